"""A server on 127.0.0.1 that speaks the vLLM subset the project uses, over any small model, and can misbehave.

Knows: completions (prompt lists, echo, log probabilities, token ids, n, seed), chat completions, /tokenize (text and
messages), /v1/models. Hides: HTTP. It counts what it answers, so that tests can tell a call that was paid twice.

    with Loopback(FakeModel()) as server: ... server.url ...
    python -m tests.llm.loopback --latency 0.05 --slots 64      # prints its URL; for the benchmark
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Faults = Callable[[int, str, Mapping[str, Any]], str | None]


class Model(Protocol):
    """What the server needs of a model. END ends an answer."""

    name: str
    end: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a templated chat, ready for an answer."""
        ...

    def score(self, ids: Sequence[int]) -> list[float | None]:
        """Natural log probability of each token given those before it; None for the first."""
        ...

    def generate(
        self, ids: Sequence[int], rng: random.Random, temperature: float, limit: int, stop: Sequence[str]
    ) -> list[int]:
        """Sampled token ids, the end token included where it was drawn."""
        ...


class FakeModel:
    """A deterministic model of single characters whose next-token probabilities are a hash of the last two.

    It answers (`generate`) with a command of the list in its prompt, if it sees one, else with its own characters;
    `style` is how it words that: plain, think (in <think> tags) or messy. says: answers it draws from instead.
    """

    name, end = "fake", 0

    def __init__(self, style: str = "plain", says: Sequence[str] = ()) -> None:
        self.style, self.says = style, says
        self._rows: dict[tuple[int, ...], list[float]] = {}

    def encode(self, text: str) -> list[int]:
        return [min(ord(character), 127) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i != self.end)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = "".join(f"<{m['role']}>\n{m['content']}\n" for m in messages)
        return self.encode(text + "<assistant>\n")

    def row(self, context: Sequence[int]) -> list[float]:
        key = tuple(context[-2:])
        if key not in self._rows:
            seed = int.from_bytes(hashlib.blake2b(bytes(key), digest_size=8).digest(), "big")
            stream = random.Random(seed)
            logits = [stream.gauss(0, 2) for _ in range(128)]
            top = max(logits)
            norm = top + math.log(sum(math.exp(x - top) for x in logits))
            self._rows[key] = [x - norm for x in logits]
        return self._rows[key]

    def score(self, ids: Sequence[int]) -> list[float | None]:
        return [None] + [self.row(ids[max(0, i - 2) : i])[ids[i]] for i in range(1, len(ids))]

    def generate(
        self, ids: Sequence[int], rng: random.Random, temperature: float, limit: int, stop: Sequence[str]
    ) -> list[int]:
        prompt = self.decode(ids)
        if self.says:
            return [*self.encode(self.says[0] if temperature == 0 else rng.choice(self.says)), self.end]
        listed = re.findall(r"^- (.+)$", prompt, re.MULTILINE)
        if not listed:
            drawn: list[int] = []
            for _ in range(limit):
                row = self.row([*ids, *drawn])
                if temperature == 0:
                    drawn.append(max(range(128), key=row.__getitem__))
                else:
                    drawn.append(rng.choices(range(128), [math.exp(x / temperature) for x in row])[0])
                if drawn[-1] == self.end or any(text in self.decode(drawn) for text in stop):
                    break
            return drawn
        command = listed[0] if temperature == 0 else rng.choice(listed)
        words = {
            "plain": command,
            "think": f"<think>maybe {listed[0]}?</think>\n{command}",
            "messy": f'Thought: I could do it.\nAction: "{command.upper()}."',
        }[self.style]
        return [*self.encode(words), self.end]


