"""Arms: rules that turn credit into example weights.

Knows: the seven arms, what a rule may keep, and that missing credit is neither 0 nor a reason to be left out quietly.
Hides: ties (broken by the points' ids, which are hashes, so that no order is favoured) and how a random control is
drawn: it keeps as many examples with the same weights as the arm it controls, among the same candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from audit.records import draws
from audit.results import Run
from audit.training.examples import Checkpoint, Examples, examples_of_run
from envs.core import InputError

Floats = npt.NDArray[np.float64]
Keep = Literal["nothing", "all", "top", "above", "proportional"]
Credit = str | Callable[[pd.DataFrame], Any] | None
JUDGE = "judge.good5_hindsight"  # the judge's arm is by this signal unless another column is named


@dataclass(frozen=True, slots=True)
class Rule:
    """From credit to weights.

    credit: a column of the points, or a function of them that gives one number a row (NaN: missing). keep:
    `nothing` (untrained), `all`, `top` (the share `at` of the points that have credit, at least one), `above` (credit
    over `at`), `proportional` (weight = credit where it is positive, else left out). optional: an arm whose column is
    not there is reported absent instead of being an error.

        Rule("early", lambda points: 1.0 * (points["step"] < 5), "proportional")
    """

    name: str
    credit: Credit = None
    keep: Keep = "all"
    at: float = 0.0
    optional: bool = False

    def __post_init__(self) -> None:
        if not self.name or self.name.startswith("random:"):
            raise InputError(f"An arm is named {self.name!r}; give a name that does not start with 'random:'.")
        if self.keep not in ("nothing", "all", "top", "above", "proportional"):
            raise InputError(
                f"Arm {self.name}: keep is {self.keep!r}; expected nothing, all, top, above, proportional."
            )
        if (self.credit is None) != (self.keep in ("nothing", "all")):
            raise InputError(f"Arm {self.name}: keep = {self.keep!r} {'takes no' if self.credit else 'needs'} credit.")
        if self.keep == "top" and not 0 < self.at <= 1:
            raise InputError(f"Arm {self.name}: top {self.at}; expected a share above 0 and at most 1.")

    def text(self) -> str:
        """The rule in words."""
        credit = self.credit if isinstance(self.credit, str) else getattr(self.credit, "__name__", "own function")
        return {
            "nothing": "nothing",
            "all": "every step",
            "top": f"top {100 * self.at:g} % by {credit}",
            "above": f"{credit} above {self.at:g}",
            "proportional": f"weight = {credit} where positive",
        }[self.keep]

    def weights(self, points: pd.DataFrame) -> Floats:
        """(points,) weights: 0 for left out by the rule, NaN for missing credit.

        Raises InputError where the column is not there or the function gives something else than numbers.
        """
        if self.keep in ("nothing", "all"):
            return np.full(len(points), float(self.keep == "all"))
        credit = self._credit(points)
        known = np.isfinite(credit)
        weights = np.where(known, 0.0, np.nan)
        if self.keep == "above":
            weights[known & (credit > self.at)] = 1.0
        elif self.keep == "proportional":
            weights[known] = np.maximum(credit[known], 0.0)
        elif known.any():
            ids = points["point"].astype(str).to_numpy()
            order = np.lexsort((ids, -np.where(known, credit, -np.inf)))
            weights[order[: max(1, round(self.at * int(known.sum())))]] = 1.0
        return weights

    def _credit(self, points: pd.DataFrame) -> Floats:
        if isinstance(self.credit, str):
            if self.credit not in points.columns:
                raise InputError(f"Arm {self.name}: no credit {self.credit!r}; known: {', '.join(points.columns)}.")
            values: Any = points[self.credit]
        else:
            assert self.credit is not None
            values = self.credit(points)
        try:
            credit = pd.to_numeric(pd.Series(np.asarray(values))).to_numpy(dtype=float, na_value=np.nan)
        except (ValueError, TypeError):
            raise InputError(f"Arm {self.name}: its credit is not a number a point.") from None
        if credit.shape != (len(points),) or np.isinf(credit).any():
            raise InputError(f"Arm {self.name}: expected {len(points)} finite or missing numbers, one a point.")
        return credit


def seven(
    share: float = 0.25,
    *,
    judge: str = JUDGE,
    implicit: str = "implicit.delta_success",
    confidence: str = "logprob",
) -> tuple[Rule, ...]:
    """The seven arms: share is kept by credit; judge, implicit, confidence: columns of their credit.

    Confidence is by default the log probability that the policy gave its step. Implicit credit is by default given
    success, not each trajectory's own outcome, which ranks high what is typical of failures where one failed.
    """
    return (
        Rule("untrained", keep="nothing"),
        Rule("all steps"),
        Rule("outcome only", "won", "above", 0.5),
        Rule("judge", judge, "top", share, optional=True),
        Rule("implicit", implicit, "top", share, optional=True),
        Rule("confidence", confidence, "top", share, optional=True),
        Rule("causal", "tau", "top", share, optional=True),
    )


@dataclass(frozen=True, slots=True)
class Arm:
    """A rule applied. weights: (examples,) 0 for left out, NaN for missing or unusable. control_of: the arm whose
    density a random arm has, else None."""

    name: str
    rule: str
    weights: Floats
    control_of: str | None = None

    def draw(self, seed: int) -> Floats:
        """The weights of one training run: a random control shuffles them among the candidates, anew for each seed."""
        if self.control_of is None:
            return self.weights
        candidates = np.flatnonzero(np.isfinite(self.weights))
        key = np.array(draws(candidates.size, "control", self.control_of, seed), dtype=np.uint64)
        shuffled = self.weights.copy()
        shuffled[candidates] = self.weights[candidates][np.argsort(key, kind="stable")]
        return shuffled


@dataclass(frozen=True)
class Arms:
    """Arms by name, on the same examples. absent: arms that could not be made, and why."""

    examples: Examples
    by_name: Mapping[str, Arm]
    absent: Mapping[str, str]

    def __iter__(self) -> Iterator[Arm]:
        return iter(self.by_name.values())

    def to_frame(self) -> pd.DataFrame:
        """One row an arm: rule, examples kept, left out, without credit and unusable (they add up to `examples`),
        trajectories, weight, effective sample size (sum w)^2 / sum w^2. Absent arms have a reason and no numbers."""
        usable = self.examples.usable()
        rows: list[dict[str, Any]] = []
        for arm in self:
            kept = arm.weights > 0
            rows.append(
                {
                    "arm": arm.name,
                    "rule": arm.rule,
                    "examples": len(self.examples),
                    "kept": int(kept.sum()),
                    "left_out": int((arm.weights == 0).sum()),
                    "no_credit": int((np.isnan(arm.weights) & usable).sum()),
                    "unusable": int((~usable).sum()),
                    "trajectories": int(self.examples.points["trajectory"][kept].nunique()),
                    "weight": float(arm.weights[kept].sum()),
                    "effective": effective(arm.weights),
                    "reason": None,
                }
            )
        rows += [{"arm": name, "rule": None, "reason": why} for name, why in self.absent.items()]
        return pd.DataFrame(rows)

    def summary(self) -> pd.DataFrame:
        """The frame in short."""
        return self.to_frame()[["arm", "rule", "kept", "left_out", "no_credit", "effective", "reason"]]


def effective(weights: npt.ArrayLike) -> float:
    """Effective sample size (sum w)^2 / sum w^2 (Kish 1965); 0 where nothing has weight. NaN is no weight."""
    w = np.nan_to_num(np.asarray(weights, dtype=float))
    square = float((w * w).sum())
    return float(w.sum()) ** 2 / square if square > 0 else 0.0


def arms(
    source: Run | Examples,
    rules: Sequence[Rule] | None = None,
    *,
    signals: pd.DataFrame | None = None,
    env: str | None = None,
    policy: Checkpoint | None = None,
    controls: bool = True,
) -> Arms:
    """Apply rules to the steps of a run (or to examples): by default the seven arms.

    signals: a frame with a `point` column and columns of credit. env, policy: as in `examples_of_run`. controls: add
    `random:ARM` for every arm that does not keep all of its candidates alike.
    Raises InputError where an arm keeps nothing, two have one name, or credit is not there and not optional.
    """
    examples = source if isinstance(source, Examples) else examples_of_run(source, env=env, policy=policy)
    if signals is not None:
        examples = examples.join(signals)
    found: dict[str, Arm] = {}
    absent: dict[str, str] = {}
    for rule in seven() if rules is None else rules:
        if rule.name in found or rule.name in absent:
            raise InputError(f"Two arms are named {rule.name!r}; give each a name of its own.")
        if rule.optional and isinstance(rule.credit, str) and not _has(examples.points, rule.credit):
            absent[rule.name] = f"no credit {rule.credit!r}"
            continue
        weights = np.where(examples.usable(), rule.weights(examples.points), np.nan)
        if rule.keep != "nothing" and not (weights > 0).any():
            absent[rule.name] = f"its rule ({rule.text()}) keeps no example"
            if not rule.optional:
                raise InputError(f"Arm {rule.name}: its rule ({rule.text()}) keeps no example.")
            continue
        found[rule.name] = Arm(rule.name, rule.text(), weights)
    if controls:
        for arm in list(found.values()):
            known = arm.weights[np.isfinite(arm.weights)]
            if (known > 0).any() and np.ptp(known) > 0:
                name = f"random:{arm.name}"
                found[name] = Arm(name, f"as many and as heavy as {arm.name}, at random", arm.weights, arm.name)
    return Arms(examples, found, absent)


def _has(points: pd.DataFrame, column: str) -> bool:
    return column in points.columns and bool(points[column].notna().any())
