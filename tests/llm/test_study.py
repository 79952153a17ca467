"""A whole study of a language-model policy: stopped by a cap, resumed, and nothing secret in its files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import audit.study
import audit.tasks
from audit.cli import main
from audit.llm.journal import CapReached, PolicyUnavailable
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
            write(
                Path(policy),
                server.url,
                decode={"max_tokens": 300},
                server={"key_env": "LOOPBACK_KEY"},
                caps={"calls": calls},
            )
            replay_study(policy, "generated:6:0", PLAN, folder)

        write(Path(policy), server.url, decode={"max_tokens": 300}, server={"key_env": "LOOPBACK_KEY"})
        asyncio.run(LLMPolicy.load(policy).examine())  # a study does it first; not in the ledger
        probes = server.requests
        server.answered.clear()
        stops = 0
        for calls in (5, 15, 30, 10_000):  # the first stops while trajectories are collected
            try:
                study(out, calls)
            except CapReached:
                stops += 1
                assert server.requests - probes <= calls
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


def test_tasks_ask_together_and_one_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    policy = str(tmp_path / "policy.toml")
    plan = PlanFile(
        Plan(
            name="wide",
            estimand=Estimand(budget=10),
            support=Support(draws=4),
            rollouts=Rollouts(rounds=[1], adaptive=False),
            collection=Collection(trajectories=3),
        ),
        False,
        (),
    )
    with Loopback(FakeModel(), latency=0.02) as server:
        limits = {"concurrency": 32, "most": 4, "batch": 4, "timeout": 20.0}
        write(Path(policy), server.url, limits=limits)
        run = replay_study(policy, "generated:6:0", plan, tmp_path / "run")
        assert server.busiest > 8, "the tasks waited for each other"
        assert run.directory.manifest["server"]["kind"] == "vllm"
        assert (run.effects["reason"].dropna() != "not replayed").all()
    lines = rows(tmp_path / "run")
    (tmp_path / "cache").rename(tmp_path / "gone")  # ask again, of a server that goes away in the middle
    with Loopback(FakeModel(), faults=lambda n, path, body: "401" if n > 90 else None) as server:
        write(Path(policy), server.url, limits=limits)
        with pytest.raises(PolicyUnavailable):
            replay_study(policy, "generated:6:0", plan, tmp_path / "cut")
    assert set(rows(tmp_path / "cut")) < set(lines)
    (tmp_path / "cache").rename(tmp_path / "gone too")
    with Loopback(FakeModel(), latency=0.02) as server:  # what is under way when time is up is dropped without noise
        write(Path(policy), server.url, limits=limits)
        stopped = replay_study(policy, "generated:6:0", plan, tmp_path / "stopped", stop_after=1e-9)
    assert stopped.effects["reason"].str.startswith("not replayed").sum() >= 8
    assert set(rows(tmp_path / "stopped")) < set(lines)


def test_a_dry_run_asks_nothing_and_a_pilot_is_not_paid_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "plan.toml").write_text(PLAN.plan.to_toml())
    policy, out = str(tmp_path / "policy.toml"), str(tmp_path / "run")
    common = ["replay", policy, "--env", "generated:6:0", "--plan", str(tmp_path / "plan.toml"), "--out", out]
    with Loopback(FakeModel()) as server:
        write(Path(policy), server.url, prices={"prompt": 2.0, "completion": 10.0})
        said = CliRunner().invoke(main, [*common, "--dry-run"])
        assert said.exit_code == 0 and "collect " in said.output and "stood in" in said.output, said.output
        assert {path.split("/")[-1] for path, _ in server.bodies} <= {"tokenize"} and not Path(out).exists()
        said = CliRunner().invoke(main, [*common, "--dry-run", "--pilot", "2"])
        assert said.exit_code == 2 and "audit collect" in said.output
        trajectories = str(tmp_path / "t.jsonl")
        collected = CliRunner().invoke(
            main, ["collect", policy, "--env", "generated:6:0", "--n", "2", "--budget", "4", "--out", trajectories]
        )
        assert collected.exit_code == 0, collected.output
        said = CliRunner().invoke(main, [*common, "--trajectories", trajectories, "--dry-run", "--pilot", "2"])
        assert said.exit_code == 0 and "a pilot of 2 of 8 points" in said.output, said.output
        done = CliRunner().invoke(main, [*common, "--trajectories", trajectories])
        assert done.exit_code == 0 and "all " in done.output, done.output
    assert CliRunner().invoke(main, ["replay", "hasty", *common[2:], "--dry-run"]).exit_code == 2
    manifest = json.loads((Path(out) / "manifest.json").read_text())
    assert manifest["server"]["can"] and "127.0.0.1" not in json.dumps(manifest)
