"""WCLS, EMEE and DCEE against what MRTAnalysis 0.3.1 prints, digit by digit, and where it is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from audit.mrt import Effects, MRTData
from audit.mrt.classic import Classic, dcee, emee, emee2, wcls
from tests.mrt.published import GPL, OWN, ROOT, load, needs_gpl, rows_of, same_as_r

# --- own data, numbers from MRTAnalysis 0.3.1 and gesttools 1.3.0 -----------------------------------------------------


@pytest.fixture(scope="module")
def agents() -> MRTData:
    table = pd.read_csv(OWN / "agent_mrt.csv")
    columns = {"trajectory": "id", "arm": "A", "outcome": "Y"}
    return MRTData.from_long(table, columns=columns, features=["S", "G", "base"])


@pytest.fixture(scope="module")
def printed() -> Any:
    return load(OWN / "agent_mrt_expected_from_R.json")


@pytest.mark.parametrize(
    ("key", "moderators", "controls"),
    [("wcls_marginal", "~ 1", "~ base + S + t"), ("wcls_mod", "~ S + G", "~ base + S + G + t")],
)
def test_wcls_on_agents(agents: MRTData, printed: Any, key: str, moderators: str, controls: str) -> None:
    fit = wcls(agents, "prox", moderators=moderators, controls=controls)
    same_as_r(fit, printed[key]["effect"], "df2")
    assert fit.controls is not None
    same_as_r(fit.controls, printed[key]["control"], "df2")
    plain = wcls(agents, "prox", moderators=moderators, controls=controls, small_sample=False)
    same_as_r(plain, printed[key]["effect_no_small_sample"], "df2")


@pytest.mark.parametrize(("key", "moderators"), [("emee_marginal", "~ 1"), ("emee_mod", "~ S")])
def test_emee_on_agents(agents: MRTData, printed: Any, key: str, moderators: str) -> None:
    expected = printed[key]
    fit = emee(agents, "prox_bin", moderators=moderators, controls="~ S + t")
    # The package counts the two trajectories without an eligible decision as clusters here (and not in wcls).
    assert (fit.df == 58 - 3 - len(fit.names)).all()
    same_as_r(replace(fit, df=fit.df + 2), expected["effect"], "df", rtol=1e-7)
    assert fit.controls is not None
    np.testing.assert_allclose(fit.controls.estimate, list(expected["alpha_hat"].values()), rtol=ROOT)
    plain = emee(agents, "prox_bin", moderators=moderators, controls="~ S + t", small_sample=False)
    np.testing.assert_allclose(plain.se, list(expected["beta_se"].values()), rtol=ROOT)
    np.testing.assert_allclose(fit.se, list(expected["beta_se_adjusted"].values()), rtol=ROOT)


@pytest.mark.parametrize("rows", ["all", "eligible"])
@pytest.mark.parametrize(("key", "moderators"), [("marg", "~ 1"), ("SG", "~ S + G")])
def test_dcee_on_agents(agents: MRTData, printed: Any, rows: Any, key: str, moderators: str) -> None:
    # The numbers are those of weight 1 a row and of controls that include G (the README of the reference names three).
    expected = printed[f"dcee_{rows}_{key}"]
    fit = dcee(agents, moderators=moderators, controls="~ base + S + G + t", rows=rows)
    np.testing.assert_allclose(fit.estimate, list(expected["beta"].values()), rtol=1e-10)
    np.testing.assert_allclose(fit.se, list(expected["se"].values()), rtol=1e-10)
    np.testing.assert_allclose(fit.covariance, expected["vcov"], rtol=1e-9)
    assert (fit.df == expected["df"]).all()


# --- example data of GPL packages ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mrtanalysis() -> Any:
    return load(GPL / "mrtanalysis_expected.json")


@pytest.fixture(scope="module")
def heartsteps() -> MRTData:
    table = pd.read_csv(GPL / "mrt_mimic_heartsteps.csv").assign(outcome=0.0)
    columns = {
        "trajectory": "userid",
        "t": "decision_point",
        "eligible": "avail",
        "arm": "intervention",
        "p": "rand_prob",
    }
    features = ["logstep_30min_lag1", "logstep_pre30min", "is_at_home_or_work"]
    return MRTData.from_long(table, columns=columns, features=features)


def heartsteps_fit(data: MRTData, key: str, **options: Any) -> Classic:
    controls = "~ logstep_pre30min"
    if key != "wcls_fit1" and key != "wcls_fit1_num05":
        controls += " + logstep_30min_lag1 + is_at_home_or_work"
    moderators = "~ is_at_home_or_work" if key == "wcls_fit3" else "~ 1"
    return wcls(data, "logstep_30min", moderators=moderators, controls=controls, **options)


@needs_gpl
@pytest.mark.parametrize("key", ["wcls_fit1", "wcls_fit2", "wcls_fit3", "wcls_fit1_num05"])
def test_wcls_on_heartsteps(heartsteps: MRTData, mrtanalysis: Any, key: str) -> None:
    expected = mrtanalysis[key]
    fit = heartsteps_fit(heartsteps, key)
    assert fit.controls is not None
    same_as_r(fit, expected["effect"][: len(fit.names)], "df2")
    if "control" in expected:
        same_as_r(fit.controls, expected["control"], "df2")
    if "vcov_mancl_derouen" not in expected:
        return
    np.testing.assert_allclose(
        np.concatenate([fit.controls.estimate, fit.estimate]), list(expected["coefficients"].values()), rtol=1e-9
    )
    for small, name in ((True, "vcov_mancl_derouen"), (False, "vcov_uncorrected")):
        fit = heartsteps_fit(heartsteps, key, small_sample=small)
        assert fit.controls is not None
        deviations = np.hstack([fit.controls.deviations, fit.deviations])
        np.testing.assert_allclose(deviations.T @ deviations, expected[name], rtol=1e-7, atol=1e-12)


@needs_gpl
def test_sum_of_two_coefficients_is_not_the_wrong_interval_of_the_package(
    heartsteps: MRTData, mrtanalysis: Any
) -> None:
    """MRTAnalysis 0.3.1 prints [.0846, .4034], p .0019, for this contrast: its critical value is 1.27, not 2.04."""
    fit = heartsteps_fit(heartsteps, "wcls_fit3").contrast({"Intercept": 1, "is_at_home_or_work": 1})
    wrong = mrtanalysis["wcls_fit3"]["effect"][2]
    assert fit.estimate[0] == pytest.approx(wrong["Estimate"], rel=1e-9)
    assert fit.se[0] == pytest.approx(wrong["StdErr"], rel=1e-9)
    low, high = fit.conf_int()[0]
    assert (round(low, 4), round(high, 4)) == (-0.0129, 0.5010)
    assert round(float(fit.p_value[0]), 4) == 0.0619
    assert low < wrong["95% LCL"] - 0.05


@pytest.fixture(scope="module")
def binary() -> MRTData:
    table = pd.read_csv(GPL / "mrt_binary.csv").assign(outcome=0.0)
    columns = {"trajectory": "userid", "t": "time", "eligible": "avail", "arm": "A", "p": "rand_prob"}
    return MRTData.from_long(table, columns=columns, features=["time_var1", "time_var2"])


def lincombs(fit: Effects) -> np.ndarray:
    """The three contrasts of the vignette beside the coefficients; the package's t intervals are right for these."""
    more = fit.contrast([[1, 0.0333], [1, 0.5], [1, 1]])
    return np.array(list(rows_of(fit).values()) + list(rows_of(more).values()))


