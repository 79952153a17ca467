"""Plans: presets, checks that name the key, locks that cannot be edited."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.plan import PRESETS, Collection, Hypothesis, Plan, departures, load_plan, lock_path, read_lock, write_lock
from audit.study import cost
from envs.core import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_toml(name: str) -> None:
    plan = replace(PRESETS[name], hypotheses=(Hypothesis("H1", "implicit is better than chance", "implicit", "auc"),))
    again = Plan.from_json(tomllib.loads(plan.to_toml()))
    assert again == plan
    assert again.hash == plan.hash


def test_hypotheses_survive_toml_and_leave_older_hashes_alone() -> None:
    every = (
        Hypothesis("H1", "about something else"),
        Hypothesis("H2", "beats fluency", "implicit.delta", "spearman", than="baseline.fluency"),
        Hypothesis("H3", "adds nothing", "implicit.m_hind", "equivalence:partial_fluency", margin=0.1),
        Hypothesis("H4", "recovers more than its share", "confidence.logp", "router", share=0.131),
    )
    plan = replace(PRESETS["default"], hypotheses=every)
    assert Plan.from_json(tomllib.loads(plan.to_toml())) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    # A lock of before `than`, `share` and `margin`.
    assert load_plan(str(Path(__file__).parents[2] / "preregistration" / "example.toml")).departed == ()
    assert set(plan.to_json()["hypotheses"][0]) == {"name", "claim", "signal", "measure"}


def test_the_preprints_rule() -> None:
    plan = PRESETS["zhang2026"]
    assert plan.estimand.contrast == "uniform"
    assert plan.support.distinct == 4
    assert plan.rollouts.design == "arms" and plan.rollouts.rounds == [3] and not plan.rollouts.adaptive


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"seeed": 1}, "did you mean 'seed'"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "seed is True"),
        ({"name": ""}, "name"),
        ({"estimand": 3}, "must be a table"),
        ({"estimand": {"contrast": "bst"}}, "contrast is 'bst'; expected one of alternatives"),
        ({"estimand": {"budget": 0}}, "budget is 0; expected between 1"),
        ({"estimand": {"budgets": 5}}, "did you mean 'budget'"),
        ({"rollouts": {"rounds": []}}, "growing whole numbers"),
        ({"rollouts": {"rounds": [4, 4]}}, "growing whole numbers"),
        ({"rollouts": {"rounds": [4.5]}}, "growing whole numbers"),
        ({"rollouts": {"adaptive": 1}}, "adaptive is 1; expected bool"),
        ({"support": {"draws": True}}, "draws is True"),
        ({"support": {"draws": 2, "distinct": 3}}, "can never show 3"),
        ({"decisions": {"alpha": 0}}, "alpha is 0"),
        ({"estimand": {"contrast": "uniform"}}, "rollouts.design must be 'arms'"),
        ({"rollouts": {"design": "arms", "adaptive": False}}, "rollouts.design must be 'draws'"),
        ({"estimand": {"outcome": "efficiency"}}, "adaptive"),
        ({"hypotheses": [{"name": "H1"}]}, "a name and a claim"),
        ({"hypotheses": [{"name": "H1", "claim": "x", "signl": "y"}]}, "did you mean 'signal'"),
        ({"hypotheses": [{"name": "H1", "claim": "x", "signal": 3}]}, "hypothesis H1: signal is 3; expected text"),
        ({"hypotheses": [{"name": "H1", "claim": "x", "signal": "s", "margin": 2}]}, "margin is 2; expected a number"),
        ({"hypotheses": [{"name": "H1", "claim": "x", "margin": 0.1}]}, "names none"),
        ({"hypotheses": [{"name": "H1", "claim": "x", "signal": "s", "measure": "router"}]}, "share go together"),
        ({"hypotheses": [{"name": "H1", "claim": "x", "signal": "s", "share": 0.1}]}, "share go together"),
        ({"hypotheses": [{"name": "H1", "claim": "x"}, {"name": "H1", "claim": "y"}]}, "two hypotheses are called H1"),
    ],
)
def test_a_wrong_setting_is_named(data: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Plan.from_json(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    )
)
def test_any_settings_are_a_plan_or_one_error(settings: Any) -> None:
    for data in ({"estimand": settings}, {"rollouts": {"rounds": settings}}, {"hypotheses": settings}):
        try:
            Plan.from_json(data)
        except InputError as error:
            assert "\n" not in str(error)


def test_a_lock_holds_and_departures_are_named(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(PRESETS["quick"].to_toml())
    assert not load_plan(str(file)).locked
    write_lock(file, load_plan(str(file)).plan)
    locked = load_plan(str(file))
    assert locked.locked and locked.departed == ()
    write_lock(file, locked.plan)  # the same content may be locked again
    file.write_text(file.read_text().replace("sesoi = 0.2", "sesoi = 0.1"))
    changed = load_plan(str(file))
    assert changed.departed == ("decisions.sesoi: 0.2 -> 0.1",)
    with pytest.raises(InputError, match=r"decisions\.sesoi"):
        write_lock(file, changed.plan)


def test_an_edited_lock_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(PRESETS["quick"].to_toml())
    lock = write_lock(file, PRESETS["quick"])
    data = json.loads(lock.read_text())
    data["plan"]["decisions"]["sesoi"] = 0.1
    lock.write_text(json.dumps(data))
    with pytest.raises(InputError, match="does not have the hash"):
        load_plan(str(file))
    lock.write_text("{")
    with pytest.raises(InputError, match="damaged"):
        read_lock(lock_path(file))


@pytest.mark.parametrize("text", ["name = ", "name = 'x'\nname = 'y'", "\x00"])
def test_what_is_no_toml_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "study.toml"
    file.write_text(text)
    with pytest.raises(InputError, match="TOML"):
        load_plan(str(file))
    with pytest.raises(InputError, match="no such plan"):
        load_plan(str(tmp_path / "nowhere.toml"))


def test_departures_of_equal_plans_are_none() -> None:
    assert departures(Plan(), Plan()) == []


def test_a_cost_is_a_range_and_a_policy_without_alternatives_costs_its_first_round() -> None:
    plan = replace(PRESETS["quick"], collection=Collection(trajectories=3))
    low, high = cost(plan, "hasty", "generated:2:0").seconds or (0.0, 0.0)
    assert 0 < low < high
    low, high = cost(plan, "expert", "generated:2:0").seconds or (1.0, 0.0)
    assert low == high
