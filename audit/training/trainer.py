"""Training arms at their doses, and the embedded trainer: a weighted conditional logit.

Knows: what a set of trained arms is, whoever trained them (`Trainer`); the embedded trainer's loss (weighted negative
log likelihood of the steps taken) and optimisers. Hides: the arithmetic on shared rows. Batches and their order come
from the doses. Equal seeds give equal bits on one machine. Language models: `audit.training.language`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from audit.policies.linear import LinearPolicy
from audit.training.dose import Dose, Doses, Recipe, batches
from audit.training.examples import Checkpoint, Choices
from envs.core import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Key = tuple[str, str, int]  # dose, arm, seed
Starts = Checkpoint | Mapping[tuple[str, int], Checkpoint]

_BETA1, _BETA2, _TINY = 0.9, 0.999, 1e-8  # Adam (Kingma and Ba 2015)


class Trainer(Protocol):
    """Trains one arm at its dose.

    Returns the checkpoint and its figures for the ledger: displacement, loss_before and loss_after (weighted mean
    negative log likelihood of the kept steps, or of some of them). Raises InputError where it cannot train this.
    """

    def __call__(self, doses: Doses, run: Dose, start: Checkpoint) -> tuple[Checkpoint, dict[str, float]]: ...


@dataclass(frozen=True)
class Trained:
    """Checkpoints by (dose, arm, seed), and the ledger with what training did. controls: random arm -> its arm."""

    checkpoints: Mapping[Key, Checkpoint]
    ledger: pd.DataFrame
    controls: Mapping[str, str]
    given: str

    def to_frame(self) -> pd.DataFrame:
        """The ledger: as `Doses.to_frame`, with displacement (Euclidean, of the weights) and the loss before and after
        (weighted mean negative log likelihood of the kept examples; a language model's of up to `probe` of them)."""
        return self.ledger

    def summary(self) -> pd.DataFrame:
        """One row an arm: means over seeds."""
        columns = ["examples", "effective", "steps", "tokens", "rate_integral", "displacement"]
        columns += ["loss_before", "loss_after"]
        counted = self.ledger["tokens"].notna().any()
        means = self.ledger.groupby(["dose", "arm"], sort=False)[[c for c in columns if counted or c != "tokens"]]
        return means.mean().reset_index()

    def policies(self, dose: str) -> dict[tuple[str, int], Checkpoint]:
        """(arm, seed) -> checkpoint: what the next round starts from."""
        return {(arm, seed): policy for (name, arm, seed), policy in self.checkpoints.items() if name == dose}


def embedded(doses: Doses, run: Dose, start: Checkpoint) -> tuple[Checkpoint, dict[str, float]]:
    """The trainer of linear policies: see the module."""
    choices = doses.examples.choices
    if not isinstance(start, LinearPolicy):
        raise InputError(f"{start}: is a language model; train it with trainer=LanguageTrainer(folder).")
    if choices is None:
        raise InputError("These examples have no choices between commands; export the arms and train them elsewhere.")
    before = dict(start.weights()["weight"])
    origin = np.array([before.get(name, 0.0) for name in choices.features])
    theta, losses = fit(choices, run.weights, origin, run.steps, doses.recipe, run.seed, start.temperature)
    if not np.isfinite(theta).all():
        raise InputError(f"Arm {run.arm}, seed {run.seed}: training diverged; lower the learning rate.")
    weights = {**before, **dict(zip(choices.features, theta.tolist(), strict=True))}
    about = {
        "start": start.describe()["weights"],
        "arm": run.arm,
        "dose": doses.dose,
        "seed": run.seed,
        "steps": run.steps,
        "examples": hashlib.sha256(run.weights.astype("<f8").tobytes()).hexdigest(),
    }
    trained = LinearPolicy(
        f"{start.name}+{run.arm}",
        start.groups,
        {name: weights[name] for name in sorted(weights)},
        temperature=start.temperature,
        training=about,
    )
    return trained, {
        "displacement": float(np.linalg.norm(theta - origin)),
        "loss_before": losses[0],
        "loss_after": losses[1],
    }


def train(
    *doses: Doses,
    start: Starts | None = None,
    trainer: Trainer = embedded,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Trained:
    """Train every arm at its dose, from the policy of the examples (or from `start`, by arm and seed where rounds
    follow each other). Untrained arms are the start itself. trainer: `LanguageTrainer` for language models.

    Raises InputError where two sets of doses have one name, or the trainer cannot train this policy.
    """
    if not doses or len({one.dose for one in doses}) != len(doses):
        raise InputError("train needs one or more sets of doses, each with a name of its own (match(..., dose=...)).")
    checkpoints: dict[Key, Checkpoint] = {}
    ledgers = []
    total = sum(len(one.runs) for one in doses)
    for one in doses:
        ledger = one.to_frame().assign(loss_before=np.nan, loss_after=np.nan)
        for row, run in enumerate(one.runs):
            progress("train", len(checkpoints), total)
            policy = _start(one, run, start)
            if run.steps:
                policy, figures = trainer(one, run, policy)
                for column, value in figures.items():
                    ledger.loc[row, column] = value
            checkpoints[one.dose, run.arm, run.seed] = policy
        ledgers.append(ledger)
    progress("train", total, total)
    controls = {run.arm: run.control_of for one in doses for run in one.runs if run.control_of is not None}
    given = "new training games" if all(one.across == "folds" for one in doses) else "these training trajectories"
    return Trained(checkpoints, pd.concat(ledgers, ignore_index=True), controls, given)


def _start(doses: Doses, run: Dose, start: Starts | None) -> Checkpoint:
    policy = start.get((run.arm, run.seed)) if isinstance(start, Mapping) else start or doses.examples.start
    if policy is None:
        raise InputError(
            f"Arm {run.arm}, seed {run.seed}: there is no linear policy to start from; name the file of a language "
            f"model in this process as the policy, or train elsewhere (export the arms)."
        )
    return policy


def fit(
    choices: Choices,
    weights: Floats,
    start: Floats,
    steps: int,
    recipe: Recipe,
    seed: int,
    temperature: float = 1.0,
) -> tuple[Floats, tuple[float, float]]:
    """`steps` optimiser steps from `start`: (parameters, (loss before, loss after)).

    The loss is sum w_i l_i / sum w_i over the kept examples, l_i the negative log probability of the command taken;
    a batch's gradient is the mean of w_i grad l_i, so that with weights of mean 1 the step does not depend on their
    scale. Raises InputError where a kept example has no choice or there is nothing to learn from.
    """
    kept = np.flatnonzero(weights > 0)
    if not kept.size or steps < 1:
        raise InputError("Training needs examples with weight and at least one step.")
    if (choices.chosen[kept] < 0).any():
        raise InputError("A kept example has no choice to learn from; make the arms with `arms`, which leaves it out.")
    model = _Model(choices, weights, temperature)
    theta = start.astype(float).copy()
    before = model.loss(theta, kept)
    first, second = np.zeros_like(theta), np.zeros_like(theta)
    shown = batches(weights, recipe, steps, seed)
    for number, (batch, rate) in enumerate(zip(shown, recipe.rates(steps), strict=True), start=1):
        gradient = model.gradient(theta, batch)
        if recipe.optimiser == "sgd":
            theta -= rate * gradient
            continue
        first = _BETA1 * first + (1 - _BETA1) * gradient
        second = _BETA2 * second + (1 - _BETA2) * gradient**2
        scale = np.sqrt(second / (1 - _BETA2**number)) + _TINY
        theta -= rate * first / (1 - _BETA1**number) / scale
    return theta, (before, model.loss(theta, kept))


class _Model:
    def __init__(self, choices: Choices, weights: Floats, temperature: float) -> None:
        self._choices, self._weights, self._temperature = choices, weights, temperature
        self._rows = choices.design.shape[0]
        self._transposed = choices.design.T.tocsr()

    def _logprobs(self, theta: Floats, batch: Ints) -> tuple[Ints, Floats]:
        utility = np.append(self._choices.design @ theta / self._temperature, -np.inf)  # the last fills up
        members = self._choices.members[batch]
        u = utility[members]
        u = u - u.max(axis=1, keepdims=True)
        return members, u - np.log(np.exp(u).sum(axis=1, keepdims=True))

    def loss(self, theta: Floats, batch: Ints) -> float:
        members, logprobs = self._logprobs(theta, batch)
        taken = members == self._choices.chosen[batch][:, None]
        # Commands with equal features share a row; the probability of one of them is that of the first found.
        nll = -logprobs[np.arange(batch.size), taken.argmax(axis=1)]
        return float(self._weights[batch] @ nll / self._weights[batch].sum())

    def gradient(self, theta: Floats, batch: Ints) -> Floats:
        members, logprobs = self._logprobs(theta, batch)
        w = self._weights[batch]
        on_rows = np.bincount(members.ravel(), (np.exp(logprobs) * w[:, None]).ravel(), minlength=self._rows + 1)
        on_rows[: self._rows] -= np.bincount(self._choices.chosen[batch], w, minlength=self._rows)
        gradient: Floats = self._transposed @ on_rows[: self._rows] / (batch.size * self._temperature)
        return gradient
