"""The plan: the one configuration of a study, written before the data, checked, locked and costed.

Knows: every setting of a replay study with its allowed values, the presets, and how a plan's content is hashed.
Hides: the TOML on disk. A plan is frozen; a run stores it resolved, with its hash and whether it was locked.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from audit.records import content_id
from envs.core import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Contrast = Literal["alternatives", "uniform", "policy", "best"]
Design = Literal["draws", "arms"]
Outcome = Literal["won", "efficiency"]
Inadmissible = Literal["keep", "exclude"]

MAX_BUDGET = 10_000
MAX_ROLLOUTS = 100_000


def setting(default: Any, meaning: str, check: Callable[[Any], bool] | None = None, expected: str = "") -> Any:
    """A documented field of the plan, with the check of its value."""
    metadata = {"meaning": meaning, "check": check, "expected": expected}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _between(low: float, high: float) -> dict[str, Any]:
    return {"check": lambda value: low <= value <= high, "expected": f"between {low} and {high}"}


def _one_of(kind: Any) -> dict[str, Any]:
    names = get_args(kind)
    return {"check": lambda value: value in names, "expected": f"one of {', '.join(names)}"}


@dataclass(frozen=True, slots=True)
class Estimand:
    """What is estimated: part of every output."""

    contrast: Contrast = setting(
        "alternatives",
        "what the factual action is compared with: the policy's own other actions in its own proportions "
        "(alternatives), its distinct alternatives equally (uniform), the policy itself (policy), the best one (best)",
        **_one_of(Contrast),
    )
    outcome: Outcome = setting(
        "won", "won (1 or 0 within the budget) or efficiency (1 - steps / budget if won, else 0)", **_one_of(Outcome)
    )
    budget: int = setting(50, "steps an episode may take, counted from its start", **_between(1, MAX_BUDGET))
    inadmissible: Inadmissible = setting(
        "keep", "whether commands that the game does not admit may serve as alternatives", **_one_of(Inadmissible)
    )


@dataclass(frozen=True, slots=True)
class Support:
    """When a point has counterfactuals at all."""

    draws: int = setting(32, "draws of the policy at each point that find its alternatives", **_between(1, 10_000))
    distinct: int = setting(1, "distinct alternatives (K) a point must show to be defined", **_between(1, 1000))


@dataclass(frozen=True, slots=True)
class Rollouts:
    """How a defined point is replayed."""

    design: Design = setting(
        "draws",
        "draws: every alternative rollout draws its own first action from the policy; "
        "arms: the first K distinct alternatives get an arm each",
        **_one_of(Design),
    )
    rounds: list[int] = setting(
        [8, 16, 24, 32, 48, 64, 96, 128],
        "rollouts of each arm in total after each round (draws: factual and alternatives; arms: every arm)",
        lambda value: (
            0 < len(value) <= 12
            and all(isinstance(n, int) and 1 <= n <= MAX_ROLLOUTS for n in value)
            and all(a < b for a, b in pairwise(value))
        ),
        f"growing whole numbers between 1 and {MAX_ROLLOUTS}",
    )
    adaptive: bool = setting(
        True, "stop at the round that decides a point (or shows that it will hardly be); false: all rounds for all"
    )
    common_random_numbers: bool = setting(False, "the same random stream for draw i of every arm of a point")
    redraws: int = setting(100, "tries to draw an alternative that is not the factual action", **_between(1, 10_000))


@dataclass(frozen=True, slots=True)
class Points:
    """Which decision points are replayed; a share or a number is drawn by hash, the same on every machine."""

    share: float = setting(1.0, "share of all points", **_between(0.0, 1.0))
    per_trajectory: int = setting(0, "at most this many a trajectory; 0: no limit", **_between(0, MAX_BUDGET))


@dataclass(frozen=True, slots=True)
class Decisions:
    """How points are judged."""

    alpha: float = setting(0.05, "error rate of intervals and of the false discovery rate", **_between(1e-6, 0.5))
    sesoi: float = setting(0.2, "smallest effect of interest: inside it an effect is negligible", **_between(0.0, 1.0))
    stop_at: float = setting(
        0.001,
        "adaptive rounds stop a point as pivotal at this p-value: about what the false discovery rate will ask for",
        **_between(1e-8, 0.5),
    )
    power: float = setting(0.8, "power at which minimum detectable effects are printed", **_between(0.5, 0.999))


@dataclass(frozen=True, slots=True)
class Collection:
    """Which trajectories the study is about, where `audit replay` collects them itself."""

    trajectories: int = setting(50, "how many trajectories are collected", **_between(1, 1_000_000))


EQUIVALENCE = "equivalence:"  # prefix of a hypothesis' measure that claims "within the margin"
LATER = ("than", "share", "margin")  # settings of a hypothesis that older locks do not have


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A confirmatory hypothesis; the comparison layer tests these with Holm, everything else is exploratory.

    signal, measure: the claim that this signal is above chance in this measure (`audit.comparison.MEASURES`, or
    `router`; default: spearman); `equivalence:MEASURE` claims that it is within `margin` of chance. than: another
    signal, in chance's place. share: of the points that the measure `router` sends to the judge. margin: of
    equivalence; default: the comparison's. Without a signal the claim is about something else, and stands untested.
    """

    name: str
    claim: str
    signal: str | None = None
    measure: str | None = None
    than: str | None = None
    share: float | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        where = f"hypothesis {self.name}"
        if self.signal is None and any(v is not None for v in (self.measure, self.than, self.share, self.margin)):
            raise InputError(f"{where}: says how a signal is tested, but names none; add its signal.")
        routed = (self.measure or "").removeprefix(EQUIVALENCE) == "router"
        if routed != (self.share is not None):
            raise InputError(f"{where}: the measure router and a share go together; expected both or neither.")
        if routed and self.than is not None:
            raise InputError(f"{where}: the router is held against its own share; leave out than.")

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data. What came later is left out where it is not set, so that older hashes stay."""
        data = asdict(self)
        return {key: value for key, value in data.items() if key not in LATER or value is not None}


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole study. Every part has defaults; `to_toml` writes all of them out with their meaning."""

    name: str = "default"
    seed: int = 0
    estimand: Estimand = field(default_factory=Estimand)
    support: Support = field(default_factory=Support)
    rollouts: Rollouts = field(default_factory=Rollouts)
    points: Points = field(default_factory=Points)
    decisions: Decisions = field(default_factory=Decisions)
    collection: Collection = field(default_factory=Collection)
    hypotheses: tuple[Hypothesis, ...] = ()

    def __post_init__(self) -> None:
        if self.estimand.contrast in ("uniform", "best") and self.rollouts.design != "arms":
            raise InputError(
                f"plan {self.name}: the contrast {self.estimand.contrast!r} compares distinct alternatives, so "
                f"rollouts.design must be 'arms'."
            )
        if self.estimand.contrast in ("alternatives", "policy") and self.rollouts.design != "draws":
            raise InputError(
                f"plan {self.name}: the contrast {self.estimand.contrast!r} weighs alternatives as the policy does, "
                f"so rollouts.design must be 'draws'."
            )
        if self.rollouts.adaptive and (self.rollouts.design == "arms" or self.estimand.outcome != "won"):
            raise InputError(
                f"plan {self.name}: adaptive rounds need rollouts.design = 'draws' and estimand.outcome = 'won'; "
                f"set rollouts.adaptive = false."
            )
        if self.rollouts.adaptive and self.rollouts.rounds[-1] > 500:
            raise InputError(f"plan {self.name}: adaptive rounds go up to 500 rollouts an arm; set fewer.")
        if self.estimand.outcome != "won" and self.estimand.contrast == "best":
            raise InputError(f"plan {self.name}: the contrast 'best' is for estimand.outcome = 'won'.")
        if self.estimand.contrast == "best" and (self.support.distinct < 2 or self.rollouts.rounds[-1] < 2):
            raise InputError(f"plan {self.name}: the contrast 'best' needs support.distinct and rollouts of 2 or more.")
        if self.support.draws < self.support.distinct:
            raise InputError(
                f"plan {self.name}: support.draws ({self.support.draws}) can never show {self.support.distinct} "
                f"distinct alternatives; raise draws."
            )

    @property
    def hash(self) -> str:
        """Content hash of everything in the plan."""
        return content_id("plan", self.to_json())

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data; `from_json` is the inverse."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {**data, "hypotheses": [hypothesis.to_json() for hypothesis in self.hypotheses]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "plan") -> Plan:
        """Check and build. Raises InputError naming the key, what was found and what is expected."""
        parts = {part.name: part.default_factory for part in fields(cls) if part.default_factory is not MISSING}
        known = [part.name for part in fields(cls)]
        values: dict[str, Any] = {}
        for key, value in data.items():
            if key not in known:
                raise _unknown(where, key, known)
            if key in parts:
                if not isinstance(value, Mapping):
                    raise InputError(f"{where}: [{key}] must be a table.")
                values[key] = _section(type(parts[key]()), value, f"{where}: {key}")
            elif key == "hypotheses":
                values[key] = _hypotheses(value, where)
            elif (isinstance(value, str) and value) if key == "name" else (_is_int(value) and 0 <= value < 1 << 63):
                values[key] = value
            else:
                raise InputError(
                    f"{where}: {key} is {value!r}; expected {'text' if key == 'name' else 'a number >= 0'}."
                )
        return cls(**values)

    def to_toml(self) -> str:
        """The plan as a commented TOML file with every setting."""
        lines = [f"name = {json.dumps(self.name)}", f"seed = {self.seed}"]
        for part in fields(self):
            section = getattr(self, part.name)
            if part.name in ("name", "seed", "hypotheses"):
                continue
            lines += ["", f"# {(type(section).__doc__ or '').strip()}", f"[{part.name}]"]
            for key in fields(section):
                lines.append(f"# {key.metadata['meaning']}")
                lines.append(f"{key.name} = {json.dumps(getattr(section, key.name))}")
        for hypothesis in self.hypotheses:
            lines += ["", "[[hypotheses]]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in asdict(hypothesis).items() if value is not None]
        return "\n".join(lines) + "\n"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _section(kind: Any, data: Mapping[str, Any], where: str) -> Any:
    known = {key.name: key for key in fields(kind)}
    default = kind()
    for key, value in data.items():
        if key not in known:
            raise _unknown(where, key, list(known))
        standard = getattr(default, key)
        fits = isinstance(value, bool) == isinstance(standard, bool) and (
            isinstance(value, type(standard)) or (isinstance(standard, float) and _is_int(value))
        )
        check, expected = known[key].metadata["check"], known[key].metadata["expected"]
        if not fits or (check is not None and not check(value)):
            raise InputError(f"{where}.{key} is {value!r}; expected {expected or type(standard).__name__}.")
    return kind(
        **{key: float(value) if isinstance(getattr(default, key), float) else value for key, value in data.items()}
    )


def _hypotheses(value: Any, where: str) -> tuple[Hypothesis, ...]:
    known = [key.name for key in fields(Hypothesis)]
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise InputError(f"{where}: hypotheses must be [[hypotheses]] tables with name and claim.")
    for entry in value:
        for key in entry:
            if key not in known:
                raise _unknown(f"{where}: hypotheses", key, known)
        if not all(isinstance(entry.get(key), str) for key in ("name", "claim")):
            raise InputError(f"{where}: every hypothesis needs a name and a claim.")
        for key, given in entry.items():
            if given is None:  # as a lock writes what is not set
                continue
            if key in ("share", "margin"):
                fits = isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < 1
            else:
                fits = isinstance(given, str) and bool(given)
            if not fits:
                expected = "a number between 0 and 1" if key in ("share", "margin") else "text"
                raise InputError(f"{where}: hypothesis {entry['name']}: {key} is {given!r}; expected {expected}.")
    names = [entry["name"] for entry in value]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{where}: two hypotheses are called {twice}; give each its own name.")
    return tuple(Hypothesis(**entry) for entry in value)


def _unknown(where: str, key: str, known: list[str]) -> InputError:
    close = difflib.get_close_matches(key, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}."
    return InputError(f"{where}: unknown key {key!r}; {hint}")


# Presets ---------------------------------------------------------------------------------------------------------

PRESETS: dict[str, Plan] = {
    "default": Plan(),
    # The rule of the preprint arXiv 2608.19760 as reported second-hand: K = 4 distinct alternatives, factual and
    # four arms, three rollouts an arm, equal weights, all points, no early stopping.
    "zhang2026": Plan(
        name="zhang2026",
        estimand=Estimand(contrast="uniform"),
        support=Support(draws=32, distinct=4),
        rollouts=Rollouts(design="arms", rounds=[3], adaptive=False),
    ),
    # Small enough for a first look and for tests.
    "quick": Plan(
        name="quick",
        rollouts=Rollouts(rounds=[8, 16, 32]),
        support=Support(draws=16),
        collection=Collection(trajectories=12),
    ),
}


# On disk ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan with what its lock says. locked: a lock file lies beside it. departed: what differs from the lock."""

    plan: Plan
    locked: bool
    departed: tuple[str, ...]


def load_plan(spec: str) -> PlanFile:
    """Open a preset by name or a TOML file, with the lock beside it.

    Raises InputError where there is none, it does not parse, or a setting is wrong.
    """
    if spec in PRESETS:
        return PlanFile(PRESETS[spec], False, ())
    path = Path(spec)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{spec}: no such plan ({error.strerror}); expected a preset ({', '.join(PRESETS)}) or a .toml file."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{spec}: does not parse as TOML: {error}.") from None
    plan = Plan.from_json(data, str(path))
    lock = lock_path(path)
    if not lock.exists():
        return PlanFile(plan, False, ())
    return PlanFile(plan, True, tuple(departures(plan, read_lock(lock))))


