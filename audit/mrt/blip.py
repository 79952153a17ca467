"""Blips: what treating at a decision changes in the final outcome, given what happens afterwards.

Knows: which estimator belongs to which continuation and what each may claim. Hides: AIPW for the randomised
continuation, g-estimation for every other, weights, grouping, the counts behind every effect.

tau^pi_t(h) = E[Y(A_1..t-1, 1, then pi) - Y(A_1..t-1, 0, then pi) | H_t = h, I_t = 1] for a continuation pi:
"randomized" (later coins as in the trial: the distal causal excursion effect), "none" (no later treatment: Robins'
blip), or a target policy. These differ wherever treatment moves later states, eligibility or length; each answers its
own question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from audit.mrt.aipw import arm_means, arm_means_without_future_noise, pseudo_outcomes
from audit.mrt.data import Bools, Floats, Ints, MRTData
from audit.mrt.design import Effect, Rule, formula_matrix, nuisance_matrix, policy_probabilities, projection
from audit.mrt.nuisance import check_learner, goodness, out_of_fold
from audit.mrt.results import Correction, Effects, by_cluster, solve
from audit.mrt.snmm import (
    FEWEST_ROWS,
    GFit,
    Instrument,
    Residualise,
    RestrictionTest,
    Rows,
    g_estimate,
    g_estimate_log,
    restriction_test,
)
from envs.core import InputError

_ILL = 1e6
RARE = 10  # trajectories with the rarer of two outcomes, below which a normal approximation is stretched


@dataclass(frozen=True, eq=False)
class Blips(Effects):
    """Effects that remember their trial: averages over histories, single decisions, tests of the model.

    s: (rows, q) blip features of the eligible rows; fit: the solved g-estimation, None for AIPW.
    """

    data: MRTData | None = None
    rows: Rows | None = None
    s: Floats | None = None
    fit: GFit | None = None
    grouped: bool = False

    def _parts(self) -> tuple[MRTData, Rows, Floats]:
        if self.data is None or self.rows is None or self.s is None:
            raise InputError("blips: this result has no trial attached; take it from blip().")
        return self.data, self.rows, self.s

    def average(self, by: Effect = "pooled", arm: int = 1) -> Effects:
        """Mean blip over the decisions of the trial, all or by group: the model's S'psi averaged over logged histories.

        The interval counts both the uncertainty of psi and that of the histories met. by: as `effect` in `blip`,
        without formulas. Raises InputError for grouped AIPW results, which are averages already.
        """
        data, rows, s = self._parts()
        if self.grouped:
            raise InputError("average: these effects are averages by group already; fit a formula to average it.")
        groups = projection(by, data.frame.loc[data.eligible])
        if not groups.grouped:
            raise InputError("average: `by` must name groups, not a formula.")
        q, size = s.shape[1], int(rows.clusters.max()) + 1
        at = slice((arm - 1) * q, arm * q)
        value = s @ self.estimate[at]
        count = groups.matrix.sum(axis=0)
        share = groups.matrix / count
        mean = share.T @ s
        estimate = mean @ self.estimate[at]
        spread = share * (value[:, None] - estimate)
        histories = by_cluster(spread, rows.clusters[rows.unit], size)
        deviations = self.deviations[:, at] @ mean.T + histories * np.sqrt(size / (size - 1))
        influence = self.influence[:, at] @ mean.T + rows.n * by_cluster(spread, rows.unit, rows.n)
        df = np.full(len(estimate), self.df[at].min())
        what = f"average over logged histories of: {self.what}"
        details = {"rows": count.astype(int).tolist()}
        return Effects(
            groups.names, estimate, influence, deviations, df, what, self.correction, details, notes=self.notes
        )

    def at_decisions(self) -> pd.DataFrame:
        """The model's blip at every eligible decision: trajectory, t, arm, blip, se (of S'psi, model taken as true)."""
        data, rows, s = self._parts()
        keys = data.decisions.loc[data.eligible, ["trajectory", "t"]].reset_index(drop=True)
        q = s.shape[1]
        tables = []
        for k in range(rows.arms):
            at = slice(k * q, (k + 1) * q)
            spread = s @ self.covariance[at, at]
            tables.append(
                keys.assign(arm=k + 1, blip=s @ self.estimate[at], se=np.sqrt(np.maximum((spread * s).sum(axis=1), 0)))
            )
        return pd.concat(tables, ignore_index=True)

    def test_restrictions(self, extra: str | Sequence[str]) -> RestrictionTest:
        """Does the blip depend on `extra` too (formula or features)? Over-identification test, section 2.

        Only for g-estimation; it tests the continuation that was fitted and no other.
        """
        data, rows, _ = self._parts()
        if self.fit is None:
            raise InputError("restriction test: needs g-estimation; fit with method='snmm'.")
        text = extra if isinstance(extra, str) else "0 + " + " + ".join(extra)
        matrix, names = formula_matrix(text, data.frame.loc[data.eligible], "extra")
        keep = [j for j, name in enumerate(names) if name != "Intercept"]
        return restriction_test(rows, self.fit, matrix[:, keep], tuple(names[j] for j in keep))


def blip(
    data: MRTData,
    continuation: Rule = "randomized",
    effect: Effect = "pooled",
    *,
    method: Literal["auto", "aipw", "snmm"] = "auto",
    learner: Any = None,
    nuisance: str | Sequence[str] | None = None,
    folds: int = 5,
    weights: str = "decision",
    per: Literal["eligible", "all"] = "eligible",
    cluster: str | None = None,
    correction: Correction = "auto",
    adjust_future: bool = False,
    link: Literal["identity", "log"] = "identity",
    instrument: Instrument = "features",
    residualise: Residualise = "design",
    seed: int = 0,
) -> Blips:
    """Estimate blips with cluster-robust intervals.

    continuation: "randomized", "none", or a target policy (feature name, constant, or function of the feature frame
    giving P(treat); (rows, K) for K arms).
    effect: "pooled", a feature or features (a group a level), a mapping name -> boolean rule (groups may overlap), or a
    formula "~ moderators". For g-estimation groups must not overlap, and the effect is the blip model itself: where it
    is wrong, psi is a projection weighted by p(1-p), not by `weights`.
    method: "aipw" only for "randomized", where it is the default; "snmm" (g-estimation) for any continuation.
    learner: any scikit-learn regressor, or classifier for a 0/1 outcome; None is linear least squares. It moves
    precision, never validity. nuisance: its features (default all declared ones and history counts).
    folds: split whole clusters, at least 2 (1 only for g-estimation with residualise="regression", the classical form).
    weights (AIPW): "decision" every eligible row counts 1; "time" every t counts alike, 1 / P(I_t = 1); "trajectory"
    cross-fitted E[1/T | H_t], so that trajectories count alike; or a declared feature. 1/T itself is refused: T is
    affected by treatment, and the estimate then has bias (-0.12 on a truth of 0.38 in the reference simulation).
    per "all" divides by all rows, an ineligible one counting as effect 0 (the convention of MRTAnalysis::dcee).
    cluster, correction: see `MRTData.cluster_codes`, `results.solve`. adjust_future (AIPW): remove later randomisation.
    link "log" (g-estimation, continuation "none"): log relative risks.
    Raises InputError where data or request cannot give the effect. Source: statistics sections 1 and 2.
    """
    kind = method if method != "auto" else ("aipw" if continuation == "randomized" and link == "identity" else "snmm")
    if kind == "aipw" and (not isinstance(continuation, str) or continuation != "randomized" or link != "identity"):
        raise InputError("blip: AIPW is for the randomised continuation on the identity scale; use method='snmm'.")
    if kind not in ("aipw", "snmm"):
        raise InputError(f"blip: unknown method {method!r}; use 'auto', 'aipw' or 'snmm'.")
    check_learner(learner, folds)
    noted = check_outcomes(data)
    rows = eligible_rows(data, cluster)
    fold = data.folds(folds, cluster, seed)[data.eligible]
    x = nuisance_matrix(nuisance, data, data.eligible)
    if kind == "aipw":
        if folds < 2:
            raise InputError("blip: AIPW needs folds >= 2; in-sample nuisances follow the row's own outcome.")
        return _aipw(data, rows, effect, x, fold, learner, weights, per, correction, adjust_future).noting(*noted)
    if per != "eligible" or weights != "decision" or adjust_future:
        raise InputError("blip: weights, per and adjust_future belong to AIPW; g-estimation takes none of them.")
    if folds < 2 and residualise != "regression":
        raise InputError("blip: folds=1 is for residualise='regression' alone; otherwise use folds >= 2.")
    fit = _snmm(data, rows, continuation, effect, x, fold, learner, link, instrument, residualise, correction)
    return fit.noting(*noted)


def eligible_rows(data: MRTData, cluster: str | None = None) -> Rows:
    """The eligible rows of a trial as arrays, with the clusters that intervals rest on."""
    at = data.eligible
    return Rows(data.y[data.unit[at]], data.arm[at], data.unit[at], data.p[at], data.n, data.cluster_codes(cluster))


def check_outcomes(data: MRTData) -> tuple[str, ...]:
    """Notes on what the outcomes can tell. Raises InputError where all are equal: an interval would have width zero."""
    values, counts = np.unique(data.y, return_counts=True)
    if values.size < 2:
        raise InputError(
            f"outcomes: every trajectory has outcome {values[0]:g}; nothing can be learned from no variation."
        )
    if values.size == 2 and counts.min() < RARE:
        return (f"only {counts.min()} trajectories have the rarer outcome: intervals are rough",)
    return ()


def continuation_probabilities(continuation: Rule, data: MRTData) -> tuple[Floats, str]:
    """(eligible rows, K + 1) probabilities of the continuation at logged histories, and its name."""
    if isinstance(continuation, str) and continuation == "randomized":
        return data.p[data.eligible], "later coins as in the trial"
    if isinstance(continuation, str) and continuation == "none":
        none = np.zeros((int(data.eligible.sum()), data.arms + 1))
        none[:, 0] = 1.0
        return none, "no later treatment"
    pi = policy_probabilities(continuation, data, data.eligible, "continuation")
    name = continuation if isinstance(continuation, str) else getattr(continuation, "__name__", str(continuation))
    return pi, f"later treatment by policy {name}"


def _aipw(
    data: MRTData,
    rows: Rows,
    effect: Effect,
    x: Floats,
    fold: Ints,
    learner: Any,
    weights: str,
    per: Literal["eligible", "all"],
    correction: Correction,
    adjust_future: bool,
) -> Blips:
    y = rows.y
    if adjust_future:
        y, mu = arm_means_without_future_noise(x, rows.y, rows.arm, rows.p, fold, rows.unit, learner)
    else:
        mu = arm_means(x, rows.y, rows.arm, fold, rows.arms, learner)
    phi = pseudo_outcomes(y, rows.arm, rows.p, mu)
    quality = goodness(y, (rows.p * mu).sum(axis=1))
    at: Bools = data.eligible if per == "eligible" else np.ones_like(data.eligible)
    if per not in ("eligible", "all"):
        raise InputError(f"per: unknown {per!r}; use 'eligible' or 'all'.")
    design = projection(effect, data.frame.loc[at])
    weight, described = _weights(weights, data, rows, x, fold, learner)
    unit, w, full_phi = data.unit[at], np.ones(int(at.sum())), np.zeros((int(at.sum()), rows.arms))
    inside = data.eligible[at]
    full_phi[inside] = phi
    if per == "eligible":
        w = weight
    elif weights != "decision":
        raise InputError("per: 'all' goes with weights='decision' only.")
    parts = []
    for k in range(rows.arms):
        for j, columns in _blocks(design.matrix, design.grouped):
            names = design.names[j : j + 1] if design.grouped else design.names
            names = names if rows.arms == 1 else tuple(f"arm {k + 1}: {n}" for n in names)
            used = (columns != 0).any(axis=1) & (w > 0)
            counts = _counts(rows, used[inside], k + 1)
            reason = _too_few(counts)
            if reason and design.grouped:
                parts.append(_absent(names, rows, reason, counts, correction))
                continue
            left = columns[used] * w[used, None]
            solved = solve(left, columns[used], full_phi[used, k], unit[used], rows.clusters, rows.n, correction)
            deviations, influence = solved.deviations, solved.influence
            if weights == "time":
                residual = full_phi[used, k] - columns[used] @ solved.estimate
                extra = _time_correction(data, left * residual[:, None], data.t[at][used], rows.n)
                extra = np.asarray(np.linalg.solve(solved.matrix, extra.T).T, dtype=np.float64)
                influence = influence + rows.n * extra
                deviations = deviations + by_cluster(extra, rows.clusters, len(deviations))
            details = {key: [value] * len(names) for key, value in counts.items()}
            parts.append(
                Effects(
                    names, solved.estimate, influence, deviations, solved.df, "", solved.correction, details,
                    ("",) * len(names),
                )
            )  # fmt: skip
    what = f"blip, later coins as in the trial, {described}, per {'eligible' if per == 'eligible' else 'any'} decision"
    note = f"AIPW; nuisance out-of-fold R2 {quality.r2:.3f}, calibration slope {quality.slope:.2f}"
    return _joined(parts, what, (note,), data, rows, design.matrix[inside], None, design.grouped)


def _snmm(
    data: MRTData,
    rows: Rows,
    continuation: Rule,
    effect: Effect,
    x: Floats,
    fold: Ints,
    learner: Any,
    link: str,
    instrument: Instrument,
    residualise: Residualise,
    correction: Correction,
) -> Blips:
    design = projection(effect, data.frame.loc[data.eligible])
    if not design.exclusive:
        raise InputError("effect: groups overlap; a blip model needs exclusive groups or a formula.")
    pi, described = continuation_probabilities(continuation, data)
    names: tuple[str, ...] = design.names
    if rows.arms > 1:
        names = tuple(f"arm {k}: {n}" for k in range(1, rows.arms + 1) for n in design.names)
    counts: dict[str, list[int]] = {}
    for k in range(1, rows.arms + 1):
        for j, name in enumerate(design.names):
            found = _counts(rows, design.matrix[:, j] != 0, k)
            if min(found["rows_treated"], found["rows_untreated"]) < FEWEST_ROWS:
                raise InputError(
                    f"effect: column `{name}` has {found['rows_treated']} treated and {found['rows_untreated']} "
                    f"untreated rows; g-estimation needs at least {FEWEST_ROWS} of each: merge levels."
                )
            for key, value in found.items():
                counts.setdefault(key, []).append(value)
    if link == "log":
        if not (isinstance(continuation, str) and continuation == "none") or instrument != "features":
            raise InputError("link 'log': only for continuation='none' with instrument='features'.")
        fit = g_estimate_log(rows, design.matrix, x, fold, learner=learner, correction=correction)
    elif link == "identity":
        fit = g_estimate(
            rows, design.matrix, pi, x, fold,
            learner=learner, instrument=instrument, residualise=residualise, correction=correction,
        )  # fmt: skip
    else:
        raise InputError(f"link: unknown {link!r}; use 'identity' or 'log'.")
    solved = fit.solved
    notes = [
        f"g-estimation; condition {solved.condition:.3g}; outcome nuisance out-of-fold R2 {fit.outcome_fit.r2:.3f}"
    ]
    if solved.condition > _ILL:
        notes.append(f"the system is ill-conditioned ({solved.condition:.2g}); estimates lean on few rows")
    what = f"{'log relative ' if link == 'log' else ''}blip model, {described}"
    part = Effects(
        names, solved.estimate, solved.influence, solved.deviations, solved.df, what, solved.correction, counts,
        ("",) * len(names),
    )  # fmt: skip
    return _joined([part], what, tuple(notes), data, rows, design.matrix, fit, False)


def _blocks(matrix: Floats, grouped: bool) -> list[tuple[int, Floats]]:
    return [(j, matrix[:, [j]]) for j in range(matrix.shape[1])] if grouped else [(0, matrix)]


def _counts(rows: Rows, used: Bools, arm: int) -> dict[str, int]:
    treated, untreated = used & (rows.arm == arm), used & (rows.arm == 0)
    codes = rows.clusters[rows.unit]
    return {
        "rows_treated": int(treated.sum()),
        "rows_untreated": int(untreated.sum()),
        "clusters_treated": int(np.unique(codes[treated]).size),
        "clusters_untreated": int(np.unique(codes[untreated]).size),
    }


def _too_few(counts: dict[str, int]) -> str:
    for word in ("treated", "untreated"):
        if counts[f"clusters_{word}"] < 2:
            return f"{counts[f'clusters_{word}']} cluster(s) with a {word} row: no effect can be had here"
    return ""


def _absent(names: tuple[str, ...], rows: Rows, reason: str, counts: dict[str, int], correction: Correction) -> Effects:
    size = int(rows.clusters.max()) + 1
    nothing = np.full(1, np.nan)
    return Effects(
        names, nothing, np.full((rows.n, 1), np.nan), np.full((size, 1), np.nan), nothing, "", str(correction),
        {k: [v] for k, v in counts.items()}, (reason,),
    )  # fmt: skip


def _joined(
    parts: list[Effects], what: str, notes: tuple[str, ...], data: MRTData, rows: Rows, s: Floats, fit: GFit | None,
    grouped: bool,
) -> Blips:  # fmt: skip
    rules = {p.correction for p in parts if np.isfinite(p.estimate).all()}
    reasons = []
    for p in parts:
        for reason, se in zip(p.reasons, p.se, strict=True):
            reasons.append(reason or ("" if np.isfinite(se) else "leaving one cluster out leaves no solution"))
    return Blips(
        tuple(n for p in parts for n in p.names),
        np.concatenate([p.estimate for p in parts]),
        np.concatenate([p.influence for p in parts], axis=1),
        np.concatenate([p.deviations for p in parts], axis=1),
        np.concatenate([p.df for p in parts]),
        what,
        rules.pop() if len(rules) == 1 else "mixed",
        {k: [v for p in parts for v in p.details[k]] for k in parts[0].details},
        tuple(reasons),
        notes,
        data,
        rows,
        s,
        fit,
        grouped,
    )


def _weights(weights: str, data: MRTData, rows: Rows, x: Floats, fold: Ints, learner: Any) -> tuple[Floats, str]:
    """(eligible rows,) estimand weights, functions of the history alone, and the target in words."""
    at = data.eligible
    if weights == "decision":
        return np.ones(int(at.sum())), "every decision counting alike"
    length = np.bincount(data.unit, minlength=data.n).astype(np.float64)
    if weights == "time":
        met = pd.Series(data.t[at]).map(pd.Series(data.t[at]).value_counts()).to_numpy(dtype=float)
        return data.n / met, "every t counting alike"
    if weights == "trajectory":
        inverse = 1 / length[rows.unit]
        return out_of_fold(x, inverse[:, None], fold, learner)[:, 0], "trajectories counting alike (E[1/T | history])"
    if weights not in data.frame.columns:
        raise InputError(f"weights: {weights!r} is neither 'decision', 'time', 'trajectory' nor a declared feature.")
    values = data.frame.loc[at, weights].to_numpy(dtype=float)
    if not (np.isfinite(values) & (values >= 0)).all() or not values.any():
        raise InputError(f"weights: `{weights}` must hold finite numbers >= 0, some above 0.")
    for size in (length, np.bincount(rows.unit, minlength=data.n).astype(float)):
        product = values * size[rows.unit]
        if np.ptp(size[rows.unit]) > 0 and np.ptp(product) < 1e-6 * product.max():
            raise InputError(
                f"weights: `{weights}` is 1/T, and T is decided after the coin, which biases the effect; "
                "use weights='trajectory'."
            )
    return values, f"weighted by {weights}"


def _time_correction(data: MRTData, scores: Floats, t: Ints, n: int) -> Floats:
    """(n, q) share of each trajectory in the error of the estimated P(I_t = 1) behind weights='time'."""
    out = np.zeros((n, scores.shape[1]))
    for moment in np.unique(t):
        here = data.unit[data.eligible & (data.t == moment)]
        mean = scores[t == moment].sum(axis=0) / n
        out[here] -= mean * (n / here.size)
        out += mean
    return out
