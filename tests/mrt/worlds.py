"""Small policies and games for trials, with exact truth by dynamic programming over (state, steps left)."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from audit.mrt.interventions import Act, Moment
from audit.policies import History, Policy, Proposal
from envs import Environment


class Wanderer:
    """Proposes `go right` with probability q, else one of the other commands, uniformly; reads messages.

    A message that holds the words `go right` makes it go right.
    """

    def __init__(self, q: float = 0.5) -> None:
        self.q, self.read = q, list[str]()

    def probabilities(self, admissible: Sequence[str]) -> dict[str, float]:
        others = [command for command in admissible if command != "go right"]
        return {"go right": self.q, **{command: (1 - self.q) / len(others) for command in others}}

    async def propose(self, requests: Sequence[History], *, seeds: Sequence[int]) -> list[Proposal]:
        return [self._draw(history, seed) for history, seed in zip(requests, seeds, strict=True)]

    def _draw(self, history: History, seed: int) -> Proposal:
        self.read.append(history.turn.observation)
        if "go right" in history.turn.observation:
            return Proposal("go right")
        choices = self.probabilities(history.turn.admissible)
        return Proposal(random.Random(seed).choices(list(choices), list(choices.values()))[0])

    async def distributions(self, requests: Sequence[History]) -> list[Mapping[str, float] | None]:
        return [None for _ in requests]

    async def logprobs(
        self, requests: Sequence[History], actions: Sequence[str], *, condition: str | None = None
    ) -> list[float | None]:
        return [None for _ in requests]

    def describe(self) -> dict[str, Any]:
        return {"kind": "wanderer", "q": self.q}


class Right:
    """An intervention of one's own: the command becomes `go right`."""

    before_proposal = False

    def eligible(self, moment: Moment) -> bool:
        return True

    def features(self, moment: Moment) -> Mapping[str, int | str]:
        """wrong; slot: cell and time where a treatment can matter, else `none`: all that a blip depends on."""
        assert moment.proposal is not None
        wrong = moment.proposal.command != "go right"
        cell, length = (int(word) for word in re.findall(r"\d+", moment.history.turn.observation))
        matters = wrong and moment.steps_left >= length - cell
        return {"wrong": int(wrong), "slot": f"{cell}@{moment.history.steps}" if matters else "none"}

    async def act(self, moments: Sequence[Moment], *, policy: Policy, seeds: Sequence[int]) -> list[Act]:
        return [Act(command="go right") for _ in moments]

    def describe(self) -> dict[str, Any]:
        return {"kind": "right"}


def exact_chain(env: Environment, q: float, budget: int, rule: Callable[[int, bool], float]) -> float:
    """Exact chance of winning a chain when `Right` treats with probability rule(t, wrong proposal)."""
    wanderer = Wanderer(q)

    @cache
    def value(state: Any, t: int) -> float:
        turn = env.restore(state)
        if turn.done or t == budget:
            return float(turn.won)
        total = 0.0
        for command, chance in wanderer.probabilities(turn.admissible).items():
            treat = rule(t, command != "go right")
            plain, treated = env.step(state, command).state, env.step(state, "go right").state
            total += chance * ((1 - treat) * value(plain, t + 1) + treat * value(treated, t + 1))
        return total

    return value(env.reset().state, 0)
