"""The public ground-truth file and the league on it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from audit.cli import main
from audit.comparison import compare
from audit.comparison.controls import ORACLE
from audit.comparison.frames import effects_of, join
from audit.comparison.league import (
    SHIPPED,
    export_benchmark,
    find_benchmark,
    league,
    read_inputs,
    read_signals,
    read_truth,
    split_of,
)
from audit.plan import Collection, Plan, PlanFile, Points, Rollouts, Support, load_plan
from audit.results import Run
from audit.scoring import Source, score
from audit.study import replay_study
from envs.core import InputError

FAST = {"draws": 300, "shuffles": 200}
SIGNALS = ["progress", "baseline.step", "baseline.random"]


@pytest.fixture(scope="module")
def benchmark(small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_benchmark(small_run, tmp_path_factory.mktemp("league") / "b.jsonl.gz")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in gzip.open(path, "rt")]


def test_the_same_run_gives_the_same_bytes(small_run: Run, benchmark: Path, tmp_path: Path) -> None:
    assert export_benchmark(small_run, tmp_path / "other.jsonl.gz").read_bytes() == benchmark.read_bytes()
    with pytest.raises(InputError, match=r"NAME.jsonl.gz"):
        export_benchmark(small_run, tmp_path / "b.json")


def test_the_same_commands_give_the_same_bytes(tmp_path: Path) -> None:
    """Another replay, in other processes, makes the file again."""
    plan = Plan(
        name="tiny",
        support=Support(draws=8),
        rollouts=Rollouts(rounds=[2], adaptive=False),
        points=Points(per_trajectory=2),
        collection=Collection(trajectories=3),
    )
    made = [
        export_benchmark(
            replay_study("hasty", "generated:3:0", PlanFile(plan, False, ()), tmp_path / f"run{jobs}", jobs=jobs),
            tmp_path / f"{jobs}.jsonl.gz",
        )
        for jobs in (1, 2)
    ]
    assert made[0].read_bytes() == made[1].read_bytes()
    # Steps that were not replayed are no points, but a signal may be scored on them.
    inputs = read_inputs(made[0])
    assert len(inputs.points) < sum(len(t.commands) for t in inputs.trajectories)
    every = score(Source.of_benchmark(made[0]), ["baseline.step", "baseline.random"]).frame
    assert len(read_signals([every])) == sum(len(t.commands) for t in inputs.trajectories)


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_is_what_its_plan_says(name: str) -> None:
    path = find_benchmark(name)
    file = load_plan(str(path.with_name(f"{name}.toml")))
    inputs, truth = read_inputs(name), read_truth(name)
    assert inputs.header["plan_hash"] == file.plan.hash and not inputs.header["surrogate"]
    assert inputs.header["env"].startswith("generated:")  # no official content
    assert len(inputs.trajectories) == file.plan.collection.trajectories and path.stat().st_size < 300_000
    assert f"--env {inputs.header['env']} --plan" in path.with_name(f"{name}.toml").read_text()
    defined = truth[truth["support"] == "defined"]
    assert (defined[["n_factual", "n_alternative"]] == file.plan.rollouts.rounds[-1]).all().all()
    assert (defined["low"] <= defined["estimate"]).all() and (defined["estimate"] <= defined["high"]).all()
    games = truth.groupby("split")["game"].nunique()
    assert games["dev"] >= 10 and games["test"] >= 20


@pytest.mark.parametrize("name", SHIPPED)
def test_who_knows_the_effects_tops_the_league_and_who_guesses_does_not(name: str) -> None:
    truth = read_truth(name)
    defined = truth[truth["support"] == "defined"].sort_values("point", ignore_index=True)
    rng = np.random.default_rng(0)
    spread = defined["estimate"].std()
    frame = pd.DataFrame(
        {
            "point": defined["point"],
            "knows": defined["estimate"] + 0.3 * spread * rng.standard_normal(len(defined)),
            "guesses": rng.standard_normal(len(defined)),
        }
    )
    text = score(Source.of_benchmark(name), ["baseline.step", "baseline.action_type"]).frame
    found = league(name, [frame, text], split="all", draws=2000, shuffles=500)
    table = found.to_frame().set_index("signal")
    assert table["rank"].idxmin() == "knows" and table.loc["knows", "verdict"] == "better"
    assert table.loc["knows", "estimate"] > table.loc[ORACLE, "estimate"] > 0.2
    assert table.loc["guesses", "verdict"] in ("equivalent", "inconclusive") and not table.loc["guesses", "tied"]
    assert table.loc["guesses", "behind_low"] > 0
    assert "split all" in found.headline and found.comparison.ceiling > 0.95


def test_inputs_hold_no_result(benchmark: Path, tmp_path: Path) -> None:
    """Scrambled truth changes no signal, and no input line names a result."""
    rows = lines(benchmark)
    inputs = [row for row in rows if row["kind"] != "truth"]
    results = {"estimate", "low", "high", "p", "q", "state", "support", "wins", "rollouts", "wins_factual"}
    for row in inputs:
        assert not results & set(row)
        for alternative in row.get("alternatives", ()):  # type: ignore[attr-defined]
            assert set(alternative) == {"command", "draws", "probability"}
    scrambled = tmp_path / "scrambled.jsonl.gz"
    with gzip.open(scrambled, "wt") as stream:
        for row in rows:
            if row["kind"] == "truth":
                row |= {"estimate": 0.5, "state": "pivotal"}
            stream.write(json.dumps(row, sort_keys=True, separators=(",", ":")) + "\n")
    before, after = (score(Source.of_benchmark(path), SIGNALS).frame for path in (benchmark, scrambled))
    pd.testing.assert_frame_equal(before, after)
    assert "/" not in str(read_inputs(benchmark).header["env"])


def test_truth_is_the_runs(small_run: Run, benchmark: Path) -> None:
    truth, effects = read_truth(benchmark), effects_of(small_run)
    pd.testing.assert_series_equal(truth["estimate"], effects["estimate"])
    pd.testing.assert_series_equal(truth["variance"], effects["variance"], atol=1e-9)
    assert (truth["support"] == effects["support"]).all()
    ours, theirs = (
        compare(frame, score(small_run, SIGNALS, save=False).frame, **FAST).frame for frame in (truth, effects)
    )
    pd.testing.assert_frame_equal(ours, theirs)


def test_splits_are_by_game(benchmark: Path) -> None:
    dev, test = read_truth(benchmark, "dev"), read_truth(benchmark, "test")
    assert not set(dev["game"]) & set(test["game"]) and len(dev) + len(test) == len(read_truth(benchmark))
    assert {split_of(game) for game in test["game"]} == {"test"}
    assert 380 < sum(split_of(str(i)) == "test" for i in range(800)) < 420


def test_the_league_ranks_files(small_run: Run, benchmark: Path, tmp_path: Path) -> None:
    frame = score(small_run, SIGNALS, save=False).frame
    mine, wide = tmp_path / "mine.csv", tmp_path / "wide.parquet"
    frame[["point", "progress.plan"]].rename(columns={"progress.plan": "value"}).to_csv(mine, index=False)
    frame[["point", "baseline.step", "baseline.random"]].to_parquet(wide)
    found = league(benchmark, [mine, wide], split="all", **FAST)
    table = found.to_frame()
    ranked = table.dropna(subset="rank")
    assert set(ranked["signal"]) == {"mine", "baseline.step", "baseline.random"}
    assert ranked["rank"].tolist() == [1, 2, 3] and ranked["estimate"].is_monotonic_decreasing
    assert ranked["behind"].iloc[0] == 0 and ranked["tied"].iloc[0]
    assert ((ranked["behind_low"] <= 0) == ranked["tied"]).all()
    assert "control.oracle" in set(table["signal"])
    with pytest.raises(InputError, match="is in another file too"):
        read_signals([wide, wide])
    with pytest.raises(InputError, match="one signal file"):
        read_signals([])
    mine.write_text("id,value\n1,2\n")
    with pytest.raises(InputError, match="no column 'point'"):
        read_signals([mine])
    with pytest.raises(InputError, match=r"\.csv, \.parquet or \.jsonl"):
        read_signals([tmp_path / "mine.txt"])


def test_files_that_do_not_fit_are_said_in_one_sentence(small_run: Run, benchmark: Path, tmp_path: Path) -> None:
    frame = score(small_run, SIGNALS, save=False).frame[["point", "baseline.step", "baseline.random"]]
    file = tmp_path / "mine.csv"

    def said(changed: pd.DataFrame) -> str:
        changed.to_csv(file, index=False)
        answer = CliRunner().invoke(main, ["league", str(benchmark), str(file), "--split", "all"])
        assert answer.exit_code == 2 and answer.output.count("\n") == 1, answer.output
        return answer.output

    other = frame.assign(point=["x" * 32, *frame["point"].iloc[1:]])
    assert f"1 of {len(frame)} points are not of this benchmark ({'x' * 32} first)" in said(other)
    assert "no column 'point'" in said(frame.drop(columns="point"))
    assert "no column but their keys" in said(frame[["point"]])
    assert "mine has no value at any point" in said(frame[["point"]].assign(value=np.nan))
    assert "'mine' is not numeric" in said(frame[["point"]].assign(value="high"))
    assert "infinite value" in said(frame[["point"]].assign(value=np.inf))
    assert "a point is there twice" in said(pd.concat([frame, frame.head(1)]))
    # Values missing here and there are no mistake; that they are missing is said.
    some = frame[["point", "baseline.random"]].rename(columns={"baseline.random": "value"})
    some["reason"] = np.where(np.arange(len(some)) % 5 == 0, "too long", None)
    some["value"] = some["value"].where(some["reason"].isna())
    some.to_csv(file, index=False)
    (note,) = [note for note in league(benchmark, [file], split="all", **FAST).notes if note.startswith("mine")]
    assert "(too long); it is ranked on the others" in note


def test_a_signal_of_ones_own_from_its_file_to_the_table(benchmark: Path, tmp_path: Path) -> None:
    mine, out = tmp_path / "my.py", tmp_path / "novelty.csv"
    mine.write_text(
        'class Novelty:\n    name = "novelty"\n    view = "prefix"\n    importance = "absolute"\n\n'
        "    def score(self, points):\n"
        "        return [1.0 / (1 + point.commands.count(point.action)) for point in points]\n"
    )
    run = CliRunner()
    tail = ["--signal", f"{mine}:Novelty", "--signal", "baseline.step"]
    direct = run.invoke(main, ["league", str(benchmark), *tail, "--split", "all"], catch_exceptions=False)
    scored = run.invoke(main, ["score", str(benchmark), *tail, "--out", str(out)], catch_exceptions=False)
    by_file = run.invoke(main, ["league", str(benchmark), str(out), "--split", "all"], catch_exceptions=False)
    assert direct.exit_code == scored.exit_code == by_file.exit_code == 0
    assert direct.output == by_file.output and "novelty" in direct.output
    for arguments, says in (
        (["score", str(benchmark), *tail], "name --out FILE.csv"),
        (["score", str(benchmark), *tail, "--out", "x.txt"], "written as .csv"),
        (["league", str(benchmark)], "--signal my.py:Class"),
        (["league", "nowhere", *tail], "hasty-generated"),
        (["score", "nowhere", *tail], "holds no run"),
    ):
        answer = run.invoke(main, arguments)
        assert answer.exit_code == 2 and says in answer.output, answer.output


STUDIES = Path(__file__).parents[2] / "examples" / "ground-truth"


@pytest.mark.parametrize("name", ["smollm2", "smollm2-early", "smollm2-seen", "smollm2-early-seen"])
def test_the_files_of_the_small_language_model_are_of_their_locked_plans(name: str) -> None:
    inputs = read_inputs(STUDIES / f"{name}.jsonl.gz")
    plan = load_plan(STUDIES.parents[1] / "preregistration" / f"{inputs.header['plan']['name']}.toml")
    assert plan.locked and inputs.header["locked"] and inputs.header["plan_hash"] == plan.plan.hash
    assert len(inputs.trajectories) == plan.plan.collection.trajectories
    truth = read_truth(STUDIES / f"{name}.jsonl.gz")
    defined = truth[truth["support"] == "defined"]
    assert (defined["n_factual"] == 6).all() and (defined["n_alternative"] == 6).all() and len(defined) > 20
    assert truth.loc[truth["support"] != "defined", "estimate"].isna().all()


def test_damaged_files_are_said(benchmark: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(benchmark.read_bytes()[:2000])
    short = tmp_path / "short.jsonl.gz"
    rows = lines(benchmark)
    with gzip.open(short, "wt") as stream:
        stream.write("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows[:-1]))
    other = tmp_path / "other.jsonl.gz"
    with gzip.open(other, "wt") as stream:
        stream.write('{"kind":"header","format":"something else"}\n')
    for path, said in ((torn, "cannot be read"), (short, "are announced"), (other, "no benchmark file")):
        with pytest.raises(InputError, match=said):
            read_truth(path)


def test_variances_from_rollouts_are_those_of_the_counts(small_run: Run) -> None:
    effects = effects_of(small_run)
    signals = score(small_run, SIGNALS, save=False).frame
    from_counts = join(effects.drop(columns="variance"), signals)
    from_rollouts = join(effects, signals)
    assert len(from_counts.tau) > 50
    pd.testing.assert_series_equal(pd.Series(from_counts.variance), pd.Series(from_rollouts.variance))
