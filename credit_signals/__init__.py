"""Credit signals: what claims to know which steps mattered.

Knows: what a signal may see (`SignalPoint`), what it must give back, the signals that ship, and how others are
found. Hides: entry points and users' files, the cut to a signal's view, the checks of what it returned. It imports
nothing of the audit but its records, so a signal cannot reach a replay's results; `check_signal` tests the rest.

A new signal is a class with a name, a view and `score` (ten lines in a file of one's own, `my.py:Novelty`):

    class Novelty:
        name = "novelty"
        view = "prefix"

        def score(self, points):
            return [1.0 / (1 + point.commands.count(point.action)) for point in points]
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

View = Literal["prefix", "hindsight"]
Importance = Literal["value", "absolute", "negated"]

ENTRY_POINTS = "credit_audit.signals"
# What a signal may ask for beyond the text, in `needs`: it is computed only then.
NEEDS = ("world", "policy", "twin", "belief", "reference", "plan", "judge")


class SignalError(ValueError):
    """A signal that is not there or breaks its contract, said in one sentence."""


@dataclass(frozen=True, slots=True)
class Missing:
    """No value, and why. Never 0, never NaN without a reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hindsight:
    """What is known once the trajectory is over: its outcome, all its commands and all its observations."""

    won: bool
    commands: tuple[str, ...]
    observations: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class SignalPoint:
    """A decision point as a signal sees it. It holds nothing that a replay found out.

    point, trajectory, game, task_type: ids. step: from 0. steps_left: of the budget, this step included.
    commands: given before this step. observations: seen up to now, one more than commands (None where the log kept
    none). action: the canonical command taken. text: what the policy wrote, where that is something else.
    admissible: commands the game offers here (needs "world"). logprob: log pi(action | history), summed over `tokens`
    tokens: those of the command and of the end that a language model writes after it, or 1 where the policy chooses
    among whole commands (its distribution is over them, however it came about). merged: tokens would span the boundary
    of prompt and command, so another tokenisation exists; None where there are none. noise: by how much such a log
    probability differs when it is computed again (nats; None: exact or not known). probabilities: the policy's whole
    distribution over commands (needs "policy"). logprob_success, logprob_failure: log p(action | history, that
    outcome) from an outcome-conditioned twin (needs "twin"). belief: probability of success at this moment (needs
    "belief"). logprob_reference: of another policy (needs "reference"). plan_before, plan_after: steps of a shortest
    plan to the goal before and after the action, from the world's state (needs "plan"; an oracle's knowledge).
    hindsight: the finished trajectory; None for a signal whose view is "prefix".
    why: field name -> why it is None.
    """

    point: str
    trajectory: str
    game: str
    task_type: str | None
    step: int
    steps_left: int
    commands: tuple[str, ...]
    observations: tuple[str | None, ...]
    action: str
    text: str | None = None
    admissible: tuple[str, ...] | None = None
    logprob: float | None = None
    tokens: int | None = None
    merged: bool | None = None
    noise: float | None = None
    probabilities: Mapping[str, float] | None = None
    logprob_success: float | None = None
    logprob_failure: float | None = None
    belief: float | None = None
    logprob_reference: float | None = None
    plan_before: int | None = None
    plan_after: int | None = None
    hindsight: Hindsight | None = None
    why: Mapping[str, str] = field(default_factory=dict)

    def missing(self, name: str) -> Missing:
        """Why a field is None."""
        return Missing(self.why.get(name, f"{name} is not known here"))


Value = float | Missing | None


class CreditSignal(Protocol):
    """A signal. `score` gets points in the order of trajectory and step and answers in that order.

    name: column name. view: "prefix" (what was known when acting) or "hindsight" (the finished trajectory too).
    Optional attributes: `needs` (some of NEEDS); `importance`: how a value reads as "this step mattered" where only
    size counts: "value" (default: the higher, the more), "absolute" (for signed credit) or "negated" (for
    confidence: unsure steps matter); `flags(points)`: a yes/no or None for each value (stored beside it, unless all
    are None). A signal that needs "judge" asks a language model: it has `bound(ask)`, `questions(points)` and
    `report(points)` as in `credit_signals.judge`.
    """

    name: str
    view: View

    def score(self, points: Sequence[SignalPoint]) -> Sequence[Value]:
        """A finite number for each point, or Missing with its reason."""
        ...


# The signals that ship ------------------------------------------------------------------------------------------

