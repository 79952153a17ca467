"""The language-model policy over the whole protocol: prompts, windows, choice, sampling, files, replay, resume."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from audit.collect import collect
from audit.llm.journal import CapReached, PolicyUnavailable
from audit.llm.scoring import ScoresUnavailable
from audit.plan import Estimand, Plan, Rollouts, Support
from audit.policies import History
from audit.policies.openai import LLMPolicy
from audit.records import draws
from audit.replay import Replayer, chosen_steps, point_id
from envs import Environment, InputError, games
from tests.llm.conftest import Open, write
from tests.llm.loopback import FakeModel, Loopback

TRANSCRIPT = {"template": "transcript", "style": "text", "window_tokens": 1400, "first_tokens": 700}
CHOICE = {"mode": "choice", "end": "\n", "max_tokens": 24, "temperature": 8.0}


def run(awaited: Any) -> Any:
    return asyncio.run(awaited)


def later(start: History, world: Environment, steps: int) -> History:
    """The history after some admissible commands."""
    history = start
    for number in draws(steps, "walk"):
        command = history.turn.admissible[number % len(history.turn.admissible)]
        history = history.then(command, world.step(history.turn.state, command))
    return history


def fake_scores(policy: LLMPolicy, history: History) -> dict[str, float]:
    """What the fake model says of each command, computed here: sums of token log probabilities."""
    model = FakeModel()
    (prompt,) = run(policy._ids([history], None))
    scores = {}
    for command in history.turn.admissible:
        ids = [*prompt, *model.encode(command + "\n")]
        values = model.score(ids)[len(prompt) :]
        scores[command] = math.fsum(value for value in values if value is not None)
    return scores


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama-server"])
def test_choice_is_the_softmax_of_the_scores(dialect: str, opened: Open, start: History) -> None:
    with Loopback(FakeModel(), dialect=dialect) as server:
        policy = opened(server, kind=dialect, prompt=TRANSCRIPT, decode=CHOICE)
        (found,) = run(policy.distributions([start]))
        scores = fake_scores(policy, start)
        top = max(scores.values())
        norm = math.fsum(math.exp((s - top) / 8) for s in scores.values())
        assert found == pytest.approx({c: math.exp((s - top) / 8) / norm for c, s in scores.items()}, abs=1e-9)
        assert math.fsum(found.values()) == pytest.approx(1)
        assert policy.tested is not None and policy.tested.disagreement < 1e-9
        asked = server.requests
        seeds = draws(4000, "draws")
        proposals = run(policy.propose([start] * len(seeds), seeds=seeds))
        assert server.requests == asked, "a distribution that is known was asked for again"
    counts = Counter(proposal.command for proposal in proposals)
    commands = sorted(found)
    expected = np.array([found[c] for c in commands]) * len(seeds)
    assert chisquare([counts[c] for c in commands], expected).pvalue > 1e-3
    assert all(p.logprob == pytest.approx(math.log(found[p.command])) for p in proposals[:20])


def test_sum_and_mean_and_the_end_are_settings_that_matter(opened: Open, start: History) -> None:
    with Loopback(FakeModel()) as server:
        found = {}
        for length in ("sum", "mean"):
            for end_counts in (True, False):
                decode = {**CHOICE, "temperature": 1.0, "length": length, "end_counts": end_counts}
                policy = opened(server, prompt=TRANSCRIPT, decode=decode)
                (found[length, end_counts],) = run(policy.distributions([start]))
    best = [tuple(sorted(d, key=d.__getitem__)) for d in found.values()]
    assert len(set(best)) == 4


def test_logprobs_of_given_actions_with_and_without_the_outcome(opened: Open, start: History) -> None:
    action = start.turn.admissible[0]
    with Loopback(FakeModel()) as server:
        policy = opened(server, prompt=TRANSCRIPT, decode={"mode": "sample", "end": "\n"})
        (plain,) = run(policy.logprobs([start], [action]))
        assert plain == pytest.approx(fake_scores(policy, start)[action])
        (score,) = run(policy.scores([start], [action], condition="failure"))
        assert score.ids == tuple(FakeModel().encode(action + "\n")) and not score.merged
        with pytest.raises(InputError, match="condition"):
            run(policy.scores([start], [action], condition="maybe"))
        choice = opened(server, prompt=TRANSCRIPT, decode=CHOICE)
        (exact,) = run(choice.distributions([start]))
        assert run(choice.logprobs([start, start], [action, "eat"])) == [
            pytest.approx(math.log(exact[action])),
            -math.inf,
        ]


def test_a_chat_only_server_gives_no_numbers(opened: Open, start: History) -> None:
    with Loopback(FakeModel(), dialect="openai") as server:
        policy = opened(server, kind="openai")
        assert run(policy.logprobs([start], ["look"])) == [None]
        assert run(policy.distributions([start])) == [None]
        with pytest.raises(ScoresUnavailable, match="no token ids"):
            run(policy.scores([start], ["look"]))
        with pytest.raises(ScoresUnavailable):
            run(opened(server, kind="openai", decode=CHOICE).propose([start], seeds=[1]))


@pytest.mark.parametrize(
    ("fault", "named"), [("no_logprobs", "missing"), ("nan", "not numbers"), ("constant", "cannot be used")]
)
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama-server"])
def test_bad_scores_stop_the_run(fault: str, named: str, dialect: str, opened: Open, start: History) -> None:
    with Loopback(FakeModel(), dialect=dialect, faults=lambda *_: fault) as server:
        policy = opened(server, kind=dialect, prompt=TRANSCRIPT, decode=CHOICE)
        with pytest.raises(PolicyUnavailable, match=named):
            run(policy.propose([start], seeds=[1]))


def test_scores_that_disagree_with_the_samples_stop_the_run(opened: Open, start: History) -> None:
    class Wrong(FakeModel):
        def generate(self, ids: Any, *rest: Any) -> list[int]:
            return [70, 71, 72]

        def score(self, ids: Any) -> list[float | None]:
            shift = 1.0 if list(ids[-3:]) == [70, 71, 72] and not self.echoing else 0.0
            return [None if v is None else v - shift for v in super().score(ids)]

        echoing = False

    model = Wrong()

    def watch(number: int, path: str, body: Any) -> None:
        model.echoing = bool(body.get("echo"))

    with Loopback(model, faults=watch) as server:
        policy = opened(server, prompt=TRANSCRIPT, decode=CHOICE, limits={"concurrency": 1, "timeout": 2.0})
        with pytest.raises(ScoresUnavailable, match=r"differ by 1\.00"):
            run(policy.propose([start], seeds=[1]))


def test_samples_are_commands_with_their_thoughts_on_record(opened: Open, start: History) -> None:
    seeds = draws(24, "samples")
    for style, repairs in (("plain", set()), ("think", {"thoughts"}), ("messy", {"action line", "marks", "case"})):
        with Loopback(FakeModel(style)) as server:
            policy = opened(server, decode={"max_tokens": 200})
            proposals = run(policy.propose([start] * 24, seeds=seeds))
        assert {p.status for p in proposals} == {"ok"}
        assert {p.command for p in proposals} <= set(start.turn.admissible)
        assert len({p.command for p in proposals}) > 2
        assert {repair for proposal in proposals for repair in proposal.repairs} == repairs
        assert all((p.text is None) == (style == "plain") for p in proposals)
        (Path(policy.ledger.path or "")).unlink()  # the next style is another model under the same name
    with Loopback(FakeModel(), reasoning=True) as server:
        (proposal,) = run(opened(server).propose([start], seeds=[1]))
    assert "let me see" in str(proposal.text) and proposal.command in start.turn.admissible


def test_an_answer_without_a_command_is_that_rollout_s_error_only(opened: Open, start: History) -> None:
    with Loopback(FakeModel(says=["<think>still", "look"])) as server:
        proposals = run(opened(server).propose([start] * 16, seeds=list(range(16))))
    assert {p.status for p in proposals} == {"ok", "error"}
    assert all("inside a thought" in str(p.reason) for p in proposals if p.status == "error")


def test_the_window_keeps_the_newest_whole_turns(opened: Open, start: History, world: Environment) -> None:
    history = later(start, world, 12)
    with Loopback(FakeModel()) as server:
        full = opened(server, prompt={"template": "transcript", "style": "text", "window_tokens": 99_999})
        (everything,) = run(full.prompts([history]))
        text = FakeModel().decode(everything)
        assert text.startswith(start.turn.observation.split("\n")[-1][:10]) or "Your task is to" in text
        assert text.count("\n> ") == 13 and text.endswith("\n> ") and "..." not in text
        for window in (600, 800, 1200):
            decode = {"max_tokens": 24}
            policy = opened(server, prompt={**TRANSCRIPT, "window_tokens": window, "first_tokens": 200}, decode=decode)
            (ids,) = run(policy.prompts([history]))
            short = FakeModel().decode(ids)
            assert len(ids) <= window - 24
            first, mark, tail = short.partition("...\n")
            assert mark and text.startswith(first) and text.endswith(tail) and len(first) <= 200
            left_out = text[: len(text) - len(tail)]
            turn = left_out[left_out.rfind("\n> ", 0, -1) + 1 :]
            assert len(ids) + len(turn) > window - 24, "another turn would have fitted"
        few = opened(server, prompt={"template": "transcript", "style": "text", "window_turns": 3})
        (short,) = run(few.prompts([history]))
        assert short.count("\n> ") == 4 and "...\n" in short


def test_own_templates_are_files_and_sandboxed(tmp_path: Path, opened: Open, start: History) -> None:
    (tmp_path / "own.jinja").write_text(
        "{% block first %}{{ observation }}{% endblock %}{% block turn %}{{ command }}{% endblock %}"
        "{% block ask %}{% for c in admissible %}\n- {{ c }}{% endfor %}\n{% endblock %}"
    )
    with Loopback(FakeModel()) as server:
        policy = opened(server, prompt={"template": "own.jinja"})
        (proposal,) = run(policy.propose([start], seeds=[3]))
        assert proposal.command in start.turn.admissible
        assert run(policy.logprobs([start], ["look"], condition="success")) == [None]
        assert policy.describe()["template"]["name"] == "own.jinja"
        for source, named in (
            ("{% block first %}", "line"),
            ("hello", "no block 'first'"),
            (
                "{% block first %}{{ nothing }}{% endblock %}{% block turn %}{% endblock %}"
                "{% block ask %}{% endblock %}",
                "nothing",
            ),
            (
                "{% block first %}{{ ''.__class__.__mro__ }}{% endblock %}{% block turn %}{% endblock %}"
                "{% block ask %}{% endblock %}",
                "unsafe",
            ),
        ):
            (tmp_path / "own.jinja").write_text(source)
            with pytest.raises(InputError, match=named):
                run(opened(server, prompt={"template": "own.jinja"}).propose([start], seeds=[3]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decode": {"mode": "guess"}}, "one of sample, choice"),
        ({"decode": {"temprature": 1.0}}, "unknown key 'temprature'"),
        ({"server": {"api_key": "sk-x"}}, "key does not belong"),
        ({"server": {"model": ""}}, "base_url and model"),
        ({"server": {"kind": "ollama"}}, "one of openai, vllm"),
        ({"prompt": {"template": "no.jinja"}}, "no such template"),
        ({"prompt": {"window_tokens": 100}}, "style = 'text'"),
        ({"decode": {"max_tokens": 0}}, "above 0"),
        ({"limits": {"timeout": -1}}, "0 or more"),
        ({"decode": {"stop": [1]}}, "expected list"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    write(tmp_path / "p.toml", "http://127.0.0.1:9/v1")
    lines = []
    for line in (tmp_path / "p.toml").read_text().splitlines():
        section = line.strip("[]") if line.startswith("[") else None
        if section is None and any(line.startswith(f"{key} =") for values in change.values() for key in values):
            continue
        lines.append(line)
        if section in change:
            lines += [f"{key} = {json.dumps(value)}" for key, value in change[section].items()]
    (tmp_path / "p.toml").write_text("\n".join(lines))
    with pytest.raises(InputError, match=named):
        LLMPolicy.load(tmp_path / "p.toml")


def test_the_description_has_no_key_no_address_and_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_NAME", "sk-secret-value")
    path = write(tmp_path / "p.toml", "http://127.0.0.1:9/v1", server={"key_env": "SECRET_NAME"})
    policy = LLMPolicy.load(path)
    said = json.dumps(policy.describe())
    assert not any(word in said for word in ("sk-secret", "SECRET_NAME", "127.0.0.1", str(tmp_path)))
    other = LLMPolicy.load(write(tmp_path / "q.toml", "http://127.0.0.1:9/v1", decode={"temperature": 0.5}))
    assert other.describe() != policy.describe()


PLAN = Plan(
    estimand=Estimand(budget=6),
    support=Support(draws=6),
    rollouts=Rollouts(rounds=[2], adaptive=False),
)


def replay(policy: LLMPolicy, world: Environment) -> list[dict[str, Any]]:
    (trajectory,) = collect(policy, games("generated:6:0")[:1], 1, budget=6, seed=1)
    points = [(step, point_id(trajectory.id, step, "llm"), []) for step in chosen_steps(trajectory, PLAN)]
    return run(Replayer(world, policy, PLAN).replay(trajectory, points))


@pytest.mark.parametrize("decode", [{"mode": "sample"}, CHOICE])
def test_replay_resumes_without_paying_twice(
    decode: dict[str, Any], tmp_path: Path, opened: Open, world: Environment
) -> None:
    prompt = TRANSCRIPT if decode["mode"] == "choice" else {}
    with Loopback(FakeModel()) as server:
        expected = replay(opened(server, prompt=prompt, decode=decode), world)
        spent = opened(server, prompt=prompt, decode=decode).spent()
        assert {record["state"] for record in expected if record["round"] == 0} == {"defined"}
        assert sum(usage.calls for usage in spent.values()) > 10
    (tmp_path / "journal.sqlite").unlink()

    def away(number: int, path: str, body: Any) -> str | None:
        return "500" if sum(server.answered.values()) >= 40 else None

    with Loopback(FakeModel(), faults=away) as server:
        policy = opened(server, prompt=prompt, decode=decode, limits={"concurrency": 2, "timeout": 2.0, "retries": 0})
        with pytest.raises(PolicyUnavailable, match="HTTP 500"):
            replay(policy, world)
        answered, port = server.answered, server.port
        assert answered
    back = Loopback(FakeModel())
    back.port = port
    with back:
        assert replay(opened(back, prompt=prompt, decode=decode), world) == expected
    paid_twice = set(back.answered) & set(answered)
    if decode["mode"] == "choice":  # the self-test of scores is asked of every session's server
        paid_twice = {q for q in paid_twice if json.loads(q)[3] != 1 or json.loads(q)[2] is not None}
    assert not paid_twice


def test_a_cap_stops_a_replay_and_a_higher_one_goes_on(opened: Open, world: Environment) -> None:
    with Loopback(FakeModel()) as server:
        with pytest.raises(CapReached):
            replay(opened(server, caps={"calls": 20}), world)
        assert server.requests <= 20
        replay(opened(server, caps={"calls": 2000}), world)
        assert max(server.answered.values()) == 1


def test_what_the_server_can_do_is_stored(opened: Open) -> None:
    with Loopback(FakeModel()) as server:
        policy = opened(server)
        found = run(policy.examine())
        assert found is not None and found["kind"] == "vllm" and "scores of given text" in found["can"]
        asked = server.requests
        assert run(opened(server).examine()) == found and server.requests == asked, "it was asked twice"
        assert opened(server).ledger.fact("capabilities")["self_test"]["noise"] == 0


def test_a_choice_without_scores_is_refused_before_anything_is_asked(opened: Open) -> None:
    with Loopback(FakeModel(), token_ids=False, dialect="openai") as server:
        policy = opened(server, kind="openai", decode=CHOICE)
        with pytest.raises(ScoresUnavailable, match=r"decode\.mode = 'sample'"):
            run(policy.examine())
        assert policy.ledger.total().calls == 0
