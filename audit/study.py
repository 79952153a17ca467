"""A whole replay study: trajectories found or collected, the run directory opened, the points replayed, the run closed.

Knows: the order of the stages and what goes into a manifest. Hides: resuming (the same call goes on where it was
stopped) and what a study will cost. The command line and scripts call this.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from audit.collect import collect, policy_id
from audit.doctor import TESTED, installed, warn_of_untested_versions
from audit.effects import detectable, sequential_design
from audit.llm.cost import STAND_IN, Estimate, estimate
from audit.plan import Plan, PlanFile
from audit.policies import Policy, load_policy
from audit.policies.openai import LLMPolicy
from audit.records import Trajectory, content_id
from audit.replay import Replayer, chosen_steps, point_id
from audit.results import Run, finish, read_run_trajectories
from audit.store import MANIFEST, RunDirectory
from audit.tasks import adopt, run_tasks, tasks
from envs import Environment, Game, InputError, games, make

Progress = Callable[[str, int, int], None]
PILOT = 12  # trajectories that are played to learn what a study will cost
TIMED = 3  # of these, replayed to learn how long it will take


def _silent(stage: str, done: int, total: int) -> None:
    return None


def replay_study(
    policy: str,
    env: str,
    plan: PlanFile,
    out: Path,
    *,
    trajectories: Sequence[Trajectory] | None = None,
    jobs: int = 1,
    engine: str = "local",
    time_limit: float = 3600.0,
    stop_after: float = math.inf,
    progress: Progress = _silent,
) -> Run:
    """Replay a policy's trajectories and write the run to `out`; the same call goes on with an interrupted run.

    policy, env: as `load_policy` and `envs.games` take them. trajectories: which to replay; None collects
    `plan.collection.trajectories` of the policy's own. jobs: processes. engine: local or ray.
    time_limit: seconds for a handful of points of one trajectory; what takes longer is given up and owed again.
    stop_after: seconds of replaying after which the run is closed with what it has (points that were not reached are
    errors with that reason, never effects); the same call goes on with it.
    progress: told (stage, done, total). Raises InputError for bad input, before anything is lost.
    """
    warn_of_untested_versions()
    loaded = load_policy(policy)
    adopt(policy, loaded)
    identity = policy_id(loaded)
    known = games(env)
    server = asyncio.run(loaded.examine()) if isinstance(loaded, LLMPolicy) else None
    if (out / MANIFEST).exists():
        trajectories = read_run_trajectories(RunDirectory.open(out))
    elif trajectories is None:
        trajectories = _collect(loaded, known, plan.plan, progress)
    if not trajectories:
        raise InputError("There is no trajectory to replay.")
    run = RunDirectory.create(
        out, _manifest(loaded, identity, env, known, plan, trajectories, server), (t.to_json() for t in trajectories)
    )
    if plan.plan.rollouts.adaptive:
        sequential_design(plan.plan)  # once, here: worker processes inherit it
    by_id = {game.id: game for game in known}
    owed = list(tasks(trajectories, by_id, policy, identity, plan.plan, run, time_limit))
    total = sum(len(task.points) for task in owed)
    replayed = 0

    def done(points: int) -> None:
        nonlocal replayed
        replayed += points
        progress("replay", replayed, total)

    if owed:
        progress("replay", 0, total)
        run_tasks(owed, run, jobs=jobs, engine=engine, stop_after=stop_after, done=done)
    return finish(run)


def _collect(policy: Policy, known: Sequence[Game], plan: Plan, progress: Progress) -> list[Trajectory]:
    n = plan.collection.trajectories
    progress("collect", 0, n)
    return list(
        collect(
            policy,
            known,
            n,
            budget=plan.estimand.budget,
            seed=plan.seed,
            done=lambda collected: progress("collect", collected, n),
        )
    )


def _manifest(
    policy: Policy,
    identity: str,
    env: str,
    known: Sequence[Game],
    plan: PlanFile,
    trajectories: Sequence[Trajectory],
    server: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What was run. No time, no host, no local path, no secret: equal studies have equal manifests."""
    played = {trajectory.game for trajectory in trajectories}
    others = sorted({trajectory.policy for trajectory in trajectories} - {identity})
    return {
        **({} if server is None else {"server": server}),
        "policy": policy.describe(),
        "policy_id": identity,
        "surrogate": bool(others),
        "trajectory_policies": sorted({trajectory.policy for trajectory in trajectories}),
        "env": env if Path(env).name == env else Path(env).name,
        "games": [{"id": game.id, "name": game.name} for game in known if game.id in played],
        "trajectories": content_id([trajectory.id for trajectory in trajectories]),
        "plan": plan.plan.to_json(),
        "plan_hash": plan.plan.hash,
        "locked": plan.locked,
        "departed": list(plan.departed),
        "versions": {"credit-audit": version("credit-audit"), **{name: installed(name) for name in TESTED}},
    }


