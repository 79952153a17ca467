"""Replay at a point: states with their reasons, seeds, the factual arm, failures, surrogates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from audit.effects import count, effects
from audit.plan import Decisions, Estimand, Plan, Points, Rollouts, Support
from audit.policies import History, Proposal
from audit.replay import Replayer, chosen_steps, point_id
from envs import Environment, Turn
from envs.tabular import tabular
from tests.audit.conftest import StateOnlyPolicy, replay_points, trajectory_of, uneven

SMALL = Plan(
    name="small",
    estimand=Estimand(budget=8),
    support=Support(draws=20),
    rollouts=Rollouts(rounds=[6], adaptive=False),
    decisions=Decisions(sesoi=0.25),
)
COMMANDS = ("go right", "wait", "go right")


@pytest.fixture
def env() -> Environment:
    return tabular("chain:3")


def only(command: str) -> Any:
    return lambda turn: {command: 1.0}


def test_a_defined_point_has_both_arms_and_the_factual_one_is_rolled_anew(env: Environment) -> None:
    found = replay_points(env, StateOnlyPolicy(uneven), trajectory_of(env, COMMANDS, 8), SMALL)
    assert [records[0]["state"] for _, records in found] == ["defined"] * 3
    for _, records in found:
        factual, alternatives = records[1]["arms"]
        assert factual["arm"] == "factual" and set(factual["commands"]) == {records[0]["action"]}
        assert records[0]["action"] not in alternatives["commands"]
        assert len(factual["outcome"]) == len(alternatives["outcome"]) == 6
        # The recorded outcome is never a replicate: every factual rollout was rolled here, with steps of its own.
        assert all(steps >= 1 for steps in factual["steps"])


def test_no_counterfactual_where_all_mass_is_on_the_action(env: Environment) -> None:
    found = replay_points(env, StateOnlyPolicy(only("go right")), trajectory_of(env, ("go right",), 8), SMALL)
    frame, counts = effects(found, SMALL)
    assert frame.loc[0, "support"] == "no_counterfactual"
    assert "all 20 draws" in frame.loc[0, "reason"]
    assert frame.loc[0, "state"] == "undefined"
    assert frame.loc[0, ["estimate", "low", "high", "p", "q"]].isna().all()  # undefined is never 0
    assert not counts


def test_insufficient_where_the_plan_asks_for_more_alternatives(env: Environment) -> None:
    plan = replace(SMALL, support=Support(draws=20, distinct=3))
    found = replay_points(env, StateOnlyPolicy(uneven), trajectory_of(env, COMMANDS, 8), plan)
    frame, _ = effects(found, plan)
    assert set(frame["support"]) == {"insufficient"}
    assert "2 distinct alternatives in 20 draws; the plan asks for 3" in frame.loc[0, "reason"]


def test_unfaithful_from_the_observation_that_does_not_reproduce(env: Environment) -> None:
    """Trap alfworld #14, #73: what was recorded is compared with what is replayed, at every prefix."""
    trajectory = trajectory_of(env, COMMANDS, 8)
    wrong = replace(trajectory, observations=(*trajectory.observations[:2], "A dragon!", trajectory.observations[3]))
    frame, _ = effects(replay_points(env, StateOnlyPolicy(uneven), wrong, SMALL), SMALL)
    assert list(frame["support"]) == ["defined", "defined", "unfaithful"]
    assert "observation at step 2" in frame.loc[2, "reason"]


def test_a_prefix_that_ends_the_game_early_is_unfaithful(env: Environment) -> None:
    """The recorded game went on, the replayed one is over."""
    short = tabular("chain:1")
    trajectory = replace(trajectory_of(env, ("go right", "go right"), 8), observations=(None, None, None))
    frame, _ = effects(replay_points(short, StateOnlyPolicy(uneven), trajectory, SMALL), SMALL)
    assert list(frame["support"]) == ["defined", "unfaithful"]
    assert "is over at step 1" in frame.loc[1, "reason"]


class Failing(StateOnlyPolicy):
    """Gives no action for some of its draws."""

    def __init__(self, every: int) -> None:
        super().__init__(uneven, hidden=True)
        self.every = every

    async def propose(self, requests: Sequence[History], *, seeds: Sequence[int]) -> Sequence[Proposal]:
        drawn = await super().propose(requests, seeds=seeds)
        return [
            Proposal("", status="error", reason="server said no") if seed % self.every == 0 else proposal
            for seed, proposal in zip(seeds, drawn, strict=True)
        ]


