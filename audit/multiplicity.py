"""Many decision points at once: false discoveries, and the share of points with an effect.

Knows: p-values of exact tests take few values, and which values differs from point to point; an estimate that is not
zero is mostly noise. Hides: the sums over supports behind the discrete step-up and step-down procedures, the count of
outcomes that give exactly zero, the mixture fit.

What controls what. Replay branches every point with random streams of its own, so that, given the trajectories (they
fix the points, their alternatives and the truth at each), p-values of different points are independent although the
truths within a trajectory are alike: the false discovery rate concerns the tests, given the truths. That holds as
long as points share no rollout (common random numbers off, no factual arm borrowed from the neighbouring point) and
no point's number of rollouts depends on another point's results. Where it fails, use `dby` (fixed designs, shared
randomness) or `by`. Independence is a fact about the rollouts. Intervals of shares and of reliability, which speak
about trajectories not yet seen, are by cluster (see `audit.clusters`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.special import xlog1py, xlogy

from audit.clusters import ClusterInterval, cluster_bootstrap, cluster_mean, cluster_share
from audit.reliability import check_counts
from envs.core import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Clusters = Sequence[Hashable] | NDArray[Any]

CONTROL = {
    "bh": "FDR <= alpha for independent or PRDS p-values (Benjamini and Yekutieli 2001)",
    "by": "FDR <= alpha under any dependence (Benjamini and Yekutieli 2001)",
    "midp": "no guarantee: mid-p values are valid on average only (Heller and Gur 2011); control by simulation",
    "hsu": "FDR <= alpha for p-values independent given their supports (Doehler, Durand and Roquain 2018)",
    "hsd": "FDR <= alpha for p-values independent given their supports (Doehler, Durand and Roquain 2018)",
    "dby": "FDR <= alpha under any dependence of the p-values given all supports (Doehler 2018, discrete BY)",
}
_QUANTUM, _SHIFT = 1e-9, 0.377  # values closer than this are one value; the shift keeps simple fractions off the edges


@dataclass(frozen=True, slots=True)
class Discoveries:
    """q-values of many points. q, rejected: (points,), NaN and False where the p-value was missing.

    rejected is q <= alpha. tests: how many p-values counted. control: what the method guarantees, and when.
    """

    q: Floats
    rejected: Bools
    method: str
    alpha: float
    tests: int
    control: str


def discoveries(
    p: ArrayLike,
    supports: Sequence[ArrayLike] | None = None,
    *,
    method: str = "hsu",
    alpha: float = 0.05,
    cdfs: Sequence[ArrayLike] | None = None,
) -> Discoveries:
    """Adjusted p-values (q-values) that control the false discovery rate over points; `CONTROL` says what holds when.

    p: (points,) p-values, NaN for undefined points (left out of the count).
    supports: for each point its attainable p-values, ascending; points may share one array (faster).
    cdfs: for each point F_i = P(P <= support value) under no effect; by default the support itself, as for every
    p-value that is the exact probability of outcomes at least as extreme. A test that cannot reach t adds nothing at
    t. `hsu`, `hsd` and `dby` rest on F_i alone, so they stay valid for p-values that are not (mid-p with its CDF).

    Methods, with S(t; u) = sum over points of F_i(t) / (1 - F_i(u)), p_(1) <= ... <= p_(m):
    - `bh`, `by`: Benjamini-Hochberg, Benjamini-Yekutieli on p alone. `midp`: BH on the mid-p values.
    - `hsd`: q_(k) = max over j <= k of S(p_(j); p_(j)) / j; the heterogeneous discrete step-down.
    - `hsu`: q_(k) = min over j >= k with p_(j) <= u of S(p_(j); u) / j, u = the largest attainable t with
      S(t; t) <= alpha m. The paper's critical values move with alpha in both directions, so an adjusted p-value of the
      step-up procedure does not exist; here u stays at the declared `alpha`. Then q <= alpha is exactly HSU at `alpha`,
      and q <= a keeps FDR <= a at every other a (conservative). q = 1 above u: never rejected by this anchor.
    - `dby`: q_(k) = min over j >= k of S(p_(j); -inf) (1 + 1/2 + ... + 1/m) / j.

    Cost: sorting all distinct supports once; 10,000 points sharing 40 supports take about .05 s.
    Raises InputError on an unknown method, p outside [0, 1] or not in its support, supports that are missing where
    needed, unsorted, or with a CDF that does not ascend to 1; and for `bh` and `by` on given supports with
    P(P <= t) > t, since these need valid p-values.
    """
    if method not in CONTROL:
        raise InputError(f"discoveries: unknown method {method!r}; choose one of {', '.join(CONTROL)}.")
    if not 0 < alpha < 1:
        raise InputError(f"discoveries: alpha must lie between 0 and 1, got {alpha}.")
    values = np.asarray(p, dtype=float)
    there = ~np.isnan(values)
    if values.ndim != 1 or bool(np.any((values[there] < 0) | (values[there] > 1))):
        raise InputError("discoveries: p must be a flat array of numbers in [0, 1] or NaN.")
    q = np.full(values.size, np.nan)
    m = int(there.sum())
    if m:
        tests = None if supports is None else _Tests(values, supports, cdfs, np.flatnonzero(there))
        if method in ("bh", "by"):
            if tests is not None and not tests.valid:
                raise InputError(
                    f"discoveries: {method} needs P(P <= t) <= t, the CDFs given exceed it; use hsd or dby."
                )
            q[there] = stats.false_discovery_control(values[there], method="bh" if method == "bh" else "by")
        elif tests is None:
            raise InputError(f"discoveries: {method} needs the attainable p-values of each point (supports).")
        elif method == "midp":
            low, high = tests.below_and_at()
            q[there] = stats.false_discovery_control((low + high) / 2, method="bh")
        else:
            q[there] = tests.adjust(method, alpha)
    return Discoveries(q, np.where(there, q, np.inf) <= alpha, method, alpha, m, CONTROL[method])


class _Tests:
    """Discrete tests; distinct supports laid end to end, `level` numbers the distinct attainable p-values of all."""

    def __init__(self, p: Floats, supports: Sequence[ArrayLike], cdfs: Sequence[ArrayLike] | None, which: Ints) -> None:
        if len(supports) != p.size or (cdfs is not None and len(cdfs) != p.size):
            raise InputError("exact tests: this needs one support (and CDF, if given) for each p-value.")
        by_identity: dict[tuple[int, int], tuple[int, object, object]] = {}  # the objects are held: ids stay theirs
        by_content: dict[bytes, int] = {}
        values: list[Floats] = []
        functions: list[Floats] = []
        code = np.zeros(which.size, dtype=np.int64)
        for row, i in enumerate(which.tolist()):
            given, given_cdf = supports[i], supports[i] if cdfs is None else cdfs[i]
            ident = (id(given), id(given_cdf))
            if ident not in by_identity:
                support, cdf = np.asarray(given, dtype=float), np.asarray(given_cdf, dtype=float)
                _check_support(support, cdf, i)
                content = support.tobytes() + b"|" + cdf.tobytes()
                if content not in by_content:
                    by_content[content] = len(values)
                    values.append(support)
                    functions.append(cdf)
                by_identity[ident] = (by_content[content], given, given_cdf)
            code[row] = by_identity[ident][0]
        sizes = np.array([v.size for v in values])
        self.start = np.cumsum(sizes) - sizes
        self.cdf, everything = np.concatenate(functions), np.concatenate(values)
        self.count = np.repeat(np.bincount(code, minlength=sizes.size), sizes)
        self.sizes = sizes
        self.valid = bool(np.all(self.cdf <= everything * (1 + 1e-7)))
        order = np.argsort(everything, kind="stable")
        ranked = everything[order]
        # The same probability computed for two tables may differ in the last digits; it is one level all the same.
        fresh = np.concatenate([[True], ranked[1:] > ranked[:-1] * (1 + 1e-9)])
        self.level = np.empty(everything.size, dtype=np.int64)
        self.level[order] = np.cumsum(fresh) - 1
        self.at = np.zeros(which.size, dtype=np.int64)  # where each p-value lies in the supports laid end to end
        grouped = np.argsort(code, kind="stable")
        for mine in np.split(grouped, np.flatnonzero(np.diff(code[grouped])) + 1):
            u = int(code[mine[0]])
            self.at[mine] = self.start[u] + _locate(p[which[mine]], values[u], which[mine])

    def below_and_at(self) -> tuple[Floats, Floats]:
        """P(P < p) and P(P <= p) of each test under no effect."""
        return self._previous(self.cdf)[self.at], self.cdf[self.at]

    def adjust(self, method: str, alpha: float) -> Floats:
        m = self.at.size
        level = self.level[self.at]
        order = np.argsort(level, kind="stable")
        mine, rank = level[order], np.arange(1, m + 1)
        with np.errstate(divide="ignore"):
            odds = np.where(self.cdf < 1 - 1e-12, self.cdf / (1 - self.cdf), np.inf)
        if method == "hsd":
            ranked = np.maximum.accumulate(self._total(odds)[mine] / rank)
        elif method == "dby":
            ranked = _step_up(self._total(self.cdf)[mine] * float((1 / rank).sum()) / rank)
        else:
            anchor = int((self._total(odds) <= alpha * m * (1 + 1e-12)).sum()) - 1
            reached = np.maximum.reduceat(np.where(self.level <= anchor, self.cdf, 0.0), self.start)
            total = self._total(self.cdf / (1 - np.repeat(reached, self.sizes)))
            ranked = _step_up(np.where(mine <= anchor, total[mine] / rank, np.inf))
        out = np.empty(m)
        out[order] = np.minimum(ranked, 1.0)
        return out

    def _total(self, height: Floats) -> Floats:
        """Sum over tests of the step functions with these heights, at every level: the running total of all jumps."""
        previous = self._previous(height)
        jump = np.where(height > previous, height, 0.0) - np.where(height > previous, previous, 0.0)
        return np.cumsum(np.bincount(self.level, weights=self.count * jump))

    def _previous(self, height: Floats) -> Floats:
        before = np.concatenate([[0.0], height[:-1]])
        before[self.start] = 0.0
        return before


def _step_up(ratio: Floats) -> Floats:
    return np.minimum.accumulate(ratio[::-1])[::-1]


def _check_support(support: Floats, cdf: Floats, point: int) -> None:
    where = f"exact tests: the support of point {point}"
    if support.ndim != 1 or support.size == 0 or support.shape != cdf.shape:
        raise InputError(f"{where} must be a non-empty flat array with a CDF of the same length.")
    if not bool(np.all(np.diff(support) > 0)) or not 0 < support[0] <= support[-1] <= 1 + 1e-9:
        raise InputError(f"{where} must ascend strictly within (0, 1].")
    if not bool(np.all(np.diff(cdf) > 0)) or not cdf[0] > 0 or not abs(cdf[-1] - 1) <= 1e-9:
        raise InputError(f"{where} needs a null CDF that ascends strictly to 1 (by default the support itself).")


def _locate(p: Floats, support: Floats, points: Ints) -> Ints:
    right = np.clip(np.searchsorted(support, p), 0, support.size - 1)
    left = np.maximum(right - 1, 0)
    place = np.where(np.abs(support[left] - p) < np.abs(support[right] - p), left, right)
    off = np.abs(support[place] - p) > 1e-7 * np.maximum(p, 1e-12)
    if bool(off.any()):
        i = int(np.flatnonzero(off)[0])
        raise InputError(f"exact tests: p-value {p[i]:.6g} of point {points[i]} is not among its attainable values.")
    return place.astype(np.int64)


def null_nonzero_given_rate(rate: float, n: Sequence[int], weights: Sequence[float] | None = None) -> float:
    """P(estimate != 0) when every arm has success probability `rate`: what a nonzero share means before any data.

    n: rollouts of the factual arm, then of each alternative. weights: of the alternatives, summing to 1; None pools
    them. Example: 3 against 12 at rate .024 gives .305, at .05 gives .536.
    """
    if not 0 <= rate <= 1:
        raise InputError(f"null_nonzero_given_rate: rate must lie in [0, 1], got {rate}.")
    arms, coefficients = _arms(n, weights)
    zero = _zero_by_total(arms, coefficients)
    total = int(sum(arms))
    everything = stats.binom.pmf(np.arange(total + 1), total, 0.5)
    return _chance(1 - float((stats.binom.pmf(np.arange(total + 1), total, rate) * zero / everything).sum()))


def null_nonzero_given_total(total: int, n: Sequence[int], weights: Sequence[float] | None = None) -> float:
    """P(estimate != 0 | total successes) when no action has an effect: successes fall on the rollouts at random.

    Exact for every success rate (the total is sufficient for it), hence unbiased for the null rate at a point,
    whatever the rates of the points are. Arguments as `null_nonzero_given_rate`.
    """
    arms, coefficients = _arms(n, weights)
    if not 0 <= total <= sum(arms):
        raise InputError(f"null_nonzero_given_total: total must lie in 0..{sum(arms)}, got {total}.")
    zero = _zero_by_total(arms, coefficients)[total]
    return _chance(1 - float(zero / stats.binom.pmf(total, sum(arms), 0.5)))


@dataclass(frozen=True, slots=True)
class NonzeroShare:
    """Share of points whose estimate is not zero, beside what no effect anywhere would give.

    observed, null, excess (observed minus null, point by point): cluster intervals. plug_in: the null share from each
    point's own pooled rate, biased low (see `nonzero_share`), for comparison only. fixed: share of points where the
    total number of successes alone decides whether the estimate is zero; these add exactly 0 to the excess.
    """

    observed: ClusterInterval
    null: ClusterInterval
    excess: ClusterInterval
    plug_in: float
    fixed: float


def nonzero_share(
    successes: ArrayLike,
    n: ArrayLike,
    clusters: Clusters,
    *,
    weights: ArrayLike | None = None,
    level: float = 0.95,
) -> NonzeroShare:
    """Nonzero share with its null rate, for yes/no outcomes.

    successes, n: (points, arms) whole numbers; arm 0 is the factual action, an absent arm has n = 0. weights: (points,
    arms - 1) of the alternatives (0 where absent), or None to pool them. Points without factual or alternative
    rollouts are left out.

    The null rate is P(nonzero | total successes) under no effect. Plugging the pooled rate x/n into the binomials
    instead is biased: 0/15 gives rate 0 and null rate 0, and at 3 against 12 with true rate .024 the plug-in averages
    .21 where the truth is .305. The conditional rate has expectation exactly equal to the null rate. "No effect"
    means that all arms of the point share one rate; arms that differ but balance are outside this null. Where the
    total decides (3 against 12 unless the total is a multiple of 5), nonzero is no evidence at all; the excess then
    is 0 for the point, and `fixed` says how often that is so.
    """
    x, k, w = check_counts(successes, n, weights)
    usable = (k[:, 0] > 0) & (k[:, 1:].sum(1) > 0)
    nonzero, null, plug = (np.full(x.shape[0], np.nan) for _ in range(3))
    for i in np.flatnonzero(usable).tolist():
        arms, coefficients = _arms(k[i].tolist(), None if w is None else w[i].tolist())
        counts = x[i] if w is not None else np.array([x[i, 0], x[i, 1:].sum()])
        counts = counts[k[i] > 0] if w is not None else counts
        nonzero[i] = float(abs(float(np.dot(coefficients, counts))) > _QUANTUM)
        total, size = int(counts.sum()), sum(arms)
        null[i], plug[i] = _null_pair(total, size, arms, coefficients)
    labels = list(clusters)
    fixed = (null == 0) | (null == 1)
    return NonzeroShare(
        observed=cluster_share(nonzero, labels, level=level),
        null=cluster_mean(null, labels, level=level),
        excess=cluster_mean(nonzero - null, labels, level=level),
        plug_in=float(np.nanmean(plug)) if usable.any() else float("nan"),
        fixed=float(fixed[usable].mean()) if usable.any() else float("nan"),
    )


@lru_cache(maxsize=65536)
def _null_pair(total: int, size: int, arms: tuple[int, ...], coefficients: tuple[float, ...]) -> tuple[float, float]:
    zero = _zero_by_total(arms, coefficients)
    at = np.arange(size + 1)
    share = zero / stats.binom.pmf(at, size, 0.5)
    plug = 1 - float((stats.binom.pmf(at, size, total / size) * share).sum())
    return _chance(1 - float(share[total])), plug


def _chance(value: float) -> float:
    """A computed probability without its rounding error, so that certain is 1 and impossible 0."""
    return min(1.0, max(0.0, round(value, 12)))


def _arms(n: Sequence[int], weights: Sequence[float] | None) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Arm sizes and the coefficients c with estimate = sum c_k x_k; alternatives pooled without weights."""
    sizes = [int(v) for v in n]
    if len(sizes) < 2 or sizes[0] < 1 or sum(sizes[1:]) < 1 or min(sizes) < 0:
        raise InputError(f"null rate: needs rollouts of the factual arm and of an alternative, got n = {sizes}.")
    if sum(sizes) > 1000:
        raise InputError(f"null rate: at most 1000 rollouts a point can be counted exactly, got {sum(sizes)}.")
    if weights is None:
        rest = sum(sizes[1:])
        return (sizes[0], rest), (1 / sizes[0], -1 / rest)
    shares = [float(v) for v in weights]
    if len(shares) != len(sizes) - 1 or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise InputError("null rate: weights must be one a alternative, >= 0, and sum to 1 over the arms present.")
    if any(v > 0 and s == 0 for v, s in zip(shares, sizes[1:], strict=True)):
        raise InputError("null rate: an alternative with a weight has no rollouts; renormalise over the arms present.")
    kept = [(s, v) for s, v in zip(sizes[1:], shares, strict=True) if s > 0]
    return (sizes[0], *(s for s, _ in kept)), (1 / sizes[0], *(-v / s for s, v in kept))


