"""Arms on generated games: from a replay run to verdicts, datasets and the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import audit
from audit.cli.training import arms as command
from audit.plan import PRESETS, Collection, PlanFile, Rollouts
from audit.policies.linear import LinearPolicy
from audit.results import Run
from audit.scoring import score
from audit.study import replay_study
from audit.training import Recipe, Rule, arms, contrast, examples_of_run, export, match, play, train, unmatched
from audit.training.rules import JUDGE
from audit.training.study import ArmsPlan, ArmsPlanFile, arms_study, load_arms_plan, lock_arms_plan
from envs.core import InputError
from tests.signals.fakes import FakeBackend, model

TRAIN, HELD_OUT = "generated:12:1", "generated:6:2"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    plan = replace(
        PRESETS["quick"], rollouts=Rollouts(rounds=[4], adaptive=False), collection=Collection(trajectories=6)
    )
    return replay_study("hasty", TRAIN, PlanFile(plan, False, ()), tmp_path_factory.mktemp("arms") / "run")


def test_examples_are_what_the_policy_saw(run: Run) -> None:
    """The encoded choice has the probability that the trajectory recorded: nothing was lost on the way."""
    examples = examples_of_run(run)
    assert len(examples) == int(run.trajectories["steps"].sum()) == len(run.effects)
    assert examples.points["tau"].notna().sum() == (run.effects["support"] == "defined").sum()
    assert examples.choices is not None and examples.start is not None
    weights = examples.start.weights()["weight"]
    theta = np.array([weights.get(name, 0.0) for name in examples.choices.features])
    utility = np.append(examples.choices.design @ theta / examples.start.temperature, -np.inf)
    u = utility[examples.choices.members]
    logprob = utility[examples.choices.chosen] - np.log(np.exp(u).sum(axis=1))
    assert np.allclose(logprob, examples.points["logprob"], atol=1e-9)


def test_arms_train_and_play_the_same_twice(run: Run) -> None:
    found = arms(run)
    assert set(found.absent) == {"judge", "implicit"}
    recipe = Recipe(epochs=2)
    trained = train(match(found, recipe, seeds=2), unmatched(found, recipe, seeds=2))
    outcomes = play(trained, HELD_OUT, n=2)
    assert len(outcomes) == len(trained.checkpoints) * 6 and outcomes["won"].isin([0.0, 0.5, 1.0]).all()
    pd.testing.assert_frame_equal(outcomes, play(trained, HELD_OUT, n=2))
    # The untrained arm is the same policy at either dose and meets the same draws: common random numbers hold.
    idle = outcomes[outcomes["arm"] == "untrained"].pivot(index=["seed", "task"], columns="dose", values="won")
    assert (idle["matched"] == idle["unmatched"]).all()
    study = contrast(trained, HELD_OUT, n=2, resamples=50)
    assert study.dose is not None and "these training trajectories" in study.headline()
    pairs = set(zip(study.frame["arm"], study.frame["against"], strict=True))
    assert ("causal", "random:causal") in pairs and ("untrained", "all steps") in pairs


def test_a_signal_frame_makes_an_arm(run: Run) -> None:
    points = run.points["point"]
    signals = pd.DataFrame({"point": points, JUDGE: np.arange(len(points)) % 3 - 1.0})
    signals.loc[::5, JUDGE] = np.nan  # unparsable
    found = arms(run, signals=signals)
    row = found.to_frame().set_index("arm").loc["judge"]
    assert row["no_credit"] == signals[JUDGE].isna().sum() and "judge" not in found.absent
    kept = signals.set_index("point").loc[found.examples.points["point"], JUDGE][found.by_name["judge"].weights > 0]
    assert (kept == 1).all()


def test_a_scored_judge_is_the_judges_arm(run: Run) -> None:
    """From audit score to audit arms: the default column is that of a real signal; --judge names another one."""

    def says(text: str, draw: int) -> str:
        """Rates what is acted on above walking, and refuses at every fifth step."""
        step, command = re.findall(r"[Ss]tep (\d+)(?:, which it takes now, is)?: (\w+)", text)[-1]
        if int(step) % 5 == 4:
            return "I'm sorry, I cannot say."
        return "3" if command == "go" else "5"

    scores = score(run, [JUDGE, "baseline.step"], judge=model(FakeBackend(says)), save=False)
    found = arms(run, signals=scores.frame)
    row = found.to_frame().set_index("arm").loc["judge"]
    assert row["no_credit"] == scores.frame[JUDGE].isna().sum() > 0
    kept = found.examples.points.loc[found.by_name["judge"].weights > 0, JUDGE]
    assert len(kept) and (kept == 1.0).all() and "random:judge" in found.by_name
    file = ArmsPlanFile(ArmsPlan(), True, ()).judged_by("baseline.step")
    assert file.departed == (f'judge: "{JUDGE}" -> "baseline.step"',) and file.plan.rules()[3].credit == "baseline.step"
    assert ArmsPlanFile(ArmsPlan(), True, ()).judged_by(JUDGE) == ArmsPlanFile(ArmsPlan(), True, ())


def test_datasets_for_elsewhere(run: Run, tmp_path: Path) -> None:
    doses = match(arms(run), seeds=1)
    ledger = export(doses, tmp_path / "trl").set_index("arm")
    assert pd.isna(ledger.loc["untrained", "file"])
    about = json.loads((tmp_path / "trl" / "arms.json").read_text())
    assert about["recipe"]["batch"] == 16 and len(about["runs"]) == len(doses.runs)
    for arm, row in ledger.drop(index="untrained").iterrows():
        lines = [json.loads(line) for line in (tmp_path / "trl" / row["file"]).read_text().splitlines()]
        assert len(lines) == row["examples"] and sum(line["weight"] for line in lines) == pytest.approx(
            row["weight"]
        ), arm
        for line in lines:
            roles = [message["role"] for message in line["prompt"]]
            assert roles[0] == "system" and roles[-1] == "user" and roles.count("assistant") == line["step"]
            assert [message["role"] for message in line["completion"]] == ["assistant"]
    export(doses, tmp_path / "verl", "verl")
    frame = pd.read_parquet(tmp_path / "verl" / "causal.seed0.parquet")
    assert len(frame) == ledger.loc["causal", "examples"]
    said = frame.set_index("point")["response"]
    actions = run.effects.set_index("point")["action"]
    assert (said == actions[said.index]).all()
    assert [message["role"] for message in frame["messages"][0]] == ["system", "user", "assistant"]
    with pytest.raises(InputError, match="no dataset format"):
        export(doses, tmp_path, "csv")  # type: ignore[arg-type]


def test_rounds_add_their_doses(run: Run) -> None:
    pairs = [["confidence", "random:confidence"], ["causal", "random:causal"]]
    plan = ArmsPlan(seeds=1, rounds=2, effective=8.0, epochs=2.0, pairs=pairs)
    asked: list[str] = []

    def credit(policy: LinearPolicy, played: object, column: str) -> pd.DataFrame:
        from audit.collect import policy_id
        from audit.training import examples_of

        asked.append(column)
        points = examples_of(played, env=TRAIN, policy=None, identity=policy_id(policy)).points  # type: ignore[arg-type]
        return points[["point"]].assign(tau=points["step"] * 1.0)

    study = arms_study(run, ArmsPlanFile(plan, False, ()), HELD_OUT, credit=credit)
    assert set(asked) == {"tau"} and len(asked) == 4  # causal and its control, matched and unmatched
    ledger = study.trained.to_frame()
    matched = ledger[(ledger["dose"] == "matched") & (ledger["steps"] > 0)]
    assert (matched["effective"] - 16).abs().max() <= 1.0  # eight in each of two rounds
    assert matched["steps"].nunique() == 1 and matched["steps"].iloc[0] == 2
    parts = matched[["examples", "left_out", "dropped", "no_credit", "unusable"]].sum(axis=1)
    assert (parts > len(study.arms.examples)).all()


def test_plans_are_checked_pinned_and_locked(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(ArmsPlan(name="x", held_out="generated:9:9", seeds=1).to_toml())
    assert load_arms_plan(str(path)).plan == ArmsPlan(name="x", held_out="generated:9:9", seeds=1)
    lock_arms_plan(path)
    assert load_arms_plan(str(path)).locked
    path.write_text(path.read_text().replace("share = 0.25", "share = 0.5"))
    assert load_arms_plan(str(path)).departed == ("share: 0.25 -> 0.5",)
    with pytest.raises(InputError, match="locks another content"):
        lock_arms_plan(path)
    study = arms_study(run, load_arms_plan(str(path)), HELD_OUT)
    assert "departs from the plan: share: 0.25 -> 0.5" in study.marks
    assert f"departs from the plan: held_out: generated:9:9 -> {HELD_OUT}" in study.marks
    assert "arm judge is absent: no credit 'judge.good5_hindsight'" in study.marks
    for text, says in (("seeds = 0", "expected above 0"), ("seed = true", "expected"), ("colour = 1", "unknown key")):
        path.with_name("bad.toml").write_text(text)
        with pytest.raises(InputError, match=says):
            load_arms_plan(str(path.with_name("bad.toml")))
    with pytest.raises(InputError, match="Held-out games are among"):
        arms_study(run, ArmsPlanFile(ArmsPlan(seeds=1), False, ()), TRAIN)


def test_the_command(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    runner = CliRunner()
    assert runner.invoke(command, ["--new", str(plan)], catch_exceptions=False).exit_code == 0
    plan.write_text(plan.read_text().replace("seeds = 5", "seeds = 2"))
    assert runner.invoke(command, ["--plan", str(plan), "--lock"], catch_exceptions=False).exit_code == 0
    arguments = [str(run.directory.path), "--plan", str(plan), "--env", HELD_OUT, "--out", str(tmp_path / "out")]
    answer = runner.invoke(command, arguments, catch_exceptions=False)
    assert answer.exit_code == 0
    for figure in ("!! arm judge is absent", "(locked)", "random:causal", "displacement", "by_chance", "mde"):
        assert figure in answer.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "arms.csv", "ledger.csv", "levels.csv", "contrasts.csv", "outcomes.csv", "study.json", "arms.png", "forest.png",
        "dose.png",
    }  # fmt: skip
    assert audit.load(run.directory.path).effects.equals(run.effects)
    signals = pd.DataFrame({"point": run.points["point"], "mine": np.arange(len(run.points)) % 4.0})
    signals.to_parquet(tmp_path / "mine.parquet")
    more = ["--judge", "mine", "--signals", str(tmp_path / "mine.parquet")]
    answer = runner.invoke(command, [*arguments[:-2], *more], catch_exceptions=False)
    assert answer.exit_code == 0 and "top 25 % by mine" in answer.output and "random:judge" in answer.output
    assert f'!! departs from the plan: judge: "{JUDGE}" -> "mine"' in answer.output


def test_arms_of_a_policy_that_is_not_linear_are_trained_elsewhere(run: Run, tmp_path: Path) -> None:
    from audit.results import read_run_trajectories
    from audit.training import examples_of

    examples = examples_of(read_run_trajectories(run.directory), env=TRAIN, policy=None)
    doses = match(arms(examples), seeds=1)
    assert export(doses, tmp_path)["file"].notna().sum() == len(doses.runs) - 1
    with pytest.raises(InputError, match="no linear policy to start from"):
        train(doses)


def test_what_cannot_be_learned_from_is_unusable_with_a_reason(run: Run) -> None:
    from audit.results import read_run_trajectories
    from audit.training import examples_of

    first = read_run_trajectories(run.directory)[0]
    odd = replace(first, commands=(*first.commands[:-1], "fly"))
    seen = replace(first, observations=(*first.observations[:2], "another world", *first.observations[3:]))
    policy = examples_of_run(run).start
    for trajectory, lost, why in ((odd, 1, "not among"), (seen, len(first.commands) - 2, "did not reproduce")):
        examples = examples_of([trajectory], env=TRAIN, policy=policy)
        reasons = [reason for reason in examples.unusable or () if reason and why in reason]
        assert len(reasons) == lost
        row = arms(examples, [Rule("all steps")]).to_frame().iloc[0]
        assert row["unusable"] == (~examples.usable()).sum() and row["kept"] + row["unusable"] == len(examples)
