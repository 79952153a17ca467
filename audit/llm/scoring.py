"""Log probabilities of given actions: what a model would have said about each, token by token.

Knows: how each kind of server scores given token ids, what makes scores unusable (missing, not numbers, constant,
disagreeing with themselves), and how much they wobble. Hides: endpoints. Token ids go in and are checked on the
way back; a server that cannot score raises, it never returns a number.

Sources: the servers' own documentation and measurements in ../shared/llm-servers.md.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, Protocol

from audit.llm.answers import BadAnswer, Sample
from audit.llm.client import Call, Client, Prompt, Sampling
from audit.llm.journal import PolicyUnavailable, Purpose, Usage
from envs.core import InputError

Kind = Literal["openai", "vllm", "sglang", "llama-server"]
Ids = tuple[int, ...]
TOLERANCE = 0.1  # nats a token by which two ways to one score may differ
TOGETHER = 32  # scored sequences in one call
_session = count()


class ScoresUnavailable(PolicyUnavailable):
    """This server or model cannot score given actions, or its scores cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Score:
    """A teacher-forced action.

    ids: its tokens. logprobs: natural log probability of each given all before it. counted: how many of them
    count (the end token may not). merged: tokens would span the boundary of prompt and action (or of command and
    end) if both were tokenised together, so another tokenisation of the same text exists.
    """

    ids: Ids
    logprobs: tuple[float, ...]
    counted: int
    merged: bool

    @property
    def total(self) -> float:
        """Sum of the log probabilities that count."""
        return math.fsum(self.logprobs[: self.counted])

    @property
    def mean(self) -> float:
        """Mean of the log probabilities that count."""
        return self.total / self.counted


class Backend(Protocol):
    """A model that can be asked: on a server (`ServerBackend`) or in process (`audit.llm.hf.LocalModel`)."""

    async def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of each text by itself, without tokens added around it."""
        ...

    async def encode_chat(self, chats: Sequence[Prompt]) -> list[Ids]:
        """Token ids of each chat with the beginning of the answer, by the model's own template."""
        ...

    async def sample(
        self,
        prompts: Sequence[Prompt],
        draws: Sequence[int],
        settings: Sampling,
        *,
        purpose: Purpose,
    ) -> list[Sample]:
        """One answer for each prompt and draw."""
        ...

    async def score(
        self, prompts: Sequence[Ids], actions: Sequence[Sequence[Ids]], *, purpose: Purpose, repeat: str = ""
    ) -> list[list[tuple[float, ...]]]:
        """Log probabilities of the tokens of each action after each prompt. repeat: another name, a fresh answer."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the model is, without keys, addresses or paths."""
        ...


