"""Commands about worlds: doctor, games list, play and generate."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from envs.core import InputError


@click.command()
@click.option("--server", help="Address of an OpenAI-compatible server, ending in /v1.")
@click.option("--model", help="The model to ask it for.")
@click.option("--key-env", help="Environment variable that holds the server's key.")
def doctor(server: str | None, model: str | None, key_env: str | None) -> None:
    """Say what is installed, which data is found where, and play one game as a self-check; or, with --server, what a
    language-model server can do and what an audit can do with it.

    \b
    Examples:  audit doctor
               audit doctor --server http://127.0.0.1:8000/v1 --model MODEL
    """
    if server is not None:
        _examine_server(server, model, key_env)
        return
    from audit import doctor as checks

    findings = checks.examine()
    for finding in findings:
        click.echo(f"{finding.mark:<5} {finding.subject:<24} {finding.detail}")
    if any(finding.mark == "FAIL" for finding in findings):
        sys.exit(1)


def _examine_server(server: str, model: str | None, key_env: str | None) -> None:
    import asyncio

    from audit.llm.capabilities import capabilities

    if model is None:
        raise InputError("--server needs --model, the name of the model to ask it for.")
    found = asyncio.run(capabilities(server, model, key_env=key_env))
    for name, value in found.lines():
        click.echo(f"{name:<28} {value}")
    for sentence in found.consequences():
        click.echo(f"- {sentence}")


@click.group()
def games() -> None:
    """List, play and generate games."""


@games.command("list")
@click.argument("spec")
@click.option("--limit", type=click.IntRange(1), help="Show at most this many.")
def list_games(spec: str, limit: int | None) -> None:
    """List the games of SPEC: alfworld:<split>, generated:<n>:<seed>, tabular:<name>, or a folder.

    \b
    Example:  audit games list generated:6:0
    """
    import envs

    found = envs.games(spec)
    for game in found[:limit]:
        click.echo(f"{game.id[:12]}  {game.task_type or '-':<31}  {game.name}")
    click.echo(f"{len(found)} games", err=True)


@games.command()
@click.option("--n", type=click.IntRange(1, 100_000), default=60, show_default=True, help="How many games.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write to.")
def generate(n: int, seed: int, out: Path) -> None:
    """Make standard ALFWorld games of all six task types; the same seed gives the same bytes everywhere.

    \b
    Example:  audit games generate --n 60 --seed 0 --out games
    """
    from envs.alfworld.generate import write_games

    paths = write_games(n, seed, out)
    click.echo(f"{len(paths)} games in {out}")


@games.command()
@click.argument("game")
@click.option("--walkthrough", is_flag=True, help="Play the game's own walkthrough and stop.")
def play(game: str, walkthrough: bool) -> None:
    """Play GAME in the terminal: a game file, tabular:<name>, stock:<path>, or a set such as generated:6:0
    (its first game).

    Type a command of the game, or :undo, :restore N (back to turn N), :list (what can be done), :quit.

    \b
    Examples:  audit games play generated:6:0 --walkthrough
               audit games play path/to/game.tw-pddl
    """
    from audit import play as terminal

    sys.exit(0 if terminal.play(game, sys.stdin, sys.stdout, walkthrough=walkthrough) else 1)


COMMANDS = (doctor, games)
