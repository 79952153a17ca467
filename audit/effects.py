"""From rollouts to effects: estimate, interval, p, q and state of every decision point.

Knows: which statistics belong to which contrast and design, and when a point needs no further round. Hides: how
records are counted. Run-level figures (coverage, shares, reliability) are in `audit.summary`.

States: `pivotal` (q <= alpha), `negligible` (shown to lie inside +-SESOI), `inconclusive` (neither), `undefined`
(no effect could be defined, with the reason). Undefined is never 0 and never left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from audit.exact_tests import Support, fisher_test, minimum_detectable_effect, permutation_test, permutation_test_scores
from audit.inference import (
    Interval,
    best_interval,
    exact_interval,
    melded_interval,
    negligible,
    policy_interval,
    score_means_interval,
)
from audit.multiplicity import discoveries
from audit.plan import Plan
from audit.records import Trajectory, draws
from audit.sequential import Sequential

Floats = npt.NDArray[np.float64]
Records = Sequence[Mapping[str, Any]]

POLICY_SHARE = 0.2  # of alpha goes to pi(a_t | h) where the `policy` contrast has to estimate it


# Counting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counts:
    """The valid rollouts of one point. arms: label and command of each. wins, n: cumulative, (arms, rounds).

    scores: the outcomes of each arm, one array an arm, in the order of their draws. steps: environment steps spent.
    failed: rollouts that failed. missing: why a round is short, or None.
    """

    arms: tuple[tuple[str, str | None], ...]
    wins: npt.NDArray[np.int64]
    n: npt.NDArray[np.int64]
    scores: tuple[npt.NDArray[Any], ...]
    steps: int
    failed: int
    missing: str | None


def count(records: Records, plan: Plan) -> Counts:
    """Count a point's rounds. A rollout that failed is no outcome; a round that stays short is said to be so."""
    point, rounds = records[0], records[1:]
    arms = rounds[0]["arms"] if rounds else []
    wins = np.zeros((len(arms), len(rounds)), dtype=np.int64)
    n = np.zeros_like(wins)
    scores: list[list[float]] = [[] for _ in arms]
    steps = failed = 0
    missing = None
    for r, record in enumerate(rounds):
        for a, arm in enumerate(record["arms"]):
            for code, taken in zip(arm["outcome"], arm["steps"], strict=True):
                steps += taken
                if code != "e":
                    late = (point["step"] + taken) / plan.estimand.budget
                    won = code == "w"
                    scores[a].append((1.0 - late if plan.estimand.outcome == "efficiency" else 1.0) if won else 0.0)
            wins[a, r] = arm["outcome"].count("w")
            n[a, r] = len(arm["outcome"]) - arm["outcome"].count("e")
            failed += len(arm["failures"])
            wanted = plan.rollouts.rounds[r] - (plan.rollouts.rounds[r - 1] if r else 0)
            if n[a, r] < wanted and missing is None:
                missing = f"{len(arm['failures'])} rollouts failed, the first: {arm['failures'][0][1]}"
    labels = tuple((arm["arm"], arm["command"]) for arm in arms)
    kind = np.uint8 if plan.estimand.outcome == "won" else np.float64  # a byte a rollout where 0 and 1 are all
    arrays = tuple(np.array(outcomes, dtype=kind) for outcomes in scores)
    return Counts(labels, wins.cumsum(axis=1), n.cumsum(axis=1), arrays, steps, failed, missing)


# When to stop ---------------------------------------------------------------------------------------------------


def sequential_design(plan: Plan) -> Sequential:
    """The plan's adaptive rounds, with their calibrated boundaries (seconds the first time, then kept on disk)."""
    alpha = plan.decisions.alpha * ((1 - POLICY_SHARE) if plan.estimand.contrast == "policy" else 1.0)
    return _design(tuple(plan.rollouts.rounds), plan.decisions.sesoi, alpha, plan.decisions.stop_at)


@lru_cache(maxsize=8)
def _design(rounds: tuple[int, ...], sesoi: float, alpha: float, stop_at: float) -> Sequential:
    pairs = tuple((n, n) for n in rounds)
    return Sequential(sesoi, alpha=alpha, alpha_tost=alpha, rounds=pairs, pivotal_at=min(stop_at, alpha))


