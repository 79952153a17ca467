"""The rounds' guarantees by exact enumeration off the calibration grid, by simulation, and what they save."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from scipy import stats

from audit.exact_tests import fisher_test
from audit.inference import contrast_interval
from audit.sequential import (
    DEFAULT_ROUNDS,
    Savings,
    Sequential,
    simulate_savings,
    spending_levels,
    spent_p_value,
)
from envs.core import InputError

SMALL = ((8, 8), (16, 16), (32, 32))
POOLED = ((4, 16), (8, 32), (16, 64))


@lru_cache
def design(rounds: tuple[tuple[int, int], ...] = SMALL, sesoi: float = 0.2, futility: float = 0.1) -> Sequential:
    return Sequential(sesoi, rounds=rounds, futility=futility)


def paths(
    rounds: tuple[tuple[int, int], ...], p1: float, p2: float | np.ndarray, points: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cumulative successes (points, rounds) of both arms; p2 may list one rate for each of equal fixed arms."""
    steps = np.diff(np.array(((0, 0), *rounds)), axis=0)
    rates = np.atleast_1d(p2)
    first = np.cumsum([rng.binomial(a, p1, points) for a, _ in steps], axis=0).T
    second = np.cumsum([sum(rng.binomial(b // len(rates), rate, points) for rate in rates) for _, b in steps], axis=0).T
    return first, second


def off_grid_rates(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    third = size // 3
    tiny = 10 ** rng.uniform(-4, -0.5, (4, third))
    p1 = np.concatenate([rng.random(third), tiny[0], 1 - tiny[1]])
    p2 = np.concatenate([rng.random(third), tiny[2], tiny[3]])
    return p1, p2


@pytest.mark.parametrize("rounds", [SMALL, POOLED], ids=["balanced", "pooled"])
def test_simultaneous_coverage_is_exact_off_the_grid(rounds: tuple[tuple[int, int], ...]) -> None:
    missed = design(rounds).noncoverage(*off_grid_rates(600, 1))
    assert missed.max() <= 0.0505
    assert missed.mean() > 0.015, "not bought with needless width"


@pytest.mark.slow
def test_default_rounds_coverage_off_the_grid() -> None:
    missed = design(DEFAULT_ROUNDS, 0.1).noncoverage(*off_grid_rates(900, 2))
    assert missed.max() <= 0.0505
    assert np.median(missed) > 0.02


@pytest.mark.parametrize("rounds", [SMALL, POOLED], ids=["balanced", "pooled"])
def test_false_decisions_are_bounded_exactly(rounds: tuple[tuple[int, int], ...]) -> None:
    rng = np.random.default_rng(3)
    rates = np.concatenate([rng.random(150), 10 ** rng.uniform(-4, -1, 50)])
    never_futile = design(rounds, futility=0.0)
    assert never_futile.operating(rates, rates).pivotal.max() <= 0.05
    shifted = rates * 0.8
    for sign in (1, -1):
        p1, p2 = (shifted + 0.2, shifted) if sign > 0 else (shifted, shifted + 0.2)
        assert never_futile.operating(p1, p2).negligible.max() <= 0.0505


def test_operating_agrees_with_simulation() -> None:
    rng = np.random.default_rng(4)
    plan = design()
    for p1, p2 in ((0.5, 0.5), (0.8, 0.4), (0.05, 0.05), (0.97, 0.9)):
        first, second = paths(SMALL, p1, p2, 4000, rng)
        state, spent = np.full(4000, "continue", dtype="<U12"), np.zeros(4000)
        for k in range(len(SMALL)):
            rows = np.flatnonzero(state == "continue")
            seen = plan.assess(first[rows, : k + 1], second[rows, : k + 1])
            state[rows], spent[rows] = seen.state, seen.factual + seen.alternative
        exact = plan.operating(p1, p2)
        assert np.mean(state == "pivotal") == pytest.approx(exact.pivotal[0], abs=0.025)
        assert np.mean(state == "negligible") == pytest.approx(exact.negligible[0], abs=0.025)
        assert spent.mean() == pytest.approx(exact.rollouts[0], rel=0.03)
        assert "continue" not in state


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.5, 0.9])
def test_p_value_is_valid_under_the_worst_stopping(rate: float) -> None:
    """Stopping at the round with the smallest p still leaves P(p <= t) <= t."""
    rng = np.random.default_rng(5)
    first, second = paths(SMALL, rate, rate, 5000, rng)
    worst = np.min([design().assess(first[:, :k], second[:, :k]).p for k in (1, 2, 3)], axis=0)
    for level in (0.01, 0.05, 0.1, 0.3):
        assert np.mean(worst <= level) <= level + 3 * np.sqrt(level * (1 - level) / 5000)


def test_support_lists_every_p_value_and_bounds_its_null_probability() -> None:
    rng = np.random.default_rng(6)
    first, second = paths(SMALL, 0.4, 0.4, 3000, rng)
    seen = design().assess(first, second)
    values, cdf = seen.support.of(17)
    assert np.all(np.isin(seen.p, values))
    assert np.all(np.diff(values) > 0)
    np.testing.assert_allclose(values, cdf)
    assert np.mean(seen.p <= 0.2) <= 0.2 + 0.025


def test_interval_excluding_zero_p_value_and_state_agree() -> None:
    rng = np.random.default_rng(7)
    first, second = paths(SMALL, 0.7, 0.35, 2000, rng)
    seen = design().assess(first, second)
    excluded = (seen.interval.low > 0) | (seen.interval.high < 0)
    assert np.all(seen.p[seen.state == "pivotal"] <= 0.05)
    assert np.mean(excluded == (seen.state == "pivotal")) > 0.995
    strict = Sequential(0.2, rounds=SMALL, pivotal_at=0.005).assess(first, second)
    assert np.all(strict.p[strict.state == "pivotal"] <= 0.005)
    assert 0 < np.sum(strict.state == "pivotal") < np.sum(seen.state == "pivotal")
    np.testing.assert_array_equal(strict.p, seen.p)


def test_intervals_only_narrow_and_simulated_coverage_at_the_stop() -> None:
    rng = np.random.default_rng(8)
    plan = design()
    for p1, p2 in ((0.5, 0.5), (0.9, 0.3), (0.99, 0.9), (0.0, 0.03)):
        first, second = paths(SMALL, p1, p2, 4000, rng)
        final = plan.assess(first, second)
        early = plan.assess(first[:, :1], second[:, :1])
        inside = (final.interval.low <= p1 - p2) & (final.interval.high >= p1 - p2)
        assert np.mean(inside) >= 0.945
        assert np.mean(final.interval.high - final.interval.low) < np.mean(early.interval.high - early.interval.low)
        assert np.all(final.interval.low <= final.interval.high)


def test_pooling_equal_arms_with_unequal_rates_stays_valid() -> None:
    rng = np.random.default_rng(9)
    rates = np.array([0.05, 0.1, 0.9, 0.95])
    first, second = paths(POOLED, float(rates.mean()), rates, 6000, rng)
    seen = design(POOLED).assess(first, second)
    assert np.mean((seen.interval.low > 0) | (seen.interval.high < 0)) <= 0.05
    assert np.mean(seen.state == "pivotal") <= 0.05


def test_points_stop_at_different_rounds_in_one_call() -> None:
    first = np.array([[8.0, np.nan, np.nan], [4.0, 8.0, 15.0]])
    second = np.array([[0.0, np.nan, np.nan], [4.0, 7.0, 16.0]])
    seen = design().assess(first, second)
    assert seen.state[0] == "pivotal" and seen.factual.tolist() == [8, 32] and seen.rounds.tolist() == [1, 3]
    alone = design().assess(first[:1, :1], second[:1, :1])
    assert seen.p[0] == alone.p[0] and seen.interval.low[0] == alone.interval.low[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([[5.0, 4.0]], [[1.0, 2.0]]),
        ([[5.0, 14.0]], [[1.0, 2.0]]),
        ([[9.0]], [[1.0]]),
        ([[np.nan, 4.0]], [[np.nan, 2.0]]),
        ([[5.0, np.nan]], [[1.0, 2.0]]),
        ([[0.5]], [[1.0]]),
        ([5.0], [1.0]),
    ],
)
def test_impossible_counts_are_refused(first: list[list[float]], second: list[list[float]]) -> None:
    with pytest.raises(InputError):
        design().assess(first, second)


@pytest.mark.parametrize("rounds", [(), ((8, 8), (8, 8)), ((8, 8), (6, 16)), ((0, 8),), ((400, 800),)])
def test_impossible_designs_are_refused(rounds: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InputError):
        Sequential(0.1, rounds=rounds)


def test_spending_levels_and_weighted_arms() -> None:
    """Weighted arms: Bonferroni over rounds, simulated with differing alternatives and no contrast."""
    looks = (8, 16, 32)
    levels = spending_levels(looks)
    assert levels.sum() == pytest.approx(0.05) and np.all(np.diff(levels) > 0)
    rng = np.random.default_rng(10)
    weights = np.array([1, -0.7, -0.2, -0.1])
    rates = np.array([0.0, 0.3, 0.7, 0.9])
    rates[0] = -(weights[1:] @ rates[1:])
    counts = np.cumsum([rng.binomial(m, rates, (4000, 4)) for m in np.diff((0, *looks))], axis=0)
    missed = np.zeros(4000, dtype=bool)
    for x, n, level in zip(counts, looks, levels, strict=True):
        interval = contrast_interval(x, n, weights, float(level))
        missed |= (interval.low > 0) | (interval.high < 0)
    assert np.mean(missed) <= 0.05


def test_spent_p_value_is_valid() -> None:
    rng = np.random.default_rng(11)
    levels = spending_levels([8, 16, 32])
    first, second = paths(SMALL, 0.4, 0.4, 5000, rng)
    own = np.column_stack([fisher_test(first[:, k], n, second[:, k], n).p for k, (n, _) in enumerate(SMALL)])
    p = spent_p_value(own, levels)
    for level in (0.01, 0.05, 0.2):
        assert np.mean(p <= level) <= level
    own[:, 1:] = np.nan
    assert np.all(spent_p_value(own, levels) >= p - 1e-12)


def print_savings(points: int = 4000) -> dict[float, Savings]:
    """Run as a script for the figures: rollouts of the default rounds against 64 rollouts for each of five arms."""
    out = {}
    for sesoi in (0.1, 0.15, 0.2):
        out[sesoi] = simulate_savings(Sequential(sesoi), np.random.default_rng(12), points=points)
        print(f"sesoi {sesoi}: " + ", ".join(f"{k} {v:.3f}" for k, v in out[sesoi]._asdict().items()))
    return out


@pytest.mark.slow
def test_savings_over_equal_allocation() -> None:
    savings = print_savings()
    for sesoi, ratio, kept in ((0.1, 0.45, 0.88), (0.15, 0.54, 0.92), (0.2, 0.46, 0.98)):
        got = savings[sesoi]
        assert got.ratio <= ratio
        assert got.decided >= kept * got.decided_equal
        assert got.false_pivotal <= 0.05


def test_boundaries_cost_little_over_one_look() -> None:
    """Interval at the last round against one fixed look: within 1.2 times as wide."""
    plan = design()
    x1, x2 = np.full((1, 3), 0), np.full((1, 3), 0)
    x1[0], x2[0] = [4, 8, 16], [4, 8, 16]
    rounds = plan.assess(x1, x2).interval
    half = float(rounds.high[0] - rounds.low[0]) / 2
    assert half <= 1.2 * stats.norm.isf(0.025) * np.sqrt(2 * 0.25 / 32)


if __name__ == "__main__":
    print_savings(20_000)
