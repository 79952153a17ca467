"""The compiled world is the stock engine, restores anything, and forgets safely."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.parity import check, walkthrough_wins
from envs import Game, InputError, games, make
from envs.alfworld.games import TASK_TYPES, open_game, read_game
from envs.alfworld.translate import display_names
from envs.alfworld.world import AlfredWorld
from envs.check import check_env

Official = Callable[[str], Path]


@pytest.fixture(scope="module")
def generated() -> list[Game]:
    return games("generated:6:0")


@pytest.fixture(scope="module")
def world(generated: list[Game]) -> AlfredWorld:
    heat = next(game for game in generated if game.task_type == "pick_heat_then_place_in_recep")
    env = make(heat.address)
    assert isinstance(env, AlfredWorld)
    return env


def walk(env: AlfredWorld, n: int, seed: int) -> list[int]:
    """The states of a random walk."""
    rng, turn = random.Random(seed), env.reset()
    states = [turn.state]
    for _ in range(n):
        turn = env.step(turn.state, rng.choice(turn.admissible))
        states.append(turn.state)
    return states  # type: ignore[return-value]


def sample_of_each_type(found: list[Game], each: int) -> list[Game]:
    return [game for kind in TASK_TYPES for game in [g for g in found if g.task_type == kind][:each]]


# Parity ------------------------------------------------------------------------------------------------------------


def test_generated_games_equal_the_stock_engine(generated: list[Game]) -> None:
    for game in generated[::2]:
        report = check(game, 30)
        assert report.difference is None, f"{game.name}: {report.difference}"
        assert report.steps >= 25 or "won" in str(report.verbs)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["valid_seen", "valid_unseen"])
def test_official_games_equal_the_stock_engine(official: Official, split: str) -> None:
    """A sample that fits CI: two games of each task type; `make parity` takes them all."""
    official(split)
    verbs: set[str] = set()
    for game in sample_of_each_type(games(f"alfworld:{split}"), 2):
        report = check(game, 40)
        assert report.difference is None, f"{game.name}: {report.difference}"
        verbs |= set(report.verbs)
    assert {"go", "open", "close", "take", "move", "examine", "look", "(nothing happens)"} <= verbs


@pytest.mark.slow
@pytest.mark.parametrize("split", ["valid_seen", "valid_unseen"])
def test_every_official_valid_walkthrough_wins(official: Official, split: str) -> None:
    official(split)
    found = games(f"alfworld:{split}")
    assert len(found) == {"valid_seen": 140, "valid_unseen": 134}[split]
    for game in found:
        problem = walkthrough_wins(make(game.address), read_game(game.address).walkthrough or ())
        assert problem is None, f"{game.name}: {problem}"


@pytest.mark.slow
def test_a_sample_of_train_walkthroughs_wins(official: Official) -> None:
    official("train")
    found = games("alfworld:train")
    assert len(found) == 3553
    for game in found[::71]:
        problem = walkthrough_wins(make(game.address), read_game(game.address).walkthrough or ())
        assert problem is None, f"{game.name}: {problem}"


def test_names_count_down_as_in_the_stock_engine() -> None:
    ids = ["cup_bar__plus_1", "cup_bar__plus_2", "sink_bar__minus_1_bar_sinkbasin", "agent1"]
    assert display_names(ids) == {
        "cup_bar__plus_1": "cup 2",
        "cup_bar__plus_2": "cup 1",
        "sink_bar__minus_1_bar_sinkbasin": "sinkbasin 1",
        "agent1": "agent1 ",
    }


# States -------------------------------------------------------------------------------------------------------------


def test_contract(generated: list[Game]) -> None:
    check_env(generated[0].address, steps=60)


def test_restoring_in_any_order_gives_the_same_turns(world: AlfredWorld) -> None:
    states = walk(world, 200, seed=1)
    turns = [world.restore(state) for state in states]
    order = list(range(len(states)))
    random.Random(2).shuffle(order)
    fresh = AlfredWorld(world.compiled)
    for i in order:
        assert fresh.restore(states[i]) == turns[i]


def test_a_bounded_memo_changes_nothing(world: AlfredWorld) -> None:
    tight = AlfredWorld(world.compiled, memo_limit=20)
    assert walk(tight, 400, seed=3) == walk(world, 400, seed=3)
    assert len(tight._turns) <= 21


@pytest.mark.parametrize("state", [-1, 10**3000, 1 << 15, "look", None])
def test_what_is_no_state_is_refused(world: AlfredWorld, state: object) -> None:
    with pytest.raises(InputError, match="no state of this game"):
        world.restore(state)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(command=st.text(max_size=40))
def test_any_command_is_answered(world: AlfredWorld, command: str) -> None:
    first = world.reset()
    turn = world.step(first.state, command)
    if command.strip() not in first.admissible:
        assert turn.observation == "Nothing happens."
        assert turn.admissible == first.admissible


def test_an_inadmissible_command_changes_nothing_but_the_observation(world: AlfredWorld) -> None:
    first = world.reset()
    after = world.step(first.state, "fly to the moon")
    assert (after.admissible, after.won, after.done) == (first.admissible, first.won, first.done)
    assert world.step(after.state, "look") == world.step(first.state, "look")


def test_won_means_over_and_stays_so(generated: list[Game]) -> None:
    env = make(generated[0].address)
    turn = env.reset()
    for command in read_game(generated[0].address).walkthrough or ():
        turn = env.step(turn.state, command)
    assert turn.won and turn.done
    assert env.step(turn.state, "look") == turn


# Dialects ------------------------------------------------------------------------------------------------------------


def test_the_other_dialect_is_understood_on_request(generated: list[Game]) -> None:
    """Trap alfworld #78, #106: `put X in/on Y` became `move X to Y`."""
    place = next(game for game in generated if game.task_type == "pick_and_place_simple")
    strict, lenient = open_game(place.address), open_game(place.address, dialect="any")
    walkthrough = read_game(place.address).walkthrough or ()
    *before, last = walkthrough
    assert last.startswith("move ")
    old = "put " + last.removeprefix("move ").replace(" to ", " in/on ")
    turn = strict.reset()
    for command in before:
        turn = strict.step(turn.state, command)
    assert strict.step(turn.state, old).observation == "Nothing happens."
    assert strict.canonical(old, turn.admissible) == old
    assert lenient.canonical(old, turn.admissible) == last
    assert lenient.step(turn.state, old).won


