"""The one result face, joint inference, diagnostics, leaderboards and choice of representation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from audit.mrt import Effects, MRTData, blip, policy_gain, stack
from audit.mrt.diagnostics import positivity, randomization_check, transport_check
from audit.mrt.impact import impact_scores, select_representation
from envs.core import InputError
from tests.mrt.dgp import (
    draw_c,
    draw_exogenous,
)

matplotlib.use("Agg")


def never(s: np.ndarray, g: np.ndarray) -> np.ndarray:
    return np.zeros(np.broadcast(s, g).shape)


def c(n: int = 300, seed: int = 0) -> MRTData:
    return draw_c(n, np.random.default_rng(seed))


def s1(frame: pd.DataFrame) -> Any:
    return frame["S"].to_numpy()


# --- results ---------------------------------------------------------------------------------------------------------


def toy(df: float = 10.0) -> Effects:
    deviations = np.array([[0.3, 0.0], [0.0, 0.4], [0.4, 0.3]])
    return Effects(("a", "b"), np.array([1.0, 0.1]), 3 * deviations, deviations, np.full(2, df), "toy", "CR1")


def test_intervals_by_hand() -> None:
    effects = toy()
    np.testing.assert_allclose(effects.se, [0.5, 0.5])
    half = stats.t.ppf(0.95, 10) * 0.5
    np.testing.assert_allclose(effects.conf_int(0.1), [[1 - half, 1 + half], [0.1 - half, 0.1 + half]])
    table = effects.to_frame()
    assert table["p_value"][0] == pytest.approx(2 * stats.t.sf(2, 10))
    assert "toy" in effects.summary()
    for bad in (0.0, 1.0, -1.0):
        with pytest.raises(InputError):
            effects.conf_int(bad)


def test_joint_inference() -> None:
    effects = replace(toy(), deviations=np.diag([0.5, 0.5]), df=np.full(2, 1e6))
    joint = effects.joint()
    # Two independent normals: the max-|z| quantile is that of Sidak.
    critical = stats.norm.ppf(1 - (1 - np.sqrt(0.95)) / 2)
    np.testing.assert_allclose(joint["high"] - joint["estimate"], critical * 0.5, rtol=0.01)
    p = effects.p_value
    np.testing.assert_allclose(joint["p_adjusted"], 1 - (1 - p) ** 2, atol=0.01)
    np.testing.assert_allclose(effects.joint(method="holm")["p_adjusted"], [2 * p[0], p[1]])
    np.testing.assert_allclose(effects.joint(method="bh")["p_adjusted"], [2 * p[0], p[1]])
    with pytest.raises(InputError, match="unknown method"):
        effects.joint(method="bonferroni")  # type: ignore[arg-type]


def test_contrasts_have_one_degree_of_freedom_and_keep_missing_apart() -> None:
    effects = toy()
    difference = effects.contrast({"a": 1, "b": -1})
    assert difference.se[0] == pytest.approx(np.sqrt(0.25 + 0.25 - 2 * 0.12))
    assert difference.df[0] == 10
    broken = replace(effects, deviations=np.array([[0.5, np.nan]]), estimate=np.array([1.0, np.nan]))
    assert broken.contrast({"a": 2}).estimate[0] == 2
    assert np.isnan(broken.contrast({"a": 1, "b": 1}).se[0])
    for bad in ({"nobody": 1.0}, [[1.0]], [[1.0, 2.0, 3.0]]):
        with pytest.raises(InputError):
            effects.contrast(bad)


def test_stacked_estimators_know_their_covariance() -> None:
    data = c()
    plain, adjusted = blip(data), blip(data, adjust_future=True)
    both = stack([plain, adjusted], ["plain ", "adjusted "])
    difference = both.contrast({"plain pooled": 1, "adjusted pooled": -1})
    assert difference.se[0] < 0.6 * plain.se[0]
    with pytest.raises(InputError, match="different trials or clusters"):
        stack([plain, blip(c(100))])


def test_plots_show_the_numbers() -> None:
    fit = blip(c(), effect="G")
    axes = fit.plot()
    np.testing.assert_allclose(np.sort(axes.lines[0].get_xdata()), np.sort(fit.estimate))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["G=0", "G=1"]
    again = policy_gain(c(), {"S1": s1}, "~ S").plot(ax=axes)
    assert again is axes
    assert "gain" in axes.get_xlabel()


def test_average_of_a_saturated_model_is_the_mean_of_its_blips() -> None:
    data = c()
    fit = blip(data, "none", "~ S * G")
    rows = fit.at_decisions()
    assert fit.average().estimate[0] == pytest.approx(rows["blip"].mean())
    g = data.frame.loc[data.eligible, "G"].to_numpy()
    by_g = fit.average("G")
    np.testing.assert_allclose(by_g.estimate, [rows["blip"][g == k].mean() for k in (0, 1)])
    assert rows["se"].nunique() == 4
    with pytest.raises(InputError, match="already"):
        blip(data, effect="G").average()


# --- diagnostics and readings ----------------------------------------------------------------------------------------


def test_positivity_counts_and_warns() -> None:
    data = c(100)
    table = positivity(data, "G", threshold=0.35)
    assert table["rows"].sum() == data.eligible.sum()
    assert set(table["arm"]) == {0, 1}
    assert table["p_min"].min() == pytest.approx(0.3)
    assert table["warning"].str.contains("under 0.35").all()


def test_wrongly_logged_coins_are_found() -> None:
    data = c(400)
    assert randomization_check(data).p_value > 0.01
    wrong = MRTData(data.decisions.assign(p=0.5), data.trajectories, features=data.features)
    check = randomization_check(wrong)
    assert check.p_value < 1e-6
    assert "AGAINST" in check.summary()
    assert check.table["term"].tolist()[:2] == ["Intercept", "t"]
    assert check.df == 7  # p follows S in this trial, and a constant p says nothing: 7 moments either way


def test_transport_warnings() -> None:
    rng = np.random.default_rng(12)
    data, same = draw_exogenous(300, rng), draw_exogenous(300, rng)
    assert transport_check(data, same).warnings == ()
    shifted = MRTData(
        same.decisions, same.trajectories.assign(base=same.trajectories["base"] + 1), features=same.features
    )
    assert "histories differ in base" in transport_check(data, shifted).warnings[0]
    coins = draw_c(300, rng)
    assert any("different coins" in w for w in transport_check(data, coins).warnings)


def test_leaderboard_orders_and_ranks() -> None:
    data = draw_exogenous(1500, np.random.default_rng(13))
    board = impact_scores(data, "S")
    table = board.to_frame()
    assert table["term"].tolist() == ["S=1", "S=0"]
    assert table["rank_best"].tolist() == [1, 2]
    assert table["rank_worst"].tolist() == [1, 2]
    assert (table["low"] < table["estimate"]).all()
    weak = impact_scores(draw_exogenous(40, np.random.default_rng(14)), "t").to_frame()
    assert (weak["rank_worst"] - weak["rank_best"] >= 1).any()
    assert "blip" in board.summary()
    assert len(board.plot().lines) > 0
    with pytest.raises(InputError, match="names groups"):
        impact_scores(data, "~ S")


def test_representation_selection_prefers_the_truth_and_warns() -> None:
    data = draw_exogenous(2000, np.random.default_rng(15))
    table = select_representation(data, {"nothing": "pooled", "S": "~ S", "too much": "~ S * C(t) * base"})
    assert table["name"][0] == "S"
    assert not bool(table.set_index("name").loc["nothing", "within_one_se"])
    assert "does not certify" in table.attrs["warning"]
