"""Scoring a run: right numbers on right points, merging, leakage, the twin and plans."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from audit.policies import History, load_policy
from audit.policies.scripted import UniformPolicy
from audit.results import Run, load
from audit.scoring import DEFAULT, Source, TwinSettings, check_leakage, load_scores, score, signal_points, twin
from audit.scoring.plans import Plans
from audit.scoring.twin import fit_twin
from credit_signals import SignalPoint
from envs import games, make
from envs.alfworld.games import read_game
from envs.core import InputError

QUICK = TwinSettings(trajectories=120)


@pytest.fixture(scope="module")
def scored(small_run: Run) -> pd.DataFrame:
    return score(small_run, DEFAULT, twin=QUICK).frame


def test_numbers_are_on_their_own_points(small_run: Run, scored: pd.DataFrame) -> None:
    """Against the run's own columns, joined by id."""
    both = small_run.effects.merge(scored, on="point", suffixes=("", "_s"))
    assert len(both) == len(small_run.effects) == len(scored)
    np.testing.assert_allclose(both["confidence.logp"], np.log(both["pi"]), atol=1e-9)
    assert (both["baseline.step"] == both["step"]).all() and (both["step_s"] == both["step"]).all()
    np.testing.assert_array_equal(both["baseline.action_length"], both["action"].str.len())
    np.testing.assert_allclose(both["implicit.m_no"] + both["implicit.delta"], both["implicit.m_hind"], atol=1e-12)


def test_columns_are_added_kept_and_replaced(small_run: Run, scored: pd.DataFrame, tmp_path: Path) -> None:
    run = load(small_run.directory.path)
    saved = load_scores(run)
    pd.testing.assert_frame_equal(saved.frame[scored.columns.tolist()], scored, check_dtype=False)
    file = tmp_path / "my.py"
    file.write_text(
        "class Novelty:\n    name = 'novelty'\n    view = 'prefix'\n"
        "    def score(self, points):\n        return [1 / (1 + p.commands.count(p.action)) for p in points]\n"
    )
    more = score(run, [f"{file}:Novelty"])
    assert set(saved.frame.columns) | {"novelty", "novelty:why"} == set(more.frame.columns)
    again = score(run, [f"{file}:Novelty", "baseline.step"])
    pd.testing.assert_frame_equal(again.frame[more.frame.columns.tolist()], more.frame)
    assert again.about["novelty"]["view"] == "prefix" and again.about["confidence.logp"]["importance"] == "negated"
    row = again.summary().set_index("signal").loc["novelty"]
    assert row["values"] == len(more.frame) and row["missing"] == 0


def test_scoring_reads_no_result(small_run: Run) -> None:
    check_leakage(small_run, DEFAULT, twin=QUICK)


def test_a_signal_that_changes_is_found(small_run: Run) -> None:
    class Counting:
        name, view = "counting", "prefix"
        calls = 0

        def score(self, points: list[SignalPoint]) -> list[float]:
            Counting.calls += 1
            return [float(p.step * Counting.calls) for p in points]

    with pytest.raises(InputError, match="changes with the replay's results"):
        check_leakage(small_run, [Counting()])


def test_what_cannot_be_scored_is_said(small_run: Run) -> None:
    found = score(small_run, ["implicit.m_no", "baseline.text_length", "implicit.prime"], save=False).frame
    assert found["implicit.prime:why"].eq("no reference policy was named").all()
    assert found["baseline.text_length:why"].eq("the policy writes the command itself, no other text").all()
    with_reference = score(small_run, ["implicit.prime"], reference="random", save=False).frame
    assert with_reference["implicit.prime"].notna().all()
    with pytest.raises(InputError, match="not the one of the run"):
        score(small_run, ["confidence.entropy"], policy="thorough", save=False)
    with pytest.raises(InputError, match="is not in generated:6:9"):
        score(small_run, ["progress"], env="generated:6:9", save=False)
    with pytest.raises(InputError, match="no such signal"):
        score(small_run, ["nosuch"])


def test_a_prefix_that_does_not_reproduce_is_missing_from_there_on(small_run: Run, tmp_path: Path) -> None:
    from dataclasses import replace

    source = Source.of_run(small_run.directory)
    first = source.trajectories[0]
    broken = replace(first, observations=(*first.observations[:3], "Something else.", *first.observations[4:]))
    points = signal_points(replace(source, trajectories=(broken,)), {"policy", "plan"})
    assert [p.plan_before is not None for p in points] == [p.step < 3 for p in points]
    assert points[3].missing("plan_before").reason == "the recorded prefix does not reproduce at step 3"


