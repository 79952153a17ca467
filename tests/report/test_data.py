"""What figures are drawn from, before any is drawn."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest

from audit.comparison.compare import compare_run
from audit.multiplicity import nonzero_share
from audit.plan import Estimand, Rollouts, Support
from audit.report.distribution import beside_null, edges_for, first_round
from audit.report.parts import Table, interval, number, plain, short, signed
from audit.report.run import coverage, steps_of
from audit.report.signals import strongest
from audit.report.svg import Sheet, dark
from audit.results import Run
from audit.scoring import load_scores
from audit.training.study import load_arms
from envs import InputError
from tests.report.conftest import study_of

matplotlib.use("Agg")


def counts(rows: list[tuple[int, int, int, int]], scale: float = 1.0) -> pd.DataFrame:
    columns = ["wins_factual", "n_factual", "wins_alternative", "n_alternative"]
    return pd.DataFrame(rows, columns=columns).assign(scale=scale)


def test_the_null_is_every_way_to_deal_the_successes() -> None:
    """Against counting all orders of two successes and three failures over arms of two and three."""
    frame = beside_null(counts([(2, 2, 0, 3)]))
    deals = [deal for deal in product((0, 1), repeat=5) if sum(deal) == 2]
    estimates = [sum(deal[:2]) / 2 - sum(deal[2:]) / 3 for deal in deals]
    edges = np.append(frame["low"], frame["high"].iloc[-1])
    expected = np.histogram(estimates, edges)[0] / len(deals)
    assert np.allclose(frame["null"], expected)
    assert frame.loc[frame["observed"] > 0, ["low", "high"]].mean(axis=1).item() == pytest.approx(1.0)


def test_the_null_is_what_no_effect_gives_whatever_the_rates_are() -> None:
    """On average over data without any effect both histograms agree; with effects they do not."""
    rng = np.random.default_rng(0)
    rates = rng.random(20_000)
    wins = rng.binomial(8, rates), rng.binomial(8, rates)
    quiet = beside_null(counts([(a, 8, b, 8) for a, b in zip(*wins, strict=True)]))
    assert np.abs(quiet["observed"] - quiet["null"]).max() < 0.006
    moved = rng.binomial(8, np.clip(rates - 0.3, 0, 1))
    loud = beside_null(counts([(a, 8, b, 8) for a, b in zip(wins[0], moved, strict=True)]))
    assert np.abs(loud["observed"] - loud["null"]).max() > 0.05
    for frame in (quiet, loud):
        assert frame["observed"].sum() == pytest.approx(1) and frame["null"].sum() == pytest.approx(1)


def test_bins_fit_the_grid_of_the_counts() -> None:
    for n0, n1 in ((8, 8), (3, 12), (32, 32), (1, 1), (100, 100)):
        edges = edges_for(counts([(0, n0, 0, n1)]))
        assert edges[0] < -1 < 1 < edges[-1]
        middle = (edges[:-1] + edges[1:]) / 2
        assert np.abs(middle).min() == pytest.approx(0, abs=1e-12)
        values = np.array([a / n0 - b / n1 for a in range(n0 + 1) for b in range(n1 + 1)])
        assert np.abs(values[:, None] - edges[None, :]).min() > 1e-6  # no estimate lies on an edge
    assert np.diff(edges_for(counts([(0, 8, 0, 8)], scale=0.7)))[0] == pytest.approx(0.05)


def test_the_first_round_is_what_the_summary_counts(run: Run) -> None:
    found = first_round(run)
    assert set(found["n_factual"]) == {4} and len(found) == (run.effects["support"] == "defined").sum()
    games = run.effects.set_index("point").loc[found["point"], "game"].to_numpy()
    share = nonzero_share(
        found[["wins_factual", "wins_alternative"]].to_numpy(),
        found[["n_factual", "n_alternative"]].to_numpy(),
        games,
    )
    told = run.details["shares"]["nonzero"]
    assert told["observed"]["estimate"] == pytest.approx(share.observed.estimate, abs=1e-6)
    frame = beside_null(found)
    middle = (frame["low"] + frame["high"]).abs() < 1e-9
    assert 1 - frame.loc[middle, "observed"].item() == pytest.approx(share.observed.estimate)
    assert 1 - frame.loc[middle, "null"].item() == pytest.approx(share.null.estimate)


def test_no_null_where_counts_do_not_give_one(run: Run) -> None:
    other = Run(run.directory, run.details)
    fixed = Rollouts(design="arms", rounds=[8], adaptive=False)
    for estimand in (Estimand(contrast="best"), Estimand(contrast="uniform", outcome="efficiency")):
        other.plan = replace(run.plan, estimand=estimand, rollouts=fixed, support=Support(draws=16, distinct=2))
        with pytest.raises(InputError):
            first_round(other)


def test_coverage_counts_every_point_once(run: Run) -> None:
    frame = coverage(run)
    whole = frame[frame["group"] == "all"]
    assert whole["points"].sum() == len(run.effects) and whole["share"].sum() == pytest.approx(1)
    parts = frame[frame["group"] != "all"]
    if len(parts):
        assert parts["points"].sum() == len(run.effects)


def test_steps_have_their_effects(run: Run) -> None:
    frame = steps_of(run, 3)
    first = run.trajectories.head(3)
    assert len(frame) == first["steps"].sum() and frame["trajectory"].nunique() == 3
    known = run.effects.set_index("point")["estimate"]
    asked = frame.dropna(subset=["point"])
    assert np.allclose(asked["estimate"].astype(float), known.loc[asked["point"]], equal_nan=True)
    assert (asked.loc[asked["state"] == "undefined", "reason"].str.len() > 0).all()


def test_the_strongest_signals_are_no_controls(run: Run) -> None:
    scores = load_scores(run)
    done = compare_run(run, scores.frame, scores.importance, draws=200, shuffles=200)
    names = strongest(done, 2)
    assert len(names) == 2 and not any(name.startswith("control") for name in names)
    points = done.points(names[0])
    assert len(points) == np.isfinite(done.joined.values[:, done.joined.names.index(names[0])]).sum()


def test_a_forest_of_many_says_how_many_there_are(run: Run) -> None:
    ax = run.plot(most=5)
    drawn = sum(len(line.get_xdata()) for line in ax.lines if line.get_marker() == "o")  # type: ignore[arg-type]
    assert drawn == 5
    legend = ax.get_legend()
    assert legend is not None
    told = sum(int(text.get_text().split("(")[1].rstrip(")")) for text in legend.get_texts())
    assert told == (run.effects["support"] == "defined").sum()


def test_a_saved_study_of_arms_comes_back(tmp_path: Path) -> None:
    study = study_of(("random:causal", "outcome only", "causal"))
    study.save(tmp_path / "arms")
    again, levels, marks = load_arms(tmp_path / "arms")
    assert marks == study.marks and again.sesoi == 0.08 and again.given == study.contrasts.given
    pd.testing.assert_frame_equal(again.to_frame(), study.contrasts.to_frame())
    pd.testing.assert_frame_equal(levels.to_frame(), study.levels.to_frame())
    assert again.dose is not None and study.contrasts.dose is not None
    pd.testing.assert_frame_equal(again.dose.to_frame(), study.contrasts.dose.to_frame())
    with pytest.raises(InputError, match="no study of arms"):
        load_arms(tmp_path)
    (tmp_path / "arms" / "study.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="damaged"):
        load_arms(tmp_path / "arms")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.5, ".500"), (-0.25, "−.250"), (1.0, "1.000"), (1234, "1,234"), (None, "–"), (float("nan"), "–"),
     (-0.0001, ".000"), (12345.6, "12,346"), (True, "yes"), (-3, "−3")],
)  # fmt: skip
def test_numbers_read_alike(value: object, shown: str) -> None:
    assert number(value) == shown


def test_effects_carry_their_sign() -> None:
    assert [signed(v) for v in (0.5, -0.5, 0.0, None)] == ["+.50", "−.50", ".00", "–"]
    assert interval(-0.1, 0.2, signed, 2) == "[−.10, +.20]" and interval(None, float("nan")) == "–"


def test_unseen_characters_are_written_out() -> None:
    assert plain("a\x00b\u2028c\u202ed\ud800e\r\nf\tg") == "a\\u0000b\\u2028c\\u202ed\\ud800e\nf\tg"
    assert "more characters" in plain("x" * 5000) and len(plain("x" * 5000)) < 4100
    assert short("a\n b" * 40, 10) == "a ba ba b…"


def test_a_table_keeps_numbers_apart_from_words() -> None:
    frame = pd.DataFrame({"name": ["a", "b"], "value": [0.5, np.nan], "note": ["", None]})
    table = Table.of("t", frame, verdict="name")
    assert table.columns == (("name", False), ("value", True)) and table.verdicts == 0
    assert table.rows == (("a", ".500"), ("b", "–"))


def test_every_colour_has_a_partner_on_dark_ground() -> None:
    assert int(dark("#000000")[1:3], 16) > 200 and int(dark("#ffffff")[1:3], 16) < 40
    for colour in ("#b2182b", "#2166ac", "#57606a"):
        red, green, blue = (int(dark(colour)[i : i + 2], 16) for i in (1, 3, 5))
        assert 0.21 * red + 0.72 * green + 0.07 * blue > 100
    with pytest.raises(ValueError, match="unexpected style"):
        Sheet().name("fill: red}body{background:url(http://evil.example)")
