"""Finding the pivotal steps: AUC, average precision, precision and recall at a budget, sign agreement, the router.

Knows: the elementary statistics with ties and their chance. Hides: the forms that make 10,000 resamples cheap (an
AUC is a bilinear form in the games' counts; a share is a ratio of totals).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from audit.comparison.ranks import BLOCK, permutations
from audit.comparison.resample import span, totals_by

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def auc_parts(x: Floats, hit: Bools, groups: Sequence[Ints]) -> Floats:
    """(trajectories, 2): pairs of a hit and a miss of a trajectory in right order (ties half), and all."""
    out = np.zeros((len(groups), 2))
    for trajectory, rows in enumerate(groups):
        n, hits = rows.size, int(hit[rows].sum())
        if 0 < hits < n:
            out[trajectory] = stats.rankdata(x[rows])[hit[rows]].sum() - hits * (hits + 1) / 2, hits * (n - hits)
    return out


def pooled_auc_matrix(x: Floats, hit: Bools, game: Ints, games: int) -> Floats:
    """(games, games) right pairs between the hits of one game and the misses of another (ties half)."""
    order = np.argsort(x, kind="stable")
    values, codes, hits = x[order], game[order], hit[order]
    below = np.zeros((values.size + 1, games), dtype=np.float64)
    below[np.arange(1, values.size + 1)[~hits], codes[~hits]] = 1
    below = below.cumsum(axis=0)
    left, right = np.searchsorted(values, values, "left"), np.searchsorted(values, values, "right")
    out = np.zeros((games, games))
    np.add.at(out, codes[hits], (below[left[hits]] + below[right[hits]]) / 2)
    return out


def pooled_auc(matrix: Floats, hits: Floats, misses: Floats, counts: NDArray[Any]) -> Floats:
    """AUC of resamples given by counts (resamples, games). hits, misses: of each game."""
    c = counts.astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        value: Floats = ((c @ matrix) * c).sum(axis=1) / ((c @ hits) * (c @ misses))
    return value


def average_precision(x: Floats, hit: NDArray[Any]) -> Floats:
    """Average precision, sum of (recall step) x precision over distinct values, as scikit-learn defines it.

    hit: (points,) or (sets, points) of 0/1. Returns (sets,); NaN for a set without a hit.
    """
    order = np.argsort(-x, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(x[order]) != 0, True))
    # Whole numbers below 2^24, which single precision holds exactly.
    found = np.atleast_2d(hit).astype(np.float32)[:, order].cumsum(axis=1)
    if ends.size < x.size:
        found = found[:, ends]
    steps = np.diff(found, axis=1, prepend=np.float32(0))
    with np.errstate(divide="ignore", invalid="ignore"):
        value: Floats = np.einsum("ij,ij,j->i", steps, found, 1 / (ends + 1.0)) / found[:, -1]
    return value


def average_precision_draws(x: Floats, hit: Bools, game: Ints, counts: NDArray[Any]) -> Floats:
    """Average precision of resamples of games.

    Only values at which there is a hit add to it; how many hits and points are at or above each of them is linear in
    the counts of the games, so that all resamples are two matrix products.
    """
    games = counts.shape[1]
    edges = np.unique(x[hit])[::-1]  # values with a hit, highest first
    place = np.searchsorted(-edges, -x, "left")  # first edge at or below a value
    table = np.zeros((2, edges.size + 1, games), dtype=np.float32)
    np.add.at(table[1], (place, game), 1)
    np.add.at(table[0], (place[hit], game[hit]), 1)
    right, all_ = table[:, :-1].cumsum(axis=1)
    found = np.empty(counts.shape[0])
    block = max(1, 1_000_000 // edges.size)
    for start in range(0, counts.shape[0], block):
        c = counts[start : start + block].astype(np.float32)
        hits, points = c @ right.T, c @ all_.T
        steps = np.diff(hits, axis=1, prepend=np.float32(0))
        precision = hits / np.maximum(points, 1)  # no hit where there is no point
        with np.errstate(divide="ignore", invalid="ignore"):
            found[start : start + block] = np.einsum("ij,ij->i", steps, precision) / hits[:, -1]
    return found


def sign_parts(x: Floats, tau: Floats, groups: Sequence[Ints]) -> Floats:
    """(trajectories, 3): agreements of sign, agreements expected by chance, and how many signs were compared.

    Over points with an effect that is not 0; a signal of exactly 0 has no sign. Chance is the expectation when the
    signal is shuffled within the trajectory.
    """
    out = np.zeros((len(groups), 3))
    for trajectory, rows in enumerate(groups):
        rows = rows[tau[rows] != 0]
        if rows.size:
            a, b = np.sign(x[rows]), np.sign(tau[rows])
            expected = sum(float((a == s).sum() * (b == s).sum()) for s in (-1, 1)) / rows.size
            out[trajectory] = float(((a == b) & (a != 0)).sum()), expected, float((a != 0).sum())
    return out


def shuffled(x: Floats, hit: Bools, groups: Sequence[Ints], *, shuffles: int, seed: int) -> dict[str, Floats]:
    """Chance of the AUCs and of average precision when one signal's values are shuffled within trajectories."""
    rank = stats.rankdata(x)
    inner = np.zeros(x.size)
    base = pairs = 0.0
    for rows in groups:
        inner[rows] = stats.rankdata(x[rows])
        n, h = rows.size, int(hit[rows].sum())
        if 0 < h < n:
            base, pairs = base + h * (h + 1) / 2, pairs + h * (n - h)
        else:
            inner[rows] = 0.0
    hits = int(hit.sum())
    parts: dict[str, list[Floats]] = {"auc": [], "auc_pooled": [], "average_precision": []}
    for start in range(0, shuffles, BLOCK):
        n = min(BLOCK, shuffles - start)
        moved = np.zeros((n, x.size), dtype=np.float32)
        for trajectory, rows in enumerate(groups):
            if rows.size:
                moved[:, rows] = hit[rows][permutations(n, rows.size, seed, start, trajectory)]
        with np.errstate(divide="ignore", invalid="ignore"):
            parts["auc"].append((moved @ inner - base) / pairs if pairs else np.full(n, np.nan))
            pooled = (moved @ rank - hits * (hits + 1) / 2) / np.float64(hits * (x.size - hits))
        parts["auc_pooled"].append(pooled)
        parts["average_precision"].append(average_precision(x, moved))
    return {name: np.concatenate(values) for name, values in parts.items()}


