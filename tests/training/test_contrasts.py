"""Contrasts, verdicts and the dose fit on tables of outcomes; files of outcomes trained elsewhere."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from statsmodels.stats.contingency_tables import mcnemar

from audit.training import arm_levels, contrast, dose_response, read_outcomes
from audit.training.contrasts import paired
from envs.core import InputError

matplotlib.use("Agg")


def table(
    arms: dict[str, float], *, seeds: int = 4, tasks: int = 40, seed: int = 0, dose: str = "matched"
) -> pd.DataFrame:
    """Arms with given success; task difficulty is common."""
    rng = np.random.default_rng(seed)
    hard = rng.normal(0, 0.1, tasks)
    rows = [
        {"dose": dose, "arm": arm, "seed": s, "task": f"t{t}", "won": float(rng.random() < p + hard[t])}
        for arm, p in arms.items()
        for s in range(seeds)
        for t in range(tasks)
    ]
    return pd.DataFrame(rows)


def test_the_crossed_interval_is_that_of_the_paired_t_where_only_one_factor_varies() -> None:
    rng = np.random.default_rng(1)
    by_seed = rng.normal(0.2, 1.0, 7)
    one = paired(np.repeat(by_seed[:, None], 30, axis=1))
    assert one.se == pytest.approx(by_seed.std(ddof=1) / np.sqrt(7)) and one.df == pytest.approx(6)
    by_task = rng.normal(0.2, 1.0, 30)
    one = paired(np.repeat(by_task[None, :], 7, axis=0))
    assert one.se == pytest.approx(by_task.std(ddof=1) / np.sqrt(30)) and one.df == pytest.approx(29)


def test_one_training_run_is_judged_by_mcnemar_and_says_so() -> None:
    outcomes = table({"random:a": 0.3, "a": 0.8}, seeds=1, tasks=60)
    row = contrast(outcomes).frame.iloc[0]
    wide = outcomes.pivot(index="task", columns="arm", values="won")
    gained = int((wide["a"] > wide["random:a"]).sum())
    lost = int((wide["a"] < wide["random:a"]).sum())
    assert row["p"] == pytest.approx(mcnemar([[0, gained], [lost, 0]], exact=True).pvalue)
    assert row["method"].startswith("McNemar") and "one training run" in row["reason"]
    assert row["low"] < row["estimate"] < row["high"] and row["verdict"] == "better"
    same = outcomes.assign(won=1.0)
    row = contrast(same).frame.iloc[0]
    assert row["p"] == 1.0 and row["low"] < 0 < row["high"]  # never an interval of width zero


def test_verdicts_holm_and_power() -> None:
    outcomes = table({"random:a": 0.4, "a": 0.75, "random:b": 0.5, "b": 0.5, "all steps": 0.5}, seeds=5, tasks=80)
    study = contrast(outcomes, sesoi=0.4)
    frame = study.to_frame().set_index(["arm", "against"])
    assert frame.loc[("a", "random:a"), "verdict"] == "better"
    assert frame.loc[("b", "random:b"), "verdict"] == "equivalent"
    family = frame[frame["family"] == "confirmatory"]
    assert len(family) == 2 and (family["p_holm"] >= family["p"]).all()
    assert frame.loc[frame["family"] == "exploratory", "p_holm"].isna().all()
    assert contrast(outcomes, sesoi=0.01).frame.set_index("arm").loc["b", "verdict"].iloc[0] == "inconclusive"
    assert (study.frame["mde"] > (study.frame["high"] - study.frame["low"]) / 2).all()
    wide = study.conf_int(0.01)
    assert (wide["low"].to_numpy() <= study.frame["low"].to_numpy()).all()
    more = contrast(outcomes, power=0.95).frame["mde"]
    assert (more > study.frame["mde"]).all()
    assert contrast(outcomes, pairs=[("b", "a")]).frame.iloc[0]["verdict"] == "worse"


def test_missing_outcomes_leave_the_task_out_and_are_counted() -> None:
    outcomes = table({"random:a": 0.4, "a": 0.6})
    outcomes.loc[outcomes["task"].eq("t3") & outcomes["arm"].eq("a") & outcomes["seed"].eq(1), "won"] = np.nan
    row = contrast(outcomes).frame.iloc[0]
    assert (row["tasks"], row["left_out"]) == (39, 1)
    without = contrast(outcomes[outcomes["task"] != "t3"]).frame.iloc[0]
    assert row["estimate"] == without["estimate"] and row["low"] == without["low"]


def test_dose_explains_all_of_a_line_and_says_what_chance_would() -> None:
    steps = {"a": 1, "b": 10, "c": 100, "d": 1000}
    rows, ledger = [], []
    for i, (arm, n) in enumerate(steps.items()):
        for seed in range(3):
            ledger.append({"arm": arm, "seed": seed, "dose": "unmatched", "steps": n})
            ledger.append({"arm": arm, "seed": seed, "dose": "matched", "steps": 10})
            rows += [
                {
                    "arm": arm,
                    "seed": seed,
                    "dose": dose,
                    "task": t,
                    "won": 1.0 * (t < (10 + 5 * i if dose == "unmatched" else 15)),
                }
                for t in range(30)
                for dose in ("unmatched", "matched")
            ]
    ledger += [{"arm": "untrained", "seed": s, "dose": "matched", "steps": 0} for s in range(3)]
    rows += [
        {"arm": "untrained", "seed": s, "dose": "matched", "task": t, "won": 0.0} for s in range(3) for t in range(30)
    ]
    found = dose_response(pd.DataFrame(rows), pd.DataFrame(ledger))
    assert found is not None and found.undosed == ("untrained",)
    fits = found.summary().set_index("dose")
    assert fits.loc["unmatched", "explained"] == pytest.approx(1.0)
    assert fits.loc["unmatched", "slope"] == pytest.approx(5 / 30)  # five more tasks of 30 a tenfold dose
    assert fits.loc["unmatched", "by_chance"] == pytest.approx(1 / 3)
    assert fits.loc["matched", "reason"] == "all doses are equal" and np.isnan(fits.loc["matched", "explained"])
    assert fits.loc["matched", "spread"] == 0
    assert found.plot().get_xscale() == "log"
    with pytest.raises(InputError, match="no 'colour'"):
        dose_response(pd.DataFrame(rows), pd.DataFrame(ledger), by="colour")


def test_noise_explains_what_chance_does() -> None:
    """With no relation R^2 is 1/(arms - 1) on average: the figure beside which it is printed."""
    rng = np.random.default_rng(3)
    levels = pd.DataFrame({"arm": list("abcdef"), "seed": 0, "dose": "u", "steps": [1, 3, 9, 20, 50, 100]})
    shares = []
    for _ in range(200):
        won = pd.DataFrame(
            {"dose": "u", "arm": np.repeat(list("abcdef"), 40), "seed": 0, "task": np.tile(range(40), 6)}
        )
        fit = dose_response(won.assign(won=1.0 * (rng.random(240) < 0.5)), levels, resamples=1)
        assert fit is not None
        shares.append(fit.summary()["explained"][0])
    assert np.mean(shares) == pytest.approx(0.2, abs=4 * np.std(shares) / np.sqrt(200))


def test_forest_shows_matched_beside_unmatched() -> None:
    outcomes = pd.concat([table({"random:a": 0.4, "a": 0.6}), table({"random:a": 0.4, "a": 0.6}, dose="unmatched")])
    study = contrast(outcomes)
    assert set(study.frame["family"][study.frame["dose"] == "unmatched"]) == {"exploratory"}
    ax = study.plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["matched", "unmatched"]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_outcomes_from_elsewhere(suffix: str, tmp_path: Path) -> None:
    outcomes = table({"random:a": 0.4, "a": 0.6}, seeds=2, tasks=12)
    outcomes.loc[0, "won"] = np.nan
    path = tmp_path / f"outcomes{suffix}"
    if suffix == ".jsonl":
        outcomes.to_json(path, orient="records", lines=True)
    elif suffix == ".csv":
        outcomes.to_csv(path, index=False)
    else:
        outcomes.to_parquet(path)
    pd.testing.assert_frame_equal(contrast(read_outcomes(path)).frame, contrast(outcomes).frame)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.drop(columns="task"), "no column 'task'"),
        (lambda t: t.assign(won=t["won"] + 1.5), "expected 0-1"),
        (lambda t: t.assign(won="yes"), "expected 0-1"),
        (lambda t: pd.concat([t, t.head(1)]), "twice"),
        (lambda t: t.drop(index=5), "of 12 tasks"),
        (lambda t: t[~(t["arm"].eq("a") & t["seed"].eq(1))], "lacks a training seed"),
    ],
)
def test_bad_outcomes_are_refused(change: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "outcomes.csv"
    change(table({"random:a": 0.4, "a": 0.6}, seeds=2, tasks=12)).to_csv(path, index=False)  # type: ignore[operator]
    with pytest.raises(InputError, match=says):
        read_outcomes(path)


def test_levels_show_arms_beside_the_untrained_policy() -> None:
    arms = {"untrained": 0.6, "all steps": 0.5, "a": 0.45, "random:a": 0.2}
    outcomes = table(arms, seeds=5, tasks=80)
    lost = outcomes["arm"].eq("a") & outcomes["task"].eq("t3") & outcomes["seed"].eq(0)
    outcomes.loc[lost, "won"] = np.nan
    ledger = pd.DataFrame(
        {"dose": "matched", "arm": list(arms), "seed": 0, "effective": [0.0, 9, 9, 9], "steps": [0, 4, 4, 4]}
    )
    study = contrast(outcomes, ledger=ledger)
    levels = arm_levels(study, ledger)
    frame = levels.to_frame().set_index("arm")
    whole = outcomes[outcomes["task"].ne("t3")]
    rate = whole.groupby("arm")["won"].mean()
    assert frame.loc["a", "success"] == pytest.approx(rate["a"])
    assert frame.loc["a", "gain"] == pytest.approx(rate["a"] - rate["untrained"])
    assert frame.loc["random:a", "success"] == pytest.approx(outcomes.query("arm == 'random:a'")["won"].mean())
    assert frame.loc["random:a", "gain_high"] < 0
    # The same difference, interval and adjusted p as the contrast itself has; only arms with a control have one.
    row = study.frame.set_index(["arm", "against"]).loc[("a", "random:a")]
    assert frame.loc["a", "over_control"] == row["estimate"] and frame.loc["a", "p_holm"] == row["p_holm"]
    assert frame["over_control"].notna().sum() == 1 and np.isnan(frame.loc["untrained", "gain"])
    assert frame.loc["a", "effective"] == 9 and frame["displacement"].isna().all()
    assert (frame["low"] < frame["success"]).all() and (frame["success"] < frame["high"]).all()
    wide = levels.conf_int(0.01)
    assert (wide["low"].to_numpy() <= levels.frame["low"]).all()
    ax = levels.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == list(arms)
    assert study.dose is not None and study.dose.idle == pytest.approx(levels.untrained)
    assert np.isnan(arm_levels(contrast(table({"random:a": 0.3, "a": 0.6}))).frame["gain"]).all()
