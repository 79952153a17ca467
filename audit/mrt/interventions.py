"""Interventions: what a trial does at a decision when the coin says so.

Knows: the protocol, the four kinds that come with the package (review, feedback, resample, hint) and what each needs
to know before the coin. Hides: reviewers, the wording of messages. An intervention of one's own is any object with the
methods of `Intervention`, named on the command line as `python:MODULE:NAME`.

    review:expert        the built-in expert approves the proposed command or puts its own in its place
    review:judge:FILE    a language model (the .toml file of a saved one) approves the proposed command or names another
    review:rule          a command that is not admissible, or was given in this very state before, is replaced
    resample[:K]         the command is drawn again: the most frequent of K fresh draws (default 1)
    feedback:helpful     after a command that failed, the policy is told which commands work here
    feedback:adversarial after a command that failed, the policy is told that it worked
    hint:expert          the policy is told what the expert would do
    hint:TEXT            the policy is told TEXT
"""

from __future__ import annotations

import asyncio
import importlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from audit.llm.judge import Scale, judge_of, trusted
from audit.policies import History, Policy, Proposal, load_policy
from audit.policies.expert import ExpertPolicy
from audit.policies.openai import LLMPolicy
from audit.policies.scripted import Choice
from audit.records import content_id, draws
from credit_signals.judge import transcript
from envs.core import InputError

Value = str | float | int
SHOWN = 12  # commands that helpful feedback lists
REVIEWED = 40  # turns that a judge is shown


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known before the coin of one decision.

    history: what really happened, without injected messages. told: the same as the policy has read it. steps_left: the
    command to come included. proposal: what the policy wants to do; None where the intervention comes before that.
    """

    history: History
    told: History
    steps_left: int
    proposal: Proposal | None


@dataclass(frozen=True, slots=True)
class Act:
    """What an intervention does: a command in place of the proposed one (None approves it), or a message that the
    policy reads before it proposes. reason: why nothing could be done (the decision still counts as treated: the
    effect is that of the assignment)."""

    command: str | None = None
    message: str | None = None
    reason: str | None = None


class Intervention(Protocol):
    """What may be done at a decision. All methods see only what was known before the coin."""

    @property
    def before_proposal(self) -> bool:
        """Whether the coin falls before the policy proposes (messages) or after (review)."""
        ...

    def eligible(self, moment: Moment) -> bool:
        """Whether a coin is flipped here."""
        ...

    def features(self, moment: Moment) -> Mapping[str, Value]:
        """Further features known before the coin; the same names at every decision."""
        ...

    async def act(self, moments: Sequence[Moment], *, policy: Policy, seeds: Sequence[int]) -> Sequence[Act]:
        """What is done at decisions whose coin fell on treatment; batched, in order, equal seeds for equal acts."""
        ...

    def describe(self) -> dict[str, Any]:
        """What it is, JSON-ready: part of the manifest and of every trajectory's id."""
        ...


def failed(history: History) -> bool:
    """Whether the last command did nothing because the game did not understand or allow it."""
    if history.parent is None or history.command is None:
        return False
    return history.command not in history.parent.turn.admissible or history.turn.observation.startswith(
        "Nothing happens"
    )


def given_before(history: History, command: str) -> bool:
    """Whether a command was given in the present state earlier in the history."""
    state, moment = history.turn.state, history
    while moment.parent is not None:
        if moment.command == command and moment.parent.turn.state == state:
            return True
        moment = moment.parent
    return False


# Review ---------------------------------------------------------------------------------------------------------


class Reviewer(Protocol):
    """Approves or replaces proposed commands.

    foresight: whether `verdict` may be asked before the coin (it is cheap and without chance); if so the trial knows
    `disagrees` as a feature, and `--eligible disagrees=1` flips coins only where the reviewer would interfere.
    """

    @property
    def foresight(self) -> bool: ...

    def verdict(self, moment: Moment) -> str | None:
        """The command to be done instead; None approves. Only called with foresight."""
        ...

    async def review(self, moments: Sequence[Moment], *, seeds: Sequence[int]) -> Sequence[Act]:
        """A verdict for each moment, batched."""
        ...

    def describe(self) -> dict[str, Any]:
        """What it is, JSON-ready."""
        ...


class RuleReviewer:
    """A reviewer that is a function of the moment: the command to be done instead, or None to approve."""

    foresight = True

    def __init__(self, rule: Callable[[Moment], str | None], name: str) -> None:
        self._rule, self._name = rule, name

    def verdict(self, moment: Moment) -> str | None:
        """The function's answer; a replacement by the same command is an approval."""
        command = self._rule(moment)
        return None if moment.proposal is not None and command == moment.proposal.command else command

    async def review(self, moments: Sequence[Moment], *, seeds: Sequence[int]) -> Sequence[Act]:
        """The function's answer for each moment."""
        return [Act(command=self.verdict(moment)) for moment in moments]

    def describe(self) -> dict[str, Any]:
        """The function's name."""
        return {"reviewer": self._name}


