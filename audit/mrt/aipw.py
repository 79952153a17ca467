"""Blips under randomised continuation: pseudo-outcomes by cross-fitted AIPW with known probabilities.

Knows: statistics section 1. phi_t,k = mu_k - mu_0 + 1(A=k)/p(k) (Y - mu_k) - 1(A=0)/p(0) (Y - mu_0) has conditional
mean tau_t,k(H_t) whatever mu is, as long as mu does not depend on the row's cluster. Hides: which folds fit what, the
removal of future noise inside each fold.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from audit.mrt.data import Bools, Floats, Ints
from audit.mrt.nuisance import fit_predict, out_of_fold


def pseudo_outcomes(y: Floats, arm: Ints, p: Floats, mu: Floats) -> Floats:
    """(rows, K) phi of each arm against arm 0. y: (rows,); p, mu: (rows, K + 1), arm 0 first."""
    residual = (arm[:, None] == np.arange(p.shape[1])) / p * (y[:, None] - mu)
    phi = mu + residual
    return np.asarray(phi[:, 1:] - phi[:, :1], dtype=np.float64)


def arm_means(x: Floats, y: Floats, arm: Ints, fold: Ints, arms: int, learner: Any) -> Floats:
    """(rows, K + 1) out-of-fold E[Y | H, A = k]: one regression an arm, fitted on the other folds."""
    fits = [out_of_fold(x, y[:, None], fold, learner, train=arm == k)[:, 0] for k in range(arms + 1)]
    return np.column_stack(fits)


def arm_means_without_future_noise(
    x: Floats, y: Floats, arm: Ints, p: Floats, fold: Ints, unit: Ints, learner: Any
) -> tuple[Floats, Floats]:
    """Outcomes cleared of later randomisation and their arm means: ((rows,) Yt~, (rows, K + 1) mu).

    Yt~ = Y - sum_{s>t} sum_k (1(A_s=k) - p_s(k)) tau_hat_{s,k}; the term has mean 0 given (H_t, A_t) for any tau_hat,
    so phi stays unbiased. Within a fold both tau_hat and mu come from the training trajectories alone.
    """
    arms = p.shape[1] - 1
    cleared, means = y.copy(), np.zeros_like(p)
    given = (arm[:, None] == np.arange(1, arms + 1)) - p[:, 1:]
    for f in range(int(fold.max()) + 1):
        held = fold == f
        first = _fit_all(x, y, arm, ~held, arms, learner)
        noise = (given * (first[:, 1:] - first[:, :1])).sum(axis=1)
        own = y - later_sums(noise[:, None], unit)[:, 0]
        second = _fit_all(x, own, arm, ~held, arms, learner)
        cleared[held], means[held] = own[held], second[held]
    return cleared, means


def later_sums(values: Floats, unit: Ints) -> Floats:
    """(rows, m) sums over strictly later rows of the same trajectory; rows sorted by trajectory and time."""
    total = np.cumsum(values, axis=0)
    last = np.concatenate([unit[1:] != unit[:-1], [True]])
    end = np.flatnonzero(last)
    block = np.cumsum(np.concatenate([[0], last[:-1].astype(np.int64)]))
    return np.asarray(total[end[block]] - total, dtype=np.float64)


def _fit_all(x: Floats, y: Floats, arm: Ints, train: Bools, arms: int, learner: Any) -> Floats:
    fits = []
    for k in range(arms + 1):
        rows = train & (arm == k)
        fits.append(fit_predict(learner, x[rows], y[rows], x) if rows.any() else np.zeros(len(x)))
    return np.column_stack(fits)
