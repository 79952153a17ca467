"""The command that writes the HTML report."""

from __future__ import annotations

from pathlib import Path

import click

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("runs", metavar="RUN...", type=_FOLDER, nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The page; default: report.html in RUN.")
@click.option(
    "--trajectories", type=click.IntRange(0), default=20, show_default=True, help="How many are shown in full."
)
@click.option("--mrt", type=_FOLDER, help="A trial to show as well (audit mrt run).")
@click.option("--used-for", type=_FOLDER, help="Another trial that the trial's numbers are meant for.")
@click.option("--arms", type=_FOLDER, help="A study of arms to show as well (audit arms --out).")
def report(
    runs: tuple[Path, ...],
    out: Path | None,
    trajectories: int,
    mrt: Path | None,
    used_for: Path | None,
    arms: Path | None,
) -> None:
    """Write RUN as one HTML page that needs no network: what it covers, which steps mattered, the transcripts, which
    signals know; each figure also as PNG, SVG and CSV beside it. RUN may be a trial; several runs share one page.

    \b
    Examples:  audit report runs/hasty
               audit report runs/thorough runs/hasty --out both.html
               audit report runs/hasty --mrt trial --arms arms
    """
    from audit.report import write_report

    written = write_report(runs, out, trajectories=trajectories, mrt=mrt, arms=arms, used_for=used_for)
    page, figures = written[0], written[1:]
    click.echo(f"{page}: {page.stat().st_size:,} bytes")
    if figures:
        names = dict.fromkeys(path.stem for path in figures)
        click.echo(f"{figures[0].parent}: {len(names)} figures as svg, png and csv: {', '.join(names)}")


COMMANDS = (report,)
