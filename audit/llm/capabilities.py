"""What a server can do, found out by asking it, and what an audit can and cannot do with that.

Knows: one small question for each capability and what its answer proves. Hides: which endpoint answers. Nothing is
believed that was not seen: a server that ignores a setting silently does not have it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from audit.llm.answers import BadAnswer, read_logprobs
from audit.llm.client import Client, Limits, Refused
from audit.llm.journal import Journal, PolicyUnavailable
from audit.llm.scoring import Kind, ScoresUnavailable, SelfTest, ServerBackend, self_test
from envs.core import InputError

_TEXT = "You are in the middle of a room. Looking quickly around you, you see a desk 1 and a shelf 2.\n> "
_ACTIONS = ("go to desk 1\n", "go to shelf 2\n", "look\n")
_CHAT = [{"role": "user", "content": "Name a colour."}]


@dataclass(frozen=True, slots=True)
class Capability:
    """One line of the table. has: None where it could not be found out."""

    name: str
    has: bool | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What was found. kind: the kind of server it looks like. table: one entry for each capability."""

    model: str
    kind: Kind
    table: tuple[Capability, ...]
    tested: SelfTest | None = None
    _by_name: dict[str, bool | None] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._by_name.update({entry.name: entry.has for entry in self.table})

    def has(self, name: str) -> bool:
        """Whether a capability was seen."""
        return self._by_name.get(name) is True

    def lines(self) -> list[tuple[str, str]]:
        """The table for printing: (capability, yes/no/unknown and detail)."""
        words = {True: "yes", False: "no", None: "unknown"}
        return [
            ("kind of server", self.kind),
            *((entry.name, words[entry.has] + (f" ({entry.detail})" if entry.detail else "")) for entry in self.table),
        ]

    def consequences(self) -> list[str]:
        """What an audit can and cannot do with this server, in sentences."""
        found = []
        if not (self.has("chat") or self.has("completions")):
            found.append("It cannot be audited: neither chat nor completions answered.")
            return found
        styles = [style for name, style in (("chat", "chat"), ("completions", "text")) if self.has(name)]
        found.append(
            f"Collect and replay with decode.mode = 'sample', prompt.style = {' or '.join(map(repr, styles))}."
        )
        if self.has("scores of given text"):
            found.append("decode.mode = 'choice' gives exact probabilities: support and unseen mass are exact.")
            found.append("Fluency, confidence and outcome-conditioned signals can be scored.")
        else:
            found.append("No scores of given actions: fluency and outcome-conditioned signals are missing, support is")
            found.append("estimated from draws, and decode.mode = 'choice' is refused.")
        if not self.has("n > 1"):
            found.append("Each draw is a call of its own: support costs as many prompts as draws.")
        if not self.has("seed"):
            found.append("Draws do not repeat by seed; the journal keeps them, so keep it with the run.")
        if not self.has("token ids"):
            found.append("No token ids: use window_turns, not window_tokens.")
        if not self.has("structured output"):
            found.append("Judges are read tolerantly; what cannot be read is missing.")
        return found

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        table = {entry.name: {"has": entry.has, "detail": entry.detail} for entry in self.table}
        tested = None if self.tested is None else self.tested.to_json()
        return {"model": self.model, "kind": self.kind, "capabilities": table, "self_test": tested}


async def capabilities(
    url: str, model: str, *, key_env: str | None = None, answers_as: str | None = None, timeout: float = 60.0
) -> Capabilities:
    """Ask a server about a dozen small questions. url: ending in /v1. Raises PolicyUnavailable if it is not there
    or does not have the model, InputError for a bad address."""
    limits = Limits(concurrency=1, timeout=timeout, retries=1, longest_wait=2.0)
    probe = _Probe(Client(url, model, key_env=key_env, answers_as=answers_as, limits=limits, journal=Journal()))
    return await probe.examine()


