"""A language model as a policy: on an OpenAI-compatible server or in this process, saved as a commented TOML file.

Knows: how a decision becomes a prompt and an answer a command, and the two ways to decide. Hides: batching, the
token window, memos, and the self-test before scores are trusted.

decode.mode = "sample": the model writes; probabilities of commands are not known (`distributions` gives None).
decode.mode = "choice": every admissible command is scored, pi(a) is proportional to exp(score / temperature), and
the draw is made here, so probabilities are exact and inadmissible commands never occur.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args

from audit.llm.answers import Sample
from audit.llm.capabilities import capabilities
from audit.llm.client import Client, Limits, Prompt, Sampling
from audit.llm.journal import Caps, Journal, Prices, Purpose, Usage, current_purpose
from audit.llm.parse import PARSER, parse_command
from audit.llm.prompts import Parts, Template
from audit.llm.scoring import (
    Backend,
    Ids,
    Kind,
    Score,
    ScoresUnavailable,
    SelfTest,
    ServerBackend,
    check_constant,
    self_test,
)
from audit.policies import History, Proposal
from audit.policies.scripted import Choice
from audit.records import content_id
from envs.core import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT = "credit-audit llm policy 1"
MEMO_LIMIT = 60_000
SLICE = 128

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Which server. kind: vllm, sglang, llama-server, or openai for any that offers no more than the chat API."""

    kind: str = "openai"
    base_url: str = ""
    model: str = ""
    key_env: str = ""
    answers_as: str = ""


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """A model in this process (extra [hf]). weights: a folder, a .gguf file, or package:NAME for a Python package
    that carries one. adapter: a LoRA folder, or empty. dtype: float32 or bfloat16. Paths are relative to the file."""

    weights: str = ""
    adapter: str = ""
    dtype: str = "float32"
    threads: int = 0
    prefix_megabytes: int = 1500


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """What the model reads. template: admissible, react, transcript, or a file. style: chat or text.

    window_turns, window_tokens: the newest turns that are shown (0: all). first_tokens: the beginning is cut to so
    many tokens (0: never).
    """

    template: str = "admissible"
    style: str = "chat"
    window_turns: int = 0
    window_tokens: int = 0
    first_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How an action is chosen. mode: sample or choice. end: the text that ends an action when it is scored.

    length: whether the score of an action is the sum or the mean of its token log probabilities. end_counts:
    whether the end's tokens are among them. repair: whether the wording may be mended to a command of the game.
    """

    mode: str = "sample"
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64
    stop: list[str] = field(default_factory=list)
    end: str = ""
    length: str = "sum"
    end_counts: bool = True
    repair: bool = True
    seeded: bool = True


@dataclass(frozen=True, slots=True)
class CapSettings:
    """Hard caps on all this policy's journal ever pays for; 0: none."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0


_ALLOWED: Mapping[str, tuple[str, ...]] = {
    "kind": get_args(Kind),
    "style": ("chat", "text"),
    "mode": ("sample", "choice"),
    "length": ("sum", "mean"),
    "dtype": ("float32", "bfloat16"),
}


