"""What a run holds when it is done: data frames of every grain, the summary, the plot.

Knows: how records become rows. Hides: parquet and streaming (rollouts are written in row groups as they are read,
so that memory does not grow with them).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from audit.effects import COLUMNS, Records, effects
from audit.plan import Plan
from audit.records import Trajectory
from audit.replay import chosen_steps, point_id, point_record
from audit.store import TRAJECTORIES, RunDirectory, write_whole
from audit.summary import summarise, table
from envs.core import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARY = "summary.json"
ROWS_AT_ONCE = 50_000
STATUS = {"w": "ok", "l": "ok", "t": "truncated", "e": "error"}
MARKERS = {"pivotal": "#b2182b", "negligible": "#4d4d4d", "inconclusive": "#b0b0b0"}

ROLLOUT_SCHEMA = pa.schema(
    [
        ("point", pa.string()),
        ("arm", pa.string()),
        ("draw", pa.int32()),
        ("first", pa.string()),
        ("won", pa.bool_()),
        ("steps", pa.int32()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("round", pa.int16()),
    ]
)


def read_run_trajectories(run: RunDirectory) -> list[Trajectory]:
    """The trajectories under study."""
    try:
        lines = (run.path / TRAJECTORIES).read_text(encoding="utf-8").splitlines()
        return [Trajectory.from_json(json.loads(line)) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run.path / TRAJECTORIES}: cannot be read ({error}); the run is damaged.") from None


def _points(run: RunDirectory, plan: Plan) -> Iterator[tuple[Trajectory, Records]]:
    """Every point of the study in order, with its records; one that was not reached yet says so."""
    index = run.index()
    policy = run.manifest["policy_id"]
    for trajectory in read_run_trajectories(run):
        for step in chosen_steps(trajectory, plan):
            identity = point_id(trajectory.id, step, policy)
            yield trajectory, index.records(identity) or [_owed(trajectory, step, identity)]


def _owed(trajectory: Trajectory, step: int, identity: str) -> dict[str, Any]:
    why = "not replayed (interrupted, or over the time limit); run the same command again"
    return point_record(trajectory, step, identity, "error", why)


def finish(run: RunDirectory) -> Run:
    """Write the parquet files and the summary from the shards, and load them."""
    plan = Plan.from_json(run.manifest["plan"])
    trajectories = _trajectory_frame(read_run_trajectories(run))
    found, counts = effects(_points(run, plan), plan)
    _write(found, run.path / "effects.parquet")
    _write(trajectories, run.path / "trajectories.parquet")
    _write_grains(run, plan)
    summary = {"run": _identity(run), **summarise(found, counts, trajectories, plan)}
    write_whole(run.path / SUMMARY, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    return load(run.path)


def _identity(run: RunDirectory) -> dict[str, Any]:
    keys = ("policy", "policy_id", "plan_hash", "locked", "departed", "surrogate", "versions")
    return {key: run.manifest.get(key) for key in keys}


def _write(frame: pd.DataFrame, path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    frame.to_parquet(partial, index=False)
    partial.replace(path)


def _trajectory_frame(trajectories: list[Trajectory]) -> pd.DataFrame:
    rows = [
        {
            "trajectory": t.id,
            "game": t.game,
            "game_name": t.game_name,
            "task_type": t.task_type,
            "policy": t.policy,
            "budget": t.budget,
            "steps": len(t.commands),
            "won": t.won,
            "status": t.status,
            "commands": list(t.commands),
            "observations": list(t.observations),
            "logprobs": list(t.logprobs),
            "texts": list(t.texts),
            "origin": json.dumps(dict(t.origin), sort_keys=True),
            "certificate": None if t.certificate is None else json.dumps(dict(t.certificate), sort_keys=True),
        }
        for t in trajectories
    ]
    return pd.DataFrame(rows)


def _write_grains(run: RunDirectory, plan: Plan) -> None:
    """points, alternatives (small) and rollouts (streamed)."""
    points: list[dict[str, Any]] = []
    alternatives: list[dict[str, Any]] = []
    partial = run.path / "rollouts.parquet.partial"
    with pq.ParquetWriter(partial, ROLLOUT_SCHEMA) as writer:
        rows: list[dict[str, Any]] = []
        for trajectory, records in _points(run, plan):
            point = {key: value for key, value in records[0].items() if key not in ("alternatives", "round")}
            points.append({**point, "game": trajectory.game, "rounds": len(records) - 1})
            tally: dict[str, list[int]] = {}
            for record in records[1:]:
                for row in _rollouts(record):
                    rows.append(row)
                    if row["status"] != "error":
                        entry = tally.setdefault(row["first"], [0, 0])
                        entry[0] += 1
                        entry[1] += row["won"]
                if len(rows) >= ROWS_AT_ONCE:
                    writer.write_table(pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA))
                    rows = []
            alternatives += _alternatives(records[0], tally)
        writer.write_table(pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA))
    partial.replace(run.path / "rollouts.parquet")
    _write(pd.DataFrame(points), run.path / "points.parquet")
    columns = ["point", "command", "factual", "draws", "probability", "admissible", "rollouts", "wins"]
    _write(pd.DataFrame(alternatives, columns=columns), run.path / "alternatives.parquet")


def _rollouts(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for arm in record["arms"]:
        reasons = dict(arm["failures"])
        label = arm["arm"] if arm["arm"] == "factual" or arm["command"] is None else "alternative"
        for i, code in enumerate(arm["outcome"]):
            first = arm["first"][i]
            yield {
                "point": record["point"],
                "arm": label,
                "draw": arm["from"] + i,
                "first": None if first < 0 else arm["commands"][first],
                "won": None if code == "e" else code == "w",
                "steps": arm["steps"][i],
                "status": STATUS[code],
                "reason": reasons.get(arm["from"] + i),
                "round": record["round"],
            }


def _alternatives(point: Mapping[str, Any], tally: Mapping[str, list[int]]) -> list[dict[str, Any]]:
    """The factual action, the alternatives that draws showed, and those that rollouts took besides."""
    probability = {command: p for command, _, p, _ in point["alternatives"]} | {point["action"]: point["pi"]}
    drawn = {command: n for command, n, _, _ in point["alternatives"]} | {point["action"]: point["factual_draws"]}
    admissible = {command: ok for command, _, _, ok in point["alternatives"]} | {point["action"]: point["admissible"]}
    rows = []
    for command in dict.fromkeys([*drawn, *tally]):
        n, wins = tally.get(command, [0, 0])
        rows.append(
            {
                "point": point["point"],
                "command": command,
                "factual": command == point["action"],
                "draws": drawn.get(command, 0),
                "probability": probability.get(command) if point["exact"] else None,
                "admissible": admissible.get(command),
                "rollouts": n,
                "wins": wins,
            }
        )
    return rows


class Run:
    """A finished run. Frames are read when they are first asked for.

    trajectories, points, alternatives, rollouts, effects: one row each; ids join them (`point`, `trajectory`).
    """

    def __init__(self, directory: RunDirectory, summary: Mapping[str, Any]) -> None:
        self.directory, self._summary = directory, summary
        self.plan = Plan.from_json(directory.manifest["plan"])
        self._frames: dict[str, pd.DataFrame] = {}

    def _frame(self, name: str) -> pd.DataFrame:
        if name not in self._frames:
            try:
                self._frames[name] = pd.read_parquet(self.directory.path / f"{name}.parquet")
            except OSError:
                raise InputError(f"{self.directory.path}: {name}.parquet is missing; run audit replay again.") from None
        return self._frames[name]

    @property
    def trajectories(self) -> pd.DataFrame:
        """One row a trajectory."""
        return self._frame("trajectories")

    @property
    def points(self) -> pd.DataFrame:
        """One row a decision point, with its support."""
        return self._frame("points")

    @property
    def alternatives(self) -> pd.DataFrame:
        """One row a point and command: draws, exact probability where known, rollouts that began with it, wins."""
        return self._frame("alternatives")

    @property
    def rollouts(self) -> pd.DataFrame:
        """One row a rollout."""
        return self._frame("rollouts")

    @property
    def effects(self) -> pd.DataFrame:
        """One row a decision point, with its effect."""
        return self._frame("effects")

    def to_frame(self) -> pd.DataFrame:
        """The effects."""
        return self.effects

    def summary(self) -> pd.DataFrame:
        """The closing table. `details` has every figure, by group too."""
        return table(self._summary)

    @property
    def details(self) -> Mapping[str, Any]:
        """All run-level figures."""
        return self._summary

    @property
    def marks(self) -> list[str]:
        """What every output of this run must say: a surrogate policy, a departure from a locked plan."""
        manifest = self.directory.manifest
        marks = []
        if manifest.get("surrogate"):
            marks.append(
                "surrogate policy: these trajectories are another policy's; effects are the replaying policy's"
            )
        if manifest.get("departed"):
            marks.append(f"departs from the locked plan: {'; '.join(manifest['departed'])}")
        return marks

    @property
    def headline(self) -> str:
        """One paragraph that says what was estimated, of whom, by how much replaying, under which plan."""
        manifest, estimand, totals = self.directory.manifest, self._summary["estimand"], self._summary["totals"]
        lock = "locked" if manifest["locked"] else "not locked"
        return (
            f"{manifest['policy'].get('name', 'policy')} on {manifest['env']}: {totals['points']:,} points of "
            f"{totals['trajectories']} trajectories in {totals['games']} games, {totals['rollouts']:,} rollouts, "
            f"{totals['steps']:,} steps, {totals['failed_rollouts']} failed.\n"
            f"Effect of the step taken on '{estimand['outcome']}' against '{estimand['contrast']}', then the policy "
            f"itself, within {estimand['budget']} steps; support {estimand['support']}, {estimand['rollouts']}.\n"
            f"Plan {self.plan.name} {manifest['plan_hash'][:12]} ({lock}); intervals over games at "
            f"{100 * (1 - estimand['alpha']):g} %."
        )

    def conf_int(self, alpha: float | None = None) -> pd.DataFrame:
        """Columns low and high by point at level 1 - alpha (default: the plan's), recomputed from the rollouts."""
        if alpha is None or alpha == self.plan.decisions.alpha:
            frame = self.effects
        else:
            if not 0 < alpha < 1:
                raise InputError(f"conf_int: alpha is {alpha}; expected between 0 and 1.")
            plan = replace(self.plan, decisions=replace(self.plan.decisions, alpha=alpha))
            frame, _ = effects(_points(self.directory, self.plan), plan)
        return frame.set_index("point")[["low", "high"]]

    def plot(self, ax: Axes | None = None, most: int | None = None) -> Axes:
        """Forest of the effects of defined points, ordered by estimate, coloured by state.

        most: draw no more than these, evenly spaced in that order (the legend counts all).
        """
        frame = self.effects[self.effects["support"] == "defined"].sort_values("estimate", kind="stable")
        total = frame["state"].value_counts()
        if most is not None and len(frame) > most:
            frame = frame.iloc[np.linspace(0, len(frame) - 1, most).round().astype(int)]
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(6, 4))
        place = np.arange(len(frame))
        for state, colour in MARKERS.items():
            part = (frame["state"] == state).to_numpy()
            shown = frame[part]
            ax.hlines(place[part], shown["low"], shown["high"], color=colour, linewidth=1)
            label = f"{state} ({total.get(state, 0)})"
            ax.plot(shown["estimate"], place[part], "o", markersize=2.5, color=colour, label=label)
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set_xlabel(f"effect on {self.plan.estimand.outcome} ({self.plan.estimand.contrast})")
        ax.set_ylabel("decision points")
        ax.set_yticks([])
        ax.legend(frameon=False, fontsize="small")
        return ax


def load(path: str | Path) -> Run:
    """Open a finished run. Raises InputError where there is none or it is not finished."""
    directory = RunDirectory.open(Path(path))
    try:
        summary = json.loads((directory.path / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(
            f"{path}: the run is not finished; repeat its audit replay command to go on with it."
        ) from None
    return Run(directory, summary)


__all__ = ["COLUMNS", "Run", "finish", "load"]
