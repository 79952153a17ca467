"""Intervals for shares and means of points that come in clusters, and the mass of actions never sampled.

Knows: that points of one trajectory (or task) are alike, so that the cluster, not the point, is what was sampled;
how to turn that into a small-sample interval, a cluster bootstrap and a table by group; how much probability a
sample of actions leaves unseen. Hides: the CR2 correction, Satterthwaite's degrees of freedom, the logit scale for
shares near 0 and 1, the resampling by counts, the hold-out argument behind the unseen-mass bound.

An interval that cannot be had is missing (NaN ends) with a reason; it is never an interval of width zero.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from envs.core import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOO_FEW_CLUSTERS = "fewer than 2 clusters: no variation between clusters can be measured"
NO_VARIATION = "all values are equal: the data say nothing about how much they vary"
NO_POINTS = "no points"


@dataclass(frozen=True, slots=True)
class ClusterInterval:
    """An estimate with its interval, or with the reason why there is none.

    estimate, low, high: NaN where missing. level: nominal coverage. n_points, n_clusters: what it rests on.
    df: degrees of freedom of the t quantile (NaN where no t quantile was used). method: how it was computed.
    reason: empty when the interval is there.
    """

    estimate: float
    low: float
    high: float
    level: float
    n_points: int
    n_clusters: int
    df: float = float("nan")
    method: str = ""
    reason: str = ""

    def to_dict(self) -> dict[str, float | int | str]:
        """The fields as one row of a table."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def cluster_mean(
    values: ArrayLike, clusters: Sequence[Hashable] | NDArray[Any], *, level: float = 0.95
) -> ClusterInterval:
    """Mean over points with a CR2 t interval; the clusters are the sampling unit.

    values: (points,) finite numbers or NaN (a missing point is left out, with its cluster if nothing else remains).
    clusters: (points,) labels. The mean weighs points equally, so a long trajectory counts more than a short one.

    The standard error is the bias-reduced linearisation CR2 (Bell and McCaffrey 2002; exact for independent points),
    the degrees of freedom are Satterthwaite's under a random-effect working model with the ANOVA estimate of the
    intra-cluster correlation (Imbens and Kolesar 2016, eq. 12 ff.). With clusters of one size they are G - 1.

    Nominal for roughly symmetric cluster means; for a yes/no value use `cluster_share`.
    Raises InputError on unequal lengths, infinite values or a level outside (0, 1).
    """
    _check_level(level)
    sums, sizes, sumsq = _by_cluster(values, clusters)
    n, g = int(sizes.sum()), sizes.size
    if n == 0:
        return _missing(float("nan"), level, 0, 0, NO_POINTS)
    mean = float(sums.sum() / n)
    if g < 2:
        return _missing(mean, level, n, g, TOO_FEW_CLUSTERS)
    if float(np.maximum(sumsq - sums**2 / sizes, 0).sum() + (sizes * (sums / sizes - mean) ** 2).sum()) <= 1e-24 * max(
        1.0, mean * mean
    ):
        return _missing(mean, level, n, g, NO_VARIATION)
    variance, df = _cr2(sums, sizes, _icc(sums, sizes, sumsq))
    if variance <= 0:
        return _missing(mean, level, n, g, "cluster means are all equal: no variation between clusters to measure")
    half = float(stats.t.ppf(0.5 + level / 2, df)) * variance**0.5
    return ClusterInterval(mean, mean - half, mean + half, level, n, g, df, "CR2 t, Satterthwaite df")


