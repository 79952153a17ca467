"""Confidence: how sure the policy was of the step it took, from its own probabilities or its own words.

Knows: which summary of the policy's distribution is which. Hides: nothing is read from the game or the outcome, so
all of it is known when acting. Unsure steps are the ones a router sends on, hence importance "negated" for
probability, margin and words. Words (`verbalised`) are a rubric put to the policy itself where it is a language
model, else to the judge that was named (`credit_signals.judge`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from credit_signals import Missing, SignalPoint, Value, View
from credit_signals.judge import shipped


@dataclass(frozen=True, slots=True)
class Confidence:
    """A confidence signal: `value` of a point whose distribution (or only log probability) is known."""

    name: str
    value: Callable[[SignalPoint], Value]
    importance: str
    needs: tuple[str, ...] = ("policy",)
    view: View = "prefix"

    def score(self, points: Sequence[SignalPoint]) -> list[Value]:
        """One number a point."""
        return [self.value(point) for point in points]


def log_probability(point: SignalPoint) -> float | Missing:
    """log pi(action | history), in nats; missing where it is unknown or the policy never takes the action."""
    if point.logprob is None:
        return point.missing("logprob")
    return point.logprob if math.isfinite(point.logprob) else Missing("the policy gives this action probability 0")


def _margin(point: SignalPoint) -> float | Missing:
    """pi(action) minus the largest probability of another command; negative where another one was likelier."""
    if point.probabilities is None:
        return point.missing("probabilities")
    others = [p for command, p in point.probabilities.items() if command != point.action]
    if not others:
        return Missing("there is no other command")
    return point.probabilities.get(point.action, 0.0) - max(others)


def _entropy(point: SignalPoint) -> float | Missing:
    """Shannon entropy of the policy over commands, in nats."""
    if point.probabilities is None:
        return point.missing("probabilities")
    return -sum(p * math.log(p) for p in point.probabilities.values() if p > 0)


LOGP = Confidence("confidence.logp", log_probability, "negated")
MARGIN = Confidence("confidence.margin", _margin, "negated")
ENTROPY = Confidence("confidence.entropy", _entropy, "value")
VERBALISED = shipped("verbalised", "confidence.verbalised")
