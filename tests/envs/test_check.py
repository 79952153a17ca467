"""The contract test itself: it passes what keeps the contract and finds each way of breaking it."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace
from typing import Any

import pytest

from envs.check import NONSENSE, ContractError, ContractReport, check_env
from envs.core import InputError, Turn
from envs.tabular import TabularWorld, tabular

RIGHT = ["take iron key", "open gate", "take gold key", "go through door", "unlock chest"]


class Sound:
    """A sound world to break: `two-key`."""

    def __init__(self) -> None:
        self.world: TabularWorld = tabular("two-key")

    @property
    def game_id(self) -> str:
        return self.world.game_id

    def reset(self) -> Turn:
        return self.world.reset()

    def restore(self, state: Any) -> Turn:
        return self.world.restore(state)

    def step(self, state: Any, command: str) -> Turn:
        return self.world.step(state, command)


class HiddenCursor(Sound):
    """step goes on from where the game stands, whatever state it is given."""

    def reset(self) -> Turn:
        self.here = super().reset()
        return self.here

    def restore(self, state: Any) -> Turn:
        self.here = super().restore(state)
        return self.here

    def step(self, state: Any, command: str) -> Turn:
        self.here = super().step(self.here.state, command)
        return self.here


class SharedState(Sound):
    """The state is one object that every step changes."""

    class Box:
        place = ""

    def __init__(self) -> None:
        super().__init__()
        self.box = self.Box()

    def pack(self, turn: Turn) -> Turn:
        self.box.place = str(turn.state)
        return replace(turn, state=self.box)

    def reset(self) -> Turn:
        return self.pack(super().reset())

    def restore(self, state: Any) -> Turn:
        return self.pack(super().restore(state.place))

    def step(self, state: Any, command: str) -> Turn:
        return self.pack(super().step(state.place, command))


class DriftingHash(Sound):
    """States stay equal, but their hash counts calls, so that they are lost in a dictionary."""

    class Key(str):
        calls = itertools.count()

        def __eq__(self, other: object) -> bool:
            return str.__eq__(self, other) is True

        def __hash__(self) -> int:
            return next(self.calls)

    def reset(self) -> Turn:
        return replace(super().reset(), state=self.Key("hall"))

    def restore(self, state: Any) -> Turn:
        return replace(super().restore(str(state)), state=state)

    def step(self, state: Any, command: str) -> Turn:
        turn = super().step(str(state), command)
        return replace(turn, state=self.Key(turn.state))


class OtherStart(Sound):
    """reset moves to the next game, as AlfredTWEnv does."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = itertools.cycle(["hall", "gallery"])

    def reset(self) -> Turn:
        return self.world.restore(next(self.starts))


class ForgetsText(Sound):
    """A restored turn has another observation than the turn it came from."""

    def step(self, state: Any, command: str) -> Turn:
        turn = super().step(state, command)
        return replace(turn, observation=f"You {command}. {turn.observation}")


class Noisy(Sound):
    """A step depends on chance."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(3)

    def step(self, state: Any, command: str) -> Turn:
        return super().step(state, command) if self.rng.random() < 0.8 else super().restore(state)


class RefusalRaises(Sound):
    def step(self, state: Any, command: str) -> Turn:
        if command not in self.world.restore(state).admissible:
            raise KeyError(command)
        return super().step(state, command)


class RefusalMoves(Sound):
    """What is not understood ends the game as lost."""

    def step(self, state: Any, command: str) -> Turn:
        turn = super().step(state, command)
        return turn if command in self.restore(state).admissible else replace(turn, done=True, admissible=())


class RefusalRemembers(Sound):
    """A refusal looks harmless, but the next command is lost."""

    def restore(self, state: Any) -> Turn:
        return replace(super().restore(state.rstrip("!")), state=state)

    def step(self, state: Any, command: str) -> Turn:
        turn = super().step(state.rstrip("!"), command)
        if command in self.restore(state).admissible:
            return self.restore(state.rstrip("!")) if state.endswith("!") else turn
        return replace(turn, state=state.rstrip("!") + "!")


class Listed(Sound):
    """admissible is a list."""

    def reset(self) -> Turn:
        turn = super().reset()
        return replace(turn, admissible=list(turn.admissible))  # type: ignore[arg-type]


class Repeated(Sound):
    """A command is listed twice."""

    def step(self, state: Any, command: str) -> Turn:
        turn = super().step(state, command)
        return replace(turn, admissible=turn.admissible + turn.admissible[:1])


class Unhashable(Sound):
    def reset(self) -> Turn:
        return replace(super().reset(), state=["hall"])  # type: ignore[arg-type]


class HashableToTheEyeOnly(Sound):
    def reset(self) -> Turn:
        return replace(super().reset(), state=("hall", []))


class WonGoesOn(Sound):
    """A won turn is not done."""

    def restore(self, state: Any) -> Turn:
        turn = super().restore(state)
        return replace(turn, done=turn.done and not turn.won)

    def step(self, state: Any, command: str) -> Turn:
        turn = super().step(state, command)
        return replace(turn, done=turn.done and not turn.won)


class Revives(Sound):
    """An episode that is over can be left again."""

    def step(self, state: Any, command: str) -> Turn:
        return self.reset() if self.restore(state).done else super().step(state, command)


class OwnNumbers(Sound):
    """States are numbers in the order in which this instance met them."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[str] = []

    def pack(self, turn: Turn) -> Turn:
        if turn.state not in self.met:
            self.met.append(str(turn.state))
        return replace(turn, state=self.met.index(str(turn.state)))

    def reset(self) -> Turn:
        return self.pack(super().reset())

    def restore(self, state: Any) -> Turn:
        return self.pack(super().restore(self.met[state]))

    def step(self, state: Any, command: str) -> Turn:
        return self.pack(super().step(self.met[state], command))


