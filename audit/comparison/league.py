"""A public ground-truth file: what a signal may see and, apart from it, what the replay found; and the league on it.

Knows: which fields are input and which are truth, and the file that ships (SHIPPED: its plan lies beside it and says
which two commands make it). Hides: the file (gzipped JSON lines, the same bytes for the same run). Whoever computes a
signal reads `read_inputs`, which never parses a truth line; `league` reads the truth.

    {"kind": "header", ...}      format, estimand, policy, games, versions, counts; no secret, no local path
    {"kind": "trajectory", ...}  a trajectory (the documented JSONL schema) and its split
    {"kind": "point", ...}       id, step, action, log pi, alternatives of the policy with draws and probability
    {"kind": "truth", ...}       id, support and reason, state, effect with interval, p, q, variance, rollouts and wins

Splits are by game and follow from its id alone, so that a game is never in both: `dev` to look at, `test` to report.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from audit.comparison.compare import PRIMARY, Comparison, compare
from audit.comparison.controls import ORACLE, PERMUTED
from audit.comparison.frames import effects_of
from audit.records import Trajectory, content_id
from audit.replay import point_id
from audit.results import Run, read_run_trajectories
from audit.store import dumps
from envs.core import InputError

FORMAT = "credit-audit benchmark 1"
MAX_BYTES = 500_000_000  # unpacked
Split = Literal["dev", "test", "all"]
SHIPPED = ("hasty-generated",)

INPUT = ("point", "trajectory", "step", "action", "pi", "exact", "draws")
TRUTH = (
    "point", "support", "reason", "state", "contrast", "estimate", "low", "high", "p", "q", "mde", "variance",
    "n_factual", "wins_factual", "n_alternative", "wins_alternative", "compared_with",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a signal may see. header: as written. trajectories: with their split by id. points: a row a point."""

    header: Mapping[str, Any]
    trajectories: tuple[Trajectory, ...]
    splits: Mapping[str, str]
    points: pd.DataFrame


def split_of(game: str) -> str:
    """`dev` or `test`, about half of the games each, from the game's content id."""
    return "test" if int(content_id("split", game)[:8], 16) % 2 else "dev"


def find_benchmark(name: str | Path) -> Path:
    """The file of a benchmark: a path, or the name of one that ships. Raises InputError where there is none."""
    if str(name) in SHIPPED:
        return Path(__file__).parent / "shipped" / f"{name}.jsonl.gz"
    if not Path(name).is_file():
        raise InputError(f"{name}: no such benchmark; expected a file NAME.jsonl.gz or {' or '.join(SHIPPED)}.")
    return Path(name)


def export_benchmark(run: Run, path: str | Path) -> Path:
    """Write a finished run as a public ground-truth file (.jsonl.gz). Equal runs give equal bytes.

    Raises InputError for another suffix or a place that cannot be written.
    """
    path = Path(path)
    if not path.name.endswith(".jsonl.gz"):
        raise InputError(f"{path}: a benchmark file is named NAME.jsonl.gz.")
    effects = effects_of(run)
    try:
        with path.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as stream:
            for line in _lines(run, effects):
                stream.write((dumps(line) + "\n").encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}).") from None
    return path


def _lines(run: Run, effects: pd.DataFrame) -> Iterator[dict[str, Any]]:
    manifest = run.directory.manifest
    kept = ("policy", "policy_id", "surrogate", "env", "plan", "plan_hash", "locked", "departed", "versions")
    trajectories = read_run_trajectories(run.directory)
    yield {
        "kind": "header",
        "format": FORMAT,
        **{key: manifest.get(key) for key in kept},
        "estimand": run.details["estimand"],
        "trajectories": len(trajectories),
        "points": len(effects),
    }
    for trajectory in trajectories:
        yield {"kind": "trajectory", "split": split_of(trajectory.game), **trajectory.to_json()}
    alternatives: dict[str, list[dict[str, Any]]] = {}
    # Draws and probabilities are the policy's; rollouts and wins are results and stay out of the inputs.
    for row in run.alternatives[run.alternatives["draws"] > 0].to_dict("records"):
        entry = {"command": row["command"], "draws": int(row["draws"]), "probability": _plain(row["probability"])}
        alternatives.setdefault(row["point"], []).append(entry)
    rows = effects.to_dict("records")
    for row in rows:
        inputs = {key: _plain(row[key]) for key in INPUT}
        yield {"kind": "point", **inputs, "alternatives": alternatives.get(row["point"], [])}
    for row in rows:
        yield {"kind": "truth", **{key: _plain(row[key]) for key in TRUTH}}