class LLMPolicy:
    """A language model that plays. See the module; `load` opens a saved one.

    backend: the model. usage: where spending is booked. folder: where relative template files lie.
    """

    def __init__(
        self, name: str, backend: Backend, prompt: PromptSettings, decode: DecodeSettings, folder: Path = Path()
    ) -> None:
        self.name, self.backend, self.prompt, self.decode = name, backend, prompt, decode
        self.template = Template.load(prompt.template, folder)
        if prompt.style == "chat" and (prompt.window_tokens or prompt.first_tokens):
            raise InputError(f"{name}: window_tokens and first_tokens need prompt.style = 'text'; set window_turns.")
        if decode.mode == "choice" and not (decode.temperature > 0 and decode.top_p == 1.0):
            raise InputError(f"{name}: decode.mode = 'choice' needs temperature > 0 and top_p = 1.")
        self.merged = 0  # scored actions whose tokens would span a boundary
        self.tested: SelfTest | None = None
        self._choices: dict[tuple[Ids, tuple[str, ...]], Choice] = {}
        self._sampling = Sampling(
            temperature=decode.temperature,
            top_p=decode.top_p,
            max_tokens=decode.max_tokens,
            stop=tuple(decode.stop),
            seeded=decode.seeded,
        )

    @classmethod
    def load(cls, path: str | Path, *, journal: Path | None = None) -> LLMPolicy:
        """Open a saved policy. journal: where answers and spending are kept (default: in the cache folder, by the
        policy's identity and server). Raises InputError for a file that is not one, naming what is wrong."""
        path = Path(path)
        data = _read(path)
        where = str(path)
        prompt = _section(PromptSettings, data.pop("prompt", {}), f"{where}: prompt")
        decode = _section(DecodeSettings, data.pop("decode", {}), f"{where}: decode")
        if data.pop("format", None) != FORMAT or not isinstance(name := data.pop("name", None), str):
            raise InputError(f"{where}: no saved LLM policy; expected format = {FORMAT!r} and a name.")
        limits = _section(Limits, data.pop("limits", {}), f"{where}: limits")
        caps = _section(CapSettings, data.pop("caps", {}), f"{where}: caps")
        prices = _section(Prices, data.pop("prices", {}), f"{where}: prices")
        server, local = data.pop("server", None), data.pop("local", None)
        if data:
            raise InputError(f"{where}: unknown key {next(iter(data))!r}.")
        if (server is None) == (local is None):
            raise InputError(f"{where}: needs one of [server] and [local].")
        backend: Backend
        if local is not None:
            from audit.llm.hf import LocalModel

            about = _section(LocalSettings, local, f"{where}: local")
            backend = LocalModel.load(
                about.weights,
                adapter=about.adapter or None,
                dtype=about.dtype,
                threads=about.threads,
                prefix_megabytes=about.prefix_megabytes,
                folder=path.parent,
            )
            return cls(name, backend, prompt, decode, path.parent)
        about_server = _section(ServerSettings, server, f"{where}: server")
        if not about_server.base_url or not about_server.model:
            raise InputError(f"{where}: [server] needs base_url and model.")
        kind: Any = about_server.kind
        client = Client(
            about_server.base_url,
            about_server.model,
            key_env=about_server.key_env or None,
            answers_as=about_server.answers_as or None,
            limits=limits,
            caps=Caps(caps.calls or None, caps.tokens or None, caps.cost or None),
            prices=prices,
        )
        policy = cls(name, ServerBackend(client, kind), prompt, decode, path.parent)
        if journal is None:
            from envs.alfworld.games import cache_folder

            identity = content_id(policy.describe(), client.base_url)
            journal = cache_folder() / "llm" / f"{identity}.sqlite"
        client.journal = Journal(journal)
        return policy

    def describe(self) -> dict[str, Any]:
        """Everything that changes the policy's answers; no key, address or path."""
        return {
            "kind": "llm",
            "name": self.name,
            "model": self.backend.describe(),
            "template": {"name": self.template.name, "digest": self.template.digest},
            "prompt": {k: v for k, v in asdict(self.prompt).items() if k != "template"},
            "decode": asdict(self.decode),
            "parser": PARSER,
        }

    def spent(self) -> dict[str, Usage]:
        """Total usage by purpose, of all sessions for a server, of this one for a local model."""
        return self.ledger.spent()

    def ledger_lines(self) -> list[tuple[str, str]]:
        """The ledger for printing; every figure is a total."""
        client = self.backend.client if isinstance(self.backend, ServerBackend) else None
        return self.ledger.lines(client.prices if client else Prices())

    @property
    def ledger(self) -> Journal:
        """Where spending is booked: the journal for a server, this session's own for a local model."""
        if isinstance(self.backend, ServerBackend):
            return self.backend.client.journal
        ledger: Journal = getattr(self.backend, "ledger")  # noqa: B009 - not part of the protocol
        return ledger

    @property
    def at_once(self) -> int:
        """How many tasks of a study should ask together, so that the server has work while others step."""
        return 1 + self.backend.client.limits.concurrency // 8 if isinstance(self.backend, ServerBackend) else 1

    async def examine(self) -> dict[str, Any] | None:
        """What the server can do, {"kind": ..., "can": [names]}, asked once a journal; None for a local model.

        The whole finding is the journal's fact `capabilities`. Raises PolicyUnavailable where the server is not there
        or has another model, ScoresUnavailable where it cannot do what decode.mode asks for.
        """
        if not isinstance(self.backend, ServerBackend):
            return None
        client = self.backend.client
        found = client.journal.fact("capabilities")
        if found is None:
            asked = await capabilities(
                client.base_url, client.model, key_env=client.key_env, answers_as=client.answers_as
            )
            found = asked.to_json()
            client.journal.note("capabilities", found)
        can = sorted(name for name, entry in found["capabilities"].items() if entry["has"])
        if self.decode.mode == "choice" and "scores of given text" not in can:
            why = found["capabilities"]["scores of given text"]["detail"]
            raise ScoresUnavailable(
                f"{client.model}: decode.mode = 'choice' needs scores of given text, which this server does not give "
                f"({why}); set decode.mode = 'sample'."
            )
        return {"kind": found["kind"], "can": can}

    # The protocol

    async def propose(self, requests: Sequence[History], *, seeds: Sequence[int]) -> list[Proposal]:
        """One draw for each history. Raises PolicyUnavailable where the model cannot be asked."""
        purpose = current_purpose("propose")
        if self.decode.mode == "choice":
            choices = await self._choice(requests, None, purpose)
            return [
                Proposal("", status="error", reason="the game offers no command at this point")
                if choice is None
                else choice.draw(seed)
                for choice, seed in zip(choices, seeds, strict=True)
            ]
        # In slices, so that the server is at work while the prompts of the next ones are made.
        tasks: list[asyncio.Task[list[Proposal]]] = []
        for first in range(0, len(requests), SLICE):
            if tasks:
                await asyncio.sleep(0.001)
            part = slice(first, first + SLICE)
            tasks.append(asyncio.create_task(self._sampled(requests[part], seeds[part], purpose)))
        found = await asyncio.gather(*tasks, return_exceptions=True)  # what is under way is waited for and kept
        proposals: list[Proposal] = []
        for some in found:
            if isinstance(some, BaseException):
                raise some
            proposals += some
        return proposals

    async def _sampled(self, requests: Sequence[History], seeds: Sequence[int], purpose: Purpose) -> list[Proposal]:
        prompts = await self.prompts(requests)
        samples = await self.backend.sample(prompts, seeds, self._sampling, purpose=purpose)
        return [self._proposal(sample, history) for sample, history in zip(samples, requests, strict=True)]

    def _proposal(self, sample: Sample, history: History) -> Proposal:
        text = sample.text if sample.thoughts is None else f"<think>{sample.thoughts}</think>\n{sample.text}"
        if sample.error is not None:
            return Proposal("", status="error", reason=sample.error)
        parsed = parse_command(sample.text, history.turn.admissible, repair=self.decode.repair)
        if parsed.command is None:
            return Proposal("", text, status="error", reason=parsed.reason)
        # Known only where one text is the command and its end was drawn too: servers differ in whether they tell that.
        local = not isinstance(self.backend, ServerBackend)
        verbatim = text == parsed.command and not self.decode.repair and sample.finish == "stop"
        logprob = math.fsum(sample.logprobs) if local and verbatim and sample.logprobs else None
        written = None if text == parsed.command else text
        return Proposal(parsed.command, written, logprob, repairs=parsed.repairs)

    async def distributions(self, requests: Sequence[History]) -> list[Mapping[str, float] | None]:
        """Exact probabilities under decode.mode = "choice", else None."""
        if self.decode.mode != "choice":
            return [None for _ in requests]
        choices = await self._choice(requests, None, current_purpose("score"))
        return [None if choice is None else choice.probabilities() for choice in choices]

    async def logprobs(
        self, requests: Sequence[History], actions: Sequence[str], *, condition: str | None = None
    ) -> list[float | None]:
        """Log probability of each action.

        "choice": of the distribution over the admissible commands (minus infinity for any other), also under a
        condition. "sample": of writing the action and its end, token by token, at temperature 1. None where the
        server cannot score or the template has no outcome; `scores` raises there and gives the tokens.
        """
        if condition is not None and not self.template.has("outcome"):
            return [None for _ in requests]
        try:
            if self.decode.mode == "choice":
                choices = await self._choice(requests, condition, current_purpose("score"))
                return [
                    None if choice is None else choice.logprob(action)
                    for choice, action in zip(choices, actions, strict=True)
                ]
            return [score.total for score in await self.scores(requests, actions, condition=condition)]
        except ScoresUnavailable:
            if (
                self.decode.mode == "sample"
                and isinstance(self.backend, ServerBackend)
                and self.backend.kind == "openai"
            ):
                return [None for _ in requests]
            raise

    async def scores(
        self, requests: Sequence[History], actions: Sequence[str], *, condition: str | None = None
    ) -> list[Score]:
        """Teacher-forced token log probabilities of given actions, under the prompt with or without the outcome.

        Raises ScoresUnavailable where the model cannot score, InputError where the template has no outcome.
        """
        if condition not in (None, "success", "failure"):
            raise InputError(f"condition is {condition!r}; expected None, 'success' or 'failure'.")
        if condition is not None and not self.template.has("outcome"):
            raise InputError(f"{self.template.name}: has no block 'outcome', so nothing can be conditioned on it.")
        prompts = await self._ids(requests, condition)
        tokens = await self._actions([(action,) for action in actions])
        await self._test(prompts, requests)
        found = await self.backend.score(prompts, [[ids for ids, _, _ in some] for some in tokens], purpose="score")
        return [
            Score(ids, logprobs, counted, merged)
            for (((ids, counted, merged),), (logprobs,)) in zip(tokens, found, strict=True)
        ]

    # Prompts

    async def prompts(self, requests: Sequence[History], condition: str | None = None) -> list[Prompt]:
        """What the model is sent for each history: token ids where a token window or a local model asks for them."""
        local = not isinstance(self.backend, ServerBackend)
        if local or self.prompt.window_tokens or self.prompt.first_tokens:
            return [*await self._ids(requests, condition)]
        return [self._text(self.template.parts(history, condition)) for history in requests]

    def _text(self, parts: Parts) -> Prompt:
        text = parts.text(self.prompt.window_turns)
        if self.prompt.style == "text":
            return self.template.system() + text
        system = self.template.system()
        return (*((("system", system),) if system else ()), ("user", text))

    async def _ids(self, requests: Sequence[History], condition: str | None) -> list[Ids]:
        parts = [self.template.parts(history, condition) for history in requests]
        if self.prompt.style == "chat":
            return await self.backend.encode_chat([self._text(part) for part in parts])
        pieces = list(dict.fromkeys(piece for part in parts for piece in part.all_pieces()))
        system = self.template.system()
        encoded = await self.backend.encode([*pieces, system] if system else pieces)
        ids = dict(zip(pieces, encoded, strict=False))
        before = encoded[-1] if system else ()
        p = self.prompt
        return [
            (*before, *part.ids(ids, p.window_turns, p.window_tokens, p.first_tokens, self.decode.max_tokens))
            for part in parts
        ]

    async def _actions(self, actions: Sequence[Sequence[str]]) -> list[list[tuple[Ids, int, bool]]]:
        """(ids, how many of them count, whether tokens merge across the end) of each command."""
        end = self.decode.end
        distinct = list(dict.fromkeys(command for some in actions for command in some))
        encoded = await self.backend.encode([text for command in distinct for text in (command + end, command)] + [end])
        found: dict[str, tuple[Ids, int, bool]] = {}
        tail = len(encoded[-1]) if end else 0
        for place, command in enumerate(distinct):
            whole, alone = encoded[2 * place], encoded[2 * place + 1]
            merged = whole[: len(alone)] != alone or len(whole) != len(alone) + tail
            self.merged += merged
            found[command] = whole, len(whole) - (0 if self.decode.end_counts else tail), merged
        return [[found[command] for command in some] for some in actions]

    # Choice

    async def _choice(
        self, requests: Sequence[History], condition: str | None, purpose: Purpose
    ) -> list[Choice | None]:
        prompts = await self._ids(requests, condition)
        keys = [(ids, history.turn.admissible) for ids, history in zip(prompts, requests, strict=True)]
        owed = [key for key in dict.fromkeys(keys) if key not in self._choices and key[1]]
        if owed:
            await self._test(prompts, requests)
            actions = await self._actions([tuple(dict.fromkeys(commands)) for _, commands in owed])
            found = await self.backend.score(
                [ids for ids, _ in owed], [[ids for ids, _, _ in some] for some in actions], purpose=purpose
            )
            if len(self._choices) + len(owed) > MEMO_LIMIT:
                self._choices.clear()
            for key, some, scores in zip(owed, actions, found, strict=True):
                check_constant(scores, self.name)
                totals = [math.fsum(score[:counted]) for (_, counted, _), score in zip(some, scores, strict=True)]
                if self.decode.length == "mean":
                    totals = [total / counted for total, (_, counted, _) in zip(totals, some, strict=True)]
                self._choices[key] = softmax(tuple(dict.fromkeys(key[1])), totals, self.decode.temperature)
        return [self._choices.get(key) for key in keys]

    async def _test(self, prompts: Sequence[Ids], requests: Sequence[History]) -> None:
        """Once a session: can the scores be trusted at all?"""
        if self.tested is not None:
            return
        commands = next((history.turn.admissible for history in requests if len(set(history.turn.admissible)) > 1), ())
        actions = await self._actions([commands[:4] or ("look around", "go to desk 1")])
        self.tested = await self_test(self.backend, prompts[0], [ids for ids, _, _ in actions[0]], self.name)
        if isinstance(self.backend, ServerBackend):
            self.backend.client.journal.note("self_test", self.tested.to_json())


