"""Figures as files and as part of the page.

Knows: a figure must read on paper, on white and on black, and come out the same bytes every time. Hides: matplotlib's
settings, and how an SVG is made safe to stand in a page: parsed, kept to the elements that figures need, its ids made
unique, its style attributes turned into classes of the page's one stylesheet (which a strict policy can name by hash),
each colour with a partner for dark screens.
"""

from __future__ import annotations

import colorsys
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd

from audit.report.parts import Drawing, plain

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ELEMENTS = {"svg", "g", "defs", "clipPath", "path", "use", "rect", "text", "tspan"}
ATTRIBUTES = {"class", "clip-path", "d", "height", "id", "transform", "viewBox", "width", "x", "y", "href"}
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, copied and read aloud
    "text.parse_math": False,  # names of signals and games are not formulas
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#57606a",
    "axes.labelcolor": "#24292f",
    "text.color": "#24292f",
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
    "xtick.labelcolor": "#24292f",
    "ytick.labelcolor": "#24292f",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "legend.fontsize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_FONT = re.compile(r"(font: [^;']*)'[^;]*")
_HARMLESS = re.compile(r"[#\w\s.,:;()%'-]*")


def dark(colour: str) -> str:
    """The partner of a colour on a dark ground: greys change places, hues are lightened until they read."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, strength = colorsys.rgb_to_hls(red, green, blue)
    if max(red, green, blue) - min(red, green, blue) < 0.08:
        light = 0.07 + 0.88 * (1 - light)
    elif light > 0.75:  # a pale ground for a band stays a ground
        light, strength = 0.28, min(strength, 0.45)
    else:
        light = max(light, 0.64)
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, strength))


class Sheet:
    """The rules that figures need, gathered over a page."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, style: str) -> str:
        """The class of a style attribute. A style with anything but plain values is refused."""
        if not _HARMLESS.fullmatch(style) or "url" in style.replace("url(#", ""):
            raise ValueError(f"unexpected style in a figure: {style[:80]!r}")
        return self._names.setdefault(style, f"f{len(self._names)}")

    def rules(self) -> str:
        """For all screens, then what differs on dark ones."""
        usual = [f".{name}{{{style}}}" for style, name in self._names.items()]
        changed = []
        for style, name in self._names.items():
            parts = [part.strip() for part in style.split(";") if _COLOUR.search(part)]
            if parts:
                swapped = ";".join(_COLOUR.sub(lambda found: dark(found[0]), part) for part in parts)
                changed.append(f".{name}{{{swapped}}}")
        return "\n".join([*usual, "@media screen and (prefers-color-scheme: dark) {", *changed, "}"])


def draw(drawing: Drawing, folder: Path, sheet: Sheet) -> str:
    """Write NAME.csv, NAME.png and NAME.svg to the folder; the figure as inline SVG for the page, "" if not shown."""
    import matplotlib
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    tidy(drawing.frame).to_csv(folder / f"{drawing.name}.csv", index=False, lineterminator="\n")
    settings: Any = {**SETTINGS, "svg.hashsalt": drawing.name}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")  # scripts that the font lacks
        figure = Figure(figsize=drawing.size, layout="constrained")
        drawing.draw(figure)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(folder / f"{drawing.name}.png", dpi=160, facecolor="white", metadata={"Software": None})
    text = plain_lines(stream.getvalue())
    (folder / f"{drawing.name}.svg").write_text(text, encoding="utf-8")
    return inline(text, drawing.name, sheet) if drawing.shown else ""


def tidy(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with texts that any program can read (no control characters, no lone surrogates)."""
    texts = [c for c in frame.columns if frame[c].dtype == object or isinstance(frame[c].dtype, pd.StringDtype)]
    cleaned = {c: frame[c].map(lambda v: plain(v) if isinstance(v, str) else v) for c in texts}
    return frame.assign(**cleaned).rename(columns=lambda c: plain(str(c)))


def plain_lines(text: str) -> str:
    """`plain` of a whole document: line by line, without a limit."""
    return "\n".join(line if line.isascii() and line.isprintable() else _whole(line) for line in text.split("\n"))


def _whole(line: str) -> str:
    return "".join(plain(line[i : i + 1000]) for i in range(0, len(line), 1000))


def inline(text: str, name: str, sheet: Sheet) -> str:
    """A figure's SVG for the page: known elements and attributes only, ids its own, styles as classes."""
    root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", text))
    parts = ["".join(_written(child, name, sheet)) for child in root]
    _, _, width, height = root.get("viewBox", "0 0 1 1").split()
    frame = f'viewBox="0 0 {float(width):g} {float(height):g}" width="{float(width):g}" height="{float(height):g}"'
    return f'<svg class="figure" {frame} role="img" aria-labelledby="{name}-title">{"".join(parts)}</svg>'


def _written(element: ElementTree.Element, name: str, sheet: Sheet) -> Iterator[str]:
    tag = element.tag.removeprefix(f"{{{SVG}}}")
    if tag not in ELEMENTS:  # metadata, and a stylesheet whose one rule the page has
        return
    attributes = []
    for key, value in element.attrib.items():
        key = key.removeprefix(f"{{{XLINK}}}")
        if key == "style":
            key, value = "class", sheet.name(_FONT.sub(r"\1system-ui, sans-serif", value))
        if key not in ATTRIBUTES:
            continue
        if key == "id":
            value = f"{name}-{value}"
        elif key == "href":
            if not value.startswith("#"):
                continue
            value = f"#{name}-{value[1:]}"
        elif key == "clip-path":
            value = value.replace("url(#", f"url(#{name}-")
        attributes.append(f' {key}="{_escaped(value)}"')
    yield f"<{tag}{''.join(attributes)}>"
    yield _escaped((element.text or "").strip("\n"))
    for child in element:
        yield from _written(child, name, sheet)
    yield f"</{tag}>"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
