"""Commands about micro-randomised trials: run, import, estimate, validate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from audit.cli.progress import Progress
from envs.core import InputError

if TYPE_CHECKING:
    from audit.mrt.results import Effects

_FOLDER = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def mrt() -> None:
    """Micro-randomised trials: randomise an intervention inside trajectories and estimate what it changed."""


@mrt.command()
@click.argument("policy")
@click.option("--intervention", required=True, help="review:expert, review:rule, resample[:K], feedback:helpful ...")
@click.option("--env", required=True, help="Set of games, e.g. alfworld:valid_seen or generated:60:0.")
@click.option("--p", default=0.5, show_default=True, help="Probability of treatment at an eligible decision.")
@click.option("--eligible", default="always", show_default=True, help="Where coins are flipped, e.g. disagrees=1.")
@click.option("--n", type=click.IntRange(1), default=500, show_default=True, help="How many trajectories.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--budget", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Steps an episode.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@click.option("--out", type=_FOLDER, required=True, help="Directory of the trial.")
def run(
    policy: str,
    intervention: str,
    env: str,
    p: float,
    eligible: str,
    n: int,
    seed: int,
    budget: int,
    jobs: int,
    out: Path,
) -> None:
    """Let POLICY play, and at each eligible decision flip a coin with a logged probability that decides whether the
    intervention is made. The same command goes on with a trial that was interrupted.

    \b
    Interventions: review:expert  review:rule  review:judge:MODEL.toml  resample[:K]  feedback:helpful
                   feedback:adversarial  hint:expert  hint:TEXT  python:MODULE:NAME
    Example:  audit mrt run hasty --intervention review:expert --env generated:60:0 --p .3 --budget 15 --out trial
    """
    from audit.mrt.trial import Design, run_trial

    design = Design(p=p, budget=budget, seed=seed, eligible=eligible)
    with Progress() as progress:
        trial = run_trial(policy, intervention, env, out, n=n, design=design, jobs=jobs, progress=progress)
    rows = trial.decisions
    coins = int(rows["eligible"].sum()) if len(rows) else 0
    click.echo(f"{len(trial.trajectories)} trajectories, {coins} coins, mean outcome ", nl=False)
    click.echo(f"{trial.trajectories['outcome'].mean():.3f}, {trial.failed} failed, in {out}")


@mrt.command("import")
@click.argument("file", type=_FILE)
@click.option("--trajectories", type=_FILE, help="Table of trajectories; without it FILE repeats the outcome.")
@click.option("--map", "mapping", multiple=True, help="OURS=THEIRS, e.g. arm=treated; may be repeated.")
@click.option("--feature", multiple=True, help="A column that was known before the coin; may be repeated.")
@click.option("--cluster", help="Column of trajectories that intervals rest on.")
@click.option("--scorer", help="Of an Inspect log with several.")
@click.option("--out", type=_FOLDER, required=True, help="Directory of the trial.")
def import_(
    file: Path,
    trajectories: Path | None,
    mapping: tuple[str, ...],
    feature: tuple[str, ...],
    cluster: str | None,
    scorer: str | None,
    out: Path,
) -> None:
    """Check the tables of another harness (CSV or parquet), or an Inspect log (.eval) with randomised review, and keep
    them as a trial.

    \b
    Columns: trajectory, t, eligible, arm, p (or p_1 .. p_K), outcome; others as --feature.
    Examples:  audit mrt import log.csv --map trajectory=run_id --map arm=treated --feature tool --out trial
               audit mrt import logs/task.eval --out trial
    """
    from audit.mrt.trial import import_trial

    columns = {}
    for pair in mapping:
        ours, sign, theirs = pair.partition("=")
        if not (ours and sign and theirs):
            raise InputError(f"--map {pair}: expected OURS=THEIRS, for instance arm=treated.")
        columns[ours] = theirs
    if file.suffix == ".eval":
        from audit.mrt.inspect_approver import import_eval_log

        trial = import_eval_log(file, out, scorer=scorer)
    else:
        trial = import_trial(file, out, trajectories=trajectories, columns=columns, features=feature, cluster=cluster)
    click.echo(f"{len(trial.trajectories)} trajectories, {len(trial.decisions)} decisions, in {out}")


@mrt.command()
@click.argument("trial", type=_FOLDER)
@click.option("--by", multiple=True, help="Feature whose levels get a blip each; may be repeated.")
@click.option("--policy", multiple=True, help="Target policy, e.g. 'early: t<5'; may be repeated.")
@click.option("--model", help="Blip model of gains, e.g. '~ C(action_group) * t'.")
@click.option("--method", type=click.Choice(["snmm", "occupancy", "seqdr", "ipw"]), default="snmm", show_default=True)
@click.option("--cluster", help="task (a population of games) or trajectory (these very games).")
@click.option("--used-for", type=_FOLDER, help="Another trial that the numbers are meant for.")
@click.option("--plots", type=_FOLDER, help="Folder to draw forest plots to.")
def estimate(
    trial: Path,
    by: tuple[str, ...],
    policy: tuple[str, ...],
    model: str | None,
    method: str,
    cluster: str | None,
    used_for: Path | None,
    plots: Path | None,
) -> None:
    """Blips (pooled, by kind of action, by type of task), impact scores and gains of target policies of a TRIAL.

    \b
    Examples:  audit mrt estimate trial
               audit mrt estimate trial --by action_group --policy always --policy 'early: t<5' --plots figures
    """
    from audit.mrt.reading import read
    from audit.mrt.trial import load_trial
    from audit.summary import as_text

    reading = read(
        load_trial(trial),
        by=by,
        policies=policy,
        model=model,
        method=method,  # type: ignore[arg-type]
        cluster=cluster,
        used_for=None if used_for is None else load_trial(used_for),
    )
    for label, value in reading.headline:
        click.echo(f"{label:<22} {value}")
    click.echo(f"\nblip over all decisions, by what happens later\n{as_text(reading.pooled)}")
    for name, board in reading.groups.items():
        columns = ["term", "estimate", "low", "high", "p_adjusted", "rank_best", "rank_worst", "rows_treated", "reason"]
        table = board.to_frame()[columns]
        for rank in ("rank_best", "rank_worst"):
            table[rank] = [None if value != value else int(value) for value in table[rank].astype(float)]
            table[rank] = table[rank].astype(object)
        click.echo(f"\nimpact by {name}, later coins as in the trial; simultaneous intervals\n{as_text(table)}")
    drawings = {f"impact-{name}": board.effects for name, board in reading.groups.items()}
    if reading.gains is not None:
        columns = ["term", "estimate", "se", "low", "high", "p_value", "ess", "consistent"]
        click.echo(f"\n{reading.gains.what}\n{as_text(reading.gains.to_frame()[columns])}")
        drawings["gains"] = reading.gains
    for note in reading.notes:
        click.echo(f"note: {note}")
    if plots is not None:
        _draw(plots, drawings)


@mrt.command()
@click.argument("policy")
@click.option("--intervention", required=True, help="As in audit mrt run.")
@click.option("--env", required=True, help="Set of games that can be restored, e.g. alfworld:valid_seen.")
@click.option("--p", default=0.5, show_default=True, help="Probability of treatment at an eligible decision.")
@click.option("--eligible", default="always", show_default=True, help="Where coins are flipped, e.g. disagrees=1.")
@click.option("--n", type=click.IntRange(10), default=1000, show_default=True, help="Trajectories of a trial.")
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Independent trials.")
@click.option("--direct", type=click.IntRange(2), default=2000, show_default=True, help="Rollouts a policy.")
@click.option("--forked", type=click.IntRange(2), default=100, show_default=True, help="Trajectories forked.")
@click.option("--rollouts", type=click.IntRange(1), default=2, show_default=True, help="Rollouts an arm of a fork.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--budget", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Steps an episode.")
@click.option("--by", multiple=True, default=("action_group",), show_default=True, help="Features with blips.")
@click.option("--target", multiple=True, help="Target policy, e.g. 'early: t<5'; may be repeated.")
@click.option("--model", help="Blip model of g-estimation.")
def validate(
    policy: str,
    intervention: str,
    env: str,
    p: float,
    eligible: str,
    n: int,
    repeats: int,
    direct: int,
    forked: int,
    rollouts: int,
    seed: int,
    budget: int,
    by: tuple[str, ...],
    target: tuple[str, ...],
    model: str | None,
) -> None:
    """Hold estimates of trials against direct Monte Carlo in a world that can be restored: blips against forks of both
    arms, gains of target policies against letting them play, with the cost of each in rollouts.

    \b
    Example:  audit mrt validate hasty --intervention review:expert --eligible disagrees=1 --env generated:60:0
                  --p .3 --budget 15 --n 1000 --repeats 20
    """
    from audit.mrt.trial import Design
    from audit.mrt.validate import validate as compare
    from audit.summary import as_text

    design = Design(p=p, budget=budget, seed=seed, eligible=eligible)
    with Progress() as progress:
        found = compare(
            policy,
            intervention,
            env,
            design,
            n=n,
            policies=target,
            by=by,
            model=model,
            repeats=repeats,
            direct=direct,
            forked=forked,
            rollouts=rollouts,
            progress=progress,
        )
    click.echo(f"never treating: {found.never:.3f}; blip model {found.model}, and each policy's own probability")
    click.echo(
        f"\ngains over never treating: trial (g-estimation) beside direct Monte Carlo\n{as_text(found.gain_table())}"
    )
    share, error = found.agreement
    click.echo(f"direct gain inside the 95 % interval: {found.share:.3f} of {len(found.gains)}")
    spread = "" if error != error else f", standard error over trials {error:.3f}"
    click.echo(f"agrees with the direct gain, whose own noise is counted: {share:.3f}{spread}")
    click.echo("\nblips: trial beside forks (agrees: inside the interval of the difference, the forks' noise counted)")
    click.echo(as_text(found.blip_table()))
    click.echo(f"\ncost\n{as_text(found.cost)}")


def _draw(folder: Path, drawings: dict[str, Effects]) -> None:
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for name, effects in drawings.items():
        figure = Figure(figsize=(6, 1 + 0.3 * len(effects.names)))
        effects.plot(figure.add_subplot())
        figure.savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight")
        click.echo(f"{folder / name}.png drawn")


COMMANDS = (mrt,)
