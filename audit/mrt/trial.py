"""Micro-randomised trials: at each eligible decision of a rollout a coin with a known, logged probability.

Knows: the design, the two tables and the directory they live in. Hides: batches, processes and resuming; what happens
within a rollout is in `audit.mrt.episodes`.

Draw i plays game i modulo the number of games; its coins follow from (seed, game, i, step) alone.

Tables (parquet, as `MRTData` reads them)
-----------------------------------------
decisions, a row a step: trajectory, t (steps done so far), eligible, arm, p (NaN where not eligible); known before the
coin: task_type, action_type (of the proposal) and action_group (go, take, put, prepare, other; last_action and
last_group where the coin falls before the proposal), admissible, repeated (the proposal was given in this very state
before), last_failed, phase (searching, holding, prepared), n_admissible, the intervention's own; recorded after it:
proposal, command (what was done), delivered, changed, message, reason.
trajectories, a row a draw: trajectory, outcome (1 won, 0 not; NaN where it failed), task (the game's id), game,
task_type, draw, steps, status, reason.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from audit.collect import policy_id
from audit.doctor import TESTED, installed
from audit.mrt.data import MRTData
from audit.mrt.episodes import Episode, opening, play
from audit.mrt.interventions import Intervention, load_intervention
from audit.mrt.rules import read_rule
from audit.policies import Policy, load_policy
from audit.records import content_id
from audit.store import RunDirectory
from envs import Game, InputError, games

KIND = "mrt"
BATCH = 64
FEWEST_TASKS = 20  # games below which nothing is claimed about a population of games
DECISIONS, TRAJECTORIES = "decisions.parquet", "trajectories.parquet"
NOT_FEATURES = ("trajectory", "t", "eligible", "arm", "p")
AFTER_COIN = ("proposal", "command", "delivered", "changed", "message", "reason")


@dataclass(frozen=True, slots=True)
class Design:
    """How a trial randomises. p: probability of treatment at eligible decisions. budget: steps of an episode. seed: of
    all draws. eligible: a rule over what is known before the coin (see `audit.mrt.rules`); decisions where it does not
    hold get no coin. Raises InputError for settings out of range."""

    p: float = 0.5
    budget: int = 50
    seed: int = 0
    eligible: str = "always"

    def __post_init__(self) -> None:
        if not 0 < self.p < 1:
            raise InputError(f"p is {self.p:g}; expected a probability strictly between 0 and 1.")
        if not 1 <= self.budget <= 10_000:
            raise InputError(f"budget is {self.budget}; expected 1 to 10000 steps.")
        read_rule(self.eligible)


@dataclass(frozen=True, slots=True)
class _Task:
    """Some draws of a trial: what a worker needs. draws: the number and the game of each."""

    policy: str
    intervention: str
    design: Design
    draws: Sequence[tuple[int, Game]]


@lru_cache(maxsize=2)
def _opened(policy: str, intervention: str) -> tuple[Policy, Intervention]:
    return load_policy(policy), load_intervention(intervention)


def _play_task(task: _Task) -> list[dict[str, Any]]:
    policy, intervention = _opened(task.policy, task.intervention)
    return play_draws(policy, intervention, task.design, task.draws)


def play_draws(
    policy: Policy, intervention: Intervention, design: Design, numbered: Sequence[tuple[int, Game]]
) -> list[dict[str, Any]]:
    """The records of some draws of a trial, played together. numbered: the number and the game of each."""
    starts = [opening(game, design.budget, (design.seed, draw)) for draw, game in numbered]
    found = asyncio.run(play(policy, intervention, starts, design.p, eligible=read_rule(design.eligible)))
    identities = policy_id(policy), intervention.describe()
    return [
        _record(_trajectory_id(*identities, design, game.id, draw), draw, episode)
        for (draw, game), episode in zip(numbered, found, strict=True)
    ]


def _record(identity: str, draw: int, episode: Episode) -> dict[str, Any]:
    columns = list(episode.rows[0]) if episode.rows else []
    return {
        "point": identity,
        "round": 0,
        "draw": draw,
        "won": episode.won,
        "steps": episode.steps,
        "status": episode.status,
        "reason": episode.reason,
        "rows": {key: [row.get(key) for row in episode.rows] for key in columns},
    }


def _trajectory_id(policy: str, intervention: Mapping[str, Any], design: Design, game: str, draw: int) -> str:
    return content_id("mrt", policy, dict(intervention), asdict(design), game, draw)


@dataclass(frozen=True, slots=True)
class Trial:
    """A finished trial: the two tables, the features that were known before the coin, and the manifest."""

    decisions: pd.DataFrame
    trajectories: pd.DataFrame
    features: tuple[str, ...]
    manifest: Mapping[str, Any]

    def data(self, cluster: str | None = None) -> MRTData:
        """The trial as estimators take it; failed trajectories are left out (see `failed`).

        cluster: `task` (default with at least 20 games: the target is a population of games) or `trajectory` (these
        very games). Raises InputError where the tables cannot carry an analysis.
        """
        valid = self.trajectories[self.trajectories["outcome"].notna()]
        rows = self.decisions[self.decisions["trajectory"].isin(valid["trajectory"])]
        cluster = cluster or self.manifest.get("cluster")
        if cluster is None and "task" in valid.columns and valid["task"].nunique() < FEWEST_TASKS:
            cluster = "trajectory"
        return MRTData(rows, valid, features=self.features, cluster=cluster)

    @property
    def failed(self) -> int:
        """Trajectories without an outcome."""
        return int(self.trajectories["outcome"].isna().sum())


def run_trial(
    policy: str,
    intervention: str,
    env: str,
    out: Path,
    *,
    n: int,
    design: Design,
    jobs: int = 1,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Trial:
    """Run a trial of n trajectories and write it to `out`; the same call goes on with an interrupted one.

    policy, env: as `load_policy` and `envs.games` take them; intervention as `load_intervention`. jobs: processes.
    Raises InputError for bad input, before anything is lost.
    """
    if n < 1:
        raise InputError(f"n is {n}; expected at least 1 trajectory.")
    loaded, treating = _opened(policy, intervention)
    known_games = games(env)
    identities = policy_id(loaded), treating.describe()
    run = RunDirectory.create(out, _manifest(loaded, treating, env, known_games, n, design), ())
    index = run.index()
    ids = []
    owed = []
    for draw in range(n):
        game = known_games[draw % len(known_games)]
        ids.append(_trajectory_id(*identities, design, game.id, draw))
        if (ids[-1], 0) not in index:
            owed.append((draw, game))
    tasks = [_Task(policy, intervention, design, owed[i : i + BATCH]) for i in range(0, len(owed), BATCH)]
    if tasks:
        done = n - len(owed)
        progress("trial", done, n)
        with run.appender() as shard:
            for records in _results(tasks, jobs):
                shard.append(records)
                done += len(records)
                progress("trial", done, n)
    return _finish(run, ids, known_games)


def _results(tasks: Sequence[_Task], jobs: int) -> Iterator[list[dict[str, Any]]]:
    if jobs == 1 or len(tasks) == 1:
        yield from map(_play_task, tasks)
    else:
        with multiprocessing.Pool(min(jobs, len(tasks))) as pool:
            yield from pool.imap_unordered(_play_task, tasks)


def _manifest(
    policy: Policy, intervention: Intervention, env: str, known_games: Sequence[Game], n: int, design: Design
) -> dict[str, Any]:
    """What was run. No time, no host, no local path, no secret: equal trials have equal manifests."""
    return {
        "kind": KIND,
        "policy": policy.describe(),
        "policy_id": policy_id(policy),
        "intervention": intervention.describe(),
        "design": asdict(design),
        "n": n,
        "env": env if Path(env).name == env else Path(env).name,
        "games": [{"id": game.id, "name": game.name} for game in known_games],
        "versions": {"credit-audit": version("credit-audit"), **{name: installed(name) for name in TESTED}},
    }


def _finish(run: RunDirectory, ids: Sequence[str], known_games: Sequence[Game]) -> Trial:
    index = run.index()
    decisions, table = tables((index.records(identity)[0] for identity in ids), known_games)
    decisions.to_parquet(run.path / DECISIONS, index=False)
    table.to_parquet(run.path / TRAJECTORIES, index=False)
    return Trial(decisions, table, _features(decisions), run.manifest)


def tables(records: Iterable[Mapping[str, Any]], known_games: Sequence[Game]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The decisions and the trajectories table of records in the order of their draws."""
    columns: dict[str, list[Any]] = {}
    owners: list[str] = []
    trajectories = []
    for record in records:
        game = known_games[record["draw"] % len(known_games)]
        for key, values in record["rows"].items():
            columns.setdefault(key, []).extend(values)
        owners += [record["point"]] * len(next(iter(record["rows"].values()), []))
        trajectories.append(
            {
                "trajectory": record["point"],
                "outcome": None if record["status"] == "error" else float(record["won"]),
                "task": game.id,
                "game": game.name,
                "task_type": game.task_type or "unknown",
                **{key: record[key] for key in ("draw", "steps", "status", "reason")},
            }
        )
    decisions = pd.DataFrame({"trajectory": owners, **columns})
    decisions["p"] = decisions["p"].astype(float) if "p" in decisions else math.nan
    return decisions, pd.DataFrame(trajectories).astype({"outcome": float})


