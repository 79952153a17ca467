"""Token counts and noise of a language model's own log probabilities, on a fake server whose scores are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audit.collect import policy_id
from audit.llm.scoring import SelfTest
from audit.policies.openai import LLMPolicy
from audit.results import Run
from audit.scoring import Source, score, signal_points
from credit_signals import Missing, load_signals
from tests.llm.conftest import write
from tests.llm.loopback import FakeModel, Loopback

from .test_contract import trajectory

TRANSCRIPT = {"template": "transcript", "style": "text", "window_turns": 3}
WRITES = {"mode": "sample", "end": "\n", "max_tokens": 24}
CHOOSES = {"mode": "choice", "end": "\n", "max_tokens": 24, "temperature": 8.0}
NAMES = ("implicit.m_no", "implicit.m_hind", "implicit.sum_no", "implicit.sum_delta", "implicit.delta",
         "implicit.contrast", "implicit.tokens")  # fmt: skip


class Conditioned(FakeModel):
    """Log probabilities change with the outcome that the prompt names."""

    def score(self, ids: Sequence[int]) -> list[float | None]:
        text = self.decode(ids)
        found: list[float | None] = [None]
        for place, value in enumerate(super().score(ids)[1:], 1):
            shift = ("success" in text[:place]) * 0.02 * (ids[place] % 7) + ("failure" in text[:place]) * 0.3
            found.append(None if value is None else value - shift)
        return found


@pytest.fixture(scope="module")
def server() -> Iterator[Loopback]:
    with Loopback(Conditioned()) as started:
        yield started


def opened(server: Loopback, folder: Path, decode: dict[str, Any], kind: str = "vllm", **prompt: Any) -> LLMPolicy:
    path = write(folder / "policy.toml", server.url, kind=kind, prompt={**TRANSCRIPT, **prompt}, decode=decode)
    return LLMPolicy.load(path, journal=folder / "journal.sqlite")


def of(run: Run, policy: LLMPolicy, trajectories: int = 1) -> Source:
    """The first trajectories of the run as if the policy had played them."""
    source = Source.of_run(run.directory)
    return replace(source, trajectories=source.trajectories[:trajectories], policy_id=policy_id(policy))


def test_what_a_model_writes_has_the_tokens_of_the_command_and_its_end(
    small_run: Run, server: Loopback, tmp_path: Path
) -> None:
    policy = opened(server, tmp_path, WRITES)
    source = of(small_run, policy)
    points = signal_points(source, {"policy", "twin"}, policy=policy)
    assert [p.tokens for p in points] == [len(p.action) + 1 for p in points]  # a character a token, and the line feed
    assert {p.merged for p in points} == {False} and all(p.noise is not None and p.noise < 1e-6 for p in points)
    found = score(source, NAMES, policy=policy, save=False)
    frame = found.frame
    tokens = frame["implicit.tokens"]
    np.testing.assert_allclose(frame["implicit.m_no"] * tokens, frame["implicit.sum_no"])
    np.testing.assert_allclose(frame["implicit.delta"] * tokens, frame["implicit.sum_delta"])
    np.testing.assert_allclose(frame["implicit.sum_no"], [p.logprob for p in points])
    assert not frame["implicit.m_no:flag"].any()
    about = found.about["implicit.delta"]
    assert about["scores"]["of"] == "the command and its end" and about["scores"]["self_test"]["noise"] < 1e-9
    assert "outcome" in about["twin"]


def test_a_model_that_chooses_among_commands_has_one_token(small_run: Run, server: Loopback, tmp_path: Path) -> None:
    policy = opened(server, tmp_path, CHOOSES)
    source = of(small_run, policy)
    points = signal_points(source, {"policy", "twin", "belief"}, policy=policy)
    assert {p.tokens for p in points} == {1} and {p.merged for p in points} == {None}
    for point in points:
        assert point.probabilities is not None and point.logprob == pytest.approx(
            math.log(point.probabilities[point.action])
        )
        # Its own twin under the condition, not one that is fitted on fresh play.
        assert point.logprob_success is not None and point.logprob_success != point.logprob
    assert points[0].missing("belief") == Missing("no belief is fitted to a policy that is its own twin")
    found = score(source, NAMES, policy=policy, save=False)
    np.testing.assert_array_equal(found.frame["implicit.delta"], found.frame["implicit.sum_delta"])
    assert "distribution" in found.about["implicit.delta"]["scores"]["of"]


def test_where_nothing_can_be_scored_it_is_missing(small_run: Run, server: Loopback, tmp_path: Path) -> None:
    chat = {"template": "admissible", "style": "chat", "window_turns": 0}
    with Loopback(FakeModel(), dialect="openai") as plain:
        policy = opened(plain, tmp_path, {"mode": "sample"}, kind="openai", **chat)
        found = score(
            of(small_run, policy), ["implicit.m_no", "implicit.delta", "baseline.step"], policy=policy, save=False
        )
    assert found.frame["implicit.m_no:why"].eq("the policy cannot score actions").all()
    assert found.frame["implicit.delta"].isna().all()


def test_ratios_within_the_noise_and_merged_tokens_are_flagged() -> None:
    base = trajectory("t", 1)[0]
    exact = replace(base, logprob=-4.0, tokens=4, logprob_success=-3.0, logprob_failure=-6.0)
    flags: dict[str, list[bool | None]] = {}
    variants = (
        exact,
        replace(exact, merged=False, noise=0.5),
        replace(exact, merged=False, noise=1.5),
        replace(exact, merged=True, noise=0.0),
    )
    for name in ("implicit.delta_success", "implicit.contrast", "implicit.m_no", "implicit.sum_delta"):
        (signal,) = load_signals([name])
        flags[name] = list(signal.flags(variants))  # type: ignore[attr-defined]
    assert flags["implicit.delta_success"] == [None, False, True, True]  # 1 nat in all
    assert flags["implicit.sum_delta"] == [None, False, True, True]
    assert flags["implicit.contrast"] == [None, False, False, True]  # 3 nats in all
    assert flags["implicit.m_no"] == [None, False, False, True]  # no ratio


def test_noise_is_that_of_the_action_in_all(small_run: Run, server: Loopback, tmp_path: Path) -> None:
    for decode, size in ((WRITES, 1.0), (CHOOSES, 2 / 8.0)):
        (tmp_path / str(decode["mode"])).mkdir()
        policy = opened(server, tmp_path / str(decode["mode"]), decode)
        policy.tested = SelfTest(0.02, 0.05, None)
        points = signal_points(of(small_run, policy), {"policy"}, policy=policy, env="generated:12:0")
        assert [p.noise for p in points] == pytest.approx([0.05 * (len(p.action) + 1) * size for p in points])
