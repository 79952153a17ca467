"""Judge signals: a language model is asked about each step, by the words of a rubric.

Knows: rubrics as files, what of a trajectory a question shows, both orders, and how answers become a value or a
reason. Hides: windows, the choice of an alternative. It asks nobody itself: whoever scores gives `bound` something
that answers (`audit.scoring.judging`), so a signal can be tried without a model.

A rubric is a TOML file (those that ship: rubrics/, one's own: `audit score RUN my.toml --judge MODEL.toml`):

    format = "credit-audit rubric 1"
    view = "prefix"            # or "hindsight": the rest of the trajectory and its outcome are shown as well
    importance = "absolute"    # how a value reads as importance, see `credit_signals.CreditSignal`
    turns = 40                 # the newest turns shown (hindsight: those around the step); 0: all
    orders = 2                 # 1: the scale is listed as it stands; 2: also the other way round, and averaged
    asks = "judge"             # or "policy": the policy itself, where it is a language model
    system = "..."
    question = "... {action} ... {scale}"     # also {step} and {steps_left}
    [[scale]]
    word = "+1"
    value = 1.0
    meaning = "it helped"

A question with {first} and {second} in place of {action} and {scale} compares the step taken with another command,
always in both orders; `against` says which: "random" (an admissible one, drawn by the point's id) or "likeliest" (the
policy's most probable other one). Its value is +1 where the step taken is preferred in both orders, -1 where the
other is, 0 where the judge prefers a place.

In both cases a value needs an answer in each order: the answers of one order alone would carry its bias. Prompts have
the transcript first and the question last, so that those of one trajectory share their beginning.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from audit.records import content_id, draws
from credit_signals import Importance, Missing, SignalError, SignalPoint, Value, View

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT = "credit-audit rubric 1"
LARGEST = 100_000  # characters of a rubric
Against = Literal["random", "likeliest"]
_PLACES = re.compile(r"\{(\w+)\}")
_RATING, _PAIR = {"action", "scale"}, {"first", "second"}
_A_OR_B = (("A", 1.0), ("B", 0.0))


def _text(value: Any) -> bool:
    return isinstance(value, str)


_ALLOWED: Mapping[str, Callable[[Any], bool]] = {
    "question": _text,
    "system": _text,
    "view": lambda value: value in get_args(View),
    "importance": lambda value: value in get_args(Importance),
    "turns": lambda value: type(value) is int and 0 <= value <= 1_000_000,
    "orders": lambda value: type(value) is int and value in (1, 2),
    "asks": lambda value: value in ("judge", "policy"),
    "against": lambda value: value in get_args(Against),
}


@dataclass(frozen=True, slots=True)
class Question:
    """What a model is asked. words: the answers that count, in the order they are named, and what each is worth."""

    system: str
    text: str
    words: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. values: of the answers that could be read. states: how many answers came to which state
    (parsed, refused, unparsable, error; scored where words were scored and nothing had to be read). reason: why there
    is no value, or not all."""

    values: tuple[float, ...]
    states: Mapping[str, int]
    reason: str | None = None

    @property
    def value(self) -> float | None:
        """Mean of what could be read, None where nothing could."""
        return fmean(self.values) if self.values else None


Asks = Callable[[Sequence[Question]], Sequence[Answer]]


@dataclass(frozen=True, slots=True)
class Word:
    """One step of a scale."""

    word: str
    value: float
    meaning: str


@dataclass(frozen=True, slots=True)
class Rubric:
    """What is asked and how it is read; see the module. digest: of the file's text."""

    question: str
    scale: tuple[Word, ...]
    view: View = "prefix"
    importance: Importance = "absolute"
    turns: int = 40
    orders: int = 2
    asks: Literal["judge", "policy"] = "judge"
    against: Against = "random"
    system: str = ""
    digest: str = ""

    @property
    def compares(self) -> bool:
        """Whether two commands are compared."""
        return not self.scale

    def describe(self) -> dict[str, Any]:
        """Everything that changes the questions, JSON-ready."""
        return {
            "digest": self.digest,
            "view": self.view,
            "turns": self.turns,
            "orders": 2 if self.compares else self.orders,
            **({"against": self.against} if self.compares else {"scale": {w.word: w.value for w in self.scale}}),
        }


