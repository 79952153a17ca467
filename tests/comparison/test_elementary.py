"""Each elementary statistic against scipy, scikit-learn or statsmodels, with ties and missing values."""

from __future__ import annotations

from itertools import permutations as orders

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score
from statsmodels.stats.multitest import multipletests

from audit.comparison.pivotal import (
    at_budgets,
    auc_parts,
    average_precision,
    average_precision_draws,
    expected_hits,
    pooled_auc,
    pooled_auc_matrix,
    router_curve,
    shuffled,
    shuffled_signs,
    sign_parts,
)
from audit.comparison.ranks import by_trajectory, shuffled_medians
from audit.comparison.resample import above, cluster_counts, enough, equivalence, holm, median_draws, span, totals_by

SIZES = (3, 5, 8, 12, 20)
GROUPS = [np.arange(start, start + size) for start, size in zip(np.cumsum((0, *SIZES)), SIZES, strict=False)]
N = sum(SIZES)


@pytest.fixture(params=["continuous", "tied", "missing"])
def data(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x, y, z = rng.normal(size=(N, 4)), rng.normal(size=N), rng.normal(size=N)
    if request.param != "continuous":
        x, y, z = np.round(x), np.round(y), np.round(z)
    if request.param == "missing":
        x[rng.random((N, 4)) < 0.2] = np.nan
    return x, y, z


@pytest.mark.parametrize("kind", ["spearman", "kendall"])
def test_rank_correlations_are_scipys(data: tuple[np.ndarray, ...], kind: str) -> None:
    x, y, _ = data
    ours = by_trajectory(x, y, GROUPS, kind=kind)
    theirs = stats.spearmanr if kind == "spearman" else stats.kendalltau
    compared = 0
    for t, rows in enumerate(GROUPS):
        for s in range(x.shape[1]):
            kept = rows[np.isfinite(x[rows, s])]
            if kept.size < 3 or len(set(x[kept, s])) == 1 or len(set(y[kept])) == 1:
                assert np.isnan(ours[t, s])
                continue
            assert ours[t, s] == pytest.approx(theirs(x[kept, s], y[kept]).statistic, abs=1e-12)
            compared += 1
    assert compared >= 12


def test_partial_rank_correlation_is_the_formula(data: tuple[np.ndarray, ...]) -> None:
    x, y, z = data
    ours = by_trajectory(x, y, GROUPS, given=z)
    rows = GROUPS[-1]
    for s in range(x.shape[1]):
        kept = rows[np.isfinite(x[rows, s])]
        xy, xz, yz = (stats.spearmanr(a[kept], b[kept]).statistic for a, b in ((x[:, s], y), (x[:, s], z), (y, z)))
        expected = (xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2))
        assert ours[-1, s] == pytest.approx(expected, abs=1e-12)


def test_a_signal_that_is_its_covariate_has_no_partial_correlation() -> None:
    rng = np.random.default_rng(2)
    z = rng.normal(size=N)
    assert np.isnan(by_trajectory(z[:, None], rng.normal(size=N), GROUPS, given=z)).all()


@pytest.mark.parametrize("kind", ["spearman", "kendall"])
def test_shuffles_have_the_permutation_distribution(kind: str) -> None:
    x, y = np.array([1.0, 2, 2, 5]), np.array([0.0, 1, 1, 3])
    exact = [by_trajectory(x[list(order)][:, None], y, [np.arange(4)], kind=kind)[0, 0] for order in orders(range(4))]
    drawn = shuffled_medians(x[:, None], y, [np.arange(4)], kind=kind, shuffles=20_000)[:, 0]
    for value in set(np.round(exact, 6)):
        share = float(np.mean(np.isclose(exact, value, atol=1e-5)))
        assert np.mean(np.isclose(drawn, value, atol=1e-4)) == pytest.approx(share, abs=0.012)


def test_resampled_medians_are_medians() -> None:
    rng = np.random.default_rng(3)
    values, home = rng.normal(size=30), rng.integers(0, 9, 30)
    values[4] = np.nan
    counts = cluster_counts(9, 200, 0)
    assert (counts.sum(axis=1) == 9).all()
    expected = []
    for row in counts:
        members = np.repeat(values, row[home])
        members = members[np.isfinite(members)]
        expected.append(np.median(members) if members.size else np.nan)
    np.testing.assert_allclose(median_draws(values, home, counts), expected)


@pytest.mark.parametrize("decimals", [8, 0])
def test_auc_and_average_precision_are_scikit_learns(decimals: int) -> None:
    rng = np.random.default_rng(4)
    x, hit, game = np.round(rng.normal(size=200), decimals), rng.random(200) < 0.3, rng.integers(0, 15, 200)
    counts = cluster_counts(15, 30, 1)
    matrix = pooled_auc_matrix(x, hit, game, 15)
    hits, misses = (np.bincount(game[w], minlength=15).astype(float) for w in (hit, ~hit))
    for row, auc, ap in zip(
        counts,
        pooled_auc(matrix, hits, misses, counts),
        average_precision_draws(x, hit, game, counts),
        strict=True,
    ):
        n = row[game]
        assert auc == pytest.approx(roc_auc_score(hit, x, sample_weight=n), abs=1e-9)
        assert ap == pytest.approx(average_precision_score(np.repeat(hit, n), np.repeat(x, n)), abs=1e-6)
    assert average_precision(x, hit)[0] == pytest.approx(average_precision_score(hit, x), abs=1e-9)
    groups = [np.flatnonzero(game == g) for g in range(15)]
    right, pairs = auc_parts(x, hit, groups).sum(axis=0)
    usable = [rows for rows in groups if 0 < hit[rows].sum() < rows.size]
    weights = [hit[rows].sum() * (~hit[rows]).sum() for rows in usable]
    assert right / pairs == pytest.approx(
        np.average([roc_auc_score(hit[rows], x[rows]) for rows in usable], weights=weights), abs=1e-12
    )


