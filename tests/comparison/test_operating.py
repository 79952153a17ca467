"""Operating characteristics by simulation: controls, chance band, corrected correlation, equivalence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from audit.comparison import compare
from audit.comparison.controls import ORACLE, PERMUTED
from audit.comparison.frames import join
from audit.comparison.measures import Measured, _pearson, _ranked, _reliability
from audit.comparison.ranks import by_trajectory, shuffled_medians
from audit.comparison.resample import cluster_counts, equivalence, span

from .dgp import World, study

SMALL = World(games=20, per_game=1, points=(8, 16), rollouts=16)


@pytest.mark.slow
def test_the_oracle_is_found_and_the_permuted_control_is_not() -> None:
    """200 studies of 20 games, one trajectory each: the whole comparison, primary measure."""
    oracle = permuted = 0
    for seed in range(200):
        effects, signals = study(SMALL, np.random.default_rng(seed))
        found = compare(effects, signals, draws=400, shuffles=200, seed=seed).frame
        verdicts = found[found["measure"] == "spearman"].set_index("signal")["verdict"]
        oracle += verdicts[ORACLE] == "better"
        permuted += verdicts[PERMUTED] == "better"
    assert oracle >= 190
    assert permuted <= 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spearman", "kendall"])
@pytest.mark.parametrize("tied", [0, 3])
def test_the_chance_band_errs_as_often_as_it_says(kind: str, tied: int) -> None:
    """A signal without any relation leaves the 95 % band in 5 % of the studies, ties or not."""
    world = replace(SMALL, games=8, strength=0.0, wander=0.0, tied=tied)
    outside = 0
    studies = 400
    for seed in range(studies):
        joined = join(*study(world, np.random.default_rng(seed)))
        value = np.nanmedian(by_trajectory(joined.values, joined.tau, joined.groups, kind=kind))
        chance = shuffled_medians(joined.values, joined.tau, joined.groups, kind=kind, shuffles=400, seed=seed)
        low, high = np.quantile(chance, [0.025, 0.975])
        outside += not low <= value <= high
    assert 0.02 <= outside / studies <= 0.08  # 5 % with three standard errors


def _truth(world: World) -> tuple[float, float]:
    """Median within-trajectory Spearman, and pooled within-trajectory Pearson, of signal and true effect."""
    effects, signals = study(replace(world, games=6000, per_game=1), np.random.default_rng(99))
    frame = effects.merge(signals, on="point").sort_values(["trajectory", "step"])
    code = pd.factorize(frame["trajectory"])[0]
    rows = np.split(np.arange(len(frame)), np.flatnonzero(np.diff(code)) + 1)
    x, tau = frame["signal"].to_numpy(), frame["truth"].to_numpy()
    spearman = float(np.nanmedian(by_trajectory(x[:, None], tau, rows)))
    centred = frame.groupby("trajectory")[["signal", "truth"]].transform(lambda v: v - v.mean())
    a, b = centred["signal"].to_numpy(), centred["truth"].to_numpy()
    return spearman, float(a @ b / np.sqrt((a @ a) * (b @ b)))


def _measured(world: World, seed: int) -> Measured:
    joined = join(*study(world, np.random.default_rng(seed)))
    counts = cluster_counts(len(joined.games), 600, seed)
    out = Measured()
    out.reliability["signal"] = _reliability(joined, joined.values[:, 0], counts)
    _ranked(out, "spearman", joined, joined.values, joined.tau, counts, 2, seed)
    _pearson(out, "signal", joined, joined.values[:, 0], counts, 2, seed)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", [8, 24])
def test_the_corrected_correlation_covers_the_true_one(rollouts: int) -> None:
    """At .95 +- .03, while the uncorrected interval misses the truth often.

    With 600 studies (not part of the tests) Pearson's is .955-.962 here, .942 with 15 games, .937 with longer
    trajectories.
    """
    world = replace(SMALL, games=30, rollouts=rollouts)
    truth = _truth(world)
    studies = 400
    hit = np.zeros(2)
    raw = 0
    for seed in range(10_000, 10_000 + studies):
        found = _measured(world, seed).found
        for i, name in enumerate(("spearman", "pearson")):
            one = found["signal", name]
            assert one.corrected is not None
            between = span(one.corrected[1], one.clusters, 0.95)
            hit[i] += between.low <= truth[i] <= between.high
        plain = span(found["signal", "pearson"].draws, 30, 0.95)
        raw += plain.low <= truth[1] <= plain.high
    assert (np.abs(hit / studies - 0.95) <= 0.03).all(), hit / studies
    assert raw / studies < 0.9 if rollouts == 24 else raw / studies < 0.4


@pytest.mark.slow
def test_equivalence_is_claimed_wrongly_in_at_most_alpha() -> None:
    """At the edge of the margin: the truth is the margin itself."""
    world = replace(SMALL, games=40, strength=0.25, wander=0.05)
    truth = _truth(world)
    claimed = np.zeros(2)
    studies = 250
    for seed in range(studies):
        found = _measured(world, seed).found
        for i, name in enumerate(("spearman", "pearson")):
            one = found["signal", name]
            claimed[i] += equivalence(one.excess, one.clusters, 0.0, truth[i]) <= 0.05
    assert (claimed / studies <= 0.05 + 0.025).all(), claimed / studies  # two standard errors
    assert (claimed > 0).all()  # it can be claimed
