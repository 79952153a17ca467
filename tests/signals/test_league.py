"""The public ground-truth file and the league on it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest

from audit.comparison import compare
from audit.comparison.frames import effects_of, join
from audit.comparison.league import export_benchmark, league, read_inputs, read_signals, read_truth, split_of
from audit.results import Run
from audit.scoring import Source, score
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
