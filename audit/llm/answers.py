"""What servers answer: choices, log probabilities and usage, in the words of each kind of server.

Knows: the shapes of answers and what in them cannot be believed. Hides: those shapes; what comes out is a `Sample`, a
`Usage`, or a `BadAnswer` that says what is wrong.
"""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from audit.llm.journal import Usage


class BadAnswer(Exception):
    """The server answered with something that is no answer (asked again, then named)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled answer.

    thoughts: what a reasoning model thought, where the server keeps it apart. ids, logprobs: of the tokens, None
    where the server did not say. error: why there is no answer to this one question (its prompt is too long, say).
    """

    text: str
    thoughts: str | None = None
    ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    finish: str | None = None
    error: str | None = None


def read_choices(data: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """The choices of an answer in order, reduced to what is kept; fewer than n where the server gave fewer."""
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices:
        raise BadAnswer("an answer without choices")
    by_index = {choice.get("index", place): choice for place, choice in enumerate(choices)}
    kept: list[dict[str, Any]] = []
    for index in range(n):
        if index not in by_index:
            break
        choice = by_index[index]
        message = choice.get("message")
        text = choice.get("text") if message is None else message.get("content") or message.get("refusal") or ""
        if not isinstance(text, str):
            raise BadAnswer("a choice without text")
        thoughts = None if message is None else message.get("reasoning_content") or message.get("reasoning")
        logprobs, ids = read_logprobs(choice)
        kept.append(
            {
                "text": text,
                "thoughts": thoughts,
                "ids": ids,
                "logprobs": logprobs,
                "finish": choice.get("finish_reason"),
            }
        )
    return kept


def read_logprobs(choice: Mapping[str, Any]) -> tuple[list[float] | None, list[int] | None]:
    """(log probabilities, ids) of a choice's sampled tokens, None where they are missing or not numbers."""
    found = choice.get("logprobs") or {}
    ids = choice.get("token_ids")
    if "content" in found:
        values = [entry.get("logprob") for entry in found["content"] or []]
    else:
        values = list(found.get("token_logprobs") or [])
    good = values and all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
    ids = ids if isinstance(ids, list) and all(isinstance(i, int) for i in ids) else None
    return ([float(v) for v in values] if good else None), ids


def as_sample(answer: Mapping[str, Any]) -> Sample:
    """A choice as it was kept by `read_choices`."""
    ids, logprobs = answer["ids"], answer["logprobs"]
    return Sample(
        answer["text"],
        answer["thoughts"],
        None if ids is None else tuple(ids),
        None if logprobs is None else tuple(logprobs),
        answer["finish"],
    )


def read_usage(data: Mapping[str, Any], expected: Usage) -> Usage:
    """What a call took, in the words of OpenAI, SGLang (`meta_info`) or llama-server; estimated if none is said."""
    parts = [item.get("meta_info") for item in data.get("items", [data]) if isinstance(item, dict)]
    said = data.get("usage")
    if isinstance(said, dict):
        details = said.get("prompt_tokens_details") or {}
        counts = [(said.get("prompt_tokens"), details.get("cached_tokens"), said.get("completion_tokens"))]
    elif parts and all(isinstance(part, dict) for part in parts):
        counts = [(p.get("prompt_tokens"), p.get("cached_tokens"), p.get("completion_tokens")) for p in parts if p]
    else:
        counts = [(data.get("tokens_evaluated"), data.get("tokens_cached"), data.get("tokens_predicted"))]
    if not all(isinstance(prompt, int) for prompt, _, _ in counts):
        return replace(expected, calls=1, untold=1)
    prompt, cached, completion = (sum(int(count[k] or 0) for count in counts) for k in range(3))
    return Usage(1, prompt, min(cached, prompt), completion)


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for (a number or a date), None if there is none to read."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
