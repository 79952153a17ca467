"""Training examples: every decision of the trajectories under study, as text and as a choice between commands.

Knows: that one example is one step, joined to credit by the id of its point; how a step becomes a row of a
conditional logit. Hides: replaying the trajectories to learn what each step could choose from, and that commands with
equal features share a row of the design.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import sparse

from audit.collect import policy_id
from audit.policies import History
from audit.policies.expert import Reader
from audit.policies.linear import Features, LinearPolicy
from audit.policies.shipped import SHIPPED, shipped_path
from audit.records import Trajectory
from audit.replay import point_id
from audit.results import Run, read_run_trajectories
from envs import Game, make
from envs import games as find_games
from envs.core import InputError

Ints = npt.NDArray[np.int64]
Decision = tuple[int, Sequence[int], int]  # code of the context, codes of the commands, position of the one chosen

REPRODUCED = "the recorded observations did not reproduce"
NOT_OFFERED = "the command is not among those the game admits"


@dataclass(frozen=True, slots=True)
class Choices:
    """What each example chose from, for the embedded trainer.

    features: names. design: (rows, features), a row for each distinct command in context. members: (examples, widest)
    rows that each example chose from, filled up with the number of rows. chosen: (examples,) row that was chosen, -1
    where the example cannot be learned from.
    """

    features: tuple[str, ...]
    design: sparse.csr_matrix
    members: Ints
    chosen: Ints

    @classmethod
    def of(cls, decisions: Sequence[Decision | None], features: Features) -> Choices:
        """From decisions as `Features.moment` codes them; None for an example that cannot be learned from."""
        rows: dict[tuple[int, int], int] = {}
        names: dict[str, int] = {}
        entries: list[list[int]] = []
        chosen = np.full(len(decisions), -1, dtype=np.int64)
        members: list[list[int]] = []
        for number, decision in enumerate(decisions):
            members.append([])
            if decision is None:
                continue
            context, codes, position = decision
            for code in codes:
                row = rows.setdefault((context, code), len(entries))
                if row == len(entries):
                    entries.append([names.setdefault(name, len(names)) for name in features.names(context, code)])
                members[-1].append(row)
            chosen[number] = members[-1][position]
        widest = max((len(member) for member in members), default=0)
        table = np.full((len(members), widest), len(entries), dtype=np.int64)
        for number, member in enumerate(members):
            table[number, : len(member)] = member
        pointers = np.cumsum([0, *map(len, entries)])
        columns = np.array([column for entry in entries for column in entry], dtype=np.int64)
        design = sparse.csr_matrix((np.ones(columns.size), columns, pointers), shape=(len(entries), len(names)))
        return cls(tuple(names), design, table, chosen)


@dataclass(frozen=True)
class Examples:
    """One example a step.

    points: one row an example, in a fixed order, with at least point, trajectory, game, step, won; credit columns may
    be added with `join`. choices: for the embedded trainer, None for policies that it cannot train. start: the policy
    that training begins with, None where it is elsewhere. unusable: (examples,) why an example cannot be trained on,
    None where it can. texts: trajectory -> what was seen and done, for datasets. tokens: (examples,) tokens of each
    example's completion, None where there are none (the linear policy) or nobody counted.
    """

    points: pd.DataFrame
    choices: Choices | None = None
    start: LinearPolicy | None = None
    unusable: Sequence[str | None] | None = None
    texts: Mapping[str, Trajectory] = field(default_factory=dict)
    tokens: Ints | None = None

    def __post_init__(self) -> None:
        for column in ("point", "trajectory", "game", "step", "won"):
            if column not in self.points.columns:
                raise InputError(f"Training examples need a column {column!r}; found {', '.join(self.points.columns)}.")
        if self.points.empty:
            raise InputError("There is no training example; the trajectories hold no step.")
        if self.points["point"].duplicated().any():
            raise InputError("Two training examples have one point id; give every step an id of its own.")
        for name, values in (("unusable", self.unusable), ("tokens", self.tokens)):
            if values is not None and len(values) != len(self.points):
                raise InputError(f"{len(values)} entries of {name} for {len(self.points)} training examples.")

    def __len__(self) -> int:
        return len(self.points)

    def usable(self) -> npt.NDArray[np.bool_]:
        """(examples,) whether an example can be trained on."""
        if self.unusable is None:
            return np.ones(len(self), dtype=bool)
        return np.array([why is None for why in self.unusable])

    def join(self, credit: pd.DataFrame) -> Examples:
        """Add the columns of a frame with a `point` column; a point that the frame lacks has missing credit.

        Columns that are here already are not replaced. Raises InputError where the frame has no point column, holds a
        point twice, or shares no point with the examples (it is of another run then).
        """
        if "point" not in credit.columns:
            raise InputError(f"Credit has columns {', '.join(map(str, credit.columns))}; expected a column 'point'.")
        if credit["point"].duplicated().any():
            raise InputError("Credit holds a point twice; give one row a point.")
        if not credit["point"].isin(self.points["point"]).any():
            raise InputError("Credit shares no point with these trajectories; it was computed for another run.")
        new = ["point", *(column for column in credit.columns if column not in self.points.columns)]
        points = self.points.merge(credit[new], on="point", how="left", validate="one_to_one")
        return replace(self, points=points)

    def counted(self, tokens: Sequence[int] | npt.ArrayLike) -> Examples:
        """The same with the number of tokens of each example's completion, for the ledger."""
        return replace(self, tokens=np.asarray(tokens, dtype=np.int64))


