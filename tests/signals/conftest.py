"""A small finished run: eight trajectories of a shipped policy on generated games, a few rollouts a point."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit.plan import Collection, Plan, PlanFile, Rollouts, Support
from audit.results import Run
from audit.study import replay_study


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    plan = Plan(
        name="small",
        support=Support(draws=16),
        rollouts=Rollouts(rounds=[4], adaptive=False),
        collection=Collection(trajectories=12),
    )
    out: Path = tmp_path_factory.mktemp("signals") / "run"
    return replay_study("hasty", "generated:12:0", PlanFile(plan, False, ()), out)