def cluster_share(
    hits: ArrayLike, clusters: Sequence[Hashable] | NDArray[Any], *, level: float = 0.95
) -> ClusterInterval:
    """Share of points that are hits, with an interval inside [0, 1] that never collapses at 0 or 1.

    hits: (points,) booleans, 0/1 or NaN (missing, left out). clusters: (points,) labels. Points weigh equally.

    Scale: logit, t quantile with Satterthwaite's df. Variance: the larger of CR2 and the design-effect variance
    p(1-p)(1 + (n* - 1) ICC)/n (n* = size-weighted mean cluster size, ICC by ANOVA, not below 0), because CR2 alone is
    noisy and biased low exactly when hits are rare.
    With no hit at all (or only hits) no variance can be estimated. Then the one-cluster-one-observation bound of
    Clopper and Pearson is used: a cluster with mean share p has no hit with probability at most 1 - p, however its
    points depend on each other, so G clusters without a hit have probability at most (1 - p)^G.

    Simulated coverage (nominal .95, beta-binomial clusters of 15 points or of 3-30, see tests): .93-.98 with 20 or 50
    clusters, ICC 0-.3 and shares .05-.5, except share .05 with ICC .3: .91-.94 with 20 clusters. With share .02 and
    ICC .3 it is .89-.92 with 50 clusters: what a few clusters hold nobody can see in the others.
    Raises InputError on values other than 0, 1 and NaN, unequal lengths or a level outside (0, 1).
    """
    _check_level(level)
    x = np.asarray(hits, dtype=float)
    if bool(np.any(~np.isnan(x) & (x != 0) & (x != 1))):
        raise InputError("cluster_share: hits must be True/False, 0/1 or missing; use cluster_mean for other values.")
    sums, sizes, sumsq = _by_cluster(x, clusters)
    n, g = int(sizes.sum()), sizes.size
    if n == 0:
        return _missing(float("nan"), level, 0, 0, NO_POINTS)
    p = float(sums.sum() / n)
    if g < 2:
        return _missing(p, level, n, g, TOO_FEW_CLUSTERS)
    if p in (0.0, 1.0):
        edge = 1 - ((1 - level) / 2) ** (1 / g)
        low, high = (0.0, edge) if p == 0 else (1 - edge, 1.0)
        return ClusterInterval(p, low, high, level, n, g, method="Clopper-Pearson, one observation a cluster")
    icc = _icc(sums, sizes, sumsq)
    variance, df = _cr2(sums, sizes, icc)
    design = 1 + (float((sizes**2).sum()) / n - 1) * icc
    se = max(variance, p * (1 - p) * design / n) ** 0.5 / (p * (1 - p))
    half = float(stats.t.ppf(0.5 + level / 2, df)) * se
    centre = np.log(p / (1 - p))
    low, high = (float(1 / (1 + np.exp(-(centre + s * half)))) for s in (-1, 1))
    return ClusterInterval(p, low, high, level, n, g, df, "logit t, CR2 or design effect, Satterthwaite df")


