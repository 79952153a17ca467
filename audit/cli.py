"""The `audit` command: wires things together and computes nothing.

Every command imports what it needs when it runs, so that `audit --help` answers at once.
Exit codes: 0 done, 1 a check found something wrong, 2 bad input (one sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envs.core import InputError

if TYPE_CHECKING:
    from audit.results import Run


class _Group(click.Group):
    """Turns bad input into one sentence and exit code 2."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except InputError as error:
            click.echo(f"audit: {error}", err=True)
            ctx.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="credit-audit", prog_name="audit")
def main() -> None:
    """Find out which steps of an agent's trajectory caused its outcome, and which credit signals can tell."""
    import envs

    ours = Path(__file__).resolve().parent.parent / "envs" / "__init__.py"
    theirs = Path(str(envs.__file__)).resolve()
    if ours != theirs:
        raise InputError(
            f"the import name 'envs' belongs to another package here ({theirs}, not {ours}); install credit-audit "
            f"in a virtual environment of its own."
        )


@main.command()
def doctor() -> None:
    """Say what is installed, which data is found where, and play one game as a self-check.

    \b
    Example:  audit doctor
    """
    from audit import doctor as checks

    findings = checks.examine()
    for finding in findings:
        click.echo(f"{finding.mark:<5} {finding.subject:<24} {finding.detail}")
    if any(finding.mark == "FAIL" for finding in findings):
        sys.exit(1)


@main.group()
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


# Policies and trajectories ------------------------------------------------------------------------------------------


@main.command()
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

    with _Progress() as progress:
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


@main.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--env", required=True, multiple=True, help="Sets the log's games are from; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="JSONL file to write.")
@click.option("--budget", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Steps an episode.")
def import_(file: Path, env: tuple[str, ...], out: Path, budget: int) -> None:
    """Import other people's logs as trajectories, each with a certificate of how faithfully it replays.

    \b
    Example:  audit import log.jsonl --env alfworld:train --out trajectories.jsonl
    """
    import envs
    from audit.importers import certificate_table, import_log
    from audit.logs import write_trajectories
    from audit.summary import as_text

    known = [game for spec in env for game in envs.games(spec)]
    imported = import_log(file, known, budget=budget)
    write_trajectories(out, imported.trajectories)
    click.echo(as_text(certificate_table(imported.trajectories, imported.problems)))
    for problem in imported.problems[:20]:
        click.echo(str(problem), err=True)
    if len(imported.problems) > 20:
        click.echo(f"... and {len(imported.problems) - 20} more", err=True)


# The study --------------------------------------------------------------------------------------------------------


@main.command()
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
def replay(policy: str, env: str, plan: str, out: Path, trajectories: Path | None, jobs: int, engine: str) -> None:
    """Replay every decision point of POLICY's trajectories: which alternatives it would have taken, what would
    have followed, and so how much each step mattered.

    The same command goes on with a run that was interrupted.

    \b
    Example:  audit replay thorough --env alfworld:valid_unseen --plan default --out runs/thorough --jobs 2
    """
    from audit.logs import read_trajectories
    from audit.plan import load_plan
    from audit.study import replay_study

    recorded = None if trajectories is None else read_trajectories(trajectories)
    with _Progress() as progress:
        run = replay_study(
            policy, env, load_plan(plan), out, trajectories=recorded, jobs=jobs, engine=engine, progress=progress
        )
    _print_run(run)


@main.command()
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


@main.group()
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


class _Progress:
    """A bar for each stage on stderr, with the time that is left."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._stage = ""

    def __enter__(self) -> _Progress:
        return self

    def __call__(self, stage: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if stage != self._stage:
            self.close()
            self._bar, self._stage = tqdm(total=total, desc=stage, file=sys.stderr, mininterval=0.5), stage
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __exit__(self, *_: object) -> None:
        self.close()


if __name__ == "__main__":
    main()
