"""All measures of all signals: estimate, bootstrap draws, shuffles and correction of each.

Knows: which effects, covariates and orientation each measure uses, and when it is undefined. Hides: sharing of work
between signals. What it means is decided in `audit.comparison.compare`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.comparison.frames import Joined, oriented
from audit.comparison.pivotal import (
    auc_parts,
    average_precision,
    average_precision_draws,
    pooled_auc,
    pooled_auc_matrix,
    shuffled,
    shuffled_signs,
    sign_parts,
)
from audit.comparison.ranks import Kind, by_trajectory, permutations, shuffled_medians
from audit.comparison.resample import median_draws, totals_by

Floats = NDArray[np.float64]

# name -> what it says. The first is primary. "within": ranked within trajectories, the median over them.
MEASURES: Mapping[str, str] = {
    "spearman": "median over trajectories of Spearman's correlation with the effect",
    "spearman_abs": "the same of importance with the size of the effect",
    "kendall": "median over trajectories of Kendall's tau-b with the effect",
    "kendall_abs": "the same of importance with the size of the effect",
    "pearson": "Pearson correlation with the effect within trajectories, pooled",
    "partial_fluency": "median over trajectories of Spearman's partial correlation with the effect, given log pi(a|h)",
    "partial_step": "the same, given the step",
    "fluency": "median over trajectories of Spearman's correlation with log pi(a|h)",
    "sign": "share of points where signal and effect have one sign",
    "auc": "AUC of importance for pivotal points among pairs of one trajectory",
    "auc_pooled": "AUC of importance for pivotal points among all pairs",
    "average_precision": "average precision of importance for pivotal points",
}
RANKED = ("spearman", "spearman_abs", "kendall", "kendall_abs", "partial_fluency", "partial_step", "fluency")
SHARES = ("sign", "auc", "auc_pooled", "average_precision")

LEAVES_NOTHING = "undefined in every trajectory: too few points, or nothing varies within trajectories"


@dataclass(frozen=True, slots=True)
class Found:
    """One measure of one signal.

    draws: bootstrap. shuffles: under chance. corrected: estimate and draws corrected for the reliability of the
    effects; None where there is no correction, with `uncorrected`. excess: draws of the distance from chance as it
    would be without rollout noise, for equivalence (noisy effects put any signal near chance); NaN where unknown.
    """

    estimate: float
    draws: Floats
    shuffles: Floats
    chance: float
    points: int
    trajectories: int
    clusters: int
    excess: Floats
    reason: str = ""
    corrected: tuple[float, Floats] | None = None
    uncorrected: str = "is defined for spearman and pearson only"


@dataclass(slots=True)
class Measured:
    """Everything of one study: (signal, measure) -> Found; reliability within trajectories with its draws."""

    found: dict[tuple[str, str], Found] = field(default_factory=dict)
    reliability: dict[str, tuple[float, Floats]] = field(default_factory=dict)


def measure(
    joined: Joined, importance: Mapping[str, Any], counts: NDArray[np.int64], *, shuffles: int, seed: int
) -> Measured:
    """All measures of all signals. counts: (draws, games) of the bootstrap, one for all, so that draws are paired."""
    out = Measured()
    size = np.abs(joined.tau)
    ranked = oriented(joined.values, joined.names, importance)
    for name in joined.names:
        out.reliability[name] = _reliability(joined, joined.values[:, joined.names.index(name)], counts)
    _ranked(out, "spearman", joined, joined.values, joined.tau, counts, shuffles, seed)
    _ranked(out, "spearman_abs", joined, ranked, size, counts, shuffles, seed)
    _ranked(out, "kendall", joined, joined.values, joined.tau, counts, shuffles, seed, kind="kendall")
    _ranked(out, "kendall_abs", joined, ranked, size, counts, shuffles, seed, kind="kendall")
    for measure_, given in (("partial_fluency", joined.fluency), ("partial_step", joined.step)):
        _ranked(out, measure_, joined, joined.values, joined.tau, counts, shuffles, seed, given=given)
    _ranked(out, "fluency", joined, joined.values, joined.fluency, counts, shuffles, seed)
    for i, name in enumerate(joined.names):
        _pearson(out, name, joined, joined.values[:, i], counts, shuffles, seed)
        _sign(out, name, joined, joined.values[:, i], counts, shuffles, seed)
        _pivotal(out, name, joined, ranked[:, i], counts, shuffles, seed)
    return out


def _ranked(
    out: Measured,
    name: str,
    joined: Joined,
    x: Floats,
    y: Floats,
    counts: NDArray[np.int64],
    shuffles: int,
    seed: int,
    *,
    kind: Kind = "spearman",
    given: Floats | None = None,
) -> None:
    values = by_trajectory(x, y, joined.groups, kind=kind, given=given)
    chance = shuffled_medians(x, y, joined.groups, kind=kind, given=given, shuffles=shuffles, seed=seed)
    for i, signal in enumerate(joined.names):
        usable = np.isfinite(values[:, i])
        points = sum(int(np.isfinite(x[rows, i]).sum()) for t, rows in enumerate(joined.groups) if usable[t])
        if not usable.any():
            out.found[signal, name] = _undefined(counts, shuffles, LEAVES_NOTHING)
            continue
        draws = median_draws(values[:, i], joined.home, counts)
        # Chance is 0 but for skewed ties; the noise of the shuffles must not put it below an interval that ends at 0.
        centre = max(0.0, float(np.median(chance[:, i])))
        estimate = float(np.median(values[usable, i]))
        out.found[signal, name] = Found(
            estimate,
            draws,
            chance[:, i],
            centre,
            points,
            int(usable.sum()),
            len(set(joined.home[usable].tolist())),
            _disattenuated(out, signal, draws - centre),
            **_corrected(out, signal, estimate, draws) if name == "spearman" else {},
        )


def _undefined(counts: NDArray[np.int64], shuffles: int, reason: str) -> Found:
    nothing = np.full(counts.shape[0], np.nan)
    return Found(np.nan, nothing, np.full(shuffles, np.nan), np.nan, 0, 0, 0, nothing, reason, uncorrected=reason)


def _corrected(out: Measured, signal: str, estimate: float, draws: Floats) -> dict[str, Any]:
    """Divided by the root of the reliability, resample by resample, so that its uncertainty is in the interval."""
    reliability, _ = out.reliability[signal]
    if not np.isfinite(reliability):
        return {"uncorrected": "the sampling variance of the effects is not known"}
    if reliability <= 0:
        return {"uncorrected": "the effects vary less within trajectories than rollout noise alone would make them"}
    return {"corrected": (estimate / reliability**0.5, _disattenuated(out, signal, draws))}


def _disattenuated(out: Measured, signal: str, draws: Floats) -> Floats:
    """Draws over the root of each resample's own reliability; infinite where that is not positive (all noise)."""
    drawn = out.reliability[signal][1]
    with np.errstate(invalid="ignore", divide="ignore"):
        return draws / np.sqrt(np.maximum(drawn, 0.0))