class ServerBackend:
    """One model on one server of a known kind. `openai` stands for any server that offers no more than chat."""

    def __init__(self, client: Client, kind: Kind) -> None:
        self.client, self.kind = client, kind
        self._ids: dict[tuple[str, Any], Ids] = {}

    def describe(self) -> dict[str, Any]:
        """Kind and model; the address is left out, so that a manifest does not depend on the host."""
        return {"server": self.kind, "model": self.client.model}

    async def sample(
        self,
        prompts: Sequence[Prompt],
        draws: Sequence[int],
        settings: Sampling,
        *,
        purpose: Purpose,
    ) -> list[Sample]:
        """See `Client.sample`."""
        return await self.client.sample(prompts, draws, settings, purpose=purpose)

    # Token ids

    async def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of texts. Raises ScoresUnavailable where the server has no /tokenize."""
        return await self._encode("text", texts)

    async def encode_chat(self, chats: Sequence[Prompt]) -> list[Ids]:
        """Token ids of chats. Raises ScoresUnavailable where the server does not tell."""
        return await self._encode("chat", chats)

    async def _encode(self, what: str, items: Sequence[Any]) -> list[Ids]:
        missing = list(dict.fromkeys(item for item in items if (what, item) not in self._ids))
        if missing:
            if self.kind == "openai":
                raise ScoresUnavailable(
                    f"{self.client.model}: this kind of server tells no token ids; set window_turns instead of "
                    f"window_tokens, decode.mode = 'sample', or use vllm, sglang, llama-server or a local model."
                )
            if len(self._ids) > 200_000:
                self._ids.clear()
            for first in range(0, len(missing), self.client.limits.concurrency):
                some = missing[first : first + self.client.limits.concurrency]
                found = await asyncio.gather(*(self._tokenize(what, item) for item in some))
                self._ids.update(((what, item), ids) for item, ids in zip(some, found, strict=True))
        return [self._ids[what, item] for item in items]

    async def _tokenize(self, what: str, item: Any) -> Ids:
        if what == "chat":
            messages = [{"role": role, "content": content} for role, content in item]
            if self.kind == "llama-server":
                data = await self._free("/apply-template", {"messages": messages})
                body = {"content": data["prompt"], "add_special": False, "parse_special": True}
            else:
                body = {"model": self.client.model, "messages": messages, "add_generation_prompt": True}
        elif self.kind == "llama-server":
            body = {"content": item, "add_special": False, "parse_special": True}
        else:
            body = {"model": self.client.model, "prompt": item, "add_special_tokens": False}
        ids = (await self._free("/tokenize", body)).get("tokens")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise ScoresUnavailable(f"{self.client.model}: /tokenize of the server gives no token ids.")
        return tuple(ids)

    async def _free(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """A call that runs no model, so it is not in the ledger."""
        problem = ""
        for attempt in range(self.client.limits.retries + 1):
            try:
                return await self.client.post(self.client.root + path, body)
            except BadAnswer as error:
                problem = str(error)
                await asyncio.sleep(min(0.1 * 2**attempt, self.client.limits.longest_wait))
        raise PolicyUnavailable(f"{self.client.model}: {path}: {problem}.")

    # Scores

    async def score(
        self, prompts: Sequence[Ids], actions: Sequence[Sequence[Ids]], *, purpose: Purpose, repeat: str = ""
    ) -> list[list[tuple[float, ...]]]:
        """Log probabilities of given tokens. Raises ScoresUnavailable where this kind of server cannot."""
        if self.kind == "openai":
            raise ScoresUnavailable(
                f"{self.client.model}: a server that offers chat only cannot score given actions; use vllm, sglang, "
                f"llama-server or a local model."
            )
        pairs = list(
            dict.fromkeys((p, tuple(a)) for p, some in zip(prompts, actions, strict=True) for a in some if len(a))
        )
        if any(not prompt for prompt, _ in pairs):
            raise ScoresUnavailable("An empty prompt gives its first token no log probability; begin with some text.")
        keys = {pair: self.client.key(f"score {self.kind}", {"ids": pair}, repeat) for pair in pairs}
        known = self.client.journal.answers(list(keys.values()))
        owed = [pair for pair in pairs if keys[pair] not in known]
        together = 1 if self.kind == "llama-server" else TOGETHER
        calls = [self._call(owed[k : k + together], keys) for k in range(0, len(owed), together)]
        answered, refused = await self.client.run(calls, purpose)
        if refused:
            raise ScoresUnavailable(f"{self.client.model}: {next(iter(refused.values()))}.")
        known.update(answered)
        return [
            [tuple(known[keys[p, tuple(a)]]["logprobs"]) if len(a) else () for a in some]
            for p, some in zip(prompts, actions, strict=True)
        ]

    def _call(self, pairs: Sequence[tuple[Ids, Ids]], keys: Mapping[tuple[Ids, Ids], str]) -> Call:
        whole = [[*prompt, *action] for prompt, action in pairs]
        tails = [len(action) for _, action in pairs]
        tokens = sum(map(len, whole))
        if self.kind == "vllm":
            path = "/completions"
            body: dict[str, Any] = {
                "model": self.client.model,
                "prompt": whole,
                "echo": True,
                "logprobs": 1,
                "max_tokens": 0,
                "temperature": 1.0,
                "return_token_ids": True,
            }

            def read(data: Mapping[str, Any]) -> list[dict[str, Any]]:
                return _read_echo(data, whole, tails)

        elif self.kind == "sglang":
            path = f"{self.client.root}/generate"
            body = {
                "input_ids": whole,
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": [len(ids) - tail - 1 for ids, tail in zip(whole, tails, strict=True)],
            }

            def read(data: Mapping[str, Any]) -> list[dict[str, Any]]:
                return _read_sglang(data, whole, tails)

        else:
            path = f"{self.client.root}/completion"
            (prompt, action), *_ = pairs
            tokens = len(prompt) + len(action)
            body = {
                "prompt": list(prompt),
                "n_predict": len(action),
                "n_probs": 1,
                "temperature": 1.0,
                "cache_prompt": True,
                "grammar": "root ::= " + " ".join(f"<[{i}]>" for i in action),
            }

            def read(data: Mapping[str, Any]) -> list[dict[str, Any]]:
                return _read_llama(data, action)

        return Call(path, body, tuple(keys[pair] for pair in pairs), read, Usage(1, tokens, 0, 0))


def _finite(values: Sequence[Any], n: int) -> list[float]:
    if len(values) != n or any(value is None for value in values):
        raise BadAnswer("log probabilities are missing from the answer")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) and value <= 1e-6 for value in values):
        raise BadAnswer("log probabilities that are not numbers below 0")
    return [min(0.0, float(value)) for value in values]


def _read_echo(data: Mapping[str, Any], whole: Sequence[Sequence[int]], tails: Sequence[int]) -> list[dict[str, Any]]:
    choices = sorted(data["choices"], key=lambda choice: choice["index"])
    if len(choices) != len(whole):
        raise BadAnswer(f"{len(choices)} answers to {len(whole)} prompts")
    found = []
    for choice, ids, tail in zip(choices, whole, tails, strict=True):
        values = (choice.get("logprobs") or {}).get("token_logprobs") or []
        said = choice.get("prompt_token_ids")
        if said is not None and list(said) != list(ids):
            raise BadAnswer("the server scored other token ids than it was sent")
        if values and len(values) != len(ids):
            raise BadAnswer(f"{len(values)} log probabilities for {len(ids)} token ids")
        found.append({"logprobs": _finite(values[-tail:], tail)})
    return found


def _read_sglang(data: Mapping[str, Any], whole: Sequence[Sequence[int]], tails: Sequence[int]) -> list[dict[str, Any]]:
    items = data.get("items", [data])
    if len(items) != len(whole):
        raise BadAnswer(f"{len(items)} answers to {len(whole)} prompts")
    found = []
    for item, ids, tail in zip(items, whole, tails, strict=True):
        entries = item["meta_info"].get("input_token_logprobs") or []
        if [entry[1] for entry in entries[-tail:]] != list(ids[-tail:]) and len(entries) >= tail:
            raise BadAnswer("the server scored other token ids than it was sent")
        found.append({"logprobs": _finite([entry[0] for entry in entries[-tail:]], tail)})
    return found


def _read_llama(data: Mapping[str, Any], action: Ids) -> list[dict[str, Any]]:
    entries = data.get("completion_probabilities") or []
    if entries and [entry.get("id") for entry in entries[: len(action)]] != list(action):
        raise BadAnswer("the grammar did not force the token ids that were to be scored")
    return [{"logprobs": _finite([entry.get("logprob") for entry in entries[: len(action)]], len(action))}]


# Trust ------------------------------------------------------------------------------------------------------------


def check_constant(scores: Sequence[Sequence[float]], model: str) -> None:
    """Raise ScoresUnavailable if every token of several different actions has the same log probability."""
    values = {value for score in scores for value in score}
    if len(values) == 1 and sum(map(len, scores)) > 2:
        raise ScoresUnavailable(
            f"{model}: every token has the log probability {values.pop():g}; such scores read as chance and cannot be "
            f"used."
        )


@dataclass(frozen=True, slots=True)
class SelfTest:
    """How far a backend agrees with itself. noise: largest difference, in nats a token, between repeated scores.

    disagreement: the same between the two ways (whole actions; their beginnings and ends apart). sampled: between
    the log probabilities of a greedy answer as sampled and as given, None where the server does not tell them.
    """

    noise: float
    disagreement: float
    sampled: float | None

    def to_json(self) -> dict[str, float | None]:
        """JSON-ready."""
        return {"noise": self.noise, "disagreement": self.disagreement, "sampled": self.sampled}


async def self_test(backend: Backend, prompt: Ids, actions: Sequence[Ids], model: str) -> SelfTest:
    """Score known actions several times and in two ways.

    actions: at least two different ones of two tokens or more. Raises ScoresUnavailable if the scores are constant
    or the two ways differ by more than TOLERANCE a token (beyond four times the noise).
    """
    actions = [action for action in dict.fromkeys(map(tuple, actions)) if len(action) > 1][:4]
    if len(actions) < 2:
        raise InputError("The self-test of scores needs two different actions of at least two tokens.")
    name = f"self-test {os.getpid()} {time.time_ns()} {next(_session)}"  # fresh answers: the server of today

    async def score(prompts: Sequence[Ids], some: Sequence[Sequence[Ids]], way: str) -> list[list[tuple[float, ...]]]:
        return await backend.score(prompts, some, purpose="score", repeat=f"{name} {way}")

    (first,) = await score([prompt], [actions], "whole")
    check_constant(first, model)
    noise = 0.0
    for repeat in range(2):
        (again,) = await score([prompt], [actions], f"again {repeat}")
        noise = max(noise, _gap(first, again))
    halves = [len(action) // 2 for action in actions]
    heads = await score([prompt] * len(actions), [[a[:k]] for a, k in zip(actions, halves, strict=True)], "heads")
    tails = await score(
        [(*prompt, *a[:k]) for a, k in zip(actions, halves, strict=True)],
        [[a[k:]] for a, k in zip(actions, halves, strict=True)],
        "tails",
    )
    apart = [(*head[0], *tail[0]) for head, tail in zip(heads, tails, strict=True)]
    gap, sampled = _gap(first, apart), None
    settings = Sampling(temperature=0.0, max_tokens=4, logprobs=True, extra=_TELL_IDS)
    greedy = (await backend.sample([prompt], [time.time_ns() % 2**31], settings, purpose="score"))[0]
    if greedy.ids and greedy.logprobs and len(greedy.ids) == len(greedy.logprobs):
        ((given,),) = await score([prompt], [[greedy.ids]], "greedy")
        sampled = _gap([given], [greedy.logprobs])
    for what, value in (("scored whole and in halves", gap), ("sampled and scored", sampled or 0.0)):
        if value > TOLERANCE + 4 * noise:
            raise ScoresUnavailable(
                f"{model}: the same tokens {what} differ by {value:.2f} nats a token (noise {noise:.2g}); these "
                f"log probabilities cannot be used."
            )
    return SelfTest(noise, gap, sampled)


_TELL_IDS = {"return_token_ids": True}


def _gap(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Largest difference of the sums, per token."""
    return max(abs(math.fsum(a) - math.fsum(b)) / max(1, len(a)) for a, b in zip(one, other, strict=True))
