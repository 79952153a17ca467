"""The confirmatory family: what a locked plan announced, tested once, with Holm over all of it.

Knows: how each kind of hypothesis is tested, and that an announced one that cannot be tested still counts. Hides: the
two signals of a difference on the points that both have, recall of a router in resamples.

A claim of `better` uses the two-sided p of `audit.comparison.compare` (the larger of the bootstrap's and of chance's);
a difference of two signals has no shuffles, so the bootstrap's alone. `equivalence:` uses two one-sided tests against
the hypothesis' margin. The verdict is `better` or `equivalent` where Holm's p is at most alpha, else `inconclusive`;
`not tested` where the signal was not scored, which says nothing about it. Intervals are not adjusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from audit.comparison.frames import oriented
from audit.comparison.measures import MEASURES, SHARES, Found, measure
from audit.comparison.pivotal import recall_at
from audit.comparison.resample import above, equivalence, holm, span
from audit.plan import EQUIVALENCE, Hypothesis
from envs.core import InputError

if TYPE_CHECKING:
    from audit.comparison.compare import Comparison

PRIMARY = "spearman"
ROUTER = "router"
COLUMNS = (
    "hypothesis", "claim", "signal", "measure", "than", "share", "estimate", "chance", "low", "high", "margin", "p",
    "p_holm", "verdict", "tested", "reason",
)  # fmt: skip


def confirm(hypotheses: Sequence[Hypothesis], comparison: Comparison) -> pd.DataFrame:
    """The family of one run: a row a hypothesis, columns as COLUMNS, with Holm's p and the verdict.

    Hypotheses without a signal are listed untested and are not in the family; one whose signal was not scored is
    listed untested and counts in it. Raises InputError for a measure or a `than` that makes no sense.
    """
    return _adjusted(pd.DataFrame([_row(h, comparison) for h in hypotheses], columns=list(COLUMNS)), comparison.alpha)


def family(compared: Mapping[str, Comparison]) -> pd.DataFrame:
    """The family of several runs of one plan: every hypothesis in each of them, one Holm over all. Adds `run`."""
    tables = [done.confirmed.assign(run=run) for run, done in compared.items()]
    table = pd.concat([t for t in tables if len(t)] or tables, ignore_index=True)
    return _adjusted(table[["run", *COLUMNS]], next(iter(compared.values())).alpha)


def in_short(table: pd.DataFrame) -> pd.DataFrame:
    """The table to print: what is tested in a few words, and what came out."""
    said = []
    for row in table.to_dict("records"):
        words = [f"{row['signal']}: {row['measure']}" if isinstance(row["signal"], str) else "-"]
        words += [f"than {row['than']}"] if isinstance(row["than"], str) else []
        words += [f"at a share of {row['share']:g}"] if pd.notna(row["share"]) else []
        words += [f"within {row['margin']:g}"] if pd.notna(row["margin"]) else []
        said.append(" ".join(words))
    kept = [c for c in ("run", "hypothesis") if c in table]
    figures = ["estimate", "chance", "low", "high", "p", "p_holm", "verdict", "reason"]
    return table[kept].assign(test=said).join(table[figures])


def _adjusted(table: pd.DataFrame, alpha: float) -> pd.DataFrame:
    announced = table["signal"].notna().to_numpy()
    tested = table["tested"].to_numpy(dtype=bool)
    adjusted = np.full(len(table), np.nan)
    adjusted[announced] = holm(table.loc[announced, "p"].astype(float).tolist())
    table["p_holm"] = np.where(tested, adjusted, np.nan)
    claimed = ["equivalent" if str(m).startswith(EQUIVALENCE) else "better" for m in table["measure"]]
    table["verdict"] = [
        "not tested" if not t else claim if p <= alpha else "inconclusive"
        for t, claim, p in zip(tested, claimed, table["p_holm"], strict=True)
    ]
    return table


def _row(hypothesis: Hypothesis, comparison: Comparison) -> dict[str, Any]:
    asked = hypothesis.measure or PRIMARY
    name = asked.removeprefix(EQUIVALENCE)
    row: dict[str, Any] = dict.fromkeys(("estimate", "chance", "low", "high", "margin", "p"), np.nan)
    row |= {"hypothesis": hypothesis.name, "claim": hypothesis.claim, "signal": hypothesis.signal, "measure": asked}
    row |= {"than": hypothesis.than, "share": hypothesis.share, "tested": False, "reason": "names no signal"}
    if hypothesis.signal is None:
        return row
    if name != ROUTER and name not in MEASURES:
        raise InputError(
            f"hypothesis {hypothesis.name}: {name} is no measure; expected {ROUTER} or one of {', '.join(MEASURES)}."
        )
    absent = [s for s in (hypothesis.signal, hypothesis.than) if s is not None and s not in comparison.joined.names]
    if absent:
        return row | {"reason": f"{absent[0]} was not scored"}
    margin = hypothesis.margin or (comparison.margin / 2 if name in (*SHARES, ROUTER) else comparison.margin)
    if name == ROUTER:
        found = _router(hypothesis, comparison, margin)
    elif hypothesis.than is not None:
        found = _difference(hypothesis.signal, hypothesis.than, name, comparison, margin)
    else:
        found = _above_chance(hypothesis.signal, name, comparison, margin)
    p = found.pop("p_equivalence", np.nan) if asked.startswith(EQUIVALENCE) else found.get("p", np.nan)
    return row | {"tested": True, "reason": None, "margin": margin if asked != name else np.nan} | found | {"p": p}


def _above_chance(signal: str, name: str, comparison: Comparison, margin: float) -> dict[str, Any]:
    found = comparison.measured.found[signal, name]
    rows = comparison.frame
    one = rows[(rows["signal"] == signal) & (rows["measure"] == name)].iloc[0]
    answer = {key: one[key] for key in ("estimate", "chance", "low", "high", "p")}
    if not np.isfinite(one["p"]):
        return answer | {"reason": one["note"]}
    return answer | {"p_equivalence": equivalence(found.excess, found.clusters, 0.0, margin)}


def _difference(signal: str, than: str, name: str, comparison: Comparison, margin: float) -> dict[str, Any]:
    a, b = _together(signal, than, name, comparison)
    if a.reason or b.reason:
        return {"reason": a.reason or b.reason}
    draws, clusters = a.draws - b.draws, min(a.clusters, b.clusters)
    between = span(draws, clusters, 1 - comparison.alpha)
    answer: dict[str, Any] = {"estimate": a.estimate - b.estimate, "chance": 0.0, "low": between.low}
    answer |= {"high": between.high}
    if between.reason:
        return answer | {"reason": between.reason}
    with np.errstate(invalid="ignore"):  # two infinite excesses: effects that are all noise
        apart = a.excess - b.excess
    p = min(1.0, 2 * above(draws, clusters, 0.0))
    return answer | {"p": p, "p_equivalence": equivalence(apart, clusters, 0.0, margin)}


def _together(signal: str, than: str, name: str, comparison: Comparison) -> tuple[Found, Found]:
    """Two signals measured on the points that both have, so that like is compared with like."""
    joined, names = comparison.joined, (signal, than)
    values = joined.values[:, [joined.names.index(one) for one in names]]
    there = np.isfinite(values)
    both = there[:, 0] & there[:, 1]
    found = comparison.measured.found
    if not bool((both == (there[:, 0] | there[:, 1])).all()):
        shared = replace(joined, values=np.where(both[:, None], values, np.nan), names=names)
        # No verdict comes from these shuffles; they only say where chance lies.
        found = measure(shared, comparison.importance, comparison.counts, shuffles=500, seed=0).found
    return found[signal, name], found[than, name]


def _router(hypothesis: Hypothesis, comparison: Comparison, margin: float) -> dict[str, Any]:
    """Recall of pivotal points when the highest-valued share of points is sent, against that share.

    The interval is the wider of Wilson's and of the one over games; chance is every choice of as many points.
    """
    joined, level = comparison.joined, 1 - comparison.alpha
    signal, share = str(hypothesis.signal), float(hypothesis.share or 0.0)
    x = oriented(joined.values, joined.names, comparison.importance)[:, joined.names.index(signal)]
    there = np.isfinite(x)
    hit, game = joined.pivotal[there], joined.game[there]
    hits, clusters = int(hit.sum()), len(set(game.tolist()))
    if not hits:
        return {"chance": share, "reason": "no point is pivotal"}
    whole = np.ones((1, len(joined.games)), dtype=np.int64)
    estimate = float(recall_at(x[there], hit, game, whole, share)[0])
    draws = recall_at(x[there], hit, game, comparison.counts, share)
    between = span(draws, clusters, level)
    wilson = proportion_confint(estimate * hits, hits, comparison.alpha, method="wilson")
    answer = {"estimate": estimate, "chance": share}
    if between.reason:
        return answer | {"reason": between.reason}
    # A point in part among those sent is none (found), and one more sent (chance): both keep the p-value valid.
    chance = stats.hypergeom(hit.size, hits, int(np.ceil(share * hit.size - 1e-9)))
    by_chance = float(chance.sf(np.floor(estimate * hits + 1e-9) - 1))
    return answer | {
        "low": min(between.low, float(wilson[0])),
        "high": max(between.high, float(wilson[1])),
        "p": min(1.0, 2 * max(above(draws, clusters, share), by_chance)),
        "p_equivalence": equivalence(draws, clusters, share, margin),
    }
