"""A run in the terminal: the timeline of a trajectory, and figures by group.

Knows: how a decision point reads in one line. Hides: finding trajectories by the beginning of their ids.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from audit.results import Run
from envs.core import InputError

SIGNS = {"pivotal": "#", "negligible": ".", "inconclusive": "?", "undefined": " "}
HALF = 12  # characters of each half of the effect bar


def timeline(run: Run, trajectory: str) -> str:
    """Step, action, pi, effect with interval and state of every replayed point of one trajectory.

    trajectory: its id or the beginning of it. Raises InputError where none or several begin so.
    """
    known = run.trajectories
    found = known[known["trajectory"].str.startswith(trajectory)]
    if len(found) != 1:
        some = ", ".join(identity[:8] for identity in known["trajectory"].head(5))
        raise InputError(f"{trajectory}: {len(found)} trajectories begin so; some of this run's are {some}.")
    row = found.iloc[0]
    points = run.effects[run.effects["trajectory"] == row["trajectory"]].set_index("step")
    lines = [f"!! {mark}" for mark in run.marks]
    lines.append(
        f"{row['trajectory'][:12]}  {row['game_name']}  {'won' if row['won'] else 'not won'}, {row['steps']} steps"
    )
    width = min(48, max((len(command) for command in row["commands"]), default=6))
    axis = f"-1{'0':^{2 * HALF - 3}}+1"
    lines.append(f"{'step':>4}  {'action':<{width}}  {'pi':>5}  {'effect':>6}  {'interval':^15}  {axis}  state")
    for step, command in enumerate(row["commands"]):
        text = f"{step:>4}  {command[:width]:<{width}}"
        if step not in points.index:
            lines.append(f"{text}  (not among the plan's points)")
            continue
        lines.append(f"{text}  {_point(points.loc[step])}")
    return "\n".join(lines)


def _point(point: pd.Series) -> str:
    pi = "    -" if pd.isna(point["pi"]) else f"{point['pi']:5.2f}"
    if point["state"] == "undefined":
        return f"{pi}  {'-':>6}  {'-':^15}  {'':<{2 * HALF + 1}}  {point['support']}: {point['reason']}"
    interval = f"[{point['low']:+.2f}, {point['high']:+.2f}]"
    return f"{pi}  {point['estimate']:+6.2f}  {interval:<15}  {_bar(point)}  {point['state']}"


def _bar(point: pd.Series) -> str:
    """The interval and the estimate on a line from -1 to 1."""

    def place(value: float) -> int:
        return int(np.clip(round((value + 1) * HALF), 0, 2 * HALF))

    line = [" "] * (2 * HALF + 1)
    line[HALF] = "|"
    for i in range(place(point["low"]), place(point["high"]) + 1):
        line[i] = "-" if i != HALF else "+"
    line[place(point["estimate"])] = SIGNS[point["state"]]
    return "".join(line)


def groups(run: Run, by: str) -> pd.DataFrame:
    """Coverage, pivotal share and mean effect by group, with intervals."""
    rows = []
    for row in run.details["groups"][by]:
        entry = {by: row["group"] or "-", "points": row["points"]}
        for name in ("defined", "pivotal", "mean_effect"):
            value = row[name] or {}
            entry |= {name: value.get("estimate"), f"{name} low": value.get("low"), f"{name} high": value.get("high")}
        rows.append(entry)
    return pd.DataFrame(rows)
