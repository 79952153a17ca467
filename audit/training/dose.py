"""Dose: how much training each arm gets, written in a ledger, and made equal by declared means.

Knows: what counts as dose (effective sample size and optimiser steps are matched; the rest is shown), and the means:
subsample (drop examples at random), repeat (go through few examples more often), steps (one step budget for all).
Hides: how a subsample hits an effective sample size to rounding when weights are unequal, and that all arms of one
seed drop examples in one random order.

Repeating an example adds steps, never effective sample size: that counts distinct examples (section 6 of the
definitions). So only a subsample can equalise it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

from audit.records import draws
from audit.training.examples import Examples
from audit.training.rules import Arms, effective
from envs.core import InputError

Floats = npt.NDArray[np.float64]
Means = Literal["subsample", "steps", "repeat"]
Equal = Literal["effective", "steps"]
Across = Literal["seeds", "folds"]

ROUNDING = 0.5  # effective sample sizes that differ by no more than this from the target are equal to rounding


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an arm is trained, alike for all arms.

    epochs: passes over the kept examples, where `steps` does not set the number of optimiser steps. batch: examples a
    step, 0 for all of them. rate: learning rate. schedule: `constant`, or `linear` down to 0.
    """

    epochs: float = 4.0
    steps: int | None = None
    batch: int = 16
    rate: float = 0.02
    optimiser: Literal["adam", "sgd"] = "adam"
    schedule: Literal["constant", "linear"] = "constant"

    def __post_init__(self) -> None:
        checks = {
            "epochs": self.epochs > 0 and math.isfinite(self.epochs),
            "steps": self.steps is None or self.steps >= 1,
            "batch": self.batch >= 0,
            "rate": self.rate > 0 and math.isfinite(self.rate),
            "optimiser": self.optimiser in ("adam", "sgd"),
            "schedule": self.schedule in ("constant", "linear"),
        }
        for name, good in checks.items():
            if not good:
                raise InputError(f"The recipe's {name} is {getattr(self, name)!r}; see Recipe for what is allowed.")

    def natural_steps(self, examples: int) -> int:
        """Steps of `epochs` passes over so many examples; part of a batch is a step."""
        return max(1, math.ceil(self.epochs * (1.0 if self.batch == 0 else examples / self.batch) - 1e-9))

    def rates(self, steps: int) -> Floats:
        """(steps,) learning rates."""
        if self.schedule == "constant":
            return np.full(steps, self.rate)
        return self.rate * (1 - np.arange(steps) / steps)


@dataclass(frozen=True, slots=True)
class Dose:
    """What one training run of one arm gets. weights: (examples,) with mean 1 over those kept, 0 elsewhere.
    dropped: kept by the rule, but not by matching (or in another fold)."""

    arm: str
    seed: int
    weights: Floats
    steps: int
    dropped: int
    no_credit: int
    unusable: int
    control_of: str | None = None


