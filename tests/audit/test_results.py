"""What a finished run shows: frames that join, intervals at any level, a plot that can be checked, a summary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest

import audit
from audit.effects import COLUMNS
from audit.plan import PRESETS, Collection, Plan, PlanFile, Points, Rollouts, Support
from audit.results import Run
from audit.study import replay_study
from audit.summary import as_text, table
from envs import InputError

matplotlib.use("Agg")


def study(folder: Path, plan: Plan, policy: str = "hasty") -> Run:
    return replay_study(policy, "generated:6:0", PlanFile(plan, False, ()), folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    plan = replace(
        PRESETS["quick"],
        rollouts=Rollouts(rounds=[6, 10]),
        collection=Collection(trajectories=5),
        points=Points(per_trajectory=5),
    )
    return study(tmp_path_factory.mktemp("run") / "run", plan)


def test_frames_of_every_grain_join(run: Run) -> None:
    assert list(run.effects.columns) == list(COLUMNS)
    assert run.effects["point"].is_unique and set(run.effects["point"]) == set(run.points["point"])
    assert set(run.effects["trajectory"]) <= set(run.trajectories["trajectory"])
    assert set(run.rollouts["point"]) <= set(run.points["point"])
    wins = run.rollouts[run.rollouts["arm"] == "factual"].groupby("point")["won"].sum()
    effects = run.effects.set_index("point").loc[wins.index]
    assert (effects["wins_factual"] == wins.astype(int)).all()
    counted = run.alternatives.groupby("point")[["rollouts", "wins"]].sum().loc[wins.index]
    assert (counted["rollouts"] == effects["n_factual"] + effects["n_alternative"]).all()
    assert (counted["wins"] == effects["wins_factual"] + effects["wins_alternative"]).all()
    exact = run.alternatives.dropna(subset=["probability"]).groupby("point")["probability"].sum()
    unseen = run.points.set_index("point")["unseen"]
    assert np.allclose(exact + unseen.loc[exact.index], 1.0)  # what draws showed, and the exact mass they did not
    assert not run.rollouts.duplicated(["point", "arm", "draw"]).any()


def test_estimates_are_the_differences_of_the_rates(run: Run) -> None:
    found = run.effects[run.effects["support"] == "defined"]
    assert len(found)
    difference = found["wins_factual"] / found["n_factual"] - found["wins_alternative"] / found["n_alternative"]
    assert np.allclose(found["estimate"], difference)
    assert ((found["low"] <= found["estimate"]) & (found["estimate"] <= found["high"])).all()
    assert found["q"].between(0, 1).all() and (found["q"] >= found["p"] - 1e-12).all()
    undefined = run.effects[run.effects["support"] != "defined"]
    assert undefined[["estimate", "low", "high", "p", "q", "mde"]].isna().all().all()
    assert undefined["reason"].notna().all() and (undefined["state"] == "undefined").all()


def test_intervals_at_another_level_nest(run: Run) -> None:
    wide, usual = run.conf_int(0.01).dropna(), run.conf_int().dropna()
    assert (wide["low"] <= usual["low"] + 1e-9).all() and (wide["high"] >= usual["high"] - 1e-9).all()
    pd.testing.assert_frame_equal(run.conf_int(0.05), run.conf_int())
    with pytest.raises(InputError, match="alpha"):
        run.conf_int(1.5)


def test_the_plot_shows_every_defined_point_and_takes_an_axes(run: Run) -> None:
    import matplotlib.pyplot as plt

    _, given = plt.subplots()
    axes = run.plot(given)
    assert axes is given
    shown = sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == "o")  # type: ignore[arg-type]
    assert shown == (run.effects["support"] == "defined").sum()
    assert run.plot().get_xlabel().startswith("effect on won")
    plt.close("all")


def test_the_summary_is_json_and_says_what_was_estimated(run: Run) -> None:
    details = json.loads((run.directory.path / "summary.json").read_text())
    assert details["estimand"]["contrast"] == "alternatives" and details["estimand"]["budget"] == 50
    assert sum(value["estimate"] for value in details["coverage"].values()) == pytest.approx(1.0)
    states = [details["shares"][state]["estimate"] for state in ("pivotal", "negligible", "inconclusive")]
    assert sum(states) == pytest.approx(1.0)
    assert set(details["shares"]["nonzero"]) >= {"observed", "null", "excess"}  # never a nonzero share alone
    frame = run.summary()
    assert {"figure", "estimate", "low", "high", "note"} == set(frame.columns)
    assert "nonzero share" in as_text(frame)


def test_no_defined_point_is_said_and_nothing_is_zero(tmp_path: Path) -> None:
    plan = replace(
        PRESETS["quick"],
        support=Support(draws=4, distinct=4),
        collection=Collection(trajectories=2),
        points=Points(per_trajectory=3),
    )
    found = study(tmp_path / "run", plan, "expert")
    assert set(found.effects["support"]) == {"no_counterfactual"}
    assert found.details["shares"] == {"reason": "no point is defined"}
    text = as_text(found.summary())
    assert "pivotal" not in text
    assert list(table(found.details)["figure"])[:2] == ["success of the trajectories", "coverage: defined"]
    assert len(found.rollouts) == 0 and "point" in found.rollouts.columns


def test_zero_has_no_sign_and_missing_is_a_dash() -> None:
    text = as_text(pd.DataFrame({"estimate": [-0.0001, -0.25, float("nan")]}))
    assert [line.strip() for line in text.splitlines()] == ["estimate", "0.000", "-0.250", "-"]


@pytest.mark.parametrize("preset", ["zhang2026"])
def test_the_preprints_rule_runs(tmp_path: Path, preset: str) -> None:
    plan = replace(PRESETS[preset], collection=Collection(trajectories=3), points=Points(per_trajectory=6))
    found = study(tmp_path / "run", plan)
    defined = found.effects[found.effects["support"] == "defined"]
    assert (defined["n_factual"] == 3).all() and (defined["n_alternative"] == 12).all()
    assert set(found.effects["support"]) <= {"defined", "insufficient", "no_counterfactual"}
    assert "null_corrected" not in found.details["shares"]  # its test has no attainable p-values to correct by


def test_what_is_no_finished_run_is_said(tmp_path: Path, run: Run) -> None:
    with pytest.raises(InputError, match="holds no run"):
        audit.load(tmp_path)
    broken = tmp_path / "run"
    broken.mkdir()
    (broken / "manifest.json").write_text((run.directory.path / "manifest.json").read_text())
    with pytest.raises(InputError, match="not finished"):
        audit.load(broken)
    (broken / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        audit.load(broken)
    (broken / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(InputError, match="another format"):
        audit.load(broken)
