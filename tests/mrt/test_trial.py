"""Trials: coins as logged, the same however they are run, resumable, against exact truth; imported tables."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from audit.cli.mrt import mrt
from audit.mrt import MRTData, blip, policy_gain, randomization_check
from audit.mrt.episodes import Start, opening, play
from audit.mrt.interventions import Act, Message, Moment, load_intervention
from audit.mrt.rules import read_rule
from audit.mrt.trial import (
    DECISIONS,
    TRAJECTORIES,
    Design,
    Trial,
    import_trial,
    load_trial,
    play_draws,
    run_trial,
    simulate,
)
from audit.policies import History, Policy, Proposal
from envs import Game, InputError, games, make
from tests.mrt.worlds import Right, Wanderer, exact_chain

CHAIN = "tabular:chain:3"
BUDGET = 6


def chain() -> list[Game]:
    return games(CHAIN)


def starts(n: int, seed: int = 0) -> list[Start]:
    game = chain()[0]
    return [opening(game, BUDGET, (seed, i)) for i in range(n)]


@pytest.fixture(scope="module")
def trial() -> Trial:
    return simulate(Wanderer(), Right(), chain(), 4000, Design(p=0.4, budget=BUDGET, seed=1))


def test_coins_fall_as_logged(trial: Trial) -> None:
    rows = trial.decisions
    assert (rows["p"] == 0.4).all() and (rows["eligible"] == 1).all()
    assert abs(rows["arm"].mean() - 0.4) < 4 * np.sqrt(0.24 / len(rows))
    assert randomization_check(trial.data("trajectory"), ["t", "wrong"]).p_value > 0.001
    done = rows["command"].where(rows["arm"] == 0, "go right")
    assert (rows["command"] == done).all() and (
        rows.loc[rows["arm"] == 0, "command"] == rows["proposal"][rows["arm"] == 0]
    ).all()
    assert (rows["changed"] == ((rows["arm"] == 1) & (rows["wrong"] == 1))).all()
    assert not {"command", "changed", "proposal", "delivered"} & set(trial.features)


def test_coins_are_fair_over_many_trials() -> None:
    """The shares of treatment of 30 trials scatter about p as independent coins would: z of mean 0 and spread 1."""
    scores = []
    for seed in range(30):
        rows = simulate(Wanderer(), Right(), chain(), 60, Design(p=0.3, budget=BUDGET, seed=seed)).decisions
        scores.append((rows["arm"].mean() - 0.3) / np.sqrt(0.21 / len(rows)))
    assert abs(np.mean(scores)) < 3 / np.sqrt(30) and 0.6 < np.std(scores) < 1.5, scores


def test_values_of_policies_against_exact_truth(trial: Trial) -> None:
    """Direct rollouts of target policies and the trial's own mean have the exact chances of winning."""
    env = make(CHAIN)
    exact = exact_chain(env, 0.5, BUDGET, lambda t, wrong: 0.4)
    y = trial.trajectories["outcome"]
    assert abs(y.mean() - exact) < 4 * y.std() / np.sqrt(len(y))
    for text, rule in {
        "wrong=1": lambda t, wrong: float(wrong),
        "t<2": lambda t, wrong: float(t < 2),
        "never": lambda t, wrong: 0.0,
    }.items():
        played = asyncio.run(play(Wanderer(), Right(), starts(3000, 7), read_rule(text)))
        won = np.array([episode.won for episode in played], dtype=float)
        truth = exact_chain(env, 0.5, BUDGET, rule)
        assert abs(won.mean() - truth) < 4 * max(won.std(), 0.01) / np.sqrt(len(won)), text


def test_estimates_from_the_trial_against_exact_truth(trial: Trial) -> None:
    """The blip by exact forking over the logged states; gains of policies by dynamic programming."""
    env = make(CHAIN)
    data = trial.data("trajectory")
    gains = policy_gain(
        data, {"wrong": read_rule("wrong=1"), "early": read_rule("t<2")}, "~ wrong * C(t)", nuisance=["t", "wrong"]
    )
    never = exact_chain(env, 0.5, BUDGET, lambda t, wrong: 0.0)
    truth = [
        exact_chain(env, 0.5, BUDGET, lambda t, wrong: float(wrong)) - never,
        exact_chain(env, 0.5, BUDGET, lambda t, wrong: float(t < 2)) - never,
    ]
    assert (np.abs(gains.estimate - truth) < 4 * gains.se).all(), (gains.estimate, truth, gains.se)
    effects = blip(data, "randomized", "wrong")
    assert abs(effects.estimate[0]) < 4 * effects.se[0]  # a right proposal replaced by itself
    assert effects.estimate[1] > 4 * effects.se[1]


