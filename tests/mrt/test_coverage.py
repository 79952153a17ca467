"""Simulated coverage of every interval with a nominal claim, on trials whose truth is exact.

R = 500 replications on DGP C and D: .925 to .975 is .95 +- 2.6 standard errors. The smaller trials take 1,000, so that
the same band leaves room for what few clusters cost (long runs: .94 to .965). Each simulation serves many checks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from sklearn.tree import DecisionTreeRegressor

from audit.mrt import Effects, blip, policy_gain
from audit.mrt.classic import dcee, emee, emee2, wcls
from audit.mrt.design import Rule
from audit.mrt.diagnostics import randomization_check
from tests.mrt.dgp import (
    G_C,
    POLICIES_C,
    POLICIES_D,
    S_C,
    draw_c,
    draw_d,
    draw_exogenous,
    draw_log,
    draw_tasks,
    trajectory_average_c,
    truth_c,
    truth_d,
)

pytestmark = pytest.mark.slow
R = 500


class Tally:
    """Hits and errors by estimator and effect."""

    def __init__(self) -> None:
        self.hits: dict[str, list[bool]] = defaultdict(list)
        self.errors: dict[str, list[float]] = defaultdict(list)
        self.widths: dict[str, list[float]] = defaultdict(list)

    def add(self, name: str, effects: Effects, truth: list[float] | np.ndarray) -> None:
        low, high = effects.conf_int().T
        for i, value in enumerate(np.atleast_1d(truth)):
            key = f"{name}[{i}]"
            self.hits[key].append(bool(low[i] <= value <= high[i]))
            self.errors[key].append(float(effects.estimate[i] - value))
            self.widths[key].append(float(effects.se[i]))

    def table(self) -> pd.DataFrame:
        rows = [
            (k, np.mean(self.hits[k]), np.mean(self.errors[k]), np.std(self.errors[k]), np.mean(self.widths[k]))
            for k in self.hits
        ]
        return pd.DataFrame(rows, columns=["estimator", "coverage", "bias", "sd", "mean_se"]).set_index("estimator")

    def check(self, name: str) -> None:
        table = self.table()
        rows = table[table.index.str.startswith(f"{name}[")]
        assert len(rows)
        assert ((rows["coverage"] >= 0.925) & (rows["coverage"] <= 0.975)).all(), rows.to_string()


def rules(policies: dict[str, Callable], s: str, g: str) -> dict[str, Rule]:
    def rule(policy: Callable) -> Rule:
        return lambda frame: policy(frame[s].to_numpy(), frame[g].to_numpy())

    return {name: rule(policy) for name, policy in policies.items()}


def never(s: np.ndarray, g: np.ndarray) -> np.ndarray:
    return np.zeros(np.broadcast(s, g).shape)


GAIN_MODEL = "~ S * t + G + I((t - 5) ** 2)"


def run_c(n: int, reps: int, seed: int) -> Tally:
    rng = np.random.default_rng(seed)
    tally = Tally()
    trial, zero = truth_c(), truth_c(never)
    one = np.ones((1, 1, 1))
    per_t = trial.met.sum(axis=(1, 2))
    by_time = float(((trial.met * trial.tau).sum(axis=(1, 2)) / per_t).mean())
    everything = float((trial.met * trial.tau).sum() / trial.rows)
    gains = [truth_c(p).value - zero.value for p in POLICIES_C.values()]
    policies = rules(POLICIES_C, "S", "G")
    s1 = truth_c(POLICIES_C["S1"])
    tree = DecisionTreeRegressor(max_depth=4, min_samples_leaf=10)
    for rep in range(reps):
        data = draw_c(n, rng)
        tally.add("aipw pooled", blip(data, seed=rep), trial.weighted())
        tally.add("aipw trees", blip(data, learner=tree, seed=rep, folds=3), trial.weighted())
        tally.add("aipw no nuisance", blip(data, nuisance=[], seed=rep), trial.weighted())
        tally.add("aipw future noise removed", blip(data, adjust_future=True, seed=rep), trial.weighted())
        tally.add("aipw per all rows", blip(data, per="all", seed=rep), everything)
        tally.add("aipw per time", blip(data, weights="time", seed=rep), by_time)
        tally.add("aipw per trajectory", blip(data, weights="trajectory", seed=rep), trajectory_average_c())
        tally.add("aipw moderator S", blip(data, effect="~ S", seed=rep), trial.linear([one, S_C]))
        tally.add("aipw groups G", blip(data, effect="G", seed=rep), [trial.weighted(1 - G_C), trial.weighted(G_C)])
        overlapping: dict[str, Rule] = {"S1": "S", "early": lambda f: f["t"] <= 3}
        early = (np.arange(10) < 3)[:, None, None].astype(float)
        tally.add(
            "aipw overlapping groups",
            blip(data, effect=overlapping, seed=rep),
            [trial.weighted(S_C), trial.weighted(early)],
        )
        tally.add("dcee", dcee(data, controls="~ S + G + base + t"), everything)
        none = blip(data, "none", "~ S + G", seed=rep)
        tally.add("snmm none", none, [0.5, 1.0, -0.8])
        tally.add("snmm none average by S", none.average("S"), [zero.weighted(1 - S_C), zero.weighted(S_C)])
        contrast = none.contrast({"Intercept": 1, "S": 1, "G": 1})
        tally.add("snmm none contrast", contrast, 0.7)
        tally.add("snmm optimal", blip(data, "none", "~ S + G", instrument="optimal", seed=rep), [0.5, 1.0, -0.8])
        tally.add("snmm no nuisance", blip(data, "none", "~ S + G", nuisance=[], seed=rep), [0.5, 1.0, -0.8])
        policy = blip(data, policies["S1"], GAIN_MODEL, seed=rep)
        tally.add("snmm policy average by G", policy.average("G"), [s1.weighted(1 - G_C), s1.weighted(G_C)])
        gain = policy_gain(data, policies, GAIN_MODEL, seed=rep)
        tally.add("gain snmm", gain, gains)
        assert gain.values is not None
        tally.add("value never", gain.values.select(["never"]), zero.value)
        tally.add("gain occupancy", policy_gain(data, policies, "~ S + G", method="occupancy", seed=rep), gains)
    return tally


@pytest.fixture(scope="module")
def dgp_c() -> Tally:
    return run_c(400, R, 1)


def run_d(n: int, reps: int, seed: int) -> Tally:
    rng = np.random.default_rng(seed)
    tally = Tally()
    trial, zero = truth_d(), truth_d(never)
    gains = [truth_d(p).value - zero.value for p in POLICIES_D.values()]
    policies = rules(POLICIES_D, "s", "g")
    type0, type1 = np.array([1.0, 0.0])[None, None], np.array([0.0, 1.0])[None, None]
    for rep in range(reps):
        data = draw_d(n, rng)
        tally.add("aipw groups", blip(data, effect="g", seed=rep), [trial.weighted(type0), trial.weighted(type1)])
        model = "~ C(g) * C(s) * C(t)"
        average = blip(data, "none", model, seed=rep).average("g")
        tally.add("snmm none average", average, [zero.weighted(type0), zero.weighted(type1)])
        gain = policy_gain(data, policies, model, seed=rep)
        tally.add("gain snmm", gain, gains)
        assert gain.values is not None
        tally.add("value never", gain.values.select(["never"]), zero.value)
    return tally


@pytest.fixture(scope="module")
def dgp_d() -> Tally:
    return run_d(1000, R, 2)


C_NAMES = [
    "aipw pooled", "aipw trees", "aipw no nuisance", "aipw future noise removed", "aipw per all rows", "aipw per time",
    "aipw per trajectory", "aipw moderator S", "aipw groups G", "aipw overlapping groups", "dcee", "snmm none",
    "snmm none average by S", "snmm none contrast", "snmm optimal", "snmm no nuisance", "snmm policy average by G",
    "gain snmm", "value never", "gain occupancy",
]  # fmt: skip


@pytest.mark.parametrize("name", C_NAMES)
def test_coverage_on_dgp_c(dgp_c: Tally, name: str) -> None:
    dgp_c.check(name)


@pytest.mark.parametrize("name", ["aipw groups", "snmm none average", "gain snmm", "value never"])
def test_coverage_on_dgp_d(dgp_d: Tally, name: str) -> None:
    dgp_d.check(name)


def test_every_simulated_estimator_is_checked(dgp_c: Tally) -> None:
    assert {k.split("[")[0] for k in dgp_c.hits} == set(C_NAMES)


def test_removing_future_noise_gains_precision(dgp_c: Tally) -> None:
    table = dgp_c.table()
    assert table.loc["aipw future noise removed[0]", "mean_se"] < 0.99 * table.loc["aipw pooled[0]", "mean_se"]
    assert table.loc["aipw pooled[0]", "mean_se"] < 0.85 * table.loc["aipw no nuisance[0]", "mean_se"]


@pytest.fixture(scope="module")
def small() -> Tally:
    """Multi-arm, log link, classic estimators on few clusters, simultaneous intervals, sizes of tests."""
    rng = np.random.default_rng(3)
    tally = Tally()
    for rep in range(2 * R):
        data = draw_exogenous(150, rng, arms=2)
        truth = [0.5, 0.6, -0.3, 0.4]
        tally.add("three arms aipw", blip(data, effect="~ S", seed=rep), truth)
        tally.add("three arms snmm", blip(data, "none", "~ S", seed=rep), truth)
        few = draw_exogenous(40, rng)
        tally.add("wcls", wcls(few, "prox", moderators="~ S", controls="~ S + t"), [0.4, 0.3])
        more = draw_exogenous(200, rng)
        tally.add("emee", emee(more, "prox_bin", moderators="~ S", controls="~ S + t"), [0.3, 0.2])
        tally.add("emee2", emee2(more, "prox_bin", moderators="~ S", controls="~ S + t"), [0.3, 0.2])
        tally.add("snmm few clusters", blip(few, "none", "~ S", seed=rep), [0.5, 0.6])
        tally.add("log link", blip(draw_log(800, rng), "none", "~ S", link="log", seed=rep), [0.15, 0.15])
        tasks, _ = draw_tasks(50, 8, rng)
        tally.add("task clusters", blip(tasks, seed=rep), 0.5)
        tally.add("trajectory clusters, population of tasks", blip(tasks, cluster="trajectory", seed=rep), 0.5)
    return tally


SMALL_NAMES = [
    "three arms aipw", "three arms snmm", "wcls", "emee", "emee2", "snmm few clusters", "log link", "task clusters",
]  # fmt: skip


@pytest.mark.parametrize("name", SMALL_NAMES)
def test_coverage_elsewhere(small: Tally, name: str) -> None:
    small.check(name)


def test_trajectory_clusters_do_not_cover_a_population_of_tasks(small: Tally) -> None:
    assert small.table().loc["trajectory clusters, population of tasks[0]", "coverage"] < 0.9


def test_gains_on_the_very_games_that_were_played() -> None:
    """140 games met 6 times each, as in the trial that is held against direct Monte Carlo on these games.

    Trajectories are the clusters: games then count as drawn anew, which is a little wide for these games. Clusters of
    games measure how games differ, which does not matter here, and are wider still.
    """
    rng = np.random.default_rng(6)
    tally = Tally()
    policies: dict[str, Rule] = {"always": 1.0, "early": lambda f: (f["t"] < 2) * 1.0, "half": 0.5}
    for rep in range(R):
        data, effect = draw_tasks(140, 6, rng)
        truth = [3 * effect, effect, 1.5 * effect]
        for cluster in ("trajectory", "task"):
            tally.add(cluster, policy_gain(data, policies, "~ 1", cluster=cluster, seed=rep), truth)
    table = tally.table()
    tally.check("trajectory")
    ratio = table["mean_se"] / table["sd"]
    assert (ratio[:3] > 0.97).all() and (ratio[3:].to_numpy() > ratio[:3].to_numpy()).all(), table.to_string()


def test_few_clusters() -> None:
    """20 trajectories: the jackknife default is near nominal (reference: .936 at 15, .928 at 25) where CR0 is not."""
    rng = np.random.default_rng(4)
    tally = Tally()
    for rep in range(R):
        data = draw_exogenous(20, rng)
        tally.add("CR0", blip(data, correction="CR0", seed=rep), 0.8)
        tally.add("default", blip(data, seed=rep), 0.8)
    table = tally.table()["coverage"]
    assert table["default[0]"] >= 0.925
    assert table["CR0[0]"] < table["default[0]"]


def test_simultaneous_intervals_and_sizes_of_tests() -> None:
    """Eight groups at once, the over-identification test and the randomisation check at their nominal sizes."""
    rng = np.random.default_rng(5)
    truth = np.array([0.5, 0.5, 0.5, 0.5, 1.1, 1.1, 1.1, 1.1])
    together, rejected, powerful, coins = [], [], [], []
    for rep in range(R):
        data = draw_exogenous(150, rng)
        joint = blip(data, effect=["S", "t"], seed=rep).joint(draws=4000, seed=rep)
        together.append(bool(((joint["low"] <= truth) & (truth <= joint["high"])).all()))
        rejected.append(blip(data, "none", "~ S", seed=rep).test_restrictions(["t", "base"]).p_value < 0.05)
        powerful.append(blip(data, "none", "~ 1", seed=rep).test_restrictions(["S"]).p_value < 0.05)
        coins.append(randomization_check(data).p_value < 0.05)
    assert 0.925 <= np.mean(together) <= 0.975
    assert 0.025 <= np.mean(rejected) <= 0.075
    assert 0.025 <= np.mean(coins) <= 0.075
    assert np.mean(powerful) > 0.7