_SHIPPED = {
    "judge": (
        "help3_prefix",
        "help3_hindsight",
        "good5_prefix",
        "good5_hindsight",
        "matter5_prefix",
        "matter5_hindsight",
        "pair_random",
        "pair_likeliest",
    ),
    "confidence": ("logp", "margin", "entropy", "verbalised"),
    "implicit": (
        "m_no",
        "m_hind",
        "delta",
        "delta_success",
        "contrast",
        "sum_no",
        "sum_hind",
        "sum_delta",
        "tokens",
        "rho",
        "prime",
        "belief_change",
    ),
    "progress": ("plan",),
    "baseline": (
        "random",
        "step",
        "steps_left",
        "action_type",
        "action_length",
        "text_length",
        "fluency",
    ),
}
REGISTRY: Mapping[str, str] = {
    f"{family}.{name}": f"credit_signals.{'baselines' if family == 'baseline' else family}:{name.upper()}"
    for family, names in _SHIPPED.items()
    for name in names
}


def known_signals() -> dict[str, str]:
    """Every name that `load_signals` knows: the shipped ones and those of installed packages (entry points)."""
    return {**{entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}, **REGISTRY}


def load_signals(specs: Sequence[str]) -> list[CreditSignal]:
    """Open signals: by name, by family (`confidence` is all of `confidence.*`), as my.py:Class, or a rubric my.toml.

    A .py file that is named here is run as a program: name only files that you trust. Raises SignalError where there
    is no such signal, it is not one, or two have one name.
    """
    known = known_signals()
    signals: list[CreditSignal] = []
    for spec in specs:
        if spec in known:
            signals.append(_instance(_attribute(known[spec]), spec))
        elif any(name.startswith(f"{spec}.") for name in known):
            signals += [
                _instance(_attribute(where), name) for name, where in known.items() if name.startswith(f"{spec}.")
            ]
        elif ".py:" in spec:
            signals.append(_instance(_from_file(spec), spec))
        elif spec.endswith(".toml"):
            from credit_signals.judge import load_rubric

            signals.append(_instance(load_rubric(spec), spec))
        else:
            raise SignalError(
                f"{spec}: no such signal; expected my.py:Class, a rubric my.toml or one of {', '.join(sorted(known))}."
            )
    names = [signal.name for signal in signals]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SignalError(f"{twice}: two signals have this name; name each signal once.")
    return signals


def _attribute(where: str) -> Any:
    module, _, name = where.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SignalError(f"{where}: cannot be imported ({error}); is the package that offers it installed?") from None


def _from_file(spec: str) -> Any:
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise SignalError(f"{file}: no such file; a signal of your own is given as my.py:Class.")
    module_name = f"_credit_signal_{path.stem}"
    loaded = importlib.util.spec_from_file_location(module_name, path)
    assert loaded is not None and loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    sys.modules[module_name] = module  # dataclasses look their module up
    try:
        loaded.loader.exec_module(module)
        return getattr(module, name)
    except Exception as error:
        raise SignalError(f"{spec}: cannot be loaded ({type(error).__name__}: {error}).") from None


def _instance(found: Any, spec: str) -> CreditSignal:
    try:
        signal = found() if isinstance(found, type) else found
    except Exception as error:
        raise SignalError(f"{spec}: cannot be made without arguments ({error}).") from None
    name = getattr(signal, "name", None)
    if not isinstance(name, str) or not name or ":" in name or not callable(getattr(signal, "score", None)):
        raise SignalError(f"{spec}: is no signal; it needs a name (text without a colon), a view and score(points).")
    if getattr(signal, "view", None) not in get_args(View):
        raise SignalError(f"{spec}: its view is {getattr(signal, 'view', None)!r}; expected 'prefix' or 'hindsight'.")
    if importance(signal) not in get_args(Importance):
        raise SignalError(f"{spec}: importance is {importance(signal)!r}; expected one of {get_args(Importance)}.")
    unknown = sorted(set(needs(signal)) - set(NEEDS))
    if unknown:
        raise SignalError(f"{spec}: needs {unknown[0]!r}, which is not known; expected some of {', '.join(NEEDS)}.")
    result: CreditSignal = signal
    return result


def needs(signal: CreditSignal) -> tuple[str, ...]:
    """What a signal asks for beyond the text."""
    return tuple(getattr(signal, "needs", ()))


def importance(signal: CreditSignal) -> str:
    """How a signal's value reads as importance."""
    return str(getattr(signal, "importance", "value"))


# Scoring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scored:
    """What a signal said. values: NaN where missing; reasons: why, None where there is a value; flags: or None."""

    name: str
    values: tuple[float, ...]
    reasons: tuple[str | None, ...]
    flags: tuple[bool | None, ...] | None = None


