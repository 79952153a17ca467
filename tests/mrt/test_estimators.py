"""Truth, identities, exact refits and small examples by hand for blips and gains; requests that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression

from audit.mrt import MRTData, blip, policy_gain
from audit.mrt.aipw import later_sums, pseudo_outcomes
from audit.mrt.blip import eligible_rows
from audit.mrt.classic import wcls
from audit.mrt.diagnostics import policy_positivity
from audit.mrt.nuisance import out_of_fold
from audit.mrt.offpolicy import overlap
from audit.mrt.results import solve
from envs.core import InputError
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

TRUTH = json.loads((Path(__file__).parent / "reference" / "dgp_truth.json").read_text())


def never(s: np.ndarray, g: np.ndarray) -> np.ndarray:
    return np.zeros(np.broadcast(s, g).shape)


def c(n: int = 300, seed: int = 0) -> MRTData:
    return draw_c(n, np.random.default_rng(seed))


def s1(frame: pd.DataFrame) -> Any:
    return frame["S"].to_numpy()


# --- truth -----------------------------------------------------------------------------------------------------------


def test_recursions_give_the_published_truth() -> None:
    for key, truth, policies in (("dgp_C", truth_c, POLICIES_C), ("dgp_D", truth_d, POLICIES_D)):
        expected = TRUTH[key]
        trial, zero = truth(), truth(never)
        assert trial.value == pytest.approx(expected["EY_behaviour"], abs=1e-12)
        assert zero.value == pytest.approx(expected["EY0"], abs=1e-12)
        for name, value in expected["gain"].items():
            assert truth(policies[name]).value - zero.value == pytest.approx(value, abs=1e-12)
    trial, one = truth_c(), np.ones((1, 1, 1))
    np.testing.assert_allclose(trial.tau, TRUTH["dgp_C"]["tau_rand_t_S_G"], atol=1e-12)
    np.testing.assert_allclose(trial.weighted(), TRUTH["dgp_C"]["rand_pooled"][0], atol=1e-12)
    np.testing.assert_allclose(trial.linear([one, S_C]), TRUTH["dgp_C"]["rand_by_S_linear"], atol=1e-12)
    np.testing.assert_allclose(trial.linear([one, S_C, G_C]), TRUTH["dgp_C"]["rand_linear_S_G"], atol=1e-12)
    np.testing.assert_allclose([trial.weighted(1 - G_C), trial.weighted(G_C)], TRUTH["dgp_C"]["rand_by_G"], atol=1e-12)
    blips = truth_c(never).tau
    for name, value in TRUTH["dgp_C"]["naive_gain_limit"].items():
        chosen = POLICIES_C[name](S_C[0], G_C[0])
        assert (trial.met * chosen * blips).sum() == pytest.approx(value, abs=1e-12)
    np.testing.assert_allclose(blips, np.broadcast_to(0.5 + S_C - 0.8 * G_C, blips.shape), atol=1e-12)
    assert trajectory_average_c() == pytest.approx(TRUTH["dgp_C"]["trajectory_average_rand_MC"], abs=0.005)
    np.testing.assert_allclose(truth_d().tau, TRUTH["dgp_D"]["rand_blip_t_s_g"], atol=1e-12)
    np.testing.assert_allclose(truth_d(never).tau, TRUTH["dgp_D"]["zero_blip_t_s_g"], atol=1e-12)
    for g, mask in enumerate((np.array([1.0, 0.0]), np.array([0.0, 1.0]))):
        assert truth_d().weighted(mask) == pytest.approx(TRUTH["dgp_D"]["rand_by_type"][str(g)], abs=1e-12)
        zero_by_type = TRUTH["dgp_D"]["zero_by_type_behaviour_weighted"][str(g)]
        assert truth_d(never).weighted(mask) == pytest.approx(zero_by_type, abs=1e-12)


def test_simulations_agree_with_the_recursions() -> None:
    rng = np.random.default_rng(0)
    for data, truth in ((draw_c(40_000, rng), truth_c()), (draw_d(40_000, rng), truth_d())):
        assert data.y.mean() == pytest.approx(truth.value, abs=4 * data.y.std() / 200)
        assert data.eligible.sum() / data.n == pytest.approx(truth.met.sum(), rel=0.02)
        assert len(data.decisions) / data.n == pytest.approx(truth.rows, rel=0.02)


# --- identities ------------------------------------------------------------------------------------------------------


def test_two_forms_of_the_pseudo_outcome_are_one() -> None:
    rng = np.random.default_rng(1)
    y, p1, mu = rng.standard_normal(50), rng.uniform(0.1, 0.9, 50), rng.standard_normal((50, 2))
    a = (rng.random(50) < p1).astype(np.int64)
    phi = pseudo_outcomes(y, a, np.column_stack([1 - p1, p1]), mu)[:, 0]
    other = (a - p1) / (p1 * (1 - p1)) * (y - (1 - p1) * mu[:, 1] - p1 * mu[:, 0])
    np.testing.assert_allclose(phi, other, atol=1e-12)


def test_later_sums_stay_within_trajectories() -> None:
    unit = np.array([0, 0, 0, 2, 2, 1])
    values = np.array([[1.0], [2.0], [3.0], [10.0], [20.0], [5.0]])
    assert later_sums(values, unit)[:, 0].tolist() == [5, 3, 0, 20, 0, 0]


def test_out_of_fold_predictions_do_not_see_their_fold() -> None:
    rng = np.random.default_rng(2)
    x = np.column_stack([np.ones(60), rng.standard_normal((60, 2))])
    y, fold = rng.standard_normal(60), np.arange(60) % 3
    for learner in (None, LinearRegression(), HistGradientBoostingRegressor(min_samples_leaf=5)):
        first = out_of_fold(x, y[:, None], fold, learner)
        changed = np.where(fold == 1, y + 100 * rng.standard_normal(60), y)
        second = out_of_fold(x, changed[:, None], fold, learner)
        np.testing.assert_allclose(first[fold == 1], second[fold == 1])
        assert not np.allclose(first[fold == 0], second[fold == 0])


def test_linear_default_is_least_squares_for_many_rows() -> None:
    rng = np.random.default_rng(3)
    x = np.column_stack([np.ones(6000), rng.standard_normal((6000, 3))])
    y, fold = x @ [1, 2, 3, 4] + rng.standard_normal(6000), np.arange(6000) % 5
    ours, theirs = (out_of_fold(x, y[:, None], fold, learner) for learner in (None, LinearRegression()))
    np.testing.assert_allclose(ours, theirs, atol=0.01)


def test_classifiers_serve_binary_outcomes() -> None:
    data = draw_d(300, np.random.default_rng(4))
    plain, logistic = blip(data, effect="g"), blip(data, effect="g", learner=LogisticRegression())
    np.testing.assert_allclose(logistic.estimate, plain.estimate, atol=0.5 * plain.se.max())
    with pytest.raises(InputError, match="0/1 outcome"):
        blip(c(), learner=LogisticRegression())


@pytest.mark.parametrize("continuation", ["randomized", "none"])
def test_jackknife_is_the_exact_refit_without_each_cluster(continuation: str) -> None:
    """With intercept-only nuisances replaced by nothing (x = 0 columns) the refit needs no nuisance at all."""
    rng = np.random.default_rng(5)
    unit = np.repeat(np.arange(12), 3)
    left, right = rng.standard_normal((36, 2)), rng.standard_normal((36, 2))
    right += 2 * left
    target = rng.standard_normal(36)
    clusters = np.arange(12) // (1 if continuation == "randomized" else 2)
    fit = solve(left, right, target, unit, clusters, 12, "CR3")
    codes = clusters[unit]
    for j in np.unique(codes):
        keep = codes != j
        refit = np.linalg.solve(left[keep].T @ right[keep], left[keep].T @ target[keep])
        np.testing.assert_allclose(fit.deviations[j], refit - fit.estimate, atol=1e-12)
    plain = solve(left, right, target, unit, clusters, 12, "CR0")
    scaled = solve(left, right, target, unit, clusters, 12, "CR1")
    g = len(np.unique(codes))
    np.testing.assert_allclose(scaled.deviations, plain.deviations * np.sqrt(g / (g - 2)))
    sums = np.array([plain.influence[clusters == j].sum(axis=0) for j in range(g)]) / 12
    np.testing.assert_allclose(plain.deviations, sums, atol=1e-12)


def test_gain_jackknife_is_the_exact_refit() -> None:
    """Deleting a cluster and redoing mean(Y) - mean(C)'psi with its own psi, nuisances held."""
    data = c(30)
    gain = policy_gain(data, {"S1": s1}, "~ S")
    assert gain.values is not None
    assert gain.correction == "CR3"
    none = blip(data, "none", "~ S")
    assert none.fit is not None
    rows = eligible_rows(data)
    moved = np.zeros((data.n, 2))
    np.add.at(moved, rows.unit, none.s * rows.arm[:, None])
    left, right = none.fit.left, none.fit.right
    target = none.fit.residual + right @ none.estimate
    full = data.y.mean() - moved.mean(axis=0) @ none.estimate
    for j in (0, 7, 29):
        keep = rows.unit != j
        psi = np.linalg.solve(left[keep].T @ right[keep], left[keep].T @ target[keep])
        others = np.arange(data.n) != j
        refit = data.y[others].mean() - moved[others].mean(axis=0) @ psi
        assert gain.values.deviations[j, 0] == pytest.approx(refit - full, abs=1e-10)


