"""The confirmatory family: what each kind of hypothesis tests, Holm over runs, and how often it errs (exact truth)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from audit.comparison import Comparison, compare, confirm, family
from audit.comparison.confirm import in_short
from audit.comparison.pivotal import recall_at, router_curve
from audit.comparison.resample import cluster_counts, holm
from audit.plan import Hypothesis

from .dgp import World, study

FAST: dict[str, Any] = {"draws": 400, "shuffles": 200}
SHARE = 0.25
EVERY = (
    Hypothesis("H1", "ranks steps", "signal"),
    Hypothesis("H2", "beats noise", "signal", than="noise"),
    Hypothesis("H3", "adds nothing", "noise", "equivalence:partial_fluency", margin=0.3),
    Hypothesis("H4", "recovers more than its share", "sized", "router", share=SHARE),
    Hypothesis("H5", "a judge ranks steps", "judge"),
    Hypothesis("H6", "about something else"),
)


@pytest.fixture(scope="module")
def frames() -> tuple[pd.DataFrame, pd.DataFrame]:
    effects, signals = study(World(games=20, per_game=1, strength=0.8), np.random.default_rng(0))
    noise = np.random.default_rng(1).normal(size=len(signals))
    return effects, signals.assign(noise=noise, sized=signals["signal"].abs() + effects["estimate"].abs())


@pytest.fixture(scope="module")
def compared(frames: tuple[pd.DataFrame, pd.DataFrame]) -> Comparison:
    return compare(*frames, hypotheses=EVERY, draws=2000, shuffles=1000)


def test_every_kind_is_tested_and_what_was_not_scored_is_said(compared: Comparison) -> None:
    table = compared.confirmed.set_index("hypothesis")
    assert table["verdict"].tolist() == ["better", "better", "equivalent", "better", "not tested", "not tested"]
    assert table.loc["H5", "reason"] == "judge was not scored" and not table.loc["H5", "tested"]
    assert np.isnan(table.loc[["H5", "H6"], ["estimate", "p", "p_holm"]].to_numpy(dtype=float)).all()
    # The judge was announced, so it counts: five tests, not four. What names no signal was never a test.
    announced = table["p"].head(5).astype(float).tolist()
    assert table["p_holm"].head(4).tolist() == holm(announced)[:4]
    assert table["p_holm"].min() == pytest.approx(5 * table["p"].min())
    assert (table["low"].head(4) <= table["estimate"].head(4)).all()
    text = in_short(compared.confirmed)["test"].tolist()
    assert text == [
        "signal: spearman",
        "signal: spearman than noise",
        "noise: equivalence:partial_fluency within 0.3",
        "sized: router at a share of 0.25",
        "judge: spearman",
        "-",
    ]


def test_a_difference_is_on_the_points_that_both_have(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    effects, signals = frames
    half = signals["signal"].where(np.arange(len(signals)) % 2 == 0)
    some = compare(
        effects, signals.assign(half=half), hypotheses=(Hypothesis("H", "c", "half", than="signal"),), **FAST
    )
    row = some.confirmed.iloc[0]  # the same values, but for what is missing
    assert row["estimate"] == row["low"] == row["high"] == 0.0 and row["verdict"] == "inconclusive"
    whole = some.difference("half", "signal")
    assert whole.low < whole.high


def test_the_plain_kinds_are_the_rows_of_the_comparison(compared: Comparison) -> None:
    found = compared.frame.set_index(["signal", "measure"])
    table = compared.confirmed.set_index("hypothesis")
    for key in ("estimate", "low", "high", "p"):
        assert table.loc["H1", key] == found.loc[("signal", "spearman"), key]
    difference = compared.difference("signal", "noise")
    assert table.loc["H2", "low"] == difference.low and table.loc["H2", "p"] == pytest.approx(difference.p)
    # A margin of the hypothesis is taken, the comparison's where it has none.
    tight = confirm((Hypothesis("H", "c", "noise", "equivalence:partial_fluency"),), compared).iloc[0]
    assert tight["margin"] == compared.margin and tight["p"] > table.loc["H3", "p"]
    assert tight["p"] == found.loc[("noise", "partial_fluency"), "p_equivalence"]


def test_recall_is_the_curves_and_each_resample_has_its_own_threshold(compared: Comparison) -> None:
    rng = np.random.default_rng(5)
    game = rng.integers(0, 6, 240)
    x, hit = np.round(rng.normal(size=240), 1), rng.random(240) < 0.2
    counts = cluster_counts(6, 40, 0)
    drawn = recall_at(x, hit, game, counts, 0.25)
    for i, row in enumerate(counts):
        places = np.concatenate([np.flatnonzero(game == g) for g, n in enumerate(row) for _ in range(n)])
        order = np.sort(x[places])[::-1]
        sought = 0.25 * places.size
        part = np.zeros(places.size)
        edge = order[int(np.ceil(sought - 1e-9)) - 1]
        part[x[places] > edge] = 1
        at = x[places] == edge
        part[at] = (sought - part.sum()) / at.sum()
        assert drawn[i] == pytest.approx((part * hit[places]).sum() / hit[places].sum())
    whole = np.ones((1, 6), dtype=np.int64)
    curve = router_curve(x, hit, game, 6, counts, [0.25], level=0.95, per_trajectory=1.0, judge_cost=1.0)
    assert recall_at(x, hit, game, whole, 0.25)[0] == pytest.approx(curve["recall"].iloc[0])
    assert recall_at(x, np.zeros(240, dtype=bool), game, whole, 0.25)[0] != 0.0  # no hit: undefined, never 0


def test_runs_of_one_plan_are_one_family(compared: Comparison, frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    effects, signals = frames
    shuffled = signals.assign(signal=signals["noise"])
    both = family({"one": compared, "two": compare(effects, shuffled, hypotheses=EVERY, **FAST)})
    assert both["run"].tolist() == ["one"] * 6 + ["two"] * 6
    announced = both[both["signal"].notna()]
    assert announced.loc[announced["tested"], "p_holm"].tolist() == [
        p for p, tested in zip(holm(announced["p"].astype(float).tolist()), announced["tested"], strict=True) if tested
    ]
    first = both[both["run"] == "one"].reset_index(drop=True)
    assert (first["p_holm"].head(4) >= compared.confirmed["p_holm"].head(4)).all()


def test_without_a_pivotal_point_the_router_is_undefined(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    effects, signals = frames
    none = compare(effects.assign(state="negligible"), signals, hypotheses=EVERY[3:4], **FAST).confirmed.iloc[0]
    assert none["reason"] == "no point is pivotal" and none["verdict"] == "inconclusive" and none["p_holm"] == 1.0


# How often it errs ------------------------------------------------------------------------------------------------

SMALL = World(games=24, per_game=1, points=(12, 18), rollouts=24, strength=0.0, wander=0.0)
STUDIES = 150


def _studies(
    kind: str, hypotheses: tuple[Hypothesis, ...], world: World = SMALL, studies: int = STUDIES
) -> list[pd.DataFrame]:
    """Confirmatory tables of simulated studies; `kind` says how the signals come about."""
    tables = []
    for seed in range(studies):
        rng = np.random.default_rng(seed)
        effects, signals = study(world, rng)
        if kind == "through fluency":
            # Fluency takes two values and moves the effect and the signal; given it, they are independent.
            common = rng.random(len(effects)) < 0.5
            effects["pi"] = np.where(common, 0.6, 0.2)
            effects["estimate"] = effects["estimate"] + 0.2 * common
            signals["signal"] = rng.normal(size=len(effects)) + 1.5 * common
        elif kind == "two alike":
            tau = effects["truth"] / world.spread
            signals["signal"], signals["other"] = (0.5 * tau + rng.normal(size=len(effects)) for _ in range(2))
        elif kind == "routed":
            # Pivotal or not, a step has the same chance to be sent; games differ in how many of theirs are pivotal.
            often = rng.beta(1, 5, world.games)
            hit = rng.random(len(effects)) < often[pd.factorize(effects["game"])[0]]
            effects["state"] = np.where(hit, "pivotal", "negligible")
            signals["signal"] = rng.normal(size=len(effects))
        elif kind == "routed at the margin":
            # Sent with probability 1/4 + 1/10 where pivotal: at a share of r over all, recall is r + the margin.
            hit = rng.random(len(effects)) < 0.2
            effects["state"] = np.where(hit, "pivotal", "negligible")
            sent = rng.random(len(effects)) < np.where(hit, SHARE + 0.1, SHARE - 0.025)
            signals["signal"] = sent + 0.5 * rng.random(len(effects))
        tables.append(compare(effects, signals, hypotheses=hypotheses, seed=seed, **FAST).confirmed)
    return tables


def _rate(tables: list[pd.DataFrame], column: str = "p") -> list[float]:
    return list(np.mean([(t[column].astype(float) <= 0.05).to_numpy() for t in tables], axis=0))


BOUND = 0.05 + 2.5 * (0.05 * 0.95 / STUDIES) ** 0.5  # 5 % with two and a half standard errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "hypotheses"),
    [
        ("through fluency", (Hypothesis("A", "c", "signal", "partial_fluency"),)),
        (
            "two alike",
            (
                Hypothesis("A", "c", "signal", than="other"),
                Hypothesis("B", "c", "signal", "auc", than="other"),
                Hypothesis("C", "c", "other", "partial_fluency", than="signal"),
            ),
        ),
        ("routed at the margin", (Hypothesis("A", "c", "signal", "equivalence:router", share=SHARE, margin=0.1),)),
    ],
)
def test_a_true_null_is_rejected_in_at_most_alpha(kind: str, hypotheses: tuple[Hypothesis, ...]) -> None:
    """The nulls are exact; the claim "better" is two-sided, so that it is expected in half of alpha."""
    world = SMALL if kind != "routed at the margin" else replace(SMALL, games=60)
    rates = _rate(_studies(kind, hypotheses, world))
    assert max(rates) <= BOUND, rates
    if kind == "routed at the margin":
        assert min(rates) > 0, rates  # it can be claimed


@pytest.mark.slow
def test_raw_correlations_are_found_where_partial_ones_are_none() -> None:
    """Such a signal does rank the effects, through fluency alone; so the test above could have failed."""
    asked = (Hypothesis("H", "c", "signal"), Hypothesis("E", "c", "signal", "equivalence:partial_fluency", margin=0.2))
    raw, nothing = _rate(_studies("through fluency", asked, replace(SMALL, games=40), 40))
    assert raw >= 0.8 and nothing >= 0.8


@pytest.mark.slow
def test_a_difference_at_the_margin_is_not_called_equivalent() -> None:
    """Truth by a study of 3,000 games; the claim of equivalence within exactly that difference errs in alpha."""
    world = replace(SMALL, games=30, rollouts=24)

    def frames(games: int, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        rng = np.random.default_rng(seed)
        effects, signals = study(replace(world, games=games), rng)
        tau = effects["truth"] / world.spread
        return effects, signals.assign(
            signal=0.6 * tau + rng.normal(size=len(tau)), other=0.3 * tau + rng.normal(size=len(tau))
        )

    effects, signals = frames(3000, 999)
    exact = compare(effects.assign(estimate=effects["truth"], variance=0.0), signals, draws=100, shuffles=100)
    margin = exact.difference("signal", "other").estimate
    asked = (Hypothesis("H", "c", "signal", "equivalence:spearman", than="other", margin=margin),)
    tables = [compare(*frames(30, seed), hypotheses=asked, seed=seed, **FAST).confirmed for seed in range(STUDIES)]
    assert 0 < _rate(tables)[0] <= BOUND


@pytest.mark.slow
def test_the_family_errs_in_alpha_at_most() -> None:
    """Four true nulls, Holm: any wrong claim in at most 5 % of the studies; the router alone in 5 % as well."""
    asked = (
        Hypothesis("A", "c", "signal"),
        Hypothesis("B", "c", "signal", "partial_fluency"),
        Hypothesis("C", "c", "signal", "router", share=SHARE),
        Hypothesis("D", "c", "signal", "auc"),
    )
    tables = _studies("routed", asked)
    wrong = np.mean([(table["verdict"] != "inconclusive").any() for table in tables])
    assert wrong <= BOUND, wrong
    assert max(_rate(tables)) <= BOUND, _rate(tables)
