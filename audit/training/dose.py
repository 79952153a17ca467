"""Dose: how much training each arm gets, written in a ledger, and made equal by declared means.

Knows: what counts as dose (effective sample size, optimiser steps and, for text, tokens are matched; the rest is
shown), and the means: subsample (drop examples at random), repeat (go through few examples more often), steps (one
step budget for all), tokens (every step takes as many examples as fill one token budget). Hides: how a subsample hits
an effective sample size to rounding when weights are unequal, and the order: all arms of one seed drop examples in one
random order and go through what they keep in another, an epoch each.

Repeating an example adds steps, never effective sample size: that counts distinct examples (section 6 of the
definitions). So only a subsample can equalise it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
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
Ints = npt.NDArray[np.int64]
Means = Literal["subsample", "steps", "repeat", "tokens"]
Equal = Literal["effective", "steps", "tokens"]
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

    def file_name(self) -> str:
        """A name for files of this run, from arm and seed."""
        return f"{re.sub(r'[^a-z0-9]+', '-', self.arm.lower()).strip('-')}.seed{self.seed}"


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
        normalised weights. shown: examples the optimiser sees, repeats included. tokens: completion tokens shown;
        weighted_tokens: each times its example's weight; read: prompt and completion tokens shown; all three missing
        for the linear policy. rate_integral: sum of the learning rates. displacement: missing until trained.
        """
        return pd.DataFrame([self._row(run) for run in self.runs])

    def summary(self) -> pd.DataFrame:
        """One row an arm: means over seeds of what is matched and shown."""
        columns = ["examples", "trajectories", "effective", "steps", "shown", "rate_integral"]
        columns += ["tokens", "weighted_tokens", "read"] if self.examples.tokens is not None else []
        return self.to_frame().groupby(["dose", "arm"], sort=False)[columns].mean().reset_index()

    def batches(self, run: Dose) -> list[Ints]:
        """The examples of each step of a training run, an example once for each time it is shown."""
        budget = self.token_budget() if "tokens" in self.by else 0.0
        return batches(run.weights, self.recipe, run.steps, run.seed, self.examples.tokens, budget)

    def token_budget(self) -> float:
        """Weighted tokens of a step where tokens are matched: a batch of examples of mean length, for all arms."""
        assert self.examples.tokens is not None
        return self.recipe.batch * float(self.examples.tokens[self.examples.usable()].mean())

    def _row(self, run: Dose) -> dict[str, Any]:
        kept = run.weights > 0
        n = int(kept.sum())
        shown = np.concatenate(self.batches(run)) if run.steps else np.empty(0, dtype=np.int64)
        tokens, weighted, read = None, None, None
        if self.examples.tokens is not None and n:
            each = self.examples.tokens[shown]
            tokens, weighted = int(each.sum()), float(run.weights[shown] @ each)
            if self.examples.encoded is not None:
                read = tokens + sum(len(self.examples.encoded[i].prompt) for i in shown.tolist())
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
            "weighted_tokens": weighted,
            "read": read,
            "steps": run.steps,
            "shown": int(shown.size),
            "rate_integral": float(self.recipe.rates(run.steps).sum()) if run.steps else 0.0,
            "displacement": math.nan if n else 0.0,
        }


