"""Trials beside direct Monte Carlo: direct figures against exact truth, estimates against both, the default models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from audit.cli.mrt import mrt
from audit.mrt import MRTData, policy_gain
from audit.mrt.reading import default_model, default_policies, gains, model_for, read
from audit.mrt.rules import read_rule, read_rules
from audit.mrt.trial import Design, Trial, simulate
from audit.mrt.validate import Validation, _agrees, validate
from envs import InputError, games, make
from tests.mrt.worlds import Right, Wanderer, exact_chain

CHAIN, BUDGET, Q = "tabular:chain:2", 4, 0.4
DESIGN = Design(p=0.4, budget=BUDGET, seed=11)
TARGETS = ("always", "half: 0.5", "wrong: wrong=1", "early: t<2", "late: t>=2", "both: wrong=1 & t<3")
MODEL = "~ 0 + C(slot)"


def exact(text: str) -> float:
    rule = read_rule(text)
    return exact_chain(make(CHAIN), Q, BUDGET, lambda t, wrong: rule.at({"t": t, "wrong": int(wrong)}))


@pytest.fixture(scope="module")
def found() -> Validation:
    return validate(
        Wanderer(Q), Right(), CHAIN, DESIGN, n=1500, policies=TARGETS, by=("wrong",), model=MODEL,
        direct=1500, forked=120, rollouts=2,
    )  # fmt: skip


def test_direct_gains_against_exact_truth(found: Validation) -> None:
    never = exact("never")
    table = found.gain_table().set_index("policy")
    assert found.never == pytest.approx(never, abs=4 * np.sqrt(never * (1 - never) / 3675))
    for text in TARGETS:
        row = table.loc[read_rule(text).name]
        assert abs(row["direct"] - (exact(text) - never)) < 4 * row["direct_se"]
        assert abs(row["estimate"] - (exact(text) - never)) < 4 * row["se"]


def test_blips_by_forking_agree_with_the_trial_and_with_what_must_hold(found: Validation) -> None:
    table = found.blip_table()
    assert set(table["method"]) == {"aipw", "snmm"}
    assert set(table["continuation"]) == {"as in the trial", "no later treatment"}
    gap = (table["estimate"] - table["direct"]).abs() / np.hypot(table["se"], table["direct_se"])
    assert (gap < 4).all(), table
    right = table[table["group"] == "wrong=0"]
    assert (right["direct"].abs() < 4 * right["direct_se"]).all()  # a right proposal, replaced by itself
    # Later treatment mends a wrong step: what is gained now is worth more where no help follows.
    wrong = table[table["group"] == "wrong=1"].groupby("continuation")["direct"].first()
    assert wrong["no later treatment"] > 0.1 and wrong["as in the trial"] > 0.05


def test_cost_counts_every_rollout(found: Validation) -> None:
    cost = found.cost.set_index("purpose")["rollouts"]
    assert cost.iloc[0] == 1500
    assert cost.iloc[1] == 1500 * len(TARGETS) + 3675  # never treating: sqrt(6) times as many, rounded up
    assert (cost.iloc[3] - 120) % (2 * 2 * 2) == 0 and cost.iloc[3] > 120 * 8
    each = found.gains.set_index("policy")
    worst = 1 / each["se"].min() ** 2
    assert 0 < cost.iloc[2] < (len(TARGETS) + 1) * 0.5 * worst


def test_repeats_are_summed_up(found: Validation) -> None:
    again = validate(
        Wanderer(Q), Right(), CHAIN, DESIGN, n=200, policies=("always", "wrong=1"), by=(), model="~ wrong * t",
        repeats=3, direct=300, forked=10, rollouts=1,
    )  # fmt: skip
    assert sorted(again.gains["repeat"].unique()) == [0, 1, 2]
    table = again.gain_table()
    assert list(table["repeats"]) == [3, 3] and len(again.gains) == 6
    assert again.gains.groupby("policy")["estimate"].nunique().min() == 3  # trials of their own
    assert table["bias"].to_numpy() == pytest.approx((table["mean_estimate"] - table["direct"]).to_numpy())
    assert {"inside", "agrees", "bias_se"} <= set(table.columns)
    # The direct figure's noise widens the interval, so that what is inside agrees.
    assert (again.gains["agrees"] >= again.gains["inside"]).all()
    share, error = again.agreement
    by_trial = again.gains.groupby("repeat")["agrees"].mean()
    assert share == pytest.approx(by_trial.mean()) and error == pytest.approx(by_trial.std() / np.sqrt(3))
    assert 0 <= again.share <= share <= 1


def test_noise_of_the_direct_figure_counts_once() -> None:
    """A direct figure 2.2 standard errors of the trial away: outside, but no disagreement if it is as noisy itself."""
    rows = pd.DataFrame({"estimate": [0.5] * 3, "direct": [0.28, 0.28, np.nan], "direct_se": [0.01, 0.1, 0.1]})
    rows["low"], rows["high"] = 0.5 - 0.196, 0.5 + 0.196
    assert _agrees(rows).tolist()[:2] == [0.0, 1.0] and np.isnan(_agrees(rows)[2])


@pytest.mark.slow
def test_gains_hold_the_exact_truth_at_their_nominal_rate() -> None:
    """25 trials, six policies: 150 intervals, dependent within a trial; a rate under .88 would be a fault."""
    rules = read_rules(TARGETS)
    truth = np.array([exact(text) for text in TARGETS]) - exact("never")
    inside = []
    for seed in range(25):
        trial = simulate(Wanderer(Q), Right(), games(CHAIN), 300, replace(DESIGN, seed=seed))
        low, high = gains(trial.data("trajectory"), rules, MODEL).conf_int().T
        inside.append((low <= truth) & (truth <= high))
    assert 0.88 <= np.mean(inside) <= 0.995, np.mean(inside, axis=0)


@pytest.mark.slow
def test_alfworld_gains_hold_direct_monte_carlo() -> None:
    """The policy and the reviewer that come with the package, on generated games, with the default blip model."""
    found = validate(
        "hasty", "review:expert", "generated:6:0", Design(p=0.3, budget=15, eligible="disagrees=1"),
        n=400, direct=150, forked=4, rollouts=1, by=(),
    )  # fmt: skip
    assert found.gains["policy"].nunique() >= 9
    assert found.share >= 0.75, found.gain_table().to_string()


def test_a_model_blind_to_a_budget_is_wrong_and_ours_is_not() -> None:
    """One treatment at most: the blip of this continuation jumps with the first treatment."""
    rule = {"one": read_rule("n_past_treated<1")}
    truth = exact_chain(make(CHAIN), Q, BUDGET, lambda t, wrong: float(t < 1)) - exact("never")
    trial = simulate(Wanderer(Q), Right(), games(CHAIN), 6000, replace(DESIGN, seed=3)).data("trajectory")
    ours, blind = gains(trial, rule, MODEL), policy_gain(trial, rule, MODEL)
    assert abs(ours.estimate[0] - truth) < 3 * ours.se[0]
    assert abs(blind.estimate[0] - truth) > 6 * blind.se[0]


# Models and policies by default ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alfworld() -> Trial:
    games_ = games("generated:6:0")
    from audit.mrt.interventions import load_intervention
    from audit.policies import load_policy

    design = Design(p=0.4, budget=15, eligible="disagrees=1")
    return simulate(load_policy("hasty"), load_intervention("review:expert"), games_, 300, design)


def test_default_model_takes_what_can_carry_an_effect(alfworld: Trial) -> None:
    data = alfworld.data()
    model = default_model(data)
    assert "C(action_group)" in model and "* t" in model and "n_past_treated" in model
    assert "disagrees" not in model and "action_type" not in model  # constant; too many levels
    rare = alfworld.decisions.assign(kind=["rare" if i < 3 else "usual" for i in range(len(alfworld.decisions))])
    thin = MRTData(rare, alfworld.trajectories, features=("kind",), cluster="trajectory")
    assert "kind" not in default_model(thin)
    # Where every decision is eligible the coins so far are the time, and nothing may enter twice.
    all_eligible = simulate(Wanderer(Q), Right(), games(CHAIN), 300, DESIGN).data("trajectory")
    assert "n_past_eligible" not in default_model(all_eligible)
    few = MRTData(alfworld.decisions, alfworld.trajectories, features=alfworld.features, cluster="task")
    assert default_model(few) == "~ t"  # six games carry two coefficients


def test_default_policies_are_those_the_trial_knows(alfworld: Trial) -> None:
    data = alfworld.data()
    assert {"always", "early", "moves", "two treatments"} <= set(default_policies(data)) and len(
        default_policies(data)
    ) >= 9
    bare = MRTData(alfworld.decisions, alfworld.trajectories)
    assert "moves" not in default_policies(bare) and "early" in default_policies(bare)


def test_a_policy_enters_its_own_model_only_where_that_adds_something(alfworld: Trial) -> None:
    data = alfworld.data()
    assert model_for(data, read_rule("n_past_treated<2"), "~ t + n_past_treated")[1].endswith("+ policy")
    assert model_for(data, read_rule("action_group=go"), "~ C(action_group)")[1] == "~ C(action_group)"
    assert model_for(data, 0.5, "~ t")[1] == "~ t"
    assert model_for(data, read_rule("t>=99"), "~ t")[1] == "~ t"


def test_reading_a_trial(alfworld: Trial) -> None:
    reading = read(alfworld, by=("action_group",), policies=("always", "early: t<5"))
    assert [name for name, _ in reading.headline][:2] == ["trajectories", "mean outcome"]
    assert list(reading.pooled["continuation"]) == ["as in the trial", "no later treatment"]
    assert reading.gains.names == ("always", "early")
    assert (reading.gains.estimate[0] > 0) and len(reading.groups["action_group"].table) >= 3
    assert reading.gains.covariance.shape == (2, 2)
    assert reading.groups["action_group"].plot() is not None
    with pytest.raises(InputError, match="`nothing` is no declared feature"):
        read(alfworld, policies=("nothing=1",))
    with pytest.raises(InputError, match="neither 'pooled'"):
        read(alfworld, by=("nothing",))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"n": 0}, "at least 1"),
        ({"direct": 1}, "at least 2"),
        ({"policies": ("nothing=1",)}, "no declared feature"),
        ({"by": ("nothing",)}, "none of what is known"),
    ],
)
def test_bad_settings(settings: dict[str, object], says: str) -> None:
    usual = {"n": 60, "policies": ("always",), "direct": 2, "forked": 2, "rollouts": 1, "by": (), "model": "~ t"}
    with pytest.raises(InputError, match=says):
        validate(Wanderer(Q), Right(), CHAIN, DESIGN, **{**usual, **settings})  # type: ignore[arg-type]


def test_nothing_eligible_is_said() -> None:
    with pytest.raises(InputError, match="eligible"):
        validate(Wanderer(Q), Right(), CHAIN, Design(budget=3, eligible="t>=3"), n=20, policies=("always",), by=())


def test_validate_on_the_command_line() -> None:
    answer = CliRunner().invoke(
        mrt,
        [
            "validate", "hasty", "--intervention", "review:expert", "--eligible", "disagrees=1", "--env",
            "generated:6:0", "--p", "0.4", "--budget", "12", "--n", "150", "--direct", "30", "--forked", "6",
            "--rollouts", "1", "--target", "always", "--target", "early: t<4", "--model", "~ t + n_past_treated",
        ],
        catch_exceptions=False,
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    for text in (
        "gains over never treating",
        "always",
        "inside the 95 % interval",
        "blips: trial beside forks",
        "cost",
    ):
        assert text in answer.output
