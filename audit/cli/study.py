"""Commands about a study: its plan, the replay, what it showed."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from audit.cli.progress import Progress
from envs.core import InputError

if TYPE_CHECKING:
    from audit.results import Run


@click.command()
@click.argument("policy")
@click.option("--env", required=True, help="Set of games, e.g. alfworld:valid_unseen or generated:60:0.")
@click.option("--plan", default="default", show_default=True, help="Preset or TOML file (audit plan new).")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Run directory.")
@click.option(
    "--trajectories",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSONL of trajectories to replay (audit collect, audit import); default: collect the plan's own.",
)
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True)
@click.option(
    "--time-limit",
    type=click.FloatRange(0),
    default=3600,
    show_default=True,
    help="Seconds for a handful of points; what takes longer is given up and owed again (0: none).",
)
@click.option(
    "--stop-after",
    type=click.FloatRange(0),
    help="Minutes after which the run is closed with what it has; the same command goes on with it later.",
)
@click.option("--dry-run", is_flag=True, help="Only print what the replay of a language model will take.")
@click.option(
    "--pilot",
    type=click.IntRange(0),
    default=0,
    help="Dry run: replay so many points to find out (paid once: the study itself does not ask again).",
)
def replay(
    policy: str,
    env: str,
    plan: str,
    out: Path,
    trajectories: Path | None,
    jobs: int,
    engine: str,
    time_limit: float,
    stop_after: float | None,
    dry_run: bool,
    pilot: int,
) -> None:
    """Replay every decision point of POLICY's trajectories: which alternatives it would have taken, what would
    have followed, and so how much each step mattered.

    The same command goes on with a run that was interrupted.

    \b
    Examples:  audit replay thorough --env alfworld:valid_unseen --plan default --out runs/thorough --jobs 2
               audit replay model.toml --env alfworld:valid_unseen --plan quick --out runs/model --dry-run
    """
    from audit import study
    from audit.logs import read_trajectories
    from audit.plan import load_plan
    from audit.policies.openai import LLMPolicy
    from audit.study import replay_study

    recorded = None if trajectories is None else read_trajectories(trajectories)
    if pilot and not dry_run:
        raise InputError("--pilot belongs to --dry-run.")
    if dry_run:
        for label, value in study.dry_run(
            policy, env, load_plan(plan), out, trajectories=recorded, pilot=pilot
        ).lines():
            click.echo(f"{label:<12} {value}")
        return
    with Progress() as progress:
        run = replay_study(
            policy,
            env,
            load_plan(plan),
            out,
            trajectories=recorded,
            jobs=jobs,
            engine=engine,
            time_limit=time_limit,
            stop_after=math.inf if stop_after is None else 60 * stop_after,
            progress=progress,
        )
    _print_run(run)
    if "server" in run.directory.manifest:
        for purpose, line in LLMPolicy.load(policy).ledger_lines():
            click.echo(f"{purpose:<8} {line}", err=True)


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.argument("trajectory", required=False)
@click.option("--by", type=click.Choice(["task_type", "step_group", "action_type"]), help="Figures by group.")
def show(run: Path, trajectory: str | None, by: str | None) -> None:
    """Show the results of RUN, or the timeline of one TRAJECTORY (its id or the beginning of it).

    \b
    Examples:  audit show runs/thorough
               audit show runs/thorough 3fa9
               audit show runs/thorough --by task_type
    """
    from audit.results import load
    from audit.show import groups, timeline
    from audit.summary import as_text

    loaded = load(run)
    if trajectory is not None:
        click.echo(timeline(loaded, trajectory))
    elif by is not None:
        click.echo(as_text(groups(loaded, by)))
    else:
        _print_run(loaded)


def _print_run(run: Run) -> None:
    from audit.summary import as_text

    for mark in run.marks:
        click.echo(f"!! {mark}")
    click.echo(run.headline)
    click.echo()
    click.echo(as_text(run.summary()))


@click.group()
def plan() -> None:
    """Write, check, lock and cost a plan: the one configuration of a study."""


@plan.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--preset", default="default", show_default=True, help="Start from this preset.")
def new(file: Path, preset: str) -> None:
    """Write a commented plan with every setting to FILE.

    \b
    Example:  audit plan new preregistration/my-study.toml
    """
    from audit.plan import PRESETS

    if preset not in PRESETS:
        raise InputError(f"{preset}: no such preset; expected one of {', '.join(PRESETS)}.")
    if file.exists():
        raise InputError(f"{file}: exists already; name a new file.")
    if not file.parent.is_dir():
        raise InputError(f"{file.parent}: no such folder.")
    file.write_text(PRESETS[preset].to_toml(), encoding="utf-8")
    click.echo(f"{file} written; edit it, then audit plan lock {file}")


@plan.command()
@click.argument("spec")
def check(spec: str) -> None:
    """Check a plan (a preset or a TOML file) and say whether it is locked.

    \b
    Example:  audit plan check preregistration/my-study.toml
    """
    from audit.plan import load_plan

    loaded = load_plan(spec)
    click.echo(
        f"plan {loaded.plan.name}: valid, hash {loaded.plan.hash}, {'locked' if loaded.locked else 'not locked'}"
    )
    for change in loaded.departed:
        click.echo(f"departs from its lock: {change}")
    if loaded.departed:
        sys.exit(1)


@plan.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def lock(file: Path) -> None:
    """Lock a plan: write its content and hash beside it, before any data are seen.

    \b
    Example:  audit plan lock preregistration/my-study.toml
    """
    from audit.plan import load_plan, write_lock

    if not file.exists():
        raise InputError(f"{file}: no such plan; audit plan new {file} writes one.")
    loaded = load_plan(str(file))
    click.echo(f"{write_lock(file, loaded.plan)}: {loaded.plan.hash}")


@plan.command()
@click.argument("spec")
@click.option("--policy", help="Policy of the pilot.")
@click.option("--env", help="Games of the pilot.")
def cost(spec: str, policy: str | None, env: str | None) -> None:
    """Print what a plan will take: points, rollouts, steps, tokens, time and the minimum detectable effect.

    \b
    Example:  audit plan cost default --policy thorough --env generated:60:0
    """
    from audit.plan import load_plan
    from audit.study import cost as estimate

    for label, value in estimate(load_plan(spec).plan, policy, env).lines():
        click.echo(f"{label:<42} {value}")


COMMANDS = (replay, show, plan)