def dry_run(
    policy: str,
    env: str,
    plan: PlanFile,
    out: Path | None = None,
    *,
    trajectories: Sequence[Trajectory] | None = None,
    pilot: int = 0,
) -> Estimate:
    """What the replay of a language model will take, before it runs; arguments as in `replay_study`.

    pilot: points that are replayed to find out (paid, kept in the journal, and not paid again by the study). Without
    one nothing is asked. The trajectories are those given, or of the run in `out`; else a shipped policy's stand in.
    Raises InputError for a policy that costs nothing, and as `replay_study` does.
    """
    loaded = load_policy(policy)
    if not isinstance(loaded, LLMPolicy):
        raise InputError(
            f"{policy}: is no language model, its replay costs no calls; audit plan cost says what it takes."
        )
    known = games(env)
    by_id = {game.id: game for game in known}
    wanted = plan.plan.collection.trajectories
    stand_in_for = 0
    if out is not None and (out / MANIFEST).exists():
        trajectories = read_run_trajectories(RunDirectory.open(out))
    elif trajectories is None:
        budget, n = plan.plan.estimand.budget, min(wanted, PILOT)
        trajectories = list(collect(load_policy(STAND_IN), known, n, budget=budget, seed=plan.plan.seed))
        stand_in_for = wanted
    worlds: dict[str, Environment] = {}

    def world(trajectory: Trajectory) -> Environment:
        if trajectory.game not in by_id:
            raise InputError(f"The game {trajectory.game_name} of a trajectory is not in the --env set.")
        return worlds.get(trajectory.game) or worlds.setdefault(trajectory.game, make(by_id[trajectory.game].address))

    identity = policy_id(loaded)
    asked = estimate(loaded, identity, plan.plan, trajectories, world, pilot=pilot, stand_in_for=stand_in_for)
    return asyncio.run(asked)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a study will take, before it runs. Ranges are (least, most); steps are environment steps."""

    trajectories: int
    points: tuple[int, int]
    rollouts: tuple[int, int]
    steps: tuple[int, int]
    tokens: int | None
    seconds: tuple[float, float] | None
    mde: dict[str, float]
    basis: str

    def lines(self) -> list[tuple[str, str]]:
        """Label and value of each line to print."""

        def span(pair: tuple[float, float], form: str = "{:,.0f}") -> str:
            low, high = (form.format(value) for value in pair)
            return low if low == high else f"{low} to {high}"

        return [
            ("trajectories", f"{self.trajectories:,}"),
            ("decision points", span(self.points)),
            ("rollouts", span(self.rollouts)),
            ("environment steps", span(self.steps)),
            ("tokens", "none (embedded policy)" if self.tokens is None else f"{self.tokens:,}"),
            ("processor time", "unknown without a pilot" if self.seconds is None else span(self.seconds) + " s"),
            *[
                (f"minimum detectable effect, {where}", "none" if np.isnan(v) else f"{v:.2f}")
                for where, v in self.mde.items()
            ],
            ("basis", self.basis),
        ]


def cost(plan: Plan, policy: str | None = None, env: str | None = None) -> Cost:
    """What a plan will take: bounds from the plan alone, tighter with a pilot of the policy's trajectories.

    Raises InputError for a policy or set that does not exist.
    """
    if policy is not None and policy.endswith(".toml"):
        raise InputError(
            f"{policy}: a language model is asked what it costs by audit replay {policy} --dry-run; audit plan cost "
            f"without --policy gives the plan's own bounds."
        )
    n, budget, share = plan.collection.trajectories, plan.estimand.budget, plan.points.share
    limit = plan.points.per_trajectory or budget
    arms = 2 if plan.rollouts.design == "draws" else 1 + plan.support.distinct
    least = plan.rollouts.rounds[0 if plan.rollouts.adaptive else -1] * arms
    most = plan.rollouts.rounds[-1] * arms
    pilot = None
    if policy is not None and env is not None:
        known, played = games(env), load_policy(policy)
        pilot = list(collect(played, known, PILOT, budget=budget, seed=plan.seed))
        length = float(np.mean([len(t.commands) for t in pilot]))
        points = int(n * min(limit, length * share)), int(n * min(limit, length * share))
        ahead = length / 2, budget - length / 2
        basis = f"a pilot of {PILOT} trajectories, {length:.1f} steps on average; {TIMED} of them replayed for the time"
    else:
        points, ahead = (int(n * min(limit, share)), int(n * min(limit, budget * share))), (1.0, budget / 2)
        basis = "the plan alone; --policy and --env give tighter figures from a pilot"
    rollouts = points[0] * least, points[1] * most
    steps = int(rollouts[0] * ahead[0]), int(rollouts[1] * ahead[1])
    seconds = None
    if pilot is not None:
        first, per_step = _timed(played, known, pilot[:TIMED], plan)
        later = 1 - arms * plan.rollouts.rounds[0] / least
        seconds = n * first + per_step * later * steps[0], n * first + per_step * steps[1]
    last = plan.rollouts.rounds[-1]
    mde = {f"p = {p}": detectable(last, last * (arms - 1), plan, p) for p in (0.5, 0.2)}
    return Cost(n, points, rollouts, steps, None, seconds, mde, basis)


def _timed(
    policy: Policy, known: Sequence[Game], trajectories: Sequence[Trajectory], plan: Plan
) -> tuple[float, float]:
    """Processor seconds that a trajectory takes with its first round, and those that a step takes after that.

    The two differ a hundredfold: a compiled world is computed where it is first seen and remembered.
    """
    rollouts = replace(plan.rollouts, rounds=plan.rollouts.rounds[:1], adaptive=False)
    by_id = {game.id: game for game in known}
    spent, steps = [0.0, 0.0], 0
    for trajectory in trajectories:
        env, asked = make(by_id[trajectory.game].address), chosen_steps(trajectory, plan)
        points: list[tuple[int, str, list[Any]]] = [
            (step, point_id(trajectory.id, step, "pilot"), []) for step in asked
        ]
        for again in (0, 1):
            started = time.process_time()
            trial = replace(plan, rollouts=rollouts, seed=plan.seed + again)
            records = asyncio.run(Replayer(env, policy, trial).replay(trajectory, points))
            spent[again] += time.process_time() - started
        steps += sum(sum(arm["steps"]) for record in records if record["round"] for arm in record["arms"])
    # Without a rollout (a policy with no alternative) there is nothing to add to the first round.
    return spent[0] / len(trajectories), spent[1] / steps if steps else 0.0
