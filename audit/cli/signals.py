"""Commands about credit signals: score, compare, export, league."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from audit.cli.progress import Progress
from envs.core import InputError

if TYPE_CHECKING:
    from audit.comparison.compare import Comparison
    from audit.results import Run

_RUN = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.argument("names", metavar="SIGNAL...", nargs=-1)
@click.option("--signal", "own", multiple=True, help="A signal of your own, e.g. my.py:Novelty; may be repeated.")
@click.option("--policy", help="The replayed policy, where it does not ship.")
@click.option("--env", help="Its games, where they are not the run's set by name.")
@click.option("--reference", help="Reference policy of implicit.prime.")
@click.option(
    "--judge", type=click.Path(path_type=Path, dir_okay=False), help="The .toml file of a language model that judges."
)
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Its answers to each question.")
@click.option("--check", is_flag=True, help="Store nothing; try whether the signals keep their contract on RUN.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the columns to this .csv too.")
def score(
    run: Path,
    names: tuple[str, ...],
    own: tuple[str, ...],
    policy: str | None,
    env: str | None,
    reference: str | None,
    judge: Path | None,
    repeats: int,
    check: bool,
    out: Path | None,
) -> None:
    """Ask credit signals about every step of RUN and store their columns; nothing is replayed.

    Without SIGNAL the shipped ones are asked that need no judge. A judge is asked only about the steps that the plan
    chose. A signal sees points without any result of the replay; --check destroys the results in a copy and looks
    whether anything changes. SIGNAL may be a name, a family, or a rubric of your own (my.toml, see
    credit_signals/judge.py). RUN may be a benchmark (audit league); its columns go to --out.

    \b
    Examples:  audit score runs/hasty
               audit score runs/hasty confidence.logp --signal my.py:Novelty
               audit score runs/hasty judge my-rubric.toml --judge model.toml
               audit score runs/hasty --check --signal my.py:Novelty
               audit score hasty-generated --signal my.py:Novelty --out novelty.csv
    """
    from audit.comparison.league import SHIPPED, find_benchmark
    from audit.results import Run, load
    from audit.scoring import DEFAULT, Source, check_leakage
    from audit.scoring import score as ask
    from audit.summary import as_text

    wanted = [*names, *own] or list(DEFAULT)
    public = run.is_file() or (str(run) in SHIPPED and not run.exists())
    if public and (check or out is None):
        raise InputError(f"{run}: is a benchmark: name --out FILE.csv, and leave out --check, which needs a run.")
    if out is not None and out.suffix != ".csv":
        raise InputError(f"{out}: signals are written as .csv.")
    loaded = Source.of_benchmark(find_benchmark(run)) if public else load(run)
    options: dict[str, Any] = {"policy": policy, "env": env, "reference": reference, "repeats": repeats}
    options["judge"] = None if judge is None else str(judge)
    with Progress() as progress:
        options["progress"] = progress
        if check and isinstance(loaded, Run):
            check_leakage(loaded, wanted, **options)
        else:
            scores = ask(loaded, wanted, **options)
    if check and isinstance(loaded, Run):
        click.echo(f"checked on {len(loaded.effects)} points: {', '.join(wanted)}")
        return
    if out is not None:
        scores.frame.to_csv(out, index=False)
    click.echo(as_text(scores.summary()))
    answers = scores.answers()
    if len(answers):
        click.echo(f"\nanswers of language models\n{as_text(answers)}")


@click.command()
@click.argument("runs", metavar="RUN...", type=_RUN, nargs=-1, required=True)
@click.option("--measure", default="spearman", show_default=True, help="Which measure to print.")
@click.option("--margin", type=click.FloatRange(0.001, 1), default=0.1, show_default=True, help="Of equivalence.")
@click.option(
    "--router", "routed", help="Signal of a router curve: the share sent to a judge against what it recovers."
)
@click.option("--csv", type=click.Path(path_type=Path, dir_okay=False), help="Write every measure to this file.")
@click.option("--outcome", type=click.Choice(["won", "lost"]), help="Only trajectories that ended so (exploratory).")
def compare(
    runs: tuple[Path, ...], measure: str, margin: float, routed: str | None, csv: Path | None, outcome: str | None
) -> None:
    """Hold the scored signals of RUN against its effects: which know which steps mattered. Several runs are put
    side by side. A planted oracle and a permuted signal are always among them, as controls.

    The hypotheses of the runs' plan are tested as one family, over all runs of that plan that are named.

    \b
    Examples:  audit compare runs/hasty
               audit compare runs/thorough runs/hasty --measure partial_fluency
    """
    from audit.comparison.compare import compare_run, side_by_side
    from audit.comparison.router import router
    from audit.results import load
    from audit.scoring import load_scores
    from audit.summary import as_text

    opened = {path.name: load(path) for path in runs}
    if len(opened) < len(runs):
        raise InputError("compare: two runs have one folder name, so their tables could not be told apart; rename one.")
    scored = {name: load_scores(run) for name, run in opened.items()}
    won = None if outcome is None else outcome == "won"
    compared = {}
    for name, run in opened.items():
        done = compare_run(run, scored[name].frame, scored[name].importance, margin=margin, won=won)
        compared[name] = done
        announced = f" (exploratory, but for roles marked so): {measure}" if len(done.confirmed) else f": {measure}"
        click.echo(f"{name}{announced}\n{run.headline}\n\n{as_text(done.summary(measure))}")
        for note in done.notes:
            click.echo(f"note: {note}")
        if routed is not None:
            click.echo(f"\nrouter by {routed}\n" + as_text(router(done, routed).summary()))
        if csv is not None:
            done.to_frame().to_csv(csv if len(opened) == 1 else csv.with_stem(f"{csv.stem}-{name}"), index=False)
        click.echo()
    _print_family(opened, compared)
    if len(opened) > 1:
        reading = {key: value for scores in scored.values() for key, value in scores.importance.items()}
        frames = {name: (done.joined.points, scored[name].frame) for name, done in compared.items()}
        _, between = side_by_side(frames, measure, importance=reading, margin=margin)
        click.echo("differences between runs (exploratory)\n" + as_text(between))


def _print_family(opened: dict[str, Run], compared: dict[str, Comparison]) -> None:
    """What plans announced, one family a plan."""
    from audit.comparison.confirm import family, in_short
    from audit.summary import as_text

    plans = {name: run.plan.hash for name, run in opened.items() if len(compared[name].confirmed)}
    for plan in dict.fromkeys(plans.values()):
        names = [name for name, hash_ in plans.items() if hash_ == plan]
        table = family({name: compared[name] for name in names})
        manifests = [opened[name].directory.manifest for name in names]
        locked = "locked" if all(m["locked"] and not m["departed"] for m in manifests) else "NOT as locked"
        announced = int(table["signal"].notna().sum())
        click.echo(f"confirmatory: plan {opened[names[0]].plan.name} ({locked}), Holm over {announced} announced tests")
        click.echo(as_text(in_short(table)) + "\n")


@click.command()
@click.argument("run", type=_RUN)
@click.option("--benchmark", type=click.Path(path_type=Path, dir_okay=False), required=True, help="NAME.jsonl.gz")
def export(run: Path, benchmark: Path) -> None:
    """Write RUN as a public ground-truth file: points and context for signals, effects with intervals apart.

    \b
    Example:  audit export runs/hasty --benchmark hasty.jsonl.gz
    """
    from audit.comparison.league import export_benchmark
    from audit.results import load

    path = export_benchmark(load(run), benchmark)
    click.echo(f"{path}: {path.stat().st_size:,} bytes")


@click.command()
@click.argument("benchmark", type=click.Path(path_type=Path))
@click.argument("files", metavar="FILE...", type=click.Path(path_type=Path, dir_okay=False), nargs=-1)
@click.option("--signal", "own", multiple=True, help="Score this one here: a name or my.py:Novelty; may be repeated.")
@click.option("--measure", default="spearman", show_default=True)
@click.option("--split", type=click.Choice(["dev", "test", "all"]), default="test", show_default=True)
@click.option("--csv", type=click.Path(path_type=Path, dir_okay=False), help="Write the table to this file.")
def league(
    benchmark: Path, files: tuple[Path, ...], own: tuple[str, ...], measure: str, split: str, csv: Path | None
) -> None:
    """Rank signals on BENCHMARK: a file (audit export) or one that ships, `hasty-generated`. Signals come as files (csv
    or parquet: `point` and a column a signal) or are scored here. Choose on `dev`, report `test`.

    \b
    Examples:  audit league hasty-generated --signal my.py:Novelty --signal baseline
               audit league hasty.jsonl.gz my-signals.csv --split dev
    """
    from typing import cast

    from audit.comparison.league import Split, find_benchmark
    from audit.comparison.league import league as rank
    from audit.scoring import Source
    from audit.scoring import score as ask
    from audit.summary import as_text

    path = find_benchmark(benchmark)
    scores = ask(Source.of_benchmark(path), own) if own else None
    found = rank(
        path,
        [*files, *([scores.frame] if scores else [])],
        measure=measure,
        split=cast(Split, split),
        importance=scores.importance if scores else None,
    )
    click.echo(f"{benchmark}: {found.headline}\n\n{as_text(found.summary())}")
    for note in found.notes:
        click.echo(f"note: {note}")
    if csv is not None:
        found.to_frame().to_csv(csv, index=False)


COMMANDS = (score, compare, export, league)
