"""Exact tests against scipy, brute-force enumeration and exact size; power against the normal figure."""

from __future__ import annotations

from itertools import product
from math import comb

import numpy as np
import pytest
from scipy import stats

from audit.exact_tests import (
    exact_power,
    fisher_test,
    minimum_detectable_effect,
    permutation_test,
    permutation_test_scores,
    rejection_region,
)
from envs.core import InputError

UNEVEN = np.array([1, -0.7, -0.2, -0.1])


@pytest.mark.parametrize(("n1", "n2", "smallest"), [(3, 3, 0.10), (4, 4, 0.029), (5, 5, 0.008), (3, 12, 0.0022)])
def test_smallest_attainable_p(n1: int, n2: int, smallest: float) -> None:
    x1, x2 = np.meshgrid(np.arange(n1 + 1), np.arange(n2 + 1), indexing="ij")
    p = fisher_test(x1.ravel(), n1, x2.ravel(), n2).p
    assert p.min() == pytest.approx(smallest, abs=5e-4 if smallest > 0.005 else 5e-5)


def test_fisher_equals_scipy() -> None:
    rng = np.random.default_rng(1)
    n1, n2 = rng.integers(1, 30, 150), rng.integers(1, 30, 150)
    x1, x2 = rng.binomial(n1, 0.4), rng.binomial(n2, 0.6)
    ours = fisher_test(x1, n1, x2, n2).p
    theirs = [
        stats.fisher_exact(np.array([[a, n - a], [b, m - b]]))[1] for a, n, b, m in zip(x1, n1, x2, n2, strict=True)
    ]
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("midp", [False, True])
def test_support_is_the_null_distribution(midp: bool) -> None:
    n1, n2, total = 6, 9, 5
    x1 = np.arange(0, total + 1)
    tested = fisher_test(x1, n1, total - x1, n2, midp=midp)
    assert tested.support is not None
    mass = stats.hypergeom.pmf(x1, n1 + n2, total, n1)
    values, cdf = tested.support.of(3)
    assert np.all(np.diff(values) > 0) and cdf[-1] == 1.0
    np.testing.assert_allclose(np.unique(np.round(tested.p, 12)), np.round(values, 12))
    for value, share in zip(values, cdf, strict=True):
        assert mass[tested.p <= value * (1 + 1e-9)].sum() == pytest.approx(share)
    if not midp:
        np.testing.assert_allclose(values, cdf)
    else:
        assert np.sum(mass * tested.p) == pytest.approx(0.5), "mid-p values average one half under the null"


def test_supports_are_shared_between_points() -> None:
    tested = fisher_test([1, 2, 3, 1], 4, [3, 2, 1, 1], 4)
    assert tested.support is not None
    assert len(set(tested.support.index[:3])) == 1 and tested.support.index[3] != tested.support.index[0]
    assert len(tested.support.offsets) == 3


@pytest.mark.parametrize("rate", [0.03, 0.3, 0.5])
def test_fisher_false_rejections(rate: float) -> None:
    for n1, n2 in ((3, 12), (8, 32), (16, 16)):
        region = rejection_region(n1, n2, 0.05, "fisher")
        assert float(exact_power(rate, rate, region)) <= 0.05


def brute_permutation(x: list[int], n: list[int], c: np.ndarray) -> float:
    """P(|contrast| >= observed) over every assignment of the won rollouts to arms."""
    observed = abs(np.sum(c * np.array(x) / np.array(n)))
    total, hit = 0, 0
    for vector in product(*(range(m + 1) for m in n)):
        if sum(vector) == sum(x):
            ways = int(np.prod([comb(m, v) for m, v in zip(n, vector, strict=True)]))
            total += ways
            hit += ways * bool(abs(np.sum(c * np.array(vector) / np.array(n))) >= observed - 1e-9)
    return hit / total


def test_permutation_is_exact_by_enumeration() -> None:
    rng = np.random.default_rng(2)
    n = [4, 3, 3, 2]
    x = np.array([rng.binomial(n, 0.5) for _ in range(25)])
    tested = permutation_test(x, n, UNEVEN, with_support=True)
    np.testing.assert_allclose(tested.p, [brute_permutation(list(row), n, UNEVEN) for row in x], rtol=1e-9)
    assert tested.support is not None
    for point in range(25):
        values, cdf = tested.support.of(point)
        assert np.min(np.abs(values - tested.p[point])) < 1e-9
        np.testing.assert_allclose(values, cdf)


def test_permutation_of_equal_arms_depends_on_the_pool_only() -> None:
    quarter = np.array([1, -0.25, -0.25, -0.25, -0.25])
    p = permutation_test([[6, 1, 1, 1, 1], [6, 4, 0, 0, 0]], 8, quarter).p
    assert p[0] == pytest.approx(p[1])
    outcomes = np.arange(9)
    mass = stats.hypergeom.pmf(outcomes, 40, 10, 8)
    far = np.abs(outcomes / 8 - (10 - outcomes) / 32) >= 6 / 8 - 4 / 32 - 1e-9
    assert p[0] == pytest.approx(mass[far].sum())