def test_damaged_files_are_said(small_run: Run, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(small_run.directory.path, copy)
    run = load(copy)
    for name in ("signals.json", "signals.parquet"):
        (copy / name).unlink(missing_ok=True)
    with pytest.raises(InputError, match="no signal was scored"):
        load_scores(run)
    score(run, ["baseline.step"])
    (copy / "signals.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match="cannot be read"):
        load_scores(run)
    assert "twin" not in json.loads((copy / "signals.json").read_text())["baseline.step"]


# The twin -----------------------------------------------------------------------------------------------------------


def test_the_twin_is_a_distribution_and_never_learns_from_the_game_it_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    known = games("generated:12:0")
    policy = load_policy("hasty")
    honest = fit_twin(policy, known, 50, QUICK)
    real = twin._play

    def lying(*arguments: object) -> object:
        """Every outcome in the games of fold `target` turned round."""
        play = real(*arguments)  # type: ignore[arg-type]
        play.won = [w != (honest.fold(g) == target) for w, g in zip(play.won, play.games, strict=True)]
        return play

    target = honest.fold(known[0].id)
    monkeypatch.setattr(twin, "_play", lying)
    deceived = fit_twin(policy, known, 50, QUICK)
    changed = False
    for game in known:
        env = make(game.address)
        history = History(game.id, env.reset())
        probabilities = policy.choice(history).probabilities()  # type: ignore[attr-defined]
        commands = [c for c, p in probabilities.items() if p > 0]
        a, b = ([t.logprob(history, probabilities, c, success=True) for c in commands] for t in (honest, deceived))
        assert sum(math.exp(float(x)) for x in a) == pytest.approx(1.0)
        beliefs = honest.belief(history, 50), deceived.belief(history, 50)
        assert 0 < float(beliefs[0]) < 1
        if honest.fold(game.id) == target:
            assert a == b and beliefs[0] == beliefs[1]
        else:
            changed = changed or beliefs[0] != beliefs[1]
    assert changed


def test_with_little_to_learn_from_the_twin_is_missing_or_the_policy_itself() -> None:
    known = games("generated:12:0")
    shy = fit_twin(load_policy("hasty"), known, 50, TwinSettings(trajectories=120, penalty=1e9))
    few = fit_twin(UniformPolicy(), known, 10, TwinSettings(trajectories=24))
    env = make(known[0].address)
    history = History(known[0].id, env.reset())
    policy = load_policy("hasty")
    probabilities = policy.choice(history).probabilities()  # type: ignore[attr-defined]
    command = max(probabilities, key=probabilities.__getitem__)
    value = shy.logprob(history, probabilities, command, success=True)
    assert value == pytest.approx(math.log(probabilities[command]), abs=1e-3)
    answer = few.logprob(history, probabilities, command, success=True)
    assert isinstance(answer, str) and "at least 20 are needed" in answer
    with pytest.raises(InputError, match="too few"):
        fit_twin(policy, known[:3], 50, QUICK)


class Asked(UniformPolicy):
    """A policy like a language model's: no distribution, but it scores an action under a condition."""

    async def distributions(self, requests):  # type: ignore[no-untyped-def]
        return [None for _ in requests]

    async def logprobs(self, requests, actions, *, condition=None):  # type: ignore[no-untyped-def]
        return [{None: -2.0, "success": -1.0, "failure": -4.0}[condition] for _ in requests]


def test_a_policy_with_a_twin_of_its_own_is_asked(small_run: Run) -> None:
    from dataclasses import replace

    from audit.collect import policy_id

    source = replace(Source.of_run(small_run.directory), policy_id=policy_id(Asked()))
    points = signal_points(source, {"policy", "twin", "belief"}, policy=Asked())
    assert {(p.logprob, p.logprob_success, p.logprob_failure) for p in points} == {(-2.0, -1.0, -4.0)}
    assert {p.missing("belief").reason for p in points} == {
        "the policy does not tell its probabilities, so no belief was fitted"
    }
    assert {p.tokens for p in points} == {None}


# Plans --------------------------------------------------------------------------------------------------------------


def test_plans_are_no_longer_than_walkthroughs_and_steps_gain_at_most_one(small_run: Run, scored: pd.DataFrame) -> None:
    for game in games("generated:12:0"):
        env = make(game.address)
        plans = Plans(env)
        turn = env.reset()
        walk = read_game(game.address).walkthrough
        length = plans.length(turn)
        assert length is not None and walk is not None and length <= len(walk)
        for command in walk:
            before, turn = plans.length(turn), env.step(turn.state, command)
            after = plans.length(turn)
            assert before is not None and after is not None and before - after <= 1
        assert plans.length(turn) == 0
    assert scored["progress.plan"].max() == 1.0 and scored["progress.plan"].notna().all()


def test_short_plans_are_shortest_of_all_commands() -> None:
    """Against a search over every command, from the last three steps of walkthroughs."""
    for game in games("generated:6:0"):
        env = make(game.address)
        plans = Plans(env)
        turns = [env.reset()]
        for command in read_game(game.address).walkthrough or ():
            turns.append(env.step(turns[-1].state, command))
        for turn in turns[-4:]:
            layer, depth = {turn.state}, 0
            while not any(env.restore(state).won for state in layer):
                layer = {env.step(s, c).state for s in layer for c in env.restore(s).admissible}
                depth += 1
            assert plans.length(turn) == depth