def undecided(points: Sequence[Records], plan: Plan) -> list[bool]:
    """Which of some defined points owe another round."""
    total = len(plan.rollouts.rounds)
    owes = [len(records) - 1 < total for records in points]
    counts = [count(records, plan) if owes[i] and len(records) > 1 else None for i, records in enumerate(points)]
    for i, found in enumerate(counts):
        if found is not None and found.missing is not None:
            owes[i], counts[i] = False, None
    judged = [i for i, found in enumerate(counts) if found is not None]
    if plan.rollouts.adaptive and judged:
        wins = _padded([found for found in counts if found is not None], total)
        states = sequential_design(plan).assess(wins[:, 0], wins[:, 1]).state
        for i, state in zip(judged, states, strict=True):
            owes[i] = bool(state == "continue")
    return owes


def _padded(counts: Sequence[Counts], total: int) -> Floats:
    """(points, 2, rounds) cumulative wins of factual and alternatives, NaN for rounds a point has not had."""
    longest = min(max(found.wins.shape[1] for found in counts), total)
    wins = np.full((len(counts), 2, longest), np.nan)
    for i, found in enumerate(counts):
        wins[i, :, : found.wins.shape[1]] = found.wins
    return wins


# Effects ---------------------------------------------------------------------------------------------------------

COLUMNS = (
    "point", "trajectory", "game", "game_name", "task_type", "policy", "step", "steps", "won", "action",
    "action_type", "support", "reason", "state", "contrast", "estimate", "low", "high", "p", "q", "mde", "pi", "exact",
    "draws", "distinct", "unseen", "rounds", "n_factual", "wins_factual", "n_alternative", "wins_alternative",
    "compared_with", "failed", "env_steps",
)  # fmt: skip


def effects(points: Iterable[tuple[Trajectory, Records]], plan: Plan) -> tuple[pd.DataFrame, dict[int, Counts]]:
    """(one row a point in the order given, the counts behind each row that has an effect).

    Columns are documented in README; `state` and `support` are never missing, numbers are where they do not exist.
    Intervals are at 1 - alpha a point; q-values control the false discovery rate over the points of this run.
    """
    rows: list[dict[str, Any]] = []
    defined: list[tuple[int, Mapping[str, Any], Counts]] = []
    for trajectory, records in points:
        row = _row(trajectory, records[0], plan)
        if records[0]["state"] == "defined":
            counts = count(records, plan)
            row["failed"], row["env_steps"], row["rounds"] = counts.failed, counts.steps, len(records) - 1
            if counts.missing is not None:
                row["support"], row["reason"] = "error", counts.missing
            elif len(records) == 1 or undecided([records], plan)[0]:
                row["support"], row["reason"] = "error", "not replayed to the end; run the same command again"
            else:
                defined.append((len(rows), records[0], counts))
        rows.append(row)
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    if defined:
        _judge(frame, defined, plan)
    return frame, {row: counts for row, _, counts in defined}


