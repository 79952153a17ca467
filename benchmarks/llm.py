"""How much of a server's speed reaches the rollouts, and what the client costs: against a loopback server.

The server (another process) needs 50 ms for an answer and serves 64 at once, so 1,280 answers a second at most.
Rollouts of a trivial world are rolled in a few lock-step batches by a language-model policy; every decision is one
answer.

    python -m benchmarks.llm [--rollouts 10000] [--steps 3] [--batch 16] [--json]

achieved_ratio: answers a second / those that the same server gives to a bare loop over sockets which sends one
prepared request again and again. of_theory: the same / 1,280. client_cpu: processor seconds of this process / wall
seconds; prompts, parsing, journal and the rollouts' own steps are included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from audit.llm.client import Client, Limits
from audit.llm.journal import Journal
from audit.llm.scoring import ServerBackend
from audit.policies import History
from audit.policies.openai import DecodeSettings, LLMPolicy, PromptSettings
from audit.records import draws
from audit.rollouts import Finish, Start, roll
from envs import Turn

LATENCY, SLOTS = 0.05, 64


class Corridor:
    """A world of two commands without an end, so that every rollout takes all its steps."""

    game_id = "corridor"

    def _turn(self, state: tuple[str, ...]) -> Turn:
        said = f"You {state[-1]}. Step {len(state)}." if state else "You are in a corridor. Your task is to: walk."
        return Turn(said, ("go left", "go right"), False, False, state)

    def reset(self) -> Turn:
        """The beginning."""
        return self._turn(())

    def restore(self, state: tuple[str, ...]) -> Turn:
        """The turn of a state."""
        return self._turn(state)

    def step(self, state: tuple[str, ...], command: str) -> Turn:
        """One more step."""
        return self._turn((*state, command))


def measure(rollouts: int, steps: int, batch: int, concurrency: int, groups: int) -> dict[str, float]:
    """Run the benchmark once."""
    command = [sys.executable, "-m", "tests.llm.loopback", "--latency", str(LATENCY), "--slots", str(SLOTS)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as folder:
            limits = Limits(concurrency=concurrency, batch=batch, most=batch, timeout=60)
            client = Client(url, "fake", limits=limits, journal=Journal(Path(folder) / "journal.sqlite"))
            policy = LLMPolicy(
                "benchmark",
                ServerBackend(client, "vllm"),
                PromptSettings("admissible", "text"),
                DecodeSettings(max_tokens=16),
            )
            world = Corridor()
            first = world.reset()
            starts = [
                # Every rollout has a past of its own: no two prompts are equal.
                Start(
                    world,
                    History(f"corridor {i}", Turn(f"{first.observation} ({i})", *_rest(first))),
                    steps,
                    draws(steps, "benchmark", i),
                )
                for i in range(rollouts)
            ]
            asyncio.run(roll(policy, starts[:SLOTS]))  # connections, imports and memos are not measured
            wall, processor = time.perf_counter(), time.process_time()
            finished = asyncio.run(_together(policy, [starts[SLOTS + k :: groups] for k in range(groups)]))
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            answers = sum(finish.steps for finish in finished)
            sample = [f"{first.observation} {i}\n- go left\n- go right\n" for i in range(batch)]
            saturated = asyncio.run(saturate(url, sample, concurrency))
            calls = client.journal.total().calls
    finally:
        server.terminate()
        server.wait()
    assert all(finish.status == "truncated" for finish in finished), "a rollout failed"
    return {
        "rollouts": rollouts,
        "answers": answers,
        "calls": calls,
        "seconds": wall,
        "answers_per_second": answers / wall,
        "saturated_per_second": saturated,
        "achieved_ratio": answers / wall / saturated,
        "of_theory": answers / wall * LATENCY / SLOTS,
        "client_cpu": processor / wall,
    }


async def _together(policy: LLMPolicy, groups: list[list[Start]]) -> list[Finish]:
    """Several lock-step batches at once, as a replay of several tasks: one steps while the others' answers come."""
    return [finish for some in await asyncio.gather(*(roll(policy, group) for group in groups)) for finish in some]


async def saturate(url: str, prompts: list[str], connections: int, seconds: float = 10.0) -> float:
    """Answers a second that the server gives to requests which cost nothing to make."""
    body = json.dumps({"model": "fake", "prompt": prompts, "max_tokens": 16, "temperature": 1.0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: loopback\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, port = url.split("/")[2].split(":")
    started = time.perf_counter()
    until = started + seconds

    async def one() -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        answers = 0
        while time.perf_counter() < until:
            writer.write(head + body)
            said = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(said.split("content-length: ")[1].split("\r\n")[0]))
            answers += len(prompts)
        writer.close()
        return answers

    answers = sum(await asyncio.gather(*(one() for _ in range(connections))))
    return answers / (time.perf_counter() - started)  # not / seconds: the last answers come after them


def _rest(turn: Turn) -> tuple[tuple[str, ...], bool, bool, object]:
    return turn.admissible, turn.won, turn.done, turn.state


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--groups", type=int, default=8, help="lock-step batches under way at once")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rollouts, options.steps, options.batch, options.concurrency, options.groups)
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<20} {value:,.3f}" if isinstance(value, float) else f"{name:<20} {value:,}")


if __name__ == "__main__":
    main()
