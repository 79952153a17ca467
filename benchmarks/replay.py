"""The audit on the compiled world beside the audit on the stock engine, and adaptive rounds beside equal allocation.

    python -m benchmarks.replay --json                                    (make bench)
    python -m benchmarks.replay --spec alfworld:valid_unseen --points 6   official games, more points
    python -m benchmarks.replay --memory                                  peak memory at 10^5 and 10^6 rollouts

audit_ratio: seconds of the stock engine over seconds of the compiled world for the same points, policy, draws and
rollouts through the same code (the records are checked to be equal). Worlds are open and translated on both sides.
adaptive_ratio: rollouts of adaptive rounds over those of an equal allocation at the last round, on the same points;
`agree` is the share of points that both decide in the same way, of those that the equal allocation decides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from audit.collect import collect, policy_id
from audit.effects import effects, sequential_design
from audit.plan import PRESETS, Collection, Plan, PlanFile, Points, Rollouts
from audit.policies import Policy, load_policy
from audit.records import Trajectory
from audit.replay import Replayer, chosen_steps, point_id
from audit.study import replay_study
from envs import Environment, games, make

clock = time.perf_counter


def replayed(
    env: Environment, policy: Policy, trajectory: Trajectory, plan: Plan
) -> tuple[list[dict[str, Any]], float, int]:
    """Records of a trajectory's chosen points, the seconds they took, and how many points there were."""
    identity = policy_id(policy)
    points = [(step, point_id(trajectory.id, step, identity), []) for step in chosen_steps(trajectory, plan)]
    started = clock()
    records = asyncio.run(Replayer(env, policy, plan).replay(trajectory, points))
    return records, clock() - started, len(points)


def audit_ratio(spec: str, policy_spec: str, points: int, rollouts: int) -> dict[str, float]:
    """One point of each of some trajectories on both worlds."""
    policy, known = load_policy(policy_spec), games(spec)
    known = known[:: max(1, len(known) // points)][:points]
    plan = replace(
        PRESETS["default"],
        rollouts=Rollouts(rounds=[rollouts], adaptive=False),
        points=Points(per_trajectory=1),
    )
    by_id = {game.id: game for game in known}
    stock_seconds = our_seconds = 0.0
    done = 0
    for trajectory in collect(policy, known, points, budget=plan.estimand.budget, seed=0):
        path = by_id[trajectory.game].address
        ours, stock = make(path), make(f"stock:{path}")
        ours.reset(), stock.reset()
        fast, seconds, n = replayed(ours, policy, trajectory, plan)
        slow, stock_time, _ = replayed(stock, load_policy(policy_spec), trajectory, plan)
        if fast != slow:
            raise SystemExit(f"{trajectory.game_name}: the two worlds give different records")
        stock.close()  # type: ignore[attr-defined]
        our_seconds, stock_seconds, done = our_seconds + seconds, stock_seconds + stock_time, done + n
        print(f"  {trajectory.game_name}: stock {stock_time:.1f} s, compiled {seconds * 1e3:.1f} ms", flush=True)
    return {"audit_ratio": stock_seconds / our_seconds, "points": done, "stock_seconds_a_point": stock_seconds / done}


def adaptive_ratio(spec: str, policy_spec: str, trajectories: int) -> dict[str, float]:
    """The same points with adaptive rounds and with all rounds for all."""
    policy, known = load_policy(policy_spec), games(spec)
    adaptive = PRESETS["default"]
    equal = replace(adaptive, rollouts=Rollouts(rounds=[adaptive.rollouts.rounds[-1]], adaptive=False))
    sequential_design(adaptive)
    worlds = {game.id: make(game.address) for game in known[:trajectories]}
    frames = []
    for plan in (adaptive, equal):
        found: list[tuple[Trajectory, Sequence[dict[str, Any]]]] = []
        for trajectory in collect(policy, known, trajectories, budget=plan.estimand.budget, seed=0):
            records, _, _ = replayed(worlds[trajectory.game], policy, trajectory, plan)
            by_point: dict[str, list[dict[str, Any]]] = {}
            for record in records:
                by_point.setdefault(record["point"], []).append(record)
            found += [(trajectory, sorted(rounds, key=lambda r: r["round"])) for rounds in by_point.values()]
        frames.append(effects(found, plan)[0].set_index("point"))
    rounds, fixed = frames
    defined = rounds.index[(rounds["support"] == "defined")]
    spent = (rounds["n_factual"] + rounds["n_alternative"])[defined].sum()
    full = (fixed["n_factual"] + fixed["n_alternative"])[defined].sum()
    decided = fixed.loc[defined, "state"].isin(["pivotal", "negligible"])
    same = rounds.loc[defined, "state"] == fixed.loc[defined, "state"]
    return {
        "adaptive_ratio": float(spent / full),
        "defined_points": len(defined),
        "decided_by_equal": float(decided.mean()),
        "decided_by_rounds": float(rounds.loc[defined, "state"].isin(["pivotal", "negligible"]).mean()),
        "agree": float(same[decided].mean()) if decided.any() else float("nan"),
    }


def peak_memory(rollouts: int) -> tuple[int, float]:
    """(rollouts made, peak resident MB) of a whole study of about that many rollouts, in this process."""
    import resource

    each = 240
    plan = replace(
        PRESETS["default"],
        rollouts=Rollouts(rounds=[each // 2], adaptive=False),
        points=Points(per_trajectory=5),
        collection=Collection(trajectories=max(1, rollouts // (5 * each))),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = replay_study("random", "tabular:chain:4", PlanFile(plan, False, ()), Path(folder) / "run")
        made = run.details["totals"]["rollouts"]
    return made, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="generated:12:0")
    parser.add_argument("--policy", default="hasty")
    parser.add_argument("--points", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=4, help="rollouts an arm of the comparison with stock")
    parser.add_argument("--trajectories", type=int, default=12, help="trajectories of the adaptive comparison")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    if options.memory:
        for n in (100_000, 1_000_000):
            with get_context("spawn").Pool(1) as fresh:
                made, peak = fresh.apply(peak_memory, (n,))
            print(f"{made:,} rollouts: peak {peak:.0f} MB", flush=True)
            figures[f"mb_at_{n}"] = peak
    else:
        figures |= audit_ratio(options.spec, options.policy, options.points, options.rollouts)
        print(f"audit_ratio {figures['audit_ratio']:,.0f} over {figures['points']:.0f} points")
        figures |= adaptive_ratio(options.spec, options.policy, options.trajectories)
        print(
            f"adaptive_ratio {figures['adaptive_ratio']:.2f} over {figures['defined_points']:.0f} points; decided: "
            f"{figures['decided_by_rounds']:.2f} by rounds, {figures['decided_by_equal']:.2f} by equal allocation, "
            f"{figures['agree']:.2f} of these alike"
        )
    if options.json:
        print(json.dumps({key: None if np.isnan(value) else round(value, 4) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