class Loopback:
    """The server, in a thread of its own. faults: given (number of the request, path, body), what goes wrong or None.

    Faults: 429, 500, 400, 401, hang, cut, junk, html, no_logprobs, nan, constant, few, many, wrong_model, drip,
    empty, no_usage, error_body, and `close` (the listening socket is closed after this answer).
    """

    def __init__(
        self,
        model: Model,
        *,
        faults: Faults | None = None,
        latency: float = 0.0,
        slots: int = 64,
        reasoning: bool = False,
        key: str | None = None,
        token_ids: bool = True,
        dialect: str = "vllm",
    ) -> None:
        self.dialect = dialect
        self.model, self.faults, self.latency, self.reasoning, self.key = model, faults, latency, reasoning, key
        self.token_ids = token_ids
        self.requests = 0
        self.answered: Counter[str] = Counter()  # answers that were sent whole, by question
        self.usage = Counter[str]()
        self.bodies: list[tuple[str, Mapping[str, Any]]] = []
        self.busiest = 0
        self._busy = 0
        self._gone = False
        self._slots_n = slots
        self.port = 0
        self._thread: threading.Thread | None = None

    # Life

    def __enter__(self) -> Loopback:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        assert self._thread is not None
        self._thread.join(20)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._slots, self._line = asyncio.Semaphore(self._slots_n), asyncio.Lock()
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        self._server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if self._gone:
                    break
                lines = head.decode().split("\r\n")
                path = lines[0].split()[1]
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(content) if content else {}
                if not await self._respond(writer, path, body, headers):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _respond(
        self, writer: asyncio.StreamWriter, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> bool:
        number = self.requests
        self.requests += 1
        self.bodies.append((path, body))
        fault = self.faults(number, path, body) if self.faults else None
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            fault = "401"
        if fault == "hang":
            await self._stop.wait()
            return False
        if fault in ("429", "500", "400", "401"):
            message = f"fault {fault}" if fault != "401" else f"Incorrect key: {headers.get('authorization')}"
            extra = "Retry-After: 0.3\r\n" if fault == "429" else ""
            await self._send(writer, {"error": {"message": message}}, int(fault), extra)
            return True
        status, answer = await self._answer(path, body, fault)
        text = json.dumps(answer)
        if fault == "junk":
            text = text[: len(text) // 2] + "}"
        if fault == "html":
            text = "<html>gateway</html>"
        if fault == "error_body":
            text = json.dumps({"error": {"message": "out of memory"}})
        if fault == "cut":
            writer.write(self._head(200, len(text)) + text[: len(text) // 2].encode())
            await writer.drain()
            return False
        if fault == "drip":
            writer.write(self._head(200, len(text)))
            for character in text:
                writer.write(character.encode())
                await writer.drain()
                await asyncio.sleep(0.05)
            return True
        await self._send(writer, text, status)
        if status == 200 and fault in (None, "close", "few", "many", "no_usage"):
            for key in self._questions(path, body):
                self.answered[key] += 1
        if fault == "close":
            self._server.close()
            self._gone = True
            return False
        return True

    @staticmethod
    def _head(status: int, length: int, extra: str = "") -> bytes:
        return (
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{extra}\r\n".encode()
        )

    async def _send(self, writer: asyncio.StreamWriter, answer: Any, status: int, extra: str = "") -> None:
        text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        writer.write(self._head(status, len(text), extra) + text)
        await writer.drain()

    @staticmethod
    def _questions(path: str, body: Mapping[str, Any]) -> list[str]:
        if "completions" not in path:
            return []
        prompt = body.get("prompt", body.get("messages"))
        several = "prompt" in body and isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (list, str))
        return [json.dumps([path, p, body.get("seed"), body.get("n", 1)]) for p in (prompt if several else [prompt])]

    # Answers

    async def _answer(self, path: str, body: Mapping[str, Any], fault: str | None) -> tuple[int, Any]:
        model = self.model
        only = {"vllm": "/v1/ /tokenize", "openai": "/v1/chat", "sglang": "/v1/ /generate /tokenize"}
        only["llama-server"] = "/v1/ /tokenize /completion"
        if not any(path.startswith(start) for start in only[self.dialect].split()):
            return 404, {"error": {"message": f"no such endpoint {path}"}}
        if path == "/generate":
            return 200, self._generate(body, fault)
        if path == "/completion":
            return 200, self._completion(body, fault)
        if path == "/tokenize" and (self.dialect == "llama-server") != ("content" in body):
            return 400, {"error": {"message": "another dialect"}}
        if path.endswith("/models"):
            return 200, {"data": [{"id": model.name, "owned_by": "vllm"}]}
        if path == "/version":
            return 200, {"version": "loopback"}
        if path == "/tokenize":
            text = body.get("prompt", body.get("content", ""))
            ids = model.chat(body["messages"]) if "messages" in body else model.encode(text)
            return 200, {"tokens": ids, "count": len(ids)}
        if path.endswith("/chat/completions"):
            prompts, chat = [model.chat(body["messages"])], True
        elif path.endswith("/completions"):
            prompt = body["prompt"]
            several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (list, str))
            prompts = [p if isinstance(p, list) else model.encode(p) for p in (prompt if several else [prompt])]
            chat = False
        else:
            return 404, {"error": {"message": f"no such endpoint {path}"}}
        if body.get("model") not in (model.name, None):
            return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
        n = int(body.get("n", 1))
        choices: list[dict[str, Any]] = []
        async with AllOf(self._slots, self._line, len(prompts) * n, self._slots_n):
            self._busy += len(prompts) * n
            self.busiest = max(self.busiest, self._busy)
            began = time.monotonic()
            for ids in prompts:
                for draw in range(n):
                    choices.append(self._choice(ids, body, draw, chat, fault, len(choices)))
            if self.latency:  # in all: what the computing took is part of it
                whole = self.latency * math.ceil(len(prompts) * n / self._slots_n)
                await asyncio.sleep(max(0.0, began + whole - time.monotonic()))
            self._busy -= len(prompts) * n
        if fault == "few":
            choices = choices[:1]
        if fault == "many":
            choices = [*choices, {**choices[0], "index": len(choices)}]
        if fault == "empty":
            choices = []
        usage = {
            "prompt_tokens": sum(len(p) for p in prompts),
            "completion_tokens": sum(c.pop("_n") for c in choices if "_n" in c),
        }
        self.usage.update(usage)
        answer = {"model": "other" if fault == "wrong_model" else model.name, "choices": choices, "usage": usage}
        if fault == "no_usage":
            del answer["usage"]
        return 200, answer

    def _damaged(self, values: Sequence[float | None], fault: str | None) -> list[float | None]:
        wrong = {"nan": math.nan, "constant": 0.0, "no_logprobs": None}
        return [None if v is None else wrong.get(fault or "", v) for v in values]

    def _generate(self, body: Mapping[str, Any], fault: str | None) -> Any:
        """SGLang's own endpoint: scores of the given tokens from `logprob_start_len` on, the first of them unknown."""
        if "input_ids" not in body:
            ids = self.model.encode(body["text"])
            return {"text": "x", "meta_info": {"prompt_tokens": len(ids), "completion_tokens": 1}}
        items = []
        for ids, start in zip(body["input_ids"], body["logprob_start_len"], strict=True):
            values = self._damaged(self.model.score(ids), fault)
            scores = [[None if k == start else values[k], ids[k], None] for k in range(start, len(ids))]
            about = {"prompt_tokens": len(ids), "completion_tokens": 0, "cached_tokens": 1}
            items.append({"text": "", "meta_info": {**about, "input_token_logprobs": scores}})
        return items

    def _completion(self, body: Mapping[str, Any], fault: str | None) -> Any:
        """llama-server's own endpoint, its answer forced by a grammar of token ids."""
        forced = [int(i) for i in re.findall(r"<\[(\d+)\]>", body.get("grammar", ""))]
        ids = [*body["prompt"], *forced]
        values = self._damaged(self.model.score(ids), fault)[len(body["prompt"]) :]
        said = [{"id": i, "logprob": v} for i, v in zip(forced, values, strict=True)]
        counts = {"tokens_evaluated": len(body["prompt"]), "tokens_predicted": len(forced), "tokens_cached": 3}
        return {"content": "", "completion_probabilities": said, **counts}

    def _choice(
        self, prompt: list[int], body: Mapping[str, Any], draw: int, chat: bool, fault: str | None, index: int
    ) -> dict[str, Any]:
        model, stop = self.model, body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        limit = int(body.get("max_tokens", 16))
        rng = random.Random(f"{body['seed']},{draw}") if "seed" in body else random.Random()
        drawn = model.generate(prompt, rng, float(body.get("temperature", 1.0)), limit, stop) if limit else []
        drawn = drawn[:limit]
        text = model.decode([i for i in drawn if i != model.end])
        finish = "stop" if drawn and drawn[-1] == model.end else "length"
        for mark in stop:
            if mark in text:
                text, finish = text.split(mark)[0], "stop"
        echo = bool(body.get("echo"))
        choice: dict[str, Any] = {"index": index, "finish_reason": finish, "_n": len(drawn)}
        shown = [*prompt, *drawn] if echo else drawn
        wanted = body.get("logprobs") is not None and body["logprobs"] is not False and fault != "no_logprobs"
        values: list[float | None] = []
        if wanted:
            values = self.model.score([*prompt, *drawn])
            values = values if echo else values[len(prompt) :]
            values = self._damaged(values, fault)
        if chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if self.reasoning:
                message = {"role": "assistant", "content": text, "reasoning_content": "let me see"}
            choice["message"] = message
            content = [{"token": model.decode([i]), "logprob": v} for i, v in zip(shown, values, strict=False)]
            choice["logprobs"] = {"content": content} if wanted else None
        else:
            choice["text"] = model.decode(prompt) + text if echo else text
            tokens = [model.decode([i]) for i in shown]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": values} if wanted else None
        if body.get("return_token_ids") and self.token_ids:
            choice["token_ids"], choice["prompt_token_ids"] = drawn, prompt
        return choice


class AllOf:
    """Takes k slots of a semaphore (at most all of them) in the order of arrival."""

    def __init__(self, slots: asyncio.Semaphore, line: asyncio.Lock, k: int, most: int) -> None:
        self.slots, self.line, self.k = slots, line, min(k, most)

    async def __aenter__(self) -> None:
        async with self.line:
            for _ in range(self.k):
                await self.slots.acquire()

    async def __aexit__(self, *_: object) -> None:
        for _ in range(self.k):
            self.slots.release()


if __name__ == "__main__":
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    with Loopback(
        FakeModel(), latency=float(options.get("--latency", 0)), slots=int(options.get("--slots", 64))
    ) as server:
        print(server.url, flush=True)
        sys.stdin.read()
