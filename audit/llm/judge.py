"""A model as judge: a question, a rating on a declared scale, and what became of the answer.

Knows: structured output where the server has it, the tolerant reading of an answer otherwise, repeats, the swapped
order where two things are compared, and the other read-out: the probability of each word of the scale as the answer,
which needs no reading. Hides: prompts on the wire and their cache. An answer that cannot be read is missing with its
state: never 0, never the middle, never the first number in it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, Protocol

from audit.llm.answers import Sample
from audit.llm.client import Prompt, Sampling
from audit.llm.journal import Purpose
from audit.llm.scoring import Backend, Ids, SelfTest, ServerBackend, check_constant, self_test
from envs.core import InputError

if TYPE_CHECKING:
    from audit.policies.openai import LLMPolicy

State = Literal["parsed", "refused", "unparsable", "error"]
Structure = Literal["json_schema", "choice", "none"]

_REFUSALS = re.compile(
    r"\b(?:i(?:'m| am) (?:sorry|unable|not able)|i (?:cannot|can't|won't|will not)|as an ai\b"
    r"|cannot (?:help|assist|comply))",
    re.IGNORECASE,
)
_STATED = re.compile(r"\W*(?:final )?(?:rating|answer|score|verdict)\W*?[:=]\s*(.+?)\W*", re.IGNORECASE)
_THINK = re.compile(r"^.*</think(?:ing)?>", re.DOTALL | re.IGNORECASE)


class Asks(Protocol):
    """Anything that samples answers: a `ServerBackend`, a `LocalModel`."""

    async def sample(
        self, prompts: Sequence[Prompt], draws: Sequence[int], settings: Sampling, *, purpose: Purpose
    ) -> list[Sample]:
        """One answer for each prompt and draw."""
        ...


@dataclass(frozen=True, slots=True)
class Scale:
    """The ratings a judge may give, as words with values, e.g. {"helped": 1, "neither": 0, "harmed": -1}."""

    values: Mapping[str, float]

    def __post_init__(self) -> None:
        if len(self.values) < 2 or len({word.casefold() for word in self.values}) < len(self.values):
            raise InputError("A scale needs at least two different words.")

    def instruction(self, *, bare: bool = False) -> str:
        """The sentence that asks for an answer that can be read. bare: for the word alone."""
        if bare:
            return f"Answer with one of these and nothing else: {', '.join(self.values)}."
        words = ", ".join(json.dumps(word) for word in self.values)
        return f'Answer with one JSON object and nothing else: {{"rating": one of {words}}}.'


THREE_POINTS = Scale({"+1": 1.0, "0": 0.0, "-1": -1.0})
FIVE_POINTS = Scale({"1": 1.0, "2": 2.0, "3": 3.0, "4": 4.0, "5": 5.0})


@dataclass(frozen=True, slots=True)
class Rating:
    """One answer of a judge. value: None unless state is `parsed`. text: what it wrote. reason: why it is missing."""

    state: State
    value: float | None
    text: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """All repeats of one question. value: mean of those that were parsed, None if none was."""

    ratings: tuple[Rating, ...]

    @property
    def value(self) -> float | None:
        """Mean of the parsed ratings, None where there is none."""
        values = [rating.value for rating in self.ratings if rating.value is not None]
        return fmean(values) if values else None

    @property
    def states(self) -> Counter[str]:
        """How many answers came to which state."""
        return Counter(rating.state for rating in self.ratings)


@dataclass(frozen=True, slots=True)
class Preference:
    """A comparison in both orders. value: share of the parsed answers that prefer the first, None if none was
    parsed. bias: share that prefers whatever is shown first minus 1/2, None where an order has no parsed answer."""

    value: float | None
    bias: float | None
    forward: Verdict
    swapped: Verdict


class Judge:
    """Asks a model for ratings. structure: how the server forces an answer (json_schema, vLLM's choice, or none).

    style: chat, or text for a model without a chat template. end: what ends a word that is scored. `judge_of` takes
    all of it from a saved model's file.
    """

    def __init__(
        self,
        backend: Asks,
        scale: Scale,
        *,
        structure: Structure = "none",
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_tokens: int = 256,
        system: str = "",
        style: str = "chat",
        end: str = "",
        seeded: bool = True,
    ) -> None:
        self.backend, self.scale, self.structure, self.system = backend, scale, structure, system
        self.style, self.end = style, end
        self.settings = Sampling(
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            seeded=seeded,
            extra=_forced(scale, structure),
        )

    def describe(self) -> dict[str, Any]:
        """What the judge is asked and how, JSON-ready."""
        return {
            "scale": dict(self.scale.values),
            "structure": self.structure,
            "temperature": self.settings.temperature,
            "top_p": self.settings.top_p,
            "max_tokens": self.settings.max_tokens,
            "system": self.system,
            "style": self.style,
            "end": self.end,
        }

    async def rate(self, questions: Sequence[str], *, repeats: int = 1, first_draw: int = 0) -> list[Verdict]:
        """Ratings of each question. repeats: independent answers (at temperature 0 they show the server's noise).

        Raises PolicyUnavailable where the server cannot be asked.
        """
        bare = self.structure == "choice"
        prompts = [self._prompt(question, bare) for question in questions for _ in range(repeats)]
        draws = [first_draw + draw for _ in questions for draw in range(repeats)]
        samples = await self.backend.sample(prompts, draws, self.settings, purpose="judge")
        ratings = [read_rating(sample, self.scale) for sample in samples]
        return [Verdict(tuple(ratings[i * repeats : (i + 1) * repeats])) for i in range(len(questions))]

    async def likelihoods(self, questions: Sequence[str]) -> list[dict[str, float]]:
        """Probability of each word of the scale as the beginning of the answer, among all of them: the softmax of the
        words' log probabilities (summed over tokens) at the judge's temperature, 1 where that is 0.

        Raises ScoresUnavailable where the model cannot score or its scores are constant, InputError where one word is
        the beginning of another in tokens.
        """
        backend = self.backend
        if not hasattr(backend, "score"):
            raise InputError("This model cannot score given words; let it answer in words (decode.mode = 'sample').")
        model: Backend = backend  # type: ignore[assignment]
        words = await model.encode([word + self.end for word in self.scale.values])
        for ids in words:
            if sum(other[: len(ids)] == ids for other in words) > 1:
                raise InputError(
                    f"Of {', '.join(self.scale.values)} one is the beginning of another; set decode.end, the text that "
                    f"ends an answer that is scored, in the model's file."
                )
        asked = [self._prompt(question, bare=True) for question in questions]
        encode: Any = model.encode if self.style == "text" else model.encode_chat
        prompts: list[Ids] = await encode(asked)
        found = await model.score(prompts, [words for _ in prompts], purpose="judge")
        temperature = self.settings.temperature or 1.0
        likely = []
        for scores in found:
            check_constant(scores, "The judge")
            sums = [math.fsum(score) / temperature for score in scores]
            chances = [math.exp(value - max(sums)) for value in sums]
            likely.append({word: p / math.fsum(chances) for word, p in zip(self.scale.values, chances, strict=True)})
        return likely

    async def compare(self, question: str, pairs: Sequence[tuple[str, str]], *, repeats: int = 1) -> list[Preference]:
        """Which of two is better, each pair in both orders.

        question: with {first} and {second}; the judge's scale must be A_OR_B. Raises InputError otherwise.
        """
        if set(self.scale.values) != set(A_OR_B.values) or "{first}" not in question or "{second}" not in question:
            raise InputError("compare needs the scale A_OR_B and a question with {first} and {second}.")

        def fill(first: str, second: str) -> str:
            # Not str.format: the texts may hold braces themselves.
            head, _, rest = question.partition("{first}")
            middle, _, tail = rest.partition("{second}")
            return head + first + middle + second + tail

        asked = [text for a, b in pairs for text in (fill(a, b), fill(b, a))]
        verdicts = await self.rate(asked, repeats=repeats)
        return [_preference(verdicts[2 * i], verdicts[2 * i + 1]) for i in range(len(pairs))]

    def _prompt(self, question: str, bare: bool = False) -> Prompt:
        text = f"{question}\n\n{self.scale.instruction(bare=bare)}"
        if self.style == "text":
            return f"{self.system}\n\n{text}\nAnswer:\n" if self.system else f"{text}\nAnswer:\n"
        asked = ("user", text)
        return (("system", self.system), asked) if self.system else (asked,)


A_OR_B = Scale({"A": 1.0, "B": 0.0})
# What each kind of server can force; a model in this process and a plain chat API are only asked.
_STRUCTURES: Mapping[str, Structure] = {"vllm": "choice", "sglang": "json_schema", "llama-server": "json_schema"}


def judge_of(model: LLMPolicy, scale: Scale, *, system: str = "") -> Judge:
    """A saved model as judge: its [decode] says how it answers, its [prompt] the style; its template is not used."""
    kind = model.backend.kind if isinstance(model.backend, ServerBackend) else ""
    return Judge(
        model.backend,
        scale,
        structure=_STRUCTURES.get(kind, "none"),
        temperature=model.decode.temperature,
        top_p=model.decode.top_p,
        max_tokens=model.decode.max_tokens,
        system=system,
        style=model.prompt.style,
        end=model.decode.end,
        seeded=model.decode.seeded,
    )


async def trusted(model: LLMPolicy) -> SelfTest:
    """The self-test of a model's scores, made once a session before `likelihoods`. Raises ScoresUnavailable."""
    if model.tested is None:
        (prompt,) = await model.backend.encode(["You are in the middle of a room. What do you do next?\n"])
        actions = await model.backend.encode(["look around", "go to desk 1"])
        model.tested = await self_test(model.backend, prompt, actions, model.name)
    return model.tested


def _preference(forward: Verdict, swapped: Verdict) -> Preference:
    there, back = forward.value, swapped.value
    votes = [r.value for r in forward.ratings if r.value is not None]
    votes += [1 - r.value for r in swapped.ratings if r.value is not None]
    bias = None if there is None or back is None else (there + back) / 2 - 0.5
    return Preference(fmean(votes) if votes else None, bias, forward, swapped)


def _forced(scale: Scale, structure: Structure) -> dict[str, Any]:
    words = list(scale.values)
    if structure == "choice":
        return {"structured_outputs": {"choice": words}}
    if structure == "json_schema":
        schema = {
            "type": "object",
            "properties": {"rating": {"type": "string", "enum": words}},
            "required": ["rating"],
            "additionalProperties": False,
        }
        return {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "rating", "strict": True, "schema": schema},
            }
        }
    return {}


