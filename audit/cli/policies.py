"""Commands about policies and their trajectories: train, evaluate, collect, import."""

from __future__ import annotations

from pathlib import Path

import click

from audit.cli.progress import Progress
from envs.core import InputError


@click.command()
@click.argument("policy")
@click.option("--env", required=True, help="Set of games, e.g. alfworld:valid_unseen or generated:60:0.")
@click.option("--n", type=click.IntRange(1), default=50, show_default=True, help="How many trajectories.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--budget", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Steps an episode.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="JSONL file to write.")
def collect(policy: str, env: str, n: int, seed: int, budget: int, out: Path) -> None:
    """Let POLICY play and write its trajectories.

    \b
    Example:  audit collect thorough --env generated:60:0 --n 20 --out trajectories.jsonl
    """
    import envs
    from audit import collect as collecting
    from audit.logs import write_trajectories
    from audit.policies import load_policy

    with Progress() as progress:
        found = list(
            collecting.collect(
                load_policy(policy),
                envs.games(env),
                n,
                budget=budget,
                seed=seed,
                done=lambda collected: progress("collect", collected, n),
            )
        )
    write_trajectories(out, found)
    click.echo(f"{len(found)} trajectories, {sum(t.won for t in found)} won, in {out}")


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--env", required=True, multiple=True, help="Sets the log's games are from; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="JSONL file to write.")
@click.option("--budget", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Steps an episode.")
def import_(file: Path, env: tuple[str, ...], out: Path, budget: int) -> None:
    """Import other people's logs as trajectories, each with a certificate of how faithfully it replays.

    \b
    Example:  audit import log.jsonl --env alfworld:train --out trajectories.jsonl
    """
    from audit.importers import certificate_table, import_log
    from audit.logs import write_trajectories
    from audit.summary import as_text

    with Progress() as progress:
        imported = import_log(
            file, list(env), budget=budget, done=lambda finished, of: progress("import", finished, of)
        )
    write_trajectories(out, imported.trajectories)
    table = certificate_table(imported.trajectories, imported.problems)
    click.echo(as_text(table.set_index("log").T.reset_index(names="certificate")))
    for line in (*imported.notes, *map(str, imported.problems[:20])):
        click.echo(line, err=True)
    if len(imported.problems) > 20:
        click.echo(f"... and {len(imported.problems) - 20} more", err=True)


@click.command()
@click.option("--recipe", help="Make a shipped policy again: thorough or hasty.")
@click.option("--env", default="generated:300:0", show_default=True, help="Games of the demonstrations.")
@click.option("--name", default="linear", show_default=True, help="Name of the policy.")
@click.option("--epsilon", type=click.FloatRange(0, 1), default=0.15, show_default=True, help="Noise of the expert.")
@click.option("--episodes", type=click.IntRange(1), default=1, show_default=True, help="Demonstrations a game.")
@click.option("--temperature", type=click.FloatRange(0.01, 100), default=1.0, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="JSON file to write.")
def train(
    recipe: str | None,
    env: str,
    name: str,
    epsilon: float,
    episodes: int,
    temperature: float,
    seed: int,
    out: Path,
) -> None:
    """Fit a linear policy to demonstrations of the built-in expert (seconds) and save it as JSON + npz.

    \b
    Examples:  audit train --env generated:300:0 --out my-policy.json
               audit train --recipe hasty --out hasty.json
    """
    from audit.train import retrain
    from audit.train import train as fit

    if out.suffix != ".json":
        raise InputError(f"{out}: a policy is saved as .json (with the weights in an .npz beside it).")
    with Progress() as progress:
        if recipe is not None:
            policy = retrain(recipe, progress=progress)
        else:
            policy = fit(
                env,
                name=name,
                epsilon=epsilon,
                episodes=episodes,
                temperature=temperature,
                seed=seed,
                progress=progress,
            )
    policy.save(out)
    click.echo(f"{out} written: {policy.describe()['name']}")


@click.command()
@click.argument("policy")
@click.option("--env", required=True, help="Set of games, e.g. alfworld:valid_unseen.")
@click.option("--games", type=click.IntRange(1), help="Only the first so many games of the set (default: all).")
@click.option("--n", type=click.IntRange(1), default=1, show_default=True, help="Draws a game.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--budget", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Steps an episode.")
def evaluate(policy: str, env: str, games: int | None, n: int, seed: int, budget: int) -> None:
    """Success of POLICY by task type, with Wilson intervals, and how often it said what the game did not offer.

    \b
    Examples:  audit evaluate hasty --env alfworld:valid_unseen
               audit evaluate model.toml --env alfworld:valid_unseen --games 20 --budget 30
    """
    import envs
    from audit.policies import load_policy
    from audit.policies.openai import LLMPolicy
    from audit.summary import as_text
    from audit.train import evaluate as success

    with Progress() as progress:
        opened = load_policy(policy)
        frame = success(opened, envs.games(env)[:games], budget=budget, seed=seed, n=n, progress=progress)
    click.echo(as_text(frame.reset_index()))
    for purpose, line in opened.ledger_lines() if isinstance(opened, LLMPolicy) else ():
        click.echo(f"{purpose:<8} {line}", err=True)


COMMANDS = (train, evaluate, collect, import_)