@lru_cache(maxsize=4096)
def _zero_by_total(arms: tuple[int, ...], coefficients: tuple[float, ...]) -> Floats:
    """P(sum c_k x_k = 0, sum x_k = s) for s = 0..N at rate 1/2, by convolution over arms, meeting in the middle."""
    order = sorted(range(len(arms)), key=lambda k: -arms[k])
    halves: list[list[int]] = [[], []]
    cells = [1, 1]
    for k in order:
        side = 0 if cells[0] <= cells[1] else 1
        halves[side].append(k)
        cells[side] *= arms[k] + 1
    left, right = (_half([arms[k] for k in h], [coefficients[k] for k in h]) for h in halves)
    mirrored = np.round(-right[0] / _QUANTUM + _SHIFT).astype(np.int64)
    keys = np.round(left[0] / _QUANTUM + _SHIFT).astype(np.int64)
    sort = np.argsort(mirrored, kind="stable")
    ranked = mirrored[sort]
    start, stop = np.searchsorted(ranked, keys, "left"), np.searchsorted(ranked, keys, "right")
    matches = stop - start
    a = np.repeat(np.arange(keys.size), matches)
    b = sort[np.arange(a.size) - np.repeat(np.cumsum(matches) - matches, matches) + np.repeat(start, matches)]
    out = np.bincount(left[1][a] + right[1][b], weights=left[2][a] * right[2][b], minlength=sum(arms) + 1)
    return out.astype(np.float64)


