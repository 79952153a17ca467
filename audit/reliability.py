"""Reliability of effect estimates over points: how much of their variance is not rollout noise.

Knows: a rank correlation with noisy effects cannot reach 1, and how high it can reach follows from the rollouts alone.
Hides: the algebra that makes the average over all halvings of the rollouts a difference of two variances, the bootstrap
over clusters, and the reading of (points, arms) tables of counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from audit.clusters import ClusterInterval, bootstrap_interval, cluster_totals
from envs.core import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Clusters = Sequence[Hashable] | NDArray[Any]


@dataclass(frozen=True, slots=True)
class Reliability:
    """How much of the variance of effect estimates over points is not rollout noise.

    value: 1 - mean sampling variance / variance of the estimates, with cluster bootstrap interval; negative values are
    kept as they are. ceiling: sqrt(value), the largest Pearson correlation that any signal can have with the estimates
    in expectation, with interval; NaN where value < 0, with ceiling_reason. noise, spread: the two variances.
    """

    value: ClusterInterval
    ceiling: float
    ceiling_low: float
    ceiling_high: float
    noise: float
    spread: float
    ceiling_reason: str = ""


def effects_with_variances(
    successes: ArrayLike, n: ArrayLike, weights: ArrayLike | None = None
) -> tuple[Floats, Floats]:
    """Estimates (factual rate minus weighted or pooled alternative rate) and their unbiased sampling variances.

    Arguments as `nonzero_share`. Both are (points,); an estimate is NaN without factual or alternative rollouts, a
    variance is NaN where an arm that counts has a single rollout (one rollout shows no variance).
    """
    x, k, w = check_counts(successes, n, weights)
    hits, size, c = _contrast(x, k, w)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = hits / size
        parts = np.where(c != 0, c**2 * rate * (1 - rate) / np.where(size > 1, size - 1, np.nan), 0.0)
        estimate = np.where(c != 0, c * rate, 0.0).sum(1)
    return estimate, parts.sum(1)


def reliability(
    estimates: ArrayLike,
    variances: ArrayLike,
    clusters: Clusters,
    *,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> Reliability:
    """Reliability of effect estimates over points by variance components.

    estimates, variances: (points,) with unbiased sampling variances (for bounded scores: the sum of weight^2 s^2/n);
    a point with either missing is left out. This is the split-half reliability with Spearman and Brown's correction
    in the limit of all splits: averaged over all halvings, the half-half covariance is V - v and the variance of a
    half V + v (V variance of the estimates, v mean sampling variance), and stepping (V - v)/(V + v) up to full length
    gives 1 - v/V. No random halving is needed and odd numbers of rollouts are no problem.

    The ceiling is exact for Pearson's correlation. With many true effects of exactly 0 a rank correlation stays below
    it, because noise ranks those ties: with 30 % of points nonzero and a perfect signal Spearman is .53/.63/.71/.76
    where the ceiling is .58/.71/.82/.90 at 4/8/16/32 rollouts an arm [simulated]. Missing with a reason with fewer
    than 3 points, fewer than 2 clusters, or equal estimates.
    """
    tau, v = np.asarray(estimates, dtype=float), np.asarray(variances, dtype=float)
    labels = np.asarray(list(clusters), dtype=object)
    if tau.ndim != 1 or tau.shape != v.shape or labels.size != tau.size:
        raise InputError("reliability: estimates, variances and clusters must be flat and of one length.")
    good = np.isfinite(tau) & np.isfinite(v)
    tau, v, labels = tau[good], v[good], labels[good]
    m = tau.size
    if m < 3:
        empty = ClusterInterval(np.nan, np.nan, np.nan, level, m, len(set(labels)), reason="fewer than 3 points")
        return Reliability(empty, np.nan, np.nan, np.nan, np.nan, np.nan, "fewer than 3 points")
    centred = tau - tau.mean()
    table = cluster_totals(np.column_stack([np.ones(m), centred, centred**2, v]), labels)

    def statistic(totals: Floats) -> Floats:
        size, first, square, noise = totals.T
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = (square - first**2 / size) / (size - 1)
            return np.where(spread > 1e-15, 1 - noise / size / spread, np.nan)

    value = bootstrap_interval(table, statistic, n_points=m, level=level, draws=draws, seed=seed)
    noise, spread = float(v.mean()), float(tau.var(ddof=1))
    if not np.isfinite(value.estimate):
        reason = "all estimates are equal: nothing to be reliable about"
        value = ClusterInterval(np.nan, np.nan, np.nan, level, m, table.shape[0], reason=reason)
        return Reliability(value, np.nan, np.nan, np.nan, noise, spread, reason)
    if value.estimate < 0:
        reason = "estimates vary less over points than rollout noise alone predicts: no ceiling above 0 can be shown"
        return Reliability(value, np.nan, np.nan, np.nan, noise, spread, reason)
    root = [float(np.sqrt(max(e, 0.0))) if np.isfinite(e) else np.nan for e in (value.low, value.high)]
    return Reliability(value, value.estimate**0.5, root[0], root[1], noise, spread, value.reason)


@dataclass(frozen=True, slots=True)
class SplitHalf:
    """Correlation of effects estimated from two halves of the rollouts, averaged over random halvings.

    pearson, spearman: of the halves. pearson_full, spearman_full: stepped up to full length (Spearman-Brown). NaN with
    a reason where undefined. points: with two rollouts or more in every arm that counts. sqrt(spearman_full) is a
    tighter ceiling for rank correlations than Pearson's, and still too high: .58/.67/.76/.82 where a perfect signal
    reaches .53/.62/.71/.76 (4/8/16/32 rollouts an arm, 30 % of points nonzero) [simulated].
    """

    pearson: float
    spearman: float
    pearson_full: float
    spearman_full: float
    points: int
    splits: int
    reason: str = ""


def split_half(
    successes: ArrayLike,
    n: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    absolute: bool = False,
    splits: int = 100,
    seed: int = 0,
) -> SplitHalf:
    """Split-half reliability by random halving within arms; the visible check of `reliability`, and its rank version.

    Arguments as `nonzero_share`; absolute=True correlates |effects|. Successes of a half are hypergeometric, so no
    single rollouts are needed. In an odd arm the spare rollout joins a random half, which makes the halves shorter
    than n/2 and the result slightly low; `reliability` has no such loss. Pearson is averaged as covariance over
    variance (so that its limit is the closed form), Spearman as the mean over splits. Spearman-Brown is a heuristic
    for ranks.
    """
    if splits < 1:
        raise InputError(f"split_half: splits must be at least 1, got {splits}.")
    x, k, w = check_counts(successes, n, weights)
    hits, total, c = _contrast(x, k, w)
    good = np.isfinite(c).all(1) & ((total >= 2) | (c == 0)).all(1)
    x, k, c = hits[good].astype(np.int64), total[good].astype(np.int64), c[good]
    m = x.shape[0]
    if m < 3:
        return SplitHalf(np.nan, np.nan, np.nan, np.nan, m, splits, "fewer than 3 points with 2 rollouts an arm")
    rng = np.random.Generator(np.random.Philox(seed))
    covariance, spread, ranks = 0.0, 0.0, []
    for _ in range(splits):
        size = (k + rng.integers(0, 2, k.shape)) // 2
        part = rng.hypergeometric(x, k - x, size)
        halves = []
        for won, tried in ((part, size), (x - part, k - size)):
            effect = (c * won / np.maximum(tried, 1)).sum(1)
            halves.append(np.abs(effect) if absolute else np.round(effect, 12))
        both = np.cov(halves[0], halves[1])
        covariance, spread = covariance + both[0, 1], spread + (both[0, 0] + both[1, 1]) / 2
        if min(both[0, 0], both[1, 1]) > 1e-15:
            ranks.append(float(np.corrcoef(stats.rankdata(halves[0]), stats.rankdata(halves[1]))[0, 1]))
    if spread <= 1e-15 * splits or not ranks:
        return SplitHalf(np.nan, np.nan, np.nan, np.nan, m, splits, "all half estimates are equal")
    r, rho = float(covariance / spread), float(np.mean(ranks))
    return SplitHalf(r, rho, 2 * r / (1 + r), 2 * rho / (1 + rho), m, splits)


def check_counts(successes: ArrayLike, n: ArrayLike, weights: ArrayLike | None) -> tuple[Ints, Ints, Floats | None]:
    """(points, arms) successes and rollouts and (points, arms - 1) weights as arrays, or InputError.

    Weights of a point sum to 1, or are all 0 where the point has no alternative (it is then undefined).
    """
    x, k = np.asarray(successes), np.asarray(n)
    if x.ndim != 2 or x.shape != k.shape or x.shape[1] < 2:
        raise InputError(f"effects: successes and n must be (points, arms) alike, got {x.shape} and {k.shape}.")
    if bool((x != np.round(x)).any() or (k != np.round(k)).any() or (x < 0).any() or (x > k).any()):
        raise InputError("effects: counts must be whole numbers with 0 <= successes <= n (only yes/no outcomes).")
    w = None if weights is None else np.asarray(weights, dtype=float)
    if w is not None and w.shape != (x.shape[0], x.shape[1] - 1):
        raise InputError(
            f"effects: weights must be (points, arms - 1) = {(x.shape[0], x.shape[1] - 1)}, got {w.shape}."
        )
    if w is not None:
        total = w.sum(1)
        if bool((w < 0).any() or np.isnan(w).any() or ((np.abs(total - 1) > 1e-6) & (total != 0)).any()):
            raise InputError("effects: weights of a point must be >= 0 and sum to 1 (all 0 where it is undefined).")
    return x.astype(np.int64), k.astype(np.int64), w


def _contrast(x: Ints, k: Ints, w: Floats | None) -> tuple[Floats, Floats, Floats]:
    """Counts and contrast coefficients of arm rates (+1 factual); NaN coefficients where the effect is undefined."""
    hits, size = x.astype(np.float64), k.astype(np.float64)
    if w is None:
        hits, size = (np.column_stack([a[:, 0], a[:, 1:].sum(1)]) for a in (hits, size))
        w = np.ones((x.shape[0], 1))
    c = np.column_stack([np.ones(x.shape[0]), -w])
    c[((size == 0) & (c != 0)).any(1) | (w.sum(1) == 0)] = np.nan
    return hits, size, c
