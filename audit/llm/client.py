"""One asynchronous client for OpenAI-compatible servers: what is asked once is paid once.

Knows: retries, waiting, limits, and what makes two questions the same (server, model, prompt, settings and the
number of the draw). Hides: HTTP, faults of servers (each is survived or named), grouping of questions into calls,
and the journal in which answers and spending are kept. The key is read from an environment variable, is sent to
the server and is written nowhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from audit.llm.answers import BadAnswer, Sample, as_sample, read_choices, read_usage, retry_after
from audit.llm.journal import Caps, Journal, PolicyUnavailable, Prices, Purpose, Usage
from audit.records import draws
from envs.core import InputError

if TYPE_CHECKING:
    import openai

CHARACTERS_A_TOKEN = 3.0  # for reservations only; what is booked is what the server says
_GOOD_AFTER = {408, 409, 425, 429}
_USELESS = {401: "the key is refused", 403: "access is refused", 404: "there is no such endpoint or model"}


@dataclass(frozen=True, slots=True)
class Limits:
    """How hard a server is driven and how long it is waited for.

    concurrency: calls under way at once. batch: different prompts in one completions call (the server's own
    randomness then, since one seed for several prompts would tie their draws together). most: draws of one prompt
    in one call (`n`). timeout: seconds a call may take in all. retries: of a call. longest_wait: seconds before
    any retry, whatever the server asks for.
    """

    concurrency: int = 32
    batch: int = 1
    most: int = 16
    timeout: float = 120.0
    retries: int = 6
    longest_wait: float = 60.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """What shapes a sampled answer. extra: further fields of the request (a JSON schema, say)."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    seeded: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The fields of the request that both kinds of endpoint share."""
        body: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens, **self.extra}
        if self.top_p != 1.0:
            body["top_p"] = self.top_p
        if self.stop:
            body["stop"] = list(self.stop)
        return body


Prompt = str | tuple[int, ...] | tuple[tuple[str, str], ...]  # text, token ids, or chat messages (role, content)


@dataclass(frozen=True, slots=True)
class Call:
    """One request. keys: of its answers. read: the answers in a good response, at most as many, in that order."""

    path: str
    body: Mapping[str, Any]
    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
    expected: Usage
    parts: Callable[[], Sequence[Call]] | None = None  # the questions one by one, where they are refused together