def test_a_target_rule_as_a_function_of_the_frame() -> None:
    seen = []

    def rule(frame: pd.DataFrame) -> np.ndarray:
        seen.append(list(frame.columns))
        return (frame["n_past_treated"] < 1).to_numpy(float)

    (episode,) = asyncio.run(play(Wanderer(), Right(), starts(1), rule))
    assert [row["arm"] for row in episode.rows] == [1] + [0] * (len(episode.rows) - 1)
    assert {"t", "n_past_eligible", "n_past_treated", "action_type", "wrong", "p"} <= set(seen[0])


def test_eligibility_by_rule() -> None:
    found = simulate(Wanderer(), Right(), chain(), 200, Design(p=0.5, budget=BUDGET, eligible="wrong=1 & t<4"))
    rows = found.decisions
    assert (rows["eligible"] == ((rows["wrong"] == 1) & (rows["t"] < 4))).all()
    assert rows.loc[rows["eligible"] == 0, "p"].isna().all() and (rows.loc[rows["eligible"] == 0, "arm"] == 0).all()
    budget = simulate(Wanderer(), Right(), chain(), 50, Design(p=0.5, budget=BUDGET, eligible="n_past_eligible<2"))
    assert (budget.decisions.groupby("trajectory")["eligible"].sum() <= 2).all()
    assert MRTData(budget.decisions, budget.trajectories, features=budget.features, cluster="trajectory").arms == 1


def test_forks_repeat_the_past_and_set_the_arm() -> None:
    episodes = asyncio.run(play(Wanderer(), Right(), starts(20), 0.5, keep_forks=True))
    for episode in episodes:
        assert len(episode.forks) == len(episode.rows)
        for row, fork in zip(episode.rows, episode.forks, strict=True):
            for arm in (0, 1):
                (again,) = asyncio.run(play(Wanderer(), Right(), [replace(fork, arm=arm, key=("f", arm))], 0.5))
                first = again.rows[0]
                assert first["arm"] == arm and first["t"] == row["t"] and first["proposal"] == row["proposal"]
                assert first["command"] == ("go right" if arm else row["proposal"])


def test_messages_are_read_by_the_policy_and_by_nothing_else() -> None:
    hint = load_intervention("hint:go right is best")
    policy = Wanderer(0.2)
    found = simulate(policy, hint, chain(), 300, Design(p=0.5, budget=BUDGET, seed=3))
    rows = found.decisions
    assert (rows.loc[rows["arm"] == 1, "command"] == "go right").all()
    assert (rows.loc[rows["arm"] == 0, "command"] != "go right").any()
    assert rows.loc[rows["arm"] == 1, "message"].str.contains("best").all()
    assert "action_type" not in rows.columns and "last_action" in found.features
    told = [text for text in policy.read if "[Hint]" in text]
    assert len(told) == int(rows["arm"].sum())
    assert all(text.count("[Hint]") == 1 for text in told)  # a message is said once, not carried along


def test_feedback_gets_coins_only_after_failures() -> None:
    class Clumsy(Wanderer):
        def _draw(self, history: History, seed: int) -> Proposal:
            return Proposal("fly") if seed % 2 and "go right" not in history.turn.observation else Proposal("go right")

    found = simulate(Clumsy(), load_intervention("feedback:helpful"), chain(), 100, Design(budget=BUDGET))
    rows = found.decisions
    before = rows.groupby("trajectory")["command"].shift()
    assert (rows["eligible"] == (before == "fly")).all()
    assert (rows.loc[rows["arm"] == 1, "command"] == "go right").all()


def test_what_fails_is_data_with_a_reason() -> None:
    class Broken(Wanderer):
        def _draw(self, history: History, seed: int) -> Proposal:
            return Proposal("", status="error", reason="no answer") if seed % 5 == 0 else super()._draw(history, seed)

    class Away(Right):
        async def act(self, moments: Sequence[Moment], *, policy: Policy, seeds: Sequence[int]) -> list[Act]:
            return [Act(reason="the reviewer was away") for _ in moments]

    found = simulate(Broken(), Away(), chain(), 60, Design(budget=BUDGET))
    table = found.trajectories
    broken = table["status"] == "error"
    assert 0 < broken.sum() < 60 and found.failed == broken.sum()
    assert table.loc[broken, "outcome"].isna().all() and (table.loc[broken, "reason"] == "no answer").all()
    assert found.data("trajectory").n == 60 - found.failed
    treated = found.decisions[found.decisions["arm"] == 1]
    assert not treated["delivered"].any() and (treated["reason"] == "the reviewer was away").all()
    assert (treated["command"] == treated["proposal"]).all()  # assigned all the same