@needs_gpl
@pytest.mark.parametrize("key", ["emee_fit4", "emee_fit5", "emee_fit5_num05", "emee2_fit4", "emee2_fit5"])
def test_log_relative_risks_on_binary(binary: MRTData, mrtanalysis: Any, key: str) -> None:
    expected = mrtanalysis[key]
    moderators = "~ time_var1" if "fit5" in key else "~ 1"
    estimator: Any = emee2 if key.startswith("emee2") else emee
    fit = estimator(binary, "Y", moderators=moderators, controls="~ time_var1 + time_var2")
    plain = estimator(binary, "Y", moderators=moderators, controls="~ time_var1 + time_var2", small_sample=False)
    np.testing.assert_allclose(fit.estimate, list(expected["beta_hat"].values()), rtol=ROOT)
    np.testing.assert_allclose(fit.controls.estimate, list(expected["alpha_hat"].values()), rtol=ROOT)
    np.testing.assert_allclose(plain.se, list(expected["beta_se"].values()), rtol=ROOT)
    np.testing.assert_allclose(plain.controls.se, list(expected["alpha_se"].values()), rtol=ROOT)
    table = lincombs(fit) if "fit5" in key else np.array(list(rows_of(fit).values()))
    keys = ("Estimate", "StdErr", "95% LCL", "95% UCL", "p-value", "df")
    theirs = np.array([[row[k] for k in keys] for row in expected["effect"]])
    if estimator is emee:
        np.testing.assert_allclose(table, theirs, rtol=10 * ROOT)
        np.testing.assert_allclose(fit.controls.se, [row["StdErr"] for row in expected["control"]], rtol=ROOT)
    else:
        np.testing.assert_allclose(table[:, 0], theirs[:, 0], rtol=ROOT)
        np.testing.assert_allclose(table[:, 1], theirs[:, 1], atol=1.5e-4)
        np.testing.assert_allclose(fit.controls.se, [row["StdErr"] for row in expected["control"]], atol=1e-4)