def test_shuffled_statistics_have_the_right_centre() -> None:
    rng = np.random.default_rng(5)
    x, tau = np.round(rng.normal(size=N), 1), np.round(rng.normal(size=N))
    hit = rng.random(N) < 0.4
    chance = shuffled(x, hit, GROUPS, shuffles=4000, seed=0)
    assert chance["auc"].mean() == pytest.approx(0.5, abs=0.005)
    assert set(chance) == {"auc", "auc_pooled", "average_precision"}
    agreed, expected, compared = sign_parts(x, tau, GROUPS).sum(axis=0)
    drawn = shuffled_signs(x, tau, GROUPS, shuffles=4000, seed=0)
    assert drawn.mean() == pytest.approx(expected / compared, abs=0.005)
    assert agreed == ((np.sign(x) == np.sign(tau)) & (tau != 0) & (x != 0)).sum()


def test_precision_at_a_budget_and_its_hypergeometric_band() -> None:
    x, hit = np.array([3.0, 2, 2, 2, 1, 0, 0, 0, 0, 0]), np.array([1, 1, 0, 0, 1, 0, 0, 0, 0, 0], dtype=bool)
    assert expected_hits(x, hit, 2) == pytest.approx(1 + 1 / 3)  # one of three ties, one of them a hit
    row = at_budgets(x, hit, [0.5], 0.95)[0]
    assert (row["k"], row["precision"], row["recall"]) == (5, 3 / 5, 1.0)
    assert row["p"] == pytest.approx(1 / 12)  # C(7,2) / C(10,5)
    assert (row["recall_band_low"], row["recall_band_high"]) == (0.0, 1.0)


def test_the_router_gives_the_published_interval() -> None:
    """13.1 % routed, 11.9 % of the pivotal turns recovered, interval 9.4-14.9 (1,768 turns, 30.5 % of them pivotal)."""
    n, pivotal = 1768, 539
    hit = np.zeros(n, dtype=bool)
    hit[:64] = True  # 64 of 539 among the 232 most doubtful
    hit[300 : 300 + pivotal - 64] = True
    x = -np.arange(n, dtype=float)
    game = np.arange(n) % 50
    curve = router_curve(
        x, hit, game, 50, cluster_counts(50, 200, 0), [232 / n], level=0.95, per_trajectory=35.36, judge_cost=2.0
    )
    row = curve.iloc[0]
    assert round(row["share"], 3) == 0.131 and round(row["recall"], 3) == 0.119
    assert (round(row["low"], 3), round(row["high"], 3)) == (0.094, 0.149)
    assert row["calls_saved_per_trajectory"] == pytest.approx((1 - 232 / n) * 35.36)
    assert row["cost_per_trajectory"] == pytest.approx(232 / n * 35.36 * 2)


def test_holm_is_statsmodels() -> None:
    p = [0.01, 0.04, 0.03, 0.5, 0.002]
    np.testing.assert_allclose(holm(p), multipletests(p, method="holm")[1])
    assert holm([0.01, float("nan")]) == [0.02, 1.0]  # an announced hypothesis without a p-value still counts
    assert holm([]) == []


def test_p_value_and_interval_say_the_same() -> None:
    draws = np.random.default_rng(6).normal(0.2, 0.1, 20_000)
    for games in (8, 40):
        p = 2 * above(draws, games, 0.0)
        assert span(draws, games, 1 - p).low == pytest.approx(0.0, abs=0.01)
    assert equivalence(draws, 40, 0.0, 0.1) > 0.5
    assert equivalence(draws, 40, 0.0, 0.9) < 0.001


def test_a_draw_that_is_zero_but_for_rounding_is_not_above_zero() -> None:
    draws = np.where(np.arange(1000) < 300, 1e-17, 0.2)
    assert above(draws, 40, 0.0) > 0.2


def test_few_games_give_no_interval() -> None:
    draws = np.random.default_rng(7).normal(size=1000)
    assert enough(5, 0.95) and not enough(6, 0.95)
    assert np.isnan(span(draws, 5, 0.95).low) and "too few" in span(draws, 5, 0.95).reason
    half = np.where(np.arange(1000) < 100, np.nan, draws)
    assert "resamples" in span(half, 30, 0.95).reason


def test_totals() -> None:
    np.testing.assert_allclose(totals_by([[1, 2], [3, 4], [5, 6]], [1, 0, 1], 3), [[3, 4], [6, 8], [0, 0]])
