"""Decision points as signals see them, made from trajectories and nothing that a replay found.

Knows: how a trajectory becomes points, and what is computed where a signal asked for it beyond the text. Hides:
replaying prefixes in the games, the policy's probabilities, its twin, plans. A prefix that does not reproduce gives
points without any of that, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from audit.collect import policy_id
from audit.plan import Plan
from audit.policies import History, Policy, load_policy
from audit.policies.openai import LLMPolicy
from audit.records import Trajectory
from audit.replay import chosen_steps, point_id
from audit.results import read_run_trajectories
from audit.scoring.likelihood import Said, said
from audit.scoring.plans import Plans
from audit.scoring.twin import Twin, TwinSettings, fit_twin
from audit.store import RunDirectory
from credit_signals import Hindsight, SignalPoint
from envs import Environment, Game, InputError, games, make

POLICY = frozenset(("policy", "twin", "belief"))  # needs that ask the replayed policy


@dataclass(frozen=True, slots=True)
class Source:
    """What is scored, and nothing of what a replay found: trajectories, who replays them, the name of their games.

    studied: ids of the points that the plan chose, which are all that a language model is asked about; None: all.
    """

    trajectories: tuple[Trajectory, ...]
    policy: Mapping[str, Any]
    policy_id: str
    env: str
    studied: frozenset[str] | None = None

    @classmethod
    def of_run(cls, directory: RunDirectory) -> Source:
        """The inputs of a run."""
        manifest = directory.manifest
        trajectories, identity = tuple(read_run_trajectories(directory)), manifest["policy_id"]
        plan = Plan.from_json(manifest["plan"])
        studied = frozenset(point_id(t.id, step, identity) for t in trajectories for step in chosen_steps(t, plan))
        return cls(trajectories, manifest["policy"], identity, manifest["env"], studied)

    @classmethod
    def of_benchmark(cls, path: str | Path) -> Source:
        """The inputs of a public ground-truth file; its truth is not read."""
        from audit.comparison.league import read_inputs

        inputs = read_inputs(path)
        header = inputs.header
        studied = frozenset(inputs.points["point"])
        return cls(inputs.trajectories, header["policy"], header["policy_id"], header["env"], studied)


class Player:
    """The replayed policy, opened when it is first asked for."""

    def __init__(self, source: Source, given: str | Policy | None) -> None:
        self._source, self._given = source, given
        self._policy: Policy | None = None

    def __call__(self) -> Policy:
        self._policy = self._policy or _policy(self._source, self._given)
        return self._policy


def signal_points(
    source: Source,
    wanted: set[str] | frozenset[str] = frozenset(),
    *,
    policy: str | Policy | None = None,
    env: str | None = None,
    reference: str | Policy | None = None,
    twin: TwinSettings | None = None,
) -> list[SignalPoint]:
    """The decision points of all steps, with what was asked for (`credit_signals.NEEDS`), in hindsight view.

    The games are opened only where that is needed. A prefix that does not reproduce is said so in `why`.
    """
    points = [point for trajectory in source.trajectories for point in _plain(trajectory, source.policy_id)]
    if not wanted:
        return points
    asked = wanted & POLICY
    replaying = _policy(source, policy) if asked else None
    other = None
    if "reference" in wanted and reference is not None:
        other = load_policy(reference) if isinstance(reference, str) else reference
    if asked == {"policy"} and not wanted & {"world", "plan", "reference"} and not _has_games(source, env):
        return points  # log probabilities of the trajectories are all there is
    known = _games(source, env)
    fitted = None
    conditioned = bool(wanted & {"twin", "belief"})
    if conditioned and replaying is not None and not own_twin(replaying) and _exact(replaying, known, source):
        fitted = fit_twin(replaying, list(known.values()), _budget(source), twin)
    worlds: dict[str, tuple[Environment, Plans]] = {}
    by_trajectory: dict[str, list[SignalPoint]] = {}
    for point in points:
        by_trajectory.setdefault(point.trajectory, []).append(point)
    found: list[SignalPoint] = []
    for trajectory in source.trajectories:
        if trajectory.game not in worlds:
            if len(worlds) >= 8:
                worlds.clear()
            world = make(known[trajectory.game].address)
            worlds[trajectory.game] = (world, Plans(world))
        env_, plans = worlds[trajectory.game]
        found += _enriched(
            by_trajectory[trajectory.id],
            trajectory,
            env_,
            plans if "plan" in wanted else None,
            replaying,
            other,
            fitted,
            conditioned,
        )
    return found


def _plain(trajectory: Trajectory, policy: str) -> list[SignalPoint]:
    """Points from the trajectory's own text; log probabilities only where its policy is the one replayed."""
    hindsight = Hindsight(trajectory.won, trajectory.commands, trajectory.observations)
    own = trajectory.policy == policy
    points = []
    for step, action in enumerate(trajectory.commands):
        logprob = trajectory.logprobs[step] if own else None
        why = dict.fromkeys(
            ("admissible", "probabilities", "logprob_success", "logprob_failure", "belief", "plan_before"),
            "was not asked for",
        ) | {
            "tokens": "the number of tokens is not known",
            "text": "the policy writes the command itself, no other text",
            "logprob": "the log kept none" if own else "the trajectory is another policy's",
            "logprob_reference": "no reference policy was named",
            "plan_after": "was not asked for",
        }
        points.append(
            SignalPoint(
                point=point_id(trajectory.id, step, policy),
                trajectory=trajectory.id,
                game=trajectory.game,
                task_type=trajectory.task_type,
                step=step,
                steps_left=trajectory.budget - step,
                commands=trajectory.commands[:step],
                observations=trajectory.observations[: step + 1],
                action=action,
                text=trajectory.texts[step],
                logprob=logprob,
                hindsight=hindsight,
                why=why,
            )
        )
    return points


