"""Classic estimators of micro-randomised trials, under their published names and conventions.

Knows: WCLS (Boruvka et al. 2018), EMEE and its second form (Qian et al. 2021), DCEE (Qian 2025), statistics section 4.
Hides: the small-sample residuals of Mancl and DeRouen by a q x q identity, Newton steps, which rows each one uses.

Their effects: WCLS the effect on a proximal outcome measured right after each decision; EMEE its log relative risk;
DCEE the distal effect under the trial's own later coins, without cross-fitting. One treatment (arms 0 and 1) each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from audit.mrt.data import Bools, Floats, Ints, MRTData
from audit.mrt.design import formula_matrix
from audit.mrt.results import FEW_CLUSTERS, Effects, solve
from envs.core import InputError


@dataclass(frozen=True, eq=False)
class Classic(Effects):
    """Effect coefficients; controls: the coefficients of the control model, None for DCEE."""

    controls: Effects | None = None


def wcls(
    data: MRTData,
    outcome: str,
    *,
    moderators: str = "~ 1",
    controls: str = "~ 1",
    numerator: float | str = 0.5,
    cluster: str | None = None,
    small_sample: bool = True,
) -> Classic:
    """Weighted and centred least squares: effect of A_t on a proximal outcome, linear in the moderators.

    outcome: numeric column of `decisions`, measured after the coin. numerator: constant or feature p~ of the weights
    (p~/p)^A ((1-p~)/(1-p))^(1-A); it may depend on the moderators alone. small_sample: Mancl-DeRouen residuals with 50
    or fewer clusters. t with df = clusters with an eligible row - all coefficients; contrasts have 1 df each
    (MRTAnalysis 0.3.1 takes the number of non-zero weights and so prints intervals that are too short).
    Raises InputError for more arms than one, missing outcomes, collinear terms.
    """
    part = _Proximal(data, outcome, moderators, controls, numerator, cluster)
    left = part.x * part.w[:, None]
    return part.result(left, part.x, part.y, np.zeros(part.x.shape[1]), small_sample, "effect on the proximal outcome")


def emee(
    data: MRTData,
    outcome: str,
    *,
    moderators: str = "~ 1",
    controls: str = "~ 1",
    numerator: float | str = 0.5,
    cluster: str | None = None,
    small_sample: bool = True,
) -> Classic:
    """Estimator of the marginal excursion effect: log relative risk of a binary or count proximal outcome.

    Solves sum W exp(-A f'b) (Y - exp(g'a + A f'b)) [g, (A - p~) f] = 0. small_sample: Mancl-DeRouen residuals whatever
    the number of clusters. t with df = clusters - coefficients. Arguments as `wcls`; InputError also where Newton
    fails.
    """
    part = _Proximal(data, outcome, moderators, controls, numerator, cluster)
    return _log_linear(part, part.a, part.w, small_sample, "log relative risk of the proximal outcome (EMEE)", True)


def emee2(
    data: MRTData,
    outcome: str,
    *,
    moderators: str = "~ 1",
    controls: str = "~ 1",
    cluster: str | None = None,
    small_sample: bool = True,
) -> Classic:
    """Second form of EMEE: sum (exp(-(A - p) f'b) Y - exp(g'a)) [g, (A - p) f] = 0, the logged p, no weights.

    Its Mancl-DeRouen standard errors agree with MRTAnalysis to four digits, not to the last.
    """
    part = _Proximal(data, outcome, moderators, controls, "p", cluster)
    ones = np.ones_like(part.w)
    return _log_linear(
        part, part.centred, ones, small_sample, "log relative risk of the proximal outcome (EMEE2)", False
    )


def dcee(
    data: MRTData,
    *,
    moderators: str = "~ 1",
    controls: str | None = "~ 1",
    rows: Literal["all", "eligible"] = "all",
    weights: Literal["decision", "trajectory"] = "decision",
    cluster: str | None = None,
) -> Classic:
    """Distal causal excursion effect with linear control models an arm, fitted in sample, as MRTAnalysis has it.

    rows "all": every decision counts, an ineligible one as effect 0 (its arm-0 outcome enters the control model);
    "eligible": eligible ones only. controls None: no control model. weights "trajectory": 1/T, allowed only where all
    trajectories have the same number of rows (elsewhere T follows from treatment and 1/T biases). CR0, df = clusters -
    coefficients. `blip` is the cross-fitted form with small-sample corrections, and the one to use.
    """
    _one_arm(data)
    at: Bools = np.ones_like(data.eligible) if rows == "all" else data.eligible
    if rows not in ("all", "eligible"):
        raise InputError(f"dcee: unknown rows {rows!r}; use 'all' or 'eligible'.")
    frame = data.frame.loc[at]
    s, names = formula_matrix(moderators, frame, "moderators")
    unit, arm, inside = data.unit[at], data.arm[at], data.eligible[at]
    y = data.y[unit]
    mu = np.zeros((len(y), 2))
    if controls is not None:
        x, _ = formula_matrix(controls, frame, "controls")
        for k in (0, 1):
            mu[:, k] = x @ np.linalg.lstsq(x[arm == k], y[arm == k], rcond=None)[0]
    p = data.p[at][:, 1]
    safe = np.where(inside, p, 0.5)
    centred = y - (1 - p) * mu[:, 1] - p * mu[:, 0]
    phi = np.where(inside, (arm - safe) / (safe * (1 - safe)) * centred, 0.0)
    length = np.bincount(unit, minlength=data.n)
    if weights == "trajectory" and np.unique(length[length > 0]).size > 1:
        raise InputError("dcee: 1/T weights with unequal T are biased; use blip(weights='trajectory').")
    clusters = data.cluster_codes(cluster)
    solved = solve(s, s, phi, unit, clusters, data.n, "CR0")
    return Classic(
        names, solved.estimate, solved.influence, solved.deviations, solved.df,
        f"distal causal excursion effect, {rows} decisions", "CR0",
    )  # fmt: skip


class _Proximal:
    """Eligible rows of a proximal analysis: outcome, moderators, controls, centring and weights."""

    def __init__(
        self, data: MRTData, outcome: str, moderators: str, controls: str, numerator: float | str, cluster: str | None
    ) -> None:
        _one_arm(data)
        at = data.eligible
        if outcome not in data.decisions.columns:
            raise InputError(f"outcome: `{outcome}` is no column of the decisions table.")
        try:
            y = data.decisions.loc[at, outcome].to_numpy(dtype=float, na_value=np.nan)
        except (TypeError, ValueError) as error:
            raise InputError(f"outcome: `{outcome}` does not hold numbers.") from error
        if not np.isfinite(y).all():
            raise InputError(f"outcome: `{outcome}` is missing at some eligible row; drop those decisions knowingly.")
        frame = data.frame.loc[at]
        self.f, self.names = formula_matrix(moderators, frame, "moderators")
        self.g, self.control_names = formula_matrix(controls, frame, "controls")
        p = data.p[at][:, 1]
        share = frame[numerator].to_numpy(dtype=float) if isinstance(numerator, str) else np.full(len(p), numerator)
        if not ((share > 0) & (share < 1)).all():
            raise InputError("numerator: must lie strictly between 0 and 1.")
        self.y, self.a, self.n = y, data.arm[at].astype(np.float64), data.n
        self.unit: Ints = data.unit[at]
        self.clusters = data.cluster_codes(cluster)
        self.centred = self.a - share
        self.w = np.where(self.a == 1, share / p, (1 - share) / (1 - p))
        self.x = np.column_stack([self.g, self.centred[:, None] * self.f])

    def result(
        self, left: Floats, slope: Floats, value: Floats, theta: Floats, small_sample: bool | None, what: str,
        residual: tuple[Floats, Floats, Floats] | None = None,
    ) -> Classic:  # fmt: skip
        """Solve left'(value - slope beta) = 0 about theta (0 for linear equations) and correct the residuals.

        residual: (left, slope, residual) of the form in which the correction is taken, default the equation's own.
        small_sample: None always corrects; True corrects with 50 or fewer clusters; False never.
        """
        solved = solve(left, slope, value, self.unit, self.clusters, self.n, "CR0")
        deviations, rule = solved.deviations, "CR0"
        if small_sample is None or (small_sample and solved.clusters <= FEW_CLUSTERS):
            own = (left, slope, value - slope @ solved.estimate) if residual is None else residual
            deviations, rule = self._mancl_derouen(*own, solved.matrix, len(deviations)), "Mancl-DeRouen"
        q = self.g.shape[1]
        whole = Effects(
            (*self.control_names, *self.names), solved.estimate + theta, solved.influence, deviations, solved.df, what,
            rule,
        )  # fmt: skip

        def cut(part: slice) -> tuple[tuple[str, ...], Floats, Floats, Floats, Floats, str, str]:
            return (
                whole.names[part], whole.estimate[part], whole.influence[:, part], whole.deviations[:, part],
                whole.df[part], what, rule,
            )  # fmt: skip

        controls = replace(Effects(*cut(slice(0, q))), what=f"control model of: {what}")
        return Classic(*cut(slice(q, None)), controls=controls)

    def _mancl_derouen(self, left: Floats, slope: Floats, residual: Floats, matrix: Floats, size: int) -> Floats:
        """(size, q) M^-1 L_c' (I - R_c M^-1 L_c')^-1 r_c, inverted as q x q: L'(I - R B L')^-1 = (I - L'R B)^-1 L'."""
        codes = self.clusters[self.unit]
        order = np.argsort(codes, kind="stable")
        starts = np.searchsorted(codes[order], np.arange(size + 1))
        bread = np.linalg.inv(matrix)
        out = np.zeros((size, left.shape[1]))
        for c in range(size):
            at = order[starts[c] : starts[c + 1]]
            if at.size:
                leverage = np.eye(left.shape[1]) - left[at].T @ slope[at] @ bread
                out[c] = bread @ np.linalg.solve(leverage, left[at].T @ residual[at])
        return out


def _log_linear(part: _Proximal, k: Floats, w: Floats, small_sample: bool, what: str, through_mean: bool) -> Classic:
    """Newton for sum w (exp(-k f'b) Y - exp(g'a)) [g, (A - p~) f] = 0, then the linear form at the root."""
    if (part.y < 0).any():
        raise InputError("outcome: a log relative risk needs outcomes >= 0.")
    q = part.g.shape[1]
    left = part.x * w[:, None]
    # Start at the mean outcome with no effect; only the intercept direction is known to exist up to a combination.
    start = np.linalg.lstsq(part.g, np.full(len(part.y), np.log(max(part.y.mean(), 1e-12))), rcond=None)[0]
    theta = np.concatenate([start, np.zeros(part.f.shape[1])])

    def pieces(at: Floats) -> tuple[Floats, Floats, Floats]:
        shrink = np.exp(np.clip(-k * (part.f @ at[q:]), -30, 30))
        mean = np.exp(np.clip(part.g @ at[:q], -30, 30))
        slope = np.column_stack([mean[:, None] * part.g, (k * shrink * part.y)[:, None] * part.f])
        return shrink * part.y - mean, slope, shrink

    value, slope, shrink = pieces(theta)
    for _ in range(100):
        step = np.linalg.lstsq(left.T @ slope, left.T @ value, rcond=None)[0]
        size, before = 1.0, np.abs(left.T @ value).max()
        while size > 1e-8 and np.abs(left.T @ pieces(theta + size * step)[0]).max() > before:
            size /= 2
        theta = theta + size * step
        value, slope, shrink = pieces(theta)
        if np.abs(step).max() * size < 1e-12:
            break
    if np.abs(left.T @ value).max() > 1e-6 * (1 + np.abs(left).T @ np.abs(part.y)).max():
        raise InputError(f"{what}: Newton does not converge; use fewer terms or more data.")
    own = None
    if through_mean:
        # As published for EMEE: the residual on the outcome's own scale, Y - exp(g'a + A f'b).
        mean = np.exp(part.g @ theta[:q] + k * (part.f @ theta[q:]))
        own = (left * shrink[:, None], mean[:, None] * np.column_stack([part.g, k[:, None] * part.f]), part.y - mean)
    return part.result(left, slope, value, theta, None if small_sample else False, what, own)


def _one_arm(data: MRTData) -> None:
    if data.arms != 1:
        raise InputError(f"classic estimators take one treatment; this trial has {data.arms} arms: use blip().")
