"""What reports are made of: a small finished run with signals, a trial, a study of arms."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from audit.mrt.trial import import_trial
from audit.plan import Collection, Plan, PlanFile, Rollouts, Support
from audit.results import Run
from audit.scoring import score
from audit.study import replay_study
from audit.training.contrasts import contrast
from audit.training.study import ArmsStudy

NAMES = ("confidence.logp", "baseline.step", "baseline.random")


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    plan = Plan(
        name="small",
        support=Support(draws=16),
        rollouts=Rollouts(rounds=[4, 12], adaptive=False),
        collection=Collection(trajectories=8),
    )
    out = tmp_path_factory.mktemp("report") / "small-run"
    found = replay_study("hasty", "generated:8:0", PlanFile(plan, False, ()), out)
    score(found, NAMES)
    return found


def decisions(rng: np.random.Generator, tools: tuple[str, ...], n: int = 80, steps: int = 6) -> pd.DataFrame:
    """A long table of a trial in which treating helps when the first tool is at hand."""
    rows = []
    for i in range(n):
        tool = rng.choice(len(tools), steps)
        arm = (rng.random(steps) < 0.4).astype(int)
        wins = 0.3 + 0.1 * float((arm * (tool == 0)).sum())
        won = float(rng.random() < min(0.95, wins))
        rows += [
            {"trajectory": f"t{i}", "t": t, "eligible": 1, "arm": int(arm[t]), "p": 0.4, "outcome": won,
             "tool": tools[tool[t]]}
            for t in range(steps)
        ]  # fmt: skip
    return pd.DataFrame(rows)


def trial_of(folder: Path, tools: tuple[str, ...]) -> Path:
    table = folder / "log.csv"
    decisions(np.random.default_rng(3), tools).to_csv(table, index=False)
    import_trial(table, folder / "trial", features=["tool"])
    return folder / "trial"


@pytest.fixture(scope="session")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trial_of(tmp_path_factory.mktemp("trial"), ("search", "write", "run"))


def study_of(arms: tuple[str, str, str]) -> ArmsStudy:
    """Three arms, four seeds, thirty tasks, two doses."""
    rng = np.random.default_rng(5)
    rows, ledger = [], []
    for dose, steps in (("matched", 40), ("unmatched", 90)):
        for place, arm in enumerate(arms):
            for seed in range(4):
                ledger.append({"dose": dose, "arm": arm, "seed": seed, "steps": steps + 10 * place, "effective": 9.0})
                for task in range(30):
                    won = float(rng.random() < 0.35 + 0.15 * place)
                    rows.append({"dose": dose, "arm": arm, "seed": seed, "task": f"g{task}", "won": won})
    outcomes = pd.DataFrame(rows).assign(draws=1)
    table = pd.DataFrame(ledger)
    result = contrast(outcomes, pairs=[(arms[2], arms[0])], ledger=table, sesoi=0.08)
    held = cast(Any, SimpleNamespace(to_frame=lambda: table))
    return ArmsStudy(held, held, result, ("arm judge is absent: no credit",))


@pytest.fixture(scope="session")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arms") / "arms"
    study_of(("random:causal", "outcome only", "causal")).save(folder)
    return folder
