"""A whole study of a language-model policy: stopped by a cap, resumed, and nothing secret in its files."""

from __future__ import annotations

from pathlib import Path

import pytest

import audit.study
import audit.tasks
from audit.llm.journal import CapReached
from audit.plan import Collection, Estimand, Plan, PlanFile, Rollouts, Support
from audit.policies.openai import LLMPolicy
from audit.study import replay_study
from tests.llm.conftest import write
from tests.llm.loopback import FakeModel, Loopback

SECRET = "sk-loopback-fedcba9876543210"
PLAN = PlanFile(
    Plan(
        name="loop",
        estimand=Estimand(budget=4),
        support=Support(draws=4),
        rollouts=Rollouts(rounds=[2], adaptive=False),
        collection=Collection(trajectories=2),
    ),
    False,
    (),
)


def rows(folder: Path) -> list[str]:
    return sorted(line for shard in (folder / "shards").glob("*.jsonl") for line in shard.read_text().splitlines())


def test_a_capped_study_resumes_and_its_files_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPBACK_KEY", SECRET)
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    for module in (audit.study, audit.tasks):
        monkeypatch.setattr(module, "load_policy", LLMPolicy.load)
    out, policy = tmp_path / "run", str(tmp_path / "policy.toml")
    with Loopback(FakeModel("think"), key=SECRET) as server:

        def study(folder: Path, calls: int) -> None:
            audit.tasks._policy.cache_clear()
            write(
                Path(policy),
                server.url,
                decode={"max_tokens": 300},
                server={"key_env": "LOOPBACK_KEY"},
                caps={"calls": calls},
            )
            replay_study(policy, "generated:6:0", PLAN, folder)

        stops = 0
        for calls in (5, 15, 30, 10_000):  # the first stops while trajectories are collected
            try:
                study(out, calls)
            except CapReached:
                stops += 1
                assert server.requests <= calls
        assert stops == 3
        assert max(server.answered.values()) == 1, "an answer was paid twice"
        paid = server.requests
        study(tmp_path / "again", 10_000)
        assert server.requests == paid, "an equal study asked again"
    assert rows(out) == rows(tmp_path / "again")
    files = [path for path in out.rglob("*") if path.is_file()] + list((tmp_path / "cache").rglob("*.sqlite*"))
    assert any(path.name == "manifest.json" for path in files) and any(".sqlite" in path.name for path in files)
    for path in files:
        content = path.read_bytes()
        assert SECRET.encode() not in content, path
        if ".sqlite" not in path.name:
            assert b"127.0.0.1" not in content and str(tmp_path).encode() not in content, path