def _plain(value: Any) -> Any:
    """JSON-ready; missing is null."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return round(value, 10) if isinstance(value, float) else value


def _read(path: str | Path, kinds: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The lines of some kinds, which come in the order of the module's description; the rest is not even parsed."""
    path = find_benchmark(path)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    marks = {kind: f'"kind":"{kind}"' for kind in ("header", "trajectory", "point", "truth")}
    read = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                read += len(line)
                if read > MAX_BYTES:
                    raise InputError(
                        f"{path}: is larger than {MAX_BYTES:,} bytes unpacked; it is no benchmark of ours."
                    )
                wanted = [kind for kind in kinds if marks[kind] in line]
                if not wanted:
                    continue
                record = json.loads(line)
                if not isinstance(record, dict) or record.get("kind") not in marks:
                    raise ValueError(f"line {number} is no record")
                if record["kind"] in found:
                    found[record["kind"]].append(record)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: cannot be read as a benchmark ({str(error)[:120]}).") from None
    return found


def read_inputs(path: str | Path) -> Inputs:
    """What a signal may see of a benchmark file. Raises InputError where it is none or is damaged."""
    found = _read(path, ("header", "trajectory", "point"))
    if len(found["header"]) != 1 or found["header"][0].get("format") != FORMAT:
        raise InputError(f"{path}: is no benchmark file of this version ({FORMAT}).")
    try:
        trajectories = tuple(Trajectory.from_json(row) for row in found["trajectory"])
        splits = {t.id: row["split"] for t, row in zip(trajectories, found["trajectory"], strict=True)}
        points = pd.DataFrame([{k: row[k] for k in (*INPUT, "alternatives")} for row in found["point"]])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error}).") from None
    return Inputs(found["header"][0], trajectories, splits, points)


def read_truth(path: str | Path, split: Split = "all") -> pd.DataFrame:
    """Effects of a benchmark file in the columns that `compare` takes. Raises InputError as `read_inputs`."""
    inputs = read_inputs(path)
    rows = _read(path, ("truth",))["truth"]
    try:
        truth = pd.DataFrame([{key: row[key] for key in TRUTH} for row in rows])
        by_trajectory = pd.DataFrame(
            [
                {
                    "trajectory": t.id,
                    "game": t.game,
                    "task_type": t.task_type,
                    "won": t.won,
                    "split": inputs.splits[t.id],
                }
                for t in inputs.trajectories
            ]
        )
        frame = inputs.points.drop(columns="alternatives").merge(truth, on="point", validate="one_to_one")
        frame = frame.merge(by_trajectory, on="trajectory", validate="many_to_one")
    except (KeyError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error}).") from None
    if len(frame) != len(truth) or len(frame) != inputs.header["points"]:
        raise InputError(f"{path}: is damaged; {inputs.header['points']} points are announced, {len(frame)} are there.")
    numbers = ["estimate", "low", "high", "p", "q", "mde", "variance", "pi"]
    frame[numbers] = frame[numbers].astype(float)
    return frame if split == "all" else frame[frame["split"] == split].reset_index(drop=True)


def read_signals(sources: Sequence[str | Path | pd.DataFrame], known: frozenset[str] | None = None) -> pd.DataFrame:
    """Signals of files (.csv, .parquet, .jsonl) and frames joined on `point`: one row a point, a column a signal.

    Each has the column `point` and one or more signals; a column named `value` is called after its file. known: the
    points there may be. Raises InputError where a file cannot be read, has other points, or two signals have one name.
    """
    joined: pd.DataFrame | None = None
    for source in sources:
        frame, where = (source, "signals") if isinstance(source, pd.DataFrame) else (_signal_file(source), str(source))
        if "point" not in frame.columns:
            raise InputError(f"{where}: has no column 'point'; expected point and a column a signal.")
        unknown = [] if known is None else [point for point in frame["point"] if point not in known]
        if unknown:
            raise InputError(
                f"{where}: {len(unknown)} of {len(frame)} points are not of this benchmark ({unknown[0]} first); "
                f"audit score BENCHMARK --out FILE.csv scores a signal on its points."
            )
        if frame["point"].duplicated().any():
            raise InputError(f"{where}: a point is there twice; expected one row a point.")
        frame = frame.drop(columns=[c for c in ("trajectory", "step") if c in frame.columns])
        if not isinstance(source, pd.DataFrame):
            stem = Path(source).stem
            frame = frame.rename(columns={"value": stem, "reason": f"{stem}:why"})
        if joined is not None:
            twice = sorted((set(joined.columns) & set(frame.columns)) - {"point"})
            if twice:
                raise InputError(f"{where}: the signal {twice[0]} is in another file too; rename one.")
        joined = frame if joined is None else joined.merge(frame, on="point", how="outer")
    if joined is None:
        raise InputError("league: name one signal file or more (on the command line also --signal my.py:Class).")
    return joined