def score(signal: CreditSignal, points: Sequence[SignalPoint]) -> Scored:
    """Ask a signal about points, in its own view; answers are in the order of the points given.

    Raises SignalError where its answer is none.

    A signal that fails, answers for other points, or gives one and the same value throughout is an error to surface,
    not a result: a server once returned 0.0 for every choice, which reads as exact chance.
    """
    order = sorted(range(len(points)), key=lambda i: (points[i].trajectory, points[i].step))
    asked = _ask(signal, _viewed(signal, [points[i] for i in order]))
    place = {i: rank for rank, i in enumerate(order)}
    back = [place[i] for i in range(len(points))]
    scored = Scored(
        asked.name,
        tuple(asked.values[rank] for rank in back),
        tuple(asked.reasons[rank] for rank in back),
        None if asked.flags is None else tuple(asked.flags[rank] for rank in back),
    )
    given = {value for value in scored.values if not math.isnan(value)}
    if len(given) == 1 and len(points) > 1:
        raise SignalError(
            f"{signal.name}: is {given.pop():g} at every point; a constant says nothing, so something is wrong with it."
        )
    return scored


def _viewed(signal: CreditSignal, points: Sequence[SignalPoint]) -> Sequence[SignalPoint]:
    return points if signal.view == "hindsight" else [replace(point, hindsight=None) for point in points]


def _ask(signal: CreditSignal, points: Sequence[SignalPoint]) -> Scored:
    flags = getattr(signal, "flags", None)
    try:
        answer = list(signal.score(points))
        flagged = None if flags is None else tuple(flags(points))
        if flagged is not None and len(flagged) == len(points) and all(flag is None for flag in flagged):
            flagged = None
    except Exception as error:
        raise SignalError(f"{signal.name}: failed ({type(error).__name__}: {error}).") from error
    if len(answer) != len(points) or (flagged is not None and len(flagged) != len(points)):
        raise SignalError(f"{signal.name}: gave {len(answer)} values for {len(points)} points; expected one each.")
    values: list[float] = []
    reasons: list[str | None] = []
    for value, point in zip(answer, points, strict=True):
        if value is None:
            value = Missing("the signal gave no value")
        if isinstance(value, Missing):
            if not value.reason.strip():
                raise SignalError(f"{signal.name}: is missing at {point.point[:12]} without a reason.")
            values.append(math.nan)
            reasons.append(value.reason)
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise SignalError(f"{signal.name}: gave {value!r}; expected a number or Missing(reason).") from None
        if not math.isfinite(number):
            raise SignalError(f"{signal.name}: gave {number} at {point.point[:12]}; give Missing(reason) instead.")
        values.append(number)
        reasons.append(None)
    return Scored(signal.name, tuple(values), tuple(reasons), flagged)


def check_signal(signal: CreditSignal, points: Sequence[SignalPoint]) -> None:
    """The contract of a signal, tried on points of several steps. Raises SignalError with what it breaks.

    It answers with finite numbers or reasons; twice the same; for a point whatever other trajectories are asked
    about beside it; not with a constant, nor with one value for all points of each trajectory (such a signal cannot
    rank steps); and, in the prefix view, without looking at later points of the trajectory. That it does not change
    with a replay's results is what `audit.scoring.check_leakage` tries.
    """
    points = sorted(points, key=lambda point: (point.trajectory, point.step))
    groups: dict[str, list[SignalPoint]] = {}
    for point in points:
        groups.setdefault(point.trajectory, []).append(point)
    if not any(len(group) > 1 for group in groups.values()):
        raise SignalError("check_signal: needs a trajectory with two points or more.")
    first = score(signal, points)
    known = _by_point(points, first)
    _compare(signal, known, points, first, score(signal, points), "two calls give different values")
    varies = False
    for group in groups.values():
        alone = _ask(signal, _viewed(signal, group))
        _compare(signal, known, group, None, alone, "a value depends on which other trajectories are scored beside it")
        varies = varies or len({value for value in alone.values if not math.isnan(value)}) > 1
        if signal.view == "prefix":
            half = group[: (len(group) + 1) // 2]
            early = _ask(signal, _viewed(signal, half))
            _compare(signal, known, half, None, early, "a prefix signal changes with later points of its trajectory")
    if not varies and any(reason is None for reason in first.reasons):
        raise SignalError(f"{signal.name}: has one value for all points of each trajectory, so it cannot rank steps.")


def _by_point(points: Sequence[SignalPoint], scored: Scored) -> dict[str, tuple[float, str | None]]:
    return {
        point.point: (value, reason) for point, value, reason in zip(points, scored.values, scored.reasons, strict=True)
    }


def _compare(
    signal: CreditSignal,
    known: Mapping[str, tuple[float, str | None]],
    points: Sequence[SignalPoint],
    before: Scored | None,
    now: Scored,
    complaint: str,
) -> None:
    same = before is None or before.flags == now.flags
    for identity, (value, reason) in _by_point(points, now).items():
        was, why = known[identity]
        same = same and reason == why and (value == was or (math.isnan(value) and math.isnan(was)))
    if not same:
        raise SignalError(f"{signal.name}: {complaint}.")
