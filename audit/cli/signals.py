"""Commands about credit signals: score, compare, export, league."""

from __future__ import annotations

from pathlib import Path

import click

from audit.cli.progress import Progress

_RUN = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("run", type=_RUN)
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
) -> None:
    """Ask credit signals about every step of RUN and store their columns; nothing is replayed.

    Without SIGNAL the shipped ones are asked that need no judge. A signal sees points without any result of the replay;
    --check destroys the results in a copy and looks whether anything changes. SIGNAL may be a name, a family, or a
    rubric of your own (my.toml, see credit_signals/judge.py).

    \b
    Examples:  audit score runs/hasty
               audit score runs/hasty confidence.logp --signal my.py:Novelty
               audit score runs/hasty judge my-rubric.toml --judge model.toml
               audit score runs/hasty --check --signal my.py:Novelty
    """
    from audit.results import load
    from audit.scoring import DEFAULT, check_leakage
    from audit.scoring import score as ask
    from audit.summary import as_text

    loaded, wanted = load(run), [*names, *own] or list(DEFAULT)
    asked = None if judge is None else str(judge)
    with Progress() as progress:
        if check:
            check_leakage(
                loaded,
                wanted,
                policy=policy,
                env=env,
                reference=reference,
                judge=asked,
                repeats=repeats,
                progress=progress,
            )
        else:
            scores = ask(
                loaded,
                wanted,
                policy=policy,
                env=env,
                reference=reference,
                judge=asked,
                repeats=repeats,
                progress=progress,
            )
    if check:
        click.echo(f"checked on {len(loaded.effects)} points: {', '.join(wanted)}")
        return
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
def compare(runs: tuple[Path, ...], measure: str, margin: float, routed: str | None, csv: Path | None) -> None:
    """Hold the scored signals of RUN against its effects: which know which steps mattered. Several runs are put
    side by side. A planted oracle and a permuted signal are always among them, as controls.

    \b
    Example:  audit compare runs/hasty
    """
    from audit.comparison.compare import compare_run, side_by_side
    from audit.comparison.frames import effects_of
    from audit.comparison.router import router
    from audit.results import load
    from audit.scoring import load_scores
    from audit.summary import as_text

    opened = {path.name: load(path) for path in runs}
    scored = {name: load_scores(run) for name, run in opened.items()}
    for name, run in opened.items():
        done = compare_run(run, scored[name].frame, scored[name].importance, margin=margin)
        click.echo(f"{name}: {run.headline}\n")
        click.echo(as_text(done.summary(measure)))
        for note in done.notes:
            click.echo(f"note: {note}")
        if len(done.confirmed):
            click.echo("\n" + as_text(done.confirmed))
        if routed is not None:
            click.echo(f"\nrouter by {routed}\n" + as_text(router(done, routed).summary()))
        if csv is not None:
            done.to_frame().to_csv(csv if len(opened) == 1 else csv.with_stem(f"{csv.stem}-{name}"), index=False)
    if len(opened) > 1:
        reading = {key: value for scores in scored.values() for key, value in scores.importance.items()}
        frames = {name: (effects_of(run), scored[name].frame) for name, run in opened.items()}
        _, between = side_by_side(frames, measure, importance=reading, margin=margin)
        click.echo("\ndifferences between runs\n" + as_text(between))


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
@click.argument("benchmark", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("files", metavar="FILE...", type=click.Path(path_type=Path, dir_okay=False), nargs=-1, required=True)
@click.option("--measure", default="spearman", show_default=True)
@click.option("--split", type=click.Choice(["dev", "test", "all"]), default="test", show_default=True)
def league(benchmark: Path, files: tuple[Path, ...], measure: str, split: str) -> None:
    """Rank signal files (csv or parquet: `point` and a column a signal) on a benchmark file.

    \b
    Example:  audit league hasty.jsonl.gz my-signals.csv
    """
    from typing import cast

    from audit.comparison.league import Split
    from audit.comparison.league import league as rank
    from audit.summary import as_text

    click.echo(as_text(rank(benchmark, files, measure=measure, split=cast(Split, split)).summary()))


COMMANDS = (score, compare, export, league)
