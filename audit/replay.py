"""Replay: every decision point restored, the policy's own alternatives drawn, each rolled forward.

Knows: how a trajectory becomes decision points, what makes a point defined, which rollouts it needs and when it
needs no more. Hides: lock-step batching and redrawing. It makes records and estimates nothing: what they mean is in
`audit.effects`. Processes and resuming are in `audit.tasks`.

Definitions: ../shared/statistics-replay.md, sections 1 to 3. A point's rounds and draws are functions of the plan
and of content ids alone, so the results do not depend on order, on the number of processes or on interruptions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from audit.effects import undecided
from audit.importers import compare_observation
from audit.llm.journal import spending
from audit.plan import Plan
from audit.policies import History, Policy, Proposal
from audit.records import PointState, Trajectory, content_id, draws
from audit.rollouts import Finish, Start, roll
from envs import Environment

FACTUAL = "factual"
ALTERNATIVES = "alternatives"
# How a rollout ended, as written in records: w won, l over without winning, t out of steps, e failed.
OUTCOME_CODES = {
    ("ok", True): "w",
    ("ok", False): "l",
    ("truncated", True): "w",
    ("truncated", False): "t",
    ("error", False): "e",
    ("error", True): "e",
}


def point_id(trajectory: str, step: int, policy: str) -> str:
    """Content id of a decision point as replayed by a policy."""
    return content_id("point", trajectory, step, policy)


def chosen_steps(trajectory: Trajectory, plan: Plan) -> list[int]:
    """The steps of a trajectory that the plan's `points` chooses, by hash: the same on every machine."""
    steps = [(content_id("choice", plan.seed, trajectory.id, step), step) for step in range(len(trajectory.commands))]
    kept = sorted((rank, step) for rank, step in steps if int(rank[:13], 16) / 16**13 < plan.points.share)
    limit = plan.points.per_trajectory or len(kept)
    return sorted(step for _, step in kept[:limit])


# One trajectory ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Point:
    """A defined point while it is replayed."""

    identity: str
    history: History
    action: str
    steps_left: int
    alternatives: list[str]
    cumulative: list[float] | None  # of the alternatives' exact probabilities
    records: list[dict[str, Any]]

    def drawn(self, word: int) -> str:
        """The alternative that a 64-bit word chooses, by exact probabilities."""
        assert self.cumulative is not None
        place = bisect_right(self.cumulative, (word >> 11) / 2**53 * self.cumulative[-1])
        return self.alternatives[min(place, len(self.alternatives) - 1)]


