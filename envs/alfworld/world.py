"""The fast ALFWorld world: a compiled game behind the Environment protocol.

Knows: how to run a `CompiledGame` quickly (what is applicable, what an operator changes, what was computed
before). Hides: masks and memos. Its turns equal the stock engine's, character for character.

A state is one integer: the atoms that hold, shifted past a code that says which text was told last (0 the
introduction, 1 "Nothing happens.", 2 + i feedback i), since a turn's observation is part of the turn.
Three memos, all functions of the state alone, make steps cheap: what is possible (by place, what is held and
the few atoms that matter there), what is said (by the atoms that can change the text), and whole turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Literal

from envs.alfworld.text import Feedback
from envs.alfworld.translate import CompiledGame
from envs.core import InputError, Turn

CODE_BITS = 16
CODES = (1 << CODE_BITS) - 1
INTRO, NOTHING, FIRST = 0, 1, 2
NOTHING_HAPPENS = "Nothing happens."
FOREIGN_STATE = "This is no state of this game; a state can only be restored by the game it came from."
MEMO_LIMIT = 150_000  # about 100 MB

Dialect = Literal["game", "any"]
_Choices = tuple[tuple[str, ...], dict[str, int]]  # admissible commands, and the operator behind each
_OLD_PUT = re.compile(r"put (.+) (?:in/on|in|on) (.+)")
_NEW_PUT = re.compile(r"move (.+) to (.+)")


class AlfredWorld:
    """One ALFWorld game; pure and without a cursor, so it serves any number of rollouts at once.

    dialect: "game" understands commands exactly as the stock engine does. "any" also understands the other
    dialect's wording (`put X in/on Y` and `move X to Y`); `canonical` tells what a command was taken for.
    memo_limit: how many turns are remembered (about .7 KB each) before the memo starts afresh; results
    do not depend on it.
    """

    def __init__(self, game: CompiledGame, *, dialect: Dialect = "game", memo_limit: int = MEMO_LIMIT) -> None:
        if dialect not in ("game", "any"):
            raise InputError(f"dialect is {dialect!r}; expected 'game' or 'any'.")
        if len(game.feedbacks) + FIRST > CODES:
            raise InputError(
                f"The game has {len(game.feedbacks)} different texts; at most {CODES - FIRST} are supported."
            )
        self.compiled = game
        self._any_dialect = dialect == "any"
        self._memo_limit = memo_limit
        self._narrator = game.narrator()
        self._told: list[Feedback | None] = [None] * len(game.feedbacks)
        self._goal_mask, self._goal = _goal(game)
        self._goal_memo: dict[int, bool] = {}
        self._key = (1 << game.key_bits) - 1
        self._situations: dict[int, _Situation] = {}
        self._by_needs: dict[tuple[int, ...], list[int]] = {}  # operators by the key atoms they need, ascending
        for number, operator in enumerate(game.operators):
            needs = tuple([literal - 1 for literal in operator.pre if 0 < literal <= game.key_bits])
            self._by_needs.setdefault(needs, []).append(number)
        self._effects: dict[int, tuple[int, int, int]] = {}
        self._turns: dict[int, Turn] = {}
        self._successors: dict[int, dict[str, Turn]] = {}
        self._remembered = 0

    @property
    def game_id(self) -> str:
        """Content hash of the game's PDDL and grammar."""
        return self.compiled.game_id

    def reset(self) -> Turn:
        """The first turn; always the same."""
        return self.restore(self.compiled.initial << CODE_BITS | INTRO)

    def restore(self, state: int) -> Turn:
        """The turn that was returned with `state`. Raises InputError for what is no state of this game."""
        turn = self._turns.get(state)
        return turn if turn is not None else self._turn(state)

    def step(self, state: int, command: str) -> Turn:
        """The turn after `command`; a command that is not admissible is answered by "Nothing happens.".

        An episode that is over stays over: a step from there gives the same turn.
        """
        try:
            return self._successors[state][command]
        except KeyError:
            return self._expand(state, command)

    def canonical(self, command: str, admissible: Sequence[str]) -> str:
        """The admissible command that `command` is taken for, or `command` itself (stripped) if none."""
        command = command.strip()
        if self._any_dialect and command not in admissible:
            for pattern, shapes in (
                (_OLD_PUT, ("move {} to {}",)),
                (_NEW_PUT, ("put {} in/on {}", "put {} in {}", "put {} on {}")),
            ):
                match = pattern.fullmatch(command)
                for shape in shapes if match else ():
                    if match and (other := shape.format(*match.groups())) in admissible:
                        return other
        return command

    # A step that was not seen before

    def _expand(self, state: int, command: str) -> Turn:
        here = self.restore(state)
        if here.done:
            return here
        core = state >> CODE_BITS
        admissible, operators = self._choices(core)
        number = operators.get(command)
        if number is None:
            number = operators.get(self.canonical(command, admissible))
        if number is None:
            after = core << CODE_BITS | NOTHING
        else:
            effect = self._effects.get(number)
            if effect is None:
                effect = self._effects[number] = self._effect(number)
            keep, add, code = effect
            after = (core & keep | add) << CODE_BITS | code
        turn = self._turns.get(after)
        if turn is None:
            turn = self._turn(after)
        successors = self._successors.get(state)
        if successors is None:
            successors = self._successors[here.state] = {}  # type: ignore[index]
        if number is not None or len(successors) < 1000:
            successors[command] = turn
            self._remembered += 1
        return turn

    def _effect(self, number: int) -> tuple[int, int, int]:
        operator = self.compiled.operators[number]
        add = sum(1 << literal - 1 for literal in operator.eff if literal > 0)
        gone = sum(1 << -literal - 1 for literal in operator.eff if literal < 0)
        return ~gone, add, operator.feedback + FIRST

    def _turn(self, state: int) -> Turn:
        if not isinstance(state, int) or not 0 <= state >> CODE_BITS < 1 << len(self.compiled.atoms):
            raise InputError(FOREIGN_STATE)
        core, code = state >> CODE_BITS, state & CODES
        if code == NOTHING:
            observation = NOTHING_HAPPENS
        elif code == INTRO:
            observation = self._narrator.intro(core)
        else:
            observation = self._feedback(code - FIRST)(core)
        admissible, _ = self._choices(core)
        seen = core & self._goal_mask
        won = self._goal_memo.get(seen)
        if won is None:
            won = self._goal_memo[seen] = self._goal(core)
        turn = Turn(observation, admissible, won, won, state)
        if self._remembered >= self._memo_limit:
            self._forget()
        self._turns[state] = turn
        self._remembered += 1
        return turn

    def _feedback(self, number: int) -> Feedback:
        if number >= len(self._told):
            raise InputError(FOREIGN_STATE)
        told = self._told[number]
        if told is None:
            told = self._told[number] = self._narrator.feedback(*self.compiled.feedbacks[number])
        return told

    def _forget(self) -> None:
        self._turns.clear()
        self._successors.clear()
        self._goal_memo.clear()
        for situation in self._situations.values():
            situation.memo.clear()
        self._remembered = 0

    # What is possible

    def _choices(self, core: int) -> _Choices:
        key = core & self._key
        situation = self._situations.get(key)
        if situation is None:
            situation = self._situations[key] = self._situation(key)
        return situation(core)

    def _situation(self, key: int) -> _Situation:
        """The operators that fit the key atoms, with what else each needs."""
        game = self.compiled
        held = [atom for atom in range(game.key_bits) if key >> atom & 1]
        if len(held) <= 4:  # where the agent is, that it holds something, and what
            subsets = (needs for size in range(len(held) + 1) for needs in combinations(held, size))
            numbers = [number for needs in subsets for number in self._by_needs.get(needs, ())]
        else:
            numbers = [number for listed in self._by_needs.values() for number in listed]
        always: dict[str, int] = {}
        sometimes: list[tuple[int, int, str, int]] = []
        for number in numbers:
            operator = game.operators[number]
            mask = value = 0
            for literal in operator.pre:
                bit = 1 << abs(literal) - 1
                mask |= bit
                value |= bit if literal > 0 else 0
            if key & mask != value & self._key:
                continue
            mask, value = mask & ~self._key, value & ~self._key
            command = game.commands[operator.command]
            if mask:
                sometimes.append((mask, value, command, number))
            else:
                always[command] = number
        return _Situation(always, sometimes)


