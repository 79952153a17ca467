"""A small game and saved policies over loopback servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from audit.policies import History
from audit.policies.openai import DecodeSettings, LLMPolicy, PromptSettings, write_policy
from envs import Environment, games, make
from tests.llm.loopback import Loopback

QUICK = {"concurrency": 4, "most": 8, "timeout": 2.0, "retries": 2, "longest_wait": 0.3}
Open = Callable[..., LLMPolicy]


@pytest.fixture(scope="session")
def world() -> Environment:
    """One generated game."""
    return make(games("generated:6:0")[0].address)


@pytest.fixture
def start(world: Environment) -> History:
    """Its beginning."""
    return History(world.game_id, world.reset())


def write(
    path: Path,
    url: str,
    *,
    kind: str = "vllm",
    prompt: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> Path:
    """A policy file for a loopback server."""
    sections.setdefault("limits", QUICK)
    write_policy(
        path,
        "loop",
        prompt=PromptSettings(**(prompt or {})),
        decode=DecodeSettings(**(decode or {})),
        server={"kind": kind, "base_url": url, "model": "fake", **(server or {})},
        **sections,
    )
    return path


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """opened(server, ...) writes a policy file as `write` does and opens it, its journal beside it."""

    def make_policy(server: Loopback, **options: Any) -> LLMPolicy:
        path = write(tmp_path / "policy.toml", server.url, **options)
        return LLMPolicy.load(path, journal=tmp_path / "journal.sqlite")

    return make_policy
