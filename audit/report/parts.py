"""What a page is made of: text, tables, figures, transcripts, and what is missing.

Knows: how a number, a missing number and a text from elsewhere are shown. Hides: nothing of what they mean. Data come
first: each section of the report gives parts, and the page only lays them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 4_000  # characters of one text on the page; what is cut is said
# Control characters, line separators, direction marks, lone surrogates: they break pages or make texts lie.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff0-\uffff\U000e0000-\U000e0fff]"
)


def plain(text: str) -> str:
    """The text with every character that is not seen written out (\\u2028), and cut where it is very long."""
    shown = _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text[: LONGEST + 1].replace("\r\n", "\n"))
    more = len(text) - LONGEST
    return shown if more <= 0 else f"{shown[:LONGEST]} … ({more:,} more characters)"


def short(text: str, width: int = 40) -> str:
    """One line of at most `width` characters."""
    line = " ".join(plain(str(text)).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def number(value: Any, digits: int = 3) -> str:
    """A figure as text: a true minus sign, no zero before the point below 1, a dash for what is missing."""
    if value is None or (isinstance(value, float) and not np.isfinite(value)) or value is pd.NA:
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (int, np.integer)):
        return f"{value:,}".replace("-", "−")
    shown = f"{float(value):.{digits}f}" if abs(float(value)) < 1000 else f"{float(value):,.0f}"
    if float(shown.replace(",", "")) == 0:
        shown = shown.lstrip("-")
    return re.sub(r"^(-?)0\.", r"\1.", shown).replace("-", "−")


def signed(value: Any, digits: int = 2) -> str:
    """A figure with its sign, as effects have one."""
    shown = number(value, digits)
    return shown if shown[0] in "−–" or not shown.strip("0.") else f"+{shown}"


def interval(low: Any, high: Any, show: Callable[[Any, int], str] = number, digits: int = 3) -> str:
    """[low, high], or a dash where there is none."""
    shown = show(low, digits), show(high, digits)
    return "–" if shown == ("–", "–") else f"[{shown[0]}, {shown[1]}]"


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph. kind: plain, how (how to read what follows), note, mark (what every output must say)."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True, slots=True)
class Missing:
    """What is not here, why, and the command that makes it."""

    what: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels with values, and a word beside some of them."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table to copy. columns: heading and whether it holds numbers. rows: cells as text. verdicts: the column whose
    word is set off, or None."""

    caption: str
    columns: tuple[tuple[str, bool], ...]
    rows: tuple[tuple[str, ...], ...]
    verdicts: int | None = None
    folded: bool = False

    @classmethod
    def of(
        cls,
        caption: str,
        frame: pd.DataFrame,
        names: Mapping[str, str] | None = None,
        *,
        verdict: str | None = None,
        digits: int = 3,
        folded: bool = False,
    ) -> Table:
        """A frame's columns (those in `names`, under these headings; default all) as a table. A column of texts without
        any is left out."""
        kept = dict(names) if names is not None else {str(c): str(c).replace("_", " ") for c in frame.columns}
        kept = {column: heading for column, heading in kept.items() if column in frame.columns}
        numeric = [pd.api.types.is_numeric_dtype(frame[column]) for column in kept]
        rows = [
            tuple(
                number(value, digits) if is_number or not isinstance(value, str) else value
                for value, is_number in zip(row, numeric, strict=True)
            )
            for row in frame[list(kept)].astype(object).itertuples(index=False, name=None)
        ]
        full = [i for i in range(len(kept)) if numeric[i] or any(row[i] not in ("", "–") for row in rows)]
        rows, numeric = [tuple(row[i] for i in full) for row in rows], [numeric[i] for i in full]
        kept = {column: kept[column] for column in (list(kept)[i] for i in full)}
        place = list(kept).index(verdict) if verdict in kept else None
        return cls(caption, tuple(zip(kept.values(), numeric, strict=True)), tuple(rows), place, folded)


@dataclass(frozen=True)
class Drawing:
    """A figure: its data and how it is drawn from them.

    name: of its files. title, how: what it is and how it is read. alt: what it shows, in words. frame: its data, as
    they go to the CSV. draw: puts it on an empty figure of size (width, height) in inches. shown: whether the page has
    it too (else its files only).
    """

    name: str
    title: str
    how: str
    frame: pd.DataFrame
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (6.0, 3.6)
    shown: bool = True
    alt: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a transcript. kind: its state. x, y: place on the strip (percent, pixels); text: all as shown."""

    number: int
    action: str
    observation: str
    wrote: str
    kind: str
    effect: str
    reason: str
    instead: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One trajectory: its line, and its transcript below."""

    label: str
    task: str
    outcome: str
    first: str
    steps: tuple[Step, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Timelines:
    """Trajectories under each other on one scale of steps. middle, height: of a strip, in pixels."""

    rows: tuple[Timeline, ...]
    middle: float
    height: float
    last: int


Part = Text | Missing | Facts | Table | Drawing | Timelines


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with its parts. `short` is its name in the list of contents."""

    title: str
    parts: Sequence[Part]
    short: str = ""
    level: int = 2
    inner: Sequence[Section] = field(default_factory=tuple)