class Replayer:
    """Replays points of one game with one policy under one plan."""

    def __init__(self, env: Environment, policy: Policy, plan: Plan) -> None:
        self.env, self.policy, self.plan = env, policy, plan

    async def replay(
        self, trajectory: Trajectory, points: Sequence[tuple[int, str, Sequence[Mapping[str, Any]]]]
    ) -> list[dict[str, Any]]:
        """New records of the given points: first the point itself, then a record for each round it needs."""
        histories, unfaithful_from, why = self._prefixes(trajectory)
        new: list[dict[str, Any]] = []
        asked: list[tuple[int, str, list[dict[str, Any]]]] = []
        for step, identity, records in points:
            if step >= self.plan.estimand.budget:
                late = f"the step lies beyond the plan's budget of {self.plan.estimand.budget} steps"
                new.append(point_record(trajectory, step, identity, "error", late))
            elif records or step < unfaithful_from:
                asked.append((step, identity, [dict(record) for record in records]))
            else:
                new.append(point_record(trajectory, step, identity, "unfaithful", why))
        known = await self.policy.distributions([histories[step] for step, _, _ in asked])
        await self._find_alternatives(trajectory, histories, asked, known, new)
        live = [
            self._live(histories[step], trajectory, step, identity, records, probabilities)
            for (step, identity, records), probabilities in zip(asked, known, strict=True)
            if records[0]["state"] == "defined"
        ]
        while True:
            owing = undecided([point.records for point in live], self.plan)
            live = [point for point, owes in zip(live, owing, strict=True) if owes]
            if not live:
                return new
            for point, record in zip(live, await self._round(live), strict=True):
                point.records.append(record)
                new.append(record)

    def _prefixes(self, trajectory: Trajectory) -> tuple[list[History], int, str]:
        """The history at every step, the first step whose prefix did not reproduce, and why."""
        turn = self.env.reset()
        history = History(trajectory.game, turn)
        histories: list[History] = []
        unfaithful, why = len(trajectory.commands) + 1, ""
        for step, recorded in enumerate(trajectory.observations):
            if unfaithful > step and compare_observation(recorded, history.turn.observation) == "different":
                unfaithful, why = step, f"the observation at step {step} does not reproduce"
            if unfaithful > step and history.turn.done and step < len(trajectory.commands):
                unfaithful, why = step, f"the replayed game is over at step {step}, the recorded one is not"
            histories.append(history)
            if step < len(trajectory.commands):
                command = trajectory.commands[step]
                history = history.then(command, self.env.step(history.turn.state, command))
        return histories, unfaithful, why

    # Support

    async def _find_alternatives(
        self,
        trajectory: Trajectory,
        histories: Sequence[History],
        asked: Sequence[tuple[int, str, list[dict[str, Any]]]],
        known: Sequence[Mapping[str, float] | None],
        new: list[dict[str, Any]],
    ) -> None:
        """Give every fresh point its own record: what the policy would do there, by the policy's own draws."""
        n = self.plan.support.draws
        fresh = [i for i, (_, _, records) in enumerate(asked) if not records]
        if not fresh:
            return
        seeds = [word for i in fresh for word in draws(n, "support", self.plan.seed, asked[i][1])]
        proposals = await self.policy.propose([histories[asked[i][0]] for i in fresh for _ in range(n)], seeds=seeds)
        for place, i in enumerate(fresh):
            step, identity, records = asked[i]
            drawn = proposals[place * n : (place + 1) * n]
            records.append(self._support(trajectory, histories[step], step, identity, known[i], drawn))
            new.append(records[0])

    def _support(
        self,
        trajectory: Trajectory,
        history: History,
        step: int,
        identity: str,
        probabilities: Mapping[str, float] | None,
        proposals: Sequence[Proposal],
    ) -> dict[str, Any]:
        action, plan = trajectory.commands[step], self.plan
        admissible = set(history.turn.admissible)
        failed = [proposal.reason for proposal in proposals if proposal.status == "error"]
        seen = Counter(proposal.command for proposal in proposals if proposal.status == "ok")
        drawn = sum(seen.values())
        allowed = [
            command
            for command in seen  # in the order of their first draw
            if command != action and (plan.estimand.inadmissible == "keep" or command in admissible)
        ]
        pi = None if drawn == 0 else seen[action] / drawn
        if probabilities is not None:
            pi = float(probabilities.get(action, 0.0))
        facts = {
            "pi": pi,
            "exact": probabilities is not None,
            "draws": drawn,
            "factual_draws": seen[action],
            "admissible": action in admissible,
            "alternatives": [
                [
                    command,
                    seen[command],
                    None if probabilities is None else float(probabilities.get(command, 0.0)),
                    command in admissible,
                ]
                for command in allowed
            ],
            "singletons": sum(1 for count in seen.values() if count == 1),
            "unseen": None
            if probabilities is None
            else max(0.0, 1.0 - sum(p for command, p in probabilities.items() if command in seen or command == action)),
        }
        state: PointState = "defined"
        reason = None
        if drawn == 0:
            state, reason = "error", f"the policy gave no action in {len(proposals)} draws: {failed[0]}"
        elif not allowed:
            state = "no_counterfactual"
            reason = f"all {drawn} draws of the policy are the factual action"
            if set(seen) - {action}:
                reason = f"no alternative in {drawn} draws of the policy is admissible"
        elif len(allowed) < plan.support.distinct:
            state = "insufficient"
            reason = f"{len(allowed)} distinct alternatives in {drawn} draws; the plan asks for {plan.support.distinct}"
        return point_record(trajectory, step, identity, state, reason, **facts)

    def _live(
        self,
        history: History,
        trajectory: Trajectory,
        step: int,
        identity: str,
        records: list[dict[str, Any]],
        probabilities: Mapping[str, float] | None,
    ) -> _Point:
        action, plan = trajectory.commands[step], self.plan
        alternatives, cumulative = [entry[0] for entry in records[0]["alternatives"]], None
        if plan.rollouts.design == "arms":
            alternatives = alternatives[: plan.support.distinct]
        elif probabilities is not None:
            admissible = set(history.turn.admissible)
            chances = {
                command: p
                for command, p in sorted(probabilities.items())
                if command != action and p > 0 and (plan.estimand.inadmissible == "keep" or command in admissible)
            }
            alternatives, cumulative = list(chances), list(accumulate(chances.values()))
        return _Point(identity, history, action, plan.estimand.budget - step, alternatives, cumulative, records)

    # Rollouts

    async def _round(self, points: Sequence[_Point]) -> list[dict[str, Any]]:
        """The next round of every point, in one lock-step batch; rollouts that fail are replaced by further draws."""
        arms = [arm for point in points for arm in self._arms(point)]
        while pending := [arm for arm in arms if arm.owed()]:
            attempts = [(arm, draw) for arm in pending for draw in arm.next_draws()]
            firsts = await self._first_commands(attempts)
            starts, rolled = [], []
            for (arm, draw), (command, reason) in zip(attempts, firsts, strict=True):
                if command is None:
                    arm.add(draw, None, None, reason)
                    continue
                seeds = self._words(arm, draw)[1:]
                starts.append(Start(self.env, arm.point.history, arm.point.steps_left, seeds, command))
                rolled.append((arm, draw, command))
            with spending("roll"):
                finished = await roll(self.policy, starts)
            for (arm, draw, command), finish in zip(rolled, finished, strict=True):
                arm.add(draw, command, finish, finish.reason)
        return [
            {
                "point": point.identity,
                "round": len(point.records),
                "arms": [a.record() for a in arms if a.point is point],
            }
            for point in points
        ]

    def _arms(self, point: _Point) -> list[_Arm]:
        done = len(point.records) - 1
        rounds = self.plan.rollouts.rounds
        n = rounds[done] - (rounds[done - 1] if done else 0)
        names: list[str | None] = [point.action]
        names += [None] if self.plan.rollouts.design == "draws" else point.alternatives
        before = point.records[-1]["arms"] if done else [{"until": 0}] * len(names)
        labels = [FACTUAL] + [ALTERNATIVES] * (len(names) - 1)
        return [
            _Arm(point, label, command, n, arm["until"])
            for label, command, arm in zip(labels, names, before, strict=True)
        ]

    def _words(self, arm: _Arm, draw: int) -> list[int]:
        """The random words of a rollout: one to choose its first command, one for each later decision."""
        which = "" if self.plan.rollouts.common_random_numbers else (arm.command or arm.label)
        return draws(arm.point.steps_left, "roll", self.plan.seed, arm.point.identity, which, draw)

    async def _first_commands(self, attempts: Sequence[tuple[_Arm, int]]) -> list[tuple[str | None, str | None]]:
        """(first command, or None and why there is none) of each rollout."""
        found: list[tuple[str | None, str | None]] = [(arm.command, None) for arm, _ in attempts]
        redraw: list[int] = []
        for i, (arm, draw) in enumerate(attempts):
            if arm.command is None and arm.point.cumulative is not None:
                found[i] = (arm.point.drawn(self._words(arm, draw)[0]), None)
            elif arm.command is None:
                redraw.append(i)
        for trial in range(self.plan.rollouts.redraws):
            if not redraw:
                return found
            histories = [attempts[i][0].point.history for i in redraw]
            seeds = [
                draws(1, "first", self.plan.seed, attempts[i][0].point.identity, attempts[i][1], trial)[0]
                for i in redraw
            ]
            again = []
            for i, proposal in zip(redraw, await self.policy.propose(histories, seeds=seeds), strict=True):
                if proposal.status == "ok" and self._may_serve(attempts[i][0].point, proposal.command):
                    found[i] = (proposal.command, None)
                else:
                    again.append(i)
            redraw = again
        for i in redraw:
            found[i] = (None, f"no alternative in {self.plan.rollouts.redraws} draws of the policy")
        return found

    def _may_serve(self, point: _Point, command: str) -> bool:
        allowed = self.plan.estimand.inadmissible == "keep" or command in point.history.turn.admissible
        return command != point.action and allowed