def match(
    arms: Arms,
    recipe: Recipe | None = None,
    *,
    seeds: int | Sequence[int] = 5,
    by: Sequence[Means] | None = None,
    effective_size: float | None = None,
    across: Across = "seeds",
    unequal: Sequence[Equal] = (),
    dose: str = "matched",
) -> Doses:
    """Give every arm the same dose.

    seeds: how many training runs an arm, or their seeds: they set the order of the examples, which are dropped, and
    how random controls are drawn. by: the means (default: subsample, steps, and tokens where they are counted).
    `subsample` drops examples at random until the effective sample size is `effective_size` (default: the smallest
    arm's, over all seeds); `steps` gives all the step budget (`recipe.steps`, or what the smallest arm would take);
    `repeat` gives all what the largest would take; `tokens` fills every step up to one budget of weighted completion
    tokens (a batch of examples of mean length) instead of a number of examples: arms whose commands are long see fewer
    of them, and weighted tokens of runs differ by no more than their heaviest example has.
    across: `seeds`, all runs see the same trajectories, and results hold given these: with others, credit that is pure
    noise would pick other examples and look better or worse (a planted world finds such differences in 8 to 10 % of
    studies at alpha .05). `folds`: each seed sees games of its own (split by their ids), so that results hold for new
    training games too (3 % in the same world); it needs games for every fold.
    unequal: which equalities not to insist on. Arms that keep nothing (untrained) have no dose and are left alone.
    Raises InputError where doses differ (by more than .5 in effective sample size, in steps, or in weighted tokens by
    more than said above), naming the arms.
    """
    recipe = recipe or Recipe()
    usual: tuple[Means, ...] = ("subsample", "steps", "tokens")
    means = (usual if arms.examples.tokens is not None else usual[:2]) if by is None else tuple(by)
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not numbers or len(set(numbers)) != len(numbers):
        raise InputError(f"Training needs one or more different seeds; got {seeds}.")
    for value, kind in ((means, Means), (unequal, Equal), ((across,), Across)):
        for name in value:
            if name not in get_args(kind):
                raise InputError(f"{name!r} is no means of matching; expected some of {', '.join(get_args(kind))}.")
    if "steps" in means and "repeat" in means:
        raise InputError("Steps cannot be matched both down ('steps') and up ('repeat'); choose one.")
    if "tokens" in means and (arms.examples.tokens is None or recipe.batch == 0):
        raise InputError("Tokens are matched where they are counted (Examples.counted) and batches are not the whole.")
    folds: npt.NDArray[np.int64] | None = None
    if across == "folds":
        games = arms.examples.points["game"].astype(str)
        folds = np.array(games.map(fold_of(games, len(numbers))), dtype=np.int64)
    runs = [run for place, seed in enumerate(numbers) for run in _undosed(arms, seed, folds, place)]
    dosed = [run for run in runs if run.weights.any()]
    if dosed and "subsample" in means:
        target = min(effective(run.weights) for run in dosed) if effective_size is None else float(effective_size)
        order = {seed: _order(len(arms.examples), "subsample", seed) for seed in numbers}
        runs = [_subsample(run, target, order[run.seed]) if run.weights.any() else run for run in runs]
    elif effective_size is not None:
        raise InputError("effective_size needs by=('subsample', ...).")
    runs = _steps(runs, recipe, means)
    doses = Doses(arms.examples, recipe, dose, means, across, tuple(runs))
    _check_equal(doses, unequal)
    return doses


def unmatched(
    arms: Arms, recipe: Recipe | None = None, *, seeds: int | Sequence[int] = 5, across: Across = "seeds"
) -> Doses:
    """Every arm as its rule leaves it: so many passes over what it keeps. To be shown beside matched arms."""
    return match(
        arms, recipe, seeds=seeds, by=(), across=across, unequal=get_args(Equal), dose="unmatched"
    )  # fmt: skip


def batches(
    weights: Floats, recipe: Recipe, steps: int, seed: int, tokens: Ints | None = None, budget: float = 0.0
) -> list[Ints]:
    """The examples of each step: one stream of epochs, cut into batches; what remains of an epoch begins the next.

    The order of an epoch follows from the seed alone; an arm leaves out what has no weight. budget: weighted tokens a
    step instead of `recipe.batch` examples: a step ends where one more example would take the run further from its
    budget so far, and has at least one.
    """
    kept = weights > 0
    if recipe.batch == 0:
        return [np.flatnonzero(kept)] * steps

    def stream() -> Iterator[int]:
        epoch = 0
        while True:
            order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(weights.size)
            yield from order[kept[order]].tolist()
            epoch += 1

    examples = stream()
    if not budget:
        return [np.fromiter(examples, np.int64, recipe.batch) for _ in range(steps)]
    assert tokens is not None
    costs = weights * tokens
    found: list[Ints] = []
    spent, following = 0.0, next(examples)
    for step in range(1, steps + 1):
        batch: list[int] = []
        while not batch or spent + costs[following] / 2 < step * budget:
            batch.append(following)
            spent += float(costs[following])
            following = next(examples)
        found.append(np.array(batch, dtype=np.int64))
    return found


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
    if ledger.empty:
        return
    checks: list[tuple[str, str, float, str]] = [
        ("effective", "effective sample size", 2 * ROUNDING, "'subsample'"),
        ("steps", "optimiser steps", 0.0, "'steps' or 'repeat'"),
    ]
    if doses.examples.tokens is not None:
        heaviest = max(float((run.weights * doses.examples.tokens).max()) for run in doses.runs)
        how = "'tokens', with larger batches" if "tokens" in doses.by else "'tokens'"
        checks.append(("tokens", "weighted tokens", heaviest, how))
    for name, what, room, how in checks:
        values = ledger["weighted_tokens" if name == "tokens" else name].to_numpy(dtype=float)
        low, high = int(values.argmin()), int(values.argmax())
        if name not in unequal and values[high] - values[low] > room + 1e-9:
            arms = ledger["arm"].tolist()
            raise InputError(
                f"Arms differ in {what}: {arms[high]} has {values[high]:g}, {arms[low]} {values[low]:g}; "
                f"match by {how}, or say unequal=({name!r},)."
            )