def simulate(policy: Policy, intervention: Intervention, known_games: Sequence[Game], n: int, design: Design) -> Trial:
    """A trial of n trajectories in memory: the same as `run_trial` writes."""
    records: list[dict[str, Any]] = []
    for first in range(0, n, BATCH):
        picked = [(i, known_games[i % len(known_games)]) for i in range(first, min(first + BATCH, n))]
        records += play_draws(policy, intervention, design, picked)
    decisions, table = tables(records, known_games)
    return Trial(decisions, table, _features(decisions), {"kind": KIND})


def _features(decisions: pd.DataFrame) -> tuple[str, ...]:
    """Columns known before the coin: what estimators may use."""
    return tuple(name for name in decisions.columns if name not in (*NOT_FEATURES, *AFTER_COIN))


def load_trial(path: Path) -> Trial:
    """Open the tables of a finished or imported trial. Raises InputError where there is none."""
    run = RunDirectory.open(path)
    if run.manifest.get("kind") != KIND:
        raise InputError(f"{path}: holds no trial but another run; audit mrt run or audit mrt import makes a trial.")
    try:
        decisions, trajectories = pd.read_parquet(path / DECISIONS), pd.read_parquet(path / TRAJECTORIES)
    except OSError:
        raise InputError(f"{path}: the trial is not finished; repeat its own command to go on with it.") from None
    imported = run.manifest.get("features")
    return Trial(
        decisions,
        trajectories,
        tuple(imported) if imported is not None else _features(decisions),
        run.manifest,
    )