def cluster_bootstrap(
    sums: ArrayLike,
    statistic: Callable[[Floats], Floats],
    *,
    draws: int = 10_000,
    seed: int = 0,
) -> Floats:
    """Bootstrap replicates of a statistic of cluster totals: (draws,) or (draws, ...), as `statistic` returns.

    sums: (clusters, k) totals of each cluster (its size among them where the statistic needs it).
    statistic: takes (b, k) totals of b resamples and returns (b, ...) values; called on blocks.
    Whole clusters are drawn with replacement; a resample is a vector of counts, so its totals are one matrix product
    and no data are copied (10,000 draws over 1,000 clusters: about .2 s). The same seed gives the same draws.
    Raises InputError with fewer than 2 clusters or draws < 1.
    """
    table = np.asarray(sums, dtype=float)
    if table.ndim != 2 or table.shape[0] < 2:
        raise InputError(f"cluster_bootstrap: sums must be (clusters, k) with 2 clusters or more, got {table.shape}.")
    if draws < 1:
        raise InputError(f"cluster_bootstrap: draws must be at least 1, got {draws}.")
    g = table.shape[0]
    rng = np.random.Generator(np.random.Philox(seed))
    block = max(1, min(draws, 2_000_000 // g))
    out = []
    for start in range(0, draws, block):
        b = min(block, draws - start)
        picks = rng.integers(0, g, (b, g)) + np.arange(b)[:, None] * g
        counts = np.bincount(picks.ravel(), minlength=b * g).reshape(b, g)
        out.append(np.asarray(statistic(counts @ table), dtype=float))
    return np.concatenate(out)


def bootstrap_interval(
    sums: ArrayLike,
    statistic: Callable[[Floats], Floats],
    *,
    n_points: int,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> ClusterInterval:
    """Percentile interval of a scalar statistic of cluster totals by `cluster_bootstrap`.

    Missing with a reason with fewer than 2 clusters, or when the statistic is undefined (not finite) in the data or in
    more than 5 % of the resamples: an interval from the rest would describe only the resamples that worked.
    """
    _check_level(level)
    table = np.asarray(sums, dtype=float)
    g = table.shape[0]
    estimate = float(np.asarray(statistic(table.sum(0, keepdims=True)), dtype=float).ravel()[0])
    if not np.isfinite(estimate):
        return _missing(float("nan"), level, n_points, g, "the statistic is undefined in the data")
    if g < 2:
        return _missing(estimate, level, n_points, g, TOO_FEW_CLUSTERS)
    values = cluster_bootstrap(table, statistic, draws=draws, seed=seed)
    good = values[np.isfinite(values)]
    if good.size < 0.95 * values.size:
        lost = 100 * (1 - good.size / values.size)
        return _missing(estimate, level, n_points, g, f"the statistic is undefined in {lost:.0f} % of the resamples")
    low, high = np.quantile(good, [(1 - level) / 2, (1 + level) / 2])
    return ClusterInterval(
        estimate, float(low), float(high), level, n_points, g, method=f"cluster bootstrap, {draws} draws"
    )


def cluster_totals(columns: ArrayLike, clusters: Sequence[Hashable] | NDArray[Any]) -> Floats:
    """Totals of (points, k) columns within clusters: (clusters, k), clusters in order of first appearance."""
    table = np.asarray(columns, dtype=float)
    code = _codes(clusters, table.shape[0])
    out = np.zeros((int(code.max()) + 1 if code.size else 0, table.shape[1]))
    np.add.at(out, code, table)
    return out


def share_table(
    frame: pd.DataFrame,
    value: str,
    *,
    cluster: str,
    by: Sequence[str] = (),
    level: float = 0.95,
) -> pd.DataFrame:
    """Share of points by group, each with its cluster interval.

    frame: one row a point. value: a yes/no column, or a column of categories (point states), of which every one that
    occurs anywhere gets a row in every group, with share 0 where it is absent. cluster: the column of trajectories or
    tasks. by: grouping columns (policy, task type, step); none gives one group. A missing group label forms its own
    group.
    Returns columns: by..., [category,] n_points, n_clusters, share, low, high, level, reason; groups sorted.
    Raises InputError on a column that is not there.
    """
    _check_columns(frame, [value, cluster, *by])
    column = frame[value]
    known_values = column.dropna()
    yes_no = pd.api.types.is_numeric_dtype(column) or bool(known_values.map(lambda v: isinstance(v, bool)).all())
    categories: list[Any] = [] if yes_no else sorted(column.dropna().unique().tolist(), key=str)

    def rows(part: pd.DataFrame) -> list[dict[str, Any]]:
        labels = part[cluster].to_numpy()
        if yes_no:
            return [_share_row(part[value].to_numpy(dtype=float, na_value=np.nan), labels, level)]
        known = part[value].notna().to_numpy()
        result = []
        for category in categories:
            hits = np.where(known, (part[value] == category).to_numpy(dtype=float, na_value=np.nan), np.nan)
            result.append({"category": category, **_share_row(hits, labels, level)})
        return result

    return _grouped(frame, by, rows)


def mean_table(
    frame: pd.DataFrame,
    value: str,
    *,
    cluster: str,
    by: Sequence[str] = (),
    level: float = 0.95,
) -> pd.DataFrame:
    """Mean of a numeric column by group with its cluster interval; columns as `share_table`, `mean` for `share`."""
    _check_columns(frame, [value, cluster, *by])

    def rows(part: pd.DataFrame) -> list[dict[str, Any]]:
        values = part[value].to_numpy(dtype=float, na_value=np.nan)
        return [_row(cluster_mean(values, part[cluster].to_numpy(), level=level), "mean")]

    return _grouped(frame, by, rows)


@dataclass(frozen=True, slots=True)
class UnseenMass:
    """Probability of the actions that a sample of n draws did not contain.

    estimate: exact (`exact` true) or Good-Turing, singletons / n; NaN where there is no draw.
    upper: one-sided upper bound at `level`; equals the estimate when exact. n, distinct, singletons: of the sample.
    reason: why something is missing, or that the estimate is known to be poor.
    """

    estimate: float
    upper: float
    level: float
    n: int
    distinct: int
    singletons: int
    exact: bool
    reason: str = ""


def unseen_mass(
    draws: Sequence[Hashable],
    *,
    probabilities: dict[Hashable, float] | None = None,
    level: float = 0.95,
    held_out: int | None = None,
) -> UnseenMass:
    """Mass of the actions absent from `draws`, which are independent draws from one policy state, in drawing order.

    probabilities: action -> pi(action | h) where the policy exposes them; then the mass is exact. Actions drawn but
    not listed, or probabilities that do not sum to 1 within 1e-6, raise InputError.

    Otherwise the estimate is Good-Turing's N1/n (Good 1953). It has bias at most 1/n upwards and a standard error of
    about sqrt(N1 + 2 N2)/n, so it is rough at the sizes used here, and 0 with no singleton does not mean that nothing
    is unseen. The bound is exact: the last `held_out` draws (half of them by default, fixed beforehand, never chosen by
    looking) fall outside the actions of the first draws with probability equal to the mass unseen by these, which the
    whole sample can only lower; Clopper and Pearson's one-sided bound for that binomial therefore holds at every n and
    for every distribution. The bound of McAllester and Schapire (2000), N1/n + (2 sqrt 2 + sqrt 3)
    sqrt(log(3/delta)/n), exceeds 1 for every n below 86 at level .95, which is why it is not used.

    The order matters to the bound: where only counts are known use `unseen_mass_of_counts`.
    """
    _check_level(level)
    labels = list(draws)
    counts: dict[Hashable, int] = {}
    for action in labels:
        counts[action] = counts.get(action, 0) + 1
    n, distinct, singles = len(labels), len(counts), sum(c == 1 for c in counts.values())
    if probabilities is not None:
        total = float(sum(probabilities.values()))
        if abs(total - 1) > 1e-6 or any(p < 0 for p in probabilities.values()):
            raise InputError(f"unseen_mass: probabilities must be >= 0 and sum to 1, they sum to {total:.6g}.")
        stray = [a for a in counts if a not in probabilities]
        if stray:
            raise InputError(f"unseen_mass: action {stray[0]!r} was drawn but has no probability; list every action.")
        mass = float(sum(p for a, p in probabilities.items() if a not in counts))
        return UnseenMass(mass, mass, level, n, distinct, singles, True)
    if n == 0:
        return UnseenMass(float("nan"), 1.0, level, 0, 0, 0, False, "no draws")
    if held_out is None:
        held_out = n - (n + 1) // 2
    if not 0 <= held_out < n:
        raise InputError(f"unseen_mass: held_out must be between 0 and {n - 1} for {n} draws, got {held_out}.")
    if held_out == 0:
        return UnseenMass(singles / n, 1.0, level, n, distinct, singles, False, "no draw held out: the bound is 1")
    seen = set(labels[: n - held_out])
    new = sum(a not in seen for a in labels[n - held_out :])
    upper = 1.0 if new == held_out else float(stats.beta.ppf(level, new + 1, held_out - new))
    return UnseenMass(singles / n, upper, level, n, distinct, singles, False)


def unseen_mass_of_counts(counts: Sequence[int] | Ints, *, level: float = 0.95, seed: int = 0) -> UnseenMass:
    """`unseen_mass` from how often each distinct action was drawn, the order being lost.

    Independent draws given their counts come in uniformly random order, so an order drawn from `seed` (fixed
    beforehand) keeps the bound exact; another seed gives another, equally valid bound.
    """
    table = np.asarray(counts)
    if table.ndim != 1 or (table.size and (not np.issubdtype(table.dtype, np.integer) or int(table.min()) < 0)):
        raise InputError("unseen_mass_of_counts: counts must be a flat list of whole numbers >= 0.")
    labels = np.repeat(np.arange(table.size), table.astype(np.int64))
    order = np.random.Generator(np.random.Philox(seed)).permutation(labels)
    return unseen_mass([int(a) for a in order], level=level)


def _cr2(sums: Floats, sizes: Floats, icc: float) -> tuple[float, float]:
    """CR2 variance of the mean and Satterthwaite df under working correlation `icc`; O(clusters).

    For a mean, CR2 divides the squared residual total of cluster g by 1 - h_g with h_g = n_g/n. These totals are linear
    in the data with covariance M = diag(d) - u w' - w u' + S u u' under the working model; df = (tr M)^2 / tr(M^2).
    """
    n = float(sizes.sum())
    h = sizes / n
    mean = float(sums.sum()) / n
    variance = float((((sums - sizes * mean) ** 2) / (1 - h)).sum()) / n**2
    s = sizes * (1 - icc) + icc * sizes**2
    b = 1 / np.sqrt(1 - h)
    u, w, d, total = b * h, b * s, b * b * s, float(s.sum())
    trace = float((d - 2 * u * w + total * u * u).sum())
    uu, ww, uw = float(u @ u), float(w @ w), float(u @ w)
    square = float(d @ d) + 2 * uu * ww + 2 * uw**2 + (total * uu) ** 2
    square += -4 * float((d * u * w).sum()) + 2 * total * float((d * u * u).sum()) - 4 * total * uu * uw
    return variance, max(1.0, trace**2 / square)


def _icc(sums: Floats, sizes: Floats, sumsq: Floats) -> float:
    """ANOVA estimate of the intra-cluster correlation, clipped to [0, 1]; 1 where no cluster has two points."""
    n, g = float(sizes.sum()), sizes.size
    if n <= g:
        return 1.0
    mean = float(sums.sum()) / n
    within = float(np.maximum(sumsq - sums**2 / sizes, 0).sum()) / (n - g)
    between = float((sizes * (sums / sizes - mean) ** 2).sum()) / (g - 1)
    n0 = (n - float((sizes**2).sum()) / n) / (g - 1)
    spread = between + (n0 - 1) * within
    return float(np.clip((between - within) / spread, 0, 1)) if spread > 0 else 0.0


def _by_cluster(values: ArrayLike, clusters: Sequence[Hashable] | NDArray[Any]) -> tuple[Floats, Floats, Floats]:
    x = np.asarray(values, dtype=float)
    if x.ndim != 1:
        raise InputError(f"cluster interval: values must be one number a point, got an array of shape {x.shape}.")
    if bool(np.isinf(x).any()):
        raise InputError("cluster interval: values must be finite or NaN; an infinite value was given.")
    code = _codes(clusters, x.size)
    there = ~np.isnan(x)
    x, code = x[there], code[there]
    if not x.size:
        empty = np.zeros(0)
        return empty, empty, empty
    sizes, sums, sumsq = (np.bincount(code, weights=w).astype(np.float64) for w in (np.ones_like(x), x, x * x))
    kept = sizes > 0
    return sums[kept], sizes[kept], sumsq[kept]


def _codes(clusters: Sequence[Hashable] | NDArray[Any], n: int) -> Ints:
    labels = np.asarray(pd.Series(list(clusters), dtype=object))
    if labels.size != n:
        raise InputError(f"cluster interval: {n} points but {labels.size} cluster labels; give one label a point.")
    code = pd.factorize(labels)[0].astype(np.int64)
    if bool((code < 0).any()):
        raise InputError("cluster interval: a cluster label is missing; every point needs its trajectory or task.")
    return code


def _missing(estimate: float, level: float, n: int, g: int, reason: str) -> ClusterInterval:
    return ClusterInterval(estimate, float("nan"), float("nan"), level, n, g, reason=reason)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1 (for example 0.95), got {level}.")


def _check_columns(frame: pd.DataFrame, names: Sequence[str]) -> None:
    absent = [name for name in names if name not in frame.columns]
    if absent:
        raise InputError(f"table by group: no column {absent[0]!r}; the frame has {sorted(map(str, frame.columns))}.")


def _row(interval: ClusterInterval, name: str) -> dict[str, Any]:
    return {
        "n_points": interval.n_points,
        "n_clusters": interval.n_clusters,
        name: interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "level": interval.level,
        "reason": interval.reason,
    }


def _share_row(hits: Floats, labels: NDArray[Any], level: float) -> dict[str, Any]:
    return _row(cluster_share(hits, labels, level=level), "share")


def _grouped(
    frame: pd.DataFrame, by: Sequence[str], rows: Callable[[pd.DataFrame], list[dict[str, Any]]]
) -> pd.DataFrame:
    if not by:
        return pd.DataFrame(rows(frame))
    out: list[dict[str, Any]] = []
    for key, part in frame.groupby(list(by), sort=True, dropna=False, observed=True):
        labels = dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True))
        out += [{**labels, **row} for row in rows(part)]
    return pd.DataFrame(out)
