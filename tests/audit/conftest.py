"""Policies and small studies that the replay tests share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from audit.plan import Plan
from audit.policies import History, Proposal
from audit.records import Trajectory
from audit.replay import Replayer, chosen_steps, point_id
from envs import Environment, Turn


class StateOnlyPolicy:
    """A policy that depends on the turn alone, so that exact truth exists.

    hidden: it does not tell its probabilities, as a language model behind a server would not.
    """

    def __init__(self, choose: Callable[[Turn], Mapping[str, float]], *, hidden: bool = False) -> None:
        self.choose, self.hidden = choose, hidden

    async def propose(self, requests: Sequence[History], *, seeds: Sequence[int]) -> Sequence[Proposal]:
        return [self._draw(history, seed) for history, seed in zip(requests, seeds, strict=True)]

    def _draw(self, history: History, seed: int) -> Proposal:
        choices = self.choose(history.turn)
        commands = sorted(choices)
        command = random.Random(seed).choices(commands, [choices[c] for c in commands])[0]
        return Proposal(command)

    async def distributions(self, requests: Sequence[History]) -> Sequence[Mapping[str, float] | None]:
        return [None if self.hidden else dict(self.choose(history.turn)) for history in requests]

    async def logprobs(
        self, requests: Sequence[History], actions: Sequence[str], *, condition: str | None = None
    ) -> Sequence[float | None]:
        return [None for _ in requests]

    def describe(self) -> dict[str, Any]:
        return {"kind": "state-only", "name": "state-only"}


def uneven(turn: Turn) -> dict[str, float]:
    """Commands in proportion 1, 2, 3, ... in the order they are listed."""
    total = sum(range(1, len(turn.admissible) + 1))
    return {command: (i + 1) / total for i, command in enumerate(turn.admissible)}


def trajectory_of(env: Environment, commands: Sequence[str], budget: int) -> Trajectory:
    """The trajectory of some commands."""
    turns = [env.reset()]
    for command in commands:
        turns.append(env.step(turns[-1].state, command))
    return Trajectory(
        game=env.game_id,
        game_name="test/test",
        task_type=None,
        policy="test",
        budget=budget,
        commands=tuple(commands),
        observations=tuple(turn.observation for turn in turns),
        won=turns[-1].won,
        status="ok" if turns[-1].done else "truncated",
        logprobs=(None,) * len(commands),
        texts=(None,) * len(commands),
        origin={"test": True},
    )


def replay_points(
    env: Environment, policy: StateOnlyPolicy, trajectory: Trajectory, plan: Plan
) -> list[tuple[Trajectory, list[dict[str, Any]]]]:
    """All chosen points of a trajectory replayed in this process, each with its records in order."""
    points = [(step, point_id(trajectory.id, step, "test"), []) for step in chosen_steps(trajectory, plan)]
    records = asyncio.run(Replayer(env, policy, plan).replay(trajectory, points))
    by_point: dict[str, list[dict[str, Any]]] = {identity: [] for _, identity, _ in points}
    for record in records:
        by_point[record["point"]].append(record)
    return [(trajectory, sorted(found, key=lambda record: record["round"])) for found in by_point.values()]