def _signal_file(source: str | Path) -> pd.DataFrame:
    path = Path(source)
    try:
        if path.suffix == ".csv":
            return pd.read_csv(path, dtype={"point": str})
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        if path.suffix == ".jsonl":
            return pd.read_json(path, lines=True, dtype={"point": str})
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({str(error)[:120]}).") from None
    raise InputError(f"{path}: a signal file is a .csv, .parquet or .jsonl.")


@dataclass(frozen=True, slots=True)
class League:
    """Signals ranked on a benchmark. frame: best first; comparison: everything behind it; notes: what must be said."""

    frame: pd.DataFrame
    comparison: Comparison
    measure: str
    split: str
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """On what it was ranked."""
        joined = self.comparison.joined
        return (
            f"{self.measure} on {len(joined.tau)} points of {len(joined.groups)} trajectories in {len(joined.games)} "
            f"games (split {self.split}); ceiling of a correlation {self.comparison.ceiling:.2f}"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row a signal: rank, estimate, interval, verdict, distance from the leader with interval."""
        return self.frame

    def summary(self) -> pd.DataFrame:
        """The table to print."""
        return self.frame

    def conf_int(self, alpha: float | None = None) -> pd.DataFrame:
        """As `Comparison.conf_int`."""
        return self.comparison.conf_int(alpha)

    def plot(self, ax: Any = None) -> Any:
        """As `Comparison.plot`."""
        return self.comparison.plot(ax, self.measure)


def league(
    benchmark: str | Path,
    signals: pd.DataFrame | Sequence[str | Path | pd.DataFrame],
    *,
    measure: str = PRIMARY,
    split: Split = "test",
    importance: Mapping[str, str] | None = None,
    **options: Any,
) -> League:
    """Rank any number of signals on a benchmark: a file, or the name of one that ships.

    signals: signal files, or frames with `point` and a column a signal. split: of games. options: as `compare`.
    `tied` says that the interval of the distance from the leader holds 0: the ranks do not tell those apart.
    Raises InputError where a file does not fit the benchmark or a signal has no value at any of its points.
    """
    truth = read_truth(benchmark, split)
    if truth.empty:
        raise InputError(f"{benchmark}: has no point in the split {split!r}.")
    sources = [signals] if isinstance(signals, pd.DataFrame) else signals
    frame = read_signals(sources, _steps(read_inputs(benchmark)))
    compared = compare(truth, frame, importance=importance, **options)
    notes = list(compared.notes)
    for row in compared.coverage.to_dict("records"):
        lacking = row["defined"] - row["compared"]
        if lacking == row["defined"]:
            raise InputError(f"league: the signal {row['signal']} has no value at any point of the split {split!r}.")
        if lacking:
            why = f" ({row['reason']})" if isinstance(row["reason"], str) else ""
            notes.append(
                f"{row['signal']}: no value at {lacking} of {row['defined']} points{why}; it is ranked on the others, "
                f"so not quite like for like"
            )
    table = compared.summary(measure)
    table = table[~table["signal"].isin((PERMUTED,))].copy()
    own = table[table["signal"] != ORACLE]
    leader = own["signal"].iloc[0]
    behind = [compared.difference(leader, signal, measure) for signal in table["signal"]]
    table["rank"] = pd.Series(range(1, len(own) + 1), index=own.index, dtype="Int64")
    table["behind"] = [d.estimate for d in behind]
    table["behind_low"], table["behind_high"] = [d.low for d in behind], [d.high for d in behind]
    table["tied"] = [bool(d.low <= 0 <= d.high) if np.isfinite(d.low) else True for d in behind]
    columns = ["rank", "signal", "estimate", "low", "high", "behind", "behind_low", "behind_high", "tied", "verdict"]
    columns += ["corrected", "corrected_low", "corrected_high", "points", "games", "note"]
    return League(table[columns].reset_index(drop=True), compared, measure, split, tuple(notes))


def _steps(inputs: Inputs) -> frozenset[str]:
    """The points that may be scored: every step of every trajectory, also those that were not replayed."""
    policy = str(inputs.header["policy_id"])
    return frozenset(point_id(t.id, step, policy) for t in inputs.trajectories for step in range(len(t.commands)))
