"""Collecting a policy's trajectories: which game, which draw, and what was seen and done.

Knows: how draws are assigned to games and seeded. Hides: the lock-step rolling. Draw i of a set is the same
however many are collected and however the work is split.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from audit.llm.journal import spending
from audit.policies import History, Policy
from audit.records import Trajectory, content_id, draws
from audit.rollouts import Finish, Start, roll
from envs import Environment, Game, make

BATCH = 64


def policy_id(policy: Policy) -> str:
    """Content id of what a policy says it is."""
    return content_id("policy", policy.describe())


def collect(
    policy: Policy,
    games: Sequence[Game],
    n: int,
    *,
    budget: int,
    seed: int,
    done: Callable[[int], None] = lambda collected: None,
) -> Iterator[Trajectory]:
    """Yield n trajectories: draw i plays game i modulo the number of games, in the order given.

    budget: steps an episode may take. seed: of the draws. done: told how many episodes are over so far.
    Deterministic: the same policy, games and seed give the same trajectories.
    """
    identity = policy_id(policy)
    for first in range(0, n, BATCH):
        numbers = range(first, min(first + BATCH, n))
        worlds: dict[str, Environment] = {}
        starts = []
        for number in numbers:
            game = games[number % len(games)]
            env = worlds.get(game.id) or worlds.setdefault(game.id, make(game.address))
            seeds = draws(budget, "collect", seed, game.id, number)
            starts.append(Start(env, History(game.id, env.reset()), budget, seeds))
        with spending("collect"):
            told = partial(_over, done, first)
            finished = asyncio.run(roll(policy, starts, keep_proposals=True, progress=told))
        for number, finish in zip(numbers, finished, strict=True):
            game = games[number % len(games)]
            yield _trajectory(game, finish, identity, budget, seed, number)
        done(numbers.stop)


def _over(done: Callable[[int], None], before: int, stage: str, over: int, of: int) -> None:
    done(before + over)


def _trajectory(game: Game, finish: Finish, identity: str, budget: int, seed: int, draw: int) -> Trajectory:
    moments = finish.history.line()
    commands = finish.history.commands()
    proposals = finish.proposals[: len(commands)]
    origin: dict[str, Any] = {"seed": seed, "draw": draw}
    if finish.reason is not None:
        origin["reason"] = finish.reason
    repairs = {str(step): list(proposal.repairs) for step, proposal in enumerate(proposals) if proposal.repairs}
    if repairs:
        origin["repairs"] = repairs
    return Trajectory(
        game=game.id,
        game_name=game.name,
        task_type=game.task_type,
        policy=identity,
        budget=budget,
        commands=commands,
        observations=tuple(moment.turn.observation for moment in moments),
        won=finish.won,
        status=finish.status,
        logprobs=tuple(proposal.logprob for proposal in proposals),
        texts=tuple(proposal.text for proposal in proposals),
        origin=origin,
    )