def test_draws_do_not_depend_on_their_company() -> None:
    game = chain()[0]
    design = Design(budget=BUDGET, seed=5)
    numbers = [(i, game) for i in range(12)]
    together = play_draws(Wanderer(), Right(), design, numbers)
    apart = [play_draws(Wanderer(), Right(), design, [one])[0] for one in reversed(numbers)][::-1]
    assert together == apart
    assert play_draws(Wanderer(), Right(), replace(design, seed=6), numbers) != together


# On disk --------------------------------------------------------------------------------------------------------


def digests(out: Path) -> list[str]:
    return [
        hashlib.sha256((out / name).read_bytes()).hexdigest() for name in (DECISIONS, TRAJECTORIES, "manifest.json")
    ]


def run(out: Path, n: int = 150, jobs: int = 1) -> Trial:
    design = Design(p=0.3, budget=15, seed=2, eligible="disagrees=1")
    return run_trial("hasty", "review:expert", "generated:6:0", out, n=n, design=design, jobs=jobs)


def test_interrupted_or_split_the_tables_are_the_same_bytes(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "split", jobs=2)
    assert digests(tmp_path / "whole") == digests(tmp_path / "split")
    run(tmp_path / "torn")
    (shard,) = (tmp_path / "torn" / "shards").glob("*.jsonl")
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 3])  # killed in the middle of a line
    for name in (DECISIONS, TRAJECTORIES):
        (tmp_path / "torn" / name).unlink()
    with pytest.raises(InputError, match="not finished"):
        load_trial(tmp_path / "torn")
    run(tmp_path / "torn")
    assert digests(tmp_path / "whole") == digests(tmp_path / "torn")
    again = load_trial(tmp_path / "torn")
    pd.testing.assert_frame_equal(again.decisions, whole.decisions)
    assert again.features == whole.features
    assert again.data().cluster == "trajectory" and again.data("task").cluster == "task"  # six games only
    assert "task_type" in again.features