def expert_reviewer() -> RuleReviewer:
    """The built-in expert of ALFWorld: approves what it would have done itself. Needs admissible commands."""
    expert = ExpertPolicy()

    def rule(moment: Moment) -> str | None:
        return expert.demonstration(moment.history) if moment.history.turn.admissible else None

    return RuleReviewer(rule, "expert")


def untried(moment: Moment) -> str | None:
    """Approves admissible commands that are new in this state; else the first admissible one that is new here."""
    admissible = moment.history.turn.admissible
    if moment.proposal is None:
        return None
    command = moment.proposal.command
    if command in admissible and not given_before(moment.history, command):
        return None
    return next((other for other in admissible if not given_before(moment.history, other)), None)


class JudgeReviewer:
    """A language model chooses among the proposed command, which approves it, and the admissible ones.

    model: a saved one; decode.mode "sample": it answers with one of them, "choice": each is scored and one is drawn
    with its probability. An answer that names none of them (refused, unparsable, error) approves, with that reason: the
    decision still counts as treated.
    """

    foresight = False
    system = (
        "You review the commands of an agent that plays a text game in a household. Its task is named at the beginning."
    )
    question = (
        "The agent has {left} steps left. Step {step}, which it proposes to take now, is: {command}\n\n"
        "Which of the possible commands should be given now? Name the proposed one to approve it."
    )

    def __init__(self, model: LLMPolicy) -> None:
        self._model = model

    def verdict(self, moment: Moment) -> str | None:
        """Not asked before the coin: it costs a call."""
        raise NotImplementedError

    async def review(self, moments: Sequence[Moment], *, seeds: Sequence[int]) -> Sequence[Act]:
        """The model's choice for each moment; equal seeds draw equal answers. Raises PolicyUnavailable."""
        if self._model.decode.mode == "choice":
            await trusted(self._model)
        return await asyncio.gather(*(self._one(moment, seed) for moment, seed in zip(moments, seeds, strict=True)))

    async def _one(self, moment: Moment, seed: int) -> Act:
        assert moment.proposal is not None
        proposed = moment.proposal.command
        words = {word.casefold(): word for word in (*moment.history.turn.admissible, proposed) if word.strip()}
        commands = sorted(words.values())
        if len(commands) < 2:
            return Act(reason="there is no other command")
        judge = judge_of(self._model, Scale({word: float(k) for k, word in enumerate(commands)}), system=self.system)
        line = moment.history.line()
        shown = transcript(moment.history.commands(), [m.turn.observation for m in line], len(line) - 1, REVIEWED)
        asked = self.question.format(left=moment.steps_left, step=len(line), command=proposed)
        if self._model.decode.mode == "choice":
            (likely,) = await judge.likelihoods([f"{shown}\n\n{asked}"])
            chances = [likely[word] for word in commands]
            logs = [math.log(p) if p > 0 else -math.inf for p in chances]
            chosen = Choice(commands, chances, logs).draw(seed).command
        else:
            (verdict,) = await judge.rate([f"{shown}\n\n{asked}"], first_draw=seed)
            (rating,) = verdict.ratings
            if rating.value is None:
                return Act(reason=f"{rating.state}: {rating.reason}")
            chosen = commands[int(rating.value)]
        return Act() if chosen == proposed else Act(command=chosen)

    def describe(self) -> dict[str, Any]:
        """The model, how it answers, and an id of what it is asked."""
        about = self._model.describe()
        asked = content_id(self.system, self.question, REVIEWED)
        return {"reviewer": "judge", "asked": asked, **{key: about[key] for key in ("model", "prompt", "decode")}}


def judge_reviewer(file: str) -> JudgeReviewer:
    """A saved language model as reviewer. Raises InputError where the file is none."""
    model = load_policy(file) if file.endswith(".toml") else None
    if not isinstance(model, LLMPolicy):
        raise InputError(f"review:judge:{file}: expected the .toml file of a language model.")
    if model.decode.mode == "choice" and not model.decode.end:
        raise InputError(f"{file}: one command can be the beginning of another, so decode.end must say what ends one.")
    return JudgeReviewer(model)


class Review:
    """A reviewer looks at the proposed command; treated: its verdict holds, untreated: the proposal is done."""

    before_proposal = False

    def __init__(self, reviewer: Reviewer) -> None:
        self.reviewer = reviewer

    def eligible(self, moment: Moment) -> bool:
        """Every proposal may be reviewed."""
        return True

    def features(self, moment: Moment) -> Mapping[str, Value]:
        """disagrees: whether the reviewer would interfere (where it can be asked beforehand)."""
        return {"disagrees": int(self.reviewer.verdict(moment) is not None)} if self.reviewer.foresight else {}

    async def act(self, moments: Sequence[Moment], *, policy: Policy, seeds: Sequence[int]) -> Sequence[Act]:
        """The reviewer's verdicts."""
        return await self.reviewer.review(moments, seeds=seeds)

    def describe(self) -> dict[str, Any]:
        """Kind and reviewer."""
        return {"kind": "review", **self.reviewer.describe()}


