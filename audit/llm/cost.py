"""What a replay of a language-model policy will take: calls, tokens and money, before it runs.

Knows: which calls a plan leads to. Hides: how a pilot of a few points is scaled to all of them. The pilot's answers
lie in the policy's journal under the same questions the study will ask, so nothing is paid twice.

Scaling is a ratio estimate (Cochran, Sampling Techniques, ch. 6): what the pilot's points took, times the work of all
points over the work of the pilot's; a point's work is the prompt tokens of one draw there and of one rollout from
there on, by the recorded trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from audit.llm.client import CHARACTERS_A_TOKEN, Prompt
from audit.llm.journal import Prices, Usage
from audit.llm.scoring import TOGETHER, ServerBackend
from audit.plan import Plan
from audit.policies import History
from audit.policies.openai import LLMPolicy
from audit.records import Trajectory, content_id
from audit.replay import Replayer, chosen_steps, point_id
from envs import Environment, InputError

STAND_IN = "thorough"  # whose trajectories stand in for those that a study has yet to collect
COUNTED = 200  # prompts that are tokenised to learn how long prompts are


@dataclass(frozen=True, slots=True)
class Estimate:
    """Totals of a whole replay. points: in all. pilot: how many of them were replayed to find out.

    usage: expected calls and tokens of the replay. collecting: of playing the trajectories first. spent: what the
    policy's journal has paid already, the pilot included. upper: an upper bound (rollouts share calls, or points share
    decisions that are scored once). stand_in: trajectories of another policy that stood in for the policy's own, 0
    where these were at hand.
    """

    points: int
    pilot: int
    usage: Usage
    spent: Usage
    prices: Prices
    upper: bool
    collecting: Usage = Usage()
    stand_in: int = 0

    def lines(self) -> list[tuple[str, str]]:
        """For printing; every figure is a total."""
        basis = f"a pilot of {self.pilot} of {self.points} points" if self.pilot else "the plan alone"
        if self.upper:
            basis += "; an upper bound"
        if self.stand_in:
            basis += f"; {self.stand_in} trajectories of the policy {STAND_IN} stood in, the model's own may be longer"

        def line(usage: Usage) -> str:
            cached = f" ({usage.cached:,} cached)" if usage.cached else ""
            return (
                f"{usage.calls:,} calls, {usage.prompt:,} prompt tokens{cached}, {usage.completion:,} completion "
                f"tokens, cost {self.prices.of(usage):.4g}"
            )

        return [
            ("points", f"{self.points:,}"),
            *([("collect", line(self.collecting))] if self.stand_in else []),
            ("replay", line(self.usage)),
            ("paid so far", f"{self.spent.calls:,} calls, {self.spent.tokens:,} tokens"),
            ("basis", basis),
        ]


async def estimate(
    policy: LLMPolicy,
    identity: str,
    plan: Plan,
    trajectories: Sequence[Trajectory],
    world: Callable[[Trajectory], Environment],
    *,
    pilot: int = 0,
    stand_in_for: int = 0,
) -> Estimate:
    """What the replay of trajectories will take.

    identity: the policy's id, as the study uses it (so that the pilot asks what the study will ask). world: opens a
    trajectory's game. pilot: points to replay; 0 asks nothing and gives an upper bound, in which no two rollouts
    share a call and adaptive rounds never stop early. stand_in_for: the trajectories are another policy's and stand in
    for so many that the study will collect; 0: they are the study's own.
    Raises InputError without trajectories, or for a pilot on another policy's.
    """
    if not trajectories:
        raise InputError("An estimate of cost needs trajectories; collect some first (audit collect).")
    if pilot and stand_in_for:
        raise InputError("A pilot replays the policy's own trajectories; collect them first (audit collect).")
    points = [(t, step) for t in trajectories for step in chosen_steps(t, plan)]
    tokens, listed = await _prompt_tokens(policy, trajectories, world)
    alive = [sum(len(t.commands) > step for t in trajectories) for step in range(plan.estimand.budget + 1)]

    def ahead(step: int) -> tuple[float, float]:
        """(decisions, prompt tokens) of one rollout from a point on, its first action not counted."""
        shares = [alive[s] / alive[step] for s in range(step + 1, plan.estimand.budget)]
        return math.fsum(shares), math.fsum(p * tokens(s) for s, p in enumerate(shares, step + 1))

    def work(step: int) -> float:
        return tokens(step) + ahead(step)[1]

    prices = policy.backend.client.prices if isinstance(policy.backend, ServerBackend) else Prices()
    ledger = policy.ledger
    if pilot:
        some = sorted(points, key=lambda point: (point[1], point[0].id))[:: max(1, len(points) // pilot)][:pilot]
        name = content_id("pilot", identity, plan.to_json(), [(t.id, step) for t, step in some])
        found = ledger.fact(name)
        if found is None:
            before = ledger.total()
            for trajectory, step in some:
                at = point_id(trajectory.id, step, identity)
                await Replayer(world(trajectory), policy, plan).replay(trajectory, [(step, at, [])])
            after = ledger.total()
            found = [getattr(after, key) - getattr(before, key) for key in _COUNTS]
            ledger.note(name, found)
        scale = math.fsum(work(step) for _, step in points) / math.fsum(work(step) for _, step in some)
        usage = Usage(*(round(count * scale) for count in found))
        return Estimate(len(points), len(some), usage, ledger.total(), prices, policy.decode.mode == "choice")
    n, draws = plan.rollouts.rounds[-1], plan.support.draws
    rollouts = n * (2 if plan.rollouts.design == "draws" else 1 + plan.support.distinct)
    written, most = _completion(policy, trajectories), draws
    commands, in_one = 1.0, 1
    if isinstance(policy.backend, ServerBackend):
        most = policy.backend.client.limits.most
        if policy.decode.mode == "choice":  # every command is scored with the whole prompt
            commands, in_one = listed, 1 if policy.backend.kind == "llama-server" else TOGETHER
    here = 1 if policy.decode.mode == "choice" else math.ceil(draws / most)
    calls = prompt = completion = 0.0
    for _, step in points:
        decisions, read = ahead(step)
        calls += (here + rollouts * decisions) * math.ceil(commands / in_one)
        prompt += (here * tokens(step) + rollouts * read) * commands
        completion += (draws + rollouts * decisions) * written
    share = stand_in_for / len(trajectories) if stand_in_for else 1.0
    usage = Usage(round(calls * share), round(prompt * share), 0, round(completion * share))
    played = [step for t in trajectories for step in range(len(t.commands))]
    collecting = Usage(
        round(len(played) * math.ceil(commands / in_one) * share),
        round(math.fsum(map(tokens, played)) * commands * share),
        0,
        round(len(played) * written * share),
    )
    total = round(len(points) * share)
    return Estimate(total, 0, usage, ledger.total(), prices, True, collecting, len(trajectories) if stand_in_for else 0)


_COUNTS = ("calls", "prompt", "cached", "completion", "untold")


async def _prompt_tokens(
    policy: LLMPolicy, trajectories: Sequence[Trajectory], world: Callable[[Trajectory], Environment]
) -> tuple[Callable[[int], float], float]:
    """Mean prompt tokens at a step (at steps none reached, as at the last one) and mean number of commands listed."""
    histories: list[History] = []
    for trajectory in trajectories[: max(1, COUNTED // max(1, len(trajectories[0].commands)))]:
        env = world(trajectory)
        history = History(trajectory.game, env.reset())
        for command in trajectory.commands:
            histories.append(history)
            history = history.then(command, env.step(history.turn.state, command))
    prompts = await policy.prompts(histories)
    by_step: dict[int, list[int]] = {}
    for history, prompt in zip(histories, prompts, strict=True):
        by_step.setdefault(history.steps, []).append(await _size(policy, prompt))
    means: Mapping[int, float] = {step: math.fsum(sizes) / len(sizes) for step, sizes in by_step.items()}
    last = max(means)
    listed = math.fsum(len(history.turn.admissible) for history in histories) / len(histories)
    return lambda step: means.get(step, means[last]), listed


async def _size(policy: LLMPolicy, prompt: Prompt) -> int:
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    if isinstance(policy.backend, ServerBackend) and policy.backend.kind == "openai":
        text = prompt if isinstance(prompt, str) else "".join(content for _, content in _messages(prompt))
        return math.ceil(len(text) / CHARACTERS_A_TOKEN)
    encode: Any = policy.backend.encode if isinstance(prompt, str) else policy.backend.encode_chat
    (ids,) = await encode([prompt])
    return len(ids)


def _messages(prompt: Prompt) -> Sequence[tuple[str, str]]:
    return [message for message in prompt if isinstance(message, tuple)]


def _completion(policy: LLMPolicy, trajectories: Sequence[Trajectory]) -> float:
    """Mean completion tokens of a decision: nothing is written under decode.mode = "choice"."""
    if policy.decode.mode == "choice":
        return 0.0
    written = [
        len(text if text is not None else command) / CHARACTERS_A_TOKEN + 1
        for t in trajectories
        for command, text in zip(t.commands, t.texts, strict=True)
    ]
    return min(policy.decode.max_tokens, math.fsum(written) / max(1, len(written)))
