"""Replay against exact truth: worlds whose values follow by dynamic programming.

Every contrast's interval covers its true value at the nominal rate; no effect is called pivotal more often than
alpha; adaptive rounds keep both. Fixed seeds; 500 studies and more of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from audit.effects import effects
from audit.plan import Contrast, Decisions, Estimand, Plan, Rollouts, Support
from audit.records import Trajectory
from envs import Environment, Turn, games, make
from envs.alfworld.world import CODE_BITS
from envs.exact import ExactValues, exact
from envs.tabular import tabular
from tests.audit.conftest import StateOnlyPolicy, replay_points, trajectory_of, uneven

STUDIES = 500
Choose = Callable[[Turn], Mapping[str, float]]


def plan_for(contrast: Contrast, budget: int, **rollouts: Any) -> Plan:
    arms = contrast in ("uniform", "best")
    settings: dict[str, Any] = {"design": "arms" if arms else "draws", "rounds": [12], "adaptive": False, **rollouts}
    return Plan(
        name=contrast,
        estimand=Estimand(contrast=contrast, budget=budget),
        support=Support(draws=64 if arms else 16, distinct=2 if arms else 1),
        rollouts=Rollouts(**settings),
        decisions=Decisions(sesoi=0.25),
    )


def truth(values: ExactValues, states: list[Any], row: pd.Series, plan: Plan, records: Any) -> float:
    """The true effect of a point: with respect to the arms it was compared with, where the contrast is of arms."""
    state, left = states[row["step"]], plan.estimand.budget - row["step"]
    if plan.estimand.contrast == "uniform":
        among = [command for command, *_ in records[0]["alternatives"][: plan.support.distinct]]
        return values.contrast(state, left, row["action"], "uniform", among)
    if plan.estimand.contrast == "best":
        return values.q(state, left, row["action"]) - values.q(state, left, row["compared_with"])
    return values.contrast(state, left, row["action"], plan.estimand.contrast)


def study(
    env: Environment, choose: Choose, trajectory: Trajectory, plan: Plan, *, hidden: bool = False, **options: Any
) -> pd.DataFrame:
    """Replay one trajectory under many seeds; one row a point and seed, with the truth beside it."""
    values = exact(env, choose, plan.estimand.budget, **options)
    turns = [env.reset()]
    for command in trajectory.commands:
        turns.append(env.step(turns[-1].state, command))
    states = [turn.state for turn in turns]
    policy = StateOnlyPolicy(choose, hidden=hidden)
    points: list[tuple[Trajectory, Any]] = []
    seeds: list[int] = []
    for seed in range(STUDIES):
        found = replay_points(env, policy, trajectory, replace(plan, seed=seed))
        points += found
        seeds += [seed] * len(found)
    frame, _ = effects(points, plan)
    frame["seed"] = seeds
    defined = frame[frame["support"] == "defined"].copy()
    defined["truth"] = [
        truth(values, states, row, plan, points[i][1]) for i, row in zip(defined.index, _rows(defined), strict=True)
    ]
    defined["covered"] = (defined["low"] <= defined["truth"] + 1e-12) & (defined["truth"] - 1e-12 <= defined["high"])
    return defined


def _rows(frame: pd.DataFrame) -> list[pd.Series]:
    return [row for _, row in frame.iterrows()]


# Worlds ---------------------------------------------------------------------------------------------------------

CHAIN = ("go right", "wait", "go left", "go right", "go right")


def chain_study(contrast: Contrast, *, hidden: bool = False, **rollouts: Any) -> pd.DataFrame:
    env = tabular("chain:3")
    plan = plan_for(contrast, 9, **rollouts)
    return study(env, uneven, trajectory_of(env, CHAIN[:4], 9), plan, hidden=hidden)


@pytest.mark.slow
@pytest.mark.parametrize("contrast", ["alternatives", "policy", "uniform", "best"])
def test_intervals_cover_the_exact_value(contrast: Contrast) -> None:
    found = chain_study(contrast)
    assert len(found) >= STUDIES * 3
    assert found["truth"].abs().max() > 0.2  # there is something to find
    coverage = found["covered"].mean()
    # The policy contrast spends part of alpha on pi, which is exact here: conservative by design.
    assert 0.925 <= coverage <= (0.985 if contrast in ("policy", "best") else 0.975), coverage


@pytest.mark.slow
@pytest.mark.parametrize("contrast", ["alternatives", "policy"])
def test_intervals_cover_where_the_policy_hides_its_probabilities(contrast: Contrast) -> None:
    found = chain_study(contrast, hidden=True)
    assert not found["exact"].any()
    assert 0.925 <= found["covered"].mean() <= 0.99


@pytest.mark.slow
def test_adaptive_rounds_cover_at_every_stop() -> None:
    """Anytime-valid: intervals hold whatever stopped the rounds; they are wider than fixed ones by design."""
    found = chain_study("alternatives", rounds=[8, 12, 16, 24, 32], adaptive=True)
    assert found["rounds"].nunique() > 1  # rounds do stop early
    assert found["covered"].mean() >= 0.945
    assert (found.groupby("step")["covered"].mean() >= 0.925).all()


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True])
def test_no_effect_is_pivotal_at_most_as_often_as_alpha(adaptive: bool) -> None:
    """The null world: before the lottery no action has an effect. Any false pivotal point of a study counts."""
    env = tabular("null:3")
    rounds = [8, 12, 16, 24] if adaptive else [16]
    plan = plan_for("alternatives", 5, rounds=rounds, adaptive=adaptive)
    commands = ["walk on the left", "walk on the right", "walk in the middle"]
    found = study(env, uneven, trajectory_of(env, commands, 5), plan)
    assert found["truth"].abs().max() < 1e-12
    noise = np.sqrt(0.05 * 0.95 / len(found))
    assert (found["p"] <= 0.05).mean() <= 0.05 + 2.6 * noise
    # q-values over one study of three points: the family-wise false rate, every point being null.
    false = []
    for _, part in found.groupby("seed"):
        from audit.multiplicity import discoveries

        false.append(bool(discoveries(part["p"].to_numpy(), method="bh").rejected.any()))
    assert np.mean(false) <= 0.05 + 2.6 * np.sqrt(0.05 * 0.95 / STUDIES)


@pytest.mark.slow
@pytest.mark.parametrize("contrast", ["uniform", "best"])
def test_arms_do_not_find_effects_where_there_are_none(contrast: Contrast) -> None:
    env = tabular("null:2")
    found = study(env, uneven, trajectory_of(env, ["walk on the left", "walk on the right"], 4), plan_for(contrast, 4))
    assert found["truth"].abs().max() < 1e-12
    assert (found["p"] <= 0.05).mean() <= 0.05 + 2.6 * np.sqrt(0.05 * 0.95 / len(found))
    assert found["covered"].mean() >= 0.925


@pytest.mark.slow
def test_the_pivotal_step_is_found() -> None:
    """Two keys: the third step cannot be mended; replay finds it, and finds it alone."""
    env = tabular("two-key")
    right = ["take iron key", "open gate", "take gold key", "go through door", "unlock chest"]
    plan = plan_for("alternatives", 30, rounds=[40])
    found = study(env, uneven, trajectory_of(env, right, 30), plan)
    pivotal = found.groupby("step")["state"].agg(lambda states: (states == "pivotal").mean())
    assert pivotal[2] == 1.0
    assert (pivotal.drop(2) <= 0.05).all()


# A small ALFWorld game ---------------------------------------------------------------------------------------------


def narrow(target: str, places: tuple[str, ...]) -> Choose:
    """A state-only policy of few commands: going to some places, and anything that names the target."""

    def choose(turn: Turn) -> Mapping[str, float]:
        listed = [
            command
            for command in turn.admissible
            if command in ("look",)
            or target in command
            or (command.startswith(("go to", "open")) and command.endswith(places))
        ]
        weights = [3.0 if target in command else 1.0 for command in listed]
        return {command: weight / sum(weights) for command, weight in zip(listed, weights, strict=True)}

    return choose


@pytest.mark.slow
@pytest.mark.parametrize("contrast", ["alternatives", "uniform"])
def test_a_small_alfworld_game_with_its_graph_enumerated(contrast: Contrast) -> None:
    from envs.alfworld.games import read_game

    game = next(g for g in games("generated:6:0") if g.task_type == "pick_and_place_simple")
    env = make(game.address)
    walkthrough = read_game(Path(game.address)).walkthrough or ()
    take = next(command for command in walkthrough if command.startswith("take "))
    target = take.split(" from ")[0].removeprefix("take ")
    places = tuple(command.removeprefix("go to ") for command in walkthrough if command.startswith("go to "))
    choose = narrow(target, places)
    budget = 14
    trajectory = trajectory_of(env, [walkthrough[0], "look", *walkthrough[1:3]], budget)
    found = study(
        env,
        choose,
        trajectory,
        plan_for(contrast, budget),
        explore="policy",
        key=lambda state: state >> CODE_BITS,
    )
    assert found["truth"].abs().max() > 0.1
    assert 0.925 <= found["covered"].mean() <= 0.98, found["covered"].mean()
