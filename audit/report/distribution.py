"""The estimates of a run beside what chance alone would give.

Knows: with few rollouts most estimates are not zero where no step has any effect, so a histogram without its null
shows nothing. Hides: the count of outcomes.

The null is exact. Given the number of successes x of a point's n0 + n1 rollouts, no effect means that every way of
dealing them to the two arms is equally likely: the factual arm's count is hypergeometric (two binomials with one rate,
given their sum), whatever the rate is. The null histogram is the mean of the points' distributions. Adaptive plans stop
where counts look decided, so counts at the end do not follow it; both histograms are of the first round, where every
point has the same number of rollouts.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from audit.results import Run
from envs.core import InputError

Floats = npt.NDArray[np.float64]

NARROWEST = 0.05


def first_round(run: Run) -> pd.DataFrame:
    """One row a defined point: n_factual, wins_factual, n_alternative, wins_alternative of its first round, and scale
    (1 - pi for the contrast `policy`, else 1). Raises InputError where an exact null is not defined."""
    plan = run.plan
    if plan.estimand.outcome != "won":
        raise InputError("outcomes are scores, so counts do not give an exact null")
    if plan.estimand.contrast == "best":
        raise InputError("the contrast best chooses its alternative by the rollouts, so counts do not give its null")
    rollouts = run.rollouts
    kept = rollouts[(rollouts["round"] == rollouts["round"].min()) & (rollouts["status"] != "error")]
    side = np.where(kept["arm"] == "factual", "factual", "alternative")
    table = kept.assign(side=side, won=kept["won"].astype(int)).groupby(["point", "side"])["won"].agg(["size", "sum"])
    wide = table.unstack(fill_value=0)
    wide.columns = [f"{'n' if what == 'size' else 'wins'}_{arm}" for what, arm in wide.columns]
    defined = run.effects.loc[run.effects["support"] == "defined", ["point", "pi"]]
    found = defined.merge(wide.reset_index(), on="point", how="inner")
    found["scale"] = 1 - found["pi"] if plan.estimand.contrast == "policy" else 1.0
    return found.drop(columns="pi")


def edges_for(counts: pd.DataFrame) -> Floats:
    """Edges of bins over [-1, 1] with 0 in the middle of one. Estimates from equal counts lie on a grid; bins are then
    an odd number of its steps wide, so that none is empty for want of a value and no value lies on an edge."""
    sizes = {int(n) for column in ("n_factual", "n_alternative") for n in counts[column].unique()}
    step = 1 / math.lcm(*sizes) if sizes and (counts["scale"] == 1).all() else NARROWEST
    steps = max(1, math.ceil(NARROWEST / step - 1e-9))
    width = step * (steps if steps % 2 else steps + 1)
    half = math.ceil(1 / width - 0.5 - 1e-9)
    return np.asarray((np.arange(-half, half + 2) - 0.5) * width, dtype=np.float64)


def _dealt(total: int, n0: int, n1: int) -> tuple[Floats, Floats]:
    """(estimates, their probabilities) of all ways to deal `total` successes to the two arms."""
    k = np.arange(max(0, total - n1), min(n0, total) + 1)
    return k / n0 - (total - k) / n1, stats.hypergeom.pmf(k, n0 + n1, total, n0)


def beside_null(counts: pd.DataFrame) -> pd.DataFrame:
    """The histogram of estimates and its null. counts: as `first_round` gives.

    Columns: low, high (edges of the bin), observed and null (shares of points; each sums to 1).
    """
    edges = edges_for(counts)
    k0, k1 = counts["wins_factual"].to_numpy(), counts["wins_alternative"].to_numpy()
    n0, n1 = counts["n_factual"].to_numpy(), counts["n_alternative"].to_numpy()
    scale = counts["scale"].to_numpy(dtype=float)
    null = np.zeros(len(edges) - 1)
    kinds, times = np.unique(np.column_stack([k0 + k1, n0, n1, scale]), axis=0, return_counts=True)
    for (total, size0, size1, factor), points in zip(kinds.tolist(), times.tolist(), strict=True):
        values, chance = _dealt(int(total), int(size0), int(size1))
        null += points * np.histogram(values * factor, edges, weights=chance)[0]
    observed = np.histogram((k0 / n0 - k1 / n1) * scale, edges)[0]
    size = max(len(counts), 1)
    return pd.DataFrame({"low": edges[:-1], "high": edges[1:], "observed": observed / size, "null": null / size})
