"""Weights and sequential doubly robust estimates of what a target policy would meet, from the trial's own coins.

Knows: importance weights of a policy at eligible decisions, the backward recursion of Jiang and Li (2016). Hides: the
embedding at eligible rows, fitted-Q by fold, thin late stages.

Time here is the index of an eligible decision within its trajectory; ineligible rows are part of the transition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from audit.mrt.data import Floats, Ints
from audit.mrt.nuisance import fit_predict
from audit.mrt.snmm import Rows

_THIN = 20  # rows per feature below which a stage borrows the later ones


@dataclass(frozen=True)
class Overlap:
    """How well logged coins carry a policy. ratio: (eligible rows,) cumulative weight up to and with the row.

    final: (n,) weight of each whole trajectory. ess: effective number of trajectories of `final`; max_weight: its
    maximum; consistent: share of trajectories whose every assignment has positive probability under the policy.
    """

    ratio: Floats
    final: Floats
    ess: float
    max_weight: float
    consistent: float


def overlap(rows: Rows, pi: Floats) -> Overlap:
    """Cumulative weights prod pi(A|H) / p(A|H) over eligible decisions. pi: (rows, K + 1) at logged histories."""
    at = np.arange(len(rows.arm))
    step = pi[at, rows.arm] / rows.p[at, rows.arm]
    first = np.concatenate([[True], rows.unit[1:] != rows.unit[:-1]])
    block = np.cumsum(first) - 1
    with np.errstate(divide="ignore"):
        log = np.where(step > 0, np.log(step), 0.0)
    zero = np.cumsum(step == 0)
    total = np.cumsum(log)
    start = np.flatnonzero(first)
    before = np.where(start > 0, total[start - 1], 0.0)[block]
    nought = np.where(start > 0, zero[start - 1], 0)[block]
    ratio = np.where(zero > nought, 0.0, np.exp(total - before))
    final = np.ones(rows.n)
    final[rows.unit] = ratio  # the last row of each trajectory is written last
    ess = float(final.sum() ** 2 / (final**2).sum()) if final.any() else 0.0
    return Overlap(ratio, final, ess, float(final.max()), float((final > 0).mean()))


def overlap_by_decision(rows: Rows, index: Ints, pi: Floats) -> pd.DataFrame:
    """ESS and largest weight at each eligible decision: index, trajectories, ess, max_weight, consistent."""
    ratio = overlap(rows, pi).ratio
    out = []
    for k in np.unique(index):
        w = ratio[index == k]
        ess = float(w.sum() ** 2 / (w**2).sum()) if w.any() else 0.0
        out.append((int(k) + 1, w.size, ess, float(w.max()), float((w > 0).mean())))
    return pd.DataFrame(out, columns=["decision", "trajectories", "ess", "max_weight", "consistent"])


def doubly_robust(
    rows: Rows,
    index: Ints,
    pi: Floats,
    x: Floats,
    fold: Ints,
    *,
    reward: Floats | None,
    start: Floats,
    learner: Any = None,
) -> Floats:
    """(n, m) terms whose mean estimates a policy's expected total: of terminal outcomes, or of rewards by decision.

    index: (rows,) eligible decisions before the row. reward: (rows, K + 1, m) reward of giving each arm at the row, or
    None for the terminal outcome `rows.y` (m = 1). start: (n, m) terms of trajectories without an eligible row.
    Per-decision doubly robust with fitted-Q from the other folds: unbiased for any fit because the coins are known;
    precise only while the weights are moderate (watch the ESS).
    """
    m = 1 if reward is None else reward.shape[2]
    arms = pi.shape[1]
    count = len(rows.y)
    last = np.concatenate([rows.unit[1:] != rows.unit[:-1], [True]])
    follow = np.minimum(np.arange(count) + 1, count - 1)
    at = np.arange(count)
    step = pi[at, rows.arm] / rows.p[at, rows.arm]
    q = np.zeros((count, arms, m))
    ends = rows.y[:, None] if reward is None else np.zeros((count, m))
    for f in range(int(fold.max()) + 1):
        fitted = np.zeros((count, arms, m))
        value = np.zeros((count, m))
        train = fold != f
        for k in range(int(index.max()), -1, -1):
            here = index == k
            target = np.where(last[:, None], ends, value[follow])
            for a in range(arms):
                use = train & here & (rows.arm == a)
                if use.sum() < _THIN * x.shape[1]:
                    use = train & (index >= k) & (rows.arm == a)
                if use.any():
                    for j in range(m):
                        fitted[here, a, j] = fit_predict(learner, x[use], target[use, j], x[here])
            now = fitted[here] if reward is None else fitted[here] + reward[here]
            value[here] = (pi[here][:, :, None] * now).sum(axis=1)
        held = fold == f
        q[held] = fitted[held] if reward is None else fitted[held] + reward[held]
    value = (pi[:, :, None] * q).sum(axis=1)
    total = np.zeros((count, m))
    for k in range(int(index.max()), -1, -1):
        here = np.flatnonzero(index == k)
        ahead = np.where(last[here, None], ends[here], total[follow[here]])
        got = ahead if reward is None else ahead + reward[here, rows.arm[here]]
        total[here] = value[here] + step[here, None] * (got - q[here, rows.arm[here]])
    out = start.astype(np.float64).copy()
    opening = index == 0
    out[rows.unit[opening]] = total[opening]
    return out
