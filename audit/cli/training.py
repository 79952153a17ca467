"""The command about training arms."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from audit.cli.progress import Progress
from envs.core import InputError


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option("--plan", default="default", show_default=True, help="`default` or a TOML file of settings.")
@click.option("--env", help="Held-out games, e.g. alfworld:valid_unseen; default: the plan's.")
@click.option("--train-env", help="The run's games, where they are not the set it names.")
@click.option(
    "--policy",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The run's policy, if not a shipped one; or a language model's .toml, which is trained instead.",
)
@click.option(
    "--method", type=click.Choice(["lora", "full"]), default="lora", show_default=True, help="For language models."
)
@click.option(
    "--signals",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Parquet of credit by point; default: signals.parquet in RUN, where it is.",
)
@click.option("--judge", help="Column of the judge's arm, in place of the plan's, e.g. judge.help3_prefix.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for tables and figures.")
@click.option("--new", type=click.Path(path_type=Path, dir_okay=False), help="Write a commented plan there, and stop.")
@click.option("--lock", is_flag=True, help="Lock the plan before any data are seen, and stop.")
def arms(
    run: Path | None,
    plan: str,
    env: str | None,
    train_env: str | None,
    policy: Path | None,
    method: Literal["lora", "full"],
    signals: Path | None,
    judge: str | None,
    out: Path | None,
    new: Path | None,
    lock: bool,
) -> None:
    """Train arms of credit on RUN's trajectories at equal dose (and as they come), and compare them on held-out games.

    \b
    Examples:  audit arms runs/hasty --plan preregistration/seven-arms.toml --env generated:60:2
               audit arms runs/hasty --policy smollm2.toml --plan my-arms.toml --env generated:20:2 --out arms
               audit arms --new my-arms.toml
               audit arms --plan my-arms.toml --lock
    """
    from audit.training.study import ArmsPlan, arms_study, load_arms_plan, lock_arms_plan

    if new is not None:
        if new.exists() or not new.parent.is_dir():
            raise InputError(f"{new}: exists already, or its folder does not; name a new file.")
        new.write_text(ArmsPlan().to_toml(), encoding="utf-8")
        click.echo(f"{new} written; edit it, then audit arms --plan {new} --lock")
        return
    if lock:
        if plan == "default":
            raise InputError("The default plan needs no lock; audit arms --new FILE writes one to edit and lock.")
        click.echo(f"{lock_arms_plan(Path(plan))}: {load_arms_plan(plan).plan.hash}")
        return
    settings = load_arms_plan(plan)
    if judge is not None:
        settings = settings.judged_by(judge)
    env = env or settings.plan.held_out
    if run is None or not env:
        raise InputError("audit arms needs a RUN and --env with held-out games (audit arms --help).")
    import pandas as pd

    from audit.policies.linear import LinearPolicy
    from audit.results import load
    from audit.summary import as_text
    from audit.training import LanguageTrainer
    from audit.training.examples import Checkpoint
    from audit.training.trainer import Trainer, embedded

    start: Checkpoint | None = None
    trainer: Trainer = embedded
    if policy is not None and policy.suffix == ".toml":
        if out is None:
            raise InputError("A language model's checkpoints need a place: name a folder with --out.")
        start, trainer = policy, LanguageTrainer(out / "checkpoints", method)
    elif policy is not None:
        start = LinearPolicy.load(policy)
    loaded = load(run)
    beside = run / "signals.parquet"
    source = signals or (beside if beside.exists() else None)
    try:
        credit = None if source is None else pd.read_parquet(source)
    except (OSError, ValueError) as error:
        raise InputError(f"{source}: cannot be read ({str(error)[:120]}).") from None
    with Progress() as progress:
        study = arms_study(
            loaded,
            settings,
            env,
            env=train_env,
            policy=start,
            trainer=trainer,
            signals=credit,
            progress=progress,
        )
    for mark in study.marks:
        click.echo(f"!! {mark}")
    click.echo(
        f"Plan {settings.plan.name} {settings.plan.hash[:12]} ({'locked' if settings.locked else 'not locked'})."
    )
    click.echo(study.contrasts.headline())
    response = study.contrasts.dose
    for table in (
        study.arms.summary(),
        study.trained.summary(),
        study.levels.summary(),
        study.contrasts.summary(),
    ):
        click.echo(f"\n{as_text(table)}")
    if response is not None:
        click.echo(f"\nSuccess against log10 of {response.by}:\n{as_text(response.summary())}")
    if out is not None:
        study.save(out)
        also = "" if trainer is embedded else "; trained policies in its folder checkpoints"
        click.echo(f"\ntables and figures in {out}{also}")


COMMANDS = (arms,)
