"""Run-level results: coverage, the three shares, reliability, and the table that goes into a paper.

Knows: which figure must stand beside which (a nonzero share beside its null rate, a coverage beside its reasons),
and what the sampling unit is (the game). Hides: which estimator gives each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from audit.clusters import ClusterInterval, cluster_mean, cluster_share, share_table
from audit.effects import Counts, detectable
from audit.exact_tests import fisher_test
from audit.multiplicity import deconvolved_share, nonzero_share, storey_share
from audit.plan import Plan
from audit.reliability import reliability

SUPPORT_STATES = ("defined", "no_counterfactual", "insufficient", "unfaithful", "error")
STATES = ("pivotal", "negligible", "inconclusive", "undefined")
GROUPS = ("task_type", "step_group", "action_type")
STEP_EDGES = (0, 5, 10, 15, 20, 30, 40)

Row = dict[str, Any]


def summarise(effects: pd.DataFrame, counts: Mapping[int, Counts], trajectories: pd.DataFrame, plan: Plan) -> Row:
    """All run-level figures as JSON-ready data; intervals are over games (the sampling unit) at 1 - alpha."""
    level = 1 - plan.decisions.alpha
    games = effects["game"].to_numpy()
    last = plan.rollouts.rounds[-1]
    pooled = last if plan.rollouts.design == "draws" else last * plan.support.distinct
    if plan.estimand.contrast == "best":
        pooled = last - last // 2
    return {
        "estimand": {
            "contrast": plan.estimand.contrast,
            "outcome": plan.estimand.outcome,
            "continuation": "the replayed policy",
            "budget": plan.estimand.budget,
            "inadmissible": plan.estimand.inadmissible,
            "action_identity": "canonical command",
            "support": f"{plan.support.distinct} of {plan.support.draws} draws",
            "rollouts": f"{plan.rollouts.design} {plan.rollouts.rounds}"
            + (" adaptive" if plan.rollouts.adaptive else ""),
            "alpha": plan.decisions.alpha,
            "sesoi": plan.decisions.sesoi,
        },
        "totals": {
            "trajectories": len(trajectories),
            "games": int(trajectories["game"].nunique()),
            "points": len(effects),
            "rollouts": int(effects["n_factual"].sum() + effects["n_alternative"].sum()),
            "failed_rollouts": int(effects["failed"].sum()),
            "steps": int(effects["env_steps"].sum()),
        },
        "success": _interval(
            cluster_share(trajectories["won"].astype(float), trajectories["game"].tolist(), level=level)
        ),
        "coverage": {
            state: _interval(cluster_share((effects["support"] == state).astype(float), games, level=level))
            for state in SUPPORT_STATES
        },
        "reasons": _reasons(effects),
        "shares": _shares(effects, counts, plan, level),
        "reliability": _reliability(effects, counts, plan, level),
        "minimum_detectable_effect": {
            f"at p = {p}": _number(detectable(last, pooled, plan, p))
            for p in (0.5, 0.2)
            if plan.estimand.outcome == "won"
        },
        "groups": {group: _group(effects, group, level) for group in GROUPS},
    }


def _number(value: float) -> float | None:
    return None if not np.isfinite(value) else round(float(value), 6)


def _interval(interval: ClusterInterval) -> Row:
    return {
        "estimate": _number(interval.estimate),
        "low": _number(interval.low),
        "high": _number(interval.high),
        "points": interval.n_points,
        "clusters": interval.n_clusters,
        "reason": interval.reason or None,
    }


def _clipped(interval: ClusterInterval, least: float) -> Row:
    """A mean of probabilities (or of their differences): its t interval cut to what is possible, [least, 1]."""
    row = _interval(interval)
    return row | {side: min(max(row[side], least), 1.0) for side in ("low", "high") if row[side] is not None}


def _reasons(effects: pd.DataFrame) -> list[Row]:
    missing = effects[effects["support"] != "defined"]
    found = Counter(zip(missing["support"], missing["reason"], strict=True))
    return [{"support": support, "reason": reason, "points": n} for (support, reason), n in found.most_common(20)]


def _shares(effects: pd.DataFrame, counts: Mapping[int, Counts], plan: Plan, level: float) -> Row:
    """Three shares of points with an effect, each named for what it is, and the states."""
    rows = sorted(counts)
    if not rows:
        return {"reason": "no point is defined"}
    games = effects.loc[rows, "game"].to_numpy()
    states = effects.loc[rows, "state"]
    shares: Row = {
        state: _interval(cluster_share((states == state).astype(float), games, level=level)) for state in STATES[:3]
    }
    if plan.estimand.outcome != "won":
        return shares
    # At one and the same number of rollouts for every point: the first round.
    wins = np.array([counts[row].wins[:, 0] for row in rows])
    n = np.array([counts[row].n[:, 0] for row in rows])
    alternatives = wins.shape[1] - 1
    weights = None if alternatives == 1 else np.full((len(rows), alternatives), 1 / alternatives)
    nonzero = nonzero_share(wins, n, games, weights=weights, level=level)
    shares["nonzero"] = {
        "rollouts": f"{n[0, 0]} factual against {n[0, 1:].sum()}",
        "observed": _interval(nonzero.observed),
        "null": _clipped(nonzero.null, 0.0),
        "excess": _interval(nonzero.excess),
        "decided_by_the_total": _number(nonzero.fixed),
    }
    if plan.rollouts.design == "draws":
        # Fisher's test at this round; p-values of adaptive rounds bound the null from above and would show nothing.
        tested = fisher_test(wins[:, 0], n[:, 0], wins[:, 1], n[:, 1])
        assert tested.support is not None
        pairs = [tested.support.of(i) for i in range(len(rows))]
        storey = storey_share(
            tested.p, [values for values, _ in pairs], games, cdfs=[cdf for _, cdf in pairs], level=level
        )
        shares["null_corrected"] = {**_interval(storey), "rollouts": shares["nonzero"]["rollouts"]}
        last = np.array([counts[row].wins[:, -1] for row in rows]), np.array([counts[row].n[:, -1] for row in rows])
        shares["deconvolved"] = _interval(deconvolved_share(*last, games, level=level))
    return shares


def _reliability(effects: pd.DataFrame, counts: Mapping[int, Counts], plan: Plan, level: float) -> Row:
    """How much of the variance of the estimates is not rollout noise; the ceiling of any signal's correlation."""
    rows = sorted(counts)
    if not rows or plan.estimand.contrast == "best":
        return {"reason": "no point is defined" if not rows else "not defined for the contrast best"}
    pi = effects.loc[rows, "pi"].to_numpy(dtype=float)
    estimates, variances = [], []
    for row, own in zip(rows, pi.tolist(), strict=True):
        arms = counts[row].scores
        scale = 1.0 - own if plan.estimand.contrast == "policy" else 1.0
        weights = [scale] + [-scale / (len(arms) - 1)] * (len(arms) - 1)
        estimates.append(sum(w * float(arm.mean()) for w, arm in zip(weights, arms, strict=True)))
        noise = [float(arm.var(ddof=1)) / len(arm) if len(arm) > 1 else float("nan") for arm in arms]
        variances.append(sum(w * w * v for w, v in zip(weights, noise, strict=True)))
    found = reliability(estimates, variances, effects.loc[rows, "game"].to_numpy(), level=level)
    return {
        "value": _interval(found.value),
        "ceiling": {
            "estimate": _number(found.ceiling),
            "low": _number(found.ceiling_low),
            "high": _number(found.ceiling_high),
            "reason": found.ceiling_reason or None,
        },
    }