def test_per_all_rows_rescales_the_pooled_effect() -> None:
    data = c()
    eligible, everything = blip(data), blip(data, per="all")
    share = data.eligible.mean()
    assert everything.estimate[0] == pytest.approx(share * eligible.estimate[0], rel=1e-12)


def test_groups_are_the_pooled_effect_of_their_rows_with_joint_covariance() -> None:
    data = c()
    by_g = blip(data, effect="G")
    named = blip(data, effect={"zero": lambda f: f["G"] == 0, "one": "G", "all": 1.0})
    np.testing.assert_allclose(by_g.estimate, named.estimate[:2])
    np.testing.assert_allclose(named.select(["all"]).se, blip(data).se)
    both = by_g.contrast({"G=0": 1, "G=1": -1})
    variance = by_g.covariance
    assert both.se[0] == pytest.approx(np.sqrt(variance[0, 0] + variance[1, 1] - 2 * variance[0, 1]))
    assert abs(variance[0, 1]) > 1e-6  # the same trajectories serve both groups
    combined = blip(data, effect=["S", "G"])
    assert combined.names == ("S, G=0, 0", "S, G=0, 1", "S, G=1, 0", "S, G=1, 1")


def test_weights_of_one_and_a_declared_column_of_ones_agree() -> None:
    base = c()
    data = MRTData(base.decisions.assign(one=2.0), base.trajectories, features=["S", "G", "base", "one"])
    chosen = ["S", "G", "base"]
    a, b = blip(data, nuisance=chosen), blip(data, nuisance=chosen, weights="one")
    np.testing.assert_allclose(a.estimate, b.estimate)
    np.testing.assert_allclose(a.se, b.se)


