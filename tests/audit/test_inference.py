"""Intervals at a point against published values, brute-force likelihoods and exact or simulated coverage."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import minimize_scalar

from audit.inference import (
    Interval,
    best_interval,
    contrast_interval,
    exact_interval,
    melded_interval,
    negligible,
    policy_interval,
    score_interval,
    score_means_interval,
    score_statistic,
)
from envs.core import InputError

FIVE = np.array([1, -0.25, -0.25, -0.25, -0.25])
UNEVEN = np.array([1, -0.7, -0.1, -0.1, -0.1])


def covered(interval: Interval, truth: float) -> float:
    return float(np.mean((interval.low <= truth + 1e-9) & (interval.high >= truth - 1e-9)))


@pytest.mark.parametrize(
    ("counts", "limits"),
    [  # Newcombe (1998), Statistics in Medicine 17:873, table II, method 6 (Miettinen-Nurminen)
        ((56, 70, 48, 80), (0.0528, 0.3382)),
        ((9, 10, 3, 10), (0.1700, 0.8406)),
        ((6, 7, 2, 7), (0.0342, 0.8534)),
        ((5, 56, 0, 29), (-0.0326, 0.1933)),
        ((0, 10, 0, 20), (-0.1658, 0.2844)),
        ((0, 10, 0, 10), (-0.2879, 0.2879)),
        ((10, 10, 0, 20), (0.7156, 1.0)),
        ((10, 10, 0, 10), (0.6636, 1.0)),
    ],
)
def test_published_miettinen_nurminen(counts: tuple[int, int, int, int], limits: tuple[float, float]) -> None:
    interval = score_interval(*counts)
    assert (float(interval.low), float(interval.high)) == pytest.approx(limits, abs=6e-5)


def brute_force_z(x1: int, n1: int, x2: int, n2: int, delta: float) -> float:
    def deviance(p2: float) -> float:
        return -float(stats.binom.logpmf(x1, n1, p2 + delta) + stats.binom.logpmf(x2, n2, p2))

    bounds = (max(0.0, -delta) + 1e-13, min(1.0, 1.0 - delta) - 1e-13)
    p2 = minimize_scalar(deviance, bounds=bounds, method="bounded", options={"xatol": 1e-13}).x
    p1, total = p2 + delta, n1 + n2
    variance = (p1 * (1 - p1) / n1 + p2 * (1 - p2) / n2) * total / (total - 1)
    return float((x1 / n1 - x2 / n2 - delta) / np.sqrt(variance))


def test_limits_and_closed_form_agree_with_brute_force_likelihood() -> None:
    # statsmodels 0.15 is no reference here: its constrained estimate is not the maximum (a swap of two equal samples
    # gives an asymmetric interval), and for many small tables its solver raises.
    rng = np.random.default_rng(7)
    z = stats.norm.isf(0.025)
    for _ in range(60):
        n1, n2 = (int(v) for v in rng.integers(2, 40, 2))
        x1, x2 = int(rng.integers(0, n1 + 1)), int(rng.integers(0, n2 + 1))
        delta = float(rng.uniform(-0.9, 0.9))
        closed = float(score_statistic(x1, n1, x2, n2, delta))
        assert closed == pytest.approx(brute_force_z(x1, n1, x2, n2, delta), abs=2e-3, rel=2e-3)
        interval = score_interval(x1, n1, x2, n2)
        for limit, sign in ((float(interval.low), 1), (float(interval.high), -1)):
            if abs(limit) < 1 - 1e-9:
                assert float(score_statistic(x1, n1, x2, n2, limit)) == pytest.approx(sign * z, abs=1e-6)


def test_wilson_is_the_one_arm_case() -> None:
    x, n, z = 3, 17, stats.norm.isf(0.025)
    interval = contrast_interval([x], [n], [1.0], critical=float(z * np.sqrt((n - 1) / n)))
    wilson = stats.binomtest(x, n).proportion_ci(method="wilson")
    assert (float(interval.low), float(interval.high)) == pytest.approx((wilson.low, wilson.high), abs=1e-9)


def test_edges_are_finite_and_ordered() -> None:
    n1, n2 = 4, 7
    x1, x2 = np.meshgrid(np.arange(n1 + 1), np.arange(n2 + 1), indexing="ij")
    for first, second in ((n1, n2), (1, 1)):
        interval = score_interval(np.minimum(x1, first), first, np.minimum(x2, second), second)
        assert np.all((interval.low >= -1) & (interval.high <= 1))
        assert np.all((interval.low <= interval.estimate) & (interval.estimate <= interval.high))
        assert np.all(interval.high > interval.low)
    swapped = score_interval(x2, n2, x1, n1)
    straight = score_interval(x1, n1, x2, n2)
    np.testing.assert_allclose(swapped.low, -straight.high, atol=1e-12)
    one = score_interval(1, 1, 0, 1)
    assert float(one.high) == 1.0 and float(one.low) < 0.0
    empty = score_interval(0, 8, 0, 32)
    assert float(empty.low) < 0 < float(empty.high)


def test_an_arm_without_weight_changes_nothing() -> None:
    with_arm = contrast_interval([3, 5, 7], [8, 9, 20], [1.0, -1.0, 0.0])
    without = score_interval(3, 8, 5, 9)
    assert float(with_arm.low) == pytest.approx(float(without.low), abs=1e-12)
    assert float(with_arm.high) == pytest.approx(float(without.high), abs=1e-12)


@pytest.mark.parametrize(
    ("n1", "n2", "inner", "average"), [(3, 12, 0.91, 0.955), (8, 32, 0.915, 0.95), (64, 64, 0.935, 0.945)]
)
def test_exact_coverage_of_the_score_interval(n1: int, n2: int, inner: float, average: float) -> None:
    """Enumerated: the floor for rates within .06-.94, and the mean, which must not be far above nominal either."""
    x1, x2 = np.meshgrid(np.arange(n1 + 1), np.arange(n2 + 1), indexing="ij")
    interval = score_interval(x1, n1, x2, n2)
    rates = np.linspace(0.06, 0.94, 23)
    coverage = np.array(
        [
            stats.binom.pmf(np.arange(n1 + 1), n1, p)
            @ ((interval.low <= p - q + 1e-9) & (interval.high >= p - q - 1e-9))
            @ stats.binom.pmf(np.arange(n2 + 1), n2, q)
            for p in rates
            for q in rates
        ]
    )
    assert coverage.min() >= inner
    assert average <= coverage.mean() <= 0.975


RATES = [[0.5] * 5, [0.05] * 5, [0.95] * 5, [0.9, 0.1, 0.1, 0.1, 0.1], [0.5, 0.1, 0.3, 0.7, 0.9]]


@pytest.mark.parametrize("n", [3, 4, 8, 16])
@pytest.mark.parametrize("weights", [FIVE, UNEVEN], ids=["uniform", "uneven"])
def test_simulated_coverage_of_contrasts(n: int, weights: np.ndarray) -> None:
    rng = np.random.default_rng(11)
    score, melded = [], []
    for rates in RATES:
        x = rng.binomial(n, rates, (2000, 5))
        truth = float(weights @ np.array(rates))
        score.append(covered(contrast_interval(x, n, weights), truth))
        melded.append(covered(melded_interval(x, n, weights, rng, resamples=1000), truth))
    assert score[0] >= 0.925 and min(score) >= 0.895
    assert min(melded) >= 0.925


def test_melded_without_midp_never_dips() -> None:
    rng = np.random.default_rng(12)
    rates = np.array([0.9, 0.1, 0.1, 0.1, 0.1])
    x = rng.binomial([16, 4, 4, 4, 4], rates, (2000, 5))
    exact = melded_interval(x, [16, 4, 4, 4, 4], FIVE, rng, midp=False)
    assert covered(exact, float(FIVE @ rates)) >= 0.95
    midp = melded_interval(x, [16, 4, 4, 4, 4], FIVE, rng)
    assert np.mean(midp.high - midp.low) < np.mean(exact.high - exact.low)


def draw(kind: str, shape: tuple[int, int], mean: float, rng: np.random.Generator) -> np.ndarray:
    if kind == "smooth":
        return rng.beta(4 * mean, 4 * (1 - mean), shape)
    if kind == "extreme":
        return rng.beta(0.3 * mean, 0.3 * (1 - mean), shape)
    return (rng.random(shape) < mean).astype(float)


@pytest.mark.parametrize("kind", ["smooth", "extreme", "binary"])
@pytest.mark.parametrize("means", [(0.5, 0.5), (0.05, 0.05), (0.9, 0.3)])
def test_score_means_coverage(kind: str, means: tuple[float, float]) -> None:
    rng = np.random.default_rng(13)
    for n1, n2 in ((8, 8), (8, 32)):
        samples = [draw(kind, (800, n1), means[0], rng), draw(kind, (800, n2), means[1], rng)]
        truth = means[0] - means[1]
        interval = score_means_interval(samples, rng=rng, resamples=2000)
        assert covered(interval, truth) >= 0.95
        bernstein = score_means_interval(samples, method="bernstein")
        assert covered(bernstein, truth) >= 0.95
        assert np.mean(interval.high - interval.low) < np.mean(bernstein.high - bernstein.low)


def test_welch_is_near_nominal_where_it_applies_and_missing_where_not() -> None:
    rng = np.random.default_rng(14)
    samples = [rng.beta(2, 2, (3000, 12)), *(rng.beta(2, 2, (3000, 8)) for _ in range(4))]
    assert covered(score_means_interval(samples, FIVE, method="welch"), 0.0) == pytest.approx(0.95, abs=0.015)
    constant = score_means_interval([np.ones((1, 8)), rng.random((1, 8))], method="welch")
    assert np.isnan(constant.low[0]) and np.isnan(constant.high[0])
    reference = stats.ttest_ind(samples[0][0], samples[1][0], equal_var=False).confidence_interval()
    ours = score_means_interval([samples[0][:1], samples[1][:1]], method="welch")
    assert (ours.low[0], ours.high[0]) == pytest.approx((reference.low, reference.high))


def test_gaffke_is_clopper_pearson_for_one_binary_arm_and_takes_ragged_samples() -> None:
    rng = np.random.default_rng(15)
    y = np.array([[1.0, 0, 0, 1, 0, 0, 0, 0], [1.0, 1, 1, 0, np.nan, np.nan, np.nan, np.nan]])
    interval = score_means_interval([y], [1.0], rng=rng, resamples=200_000)
    for row, (x, n) in enumerate(((2, 8), (3, 4))):
        exact = stats.binomtest(x, n).proportion_ci(method="exact")
        assert (interval.low[row], interval.high[row]) == pytest.approx((exact.low, exact.high), abs=5e-3)


def test_policy_contrast_scales_or_covers_the_product() -> None:
    rng = np.random.default_rng(16)
    p1, p2, pi, points = 0.8, 0.4, 0.6, 4000
    x1, x2 = rng.binomial(16, p1, points), rng.binomial(48, p2, points)
    known = policy_interval(score_interval(x1, 16, x2, 48), 0.05, pi=pi)
    assert covered(known, (1 - pi) * (p1 - p2)) == pytest.approx(0.95, abs=0.025)
    tau = score_interval(x1, 16, x2, 48, alpha=0.04)
    estimated = policy_interval(tau, 0.04, draws_equal=rng.binomial(20, pi, points), draws=20)
    assert covered(estimated, (1 - pi) * (p1 - p2)) >= 0.95
    assert np.all(estimated.high - estimated.low > 0)
    every = policy_interval(tau, 0.04, draws_equal=20, draws=20)
    assert np.all(every.estimate == 0) and np.any(every.high > 0), "all draws equal is not proof of pi = 1"
    with pytest.raises(InputError):
        policy_interval(tau, 0.04, pi=0.5, draws_equal=3, draws=5)


def test_exact_interval_never_undercovers_and_stays_short() -> None:
    rng = np.random.default_rng(7)
    rates = np.concatenate(
        [10 ** rng.uniform(-4, -1, 10), rng.uniform(0.05, 0.95, 20), 1 - 10 ** rng.uniform(-4, -1, 10)]
    )
    for n1, n2 in ((3, 12), (8, 8), (8, 32)):
        x1, x2 = np.meshgrid(np.arange(n1 + 1), np.arange(n2 + 1), indexing="ij")
        interval = exact_interval(x1, n1, x2, n2)
        assert np.all((interval.low <= interval.estimate) & (interval.estimate <= interval.high))
        coverage = [
            stats.binom.pmf(np.arange(n1 + 1), n1, p)
            @ ((interval.low <= p - q + 1e-9) & (interval.high >= p - q - 1e-9))
            @ stats.binom.pmf(np.arange(n2 + 1), n2, q)
            for p in rates
            for q in rates
        ]
        assert min(coverage) >= 0.95 - 1e-3
        assert np.mean(coverage) <= 0.99


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_best_does_not_inflate(rate: float) -> None:
    rng = np.random.default_rng(17)
    points, half = 4000, 8
    factual = rng.binomial(16, rate, points)
    choose, estimate = rng.binomial(half, rate, (points, 4)), rng.binomial(half, rate, (points, 4))
    _, honest = best_interval((factual, 16), (choose, half), (estimate, half))
    excluded = np.mean((honest.low > 0) | (honest.high < 0))
    assert excluded <= 0.05
    assert abs(float(np.mean(honest.estimate))) < 0.01
    both = choose + estimate
    naive = factual / 16 - both.max(axis=1) / 16
    assert np.mean(naive) < -0.05, "the shortcut this function exists to avoid"


def test_best_finds_the_better_arm() -> None:
    rng = np.random.default_rng(18)
    rates = np.array([0.1, 0.2, 0.9, 0.3])
    chosen, interval = best_interval(
        (rng.binomial(16, 0.4, 500), 16), (rng.binomial(8, rates, (500, 4)), 8), (rng.binomial(8, rates, (500, 4)), 8)
    )
    assert np.mean(chosen == 2) > 0.95
    assert np.mean(interval.high < 0) > 0.5


def test_tost_size_and_power() -> None:
    rng = np.random.default_rng(19)

    def share(p1: float, p2: float) -> float:
        x1, x2 = rng.binomial(200, p1, 4000), rng.binomial(200, p2, 4000)
        return float(np.mean(negligible(score_interval(x1, 200, x2, 200, alpha=0.10), 0.15)))

    assert share(0.65, 0.5) <= 0.06
    assert share(0.5, 0.5) > 0.8
    with pytest.raises(InputError):
        negligible(score_interval(1, 2, 1, 2), 0.0)
    missing = Interval(np.zeros(1), np.array([np.nan]), np.array([np.nan]))
    assert not negligible(missing, 0.1)[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: score_interval(3, 2, 1, 2),
        lambda: score_interval(0, 0, 1, 2),
        lambda: score_interval(0.5, 2, 1, 2),
        lambda: score_interval(np.nan, 2, 1, 2),
        lambda: score_interval(1, 2, 1, 2, alpha=1.5),
        lambda: contrast_interval([1, 1], [2, 2], [0.0, 0.0]),
        lambda: contrast_interval([1, 1], [2, 2], [1.0, -0.5, -0.5]),
        lambda: score_means_interval([[[1.2, 0.0]], [[0.5, 0.5]]], method="welch"),
        lambda: score_means_interval([[[1.0, 0.0]], [[0.5, 0.5]]]),
        lambda: score_means_interval([[[np.nan, np.nan]], [[0.5, 0.5]]], method="welch"),
    ],
)
def test_bad_input_is_refused(call: object) -> None:
    with pytest.raises(InputError):
        call()  # type: ignore[operator]