@dataclass(frozen=True)
class Doses:
    """The training runs of all arms. dose: what the set is called (`matched`, `unmatched`)."""

    examples: Examples
    recipe: Recipe
    dose: str
    by: tuple[str, ...]
    across: Across
    runs: tuple[Dose, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The training seeds, common to all arms."""
        return tuple(dict.fromkeys(run.seed for run in self.runs))

    def to_frame(self) -> pd.DataFrame:
        """The ledger: one row an arm and seed.

        examples + left_out + dropped + no_credit + unusable is the number of examples there are. weight: sum of the
        normalised weights. shown: examples the optimiser sees, repeats included. tokens: completion tokens shown,
        missing for the linear policy. rate_integral: sum of the learning rates. displacement: missing until trained.
        """
        return pd.DataFrame([self._row(run) for run in self.runs])

    def summary(self) -> pd.DataFrame:
        """One row an arm: means over seeds of what is matched and shown."""
        columns = ["examples", "trajectories", "effective", "steps", "shown", "rate_integral"]
        return self.to_frame().groupby(["dose", "arm"], sort=False)[columns].mean().reset_index()

    def _row(self, run: Dose) -> dict[str, Any]:
        kept = run.weights > 0
        n = int(kept.sum())
        shown = run.steps * (self.recipe.batch or n)
        tokens = None
        if self.examples.tokens is not None and n:
            # Every kept example is shown equally often, to within one pass.
            tokens = float(self.examples.tokens[kept].sum()) * shown / n
        return {
            "dose": self.dose,
            "arm": run.arm,
            "seed": run.seed,
            "trajectories": int(self.examples.points["trajectory"][kept].nunique()),
            "games": int(self.examples.points["game"][kept].nunique()),
            "examples": n,
            "left_out": len(self.examples) - n - run.dropped - run.no_credit - run.unusable,
            "dropped": run.dropped,
            "no_credit": run.no_credit,
            "unusable": run.unusable,
            "weight": float(run.weights.sum()),
            "effective": effective(run.weights),
            "tokens": tokens,
            "steps": run.steps,
            "shown": shown,
            "rate_integral": float(self.recipe.rates(run.steps).sum()) if run.steps else 0.0,
            "displacement": math.nan if n else 0.0,
        }


def match(
    arms: Arms,
    recipe: Recipe | None = None,
    *,
    seeds: int | Sequence[int] = 5,
    by: Sequence[Means] = ("subsample", "steps"),
    effective_size: float | None = None,
    across: Across = "seeds",
    unequal: Sequence[Equal] = (),
    dose: str = "matched",
) -> Doses:
    """Give every arm the same dose.

    seeds: how many training runs an arm, or their seeds: they set the order of the examples, which are dropped, and
    how random controls are drawn. by: the means. `subsample` drops examples at random until the effective sample size
    is `effective_size` (default: the smallest arm's, over all seeds); `steps` gives all the step budget
    (`recipe.steps`, or what the smallest arm would take); `repeat` gives all what the largest would take.
    across: `seeds`, all runs see the same trajectories, and results hold given these: with others, credit that is pure
    noise would pick other examples and look better or worse (a planted world finds such differences in 8 to 10 % of
    studies at alpha .05). `folds`: each seed sees games of its own (split by their ids), so that results hold for new
    training games too (3 % in the same world); it needs games for every fold.
    unequal: which equalities not to insist on. Arms that keep nothing (untrained) have no dose and are left alone.
    Raises InputError where doses differ (by more than .5 in effective sample size, or in steps), naming the arms.
    """
    recipe = recipe or Recipe()
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not numbers or len(set(numbers)) != len(numbers):
        raise InputError(f"Training needs one or more different seeds; got {seeds}.")
    for value, kind in ((by, Means), (unequal, Equal), ((across,), Across)):
        for name in value:
            if name not in get_args(kind):
                raise InputError(f"{name!r} is no means of matching; expected some of {', '.join(get_args(kind))}.")
    if "steps" in by and "repeat" in by:
        raise InputError("Steps cannot be matched both down ('steps') and up ('repeat'); choose one.")
    folds: npt.NDArray[np.int64] | None = None
    if across == "folds":
        games = arms.examples.points["game"].astype(str)
        folds = np.array(games.map(fold_of(games, len(numbers))), dtype=np.int64)
    runs = [run for place, seed in enumerate(numbers) for run in _undosed(arms, seed, folds, place)]
    dosed = [run for run in runs if run.weights.any()]
    if dosed and "subsample" in by:
        target = min(effective(run.weights) for run in dosed) if effective_size is None else float(effective_size)
        order = {seed: _order(len(arms.examples), "subsample", seed) for seed in numbers}
        runs = [_subsample(run, target, order[run.seed]) if run.weights.any() else run for run in runs]
    elif effective_size is not None:
        raise InputError("effective_size needs by=('subsample', ...).")
    runs = _steps(runs, recipe, by)
    doses = Doses(arms.examples, recipe, dose, tuple(by), across, tuple(runs))
    _check_equal(doses, unequal)
    return doses


def unmatched(
    arms: Arms, recipe: Recipe | None = None, *, seeds: int | Sequence[int] = 5, across: Across = "seeds"
) -> Doses:
    """Every arm as its rule leaves it: so many passes over what it keeps. To be shown beside matched arms."""
    return match(
        arms, recipe, seeds=seeds, by=(), across=across, unequal=("effective", "steps"), dose="unmatched"
    )  # fmt: skip


def _order(n: int, *key: Any) -> npt.NDArray[np.int64]:
    return np.argsort(np.array(draws(n, *key), dtype=np.uint64), kind="stable")


def fold_of(games: Iterable[str], n: int) -> dict[str, int]:
    """Which of n folds each game is in. Folds are equal in games, not in steps. Raises InputError for too few games."""
    names = sorted(set(games))
    if len(names) < n:
        raise InputError(f"{len(names)} training games cannot be split into {n} folds; give fewer seeds or more games.")
    order = _order(len(names), "folds", names)
    return {names[game]: place % n for place, game in enumerate(order.tolist())}


def _undosed(arms: Arms, seed: int, folds: npt.NDArray[np.int64] | None, place: int) -> Iterable[Dose]:
    usable = arms.examples.usable()
    here = np.ones(len(arms.examples), dtype=bool) if folds is None else folds == place
    for arm in arms:
        drawn = arm.draw(seed)
        # No credit is counted where the rule (or the rule that a control follows) had none.
        missing = int((np.isnan(drawn) & usable).sum())
        weights = np.where(here, np.nan_to_num(drawn), 0.0)
        if (drawn > 0).any() and not weights.any():
            raise InputError(f"Arm {arm.name} keeps no example in fold {place}; give fewer seeds or more games.")
        dropped = int((drawn > 0).sum() - (weights > 0).sum())
        yield Dose(
            arm.name, seed, _normalised(weights), 0, dropped, missing, int((~usable).sum()), arm.control_of
        )  # fmt: skip


def _normalised(weights: Floats) -> Floats:
    kept = weights > 0
    return weights / weights[kept].mean() if kept.any() else weights


def _subsample(run: Dose, target: float, order: npt.NDArray[np.int64]) -> Dose:
    """Keep a beginning of a random order whose effective sample size is nearest to the target.

    Adding an example of weight w to a sum S with sum of squares Q gives (S+w)^2/(Q+w^2) <= S^2/Q + 1 (Cauchy-Schwarz),
    so that effective sample size grows by at most 1 an example and cannot jump over the target by more than that: on
    the way up, one of the two neighbours of the target is within .5 of it.
    """
    members = order[run.weights[order] > 0]
    w = run.weights[members]
    sizes = w.cumsum() ** 2 / (w * w).cumsum()
    above = np.flatnonzero(sizes >= target - 1e-9)
    if not above.size:
        if sizes[-1] < target - ROUNDING:
            raise InputError(
                f"Arm {run.arm}, seed {run.seed}: effective sample size {sizes[-1]:.1f} is below the {target:.1f} "
                f"asked for; ask for less, or for no subsample."
            )
        return run
    last = int(above[0])
    if last > 0 and target - sizes[last - 1] < sizes[last] - target:
        last -= 1
    if effective(run.weights) <= target + 1e-9:  # the smallest arm stays whole
        last = members.size - 1
    weights = np.zeros_like(run.weights)
    weights[members[: last + 1]] = w[: last + 1]
    return replace(run, weights=_normalised(weights), dropped=run.dropped + members.size - last - 1)


def _steps(runs: Sequence[Dose], recipe: Recipe, by: Sequence[str]) -> list[Dose]:
    natural = [recipe.natural_steps(int((run.weights > 0).sum())) if run.weights.any() else 0 for run in runs]
    dosed = [steps for steps in natural if steps]
    if dosed and ("steps" in by or "repeat" in by):
        budget = recipe.steps or (min(dosed) if "steps" in by else max(dosed))
        natural = [budget if steps else 0 for steps in natural]
    return [replace(run, steps=steps) for run, steps in zip(runs, natural, strict=True)]


def _check_equal(doses: Doses, unequal: Sequence[str]) -> None:
    ledger = doses.to_frame()
    ledger = ledger[ledger["examples"] > 0]
    names = ledger["arm"].tolist()
    for column, room, how in (("effective", 2 * ROUNDING, "'subsample'"), ("steps", 0.0, "'steps' or 'repeat'")):
        if column in unequal or ledger.empty:
            continue
        values = ledger[column].to_numpy(dtype=float)
        low, high = int(values.argmin()), int(values.argmax())
        if values[high] - values[low] > room + 1e-9:
            what = "effective sample size" if column == "effective" else "optimiser steps"
            raise InputError(
                f"Arms differ in {what}: {names[high]} has {values[high]:g}, {names[low]} {values[low]:g}; "
                f"match by {how}, or say unequal=({column!r},)."
            )
