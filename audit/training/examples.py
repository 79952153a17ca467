"""Training examples: every decision of the trajectories under study, as text, as tokens, as a choice of a command.

Knows: that one example is one step, joined to credit by the id of its point; how a step becomes a row of a
conditional logit, or a language model's prompt and answer. Hides: replaying the trajectories to learn what each step
could choose from, and that commands with equal features share a row of the design.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
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
Checkpoint = LinearPolicy | Path  # a policy that arms can start from or end as; a language model is its .toml file
Decision = tuple[int, Sequence[int], int]  # code of the context, codes of the commands, position of the one chosen

REPRODUCED = "the recorded observations did not reproduce"
NOT_OFFERED = "the command is not among those the game admits"
TOO_LONG = "prompt and answer are longer than the model's context"


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


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a language model reads and is to write at one step, as token ids. answer ends with the policy's own end."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Examples:
    """One example a step.

    points: one row an example, in a fixed order, with at least point, trajectory, game, step, won; credit columns may
    be added with `join`. choices: for the embedded trainer, None for policies that it cannot train. start: the policy
    that training begins with, None where it is elsewhere. unusable: (examples,) why an example cannot be trained on,
    None where it can. texts: trajectory -> what was seen and done, for datasets. tokens: (examples,) tokens of each
    example's completion, None where there are none (the linear policy) or nobody counted. encoded: (examples,) for
    the trainer of language models, by the policy's own template and window. start_id: id of that language model.
    """

    points: pd.DataFrame
    choices: Choices | None = None
    start: Checkpoint | None = None
    unusable: Sequence[str | None] | None = None
    texts: Mapping[str, Trajectory] = field(default_factory=dict)
    tokens: Ints | None = None
    encoded: Sequence[Encoded] | None = None
    start_id: str | None = None

    def __post_init__(self) -> None:
        for column in ("point", "trajectory", "game", "step", "won"):
            if column not in self.points.columns:
                raise InputError(f"Training examples need a column {column!r}; found {', '.join(self.points.columns)}.")
        if self.points.empty:
            raise InputError("There is no training example; the trajectories hold no step.")
        if self.points["point"].duplicated().any():
            raise InputError("Two training examples have one point id; give every step an id of its own.")
        for name, values in (("unusable", self.unusable), ("tokens", self.tokens), ("encoded", self.encoded)):
            if values is not None and len(values) != len(self.points):
                raise InputError(f"{len(values)} entries of {name} for {len(self.points)} training examples.")

    def __len__(self) -> int:
        return len(self.points)

    def surrogate(self) -> bool:
        """Whether a language model learns from what another policy played."""
        return self.start_id is not None and any(one.policy != self.start_id for one in self.texts.values())

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


def examples_of_run(run: Run, *, env: str | Sequence[Game] | None = None, policy: Checkpoint | None = None) -> Examples:
    """The steps of a run's trajectories, with the replayed effect as `tau` (missing where a point is undefined).

    env: the set its games are from (default: as in the run). policy: what arms start from: the linear policy that was
    replayed, where it is not one that ships, or the .toml file of a language model in this process ([local]), which
    may be another one than was replayed. Examples without either can be matched and exported, not trained here.
    Raises InputError where a game or the policy is not at hand.
    """
    manifest = run.directory.manifest
    trajectories = read_run_trajectories(run.directory)
    if policy is None and manifest["policy"].get("name") in SHIPPED:
        policy = LinearPolicy.load(shipped_path(manifest["policy"]["name"]))
    if policy is None and manifest["policy"].get("kind") == "linear":
        raise InputError(f"{run.directory.path}: give the linear policy that was replayed (it is not one that ships).")
    if isinstance(policy, LinearPolicy) and policy_id(policy) != manifest["policy_id"]:
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
    policy: Checkpoint | None,
    identity: str | None = None,
) -> Examples:
    """The steps of trajectories. identity: id of the policy that replays them (default: the trajectory's own).

    `logprob` is what the trajectory recorded, missing where it recorded none. A language model learns what was
    written, also where the game did not admit it; the linear policy cannot.
    Raises InputError where a game is not in the set.
    """
    frame = pd.DataFrame([row for trajectory in trajectories for row in _rows(trajectory, identity)])
    if frame.empty:
        raise InputError("There is no training example; the trajectories hold no step.")
    bare = Examples(frame, start=policy, texts={trajectory.id: trajectory for trajectory in trajectories})
    if policy is None:
        return replace(bare, unusable=[None] * len(frame))
    games = {game.id: game for game in (find_games(env) if isinstance(env, str) else env)}
    for trajectory in trajectories:
        if trajectory.game not in games:
            raise InputError(f"{trajectory.game_name}: not a game of {env}; name the set that the run was played on.")
    moments = [moment for trajectory in trajectories for moment in _moments(trajectory, games[trajectory.game])]
    if isinstance(policy, Path):
        return _encoded(bare, moments, policy)
    features, reader = Features(policy.groups), Reader()
    decisions: list[Decision | None] = []
    unusable: list[str | None] = []
    for history, command in zip(moments, frame["action"], strict=True):
        offered = history is not None and command in history.turn.admissible
        unusable.append(REPRODUCED if history is None else None if offered else NOT_OFFERED)
        if history is None or not offered:
            decisions.append(None)
            continue
        context, codes = features.moment(reader.memory(history), history.turn)
        decisions.append((context, codes, history.turn.admissible.index(command)))
    return replace(bare, choices=Choices.of(decisions, features), unusable=unusable)


def _rows(trajectory: Trajectory, identity: str | None) -> Iterator[dict[str, Any]]:
    for step, command in enumerate(trajectory.commands):
        yield {
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


def _moments(trajectory: Trajectory, game: Game) -> Iterator[History | None]:
    """The history of each step as the world tells it; None from where it tells another than was recorded."""
    world = make(game.address)
    history = History(world.game_id, world.reset())
    faithful = True
    for step, command in enumerate(trajectory.commands):
        turn, recorded = history.turn, trajectory.observations[step]
        faithful = faithful and not turn.done and (recorded is None or recorded == turn.observation)
        yield history if faithful else None
        if faithful:
            history = history.then(command, world.step(turn.state, command))


def _encoded(bare: Examples, moments: Sequence[History | None], path: Path) -> Examples:
    """Prompts and answers as the language model of a policy file reads and writes them."""
    from audit.policies.openai import LLMPolicy

    policy = LLMPolicy.load(path)
    backend: Any = policy.backend
    if not hasattr(backend, "tokenizer"):
        raise InputError(f"{path}: is a server's model; training needs one in this process ([local]).")
    known = [place for place, history in enumerate(moments) if history is not None]
    texts = [written(one, step) for one in bare.texts.values() for step in range(len(one.commands))]
    prompts: Any = asyncio.run(policy.prompts([moments[place] for place in known]))  # type: ignore[misc]
    answers = asyncio.run(backend.encode([texts[place] + policy.decode.end for place in known]))
    end = () if policy.decode.end else (int(backend.tokenizer.eos_token_id),)
    encoded = [Encoded((), ())] * len(moments)
    unusable: list[str | None] = [REPRODUCED] * len(moments)
    longest = backend.model.config.max_position_embeddings
    for place, prompt, answer in zip(known, prompts, answers, strict=True):
        encoded[place] = Encoded(tuple(prompt), (*answer, *end))
        unusable[place] = TOO_LONG if len(prompt) + len(answer) + len(end) > longest else None
    tokens = np.array([len(one.answer) for one in encoded], dtype=np.int64)
    return replace(bare, encoded=encoded, unusable=unusable, tokens=tokens, start_id=policy_id(policy))


def written(trajectory: Trajectory, step: int) -> str:
    """What the policy wrote at a step: its text where there is one beside the command."""
    return trajectory.texts[step] or trajectory.commands[step]