def test_trajectories_without_an_eligible_decision_count_in_values_alone() -> None:
    data = c(200)
    decisions, trajectories = data.decisions, data.trajectories
    more = pd.DataFrame({"base": 0.0, "trajectory": np.arange(1000, 1050), "outcome": 50.0})
    wider = MRTData(decisions, pd.concat([trajectories, more], ignore_index=True), features=data.features)
    plain = blip(wider, "none", "~ S", nuisance=[], folds=2)
    assert (plain.influence[200:] == 0).all()
    assert plain.df[0] == blip(data, "none", "~ S", nuisance=[], folds=2).df[0]
    gain = policy_gain(wider, {"S1": s1}, "~ S")
    assert gain.values is not None
    assert gain.values.estimate[0] > 9  # 50 of 250 trajectories end at 50
    for method in ("seqdr", "ipw", "occupancy"):
        other = policy_gain(wider, {"S1": s1}, "~ S", method=method)  # type: ignore[arg-type]
        assert other.values is not None
        assert other.values.estimate[0] > 9


def test_time_weights_average_the_effects_of_each_t() -> None:
    data = draw_exogenous(200, np.random.default_rng(6))
    by_t = blip(data, effect="t")
    per_time = blip(data, weights="time")
    assert per_time.estimate[0] == pytest.approx(by_t.estimate.mean(), rel=1e-10)


