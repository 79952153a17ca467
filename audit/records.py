"""What the audit writes down: frozen records with ids that follow from their content.

Knows: which facts make two things the same. Hides: how ids and random streams are derived from them.
Ids are BLAKE2b of canonical JSON, so they are the same on every machine and after every restart; a rollout's
random stream follows from its id, so results do not depend on order, worker count or interruption.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Status = Literal["ok", "truncated", "error"]
PointState = Literal["defined", "no_counterfactual", "insufficient", "unfaithful", "error"]


def content_id(*parts: Any) -> str:
    """32 hexadecimal digits that follow from JSON-ready parts."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def draws(n: int, *key: Any) -> list[int]:
    """n random 64-bit integers from the Philox stream named by a key."""
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).digest()
    words = np.frombuffer(digest, dtype="<u8")
    stream: list[int] = np.random.Philox(key=words).random_raw(n).tolist()
    return stream


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode of a policy in a game.

    game, game_name, task_type: which game. policy: id of the policy (`unknown` for logs without one).
    budget: steps allowed. commands: what was done, in order. observations: what was seen, one more than
    commands (None where a log kept none). won: outcome from the goal. status: `truncated` at the budget.
    logprobs: natural log of pi(command | history), None where unknown. texts: what the policy wrote, where it
    is not the command itself. origin: how the trajectory came about (seed and draw, or the log and its entry; by step
    what was mended to read the command, why the policy gave up).
    certificate: for imported logs, how faithfully it replays.
    """

    game: str
    game_name: str
    task_type: str | None
    policy: str
    budget: int
    commands: tuple[str, ...]
    observations: tuple[str | None, ...]
    won: bool
    status: Status
    logprobs: tuple[float | None, ...]
    texts: tuple[str | None, ...]
    origin: Mapping[str, Any] = field(default_factory=dict)
    certificate: Mapping[str, Any] | None = None

    @property
    def id(self) -> str:
        """Content id: the game, who played, how the trajectory came about and what was done."""
        return content_id("trajectory", self.game, self.policy, self.budget, dict(self.origin), self.commands)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; the documented JSONL schema of trajectories is these fields plus `id`."""
        return {
            "id": self.id,
            "game": self.game,
            "game_name": self.game_name,
            "task_type": self.task_type,
            "policy": self.policy,
            "budget": self.budget,
            "commands": list(self.commands),
            "observations": list(self.observations),
            "won": self.won,
            "status": self.status,
            "logprobs": list(self.logprobs),
            "texts": list(self.texts),
            "origin": dict(self.origin),
            "certificate": None if self.certificate is None else dict(self.certificate),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trajectory:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on data of another shape."""

        def optional(values: Sequence[Any] | None, n: int) -> tuple[Any, ...]:
            return tuple(values) if values is not None else (None,) * n

        commands = tuple(str(command) for command in data["commands"])
        trajectory = cls(
            game=str(data["game"]),
            game_name=str(data["game_name"]),
            task_type=data.get("task_type"),
            policy=str(data.get("policy", "unknown")),
            budget=int(data["budget"]),
            commands=commands,
            observations=optional(data.get("observations"), len(commands) + 1),
            won=bool(data["won"]),
            status=data.get("status", "ok"),
            logprobs=optional(data.get("logprobs"), len(commands)),
            texts=optional(data.get("texts"), len(commands)),
            origin=dict(data.get("origin") or {}),
            certificate=data.get("certificate"),
        )
        if len(trajectory.observations) != len(commands) + 1:
            raise ValueError(f"{len(commands)} commands need {len(commands) + 1} observations")
        return trajectory
