"""Simulated studies whose truth is known: true effects, binomial rollouts, signals of known correlation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """games x per_game trajectories of `points` (low, high) steps; effects are `spread` x normal, a share of them 0.

    rollouts: of the factual action and of its alternatives. strength: correlation of the signal with true effects.
    tied: levels that the signal is rounded to (0: continuous).
    """

    games: int = 30
    per_game: int = 2
    points: tuple[int, int] = (12, 24)
    spread: float = 0.25
    zeros: float = 0.0
    rollouts: int = 24
    strength: float = 0.5
    tied: int = 0
    wander: float = 0.15  # how much the strength differs between games


def study(world: World, rng: np.random.Generator) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(effects, signals): columns as a run's; `truth` is the true effect, `signal` the signal."""
    rows = []
    n = 0
    for game in range(world.games):
        strength = float(np.clip(world.strength + world.wander * rng.standard_normal(), -0.99, 0.99))
        for number in range(world.per_game):
            size = int(rng.integers(world.points[0], world.points[1] + 1))
            base = rng.uniform(0.35, 0.65)
            wanted = world.spread * rng.standard_normal(size) * (rng.random(size) >= world.zeros)
            high, low = np.clip(base + wanted / 2, 0, 1), np.clip(base - wanted / 2, 0, 1)
            tau = high - low
            x = strength * tau / world.spread + (1 - strength**2) ** 0.5 * rng.standard_normal(size)
            if world.tied:
                x = np.clip(np.round(x * world.tied / 4), -world.tied // 2, world.tied // 2)
            wins = rng.binomial(world.rollouts, high), rng.binomial(world.rollouts, low)
            for step in range(size):
                rows.append(
                    (f"p{n}", f"t{game}.{number}", f"g{game}", step, tau[step], wins[0][step], wins[1][step], x[step])
                )
                n += 1
    columns = ["point", "trajectory", "game", "step", "truth", "wins_factual", "wins_alternative", "signal"]
    frame = pd.DataFrame(rows, columns=columns)
    m = world.rollouts
    estimate = (frame["wins_factual"] - frame["wins_alternative"]) / m
    noise = sum(frame[c] / m * (1 - frame[c] / m) / (m - 1) for c in ("wins_factual", "wins_alternative"))
    pivotal = estimate.abs() > 2.6 * np.sqrt(np.maximum(noise, 1e-3))
    effects = frame.assign(
        estimate=estimate,
        variance=noise,
        support="defined",
        state=np.where(pivotal, "pivotal", "inconclusive"),
        pi=np.clip(rng.beta(2, 2, len(frame)), 0.01, 0.99),
        n_factual=m,
        n_alternative=m,
        contrast="alternatives",
    ).drop(columns="signal")
    return effects, frame[["point", "signal"]]