def with_step_groups(effects: pd.DataFrame) -> pd.DataFrame:
    """The effects with the column `step_group` (steps 0-4, 5-9, ...)."""
    edges = [*STEP_EDGES, np.inf]
    names = [f"{a}-{b - 1}" if np.isfinite(b) else f"{a}+" for a, b in pairwise(edges)]
    return effects.assign(step_group=pd.cut(effects["step"], edges, right=False, labels=names).astype(str))


def _group(effects: pd.DataFrame, group: str, level: float) -> list[Row]:
    frame = with_step_groups(effects)
    covered = share_table(
        frame.assign(hit=frame["support"] == "defined"), "hit", cluster="game", by=[group], level=level
    )
    found = frame[frame["support"] == "defined"].assign(hit=lambda part: part["state"] == "pivotal")
    rows = []
    for row in covered.to_dict("records"):
        inside = found[found[group].isna()] if pd.isna(row[group]) else found[found[group] == row[group]]
        share = (
            cluster_share(inside["hit"].astype(float), inside["game"].tolist(), level=level) if len(inside) else None
        )
        effect = cluster_mean(inside["estimate"], inside["game"].tolist(), level=level) if len(inside) else None
        rows.append(
            {
                "group": None if pd.isna(row[group]) else row[group],
                "points": int(row["n_points"]),
                "defined": {key: _number(row[column]) for key, column in _SHARE_COLUMNS},
                "pivotal": None if share is None else _interval(share),
                "mean_effect": None if effect is None else _clipped(effect, -1.0),
            }
        )
    if group == "step_group":
        rows.sort(key=lambda row: int(str(row["group"]).rstrip("+").split("-")[0]))
    return rows


