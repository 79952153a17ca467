"""Implicit credit: how much likelier the step becomes once the outcome is known.

Knows: the formulas of ../shared/statistics-replay.md, section 4. Hides: which of the twin's two conditionals a
trajectory's outcome picks. By Bayes' rule p(a|h, success) / p(a|h) = Q(h, a) / V(h): with an exact twin the ratio is
the causal quantity itself, so what is tested is how far a fitted twin is from that. m is a mean over tokens (nats a
token), a sum is over the whole action; for a policy over whole commands the two are one. Flagged is a value whose
tokens merge across the boundary of prompt and command, and a ratio that is no larger than the noise of the log
probabilities it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from credit_signals import Missing, SignalPoint, Value, View
from credit_signals.confidence import log_probability

TEMPERATURE, LOW, HIGH = 5.0, 0.8, 1.2  # HCAPO's T and clip
BETA = 0.05  # PRIME's beta; a scale, so no rank depends on it


@dataclass(frozen=True, slots=True)
class Implicit:
    """A signal that follows from one point's own numbers. ratio: of two log probabilities of one action, in nats a
    token or (`summed`) in all, so that it can be held against their noise."""

    name: str
    value: Callable[[SignalPoint], Value]
    view: View
    needs: tuple[str, ...]
    importance: str = "absolute"
    ratio: bool = False
    summed: bool = False

    def score(self, points: Sequence[SignalPoint]) -> list[Value]:
        """One number a point."""
        return [self.value(point) for point in points]

    def flags(self, points: Sequence[SignalPoint]) -> list[bool | None]:
        """Whether tokens merge or a ratio is within its noise; None where neither is known."""
        return [self._flag(point) for point in points]

    def _flag(self, point: SignalPoint) -> bool | None:
        value = self.value(point)
        if (point.merged is None and point.noise is None) or not isinstance(value, float):
            return None
        size = abs(value) * (1 if self.summed else point.tokens or 1)
        return bool(point.merged) or (self.ratio and point.noise is not None and size <= point.noise)


def _conditional(point: SignalPoint, success: bool) -> float | Missing:
    name = "logprob_success" if success else "logprob_failure"
    value: float | None = getattr(point, name)
    if value is None:
        return point.missing(name)
    return value if math.isfinite(value) else Missing(f"{name} is minus infinity")


def _hind(point: SignalPoint) -> float | Missing:
    """log p(a | h, the trajectory's own outcome)."""
    if point.hindsight is None:
        return Missing("the outcome of the trajectory is not known")
    return _conditional(point, point.hindsight.won)


def _mean(total: float | Missing, point: SignalPoint) -> float | Missing:
    if isinstance(total, Missing):
        return total
    return total / point.tokens if point.tokens else point.missing("tokens")


def _minus(a: float | Missing, b: float | Missing) -> float | Missing:
    if isinstance(a, Missing):
        return a
    return b if isinstance(b, Missing) else a - b


def _m_no(point: SignalPoint) -> float | Missing:
    return _mean(log_probability(point), point)


def _m_hind(point: SignalPoint) -> float | Missing:
    return _mean(_hind(point), point)


def _delta(point: SignalPoint) -> float | Missing:
    return _minus(_m_hind(point), _m_no(point))


def _delta_success(point: SignalPoint) -> float | Missing:
    """Conditioned on success whatever happened: it needs no outcome, so it is known when acting."""
    return _minus(_mean(_conditional(point, True), point), _m_no(point))


def _contrast(point: SignalPoint) -> float | Missing:
    """log p(a|h, success) - log p(a|h, failure): the log odds of success that the action adds."""
    return _mean(_minus(_conditional(point, True), _conditional(point, False)), point)


def _tokens(point: SignalPoint) -> float | Missing:
    if point.tokens == 1 and point.probabilities is not None:
        return Missing("the policy chooses among whole commands, so each is one token")
    return point.missing("tokens") if point.tokens is None else float(point.tokens)


def _prime(point: SignalPoint) -> float | Missing:
    """beta (log pi(a|h) - log pi_ref(a|h)), summed over tokens: the implicit process reward of PRIME."""
    if point.logprob_reference is None:
        return point.missing("logprob_reference")
    if not math.isfinite(point.logprob_reference):
        return Missing("the reference policy gives this action probability 0")
    ratio = _minus(log_probability(point), point.logprob_reference)
    return ratio if isinstance(ratio, Missing) else BETA * ratio


@dataclass(frozen=True, slots=True)
class HCAPO:
    """HCAPO's ratio: clip(exp(m_hind / T) / its mean over the trajectory, .8, 1.2), T = 5; flags: whether clipped.

    It is normalised by the trajectory's mean, not by pi(a|h), so it is nearly fluency by construction.
    """

    name: str = "implicit.rho"
    view: View = "hindsight"
    needs: tuple[str, ...] = ("policy", "twin")

    def score(self, points: Sequence[SignalPoint]) -> list[Value]:
        """One number a point."""
        return [r if isinstance(r, Missing) else min(max(r, LOW), HIGH) for r in self._ratios(points)]

    def flags(self, points: Sequence[SignalPoint]) -> list[bool | None]:
        """Whether a ratio was clipped."""
        return [None if isinstance(r, Missing) else not LOW <= r <= HIGH for r in self._ratios(points)]

    def _ratios(self, points: Sequence[SignalPoint]) -> list[float | Missing]:
        raw = [_m_hind(point) for point in points]
        scaled = [r if isinstance(r, Missing) else math.exp(r / TEMPERATURE) for r in raw]
        known: dict[str, list[float]] = {}
        for point, value in zip(points, scaled, strict=True):
            if not isinstance(value, Missing):
                known.setdefault(point.trajectory, []).append(value)
        means = {trajectory: sum(values) / len(values) for trajectory, values in known.items()}
        return [
            value if isinstance(value, Missing) else value / means[point.trajectory]
            for point, value in zip(points, scaled, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class BeliefChange:
    """IGPO's information gain: how the probability of success changes over the step and what it showed.

    After the last step of a trajectory the outcome itself is known, so the view is hindsight.
    """

    name: str = "implicit.belief_change"
    view: View = "hindsight"
    needs: tuple[str, ...] = ("policy", "belief")
    importance: str = "absolute"

    def score(self, points: Sequence[SignalPoint]) -> list[Value]:
        """One number a point."""
        beliefs = {(point.trajectory, point.step): point.belief for point in points}
        return [self._change(point, beliefs.get((point.trajectory, point.step + 1))) for point in points]

    def _change(self, point: SignalPoint, after: float | None) -> Value:
        if point.belief is None:
            return point.missing("belief")
        if point.hindsight is not None and point.step + 1 == len(point.hindsight.commands):
            after = float(point.hindsight.won)
        return Missing("the belief after the step is not known") if after is None else after - point.belief


TWIN = ("policy", "twin")
M_NO = Implicit("implicit.m_no", _m_no, "prefix", ("policy",), "negated")
M_HIND = Implicit("implicit.m_hind", _m_hind, "hindsight", TWIN, "negated")
DELTA = Implicit("implicit.delta", _delta, "hindsight", TWIN, ratio=True)
DELTA_SUCCESS = Implicit("implicit.delta_success", _delta_success, "prefix", TWIN, ratio=True)
CONTRAST = Implicit("implicit.contrast", _contrast, "prefix", TWIN, ratio=True)
SUM_NO = Implicit("implicit.sum_no", log_probability, "prefix", ("policy",), "negated", summed=True)
SUM_HIND = Implicit("implicit.sum_hind", _hind, "hindsight", TWIN, "negated", summed=True)
SUM_DELTA = Implicit("implicit.sum_delta", lambda p: _minus(_hind(p), log_probability(p)), "hindsight", TWIN,
                     ratio=True, summed=True)  # fmt: skip
TOKENS = Implicit("implicit.tokens", _tokens, "prefix", ("policy",), "value")
RHO = HCAPO()
PRIME = Implicit("implicit.prime", _prime, "prefix", ("policy", "reference"))
BELIEF_CHANGE = BeliefChange()