def test_another_trial_in_the_directory_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "t", n=5)
    with pytest.raises(InputError, match="another run"):
        run(tmp_path / "t", n=6)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"p": 0.0}, "strictly between"),
        ({"p": 1.0}, "strictly between"),
        ({"budget": 0}, "budget"),
        ({"eligible": "x<"}, "no comparison"),
    ],
)
def test_bad_designs(settings: dict[str, float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Design(**settings)  # type: ignore[arg-type]


# Imported -------------------------------------------------------------------------------------------------------


def long_table(trial: Trial, n: int = 60) -> pd.DataFrame:
    keep = trial.trajectories["trajectory"][:n]
    rows = trial.decisions[trial.decisions["trajectory"].isin(keep)]
    long = rows[["trajectory", "t", "eligible", "arm", "p", "wrong"]].merge(
        trial.trajectories[["trajectory", "outcome"]], on="trajectory"
    )
    return long.rename(columns={"trajectory": "run_id", "arm": "treated", "outcome": "score", "p": "prob"})


MAPPING = {"trajectory": "run_id", "arm": "treated", "outcome": "score", "p": "prob"}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_import_of_another_harness(trial: Trial, tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"log.{ending}"
    long = long_table(trial)
    long.to_csv(file, index=False) if ending == "csv" else long.to_parquet(file)
    import_trial(file, tmp_path / "t", columns=MAPPING, features=["wrong"])
    found = load_trial(tmp_path / "t").data()
    assert found.n == 60 and found.features == ("wrong",)
    assert found.y.mean() == pytest.approx(trial.trajectories["outcome"][:60].mean())
    assert np.array_equal(found.arm, trial.data("trajectory").arm[: len(found.arm)])


@pytest.mark.parametrize(
    ("spoil", "columns", "says"),
    [
        (lambda long: long, {}, "column `trajectory` is not there"),
        (lambda long: long.assign(prob=1.0), MAPPING, "strictly between 0 and 1"),
        (lambda long: long.assign(eligible=0), MAPPING, "not eligible"),
        (lambda long: long.assign(score=range(len(long))), MAPPING, "varies within a trajectory"),
        (lambda long: long.iloc[::-1], MAPPING, "unsorted"),
        (lambda long: long.assign(treated="yes"), MAPPING, "expected numbers"),
    ],
)
def test_bad_tables_are_one_clear_error(trial: Trial, tmp_path: Path, spoil, columns, says: str) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "log.csv"
    spoil(long_table(trial)).to_csv(file, index=False)
    with pytest.raises(InputError, match=says):
        import_trial(file, tmp_path / "t", columns=columns, features=["wrong"])
    assert not (tmp_path / "t").exists()


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("hello")
    (tmp_path / "x.csv").write_text("")
    for name in ("x.parquet", "x.csv", "x.json", "none.csv"):
        with pytest.raises(InputError):
            import_trial(tmp_path / name, tmp_path / "t")


def test_a_directory_that_holds_no_trial(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        load_trial(tmp_path)


def test_a_message_never_shares_a_memo_with_the_plain_turn() -> None:
    """A policy that remembers turns by their state must not answer a message from memory, or the other way round."""
    message = Message(lambda moment: "go right", {"kind": "test"}, after_failure=False)
    states = []

    class Remembering(Wanderer):
        async def propose(self, requests: Sequence[History], *, seeds: Sequence[int]) -> list[Proposal]:
            states.extend((history.turn.state, history.turn.observation) for history in requests)
            return await super().propose(requests, seeds=seeds)

    asyncio.run(play(Remembering(), message, starts(50), 0.5))
    by_state: dict[object, set[str]] = {}
    for state, text in states:
        by_state.setdefault(state, set()).add(text)
    assert len(by_state) > 3 and all(len(texts) == 1 for texts in by_state.values())


# The command line -----------------------------------------------------------------------------------------------


def command(*arguments: str) -> Result:
    return CliRunner().invoke(mrt, list(arguments), catch_exceptions=False)


def test_from_run_to_estimate_on_the_command_line(tmp_path: Path) -> None:
    out, figures = tmp_path / "trial", tmp_path / "figures"
    done = command(
        "run", "hasty", "--intervention", "review:expert", "--env", "generated:6:0", "--p", "0.4", "--budget", "15",
        "--n", "200", "--eligible", "disagrees=1", "--out", str(out),
    )  # fmt: skip
    assert done.exit_code == 0 and "200 trajectories" in done.output
    answer = command(
        "estimate", str(out), "--by", "action_group", "--policy", "always", "--policy", "early: t<5",
        "--plots", str(figures),
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    for text in (
        "blip over all decisions",
        "impact by action_group",
        "gain over never treating",
        "early",
        "note: blip",
    ):
        assert text in answer.output
    assert {file.name for file in figures.iterdir()} == {"impact-action_group.png", "gains.png"}
    with pytest.raises(InputError, match="no declared feature"):
        command("estimate", str(out), "--policy", "nothing=1")


def test_import_and_estimate_with_several_treatments(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n, times = 200, 3
    rows = pd.DataFrame({"run": np.repeat(np.arange(n), times), "t": np.tile(np.arange(times), n), "eligible": 1})
    rows["arm"] = rng.integers(0, 3, len(rows))
    rows["p_1"] = rows["p_2"] = 1 / 3
    gain = rows["arm"].map({0: 0.0, 1: 1.0, 2: 0.0})
    rows["outcome"] = (gain.groupby(rows["run"]).sum() + rng.standard_normal(n))[rows["run"]].to_numpy()
    rows.to_csv(tmp_path / "log.csv", index=False)
    made = command("import", str(tmp_path / "log.csv"), "--map", "trajectory=run", "--out", str(tmp_path / "t"))
    assert made.exit_code == 0 and "200 trajectories, 600 decisions" in made.output
    answer = command("estimate", str(tmp_path / "t"))
    assert answer.exit_code == 0, answer.output
    lines = [line.split() for line in answer.output.splitlines() if line.startswith(("as in the trial", "no later"))]
    found = {(" ".join(line[:-6]), int(line[-6])): float(line[-5]) for line in lines}
    assert len(found) == 4
    for (continuation, arm), estimate in found.items():
        assert estimate == pytest.approx(1.0 if arm == 1 else 0.0, abs=0.5), continuation
    assert "gain over" not in answer.output
    with pytest.raises(InputError, match="for one treatment"):
        command("estimate", str(tmp_path / "t"), "--policy", "always")
    with pytest.raises(InputError, match="expected OURS=THEIRS"):
        command("import", str(tmp_path / "log.csv"), "--map", "trajectory", "--out", str(tmp_path / "u"))