@needs_gpl
def test_why_the_adjusted_errors_of_emee2_differ(binary: MRTData, mrtanalysis: Any) -> None:
    """The package lets decisions without availability into the leverage but not into the score; doing the same here
    gives its numbers to the last digit, so the rest of the estimator agrees. Ours keeps them out of both."""
    fit = emee2(binary, "Y", controls="~ time_var1 + time_var2")
    assert fit.controls is not None
    f, y, a = binary.frame, binary.decisions["Y"].to_numpy(float), binary.arm.astype(float)
    available = binary.eligible.astype(float)
    p = binary.decisions["p"].to_numpy(float)
    g = np.column_stack([np.ones(len(f)), f["time_var1"], f["time_var2"]])
    x = np.column_stack([g, a - p])
    shrink, mean = np.exp(-(a - p) * fit.estimate[0]), np.exp(g @ fit.controls.estimate)
    slope = -np.column_stack([mean[:, None] * g, (a - p) * shrink * y])
    bread = np.linalg.inv((x * available[:, None]).T @ slope)
    total = np.zeros((4, 4))
    for i in range(binary.n):
        m = binary.unit == i
        leverage = slope[m] @ bread @ x[m].T
        inverse = np.linalg.solve(np.eye(int(m.sum())) - leverage, (shrink * y - mean)[m])
        part = bread @ ((x * available[:, None])[m].T @ inverse)
        total += np.outer(part, part)
    expected = [row["StdErr"] for row in mrtanalysis["emee2_fit4"]["control"]]
    expected.append(mrtanalysis["emee2_fit4"]["effect"][0]["StdErr"])
    np.testing.assert_allclose(np.sqrt(np.diag(total)), expected, rtol=1e-8)


@needs_gpl
@pytest.mark.parametrize(
    ("key", "moderators", "controls"),
    [
        ("dcee_marginal_lm", "~ 1", "~ X + Z"),
        ("dcee_modZ_lm", "~ Z", "~ X + Z"),
        ("dcee_modZ_gam", "~ Z", "~ X + Z"),
        ("dcee_marginal_zero", "~ 1", None),
        ("dcee_modZX_lm", "~ Z + X", "~ X + Z"),
    ],
)
def test_dcee_on_distal(mrtanalysis: Any, key: str, moderators: str, controls: str | None) -> None:
    table = pd.read_csv(GPL / "mrt_distal_continuous.csv")
    columns = {"trajectory": "userid", "t": "dp", "eligible": "avail", "arm": "A", "p": "prob_A", "outcome": "Y"}
    data = MRTData.from_long(table, columns=columns, features=["X", "Z"])
    expected = mrtanalysis[key]
    fit = dcee(data, moderators=moderators, controls=controls, weights="trajectory")
    rtol = 1e-7 if key.endswith("gam") else 1e-9  # the package's gam is a straight line here, to its own tolerance
    np.testing.assert_allclose(fit.estimate, list(expected["beta_hat"].values()), rtol=rtol)
    np.testing.assert_allclose(fit.se, list(expected["beta_se"].values()), rtol=rtol)
    np.testing.assert_allclose(fit.covariance, expected["vcov"], rtol=rtol)
    np.testing.assert_allclose(fit.conf_int(), expected["ci_t"], rtol=rtol)
    np.testing.assert_allclose(fit.p_value, [r["Pr(>|t value|)"] for r in expected["summary_table"]], rtol=rtol)
    assert (fit.df == expected["df"]).all()
    for row in expected["lincomb"]:
        both = fit.contrast([[1, 1]])
        keys = ("Estimate", "Std. Error", "95% LCL", "95% UCL", "Pr(>|t value|)", "df")
        np.testing.assert_allclose(next(iter(rows_of(both).values())), [row[k] for k in keys], rtol=1e-8)


@needs_gpl
def test_dcee_golden_numbers_of_the_package() -> None:
    table = pd.read_csv(GPL / "mrt_distal_golden.csv")
    columns = {"trajectory": "userid", "t": "dp", "eligible": "avail", "arm": "A", "p": "prob_A", "outcome": "Y"}
    data = MRTData.from_long(table, columns=columns, features=["X"])
    for key, moderators in (("marginal", "~ 1"), ("moderated_X", "~ X")):
        expected = load(GPL / "mrt_distal_golden_expected.json")[key]
        fit = dcee(data, moderators=moderators, controls="~ X")
        np.testing.assert_allclose(fit.estimate, list(expected["beta"].values()), rtol=1e-10)
        np.testing.assert_allclose(fit.se, list(expected["se"].values()), rtol=1e-10)
        assert (fit.df == expected["df"]).all()
