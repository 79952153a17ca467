"""Cross-fitted regressions: predictions for each row from models that never saw its cluster.

Knows: folds and learners. Hides: the linear default from per-fold cross products (one pass over the rows whatever the
number of folds and targets), cloning of scikit-learn learners, classifiers for binary targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone, is_classifier

from audit.mrt.data import Bools, Floats, Ints
from envs.core import InputError

_RIDGE = 1.0  # in rows of a standardised column: steadies small folds, invisible in large ones


@dataclass(frozen=True)
class Fit:
    """How well a nuisance model predicts out of fold: r2 and the slope of the target on its prediction (1 is ideal)."""

    r2: float
    slope: float


def check_learner(learner: Any, folds: int) -> None:
    """Raise InputError for a learner without fit and predict, or a flexible learner without cross-fitting.

    In-sample predictions of a flexible learner follow each row's own outcome: coverage .80 instead of .95 with deep
    trees (statistics section 1). Only the linear default may go without, as classical g-estimation does.
    """
    if learner is not None and not (hasattr(learner, "fit") and hasattr(learner, "predict")):
        raise InputError(f"learner: {learner!r} has no fit and predict; expected a scikit-learn estimator or None.")
    if folds < 2 and learner is not None:
        raise InputError("folds: a learner needs cross-fitting with folds >= 2; only learner=None may use folds=1.")


def out_of_fold(x: Floats, targets: Floats, fold: Ints, learner: Any = None, train: Bools | None = None) -> Floats:
    """(rows, m) predictions of targets (rows, m); those of fold f come from the other folds' rows where `train` holds.

    x: (rows, d), first column ones. With a single fold the fit is in-sample least squares. Where no row of the other
    folds may be used the prediction is 0, which costs precision and never bias.
    """
    use = np.ones(len(x), dtype=bool) if train is None else train
    k = int(fold.max()) + 1 if fold.size else 1
    if learner is None:
        return _linear(x, targets, fold, use, k)
    out = np.zeros_like(targets)
    for f in range(k):
        held = fold == f
        fit = use & ~held
        if not fit.any() or not held.any():
            continue
        for j in range(targets.shape[1]):
            out[held, j] = fit_predict(learner, x[fit], targets[fit, j], x[held])
    return out


def fit_predict(learner: Any, x: Floats, target: Floats, new: Floats) -> Floats:
    """Predictions at `new` of a learner (None: linear) fitted on x and target; probabilities from a classifier."""
    if learner is None:
        return np.asarray(new @ _ridge(x, target[:, None]), dtype=np.float64)[:, 0]
    if (target == target[0]).all():
        return np.full(len(new), target[0])
    model = clone(learner)
    if is_classifier(learner):
        if not np.isin(target, (0, 1)).all():
            raise InputError("learner: a classifier needs a 0/1 outcome; use a regressor here.")
        model.fit(x[:, 1:], target.astype(int))
        return np.asarray(model.predict_proba(new[:, 1:])[:, 1], dtype=np.float64)
    model.fit(x[:, 1:], target)
    return np.asarray(model.predict(new[:, 1:]), dtype=np.float64).reshape(len(new))


def goodness(target: Floats, predicted: Floats) -> Fit:
    """Out-of-fold R2 and calibration slope; NaN where the target or the prediction does not vary."""
    total = float(((target - target.mean()) ** 2).sum())
    spread = float(((predicted - predicted.mean()) ** 2).sum())
    r2 = 1 - float(((target - predicted) ** 2).sum()) / total if total > 0 else float("nan")
    cross = float(((target - target.mean()) * (predicted - predicted.mean())).sum())
    return Fit(r2, cross / spread if spread > 1e-12 * max(total, 1e-300) else float("nan"))


def _linear(x: Floats, targets: Floats, fold: Ints, use: Bools, k: int) -> Floats:
    if k == 1:
        return np.asarray(x @ np.linalg.lstsq(x[use], targets[use], rcond=None)[0], dtype=np.float64)
    scale = np.sqrt((x * x).mean(axis=0))
    scale[scale == 0] = 1.0
    z = x / scale
    grams, crosses = [], []
    for f in range(k):
        rows = use & (fold == f)
        grams.append(z[rows].T @ z[rows])
        crosses.append(z[rows].T @ targets[rows])
    gram, cross = np.sum(grams, axis=0), np.sum(crosses, axis=0)
    out = np.zeros_like(targets)
    for f in range(k):
        held = fold == f
        out[held] = z[held] @ _solve(gram - grams[f], cross - crosses[f])
    return out


def _ridge(x: Floats, targets: Floats) -> Floats:
    scale = np.sqrt((x * x).mean(axis=0))
    scale[scale == 0] = 1.0
    z = x / scale
    return np.asarray(_solve(z.T @ z, z.T @ targets) / scale[:, None], dtype=np.float64)


def _solve(gram: Floats, cross: Floats) -> Floats:
    """Ridge that leaves the mean alone: the first column (ones) is barely penalised."""
    penalty = np.full(len(gram), _RIDGE)
    penalty[0] = 1e-9 * (1 + gram[0, 0])
    return np.asarray(np.linalg.solve(gram + np.diag(penalty), cross), dtype=np.float64)
