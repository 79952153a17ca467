"""How many steps the goal is away: a shortest plan by search in the world itself.

Knows: which commands can bring an ALFWorld goal nearer. Hides: the search, and that steps of one game share what it
found. The search sees the game's state (where everything lies), which no agent does.

Breadth-first over the commands that can matter: going to a place that holds the target, treats it, is a
destination or has the lamp; opening it; taking, treating and placing the target; putting down what is in the way.
Places are found by looking into each of them in a branch of the world that is then dropped. In a world without a
readable task every command is searched.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from audit.policies.expert import Command, read_command, read_task
from envs import Environment, Turn

MAX_STATES = 20_000
_USEFUL = ("open", "take", "put", "clean", "heat", "cool", "use")


class Plans:
    """Shortest plans of one game. max_states: after so many states without a goal the length counts as unknown."""

    def __init__(self, env: Environment, max_states: int = MAX_STATES) -> None:
        self._env, self._max = env, max_states
        first = env.reset()
        self._task = read_task(first.observation)
        self._lengths: dict[Hashable, int | None] = {}
        # Before its first step the player stands nowhere, so that every place can be gone to.
        self._always = {
            command.place
            for command in map(read_command, first.admissible)
            if command.kind == "go" and self._asked(command)
        }

    def length(self, turn: Turn) -> int | None:
        """Steps of a shortest plan from a moment; 0 where the goal holds, None where none was found."""
        if turn.state not in self._lengths:
            self._search(turn)
        return self._lengths[turn.state]

    def _search(self, start: Turn) -> None:
        places = self._places(start) if self._task.kind != "unknown" else None
        came: dict[Hashable, Hashable | None] = {start.state: None}
        layer = [start]
        while layer and len(came) <= self._max:
            for turn in layer:
                if turn.won:
                    self._remember(turn.state, came)
                    return
            following = []
            for turn in layer:
                for command in () if turn.done else self._choices(turn, places):
                    after = self._env.step(turn.state, command)
                    if after.state not in came:
                        came[after.state] = turn.state
                        following.append(after)
            layer = following
        self._lengths[start.state] = None

    def _remember(self, goal: Hashable, came: dict[Hashable, Hashable | None]) -> None:
        """Every state on a shortest plan is as far away as the plan has steps left."""
        state: Hashable | None = goal
        length = 0
        while state is not None:
            self._lengths[state] = length
            state, length = came[state], length + 1

    def _choices(self, turn: Turn, places: set[str] | None) -> Iterator[str]:
        for text in turn.admissible:
            if places is None:
                yield text
                continue
            command = read_command(text)
            if (
                (command.kind == "go" and command.place in places)
                or (command.kind == "take" and command.thing_type == self._task.target)
                or (command.kind in _USEFUL and command.kind != "take")
            ):
                yield text

    def _asked(self, command: Command) -> bool:
        """Whether the task itself names this kind of place."""
        task = self._task
        return command.place_type == task.appliance or (command.place_type == task.destination and task.kind != "light")

    def _places(self, turn: Turn) -> set[str]:
        """Where going can matter from here; the place where the player stands is named by what can be done there."""
        found = set(self._always)
        for text in turn.admissible:
            command = read_command(text)
            if command.kind == "go":
                if command.place not in found and self._holds(turn.state, text):
                    found.add(command.place)
            else:
                found.add(command.thing if command.kind == "examine" else command.place)
        return found

    def _holds(self, state: Any, going: str) -> bool:
        """Whether a place has a target to take or a lamp to use, looked at in a branch."""
        task = self._task
        turn = self._env.step(state, going)
        opening = next((text for text in turn.admissible if read_command(text).kind == "open"), None)
        for moment in (turn, None if opening is None else self._env.step(turn.state, opening)):
            for text in () if moment is None else moment.admissible:
                command = read_command(text)
                if command.kind == "take" and command.thing_type == task.target:
                    return True
                # With the hands full nothing can be taken, so what lies there shows in the words alone.
                if command.kind == "use" and command.thing_type == task.destination and task.kind == "light":
                    return True
            if moment is not None and f" a {task.target} " in moment.observation.replace(",", " "):
                return True
        return False
