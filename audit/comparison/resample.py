"""Resampling of games: bootstrap draws, intervals, p-values, equivalence, Holm.

Knows: that games are what was sampled, and how few of them make an interval impossible. Hides: that a resample is a
vector of counts, so that a statistic of 10,000 resamples is a handful of array operations and two signals resampled
together keep their pairing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROUNDING = 1e-9  # a correlation of exactly 0 comes out as 1e-17
LOST = 0.05  # share of resamples without a value above which there is no interval


@dataclass(frozen=True, slots=True)
class Span:
    """An interval, or why there is none (NaN ends)."""

    low: float
    high: float
    reason: str = ""


def cluster_counts(clusters: int, draws: int, seed: int) -> Ints:
    """(draws, clusters) how often each cluster is in each resample of as many clusters, with replacement."""
    rng = np.random.Generator(np.random.Philox(seed))
    counts = np.empty((draws, clusters), dtype=np.int64)
    block = max(1, 4_000_000 // max(1, clusters))
    for start in range(0, draws, block):
        b = min(block, draws - start)
        picks = rng.integers(0, clusters, (b, clusters)) + np.arange(b)[:, None] * clusters
        counts[start : start + b] = np.bincount(picks.ravel(), minlength=b * clusters).reshape(b, clusters)
    return counts


def median_draws(values: ArrayLike, clusters: ArrayLike, counts: Ints) -> Floats:
    """Medians over resampled members (a trajectory counts as often as its game was drawn); NaN members are left out.

    values, clusters: (members,). The median of an even number is the mean of the middle two, as everywhere.
    """
    v, c = np.asarray(values, dtype=float), np.asarray(clusters, dtype=np.int64)
    good = np.isfinite(v)
    v, c = v[good], c[good]
    if v.size == 0:
        return np.full(counts.shape[0], np.nan)
    order = np.argsort(v, kind="stable")
    v, c = v[order], c[order]
    found = np.empty(counts.shape[0])
    block = max(1, 2_000_000 // v.size)
    for start in range(0, counts.shape[0], block):
        cumulative = counts[start : start + block].T.astype(np.int32)[c].cumsum(axis=0, dtype=np.int32)
        total = cumulative[-1]
        low, high = ((cumulative <= place).sum(axis=0) for place in ((total - 1) // 2, total // 2))
        last = v.size - 1
        middle = (v[np.minimum(low, last)] + v[np.minimum(high, last)]) / 2
        found[start : start + block] = np.where(total > 0, middle, np.nan)
    return found


def totals_by(columns: ArrayLike, clusters: ArrayLike, n_clusters: int) -> Floats:
    """(clusters, k) totals of (members, k) columns."""
    table, c = np.asarray(columns, dtype=float), np.asarray(clusters, dtype=np.int64)
    return np.column_stack([np.bincount(c, column, n_clusters) for column in table.T])


def enough(clusters: int, level: float) -> str:
    """Empty, or why so few clusters give no interval: the whole range of G independent values covers a median with
    probability 1 - 2^(1-G), and no percentile interval is wider than that."""
    if clusters > 1 and 2.0 ** (1 - clusters) <= 1 - level:
        return ""
    games = "1 game is" if clusters == 1 else f"{clusters} games are"
    return f"{games} too few for an interval at {100 * level:g} %"


def _widened(tail: float, clusters: int) -> float:
    """The percentile to use for a tail: expanded percentile interval (Hesterberg 2015, section 3.2): a bootstrap of G
    clusters is too narrow by sqrt((G-1)/G) and lacks the t quantile."""
    g = clusters
    return float(stats.norm.cdf((g / (g - 1)) ** 0.5 * stats.t.ppf(tail, g - 1)))


def span(draws: Floats, clusters: int, level: float) -> Span:
    """Expanded percentile interval of bootstrap draws; NaN draws are undefined, infinite ones are beyond all bounds."""
    reason = enough(clusters, level)
    good = draws[~np.isnan(draws)]
    if not reason and good.size < (1 - LOST) * draws.size:
        reason = f"undefined in {100 * (1 - good.size / draws.size):.0f} % of the resamples"
    if reason:
        return Span(np.nan, np.nan, reason)
    tail = _widened((1 - level) / 2, clusters)
    method: Literal["linear", "inverted_cdf"] = "linear" if np.isfinite(good).all() else "inverted_cdf"
    low, high = np.quantile(good, [tail, 1 - tail], method=method)
    if not np.isfinite([low, high]).all():
        return Span(np.nan, np.nan, "the effects are too noisy: the interval has no finite end")
    return Span(float(low), float(high))


def above(draws: Floats, clusters: int, bound: float) -> float:
    """One-sided p-value of "not above the bound": the level at which the interval's lower end meets it; NaN if none."""
    good = draws[~np.isnan(draws)]
    if clusters < 2 or good.size < (1 - LOST) * draws.size or not np.isfinite(bound):
        return float("nan")
    share = (float((good <= bound + ROUNDING).sum()) + 1) / (good.size + 1)
    if share >= 1:
        return 1.0
    p = float(stats.t.cdf(stats.norm.ppf(share) / (clusters / (clusters - 1)) ** 0.5, clusters - 1))
    # Fewer games than that cannot show more, however they fall (see `enough`).
    return max(p, 2.0**-clusters)


def equivalence(draws: Floats, clusters: int, chance: float, margin: float) -> float:
    """TOST p-value: the larger of the two one-sided tests of being outside chance +- margin."""
    return max(above(draws, clusters, chance - margin), above(-draws, clusters, -(chance + margin)))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values; a missing p-value counts as 1, since its hypothesis was announced."""
    values = np.nan_to_num(np.array(p, dtype=float), nan=1.0)
    adjusted = np.empty(values.size)
    running = 0.0
    for rank, i in enumerate(np.argsort(values, kind="stable")):
        running = max(running, min(1.0, (values.size - rank) * float(values[i])))
        adjusted[i] = running
    return [float(value) for value in adjusted]
