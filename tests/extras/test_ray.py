"""The same call on a Ray cluster: equal results, with one local worker pool standing in for the cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from audit.plan import PRESETS, Collection, PlanFile, Points, Rollouts
from audit.study import replay_study

pytestmark = pytest.mark.extras
ray = pytest.importorskip("ray", reason="ray is not installed; make test-extras installs it")


def test_ray_gives_the_same_effects(tmp_path: Path) -> None:
    plan = replace(
        PRESETS["quick"],
        rollouts=Rollouts(rounds=[4], adaptive=False),
        collection=Collection(trajectories=3),
        points=Points(per_trajectory=4),
    )
    file = PlanFile(plan, False, ())
    local = replay_study("hasty", "generated:6:0", file, tmp_path / "local")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        remote = replay_study("hasty", "generated:6:0", file, tmp_path / "ray", engine="ray", jobs=2)
    finally:
        ray.shutdown()
    pd.testing.assert_frame_equal(local.effects, remote.effects)
    pd.testing.assert_frame_equal(local.rollouts, remote.rollouts)
