"""From a history to a prompt: templates as files, a window over the turns, pieces that are tokenised on their own.

Knows: the blocks of a template (Jinja2, sandboxed) and which turns fit a window. Hides: rendering and its memo.

A template has the blocks `first` (given `observation`, `admissible`), `turn` (`command`, `observation`), `dropped`
(where older turns are left out), `ask` (`admissible`, `observation`) and, optionally, `system`, `judged` and
`outcome` (`condition`: success or failure; without it the policy has no outcome-conditioned twin). `{{ cut }}` in a
block ends a piece: a prompt of token ids is the pieces' ids in a row, so tokens never span a piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from audit.policies import History
from envs.core import InputError

SHIPPED = ("admissible", "react", "transcript")
CUT = "\x1f"
_MEMO = 50_000
_NEEDED = ("first", "turn", "ask")


def first_observation(text: str) -> str:
    """The first observation without the line with which the stock engine greets."""
    lines = text.strip().splitlines()
    return "\n".join(lines[1:] if lines and lines[0].startswith("-= Welcome") else lines).strip()


class Template:
    """One prompt template. Raises InputError if it does not parse, lacks a block or uses an unknown name."""

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        self.digest = hashlib.sha256(source.encode()).hexdigest()[:32]
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
        )
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"{name}: line {error.lineno}: {error.message}.") from None
        missing = [block for block in _NEEDED if block not in self._template.blocks]
        if missing:
            raise InputError(f"{name}: has no block {missing[0]!r}; a template needs {', '.join(_NEEDED)}.")
        self._memo: dict[tuple[Any, ...], tuple[str, ...]] = {}

    @classmethod
    def load(cls, name: str, folder: Path) -> Template:
        """A shipped template by name, or a file (relative to `folder`)."""
        if name in SHIPPED:
            file = resources.files("audit") / "policies" / "templates" / f"{name}.jinja"
            return cls(file.read_text(encoding="utf-8"), name)
        path = folder / name
        try:
            return cls(path.read_text(encoding="utf-8"), path.name)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{name}: no such template ({error}); expected one of {', '.join(SHIPPED)} or a file."
            ) from None

    def has(self, block: str) -> bool:
        """Whether the template has a block."""
        return block in self._template.blocks

    def pieces(self, block: str, **values: Any) -> tuple[str, ...]:
        """The pieces of a rendered block (none where it is empty)."""
        key = (block, *values.values())
        found = self._memo.get(key)
        if found is None:
            if len(self._memo) >= _MEMO:
                self._memo.clear()
            clean = {k: v.replace(CUT, " ") if isinstance(v, str) else v for k, v in values.items()}
            context = self._template.new_context({**clean, "cut": CUT})
            try:
                text = "".join(self._template.blocks[block](context))
            except jinja2.TemplateError as error:
                raise InputError(f"{self.name}: block {block}: {error}.") from None
            found = self._memo[key] = tuple(piece for piece in text.split(CUT) if piece)
        return found

    def parts(self, history: History, condition: str | None) -> Parts:
        """The prompt of a history before any window: what comes first, each turn, and the question at the end."""
        line = history.line()
        opening = first_observation(line[0].turn.observation)
        first = self.pieces("first", observation=opening, admissible=line[0].turn.admissible)
        turns = [
            self.pieces("turn", command=moment.command, observation=moment.turn.observation.strip())
            for moment in line[1:]
        ]
        outcome = () if condition is None else self.pieces("outcome", condition=condition)
        now = history.turn.observation.strip() if line[1:] else opening
        ask = self.pieces("ask", admissible=history.turn.admissible, observation=now)
        dropped = self.pieces("dropped") if self.has("dropped") else ()
        return Parts(first, turns, dropped, (*outcome, *ask))

    def system(self) -> str:
        """The system message, empty where the template has none."""
        return "".join(self.pieces("system")) if self.has("system") else ""


class Parts:
    """A prompt in pieces. first, dropped, last: pieces; turns: pieces of each turn, the oldest first."""

    __slots__ = ("dropped", "first", "last", "turns")

    def __init__(
        self, first: tuple[str, ...], turns: Sequence[tuple[str, ...]], dropped: tuple[str, ...], last: tuple[str, ...]
    ) -> None:
        self.first, self.turns, self.dropped, self.last = first, turns, dropped, last

    def all_pieces(self) -> Iterable[str]:
        """Every piece that any window may need."""
        yield from self.first
        yield from self.dropped
        for turn in self.turns:
            yield from turn
        yield from self.last

    def text(self, window_turns: int) -> str:
        """The prompt as text with the newest turns only (0: all of them)."""
        return "".join(self._joined(self._kept(window_turns)))

    def ids(
        self, ids: Mapping[str, Sequence[int]], window_turns: int, window_tokens: int, first_tokens: int, reserve: int
    ) -> tuple[int, ...]:
        """The prompt as token ids: the newest whole turns that fit `window_tokens` with `reserve` tokens to spare.

        first_tokens: the beginning is cut to so many (0: never). At least the question remains.
        """
        first = [i for piece in self.first for i in ids[piece]]
        if first_tokens:
            first = first[:first_tokens]
        last = [i for piece in self.last for i in ids[piece]]
        turns = [[i for piece in turn for i in ids[piece]] for turn in self.turns[self._kept(window_turns) :]]
        dropped = [i for piece in self.dropped for i in ids[piece]]
        start = 0
        if window_tokens:
            room = window_tokens - reserve - len(first) - len(last)
            used = 0
            start = len(turns)
            while start > 0:
                mark = len(dropped) if start - 1 > 0 or len(turns) < len(self.turns) else 0
                if used + len(turns[start - 1]) + mark > room:
                    break
                used += len(turns[start - 1])
                start -= 1
        left_out = start > 0 or len(turns) < len(self.turns)
        middle = [i for turn in turns[start:] for i in turn]
        return (*first, *(dropped if left_out else ()), *middle, *last)

    def _kept(self, window_turns: int) -> int:
        return max(0, len(self.turns) - window_turns) if window_turns else 0

    def _joined(self, start: int) -> Iterable[str]:
        yield from self.first
        if start:
            yield from self.dropped
        for turn in self.turns[start:]:
            yield from turn
        yield from self.last
