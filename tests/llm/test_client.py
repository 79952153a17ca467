"""The client against a server that misbehaves: every fault is survived or named, and no answer is paid twice."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from audit.llm.answers import Sample
from audit.llm.client import Client, Limits, Sampling
from audit.llm.journal import CapReached, Caps, Journal, PolicyUnavailable, Prices, Usage, spending
from envs import InputError
from tests.llm.loopback import FakeModel, Faults, Loopback

QUICK = Limits(concurrency=4, most=4, timeout=1.5, retries=3, longest_wait=0.5)
PROMPTS = [f"Commands:\n- go to desk {i}\n- look\n- inventory\n> " for i in range(6)]


def client(server: Loopback, path: Path | None = None, **options: Any) -> Client:
    options.setdefault("limits", QUICK)
    return Client(server.url, "fake", journal=Journal(path), **options)


def ask(asked: Client, draws: range = range(3), settings: Sampling | None = None) -> list[Sample]:
    pairs = [(prompt, draw) for prompt in PROMPTS for draw in draws]
    return asyncio.run(
        asked.sample([p for p, _ in pairs], [d for _, d in pairs], settings or Sampling(), purpose="roll")
    )


def once(fault: str, at: int = 2) -> Faults:
    """The fault at one request only."""
    return lambda number, path, body: fault if number == at else None


def test_answers_come_in_order_and_equal_draws_are_equal() -> None:
    with Loopback(FakeModel()) as server:
        first = ask(client(server))
        again = ask(client(server))
    assert first == again  # the same seeds on another journal
    assert all(
        sample.text in prompt for prompt, sample in zip((p for p in PROMPTS for _ in range(3)), first, strict=True)
    )
    assert len({sample.text for sample in first}) > 3


def test_draws_of_a_prompt_share_a_call() -> None:
    with Loopback(FakeModel()) as server:
        ask(client(server), range(8))
        assert server.requests == len(PROMPTS) * 2  # n = 4 twice
        assert all(body["n"] == 4 for _, body in server.bodies)


def test_prompts_share_a_call_without_a_seed_that_would_tie_their_draws() -> None:
    with Loopback(FakeModel()) as server:
        asked = client(server, limits=Limits(batch=4, timeout=2))
        first = ask(asked, range(1))
        assert [len(body["prompt"]) for _, body in server.bodies] == [4, 2]
        assert not any("seed" in body for _, body in server.bodies)
        assert ask(asked, range(1)) == first
        assert server.requests == 2


@pytest.mark.parametrize(
    "fault", ["429", "500", "hang", "cut", "junk", "html", "empty", "drip", "error_body", "few", "many", "no_usage"]
)
def test_a_passing_fault_is_survived(fault: str, tmp_path: Path) -> None:
    with Loopback(FakeModel()) as server:
        expected = ask(client(server), range(1))
    with Loopback(FakeModel(), faults=once(fault)) as server:
        asked = client(server, tmp_path / "j.sqlite")
        found = ask(asked, range(4) if fault in ("few", "many") else range(1))
        assert all(sample.error is None and sample.text for sample in found)
        if fault not in ("few", "many"):
            assert found == expected
        before = server.requests
        assert ask(client(server, tmp_path / "j.sqlite"), range(4) if fault in ("few", "many") else range(1)) == found
        assert server.requests == before, "a resumed run asked for something it had"
        untold = asked.journal.total().untold
        assert untold == (fault == "no_usage")
        if fault in ("429", "500", "junk", "html", "empty", "drip"):
            assert max(server.answered.values()) == 1


def test_retry_after_is_kept_to() -> None:
    with Loopback(FakeModel(), faults=once("429", 0)) as server:
        started = time.monotonic()
        ask(client(server, limits=Limits(concurrency=1, timeout=2, retries=2, longest_wait=0.4)), range(1))
        assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("500", "HTTP 500"),
        ("401", "key is refused"),
        ("hang", "no whole answer within"),
        ("drip", "no whole answer within"),
        ("cut", "cut the line"),
        ("junk", "not JSON"),
        ("empty", "without choices"),
        ("wrong_model", "answered as model 'other'"),
        ("error_body", "out of memory"),
    ],
)
def test_a_lasting_fault_is_named_and_stops(fault: str, named: str) -> None:
    limits = Limits(concurrency=4, most=1, timeout=0.4, retries=1, longest_wait=0.1)
    with Loopback(FakeModel(), faults=lambda number, path, body: fault) as server:
        with pytest.raises(PolicyUnavailable, match=named):
            ask(client(server, limits=limits), range(1))
        assert server.requests <= 8, "it went on asking"


def test_nothing_is_lost_or_paid_twice_when_the_server_goes_away(tmp_path: Path) -> None:
    limits = Limits(concurrency=2, most=1, timeout=1, retries=1, longest_wait=0.1)
    with Loopback(FakeModel(), faults=once("close", 4)) as server:
        with pytest.raises(PolicyUnavailable, match="cannot be reached"):
            ask(client(server, tmp_path / "j.sqlite", limits=limits), range(2))
        answered, port = server.answered.copy(), server.port
    kept = Journal(tmp_path / "j.sqlite").total().calls
    assert kept == sum(answered.values()) >= 4
    second = Loopback(FakeModel())
    second.port = port  # the server is back where it was
    with second:
        found = ask(client(second, tmp_path / "j.sqlite", limits=limits), range(2))
        assert all(sample.text for sample in found)
        assert set(second.answered) & set(answered) == set()
        assert sum(second.answered.values()) + kept == 12


def test_one_refused_question_does_not_touch_the_others() -> None:
    def too_long(number: int, path: str, body: Mapping[str, Any]) -> str | None:
        return "400" if PROMPTS[2] in body["prompt"] else None

    with Loopback(FakeModel(), faults=too_long) as server:
        for limits in (QUICK, Limits(batch=6, timeout=2)):
            found = ask(client(server, limits=limits), range(1))
            assert [sample.error is None for sample in found] == [True, True, False, True, True, True]
            assert "HTTP 400" in str(found[2].error)


def test_a_server_without_n_is_asked_one_by_one() -> None:
    def no_n(number: int, path: str, body: Mapping[str, Any]) -> str | None:
        return "400" if body.get("n", 1) > 1 else None

    with Loopback(FakeModel(), faults=no_n) as server:
        found = ask(client(server), range(4))
    assert all(sample.text for sample in found)


def test_caps_stop_within_a_batch_and_the_run_resumes(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    limits = Limits(concurrency=2, most=1, timeout=2)
    with Loopback(FakeModel()) as server:
        with pytest.raises(CapReached, match="cap 5"):
            ask(client(server, path, limits=limits, caps=Caps(calls=5)), range(2))
        assert server.requests == 5
        with pytest.raises(CapReached):
            ask(client(server, path, limits=limits, caps=Caps(calls=5)), range(2))
        assert server.requests == 5
        ask(client(server, path, limits=limits, caps=Caps(calls=12)), range(2))
        assert server.requests == 12
        assert max(server.answered.values()) == 1
        with pytest.raises(CapReached, match="cost"):
            ask(client(server, path, caps=Caps(cost=1e-9), prices=Prices(1, 1, 1)), range(2, 4))
        with pytest.raises(CapReached, match="tokens"):
            ask(client(server, path, caps=Caps(tokens=10)), range(2, 4))
        assert server.requests == 12


def test_the_ledger_holds_what_the_server_counted(tmp_path: Path) -> None:
    with Loopback(FakeModel()) as server:
        asked = client(server, tmp_path / "j.sqlite")
        with spending("collect"), spending("roll"):
            from audit.llm.journal import current_purpose

            assert current_purpose("propose") == "collect"
        ask(asked)
        total = asked.journal.total()
        assert (total.prompt, total.completion) == (server.usage["prompt_tokens"], server.usage["completion_tokens"])
        assert set(asked.journal.spent()) == {"roll"}
        label, line = asked.journal.lines(Prices(completion=1e6))[-1]
        assert label == "all" and line.startswith("total") and f"cost {total.completion:.4g}" in line


def test_every_setting_and_the_draw_are_part_of_the_question() -> None:
    with Loopback(FakeModel()) as server:
        asked = client(server)
        base = Sampling()
        keys = {
            asked.key("/completions", {"prompt": "x", **s.body()}, d)
            for d in (0, 1)
            for s in (
                base,
                Sampling(temperature=0.5),
                Sampling(top_p=0.9),
                Sampling(max_tokens=3),
                Sampling(stop=("\n",)),
                Sampling(extra={"k": 1}),
            )
        }
        other = Client(server.url, "other")
        assert len(keys) == 12
        assert other.key("/completions", {"prompt": "x"}, 0) != asked.key("/completions", {"prompt": "x"}, 0)


def test_the_key_is_sent_and_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-loopback-0123456789abcdef"
    monkeypatch.setenv("LOOPBACK_KEY", secret)
    with Loopback(FakeModel(), key=secret) as server:
        asked = client(server, tmp_path / "j.sqlite", key_env="LOOPBACK_KEY")
        ask(asked)
        monkeypatch.setenv("LOOPBACK_KEY", "sk-wrong-0123456789abcdef")
        with pytest.raises(PolicyUnavailable) as caught:
            ask(client(server, key_env="LOOPBACK_KEY"))
    assert "sk-" not in str(caught.value)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(secret.encode() in path.read_bytes() for path in files)
    with pytest.raises(InputError, match="NO_SUCH_KEY"):
        Client(server.url, "fake", key_env="NO_SUCH_KEY")
    with pytest.raises(InputError, match="without user name"):
        Client("http://user:word@host/v1", "fake")


def test_a_journal_survives_a_kill_and_serves_several_processes(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path)
    pid = os.fork()
    if pid == 0:  # the child writes one answer, begins another and dies in the middle
        child = Journal(path)
        child.record("roll", Usage(1, 10, 0, 5), {"a": {"text": "one"}})
        db = child._open()
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO answers VALUES ('b', '{}')")
        os._exit(9)
    os.waitpid(pid, 0)
    assert journal.answers(["a", "b"]) == {"a": {"text": "one"}}
    assert journal.total() == Usage(1, 10, 0, 5)
    journal.record("judge", Usage(1, 1, 0, 1), {"a": {"text": "two"}})
    assert journal.answers(["a"]) == {"a": {"text": "one"}}, "a paid answer was overwritten"
    (tmp_path / "text").write_text("no database, but long enough to be looked at as one" * 20)
    with pytest.raises(InputError, match="journal"):
        Journal(tmp_path / "text").total()
