"""Each arm on its own: success on held-out tasks, what it gained over the untrained policy, and the dose behind both.

Knows: that arms may differ from each other and yet all be worse than no training, which contrasts of arms alone do not
show. Hides: that a rate over seeds and tasks is judged like a difference of rates, both being samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from audit.training.contrasts import Contrasts, Paired, forest, paired, success_table
from envs.core import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOSE = ("effective", "steps", "displacement")


@dataclass(frozen=True)
class ArmLevels:
    """Success of every arm, and its difference from the untrained policy.

    frame: one row a dose set and arm: success with low and high; gain (over untrained, paired by seed and task) with
    gain_low, gain_high and gain_p (not adjusted for the number of arms); over_control and p_holm (difference from the
    random control at this dose; Holm's p in the first dose set only); effective, steps, displacement (means over seeds
    of the ledger, missing where there is none). untrained: success of the untrained policy, NaN where it is no arm.
    """

    frame: pd.DataFrame
    untrained: float
    alpha: float
    _own: tuple[Paired, ...]

    def to_frame(self) -> pd.DataFrame:
        """Every figure."""
        return self.frame

    def summary(self) -> pd.DataFrame:
        """What is printed: the interval of each rate beside both differences."""
        columns = ["dose", "arm", "success", "low", "high", "over_control", "p_holm", "gain", "gain_low", "gain_high"]
        return self.frame[[*columns, *DOSE]]

    def conf_int(self, alpha: float | None = None) -> pd.DataFrame:
        """low and high of every arm's success at level 1 - alpha (default: the study's)."""
        level = self.alpha if alpha is None else alpha
        if not 0 < level < 1:
            raise InputError(f"conf_int: alpha is {alpha}; expected between 0 and 1.")
        limits = pd.DataFrame([_rate_interval(one, level) for one in self._own], columns=["low", "high"])
        return limits.set_index(pd.MultiIndex.from_frame(self.frame[["dose", "arm"]]))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Forest of success, matched (filled) beside unmatched (open); a line where the untrained policy is."""
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(6.4, 4.4))
        forest(self.frame.assign(name=self.frame["arm"]), "success", ax)
        if math.isfinite(self.untrained):
            ax.axvline(self.untrained, color="black", linewidth=0.8)
        ax.set_xlabel("success on held-out tasks; the line is the untrained policy")
        return ax


def arm_levels(contrasts: Contrasts, ledger: pd.DataFrame | None = None) -> ArmLevels:
    """Levels of the arms of a study. ledger: its doses, where it has any (`Trained.to_frame`).

    Tasks that lack an outcome in some run of an arm are left out of that arm's rate, and of the pair in a difference.
    """
    outcomes, alpha = contrasts.outcomes, contrasts.alpha
    rows: list[dict[str, Any]] = []
    judged: list[Paired] = []
    untrained = math.nan
    for dose, part in outcomes.groupby("dose", sort=False):
        table = success_table(part)
        start = table.get("untrained")
        if start is not None and math.isnan(untrained):
            untrained = float(np.nanmean(start))
        for arm, won in table.items():
            own = paired(won[:, ~np.isnan(won).any(axis=0)])
            low, high = _rate_interval(own, alpha)
            row: dict[str, Any] = {"dose": dose, "arm": arm, "success": own.estimate, "low": low, "high": high}
            row |= {"gain": math.nan, "gain_low": math.nan, "gain_high": math.nan, "gain_p": math.nan}
            if start is not None and arm != "untrained":
                difference = won - start
                one = paired(difference[:, ~np.isnan(difference).any(axis=0)])
                row["gain"], (row["gain_low"], row["gain_high"]) = one.estimate, one.interval(alpha)
                row["gain_p"] = one.p
            rows.append(row)
            judged.append(own)
    frame = pd.DataFrame(rows)
    found = contrasts.frame
    control = found[found["against"] == "random:" + found["arm"]].set_index(["dose", "arm"])
    keys = pd.MultiIndex.from_frame(frame[["dose", "arm"]])
    frame["over_control"] = control["estimate"].reindex(keys).to_numpy()
    frame["p_holm"] = control["p_holm"].reindex(keys).to_numpy()
    for column in DOSE:
        if ledger is None or column not in ledger.columns:
            frame[column] = np.nan
            continue
        level = pd.to_numeric(ledger[column], errors="coerce").groupby([ledger["dose"], ledger["arm"]]).mean()
        frame[column] = level.reindex(keys).to_numpy()
    return ArmLevels(frame, untrained, alpha, tuple(judged))


def _rate_interval(one: Paired, alpha: float) -> tuple[float, float]:
    low, high = one.interval(alpha)
    return max(0.0, low), high