def test_old_dialect_games_work(generated: list[Game]) -> None:
    """A game whose grammar says `put X in/on Y` plays in its own words, and in today's on request."""
    place = next(game for game in generated if game.task_type == "pick_and_place_simple")
    game = read_game(place.address)
    from envs.alfworld.translate import compile_game

    grammar = game.grammar.replace("move {o} to {r}", "put {o} in/on {r}").replace(
        "You move the {o.name} to the {r.name}.", "You put the {o.name} in/on the {r.name}."
    )
    old = compile_game(game.domain, game.problem, grammar)
    assert old.game_id != game.game_id
    env, lenient = AlfredWorld(old), AlfredWorld(old, dialect="any")
    *before, last = game.walkthrough or ()
    turn = env.reset()
    for command in before:
        turn = env.step(turn.state, command)
    put = "put " + last.removeprefix("move ").replace(" to ", " in/on ")
    assert put in turn.admissible
    assert env.step(turn.state, put).observation.startswith("You put the ")
    assert env.step(turn.state, last).observation == "Nothing happens."
    assert lenient.step(turn.state, last).won


def test_an_unknown_dialect_is_refused(world: AlfredWorld) -> None:
    with pytest.raises(InputError, match="dialect"):
        AlfredWorld(world.compiled, dialect="klingon")  # type: ignore[arg-type]
