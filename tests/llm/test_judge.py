"""Judges: what is a rating and what is not, repeats, both orders."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from audit.llm.answers import Sample
from audit.llm.client import Client, Limits
from audit.llm.journal import Journal
from audit.llm.judge import A_OR_B, FIVE_POINTS, THREE_POINTS, Judge, Scale, read_rating
from audit.llm.scoring import ServerBackend
from envs import InputError
from tests.llm.loopback import FakeModel, Loopback


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"rating": "+1"}', 1.0),
        ('{"rating": 1}', 1.0),
        ('{"rating": -1, "why": "it {lost} the 0"}', -1.0),
        ('```json\n{"rating": "0"}\n```', 0.0),
        ("0", 0.0),
        ("+1", 1.0),
        ("**-1**", -1.0),
        ("I think it helped a bit, 3 of 4 ways.\nRating: +1", 1.0),
        ("Final answer: 0.", 0.0),
        ("<think>-1? no</think>+1", 1.0),
    ],
)
def test_ratings_are_read(text: str, value: float) -> None:
    rating = read_rating(Sample(text), THREE_POINTS)
    assert (rating.state, rating.value) == ("parsed", value)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("", "unparsable"),
        ("The step took 1 minute.", "unparsable"),
        ("Rating: 7", "unparsable"),
        ("Rating: 0.5", "unparsable"),
        ("Rating: +1\nRating: -1", "unparsable"),
        ('{"rating": true}', "unparsable"),
        ('{"rating": null}', "unparsable"),
        ('{"rating": "+1"} or {"rating": "0"}', "unparsable"),
        ("It is +1 or maybe 0", "unparsable"),
        ("I'm sorry, I can't judge this.", "refused"),
        ("As an AI, I have no view.", "refused"),
        ("<think>+1", "unparsable"),
    ],
)
def test_what_is_no_rating_is_missing_with_its_state(text: str, state: str) -> None:
    rating = read_rating(Sample(text), THREE_POINTS)
    assert (rating.state, rating.value) == (state, None) and rating.reason


def test_a_cut_answer_says_so() -> None:
    assert "max_tokens" in str(read_rating(Sample("Because", finish="length"), FIVE_POINTS).reason)
    assert read_rating(Sample("", error="HTTP 400"), FIVE_POINTS).state == "error"


def judge(server: Loopback, scale: Scale, **options: Any) -> Judge:
    limits = Limits(concurrency=4, most=4, timeout=2, retries=2, longest_wait=0.3)
    return Judge(ServerBackend(Client(server.url, "fake", limits=limits, journal=Journal()), "vllm"), scale, **options)


def test_repeats_are_averaged_over_what_was_parsed() -> None:
    with Loopback(FakeModel(says=["+1", "0", "no idea"])) as server:
        asked = judge(server, THREE_POINTS, temperature=1.0)
        verdicts = asyncio.run(asked.rate(["Did step 3 help?", "Did step 4 help?"], repeats=12))
        assert asked.backend.client.journal.spent().keys() == {"judge"}  # type: ignore[attr-defined]
    for verdict in verdicts:
        assert len(verdict.ratings) == 12 and verdict.states["unparsable"] > 0
        values = [rating.value for rating in verdict.ratings if rating.value is not None]
        assert verdict.value == sum(values) / len(values)
    assert verdicts[0] != verdicts[1]
    with Loopback(FakeModel(says=["no idea"])) as server:
        assert asyncio.run(judge(server, THREE_POINTS).rate(["?"]))[0].value is None


def test_position_bias_shows_and_cancels() -> None:
    question = "Which is better?\nFirst: {first}\nSecond: {second}"
    with Loopback(FakeModel(says=["A"])) as server:  # whatever stands first
        (preference,) = asyncio.run(judge(server, A_OR_B).compare(question, [("{x}", "y {second}")], repeats=2))
        shown = [body["messages"][-1]["content"] for _, body in server.bodies]
    assert (preference.value, preference.bias) == (0.5, 0.5)
    assert any("First: {x}\nSecond: y {second}" in text for text in shown)
    assert any("First: y {second}\nSecond: {x}" in text for text in shown)
    with Loopback(FakeModel(says=["hm"])) as server:
        (preference,) = asyncio.run(judge(server, A_OR_B).compare(question, [("x", "y")]))
    assert preference.value is None and preference.bias is None
    with pytest.raises(InputError, match="A_OR_B"):
        asyncio.run(judge(server, THREE_POINTS).compare(question, []))


@pytest.mark.parametrize(
    ("structure", "field"), [("choice", "structured_outputs"), ("json_schema", "response_format"), ("none", None)]
)
def test_the_server_is_asked_to_force_the_answer_where_it_can(structure: Any, field: str | None) -> None:
    with Loopback(FakeModel(says=['{"rating": "4"}'])) as server:
        (verdict,) = asyncio.run(judge(server, FIVE_POINTS, structure=structure).rate(["?"]))
        ((_, body),) = server.bodies
    assert verdict.value == 4.0
    assert [key for key in ("structured_outputs", "response_format") if key in body] == ([field] if field else [])
