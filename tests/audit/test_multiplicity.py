"""False discovery rates, effect shares and reliability against hand computation, brute force and simulated truth."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
from scipy import stats

from audit.multiplicity import (
    CONTROL,
    deconvolved_share,
    discoveries,
    nonzero_share,
    null_nonzero_given_rate,
    null_nonzero_given_total,
    storey_share,
)
from audit.reliability import effects_with_variances, reliability, split_half
from envs.core import InputError

Array = np.ndarray


@cache
def fisher(n1: int, n2: int, total: int) -> tuple[dict[int, float], Array]:
    """Two-sided Fisher p-value of each table with these margins, and the attainable values."""
    x = np.arange(max(0, total - n2), min(n1, total) + 1)
    mass = stats.hypergeom.pmf(x, n1 + n2, total, n1)
    p = np.minimum(1, [mass[mass <= v * (1 + 1e-7)].sum() for v in mass])
    support = np.unique(np.round(p, 12))
    support[-1] = 1.0
    return {int(a): float(support[np.abs(support - v).argmin()]) for a, v in zip(x, p, strict=True)}, support


def fisher_all(x1: Array, x2: Array, n1: int, n2: int) -> tuple[Array, list[Array]]:
    tables = [fisher(n1, n2, int(a + b)) for a, b in zip(x1, x2, strict=True)]
    return np.array([t[0][int(a)] for t, a in zip(tables, x1, strict=True)]), [t[1] for t in tables]


def effects(rng: np.random.Generator, m: int, nulls: float, base: Array | None = None) -> tuple[Array, Array, Array]:
    """Success probabilities of both arms and tau: a share `nulls` has tau = 0, the rest |tau| uniform on .1-.6."""
    tau = np.where(rng.random(m) < nulls, 0.0, rng.choice([-1, 1], m) * rng.uniform(0.1, 0.6, m))
    low = np.maximum(0, -tau)
    other = low + (np.minimum(1, 1 - tau) - low) * (rng.random(m) if base is None else base)
    return other + tau, other, tau


# ---------------------------------------------------------------------------------------------------- discoveries


def test_worked_by_hand() -> None:
    """A takes .05 or 1, B takes .01, .2 or 1; A = .05 and B = .01 observed."""
    p, supports = [0.05, 0.01], [np.array([0.05, 1]), np.array([0.01, 0.2, 1])]
    first, second = 0.01 / 0.99, (0.05 / 0.95 + 0.01 / 0.99) / 2
    assert discoveries(p, supports, method="hsd").q == pytest.approx([second, first])
    assert discoveries(p, supports, method="hsu").q == pytest.approx([second, first])
    assert discoveries(p, supports, method="dby").q == pytest.approx([0.06 * 1.5 / 2, 0.01 * 1.5])
    assert discoveries(p, supports, method="bh").q == pytest.approx([0.05, 0.02])
    assert discoveries(p, supports, method="midp").q == pytest.approx([0.025, 0.01])
    # At alpha = .005 the anchor is below both p-values: S(.01; .01) = .0101 > 2 alpha.
    assert discoveries(p, supports, method="hsu", alpha=0.005).q.tolist() == [1.0, 1.0]


def test_published_example() -> None:
    """Nine 2x2 tables, 148 against 132: critical values printed in the documentation of the R package DiscreteFDR."""
    x1, x2 = np.array([4, 2, 2, 14, 6, 9, 4, 0, 1]), np.array([0, 0, 1, 3, 2, 1, 2, 2, 2])
    p, supports = fisher_all(x1, x2, 148, 132)
    assert np.sort(p)[:3] == pytest.approx([0.01243145, 0.02126871, 0.12476691], abs=1e-8)
    levels = np.unique(np.round(np.concatenate(supports), 11))
    critical = []
    for k in range(1, 10):
        fits = [t for t in levels[:-1] if odds_sum(supports, t, t) <= 0.05 * k]
        critical.append(max(fits))
    printed = [0.01243145, 0.02832448, 0.03109596, 0.04839433, 0.05014119, 0.07657062, 0.07657062]
    assert critical[:7] == pytest.approx(printed, abs=1e-8)
    result = discoveries(p, supports, method="hsd")
    assert np.sort(p[result.rejected]) == pytest.approx([0.01243145, 0.02126871], abs=1e-8)
    assert not discoveries(p, method="bh").rejected.any()
    assert discoveries(p, method="bh").q[3] == pytest.approx(0.09570921, abs=1e-8)


def odds_sum(supports: list[Array], t: float, u: float) -> float:
    """Sum over tests of F(t)/(1 - F(u)), from the definition, with F the support itself."""
    total = 0.0
    for support in supports:
        at = [support[support <= v * (1 + 1e-9)] for v in (t, u)]
        f, g = (float(a[-1]) if a.size else 0.0 for a in at)
        total += f / (1 - g) if g < 1 else (np.inf if f > 0 else 0.0)
    return total


def brute_force(p: Array, supports: list[Array], alpha: float, method: str) -> Array:
    """The procedures as the paper states them: critical values from the attainable set, then step up or down."""
    m, levels = p.size, np.unique(np.concatenate(supports))
    if method == "hsd":
        critical = [
            max([t for t in levels if odds_sum(supports, t, t) <= alpha * k], default=-1) for k in range(1, m + 1)
        ]
    else:
        last = max([t for t in levels if odds_sum(supports, t, t) <= alpha * m], default=-1)
        critical = [
            max([t for t in levels if t <= last and odds_sum(supports, t, last) <= alpha * k], default=-1)
            for k in range(1, m + 1)
        ]
    below = np.sort(p) <= np.array(critical) * (1 + 1e-9)
    if method == "hsd":
        count = m if below.all() else int(np.argmin(below))
    else:
        count = int(np.flatnonzero(below).max()) + 1 if below.any() else 0
    return p <= (np.sort(p)[count - 1] if count else -1) * (1 + 1e-9)


@pytest.mark.parametrize("method", ["hsu", "hsd"])
def test_decisions_equal_the_paper_definition(method: str) -> None:
    rng = np.random.default_rng(11)
    some = 0
    for _ in range(60):
        m = int(rng.integers(2, 14))
        q1, q2, _ = effects(rng, m, 0.3)
        n1, n2 = int(rng.integers(4, 12)), int(rng.integers(8, 30))
        p, supports = fisher_all(rng.binomial(n1, q1), rng.binomial(n2, q2), n1, n2)
        for alpha in (0.02, 0.05, 0.2, 0.5):
            expected = brute_force(p, supports, alpha, method)
            assert np.array_equal(discoveries(p, supports, method=method, alpha=alpha).rejected, expected)
            some += int(expected.sum())
    assert some > 200


def test_step_up_at_another_level_is_never_more_than_the_paper_gives_and_nested() -> None:
    rng = np.random.default_rng(12)
    for _ in range(30):
        q1, q2, _ = effects(rng, 12, 0.3)
        p, supports = fisher_all(rng.binomial(8, q1), rng.binomial(24, q2), 8, 24)
        result = discoveries(p, supports, method="hsu", alpha=0.1)
        assert np.array_equal(result.rejected, result.q <= 0.1)
        order = np.argsort(p)
        assert np.all(np.diff(result.q[order]) >= -1e-12)


def test_missing_shared_and_own_cdfs() -> None:
    support = np.array([0.02, 0.3, 1.0])
    p = np.array([0.02, np.nan, 0.3, 1.0])
    result = discoveries(p, [support] * 4, method="hsd")
    copies = discoveries(p, [support.copy() for _ in range(4)], method="hsd", cdfs=[support.copy() for _ in range(4)])
    assert np.isnan(result.q[1]) and not result.rejected[1] and result.tests == 3
    assert np.array_equal(result.q, copies.q, equal_nan=True)
    alone = discoveries(p[[0, 2, 3]], [support] * 3, method="hsd")
    assert result.q[[0, 2, 3]] == pytest.approx(alone.q)
    smaller = discoveries(p, [support] * 4, method="hsd", cdfs=[np.array([0.01, 0.2, 1.0])] * 4)
    assert smaller.q[0] == pytest.approx(3 * 0.01 / 0.99)

    # Supports made on the fly, so that memory addresses are reused, must not be confused with each other.
    class Lazy(list):  # type: ignore[type-arg]
        def __getitem__(self, i):  # type: ignore[no-untyped-def]
            return np.array([[0.02, 1.0], [0.01, 0.02, 0.3, 1.0]][i % 2])

    lazy = discoveries([0.02, 0.3, 0.02, 0.01], Lazy([0] * 4), method="dby")
    plain = discoveries([0.02, 0.3, 0.02, 0.01], [Lazy()[i] for i in range(4)], method="dby")
    assert np.array_equal(lazy.q, plain.q)


def test_points_that_cannot_be_significant_cost_nothing() -> None:
    """Discrete procedures give the same q whether or not points with the single attainable p-value 1 are added."""
    support = np.array([0.004, 0.2, 1.0])
    few = discoveries([0.004, 0.2], [support] * 2, method="hsd").q
    many = discoveries([0.004, 0.2] + [1.0] * 500, [support] * 2 + [np.array([1.0])] * 500, method="hsd").q
    assert many[:2] == pytest.approx(few)
    assert discoveries([0.004, 0.2] + [1.0] * 500, method="bh").q[0] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("n1", "n2"), [(3, 12), (8, 32)])
@pytest.mark.parametrize("nulls", [1.0, 0.7])
def test_rate_is_controlled_and_power_gained(n1: int, n2: int, nulls: float) -> None:
    rng = np.random.default_rng([n1, int(10 * nulls)])
    false, power = {k: [] for k in CONTROL}, {k: [] for k in CONTROL}  # type: ignore[var-annotated]
    for _ in range(300):
        q1, q2, tau = effects(rng, 150, nulls, rng.uniform(0, 0.15, 150))
        p, supports = fisher_all(rng.binomial(n1, q1), rng.binomial(n2, q2), n1, n2)
        for method in CONTROL:
            rejected = discoveries(p, supports, method=method).rejected
            false[method].append(rejected[tau == 0].sum() / max(1, rejected.sum()))
            power[method].append(rejected[tau != 0].sum() / max(1, (tau != 0).sum()))
    for method in CONTROL:
        assert np.mean(false[method]) <= 0.05 + 2 * np.std(false[method]) / 300**0.5
    if nulls < 1:
        mean = {k: float(np.mean(v)) for k, v in power.items()}
        assert mean["hsu"] > mean["bh"] and mean["hsd"] > mean["bh"] and mean["dby"] > mean["by"] - 1e-9
        if n1 == 8:
            assert mean["hsu"] > 1.5 * mean["bh"] > 0.1
            assert mean["hsu"] > mean["midp"] > mean["bh"]


@pytest.mark.slow
def test_any_dependence_is_covered_by_dby() -> None:
    """Blocks of ten points share all rollouts (the worst common random numbers): dby still holds."""
    rng = np.random.default_rng(13)
    false = []
    for _ in range(600):
        q1, q2, tau = effects(rng, 12, 0.8)
        x1, x2 = rng.binomial(8, q1).repeat(10), rng.binomial(32, q2).repeat(10)
        rejected = discoveries(*fisher_all(x1, x2, 8, 32), method="dby").rejected
        false.append(rejected[tau.repeat(10) == 0].sum() / max(1, rejected.sum()))
    assert np.mean(false) <= 0.05 + 2 * np.std(false) / 600**0.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: discoveries([0.5], method="holm"), "unknown method"),
        (lambda: discoveries([1.5], method="bh"), r"\[0, 1\]"),
        (lambda: discoveries([0.5]), "supports"),
        (lambda: discoveries([0.5], [[0.4, 1]]), "not among"),
        (lambda: discoveries([0.5], [[1, 0.5]]), "ascend"),
        (lambda: discoveries([0.5], [[0.5, 1]], cdfs=[[0.5, 0.9]]), "CDF"),
        (lambda: discoveries([0.5], [[0.5, 1]], method="bh", cdfs=[[0.6, 1]]), "exceed"),
        (lambda: discoveries([0.5], [[0.5, 1], [1]]), "one support"),
        (lambda: null_nonzero_given_rate(1.2, [3, 3]), "rate"),
        (lambda: null_nonzero_given_total(7, [3, 3]), "total"),
        (lambda: null_nonzero_given_total(1, [3, 3, 3], [0.5, 0.4]), "sum to 1"),
        (lambda: null_nonzero_given_total(1, [3, 0, 3], [0.5, 0.5]), "renormalise"),
        (lambda: nonzero_share([[1, 4]], [[3, 3]], ["a"]), "whole numbers"),
        (lambda: storey_share([1.0], [[1.0]], ["a"], threshold=1), "threshold"),
        (lambda: deconvolved_share([[1, 1, 1]], [[3, 3, 3]], ["a"]), "two columns"),
        (lambda: effects_with_variances([[1, 1, 1]], [[3, 3, 3]], [[0.5, 0.2]]), "sum to 1"),
        (lambda: split_half([[1, 1]], [[3, 3]], splits=0), "splits"),
        (lambda: reliability([1.0], [1.0, 2.0], ["a"]), "one length"),
    ],
)
def test_bad_input_is_one_clear_sentence(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


# ------------------------------------------------------------------------------------------------- nonzero share


def test_null_rates_of_the_preprint_design() -> None:
    assert null_nonzero_given_rate(0.024, [3, 12]) == pytest.approx(0.305, abs=0.0005)
    assert null_nonzero_given_rate(0.05, [3, 12]) == pytest.approx(0.54, abs=0.005)
    assert null_nonzero_given_rate(0.0, [3, 12]) == 0 == null_nonzero_given_rate(1.0, [3, 12])


def enumerate_null(n: list[int], weights: list[float] | None, rate: float) -> tuple[float, dict[int, float]]:
    """P(nonzero | rate) and P(nonzero | total) over every outcome of every rollout arm."""
    nonzero, by_total, all_total = 0.0, {}, {}  # type: ignore[var-annotated]
    for x in product(*(range(k + 1) for k in n)):
        chance = float(np.prod([stats.binom.pmf(a, k, rate) for a, k in zip(x, n, strict=True)]))
        rest = (
            sum(x[1:]) / sum(n[1:])
            if weights is None
            else sum(w * a / k for w, a, k in zip(weights, x[1:], n[1:], strict=True))
        )
        hit = abs(x[0] / n[0] - rest) > 1e-9
        nonzero += chance * hit
        by_total[sum(x)] = by_total.get(sum(x), 0.0) + chance * hit
        all_total[sum(x)] = all_total.get(sum(x), 0.0) + chance
    return nonzero, {s: by_total[s] / all_total[s] for s in all_total}


@pytest.mark.parametrize(
    ("n", "weights"),
    [
        ([3, 12], None),
        ([4, 2, 3], None),
        ([3, 3, 3, 3], [0.25, 0.5, 0.25]),
        ([4, 2, 3], [1 / 3, 2 / 3]),
        ([2, 2, 3, 2, 3], [0.1, 0.2, 0.3, 0.4]),
        ([5, 3, 2], [0.6180339887, 0.3819660113]),
    ],
)
def test_null_rates_equal_enumeration(n: list[int], weights: list[float] | None) -> None:
    for rate in (0.1, 0.6):
        nonzero, by_total = enumerate_null(n, weights, rate)
        assert null_nonzero_given_rate(rate, n, weights) == pytest.approx(nonzero, abs=1e-10)
        for total, chance in by_total.items():
            assert null_nonzero_given_total(total, n, weights) == pytest.approx(chance, abs=1e-10)


def test_null_share_is_calibrated_where_the_plug_in_is_not() -> None:
    """Rates differ over points and many are near 0: the conditional null share is unbiased, the plug-in far too low."""
    rng = np.random.default_rng(14)
    gap, plug_gap, covered = [], [], 0
    for _ in range(120):
        rate = np.repeat(rng.choice([0.0, 0.024, 0.05, 0.5], 40), 10)
        x = np.column_stack([rng.binomial(4, rate), rng.binomial(4, rate)])
        result = nonzero_share(x, np.full((400, 2), 4), np.repeat(np.arange(40), 10))
        gap.append(result.observed.estimate - result.null.estimate)
        plug_gap.append(result.observed.estimate - result.plug_in)
        covered += result.excess.low <= 0 <= result.excess.high
    assert abs(np.mean(gap)) < 3 * np.std(gap) / 120**0.5
    assert np.mean(plug_gap) > 0.04
    assert covered / 120 > 0.9


def test_nonzero_share_of_weighted_and_absent_arms() -> None:
    x = np.array([[2, 1, 1, 0], [3, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    n = np.array([[4, 2, 2, 0], [3, 3, 3, 3], [2, 2, 0, 0], [3, 0, 0, 0]])
    w = np.array([[0.3, 0.7, 0.0], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    result = nonzero_share(x, n, ["a", "b", "c", "d"], weights=w)
    assert result.observed.n_points == 3 and result.observed.estimate == pytest.approx(1 / 3)
    expected = [
        null_nonzero_given_total(4, [4, 2, 2], [0.3, 0.7]),
        null_nonzero_given_total(3, [3, 3, 3, 3], [0.2, 0.3, 0.5]),
        null_nonzero_given_total(2, [2, 2]),
    ]
    assert result.null.estimate == pytest.approx(np.mean(expected))
    # 3 against 12 with 1 success in all: nonzero whatever happens, hence no evidence.
    fixed = nonzero_share([[1, 0], [0, 1]], [[3, 12]] * 2, ["a", "b"])
    assert fixed.fixed == 1.0 and fixed.excess.estimate == 0 and "equal" in fixed.excess.reason


# --------------------------------------------------------------------------------------------- null-corrected share


def clustered(rng: np.random.Generator, share: float, n1: int, n2: int) -> tuple[Array, Array, Array]:
    label = np.repeat(np.arange(50), 10)
    nulls = 1 - (rng.beta(4 * share, 4 * (1 - share), 50)[label] if share else np.zeros(500))
    q1, q2, _ = effects(rng, 500, 0.0)
    null = rng.random(500) < nulls
    flat = rng.random(500)
    x1 = rng.binomial(n1, np.where(null, flat, q1))
    return x1, rng.binomial(n2, np.where(null, flat, q2)), label


def test_storey_by_hand() -> None:
    """Support .4/1, threshold .5: p = .4 lies below it; p = 1 is spread over (.4, 1], five sixths above."""
    support = np.array([0.4, 1.0])
    result = storey_share([0.4, 0.4, 1.0, 1.0], [support] * 4, ["a", "b", "c", "d"])
    assert result.estimate == pytest.approx(1 - (2 * (5 / 6) / 0.5) / 4)
    all_one = storey_share([1.0, 1.0, 1.0], [np.array([1.0])] * 3, ["a", "b", "c"])
    assert all_one.estimate == 0 and "equal" in all_one.reason


@pytest.mark.slow
@pytest.mark.parametrize(("n1", "n2"), [(3, 12), (8, 32)])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_storey_is_exact_without_effects_and_a_lower_bound_with(n1: int, n2: int, share: float) -> None:
    rng = np.random.default_rng([n1, int(10 * share)])
    raw, below = [], 0
    for _ in range(120):
        x1, x2, label = clustered(rng, share, n1, n2)
        result = storey_share(*fisher_all(x1, x2, n1, n2), label)
        raw.append(float(result.method.split("unclipped ")[1].split(",")[0]))
        below += result.low <= share
    assert below / 120 >= 0.925
    if share == 0:
        assert abs(np.mean(raw)) < 3 * np.std(raw) / 120**0.5
    else:
        assert 0.1 < np.mean(raw) < 0.27


@pytest.mark.slow
@pytest.mark.parametrize(("n1", "n2"), [(8, 8), (8, 32)])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_deconvolution_covers_when_effects_are_spread_out(n1: int, n2: int, share: float) -> None:
    rng = np.random.default_rng([n1, n2, int(10 * share)])
    estimates, hit = [], 0
    for _ in range(40):
        x1, x2, label = clustered(rng, share, n1, n2)
        result = deconvolved_share(np.column_stack([x1, x2]), np.full((500, 2), (n1, n2)), label, draws=150)
        estimates.append(result.estimate)
        hit += result.low <= share <= result.high
    assert abs(np.mean(estimates) - share) < 0.06
    assert hit / 40 >= 0.85


def test_deconvolution_misses_small_effects_and_says_so_when_it_cannot_speak() -> None:
    rng = np.random.default_rng(15)
    tau = np.where(rng.random(500) < 0.7, 0, 0.15 * rng.choice([-1, 1], 500))
    base = rng.uniform(0.15, 0.85, 500)
    x = np.column_stack([rng.binomial(8, base + tau), rng.binomial(8, base)])
    result = deconvolved_share(x, np.full((500, 2), 8), np.repeat(np.arange(50), 10), draws=50)
    assert result.estimate < 0.25
    one = deconvolved_share(x[:10], np.full((10, 2), 8), ["a"] * 10, draws=50)
    assert np.isnan(one.low) and "2 clusters" in one.reason
    none = deconvolved_share([[0, 0]], [[0, 3]], ["a"])
    assert np.isnan(none.estimate) and none.reason == "no points with both arms"


# ---------------------------------------------------------------------------------------------------- reliability


def test_variances_are_unbiased() -> None:
    rng = np.random.default_rng(16)
    rates, n, w = np.array([0.3, 0.6, 0.1]), np.array([5, 3, 4]), np.array([0.25, 0.75])
    x = rng.binomial(n, rates, (40_000, 3))
    tau, v = effects_with_variances(x, np.tile(n, (40_000, 1)), np.tile(w, (40_000, 1)))
    truth = 0.3 * 0.7 / 5 + 0.25**2 * 0.6 * 0.4 / 3 + 0.75**2 * 0.1 * 0.9 / 4
    assert tau.mean() == pytest.approx(0.3 - 0.25 * 0.6 - 0.75 * 0.1, abs=0.005)
    assert tau.var() == pytest.approx(truth, rel=0.03) and v.mean() == pytest.approx(truth, rel=0.03)
    undefined = effects_with_variances([[1, 1], [1, 0]], [[1, 3], [2, 0]])
    assert np.isnan(undefined[1]).all() and np.isfinite(undefined[0][0]) and np.isnan(undefined[0][1])


def test_closed_form_is_the_average_over_every_halving() -> None:
    """Four rollouts in either arm of five points: all 6 x 6 halvings per point enumerated for the moments."""
    x, n = np.array([[4, 1], [2, 2], [3, 0], [0, 2], [1, 3]]), np.full((5, 2), 4)
    halvings = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    first = np.zeros(5)
    square, cross = np.zeros(5), np.zeros(5)
    for i in range(5):
        arms = [np.arange(4) < k for k in x[i]]
        values = []
        for a, b in product(halvings, halvings):
            one = arms[0][list(a)].mean() - arms[1][list(b)].mean()
            other = (arms[0].sum() - 2 * arms[0][list(a)].mean() - arms[1].sum() + 2 * arms[1][list(b)].mean()) / 2
            values.append((one, other))
        table = np.array(values)
        first[i], square[i], cross[i] = table[:, 0].mean(), (table[:, 0] ** 2).mean(), table.prod(1).mean()
    # Halvings of different points are independent, so products across points factor into the means.
    covariance = (cross.sum() - (first.sum() ** 2 - (first**2).sum() + cross.sum()) / 5) / 4
    spread = (square.sum() - (first.sum() ** 2 - (first**2).sum() + square.sum()) / 5) / 4
    half = covariance / spread
    tau, v = effects_with_variances(x, n)
    assert reliability(tau, v, list("abcde")).value.estimate == pytest.approx(2 * half / (1 + half))


def test_random_halving_agrees_with_the_closed_form() -> None:
    rng = np.random.default_rng(17)
    q1, q2, _ = effects(rng, 800, 0.7)
    x = np.column_stack([rng.binomial(8, q1), rng.binomial(8, q2)])
    n = np.full((800, 2), 8)
    closed = reliability(*effects_with_variances(x, n), np.repeat(np.arange(80), 10), draws=500)
    halves = split_half(x, n, splits=200)
    assert halves.pearson_full == pytest.approx(closed.value.estimate, abs=0.015)
    assert halves.points == 800
    assert split_half(x, n, splits=5) == split_half(x, n, splits=5)
    absolute = split_half(x, n, absolute=True, splits=50)
    assert absolute.pearson_full < halves.pearson_full


@pytest.mark.slow
def test_reliability_interval_covers() -> None:
    rng = np.random.default_rng(18)
    q1, q2, tau = effects(rng, 400_000, 0.7)
    noise = (q1 * (1 - q1) / 8 + q2 * (1 - q2) / 8).mean()
    truth = tau.var() / (tau.var() + noise)
    hit = ceilings = 0
    for _ in range(300):
        q1, q2, _ = effects(rng, 400, 0.7)
        x = np.column_stack([rng.binomial(8, q1), rng.binomial(8, q2)])
        result = reliability(*effects_with_variances(x, np.full((400, 2), 8)), np.repeat(np.arange(40), 10), draws=600)
        hit += result.value.low <= truth <= result.value.high
        ceilings += result.ceiling_low <= truth**0.5 <= result.ceiling_high
    assert abs(hit / 300 - 0.95) < 0.035
    assert ceilings == hit


def test_a_perfect_signal_does_not_reach_one() -> None:
    """Spearman of true with estimated effects: .56/.66/.73/.77 at 4/8/16/32 rollouts, 30 % of points nonzero."""
    rng = np.random.default_rng(19)
    m = 20_000
    reached = []
    for rollouts, expected in ((4, 0.56), (8, 0.66), (16, 0.73), (32, 0.77)):
        q1, q2, tau = effects(rng, m, 0.7)
        x = np.column_stack([rng.binomial(rollouts, q1), rng.binomial(rollouts, q2)])
        n = np.full((m, 2), rollouts)
        estimate, variance = effects_with_variances(x, n)
        result = reliability(estimate, variance, np.arange(m), draws=200)
        spearman = float(stats.spearmanr(tau, estimate).statistic)
        assert spearman == pytest.approx(expected, abs=0.05)
        # The ceiling is Pearson's, exactly; ranks stay below it since noise orders the true zeros.
        assert result.ceiling == pytest.approx(float(np.corrcoef(tau, estimate)[0, 1]), abs=0.02)
        assert spearman < result.ceiling
        reached.append(spearman)
    assert reached == sorted(reached)


def test_reliability_missing_and_negative() -> None:
    few = reliability([0.1, 0.2, np.nan], [0.01, 0.01, 0.01], ["a", "b", "c"])
    assert np.isnan(few.value.estimate) and few.value.reason == "fewer than 3 points" and np.isnan(few.ceiling)
    flat = reliability([0.1] * 4, [0.01] * 4, list("abcd"))
    assert np.isnan(flat.value.estimate) and "equal" in flat.value.reason
    noise = reliability([0.1, 0.2, 0.15, 0.12], [0.5] * 4, list("abcd"), draws=200)
    assert noise.value.estimate < 0 and np.isnan(noise.ceiling) and "noise" in noise.ceiling_reason
    one = reliability([0.1, 0.5, 0.9], [0.01] * 3, ["a"] * 3)
    assert one.value.estimate > 0 and np.isnan(one.value.low) and "2 clusters" in one.value.reason
    short = split_half([[1, 1], [0, 2]], [[2, 2], [2, 2]])
    assert np.isnan(short.pearson) and "3 points" in short.reason
    same = split_half([[0, 0]] * 5, [[2, 2]] * 5)
    assert np.isnan(same.pearson_full) and "equal" in same.reason
