"""The capability probe: what each kind of loopback server is found to be able to do, and what follows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from audit.llm.capabilities import Capabilities, capabilities
from audit.llm.journal import PolicyUnavailable
from tests.llm.loopback import FakeModel, Faults, Loopback


def probe(dialect: str = "vllm", faults: Faults | None = None, model: str = "fake") -> Capabilities:
    with Loopback(FakeModel(), dialect=dialect, faults=faults) as server:
        found = asyncio.run(capabilities(server.url, model, timeout=2))
        assert server.requests < 60
    json.dumps(found.to_json(), allow_nan=False)
    return found


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama-server"])
def test_servers_that_score_are_recognised(dialect: str) -> None:
    found = probe(dialect)
    assert found.kind == dialect
    for name in ("chat", "completions", "log probabilities of samples", "n > 1", "seed", "token ids"):
        assert found.has(name), name
    assert found.has("scores of given text") and found.tested is not None and found.tested.noise == 0
    assert not found.has("structured output")
    assert any("exact probabilities" in sentence for sentence in found.consequences())


def test_a_chat_server_is_told_what_it_lacks() -> None:
    found = probe("openai")
    assert found.kind == "openai" and found.has("chat") and not found.has("completions")
    assert not found.has("scores of given text") and found.tested is None
    assert any("'choice' is refused" in sentence for sentence in found.consequences())
    assert ("scores of given text", "no (needs token ids)") in found.lines()


def test_ignored_settings_do_not_count() -> None:
    def ignores(number: int, path: str, body: Mapping[str, Any]) -> str | None:
        return "few" if body.get("n", 1) > 1 else None

    found = probe(faults=ignores)
    assert not found.has("n > 1")
    assert not probe(faults=lambda n, path, body: "no_logprobs").has("log probabilities of samples")


def test_scores_that_are_constant_are_no_scores() -> None:
    found = probe(faults=lambda n, path, body: "constant" if body.get("echo") else None)
    assert not found.has("scores of given text")
    assert any("reads as chance" in line or "read as chance" in line for _, line in found.lines())


def test_no_server_no_model_and_another_model_are_named() -> None:
    with pytest.raises(PolicyUnavailable, match="cannot be reached"):
        asyncio.run(capabilities("http://127.0.0.1:9/v1", "fake", timeout=2))
    with pytest.raises(PolicyUnavailable, match="does not exist"):
        probe(model="other")
    with pytest.raises(PolicyUnavailable, match="answered as model"):
        probe(faults=lambda *_: "wrong_model")
