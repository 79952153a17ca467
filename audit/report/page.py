"""From sections to one file.

Knows: what a page made of other people's data may contain. Everything from data is text, escaped; there is no script
and no image, and the one stylesheet is named by its hash, so that even a mistake here could not run anything or fetch
anything. Hides: jinja, the stylesheet, the naming of figure files.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from audit.report.parts import Drawing, Facts, Missing, Section, Table, Text, Timelines, plain
from audit.report.svg import Sheet, draw
from audit.store import write_whole

ENDINGS = ("svg", "png", "csv")


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A figure on the page. files: ending and relative address of each file."""

    drawing: Drawing
    svg: Markup
    files: tuple[tuple[str, str], ...]


def write_page(title: str, subtitle: str, sections: Sequence[Section], out: Path) -> list[Path]:
    """Write the page to `out` and its figures to the folder of the same name beside it; all paths written."""
    folder = out.with_suffix("")
    sheet = Sheet()
    written: list[Path] = []
    drawn: dict[int, _Drawn] = {}
    for part in (part for section in sections for part in section.parts):
        if isinstance(part, Drawing):
            svg = draw(part, folder, sheet)
            paths = [folder / f"{part.name}.{ending}" for ending in ENDINGS]
            links = tuple((e, quote(f"{folder.name}/{p.name}")) for e, p in zip(ENDINGS, paths, strict=True))
            drawn[id(part)] = _Drawn(part, Markup(svg), links)  # built element by element
            written += paths
    css = _file("report.css") + sheet.rules() + "\n"
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    text = _template().render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        css=Markup(css),
        policy=policy,
        kind_of=_kind,
        verdict=_verdict,
        drawn=lambda part: drawn[id(part)],
    )
    write_whole(out, text)
    return [out, *written]


def _kind(part: Any) -> str:
    kinds = {
        Text: "text",
        Missing: "missing",
        Facts: "facts",
        Table: "table",
        Drawing: "drawing",
        Timelines: "timelines",
    }
    return kinds[type(part)]


def _verdict(word: str) -> str:
    """The class of a verdict: of the words this package uses, none for any other."""
    known = ("pivotal", "inconclusive", "better", "worse")
    return word.replace(" ", "-") if word in known else ""


def _file(name: str) -> str:
    return (files("audit.report") / "templates" / name).read_text(encoding="utf-8")


def _shown(value: Any) -> Any:
    """Every text that reaches the page passes here (then it is escaped)."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    return environment.from_string(_file("report.html"))
