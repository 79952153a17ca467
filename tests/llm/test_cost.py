"""The estimate before a run against the ledger after it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from audit.collect import collect, policy_id
from audit.llm.cost import Estimate, estimate
from audit.plan import Estimand, Plan, Rollouts, Support
from audit.records import Trajectory
from audit.replay import Replayer, chosen_steps, point_id
from envs import Environment, InputError, games, make
from tests.llm.conftest import Open
from tests.llm.loopback import FakeModel, Loopback

PLAN = Plan(estimand=Estimand(budget=10), support=Support(draws=8), rollouts=Rollouts(rounds=[2, 4], adaptive=False))


def run(awaited: Any) -> Any:
    return asyncio.run(awaited)


@pytest.fixture(scope="module")
def worlds() -> dict[str, Environment]:
    return {game.id: make(game.address) for game in games("generated:6:0")[:3]}


def within(estimated: float, actual: float) -> bool:
    return 0.8 <= estimated / actual <= 1.25


@pytest.mark.parametrize("decode", [{"mode": "sample"}, {"mode": "choice", "end": "\n", "temperature": 8.0}])
def test_a_pilot_predicts_the_ledger_and_costs_nothing_extra(
    decode: dict[str, Any], opened: Open, worlds: dict[str, Environment], tmp_path: Path
) -> None:
    prompt = (
        {}
        if decode["mode"] == "sample"
        else {"template": "transcript", "style": "text", "window_tokens": 700, "first_tokens": 300}
    )
    with Loopback(FakeModel()) as server:
        policy = opened(server, prompt=prompt, decode=decode, limits={"concurrency": 4, "timeout": 20.0})
        identity = policy_id(policy)
        n = 3 if decode["mode"] == "sample" else 1  # a choice scores every command: more work for the fake model
        trajectories = list(collect(policy, games("generated:6:0")[:n], n, budget=10, seed=0))
        collected = policy.ledger.total()

        def ask(pilot: int) -> Estimate:
            def world(trajectory: Trajectory) -> Environment:
                return worlds[trajectory.game]

            return run(estimate(policy, identity, PLAN, trajectories, world, pilot=pilot))

        bound = ask(0)
        assert policy.ledger.total() == collected, "an estimate without a pilot asked the model"
        piloted = ask(5)
        paid = policy.ledger.total()
        assert ask(5).usage == piloted.usage and policy.ledger.total() == paid, "the pilot was paid twice"
        for trajectory in trajectories:
            points = [(s, point_id(trajectory.id, s, identity), []) for s in chosen_steps(trajectory, PLAN)]
            run(Replayer(worlds[trajectory.game], policy, PLAN).replay(trajectory, points))
        total = policy.ledger.total()
        assert max(server.answered.values()) == 1 or decode["mode"] == "choice"
    actual_prompt, actual_calls = total.prompt - collected.prompt, total.calls - collected.calls
    if decode["mode"] == "sample":
        assert within(piloted.usage.prompt, actual_prompt)
        assert within(piloted.usage.calls, actual_calls)
        assert within(piloted.usage.completion, total.completion - collected.completion)
    else:  # points share decisions that are scored once: more so, the more points there are
        assert 0.8 <= piloted.usage.prompt / actual_prompt <= 2 and "upper bound" in dict(piloted.lines())["basis"]
    assert bound.usage.prompt >= 0.8 * actual_prompt and bound.points == piloted.points == 10 * n
    assert dict(piloted.lines())["basis"].startswith(f"a pilot of 5 of {10 * n} points")


def test_nothing_to_estimate_is_said(opened: Open) -> None:
    with Loopback(FakeModel()) as server, pytest.raises(InputError, match="needs trajectories"):
        run(estimate(opened(server), "x", PLAN, [], lambda t: pytest.fail("unused"), pilot=0))