@dataclass(frozen=True, slots=True)
class Judged:
    """A rubric as a signal. ask: who answers; None until it is bound.

    flags: whether the two orders came to different words (or, compared, to different commands).
    """

    name: str
    rubric: Rubric
    ask: Asks | None = None

    @property
    def view(self) -> View:
        """What the judge is shown."""
        return self.rubric.view

    @property
    def importance(self) -> Importance:
        """As the rubric says."""
        return self.rubric.importance

    @property
    def needs(self) -> tuple[str, ...]:
        """A judge, and what tells of another command where two are compared."""
        other = ("world",) if self.rubric.against == "random" else ("policy",)
        return ("judge", *(other if self.rubric.compares else ()))

    @property
    def asks(self) -> str:
        """Who is asked: a judge, or the policy itself."""
        return self.rubric.asks

    def bound(self, ask: Asks) -> Judged:
        """The same signal, answered by `ask`."""
        return replace(self, ask=ask)

    def questions(self, points: Sequence[SignalPoint]) -> list[Question]:
        """Everything that `score` will ask about points."""
        return [question for point in points for question in self._asked(point)]

    def score(self, points: Sequence[SignalPoint]) -> list[Value]:
        """One number a point, or the state of the answer as the reason why not."""
        values: list[Value] = []
        for orders in self._orders(points):
            if isinstance(orders, Missing):
                values.append(orders)
                continue
            unread = next((answer for answer in orders if answer.value is None), None)
            if unread is None:
                values.append(self._value([answer.value for answer in orders if answer.value is not None]))
            elif all(answer.value is None for answer in orders):
                values.append(Missing(unread.reason or "no answer"))
            else:
                values.append(Missing(f"one order of two has no rating ({unread.reason or 'no answer'})"))
        return values

    def flags(self, points: Sequence[SignalPoint]) -> list[bool | None]:
        """Whether the orders disagree; None where there is one order or one has no answer."""
        return [
            None if (pair := self._pair(orders)) is None else self._differ(*pair) for orders in self._orders(points)
        ]

    def report(self, points: Sequence[SignalPoint]) -> dict[str, Any]:
        """What the answers were like: how many came to which state, and what the order did.

        order_effect: mean rating with the scale as it stands minus with the scale turned round. position_bias: how
        much oftener than half of the time the command shown first is preferred. orders_disagree: share of points.
        """
        states: Counter[str] = Counter()
        pairs = []
        for orders in self._orders(points):
            if isinstance(orders, Missing):
                continue
            for answer in orders:
                states.update(answer.states)
            pair = self._pair(orders)
            if pair is not None:
                pairs.append(pair)
        about: dict[str, Any] = {"answers": sum(states.values()), "states": dict(sorted(states.items()))}
        if pairs:
            name = "position_bias" if self.rubric.compares else "order_effect"
            bias = [(a + b - 1) / 2 if self.rubric.compares else a - b for a, b in pairs]
            about[name] = round(fmean(bias), 6)
            about["orders_disagree"] = round(fmean(self._differ(*pair) for pair in pairs), 6)
        return about

    # Questions

    def _orders(self, points: Sequence[SignalPoint]) -> list[list[Answer] | Missing]:
        """The answers about each point, one an order, or why nothing was asked."""
        if self.ask is None:
            own = "the policy is no language model, and " if self.asks == "policy" else ""
            return [Missing(f"{own}no judge was named") for _ in points]
        asked = [self._asked(point) for point in points]
        answers = iter(self.ask([question for some in asked for question in some]))
        return [
            [next(answers) for _ in some] if some else self._unasked(point)
            for point, some in zip(points, asked, strict=True)
        ]

    def _asked(self, point: SignalPoint) -> list[Question]:
        rubric, whole = self.rubric, point.hindsight if self.rubric.view == "hindsight" else None
        if rubric.view == "hindsight" and whole is None:
            return []
        if whole is None:
            shown = transcript(point.commands, point.observations, point.step, rubric.turns)
        else:
            shown = transcript(whole.commands, whole.observations, point.step, rubric.turns, won=whole.won)
        places = {"step": str(point.step + 1), "steps_left": str(point.steps_left), "action": point.action}

        def question(words: Sequence[tuple[str, float]], **more: str) -> Question:
            known = {**places, **more}
            return Question(
                rubric.system,
                f"{shown}\n\n{_PLACES.sub(lambda match: known.get(match[1], match[0]), rubric.question)}",
                tuple(words),
            )

        if rubric.compares:
            other = self._other(point)
            if other is None:
                return []
            pairs = ((point.action, other), (other, point.action))
            return [question(_A_OR_B, first=first, second=second) for first, second in pairs]
        listings = (rubric.scale, rubric.scale[::-1])[: rubric.orders]
        return [
            question(
                [(word.word, word.value) for word in scale],
                scale="\n".join(f"{word.word}: {word.meaning}" for word in scale),
            )
            for scale in listings
        ]

    def _other(self, point: SignalPoint) -> str | None:
        """The command that the step taken is compared with, None where there is none."""
        if self.rubric.against == "random":
            others = sorted({command for command in point.admissible or () if command != point.action})
            return others[draws(1, "judged alternative", point.point)[0] % len(others)] if others else None
        chances = [(p, command) for command, p in (point.probabilities or {}).items() if command != point.action]
        return max(chances)[1] if chances else None

    def _unasked(self, point: SignalPoint) -> Missing:
        if self.rubric.view == "hindsight" and point.hindsight is None:
            return Missing("the rest of the trajectory is not known")
        name = "admissible" if self.rubric.against == "random" else "probabilities"
        return point.missing(name) if getattr(point, name) is None else Missing("there is no other command")

    # Answers

    def _value(self, orders: Sequence[float]) -> float:
        if self.rubric.compares:
            first, second = orders  # shares that prefer what is shown first: the step taken, then the other
            return first - second
        return fmean(orders)

    def _pair(self, orders: list[Answer] | Missing) -> tuple[float, float] | None:
        if isinstance(orders, Missing) or len(orders) < 2:
            return None
        first, second = orders[0].value, orders[1].value
        return None if first is None or second is None else (first, second)

    def _differ(self, first: float, second: float) -> bool:
        if self.rubric.compares:
            return (first > 0.5) == (second > 0.5)
        values = [word.value for word in self.rubric.scale]
        near, far = (min(values, key=lambda value: abs(value - rating)) for rating in (first, second))
        return near != far


