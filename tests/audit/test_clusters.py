"""Cluster intervals, bootstrap, tables by group and unseen mass against hand computation and exact simulation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy import stats

from audit.clusters import (
    bootstrap_interval,
    cluster_bootstrap,
    cluster_mean,
    cluster_share,
    cluster_totals,
    mean_table,
    share_table,
    unseen_mass,
    unseen_mass_of_counts,
)
from envs.core import InputError


def beta_binomial(rng: np.random.Generator, sizes: np.ndarray, share: float, icc: float) -> np.ndarray:
    if icc == 0:
        return rng.binomial(1, share, int(sizes.sum()))
    rates = rng.beta(share * (1 - icc) / icc, (1 - share) * (1 - icc) / icc, sizes.size)
    return rng.binomial(1, np.repeat(rates, sizes))


def coverage(rng: np.random.Generator, clusters: int, share: float, icc: float, equal: bool, runs: int) -> float:
    hit = 0
    for _ in range(runs):
        sizes = np.full(clusters, 15) if equal else rng.integers(3, 31, clusters)
        y = beta_binomial(rng, sizes, share, icc)
        interval = cluster_share(y, np.repeat(np.arange(clusters), sizes))
        hit += interval.low <= share <= interval.high
    return hit / runs


@pytest.mark.slow
@pytest.mark.parametrize("clusters", [20, 50])
@pytest.mark.parametrize("icc", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_share_interval_covers(clusters: int, icc: float, share: float) -> None:
    rng = np.random.default_rng([clusters, int(10 * icc), int(100 * share)])
    # Rare hits in strongly alike clusters: the documented exception, where too few clusters hold all the hits.
    lowest = 0.89 if (icc, share, clusters) == (0.3, 0.05, 20) else 0.915
    for equal in (True, False):
        assert lowest <= coverage(rng, clusters, share, icc, equal, 700) <= 0.995


def test_points_as_independent_would_not_cover() -> None:
    """The failure that the cluster interval mends: a binomial interval at ICC .3."""
    rng = np.random.default_rng(0)
    naive = clustered = 0
    for _ in range(300):
        sizes = np.full(20, 15)
        y = beta_binomial(rng, sizes, 0.3, 0.3)
        low, high = stats.binomtest(int(y.sum()), y.size).proportion_ci(method="wilson")
        naive += low <= 0.3 <= high
        interval = cluster_share(y, np.repeat(np.arange(20), sizes))
        clustered += interval.low <= 0.3 <= interval.high
    assert naive / 300 < 0.75
    assert clustered / 300 > 0.91


def test_share_of_zero_and_one_keeps_a_width() -> None:
    labels = np.repeat(np.arange(10), 4)
    none = cluster_share(np.zeros(40), labels)
    every = cluster_share(np.ones(40), labels)
    assert (none.estimate, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(1 - 0.025**0.1)
    assert (every.estimate, every.high) == (1.0, 1.0)
    assert every.low == pytest.approx(0.025**0.1)


def test_bound_without_hits_is_valid_for_any_dependence() -> None:
    """P(no hit in G clusters) <= (1 - p)^G: perfectly alike points attain it, independent ones fall below."""
    p, size, clusters = 0.1, 7, 12
    alike, independent = (1 - p) ** clusters, (1 - p) ** (size * clusters)
    bound = cluster_share(np.zeros(clusters * size), np.repeat(np.arange(clusters), size), level=1 - 2 * alike)
    assert bound.high == pytest.approx(p)
    assert independent < alike


@pytest.mark.slow
def test_mean_interval_covers() -> None:
    rng = np.random.default_rng(3)
    for clusters, rho in ((8, 0.2), (20, 0.5)):
        hit = 0
        for _ in range(1500):
            sizes = rng.integers(2, 25, clusters)
            label = np.repeat(np.arange(clusters), sizes)
            y = 1 + rng.normal(0, rho**0.5, clusters)[label] + rng.normal(0, (1 - rho) ** 0.5, label.size)
            interval = cluster_mean(y, label)
            hit += interval.low <= 1 <= interval.high
        assert abs(hit / 1500 - 0.95) < 0.025


def test_mean_of_equal_clusters_is_the_t_interval_of_cluster_means() -> None:
    rng = np.random.default_rng(1)
    means = rng.normal(size=9)
    y = (means[:, None] + np.array([-1, 0, 1])).ravel()
    interval = cluster_mean(y, np.repeat(np.arange(9), 3))
    expected = stats.t.interval(0.95, 8, means.mean(), stats.sem(means))
    assert interval.df == pytest.approx(8)
    assert (interval.low, interval.high) == pytest.approx(expected)


def test_singletons_are_independent_points() -> None:
    y = np.random.default_rng(2).normal(size=30)
    interval = cluster_mean(y, np.arange(30))
    assert (interval.low, interval.high) == pytest.approx(stats.t.interval(0.95, 29, y.mean(), stats.sem(y)))


def test_cr2_against_matrices() -> None:
    """Variance and degrees of freedom from the definition, with explicit projection matrices."""
    rng = np.random.default_rng(5)
    sizes = np.array([2, 9, 4, 1, 6])
    label = np.repeat(np.arange(5), sizes)
    y = rng.normal(size=22) + rng.normal(size=5)[label]
    n = y.size
    hat = np.full((n, n), 1 / n)
    vectors = []
    for g in range(5):
        inside = label == g
        block = np.eye(sizes[g]) - hat[np.ix_(inside, inside)]
        values, basis = np.linalg.eigh(block)
        root = basis @ np.diag(values**-0.5) @ basis.T
        vectors.append((np.eye(n) - hat)[inside].T @ root @ np.ones(sizes[g]) / n)
    q = np.array(vectors)
    variance = float(((q @ y) ** 2).sum())
    interval = cluster_mean(y, label)
    groups = [y[label == g] for g in range(5)]
    between = sum(s * (v.mean() - y.mean()) ** 2 for s, v in zip(sizes, groups, strict=True)) / 4
    within = sum(((v - v.mean()) ** 2).sum() for v in groups) / (n - 5)
    n0 = (n - (sizes**2).sum() / n) / 4
    icc = min(1.0, max(0.0, (between - within) / (between + (n0 - 1) * within)))
    omega = (1 - icc) * np.eye(n) + icc * (label[:, None] == label[None])
    moments = q @ omega @ q.T
    df = np.trace(moments) ** 2 / (moments**2).sum()
    assert interval.df == pytest.approx(df)
    assert (interval.high - interval.low) / 2 == pytest.approx(stats.t.ppf(0.975, df) * variance**0.5)


def test_standard_error_is_close_to_statsmodels_with_many_clusters() -> None:
    rng = np.random.default_rng(6)
    sizes = rng.integers(1, 9, 400)
    label = np.repeat(np.arange(400), sizes)
    y = rng.normal(size=label.size) + rng.normal(size=400)[label]
    fit = sm.OLS(y, np.ones(y.size)).fit(cov_type="cluster", cov_kwds={"groups": label})
    interval = cluster_mean(y, label)
    se = (interval.high - interval.low) / 2 / stats.t.ppf(0.975, interval.df)
    assert se == pytest.approx(float(fit.bse[0]), rel=0.01)


@pytest.mark.parametrize("function", [cluster_mean, cluster_share])
def test_missing_has_a_reason(function) -> None:  # type: ignore[no-untyped-def]
    one = function([1, 0, 1], ["a", "a", "a"])
    assert np.isnan(one.low) and np.isnan(one.high) and "2 clusters" in one.reason
    assert one.estimate == pytest.approx(2 / 3)
    empty = function([np.nan, np.nan], ["a", "b"])
    assert np.isnan(empty.estimate) and empty.reason == "no points"
    left_out = function([1, 0, np.nan], ["a", "b", "c"])
    assert (left_out.n_points, left_out.n_clusters) == (2, 2)


def test_mean_without_variation_is_missing() -> None:
    assert "equal" in cluster_mean([0.3, 0.3, 0.3], ["a", "b", "c"]).reason
    assert "no variation between clusters" in cluster_mean([0, 1, 0, 1], ["a", "a", "b", "b"]).reason


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cluster_share([0, 2], ["a", "b"]), "True/False"),
        (lambda: cluster_share([0, 1], ["a"]), "cluster labels"),
        (lambda: cluster_mean([0, np.inf], ["a", "b"]), "finite"),
        (lambda: cluster_mean([0, 1], ["a", None]), "missing"),
        (lambda: cluster_mean([0, 1], ["a", "b"], level=1.0), "level"),
        (lambda: cluster_bootstrap(np.ones((1, 2)), lambda t: t[:, 0]), "2 clusters"),
        (lambda: share_table(pd.DataFrame({"a": [1]}), "b", cluster="a"), "no column"),
        (lambda: unseen_mass("ab", probabilities={"a": 0.5, "c": 0.5}), "drawn but has no probability"),
        (lambda: unseen_mass("ab", probabilities={"a": 0.5, "b": 0.4}), "sum to 1"),
        (lambda: unseen_mass("ab", held_out=2), "held_out"),
        (lambda: unseen_mass_of_counts([1, -1]), "whole numbers"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=words):
        call()


def test_bootstrap_repeats_and_matches_the_sampling_error() -> None:
    rng = np.random.default_rng(8)
    sums = np.column_stack([rng.normal(size=300), np.ones(300)])

    def mean(totals: np.ndarray) -> np.ndarray:
        return totals[:, 0] / totals[:, 1]

    first = cluster_bootstrap(sums, mean, draws=4000, seed=7)
    assert np.array_equal(first, cluster_bootstrap(sums, mean, draws=4000, seed=7))
    assert not np.array_equal(first, cluster_bootstrap(sums, mean, draws=4000, seed=8))
    assert first.shape == (4000,)
    assert first.std() == pytest.approx(sums[:, 0].std() / 300**0.5, rel=0.05)


def test_bootstrap_draws_whole_clusters() -> None:
    totals = cluster_bootstrap(np.eye(5), lambda t: t, draws=500)
    assert np.all(totals.sum(1) == 5)
    assert np.all(totals == np.round(totals))


def test_bootstrap_interval_is_missing_where_resamples_fail() -> None:
    sums = np.array([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])

    def ratio(totals: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return totals[:, 0] / totals[:, 1]

    interval = bootstrap_interval(sums, ratio, n_points=3, draws=500)
    assert interval.estimate == 1 and np.isnan(interval.low) and "resamples" in interval.reason


def test_cluster_totals() -> None:
    totals = cluster_totals([[1, 2], [3, 4], [5, 6]], ["b", "a", "b"])
    assert totals.tolist() == [[6, 8], [3, 4]]


def test_share_table_by_group_and_category() -> None:
    frame = pd.DataFrame(
        {
            "policy": ["p"] * 6 + ["q"] * 2,
            "run": ["a", "a", "b", "b", "c", "c", "d", "d"],
            "state": ["defined", "defined", "defined", "error", "defined", None, "defined", "defined"],
            "hit": [True, False, True, False, True, True, False, True],
        }
    )
    table = share_table(frame, "state", cluster="run", by=["policy"])
    p = table[table["policy"] == "p"].set_index("category")
    assert p.loc["defined", "share"] == pytest.approx(4 / 5) and p.loc["defined", "n_points"] == 5
    assert p.loc["error", "share"] == pytest.approx(1 / 5)
    q = table[table["policy"] == "q"].set_index("category")
    assert q.loc["error", "share"] == 0 and "2 clusters" in q.loc["error", "reason"] and np.isnan(q.loc["error", "low"])
    whole = share_table(frame, "hit", cluster="run")
    alone = cluster_share(frame["hit"], frame["run"])
    assert whole.loc[0, "low"] == alone.low and whole.loc[0, "n_clusters"] == 4
    gaps = share_table(frame.assign(hit=[True, False, None, True, True, None, False, True]), "hit", cluster="run")
    assert len(gaps) == 1 and gaps.loc[0, "n_points"] == 6 and gaps.loc[0, "share"] == pytest.approx(4 / 6)
    means = mean_table(frame.assign(x=range(8)), "x", cluster="run", by=["policy"])
    assert means["mean"].tolist() == [2.5, 6.5]


def test_unseen_mass_exact_and_good_turing() -> None:
    chances = {"go": 0.7, "take": 0.2, "look": 0.1}
    exact = unseen_mass(["go", "go", "look"], probabilities=chances)
    assert exact.exact and exact.estimate == pytest.approx(0.2) and exact.upper == exact.estimate
    rough = unseen_mass(["go", "go", "look", "go"])
    assert rough.estimate == 0.25 and not rough.exact and (rough.n, rough.distinct, rough.singletons) == (4, 2, 1)
    assert rough.upper == pytest.approx(stats.beta.ppf(0.95, 2, 1))  # "look" is new among the 2 held out
    same = unseen_mass(["go"] * 16)
    assert same.estimate == 0 and same.upper == pytest.approx(1 - 0.05 ** (1 / 8))
    nothing = unseen_mass([])
    assert np.isnan(nothing.estimate) and nothing.upper == 1 and nothing.reason == "no draws"


def test_unseen_mass_is_unbiased_up_to_one_draw() -> None:
    """E[N1/n] equals the expected mass unseen by n - 1 draws (Good 1953), exactly."""
    rng = np.random.default_rng(9)
    p = np.array([0.5, 0.2, 0.1, 0.1, 0.05, 0.05])
    n = 10
    estimates = [unseen_mass(rng.choice(6, n, p=p).tolist()).estimate for _ in range(6000)]
    assert np.mean(estimates) == pytest.approx(float((p * (1 - p) ** (n - 1)).sum()), abs=0.005)


@pytest.mark.parametrize("n", [8, 16, 32])
def test_unseen_mass_bound_holds(n: int) -> None:
    rng = np.random.default_rng(n)
    for p in (np.array([0.9, 0.1]), np.full(40, 1 / 40), 0.5 ** np.arange(1, 20)):
        p = p / p.sum()
        over = over_counts = 0
        for _ in range(1200):
            draws = rng.choice(p.size, n, p=p)
            truth = 1 - p[np.unique(draws)].sum()
            over += truth > unseen_mass(draws.tolist()).upper
            over_counts += truth > unseen_mass_of_counts(np.bincount(draws, minlength=p.size)).upper
        assert over / 1200 <= 0.065 and over_counts / 1200 <= 0.065
