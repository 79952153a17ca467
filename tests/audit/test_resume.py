"""Kill -9 at random moments and resume: the results are byte-identical, with one process and with two."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from audit.plan import PlanFile, load_plan
from audit.store import RunDirectory, dumps
from audit.study import replay_study
from audit.train import train
from envs import InputError

ROOT = Path(__file__).resolve().parents[2]
PLAN = """
name = "resume"
[support]
draws = 8
[rollouts]
rounds = [4, 8, 12]
[points]
per_trajectory = 6
[collection]
trajectories = 10
"""
ARGUMENTS = ["replay", "hasty", "--env", "generated:6:0"]
RESULTS = ("effects", "rollouts", "alternatives", "points", "trajectories")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "resume.toml"
    file.write_text(PLAN)
    load_plan(str(file))
    return file


def command(plan: Path, out: Path, jobs: int) -> list[str]:
    return [sys.executable, "-m", "audit.cli", *ARGUMENTS, "--plan", str(plan), "--out", str(out), "--jobs", str(jobs)]


def run(plan: Path, out: Path, jobs: int = 1) -> None:
    answer = subprocess.run(command(plan, out, jobs), cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def digests(out: Path) -> dict[str, str]:
    files = [*(f"{name}.parquet" for name in RESULTS), "summary.json", "manifest.json"]
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in files}


@pytest.fixture(scope="module")
def uninterrupted(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("whole") / "run"
    run(plan, out)
    return digests(out)


@pytest.mark.slow
def test_two_processes_give_the_same_bytes(plan: Path, uninterrupted: dict[str, str], tmp_path: Path) -> None:
    run(plan, tmp_path / "run", jobs=2)
    assert digests(tmp_path / "run") == uninterrupted


@pytest.mark.slow
def test_kill_and_resume_gives_the_same_bytes(plan: Path, uninterrupted: dict[str, str], tmp_path: Path) -> None:
    """Killed at random moments, as often as AUDIT_KILLS says, with 1 or 2 processes; nothing is lost or changed."""
    rng = random.Random(0)
    wanted = int(os.environ.get("AUDIT_KILLS", "20"))
    kills = runs = 0
    while kills < wanted:
        out = tmp_path / f"run{runs}"
        started = time.monotonic()
        for _ in range(rng.randint(3, 6)):
            process = subprocess.Popen(
                command(plan, out, rng.randint(1, 2)),
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                process.wait(timeout=rng.uniform(1.0, 4.0))
                break  # it was faster
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
        run(plan, out, jobs=rng.randint(1, 2))
        assert digests(out) == uninterrupted
        runs += 1
        assert time.monotonic() - started < 600
    assert kills >= wanted


# The store -----------------------------------------------------------------------------------------------------------


def record(point: str, number: int) -> dict[str, object]:
    return {"point": point, "round": number, "text": "é" * 5}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_is_stopped_says_what_was_not_reached_and_goes_on(
    jobs: int, plan: Path, uninterrupted: dict[str, str], tmp_path: Path
) -> None:
    loaded = load_plan(str(plan))
    out = tmp_path / "run"
    stopped = replay_study("hasty", "generated:6:0", loaded, out, jobs=jobs, stop_after=1e-9)
    reached = stopped.effects["support"] == "defined"
    owed = stopped.effects[stopped.effects["support"] == "error"]
    assert 0 < reached.sum() <= 8 and len(owed) > 8
    assert owed["reason"].str.startswith("not replayed").all() and owed["estimate"].isna().all()
    assert replay_study("hasty", "generated:6:0", loaded, out, stop_after=0).effects.equals(stopped.effects)
    run(plan, out, jobs)
    assert digests(out) == uninterrupted


def test_a_torn_last_line_is_owed_again(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {"a": 1}, [])
    with run.appender() as shard:
        shard.append([record("p", 0), record("p", 1)])
    file = next((tmp_path / "run" / "shards").iterdir())
    for cut in range(1, len(dumps(record("p", 1))) + 1):
        file.write_bytes((dumps(record("p", 0)) + "\n" + dumps(record("p", 1)) + "\n").encode()[:-cut])
        assert run.index().records("p") == [record("p", 0)]
    file.write_bytes(b'{"point": "p"}\n' + (dumps(record("p", 1)) + "\n").encode())
    with pytest.raises(InputError, match="line 1 is damaged"):
        run.index()


def test_every_session_has_its_own_shard_and_equal_lines_count_once(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {"a": 1}, [])
    with run.appender() as one, run.appender() as two:
        one.append([record("p", 0)])
        two.append([record("p", 0), record("p", 1)])
    assert len(list((tmp_path / "run" / "shards").iterdir())) == 2
    assert run.index().records("p") == [record("p", 0), record("p", 1)]


def test_a_directory_that_holds_another_run_is_refused(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", {"plan": 1, "policy": "a"}, [])
    with pytest.raises(InputError, match="plan, policy differ"):
        RunDirectory.create(tmp_path / "run", {"plan": 2, "policy": "b"}, [])
    RunDirectory.create(tmp_path / "run", {"plan": 1, "policy": "a"}, [])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(InputError, match="is not empty"):
        RunDirectory.create(tmp_path / "other", {}, [])
    with pytest.raises(InputError, match="holds no run"):
        RunDirectory.open(tmp_path / "other")


def test_a_run_holds_no_absolute_path_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-secret-0123456789")
    from envs.alfworld.generate import write_games

    write_games(2, 0, tmp_path / "some games")
    plan = load_plan("quick").plan
    from dataclasses import replace

    from audit.plan import Collection, Points, Rollouts

    small = replace(
        plan,
        rollouts=Rollouts(rounds=[2], adaptive=False),
        collection=Collection(trajectories=2),
        points=Points(per_trajectory=2),
    )
    replay_study("hasty", str(tmp_path / "some games"), PlanFile(small, False, ()), tmp_path / "run")
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            for secret in (str(tmp_path), str(ROOT), str(Path.home()), "sk-test-secret"):
                assert secret.encode() not in content, f"{file.name} holds {secret}"


def test_a_policy_saved_anew_under_its_name_is_the_one_that_replays(plan: Path, tmp_path: Path) -> None:
    loaded, file = load_plan(str(plan)), tmp_path / "policy.json"
    runs = []
    for number, temperature in enumerate((0.05, 8.0)):  # hardly ever another action, and nearly any
        train("generated:6:0", episodes=2, temperature=temperature).save(file)
        runs.append(replay_study(str(file), "generated:6:0", loaded, tmp_path / str(number)))
    train("generated:6:0", episodes=2, temperature=8.0).save(tmp_path / "other.json")
    fresh = replay_study(str(tmp_path / "other.json"), "generated:6:0", loaded, tmp_path / "fresh")
    assert runs[1].points["draws"].sum() and not runs[0].points.equals(runs[1].points)
    assert runs[1].rollouts.equals(fresh.rollouts), "the policy that the file held before was replayed"
