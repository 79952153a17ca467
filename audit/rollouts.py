"""Rolling forward: many rollouts in lock-step, so that the policy is asked in batches.

Knows: how an episode goes on and when it is over. Hides: the loop. Used to collect trajectories, to replay
alternatives and to evaluate policies. A rollout that fails is data with a reason, never a crash and never a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from audit.policies import History, Policy, Proposal
from audit.records import Status
from envs import Environment, InputError


@dataclass(frozen=True, slots=True)
class Start:
    """Where a rollout begins. first: a command done before the policy takes over (None: the policy at once).

    steps: how many steps are left, the first command included. seeds: one 64-bit integer for each of the
    policy's decisions.
    """

    env: Environment
    history: History
    steps: int
    seeds: Sequence[int]
    first: str | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """How a rollout ended. history: its last moment. steps: what it took. proposals: the policy's own choices
    (empty unless kept). status: ok (the game ended), truncated (steps ran out) or error, with the reason."""

    history: History
    won: bool
    steps: int
    status: Status
    reason: str | None
    proposals: tuple[Proposal, ...] = ()


class _Live:
    __slots__ = ("decisions", "history", "index", "proposals", "start", "steps")

    def __init__(self, index: int, start: Start) -> None:
        self.index, self.start, self.history = index, start, start.history
        self.steps = self.decisions = 0
        self.proposals: list[Proposal] = []

    def step(self, command: str) -> None:
        turn = self.start.env.step(self.history.turn.state, command)
        self.history = self.history.then(command, turn)
        self.steps += 1

    def over(self) -> bool:
        return self.history.turn.done or self.steps >= self.start.steps

    def finish(self, reason: str | None = None) -> Finish:
        turn = self.history.turn
        status: Status = "error" if reason is not None else "ok" if turn.done else "truncated"
        return Finish(self.history, turn.won and reason is None, self.steps, status, reason, tuple(self.proposals))


async def roll(
    policy: Policy,
    starts: Sequence[Start],
    *,
    keep_proposals: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Finish]:
    """Play every start to its end, all of them in lock-step; results in the order of the starts.

    An environment that has a cursor of its own (the stock engine: `one_at_a_time`) is rolled one start after the
    other, since every change of line would cost it a reset.

    Errors of the environment or of a single proposal end that rollout with status `error`. An exception of the
    policy's whole batch (a server that is gone, a cap that is reached) is the caller's to handle. progress: told
    ("episodes", how many are over, of how many) after each step.
    """
    if len(starts) > 1 and any(getattr(start.env, "one_at_a_time", False) for start in starts):
        return [(await roll(policy, [start], keep_proposals=keep_proposals))[0] for start in starts]
    finished: list[Finish | None] = [None] * len(starts)
    live: list[_Live] = []
    for index, start in enumerate(starts):
        rollout = _Live(index, start)
        try:
            if start.first is not None and not rollout.over():
                rollout.step(start.first)
        except InputError as error:
            finished[index] = rollout.finish(str(error))
            continue
        if rollout.over():
            finished[index] = rollout.finish()
        else:
            live.append(rollout)
    while live:
        proposals = await policy.propose(
            [rollout.history for rollout in live], seeds=[rollout.start.seeds[rollout.decisions] for rollout in live]
        )
        going: list[_Live] = []
        for rollout, proposal in zip(live, proposals, strict=True):
            rollout.decisions += 1
            if keep_proposals:
                rollout.proposals.append(proposal)
            if proposal.status == "error":
                finished[rollout.index] = rollout.finish(proposal.reason or "the policy gave no action")
                continue
            try:
                rollout.step(proposal.command)
            except InputError as error:
                finished[rollout.index] = rollout.finish(str(error))
                continue
            if rollout.over():
                finished[rollout.index] = rollout.finish()
            else:
                going.append(rollout)
        live = going
        if progress is not None:
            progress("episodes", len(starts) - len(live), len(starts))
    return [finish for finish in finished if finish is not None]
