"""Asking for judge signals: their questions put to a saved language model, each once.

Knows: which model answers which signal (the judge that was named; the policy itself where a rubric asks it and it is
a language model), and the two read-outs: with decode.mode = "sample" in the model's file it writes an answer that is
read, with "choice" the words of the scale are scored and the expected value is taken. Hides: batches, memos, and the
journal in which the answers of a model in this process are kept, so that an interrupted scoring goes on.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from audit.llm.hf import LocalModel
from audit.llm.journal import Journal, Usage
from audit.llm.judge import Scale, Verdict, judge_of, trusted
from audit.llm.scoring import ServerBackend
from audit.policies import Policy, load_policy
from audit.policies.openai import LLMPolicy
from audit.records import content_id
from credit_signals import CreditSignal, Scored, SignalPoint, needs
from credit_signals.judge import Answer, Judged, Question
from envs.alfworld.games import cache_folder
from envs.core import InputError

NOT_STUDIED = "not among the points that the plan chose, so no question was asked"
TOGETHER = 32  # questions between two looks at the progress; what was answered by then is kept
Progress = Callable[[str, int, int], None]


def _silent(stage: str, done: int, total: int) -> None:
    return None


class Interview:
    """One model and what it has answered. repeats: answers to each question (where it writes them).

    answers: where those of a model in this process are kept; a server's are in its own journal. asked: who the model
    is, for the record.
    """

    def __init__(
        self,
        model: LLMPolicy,
        *,
        repeats: int = 1,
        answers: Journal | None = None,
        asked: str = "a judge",
        progress: Progress = _silent,
    ) -> None:
        if repeats < 1:
            raise InputError(f"repeats is {repeats}; expected 1 or more answers to a question.")
        self.model, self.asked, self.progress = model, asked, progress
        self.scored = model.decode.mode == "choice"
        self.repeats = 1 if self.scored else repeats
        self._known: dict[Question, Answer] = {}
        self._answers = answers

    @classmethod
    def open(
        cls, judge: str | Policy, *, repeats: int = 1, asked: str = "a judge", progress: Progress = _silent
    ) -> Interview:
        """Ask the model of a saved file (or an open one). Raises InputError where it is no language model."""
        if isinstance(judge, str) and not judge.endswith(".toml"):
            raise InputError(f"{judge}: is no judge; expected the .toml file of a language model.")
        model = load_policy(judge) if isinstance(judge, str) else judge
        if not isinstance(model, LLMPolicy):
            raise InputError(f"{model.describe().get('kind')}: is no language model, so it cannot be a judge.")
        answers = None
        if isinstance(model.backend, LocalModel):
            answers = Journal(cache_folder() / "llm" / f"answers-{content_id(model.describe())}.sqlite")
        return cls(model, repeats=repeats, answers=answers, asked=asked, progress=progress)

    def describe(self) -> dict[str, Any]:
        """What is asked and how its answers are read, JSON-ready."""
        about: dict[str, Any] = {
            "asked": self.asked,
            "model": self.model.backend.describe(),
            "style": self.model.prompt.style,
            "temperature": self.model.decode.temperature,
        }
        if self.scored:
            kept = None if self._answers is None else self._answers.fact("self_test")
            tested = kept if self.model.tested is None else self.model.tested.to_json()
            return {**about, "readout": "expected value under the likelihood of the scale's words", "self_test": tested}
        decode = self.model.decode
        return {
            **about,
            "readout": "answers in words",
            "repeats": self.repeats,
            "top_p": decode.top_p,
            "max_tokens": decode.max_tokens,
        }

    def __call__(self, questions: Sequence[Question]) -> list[Answer]:
        """An answer to each question; what was asked before is not asked again.

        Raises PolicyUnavailable where the model cannot be asked.
        """
        owed = [question for question in dict.fromkeys(questions) if question not in self._known]
        if owed:
            asyncio.run(self._ask(owed))
        return [self._known[question] for question in questions]

    async def _ask(self, questions: Sequence[Question]) -> None:
        keys = {question: self._key(question) for question in questions}
        kept = {} if self._answers is None else self._answers.answers(list(keys.values()))
        for question in questions:
            if keys[question] in kept:
                self._known[question] = _from_json(kept[keys[question]])
        owed = [question for question in questions if question not in self._known]
        if owed and self.scored:
            tested = await trusted(self.model)
            if self._answers is not None:
                self._answers.note("self_test", tested.to_json())
        backend = self.model.backend
        together = max(TOGETHER, 8 * backend.client.limits.concurrency if isinstance(backend, ServerBackend) else 0)
        for first in range(0, len(owed), together):
            self.progress("questions", first, len(owed))
            some = owed[first : first + together]
            groups: dict[tuple[str, tuple[tuple[str, float], ...]], list[Question]] = {}
            for question in some:
                groups.setdefault((question.system, question.words), []).append(question)
            await asyncio.gather(*(self._group(*group, asked) for group, asked in groups.items()))
            if self._answers is not None:
                found = {keys[question]: _to_json(self._known[question]) for question in some}
                self._answers.record("judge", Usage(len(some)), found)
        if owed:
            self.progress("questions", len(owed), len(owed))

    async def _group(self, system: str, words: Sequence[tuple[str, float]], questions: Sequence[Question]) -> None:
        judge = judge_of(self.model, Scale(dict(words)), system=system)
        texts = [question.text for question in questions]
        if self.scored:
            for question, likely in zip(questions, await judge.likelihoods(texts), strict=True):
                expected = math.fsum(likely[word] * value for word, value in words)
                self._known[question] = Answer((expected,), {"scored": 1})
            return
        for question, verdict in zip(questions, await judge.rate(texts, repeats=self.repeats), strict=True):
            self._known[question] = _answer(verdict)

    def _key(self, question: Question) -> str:
        return content_id("answer", question.system, question.text, question.words, self.repeats)


def _answer(verdict: Verdict) -> Answer:
    values = tuple(rating.value for rating in verdict.ratings if rating.value is not None)
    missing = Counter((rating.state, rating.reason) for rating in verdict.ratings if rating.value is None)
    reason = None
    if missing:
        state, why = missing.most_common(1)[0][0]
        reason = f"{state}: {why}"
    return Answer(values, dict(verdict.states), reason)


def _to_json(answer: Answer) -> dict[str, Any]:
    return {"values": list(answer.values), "states": dict(answer.states), "reason": answer.reason}


def _from_json(data: Mapping[str, Any]) -> Answer:
    return Answer(tuple(data["values"]), dict(data["states"]), data["reason"])


# Who is asked -----------------------------------------------------------------------------------------------------


def asks(signal: CreditSignal) -> bool:
    """Whether a signal asks a language model."""
    return "judge" in needs(signal)


def seated(
    signals: Sequence[CreditSignal],
    judge: str | Policy | None,
    policy: Callable[[], Policy],
    *,
    repeats: int = 1,
    progress: Progress = _silent,
) -> list[CreditSignal]:
    """Signals with somebody to answer them. policy: opens the run's policy, for rubrics that ask it.

    A rubric that asks the policy is put to the judge where the policy is no language model, and is missing with that
    reason where no judge was named either. Raises InputError where another one needs a judge and none was named.
    """
    named = None if judge is None else Interview.open(judge, repeats=repeats, progress=progress)
    own: Interview | None = None
    found: list[CreditSignal] = []
    for signal in signals:
        if not asks(signal):
            found.append(signal)
            continue
        interview = named
        if getattr(signal, "asks", "judge") == "policy":
            if own is None and isinstance(player := policy(), LLMPolicy):
                own = Interview.open(player, repeats=repeats, asked="the policy itself", progress=progress)
            interview = own or named
        elif named is None:
            raise InputError(f"{signal.name} asks a language model: name one with --judge MODEL.toml.")
        found.append(signal if interview is None else cast(CreditSignal, cast(Judged, signal).bound(interview)))
    return found


def of_study(points: Sequence[SignalPoint], studied: frozenset[str] | None) -> list[SignalPoint]:
    """The points that a language model is asked about, since each question costs: those that the plan chose."""
    return [point for point in points if studied is None or point.point in studied]


def put(signals: Sequence[CreditSignal], points: Sequence[SignalPoint]) -> None:
    """Ask all that the signals will ask about the points. Raises PolicyUnavailable; what was answered is kept."""
    for signal in signals:
        if asks(signal) and (ask := cast(Judged, signal).ask) is not None:
            ask(cast(Judged, signal).questions(points))


def spread(answer: Scored, some: Sequence[SignalPoint], points: Sequence[SignalPoint]) -> Scored:
    """The answer about some points as one about all: missing, with that reason, at the others."""
    place = {point.point: i for i, point in enumerate(some)}
    at = [place.get(point.point) for point in points]
    return Scored(
        answer.name,
        tuple(math.nan if i is None else answer.values[i] for i in at),
        tuple(NOT_STUDIED if i is None else answer.reasons[i] for i in at),
        None if answer.flags is None else tuple(None if i is None else answer.flags[i] for i in at),
    )


def answered(signal: CreditSignal, points: Sequence[SignalPoint]) -> dict[str, Any]:
    """What is stored beside a judge's column: the rubric, the model, how its answers were read and what they were."""
    judged = cast(Judged, signal)
    if not isinstance(judged.ask, Interview):
        return {}
    return {"rubric": judged.rubric.describe(), **judged.ask.describe(), **judged.report(points)}
