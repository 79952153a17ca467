"""Exact and permutation tests of no effect at a decision point, and exact power, vectorised over points.

Knows: Fisher's test and permutation tests of weighted contrasts, the p-values each point could have attained with their
null distribution (what a discrete-aware false discovery rate needs), exact power and the minimum detectable effect.
Hides: enumeration of tables, ties, Monte Carlo. It knows no records and no multiplicity: arrays in, arrays out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from audit.inference import Array, check_counts, check_level, score_statistic
from envs.core import InputError

Test = Literal["midp", "fisher", "score"]

_TIE = 1e-7  # relative tolerance within which two table probabilities or statistics count as equal


@dataclass(frozen=True, slots=True)
class Support:
    """Attainable p-values of each point with their null distribution, as a ragged array shared between equal points.

    Row r holds values[offsets[r]:offsets[r + 1]], ascending, and cdf, the null P(p-value <= value) there.
    index: the row of each point.
    """

    values: Array
    cdf: Array
    offsets: Array
    index: Array

    def of(self, point: int) -> tuple[Array, Array]:
        """Attainable p-values and their null cdf of one point."""
        row = self.index[point]
        part = slice(self.offsets[row], self.offsets[row + 1])
        return self.values[part], self.cdf[part]


class Tested(NamedTuple):
    """P-values and their supports (None where the p-value comes from Monte Carlo permutations)."""

    p: Array
    support: Support | None


def _support(rows: list[tuple[Array, Array]], index: Array) -> Support:
    offsets = np.concatenate([[0], np.cumsum([len(values) for values, _ in rows])])
    empty = [np.empty(0)]
    values = np.concatenate([v for v, _ in rows] or empty)
    return Support(values, np.concatenate([f for _, f in rows] or empty), offsets, index)


def _tail(extremeness: Array, mass: Array, midp: bool) -> tuple[Array, Array, Array]:
    """P-value of every outcome, then the attainable p-values and their null cdf; larger extremeness = smaller p."""
    order = np.argsort(-extremeness, kind="stable")
    ranked, weight = extremeness[order], mass[order]
    scale = np.maximum(np.abs(ranked[:-1]), np.abs(ranked[1:]))
    new = np.concatenate([[True], ranked[:-1] - ranked[1:] > _TIE * scale + 1e-12])
    level = np.cumsum(new) - 1
    tied = np.bincount(level, weights=weight)
    cdf = np.minimum(np.cumsum(tied), 1.0)
    cdf[-1] = 1.0
    values = np.maximum(cdf - 0.5 * tied, 0.0) if midp else cdf
    p = np.empty_like(mass)
    p[order] = values[level]
    return p, values, cdf


def fisher_test(
    x1: npt.ArrayLike, n1: npt.ArrayLike, x2: npt.ArrayLike, n2: npt.ArrayLike, *, midp: bool = False
) -> Tested:
    """Two-sided exact conditional test of p1 = p2 given the total (Fisher; tables no likelier than the observed).

    midp: counts half of the tables as likely as the observed one; less conservative, no longer exact.
    Inputs broadcast to one axis of points. The support conditions on each point's own total.
    """
    a, n_1 = check_counts(x1, n1, "fisher_test, first sample")
    b, n_2 = check_counts(x2, n2, "fisher_test, second sample")
    a, n_1, b, n_2 = (np.atleast_1d(v).astype(np.int64) for v in np.broadcast_arrays(a, n_1, b, n_2))
    designs, member = np.unique(np.stack([n_1, n_2, a + b], axis=1), axis=0, return_inverse=True)
    member = member.ravel()
    p = np.empty(len(a))
    rows = []
    order = np.argsort(member, kind="stable")
    bounds = np.searchsorted(member[order], np.arange(len(designs) + 1))
    for r, (first, second, total) in enumerate(designs):
        least = max(0, total - second)
        outcomes = np.arange(least, min(total, first) + 1)
        mass = stats.hypergeom.pmf(outcomes, first + second, total, first)
        table_p, values, cdf = _tail(-np.log(np.maximum(mass, 1e-300)) + 1.0, mass, midp)
        points = order[bounds[r] : bounds[r + 1]]
        p[points] = table_p[a[points] - least]
        rows.append((values, cdf))
    return Tested(p, _support(rows, member))


def permutation_test(
    successes: npt.ArrayLike,
    n: npt.ArrayLike,
    weights: npt.ArrayLike,
    *,
    rng: np.random.Generator | None = None,
    resamples: int = 9999,
    max_tables: int = 100_000,
    with_support: bool = False,
) -> Tested:
    """Permutation test of no effect by |weighted contrast| of arms, won/lost outcomes.

    successes, n: (points, k); weights: (k,) or (points, k). Exact under equal rates in all arms: given the total,
    counts are multivariate hypergeometric, enumerated where that takes at most `max_tables` count vectors and drawn
    `resamples` times from `rng` otherwise (then p >= 1/(resamples + 1)). The contrast is not studentised: with a few
    rollouts an arm that cure is worse (measured at 5 arms of 8, alternatives at .1, .2, .8, .9 and only the contrast
    null: 10 % rejections at .05 studentised, under 5 % plain, because differing alternatives vary less than one rate).
    with_support: also return the attainable p-values; needs every point enumerated.
    """
    x, size = (np.atleast_2d(v) for v in check_counts(successes, n, "permutation_test"))
    c = np.broadcast_to(np.asarray(weights, dtype=float), x.shape)
    designs, member = np.unique(
        np.column_stack([size, x.sum(axis=1), c]), axis=0, return_inverse=True
    )  # one row for each distinct (sizes, total, weights)
    member = member.ravel()
    k = x.shape[1]
    p = np.empty(len(x))
    rows = []
    tables: tuple[Array, Array] | None = None
    for r, design in enumerate(designs):
        sizes, total, coefficients = design[:k].astype(np.int64), int(design[k]), design[k + 1 :]
        if r == 0 or np.any(designs[r - 1, : k + 1] != design[: k + 1]):
            tables = _count_vectors(sizes, total, max_tables)
            exact = tables is not None
            if tables is None:
                if rng is None or with_support:
                    raise InputError(
                        f"permutation_test: {sizes.tolist()} rollouts have more than {max_tables} count vectors; "
                        "pass a numpy Generator for Monte Carlo permutations and leave with_support off."
                    )
                drawn = rng.multivariate_hypergeometric(sizes, total, size=resamples, method="marginals")
                tables = drawn.astype(float), np.full(resamples, 1.0 / (resamples + 1))
        assert tables is not None
        vectors, mass = tables
        points = np.flatnonzero(member == r)
        scaled = coefficients / sizes
        null, observed = np.abs(vectors @ scaled), np.abs(x[points] @ scaled)
        order = np.argsort(null)
        tail = np.concatenate([np.cumsum(mass[order][::-1])[::-1], [0.0]])
        start = np.searchsorted(null[order], observed * (1 - _TIE) - 1e-12, side="left")
        p[points] = np.minimum(tail[start] + (0.0 if exact else 1.0 / (resamples + 1)), 1.0)
        if with_support:
            rows.append(_tail(null, mass, midp=False)[1:])
    return Tested(p, _support(rows, member) if with_support else None)


def _count_vectors(sizes: Array, total: int, limit: int) -> tuple[Array, Array] | None:
    """All count vectors with the given total and their null mass; None where more than `limit` candidates."""
    last = int(np.argmax(sizes))
    free = np.delete(sizes, last)
    ranges = [np.arange(min(int(s), total) + 1) for s in free]
    if np.prod([float(len(part)) for part in ranges]) > limit:
        return None
    grid = np.stack([g.ravel() for g in np.meshgrid(*ranges, indexing="ij")], axis=1)
    rest = total - grid.sum(axis=1)
    fits = (rest >= 0) & (rest <= sizes[last])
    vectors = np.insert(grid[fits], last, rest[fits], axis=1).astype(float)
    ways = special.gammaln(sizes + 1.0) - special.gammaln(vectors + 1) - special.gammaln(sizes - vectors + 1)
    log = ways.sum(axis=1)
    mass = np.exp(log - log.max())
    return vectors, mass / mass.sum()


def permutation_test_scores(
    outcomes: npt.ArrayLike,
    arm: npt.ArrayLike,
    weights: npt.ArrayLike,
    rng: np.random.Generator,
    *,
    strata: npt.ArrayLike | None = None,
    resamples: int = 9999,
) -> Array:
    """Monte Carlo permutation test of no effect for any real outcomes; returns p (points,), each >= 1/(resamples+1).

    outcomes: (points, N); arm: (N,) integers 0..k-1, the same layout at every point; weights: (k,) or (points, k).
    strata: (N,) labels; rollouts are exchanged within a stratum only (rounds, batches, shared random numbers).
    All points share the permutations: each p-value is valid, and they are independent given the permutations.
    Statistic as in `permutation_test`.
    """
    y, label = np.atleast_2d(np.asarray(outcomes, dtype=float)), np.asarray(arm, dtype=np.int64)
    if label.shape != y.shape[1:] or not np.all(np.isfinite(y)):
        raise InputError("permutation_test_scores: outcomes must be finite (points, N) and arm (N,) with the same N.")
    sizes = np.bincount(label)
    c = np.broadcast_to(np.asarray(weights, dtype=float), (len(y), len(sizes)))
    if np.any(sizes == 0):
        raise InputError("permutation_test_scores: arms must be numbered 0..k-1 with at least one rollout each.")
    groups = np.zeros(len(label)) if strata is None else np.asarray(strata)
    labels = np.tile(label, (resamples + 1, 1))  # row 0 stays as observed
    for group in np.unique(groups):
        columns = np.flatnonzero(groups == group)
        labels[1:, columns] = rng.permuted(labels[1:, columns], axis=1)
    y = y - y.mean(axis=1, keepdims=True)
    p = np.empty(len(y))
    for block in np.array_split(np.arange(len(y)), max(1, len(y) * resamples * len(sizes) // 20_000_000)):
        part = y[block]
        sums = np.stack([part @ (labels == i).T.astype(float) for i in range(len(sizes))], axis=-1)
        t = np.abs((c[block][:, None, :] * sums / sizes).sum(axis=-1))
        p[block] = (t >= t[:, :1] * (1 - _TIE) - 1e-12).sum(axis=1) / (resamples + 1)
    return p


# --- power --------------------------------------------------------------------------------------------------------


def rejection_region(n1: int, n2: int, alpha: float = 0.05, test: Test = "midp") -> Array:
    """(n1 + 1, n2 + 1) booleans: which outcomes the two-sided test rejects at `alpha`."""
    check_level(alpha)
    a, b = np.meshgrid(np.arange(n1 + 1), np.arange(n2 + 1), indexing="ij")
    if test == "score":
        return np.asarray(np.abs(score_statistic(a, n1, b, n2)) >= stats.norm.isf(alpha / 2))
    if test not in ("midp", "fisher"):
        raise InputError(f"unknown test {test!r}; use 'midp', 'fisher' or 'score'.")
    p = fisher_test(a.ravel(), n1, b.ravel(), n2, midp=test == "midp").p
    return np.asarray(p.reshape(a.shape) <= alpha * (1 + _TIE))


def exact_power(p1: npt.ArrayLike, p2: npt.ArrayLike, region: Array) -> Array:
    """Exact binomial probability of a rejection region at true rates p1, p2 (broadcast)."""
    n1, n2 = region.shape[0] - 1, region.shape[1] - 1
    first, second = np.broadcast_arrays(np.asarray(p1, dtype=float), np.asarray(p2, dtype=float))
    mass1 = stats.binom.pmf(np.arange(n1 + 1), n1, first[..., None])
    mass2 = stats.binom.pmf(np.arange(n2 + 1), n2, second[..., None])
    return np.asarray(np.einsum("...i,ij,...j->...", mass1, region.astype(float), mass2, optimize=True))


def minimum_detectable_effect(
    p: npt.ArrayLike,
    n_factual: int,
    n_alternative: int,
    *,
    alpha: float = 0.05,
    power: float = 0.8,
    test: Test = "midp",
) -> Array:
    """Least |tau| found with the wanted exact power when the two rates are p + tau/2 and p - tau/2.

    The rates straddle p (at p = .5 an effect above .5 could not exist otherwise); the worse of both directions
    counts. n_alternative is the pooled number of alternative rollouts. NaN where no effect that p admits is enough:
    with so few rollouts nothing is detectable, which is not the same as a large minimum.
    """
    rates = np.asarray(p, dtype=float)
    if not np.all((rates > 0) & (rates < 1)):
        raise InputError("minimum_detectable_effect: p must lie strictly between 0 and 1.")
    check_level(power, "power")
    region = rejection_region(n_factual, n_alternative, alpha, test)

    def reached(tau: Array) -> Array:
        up, down = np.clip(rates + tau / 2, 0, 1), np.clip(rates - tau / 2, 0, 1)
        return np.minimum(exact_power(up, down, region), exact_power(down, up, region)) >= power

    low, high = np.zeros_like(rates), 2 * np.minimum(rates, 1 - rates)
    possible = reached(high)
    for _ in range(30):
        middle = (low + high) / 2
        enough = reached(middle)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(possible, high, np.nan)
