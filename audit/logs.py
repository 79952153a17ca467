"""Files of trajectories: our own, and the logs that other people's agents left.

Knows: how four kinds of log are written. Hides: reading files that nobody vouches for. A log is data: nothing in it
is run, nothing in it names a path, its size is bounded, and every entry is read or refused with its reason.

The kinds, told apart by content:

    knowagent   JSON lines {name, result, traj}. `traj` is text: lines `> Think:` and `> ActionPath:` (spelt exactly
                so) were kept from the game, every other `> ` line was sent to it, the lines after it are the answer.
                Also `> think:` was sent, and answered. `result` 0 marks a run that its context length cut short.
    adapt       one JSON object {group: {name: {problem, trace, plans, reward}}}. `trace` joins, in order, the
                transcripts of the sub-plans that succeeded; what failed attempts did is not in it and left nothing
                behind in the game either (every trace replays from a fresh game). Each transcript goes on after a
                prompt, so its first line lacks the `> `; it ends in an empty prompt. `> think:` is answered `OK.`.
    expert      JSON lines {game, conversation: [{from: human | gpt, value}]}: the game's text and the commands, in
                turn. No outcome is recorded.
    audit       JSON lines of `Trajectory.to_json`. To import one, game_name and commands are needed; used where
                given: game (content id), observations (one more than commands, or null), won, policy, budget,
                logprobs, texts, origin.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from audit.records import Status, Trajectory, content_id
from envs.core import InputError

Kind = Literal["knowagent", "adapt", "expert", "audit"]

MAX_LINE = 8_000_000  # bytes
MAX_DOCUMENT = 200_000_000  # bytes of a log that is one JSON document
MAX_ACTIONS = 2_000
MAX_COMMAND = 2_000  # characters
MAX_NAME = 500  # characters
_PROBED_LINES = 20


@dataclass(slots=True)
class Step:
    """command: as written. observation: the answer, None if the log kept none. text: all that the policy wrote
    for it, None where that is the command itself."""

    command: str
    observation: str | None = None
    text: str | None = None


@dataclass(slots=True)
class Entry:
    """An entry of a log as it was read. number: its line, or its place in the document, from 1.

    name: the game it names. intro: the first text. won: the outcome it claims, None if it claims none.
    digest: content id of the entry. kept: the fields of an entry of our own. facts, notes: for its certificate.
    """

    number: int
    name: str
    intro: str | None
    steps: list[Step]
    won: bool | None
    digest: str
    kept: Mapping[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Refused:
    """An entry that could not be read, why, and the game it names if that much could be read."""

    number: int
    name: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Log:
    """All entries of a log in its order. notes: what it holds besides entries."""

    kind: Kind
    entries: tuple[Entry | Refused, ...]
    notes: tuple[str, ...]


class _Bad(ValueError):
    """Why something cannot be used; turned into a Refused or an InputError by whoever knows where it was."""


def read_log(path: str | Path, kind: Kind | None = None) -> Log:
    """Read a log. kind: told from its content if None.

    Raises InputError where the file cannot be read or is of no known kind.
    """
    path = Path(path)
    if kind is not None and kind not in get_args(Kind):
        raise InputError(f"kind is {kind!r}; expected one of {', '.join(get_args(Kind))}.")
    notes: list[str] = []
    try:
        kind = kind or _kind(path)
        entries = tuple(_document_entries(path, notes) if kind == "adapt" else _line_entries(path, kind))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path.") from None
    return Log(kind, entries, tuple(notes))


def _kind(path: Path) -> Kind:
    """The kind of a log, from the fields of its first readable line, else from the document as a whole."""
    probed = 0
    for _, raw, _ in _raw_lines(path):
        probed += 1
        try:
            data = _parse(raw)
        except _Bad:
            data = None
        for kind, (keys, _) in _LINE_KINDS.items():
            if isinstance(data, dict) and all(key in data for key in keys):
                return kind
        if probed >= _PROBED_LINES:
            break
    if probed == 0:
        raise InputError(f"{path}: is empty; expected a log of trajectories.")
    try:
        data = _document(path)
    except InputError:
        data = None
    groups = [group for group in data.values() if isinstance(group, dict)] if isinstance(data, dict) else []
    if any(isinstance(entry, dict) and "trace" in entry for group in groups for entry in group.values()):
        return "adapt"
    raise InputError(
        f"{path}: is no log of a known kind; expected JSON lines with name and traj (knowagent), game and conversation "
        f"(expert) or game_name and commands (audit), or one JSON object of groups of entries with a trace (adapt)."
    )


# Bytes to JSON --------------------------------------------------------------------------------------------------


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes | None, bool]]:
    """(number from 1, the line or None if it is too long, whether it is ended) of every line that is not blank."""
    with path.open("rb") as stream:
        number = 0
        while raw := stream.readline(MAX_LINE + 1):
            number += 1
            ended, too_long = raw.endswith(b"\n"), len(raw) > MAX_LINE
            while too_long and not ended and (rest := stream.readline(MAX_LINE)):
                ended = rest.endswith(b"\n")
            if raw.strip():
                yield number, None if too_long else raw, ended


def _parse(raw: bytes | None, ended: bool = True) -> Any:
    """JSON of bytes. Raises _Bad with the reason; a key that occurs twice would silently lose one of its values."""
    if raw is None:
        raise _Bad(f"too long: more than {MAX_LINE} bytes")
    try:
        data = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_constant)
        if b"\\u" in raw:  # half a surrogate pair is valid JSON and invalid text
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        if not ended:
            raise _Bad("torn: the file ends within it") from None
        if isinstance(error, UnicodeError):
            raise _Bad("not UTF-8 text") from None
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
        raise _Bad(f"not readable as JSON: {why}") from None
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {_clip(twice)} occurs twice in one object")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _document(path: Path) -> Any:
    if path.stat().st_size > MAX_DOCUMENT:
        raise InputError(f"{path}: {path.stat().st_size} bytes; a log in one JSON document has at most {MAX_DOCUMENT}.")
    try:
        return _parse(path.read_bytes())
    except _Bad as error:
        raise InputError(f"{path}: {error}.") from None


# JSON to entries ------------------------------------------------------------------------------------------------


def _line_entries(path: Path, kind: Kind) -> Iterator[Entry | Refused]:
    keys, reader = _LINE_KINDS[kind]
    for number, raw, ended in _raw_lines(path):
        try:
            data = _parse(raw, ended)
        except _Bad as error:
            yield Refused(number, None, str(error))
        else:
            yield _entry(number, data, keys[0], reader)


def _document_entries(path: Path, notes: list[str]) -> Iterator[Entry | Refused]:
    data = _document(path)
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected one JSON object of groups of entries.")
    number = 0
    for group, entries in data.items():
        if not isinstance(entries, dict):
            number += 1
            yield Refused(number, None, f"no group of entries: {_clip(group)} is no JSON object")
        elif group == "overall" and not any(isinstance(entry, dict) for entry in entries.values()):
            notes.append("'overall' is the log's own summary and holds no entry")
        else:
            for name, entry in entries.items():
                number += 1
                yield _entry(number, {"name": name, "entry": entry}, "name", _adapt)


def _entry(number: int, data: Any, named: str, reader: Callable[[int, Any], Entry]) -> Entry | Refused:
    name = data.get(named) if isinstance(data, dict) else None
    name = name if isinstance(name, str) and len(name) <= MAX_NAME else None
    try:
        entry = reader(number, data)
        if name is None:
            raise _Bad(f"too long: a name of more than {MAX_NAME} characters")
        if not entry.steps:
            raise _Bad("no action is recorded" + "".join(f"; {note}" for note in entry.notes))
        if len(entry.steps) > MAX_ACTIONS:
            raise _Bad(f"too long: {len(entry.steps)} actions, at most {MAX_ACTIONS} are read")
        if any(len(step.command) > MAX_COMMAND for step in entry.steps):
            raise _Bad(f"too long: a command of more than {MAX_COMMAND} characters")
    except _Bad as error:
        return Refused(number, name, str(error))
    except RecursionError:
        return Refused(number, name, "not readable as JSON: nested too deeply")
    return entry


def _knowagent(number: int, data: Any) -> Entry:
    name, text = _string(data, "name"), _string(data, "traj")
    intro, steps, after = _transcript(text.split("\n"), ("Think:", "ActionPath:"))
    won = _outcome(data, "result")
    return Entry(number, name, intro, steps, won, content_id(data), facts={"thoughts_after": after})


def _adapt(number: int, data: Any) -> Entry:
    name, entry = _string(data, "name"), data["entry"]
    lines, transcripts = _unfold(_string(entry, "trace"))
    _, steps, after = _transcript(lines, ("think:",))
    intro, plans = entry.get("problem"), entry.get("plans")
    failed = sum(
        isinstance(plan, str) and plan.endswith("success: False") for plan in (plans if isinstance(plans, list) else ())
    )
    return Entry(
        number,
        name,
        intro if isinstance(intro, str) else None,
        steps,
        _outcome(entry, "reward"),
        content_id(data),
        facts={"thoughts_after": after, "transcripts": transcripts, "failed_attempts": failed},
        notes=[f"what {failed} failed attempts did is not in the log"] if failed else [],
    )


def _unfold(trace: str) -> tuple[list[str], int]:
    """The lines of an ADaPT trace with every prompt in its place, and how many transcripts it joins.

    A bare `>` that a blank line (or the end) follows is where a transcript stopped; the line after it goes on
    after a prompt that is not written. A bare `>` that is answered is an empty command.
    """
    lines = trace.split("\n")
    unfolded: list[str] = []
    transcripts, stopped = 0, True
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.strip() == ">" and not following.strip():
            stopped = True
        elif line.strip():
            transcripts += stopped
            unfolded.append(f">{line}" if stopped and not line.startswith(">") else line)
            stopped = False
    return unfolded, transcripts


def _transcript(lines: Iterable[str], thoughts: tuple[str, ...]) -> tuple[str | None, list[Step], int]:
    """(the first text, the steps, how many thoughts follow the last one) of a transcript whose prompts are `>`.

    Lines that begin with one of `thoughts` were not sent to the game; they are part of what the policy wrote for
    its next command.
    """
    intro: list[str] = []
    steps: list[Step] = []
    thought: list[str] = []
    for line in lines:
        if line.startswith(">"):
            written = line[1:].strip()
            thought.append(written)
            if not written.startswith(thoughts):
                steps.append(Step(written, None, "\n".join(thought) if len(thought) > 1 else None))
                thought = []
        elif thought:
            if line.strip() not in ("", "OK."):
                thought[-1] += f"\n{line}"
        elif not steps:
            intro.append(line)
        elif line.strip():
            steps[-1].observation = _joined(steps[-1].observation, line)
    return "\n".join(intro).strip("\n") or None, steps, len(thought)


def _expert(number: int, data: Any) -> Entry:
    name, turns = _string(data, "game"), data.get("conversation")
    if not isinstance(turns, list):
        raise _Bad("'conversation' is no list")
    intro: str | None = None
    steps: list[Step] = []
    for position, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or turn.get("from") not in ("human", "gpt"):
            raise _Bad(f"a turn of the conversation is neither of human nor of gpt: turn {position}")
        value = _string(turn, "value")
        if turn["from"] == "gpt":
            steps.append(Step(value))
        elif steps:
            steps[-1].observation = _joined(steps[-1].observation, value)
        else:
            intro = _joined(intro, value)
    return Entry(number, name, intro, steps, None, content_id(data))


def _own(number: int, data: Any) -> Entry:
    kept = _checked(data, ("game_name", "commands"))
    commands = kept["commands"]
    observations = kept.get("observations") or [None] * (len(commands) + 1)
    texts = kept.get("texts") or [None] * len(commands)
    steps = [Step(*parts) for parts in zip(commands, observations[1:], texts, strict=True)]
    notes = ["the recorded run ended in an error"] if kept.get("status") == "error" else []
    return Entry(
        number, kept["game_name"], observations[0], steps, kept.get("won"), content_id(data), kept, notes=notes
    )


_LINE_KINDS: dict[Kind, tuple[tuple[str, str], Callable[[int, Any], Entry]]] = {
    "knowagent": (("name", "traj"), _knowagent),
    "expert": (("game", "conversation"), _expert),
    "audit": (("game_name", "commands"), _own),
}


def _joined(before: str | None, line: str) -> str:
    return line if before is None else f"{before}\n{line}"


def _string(data: Any, key: str) -> str:
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, str):
        raise _Bad(f"{key!r} is missing or no text")
    return value


def _outcome(data: Mapping[str, Any], key: str) -> bool | None:
    """True, False, 1 or 0; None for anything else, which says nothing certain."""
    value = data.get(key)
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def _clip(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


# Our own files --------------------------------------------------------------------------------------------------


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(item is None or isinstance(item, str) for item in value)


def _logprob(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value) and value <= 0)


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (lambda value: isinstance(value, str), "text"),
    "game": (lambda value: isinstance(value, str), "text"),
    "game_name": (lambda value: isinstance(value, str), "text"),
    "policy": (lambda value: isinstance(value, str), "text"),
    "task_type": (lambda value: value is None or isinstance(value, str), "text or null"),
    "budget": (lambda value: type(value) is int and value >= 1, "a whole number from 1"),
    "commands": (lambda value: _texts(value) and None not in value, "a list of texts"),
    "observations": (lambda value: value is None or _texts(value), "a list of texts and nulls"),
    "texts": (lambda value: value is None or _texts(value), "a list of texts and nulls"),
    "won": (lambda value: isinstance(value, bool), "true or false"),
    "status": (lambda value: value in get_args(Status), f"one of {', '.join(get_args(Status))}"),
    "logprobs": (
        lambda value: value is None or (isinstance(value, list) and all(_logprob(item) for item in value)),
        "a list of finite numbers, none above 0, and nulls",
    ),
    "origin": (lambda value: value is None or isinstance(value, dict), "an object"),
    "certificate": (lambda value: value is None or isinstance(value, dict), "an object"),
}


def _checked(data: Any, required: Iterable[str]) -> dict[str, Any]:
    """The fields of a trajectory, each of its shape and length. Raises _Bad."""
    if not isinstance(data, dict):
        raise _Bad("not a JSON object")
    for key in required:
        if key not in data:
            raise _Bad(f"{key!r} is missing")
    for key, (fits, shape) in _SHAPES.items():
        if key in data and not fits(data[key]):
            raise _Bad(f"{key!r} is not {shape}")
    n = len(data["commands"])
    for key, length in (("observations", n + 1), ("texts", n), ("logprobs", n)):
        if data.get(key) is not None and len(data[key]) != length:
            raise _Bad(f"{key!r} has {len(data[key])} items; {n} commands need {length}")
    try:
        content_id(data.get("origin"), data.get("certificate"))
    except ValueError:
        raise _Bad("'origin' or 'certificate' holds a number that is not finite") from None
    return {key: value for key, value in data.items() if key in _SHAPES}


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> int:
    """Write trajectories as JSON lines (`Trajectory.to_json`), whole or not at all; returns how many there were.

    Raises InputError where the file cannot be written.
    """
    path = Path(path)
    n = 0
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        try:
            with os.fdopen(handle, "w", encoding="ascii", newline="\n") as stream:
                for trajectory in trajectories:
                    stream.write(json.dumps(trajectory.to_json(), allow_nan=False) + "\n")
                    n += 1
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); check the folder.") from None
    return n


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """Read what `write_trajectories` wrote, in its order.

    Raises InputError naming the line that is torn, no JSON, lacks a field, has one of another shape, or whose `id`
    does not follow from what it holds (it was changed since).
    """
    path = Path(path)
    trajectories: list[Trajectory] = []
    try:
        for number, raw, ended in _raw_lines(path):
            try:
                data = _checked(_parse(raw, ended), ("game", "game_name", "budget", "commands", "won"))
                trajectory = Trajectory.from_json(data)
                if data.get("id", trajectory.id) != trajectory.id:
                    raise _Bad("its id does not follow from its content; restore the line, or remove the id")
            except _Bad as error:
                raise InputError(f"{path}, line {number}: {error}.") from None
            trajectories.append(trajectory)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path.") from None
    return trajectories