def _half(arms: list[int], coefficients: list[float]) -> tuple[Floats, Ints, Floats]:
    """Value, total and probability at rate 1/2 of every outcome of some arms, equal (value, total) merged."""
    value, total, chance = np.zeros(1), np.zeros(1, dtype=np.int64), np.ones(1)
    for size, c in zip(arms, coefficients, strict=True):
        x = np.arange(size + 1)
        if value.size * x.size > 5_000_000:
            raise InputError(
                f"null rate: {len(arms)} weighted arms of {max(arms)} rollouts are too many to count exactly."
            )
        value = (value[:, None] + c * x).ravel()
        total = (total[:, None] + x).ravel()
        chance = (chance[:, None] * stats.binom.pmf(x, size, 0.5)).ravel()
        key = np.round(value / _QUANTUM + _SHIFT).astype(np.int64)
        order = np.lexsort((total, key))
        new = np.concatenate([[True], (np.diff(key[order]) != 0) | (np.diff(total[order]) != 0)])
        at = np.flatnonzero(new)
        value, total, chance = value[order][at], total[order][at], np.add.reduceat(chance[order], at)
    return value, total, chance


def storey_share(
    p: ArrayLike,
    supports: Sequence[ArrayLike],
    clusters: Clusters,
    *,
    cdfs: Sequence[ArrayLike] | None = None,
    threshold: float = 0.5,
    level: float = 0.95,
) -> ClusterInterval:
    """Null-corrected share of points with an effect, 1 - pi0 by Storey (2002) for discrete p-values: a lower bound.

    p, supports, cdfs as in `discoveries`. Each p-value is spread evenly over its own jump of the null CDF (the
    randomised p-value, uniform under no effect whatever the support) and the share above `threshold` is taken in
    expectation over that randomisation, so no random number enters: pi0 = mean P(randomised p > threshold)/(1 -
    threshold).

    Its expectation is at least pi0, since points with an effect exceed the threshold too: the share is a LOWER bound in
    expectation, loose with few rollouts, and points that cannot show an effect (all rollouts alike) count as having
    none. The interval (cluster t) covers that bound; its lower end is a lower confidence limit for the share of
    points with an effect, its upper end is no upper limit for it. `threshold` is fixed beforehand: a data-driven
    choice is biased. Estimate and interval are clipped to [0, 1]; `method` keeps the unclipped estimate.
    """
    if not 0 < threshold < 1:
        raise InputError(f"storey_share: threshold must lie between 0 and 1, got {threshold}.")
    values = np.asarray(p, dtype=float)
    there = np.flatnonzero(~np.isnan(values))
    effect = np.full(values.size, np.nan)
    if there.size:
        low, high = _Tests(values, supports, cdfs, there).below_and_at()
        above = np.clip((high - np.maximum(threshold, low)) / (high - low), 0, 1)
        effect[there] = 1 - above / (1 - threshold)
    raw = cluster_mean(effect, clusters, level=level)
    return _clipped(raw, f"Storey at {threshold:g}, unclipped {raw.estimate:.4f}, {raw.method or 'no interval'}")