def lock_path(plan: Path) -> Path:
    """Where the lock of a plan file lies."""
    return plan.with_suffix(".lock")


def write_lock(path: Path, plan: Plan) -> Path:
    """Lock a plan: write its content and hash beside it. Raises InputError if another content is locked already."""
    lock = lock_path(path)
    if lock.exists() and read_lock(lock).hash != plan.hash:
        changed = ", ".join(departures(plan, read_lock(lock)))
        raise InputError(
            f"{lock}: already locks another content ({changed}); a locked plan is changed under a new name."
        )
    lock.write_text(json.dumps({"hash": plan.hash, "plan": plan.to_json()}, indent=1) + "\n", encoding="utf-8")
    return lock


def read_lock(lock: Path) -> Plan:
    """The plan a lock holds. Raises InputError if the file is damaged or was edited."""
    try:
        data = json.loads(lock.read_text(encoding="utf-8"))
        plan = Plan.from_json(data["plan"], str(lock))
        stated = data["hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{lock}: is damaged ({type(error).__name__}); restore it from version control.") from None
    if plan.hash != stated:
        raise InputError(f"{lock}: its content does not have the hash it states; restore it from version control.")
    return plan


def departures(plan: Plan, locked: Plan) -> list[str]:
    """The settings in which a plan differs from a locked one, as `part.key: locked -> now`."""
    changes: list[str] = []

    def compare(path: str, now: Any, before: Any) -> None:
        if isinstance(now, dict) and isinstance(before, dict):
            for key in sorted({*now, *before}):
                compare(f"{path}.{key}" if path else key, now.get(key), before.get(key))
        elif now != before:
            changes.append(f"{path}: {json.dumps(before)} -> {json.dumps(now)}")

    compare("", plan.to_json(), locked.to_json())
    return changes
