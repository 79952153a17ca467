"""Worlds that can be restored at any point. Imports nothing of audit or credit_signals.

`make(address)` opens one game, `games(spec)` lists the games of a set. Addresses and specs:

    PATH/game.tw-pddl        an ALFWorld game, compiled        FOLDER              all games below it
    tabular:NAME             a small world with exact truth    alfworld:SPLIT      official games (ALFWORLD_DATA)
    stock:PATH               any TextWorld game, stock engine  generated:N:SEED    games made here, no download
                                                               stock:SPEC          the same games, stock engine
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from envs.core import Environment, InputError, Turn

__all__ = ["Environment", "Game", "InputError", "Turn", "games", "make"]


@dataclass(frozen=True, slots=True)
class Game:
    """One game of a set.

    id: content hash, the same on every machine. name: readable, host-independent. task_type: None if unknown.
    address: what `make` opens here; local to this machine, so it is never written to a run directory.
    """

    id: str
    name: str
    task_type: str | None
    address: str


def make(address: str | Path) -> Environment:
    """Open one game. Raises InputError where there is none at that address."""
    kind, _, rest = str(address).partition(":")
    if kind == "tabular":
        from envs.tabular import tabular

        return tabular(rest)
    if kind == "stock":
        from envs.textworld import StockWorld

        return StockWorld(rest)
    path = Path(address)
    if path.is_dir():
        raise InputError(f"{address}: is a folder; give one game.tw-pddl, or list the folder with games().")
    if path.suffix == ".tw-pddl":
        from envs.alfworld.games import open_game

        return open_game(path)
    if path.suffix in (".z8", ".ulx"):
        raise InputError(f"{address}: a compiled TextWorld game is played by the stock engine; write stock:{address}.")
    raise InputError(
        f"{address}: no game of that kind; expected a path to a game.tw-pddl, tabular:<name> or stock:<path>."
    )


def games(spec: str | Path) -> list[Game]:
    """The games of a set, sorted by content id. Raises InputError where there are none, saying where it looked."""
    kind, _, rest = str(spec).partition(":")
    if kind == "stock":
        inner = [Game("", rest, None, rest)] if Path(rest).suffix in (".z8", ".ulx") else games(rest)
        return [
            Game(game.id or make(f"stock:{game.address}").game_id, game.name, game.task_type, f"stock:{game.address}")
            for game in inner
        ]
    if kind == "tabular":
        return [Game(make(spec).game_id, str(spec), None, str(spec))]

    from envs.alfworld import games as files

    if kind == "alfworld":
        found = files.find_games(files.split_folder(rest))
    elif kind == "generated":
        found = files.find_games(files.generated_folder(rest))
    elif Path(spec).suffix == ".tw-pddl":
        path = Path(spec)
        found = [files.Found(files.read_game(path).game_id, files.game_name(path), files.task_type(path), path)]
    else:
        found = files.find_games(Path(spec))
    return [Game(game.game_id, game.name, game.task_type, str(game.path)) for game in found]
