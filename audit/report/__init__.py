"""The HTML report: one page that shows a run, its signals, a trial, training arms.

Knows: which sections there are and what each needs. Hides: how they are laid out. The page stands alone (no network, no
script); equal runs give equal bytes. Data first: every section makes frames, then figures from them; each figure is
also a PNG, an SVG and a CSV in the folder beside the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from audit.store import MANIFEST, RunDirectory
from envs.core import InputError

PAGE = "report.html"


def write_report(
    runs: Sequence[Path],
    out: Path | None = None,
    *,
    trajectories: int = 20,
    mrt: Path | None = None,
    arms: Path | None = None,
    used_for: Path | None = None,
) -> list[Path]:
    """Write the page and its figures; the paths written, the page first.

    runs: run directories, or trial directories. out: the page (default `report.html` in the first of them); figures go
    to the folder of the same name beside it. trajectories: how many of each run are shown in full. mrt: a trial. arms:
    a folder that `audit arms --out` wrote. used_for: a trial that the numbers of the trial are meant for.
    Raises InputError where something is not there or not finished.
    """
    from audit.mrt.trial import KIND, load_trial
    from audit.report.arms import arms_section
    from audit.report.page import write_page
    from audit.report.parts import Section
    from audit.report.run import run_sections
    from audit.report.signals import between_runs, compared, signal_section
    from audit.report.trial import trial_section
    from audit.results import load
    from audit.training.study import load_arms

    trials = [path for path in runs if RunDirectory.open(path).manifest.get("kind") == KIND]
    opened = {label: load(path) for label, path in _labels([path for path in runs if path not in trials]).items()}
    page = runs[0] / PAGE if out is None else out
    if page.suffix != ".html" or not page.resolve().parent.is_dir():
        raise InputError(f"{page}: expected a file NAME.html in a folder that exists.")
    if (page.with_suffix("") / MANIFEST).exists():
        raise InputError(f"{page}: its figures would go into the run {page.stem}; give the page another name.")
    scored = {label: (run, compared(run, label)) for label, run in opened.items()}
    sections: list[Section] = []
    for place, (label, (run, found)) in enumerate(scored.items()):
        prefix = "" if len(scored) == 1 else f"run{place + 1}-"
        own = [*run_sections(run, prefix, trajectories), signal_section(run, found, prefix)]
        name = run.directory.manifest["policy"].get("name", "policy")
        sections += own if len(scored) == 1 else [Section(f"{label}: {name}", [], label, 1), *own]
    if len(scored) > 1:
        sections += [Section("Together", [], "Together", 1), between_runs(scored)]
    wanted = [*trials, *([mrt] if mrt is not None else [])]
    if used_for is not None and not wanted:
        raise InputError("--used-for is about a trial, and none is given; name one with --mrt.")
    held = None if used_for is None else load_trial(used_for)
    for place, (label, path) in enumerate(_labels(wanted).items()):
        prefix = "trial-" if len(wanted) == 1 else f"trial{place + 1}-"
        sections.append(trial_section(load_trial(path), label, prefix, held))
    if arms is not None:
        sections.append(arms_section(*load_arms(arms), "training-"))
    first = next(iter(opened.values()), None)
    subtitle = "A micro-randomised trial." if first is None else first.headline.split("\n")[0]
    title = "Credit audit: " + ", ".join([*opened, *(_labels(trials))])
    return write_page(title, subtitle if len(opened) < 2 else "", sections, page)


def _labels(paths: Sequence[Path]) -> dict[str, Path]:
    """A name for each path: its last part, with a number where two are alike; no local folder is shown."""
    named: dict[str, Path] = {}
    for path in paths:
        name = path.resolve().name
        label, number = name, 2
        while label in named:
            label, number = f"{name} ({number})", number + 1
        named[label] = path
    return named