def examples_of_run(
    run: Run, *, env: str | Sequence[Game] | None = None, policy: LinearPolicy | None = None
) -> Examples:
    """The steps of a run's trajectories, with the replayed effect as `tau` (missing where a point is undefined).

    env: the set its games are from (default: as in the run). policy: the linear policy that was replayed, where it is
    not one that ships. Examples of other policies have no choices: they can be matched and exported, not trained here.
    Raises InputError where a game or the policy is not at hand.
    """
    manifest = run.directory.manifest
    trajectories = read_run_trajectories(run.directory)
    if policy is None and manifest["policy"].get("name") in SHIPPED:
        policy = LinearPolicy.load(shipped_path(manifest["policy"]["name"]))
    if policy is None and manifest["policy"].get("kind") == "linear":
        raise InputError(f"{run.directory.path}: give the linear policy that was replayed (it is not one that ships).")
    if policy is not None and policy_id(policy) != manifest["policy_id"]:
        raise InputError(f"{run.directory.path}: was replayed by another policy than {policy.name}; give that one.")
    examples = examples_of(
        trajectories, env=manifest["env"] if env is None else env, policy=policy, identity=manifest["policy_id"]
    )
    effects = run.effects
    tau = effects.loc[effects["support"] == "defined", ["point", "estimate"]].rename(columns={"estimate": "tau"})
    return examples.join(tau if len(tau) else effects[["point"]].assign(tau=np.nan))


def examples_of(
    trajectories: Sequence[Trajectory],
    *,
    env: str | Sequence[Game],
    policy: LinearPolicy | None,
    identity: str | None = None,
) -> Examples:
    """The steps of trajectories. identity: id of the policy that replays them (default: the trajectory's own).

    `logprob` is what the trajectory recorded, missing where it recorded none.
    Raises InputError where a game is not in the set.
    """
    rows: list[dict[str, Any]] = []
    decisions: list[Decision | None] = []
    unusable: list[str | None] = []
    games: dict[str, Game] = {}
    if policy is not None:
        games = {game.id: game for game in (find_games(env) if isinstance(env, str) else env)}
    features, reader = Features(policy.groups if policy is not None else ()), Reader()
    for trajectory in trajectories:
        for step, command in enumerate(trajectory.commands):
            rows.append(
                {
                    "point": point_id(trajectory.id, step, identity or trajectory.policy),
                    "trajectory": trajectory.id,
                    "game": trajectory.game,
                    "task_type": trajectory.task_type,
                    "step": step,
                    "steps": len(trajectory.commands),
                    "won": bool(trajectory.won),
                    "status": trajectory.status,
                    "action": command,
                    "logprob": np.nan if trajectory.logprobs[step] is None else trajectory.logprobs[step],
                }
            )
        if policy is None:
            unusable += [None] * len(trajectory.commands)
            continue
        if trajectory.game not in games:
            raise InputError(f"{trajectory.game_name}: not a game of {env}; name the set that the run was played on.")
        for decision, why in _decisions(trajectory, games[trajectory.game], features, reader):
            decisions.append(decision)
            unusable.append(why)
    frame = pd.DataFrame(rows)
    if frame.empty:
        raise InputError("There is no training example; the trajectories hold no step.")
    choices = None if policy is None else Choices.of(decisions, features)
    return Examples(frame, choices, policy, unusable, {trajectory.id: trajectory for trajectory in trajectories})


def _decisions(
    trajectory: Trajectory, game: Game, features: Features, reader: Reader
) -> list[tuple[Decision | None, str | None]]:
    world = make(game.address)
    history = History(world.game_id, world.reset())
    found: list[tuple[Decision | None, str | None]] = []
    faithful = True
    for step, command in enumerate(trajectory.commands):
        turn, recorded = history.turn, trajectory.observations[step]
        faithful = faithful and not turn.done and (recorded is None or recorded == turn.observation)
        if not faithful:
            found.append((None, REPRODUCED))
            continue
        if command not in turn.admissible:
            found.append((None, NOT_OFFERED))
        else:
            context, codes = features.moment(reader.memory(history), turn)
            found.append(((context, codes, turn.admissible.index(command)), None))
        history = history.then(command, world.step(turn.state, command))
    return found