def test_monte_carlo_agrees_and_never_reports_zero() -> None:
    x, n = np.array([[7, 1, 2, 0], [4, 4, 4, 5]]), 8
    exact = permutation_test(x, n, UNEVEN).p
    sampled = permutation_test(x, n, UNEVEN, rng=np.random.default_rng(3), resamples=4999, max_tables=1).p
    np.testing.assert_allclose(sampled, exact, atol=0.03)
    certain = permutation_test([[16, 0, 0, 0]], 16, UNEVEN, rng=np.random.default_rng(3), resamples=99, max_tables=1).p
    assert certain[0] == pytest.approx(0.01)
    with pytest.raises(InputError):
        permutation_test(x, n, UNEVEN, max_tables=1)


@pytest.mark.parametrize("rates", [[0.5] * 4, [0.1] * 4, [0.36, 0.1, 0.9, 1.0]], ids=["equal", "rare", "contrast only"])
def test_permutation_false_rejections(rates: list[float]) -> None:
    """Equal rates (exact), and a null contrast over differing alternatives (approximate)."""
    rng = np.random.default_rng(4)
    truth = np.array(rates)
    if len(set(rates)) > 1:
        truth[0] = -(UNEVEN[1:] @ truth[1:])
    x = rng.binomial(8, truth, (3000, 4))
    assert np.mean(permutation_test(x, 8, UNEVEN).p <= 0.05) <= 0.06


def test_score_permutations() -> None:
    rng = np.random.default_rng(5)
    arm = np.repeat(np.arange(3), [8, 6, 6])
    weights = np.array([1, -0.5, -0.5])
    y = rng.beta(0.5, 0.5, (1500, 20))
    p = permutation_test_scores(y, arm, weights, rng, resamples=399)
    assert np.mean(p <= 0.05) == pytest.approx(0.05, abs=0.02)
    assert p.min() >= 1 / 400
    y[:, :8] = np.clip(y[:, :8] + 0.5, 0, 1)
    assert np.mean(permutation_test_scores(y, arm, weights, rng, resamples=399) <= 0.05) > 0.5


def test_strata_remove_a_difference_between_rounds() -> None:
    """Arms of unequal shares in an easy and a hard round: only exchange within rounds keeps the level."""
    rng = np.random.default_rng(6)
    arm = np.array([0] * 8 + [1] * 2 + [0] * 2 + [1] * 8)
    stratum = np.array([0] * 10 + [1] * 10)
    y = (rng.random((1000, 20)) < np.where(stratum == 0, 0.9, 0.1)).astype(float)
    plain = permutation_test_scores(y, arm, [1, -1], rng, resamples=199)
    within = permutation_test_scores(y, arm, [1, -1], rng, strata=stratum, resamples=199)
    assert np.mean(plain <= 0.05) > 0.2
    assert np.mean(within <= 0.05) <= 0.065


@pytest.mark.parametrize(("m", "stated"), [(8, 0.55), (16, 0.39), (32, 0.28), (64, 0.20)])
def test_minimum_detectable_effect_near_the_stated_figures(m: int, stated: float) -> None:
    """The stated figures are 2.8 standard errors at p = .5; exact power needs the same or up to .03 less."""
    normal = (stats.norm.isf(0.025) + stats.norm.isf(0.2)) * np.sqrt(0.25 / m + 0.25 / (4 * m))
    assert round(float(normal), 2) == stated
    for test in ("midp", "fisher", "score"):
        assert stated - 0.05 <= float(minimum_detectable_effect(0.5, m, 4 * m, test=test)) <= stated + 0.005


def test_minimum_detectable_effect_has_the_power_it_claims() -> None:
    rates = np.array([0.2, 0.5, 0.7])
    effect = minimum_detectable_effect(rates, 32, 64)
    region = rejection_region(32, 64)
    for p, tau in zip(rates, effect, strict=True):
        powers = [float(exact_power(p + s * tau / 2, p - s * tau / 2, region)) for s in (1, -1)]
        assert min(powers) == pytest.approx(0.8, abs=2e-3)
    rng = np.random.default_rng(8)
    p1, p2 = rates[1] + effect[1] / 2, rates[1] - effect[1] / 2
    simulated = fisher_test(rng.binomial(32, p1, 4000), 32, rng.binomial(64, p2, 4000), 64, midp=True).p <= 0.05
    assert np.mean(simulated) == pytest.approx(0.8, abs=0.03)
    assert np.isnan(minimum_detectable_effect(0.5, 3, 3, test="fisher")), "3 against 3 can never reach .05"
    with pytest.raises(InputError):
        minimum_detectable_effect(1.0, 8, 8)