def test_future_noise_adjustment_leaves_single_decisions_alone() -> None:
    base = draw_exogenous(200, np.random.default_rng(7))
    first = base.decisions[base.decisions["t"] == 1]
    data = MRTData(first, base.trajectories, features=base.features)
    np.testing.assert_allclose(blip(data, adjust_future=True).estimate, blip(data).estimate, atol=1e-3)


def test_log_link_finds_a_root() -> None:
    data = draw_log(4000, np.random.default_rng(8))
    fit = blip(data, "none", "~ S", link="log")
    np.testing.assert_allclose(fit.estimate, [0.15, 0.15], atol=4 * fit.se.max())
    assert fit.fit is not None
    scale = np.abs(fit.fit.left).T @ np.abs(fit.fit.residual)
    assert (np.abs(fit.fit.left.T @ fit.fit.residual) < 1e-8 * scale).all()
    with pytest.raises(InputError, match="negative"):
        blip(c(), "none", "~ S", link="log")
    with pytest.raises(InputError, match="continuation='none'"):
        blip(data, "randomized", "~ S", link="log")


def test_policy_one_means_always_and_policy_p_means_randomized() -> None:
    data = c()
    np.testing.assert_allclose(blip(data, 0.0, "~ S").estimate, blip(data, "none", "~ S").estimate)
    np.testing.assert_allclose(blip(data, "p", "~ S").estimate, blip(data, "randomized", "~ S", method="snmm").estimate)
    gain = policy_gain(data, {"never too": 0.0, "as logged": "randomized"}, "~ S")
    assert gain.estimate[0] == pytest.approx(0, abs=1e-12)
    assert gain.values is not None
    fit = blip(data, "randomized", "~ S", method="snmm")
    rows = eligible_rows(data)
    noise = (rows.given(rows.p) * fit.s).sum(axis=0) / data.n
    assert gain.values.estimate[2] == pytest.approx(data.y.mean() - noise @ fit.estimate)


def test_importance_weights_by_hand() -> None:
    decisions = pd.DataFrame(
        {"trajectory": [0, 0, 1, 1], "t": [1, 2, 1, 2], "eligible": 1, "arm": [1, 0, 1, 1], "p": [0.5, 0.25, 0.5, 0.25]}
    )
    data = MRTData(decisions, pd.DataFrame({"trajectory": [0, 1, 2], "outcome": [1.0, 2.0, 3.0]}))
    always = np.tile([0.0, 1.0], (4, 1))
    seen = overlap(eligible_rows(data), always)
    assert seen.ratio == pytest.approx([2, 0, 2, 8])
    assert seen.final == pytest.approx([0, 8, 1])
    assert seen.ess == pytest.approx(81 / 65)
    assert (seen.max_weight, seen.consistent) == pytest.approx((8, 2 / 3))
    table = policy_positivity(data, 1.0)
    assert table["ess"].tolist() == pytest.approx([2, 1])


def test_methods_of_gain_agree_on_a_large_trial() -> None:
    data = c(8000, seed=9)
    truth = truth_c(POLICIES_C["S1"]).value - 1
    for method in ("snmm", "occupancy", "seqdr", "ipw"):
        model = "~ S * t + G" if method == "snmm" else "~ S + G"
        gain = policy_gain(data, {"S1": s1}, model, method=method)  # type: ignore[arg-type]
        assert abs(gain.estimate[0] - truth) < 4 * gain.se[0]
        assert list(gain.to_frame()["term"]) == ["S1"]
    assert {"ess", "max_weight", "consistent"} <= set(gain.to_frame().columns)


def test_low_effective_sample_size_is_said() -> None:
    gain = policy_gain(c(), {"always": 1.0}, "~ S + G")
    assert gain.overlaps["always"].ess < 30
    assert "effective sample size below 30" in gain.summary()


# --- refusals --------------------------------------------------------------------------------------------------------


