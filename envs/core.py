"""What an environment is: the protocol every world obeys, and nothing about any particular world.

Knows: the shape of one moment (`Turn`), the three operations of an environment, and the one error
type for bad input. Hides: nothing; everything here is interface.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


class InputError(ValueError):
    """Bad input from outside, said in one sentence: what, where, expected, how to mend.

    The command line prints the sentence and exits with code 2; library users catch it as a ValueError.
    """


@dataclass(frozen=True, slots=True)
class Turn:
    """One moment of a game: what the agent reads and may do, and the state to come back to.

    observation: text shown to the agent.
    admissible: the commands the game understands here, in the reference engine's order.
    won, done: whether the goal holds; whether the episode is over.
    state: opaque, hashable, cheap to hold; valid for `restore` and `step` of the same game only.
    """

    observation: str
    admissible: tuple[str, ...]
    won: bool
    done: bool
    state: Hashable


@runtime_checkable
class Environment(Protocol):
    """A deterministic game without a cursor: one instance serves any number of rollouts at once."""

    @property
    def game_id(self) -> str:
        """Content hash of what defines the game (the same on every machine)."""
        ...

    def reset(self) -> Turn:
        """The first turn; always the same."""
        ...

    def restore(self, state: Any) -> Turn:
        """The turn that was returned together with `state`, at any depth, in any order."""
        ...

    def step(self, state: Any, command: str) -> Turn:
        """The turn after `command` in `state`; pure. An inadmissible command leaves the state as it is."""
        ...
