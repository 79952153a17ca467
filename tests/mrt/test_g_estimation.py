"""g-estimation against gesttools 1.3.0, DTRreg 2.4 and EconML 0.17.0 on shared data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

from audit.mrt import Effects, MRTData, blip
from tests.mrt.published import GPL, OWN, load, needs_gpl


@pytest.fixture(scope="module")
def printed() -> Any:
    return load(OWN / "agent_mrt_expected_from_R.json")


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


# --- example data of GPL packages ---


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
