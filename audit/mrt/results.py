"""One face for every estimate of a trial: numbers, intervals, contrasts, joint inference, a forest plot.

Knows: how influence values become standard errors when clusters were sampled, few of them perhaps. Hides: CR0, CR1 and
the delete-one-cluster jackknife CR3, t quantiles, simultaneous critical values, Holm and BH.

Every covariance is `deviations' deviations`, where `deviations` (clusters, q) holds each cluster's signed share. A
contrast, a difference of estimators or a stack of groups is a linear map of these columns, so its standard error is
right without further thought, and a linear contrast always has ONE degree of freedom in its numerator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.multitest import multipletests

from audit.inference import check_level
from audit.mrt.data import Floats, Ints
from envs.core import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Correction = Literal["auto", "CR0", "CR1", "CR3"]
FEW_CLUSTERS = 50
_Self = TypeVar("_Self", bound="Effects")


@dataclass(frozen=True, eq=False)
class Effects:
    """Estimates with their influence values.

    names: (q,). estimate: (q,), NaN where missing (see `reasons`). influence: (n, q), a row a trajectory, scaled so
    that estimate - truth is their mean; a trajectory that contributes nothing has 0. deviations: (clusters, q), whose
    cross product is the covariance. df: (q,) of the t quantiles. what: the estimand in words. correction: "CR0", "CR1",
    "CR3" or "mixed". details: further columns of the table (counts). reasons: (q,) empty, or why an interval
    is missing. notes: what a reader must be told. alpha of printed intervals is .05 unless asked otherwise.
    """

    names: tuple[str, ...]
    estimate: Floats
    influence: Floats
    deviations: Floats
    df: Floats
    what: str
    correction: str
    details: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def covariance(self) -> Floats:
        """(q, q); NaN rows where an interval is missing."""
        return np.asarray(self.deviations.T @ self.deviations, dtype=np.float64)

    @property
    def se(self) -> Floats:
        """(q,) cluster-robust standard errors."""
        return np.asarray(np.sqrt((self.deviations**2).sum(axis=0)), dtype=np.float64)

    def conf_int(self, alpha: float = 0.05) -> Floats:
        """(q, 2) two-sided t limits, each at level 1 - alpha on its own; `joint` gives simultaneous ones."""
        half = stats.t.isf(check_level(alpha) / 2, self.df) * self.se
        return np.column_stack([self.estimate - half, self.estimate + half])

    @property
    def p_value(self) -> Floats:
        """(q,) two-sided, of the hypothesis that the effect is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(2 * stats.t.sf(np.abs(self.estimate / self.se), self.df), dtype=np.float64)

    def to_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """One row an effect: term, estimate, se, df, low, high, p_value, details, reason."""
        low, high = self.conf_int(alpha).T
        table = {
            "term": list(self.names),
            "estimate": self.estimate,
            "se": self.se,
            "df": self.df,
            "low": low,
            "high": high,
            "p_value": self.p_value,
            **{k: list(v) for k, v in self.details.items()},
            "reason": list(self.reasons) if self.reasons else [""] * len(self.names),
        }
        return pd.DataFrame(table)

    def summary(self, alpha: float = 0.05) -> str:
        """The table as text under the estimand in words, with every note."""
        head = f"{self.what}\n{100 * (1 - alpha):g} % t intervals, {self.correction} standard errors"
        body = self.to_frame(alpha).to_string(index=False, float_format=lambda v: f"{v:.4g}")
        return "\n".join([head, body, *(f"note: {n}" for n in self.notes)])

    def plot(self, ax: Axes | None = None, alpha: float = 0.05) -> Axes:
        """Forest plot of the estimates with their intervals, first effect on top; returns the Axes."""
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.subplots(figsize=(6, 1 + 0.3 * len(self.names)))[1]
        low, high = self.conf_int(alpha).T
        y = np.arange(len(self.names))[::-1]
        ax.hlines(y, low, high, color="0.3")
        ax.plot(self.estimate, y, "o", color="0.1")
        ax.axvline(0, color="0.7", linewidth=0.8)
        ax.set_yticks(y, list(self.names))
        ax.set_xlabel(f"effect, {100 * (1 - alpha):g} % interval")
        return ax

    def select(self, names: Sequence[str]) -> Effects:
        """These effects only, in this order. Raises InputError for an unknown name."""
        unknown = [n for n in names if n not in self.names]
        if unknown:
            raise InputError(f"effects: {unknown[0]!r} is not among {list(self.names)}.")
        at = [self.names.index(n) for n in names]
        return Effects(
            tuple(names),
            self.estimate[at],
            self.influence[:, at],
            self.deviations[:, at],
            self.df[at],
            self.what,
            self.correction,
            {k: [v[i] for i in at] for k, v in self.details.items()},
            tuple(self.reasons[i] for i in at) if self.reasons else (),
            self.notes,
        )

    def contrast(
        self, weights: Mapping[str, float] | Sequence[Sequence[float]] | Floats, names: Sequence[str] | None = None
    ) -> Effects:
        """Linear contrasts, each with a 1-df t interval.

        weights: name of an effect -> coefficient (one contrast), or (contrasts, q) numbers. df: the least of the
        effects that enter. Raises InputError for names or shapes that do not fit.
        """
        if isinstance(weights, Mapping):
            unknown = [n for n in weights if n not in self.names]
            if unknown:
                raise InputError(f"contrast: {unknown[0]!r} is not among {list(self.names)}.")
            matrix = np.array([[float(weights.get(n, 0.0)) for n in self.names]])
            labels = [" + ".join(f"{w:g}*{n}" for n, w in weights.items())]
        else:
            matrix = np.atleast_2d(np.asarray(weights, dtype=float))
            if matrix.ndim != 2 or matrix.shape[1] != len(self.names):
                raise InputError(f"contrast: weights {matrix.shape} do not fit {len(self.names)} effects.")
            labels = [
                " + ".join(f"{w:g}*{n}" for w, n in zip(row, self.names, strict=True) if w != 0) for row in matrix
            ]
        if names is not None and len(names) != len(matrix):
            raise InputError(f"contrast: {len(names)} names for {len(matrix)} contrasts.")

        def combine(values: Floats) -> Floats:  # an effect that does not enter must not spread its NaN
            out = [values[:, row != 0] @ row[row != 0] for row in matrix]
            return np.asarray(np.column_stack(out), dtype=np.float64)

        df = np.array([self.df[row != 0].min() if (row != 0).any() else np.nan for row in matrix])
        estimate = combine(self.estimate[None, :])[0]
        return Effects(
            tuple(names or labels),
            estimate,
            combine(self.influence),
            combine(self.deviations),
            df,
            f"contrast of: {self.what}",
            self.correction,
            notes=self.notes,
        )

    def joint(
        self,
        alpha: float = 0.05,
        method: Literal["max-t", "holm", "bh"] = "max-t",
        *,
        draws: int = 100_000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """All effects at once: term, estimate, se, adjusted p, rejected and, for max-t, simultaneous limits.

        max-t: quantile of max |t| under the estimated correlation with the least df (multivariate t by simulation of
        `draws` values, fixed by seed): simultaneous coverage and FWER. holm: FWER. bh: FDR for independent or PRDS
        p-values. Effects without an interval take no part and stay missing.
        """
        check_level(alpha)
        there = np.isfinite(self.se) & (self.se > 0)
        table = self.to_frame(alpha)[["term", "estimate", "se"]].copy()
        adjusted = np.full(len(self.names), np.nan)
        low, high = adjusted.copy(), adjusted.copy()
        if there.any() and method == "max-t":
            z = self.deviations[:, there] / self.se[there]
            df = float(self.df[there].min())
            rng = np.random.Generator(np.random.Philox(seed))
            values, vectors = np.linalg.eigh(z.T @ z)
            root = vectors * np.sqrt(np.maximum(values, 0))
            normal = rng.standard_normal((draws, int(there.sum()))) @ root.T
            top = np.sort(np.abs(normal).max(axis=1) / np.sqrt(rng.chisquare(df, draws) / df))
            critical = float(np.quantile(top, 1 - alpha))
            statistic = np.abs(self.estimate[there] / self.se[there])
            adjusted[there] = (1 + draws - np.searchsorted(top, statistic)) / (1 + draws)
            low[there] = self.estimate[there] - critical * self.se[there]
            high[there] = self.estimate[there] + critical * self.se[there]
        elif there.any() and method in ("holm", "bh"):
            name = "holm" if method == "holm" else "fdr_bh"
            adjusted[there] = multipletests(self.p_value[there], alpha=alpha, method=name)[1]
        elif method not in ("max-t", "holm", "bh"):
            raise InputError(f"joint: unknown method {method!r}; use 'max-t', 'holm' or 'bh'.")
        table["p_adjusted"], table["rejected"] = adjusted, adjusted <= alpha
        if method == "max-t":
            table["low"], table["high"] = low, high
        return table

    def noting(self: _Self, *notes: str) -> _Self:
        """The same effects with further notes."""
        return replace(self, notes=(*self.notes, *(n for n in notes if n not in self.notes)))


def stack(parts: Sequence[Effects], prefixes: Sequence[str] | None = None) -> Effects:
    """Several estimates from the SAME trial and clustering side by side, with their joint covariance.

    prefixes: put before the names of each part. Raises InputError if the parts rest on different clusters.
    """
    if len({p.deviations.shape[0] for p in parts}) != 1 or len({p.influence.shape[0] for p in parts}) != 1:
        raise InputError("stack: the parts rest on different trials or clusters; estimate them on the same ones.")
    heads = list(prefixes) if prefixes is not None else [""] * len(parts)
    corrections = {p.correction for p in parts}
    notes: dict[str, None] = {}
    for p in parts:
        notes |= dict.fromkeys(p.notes)
    keys = [k for k in parts[0].details if all(k in p.details for p in parts)]
    return Effects(
        tuple(h + n for h, p in zip(heads, parts, strict=True) for n in p.names),
        np.concatenate([p.estimate for p in parts]),
        np.concatenate([p.influence for p in parts], axis=1),
        np.concatenate([p.deviations for p in parts], axis=1),
        np.concatenate([p.df for p in parts]),
        "; ".join(dict.fromkeys(p.what for p in parts)),
        corrections.pop() if len(corrections) == 1 else "mixed",
        {k: [v for p in parts for v in p.details[k]] for k in keys},
        tuple(r for p in parts for r in (p.reasons or ("",) * len(p.names))),
        tuple(notes),
    )


def by_cluster(values: Floats, codes: Ints, size: int) -> Floats:
    """(size, q) sums of (rows, q) values by code."""
    out = np.empty((size, values.shape[1]))
    for j in range(values.shape[1]):
        out[:, j] = np.bincount(codes, values[:, j], minlength=size)
    return out


@dataclass(frozen=True)
class Solved:
    """Solution of sum_rows left (target - right' beta) = 0 with everything inference needs; see `solve`."""

    estimate: Floats
    influence: Floats
    deviations: Floats
    df: Floats
    correction: str
    clusters: int
    matrix: Floats
    condition: float


def solve(
    left: Floats, right: Floats, target: Floats, unit: Ints, clusters: Ints, n: int, correction: Correction = "auto"
) -> Solved:
    """Solve a linear estimating equation over rows and give its clustered sandwich.

    left, right: (rows, q); target: (rows,); unit: (rows,) trajectory of each row; clusters: (n,) cluster of each
    trajectory. beta = M^-1 B with M = left'right, B = left'target; U_i the trajectory's sum of left (target - right'
    beta); influence n M^-1 U_i. G = clusters with a nonzero `left` row.
    CR0: sandwich; CR1: times G/(G - q); CR3: exact delete-one-cluster jackknife of the linear system, nuisances held.
    auto: CR3 below 50 clusters, CR1 from there. df = G - q. condition: of M with unit columns. Raises InputError where
    the system is singular or G <= q.
    """
    q = left.shape[1]
    matrix, right_side = left.T @ right, left.T @ target
    scale = np.sqrt((left**2).sum(axis=0))[:, None] * np.sqrt((right**2).sum(axis=0))[None, :]
    condition = float(np.linalg.cond(matrix / np.where(scale > 0, scale, 1.0))) if np.isfinite(matrix).all() else np.inf
    if not condition < 1e10:
        raise InputError("estimating equation: the effect's features are collinear in the data; take some out.")
    beta: Floats = np.asarray(np.linalg.solve(matrix, right_side), dtype=np.float64)
    scores = by_cluster(left * (target - right @ beta)[:, None], unit, n)
    influence: Floats = np.asarray(n * np.linalg.solve(matrix, scores.T).T, dtype=np.float64)
    size = int(clusters.max()) + 1
    active = np.unique(clusters[unit[(left != 0).any(axis=1)]])
    g = active.size
    if g <= q:
        raise InputError(f"estimating equation: {g} clusters contribute to {q} coefficients; more clusters are needed.")
    rule = ("CR3" if g < FEW_CLUSTERS else "CR1") if correction == "auto" else correction
    plain = by_cluster(influence, clusters, size) / n
    if rule == "CR3":
        deviations = _jackknife(left, right, target, clusters[unit], active, size, matrix, right_side, beta)
    elif rule in ("CR0", "CR1"):
        deviations = plain * np.sqrt(g / (g - q) if rule == "CR1" else 1.0)
    else:
        raise InputError(f"correction: unknown {correction!r}; use 'auto', 'CR0', 'CR1' or 'CR3'.")
    return Solved(beta, influence, deviations, np.full(q, float(g - q)), rule, g, matrix, condition)


def _jackknife(
    left: Floats,
    right: Floats,
    target: Floats,
    codes: Ints,
    active: Ints,
    size: int,
    m: Floats,
    b: Floats,
    beta: Floats,
) -> Floats:
    """(size, q) beta without the cluster minus beta; NaN columns where leaving one out makes the system singular."""
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(size + 1))
    out = np.zeros((size, left.shape[1]))
    for c in active:
        rows = order[starts[c] : starts[c + 1]]
        try:
            out[c] = np.linalg.solve(m - left[rows].T @ right[rows], b - left[rows].T @ target[rows]) - beta
        except np.linalg.LinAlgError:
            out[c] = np.nan
    return out
