"""Published numbers: what R and Python packages print for shared data, to the digits they print.

reference/ is ours to ship. The example data of GPL packages are read from ../shared at test time and skipped where
absent.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

from audit.mrt import Effects, MRTData, blip
from audit.mrt.classic import Classic, dcee, emee, emee2, wcls

OWN = Path(__file__).parent / "reference"
SHARED = Path(os.environ.get("AUDIT_SHARED", Path(__file__).parents[2].parent / "shared"))
GPL = SHARED / "reference" / "gpl"
ROOT = 5e-8  # the package stops its root finder at about 1e-8; ours goes on
needs_gpl = pytest.mark.skipif(
    not GPL.is_dir(),
    reason="example data of GPL packages are not shipped; set AUDIT_SHARED to the folder that has them",
)


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def rows_of(effects: Effects, names: dict[str, str] | None = None) -> dict[str, list[float]]:
    """Term -> estimate, se, low, high, p, df."""
    low, high = effects.conf_int().T
    columns = zip(effects.estimate, effects.se, low, high, effects.p_value, effects.df, strict=True)
    return {(names or {}).get(n, n): list(map(float, c)) for n, c in zip(effects.names, columns, strict=True)}


def same_as_r(effects: Effects, expected: list[dict[str, Any]], df: str, rtol: float = 1e-8) -> None:
    found = rows_of(effects, {"Intercept": "(Intercept)"})
    assert len(found) == len(expected)
    for row in expected:
        keys = ("Estimate", "StdErr", "95% LCL", "95% UCL", "p-value", df)
        # R prints a p-value below 1e-16 or so as 0, and its tails carry a dozen digits.
        np.testing.assert_allclose(found[row["term"]], [row[k] for k in keys], rtol=rtol, atol=2e-14)


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


def staged(table: pd.DataFrame, propensity: np.ndarray, features: list[str], **columns: str) -> MRTData:
    """An end-of-study table with its fitted propensity as p and the previous arm as a feature."""
    table = table.assign(eligible=1, p=propensity)
    arm = columns.get("arm", "A")
    table["lag"] = table.groupby(columns.get("trajectory", "id"))[arm].shift(1).fillna(0)
    mapping = {"trajectory": "id", "t": "time", "arm": "A", "outcome": "Y"} | columns
    return MRTData.from_long(table, columns=mapping, features=[*features, "lag"])


def classical(data: MRTData, effect: str, nuisance: str) -> Effects:
    """g-estimation as ordinary regression with the propensity as a covariate, stage by stage."""
    return blip(data, "none", effect, nuisance=nuisance, folds=1, residualise="regression")


def own_end_of_study() -> MRTData:
    table = pd.read_csv(OWN / "end_of_study_T3.csv").drop(columns="p")
    x = sm.add_constant((table["L"] > 0).astype(float))
    return staged(table, sm.Logit(table["A"], x).fit(disp=0).predict(), ["L", "U"])


def test_g_estimation_by_stage_on_own_data(printed: Any) -> None:
    data = own_end_of_study()
    fit = classical(data, "~ 0 + C(t) + C(t):L", "~ 0 + C(t) + C(t):(L + U + lag + p + p:L)")
    found = dict(zip(fit.names, fit.estimate, strict=True))
    for k in (1, 2, 3):
        expected = printed["gestSingle_type4"]
        assert found[f"C(t)[{k}]"] == pytest.approx(expected[f"t={k}.A"], rel=1e-9)
        assert found[f"C(t)[{k}]:L"] == pytest.approx(expected[f"t={k}.A:L"], rel=1e-9)


def gesttools_recursion(
    data: MRTData, s: np.ndarray, z: np.ndarray, more: int = 0, stage: np.ndarray | None = None
) -> np.ndarray:
    """The pooled recursion of gesttools: regress the outcome cleared of LATER treatment on rows from stage k on, k down
    to 1, and stop. Its answer depends on the stop; `more` repeats of the last regression lead to a fixed point."""
    y, t = data.y[data.unit], data.t if stage is None else stage
    given = np.hstack([(data.arm == k)[:, None] * s for k in range(1, data.arms + 1)])
    psi = np.zeros(given.shape[1])
    for k in [*range(int(t.max()), 0, -1), *([1] * more)]:
        own = pd.Series(given @ psi)
        later = (own.groupby(data.unit).transform("sum") - own.groupby(data.unit).cumsum()).to_numpy()
        x = np.column_stack([given, z])[t >= k]
        psi = np.linalg.lstsq(x, (y - later)[t >= k], rcond=None)[0][: given.shape[1]]
    return psi


def pooled_design(data: MRTData, interact: bool) -> tuple[np.ndarray, np.ndarray]:
    f = data.frame
    one = np.ones(len(f))
    s = np.column_stack([one, f["L"]]) if interact else one[:, None]
    z = np.column_stack([one, f["L"], f["U"], f["lag"], *(f["p"] * s[:, j] for j in range(s.shape[1]))])
    return s, z


def test_pooled_g_estimation_is_the_limit_of_the_recursion(printed: Any) -> None:
    data = own_end_of_study()
    s, z = pooled_design(data, True)
    fit = classical(data, "~ L", "~ L + U + lag + p + p:L")
    np.testing.assert_allclose(fit.estimate, gesttools_recursion(data, s, z, 60), rtol=1e-9)
    # type 2 of the package stops after one pass (and clears later treatment in its own way): near, not equal.
    np.testing.assert_allclose(fit.estimate, list(printed["gestSingle_type2"].values()), atol=0.1 * fit.se.max())


def test_panel_with_known_truth_against_econml() -> None:
    expected = load(OWN / "panel_dynamic_expected.json")
    table = pd.read_csv(OWN / "panel_dynamic.csv").assign(eligible=1)
    columns = {"trajectory": "id", "arm": "A", "outcome": "Y"}
    data = MRTData.from_long(table, columns=columns, features=["S", "U", "W"])
    names = "~ 0 + C(t) + C(t):U"
    fit = blip(data, "none", names, nuisance="~ 0 + C(t) + C(t):(S + U + W)")
    other = expected["dynamic_dml"]
    for theirs, their_se in (
        (other["intercept"] + other["coef_U"], other["intercept_se"] + other["coef_U_se"]),
        (expected["own_prototype"]["psi"], expected["own_prototype"]["se"]),
    ):
        np.testing.assert_allclose((fit.estimate - theirs) / their_se, 0, atol=0.3)
        np.testing.assert_allclose(fit.se, their_se, rtol=0.1)
    truth = np.array(expected["truth"]["intercept"] + expected["truth"]["slope_U"])
    deviation = fit.estimate - truth
    assert float(deviation @ np.linalg.solve(fit.covariance, deviation)) < 20.1  # chi2(8), .99


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


def gpl_end_of_study() -> MRTData:
    table = pd.read_csv(GPL / "gest_end_of_study.csv")
    return staged(table, table["prs"].to_numpy(), ["L", "U"])


@needs_gpl
@pytest.mark.parametrize("key", ["type3", "type4"])
def test_g_estimation_by_stage_on_package_data(key: str) -> None:
    interact = key == "type4"
    data = gpl_end_of_study()
    effect, extra = ("~ 0 + C(t) + C(t):L", " + p:L") if interact else ("~ 0 + C(t)", "")
    fit = classical(data, effect, f"~ 0 + C(t) + C(t):(L + U + lag + p{extra})")
    found = dict(zip(fit.names, fit.estimate, strict=True))
    for name, value in load(GPL / "gesttools_expected.json")["gestSingle"][key].items():
        stage, term = name.split(".")
        ours = f"C(t)[{stage[2:]}]" + (":L" if term == "A:L" else "")
        assert found[ours] == pytest.approx(value, rel=1e-8)


@needs_gpl
def test_bootstrap_interval_of_the_package_is_ours_in_width() -> None:
    """Its bootstrap limits are random; their width agrees with our standard errors within simulation error."""
    expected = load(GPL / "gesttools_expected.json")["gestboot_type3"]
    fit = classical(gpl_end_of_study(), "~ 0 + C(t)", "~ 0 + C(t) + C(t):(L + U + lag + p)")
    np.testing.assert_allclose(fit.estimate, list(expected["original"].values()), rtol=1e-8)
    low, high = np.array(expected["conf"]).reshape(2, 3)
    np.testing.assert_allclose(3.92 * fit.se, high - low, rtol=0.25)


@needs_gpl
@pytest.mark.parametrize(("key", "interact", "exact"), [("type1", False, True), ("type2", True, False)])
def test_pooled_g_estimation_on_package_data(key: str, interact: bool, exact: bool) -> None:
    data = gpl_end_of_study()
    s, z = pooled_design(data, interact)
    expected = list(load(GPL / "gesttools_expected.json")["gestSingle"][key].values())
    once = gesttools_recursion(data, s, z)
    np.testing.assert_allclose(once, expected, rtol=1e-9 if exact else 0, atol=0 if exact else 5e-3)
    fit = classical(data, "~ L" if interact else "~ 1", "~ L + U + lag + p" + (" + p:L" if interact else ""))
    np.testing.assert_allclose(fit.estimate, gesttools_recursion(data, s, z, 60), rtol=1e-8)
    assert (np.abs(fit.estimate - expected) < 0.5 * fit.se).all()


@needs_gpl
def test_repeated_outcomes_as_windows_on_package_data() -> None:
    """gestMultiple with cutoff 2: every outcome Y_s is a trajectory of decisions s - 1 and s, clusters are people."""
    table = pd.read_csv(GPL / "gest_repeated_outcome.csv")
    table["lag"] = table.groupby("id")["A"].shift(1).fillna(0)
    x = np.column_stack([np.ones(len(table)), table[["L", "U", "lag"]], table["time"] == 2, table["time"] == 3])
    table["p"] = sm.Logit(table["A"], x.astype(float)).fit(disp=0).predict()
    windows = []
    for s in (1, 2, 3):
        part = table[(table["time"] <= s) & (table["time"] > s - 2)].drop(columns="Y")
        outcome = table.loc[table["time"] == s].set_index("id")["Y"]
        windows.append(part.assign(outcome=part["id"].map(outcome), window=s, back=s - part["time"]))
    long = pd.concat(windows).sort_values(["id", "window", "time"], ignore_index=True)
    long = long.assign(trajectory=long["id"] * 10 + long["window"], eligible=1)
    columns = {"t": "time", "arm": "A"}
    data = MRTData.from_long(long, columns=columns, features=["L", "U", "lag"], cluster="id")
    one = np.ones((len(long), 1))
    z = np.column_stack([one, data.frame[["L", "U", "lag", "p"]]])
    stage = 2 - long["back"].to_numpy()  # an outcome's own decision first, then the one before it
    expected = load(GPL / "gesttools_expected.json")["gestMultiple_type1_cutoff2"]["A"]
    assert gesttools_recursion(data, one, z, 0, stage)[0] == pytest.approx(expected, rel=1e-9)
    fit = classical(data, "~ 1", "~ L + U + lag + p")
    assert fit.estimate[0] == pytest.approx(gesttools_recursion(data, one, z, 60, stage)[0], rel=1e-9)
    assert fit.df[0] == 999


# --- three arms and optimal continuations ----------------------------------------------------------------------------


def three_arms() -> MRTData:
    """Arm probabilities by a multinomial logit on L, U, time and the previous arm, as the package fits them."""
    table = pd.read_csv(GPL / "gest_end_of_study_3arm.csv")
    table["A"] = table["A"].map({"a": 0, "b": 1, "c": 2})
    lag = table.groupby("id")["A"].shift(1).fillna(0).astype(int)
    x = np.column_stack(
        [np.ones(len(table)), table["L"], table["U"], table["time"] == 2, table["time"] == 3, lag == 1, lag == 2]
    ).astype(float)
    p = np.asarray(sm.MNLogit(table["A"], x).fit(disp=0, method="newton", maxiter=100, tol=1e-12).predict())
    table = table.assign(
        eligible=1, p_1=p[:, 1], p_2=p[:, 2], lag1=(lag == 1).astype(float), lag2=(lag == 2).astype(float)
    )
    columns = {"trajectory": "id", "t": "time", "arm": "A", "outcome": "Y"}
    return MRTData.from_long(table, columns=columns, features=["L", "U", "lag1", "lag2"])


@needs_gpl
def test_three_arms_by_stage_on_package_data() -> None:
    """Six digits: the multinomial fit of the package stops a little early."""
    fit = classical(three_arms(), "~ 0 + C(t)", "~ 0 + C(t) + C(t):(L + U + lag1 + lag2 + p_1 + p_2)")
    found = dict(zip(fit.names, fit.estimate, strict=True))
    for name, value in load(GPL / "gesttools_expected.json")["gestSingle_3arm"]["type3"].items():
        stage, arm = name.split(".")
        ours = f"arm {'abc'.index(arm[1])}: C(t)[{stage[2:]}]"
        assert found[ours] == pytest.approx(value, abs=1e-6)


@needs_gpl
def test_three_arms_pooled_on_package_data() -> None:
    data = three_arms()
    one = np.ones((len(data.unit), 1))
    z = np.column_stack([one, data.frame[["L", "U", "lag1", "lag2", "p_1", "p_2"]]])
    expected = list(load(GPL / "gesttools_expected.json")["gestSingle_3arm"]["type1"].values())
    np.testing.assert_allclose(gesttools_recursion(data, one, z), expected, atol=1e-6)
    fit = classical(data, "~ 1", "~ L + U + lag1 + lag2 + p_1 + p_2")
    np.testing.assert_allclose(fit.estimate, gesttools_recursion(data, one, z, 60), rtol=1e-8)


@needs_gpl
@pytest.mark.parametrize(("key", "second"), [("gest_treat1", None), ("gest_treat2", "X")])
def test_optimal_continuation_of_dtrreg(key: str, second: str | None) -> None:
    """Stage 2 first, then the blip continued by the estimated optimal rule of stage 2: DTRreg's g-estimation."""
    wide = pd.read_csv(GPL / "dtr_two_stage_cont.csv")
    n = len(wide)
    table = pd.DataFrame(
        {
            "trajectory": np.repeat(np.arange(n), 2),
            "t": np.tile([1, 2], n),
            "eligible": 1,
            "arm": wide[["A1", "A2"]].to_numpy().ravel(),
            "X": wide[["X1", "X2"]].to_numpy().ravel(),
            "outcome": np.repeat(wide["Y"].to_numpy(), 2),
        }
    )
    design = {1: sm.add_constant(wide["X1"]), 2: sm.add_constant(wide["X2"]) if second else np.ones((n, 1))}
    fits = [sm.Logit(wide[f"A{k}"], design[k]).fit(disp=0).predict() for k in (1, 2)]
    table["p"] = np.column_stack(fits).ravel()
    data = MRTData.from_long(table, features=["X"])
    options = {"nuisance": "~ 0 + C(t) + C(t):X", "folds": 1, "residualise": "regression", "correction": "CR0"}
    model = "~ 0 + C(t) + C(t):X"
    last = dict(zip((f := blip(data, "none", model, **options)).names, f.estimate, strict=True))  # type: ignore[arg-type]

    def optimal(frame: pd.DataFrame) -> np.ndarray:
        return (last["C(t)[2]"] + last["C(t)[2]:X"] * frame["X"].to_numpy() > 0).astype(float)

    fit = blip(data, optimal, model, **options)  # type: ignore[arg-type]
    found = dict(zip(fit.names, fit.estimate, strict=True))
    expected = load(GPL / "dtrreg_expected.json")[key]
    for k, psi in enumerate(expected["psi"], start=1):
        assert found[f"C(t)[{k}]"] == pytest.approx(psi[f"A{k}"], rel=1e-7)
        assert found[f"C(t)[{k}]:X"] == pytest.approx(psi[f"X{k}:A{k}"], rel=1e-7)
    # Its covariance also counts the estimated propensity, which ours takes as known: near, not equal.
    for k in (1, 2):
        at = [fit.names.index(f"C(t)[{k}]"), fit.names.index(f"C(t)[{k}]:X")]
        np.testing.assert_allclose(fit.se[at], np.sqrt(np.diag(expected["covmat"][k - 1])), rtol=0.03)