class _Probe:
    def __init__(self, client: Client) -> None:
        self.client, self.model = client, client.model
        self.table: list[Capability] = []

    async def _ask(self, path: str, body: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
        """(answer, why there is none). A server that cannot be reached at all is the caller's to report."""
        try:
            return await self.client.post(path, body), ""
        except (BadAnswer, PolicyUnavailable, Refused) as error:
            return None, str(error)

    def _note(self, name: str, has: bool | None, detail: str = "") -> bool:
        self.table.append(Capability(name, has, detail[:120]))
        return has is True

    async def examine(self) -> Capabilities:
        chat_body = {"model": self.model, "messages": _CHAT, "max_tokens": 3, "temperature": 1.0}
        text_body = {"model": self.model, "prompt": _TEXT, "max_tokens": 3, "temperature": 1.0}
        chat, why_chat = await self._ask("/chat/completions", chat_body)
        text, why_text = await self._ask("/completions", text_body)
        if chat is None and text is None:
            raise PolicyUnavailable(f"{self.client.base_url}: neither chat nor completions answered: {why_chat}")
        for answer in (chat, text):
            if answer is not None:
                self.client.check_model(answer)
        self._note("chat", _choices(chat) == 1, why_chat)
        self._note("completions", _choices(text) == 1, why_text)
        path, body = ("/completions", text_body) if _choices(text) else ("/chat/completions", chat_body)
        wanted = {"logprobs": 1} if path == "/completions" else {"logprobs": True}
        answer, why = await self._ask(path, {**body, **wanted})
        values = read_logprobs(answer["choices"][0])[0] if answer and _choices(answer) else None
        self._note("log probabilities of samples", values is not None, why)
        answer, why = await self._ask(path, {**body, "n": 2})
        self._note("n > 1", _choices(answer) == 2, why or f"{_choices(answer)} of 2 answers")
        same = [await self._ask(path, {**body, "max_tokens": 12, "seed": seed}) for seed in (7, 7, 8, 9, 10)]
        texts = [_text(answer) for answer, _ in same]
        repeats = texts[0] == texts[1] and len(set(texts)) > 1
        self._note(
            "seed", None if len(set(texts)) == 1 else repeats, "all answers are equal" if len(set(texts)) == 1 else ""
        )
        answer, why = await self._ask(
            path, {**body, "max_tokens": 8, "structured_outputs": {"choice": ["zebra", "lynx"]}}
        )
        forced = _text(answer) in ("zebra", "lynx")
        if not forced:
            schema = {"type": "object", "properties": {"a": {"enum": ["zebra"]}}, "required": ["a"]}
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            answer, why = await self._ask("/chat/completions", {**chat_body, "max_tokens": 20, "response_format": form})
            forced = '"zebra"' in (_text(answer) or "")
        self._note("structured output", forced, why)
        kind = await self._kind()
        tested = await self._scores(kind)
        return Capabilities(self.model, kind, tuple(self.table), tested)

    async def _kind(self) -> Kind:
        """By what only one kind of server answers."""
        root = self.client.root
        one, _ = await self._ask(
            root + "/tokenize", {"model": self.model, "prompt": "a b", "add_special_tokens": False}
        )
        two, _ = await self._ask(root + "/tokenize", {"content": "a b", "add_special": False})
        native, _ = await self._ask(
            root + "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        )
        if native is not None and "meta_info" in native.get("items", [native])[0]:
            return "sglang"
        if one is not None and one.get("tokens"):
            return "vllm"
        if two is not None and two.get("tokens"):
            return "llama-server"
        return "openai"

    async def _scores(self, kind: Kind) -> SelfTest | None:
        backend = ServerBackend(self.client, kind)
        try:
            prompt, *actions = await backend.encode([_TEXT, *_ACTIONS])
        except (PolicyUnavailable, InputError) as error:
            self._note("token ids", False, str(error))
            self._note("scores of given text", False, "needs token ids")
            return None
        self._note("token ids", True)
        try:
            tested = await self_test(backend, prompt, actions, self.model)
        except (ScoresUnavailable, PolicyUnavailable, InputError) as error:
            self._note("scores of given text", False, str(error))
            return None
        detail = f"noise {tested.noise:.2g}, two ways differ by {tested.disagreement:.2g} nats a token"
        if tested.sampled is not None and math.isfinite(tested.sampled):
            detail += f", sampled and scored by {tested.sampled:.2g}"
        self._note("scores of given text", True, detail)
        return tested


def _choices(answer: Mapping[str, Any] | None) -> int:
    choices = (answer or {}).get("choices")
    return len(choices) if isinstance(choices, list) else 0


def _text(answer: Mapping[str, Any] | None) -> str | None:
    if not _choices(answer):
        return None
    choice = (answer or {})["choices"][0]
    return str(choice["text"] if "text" in choice else (choice.get("message") or {}).get("content") or "").strip()
