"""The page as written: whole, self-contained, the same every time, and plain about what is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from click.testing import CliRunner

from audit.cli import main
from audit.report import write_report
from audit.results import Run
from tests.report.reading import Reader, read

matplotlib.use("Agg")

FIGURES = {"coverage", "forest", "distribution", "timelines", "league", "scatter"}


@pytest.fixture(scope="module")
def whole(run: Run, trial: Path, arms: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reader]:
    out = tmp_path_factory.mktemp("page") / "page.html"
    write_report([run.directory.path], out, mrt=trial, arms=arms)
    return out, read(out)


def test_every_section_is_there(whole: tuple[Path, Reader]) -> None:
    _, page = whole
    for heading in ("The run", "Which steps mattered", "Trajectories", "Which signals know", "Training arms", "Words"):
        assert heading in page.headings
    assert any(heading.startswith("Trial") for heading in page.headings)
    assert page.tags.count("svg") > 8 and page.tags.count("table") > 8


def test_figures_lie_beside_the_page_with_their_data(whole: tuple[Path, Reader]) -> None:
    out, page = whole
    folder = out.with_suffix("")
    names = {path.stem for path in folder.iterdir()}
    assert names >= FIGURES | {"trial-gains", "trial-blip-1", "training-arms", "training-levels", "training-dose"}
    for name in names:
        assert {path.suffix for path in folder.glob(f"{name}.*")} == {".svg", ".png", ".csv"}
        assert len(pd.read_csv(folder / f"{name}.csv"))
    links = [link for link in page.links if not link.startswith("#")]
    assert links and all((out.parent / link).is_file() for link in links)
    anchors = [link[1:] for link in page.links if link.startswith("#")]
    assert set(anchors) <= set(page.ids)


def test_ids_are_single(whole: tuple[Path, Reader]) -> None:
    _, page = whole
    assert len(page.ids) == len(set(page.ids))


def test_transcripts_are_a_click_away(whole: tuple[Path, Reader], run: Run) -> None:
    _, page = whole
    assert page.tags.count("details") >= len(run.trajectories)
    first = run.trajectories.iloc[0]
    for command in first["commands"]:
        assert command in page.text
    undefined = run.effects[run.effects["support"] != "defined"]
    assert undefined["reason"].iloc[0] in page.text


def test_equal_runs_give_equal_bytes(run: Run, tmp_path: Path) -> None:
    pages = []
    for name in ("one", "two"):
        folder = tmp_path / name / "small-run"
        shutil.copytree(run.directory.path, folder, ignore=shutil.ignore_patterns("report*"))
        written = write_report([folder], trajectories=2)
        assert written[0] == folder / "report.html"
        pages.append({path.relative_to(folder): path.read_bytes() for path in written})
    assert pages[0] == pages[1] and len(pages[0]) > 15


def test_several_runs_share_a_page(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other-run"
    shutil.copytree(run.directory.path, other)
    write_report([run.directory.path, other], tmp_path / "both.html", trajectories=1)
    page = read(tmp_path / "both.html")
    assert "The runs side by side" in page.headings and "Differences between runs" in page.text
    assert {"run1-forest", "run2-forest"} <= {path.stem for path in (tmp_path / "both").iterdir()}


def test_what_is_missing_is_said_with_its_command(run: Run, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(run.directory.path, bare, ignore=shutil.ignore_patterns("signals*", "report*"))
    write_report([bare], trajectories=0)
    page = read(bare / "report.html")
    assert "audit score bare" in page.text and "--trajectories 20" in page.text
    assert not (bare / "report" / "league.csv").exists()


def test_a_run_without_an_effect_has_a_page(run: Run, tmp_path: Path) -> None:
    from dataclasses import replace

    from audit.plan import PlanFile, Support
    from audit.study import replay_study

    plan = replace(run.plan, support=Support(draws=16, distinct=16))
    replay_study("hasty", "generated:2:0", PlanFile(plan, False, ()), tmp_path / "none")
    write_report([tmp_path / "none"])
    page = read(tmp_path / "none" / "report.html")
    assert "None of the" in page.text and "No point is defined" in page.text


def test_a_trial_alone_has_a_page(trial: Path) -> None:
    answer = CliRunner().invoke(main, ["report", str(trial)], catch_exceptions=False)
    assert answer.exit_code == 0 and "report.html" in answer.output and "trial-gains" in answer.output
    page = read(trial / "report.html")
    assert "Randomisation check" in page.text and "Leaderboard" in page.text and "--used-for" in page.text


def test_another_trial_brings_its_warning(trial: Path, tmp_path: Path) -> None:
    from tests.report.conftest import trial_of

    other = trial_of(tmp_path, ("search", "search", "write"))
    write_report([trial], tmp_path / "page.html", used_for=other)
    assert "histories differ" in read(tmp_path / "page.html").text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "holds no run"),
        (["{run}", "--out", "page.pdf"], "NAME.html"),
        (["{run}", "--mrt", "{run}"], "holds no trial"),
        (["{run}", "--arms", "{run}"], "holds no study of arms"),
        (["{run}", "--used-for", "{run}"], "--mrt"),
        (["{run}", "--out", "{run}.html"], "another name"),
    ],
)
def test_bad_input_is_one_sentence(run: Run, arguments: list[str], says: str) -> None:
    filled = [part.format(run=run.directory.path) for part in arguments]
    answer = CliRunner().invoke(main, ["report", *filled], catch_exceptions=False)
    assert answer.exit_code == 2 and says in answer.stderr and answer.stderr.count("\n") == 1
