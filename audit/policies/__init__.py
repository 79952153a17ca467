"""What a policy is: the batched protocol, the history it sees, and how saved policies are opened.

Knows: the shape of a question to a policy and of its answer. Hides: which kind of policy answers.

A policy sees the text history only (a `History`), never the game's state, so that any agent can be one. Calls
are batched: the rollouts that are under way hand over their histories together, so that a local model
vectorises and a server sees enough concurrency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from envs.core import InputError, Turn

T = TypeVar("T")


class History:
    """What happened so far in one rollout: an immutable linked list, so that branches share their past.

    game_id: content id of the game, for memo keys only; a policy must not learn from it.
    command: what led here (None at the first turn). turn: what was seen. steps: commands given so far.
    """

    __slots__ = ("_folded", "command", "game_id", "parent", "steps", "turn")

    def __init__(self, game_id: str, turn: Turn, parent: History | None = None, command: str | None = None) -> None:
        self.game_id, self.turn, self.parent, self.command = game_id, turn, parent, command
        self.steps: int = 0 if parent is None else parent.steps + 1
        self._folded: tuple[object, Any] | None = None

    def then(self, command: str, turn: Turn) -> History:
        """The history after one more command and the turn that followed."""
        return History(self.game_id, turn, self, command)

    def line(self) -> list[History]:
        """All moments from the first to this one."""
        moments = list(self._back())
        moments.reverse()
        return moments

    def _back(self) -> Iterator[History]:
        moment: History | None = self
        while moment is not None:
            yield moment
            moment = moment.parent

    def commands(self) -> tuple[str, ...]:
        """The commands given so far."""
        return tuple(moment.command for moment in self.line()[1:] if moment.command is not None)

    def fold(self, owner: object, start: Callable[[History], T], update: Callable[[T, History], T]) -> T:
        """A summary of the history, computed once a moment: `start(first)`, then `update(summary, moment)`.

        owner: who asks (a policy); a moment keeps the summary of the last owner only. Summaries must be
        treated as immutable, since branches share them.
        """
        missing: list[History] = []
        moment = self
        while moment._folded is None or moment._folded[0] is not owner:
            missing.append(moment)
            if moment.parent is None:
                break
            moment = moment.parent
        for moment in reversed(missing):
            if moment.parent is None:
                moment._folded = (owner, start(moment))
            else:
                assert moment.parent._folded is not None
                moment._folded = (owner, update(moment.parent._folded[1], moment))
        assert self._folded is not None
        summary: T = self._folded[1]
        return summary


@dataclass(frozen=True, slots=True)
class Proposal:
    """A policy's choice.

    command: the canonical command after parsing (it may be inadmissible: that is a real action of the policy).
    text: what the policy actually wrote, if that is something else. logprob: natural log of the probability of
    `command` under the policy, None where it is not known. status: "error" if the policy failed, with `reason`.
    repairs: what was mended to read a command out of `text`, by name.
    """

    command: str
    text: str | None = None
    logprob: float | None = None
    status: Literal["ok", "error"] = "ok"
    reason: str | None = None
    repairs: tuple[str, ...] = ()


class Policy(Protocol):
    """A stochastic policy over commands. All methods are batched; results are in the order of the requests."""

    async def propose(self, requests: Sequence[History], *, seeds: Sequence[int]) -> Sequence[Proposal]:
        """One draw for each history. seeds: 64-bit integers; equal history and seed give an equal draw."""
        ...

    async def distributions(self, requests: Sequence[History]) -> Sequence[Mapping[str, float] | None]:
        """Exact probabilities of all commands the policy can choose (they sum to 1), None where not known."""
        ...

    async def logprobs(
        self, requests: Sequence[History], actions: Sequence[str], *, condition: str | None = None
    ) -> Sequence[float | None]:
        """Natural log probability of each given action; None (never 0) where the policy cannot score it.

        condition: "success" or "failure" where the policy has an outcome-conditioned twin, else None.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """What the policy is, JSON-ready, without secrets or local paths: it goes into manifest and ids."""
        ...


def load_policy(spec: str) -> Policy:
    """Open a policy: a shipped one by name, `random`, `expert[:epsilon]`, `scripted:FILE`, or a saved file.

    Raises InputError where there is none of that name.
    """
    from audit.policies.shipped import SHIPPED, shipped_path

    kind, _, rest = spec.partition(":")
    if kind == "random":
        from audit.policies.scripted import UniformPolicy

        return UniformPolicy()
    if kind == "expert":
        from audit.policies.expert import ExpertPolicy

        return ExpertPolicy.from_spec(rest)
    if kind == "scripted":
        from audit.policies.scripted import ScriptedPolicy

        return ScriptedPolicy.load(rest)
    if spec in SHIPPED or spec.endswith(".json"):
        from audit.policies.linear import LinearPolicy

        return LinearPolicy.load(shipped_path(spec) if spec in SHIPPED else spec)
    if spec.endswith(".toml"):
        from audit.policies.openai import LLMPolicy

        return LLMPolicy.load(spec)
    raise InputError(
        f"{spec}: no such policy; expected one of {', '.join(SHIPPED)}, random, expert[:epsilon], scripted:FILE, "
        f"the .json file of a "
        f"saved policy (audit train makes one), or the .toml file of a language model."
    )
