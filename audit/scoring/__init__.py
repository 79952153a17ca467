"""Scoring: what each signal says of each decision point of a run, written beside the run.

Knows: where the columns go and what is stored about each. Hides: how points are made (`points`), what policies say
of actions (`likelihood`), twins and plans, who answers judges' questions (`judging`), merging with what was scored
before. Nothing here reads a run's effects or rollouts: points are made from its trajectories alone, for all their
steps, so that signals cannot learn the truth they are compared with.

    signals.parquet   one row a point; a column a signal, `NAME:why` where it is missing, `NAME:flag` where it flags
    signals.json      what each column is: view, importance, what it was computed from
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from audit.policies import Policy
from audit.results import Run
from audit.scoring.judging import Progress, answered, asks, of_study, put, seated, spread
from audit.scoring.likelihood import about as about_scores
from audit.scoring.points import POLICY, Player, Source, own_twin, signal_points
from audit.scoring.twin import TwinSettings
from audit.store import RunDirectory, write_whole
from credit_signals import (
    CreditSignal,
    Scored,
    SignalError,
    SignalPoint,
    check_signal,
    importance,
    load_signals,
    needs,
)
from credit_signals import score as ask
from envs.core import InputError

SIGNALS, ABOUT = "signals.parquet", "signals.json"
KEYS = ("point", "trajectory", "step")
STATES = ("parsed", "scored", "refused", "unparsable", "error")  # of answers
DEFAULT = (
    "confidence.logp", "confidence.margin", "confidence.entropy", "implicit.m_no", "implicit.m_hind", "implicit.delta",
    "implicit.delta_success", "implicit.contrast", "implicit.rho", "implicit.belief_change", "progress",
    "baseline.random", "baseline.step", "baseline.action_type", "baseline.action_length", "baseline.fluency",
)  # fmt: skip


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

    def answers(self) -> pd.DataFrame:
        """One row a signal that asked a language model: how many answers, their states, what the order of the words
        (or of the two commands) did, and the share of points where the two orders disagree."""
        rows = []
        for name, about in self.about.items():
            judged = about.get("judge")
            if judged:
                states = judged["states"]
                row = {"signal": name, "answers": judged["answers"]}
                row |= {state: states.get(state, 0) for state in STATES}
                row |= {key: judged.get(key) for key in ("order_effect", "position_bias", "orders_disagree")}
                rows.append(row)
        return pd.DataFrame(rows)


def score(
    run: Run | Source,
    signals: Sequence[CreditSignal | str] = DEFAULT,
    *,
    policy: str | Policy | None = None,
    env: str | None = None,
    reference: str | Policy | None = None,
    twin: TwinSettings | None = None,
    judge: str | Policy | None = None,
    repeats: int = 1,
    save: bool = True,
    progress: Progress = lambda stage, done, total: None,
) -> Scores:
    """Ask signals about every step of a run's trajectories (those that ask a language model: about the points that the
    plan chose); with `save`, add the columns to the run.

    signals: objects, names, families, my.py:Class or a rubric my.toml. policy: the replayed policy (default: the
    run's, where it ships). env: its games (default: the run's set). reference: the other policy of `implicit.prime`.
    twin: how the outcome-conditioned twin is fitted. judge: the language model of signals that ask one (a saved one's
    .toml file); repeats: its answers to each question. A column that was scored before is replaced; others are kept.
    Raises InputError where something needed is not at hand or a signal breaks its contract, PolicyUnavailable where a
    language model cannot be asked.
    """
    source = run if isinstance(run, Source) else Source.of_run(run.directory)
    player = Player(source, policy)
    try:
        opened = seated(_opened(signals), judge, player, repeats=repeats, progress=progress)
        wanted = {need for signal in opened for need in needs(signal)}
        replayed = player() if wanted & POLICY else None
        points = signal_points(source, wanted, policy=replayed, env=env, reference=reference, twin=twin)
        studied = of_study(points, source.studied)
        put(opened, studied)
        answers = [
            spread(ask(signal, studied), studied, points) if asks(signal) else ask(signal, points) for signal in opened
        ]
    except SignalError as error:
        raise InputError(str(error)) from error
    about = {signal.name: _about(signal, studied, twin, replayed) for signal in opened}
    scores = Scores(_frame(points, answers), about)
    if save and isinstance(run, Run):
        return save_scores(run, scores)
    return scores


def _opened(signals: Sequence[CreditSignal | str]) -> list[CreditSignal]:
    return [s for spec in signals for s in (load_signals([spec]) if isinstance(spec, str) else [spec])]


def _about(
    signal: CreditSignal, studied: Sequence[SignalPoint], twin: TwinSettings | None, policy: Policy | None
) -> dict[str, Any]:
    wanted = set(needs(signal))
    about: dict[str, Any] = {"view": signal.view, "importance": importance(signal), "needs": list(needs(signal))}
    if policy is not None and wanted & POLICY:
        about |= about_scores(policy)
    if {"twin", "belief"} & wanted:
        if policy is None or not own_twin(policy):
            about["twin"] = {
                **asdict(twin or TwinSettings()),
                "fitted_on": "fresh play of other games (cross-fit by game)",
            }
        else:
            about["twin"] = "the policy itself, its prompt with a line that names the outcome"
    if asks(signal):
        about["judge"] = answered(signal, studied)
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


# The check of leakage ---------------------------------------------------------------------------------------------


def check_leakage(
    run: Run,
    signals: Sequence[CreditSignal | str],
    *,
    policy: str | Policy | None = None,
    judge: str | Policy | None = None,
    repeats: int = 1,
    progress: Progress = lambda stage, done, total: None,
    **options: Any,
) -> None:
    """Score a copy of the run whose replay results are scrambled: nothing may change. Also `check_signal` of each.

    Every file with results in the copy is destroyed (effects, rollouts, alternatives, points, summary, shards);
    arguments: as `score`. It finds results that leak through points, twins or plans, or through the run directory; a
    signal's file that reads some other path is its author's word. Raises InputError with the signal that changed.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(run.directory.path, copy)
        for file in [*copy.glob("*.parquet"), *copy.glob("shards/*"), copy / "summary.json"]:
            file.write_bytes(b"scrambled")
        whole, scrambled = Source.of_run(run.directory), Source.of_run(RunDirectory.open(copy))
        player = Player(whole, policy)
        try:
            opened = seated(_opened(signals), judge, player, repeats=repeats, progress=progress)
            wanted = {need for signal in opened for need in needs(signal)}
            replayed = player() if wanted & POLICY else None
            points, blind = (signal_points(source, wanted, policy=replayed, **options) for source in (whole, scrambled))
            put(opened, of_study(points, whole.studied))
            for signal in opened:
                asked, again = (of_study(all_, whole.studied) if asks(signal) else all_ for all_ in (points, blind))
                before, after = ask(signal, asked), ask(signal, again)
                if not np.array_equal(before.values, after.values, equal_nan=True):
                    raise SignalError(f"{signal.name}: changes with the replay's results, which it must not see.")
                check_signal(signal, asked)
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
