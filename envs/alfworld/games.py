"""Game files: reading them, compiling them once, finding them.

Knows: the `game.tw-pddl` format, where games lie, the on-disk cache of compiled games. Hides: all of it behind
`open_game` and `find_games`. Files from others are data: nothing in them is run, and nothing in them names a path.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from envs.alfworld.generate import TASK_TYPES, write_games
from envs.alfworld.translate import FORMAT, CompiledGame, compile_game, content_id, from_json, to_json
from envs.alfworld.world import AlfredWorld, Dialect
from envs.core import InputError

GAME_FILE = "game.tw-pddl"
TRAJECTORY_FILE = "traj_data.json"
SPLITS = ("train", "valid_seen", "valid_unseen")
MAX_FILE = 20_000_000
_MAGIC = b"credit-audit compiled game\n"


@dataclass(frozen=True, slots=True)
class GameFile:
    """The contents of a game.tw-pddl, checked for shape only."""

    domain: str
    problem: str
    grammar: str
    walkthrough: tuple[str, ...] | None
    solvable: bool | None

    @property
    def game_id(self) -> str:
        """Content hash of what defines the game."""
        return content_id(self.domain, self.problem, self.grammar)


def read_game(path: str | Path) -> GameFile:
    """Read a game file. Raises InputError if it is missing, too large, not JSON, or lacks a part."""
    path = Path(path)
    data = _read_json(path)
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object with pddl_domain, pddl_problem and grammar.")
    for key in ("pddl_domain", "pddl_problem", "grammar"):
        if not isinstance(data.get(key), str):
            raise InputError(f"{path}: {key!r} is missing or not text; is this an ALFWorld game.tw-pddl?")
    walkthrough = data.get("walkthrough")
    if walkthrough is not None and not (
        isinstance(walkthrough, list) and all(isinstance(command, str) for command in walkthrough)
    ):
        raise InputError(f"{path}: 'walkthrough' must be a list of commands.")
    solvable = data.get("solvable")
    return GameFile(
        data["pddl_domain"],
        data["pddl_problem"],
        data["grammar"],
        None if walkthrough is None else tuple(walkthrough),
        solvable if isinstance(solvable, bool) else None,
    )


def _read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE:
            raise InputError(f"{path}: {path.stat().st_size} bytes; a game file has at most {MAX_FILE}.")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a JSON file ({str(error)[:120]}).") from None


def open_game(path: str | Path, *, dialect: Dialect = "game", cache: Path | None = None) -> AlfredWorld:
    """The compiled world of a game file; compiled at the first use, then read from the cache.

    cache: folder of compiled games (default `cache_folder()`).
    Raises InputError where the file is no ALFWorld game.
    """
    game = read_game(path)
    try:
        return AlfredWorld(compiled(game, cache), dialect=dialect)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


# The cache ----------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where what can be made again is kept: $AUDIT_CACHE, else the user's cache folder."""
    if os.environ.get("AUDIT_CACHE"):
        return Path(os.environ["AUDIT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credit-audit"


def compiled(game: GameFile, cache: Path | None = None) -> CompiledGame:
    """Compile a game, or read it from the cache. A cache that cannot be read or written is done without."""
    identifier = game.game_id
    file = (cache or cache_folder()) / f"games-{FORMAT}" / identifier[:2] / f"{identifier}.bin"
    found = _load(file, identifier)
    if found is not None:
        return found
    fresh = compile_game(game.domain, game.problem, game.grammar)
    _save(file, fresh)
    return fresh


def _load(file: Path, identifier: str) -> CompiledGame | None:
    """A cached game, or None if there is none or it is torn, foreign or of another shape."""
    try:
        raw = file.read_bytes()
        header = len(_MAGIC) + 32
        if not raw.startswith(_MAGIC) or hashlib.sha256(raw[header:]).digest() != raw[len(_MAGIC) : header]:
            return None
        game = from_json(json.loads(zlib.decompress(raw[header:])))
        return game if game.game_id == identifier else None
    except (OSError, ValueError, KeyError, TypeError, zlib.error):
        return None


def _save(file: Path, game: CompiledGame) -> None:
    """Write whole or not at all; concurrent writers each replace the file by an equal one."""
    payload = zlib.compress(json.dumps(to_json(game), separators=(",", ":")).encode(), 3)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".writing-")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise
    except OSError:
        return  # a read-only or full cache costs time, not the run


# Finding games --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """A game on disk: its content id, its name (`<task>/<trial>`), its task type if known, and its file."""

    game_id: str
    name: str
    task_type: str | None
    path: Path


def data_folder() -> Path:
    """Where official games are looked for: $ALFWORLD_DATA, else alfworld's own default."""
    return Path(os.environ.get("ALFWORLD_DATA") or Path.home() / ".cache" / "alfworld")


def split_folder(split: str) -> Path:
    """The folder of an official split. Raises InputError (where it looked, how to mend) if it is not there."""
    if split not in SPLITS:
        raise InputError(f"alfworld:{split}: unknown split; expected one of {', '.join(SPLITS)}.")
    root = data_folder()
    tried = [root / "json_2.1.1" / split, root / split]
    for folder in tried:
        if folder.is_dir():
            return folder
    raise InputError(
        f"alfworld:{split}: no games found; looked in {' and '.join(str(folder) for folder in tried)}. Set "
        f"ALFWORLD_DATA to the folder that holds json_2.1.1 (alfworld-download fills it), or use generated:60:0."
    )


def generated_folder(size: str) -> Path:
    """The folder of the generated games `<n>:<seed>`, made in the cache at the first use.

    Raises InputError where the size does not read as two whole numbers.
    """
    numbers = size.split(":")
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise InputError(f"generated:{size}: expected generated:<n>:<seed>, for instance generated:60:0.")
    n, seed = (int(number) for number in numbers)
    if not 1 <= n <= 100_000:
        raise InputError(f"generated:{size}: n must be between 1 and 100000.")
    folder = cache_folder() / "generated" / f"{version('alfworld')}-{n}-{seed}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
        write_games(n, seed, fresh)
        try:
            fresh.rename(folder)
        except OSError:  # somebody else was faster, with the same games
            shutil.rmtree(fresh)
    return folder


def find_games(folder: str | Path) -> list[Found]:
    """All playable games below a folder, in the order of their content ids (never of the file system).

    As in alfworld, movable-receptacle and sliced tasks and games marked unsolvable are left out.
    Raises InputError if the folder is missing or holds no game.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder of games.")
    found = sorted(_walk(folder), key=lambda game: (game.game_id, game.name))
    if not found:
        raise InputError(f"{folder}: holds no playable {GAME_FILE}, in no subfolder.")
    return found


def _walk(folder: Path) -> Iterator[Found]:
    for path in folder.rglob(GAME_FILE):
        where = str(path.parent)
        if "movable" in where or "Sliced" in where:
            continue
        game = read_game(path)
        if game.solvable is not False:
            yield Found(game.game_id, game_name(path), task_type(path), path)


def game_name(path: str | Path) -> str:
    """`<task>/<trial>`, which is the same on every machine."""
    parts = Path(path).resolve().parent.parts
    return "/".join(parts[-2:])


def task_type(path: str | Path) -> str | None:
    """The task type of a game from the traj_data.json beside it, else from its folder's name, else None."""
    path = Path(path)
    beside = path.parent / TRAJECTORY_FILE
    if beside.is_file():
        data = _read_json(beside)
        kind = data.get("task_type") if isinstance(data, dict) else None
        if isinstance(kind, str):
            return kind
    for kind in TASK_TYPES:
        if path.resolve().parent.parent.name.startswith(kind):
            return kind
    return None
