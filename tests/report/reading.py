"""A page read back by the parser of the standard library."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path


class Reader(HTMLParser):
    """tags, attributes (tag, name, value), ids, links, headings and the text a reader sees; the stylesheet apart."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.headings: list[str] = []
        self.styles: list[str] = []
        self.title = ""
        self._open: list[str] = []
        self._text: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def ids(self) -> list[str]:
        return [value for _, name, value in self.attributes if name == "id"]

    @property
    def links(self) -> list[str]:
        return [value for _, name, value in self.attributes if name in ("href", "src")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        now = self._open[-1] if self._open else ""
        if now == "style":
            self.styles.append(data)
            return
        if now == "title" and "svg" not in self._open:
            self.title += data
        if now == "h2":
            self.headings.append(data)
        self._text.append(data)


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader
