"""Reading blips: which decisions matter, who leads, which description of a decision predicts best.

Knows: a leaderboard needs simultaneous intervals and the number of clusters behind each line; a representation chosen
by fit on the randomised continuation says nothing about the others. Hides: the cross-validation of blip models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from audit.mrt.aipw import arm_means, pseudo_outcomes
from audit.mrt.blip import Blips, blip, eligible_rows
from audit.mrt.data import MRTData
from audit.mrt.design import Effect, Rule, nuisance_matrix, projection
from audit.mrt.diagnostics import transport_check
from audit.mrt.nuisance import check_learner
from audit.mrt.results import Effects, by_cluster
from envs.core import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOES_NOT_CERTIFY = (
    "chosen by fit on the randomised-continuation blip; this does not certify the representation for no later "
    "treatment or a target policy: test those with Blips.test_restrictions"
)


@dataclass(frozen=True, eq=False)
class Leaderboard:
    """Groups by impact. effects: the blips. table: sorted by estimate, with simultaneous limits, adjusted p, and the
    range of ranks each group may hold (1 = largest) given every pairwise difference at once."""

    effects: Effects
    table: pd.DataFrame
    warnings: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        """The sorted table."""
        return self.table.copy()

    def summary(self) -> str:
        """The table as text, under the estimand, with warnings."""
        body = self.table.to_string(index=False, float_format=lambda v: f"{v:.4g}")
        return "\n".join([self.effects.what, body, *(f"warning: {w}" for w in self.warnings)])

    def plot(self, ax: Axes | None = None, alpha: float = 0.05) -> Axes:
        """Forest plot in order of impact; returns the Axes."""
        return self.effects.select(list(self.table["term"])).plot(ax, alpha)


def impact_scores(
    data: MRTData,
    by: Effect,
    *,
    continuation: Rule = "randomized",
    alpha: float = 0.05,
    used_for: MRTData | None = None,
    **options: Any,
) -> Leaderboard:
    """Impact of intervening by group (action, tool, capability, state cell ...), as a leaderboard.

    by: a feature, features (their combinations) or named rules. continuation and options: as in `blip`. Intervals are
    simultaneous at 1 - alpha (max-t); ranks come from all pairwise differences, simultaneous too: a group's best rank
    is 1 + the number of groups surely above it. used_for: another trial the numbers are meant for; differences of its
    histories or coins become warnings. For single decisions use `Blips.at_decisions` of a formula.
    Raises InputError with multi-arm trials unless each arm's groups are wanted as separate lines (they are listed so).
    """
    if isinstance(by, str) and "~" in by:
        raise InputError("impact_scores: `by` names groups; for a formula use blip() and Blips.at_decisions.")
    effects: Blips = blip(data, continuation, by, **options)
    table = effects.joint(alpha)
    counts = pd.DataFrame({k: list(v) for k, v in effects.details.items()})
    table = pd.concat([table, counts], axis=1)
    table["reason"] = list(effects.reasons)
    table["rank_best"], table["rank_worst"] = _ranks(effects, alpha)
    warnings = transport_check(data, used_for).warnings if used_for is not None else ()
    missing = int(table["reason"].astype(bool).sum())
    if missing:
        warnings += (f"{missing} group(s) without enough data are listed without numbers",)
    table = table.sort_values("estimate", ascending=False, na_position="last", ignore_index=True)
    return Leaderboard(effects, table, warnings)


def _ranks(effects: Effects, alpha: float) -> tuple[list[Any], list[Any]]:
    there = [i for i, se in enumerate(effects.se) if np.isfinite(se) and se > 0]
    best: list[Any] = [None] * len(effects.names)
    worst: list[Any] = [None] * len(effects.names)
    if len(there) < 2:
        for i in there:
            best[i] = worst[i] = 1
        return best, worst
    pairs = [(i, j) for a, i in enumerate(there) for j in there[a + 1 :]]
    weights = np.zeros((len(pairs), len(effects.names)))
    for row, (i, j) in enumerate(pairs):
        weights[row, i], weights[row, j] = 1, -1
    differences = effects.contrast(weights, [str(k) for k in range(len(pairs))]).joint(alpha, draws=20_000)
    above = dict.fromkeys(there, 0)
    below = dict.fromkeys(there, 0)
    for (i, j), low, high in zip(pairs, differences["low"], differences["high"], strict=True):
        if low > 0:
            above[j] += 1
            below[i] += 1
        elif high < 0:
            above[i] += 1
            below[j] += 1
    for i in there:
        best[i], worst[i] = 1 + above[i], len(there) - below[i]
    return best, worst


def select_representation(
    data: MRTData,
    candidates: Mapping[str, Effect],
    *,
    learner: Any = None,
    nuisance: str | Sequence[str] | None = None,
    folds: int = 5,
    cluster: str | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Cross-validated fit of blip models on the randomised-continuation pseudo-outcome, best first.

    candidates: name -> effect as in `blip` (not overlapping groups). Loss: mean over eligible rows and arms of
    (phi - S'beta)^2 with beta and nuisances from other folds; phi has conditional mean tau, so losses differ in
    expectation by the squared distance to the true blip. Columns: name, columns, loss, excess (over the best), se of
    the excess (clustered), within_one_se. `table.attrs["warning"]` repeats what the choice does NOT show.
    """
    check_learner(learner, folds)
    if not candidates or folds < 2:
        raise InputError("select_representation: needs at least one candidate and folds >= 2.")
    rows = eligible_rows(data, cluster)
    fold = data.folds(folds, cluster, seed)[data.eligible]
    x = nuisance_matrix(nuisance, data, data.eligible)
    phi = pseudo_outcomes(rows.y, rows.arm, rows.p, arm_means(x, rows.y, rows.arm, fold, rows.arms, learner))
    losses, sizes = [], []
    for name, effect in candidates.items():
        s = projection(effect, data.frame.loc[data.eligible])
        if not s.exclusive:
            raise InputError(f"select_representation: groups of {name!r} overlap; use a formula.")
        fitted = np.zeros_like(phi)
        for f in range(folds):
            held = fold == f
            fitted[held] = s.matrix[held] @ np.linalg.lstsq(s.matrix[~held], phi[~held], rcond=None)[0]
        losses.append(((phi - fitted) ** 2).mean(axis=1))
        sizes.append(s.matrix.shape[1])
    loss = np.array([v.mean() for v in losses])
    top = int(np.argmin(loss))
    codes, size = rows.clusters[rows.unit], int(rows.clusters.max()) + 1
    gaps = np.column_stack([v - losses[top] for v in losses])
    spread = by_cluster(gaps - gaps.mean(axis=0), codes, size)
    se = np.sqrt((spread**2).sum(axis=0)) / len(gaps)
    table = pd.DataFrame(
        {
            "name": list(candidates),
            "columns": sizes,
            "loss": loss,
            "excess": loss - loss[top],
            "se": se,
            "within_one_se": loss - loss[top] <= se,
        }
    ).sort_values("loss", ignore_index=True)
    table.attrs["warning"] = DOES_NOT_CERTIFY
    return table
