"""Policies that learn nothing (uniform, scripted), and what every policy with exact probabilities shares.

Knows: how a draw is made from a 64-bit seed and a finite distribution over commands. Hides: the arithmetic of
sampling; a policy of this kind only says, for a history, which commands it may choose and how likely each is.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from audit.policies import History, Proposal
from envs.core import InputError

MAX_SCRIPT = 10_000_000
_STEP = 2.0**-53  # the 53 leading bits of a seed make a uniform number of [0, 1)


class Choice:
    """A finite distribution over commands, ready to be drawn from.

    commands: what may be chosen, no two equal. logprobs: natural log of the probability of each; the
    probabilities sum to 1 up to rounding.
    """

    __slots__ = ("_cumulative", "_proposals", "commands", "logprobs")

    def __init__(self, commands: Sequence[str], probabilities: Sequence[float], logprobs: Sequence[float]) -> None:
        # Arrays, since a policy remembers many choices: 16 bytes a command.
        self.commands, self.logprobs = commands, array("d", logprobs)
        self._cumulative = array("d", accumulate(probabilities))
        self._cumulative[-1] = 1.0  # so that rounding never leaves a draw without a command
        self._proposals: dict[int, Proposal] = {}  # the same few are proposed again and again

    def draw(self, seed: int) -> Proposal:
        """The command that a seed of 0 to 2^64 - 1 draws; equal seeds draw equal commands."""
        index = bisect_right(self._cumulative, (seed >> 11) * _STEP)
        proposal = self._proposals.get(index)
        if proposal is None:
            proposal = self._proposals[index] = Proposal(self.commands[index], logprob=self.logprobs[index])
        return proposal

    def probabilities(self) -> dict[str, float]:
        """Probability of each command."""
        return {command: math.exp(logprob) for command, logprob in zip(self.commands, self.logprobs, strict=True)}

    def logprob(self, command: str) -> float:
        """Natural log of the probability of a command: minus infinity for one that is never chosen."""
        try:
            return self.logprobs[self.commands.index(command)]
        except ValueError:
            return -math.inf


class ExactPolicy:
    """A policy whose probabilities are known: subclasses give `choice`, and this makes the protocol of it."""

    def choice(self, history: History) -> Choice | None:
        """The distribution over commands at the end of a history, None where there is no command to give."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What the policy is, JSON-ready."""
        raise NotImplementedError

    async def propose(self, requests: Sequence[History], *, seeds: Sequence[int]) -> list[Proposal]:
        """One draw for each history, with its exact log probability."""
        proposals = []
        for history, seed in zip(requests, seeds, strict=True):
            choice = self.choice(history)
            proposals.append(
                choice.draw(seed)
                if choice is not None
                else Proposal("", status="error", reason="the game offers no command at this point")
            )
        return proposals

    async def distributions(self, requests: Sequence[History]) -> list[Mapping[str, float] | None]:
        """Exact probabilities, None where the game offers no command."""
        choices = [self.choice(history) for history in requests]
        return [None if choice is None else choice.probabilities() for choice in choices]

    async def logprobs(
        self, requests: Sequence[History], actions: Sequence[str], *, condition: str | None = None
    ) -> list[float | None]:
        """Exact log probabilities; minus infinity for a command that is never chosen here.

        None where the game offers no command, and for every action under a condition: these policies have no
        outcome-conditioned twin.
        """
        scores: list[float | None] = []
        for history, action in zip(requests, actions, strict=True):
            choice = None if condition is not None else self.choice(history)
            scores.append(None if choice is None else choice.logprob(action))
        return scores


class UniformPolicy(ExactPolicy):
    """Every admissible command is equally likely."""

    def __init__(self) -> None:
        self._last: tuple[Sequence[str], Choice] | None = None

    def choice(self, history: History) -> Choice | None:
        """Uniform over the admissible commands."""
        commands = history.turn.admissible
        if not commands:
            return None
        if self._last is None or self._last[0] is not commands:  # worlds hand out the same tuple for a state
            n = len(commands)
            self._last = commands, Choice(commands, [1 / n] * n, [-math.log(n)] * n)
        return self._last[1]

    def describe(self) -> dict[str, Any]:
        """What the policy is."""
        return {"kind": "uniform"}


class ScriptedPolicy(ExactPolicy):
    """A fixed list of commands, whatever is seen; then `look` for ever."""

    def __init__(self, commands: Sequence[str]) -> None:
        if isinstance(commands, str) or not all(isinstance(command, str) for command in commands):
            raise InputError("A script is a list of commands (text), in the order they are given.")
        self._commands = tuple(commands)
        self._choices = {command: Choice((command,), (1.0,), (0.0,)) for command in (*self._commands, "look")}

    @classmethod
    def load(cls, path: str | Path) -> ScriptedPolicy:
        """Read a script: a JSON list of commands, or an object with such a list under `commands`.

        Raises InputError where the file cannot be read or holds something else.
        """
        path = Path(path)
        try:
            if path.stat().st_size > MAX_SCRIPT:
                raise InputError(f"{path}: {path.stat().st_size} bytes; a script has at most {MAX_SCRIPT}.")
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); scripted:FILE names a script.") from None
        except (ValueError, RecursionError) as error:
            raise InputError(
                f'{path}: not a JSON file ({str(error)[:120]}); a script looks like ["go to desk 1"].'
            ) from None
        if isinstance(data, dict):
            data = data.get("commands")
        if not isinstance(data, list) or not all(isinstance(command, str) for command in data):
            raise InputError(f'{path}: expected a JSON list of commands, for instance ["go to desk 1", "look"].')
        return cls(data)

    def choice(self, history: History) -> Choice:
        """The next command of the script, with certainty."""
        step = history.steps
        return self._choices[self._commands[step] if step < len(self._commands) else "look"]

    def describe(self) -> dict[str, Any]:
        """What the policy is, with the whole script."""
        return {"kind": "scripted", "commands": list(self._commands)}