def test_a_failed_rollout_is_data_and_is_replaced(env: Environment) -> None:
    """Trap trl #5974: a failed rollout is not a zero."""
    found = replay_points(env, Failing(12), trajectory_of(env, COMMANDS, 8), SMALL)
    frame, counts = effects(found, SMALL)
    assert frame["failed"].sum() > 0
    assert (frame["n_factual"] == 6).all() and (frame["n_alternative"] == 6).all()
    for (_, records), row in zip(found, sorted(counts), strict=True):
        codes = "".join(arm["outcome"] for arm in records[1]["arms"])
        assert counts[row].failed == codes.count("e")
        assert counts[row].n.sum() == len(codes) - codes.count("e")


def test_a_policy_that_always_fails_makes_the_point_an_error_with_its_reason(env: Environment) -> None:
    frame, _ = effects(replay_points(env, Failing(1), trajectory_of(env, COMMANDS, 8), SMALL), SMALL)
    assert set(frame["support"]) == {"error"}
    assert frame["reason"].str.contains("server said no").all()


def test_inadmissible_alternatives_are_kept_or_left_out_as_declared(env: Environment) -> None:
    """A command that the game does not admit is a real action of the policy."""

    def sometimes_flies(turn: Turn) -> Mapping[str, float]:
        return {"go right": 0.5, "fly": 0.5}

    trajectory = trajectory_of(env, ("go right",), 8)
    kept = replay_points(env, StateOnlyPolicy(sometimes_flies), trajectory, SMALL)
    assert [entry[0] for entry in kept[0][1][0]["alternatives"]] == ["fly"]
    assert kept[0][1][0]["alternatives"][0][3] is False
    plan = replace(SMALL, estimand=Estimand(budget=8, inadmissible="exclude"))
    frame, _ = effects(replay_points(env, StateOnlyPolicy(sometimes_flies), trajectory, plan), plan)
    assert frame.loc[0, "support"] == "no_counterfactual"
    assert "admissible" in frame.loc[0, "reason"]


def test_exact_and_drawn_alternatives_have_one_law(env: Environment) -> None:
    """A policy that hides its probabilities gets its alternatives by redrawing: the same proportions."""
    plan = replace(SMALL, rollouts=Rollouts(rounds=[400], adaptive=False))
    trajectory = trajectory_of(env, ("wait",), 8)
    shares = []
    for hidden in (False, True):
        ((_, records),) = replay_points(env, StateOnlyPolicy(uneven, hidden=hidden), trajectory, plan)
        arm = records[1]["arms"][1]
        firsts = [arm["commands"][i] for i in arm["first"]]
        shares.append(firsts.count("go right") / len(firsts))
    expected = 2 / 3  # uneven: go left 1, go right 2, wait 3
    assert all(abs(share - expected) < 0.08 for share in shares)


def test_results_do_not_depend_on_which_points_are_replayed_together(env: Environment) -> None:
    trajectory = trajectory_of(env, COMMANDS, 8)
    replayer = Replayer(env, StateOnlyPolicy(uneven), SMALL)
    points: list[tuple[int, str, Sequence[Mapping[str, Any]]]] = [
        (step, point_id(trajectory.id, step, "test"), []) for step in range(3)
    ]
    together = asyncio.run(replayer.replay(trajectory, points))
    apart = [record for point in reversed(points) for record in asyncio.run(replayer.replay(trajectory, [point]))]

    def key(record: Mapping[str, Any]) -> tuple[str, int]:
        return record["point"], record["round"]

    assert sorted(together, key=key) == sorted(apart, key=key)


def test_rounds_go_on_from_stored_records_as_if_never_stopped(env: Environment) -> None:
    plan = replace(SMALL, rollouts=Rollouts(rounds=[4, 8, 12], adaptive=False))
    trajectory = trajectory_of(env, ("wait",), 8)
    ((_, whole),) = replay_points(env, StateOnlyPolicy(uneven), trajectory, plan)
    replayer = Replayer(env, StateOnlyPolicy(uneven), plan)
    for kept in range(1, len(whole)):
        rest = asyncio.run(replayer.replay(trajectory, [(0, whole[0]["point"], whole[:kept])]))
        assert whole[:kept] + rest == whole


