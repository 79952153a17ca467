"""Whether a trial can carry an analysis: positivity, the coin's fairness, reach of a policy, likeness of two trials.

Knows: statistics section 6. Hides: the clustered joint tests. Nothing here changes an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from audit.mrt.blip import continuation_probabilities, eligible_rows
from audit.mrt.data import Bools, Floats, MRTData
from audit.mrt.design import Effect, Rule, nuisance_columns, projection
from audit.mrt.offpolicy import overlap_by_decision
from audit.mrt.results import by_cluster
from envs.core import InputError


def positivity(
    data: MRTData, by: Effect = "pooled", *, threshold: float = 0.05, cluster: str | None = None
) -> pd.DataFrame:
    """Support of every arm, a row a group and arm: what a group's effect rests on.

    by: groups as `effect` in `blip`. Columns: group, arm, rows, clusters (with that arm given), p_min, p_max (logged
    probability of the arm over the group's eligible rows), below (share of rows with p under `threshold`), warning.
    """
    rows = eligible_rows(data, cluster)
    groups = projection(by, data.frame.loc[data.eligible])
    if not groups.grouped:
        raise InputError("positivity: `by` must name groups, not a formula.")
    codes = rows.clusters[rows.unit]
    out = []
    for j, name in enumerate(groups.names):
        inside: Bools = groups.matrix[:, j] != 0
        for arm in range(rows.arms + 1):
            given = inside & (rows.arm == arm)
            p = rows.p[inside, arm]
            below = float((p < threshold).mean()) if p.size else float("nan")
            clusters = int(np.unique(codes[given]).size)
            warning = ""
            if clusters < 2:
                warning = "fewer than 2 clusters: no effect can be had here"
            elif clusters < 10:
                warning = f"only {clusters} clusters: intervals are rough"
            elif below > 0:
                warning = f"{100 * below:.0f} % of rows have p under {threshold:g}: large weights"
            low, high = (float(p.min()), float(p.max())) if p.size else (float("nan"), float("nan"))
            out.append((name, arm, int(given.sum()), clusters, low, high, below, warning))
    names = ["group", "arm", "rows", "clusters", "p_min", "p_max", "below", "warning"]
    return pd.DataFrame(out, columns=names)


def policy_positivity(data: MRTData, policy: Rule) -> pd.DataFrame:
    """How far the logged coins follow a policy: ESS, largest weight, share consistent, at each eligible decision.

    policy as `continuation` in `blip`. A policy is identified wherever every arm has logged probability inside (0, 1),
    which `MRTData` guarantees; an ESS under about 30 means that a gain leans on its blip model.
    """
    rows = eligible_rows(data)
    pi, _ = continuation_probabilities(policy, data)
    return overlap_by_decision(rows, data.index[data.eligible], pi)


@dataclass(frozen=True)
class RandomizationCheck:
    """Did the coin fall as logged? table: (arm, term, coefficient, se, t, p_value) of A - p on the history; statistic,
    df, df_denominator, p_value: joint clustered F; calibration: logged p against the observed share, by bin of p."""

    table: pd.DataFrame
    statistic: float
    df: int
    df_denominator: int
    p_value: float
    calibration: pd.DataFrame

    def summary(self) -> str:
        """The joint test in a sentence, the calibration below it."""
        verdict = "no sign against" if self.p_value >= 0.05 else "evidence AGAINST"
        return (
            f"randomisation check: F({self.df}, {self.df_denominator}) = {self.statistic:.3f}, p = {self.p_value:.3g}: "
            f"{verdict} coins as logged\n{self.calibration.to_string(index=False)}"
        )


def randomization_check(
    data: MRTData, features: str | Sequence[str] | None = None, *, cluster: str | None = None, bins: int = 5
) -> RandomizationCheck:
    """Regress 1(A=k) - p_k on the history, test all coefficients (intercept too) at once with clustered covariance.

    Under the logged coins the mean of (A - p) h(H) is 0 for every h. features: formula or names (default all). The
    joint statistic is Hotelling's: F = (G - m)/(m (G - 1)) W with (m, G - m) df, G clusters, W the Wald statistic of
    the m moments. A small p-value means that probabilities or eligibility were logged wrongly, and nothing else can be
    trusted. Raises InputError when fewer clusters than moments.
    """
    rows = eligible_rows(data, cluster)
    x, names = nuisance_columns(features, data, data.eligible)
    scale = np.sqrt((x * x).mean(axis=0))
    _, r = np.linalg.qr(x / scale)
    keep = np.abs(np.diag(r)) > 1e-7 * np.abs(np.diag(r)).max()  # take collinear history columns once
    z = (x / scale)[:, keep]
    given = rows.given(rows.p)
    size = int(rows.clusters.max()) + 1
    codes = rows.clusters[rows.unit]
    moments = np.column_stack([by_cluster(z * given[:, [k]], codes, size) for k in range(rows.arms)])
    moments = moments[np.unique(codes)]
    g, m = moments.shape
    if g <= m:
        raise InputError(f"randomization check: {g} clusters for {m} moments; name fewer features.")
    mean = moments.mean(axis=0)
    spread = np.cov(moments, rowvar=False).reshape(m, m)
    wald = float(g * mean @ np.linalg.pinv(spread, rcond=1e-10) @ mean)
    statistic = wald * (g - m) / (m * (g - 1))
    bread = np.linalg.pinv(z.T @ z)
    tables = []
    for k in range(rows.arms):
        coefficient = bread @ (z.T @ given[:, k])
        residual = z * (given[:, k] - z @ coefficient)[:, None]
        spread_k = by_cluster(residual, codes, size) @ bread
        se = np.sqrt((spread_k**2).sum(axis=0) * g / (g - 1))
        t = coefficient / se
        tables.append(
            pd.DataFrame(
                {
                    "arm": k + 1,
                    "term": [name for name, kept in zip(names, keep, strict=True) if kept],
                    "coefficient": coefficient,
                    "se": se,
                    "t": t,
                    "p_value": 2 * stats.t.sf(np.abs(t), g - 1),
                }
            )
        )
    return RandomizationCheck(
        pd.concat(tables, ignore_index=True),
        statistic,
        m,
        g - m,
        float(stats.f.sf(statistic, m, g - m)),
        _calibration(rows.p, rows.arm, codes, bins),
    )


def _calibration(p: Floats, arm: Any, codes: Any, bins: int) -> pd.DataFrame:
    out = []
    for k in range(1, p.shape[1]):
        values = p[:, k]
        edges = np.unique(np.quantile(values, np.linspace(0, 1, bins + 1)))
        where = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(len(edges) - 2, 0))
        for b in np.unique(where):
            at = where == b
            out.append(
                (
                    k,
                    int(at.sum()),
                    int(np.unique(codes[at]).size),
                    float(values[at].mean()),
                    float((arm[at] == k).mean()),
                )
            )
    return pd.DataFrame(out, columns=["arm", "rows", "clusters", "logged", "observed"])


@dataclass(frozen=True)
class Transport:
    """Likeness of the histories of two trials. table: feature, mean here, mean there, standardised difference, p_value
    (clustered). probabilities: the same for the logged p. warnings: sentences for a report, empty where alike."""

    table: pd.DataFrame
    warnings: tuple[str, ...]


def transport_check(data: MRTData, other: MRTData, *, limit: float = 0.1) -> Transport:
    """Do effects of `data` speak about `other`? Compare eligible histories and logged probabilities of both.

    A blip is an average over the histories its collection policy met, given its later coins; where these differ by more
    than `limit` standard deviations with p < .05 (Holm over features), carry numbers over only by a blip model.
    """
    from statsmodels.stats.multitest import multipletests

    shared = [c for c in data.frame.columns if c in other.frame.columns]
    here, there = data.frame.loc[data.eligible, shared], other.frame.loc[other.eligible, shared]
    out: list[tuple[str, float, float, float, float]] = []
    for name in shared:
        if not pd.api.types.is_numeric_dtype(here[name]):
            levels = sorted(set(here[name]) | set(there[name]), key=str)
            columns = [
                (f"{name}={v}", (here[name] == v).to_numpy(float), (there[name] == v).to_numpy(float)) for v in levels
            ]
        else:
            mine, theirs = here[name].to_numpy(float), there[name].to_numpy(float)
            columns = [(name, mine, theirs)]
            if np.unique(np.concatenate([mine, theirs])).size > 2:
                centre = (mine.mean() + theirs.mean()) / 2
                columns.append((f"spread of {name}", np.abs(mine - centre), np.abs(theirs - centre)))
        for label, a, b in columns:
            spread = float(np.sqrt((a.var() + b.var()) / 2))
            gap = float(a.mean() - b.mean())
            error = np.hypot(_clustered_se(data, a), _clustered_se(other, b))
            p = float(2 * stats.norm.sf(abs(gap) / error)) if error > 0 else float(gap == 0)
            size = gap / spread if spread > 0 else (0.0 if gap == 0 else float(np.copysign(np.inf, gap)))
            out.append((label, float(a.mean()), float(b.mean()), size, p))
    table = pd.DataFrame(out, columns=["feature", "mean_here", "mean_there", "difference_in_sd", "p_value"])
    table["p_holm"] = multipletests(table["p_value"], method="holm")[1]
    differs = table[(table["difference_in_sd"].abs() > limit) & (table["p_holm"] < 0.05)]
    warnings = []
    coins = differs["feature"].str.fullmatch(r"(spread of )?p(_\d+)?")
    if coins.any():
        warnings.append(
            "the trials flipped different coins: blips with randomised continuation are different estimands"
        )
    if (~coins).any():
        names = ", ".join(differs.loc[~coins, "feature"])
        warnings.append(f"histories differ in {names}: averages of blips need not carry over")
    return Transport(table, tuple(warnings))


def _clustered_se(data: MRTData, values: Floats) -> float:
    codes = data.cluster_codes()[data.unit[data.eligible]]
    sums = np.bincount(codes, values - values.mean())
    return float(np.sqrt((sums**2).sum()) / len(values))
