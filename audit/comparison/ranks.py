"""Rank correlations within trajectories, for many signals at once, and their chance by shuffling.

Knows: Spearman, Kendall's tau-b and Spearman's partial correlation with ties. Hides: that all of them are inner
products of centred scores (ranks, signs of pairs, residual ranks), so that all signals share a matrix product and
all shuffles one set of permutations; that signals miss different points.

Shuffling a signal within its trajectory and shuffling the effects within it are the same thing, so the effects are
shuffled, once for all signals; ties stay ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = Literal["spearman", "kendall"]

LEAST = 3  # points of a trajectory below which it has no rank correlation
FLAT = 1e-9  # squared length of a score below which it is constant
BLOCK = 500  # shuffles at once


@dataclass(frozen=True, slots=True)
class _Cell:
    """Signals that miss the same points of one trajectory: rows, columns, and their scores."""

    trajectory: int
    columns: Ints
    x: Floats  # (score length, columns), unit length or NaN
    y: Floats  # (points,) ranks, residual ranks, or raw values whose pairs are compared
    scale: float


def _cells(x: Floats, y: Floats, given: Floats | None, groups: Sequence[Ints], kind: Kind) -> Iterator[_Cell]:
    for trajectory, rows in enumerate(groups):
        usable = np.isfinite(y[rows])
        if given is not None:
            usable &= np.isfinite(given[rows])
        rows = rows[usable]
        if rows.size < LEAST + (given is not None):
            continue
        there = np.isfinite(x[rows])
        patterns, which = np.unique(there, axis=1, return_inverse=True)
        for number in range(patterns.shape[1]):
            columns = np.flatnonzero(which.ravel() == number)
            kept = rows[patterns[:, number]]
            if kept.size < LEAST + (given is not None):
                continue
            if kind == "kendall":
                scores = _signs(x[np.ix_(kept, columns)])
                effects = y[kept].astype(float)
                length = float((_signs(effects[:, None]) ** 2).sum())
            else:
                scores = _ranks(x[np.ix_(kept, columns)])
                effects = _ranks(y[kept][:, None])[:, 0]
                if given is not None:
                    z = _ranks(given[kept][:, None])[:, 0]
                    if z @ z > FLAT:
                        scores = scores - np.outer(z, z @ scores) / (z @ z)
                        effects = effects - z * (z @ effects) / (z @ z)
                length = float(effects @ effects)
            lengths = (scores**2).sum(axis=0)
            with np.errstate(divide="ignore", invalid="ignore"):
                unit = np.where(lengths > FLAT, scores / np.sqrt(lengths), np.nan)
            if length > FLAT:
                yield _Cell(trajectory, columns, unit, effects, length**-0.5)


def _ranks(values: Floats) -> Floats:
    ranks = stats.rankdata(values, axis=0)
    centred: Floats = ranks - ranks.mean(axis=0)
    return centred


def _signs(values: Floats) -> Floats:
    first, second = np.triu_indices(values.shape[0], 1)
    signs: Floats = np.sign(values[first] - values[second])
    return signs


def by_trajectory(
    x: Floats, y: Floats, groups: Sequence[Ints], *, kind: Kind = "spearman", given: Floats | None = None
) -> Floats:
    """(trajectories, signals) rank correlations; NaN where undefined (too few points, or one side constant).

    x: (points, signals), NaN where a signal is missing. y: (points,). groups: the rows of each trajectory.
    given: (points,) a covariate: Spearman's partial correlation, the correlation of the residuals of ranks.
    """
    found = np.full((len(groups), x.shape[1]), np.nan)
    for cell in _cells(x, y, given, groups, kind):
        scores = cell.y if kind == "spearman" else _signs(cell.y[:, None])[:, 0]
        found[cell.trajectory, cell.columns] = cell.scale * (scores @ cell.x)
    return found


@lru_cache(maxsize=1024)
def permutations(n: int, size: int, *key: int) -> NDArray[np.int32]:
    """(n, size) random permutations from the stream that a key of whole numbers names; do not write into them."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    return rng.permuted(np.broadcast_to(np.arange(size, dtype=np.int32), (n, size)), axis=1)


def shuffled_medians(
    x: Floats,
    y: Floats,
    groups: Sequence[Ints],
    *,
    kind: Kind = "spearman",
    given: Floats | None = None,
    shuffles: int = 2000,
    seed: int = 0,
) -> Floats:
    """(shuffles, signals) medians of `by_trajectory` when signals are shuffled within trajectories."""
    cells = list(_cells(x, y, given, groups, kind))
    out = np.full((shuffles, x.shape[1]), np.nan)
    for start in range(0, shuffles, BLOCK):
        n = min(BLOCK, shuffles - start)
        found = np.full((n, len(groups), x.shape[1]), np.nan, dtype=np.float32)
        for cell in cells:
            order = permutations(n, cell.y.size, seed, start, cell.trajectory)
            moved = cell.y[order]
            if kind == "kendall":
                first, second = np.triu_indices(cell.y.size, 1)
                moved = np.sign(moved[:, first] - moved[:, second])
            found[:, cell.trajectory, cell.columns] = cell.scale * (
                moved.astype(np.float32) @ cell.x.astype(np.float32)
            )
        for column in range(x.shape[1]):
            defined = ~np.isnan(found[0, :, column])
            if defined.any():
                out[start : start + n, column] = np.median(found[:, defined, column], axis=1)
    return out
