"""Planted worlds for arms: choices among four options whose right answer is known, no games.

A policy that gets `theta` right succeeds more often on held-out tasks. In the dose world every example is as good as
every other and credit is noise, so only how much is trained matters. In the content world some examples take a random
option and credit tells, with noise, which ones.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import sparse

from audit.policies.linear import LinearPolicy
from audit.training.examples import Choices, Examples
from audit.training.trainer import Trained

FEATURES, OPTIONS = 6, 4
TRUTH = np.array([2.0, -1.5, 1.0, -1.0, 0.5, 0.0])
NAMES = tuple(f"f{i}" for i in range(FEATURES))


def examples(seed: int, *, games: int = 60, steps: int = 10, wrong: float = 0.0, noise: float = 1.0) -> Examples:
    """games x steps examples; a share `wrong` of them takes a random option. credit: 1 for right plus noise."""
    rng = np.random.default_rng([seed, 1])
    n = games * steps
    x = rng.normal(size=(n, OPTIONS, FEATURES))
    utility = x @ TRUTH + rng.gumbel(size=(n, OPTIONS))  # a draw from the conditional logit of TRUTH
    right = rng.random(n) >= wrong
    position = np.where(right, utility.argmax(axis=1), rng.integers(0, OPTIONS, n))
    design = sparse.csr_matrix(x.reshape(n * OPTIONS, FEATURES))
    members = np.arange(n * OPTIONS).reshape(n, OPTIONS)
    game = np.repeat(np.arange(games), steps)
    points = pd.DataFrame(
        {
            "point": [f"{v:032x}" for v in rng.permutation(n)],
            "trajectory": [f"t{g}" for g in game],
            "game": [f"g{g}" for g in game],
            "step": np.tile(np.arange(steps), games),
            "won": rng.random(games)[game] < 0.5,
            "credit": right + noise * rng.normal(size=n),
        }
    )
    start = LinearPolicy("start", (), dict.fromkeys(NAMES, 0.0))
    return Examples(points, Choices(NAMES, design, members, members[np.arange(n), position]), start)


def held_out(trained: Trained, seed: int, *, tasks: int = 60, decisions: int = 3) -> pd.DataFrame:
    """Outcomes on tasks of a few decisions, each of which must be the best one; draws are common to arms."""
    rng = np.random.default_rng([seed, 2])
    x = rng.normal(size=(tasks, decisions, OPTIONS, FEATURES))
    best = (x @ TRUTH).argmax(axis=2)
    parts = []
    for (dose, arm, training_seed), policy in trained.checkpoints.items():
        weights = policy.weights()["weight"]
        u = x @ np.array([weights.get(name, 0.0) for name in NAMES])
        p = np.exp(u - u.max(axis=2, keepdims=True))
        p /= p.sum(axis=2, keepdims=True)
        success = np.take_along_axis(p, best[:, :, None], axis=2)[:, :, 0].prod(axis=1)
        draw = np.random.default_rng([seed, 3, training_seed]).random(tasks)
        parts.append(
            pd.DataFrame(
                {
                    "dose": dose,
                    "arm": arm,
                    "seed": training_seed,
                    "task": np.arange(tasks),
                    "won": 1.0 * (draw < success),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)
