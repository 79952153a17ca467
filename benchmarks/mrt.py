"""Estimators of micro-randomised trials beside EconML's DynamicDML, and their growth to a million decisions.

    python -m benchmarks.mrt --json                            (make bench)
    python -m benchmarks.mrt --econml PATH/TO/python           a Python with econml of its own (it pins old packages)
    python -m benchmarks.mrt --biggest 1000000                 the largest number of decisions

dynamicdml_ratio: seconds of DynamicDML over seconds of `blip(..., "none", method="snmm")` on one table of 2000
trajectories of 10 decisions, an effect for each decision, the same learner (ridge) and two folds; null where EconML is
not to be had. DynamicDML estimates the propensity too, ours is told it: in a trial it is known. The data follow an
additive blip of .5 at every decision, and both print what they find.
million_seconds: seconds of a pooled AIPW blip, a g-estimation with an effect for each decision and the gain of one
policy at the largest size. growth: the slope of log seconds on log decisions (1 is linear). Memory is the peak of a
fresh process for each size.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from multiprocessing import get_context

import numpy as np
import pandas as pd
from sklearn.linear_model import Ridge

from audit.mrt import MRTData, blip, policy_gain
from audit.mrt.rules import read_rule

clock = time.perf_counter
T, FEATURES, EFFECT = 10, 5, 0.5

OTHERS = """
import json, sys, time, warnings
warnings.filterwarnings("ignore")
import numpy as np
from sklearn.linear_model import LogisticRegression, Ridge
from econml.panel.dml import DynamicDML
data = np.load(sys.argv[1])
seconds, found = [], None
for _ in range(int(sys.argv[2])):
    model = DynamicDML(model_y=Ridge(1.0), model_t=LogisticRegression(), discrete_treatment=True, cv=2, random_state=0)
    started = time.perf_counter()
    model.fit(data["y"], data["a"], X=None, W=data["x"], groups=data["unit"])
    seconds.append(time.perf_counter() - started)
    found = np.ravel(model.intercept_).tolist()
print(json.dumps({"seconds": min(seconds), "found": found}))
"""


def table(n: int, seed: int = 0) -> tuple[MRTData, dict[str, np.ndarray]]:
    """n trajectories of T decisions as ours and as arrays; the blip is EFFECT whatever happens later."""
    rng = np.random.Generator(np.random.Philox(seed))
    x = np.zeros((n, T, FEATURES))
    a = (rng.random((n, T)) < 0.5).astype(int)
    state = rng.standard_normal((n, FEATURES))
    for t in range(T):
        x[:, t] = state
        state = 0.5 * state + rng.standard_normal((n, FEATURES))
    y = EFFECT * a.sum(axis=1) + x.sum(axis=(1, 2)) * 0.2 + rng.standard_normal(n)
    unit = np.repeat(np.arange(n), T)
    names = [f"x{j}" for j in range(FEATURES)]
    decisions = pd.DataFrame(
        {"trajectory": unit, "t": np.tile(np.arange(T), n), "eligible": 1, "arm": a.ravel(), "p": 0.5}
    ).assign(slot=lambda d: d["t"].astype(str), **{name: x[:, :, j].ravel() for j, name in enumerate(names)})
    trajectories = pd.DataFrame({"trajectory": np.arange(n), "outcome": y})
    arrays = {"y": np.repeat(y, T), "a": a.ravel(), "x": x.reshape(n * T, FEATURES), "unit": unit}
    # DynamicDML reads an outcome a period; a terminal one is 0 before the last.
    arrays["y"] = np.where(np.tile(np.arange(T), n) == T - 1, arrays["y"], 0.0)
    return MRTData(decisions, trajectories, features=[*names, "slot"]), arrays


def beside_dynamicdml(python: str, folder: str, repeats: int) -> dict[str, float | None]:
    """Seconds of both on the same table."""
    data, arrays = table(2000)
    file = f"{folder}/panel.npz"
    np.savez(file, **arrays)
    seconds = []
    for _ in range(repeats):
        started = clock()
        ours = blip(
            data,
            "none",
            "slot",
            method="snmm",
            learner=Ridge(1.0),
            folds=2,
            nuisance=[f"x{j}" for j in range(FEATURES)],
        )
        seconds.append(clock() - started)
    print(f"ours: {min(seconds):.2f} s, effects {ours.estimate.round(2).tolist()}", flush=True)
    answer = subprocess.run(
        [python, "-c", OTHERS, file, str(repeats)], capture_output=True, text=True, env=_alone(), check=False
    )
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no answer"])[-1]
        print(
            f"DynamicDML: not to be had ({reason}); pip install econml in an environment of its own, name it --econml"
        )
        return {"dynamicdml_ratio": None}
    theirs = json.loads(answer.stdout.splitlines()[-1])
    print(f"DynamicDML: {theirs['seconds']:.2f} s, effects {np.round(theirs['found'], 2).tolist()}")
    return {"dynamicdml_ratio": theirs["seconds"] / min(seconds)}


def _alone() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def at_size(decisions: int) -> tuple[float, float, float, float]:
    """(seconds of checking the tables, seconds of estimating, peak MB, MB of the tables alone) in this process."""
    started = clock()
    data, _ = table(decisions // T)
    tables = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ready = clock()
    blip(data, "randomized")
    blip(data, "none", "slot")
    policy_gain(data, {"early": read_rule("t<5")}, "slot")
    return ready - started, clock() - ready, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, tables


def growth(biggest: int) -> dict[str, float]:
    """Seconds and memory at three sizes up to the biggest, each in a fresh process."""
    sizes = [biggest // 16, biggest // 4, biggest]
    seconds = []
    figures: dict[str, float] = {}
    for size in sizes:
        with get_context("spawn").Pool(1) as fresh:
            ready, spent, peak, tables = fresh.apply(at_size, (size,))
        print(f"{size:>9,} decisions: {spent:.1f} s (tables {ready:.1f} s), peak {peak:.0f} MB ({tables:.0f} before)")
        seconds.append(spent)
        figures[f"mb_at_{size}"] = peak
    slope = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    return {"million_seconds": seconds[-1], "growth": float(slope), **figures}


def main() -> None:
    """Command line."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--econml", default=sys.executable, help="a Python that has econml")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many runs counts, on both sides")
    parser.add_argument("--biggest", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, float | None] = beside_dynamicdml(options.econml, folder, options.repeats)
    figures |= growth(options.biggest)
    if options.json:
        print(json.dumps({key: None if value is None else round(value, 4) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
