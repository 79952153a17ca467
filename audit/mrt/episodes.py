"""One rollout with coins: what is known before each coin, the coin, the treatment, the step; many in lock-step.

Knows: the order of proposal, coin, treatment and step; how coins are drawn; how an episode is forked at a decision.
Hides: batching, the message that only the policy reads.

Coins are counter-based: the random words of a rollout follow from its key alone and are addressed by the step, so a
rollout is the same however it is batched, split over processes or interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import pandas as pd

from audit.mrt.interventions import Act, Intervention, Moment, Value, failed, given_before
from audit.mrt.rules import TextRule
from audit.policies import History, Policy, Proposal
from audit.records import Status, draws
from envs import Environment, Game, InputError, Turn, make

WORLDS = 512  # games a process keeps open
GROUPS = {
    **dict.fromkeys(("put", "move"), "put"),
    **dict.fromkeys(("clean", "heat", "cool", "use"), "prepare"),
    **{word: word for word in ("go", "take")},
}
Rule = float | TextRule | Callable[[pd.DataFrame], Any]


@lru_cache(maxsize=WORLDS)
def world(address: str) -> Environment:
    """An open game, kept for the next batch."""
    return make(address)


def opening(game: Game, budget: int, key: tuple[Any, ...]) -> Start:
    """The start of an episode; the random streams follow from the key and the game."""
    env = world(game.address)
    turn = env.reset()
    facts: dict[str, Value] = {} if game.task_type is None else {"task_type": game.task_type}
    # Two chains of moments, since a policy and a reviewer each keep a summary in the moments they read.
    return Start(env, History(game.id, turn), History(game.id, turn), budget, (*key, game.id), facts=facts)


class Told(NamedTuple):
    """State of a turn with a message: never equal to the state of the plain turn, so that no memo mixes them up."""

    state: Any
    message: str


@dataclass(frozen=True, slots=True)
class Start:
    """Where a rollout begins: at the start of a game, or at a decision that is forked.

    history, told: what happened, and what the policy read. key: names the random streams. budget: steps of the whole
    episode. n_eligible, n_treated: coins and treatments so far. proposal, arm: of the first decision, where given (a
    fork keeps the logged proposal and sets the arm). facts: features of the whole episode.
    """

    env: Environment
    history: History
    told: History
    budget: int
    key: tuple[Any, ...]
    n_eligible: int = 0
    n_treated: int = 0
    proposal: Proposal | None = None
    arm: int | None = None
    facts: Mapping[str, Value] = field(default_factory=dict)


@dataclass(slots=True)
class Episode:
    """How a rollout went. rows: one dict a decision (the decisions table without `trajectory`). treated: treatments in
    all. forks: a Start for each eligible decision, in order, where asked for."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    won: bool = False
    steps: int = 0
    treated: int = 0
    status: Status = "ok"
    reason: str | None = None
    forks: list[Start] = field(default_factory=list)


def known(moment: Moment) -> dict[str, Value]:
    """What is known before the coin of a decision, as features; described in `audit.mrt.trial`."""
    history, proposal = moment.history, moment.proposal
    turn = history.turn
    row: dict[str, Value] = {}
    if proposal is not None:
        row["action_type"] = word = proposal.command.split(" ", 1)[0] or "none"
        row["action_group"] = GROUPS.get(word, "other")
        row["admissible"] = int(proposal.command in turn.admissible)
        row["repeated"] = int(given_before(history, proposal.command))
    else:
        row["last_action"] = word = (history.command or "none").split(" ", 1)[0]
        row["last_group"] = GROUPS.get(word, "other")
    row["last_failed"] = int(failed(history))
    row["phase"] = _phase(history)
    row["n_admissible"] = len(turn.admissible)
    return row


def _phase(history: History) -> str:
    prepared, moment = False, history
    while moment.parent is not None:
        word = (moment.command or "").split(" ", 1)[0]
        if word in _PHASES and not moment.turn.observation.startswith("Nothing happens"):
            if word == "take":
                return "prepared" if prepared else "holding"
            if word in ("put", "move"):
                return "searching"
            prepared = True
        moment = moment.parent
    return "searching"


_PHASES = frozenset(("take", "put", "move", "clean", "heat", "cool"))


class _Live:
    def __init__(self, start: Start) -> None:
        self.start, self.history, self.told = start, start.history, start.told
        self.n_eligible, self.n_treated = start.n_eligible, start.n_treated
        self.proposal, self.arm = start.proposal, start.arm
        self.words = draws(3 * start.budget, "trial", *start.key)
        self.episode = Episode()
        self.row: dict[str, Any] = {}
        self.act = Act()

    def word(self, stream: int) -> int:
        return self.words[stream * self.start.budget + self.history.steps]

    def moment(self) -> Moment:
        return Moment(self.history, self.told, self.start.budget - self.history.steps, self.proposal)

    def fork(self) -> Start:
        return replace(
            self.start,
            history=self.history,
            told=self.told,
            n_eligible=self.n_eligible,
            n_treated=self.n_treated,
            proposal=self.proposal,
        )

    def over(self) -> bool:
        return self.history.turn.done or self.history.steps >= self.start.budget

    def close(self, reason: str | None = None) -> None:
        turn, episode = self.history.turn, self.episode
        episode.won = turn.won and reason is None
        episode.status = "error" if reason is not None else "ok" if turn.done else "truncated"
        episode.steps, episode.treated, episode.reason = self.history.steps, self.n_treated, reason

    def step(self) -> None:
        proposal = self.proposal
        assert proposal is not None
        command = self.act.command if self.act.command is not None else proposal.command
        treated = self.row["arm"] == 1
        self.row |= {
            "proposal": proposal.command,
            "command": command,
            "delivered": bool(treated and self.act.reason is None),
            "changed": bool(treated and (command != proposal.command or self.act.message is not None)),
            "message": self.act.message,
            "reason": self.act.reason,
        }
        self.episode.rows.append(self.row)
        turn = self.start.env.step(self.history.turn.state, command)
        self.history, self.told = self.history.then(command, turn), self.told.then(command, turn)
        self.proposal, self.arm, self.act, self.row = None, None, Act(), {}