class OneStateTwoTurns(Sound):
    """A refusal says so, but comes with the old state: which of the two turns is restored?"""

    def step(self, state: Any, command: str) -> Turn:
        turn = super().step(state, command)
        return turn if command in self.restore(state).admissible else replace(turn, observation="Nothing happens.")


class OwnId(Sound):
    """The id names the instance, not the game."""

    made = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.number = next(self.made)

    @property
    def game_id(self) -> str:
        return f"game {self.number}"


class HashOrder(Sound):
    """The order of commands is that of a set: equal within a process, not over processes."""

    def sort(self, turn: Turn) -> Turn:
        return replace(turn, admissible=tuple({*turn.admissible, *(f"examine thing {i}" for i in range(9))}))

    def reset(self) -> Turn:
        return self.sort(super().reset())

    def restore(self, state: Any) -> Turn:
        return self.sort(super().restore(state))

    def step(self, state: Any, command: str) -> Turn:
        return self.sort(super().step(state, command))


BROKEN: list[tuple[type[Sound], str]] = [
    (HiddenCursor, "a step depends on state and command alone"),
    (SharedState, "equal states mean equal turns"),
    (DriftingHash, "hash"),
    (OtherStart, "reset gives the same turn again"),
    (ForgetsText, "equal states mean equal turns|restore gives the turn"),
    (Noisy, "a step depends on state and command alone|an inadmissible command|instances agree"),
    (RefusalRaises, "raised KeyError"),
    (RefusalMoves, "equal states mean equal turns|an inadmissible command leaves"),
    (RefusalRemembers, "an inadmissible command leaves"),
    (Listed, "admissible is a tuple of distinct strings"),
    (Repeated, "admissible is a tuple of distinct strings"),
    (Unhashable, "a state is hashable"),
    (HashableToTheEyeOnly, "a state is hashable"),
    (WonGoesOn, "won implies done"),
    (Revives, "an episode that is over stays over"),
    (OwnNumbers, "restore works in a fresh instance"),
    (OneStateTwoTurns, "equal states mean equal turns|restore gives the turn"),
    (OwnId, "instances agree"),
    (HashOrder, "processes agree"),
]


@pytest.mark.parametrize(("world", "clause"), BROKEN, ids=[world.__name__ for world, _ in BROKEN])
@pytest.mark.parametrize("seed", [0, 1])
def test_finds_what_is_broken(world: type[Sound], clause: str, seed: int) -> None:
    with pytest.raises(ContractError, match=clause):
        check_env(world, script=RIGHT, seed=seed)


def test_passes_what_is_sound_and_says_what_it_covered() -> None:
    report = check_env(Sound, script=RIGHT, steps=30)
    assert report == ContractReport(tabular("two-key").game_id, 36, report.restored, report.refused, 1, 2, ())
    assert report.restored >= 24
    assert report.refused >= 4
    assert check_env(Sound, script=RIGHT, steps=30) == report


def test_says_what_it_could_not_check() -> None:
    report = check_env(lambda: Sound(), steps=3)
    assert report.processes == 0
    assert [reason.split(":")[0] for reason in report.unchecked] == [
        "an episode that is over",
        "determinism over processes",
    ]
    assert check_env(lambda: Sound(), steps=3, script=RIGHT, processes=0).unchecked == ()


def test_a_documented_game_may_go_on_after_winning() -> None:
    check_env(WonGoesOn, script=RIGHT, steps=5, won_ends=False)


def test_an_address_is_opened_by_make() -> None:
    assert check_env("tabular:chain:3", script=["go right"] * 3, steps=5).processes == 2
    with pytest.raises(InputError):
        check_env("tabular:nowhere")


def test_no_steps_at_all_still_checks_the_first_turn() -> None:
    assert check_env(Sound, steps=0, processes=0).turns == 1
    with pytest.raises(ContractError):
        check_env(Unhashable, steps=0, processes=0)


def test_a_child_that_does_not_end_is_a_breach() -> None:
    with pytest.raises(ContractError, match="did not end within"):
        check_env(Sound, steps=3, timeout=0.001)


class OnlyHere(Sound):
    """Works in this process only, as with a file that the test made."""

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get("AUDIT_TEST_PARENT") != str(os.getpid()):
            raise RuntimeError("not the parent")


def test_a_child_that_fails_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_TEST_PARENT", str(os.getpid()))
    with pytest.raises(ContractError, match=r"processes agree.*RuntimeError: not the parent"):
        check_env(OnlyHere, steps=3)


def test_nonsense_is_a_word_of_no_game() -> None:
    assert NONSENSE not in tabular("two-key").reset().admissible
