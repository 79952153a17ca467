"""A public ground-truth file: what a signal may see and, apart from it, what the replay found; and the league on it.

Knows: which fields are input and which are truth. Hides: the file (gzipped JSON lines, the same bytes for the same
run). Whoever computes a signal reads `read_inputs`, which never parses a truth line; `league` reads the truth.

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
from audit.results import Run, read_run_trajectories
from audit.store import dumps
from envs.core import InputError

FORMAT = "credit-audit benchmark 1"
MAX_BYTES = 500_000_000  # unpacked
Split = Literal["dev", "test", "all"]

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


def read_signals(paths: Sequence[str | Path]) -> pd.DataFrame:
    """Signal files (.csv, .parquet, .jsonl) joined on `point`: one row a point, a column a signal.

    A file has the column `point` and one or more signals; a column named `value` is called after the file.
    Raises InputError where a file cannot be read or two signals have one name.
    """
    joined: pd.DataFrame | None = None
    for path in map(Path, paths):
        frame = _signal_file(path)
        if "point" not in frame.columns:
            raise InputError(f"{path}: has no column 'point'; expected point and a column a signal.")
        frame = frame.drop(columns=[c for c in ("trajectory", "step") if c in frame.columns])
        frame = frame.rename(columns={"value": path.stem, "reason": f"{path.stem}:why"})
        if frame["point"].duplicated().any():
            raise InputError(f"{path}: a point is there twice; expected one row a point.")
        if joined is not None:
            twice = sorted((set(joined.columns) & set(frame.columns)) - {"point"})
            if twice:
                raise InputError(f"{path}: the signal {twice[0]} is in another file too; rename one.")
        joined = frame if joined is None else joined.merge(frame, on="point", how="outer")
    if joined is None:
        raise InputError("league: name one signal file or more.")
    return joined


def _signal_file(path: Path) -> pd.DataFrame:
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
    """Signals ranked on a benchmark. frame: best first; comparison: everything behind it."""

    frame: pd.DataFrame
    comparison: Comparison
    measure: str
    split: str

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
    signals: pd.DataFrame | Sequence[str | Path],
    *,
    measure: str = PRIMARY,
    split: Split = "test",
    importance: Mapping[str, str] | None = None,
    **options: Any,
) -> League:
    """Rank any number of signals on a benchmark file.

    signals: a frame with `point` and a column a signal, or signal files. split: of games. options: as `compare`.
    `tied` says that the interval of the distance from the leader holds 0: the ranks do not tell those apart.
    """
    truth = read_truth(benchmark, split)
    if truth.empty:
        raise InputError(f"{benchmark}: has no point in the split {split!r}.")
    frame = signals if isinstance(signals, pd.DataFrame) else read_signals(signals)
    compared = compare(truth, frame, importance=importance, **options)
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
    return League(table[columns].reset_index(drop=True), compared, measure, split)