_SHARE_COLUMNS = (("estimate", "share"), ("low", "low"), ("high", "high"))


# The table ------------------------------------------------------------------------------------------------------


def table(summary: Mapping[str, Any]) -> pd.DataFrame:
    """The closing table: one row a figure with its interval, ready to paste."""
    rows: list[Row] = []

    def add(figure: str, value: Mapping[str, Any] | None, note: str = "") -> None:
        if value is not None:
            why = value.get("reason") or ""
            rows.append(
                {"figure": figure, **{k: value.get(k) for k in ("estimate", "low", "high")}, "note": note or why}
            )

    totals = summary["totals"]
    add("success of the trajectories", summary["success"], f"{totals['trajectories']} trajectories")
    for state in SUPPORT_STATES:
        if state in ("defined", "no_counterfactual") or summary["coverage"][state]["estimate"]:
            add(
                f"coverage: {state}",
                summary["coverage"][state],
                f"of {totals['points']} points" if state == "defined" else "",
            )
    shares = summary["shares"]
    if "nonzero" in shares:
        add("nonzero share", shares["nonzero"]["observed"], shares["nonzero"]["rollouts"])
        add("  with no effect anywhere", shares["nonzero"]["null"])
        fixed = shares["nonzero"]["decided_by_the_total"]
        add("  excess over the null", shares["nonzero"]["excess"], f"the total alone decides {fixed:.0%} of points")
    if "null_corrected" in shares:
        at = shares["null_corrected"]["rollouts"]
        add("null-corrected share", shares["null_corrected"], f"Storey, {at}; a lower bound")
    add("deconvolved share", shares.get("deconvolved"), "effects of .1 or more, all rollouts; model-based")
    add("pivotal share", shares.get("pivotal"), "q <= alpha, of defined points")
    add("negligible share", shares.get("negligible"), f"inside +-{summary['estimand']['sesoi']}")
    add("inconclusive share", shares.get("inconclusive"))
    add("reliability of the effects", summary["reliability"].get("value"))
    add("ceiling of a correlation", summary["reliability"].get("ceiling"))
    for where, value in summary["minimum_detectable_effect"].items():
        add(
            f"minimum detectable effect {where}", {"estimate": value}, "" if value is not None else "none is detectable"
        )
    return pd.DataFrame(rows)


def as_text(frame: pd.DataFrame) -> str:
    """A frame of figures as aligned plain text; missing is shown as a dash, never as 0."""

    def cell(value: Any) -> str:
        if value is None or value is pd.NA or (isinstance(value, float) and not np.isfinite(value)):
            return "-"
        return f"{round(value, 3) + 0.0:.3f}" if isinstance(value, float) else str(value)  # + 0.0: no minus before 0

    cells = [
        [str(column) for column in frame.columns],
        *([cell(v) for v in row] for row in frame.itertuples(index=False)),
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    numeric = [pd.api.types.is_numeric_dtype(frame[column]) for column in frame.columns]
    lines = [
        "  ".join(
            text.rjust(w) if right else text.ljust(w) for text, w, right in zip(row, widths, numeric, strict=True)
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)
