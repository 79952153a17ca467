"""The router: send the share of steps that a signal finds most doubtful to a judge, and see what that recovers.

Knows: that the question is the whole curve of recall against the share sent, not one point of it. Hides: ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from audit.comparison.compare import Comparison
from audit.comparison.frames import oriented
from audit.comparison.pivotal import router_curve
from envs.core import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = tuple(round(0.02 * i, 2) for i in range(51))


@dataclass(frozen=True, slots=True)
class Router:
    """The curve of one signal. frame: one row a share r; columns as `pivotal.router_curve` documents them."""

    signal: str
    frame: pd.DataFrame
    alpha: float

    def to_frame(self) -> pd.DataFrame:
        """The whole curve."""
        return self.frame

    def at(self, share: float) -> pd.Series:
        """The row whose share is nearest."""
        return self.frame.iloc[int((self.frame["share"] - share).abs().to_numpy().argmin())]

    def summary(self) -> pd.DataFrame:
        """Five points of the curve."""
        rows = [self.at(share) for share in (0.1, 0.2, 0.3, 0.5, 0.7)]
        return pd.DataFrame(rows).reset_index(drop=True)

    def conf_int(self) -> pd.DataFrame:
        """Columns low and high by share: the wider of Wilson's interval and the one over games."""
        low = self.frame[["low", "cluster_low"]].min(axis=1)
        high = self.frame[["high", "cluster_high"]].max(axis=1)
        return pd.DataFrame({"low": low.to_numpy(), "high": high.to_numpy()}, index=self.frame["share"])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Recall against the share sent, Wilson's band, and the diagonal of chance."""
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(4.5, 4))
        ax.fill_between(self.frame["share"], self.frame["low"], self.frame["high"], color="#d1e5f0")
        ax.plot(self.frame["share"], self.frame["recall"], color="#2166ac", label=self.signal)
        ax.plot([0, 1], [0, 1], "--", color="black", linewidth=0.8, label="chance")
        ax.set_xlabel("share of steps sent to the judge")
        ax.set_ylabel("share of pivotal steps among them")
        ax.legend(frameon=False, fontsize="small")
        return ax


def router(comparison: Comparison, signal: str, *, shares: Sequence[float] = SHARES, judge_cost: float = 1.0) -> Router:
    """The router that a signal's importance makes (for confidence: the least confident steps are sent).

    shares: of points sent. judge_cost: of one call of the judge, in any unit.
    Raises InputError for a signal that is not there, shares outside [0, 1], or where no point is pivotal.
    """
    joined = comparison.joined
    if signal not in joined.names:
        raise InputError(f"{signal}: no such signal here; there are {', '.join(joined.names)}.")
    if not all(0 <= share <= 1 for share in shares):
        raise InputError("router: shares must lie between 0 and 1.")
    x = oriented(joined.values, joined.names, comparison.importance)[:, joined.names.index(signal)]
    there = np.isfinite(x)
    if not joined.pivotal[there].any():
        raise InputError(f"router: no pivotal point has a value of {signal}, so there is nothing to recover.")
    frame = router_curve(
        x[there],
        joined.pivotal[there],
        joined.game[there],
        len(joined.games),
        comparison.counts,
        shares,
        level=1 - comparison.alpha,
        per_trajectory=joined.per_trajectory,
        judge_cost=judge_cost,
    )
    return Router(signal, frame, comparison.alpha)
