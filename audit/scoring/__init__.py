"""Scoring: what each signal says of each decision point of a run, written beside the run.

Knows: how a trajectory becomes the points that a signal may see, what a signal asked for beyond the text, and
where the columns go. Hides: replaying prefixes, the policy's probabilities, twins and plans, merging with what was
scored before. Nothing here reads a run's effects or rollouts: points are made from its trajectories alone, for all
their steps, so that signals cannot learn the truth they are compared with.

    signals.parquet   one row a point; a column a signal, `NAME:why` where it is missing, `NAME:flag` where it flags
    signals.json      what each column is: view, importance, what it was computed from
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from audit.collect import policy_id
from audit.policies import History, Policy, load_policy
from audit.records import Trajectory
from audit.replay import point_id
from audit.results import Run, read_run_trajectories
from audit.scoring.plans import Plans
from audit.scoring.twin import Twin, TwinSettings, fit_twin
from audit.store import RunDirectory, write_whole
from credit_signals import (
    CreditSignal,
    Hindsight,
    Scored,
    SignalError,
    SignalPoint,
    check_signal,
    importance,
    load_signals,
    needs,
)
from credit_signals import score as ask
from envs import Environment, Game, InputError, games, make

SIGNALS, ABOUT = "signals.parquet", "signals.json"
KEYS = ("point", "trajectory", "step")
DEFAULT = (
    "confidence", "implicit.m_no", "implicit.m_hind", "implicit.delta", "implicit.delta_success", "implicit.contrast",
    "implicit.rho", "implicit.belief_change", "progress", "baseline.random", "baseline.step", "baseline.action_type",
    "baseline.action_length", "baseline.fluency",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """What is scored, and nothing of what a replay found: trajectories, who replays them, the name of their games."""

    trajectories: tuple[Trajectory, ...]
    policy: Mapping[str, Any]
    policy_id: str
    env: str

    @classmethod
    def of_run(cls, directory: RunDirectory) -> Source:
        """The inputs of a run."""
        manifest = directory.manifest
        return cls(tuple(read_run_trajectories(directory)), manifest["policy"], manifest["policy_id"], manifest["env"])

    @classmethod
    def of_benchmark(cls, path: str | Path) -> Source:
        """The inputs of a public ground-truth file; its truth is not read."""
        from audit.comparison.league import read_inputs

        inputs = read_inputs(path)
        header = inputs.header
        return cls(inputs.trajectories, header["policy"], header["policy_id"], header["env"])


@dataclass(frozen=True, slots=True)
class Scores:
    """Signals on points. frame: as in signals.parquet. about: column -> what it is."""

    frame: pd.DataFrame
    about: Mapping[str, Mapping[str, Any]]

    def to_frame(self) -> pd.DataFrame:
        """One row a point, a column a signal and its reasons and flags."""
        return self.frame

    @property
    def importance(self) -> dict[str, str]:
        """How each signal reads as importance, as `audit.comparison.compare` takes it."""
        return {name: str(about["importance"]) for name, about in self.about.items()}

    def summary(self) -> pd.DataFrame:
        """One row a signal: view, values, missing and the commonest reason, distinct values."""
        rows = []
        for name, about in self.about.items():
            why = self.frame[f"{name}:why"].dropna()
            values = self.frame[name].dropna()
            rows.append(
                {
                    "signal": name,
                    "view": about["view"],
                    "values": len(values),
                    "missing": len(why),
                    "reason": why.mode().iloc[0] if len(why) else None,
                    "distinct": values.nunique(),
                    "mean": values.mean(),
                }
            )
        return pd.DataFrame(rows)


def score(
    run: Run | Source,
    signals: Sequence[CreditSignal | str] = DEFAULT,
    *,
    policy: str | Policy | None = None,
    env: str | None = None,
    reference: str | Policy | None = None,
    twin: TwinSettings | None = None,
    save: bool = True,
) -> Scores:
    """Ask signals about every step of a run's trajectories; with `save`, add the columns to the run.

    signals: objects, names, families or my.py:Class. policy: the replayed policy (default: the run's, where it
    ships). env: its games (default: the run's set). reference: the other policy of `implicit.prime`. twin: how the
    outcome-conditioned twin is fitted. A column that was scored before is replaced; others are kept.
    Raises InputError where something needed is not at hand or a signal breaks its contract.
    """
    source = run if isinstance(run, Source) else Source.of_run(run.directory)
    try:
        opened = _opened(signals)
        wanted = {need for signal in opened for need in needs(signal)}
        points = signal_points(source, wanted, policy=policy, env=env, reference=reference, twin=twin)
        answers = [ask(signal, points) for signal in opened]
    except SignalError as error:
        raise InputError(str(error)) from error
    about = {signal.name: _about(signal, source, wanted, twin) for signal in opened}
    scores = Scores(_frame(points, answers), about)
    if save and isinstance(run, Run):
        return save_scores(run, scores)
    return scores


def _opened(signals: Sequence[CreditSignal | str]) -> list[CreditSignal]:
    return [s for spec in signals for s in (load_signals([spec]) if isinstance(spec, str) else [spec])]


def _about(signal: CreditSignal, source: Source, wanted: set[str], twin: TwinSettings | None) -> dict[str, Any]:
    about: dict[str, Any] = {"view": signal.view, "importance": importance(signal), "needs": list(needs(signal))}
    if {"twin", "belief"} & set(needs(signal)):
        about["twin"] = {**asdict(twin or TwinSettings()), "fitted_on": "fresh play of other games (cross-fit by game)"}
    return about


def _frame(points: Sequence[SignalPoint], answers: Sequence[Scored]) -> pd.DataFrame:
    frame = pd.DataFrame([{key: getattr(point, key) for key in KEYS} for point in points], columns=list(KEYS))
    columns: dict[str, Any] = {}
    for answer in answers:
        columns[answer.name] = np.array(answer.values, dtype=float)
        columns[f"{answer.name}:why"] = pd.Series(answer.reasons, dtype="string")
        if answer.flags is not None:
            columns[f"{answer.name}:flag"] = pd.array(list(answer.flags), dtype="boolean")
    return pd.concat([frame, pd.DataFrame(columns, index=frame.index)], axis=1)


# Beside the run ---------------------------------------------------------------------------------------------------


def save_scores(run: Run, scores: Scores) -> Scores:
    """Add columns to a run's signals; all of them are returned."""
    folder = run.directory.path
    if (folder / SIGNALS).exists():
        before = load_scores(run)
        mine = [c for c in scores.frame.columns if c not in KEYS]
        kept = before.frame.drop(columns=[c for c in before.frame.columns if c.split(":")[0] in scores.about])
        merged = kept.merge(scores.frame[["point", *mine]], on="point", how="outer", validate="one_to_one")
        if len(merged) != len(scores.frame):
            raise InputError(f"{folder / SIGNALS}: holds other points than this run; delete it and score again.")
        scores = Scores(merged, {**before.about, **scores.about})
    partial = folder / f"{SIGNALS}.partial"
    scores.frame.to_parquet(partial, index=False)
    partial.replace(folder / SIGNALS)
    write_whole(folder / ABOUT, json.dumps(scores.about, indent=1, sort_keys=True) + "\n")
    return scores


def load_scores(run: Run) -> Scores:
    """What was scored so far. Raises InputError where nothing was, or the files are damaged."""
    folder = run.directory.path
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        frame = pd.read_parquet(folder / SIGNALS)
    except FileNotFoundError:
        raise InputError(f"{folder}: no signal was scored yet; audit score {folder.name} does it.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / SIGNALS}: cannot be read ({error}); delete it and score again.") from None
    return Scores(frame, about)


# Points -----------------------------------------------------------------------------------------------------------


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
    asked = wanted & {"policy", "twin", "belief"}
    replaying = _policy(source, policy) if asked else None
    other = None
    if "reference" in wanted and reference is not None:
        other = load_policy(reference) if isinstance(reference, str) else reference
    if asked == {"policy"} and not wanted & {"world", "plan", "reference"} and not _has_games(source, env):
        return points  # log probabilities of the trajectories are all there is
    known = _games(source, env)
    fitted = None
    if wanted & {"twin", "belief"} and replaying is not None and _exact(replaying, known, source):
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
            bool(wanted & {"twin", "belief"}),
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
    own = asyncio.run(policy.logprobs(moments, actions)) if policy else [None] * faithful
    other = asyncio.run(reference.logprobs(moments, actions)) if reference else [None] * faithful
    # A policy that can be asked under a condition has its own twin; an exact one is given a fitted one.
    asked = twin is None and conditioned and policy is not None
    outcomes = {
        f"logprob_{word}": asyncio.run(policy.logprobs(moments, actions, condition=word))
        if asked and policy is not None
        else [None] * faithful
        for word in ("success", "failure")
    }
    found = []
    for i, (point, moment, after, probabilities, logprob, base) in enumerate(
        zip(points, moments, histories[1:], distributions, own, other, strict=False)
    ):
        values: dict[str, Any] = {"admissible": moment.turn.admissible}
        why = dict(point.why)
        if policy is not None:
            values |= {"probabilities": probabilities, "logprob": point.logprob if logprob is None else logprob}
            values["tokens"] = None if probabilities is None else 1
            why["probabilities"] = "the policy does not tell its probabilities"
            why["logprob"] = "the policy cannot score actions"
        if reference is not None:
            values["logprob_reference"] = base
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
            values |= {name: scores[i] for name, scores in outcomes.items()}
            why |= dict.fromkeys(outcomes, "the policy cannot be asked under a condition")
            why["belief"] = "the policy does not tell its probabilities, so no belief was fitted"
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


# The check of leakage ---------------------------------------------------------------------------------------------


def check_leakage(run: Run, signals: Sequence[CreditSignal | str], **options: Any) -> None:
    """Score a copy of the run whose replay results are scrambled: nothing may change. Also `check_signal` of each.

    Every file with results in the copy is destroyed (effects, rollouts, alternatives, points, summary, shards);
    options: as `score`. It finds results that leak through points, twins or plans, or through the run directory; a
    signal's file that reads some other path is its author's word. Raises InputError with the signal that changed.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(run.directory.path, copy)
        for file in [*copy.glob("*.parquet"), *copy.glob("shards/*"), copy / "summary.json"]:
            file.write_bytes(b"scrambled")
        scrambled = Source.of_run(RunDirectory.open(copy))
        try:
            opened = _opened(signals)
            wanted = {need for signal in opened for need in needs(signal)}
            points, blind = (
                signal_points(source, wanted, **options) for source in (Source.of_run(run.directory), scrambled)
            )
            for signal in opened:
                before, after = ask(signal, points), ask(signal, blind)
                if not np.array_equal(before.values, after.values, equal_nan=True):
                    raise SignalError(f"{signal.name}: changes with the replay's results, which it must not see.")
                check_signal(signal, points)
        except SignalError as error:
            raise InputError(str(error)) from error


__all__ = [
    "DEFAULT",
    "Scores",
    "Source",
    "TwinSettings",
    "check_leakage",
    "load_scores",
    "save_scores",
    "score",
    "signal_points",
]