class Client:
    """Asks one model on one server. base_url: as for the openai package, ending in /v1.

    key_env: name of the environment variable that holds the key (servers of one's own need none). answers_as: what
    the server calls the model in its answers, if not by the name it is asked for. Raises InputError for a URL with
    a password in it or an empty key variable.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        key_env: str | None = None,
        answers_as: str | None = None,
        limits: Limits | None = None,
        caps: Caps | None = None,
        prices: Prices | None = None,
        journal: Journal | None = None,
    ) -> None:
        if not re.fullmatch(r"https?://[^@\s]+", base_url):
            raise InputError(
                f"The server address must be http(s)://host:port/v1 without user name or password; keys come from an "
                f"environment variable (key_env). Got {re.sub('//.*@', '//...@', base_url)!r}."
            )
        if key_env is not None and not os.environ.get(key_env):
            raise InputError(f"The environment variable {key_env}, which should hold the key of the server, is empty.")
        self.base_url, self.model, self.limits = base_url.rstrip("/"), model, limits or Limits()
        self.caps, self.prices, self.journal = caps or Caps(), prices or Prices(), journal or Journal()
        self.root = re.sub(r"/v1$", "", self.base_url)
        self.key_env, self.answers_as = key_env, answers_as or model
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: openai.AsyncOpenAI | None = None
        self._slots: asyncio.Semaphore | None = None
        self._closing: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._one_draw_a_call = False
        self._key_base = hashlib.blake2b(f"{self.base_url}\n{model}\n".encode(), digest_size=16)

    def key(self, path: str, body: Mapping[str, Any], draw: Any) -> str:
        """Content id of a question: everything that changes its answer, the draw too."""
        digest = self._key_base.copy()
        digest.update(json.dumps([path, body, draw], sort_keys=True, separators=(",", ":")).encode())
        return digest.hexdigest()

    # Sampling

    async def sample(
        self, prompts: Sequence[Prompt], draws: Sequence[int], settings: Sampling, *, purpose: Purpose
    ) -> list[Sample]:
        """One answer for each prompt and draw; equal prompts with different draws share a call where n > 1 works.

        Raises PolicyUnavailable (the server cannot be asked) or CapReached; what was answered by then is kept.
        """
        chat = [_is_chat(prompt) for prompt in prompts]
        bodies = [
            {"messages" if c else "prompt": _wire(prompt), **settings.body(), **_logprobs_field(c, settings)}
            for prompt, c in zip(prompts, chat, strict=True)
        ]
        paths = ["/chat/completions" if c else "/completions" for c in chat]
        keys = [self.key(path, body, draw) for path, body, draw in zip(paths, bodies, draws, strict=True)]
        first: dict[str, int] = {}
        for i, key in enumerate(keys):
            first.setdefault(key, i)
        known, errors = self.journal.answers(list(first)), dict[str, str]()
        while owed := [i for key, i in first.items() if key not in known and key not in errors]:
            groups: dict[Prompt, list[int]] = {}
            for i in owed:
                groups.setdefault(prompts[i], []).append(i)
            calls = self._sampling_calls(groups.values(), paths, bodies, draws, keys, settings)
            answered, refused = await self.run(calls, purpose)
            known.update(answered)
            errors.update(refused)
        return [as_sample(known[key]) if key in known else Sample("", error=errors[key]) for key in keys]

    def _sampling_calls(
        self,
        groups: Iterable[list[int]],
        paths: Sequence[str],
        bodies: Sequence[dict[str, Any]],
        draws: Sequence[int],
        keys: Sequence[str],
        settings: Sampling,
    ) -> list[Call]:
        calls: list[Call] = []
        singles: list[int] = []
        most = 1 if self._one_draw_a_call else self.limits.most

        def call(indices: Sequence[int], together: bool) -> Call:
            i = indices[0]
            body = {"model": self.model, **bodies[i]}
            expected = Usage(1, _prompt_size(bodies[i]), 0, settings.max_tokens * len(indices))
            if together:
                body["prompt"] = [bodies[j]["prompt"] for j in indices]
                expected = replace(expected, prompt=sum(_prompt_size(bodies[j]) for j in indices))
            elif len(indices) > 1:
                body["n"] = len(indices)
            if settings.seeded and not together:
                # The prompt is mixed in: one seed under two prompts would tie their answers together.
                named = json.dumps([body, [draws[j] for j in indices]], sort_keys=True).encode()
                body["seed"] = int.from_bytes(hashlib.blake2b(named, digest_size=4).digest(), "big") >> 1
            n = len(indices)
            return Call(
                paths[i],
                body,
                tuple(keys[j] for j in indices),
                lambda data: read_choices(data, n),
                expected,
                (lambda: [call([j], False) for j in indices]) if n > 1 else None,
            )

        for group in groups:
            if len(group) > 1 and most > 1:
                calls += [call(group[k : k + most], False) for k in range(0, len(group), most)]
            elif self.limits.batch > 1 and paths[group[0]] == "/completions":
                singles += group
            else:
                calls += [call([i], False) for i in group]
        for k in range(0, len(singles), self.limits.batch):
            some = singles[k : k + self.limits.batch]
            calls.append(call(some, len(some) > 1))
        return calls

    # Calls

    async def run(self, calls: Sequence[Call], purpose: Purpose) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
        """Send calls, as many at once as the limits allow: (answers by key, reasons of refusal by key).

        On an error that stops the run, calls under way are waited for and kept, no new one is sent, and the error
        is raised.
        """
        answered: dict[str, Mapping[str, Any]] = {}
        refused: dict[str, str] = {}
        stop: list[BaseException] = []
        slots = self._session()[1]

        async def one(call: Call) -> None:
            async with slots:
                if stop:
                    return
                try:
                    answers = await self._answered(call, purpose)
                except Refused as error:
                    reason = str(error)
                except (PolicyUnavailable, InputError) as error:
                    stop.append(error)
                    return
                else:
                    if len(answers) < len(call.keys):
                        self._one_draw_a_call = True
                    answered.update(zip(call.keys, answers, strict=False))
                    return
            if call.parts is None:
                refused.update(dict.fromkeys(call.keys, reason))
                return
            if "n" in call.body:
                self._one_draw_a_call = True
            for part in call.parts():
                await one(part)

        await asyncio.gather(*(one(call) for call in calls))
        if stop:
            raise stop[0]
        return answered, refused

    async def _answered(self, call: Call, purpose: Purpose) -> Sequence[Mapping[str, Any]]:
        problem, bad = "", 0
        for attempt in range(self.limits.retries + 1):
            if attempt:
                await asyncio.sleep(self._wait(call, attempt))
            while (pause := self._not_before - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            with self.journal.reserved(call.expected, self.caps, self.prices):
                try:
                    data = await self.post(call.path, call.body)
                except BadAnswer as error:
                    problem = str(error)
                    continue
                usage = read_usage(data, call.expected)
                try:
                    self.check_model(data)
                    answers = call.read(data)
                except (BadAnswer, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                    self.journal.record(purpose, usage, {})
                    problem = str(error) if isinstance(error, BadAnswer) else f"an answer of another shape ({error!r})"
                    bad += 1
                    if bad > 2:  # it was answered, so it is probably paid: not as often as a fault of the line
                        break
                    continue
                except PolicyUnavailable:
                    self.journal.record(purpose, usage, {})
                    raise
                self.journal.record(purpose, usage, dict(zip(call.keys, answers, strict=False)))
                return answers
        raise PolicyUnavailable(f"{self.model}: {problem}; given up after {attempt + 1} tries. Repeat to go on.")

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """One request, no retry: the JSON object of the answer (a list as `items`). path: below base_url, or a URL.

        Raises BadAnswer for a fault that may pass, PolicyUnavailable for one that will not.
        """
        import openai

        server, _ = self._session()
        request = asyncio.ensure_future(server.post(path, cast_to=object, body=dict(body)))
        try:  # not wait_for: a TimeoutError from elsewhere (a task's own time limit) must not pass for this one
            done, _ = await asyncio.wait({request}, timeout=self.limits.timeout)
        except asyncio.CancelledError:
            request.cancel()
            raise
        if not done:
            request.cancel()
            raise BadAnswer(f"no whole answer within {self.limits.timeout:g} s")
        try:
            data = request.result()
        except openai.APIStatusError as error:
            raise self._status_error(error) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise BadAnswer(f"the server cannot be reached or cut the line ({type(cause).__name__})") from None
        except (ValueError, openai.APIError) as error:
            raise BadAnswer(f"an answer that is not JSON ({type(error).__name__})") from None
        if isinstance(data, list):
            return {"items": data}
        if not isinstance(data, dict):
            raise BadAnswer("an answer that is not JSON")
        if "error" in data and "choices" not in data:
            raise BadAnswer(f"an error in place of an answer: {self._clean(str(data['error']))}")
        return data

    def _status_error(self, error: openai.APIStatusError) -> Exception:
        status, said = error.status_code, self._clean(str(error.message))
        if status in _USELESS:
            return PolicyUnavailable(f"{self.model}: {_USELESS[status]} (HTTP {status}: {said}).")
        if error.code == "insufficient_quota":
            return PolicyUnavailable(f"{self.model}: the account's quota is used up (HTTP {status}: {said}).")
        if status not in _GOOD_AFTER and status < 500:
            return Refused(f"the server refuses this question (HTTP {status}: {said})")
        wait = retry_after(error.response.headers.get("retry-after"))
        if wait is not None:  # it concerns every call, not this one alone
            self._not_before = max(self._not_before, time.monotonic() + min(wait, self.limits.longest_wait))
        return BadAnswer(f"HTTP {status}: {said}")

    def _wait(self, call: Call, attempt: int) -> float:
        """Seconds before a retry: doubling, with jitter from a stream of its own for each call and attempt."""
        share: float = draws(1, "retry", call.keys, attempt)[0] / 2**64
        return min(math.ldexp(0.25, attempt - 1), self.limits.longest_wait) * (0.5 + share)

    def check_model(self, data: Mapping[str, Any]) -> None:
        """Raise PolicyUnavailable if an answer is another model's."""
        said = data.get("model")
        if isinstance(said, str) and said not in ("", self.answers_as) and not said.startswith(self.answers_as + "-"):
            raise PolicyUnavailable(
                f"The server answered as model {said!r}, asked was {self.model!r}; name the right one, or set "
                f"answers_as = {said!r} if it is the same."
            )

    def _clean(self, said: str) -> str:
        """What a server said, without anything like a key, short."""
        key = os.environ.get(self.key_env) if self.key_env else None
        if key:
            said = said.replace(key, "(key)")
        return re.sub(r"\b(?:(?:sk|key)[-_]|Bearer )[\w*.-]{6,}", "(key)", said)[:300]

    def _session(self) -> tuple[openai.AsyncOpenAI, asyncio.Semaphore]:
        # Connections belong to one event loop; every asyncio.run brings its own.
        import openai

        loop = asyncio.get_running_loop()
        if self._server is None or self._slots is None or self._loop is not loop:
            key = os.environ.get(self.key_env, "") if self.key_env else "none"
            self._loop, self._slots = loop, asyncio.Semaphore(self.limits.concurrency)
            http = openai.DefaultAsyncHttpxClient(timeout=self.limits.timeout + 5)
            self._server = openai.AsyncOpenAI(api_key=key, base_url=self.base_url, max_retries=0, http_client=http)
            self._closing = loop.create_task(_close_with_the_loop(self._server))
        return self._server, self._slots


async def _close_with_the_loop(server: openai.AsyncOpenAI) -> None:
    """Wait for the end of the loop (asyncio.run cancels what is left), then close the connections while one can."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await server.close()


class Refused(Exception):
    """The server will not answer this question, now or later; other questions are not concerned."""


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, tuple) and bool(prompt) and isinstance(prompt[0], tuple)


def _wire(prompt: Prompt) -> Any:
    if isinstance(prompt, str):
        return prompt
    if _is_chat(prompt):
        return [{"role": role, "content": content} for role, content in prompt]  # type: ignore[misc]
    return list(prompt)


def _logprobs_field(chat: bool, settings: Sampling) -> dict[str, Any]:
    if not settings.logprobs:
        return {}
    return {"logprobs": True} if chat else {"logprobs": 1}


def _prompt_size(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    text = prompt if isinstance(prompt, str) else "".join(message["content"] for message in body["messages"])
    return math.ceil(len(text) / CHARACTERS_A_TOKEN)
