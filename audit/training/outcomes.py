"""Outcomes of arms on held-out tasks: played here, or trained elsewhere and read back; and the datasets for elsewhere.

Knows: the one table every comparison starts from (a row a training run and task), how checkpoints are played so that
they can be paired, and how arms are written for TRL and verl. Hides: rolling, and what a well-formed table is.

Every checkpoint meets the same tasks in the same order, and the rollouts of one training seed share their random
streams over all arms and doses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from audit.policies import History, Policy, load_policy
from audit.policies.linear import LinearPolicy
from audit.records import Trajectory, content_id, draws
from audit.rollouts import Start, roll
from audit.store import write_whole
from audit.training.dose import Dose, Doses
from audit.training.examples import Checkpoint, written
from audit.training.trainer import Trained
from envs import Game, make
from envs import games as find_games
from envs.core import InputError

KEYS = ["dose", "arm", "seed", "task"]
AT_ONCE = 400  # rollouts in lock-step


def play(
    trained: Trained,
    games: str | Sequence[Game],
    *,
    n: int = 1,
    budget: int = 50,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> pd.DataFrame:
    """Play every checkpoint on held-out games: one row a dose, arm, training seed and task.

    n: rollouts of each checkpoint in each game. Columns dose, arm, seed, task (the game's id), task_type, draws, won
    (share of the draws won; missing where a rollout failed), reason.
    """
    held_out = find_games(games) if isinstance(games, str) else list(games)
    if not held_out or n < 1 or budget < 1:
        raise InputError("Outcomes need at least one held-out game, one draw a game and one step an episode.")
    worlds = [make(game.address) for game in held_out]
    rows: list[dict[str, Any]] = []
    for done, ((dose, arm, training_seed), policy) in enumerate(trained.checkpoints.items()):
        progress("held-out games", done, len(trained.checkpoints))
        fresh = _opened(policy)
        starts = [
            Start(world, History(world.game_id, world.reset()), budget, streams)
            for world, game in zip(worlds, held_out, strict=True)
            for streams in (draws(budget, "held-out", seed, training_seed, game.id, draw) for draw in range(n))
        ]
        ends = [
            end
            for first in range(0, len(starts), AT_ONCE)
            for end in asyncio.run(roll(fresh, starts[first : first + AT_ONCE]))
        ]
        for number, game in enumerate(held_out):
            mine = ends[number * n : (number + 1) * n]
            failed = next((end.reason for end in mine if end.status == "error"), None)
            rows.append(
                {
                    "dose": dose,
                    "arm": arm,
                    "seed": training_seed,
                    "task": game.id,
                    "task_type": game.task_type,
                    "draws": n,
                    "won": np.nan if failed is not None else float(np.mean([end.won for end in mine])),
                    "reason": failed,
                }
            )
    progress("held-out games", len(trained.checkpoints), len(trained.checkpoints))
    return pd.DataFrame(rows)


def _opened(checkpoint: Checkpoint) -> Policy:
    """The policy of a checkpoint, one that remembers no state yet: what it will remember goes with it."""
    if isinstance(checkpoint, LinearPolicy):
        return checkpoint.at(checkpoint.temperature)
    return load_policy(str(checkpoint))


def checked(outcomes: pd.DataFrame) -> pd.DataFrame:
    """Outcomes with every column, or InputError saying which row or run is not as it must be.

    Needed: arm, seed, task, won (between 0 and 1; missing where there is none). dose defaults to `as given`, draws
    to 1. Every arm of a dose must have the same seeds and every run the same tasks: a run that lacks a task must say so
    with a missing `won`, since a task that is quietly absent would be compared with one that is not.
    """
    absent = [column for column in ("arm", "seed", "task", "won") if column not in outcomes.columns]
    if absent:
        raise InputError(f"Outcomes have no column {absent[0]!r}; expected arm, seed, task and won, one row a task.")
    frame = outcomes.copy()
    if "dose" not in frame.columns:
        frame["dose"] = "as given"
    if "draws" not in frame.columns:
        frame["draws"] = 1
    for column in ("dose", "arm", "task"):
        frame[column] = frame[column].astype(str)
    frame["won"] = pd.to_numeric(frame["won"], errors="coerce").astype(float).where(outcomes["won"].notna())
    bad = outcomes["won"].notna() & ~frame["won"].between(0, 1)
    if bad.any():
        raise InputError(
            f"Outcome {outcomes['won'][bad].iloc[0]!r} in row {int(np.flatnonzero(bad)[0])}; expected 0-1."
        )
    if frame.duplicated(KEYS).any():
        twice = frame[frame.duplicated(KEYS)].iloc[0]
        raise InputError(f"Arm {twice['arm']}, seed {twice['seed']} has task {twice['task']} twice; average its draws.")
    for dose, part in frame.groupby("dose", sort=False):
        tasks, seeds = part["task"].nunique(), part["seed"].nunique()
        sizes = part.groupby(["arm", "seed"]).size()
        if len(sizes) != part["arm"].nunique() * seeds:
            lacking = part.groupby("arm")["seed"].nunique().idxmin()
            raise InputError(f"Arm {lacking} ({dose}) lacks a training seed that other arms have; pairs need all.")
        if (sizes != tasks).any():
            arm, seed = sizes[sizes != tasks].index[0]
            raise InputError(
                f"Arm {arm}, seed {seed} ({dose}) has {sizes[arm, seed]} of {tasks} tasks; give every task."
            )
    return frame


def read_outcomes(path: str | Path) -> pd.DataFrame:
    """Outcomes of arms that were trained elsewhere: JSONL, CSV or parquet with arm, seed, task, won (and dose).

    Raises InputError where the file cannot be read or the table is not well-formed (`checked`).
    """
    path = Path(path)
    readers: dict[str, Callable[[Path], pd.DataFrame]] = {
        ".jsonl": lambda p: pd.read_json(p, lines=True, dtype={"task": str, "arm": str, "dose": str}),
        ".csv": lambda p: pd.read_csv(p, dtype={"task": str, "arm": str, "dose": str}),
        ".parquet": pd.read_parquet,
    }
    if path.suffix not in readers:
        raise InputError(f"{path}: outcomes are read from {', '.join(readers)}.")
    try:
        return checked(readers[path.suffix](path))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise InputError(f"{path}: {error}") from None
        raise InputError(f"{path}: cannot be read ({str(error)[:200]}).") from None


# Datasets ---------------------------------------------------------------------------------------------------------

Format = Literal["trl", "verl"]
SYSTEM = "You act in a text game. Answer with the next command."


def export(doses: Doses, folder: str | Path, form: Format = "trl") -> pd.DataFrame:
    """Write each run as a dataset with weights, and `arms.json` with the recipe; returns the ledger, with files.

    trl: JSONL in TRL's conversational prompt-completion type (`prompt`, `completion`; read and trained on with TRL
    1.16). verl: parquet of one-turn chats, `messages` for verl's MultiTurnSFTDataset (`data.messages_key`), `prompt`
    and `response` as text for its older SFTDataset (`data.prompt_key`, `data.response_key`); the history is in the
    user's turn, since verl learns every assistant's turn of `messages`. Both have `weight` (mean 1), `point`,
    `trajectory` and `step`.

    What the trainer elsewhere must do, or doses are no longer those of the ledger: multiply the loss of an example by
    `weight` (neither TRL nor verl does; TRL drops the column before the loss unless remove_unused_columns = False);
    take `steps` optimiser steps (`arms.json`); cut no example. TRL's default max_length = 1024 cuts the end and then
    leaves out, without an error, examples whose completion is gone: set max_length = None. verl's raises.
    Untrained arms have no dataset.
    Raises InputError where the text of a step is not known.
    """
    if form not in ("trl", "verl"):
        raise InputError(f"{form!r} is no dataset format; expected trl or verl.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ledger = doses.to_frame()
    files: list[str | None] = []
    for run in doses.runs:
        if not run.steps:
            files.append(None)
            continue
        name = run.file_name()
        rows = [_row(doses, run, int(i), form) for i in np.flatnonzero(run.weights > 0)]
        files.append(f"{name}.{'jsonl' if form == 'trl' else 'parquet'}")
        if form == "trl":
            text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
            write_whole(folder / f"{name}.jsonl", text)
        else:
            pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet", index=False)
    ledger["file"] = files
    if ledger["file"].dropna().duplicated().any():
        raise InputError("Two arms have names that differ in signs only; name them apart for files.")
    rows_out = json.loads(ledger.to_json(orient="records", double_precision=12))
    about = {
        "dose": doses.dose,
        "matched_by": list(doses.by),
        "across": doses.across,
        "recipe": asdict(doses.recipe),
        "format": form,
        "runs": rows_out,
    }
    write_whole(folder / "arms.json", json.dumps({"id": content_id("arms", about), **about}, indent=1) + "\n")
    return ledger


def _row(doses: Doses, run: Dose, number: int, form: Format) -> dict[str, Any]:
    point = doses.examples.points.iloc[number]
    trajectory = doses.examples.texts.get(point["trajectory"])
    if trajectory is None:
        raise InputError(f"Trajectory {point['trajectory']}: its text is not here; make examples with `examples_of`.")
    step = int(point["step"])
    turns = _turns(trajectory, step)
    answer = written(trajectory, step)
    about = {
        "weight": float(run.weights[number]),
        "point": str(point["point"]),
        "trajectory": str(point["trajectory"]),
        "step": step,
    }
    if form == "trl":
        chat = [{"role": "system", "content": SYSTEM}]
        for observation, said in turns:
            chat.append({"role": "user", "content": observation})
            if said is not None:
                chat.append({"role": "assistant", "content": said})
        return {"prompt": chat, "completion": [{"role": "assistant", "content": answer}], **about}
    text = "\n".join(f"{observation}" if said is None else f"{observation}\n> {said}" for observation, said in turns)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": text},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, "prompt": text, "response": answer, **about}


def _turns(trajectory: Trajectory, step: int) -> list[tuple[str, str | None]]:
    """What was seen and said up to a step; what is said at the step itself is left open."""
    turns: list[tuple[str, str | None]] = []
    for moment in range(step + 1):
        observation = trajectory.observations[moment]
        if observation is None:
            raise InputError(f"{trajectory.game_name}: step {moment} has no observation; this log cannot be exported.")
        turns.append((observation, written(trajectory, moment) if moment < step else None))
    return turns
