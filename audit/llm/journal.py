"""What was asked, answered and paid: one SQLite file that is both the cache of answers and the ledger of spending.

Knows: the purposes money is spent on, prices, caps, and that an answer and what it cost are written in one
transaction, so that a killed process has either both or neither. Hides: SQLite, torn writes (its write-ahead log
rolls them back) and the processes of a run that share one journal. No key is ever given to it.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from envs.core import InputError

Purpose = Literal["collect", "propose", "roll", "score", "judge"]
PURPOSES: tuple[str, ...] = get_args(Purpose)
_MANY = 500  # keys in one query

_purpose: ContextVar[Purpose | None] = ContextVar("purpose", default=None)


@contextmanager
def spending(purpose: Purpose) -> Iterator[None]:
    """Book every call made inside on this purpose (it follows asyncio tasks); the outermost one counts."""
    token = _purpose.set(_purpose.get() or purpose)
    try:
        yield
    finally:
        _purpose.reset(token)


def current_purpose(default: Purpose) -> Purpose:
    """What is being paid for, `default` where nobody said."""
    return _purpose.get() or default


class PolicyUnavailable(RuntimeError):
    """The model cannot be asked (server gone, key refused, wrong model): the run stops and can be resumed.

    Never turned into a failed rollout: a server that is away says nothing about the policy.
    """


class CapReached(PolicyUnavailable):
    """A hard cap on calls, tokens or cost is reached: raise the cap and repeat the command to go on."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals (never averages): calls, prompt tokens (cached ones included), cached tokens, completion tokens.

    untold: calls whose answer did not say what it took; their tokens are estimates.
    """

    calls: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    untold: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class Prices:
    """Price of a million tokens of each kind, in any one currency; 0 for a model of one's own."""

    prompt: float = 0.0
    cached: float = 0.0
    completion: float = 0.0

    def of(self, usage: Usage) -> float:
        """What a usage costs."""
        fresh = usage.prompt - usage.cached
        return (fresh * self.prompt + usage.cached * self.cached + usage.completion * self.completion) / 1e6


@dataclass(frozen=True, slots=True)
class Caps:
    """Hard limits on all that a journal ever pays for, over restarts and processes; None: no limit."""

    calls: int | None = None
    tokens: int | None = None
    cost: float | None = None

    def exceeded(self, usage: Usage, prices: Prices) -> str | None:
        """Which cap a usage is over, said with both figures; None if none."""
        if self.calls is not None and usage.calls > self.calls:
            return f"calls: cap {self.calls}"
        if self.tokens is not None and usage.tokens > self.tokens:
            return f"tokens: cap {self.tokens}"
        if self.cost is not None and prices.of(usage) > self.cost:
            return f"cost: cap {self.cost:g}"
        return None


class Journal:
    """Answers by key and spending by purpose. path: the SQLite file (made with its folder), None for memory only.

    Raises InputError where the file cannot be opened or is something else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._process = -1
        self._reserved = Usage()

    def _open(self) -> sqlite3.Connection:
        # A connection must not cross a fork: every process opens its own.
        if self._db is not None and self._process == os.getpid():
            return self._db
        try:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path or ":memory:", timeout=60, isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT) WITHOUT ROWID")
            db.execute("CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT)")
            db.execute(
                "CREATE TABLE IF NOT EXISTS ledger (purpose TEXT PRIMARY KEY, calls INTEGER, prompt INTEGER, "
                "cached INTEGER, completion INTEGER, untold INTEGER)"
            )
        except (OSError, sqlite3.Error) as error:
            raise InputError(
                f"{self.path}: cannot be opened as a journal of answers ({error}); name another file."
            ) from None
        self._db, self._process = db, os.getpid()
        return db

    def answers(self, keys: Sequence[str]) -> dict[str, Any]:
        """The answers that are already paid, by key."""
        found: dict[str, Any] = {}
        for first in range(0, len(keys), _MANY):
            some = keys[first : first + _MANY]
            places = ",".join("?" * len(some))
            rows = self._open().execute(f"SELECT key, answer FROM answers WHERE key IN ({places})", some)
            found.update((key, json.loads(answer)) for key, answer in rows)
        return found

    def record(self, purpose: str, usage: Usage, answers: Mapping[str, Any]) -> None:
        """Write answers and what they cost, both or neither. An answer that is there already stays as it is."""
        db = self._open()
        db.execute("BEGIN IMMEDIATE")
        try:
            db.executemany(
                "INSERT OR IGNORE INTO answers VALUES (?, ?)",
                [(key, json.dumps(answer, separators=(",", ":"), allow_nan=False)) for key, answer in answers.items()],
            )
            db.execute(
                "INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (purpose) DO UPDATE SET "
                "calls = calls + excluded.calls, prompt = prompt + excluded.prompt, "
                "cached = cached + excluded.cached, completion = completion + excluded.completion, "
                "untold = untold + excluded.untold",
                (purpose, usage.calls, usage.prompt, usage.cached, usage.completion, usage.untold),
            )
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")

    def spent(self) -> dict[str, Usage]:
        """Total usage of each purpose that has any, over all sessions."""
        rows = self._open().execute("SELECT purpose, calls, prompt, cached, completion, untold FROM ledger")
        found = {purpose: Usage(*counts) for purpose, *counts in rows}
        return {purpose: found[purpose] for purpose in PURPOSES if purpose in found}

    def total(self) -> Usage:
        """Usage of all purposes together."""
        row = (
            self._open()
            .execute("SELECT sum(calls), sum(prompt), sum(cached), sum(completion), sum(untold) FROM ledger")
            .fetchone()
        )
        return Usage(*(int(value or 0) for value in row))

    @contextmanager
    def reserved(self, expected: Usage, caps: Caps, prices: Prices) -> Iterator[None]:
        """Hold room for a call while it is under way.

        Raises CapReached, before anything is sent, if what is spent and under way and this call exceed a cap.
        """
        if caps != _NO_CAPS:
            spent = self.total()
            over = caps.exceeded(spent + self._reserved + expected, prices)
            if over is not None:
                raise CapReached(
                    f"The next call would go over the cap on {over} (total spent: {spent.calls} calls, {spent.tokens} "
                    f"tokens, cost {prices.of(spent):.4g}); raise it and repeat the command to go on."
                )
        self._reserved += expected
        try:
            yield
        finally:
            self._reserved += Usage(*(-getattr(expected, f.name) for f in fields(expected)))

    def fact(self, name: str) -> Any:
        """A stored finding about the server (a self-test, its capabilities), None if there is none."""
        row = self._open().execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def note(self, name: str, value: Any) -> None:
        """Store a finding about the server."""
        self._open().execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value, sort_keys=True)))

    def lines(self, prices: Prices) -> list[tuple[str, str]]:
        """The ledger for printing: a line for each purpose and the total; every figure is a total."""

        def line(usage: Usage) -> str:
            estimates = f", {usage.untold} calls without figures of their own" if usage.untold else ""
            return (
                f"total {usage.calls:,} calls, {usage.prompt:,} prompt tokens ({usage.cached:,} cached), "
                f"{usage.completion:,} completion tokens, cost {prices.of(usage):.4g}{estimates}"
            )

        return [*((purpose, line(usage)) for purpose, usage in self.spent().items()), ("all", line(self.total()))]

    def close(self) -> None:
        """Close the file; a later use opens it again."""
        if self._db is not None and self._process == os.getpid():
            self._db.close()
        self._db = None


_NO_CAPS = Caps()
