"""The join of effects and signals on the point's id, and what of it can be compared.

Knows: which columns the comparison reads, that undefined effects and missing signals leave a point out and are
counted, where the sampling variance of an effect comes from. Hides: coding of trajectories and games.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from audit.results import Run
from envs.core import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NEEDED = ("point", "trajectory", "game", "step", "support", "state", "estimate")


@dataclass(frozen=True, slots=True)
class Joined:
    """Defined points in the order of trajectory and step, with everything known of them.

    tau, variance (NaN where unknown), fluency (log pi, NaN where unknown), step: (points,). pivotal: (points,).
    values: (points, signals), NaN where missing. groups: rows of each trajectory. home: game of each trajectory.
    game: game of each point. games: labels, in code order. names: of the signals. coverage: one row a signal.
    per_trajectory: points of a trajectory on average, undefined ones included.
    """

    points: pd.DataFrame
    tau: Floats
    variance: Floats
    fluency: Floats
    step: Floats
    pivotal: NDArray[np.bool_]
    values: Floats
    names: tuple[str, ...]
    groups: tuple[Ints, ...]
    home: Ints
    game: Ints
    games: tuple[str, ...]
    coverage: pd.DataFrame
    per_trajectory: float


def check_frames(effects: pd.DataFrame, signals: pd.DataFrame) -> tuple[str, ...]:
    """The names of the signals, after a look at both frames. Raises InputError as `join`."""
    absent = [column for column in NEEDED if column not in effects.columns]
    if absent:
        raise InputError(f"compare: the effects have no column {absent[0]!r}; give the frame of a finished run.")
    if "point" not in signals.columns:
        raise InputError("compare: the signals have no column 'point'; expected a row a point and a column a signal.")
    for what, frame in (("effects", effects), ("signals", signals)):
        twice = frame["point"][frame["point"].duplicated()]
        if len(twice):
            raise InputError(f"compare: point {twice.iloc[0]} is twice in the {what}; expected one row a point.")
    names = tuple(c for c in signals.columns if c not in ("point", "trajectory", "step", "game") and ":" not in c)
    if not names:
        raise InputError("compare: the signals have no column but their keys; expected a column a signal.")
    textual = next((name for name in names if not pd.api.types.is_numeric_dtype(signals[name])), None)
    if textual is not None:
        raise InputError(f"compare: the signal {textual!r} is not numeric; expected numbers, empty where missing.")
    return names


def join(effects: pd.DataFrame, signals: pd.DataFrame, games: Sequence[str] | None = None) -> Joined:
    """Join on `point`. signals: `point` and a column a signal; columns with a colon (reasons, flags) are not signals.

    games: the labels to resample, where they are more than this run's (several runs side by side).
    Raises InputError on missing columns, repeated points, no overlap, or a signal that is no number.
    """
    names = check_frames(effects, signals)
    overlap = int(effects["point"].isin(signals["point"]).sum())
    if not overlap:
        raise InputError("compare: no point of the effects is among the signals; are they of another run?")
    frame = effects[effects["support"] == "defined"].merge(signals[["point", *names]], on="point", how="left")
    frame = frame[np.isfinite(frame["estimate"].astype(float))]
    if frame.empty:
        raise InputError("compare: no effect is defined, so there is nothing to compare signals with.")
    frame = frame.sort_values(["trajectory", "step"], kind="stable").reset_index(drop=True)
    values = frame[list(names)].to_numpy(dtype=float, na_value=np.nan)
    if bool(np.isinf(values).any()):
        raise InputError("compare: a signal has an infinite value; leave it empty with a reason instead.")
    labels = tuple(sorted(set(frame["game"]))) if games is None else tuple(games)
    code = {label: number for number, label in enumerate(labels)}
    trajectory = pd.factorize(frame["trajectory"])[0]
    groups = tuple(np.flatnonzero(trajectory == t) for t in range(trajectory.max() + 1))
    game = np.array([code[label] for label in frame["game"]], dtype=np.int64)
    pi = frame["pi"].to_numpy(dtype=float) if "pi" in frame else np.full(len(frame), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        fluency = np.where(pi > 0, np.log(pi), np.nan)
    return Joined(
        points=frame.drop(columns=list(names)),
        tau=frame["estimate"].to_numpy(dtype=float),
        variance=_variance(frame),
        fluency=fluency,
        step=frame["step"].to_numpy(dtype=float),
        pivotal=(frame["state"] == "pivotal").to_numpy(),
        values=values,
        names=names,
        groups=groups,
        home=np.array([game[rows[0]] for rows in groups], dtype=np.int64),
        game=game,
        games=labels,
        coverage=_coverage(effects, signals, names, values),
        per_trajectory=len(effects) / effects["trajectory"].nunique(),
    )


def _coverage(effects: pd.DataFrame, signals: pd.DataFrame, names: Sequence[str], values: Floats) -> pd.DataFrame:
    known = signals[signals["point"].isin(effects["point"])]
    rows = []
    for i, name in enumerate(names):
        why = known[f"{name}:why"].dropna() if f"{name}:why" in known else pd.Series(dtype=object)
        rows.append(
            {
                "signal": name,
                "points": len(effects),
                "in_signals": len(known),
                "defined": values.shape[0],
                "compared": int(np.isfinite(values[:, i]).sum()),
                "missing": int(known[name].isna().sum()),
                "reason": why.mode().iloc[0] if len(why) else None,
            }
        )
    return pd.DataFrame(rows)


def _variance(frame: pd.DataFrame) -> Floats:
    """Unbiased sampling variances: the column `variance`, else from the counts of two arms of won rollouts."""
    if "variance" in frame:
        return frame["variance"].to_numpy(dtype=float)
    counts = ("n_factual", "wins_factual", "n_alternative", "wins_alternative")
    whole = all(column in frame for column in counts) and "contrast" in frame
    if not whole or not frame["contrast"].isin(["alternatives"]).all():
        return np.full(len(frame), np.nan)
    parts = np.zeros(len(frame))
    for arm in ("factual", "alternative"):
        n, wins = (frame[f"{what}_{arm}"].to_numpy(dtype=float) for what in ("n", "wins"))
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = wins / n
            parts += np.where(n > 1, rate * (1 - rate) / (n - 1), np.nan)
    return parts


def effects_of(run: Run) -> pd.DataFrame:
    """A run's effects with the column `variance`, from its rollouts, for every contrast that has one.

    Weights as in `audit.summary`: factual +1, alternatives pooled (draws) or equally weighted arms; the policy
    contrast times 1 - pi. NaN for the contrast `best` (its alternative was chosen by the same rollouts) and where an
    arm has a single rollout.
    """
    plan, effects = run.plan, run.effects.copy()
    effects["variance"] = np.nan
    if plan.estimand.contrast == "best":
        return effects
    rollouts = run.rollouts
    rollouts = rollouts[rollouts["status"] != "error"].merge(effects[["point", "step"]], on="point")
    late = (rollouts["step"] + rollouts["steps"]) / plan.estimand.budget
    won = rollouts["won"].astype(float)
    score = won * (1 - late) if plan.estimand.outcome == "efficiency" else won
    factual = rollouts["arm"] == "factual"
    arm = np.where(factual, "factual", rollouts["first"] if plan.rollouts.design == "arms" else "alternatives")
    cells = pd.DataFrame({"point": rollouts["point"], "factual": factual, "arm": arm, "score": score})
    table = cells.groupby(["point", "factual", "arm"], sort=False)["score"].agg(["var", "count"]).reset_index()
    table["noise"] = table["var"] / table["count"]
    side = table.groupby(["point", "factual"])["noise"].agg(lambda v: v.sum(skipna=False) / len(v) ** 2).unstack()
    total = side[True] + side[False] if {True, False} <= set(side.columns) else pd.Series(dtype=float)
    scale = (1 - effects["pi"]) ** 2 if plan.estimand.contrast == "policy" else 1.0
    effects["variance"] = effects["point"].map(total).astype(float) * scale
    return effects


def oriented(values: Floats, names: Sequence[str], importance: Mapping[str, Any]) -> Floats:
    """Values as importance: higher means "this step mattered more". Raises InputError on an unknown orientation."""
    out = values.copy()
    for i, name in enumerate(names):
        how = importance.get(name, "value")
        if how == "absolute":
            out[:, i] = np.abs(out[:, i])
        elif how == "negated":
            out[:, i] = -out[:, i]
        elif how != "value":
            raise InputError(f"compare: importance of {name} is {how!r}; expected value, absolute or negated.")
    return out