def _row(trajectory: Trajectory, point: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    return {
        "point": point["point"],
        "trajectory": trajectory.id,
        "game": trajectory.game,
        "game_name": trajectory.game_name,
        "task_type": trajectory.task_type,
        "policy": trajectory.policy,
        "step": point["step"],
        "steps": len(trajectory.commands),
        "won": trajectory.won,
        "action": point["action"],
        "action_type": point["action"].split(" ", 1)[0],
        "support": point["state"],
        "reason": point["reason"],
        "state": "undefined",
        "contrast": plan.estimand.contrast,
        **dict.fromkeys(("estimate", "low", "high", "p", "q", "mde"), np.nan),
        "pi": np.nan if point["pi"] is None else point["pi"],
        "exact": point["exact"],
        "draws": point["draws"],
        "distinct": len(point["alternatives"]),
        "unseen": _unseen(point),
        **dict.fromkeys(("rounds", "n_factual", "wins_factual", "n_alternative", "wins_alternative", "failed"), 0),
        "compared_with": None,
        "env_steps": 0,
    }


def _unseen(point: Mapping[str, Any]) -> float:
    """Mass of actions that no draw showed: exact where the policy knows, else Good-Turing; NaN without draws."""
    if point["unseen"] is not None:
        return float(point["unseen"])
    return point["singletons"] / point["draws"] if point["draws"] else float("nan")


@dataclass(frozen=True, slots=True)
class _Judgement:
    """What a contrast gives for all defined points at once."""

    interval: Interval
    p: Floats
    support: Support | None
    close: npt.NDArray[np.bool_]


def _judge(frame: pd.DataFrame, defined: Sequence[tuple[int, Mapping[str, Any], Counts]], plan: Plan) -> None:
    rows = [row for row, _, _ in defined]
    points = [point for _, point, _ in defined]
    counts = [found for _, _, found in defined]
    wins = np.array([found.wins[:, -1] for found in counts])
    n = np.array([found.n[:, -1] for found in counts])
    if plan.estimand.contrast == "best":
        judged, chosen = _best(counts, plan)
        frame.loc[rows, "compared_with"] = [found.arms[1 + arm][1] for found, arm in zip(counts, chosen, strict=True)]
    elif plan.rollouts.adaptive:
        judged = _adaptive(counts, points, plan)
    elif plan.estimand.outcome == "won":
        judged = _fixed(wins, n, points, plan)
    else:
        judged = _scores(counts, points, plan)
    supports = None
    cdfs = None
    if judged.support is not None:
        pairs = [judged.support.of(i) for i in range(len(rows))]
        supports, cdfs = [values for values, _ in pairs], [cdf for _, cdf in pairs]
    alpha = plan.decisions.alpha
    q = discoveries(judged.p, supports, method="bh" if supports is None else "hsu", alpha=alpha, cdfs=cdfs).q
    values = {
        "estimate": judged.interval.estimate,
        "low": judged.interval.low,
        "high": judged.interval.high,
        "p": judged.p,
        "q": q,
        "state": np.where(q <= alpha, "pivotal", np.where(judged.close, "negligible", "inconclusive")),
        "n_factual": n[:, 0],
        "wins_factual": wins[:, 0],
        "n_alternative": n[:, 1:].sum(axis=1),
        "wins_alternative": wins[:, 1:].sum(axis=1),
    }
    for column, value in values.items():
        frame.loc[rows, column] = value
    if plan.estimand.outcome == "won":
        frame.loc[rows, "mde"] = [
            detectable(int(a), int(b), plan) for a, b in zip(n[:, 0], n[:, 1:].sum(axis=1), strict=True)
        ]


@lru_cache(maxsize=1024)
def _detectable(n_factual: int, n_alternative: int, p: float, alpha: float, power: float) -> float:
    return float(minimum_detectable_effect(p, n_factual, n_alternative, alpha=alpha, power=power))


def detectable(n_factual: int, n_alternative: int, plan: Plan, p: float = 0.5) -> float:
    """Minimum detectable effect of one point with these rollouts, where the rates straddle p; NaN if none is."""
    return _detectable(n_factual, n_alternative, p, plan.decisions.alpha, plan.decisions.power)


def _weights(k: int) -> list[float]:
    """Contrast of the factual arm with k alternatives, equally weighted."""
    return [1.0] + [-1.0 / k] * k


def _adaptive(counts: Sequence[Counts], points: Sequence[Mapping[str, Any]], plan: Plan) -> _Judgement:
    wins = _padded(counts, len(plan.rollouts.rounds))
    design = sequential_design(plan)
    seen = design.assess(wins[:, 0], wins[:, 1])
    interval, close = seen.interval, seen.state == "negligible"
    if plan.estimand.contrast == "policy":
        interval = _scaled(interval, design.alpha, points, plan)
        close = negligible(interval, plan.decisions.sesoi)
    return _Judgement(interval, seen.p, seen.support, close)


def _fixed(wins: Any, n: Any, points: Sequence[Mapping[str, Any]], plan: Plan) -> _Judgement:
    alpha = plan.decisions.alpha
    if plan.rollouts.design == "arms":
        weights = _weights(wins.shape[1] - 1)
        rng = np.random.Generator(np.random.Philox(key=draws(2, "permutations", plan.seed)))
        tested = permutation_test(wins, n, weights, rng=rng)
        # Melded, since the score interval of several small arms dips to .91 where rates are near 0 or 1.
        interval, narrow = (melded_interval(wins, n, weights, rng, level) for level in (alpha, 2 * alpha))
        return _Judgement(interval, tested.p, tested.support, negligible(narrow, plan.decisions.sesoi))
    tested = fisher_test(wins[:, 0], n[:, 0], wins[:, 1], n[:, 1])
    if plan.estimand.contrast == "policy":
        level = alpha * (1 - POLICY_SHARE)
        interval = _scaled(exact_interval(wins[:, 0], n[:, 0], wins[:, 1], n[:, 1], level), level, points, plan)
        return _Judgement(interval, tested.p, tested.support, negligible(interval, plan.decisions.sesoi))
    interval = exact_interval(wins[:, 0], n[:, 0], wins[:, 1], n[:, 1], alpha)
    narrow = exact_interval(wins[:, 0], n[:, 0], wins[:, 1], n[:, 1], 2 * alpha)
    return _Judgement(interval, tested.p, tested.support, negligible(narrow, plan.decisions.sesoi))


def _scaled(tau: Interval, level: float, points: Sequence[Mapping[str, Any]], plan: Plan) -> Interval:
    """The `policy` contrast (1 - pi) tau: pi exact where the policy knows it, else from its draws."""
    exact = np.array([point["exact"] for point in points])
    parts = [np.full(len(points), np.nan) for _ in range(3)]
    for known in (True, False):
        rows = np.flatnonzero(exact == known)
        if len(rows) == 0:
            continue
        part = Interval(tau.estimate[rows], tau.low[rows], tau.high[rows])
        if known:
            scaled = policy_interval(part, level, pi=[points[i]["pi"] for i in rows.tolist()])
        else:
            scaled = policy_interval(
                part,
                level,
                draws_equal=[points[i]["factual_draws"] for i in rows.tolist()],
                draws=[points[i]["draws"] for i in rows.tolist()],
                pi_alpha=plan.decisions.alpha * POLICY_SHARE,
            )
        for whole, value in zip(parts, scaled, strict=True):
            whole[rows] = value
    return Interval(*parts)


def _best(counts: Sequence[Counts], plan: Plan) -> tuple[_Judgement, npt.NDArray[np.int64]]:
    """Choose the best alternative on the first half of its rollouts, estimate on the second."""
    alpha = plan.decisions.alpha
    half = plan.rollouts.rounds[-1] // 2
    factual = (
        np.array([found.scores[0].sum() for found in counts]),
        np.array([len(found.scores[0]) for found in counts]),
    )
    first = np.array([[arm[:half].sum() for arm in found.scores[1:]] for found in counts])
    second = np.array([[arm[half:].sum() for arm in found.scores[1:]] for found in counts])
    rest = np.array([[len(arm) - half for arm in found.scores[1:]] for found in counts])
    choosing, estimating = (first, np.full_like(rest, half)), (second, rest)
    chosen, interval = best_interval(factual, choosing, estimating, alpha)
    _, narrow = best_interval(factual, choosing, estimating, 2 * alpha)
    at = np.arange(len(counts)), chosen
    tested = fisher_test(factual[0], factual[1], second[at], rest[at])
    return _Judgement(interval, tested.p, tested.support, negligible(narrow, plan.decisions.sesoi)), chosen


def _scores(counts: Sequence[Counts], points: Sequence[Mapping[str, Any]], plan: Plan) -> _Judgement:
    """Bounded scores: guaranteed intervals (Gaffke), permutation p-values."""
    alpha = plan.decisions.alpha
    arms = [np.array([found.scores[a] for found in counts]) for a in range(len(counts[0].scores))]
    weights = _weights(len(arms) - 1)

    def rng(use: str) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=draws(2, use, plan.seed)))

    labels = np.concatenate([np.full(arm.shape[1], a) for a, arm in enumerate(arms)])
    p = permutation_test_scores(np.concatenate(arms, axis=1), labels, weights, rng("permutations"))
    level = alpha * (1 - POLICY_SHARE) if plan.estimand.contrast == "policy" else alpha
    interval = score_means_interval(arms, weights, level, rng=rng("gaffke"))
    narrow = interval
    if plan.estimand.contrast == "policy":
        interval = narrow = _scaled(interval, level, points, plan)
    else:
        narrow = score_means_interval(arms, weights, 2 * alpha, rng=rng("gaffke"))
    return _Judgement(interval, p, None, negligible(narrow, plan.decisions.sesoi))