def read_rating(sample: Sample, scale: Scale) -> Rating:
    """The rating in an answer: a JSON object with `rating`, a line `rating: ...`, or the rating alone.

    Two different ratings in one answer, a number off the scale or a rating within a sentence are unparsable.
    """
    if sample.error is not None:
        return Rating("error", None, "", sample.error)
    text = _THINK.sub("", sample.text).strip()
    words = {word.casefold(): value for word, value in scale.values.items()}

    def value(candidate: Any) -> float | None:
        word = str(candidate).strip().strip("\"'`*.").strip().casefold()
        if word in words:
            return words[word]
        if not isinstance(candidate, bool) and re.fullmatch(r"[+-]?\d+(\.0+)?", word):  # 1 for "+1", 3.0 for "3"
            same = {v for w, v in words.items() if re.fullmatch(r"[+-]?\d+", w) and float(w) == float(word)}
            return same.pop() if len(same) == 1 else None
        return None

    whole = value(text) if text else None
    if whole is not None:
        return Rating("parsed", whole, sample.text)
    stated = [found.get("rating") for found in _objects(text) if "rating" in found]
    if not stated:
        lines = [_STATED.fullmatch(line.strip()) for line in text.splitlines()]
        stated = [match[1] for match in lines if match]
    read = {value(candidate) for candidate in stated}
    if len(read) == 1 and None not in read:
        return Rating("parsed", read.pop(), sample.text)
    if not stated and _REFUSALS.search(text):
        return Rating("refused", None, sample.text, "the judge refused")
    why = "no rating in the answer" if not stated else "several ratings" if len(read) > 1 else "a rating off the scale"
    if sample.finish == "length":
        why += ", which was cut off by max_tokens"
    return Rating("unparsable", None, sample.text, why)


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, outermost ones."""
    found: list[dict[str, Any]] = []
    decoder, place = json.JSONDecoder(), 0
    while (place := text.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
