"""Exact values against closed forms, against the tree of all histories, and against simulation."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.core import Environment, InputError, Turn
from envs.exact import ExactValues, Policy, exact
from envs.tabular import Place, TabularWorld, tabular


def uniform(turn: Turn) -> dict[str, float]:
    return {command: 1 / len(turn.admissible) for command in turn.admissible}


def uneven(turn: Turn) -> dict[str, float]:
    """A policy by hash of state and command, with an inadmissible command and one of probability 0."""
    listed = [*turn.admissible, "shout"]
    weights = [1 + hashlib.blake2b(f"{turn.state}/{c}".encode(), digest_size=1).digest()[0] for c in listed]
    weights[0] = 0 if len(listed) > 3 else weights[0]
    return {command: weight / sum(weights) for command, weight in zip(listed, weights, strict=True)}


def tree(env: Environment, turn: Turn, policy: Policy, steps: int) -> float:
    """P(win) by the sum over all histories: no graph, no memory, no arrays."""
    if turn.won or turn.done or steps == 0:
        return float(turn.won)
    return math.fsum(
        p * tree(env, env.step(turn.state, command), policy, steps - 1) for command, p in policy(turn).items() if p
    )


def simulate(env: Environment, policy: Policy, budget: int, n: int, seed: int) -> float:
    rng = random.Random(seed)
    wins = 0
    for _ in range(n):
        turn = env.reset()
        for _ in range(budget):
            if turn.done:
                break
            choice = policy(turn)
            turn = env.step(turn.state, rng.choices(list(choice), list(choice.values()))[0])
        wins += turn.won
    return wins / n


@pytest.mark.parametrize("budget", [0, 1, 2, 7])
def test_one_cell_chain_has_its_closed_form(budget: int) -> None:
    values = exact(tabular("chain:1"), uniform, budget)
    assert values.v("cell 0 of 1", budget) == pytest.approx(1 - (2 / 3) ** budget, abs=1e-15)


def test_chain_needs_its_length() -> None:
    values = exact(tabular("chain:4"), uniform, 5)
    assert values.v("cell 0 of 4", 3) == 0
    assert values.v("cell 0 of 4", 4) == pytest.approx(3**-4)
    # Five steps: four to the right and one wait at any of four places, or one left at the first.
    assert values.v("cell 0 of 4", 5) == pytest.approx(3**-4 + 5 * 3**-5)
    assert values.q("cell 3 of 4", 1, "go right") == 1
    assert values.q("cell 3 of 4", 1, "wait") == 0


def test_two_key_turns_on_the_choice_in_the_middle() -> None:
    values = exact(tabular("two-key"), uniform, 60)
    assert values.v("hall", 60) == pytest.approx(0.5, abs=1e-6)
    for k in (3, 5, 60):
        assert values.q("gallery", k, "take silver key") == 0
    assert values.q("gallery", 3, "take gold key") == pytest.approx(1 / 4)
    assert values.contrast("gallery", 57, "take gold key", "best") == pytest.approx(
        values.q("gallery", 57, "take gold key") - values.q("gallery", 57, "wait")
    )
    # Away from the choice, time is all there is to lose.
    assert values.spread("hall", 60) < 1e-6
    assert values.spread("gallery, holding the silver key", 50) == 0


@pytest.mark.parametrize("policy", [uniform, uneven])
def test_null_has_no_effect_anywhere_but_in_the_lottery(policy: Policy) -> None:
    world = tabular("null:3")
    values = exact(world, policy, 12)
    for state in world.effect_free:
        assert 0 < values.v(state, 12) < 1
        for k in range(1, 13):
            listed = world.restore(state).admissible
            assert len({values.q(state, k, command) for command in listed}) == 1
    assert values.spread("lottery", 1) == 1
    assert exact(world, uniform, 4).v(world.start, 4) == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(6))
def test_random_worlds_equal_the_sum_over_histories(seed: int) -> None:
    world = tabular(f"random:{seed}:6")
    values = exact(world, uneven, 5)
    for i, turn in enumerate(values.turns):
        for k in range(6):
            assert values.values[i, k] == pytest.approx(tree(world, turn, uneven, k), abs=1e-12)
    start = world.start
    for command in values.commands(start):
        assert values.q(start, 5, command) == pytest.approx(
            tree(world, world.step(start, command), uneven, 4), abs=1e-12
        )


@pytest.mark.parametrize(("name", "policy"), [("random:1", uneven), ("two-key", uniform), ("chain:3", uneven)])
def test_simulation_agrees(name: str, policy: Policy) -> None:
    world, n = tabular(name), 4000
    truth = exact(world, policy, 20).v(world.start, 20)
    assert 0.01 < truth < 0.99
    assert abs(simulate(world, policy, 20, n, seed=5) - truth) < 4 * math.sqrt(truth * (1 - truth) / n)


def by_hand(values: ExactValues, state: str, k: int, command: str) -> dict[str, float]:
    """The contrasts written out as in their definitions."""
    pi = values.policy(state)
    q = {c: values.q(state, k, c) for c in values.commands(state)}
    others = [c for c in pi if pi[c] > 0 and c != command]
    return {
        "alternatives": q[command] - sum(pi[c] / (1 - pi[command]) * q[c] for c in others),
        "uniform": q[command] - sum(q[c] for c in others) / len(others),
        "policy": q[command] - sum(pi[c] * q[c] for c in pi),
        "best": q[command] - max(q[c] for c in others),
    }


@pytest.mark.parametrize("seed", range(4))
def test_contrasts_follow_their_definitions(seed: int) -> None:
    values = exact(tabular(f"random:{seed}"), uneven, 15)
    checked = 0
    for turn in values.turns:
        for command in values.commands(turn.state):
            wanted = by_hand(values, str(turn.state), 9, command)
            for kind, tau in wanted.items():
                assert values.contrast(turn.state, 9, command, kind) == pytest.approx(tau, abs=1e-12)  # type: ignore[arg-type]
            pi = values.policy(turn.state)[command]
            assert wanted["policy"] == pytest.approx((1 - pi) * wanted["alternatives"], abs=1e-12)
            checked += 1
    assert checked > 20


def test_contrasts_among_given_alternatives() -> None:
    values = exact(tabular("chain:2"), uniform, 6)
    q = {c: values.q("cell 1 of 2", 4, c) for c in ("go right", "go left", "wait")}
    among = ("wait", "go right")
    assert values.contrast("cell 1 of 2", 4, "go right", "uniform", among) == pytest.approx(q["go right"] - q["wait"])
    assert values.contrast("cell 1 of 2", 4, "go left", "best", among) == pytest.approx(q["go left"] - q["go right"])
    with pytest.raises(InputError, match="weighs by the policy"):
        values.contrast("cell 1 of 2", 4, "wait", "alternatives", among)
    with pytest.raises(InputError, match="not known"):
        values.contrast("cell 1 of 2", 4, "wait", "worst")  # type: ignore[arg-type]


def test_without_an_alternative_the_contrast_is_missing() -> None:
    def certain(turn: Turn) -> dict[str, float]:
        return {"go right": 1.0}

    values = exact(tabular("chain:2"), certain, 3)
    for kind in ("alternatives", "uniform", "best"):
        assert math.isnan(values.contrast("cell 0 of 2", 3, "go right", kind))
    assert values.contrast("cell 0 of 2", 3, "go right", "policy") == 0
    # A command that the policy never takes has its effect too.
    assert values.contrast("cell 0 of 2", 2, "wait") == -1
    assert math.isnan(values.spread("cell 2 of 2", 1))


def test_occupancy_is_the_forward_recursion() -> None:
    world = tabular("random:2")
    values = exact(world, uneven, 12)
    assert np.allclose(values.occupancy.sum(axis=1), 1)
    assert values.distribution(0) == {world.start: 1.0}
    won = [i for i, turn in enumerate(values.turns) if turn.won]
    for t in range(13):
        assert values.occupancy[t, won].sum() == pytest.approx(values.v(world.start, t), abs=1e-12)
    one = values.distribution(1)
    for command, p in uneven(world.reset()).items():
        assert p == 0 or world.step(world.start, command).state in one


def test_steps_beyond_what_was_explored_are_an_error_and_not_a_number() -> None:
    values = exact(tabular("chain:9"), uniform, 3)
    assert {str(state)[:6] for state in values.states} == {"cell 0", "cell 1", "cell 2", "cell 3"}
    assert values.v("cell 1 of 9", 2) == 0
    with pytest.raises(InputError, match="only 3 steps were explored"):
        values.v("cell 1 of 9", 3)
    with pytest.raises(InputError, match="outside the budget"):
        values.v("cell 0 of 9", 4)
    with pytest.raises(InputError, match="not among those reached"):
        values.v("cell 7 of 9", 1)
    with pytest.raises(InputError, match="at least one step"):
        values.q("cell 0 of 9", 0, "wait")
    with pytest.raises(InputError, match="not explored"):
        values.q("cell 0 of 9", 1, "fly")


def test_a_command_of_probability_0_does_not_spoil_values_at_the_rim() -> None:
    def stay(turn: Turn) -> dict[str, float]:
        return {"wait": 1.0, "go right": 0.0}

    values = exact(tabular("chain:9"), stay, 2, explore="policy")
    assert values.v("cell 0 of 9", 2) == 0
    assert values.v("cell 1 of 9", 1) == 0
    assert values.q("cell 0 of 9", 1, "go right") == 0
    assert values.commands("cell 0 of 9") == ("wait", "go right")


def test_start_elsewhere() -> None:
    world = tabular("chain:4")
    values = exact(world, uniform, 2, start="cell 2 of 4")
    assert values.turns[0].state == "cell 2 of 4"
    assert values.v("cell 2 of 4", 2) == pytest.approx(1 / 9)


def test_won_counts_even_where_the_game_goes_on() -> None:
    class GoesOn(TabularWorld):
        def restore(self, state: Any) -> Turn:
            turn = super().restore(state)
            return Turn(turn.observation, turn.admissible, turn.state == "mid", False, turn.state)

        def step(self, state: Any, command: str) -> Turn:
            return self.restore(super().step(state, command).state)

        def reset(self) -> Turn:
            return self.restore(self.start)

    world = GoesOn("t", "a", {"a": Place({"go": "mid"}), "mid": Place({"back": "a"})})
    assert exact(world, uniform, 3).values[0].tolist() == [0, 1, 1, 1]


def test_keys_merge_states_and_wrong_keys_are_found() -> None:
    places = {f"{side}{i}": Place({"l": f"l{i + 1}", "r": f"r{i + 1}"}) for side in "lr" for i in range(3)}
    places |= {"l3": Place(won=True), "r3": Place()}
    world = TabularWorld("t", "l0", places)
    plain = exact(world, uniform, 3)
    merged = exact(world, uniform, 3, key=lambda state: state if state[1] == "3" else state[1])
    assert len(merged.turns) < len(plain.turns)
    for turn in plain.turns:
        k = 3 - int(str(turn.state)[1])
        assert merged.v(turn.state, k) == plain.v(turn.state, k)

    def sided(turn: Turn) -> dict[str, float]:
        return {"l": 0.3, "r": 0.7} if str(turn.state).startswith("l") else {"l": 0.7, "r": 0.3}

    with pytest.raises(InputError, match="finer key"):
        exact(world, sided, 3, key=lambda state: state if state[1] == "3" else state[1])
    with pytest.raises(InputError, match="finer key"):
        exact(world, uniform, 3, key=lambda state: state[1])


@pytest.mark.parametrize(
    "choice",
    [{}, {"wait": 0.9}, {"wait": 1.5, "go left": -0.5}, {"wait": math.nan}, {"wait": 1.0, "go left": 1e-6}],
)
def test_what_is_no_distribution_is_refused(choice: Mapping[str, float]) -> None:
    with pytest.raises(InputError, match="expected a distribution"):
        exact(tabular("chain"), lambda turn: choice, 2)


def test_bounds_are_kept() -> None:
    with pytest.raises(InputError, match="more than 50 states"):
        exact(tabular("chain:200"), uniform, 100, max_states=50)
    with pytest.raises(InputError, match="budget"):
        exact(tabular("chain"), uniform, -1)
    with pytest.raises(InputError, match="explore"):
        exact(tabular("chain"), uniform, 1, explore="some")  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_alfworld_game_equals_its_simulation(tmp_path: Path) -> None:
    """The compiled world with a state-only policy around the walkthrough; text states and merged ones agree."""
    from envs.alfworld.games import open_game
    from envs.alfworld.generate import generate
    from envs.alfworld.world import CODE_BITS

    game = next(iter(generate(1, 0)))
    file = tmp_path / "game.tw-pddl"
    file.write_bytes(game.game)
    world = open_game(file, cache=tmp_path)

    def around(turn: Turn) -> dict[str, float]:
        weights = {
            c: 6.0 if c in game.walkthrough else 1.0 for c in turn.admissible if c in (*game.walkthrough, "look")
        }
        weights["sing"] = 0.5
        total = sum(weights.values())
        return {command: weight / total for command, weight in weights.items()}

    budget = 2 * len(game.walkthrough)
    plain = exact(world, around, budget, explore="policy")
    merged = exact(world, around, budget, explore="policy", key=lambda state: state >> CODE_BITS)
    start = world.reset().state
    truth = plain.v(start, budget)
    assert 0.02 < truth < 0.98
    assert len(merged.turns) < len(plain.turns)
    assert merged.v(start, budget) == pytest.approx(truth, abs=1e-12)
    n = 3000
    assert abs(simulate(world, around, budget, n, seed=1) - truth) < 4 * math.sqrt(truth * (1 - truth) / n)
