"""What looks simpler and is wrong, shown to be wrong, so that nobody simplifies into it."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.tree import DecisionTreeRegressor

from audit.mrt import MRTData, blip, policy_gain
from audit.mrt.aipw import arm_means, pseudo_outcomes
from audit.mrt.blip import eligible_rows
from audit.mrt.classic import dcee
from audit.mrt.design import nuisance_matrix
from audit.mrt.results import solve
from envs.core import InputError
from tests.mrt.dgp import POLICIES_C, draw_c, draw_exogenous, trajectory_average_c, truth_c


def weighted_mean(data: MRTData, phi: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    """Pooled effect with any weights, past every guard: estimate and standard error."""
    rows = eligible_rows(data)
    one = np.ones((len(w), 1))
    fit = solve(w[:, None], one, phi, rows.unit, rows.clusters, data.n, "CR1")
    return float(fit.estimate[0]), float(np.sqrt((fit.deviations**2).sum()))


@pytest.mark.slow
def test_one_over_t_weights_are_biased() -> None:
    """T is decided after the coin: 1/T weights estimate neither the pooled effect nor the trajectory average."""
    rng = np.random.default_rng(1)
    pooled, average = truth_c().weighted(), trajectory_average_c()
    errors, covered, right = [], [], []
    for rep in range(150):
        data = draw_c(1000, rng)
        rows = eligible_rows(data)
        x = nuisance_matrix(None, data, data.eligible)
        fold = data.folds(5, seed=rep)[data.eligible]
        phi = pseudo_outcomes(rows.y, rows.arm, rows.p, arm_means(x, rows.y, rows.arm, fold, 1, None))[:, 0]
        length = np.bincount(data.unit, minlength=data.n)
        estimate, se = weighted_mean(data, phi, 1 / length[rows.unit])
        errors.append(estimate)
        covered.append([abs(estimate - pooled) < 1.96 * se, abs(estimate - average) < 1.96 * se])
        right.append(blip(data, weights="trajectory", seed=rep).estimate[0])
    assert np.mean(errors) - pooled < -0.09
    assert np.mean(errors) - average < -0.05
    assert (np.mean(covered, axis=0) < 0.9).all()
    assert abs(np.mean(right) - average) < 0.02


def test_one_over_t_weights_are_refused() -> None:
    data = draw_c(200, np.random.default_rng(2))
    length = np.bincount(data.unit, minlength=data.n)
    decisions = data.decisions.assign(w=3 / length[data.unit])
    bad = MRTData(decisions, data.trajectories, features=["S", "G", "base", "w"])
    with pytest.raises(InputError, match="decided after the coin"):
        blip(bad, weights="w")
    with pytest.raises(InputError, match="unequal T"):
        dcee(data, weights="trajectory")


@pytest.mark.slow
def test_blips_without_later_treatment_summed_over_logged_histories_are_no_gain() -> None:
    """The shortcut's limits on DGP C are 2.571, 2.148, 2.852 where the gains are 1.872, 2.223, 2.447."""
    rng = np.random.default_rng(3)
    data = draw_c(20_000, rng)
    psi = blip(data, "none", "~ S + G").estimate
    frame = data.frame.loc[data.eligible]
    blips = psi[0] + psi[1] * frame["S"].to_numpy() + psi[2] * frame["G"].to_numpy()
    policies = {
        name: (lambda f, rule=rule: rule(f["S"].to_numpy(), f["G"].to_numpy())) for name, rule in POLICIES_C.items()
    }
    gain = policy_gain(data, policies, "~ S * t + G + I((t - 5) ** 2)")
    truth = np.array([truth_c(rule).value - 1.0 for rule in POLICIES_C.values()])
    shortcut = np.array([(policies[name](frame) * blips).sum() / data.n for name in policies])
    np.testing.assert_allclose(shortcut, [2.5707, 2.1484, 2.8522], atol=0.12)
    np.testing.assert_allclose(gain.estimate, truth, atol=0.17)
    assert shortcut[0] - truth[0] > 0.5
    assert shortcut[2] - truth[2] > 0.3


@pytest.mark.slow
def test_flexible_nuisances_without_cross_fitting_are_biased() -> None:
    rng = np.random.default_rng(4)
    truth = truth_c().weighted()
    tree = DecisionTreeRegressor(min_samples_leaf=2, random_state=0)
    inside, outside, errors = [], [], []
    for rep in range(150):
        data = draw_c(200, rng)
        rows = eligible_rows(data)
        x = nuisance_matrix(None, data, data.eligible)
        mu = np.column_stack([tree.fit(x[rows.arm == k], rows.y[rows.arm == k]).predict(x) for k in (0, 1)])
        phi = pseudo_outcomes(rows.y, rows.arm, rows.p, mu)[:, 0]
        estimate, se = weighted_mean(data, phi, np.ones(len(phi)))
        inside.append(abs(estimate - truth) < 1.97 * se)
        errors.append(estimate - truth)
        low, high = blip(data, learner=tree, seed=rep).conf_int()[0]
        outside.append(low <= truth <= high)
    assert np.mean(inside) < 0.88
    assert np.mean(outside) > 0.91
    assert np.mean(errors) < -0.03


def test_flexible_nuisances_without_cross_fitting_are_refused() -> None:
    data = draw_exogenous(50, np.random.default_rng(5))
    with pytest.raises(InputError, match="cross-fitting"):
        blip(data, learner=DecisionTreeRegressor(), folds=1)
    with pytest.raises(InputError, match="folds >= 2"):
        blip(data, folds=1)
    with pytest.raises(InputError, match="folds=1 is for"):
        blip(data, "none", folds=1)


def test_columns_recorded_after_the_coin_cannot_enter() -> None:
    """`prox` follows the coin; adjusting for it would remove part of the effect. Undeclared, it is refused."""
    data = draw_exogenous(100, np.random.default_rng(6))
    for call in (
        lambda: blip(data, nuisance=["prox"]),
        lambda: blip(data, effect="~ prox"),
        lambda: blip(data, effect="prox"),
        lambda: blip(data, "prox", "~ S"),
        lambda: blip(data, weights="prox"),
    ):
        with pytest.raises(InputError, match="declared feature"):
            call()