def shuffled_signs(x: Floats, tau: Floats, groups: Sequence[Ints], *, shuffles: int, seed: int) -> Floats:
    """Chance of the share of equal signs."""
    rows = [group[tau[group] != 0] for group in groups]
    compared = sum(int((x[r] != 0).sum()) for r in rows)
    parts = []
    for start in range(0, shuffles, BLOCK):
        n = min(BLOCK, shuffles - start)
        equal = np.zeros(n)
        for trajectory, r in enumerate(rows):
            if r.size:
                moved = np.sign(tau[r])[permutations(n, r.size, seed, start, trajectory)]
                equal += (moved == np.sign(x[r])).sum(axis=1)
        parts.append(equal / compared if compared else np.full(n, np.nan))
    return np.concatenate(parts)


def expected_hits(x: Floats, hit: Bools, k: int) -> float:
    """Hits among the k highest values, in expectation over the order of ties."""
    order = np.argsort(-x, kind="stable")
    edge = x[order[k - 1]]
    over, at = x > edge, x == edge
    return float(hit[over].sum()) + (k - int(over.sum())) * float(hit[at].mean())


def at_budgets(x: Floats, hit: Bools, shares: Sequence[float], level: float) -> list[dict[str, float]]:
    """Precision and recall of the highest-valued share of points, beside the hypergeometric chance band.

    The band and p take every choice of k points as equally likely under chance; it is about these points, not about
    other games.
    """
    n, hits = x.size, int(hit.sum())
    rows = []
    for share in shares:
        k = max(1, int(np.ceil(share * n - 1e-9)))
        found = expected_hits(x, hit, k)
        chance = stats.hypergeom(n, hits, k)
        low, high = (float(chance.ppf(q)) for q in ((1 - level) / 2, (1 + level) / 2))
        rows.append(
            {
                "budget": share,
                "k": k,
                "hits": found,
                "precision": found / k,
                "precision_chance": hits / n,
                "precision_band_low": low / k,
                "precision_band_high": high / k,
                "recall": found / hits if hits else np.nan,
                "recall_chance": k / n,
                "recall_band_low": low / hits if hits else np.nan,
                "recall_band_high": high / hits if hits else np.nan,
                # Ties make hits fractional; rounding down keeps the p-value valid.
                "p": float(chance.sf(np.floor(found + 1e-9) - 1)) if hits else np.nan,
            }
        )
    return rows


