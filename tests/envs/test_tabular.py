"""Tabular worlds: what they are, that they keep the contract, and that bad names and tables are refused."""

from __future__ import annotations

import pytest

from envs.check import check_env
from envs.core import Environment, InputError, Turn
from envs.tabular import Place, TabularWorld, tabular

SCRIPTS = {
    "chain:3": ["go right"] * 3,
    "two-key": ["take iron key", "open gate", "take gold key", "go through door", "unlock chest"],
    "null:3": ["walk on the left", "walk in the middle", "walk on the right", "draw ticket 1"],
    "random:0": [],
}


def play(world: TabularWorld, commands: list[str]) -> Turn:
    turn = world.reset()
    for command in commands:
        turn = world.step(turn.state, command)
    return turn


@pytest.mark.parametrize("name", [*SCRIPTS, "random:7:30"])
def test_keeps_the_contract(name: str) -> None:
    report = check_env(f"tabular:{name}", script=SCRIPTS.get(name, []), steps=60)
    assert report.processes == 2
    assert report.finished
    assert report.unchecked == ()


@pytest.mark.parametrize("name", ["chain:3", "two-key", "null:3"])
def test_is_won_by_the_right_commands_and_no_earlier(name: str) -> None:
    world = tabular(name)
    assert isinstance(world, Environment)
    assert not play(world, SCRIPTS[name][:-1]).done
    last = play(world, SCRIPTS[name])
    assert last.won and last.done and last.admissible == ()


def test_chain_loses_only_time() -> None:
    world = tabular("chain:3")
    assert play(world, ["go right", "go left", "wait", "go left", "go right", "go right", "go right"]).won


def test_two_key_cannot_be_mended_after_the_choice() -> None:
    world = tabular("two-key")
    wrong = play(world, ["take iron key", "open gate", "take silver key"])
    reached, waiting = {wrong.state}, [wrong.state]
    while waiting:
        state = waiting.pop()
        for command in world.restore(state).admissible:
            turn = world.step(state, command)
            assert not turn.won
            if turn.state not in reached:
                reached.add(turn.state)
                waiting.append(turn.state)
    assert len(reached) == 2


def test_null_is_free_of_effect_but_at_the_lottery() -> None:
    world = tabular("null:3")
    assert world.effect_free == {f"corridor {i} of 3" for i in (1, 2, 3)}
    assert {world.step("lottery", f"draw ticket {i}").won for i in (1, 2, 3, 4)} == {True, False}
    assert tabular("chain").effect_free == set()


def test_observations_name_the_state_and_order_is_sorted() -> None:
    for name in SCRIPTS:
        world = tabular(name)
        for state in world.places:
            turn = world.restore(state)
            assert state in turn.observation
            assert list(turn.admissible) == sorted(turn.admissible)


def test_commands_are_stripped_and_unknown_ones_change_nothing() -> None:
    world = tabular("chain")
    assert world.step(world.reset().state, " go right\n").state == "cell 1 of 5"
    assert world.step("cell 1 of 5", "fly") == world.restore("cell 1 of 5")


def test_random_worlds_have_both_ends_and_differ_by_seed() -> None:
    ids = set()
    for seed in range(20):
        world = tabular(f"random:{seed}")
        ids.add(world.game_id)
        reached, waiting = {world.start}, [world.start]
        while waiting:
            fresh = set(world.places[waiting.pop()].moves.values()) - reached
            reached |= fresh
            waiting += fresh
        assert {"exit", "pit"} <= reached
    assert len(ids) == 20
    assert tabular("random:3").game_id == tabular("random:3").game_id


def test_the_tables_are_pinned() -> None:
    """The worlds are part of published tests: a change of a table must be seen."""
    names = ("chain", "two-key", "null", "random:0")
    assert [tabular(name).game_id[:8] for name in names] == PINNED


PINNED = ["8d2adbd7", "ffa738b2", "4738d206", "0cd87ae4"]


@pytest.mark.parametrize(
    "name",
    ["", "chains", "chain:", "chain:0", "chain:-1", "chain:1:2", "chain:99999999", "chain: 3", "chain:1_0", "chain:³",
     "two-key:2", "null:x", "random", "random:", "random:-1", "random:1:1", "random:1:2:3", "random:" + "9" * 5000],
)  # fmt: skip
def test_bad_names_are_one_clear_error(name: str) -> None:
    with pytest.raises(InputError, match="tabular world"):
        tabular(name)


def test_bad_tables_are_refused() -> None:
    end = Place(won=True)
    with pytest.raises(InputError, match="the start"):
        TabularWorld("t", "a", {"end": end})
    with pytest.raises(InputError, match="leads to no place"):
        TabularWorld("t", "a", {"a": Place({"go": "b"})})
    with pytest.raises(InputError, match="won but has moves"):
        TabularWorld("t", "a", {"a": Place({"go": "a"}, won=True)})
    with pytest.raises(InputError, match="strip it"):
        TabularWorld("t", "a", {"a": Place({" go": "end"}), "end": end})
    with pytest.raises(InputError, match="no place of it"):
        tabular("chain").restore("nowhere")
    with pytest.raises(InputError, match="no place of it"):
        tabular("chain").step([], "wait")


def test_a_table_cannot_be_changed_from_outside() -> None:
    places = {"a": Place({"go": "end"}), "end": Place(won=True)}
    world = TabularWorld("t", "a", places)
    before = world.step("a", "go")
    places["a"] = Place({"go": "a"})
    assert world.step("a", "go") == before
