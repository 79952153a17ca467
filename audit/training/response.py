"""How much of the spread between arms is dose: success on held-out tasks against the logarithm of dose.

Knows: which figure of the ledger is taken for dose, and that a few points on a line explain something by chance.
Hides: the regression and the bootstrap of its share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from envs.core import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]
PALETTE = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#1f78b4")


@dataclass(frozen=True)
class DoseResponse:
    """Success against log dose over arms.

    frame: one row a dose set and arm with a dose: figure of the ledger, success, tasks and seeds behind it. fits: one
    row a set (and one for all): arms, spread (standard deviation of the arms' success), slope (success per tenfold
    dose) with interval, explained (R^2: share of the spread that dose explains) with bootstrap interval, by_chance
    (R^2 expected with no relation, 1/(arms - 1)), p, reason.
    by: the figure. undosed: arms without a dose; they have no place on the axis, and idle, their mean success (NaN
    without any), is a line across it.
    """

    frame: pd.DataFrame
    fits: pd.DataFrame
    by: str
    undosed: tuple[str, ...]
    idle: float = math.nan

    def to_frame(self) -> pd.DataFrame:
        """The points."""
        return self.frame

    def summary(self) -> pd.DataFrame:
        """The fits."""
        return self.fits

    def conf_int(self) -> pd.DataFrame:
        """Interval of the slope of each set."""
        return self.fits.set_index("dose")[["slope_low", "slope_high"]].set_axis(["low", "high"], axis=1)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Scatter, arms as colours, matched filled and others open; random controls are squares."""
        from matplotlib.ticker import LogLocator, NullFormatter

        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(5.6, 4))
        arms = list(dict.fromkeys(name.removeprefix("random:") for name in self.frame["arm"]))
        first = self.frame["dose"].iloc[0]
        for row in self.frame.to_dict("records"):
            base = row["arm"].removeprefix("random:")
            colour = PALETTE[arms.index(base) % len(PALETTE)]
            marker = "o" if base == row["arm"] else "s"
            face = colour if row["dose"] == first else "white"
            ax.plot(row["level"], row["success"], marker, color=colour, markerfacecolor=face, markersize=6)
        for name in arms:
            ax.plot([], [], "o", color=PALETTE[arms.index(name) % len(PALETTE)], label=name)
        ax.plot([], [], "s", color="#777777", label="random control")
        ax.plot([], [], "o", color="#777777", markerfacecolor="white", label=f"not {first}")
        if math.isfinite(self.idle):
            ax.axhline(self.idle, color="black", linewidth=0.8, linestyle="--", label=", ".join(self.undosed))
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(lambda level, place: f"{level:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel({"effective": "effective sample size", "steps": "optimiser steps"}.get(self.by, self.by))
        ax.set_ylabel("success on held-out tasks")
        ax.legend(frameon=False, fontsize="x-small")
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        return ax


def dose_response(
    outcomes: pd.DataFrame, ledger: pd.DataFrame, *, by: str = "steps", resamples: int = 2000, seed: int = 0
) -> DoseResponse | None:
    """Fit success against log10 of a figure of the ledger, over arms. None where no arm has a dose.

    by: steps, effective, shown, tokens, rate_integral or displacement. A set whose arms all have one dose (a matched
    one) has no slope, and says so; its spread is what dose cannot explain.
    """
    if by not in ledger.columns:
        raise InputError(f"The ledger has no {by!r}; it has {', '.join(map(str, ledger.columns))}.")
    frame, sets = ledger.copy(), outcomes.copy()
    if "dose" not in frame.columns:
        frame["dose"] = "as given"
    level = pd.to_numeric(frame[by], errors="coerce").groupby([frame["dose"], frame["arm"]], sort=False).mean()
    rows: list[dict[str, Any]] = []
    tables: list[Floats] = []
    undosed: dict[str, list[float]] = {}
    for (dose, arm), part in sets.groupby(["dose", "arm"], sort=False):
        value = float(level.get((dose, arm), math.nan))
        if not value > 0:
            undosed.setdefault(str(arm), []).append(float(part["won"].mean()))
            continue
        table = part.pivot(index="seed", columns="task", values="won").sort_index().to_numpy(dtype=float)
        rows.append(
            {"dose": dose, "arm": arm, "level": value, "success": float(np.nanmean(table)), "tasks": table.shape[1]}
        )
        tables.append(table)
    if not rows:
        return None
    points = pd.DataFrame(rows)
    names = list(dict.fromkeys(points["dose"]))
    parts = [(name, np.flatnonzero((points["dose"] == name).to_numpy())) for name in names]
    if len(names) > 1:
        parts.append(("all", np.arange(len(points))))
    fits = [{"dose": name, **_fit(points, tables, rows_, resamples, seed)} for name, rows_ in parts]
    idle = float(np.nanmean([rate for rates in undosed.values() for rate in rates])) if undosed else math.nan
    return DoseResponse(points, pd.DataFrame(fits), by, tuple(undosed), idle)


def _fit(
    points: pd.DataFrame, tables: list[Floats], rows: npt.NDArray[np.int64], resamples: int, seed: int
) -> dict[str, Any]:
    x = np.log10(points["level"].to_numpy(dtype=float)[rows])
    y = points["success"].to_numpy(dtype=float)[rows]
    n = rows.size
    fit: dict[str, Any] = {
        "arms": n,
        "spread": float(y.std(ddof=1)) if n > 1 else math.nan,
        "slope": math.nan, "slope_low": math.nan, "slope_high": math.nan, "p": math.nan,
        "explained": math.nan, "explained_low": math.nan, "explained_high": math.nan,
        "by_chance": 1 / (n - 1) if n > 1 else math.nan, "reason": "",
    }  # fmt: skip
    if n < 3:
        fit["reason"] = "fewer than 3 arms with a dose"
        return fit
    if np.ptp(x) < 1e-9:
        fit["reason"] = "all doses are equal"
        return fit
    if np.ptp(y) < 1e-12:
        fit["reason"] = "all arms succeed equally often"
        return fit
    line = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, n - 2)) * float(line.stderr)
    fit |= {
        "slope": float(line.slope),
        "slope_low": float(line.slope) - half,
        "slope_high": float(line.slope) + half,
        "p": float(line.pvalue),
        "explained": float(line.rvalue) ** 2,
    }
    if len({tables[row].shape for row in rows}) == 1 and min(tables[rows[0]].shape) > 1:
        shares = _shares(np.stack([tables[row] for row in rows]), x, resamples, seed)
        if shares.size:
            fit["explained_low"], fit["explained_high"] = (float(q) for q in np.quantile(shares, (0.025, 0.975)))
    return fit


def _shares(stack: Floats, x: Floats, resamples: int, seed: int) -> Floats:
    """R^2 of resamples of seeds and tasks, common to all arms. Tasks with a missing outcome are left out."""
    stack = stack[:, :, ~np.isnan(stack).any(axis=(0, 1))]
    _, seeds, tasks = stack.shape
    if tasks < 2:
        return np.empty(0)
    rng = np.random.Generator(np.random.Philox(key=[seed, 7]))
    on_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), resamples) / seeds
    on_tasks = rng.multinomial(tasks, np.full(tasks, 1 / tasks), resamples) / tasks
    y = np.stack([((on_seeds @ table) * on_tasks).sum(axis=1) for table in stack], axis=1)
    y = y - y.mean(axis=1, keepdims=True)
    centred = x - x.mean()
    total = (y**2).sum(axis=1)
    good = total > 1e-15
    shares: Floats = (y[good] @ centred) ** 2 / (total[good] * float(centred @ centred))
    return shares