async def play(
    policy: Policy,
    intervention: Intervention,
    starts: Sequence[Start],
    rule: Rule,
    *,
    p: float | None = None,
    eligible: TextRule | None = None,
    keep_forks: bool = False,
) -> list[Episode]:
    """Play every start to its end in lock-step; episodes in the order of the starts.

    rule: probability of treatment at eligible decisions: a constant (a trial), a `TextRule`, or a function of the
    feature frame (a target policy). p: what is written as `p` where the rule is not what the logs are for. Errors of
    the environment or of one proposal end that rollout with its reason, as in `audit.rollouts`.
    """
    if len(starts) > 1 and any(getattr(start.env, "one_at_a_time", False) for start in starts):
        options: dict[str, Any] = {"p": p, "eligible": eligible, "keep_forks": keep_forks}
        return [(await play(policy, intervention, [start], rule, **options))[0] for start in starts]
    lives = [_Live(start) for start in starts]
    going = lives
    for live in lives:
        if live.over():
            live.close()
    while going := [live for live in going if live.episode.reason is None and not live.over()]:
        if not intervention.before_proposal:
            going = await _propose(policy, going)
        flipped = _flip(intervention, going, rule, p, eligible, keep_forks)
        if flipped:
            seeds = [live.word(2) for live in flipped]
            moments = [live.moment() for live in flipped]
            for live, act in zip(flipped, await intervention.act(moments, policy=policy, seeds=seeds), strict=True):
                live.act = act
                if act.message is not None and intervention.before_proposal:
                    live.told = _with_message(live.told, act.message)
        if intervention.before_proposal:
            going = await _propose(policy, going)
        for live in going:
            try:
                live.step()
            except InputError as error:
                live.close(str(error))
                continue
            if live.over():
                live.close()
    return [live.episode for live in lives]


async def _propose(policy: Policy, going: Sequence[_Live]) -> list[_Live]:
    """Give every rollout a proposal; those whose policy failed are closed."""
    asked = [live for live in going if live.proposal is None]
    if asked:
        answers = await policy.propose([live.told for live in asked], seeds=[live.word(0) for live in asked])
        for live, proposal in zip(asked, answers, strict=True):
            if proposal.status == "error":
                live.close(proposal.reason or "the policy gave no action")
            else:
                live.proposal = proposal
    return [live for live in going if live.episode.reason is None]


def _with_message(told: History, message: str) -> History:
    turn = told.turn
    text = f"{turn.observation}\n\n{message}"
    return History(
        told.game_id,
        Turn(text, turn.admissible, turn.won, turn.done, Told(turn.state, message)),
        told.parent,
        told.command,
    )


def _flip(
    intervention: Intervention,
    going: Sequence[_Live],
    rule: Rule,
    p: float | None,
    eligible: TextRule | None,
    keep_forks: bool,
) -> list[_Live]:
    """Write every decision's row up to its coin; the rollouts whose coin fell on treatment."""
    flipping = []
    for live in going:
        moment = live.moment()
        row = {**live.start.facts, **known(moment), **intervention.features(moment)}
        past = {"t": live.history.steps, "n_past_eligible": live.n_eligible, "n_past_treated": live.n_treated}
        open_ = intervention.eligible(moment) and (eligible is None or eligible.at({**row, **past}) > 0)
        live.row = {"t": live.history.steps, "eligible": int(open_), "arm": 0, "p": None, **row}
        if open_:
            flipping.append((live, {**past, **row}))
    chances = _chances(rule, [row for _, row in flipping], p)
    treated = []
    for (live, _), chance in zip(flipping, chances, strict=True):
        if keep_forks:
            live.episode.forks.append(live.fork())
        arm = live.arm if live.arm is not None else int((live.word(1) >> 11) * 2.0**-53 < chance)
        live.row["arm"], live.row["p"] = arm, chance if p is None else p
        live.n_eligible += 1
        live.n_treated += arm
        if arm:
            treated.append(live)
    return treated


def _chances(rule: Rule, rows: Sequence[Mapping[str, Any]], p: float | None) -> list[float]:
    if isinstance(rule, TextRule):
        return [rule.at(row) for row in rows]
    if callable(rule):
        if not rows:
            return []
        frame = pd.DataFrame(rows).assign(p=math.nan if p is None else p)
        return [float(value) for value in rule(frame)]
    return [float(rule)] * len(rows)
