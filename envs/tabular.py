"""Small worlds given by a table, so that everything about them can be computed exactly.

Knows: the tables (`chain`, `two-key`, `null`, `random:<seed>`) and how a table is played through the Environment
protocol. Hides: nothing else; values, support and effects of a policy follow from `envs.exact`.

A state is the name of a place, and the observation names it. The worlds are deterministic: chance comes from
the policy alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from envs.core import InputError, Turn

MAX_PLACES = 10_000


@dataclass(frozen=True, slots=True)
class Place:
    """One row of the table.

    moves: command -> name of the next place; empty where the episode is over. won: the goal holds here.
    text: what is to be seen, after the name of the place.
    """

    moves: Mapping[str, str] = field(default_factory=dict)
    won: bool = False
    text: str = ""

    @property
    def done(self) -> bool:
        """Whether the episode ends here: nothing can be done any more."""
        return not self.moves


class TabularWorld:
    """A world whose places and moves are listed; pure and without a cursor.

    A command that the place does not list changes nothing: the same turn comes back. So does every command
    once the episode is over. Commands are taken without surrounding white space, as in TextWorld.
    """

    def __init__(self, name: str, start: str, places: Mapping[str, Place]) -> None:
        """Raises InputError where a move leads nowhere, a won place goes on, or a command is not plain text."""
        if start not in places:
            raise InputError(f"tabular world {name!r}: the start {start!r} is no place of it.")
        for here, place in places.items():
            if place.won and place.moves:
                raise InputError(
                    f"tabular world {name!r}: {here!r} is won but has moves; a won place ends the episode."
                )
            for command, there in place.moves.items():
                if there not in places:
                    raise InputError(f"tabular world {name!r}: {command!r} at {here!r} leads to no place: {there!r}.")
                if not command or command != command.strip():
                    raise InputError(
                        f"tabular world {name!r}: {command!r} at {here!r} is empty or has space around it; strip it."
                    )
        self.name = name
        self.start = start
        self.places: Mapping[str, Place] = MappingProxyType(dict(places))
        self._turns = {
            here: Turn(
                observation=f"You are at: {here}." + (f" {place.text}" if place.text else ""),
                admissible=tuple(sorted(place.moves)),
                won=place.won,
                done=place.done,
                state=here,
            )
            for here, place in places.items()
        }
        table = {here: [sorted(place.moves.items()), place.won, place.text] for here, place in sorted(places.items())}
        self._game_id = hashlib.blake2b(json.dumps([start, table]).encode(), digest_size=16).hexdigest()

    @property
    def game_id(self) -> str:
        """Content hash of the table."""
        return self._game_id

    @property
    def effect_free(self) -> frozenset[str]:
        """Unfinished places where all commands lead to one place, so that none has an effect on anything.

        True for every policy that depends on the state alone and every budget of steps.
        """
        return frozenset(
            here for here, place in self.places.items() if place.moves and len(set(place.moves.values())) == 1
        )

    def reset(self) -> Turn:
        """The turn at the start."""
        return self._turns[self.start]

    def restore(self, state: Any) -> Turn:
        """The turn at a place. Raises InputError for what is no place of this world."""
        try:
            return self._turns[state]
        except (KeyError, TypeError):
            raise InputError(f"tabular world {self.name!r}: {state!r} is no place of it.") from None

    def step(self, state: Any, command: str) -> Turn:
        """The turn after `command`; an inadmissible one leads back to the same turn."""
        here = self.restore(state)
        return self._turns[self.places[state].moves.get(command.strip(), state)] if not here.done else here


def tabular(name: str) -> TabularWorld:
    """Open a tabular world by name.

    chain[:n]             go right n times (default 5); a wrong move costs steps, nothing is lost for good
    two-key               two keys are needed, and the choice of the second, in the middle, is for good
    null[:n]              n (default 4) decisions without any effect, then a lottery that decides alone
    random:<seed>[:n]     n (default 12) rooms with random moves, an exit that wins and a pit that loses

    Raises InputError for another name or a size out of range.
    """
    kind, *numbers = name.split(":")
    if kind == "chain" and len(numbers) <= 1:
        return _chain(name, _number(name, numbers[0], 1) if numbers else 5)
    if kind == "two-key" and not numbers:
        return _two_key(name)
    if kind == "null" and len(numbers) <= 1:
        return _null(name, _number(name, numbers[0], 1) if numbers else 4)
    if kind == "random" and 1 <= len(numbers) <= 2:
        seed = _number(name, numbers[0], 0, limit=None)
        return _random(name, seed, _number(name, numbers[1], 2) if len(numbers) == 2 else 12)
    raise InputError(
        f"tabular world {name!r} is not known; expected chain[:n], two-key, null[:n] or random:<seed>[:n]."
    )


def _number(name: str, text: str, least: int, limit: int | None = MAX_PLACES) -> int:
    # isdecimal lets no sign, space or underscore through; the length guards int() against huge inputs.
    if text.isascii() and text.isdecimal() and len(text) <= 20:
        number = int(text)
        if number >= least and (limit is None or number <= limit):
            return number
    most = "" if limit is None else f" and at most {limit}"
    raise InputError(f"tabular world {name!r}: {text!r} should be a whole number, at least {least}{most}.")


def _chain(name: str, length: int) -> TabularWorld:
    places = {
        f"cell {i} of {length}": Place(
            {
                "go left": f"cell {max(i - 1, 0)} of {length}",
                "go right": f"cell {i + 1} of {length}",
                "wait": f"cell {i} of {length}",
            }
        )
        for i in range(length)
    }
    places[f"cell {length} of {length}"] = Place(won=True)
    return TabularWorld(name, f"cell 0 of {length}", places)


def _two_key(name: str) -> TabularWorld:
    """Five right steps; the third, which key to take before the one-way door, cannot be mended."""
    places = {
        "hall": Place({"take iron key": "hall, holding the iron key", "wait": "hall"}, text="The gate is locked."),
        "hall, holding the iron key": Place({"open gate": "gallery", "wait": "hall, holding the iron key"}),
        "gallery": Place(
            {
                "take gold key": "gallery, holding the gold key",
                "take silver key": "gallery, holding the silver key",
                "wait": "gallery",
            },
            text="A case holds two keys and shuts for good once one is taken. A door opens one way.",
        ),
        "open chest": Place(won=True),
    }
    for metal, opens in (("gold", "open chest"), ("silver", "vault, holding the silver key")):
        gallery, vault = f"gallery, holding the {metal} key", f"vault, holding the {metal} key"
        places[gallery] = Place({"go through door": vault, "wait": gallery})
        places[vault] = Place({"unlock chest": opens, "wait": vault}, text="The door has shut behind you.")
    return TabularWorld(name, "hall", places)


def _null(name: str, length: int) -> TabularWorld:
    """Decisions without effect, then a lottery.

    In a deterministic world the chance of winning must be settled by some last choice, since a value that is
    equal for all commands everywhere is the same as at the end: 0 or 1. Here the lottery alone settles it, so
    with a budget of at least n + 1 steps every place before it has one value, that of the policy's draw.
    """
    tickets = {f"draw ticket {i}": "prize" if i % 2 else "blank" for i in range(1, 5)}
    places = {
        f"corridor {i} of {length}": Place(
            {
                f"walk {side}": f"corridor {i + 1} of {length}" if i < length else "lottery"
                for side in ("on the left", "in the middle", "on the right")
            }
        )
        for i in range(1, length + 1)
    }
    places |= {"lottery": Place(tickets), "prize": Place(won=True), "blank": Place()}
    return TabularWorld(name, f"corridor 1 of {length}", places)


def _random(name: str, seed: int, rooms: int) -> TabularWorld:
    """Rooms with 2-4 commands whose ends are drawn by hash, hence alike on every machine and Python.

    Tables in which the exit or the pit cannot be reached from the first room are drawn again.
    """
    names = [f"room {i}" for i in range(rooms)] + ["exit", "pit"]
    for attempt in range(1000):
        places = {"exit": Place(won=True), "pit": Place()}
        for room in range(rooms):
            count = 2 + _draw(seed, attempt, room, -1) % 3
            places[names[room]] = Place(
                {f"press {i + 1}": names[_draw(seed, attempt, room, i) % len(names)] for i in range(count)}
            )
        found, waiting = {"room 0"}, ["room 0"]
        while waiting:
            fresh = set(places[waiting.pop()].moves.values()) - found
            found |= fresh
            waiting += fresh
        if {"exit", "pit"} <= found:
            return TabularWorld(name, "room 0", places)
    raise InputError(f"tabular world {name!r}: no table with a reachable exit and pit was found; take another seed.")


def _draw(*key: int) -> int:
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
