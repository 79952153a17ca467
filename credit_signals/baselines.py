"""Baselines: what a credit signal has to beat, because it costs nothing.

Knows: chance, position, kind and length of the action, fluency. Hides: the seed. The planted oracle and the
permuted control need effects, so they belong to `audit.comparison`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from audit.records import draws
from credit_signals import SignalPoint, Value, View
from credit_signals.confidence import log_probability

# Looking, going, opening, acting on things: by what an action can change.
_KINDS = {
    **dict.fromkeys(("look", "inventory", "examine", "help"), 0.0),
    "go": 1.0,
    **dict.fromkeys(("open", "close"), 2.0),
}
_ACTS = 3.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """A signal of one point alone."""

    name: str
    value: Callable[[SignalPoint], Value]
    importance: str = "value"
    needs: tuple[str, ...] = ()
    view: View = "prefix"

    def score(self, points: Sequence[SignalPoint]) -> list[Value]:
        """One number a point."""
        return [self.value(point) for point in points]


def random(seed: int = 0, name: str = "baseline.random") -> Baseline:
    """A uniform number in [0, 1) that follows from the seed and the point's id."""
    return Baseline(name, lambda point: draws(1, "random signal", seed, point.point)[0] / 2**64)


def _action_type(point: SignalPoint) -> float:
    return _KINDS.get(point.action.split(" ", 1)[0], _ACTS)


def _text_length(point: SignalPoint) -> Value:
    return point.missing("text") if point.text is None else float(len(point.text))


RANDOM = random()
STEP = Baseline("baseline.step", lambda point: float(point.step))
STEPS_LEFT = Baseline("baseline.steps_left", lambda point: float(point.steps_left))
ACTION_TYPE = Baseline("baseline.action_type", _action_type)
ACTION_LENGTH = Baseline("baseline.action_length", lambda point: float(len(point.action)))
TEXT_LENGTH = Baseline("baseline.text_length", _text_length)
FLUENCY = Baseline("baseline.fluency", log_probability, needs=("policy",))
