"""Who replays what: a study cut into tasks, done by processes here or on a Ray cluster, streamed to the store.

Knows: what is still owed, and how a task travels. Hides: pools, what a worker keeps open, and time limits.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from audit.effects import undecided
from audit.plan import Plan
from audit.policies import Policy, load_policy
from audit.records import Trajectory
from audit.replay import Replayer, chosen_steps, point_id
from audit.store import RunDirectory
from envs import Environment, Game, InputError, make

CHUNK = 8  # decision points that one task of a worker replays together
WORLDS = 8  # games a worker keeps open


@dataclass(frozen=True, slots=True)
class Task:
    """Some points of one trajectory: what a worker needs and nothing else (it may be on another machine).

    points: (step, point id, records so far) of each point that is owed something. limit: seconds the task may
    take; one that takes longer is given up, its points are owed again, and the run goes on.
    """

    trajectory: Mapping[str, Any]
    address: str
    policy: str
    plan: Mapping[str, Any]
    points: Sequence[tuple[int, str, Sequence[Mapping[str, Any]]]]
    limit: float = 3600.0


def tasks(
    trajectories: Sequence[Trajectory],
    games: Mapping[str, Game],
    policy: str,
    policy_hash: str,
    plan: Plan,
    run: RunDirectory,
    limit: float = 3600.0,
) -> Iterator[Task]:
    """What is still owed: wanted minus done. limit: seconds a task may take.

    Raises InputError for a trajectory whose game is not at hand.
    """
    index = run.index()
    for trajectory in trajectories:
        if trajectory.game not in games:
            raise InputError(
                f"The game {trajectory.game_name} ({trajectory.game[:12]}) of a trajectory is not in the --env set; "
                f"name the set it was played in."
            )
        owed = []
        for step in chosen_steps(trajectory, plan):
            identity = point_id(trajectory.id, step, policy_hash)
            records = index.records(identity)
            if not records or _owes(records, plan):
                owed.append((step, identity, records))
        for first in range(0, len(owed), CHUNK):
            yield Task(
                trajectory.to_json(),
                games[trajectory.game].address,
                policy,
                plan.to_json(),
                owed[first : first + CHUNK],
                limit,
            )


def _owes(records: Sequence[Mapping[str, Any]], plan: Plan) -> bool:
    return records[0]["state"] == "defined" and undecided([records], plan)[0]


def run_tasks(
    owed: Sequence[Task],
    run: RunDirectory,
    *,
    jobs: int = 1,
    engine: str = "local",
    stop_after: float = math.inf,
    done: Callable[[int], None] = lambda points: None,
) -> None:
    """Do tasks and stream what they bring to the run directory. done: told how many points each task held.

    engine: `local` (processes of this machine) or `ray` (a Ray cluster). stop_after: seconds after which no further
    result is waited for; what is under way then is given up and owed again.
    """
    if stop_after <= 0:
        return
    until = time.monotonic() + stop_after
    with run.appender() as shard, closing(_results(owed, jobs, engine)) as results:
        for points, records in results:
            shard.append(records)
            done(points)
            if time.monotonic() > until:
                break


def _results(owed: Sequence[Task], jobs: int, engine: str) -> Generator[tuple[int, list[dict[str, Any]]], None, None]:
    if engine == "ray":
        try:
            from ray.util.multiprocessing import Pool
        except ImportError:
            raise InputError("--engine ray needs the extra: pip install 'credit-audit[ray]'.") from None
        with Pool(jobs if jobs > 1 else None) as pool:
            yield from pool.imap_unordered(do_task, owed)
    elif engine != "local":
        raise InputError(f"engine {engine!r} is not known; expected local or ray.")
    elif jobs == 1 and (width := getattr(_policy(owed[0].policy), "at_once", 1)) > 1:
        yield from _together(owed, width)
    elif jobs == 1 or len(owed) <= 1:
        yield from map(do_task, owed)
    else:
        with multiprocessing.Pool(min(jobs, len(owed))) as pool:
            yield from pool.imap_unordered(do_task, owed)


_adopted: dict[tuple[int, str], Policy] = {}


def adopt(spec: str, policy: Policy) -> None:
    """Let this process, and none that it forks, do tasks of `spec` with a policy that is open already.

    So a model is not loaded twice, and a file saved anew under the same name is not mistaken for what it held before.
    """
    _adopted.clear()
    _adopted[os.getpid(), spec] = policy


def _policy(spec: str) -> Policy:
    return _adopted.get((os.getpid(), spec)) or _loaded(spec)


@lru_cache(maxsize=4)
def _loaded(spec: str) -> Policy:
    return load_policy(spec)


@lru_cache(maxsize=WORLDS)
def _world(address: str) -> Environment:
    return make(address)


def do_task(task: Task) -> tuple[int, list[dict[str, Any]]]:
    """Replay the points of a task to the end: (how many points, their new records); none if it took too long."""
    try:
        with _time_limit(task.limit):
            return asyncio.run(_replay(task))
    except TimeoutError:
        return _given_up(task)


async def _replay(task: Task) -> tuple[int, list[dict[str, Any]]]:
    replayer = Replayer(_world(task.address), _policy(task.policy), Plan.from_json(task.plan))
    return len(task.points), await replayer.replay(Trajectory.from_json(task.trajectory), task.points)


def _given_up(task: Task) -> tuple[int, list[dict[str, Any]]]:
    warnings.warn(
        f"{task.trajectory['game_name']}: {len(task.points)} points took over {task.limit:g} s and were given up.",
        stacklevel=2,
    )
    return len(task.points), []


def _together(owed: Sequence[Task], width: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Tasks whose policy waits for a server: several under way in one loop, results as they come.

    If one fails (the server is gone, a cap is reached) the others that are under way are waited for and given first:
    what they asked is paid.
    """
    loop = asyncio.new_event_loop()
    try:
        waiting = iter(owed)
        under_way: dict[asyncio.Task[tuple[int, list[dict[str, Any]]]], Task] = {}
        failure: BaseException | None = None
        while True:
            for task in islice(waiting, 0 if failure else width - len(under_way)):
                under_way[loop.create_task(asyncio.wait_for(_replay(task), task.limit or None))] = task
            if not under_way:
                break
            done, _ = loop.run_until_complete(asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED))
            for finished in done:
                task = under_way.pop(finished)
                try:
                    yield finished.result()
                except (TimeoutError, asyncio.TimeoutError):
                    yield _given_up(task)
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise failure
    finally:
        for left in (dropped := asyncio.all_tasks(loop)):
            left.cancel()
        if dropped:
            loop.run_until_complete(asyncio.gather(*dropped, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer, where the platform and the thread allow it."""
    if seconds <= 0 or not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