def router_curve(
    x: Floats,
    hit: Bools,
    game: Ints,
    games: int,
    counts: NDArray[Any],
    shares: Sequence[float],
    *,
    level: float,
    per_trajectory: float,
    judge_cost: float,
) -> pd.DataFrame:
    """Recall of pivotal points when the highest-valued share r of points is sent to the judge, for every r.

    low, high: Wilson's interval, which takes pivotal points as independent. cluster_low, cluster_high: over games, at
    the threshold that r gives. calls_saved: a turn and a trajectory. cost: judge's calls times `judge_cost`, a
    trajectory; `cost_of_all` is what sending every turn would cost.
    """
    order = np.argsort(-x, kind="stable")
    hits = int(hit.sum())
    rows = []
    for share in shares:
        k = round(share * x.size)
        taken = np.zeros(x.size)
        if k:
            edge = x[order[k - 1]]
            taken[x > edge] = 1.0
            at = x == edge
            taken[at] = (k - (x > edge).sum()) / at.sum()
        found = float(taken @ hit)
        real = k / x.size
        low, high = proportion_confint(found, hits, 1 - level, method="wilson") if hits else (np.nan, np.nan)
        table = totals_by(np.column_stack([taken * hit, hit]), game, games)
        drawn = counts @ table
        with np.errstate(divide="ignore", invalid="ignore"):
            between = span(drawn[:, 0] / drawn[:, 1], games, level)
        rows.append(
            {
                "share": real,
                "recall": found / hits if hits else np.nan,
                "low": float(low),
                "high": float(high),
                "cluster_low": between.low,
                "cluster_high": between.high,
                "lift": found / hits - real if hits else np.nan,
                "calls_saved_per_turn": 1 - real,
                "calls_saved_per_trajectory": (1 - real) * per_trajectory,
                "cost_per_trajectory": real * per_trajectory * judge_cost,
                "cost_of_all": per_trajectory * judge_cost,
            }
        )
    return pd.DataFrame(rows)


def recall_at(x: Floats, hit: Bools, game: Ints, counts: NDArray[Any], share: float) -> Floats:
    """Share of the hits among the highest-valued share of points, in resamples given by counts (resamples, games).

    The threshold is each resample's own; the point at which the share is reached, and points tied with it, count in
    part. NaN in a resample without a hit.
    """
    values, place = np.unique(-x, return_inverse=True)
    table = np.zeros((2, values.size, counts.shape[1]))
    np.add.at(table[0], (place, game), 1)
    np.add.at(table[1], (place[hit], game[hit]), 1)
    points, hits = table.cumsum(axis=1)
    found = np.empty(counts.shape[0])
    block = max(1, 2_000_000 // values.size)
    for start in range(0, counts.shape[0], block):
        c = counts[start : start + block].astype(float)
        sent, right = c @ points.T, c @ hits.T
        sought = share * sent[:, -1]
        edge = np.minimum((sent < sought[:, None] - 1e-9).sum(axis=1), values.size - 1)
        row = np.arange(c.shape[0])
        before = np.where(edge > 0, sent[row, edge - 1], 0.0), np.where(edge > 0, right[row, edge - 1], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            part = (sought - before[0]) / (sent[row, edge] - before[0])
            found[start : start + block] = (before[1] + part * (right[row, edge] - before[1])) / right[:, -1]
    return found
