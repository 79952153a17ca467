"""Playing one game in a terminal, with undo and restore; also how a walkthrough is shown.

Knows: the conversation with a person. Hides: reading commands and the line of turns.
"""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from envs import Environment, InputError, Turn, games, make

HELP = ":undo  :restore N  :list  :quit"


def play(address: str, source: TextIO, out: TextIO, *, walkthrough: bool = False) -> bool:
    """Play a game from a stream of lines; True if it was won.

    address: what `envs.make` opens, or the spec of a set, of which the first game is played.
    Raises InputError if there is no such game, or no walkthrough where one is asked for.
    """
    address = _one_game(address)
    env = make(address)
    if walkthrough:
        return _follow(env, _walkthrough(address), out)
    line = [env.reset()]
    out.write(f"{line[0].observation}\n")
    while not line[-1].done:
        out.write(f"[{len(line) - 1}] > ")
        out.flush()
        entered = source.readline()
        command = entered.strip()
        if not entered or command == ":quit":
            out.write("\n")
            return False
        if command.startswith(":"):
            _special(command, line, env, out)
        elif command:
            line.append(env.step(line[-1].state, command))
            out.write(f"{line[-1].observation}\n")
    out.write("You won.\n" if line[-1].won else "The game is over.\n")
    return line[-1].won


def _one_game(address: str) -> str:
    single = address.startswith(("tabular:", "stock:")) or Path(address).is_file() or address.endswith(".tw-pddl")
    return address if single else games(address)[0].address


def _special(command: str, line: list[Turn], env: Environment, out: TextIO) -> None:
    word, _, rest = command.partition(" ")
    target = len(line) - 2 if word == ":undo" else int(rest) if rest.isascii() and rest.isdigit() else -1
    if word == ":list":
        out.write("".join(f"  {choice}\n" for choice in line[-1].admissible))
    elif word in (":undo", ":restore") and 0 <= target < len(line):
        del line[target + 1 :]
        line[-1] = env.restore(line[-1].state)
        out.write(f"(back at turn {target})\n{line[-1].observation}\n")
    elif word in (":undo", ":restore"):
        out.write(f"There is no such turn; turns 0 to {len(line) - 1} can be restored.\n")
    else:
        out.write(f"{HELP}\n")


def _walkthrough(address: str) -> tuple[str, ...]:
    from envs.alfworld.games import read_game

    if not address.endswith(".tw-pddl"):
        raise InputError(f"{address}: only ALFWorld game files carry a walkthrough.")
    commands = read_game(address.removeprefix("stock:")).walkthrough
    if not commands:
        raise InputError(f"{address}: this game file has no walkthrough.")
    return commands


def _follow(env: Environment, commands: tuple[str, ...], out: TextIO) -> bool:
    turn = env.reset()
    out.write(f"{turn.observation}\n")
    for command in commands:
        turn = env.step(turn.state, command)
        out.write(f"> {command}\n{turn.observation}\n")
    out.write(f"{'Won' if turn.won else 'Not won'} after {len(commands)} steps.\n")
    return turn.won
