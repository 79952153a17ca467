"""From what a model wrote to the command it meant, with every repair on record.

Knows: thoughts and where they end, action lines, quotation marks, the two dialects of ALFWorld. Hides: the order of
the attempts. A repair never guesses: it changes the wording only where the result is a command of the game, and a
command that the game does not admit stays a real action of the policy. Nothing is matched as a substring.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PARSER = 1  # changes whenever the same text may give another command: part of a policy's identity

_THINK = re.compile(r"<(think|thinking|thought|reasoning)>.*?</\1>", re.DOTALL | re.IGNORECASE)
_OPEN_THINK = re.compile(r"<(think|thinking|thought|reasoning)>", re.IGNORECASE)
_CLOSE_THINK = re.compile(r"^.*</(think|thinking|thought|reasoning)>", re.DOTALL | re.IGNORECASE)
_ACTION = re.compile(r"^\W*(?:next )?(?:action|act|command)\W*?(?:\d+)?\W*?:\s*(.*)$", re.IGNORECASE)
_THOUGHT = re.compile(r"^\W*(?:thought|think|reasoning|reason|observation)\b\W*?(?:\d+)?\W*?:", re.IGNORECASE)
_MARKS = re.compile(r"^(?:>+|[-*•])\s+|^>|[`\"'*“”\[\]]|[.!]+\s*$")
_PUT = re.compile(r"put (.+?) (?:in/on|in|on|into|onto) (.+)")
_MOVE = re.compile(r"move (.+) to (.+)")
_ARTICLES = re.compile(r"\b(?:the|a|an) ")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A command, None with the reason where the text holds none. repairs: what was done to find it, in order."""

    command: str | None
    repairs: tuple[str, ...] = ()
    reason: str | None = None


def parse_command(text: str, admissible: Sequence[str], *, repair: bool = True) -> Parsed:
    """Read the command in a model's answer. repair: False takes the first line as it stands, thoughts aside."""
    repairs: list[str] = []

    def changed(name: str, before: str, after: str) -> str:
        if after != before:
            repairs.append(name)
        return after

    text = changed("thoughts", text, _CLOSE_THINK.sub("", _THINK.sub("", text)))
    if _OPEN_THINK.search(text):
        return Parsed(None, tuple(repairs), "the answer ends inside a thought; raise max_tokens")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not repair:
        return Parsed(lines[0], tuple(repairs)) if lines else Parsed(None, tuple(repairs), "the answer is empty")
    actions = [(match[1], i) for i, line in enumerate(lines) if (match := _ACTION.match(line))]
    if actions:
        found, place = actions[0]
        repairs.append("action line")
        if not found.strip("*`\"' ") and place + 1 < len(lines):  # the command stands on the next line
            found = lines[place + 1]
    else:
        spoken = [line for line in lines if not _THOUGHT.match(line)]
        if len(spoken) < len(lines):
            repairs.append("thoughts")
        if not spoken:
            return Parsed(
                None, tuple(repairs), "the answer holds a thought and no command" if lines else "the answer is empty"
            )
        found = spoken[0]
        if len(spoken) > 1:
            repairs.append("first line")
    if found in admissible:
        return Parsed(found, tuple(repairs))
    found = changed("marks", found, _MARKS.sub("", _MARKS.sub("", found.strip())).strip())
    found = changed("spaces", found, " ".join(found.split()))
    if found not in admissible:
        found = changed("case", found, found.lower())
    if not found:
        return Parsed(None, tuple(repairs), "the answer holds no command")
    if found not in admissible:
        for name, other in _rewordings(found):
            if other in admissible:
                return Parsed(other, (*repairs, name))
    return Parsed(found, tuple(repairs))


def _rewordings(command: str) -> list[tuple[str, str]]:
    """(name of the repair, other wording) of a command, tried in this order."""
    found: list[tuple[str, str]] = []
    for base, prefix in ((command, ""), (_ARTICLES.sub("", command), "articles")):
        if prefix:
            found.append((prefix, base))
        name = f"{prefix}, dialect" if prefix else "dialect"
        if match := _PUT.fullmatch(base):
            found += [(name, f"move {match[1]} to {match[2]}"), (name, f"put {match[1]} in/on {match[2]}")]
        if match := _MOVE.fullmatch(base):
            found += [(name, f"put {match[1]} in/on {match[2]}")]
    return found