class _Situation:
    """What can be done at one place with one thing (or nothing) in hand."""

    __slots__ = ("_always", "_mask", "_sometimes", "memo")

    def __init__(self, always: dict[str, int], sometimes: list[tuple[int, int, str, int]]) -> None:
        self._always, self._sometimes = always, sometimes
        self._mask = 0
        for mask, *_ in sometimes:
            self._mask |= mask
        self.memo: dict[int, _Choices] = {}

    def __call__(self, core: int) -> _Choices:
        seen = core & self._mask
        choices = self.memo.get(seen)
        if choices is None:
            operators = dict(self._always)
            for mask, value, command, number in self._sometimes:
                if seen & mask == value:
                    operators[command] = number
            choices = self.memo[seen] = (tuple(sorted(operators)), operators)
        return choices


def _goal(game: CompiledGame) -> tuple[int, Callable[[int], bool]]:
    """(mask of the atoms that the goal depends on, the goal as a function of the state's atoms)."""
    n_atoms = len(game.atoms)
    mask = 0
    for clauses in game.goal:
        for clause in clauses:
            for literal in clause:
                if abs(literal) <= n_atoms:
                    mask |= 1 << abs(literal) - 1

    def holds(literal: int, core: int) -> bool:
        index = abs(literal) - 1
        true = bool(core >> index & 1) if index < n_atoms else any_of(game.goal[1 + index - n_atoms], core)
        return true == (literal > 0)

    def any_of(clauses: Sequence[Sequence[int]], core: int) -> bool:
        return any(all(holds(literal, core) for literal in clause) for clause in clauses)

    return mask, lambda core: any_of(game.goal[0], core)