def test_common_random_numbers_are_an_option(env: Environment) -> None:
    """Off by default: arms have streams of their own. On: draw i of every arm continues with the same stream."""

    def two(turn: Turn) -> Mapping[str, float]:
        return {"wait": 0.5, "look again": 0.5}  # both leave the world as it is, so only the streams can differ

    trajectory = trajectory_of(env, ("wait",), 8)

    def explore(turn: Turn) -> Mapping[str, float]:
        return {"wait": 0.25, "look again": 0.25, "go right": 0.5}

    for common in (False, True):
        plan = replace(SMALL, rollouts=Rollouts(rounds=[40], adaptive=False, common_random_numbers=common))
        ((_, records),) = replay_points(env, StateOnlyPolicy(explore), trajectory, plan)
        factual, other = records[1]["arms"]
        waited = [i for i, first in enumerate(other["first"]) if other["commands"][first] == "look again"]
        same = [factual["steps"][i] == other["steps"][i] for i in waited]
        assert len(waited) > 5
        assert all(same) if common else not all(same)
    assert two(env.reset())


def test_steps_beyond_the_budget_are_points_that_say_so(env: Environment) -> None:
    trajectory = trajectory_of(env, ("wait",) * 6, 8)
    plan = replace(SMALL, estimand=Estimand(budget=4))
    frame, _ = effects(replay_points(env, StateOnlyPolicy(uneven), trajectory, plan), plan)
    assert list(frame["support"]) == ["defined"] * 4 + ["error"] * 2
    assert "beyond the plan's budget of 4" in frame.loc[5, "reason"]


def test_points_are_chosen_by_hash(env: Environment) -> None:
    trajectory = trajectory_of(env, ("wait",) * 8, 8)
    assert chosen_steps(trajectory, SMALL) == list(range(8))
    some = replace(SMALL, points=Points(share=0.5))
    assert chosen_steps(trajectory, some) == chosen_steps(trajectory, some)
    assert 0 < len(chosen_steps(trajectory, some)) < 8
    assert len(chosen_steps(trajectory, replace(SMALL, points=Points(per_trajectory=3)))) == 3
    assert chosen_steps(trajectory, replace(some, seed=1)) != chosen_steps(trajectory, some)


def test_the_first_step_and_the_last_are_points_too(env: Environment) -> None:
    """At the last step of the budget one command is left: the rollout is that command alone."""
    trajectory = trajectory_of(env, ("go right", "go right", "go right"), 3)
    plan = replace(SMALL, estimand=Estimand(budget=3))
    found = replay_points(env, StateOnlyPolicy(uneven), trajectory, plan)
    last = found[-1][1][1]["arms"]
    assert set(last[0]["outcome"]) == {"w"} and set(last[1]["outcome"]) == {"t"}
    assert set(last[0]["steps"]) == set(last[1]["steps"]) == {1}


def test_efficiency_is_a_score_of_the_steps_taken(env: Environment) -> None:
    plan = replace(
        SMALL, estimand=Estimand(budget=8, outcome="efficiency"), rollouts=Rollouts(rounds=[30], adaptive=False)
    )
    found = replay_points(env, StateOnlyPolicy(uneven), trajectory_of(env, COMMANDS, 8), plan)
    counts = count(found[0][1], plan)
    assert all(0 <= score < 1 for arm in counts.scores for score in arm)
    frame, _ = effects(found, plan)
    assert (frame["low"] <= frame["estimate"]).all() and (frame["estimate"] <= frame["high"]).all()
    assert frame["mde"].isna().all()


def test_what_hangs_is_given_up_and_owed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap reflexion #34, EPO #1: a stuck reset hung the whole run."""
    from audit import tasks
    from audit.plan import Collection, PlanFile
    from audit.study import replay_study

    plan = PlanFile(replace(SMALL, collection=Collection(trajectories=2), points=Points(per_trajectory=2)), False, ())

    class Stuck:
        def reset(self) -> Turn:
            while True:
                time.sleep(0.01)

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"took over 0\.2 s and were given up"):
        patch.setattr(tasks, "_world", lambda address: Stuck())
        stuck = replay_study("random", "tabular:chain:3", plan, tmp_path / "run", time_limit=0.2)
    assert set(stuck.effects["support"]) == {"error"}
    assert stuck.effects["reason"].str.contains("over the time limit").all()
    again = replay_study("random", "tabular:chain:3", plan, tmp_path / "run")
    assert set(again.effects["support"]) == {"defined"}