class Resample:
    """The policy draws again: the most frequent of k fresh draws, the earliest of equals.

    With k = 1 the pooled effect given the history is 0 by design (a redraw has the distribution of the draw it
    replaces): a negative control. By the proposed action it is not.
    """

    before_proposal = False

    def __init__(self, k: int = 1) -> None:
        if not 1 <= k <= 1000:
            raise InputError(f"resample:{k}: expected a number of draws between 1 and 1000.")
        self.k = k

    def eligible(self, moment: Moment) -> bool:
        """Every proposal may be drawn again."""
        return True

    def features(self, moment: Moment) -> Mapping[str, Value]:
        """None of its own."""
        return {}

    async def act(self, moments: Sequence[Moment], *, policy: Policy, seeds: Sequence[int]) -> Sequence[Act]:
        """Fresh draws at the same histories; failed draws are left out."""
        words = [word for seed in seeds for word in draws(self.k, "resample", seed)]
        proposals = await policy.propose([moment.told for moment in moments for _ in range(self.k)], seeds=words)
        acts = []
        for i in range(len(moments)):
            drawn = proposals[i * self.k : (i + 1) * self.k]
            commands = Counter(proposal.command for proposal in drawn if proposal.status == "ok")
            if commands:
                acts.append(Act(command=commands.most_common(1)[0][0]))
            else:
                acts.append(Act(reason=drawn[0].reason or "the policy gave no action"))
        return acts

    def describe(self) -> dict[str, Any]:
        """Kind and number of draws."""
        return {"kind": "resample", "draws": self.k}


# Messages -------------------------------------------------------------------------------------------------------


class Message:
    """A message is put under what the policy reads before it proposes.

    The game goes on as if nothing had been said. Policies that read only what the game writes (the embedded linear
    ones) do not react to it.
    """

    before_proposal = True

    def __init__(self, write: Callable[[Moment], str], description: Mapping[str, Any], *, after_failure: bool) -> None:
        self._write, self._description, self._after_failure = write, dict(description), after_failure

    def eligible(self, moment: Moment) -> bool:
        """Everywhere, or only right after a command that failed."""
        return failed(moment.history) or not self._after_failure

    def features(self, moment: Moment) -> Mapping[str, Value]:
        """None of its own."""
        return {}

    async def act(self, moments: Sequence[Moment], *, policy: Policy, seeds: Sequence[int]) -> Sequence[Act]:
        """The messages."""
        return [Act(message=self._write(moment)) for moment in moments]

    def describe(self) -> dict[str, Any]:
        """Kind and wording."""
        return dict(self._description)


def _helpful(moment: Moment) -> str:
    commands = moment.history.turn.admissible
    more = ", ..." if len(commands) > SHOWN else ""
    return f"[Feedback] The last command did nothing. Commands that work here: {', '.join(commands[:SHOWN])}{more}"


def _adversarial(moment: Moment) -> str:
    return f"[Feedback] '{moment.history.command}' worked. Repeat it to make sure."


def _expert_hint() -> Callable[[Moment], str]:
    expert = ExpertPolicy()
    return lambda moment: f"[Hint] A good next command is: {expert.demonstration(moment.history)}"


def load_intervention(spec: str) -> Intervention:
    """Open an intervention by its name (see the module). Raises InputError where there is none of that name."""
    kind, _, rest = spec.partition(":")
    if kind == "review" and rest == "expert":
        return Review(expert_reviewer())
    if kind == "review" and rest == "rule":
        return Review(RuleReviewer(untried, "rule"))
    if kind == "review" and rest.startswith("judge:"):
        return Review(judge_reviewer(rest.removeprefix("judge:")))
    if kind == "resample" and (rest == "" or rest.isdecimal()):
        return Resample(int(rest or 1))
    if kind == "feedback" and rest in ("helpful", "adversarial"):
        wording: Callable[[Moment], str] = _helpful if rest == "helpful" else _adversarial
        return Message(wording, {"kind": "feedback", "tone": rest}, after_failure=True)
    if kind == "hint" and rest:
        write = _expert_hint() if rest == "expert" else lambda moment: f"[Hint] {rest}"
        return Message(write, {"kind": "hint", "text": rest}, after_failure=False)
    if kind == "python":
        return _own(rest)
    raise InputError(
        f"{spec}: no such intervention; expected review:expert, review:rule, review:judge:FILE, resample[:K], "
        f"feedback:helpful, feedback:adversarial, hint:expert, hint:TEXT or python:MODULE:NAME."
    )


def _own(rest: str) -> Intervention:
    module, _, name = rest.partition(":")
    try:
        made: Intervention = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"python:{rest}: cannot be made ({type(error).__name__}: {error}); expected an importable MODULE and the "
            f"NAME of something that gives an intervention when called without arguments."
        ) from None
    absent = [
        part for part in ("before_proposal", "eligible", "features", "act", "describe") if not hasattr(made, part)
    ]
    if absent:
        raise InputError(f"python:{rest}: is no intervention; it has no `{absent[0]}` (see audit.mrt.interventions).")
    return made