class _Arm:
    """One arm of one point in one round: which draws it has had and how they ended."""

    def __init__(self, point: _Point, label: str, command: str | None, n: int, draw: int) -> None:
        self.point, self.label, self.command = point, label, command
        self._n, self._first, self._next, self._valid = n, draw, draw, 0
        self._limit = draw + 2 * n + 10
        self._rows: list[tuple[int, str | None, str, int, str | None]] = []

    def owed(self) -> bool:
        return self._valid < self._n and self._next < self._limit

    def next_draws(self) -> range:
        start = self._next
        self._next = min(start + self._n - self._valid, self._limit)
        return range(start, self._next)

    def add(self, draw: int, command: str | None, finish: Finish | None, reason: str | None) -> None:
        code = "e" if finish is None else OUTCOME_CODES[finish.status, finish.won]
        self._valid += code != "e"
        self._rows.append((draw, command, code, 0 if finish is None else finish.steps, reason))

    def record(self) -> dict[str, Any]:
        self._rows.sort()
        commands = list(dict.fromkeys(row[1] for row in self._rows if row[1] is not None))
        return {
            "arm": self.label,
            "command": self.command,
            "from": self._first,
            "until": self._next,
            "commands": commands,
            "first": [-1 if row[1] is None else commands.index(row[1]) for row in self._rows],
            "outcome": "".join(row[2] for row in self._rows),
            "steps": [row[3] for row in self._rows],
            "failures": [[row[0], row[4]] for row in self._rows if row[2] == "e"],
        }


def point_record(
    trajectory: Trajectory, step: int, identity: str, state: PointState, reason: str | None, **facts: Any
) -> dict[str, Any]:
    """The record of a point. alternatives: [command, draws, exact probability or null, admissible] of each."""
    record = {
        "point": identity,
        "round": 0,
        "trajectory": trajectory.id,
        "step": step,
        "action": trajectory.commands[step],
        "state": state,
        "reason": reason,
        "pi": None,
        "exact": False,
        "draws": 0,
        "factual_draws": 0,
        "admissible": None,
        "alternatives": [],
        "singletons": 0,
        "unseen": None,
    }
    return {**record, **facts}