def test_groups_without_data_are_missing_with_a_reason() -> None:
    base = c(200)
    decisions = base.decisions.assign(rare=["rare"] + ["usual"] * (len(base.decisions) - 1))
    data = MRTData(decisions, base.trajectories, features=["S", "G", "base", "rare"])
    fit = blip(data, effect="rare", nuisance=["S"])
    table = fit.to_frame().set_index("term")
    assert np.isnan(table.loc["rare=rare", ["estimate", "se", "low", "high"]].astype(float)).all()
    assert "no effect can be had" in table.loc["rare=rare", "reason"]
    assert np.isfinite(table.loc["rare=usual", "se"])
    with pytest.raises(InputError, match="merge levels"):
        blip(data, "none", "~ 0 + rare")
    joint = fit.joint()
    assert joint["p_adjusted"].isna().tolist() == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "aipw", "continuation": "none"}, "randomised continuation"),
        ({"method": "magic"}, "unknown method"),
        ({"effect": "nothing"}, "neither 'pooled'"),
        ({"effect": "~ S + S2"}, "declared features"),
        ({"effect": "~ S + I(2 * S)"}, "collinear"),
        ({"effect": {}}, "no group"),
        ({"effect": {"half": 0.5}}, "must be boolean"),
        ({"continuation": "none", "effect": {"a": "S", "b": 1.0}}, "overlap"),
        ({"continuation": 1.5, "effect": "~ S"}, "not probabilities"),
        ({"continuation": lambda f: [0.5], "effect": "~ S"}, "expected"),
        ({"continuation": "none", "weights": "time"}, "belong to AIPW"),
        ({"weights": "nothing"}, "declared feature"),
        ({"per": "all", "weights": "time"}, "weights='decision' only"),
        ({"cluster": "village"}, "no column of the trajectories"),
        ({"learner": "trees"}, "no fit and predict"),
        ({"folds": 10_000}, "expected 1 <= folds"),
        ({"continuation": "none", "instrument": "magic"}, "unknown 'magic'"),
        ({"continuation": "none", "residualise": "magic"}, "unknown 'magic'"),
        ({"correction": "CR9"}, "unknown 'CR9'"),
    ],
)
def test_requests_that_cannot_be_met(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        blip(c(60), **options)


def test_outcomes_without_variation_are_refused_and_rare_ones_noted() -> None:
    data = c(100)
    same = MRTData(data.decisions, data.trajectories.assign(outcome=1.0), features=["S"])
    with pytest.raises(InputError, match="no variation"):
        blip(same)
    with pytest.raises(InputError, match="no variation"):
        policy_gain(same, {"S1": s1}, "~ S")
    rare = MRTData(data.decisions, data.trajectories.assign(outcome=np.arange(100) < 4), features=["S"])
    assert "only 4 trajectories" in blip(rare).summary()
    assert "only 4 trajectories" in policy_gain(rare, {"S1": s1}, "~ S").summary()


def test_restrictions_need_g_estimation_and_new_terms() -> None:
    data = c()
    with pytest.raises(InputError, match="needs g-estimation"):
        blip(data, effect="~ S").test_restrictions(["G"])
    with pytest.raises(InputError, match="in the model already"):
        blip(data, "none", "~ S + G").test_restrictions(["S"])
    test = blip(c(1500), "none", "~ 1").test_restrictions(["S", "G"])
    assert (test.df, test.extra) == (2, ("S", "G"))
    assert test.p_value < 1e-4


def test_task_clusters_are_the_default_where_there_are_tasks() -> None:
    data, _ = draw_tasks(60, 8, np.random.default_rng(10))
    assert blip(data).df[0] == 59
    assert blip(data, cluster="trajectory").df[0] == 479
    assert blip(data, cluster="trajectory").se[0] < blip(data).se[0]


def test_classics_refuse_several_arms_and_missing_outcomes() -> None:
    rng = np.random.default_rng(11)
    with pytest.raises(InputError, match="one treatment"):
        wcls(draw_exogenous(50, rng, arms=2), "prox")
    base = draw_exogenous(50, rng)
    decisions = base.decisions.assign(prox=base.decisions["prox"].where(base.decisions.index != 3))
    with pytest.raises(InputError, match="missing at some eligible row"):
        wcls(MRTData(decisions, base.trajectories, features=base.features), "prox")