# Trials of other harnesses --------------------------------------------------------------------------------------


def import_trial(
    decisions: Path,
    out: Path,
    *,
    trajectories: Path | None = None,
    columns: Mapping[str, str] | None = None,
    features: Sequence[str] = (),
    cluster: str | None = None,
) -> Trial:
    """Check tables of another harness and write them to `out` as a trial.

    decisions, trajectories: CSV or parquet; without the second, `decisions` is one long table that repeats the outcome.
    columns: canonical name -> theirs (see `audit.mrt.data`). features: what was known before the coin; nothing else is
    used by estimators, since a column recorded after the coin would bias them. Raises InputError for the first thing
    that is wrong with the tables.
    """
    long = read_table(decisions)
    if trajectories is None:
        data = MRTData.from_long(long, features=features, columns=columns, cluster=cluster)
    else:
        data = MRTData(long, read_table(trajectories), features=features, columns=columns, cluster=cluster)
    return keep(data, out, imported=decisions.name, columns=dict(columns or {}))


def keep(data: MRTData, out: Path, **origin: Any) -> Trial:
    """Write checked tables to `out` as a trial. origin: where they are from, JSON-ready, for the manifest."""
    content = [
        [str(value) for value in pd.util.hash_pandas_object(table.astype(str), index=False)]
        for table in (data.decisions, data.trajectories)
    ]
    manifest = {
        "kind": KIND,
        **origin,
        "features": list(data.features),
        "cluster": data.cluster,
        "content": content_id(*content),
    }
    run = RunDirectory.create(out, manifest, ())
    data.decisions.to_parquet(run.path / DECISIONS, index=False)
    data.trajectories.to_parquet(run.path / TRAJECTORIES, index=False)
    return Trial(data.decisions, data.trajectories, data.features, run.manifest)


def read_table(path: Path) -> pd.DataFrame:
    """A CSV or parquet file. Raises InputError where it cannot be read."""
    if path.suffix not in (".csv", ".parquet"):
        raise InputError(f"{path}: has another ending; expected a table as .csv or .parquet.")
    try:
        return pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or type(error).__name__}).") from None
    except ValueError as error:  # parsers' errors derive from it
        raise InputError(f"{path}: is no {path.suffix} table ({str(error).splitlines()[0][:120]}).") from None