def _reliability(joined: Joined, x: Floats, counts: NDArray[np.int64]) -> tuple[float, Floats]:
    """Reliability of the effects within trajectories, on the points that a signal has: 1 - noise / spread.

    Within, since ranks are compared within trajectories; differences between trajectories would flatter it. The
    expected sum of squares of noise about its trajectory's mean is sum (1 - 1/n) v.
    """
    spread = np.zeros((len(joined.groups), 2))
    for t, rows in enumerate(joined.groups):
        kept = rows[np.isfinite(x[rows]) & np.isfinite(joined.variance[rows])]
        if kept.size > 1:
            tau = joined.tau[kept]
            spread[t] = ((tau - tau.mean()) ** 2).sum(), (1 - 1 / kept.size) * joined.variance[kept].sum()
    totals = totals_by(spread, joined.home, len(joined.games))
    with np.errstate(invalid="ignore", divide="ignore"):
        square, noise = totals.sum(axis=0)
        drawn = counts @ totals
        return (float(1 - noise / square) if square > 0 else np.nan), 1 - drawn[:, 1] / drawn[:, 0]


def _centred(joined: Joined, x: Floats) -> list[tuple[int, NDArray[np.int64], Floats, Floats]]:
    """(trajectory, rows, signal, effect), both centred within the trajectory, where it has two points or more."""
    found = []
    for t, rows in enumerate(joined.groups):
        kept = rows[np.isfinite(x[rows])]
        if kept.size > 1:
            found.append((t, kept, x[kept] - x[kept].mean(), joined.tau[kept] - joined.tau[kept].mean()))
    return found