def softmax(commands: Sequence[str], scores: Sequence[float], temperature: float) -> Choice:
    """The distribution proportional to exp(score / temperature)."""
    scaled = [score / temperature for score in scores]
    top = max(scaled)
    norm = top + math.log(math.fsum(math.exp(score - top) for score in scaled))
    logprobs = [score - norm for score in scaled]
    return Choice(commands, [math.exp(value) for value in logprobs], logprobs)


# On disk ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: does not parse as TOML: {error}.") from None


def _section(kind: type[T], data: Any, where: str) -> T:
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: must be a table.")
    default: Any = kind()
    known = {key.name: getattr(default, key.name) for key in fields(default)}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in ("api_key", "key"):
            raise InputError(f"{where}: a key does not belong in a file; name an environment variable in key_env.")
        if key not in known:
            raise InputError(f"{where}: unknown key {key!r}; known: {', '.join(known)}.")
        standard = known[key]
        if isinstance(standard, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        texts = not isinstance(value, list) or all(isinstance(item, str) for item in value)
        if type(value) is not type(standard) or not texts:
            raise InputError(f"{where}.{key} is {value!r}; expected {type(standard).__name__}.")
        if key in _ALLOWED and value not in _ALLOWED[key]:
            raise InputError(f"{where}.{key} is {value!r}; expected one of {', '.join(_ALLOWED[key])}.")
        if isinstance(value, (int, float)) and not 0 <= value < 1e12:
            raise InputError(f"{where}.{key} is {value!r}; expected a number of 0 or more.")
        values[key] = value
    for key in ("concurrency", "batch", "most", "timeout", "max_tokens"):
        if key in known and values.get(key, known[key]) <= 0:
            raise InputError(f"{where}.{key} must be above 0.")
    return kind(**values)


def write_policy(
    path: Path, name: str, *, prompt: PromptSettings, decode: DecodeSettings, **sections: Mapping[str, Any]
) -> None:
    """Write a policy file. sections: server or local, and limits, caps, prices where they are not the standard."""
    lines = [f"format = {json.dumps(FORMAT)}", f"name = {json.dumps(name)}"]
    for title, section in {**sections, "prompt": asdict(prompt), "decode": asdict(decode)}.items():
        lines += ["", f"[{title}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