def _enriched(
    points: Sequence[SignalPoint],
    trajectory: Trajectory,
    env: Environment,
    plans: Plans | None,
    policy: Policy | None,
    reference: Policy | None,
    twin: Twin | None,
    conditioned: bool,
) -> list[SignalPoint]:
    """Points with what the world and the policies say of them."""
    from audit.importers import compare_observation

    history = History(trajectory.game, env.reset())
    histories = [history]
    faithful = 0
    for step, command in enumerate(trajectory.commands):
        if compare_observation(trajectory.observations[step], history.turn.observation) == "different":
            break
        if history.turn.done:
            break
        faithful = step + 1
        history = history.then(command, env.step(history.turn.state, command))
        histories.append(history)
    moments = histories[:faithful]
    actions = list(trajectory.commands[:faithful])
    distributions = asyncio.run(policy.distributions(moments)) if policy else [None] * faithful
    nothing = [Said()] * faithful
    own = asyncio.run(said(policy, moments, actions)) if policy else nothing
    other = asyncio.run(said(reference, moments, actions)) if reference else nothing
    # A policy that can be asked under a condition has its own twin; an exact one is given a fitted one.
    asked = twin is None and conditioned and policy is not None
    outcomes = {
        f"logprob_{word}": asyncio.run(said(policy, moments, actions, word))
        if asked and policy is not None
        else nothing
        for word in ("success", "failure")
    }
    found = []
    for i, (point, moment, after, probabilities, mine, base) in enumerate(
        zip(points, moments, histories[1:], distributions, own, other, strict=False)
    ):
        values: dict[str, Any] = {"admissible": moment.turn.admissible}
        why = dict(point.why)
        if policy is not None:
            values |= {"probabilities": probabilities, "logprob": point.logprob if mine.total is None else mine.total}
            values |= {"tokens": mine.tokens, "merged": mine.merged, "noise": mine.noise}
            why["probabilities"] = "the policy does not tell its probabilities"
            why["logprob"] = "the policy cannot score actions"
        if reference is not None:
            values["logprob_reference"] = base.total
            why["logprob_reference"] = "the reference policy cannot score actions"
        if plans is not None:
            values |= {"plan_before": plans.length(moment.turn), "plan_after": plans.length(after.turn)}
            why |= dict.fromkeys(("plan_before", "plan_after"), "no plan to the goal was found")
        if twin is not None and probabilities is not None:
            answers: dict[str, float | str] = {
                "logprob_success": twin.logprob(moment, probabilities, point.action, success=True),
                "logprob_failure": twin.logprob(moment, probabilities, point.action, success=False),
                "belief": twin.belief(moment, trajectory.budget),
            }
            values |= {name: None if isinstance(value, str) else value for name, value in answers.items()}
            why |= {name: value for name, value in answers.items() if isinstance(value, str)}
        elif asked:
            values |= {name: scores[i].total for name, scores in outcomes.items()}
            why |= dict.fromkeys(outcomes, "the policy cannot be asked under a condition")
            why["belief"] = (
                "the policy does not tell its probabilities, so no belief was fitted"
                if probabilities is None
                else "no belief is fitted to a policy that is its own twin"
            )
        found.append(replace(point, **values, why=why))
    reason = f"the recorded prefix does not reproduce at step {faithful}"
    return found + [replace(point, why=dict.fromkeys(point.why, reason)) for point in points[faithful:]]


def _policy(source: Source, given: str | Policy | None) -> Policy:
    """The replayed policy, checked against the run's."""
    from audit.policies.shipped import SHIPPED

    if given is None:
        kind, name = source.policy.get("kind"), source.policy.get("name")
        if kind == "uniform":
            given = "random"
        elif kind == "linear" and name in SHIPPED:
            given = str(name)
        else:
            raise InputError(
                f"The run's policy ({name or kind}) does not come with the package; name it with --policy."
            )
    policy = load_policy(given) if isinstance(given, str) else given
    if policy_id(policy) != source.policy_id:
        raise InputError(
            f"The policy is not the one of the run ({source.policy_id[:12]}); name that one with --policy."
        )
    return policy


def own_twin(policy: Policy) -> bool:
    """Whether a policy can be asked under a condition itself: a language model whose template names the outcome."""
    return isinstance(policy, LLMPolicy) and policy.template.has("outcome")


def _exact(policy: Policy, known: Mapping[str, Game], source: Source) -> bool:
    """Whether a policy tells the probabilities of all its commands."""
    game = known[source.trajectories[0].game]
    history = History(game.id, make(game.address).reset())
    return asyncio.run(policy.distributions([history]))[0] is not None


def _has_games(source: Source, env: str | None) -> bool:
    try:
        _games(source, env)
    except InputError:
        return False
    return True


def _games(source: Source, env: str | None) -> dict[str, Game]:
    """The games of the set, those of the trajectories among them. Raises InputError where one is not there."""
    known = {game.id: game for game in games(env or source.env)}
    for trajectory in source.trajectories:
        if trajectory.game not in known:
            raise InputError(
                f"The game {trajectory.game_name} is not in {env or source.env}; name the run's games with --env."
            )
    return known


def _budget(source: Source) -> int:
    return max(trajectory.budget for trajectory in source.trajectories)