def _clipped(raw: ClusterInterval, method: str) -> ClusterInterval:
    estimate, low, high = (float(np.clip(v, 0, 1)) for v in (raw.estimate, raw.low, raw.high))
    return ClusterInterval(estimate, low, high, raw.level, raw.n_points, raw.n_clusters, raw.df, method, raw.reason)


def deconvolved_share(
    successes: ArrayLike,
    n: ArrayLike,
    clusters: Clusters,
    *,
    gap: float = 0.1,
    prior: float = 10.0,
    draws: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> ClusterInterval:
    """Share of points with an effect of at least `gap`, by a mixture over (rate, effect): model-based.

    successes, n: (points, 2) whole numbers, factual and pooled alternatives. The success probabilities of the two
    arms are equal (31 rates in [0, 1]) or differ by an effect of either sign whose size is uniform on [gap, c], c one
    of four widths up to 1, at 13 positions of the rates that the effect allows; weights are fitted by EM to the joint
    distribution of the two counts. `prior` adds that many pseudo-points without effect (as in Stephens 2017), because
    an unpenalised fit finds effects in noise: with none at all it reports .08 at 8 against 8, .02-.03 with the prior
    [simulated].

    What it cannot do: effects below `gap` look like none, and small ones are largely missed with few rollouts (all
    effects .15 at share .30: estimate .07-.10 at 8 v 8, .11-.16 at 8 v 32 [simulated]). Read the lower end; the upper
    end holds only if effects are spread out as the model says. The interval joins the percentile and the basic interval
    of a cluster bootstrap (each alone under-covers next to 0).
    """
    if not 0 < gap < 1:
        raise InputError(f"deconvolved_share: gap must lie between 0 and 1, got {gap}.")
    x, k, _ = check_counts(successes, n, None)
    if x.shape[1] != 2:
        raise InputError(f"deconvolved_share: needs two columns (factual, pooled alternatives), got {x.shape[1]}.")
    usable = (k > 0).all(1)
    labels = np.asarray(list(clusters), dtype=object)
    if labels.size != usable.size:
        raise InputError(f"deconvolved_share: {usable.size} points but {labels.size} cluster labels.")
    x, k, labels = x[usable], k[usable], labels[usable]
    if not x.shape[0]:
        return ClusterInterval(float("nan"), float("nan"), float("nan"), level, 0, 0, reason="no points with both arms")
    cells, code = np.unique(np.column_stack([x, k]), axis=0, return_inverse=True)
    chance, null = _mixture(cells, gap)
    group = pd.factorize(labels)[0]
    table = np.zeros((int(group.max()) + 1, cells.shape[0]))
    np.add.at(table, (group, code.ravel()), 1.0)
    start = np.where(null, 0.9 / null.sum(), 0.1 / (~null).sum())
    fitted = _em(chance, null, table.sum(0, keepdims=True), start[None], prior, 1000)[0]
    estimate, groups = float(fitted[~null].sum()), table.shape[0]
    method = f"mixture with gap {gap:g}, percentile and basic cluster bootstrap, {draws} draws"
    if groups < 2:
        reason = "fewer than 2 clusters: no variation between clusters can be measured"
        return ClusterInterval(estimate, np.nan, np.nan, level, x.shape[0], groups, method=method, reason=reason)

    def shares(totals: Floats) -> Floats:
        begin = np.tile(0.9 * fitted + 0.1 * start, (totals.shape[0], 1))
        fits = _em(chance, null, totals, begin, prior, 200)
        return np.asarray(1 - fits[:, null].sum(1), dtype=np.float64)

    low, high = np.quantile(
        cluster_bootstrap(table, shares, draws=draws, seed=seed), [(1 - level) / 2, (1 + level) / 2]
    )
    low, high = min(low, 2 * estimate - high), max(high, 2 * estimate - low)
    raw = ClusterInterval(estimate, float(low), float(high), level, x.shape[0], groups)
    return _clipped(raw, method)


def _mixture(cells: Ints, gap: float) -> tuple[Floats, Bools]:
    """Likelihood of each cell (x1, x2, n1, n2) under each component, up to a factor of the cell; which are null."""
    null_rates = np.sin(np.linspace(0, np.pi / 2, 31)) ** 2
    first, second, owner = [null_rates], [null_rates], [np.arange(31)]
    components = 31
    for width in gap + (1 - gap) * np.array([0.1, 0.3, 0.6, 1.0]):
        size = gap + (width - gap) * (np.arange(12) + 0.5) / 12
        effect = np.concatenate([size, -size])
        for position in np.linspace(0.05, 0.95, 13):
            other = np.maximum(0, -effect) + (1 - np.abs(effect)) * position
            first.append(other + effect)
            second.append(other)
            owner.append(np.full(effect.size, components))
            components += 1
    p, r, belongs = np.concatenate(first), np.concatenate(second), np.concatenate(owner)
    p, r = np.clip(p, 0, 1), np.clip(r, 0, 1)
    share = 1 / np.bincount(belongs)[belongs]
    chance = np.zeros((cells.shape[0], components))
    member = np.zeros((p.size, components))
    member[np.arange(p.size), belongs] = share
    for begin in range(0, cells.shape[0], 2000):
        x1, x2, n1, n2 = (cells[begin : begin + 2000, j, None] for j in range(4))
        log = xlogy(x1, p) + xlog1py(n1 - x1, -p) + xlogy(x2, r) + xlog1py(n2 - x2, -r)
        log -= log.max(1, keepdims=True)
        chance[begin : begin + 2000] = np.exp(log) @ member
    return chance, np.arange(components) < 31


def _em(chance: Floats, null: Bools, totals: Floats, weights: Floats, prior: float, steps: int) -> Floats:
    """Mixture weights (b, components) of b weighted data sets (b, cells) after `steps` EM steps."""
    size = totals.sum(1, keepdims=True)
    for _ in range(steps):
        weights = weights * ((totals / np.maximum(weights @ chance.T, 1e-300)) @ chance)
        none = weights[:, null].sum(1, keepdims=True)
        weights[:, null] *= (none + prior) / np.maximum(none, 1e-300)
        weights /= size + prior
    return weights