# What is shown --------------------------------------------------------------------------------------------------


def transcript(
    commands: Sequence[str],
    observations: Sequence[str | None],
    step: int,
    turns: int = 0,
    *,
    won: bool | None = None,
) -> str:
    """A trajectory as text: up to the step, or, with an outcome (won), the whole of it and how it ended.

    observations: the first one and one after each command. turns: at most so many of them, the newest or, with an
    outcome, those around the step; 0: all. The window moves in jumps of half its size, so that neighbouring questions
    begin alike and a prefix cache helps.
    """
    lines = _seen(observations[0] if observations else None).splitlines()
    shown = ["\n".join(lines[1:] if lines and lines[0].startswith("-= Welcome") else lines).strip()]
    start, end = _window(len(commands), step, turns, around=won is not None)
    if start:
        shown.append(_left_out(1, start))
    for k in range(start, end):
        seen = observations[k + 1] if k + 1 < len(observations) else None
        shown.append(f"Step {k + 1}: {commands[k]}\n{_seen(seen)}")
    if end < len(commands):
        shown.append(_left_out(end + 1, len(commands)))
    if won is not None:
        reached = "The agent reached its goal" if won else "The agent did not reach its goal"
        shown.append(f"The trajectory ends here, after {len(commands)} steps. {reached}.")
    return "\n\n".join(shown)


def _left_out(first: int, last: int) -> str:
    return f"(step {first} is left out)" if first == last else f"(steps {first} to {last} are left out)"


def _seen(observation: str | None) -> str:
    return "(what was seen was not recorded)" if observation is None else observation.strip()


