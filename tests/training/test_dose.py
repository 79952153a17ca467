"""The ledger and matching: sums add up, equalities hold to rounding, unequal doses are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.training import Recipe, Rule, arms, match, train, unmatched
from audit.training.dose import batches
from audit.training.rules import effective
from envs.core import InputError
from tests.training.planted import examples

RULES = [
    Rule("untrained", keep="nothing"),
    Rule("all steps"),
    Rule("top", "credit", "top", 0.1),
    Rule("above", "credit", "above", 1.0),
    Rule("weighted", "credit", "proportional"),
    Rule("own", lambda points: np.where(points["step"] < 5, 1.0 + points["step"], np.nan), "proportional"),
]


@pytest.mark.parametrize("across", ["seeds", "folds"])
def test_matched_doses_are_equal_to_rounding_and_nothing_is_dropped_silently(across: str) -> None:
    world = examples(1)
    made = arms(world, RULES)
    doses = match(made, Recipe(batch=8), seeds=4, across=across)  # type: ignore[arg-type]
    ledger = doses.to_frame()
    parts = ledger[["examples", "left_out", "dropped", "no_credit", "unusable"]]
    assert (parts.sum(axis=1) == len(world)).all() and (parts >= 0).all(axis=None)
    dosed = ledger[ledger["arm"] != "untrained"]
    target = dosed["effective"].min()
    assert (dosed["effective"] - target).abs().max() <= 1.0
    assert dosed["steps"].nunique() == dosed["shown"].nunique() == dosed["rate_integral"].nunique() == 1
    assert np.allclose(dosed["weight"], dosed["examples"])
    assert dosed["tokens"].isna().all()
    own = ledger[ledger["arm"].isin(["own", "random:own"])]
    assert (own["no_credit"] == len(world) // 2).all()
    idle = ledger[ledger["arm"] == "untrained"]
    assert (idle[["examples", "steps", "rate_integral", "displacement", "effective"]] == 0).all(axis=None)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.001, 1000), min_size=3, max_size=60),
    st.floats(0.05, 1.0),
)
def test_a_subsample_hits_any_effective_size_to_half_an_example(weights: list[float], share: float) -> None:
    world = examples(2, games=20, steps=3)
    values = np.full(len(world), np.nan)
    values[: len(weights)] = weights
    made = arms(world, [Rule("own", lambda points: values, "proportional")], controls=False)
    whole = effective(np.array(weights))
    target = max(1.0, share * whole)
    ledger = match(made, seeds=2, effective_size=target).to_frame()
    assert (ledger["effective"] - target).abs().max() <= 0.5 + 1e-6


def test_unequal_doses_raise_unless_asked_for() -> None:
    made = arms(examples(3), RULES[:3])
    with pytest.raises(InputError, match="effective sample size: all steps has 600, top 60"):
        match(made, by=("steps",))
    with pytest.raises(InputError, match="optimiser steps: all steps has 150"):
        match(made, by=(), unequal=("effective",))
    loose = match(made, by=("repeat",), unequal=("effective",)).to_frame()
    dosed = loose[loose["steps"] > 0]
    # Repeating shows few examples more often; their effective sample size stays what it is.
    assert dosed["steps"].nunique() == 1 and dosed["steps"].iloc[0] == 150
    assert set(dosed["effective"].round(6)) == {600.0, 60.0}
    natural = unmatched(made).to_frame().groupby("arm")["steps"].first()
    assert natural["all steps"] == 150 and natural["top"] == 15
    with pytest.raises(InputError, match="below the 100"):
        match(made, effective_size=100)
    with pytest.raises(InputError, match="choose one"):
        match(made, by=("steps", "repeat"))
    with pytest.raises(InputError, match="no means of matching"):
        match(made, by=("magic",))  # type: ignore[arg-type]


def test_missing_credit_is_missing_and_never_zero() -> None:
    world = examples(4, games=10, steps=4)
    credit = world.points["credit"].where(world.points["step"] != 2)
    made = arms(world.join(world.points[["point"]].assign(tau=credit)), [Rule("causal", "tau", "top", 0.5)])
    row = made.to_frame().set_index("arm").loc["causal"]
    assert (row["no_credit"], row["kept"], row["left_out"]) == (10, 15, 15)  # half of the 30 that have credit
    # A negative credit is above a missing one; the control is drawn among the same candidates.
    negative = arms(world.join(world.points[["point"]].assign(tau=-1.0 - credit.abs())), [Rule("c", "tau", "top", 1.0)])
    assert negative.by_name["c"].weights[np.isfinite(credit)].sum() == 30
    for seed in range(5):
        drawn = made.by_name["random:causal"].draw(seed)
        assert (np.isnan(drawn) == credit.isna()).all() and np.nansum(drawn) == 15
    assert not np.array_equal(made.by_name["random:causal"].draw(0), made.by_name["random:causal"].draw(1))


def test_ties_are_broken_without_favouring_an_order() -> None:
    world = examples(5)
    made = arms(world, [Rule("tied", lambda points: np.zeros(len(points)), "top", 0.5)])
    steps = world.points["step"][made.by_name["tied"].weights > 0]
    assert abs(steps.mean() - 4.5) < 0.5  # the first half of the file would have 4.5 too; of each game, 2
    order = world.points.index[made.by_name["tied"].weights > 0]
    assert abs(order.to_numpy().mean() - 299.5) < 40


def test_absent_and_wrong_credit() -> None:
    world = examples(6, games=4)
    made = arms(world)  # the seven, without judge, implicit, log probabilities and tau
    assert set(made.absent) == {"judge", "implicit", "confidence", "causal"}
    assert set(made.by_name) == {"untrained", "all steps", "outcome only", "random:outcome only"}
    assert made.to_frame().set_index("arm").loc["judge", "reason"] == "no credit 'judge.good5_hindsight'"
    with pytest.raises(InputError, match="no credit 'nothing'"):
        arms(world, [Rule("x", "nothing", "top", 0.1)])
    with pytest.raises(InputError, match="keeps no example"):
        arms(world, [Rule("x", "credit", "above", 1e9)])
    with pytest.raises(InputError, match="not a number a point"):
        arms(world, [Rule("x", lambda points: ["a"] * len(points), "top", 0.1)])
    with pytest.raises(InputError, match="finite or missing"):
        arms(world, [Rule("x", lambda points: [1.0], "top", 0.1)])
    with pytest.raises(InputError, match="another run"):
        world.join(world.points[["point"]].assign(point="?").head(1))
    with pytest.raises(InputError, match="a share above 0"):
        Rule("x", "credit", "top", 0.0)


def test_training_is_bit_reproducible_by_seed_and_follows_the_gradient() -> None:
    made = arms(examples(7), RULES[:3])
    one, two = (train(match(made, seeds=2)) for _ in range(2))
    for key, policy in one.checkpoints.items():
        assert policy.describe() == two.checkpoints[key].describe()  # the digest of the weights is in it
    assert one.checkpoints["matched", "top", 0].describe() != one.checkpoints["matched", "top", 1].describe()
    ledger = one.to_frame()
    dosed = ledger[ledger["steps"] > 0]
    assert (dosed["displacement"] > 0).all() and (dosed["loss_after"] < dosed["loss_before"]).all()
    assert np.allclose(dosed["loss_before"], np.log(4))  # from weights of 0, four options are equally likely
    # Rounds: going on from the checkpoints moves them further.
    more = train(match(made, seeds=2), start=one.policies("matched"))
    key = ("matched", "top", 0)
    assert more.checkpoints[key].training["start"] == one.checkpoints[key].describe()["weights"]


def test_the_gradient_is_that_of_the_loss_and_weights_weigh() -> None:
    from audit.training.trainer import _Model, fit

    world = examples(8, games=10)
    choices = world.choices
    assert choices is not None
    rng = np.random.default_rng(0)
    w, theta = rng.random(len(world)), rng.normal(size=6)
    model, every = _Model(choices, w, 1.7), np.arange(len(world))
    gradient = model.gradient(theta, every) * len(world) / w.sum()
    for i in range(6):
        step = np.eye(6)[i] * 1e-6
        slope = (model.loss(theta + step, every) - model.loss(theta - step, every)) / 2e-6
        assert slope == pytest.approx(gradient[i], abs=1e-7)
    # A weight of 2 is the same as an example that is there twice: full-batch steps agree bit for bit up to rounding.
    recipe = Recipe(batch=0, rate=0.5, optimiser="sgd")
    twice = np.where(every < 50, 2.0, 1.0)
    once, _ = fit(choices, twice / twice.mean(), np.zeros(6), 20, recipe, 0)
    from audit.training.examples import Choices

    doubled = Choices(
        choices.features, choices.design, np.vstack([choices.members, choices.members[:50]]),
        np.concatenate([choices.chosen, choices.chosen[:50]]),
    )  # fmt: skip
    again, _ = fit(doubled, np.ones(len(world) + 50), np.zeros(6), 20, recipe, 0)
    assert np.allclose(once, again, rtol=1e-10)


def test_order_is_common_to_arms() -> None:
    few = np.where(np.arange(100) % 3 == 0, 1.0, 0.0)
    mine = np.concatenate(batches(few, Recipe(batch=4), 8, 5))
    whole = np.concatenate(batches(np.ones(100), Recipe(batch=4), 25, 5))
    assert sorted(whole) == list(range(100))
    assert mine.tolist() == [i for i in whole.tolist() if i % 3 == 0][: mine.size]
    assert all(part.size == 34 for part in batches(few, Recipe(batch=0), 3, 5))


def test_tokens_are_counted_where_somebody_counts_them() -> None:
    world = examples(9, games=10)
    counted = world.counted(np.full(len(world), 7))
    ledger = match(arms(counted, RULES[:3]), Recipe(batch=4), seeds=1).to_frame().set_index("arm")
    assert np.isnan(ledger.loc["untrained", "tokens"])
    assert (ledger.loc[["all steps", "top"], "tokens"] == 7 * ledger.loc[["all steps", "top"], "shown"]).all()
    with pytest.raises(InputError, match="3 entries of tokens"):
        world.counted([1, 2, 3])


def test_token_matching_equalises_weighted_tokens_to_one_example() -> None:
    world = examples(10, games=40)
    # Long commands have high credit, so that arms of credit would see more tokens in as many examples.
    lengths = np.clip(np.round(6 + 2 * world.points["credit"]), 2, None).astype(int)
    counted = world.counted(lengths)
    made = arms(counted, RULES[:5])
    recipe = Recipe(batch=8)
    with pytest.raises(InputError, match="weighted tokens: top has"):
        match(made, recipe, seeds=2, by=("subsample", "steps"))
    loose = match(made, recipe, seeds=2, by=("subsample", "steps"), unequal=("tokens",)).to_frame()
    assert loose[loose["steps"] > 0]["weighted_tokens"].pipe(np.ptp) > 50
    doses = match(made, recipe, seeds=2)
    assert doses.by == ("subsample", "steps", "tokens")
    ledger = doses.to_frame()
    dosed = ledger[ledger["steps"] > 0]
    assert dosed["steps"].nunique() == 1 and (dosed["effective"] - dosed["effective"].min()).max() <= 1.0
    for run, (_, row) in zip(doses.runs, ledger.iterrows(), strict=True):
        if not run.steps:
            continue
        shown = np.concatenate(doses.batches(run))
        assert (run.weights[shown] > 0).all() and len(doses.batches(run)) == run.steps
        assert row["tokens"] == sum(int(lengths[i]) for i in shown) and row["shown"] == shown.size
        heaviest = (run.weights * counted.tokens).max()
        assert abs(row["weighted_tokens"] - run.steps * doses.token_budget()) <= heaviest / 2
    assert set(unmatched(made, recipe, seeds=1).to_frame()["dose"]) == {"unmatched"}  # asked for unequal doses
    with pytest.raises(InputError, match="where they are counted"):
        match(arms(world, RULES[:3]), by=("subsample", "steps", "tokens"))
    with pytest.raises(InputError, match="larger batches"):  # one example is more than a step's budget
        spiky = world.counted(np.where(np.arange(len(world)) % 7, 1, 400))
        match(arms(spiky, [Rule("all steps"), Rule("top", "credit", "top", 0.1)]), Recipe(batch=1), seeds=1)
