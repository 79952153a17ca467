"""Structural nested mean models by g-estimation: one linear system for any continuation.

Knows: statistics section 2. With blip S'psi and R_t = A_t S_t + sum_{s>t} I_s (A_s - pi_s) S_s, the outcome cleared of
own and later treatment, Y - R_t'psi, does not depend on A_t at the truth, so sum I q (A - p)(Y - l - (R - r)'psi) = 0
with cross-fitted l = E[Y|H], r = E[R|H] free of psi. Arms are stacked: the system has K q unknowns. Hides: the
stacking, the locally efficient instrument, Newton steps for the log link, the over-identification test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from audit.mrt.aipw import later_sums
from audit.mrt.data import Floats, Ints
from audit.mrt.nuisance import Fit, goodness, out_of_fold
from audit.mrt.results import Correction, Solved, by_cluster, solve
from envs.core import InputError

FEWEST_ROWS = 3  # treated and untreated rows that a column of the blip model must have
Instrument = Literal["features", "optimal"]
Residualise = Literal["design", "regression"]


@dataclass(frozen=True)
class Rows:
    """Eligible rows of a trial, sorted by trajectory and time. y, arm, unit: (rows,). p: (rows, K + 1), arm 0 first."""

    y: Floats
    arm: Ints
    unit: Ints
    p: Floats
    n: int
    clusters: Ints

    @property
    def arms(self) -> int:
        return int(self.p.shape[1]) - 1

    def given(self, centre: Floats | None = None) -> Floats:
        """(rows, K) 1(A=k) - centre_k, for k = 1..K; no centre where None."""
        hit = (self.arm[:, None] == np.arange(1, self.arms + 1)).astype(np.float64)
        return hit if centre is None else np.asarray(hit - centre[:, 1:], dtype=np.float64)


@dataclass(frozen=True)
class GFit:
    """A solved g-estimation: left (rows, Kq) instruments times (A - p); right = R - r; residual at the solution."""

    solved: Solved
    left: Floats
    right: Floats
    residual: Floats
    outcome_fit: Fit


def stacked(factor: Floats, s: Floats) -> Floats:
    """(rows, K q): factor_k * s for every arm, arm by arm."""
    return np.asarray((factor[:, :, None] * s[:, None, :]).reshape(len(s), -1), dtype=np.float64)


def g_estimate(
    rows: Rows,
    s: Floats,
    pi: Floats,
    x: Floats,
    fold: Ints,
    *,
    learner: Any = None,
    instrument: Instrument = "features",
    residualise: Residualise = "design",
    correction: Correction = "auto",
) -> GFit:
    """Identity link. s: (rows, q) blip features; pi: (rows, K + 1) continuation at logged histories; x: nuisances.

    residualise "design" uses the known E[A_t S_t | H_t] = p_t S_t and regresses only the later part of R_t;
    "regression" regresses all of R_t, as classical g-estimation with a treatment-free model does (folds = 1 and p S
    among x then equal ordinary regression with the propensity as a covariate).
    instrument "optimal" adds E[F|H,A=k] - E[F|H,A=0] of the later part F (Robins 1994).
    """
    later = later_sums(stacked(rows.given(pi), s), rows.unit)
    own = stacked(rows.given(), s)
    outcome = out_of_fold(x, rows.y[:, None], fold, learner)[:, 0]
    if residualise == "design":
        centre = stacked(rows.p[:, 1:], s) + out_of_fold(x, later, fold, learner)
    elif residualise == "regression":
        centre = out_of_fold(x, own + later, fold, learner)
    else:
        raise InputError(f"residualise: unknown {residualise!r}; use 'design' or 'regression'.")
    left = _instruments(rows, s, later, x, fold, learner, instrument)
    right, target = own + later - centre, rows.y - outcome
    solved = solve(left, right, target, rows.unit, rows.clusters, rows.n, correction)
    return GFit(solved, left, right, target - right @ solved.estimate, goodness(rows.y, outcome))


def g_estimate_log(
    rows: Rows, s: Floats, x: Floats, fold: Ints, *, learner: Any = None, correction: Correction = "auto"
) -> GFit:
    """Log link, no treatment afterwards: H_t = Y exp(-R_t'psi) with R_t = sum_{s>=t} I_s A_s S_s, solved by Newton.

    The centring m_t = E[H_t | H_t history] is fitted at psi = 0, then refitted once at the first solution. Raises
    InputError for a negative outcome or where Newton does not converge (then there may be no solution at all).
    """
    if (rows.y < 0).any():
        raise InputError("link 'log': the outcome has negative values; expected binary, counts or positive numbers.")
    own = stacked(rows.given(), s)
    total = own + later_sums(own, rows.unit)
    left = stacked(rows.given(rows.p), s)
    psi = np.zeros(left.shape[1])
    cleared = rows.y
    for _ in range(2):
        centre = out_of_fold(x, cleared[:, None], fold, learner)[:, 0]
        psi = _newton(rows.y, total, left, centre, psi)
        cleared = rows.y * np.exp(-total @ psi)
    # At the solution the equation is that of a linear system with the same root and derivative.
    right = cleared[:, None] * total
    target = cleared - centre + right @ psi
    solved = solve(left, right, target, rows.unit, rows.clusters, rows.n, correction)
    return GFit(solved, left, right, cleared - centre, goodness(cleared, centre))


@dataclass(frozen=True)
class RestrictionTest:
    """Over-identification test of a fitted blip model: chi-square statistic, df, p-value, the extra terms tested.

    Rejection says that the blip depends on the extra terms. It concerns the fitted continuation alone: a model that
    passes for the randomised continuation may be wrong for none.
    """

    statistic: float
    df: int
    p_value: float
    extra: tuple[str, ...]


def restriction_test(rows: Rows, fit: GFit, extra: Floats, names: tuple[str, ...]) -> RestrictionTest:
    """Section 2: moments of extra features, adjusted for the estimated psi, clustered; chi2 with one df a moment."""
    instruments = stacked(rows.given(rows.p), extra)
    size = int(rows.clusters.max()) + 1
    codes = rows.clusters[rows.unit]
    moments = by_cluster(instruments * fit.residual[:, None], codes, size)
    scores = by_cluster(fit.left * fit.residual[:, None], codes, size)
    adjusted = moments - scores @ np.linalg.solve(fit.solved.matrix.T, (instruments.T @ fit.right).T)
    total, spread = moments.sum(axis=0), adjusted.T @ adjusted
    m = total.size
    explained = np.diag(spread) < 1e-10 * (moments**2).sum(axis=0)
    if explained.any():
        raise InputError(
            f"restriction test: `{names[int(np.argmax(explained)) % len(names)]}` is in the model already."
        )
    if np.linalg.matrix_rank(spread / np.sqrt(np.outer(np.diag(spread), np.diag(spread)) + 1e-300), tol=1e-8) < m:
        raise InputError("restriction test: the extra terms are collinear; leave some out.")
    statistic = float(total @ np.linalg.solve(spread, total))
    return RestrictionTest(statistic, m, float(stats.chi2.sf(statistic, m)), names)


def _instruments(
    rows: Rows, s: Floats, later: Floats, x: Floats, fold: Ints, learner: Any, instrument: Instrument
) -> Floats:
    left = stacked(rows.given(rows.p), s)
    if instrument == "features":
        return left
    if instrument != "optimal":
        raise InputError(f"instrument: unknown {instrument!r}; use 'features' or 'optimal'.")
    base = out_of_fold(x, later, fold, learner, train=rows.arm == 0)
    given = rows.given(rows.p)
    for k in range(1, rows.arms + 1):
        shift = out_of_fold(x, later, fold, learner, train=rows.arm == k) - base
        left = left + given[:, [k - 1]] * shift
    return left


def _newton(y: Floats, total: Floats, left: Floats, centre: Floats, start: Floats) -> Floats:
    psi = start

    def equation(at: Floats) -> tuple[Floats, Floats]:
        cleared = y * np.exp(np.clip(-total @ at, -30, 30))
        return left.T @ (cleared - centre), cleared

    value, cleared = equation(psi)
    scale = np.abs(left).T @ (np.abs(y) + np.abs(centre)) + 1e-300
    for _ in range(100):
        if (np.abs(value) < 1e-11 * scale).all():
            return psi
        step = np.linalg.lstsq(left.T @ (cleared[:, None] * total), value, rcond=None)[0]
        size = 1.0
        while size > 1e-8:
            trial, there = equation(psi + size * step)
            if np.abs(trial / scale).max() < np.abs(value / scale).max():
                break
            size /= 2
        else:
            break
        psi, value, cleared = psi + size * step, trial, there
    if (np.abs(value) < 1e-8 * scale).all():
        return psi
    raise InputError(
        "link 'log': the estimating equation has no root in reach; use the identity link (risk differences) or a "
        "smaller effect model."
    )