def _window(n: int, step: int, turns: int, *, around: bool) -> tuple[int, int]:
    """The first turn shown and the one after the last."""
    if not turns or n <= turns:
        return 0, n
    jump = max(1, turns // 2)
    start = max(0, (step - turns // 2) // jump * jump) if around else -(-(n - turns) // jump) * jump
    start = min(start, n - turns) if around else min(start, n)
    return start, min(n, start + turns)


# Files ----------------------------------------------------------------------------------------------------------


def load_rubric(path: str | Path) -> Judged:
    """A rubric of one's own as the signal `judge.STEM`. Raises SignalError naming what is wrong with the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SignalError(f"{path}: cannot be read as a rubric ({error}).") from None
    if ":" in path.stem:
        raise SignalError(f"{path}: a rubric gives its column a name, so its file name must not hold a colon.")
    return Judged(f"judge.{path.stem}", read_rubric(text, str(path)))


def read_rubric(text: str, where: str) -> Rubric:
    """A rubric from the text of its file. Raises SignalError naming what is wrong."""
    if len(text) > LARGEST:
        raise SignalError(f"{where}: {len(text)} characters; a rubric has at most {LARGEST}.")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SignalError(f"{where}: does not parse as TOML: {error}.") from None
    if data.pop("format", None) != FORMAT:
        raise SignalError(f"{where}: is no rubric; expected format = {FORMAT!r} (see credit_signals.judge).")
    scale = tuple(_word(item, where) for item in _list(data.pop("scale", []), where))
    for key, value in data.items():
        allowed = _ALLOWED.get(key)
        if allowed is None:
            raise SignalError(f"{where}: unknown key {key!r}; known: {', '.join(_ALLOWED)}, scale.")
        if not allowed(value):
            raise SignalError(f"{where}: {key} is {value!r}, which it cannot be (see credit_signals.judge).")
    _check(data.get("question", ""), scale, where)
    return Rubric(**data, scale=scale, digest=content_id(text))


def _list(items: Any, where: str) -> list[Any]:
    if not isinstance(items, list):
        raise SignalError(f"{where}: scale must be tables [[scale]] with word, value and meaning.")
    return items


def _word(item: Any, where: str) -> Word:
    if isinstance(item, dict) and set(item) == {"word", "value", "meaning"}:
        word, value, meaning = item["word"], item["value"], item["meaning"]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12
        if isinstance(word, str) and word.strip() and number and isinstance(meaning, str):
            return Word(word, float(value), meaning)
    raise SignalError(f"{where}: {item!r} is no step of a scale; expected word, value (a number) and meaning.")


def _check(question: str, scale: Sequence[Word], where: str) -> None:
    places = set(_PLACES.findall(question))
    unknown = sorted(places - _RATING - _PAIR - {"step", "steps_left"})
    if unknown:
        raise SignalError(f"{where}: the question holds {{{unknown[0]}}}, which is nothing that can be put in.")
    if places >= _PAIR and not scale and "scale" not in places:
        return
    if not places >= _RATING or places & _PAIR:
        raise SignalError(
            f"{where}: a question needs {{action}} and {{scale}} and a [[scale]], or {{first}} and {{second}} and none."
        )
    if len({word.word.casefold() for word in scale}) < max(2, len(scale)) or len({w.value for w in scale}) < 2:
        raise SignalError(f"{where}: a scale needs at least two different words with different values.")


def shipped(name: str, signal: str) -> Judged:
    """A rubric that comes with the package, as a signal of that name."""
    file = resources.files("credit_signals") / "rubrics" / f"{name}.toml"
    return Judged(signal, read_rubric(file.read_text(encoding="utf-8"), f"{name}.toml"))


HELP3_PREFIX = shipped("help3_prefix", "judge.help3_prefix")
HELP3_HINDSIGHT = shipped("help3_hindsight", "judge.help3_hindsight")
GOOD5_PREFIX = shipped("good5_prefix", "judge.good5_prefix")
GOOD5_HINDSIGHT = shipped("good5_hindsight", "judge.good5_hindsight")
MATTER5_PREFIX = shipped("matter5_prefix", "judge.matter5_prefix")
MATTER5_HINDSIGHT = shipped("matter5_hindsight", "judge.matter5_hindsight")
PAIR_RANDOM = shipped("pair_random", "judge.pair_random")
PAIR_LIKELIEST = shipped("pair_likeliest", "judge.pair_likeliest")
