"""What a policy says of given actions, in nats and in tokens.

Knows: that a policy over whole commands has one token an action (its own distribution is over them), also where a
language model scores every command ("choice"), and that one that writes has the tokens of the command and its end.
Hides: which policies can tell. Both sides of a ratio come from here, so by one path and with the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from audit.llm.scoring import ScoresUnavailable
from audit.policies import History, Policy
from audit.policies.openai import LLMPolicy
from envs.core import InputError


@dataclass(frozen=True, slots=True)
class Said:
    """Of one action. total: log probability, None where the policy cannot score. tokens, merged, noise: as in
    `credit_signals.SignalPoint`."""

    total: float | None = None
    tokens: int | None = None
    merged: bool | None = None
    noise: float | None = None


async def said(
    policy: Policy, moments: Sequence[History], actions: Sequence[str], condition: str | None = None
) -> list[Said]:
    """Log probability of each action, with its tokens where the policy tells them. Raises PolicyUnavailable."""
    if not isinstance(policy, LLMPolicy):
        totals = await policy.logprobs(moments, actions, condition=condition)
        exact = [] if condition else await policy.distributions(moments)
        return [Said(t, 1 if exact and exact[i] is not None else None) for i, t in enumerate(totals)]
    if policy.decode.mode == "choice":
        totals = await policy.logprobs(moments, actions, condition=condition)
        return [Said(t, 1, None, await _choice_noise(policy, a)) for t, a in zip(totals, actions, strict=True)]
    try:
        scores = await policy.scores(moments, actions, condition=condition)
    except (ScoresUnavailable, InputError):  # no scores here, or no outcome in its template: `logprobs` says which
        return [Said(total) for total in await policy.logprobs(moments, actions, condition=condition)]
    noise = _noise(policy)
    return [
        Said(score.total, score.counted, score.merged, None if noise is None else noise * score.counted)
        for score in scores
    ]


def _noise(policy: LLMPolicy) -> float | None:
    """Nats a token by which a score differs when it is computed again, in the same way or the other one."""
    return None if policy.tested is None else max(policy.tested.noise, policy.tested.disagreement)


async def _choice_noise(policy: LLMPolicy, action: str) -> float | None:
    """The same of log pi(action): of its own score, and of the sum over commands it is divided by."""
    noise = _noise(policy)
    if noise is None:
        return None
    (ids,) = await policy.backend.encode([action + policy.decode.end])
    return 2 * noise * (1 if policy.decode.length == "mean" else len(ids)) / policy.decode.temperature


def about(policy: Policy) -> Mapping[str, Any]:
    """What is stored beside columns of log probabilities; empty for policies that compute them exactly."""
    if not isinstance(policy, LLMPolicy):
        return {}
    choice = policy.decode.mode == "choice"
    return {
        "scores": {
            "of": "the policy's distribution over admissible commands" if choice else "the command and its end",
            "temperature": policy.decode.temperature if choice else 1.0,
            "self_test": None if policy.tested is None else policy.tested.to_json(),
        }
    }