def _pearson(
    out: Measured, name: str, joined: Joined, x: Floats, counts: NDArray[np.int64], shuffles: int, seed: int
) -> None:
    cells = _centred(joined, x)
    sums = np.zeros((len(joined.groups), 3))
    chance = np.zeros(shuffles)
    for t, rows, a, b in cells:
        sums[t] = a @ b, a @ a, b @ b
        chance += b[permutations(shuffles, rows.size, seed, 0, t)] @ a
    cross, one, two = sums.sum(axis=0)
    if one <= 1e-12 or two <= 1e-12:
        out.found[name, "pearson"] = _undefined(counts, shuffles, LEAVES_NOTHING)
        return
    drawn = counts @ totals_by(sums, joined.home, len(joined.games))
    with np.errstate(invalid="ignore", divide="ignore"):
        draws = drawn[:, 0] / np.sqrt(drawn[:, 1] * drawn[:, 2])
    estimate = float(cross / (one * two) ** 0.5)
    trajectories = [t for t, _, _, _ in cells]
    out.found[name, "pearson"] = Found(
        estimate,
        draws,
        chance / (one * two) ** 0.5,
        0.0,
        sum(rows.size for _, rows, _, _ in cells),
        len(trajectories),
        len(set(joined.home[trajectories].tolist())),
        _disattenuated(out, name, draws),
        **_corrected(out, name, estimate, draws),
    )


def _sign(
    out: Measured, name: str, joined: Joined, x: Floats, counts: NDArray[np.int64], shuffles: int, seed: int
) -> None:
    there = np.isfinite(x)
    groups = [rows[there[rows]] for rows in joined.groups]
    parts = sign_parts(x, joined.tau, groups)
    agreed, expected, compared = parts.sum(axis=0)
    signs = set(np.sign(x[there & (joined.tau != 0)]).tolist()) - {0.0}
    if len(signs) < 2:
        reason = "no effect differs from 0" if not compared else "the signal has one sign only, which says nothing"
        out.found[name, "sign"] = _undefined(counts, shuffles, reason)
        return
    drawn = counts @ totals_by(parts, joined.home, len(joined.games))
    chance = float(expected / compared)
    used = parts[:, 2] > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        # Excess over each resample's own chance, put back on the scale of the share.
        draws = (drawn[:, 0] - drawn[:, 1]) / drawn[:, 2] + chance
    out.found[name, "sign"] = Found(
        float(agreed / compared),
        draws,
        shuffled_signs(x, joined.tau, groups, shuffles=shuffles, seed=seed),
        chance,
        int(compared),
        int(used.sum()),
        len(set(joined.home[used].tolist())),
        draws - chance,
    )


def _pivotal(
    out: Measured, name: str, joined: Joined, x: Floats, counts: NDArray[np.int64], shuffles: int, seed: int
) -> None:
    there = np.isfinite(x)
    hit = joined.pivotal[there]
    names = ("auc", "auc_pooled", "average_precision")
    if not 0 < hit.sum() < hit.size:
        reason = "no point is pivotal" if not hit.any() else "every point is pivotal"
        out.found |= {(name, measure_): _undefined(counts, shuffles, reason) for measure_ in names}
        return
    place = np.cumsum(there) - 1
    groups = [place[rows[there[rows]]] for rows in joined.groups]
    value, game, games = x[there], joined.game[there], len(joined.games)
    chance = shuffled(value, hit, groups, shuffles=shuffles, seed=seed)
    parts = auc_parts(value, hit, groups)
    used = parts[:, 1] > 0
    drawn = counts @ totals_by(parts, joined.home, games)
    every = (value.size, sum(rows.size > 0 for rows in groups), len(set(game.tolist())))
    if used.any():
        with np.errstate(invalid="ignore", divide="ignore"):
            draws = drawn[:, 0] / drawn[:, 1]
        inside = (
            sum(rows.size for rows, u in zip(groups, used, strict=True) if u),
            int(used.sum()),
            len(set(joined.home[used].tolist())),
        )
        estimate = float(parts[:, 0].sum() / parts[:, 1].sum())
        out.found[name, "auc"] = Found(estimate, draws, chance["auc"], 0.5, *inside, draws - 0.5)
    else:
        out.found[name, "auc"] = _undefined(counts, shuffles, "no trajectory has both pivotal points and others")
    matrix = pooled_auc_matrix(value, hit, game, games)
    hits, misses = (np.bincount(game[which], minlength=games).astype(float) for which in (hit, ~hit))
    whole = np.ones((1, games), dtype=np.int64)
    pooled = {
        "auc_pooled": (pooled_auc(matrix, hits, misses, whole), pooled_auc(matrix, hits, misses, counts)),
        "average_precision": (average_precision(value, hit), average_precision_draws(value, hit, game, counts)),
    }
    for measure_, (one, draws) in pooled.items():
        centre = float(chance[measure_].mean())
        out.found[name, measure_] = Found(float(one[0]), draws, chance[measure_], centre, *every, draws - centre)
