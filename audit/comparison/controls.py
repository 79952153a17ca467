"""The two controls of every comparison: a signal that must be found, and one that must not.

Knows: how they are made. Hides: the streams they are drawn from.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from envs.core import InputError

ORACLE, PERMUTED = "control.oracle", "control.permuted"


def controls(effects: pd.DataFrame, *, noise: float = 1.0, seed: int = 0) -> pd.DataFrame:
    """Columns `point`, the planted oracle and the permuted control, for defined points.

    The oracle is the estimated effect plus normal noise of `noise` standard deviations of the effects (1: a Pearson
    correlation of about .71 with them). It shares the rollouts' own noise with the effects, so it shows that the
    machinery and the amount of data can find a signal of that strength; no real signal can be as good. The permuted
    control is the oracle shuffled within trajectories.
    Raises InputError where noise is not positive.
    """
    if not noise > 0:
        raise InputError(f"controls: noise is {noise}; expected a number above 0 (standard deviations of the effects).")
    frame = effects.loc[effects["support"] == "defined", ["point", "trajectory", "step", "estimate"]]
    frame = frame.sort_values(["trajectory", "step"], kind="stable")
    tau = frame["estimate"].to_numpy(dtype=float)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, 1])))
    spread = float(np.std(tau)) if tau.size else 0.0
    spread = spread or 1.0  # all effects equal: pure noise, and nothing can be found
    oracle = tau + noise * spread * rng.standard_normal(tau.size)
    permuted = oracle.copy()
    for rows in frame.reset_index(drop=True).groupby("trajectory", sort=True).indices.values():
        permuted[rows] = oracle[rng.permutation(rows)]
    return pd.DataFrame({"point": frame["point"].to_numpy(), ORACLE: oracle, PERMUTED: permuted})


IMPORTANCE = {ORACLE: "absolute", PERMUTED: "absolute"}
