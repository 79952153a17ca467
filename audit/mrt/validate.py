"""A trial held against direct Monte Carlo, in a world that can be restored: both halves of the audit on one question.

Knows: how the same blips are had by forking (both arms of a decision, each continuation) and the same gains by letting
target policies play; what either costs in rollouts. Hides: the batches.

Everything here is about these very games, so intervals of the trial rest on trajectories, not on tasks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from audit.mrt.blip import blip
from audit.mrt.data import Floats
from audit.mrt.episodes import Episode, Rule, Start, opening, play
from audit.mrt.interventions import Intervention, load_intervention
from audit.mrt.reading import POLICIES, default_model, gains
from audit.mrt.results import Effects
from audit.mrt.rules import TextRule, read_rule, read_rules
from audit.mrt.trial import Design, simulate
from audit.policies import Policy, load_policy
from envs import Game, InputError, games

BATCH = 256
NEVER = "never treating"
CONTINUATIONS = {"as in the trial": "randomized", "no later treatment": "none"}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Validation:
    """Estimates of trials beside direct Monte Carlo.

    blips, gains: a row a repeat and effect: repeat, effect (gains: the policy; blips: continuation, method, group),
    estimate, se, low, high, direct, direct_se, agrees (is their difference inside its 95 % interval, which counts the
    noise of the direct figure too; this holds 95 % of the time if both are right). gains have inside as well: is the
    direct figure inside the trial's own interval, so that its noise counts against the trial. cost: rollouts by
    purpose. never: the chance of winning without treatment, by direct Monte Carlo.
    """

    gains: pd.DataFrame
    blips: pd.DataFrame
    cost: pd.DataFrame
    never: float
    model: str

    def gain_table(self) -> pd.DataFrame:
        """A row a policy: see `_over_repeats`."""
        return _over_repeats(self.gains, ["policy"])

    def blip_table(self) -> pd.DataFrame:
        """A row a continuation, method and group: see `_over_repeats`."""
        return _over_repeats(self.blips, ["continuation", "method", "group"])

    @property
    def share(self) -> float:
        """Share of direct gains inside the interval, over policies and repeats; the noise of the direct gain counts
        against the trial."""
        return float(self.gains["inside"].mean())

    @property
    def agreement(self) -> tuple[float, float]:
        """Share of gains that agree with the direct ones once its noise is counted, and the standard error of this
        share over trials (NaN for one): gains of one trial are hit or missed together, so that repeats count, not
        repeats times policies. The direct figures are the same for all repeats, which this error leaves out."""
        by_trial = self.gains.groupby("repeat")["agrees"].mean()
        error = float(by_trial.std(ddof=1) / math.sqrt(len(by_trial))) if len(by_trial) > 1 else math.nan
        return float(by_trial.mean()), error


def _over_repeats(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One repeat: its estimates as they are. More: mean estimate, bias with its standard error (of the repeats and of
    the direct figure), the estimates' spread beside the mean standard error, and the shares that are inside or
    agree."""
    if rows["repeat"].nunique() < 2:
        return rows.drop(columns="repeat")
    found = rows.groupby(keys, sort=False)
    shares = {name: (name, "mean") for name in ("inside", "agrees") if name in rows.columns}
    table = found.agg(
        direct=("direct", "first"),
        direct_se=("direct_se", "first"),
        mean_estimate=("estimate", "mean"),
        spread=("estimate", "std"),
        mean_se=("se", "mean"),
        repeats=("estimate", "count"),
        **shares,
    ).reset_index()
    table.insert(len(keys) + 3, "bias", table["mean_estimate"] - table["direct"])
    error = np.hypot(table["spread"] / np.sqrt(table["repeats"]), table["direct_se"])
    table.insert(len(keys) + 4, "bias_se", error)
    return table


@dataclass(frozen=True)
class _Bench:
    """The world in which everything is played."""

    policy: Policy
    intervention: Intervention
    known: Sequence[Game]
    design: Design

    def play(self, starts: Sequence[Start], rule: Rule, *, keep_forks: bool = False) -> list[Episode]:
        eligible = read_rule(self.design.eligible)
        return asyncio.run(
            play(
                self.policy,
                self.intervention,
                starts,
                rule,
                p=self.design.p,
                eligible=eligible,
                keep_forks=keep_forks,
            )
        )

    def openings(self, n: int, *key: Any) -> Iterable[list[Start]]:
        for first in range(0, n, BATCH):
            numbers = range(first, min(first + BATCH, n))
            yield [
                opening(self.known[i % len(self.known)], self.design.budget, (*key, self.design.seed, i))
                for i in numbers
            ]


@dataclass(frozen=True, slots=True)
class Direct:
    """A policy's outcome by letting it play: mean, its standard error, variance of one rollout, failed rollouts."""

    mean: float
    se: float
    variance: float
    failed: int


def direct_values(
    bench: _Bench, rules: Mapping[str, Rule], n: int, progress: Progress = lambda stage, done, total: None
) -> dict[str, Direct]:
    """Mean outcome of never treating and of each target policy, by rollouts of its own (games in turn).

    Each policy gets n rollouts, never treating `_never_rollouts`: its error is shared by all gains.
    """
    found = {}
    asked: dict[str, Rule] = {NEVER: 0.0, **rules}
    for number, (name, rule) in enumerate(asked.items()):
        size = _never_rollouts(n, len(rules)) if name == NEVER else n
        episodes = [episode for starts in bench.openings(size, "direct", name) for episode in bench.play(starts, rule)]
        won = np.array([episode.won for episode in episodes if episode.status != "error"], dtype=float)
        if len(won) < 2:
            raise InputError(
                f"validate: policy {name!r} has {len(won)} rollouts with an outcome; at least 2 are needed."
            )
        variance = float(won.var(ddof=1))
        found[name] = Direct(float(won.mean()), float(np.sqrt(variance / len(won))), variance, size - len(won))
        progress("direct gains", number + 1, len(asked))
    return found


def _never_rollouts(n: int, policies: int) -> int:
    """Dunnett's allocation: an arm that m others are held against is worth sqrt(m) of them."""
    return math.ceil(n * math.sqrt(policies))


def direct_blips(
    bench: _Bench, n: int, rollouts: int, by: Sequence[str], progress: Progress = lambda stage, done, total: None
) -> tuple[pd.DataFrame, int]:
    """Blips by forking: every eligible decision of n fresh trajectories of the trial, both arms, each continuation.

    rollouts: of each arm of a decision. Returns a row a continuation and group (continuation, group, direct,
    direct_se (clustered by trajectory), decisions), and the number of rollouts. Decisions whose rollouts failed are
    left out.
    """
    rows: list[dict[str, Any]] = []
    forks: list[Start] = []
    owners: list[int] = []
    for starts in bench.openings(n, "forked"):
        for episode in bench.play(starts, bench.design.p, keep_forks=True):
            owner = owners[-1] + 1 if owners else 0
            rows += [row for row in episode.rows if row["eligible"]]
            forks += episode.forks
            owners += [owner] * len(episode.forks)
    if not forks:
        raise InputError("validate: no decision of the trial was eligible; there is nothing to fork.")
    parts = []
    for number, (name, kind) in enumerate(CONTINUATIONS.items()):
        rule = bench.design.p if kind == "randomized" else 0.0
        difference = np.zeros(len(forks))
        for arm, sign in ((1, 1.0), (0, -1.0)):
            arms = [
                replace(fork, arm=arm, key=("fork", name, arm, i, r, *fork.key))
                for i, fork in enumerate(forks)
                for r in range(rollouts)
            ]
            won: list[float] = []
            for first in range(0, len(arms), BATCH):
                played = bench.play(arms[first : first + BATCH], rule)
                won += [float("nan") if e.status == "error" else float(e.won) for e in played]
            difference += sign * np.reshape(won, (len(forks), rollouts)).mean(axis=1)
            progress("direct blips", 2 * number + (2 if arm == 0 else 1), 2 * len(CONTINUATIONS))
        for feature, level, at in _groups(rows, by):
            at = at & np.isfinite(difference)
            mean, se = _clustered(difference[at], np.asarray(owners)[at])
            label = "all" if not feature else f"{feature}={level}"
            parts.append((name, label, mean, se, int(at.sum())))
    table = pd.DataFrame(parts, columns=["continuation", "group", "direct", "direct_se", "decisions"])
    return table, n + 2 * len(CONTINUATIONS) * rollouts * len(forks)


def _groups(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> Iterable[tuple[str, str, np.ndarray]]:
    yield "", "", np.ones(len(rows), dtype=bool)
    for feature in by:
        if feature not in rows[0]:
            raise InputError(f"validate: `{feature}` is none of what is known before a coin: {', '.join(rows[0])}.")
        values = np.array([str(row[feature]) for row in rows])
        for level in sorted(set(values)):
            yield feature, level, values == level


def _clustered(values: Floats, owners: Any) -> tuple[float, float]:
    if not len(values):
        return float("nan"), float("nan")
    codes = np.unique(owners, return_inverse=True)[1]
    sums = np.bincount(codes, values - values.mean())
    g = len(sums)
    se = np.sqrt((sums**2).sum() * g / (g - 1)) / len(values) if g > 1 else np.nan
    return float(values.mean()), float(se)


def validate(
    policy: str | Policy,
    intervention: str | Intervention,
    env: str,
    design: Design,
    *,
    n: int,
    policies: Sequence[str] = (),
    by: Sequence[str] = ("action_group",),
    model: str | None = None,
    repeats: int = 1,
    direct: int = 2000,
    forked: int = 100,
    rollouts: int = 2,
    progress: Progress = lambda stage, done, total: None,
) -> Validation:
    """Trials of n trajectories beside direct Monte Carlo of the same effects.

    policies: target policies as text (default: those of `reading.POLICIES` that the trial can carry). by: features
    whose levels get a blip each. model: the blip model of g-estimation (default `reading.default_model` of the first
    trial, so that all repeats estimate the same). repeats: independent trials. direct: rollouts of each target policy
    (never treating, shared by all gains, gets the square root of their number times as many). forked: trajectories
    whose every eligible decision is forked; rollouts: of each arm there.
    Raises InputError for settings that the world cannot carry.
    """
    if min(n, repeats, rollouts) < 1 or min(direct, forked) < 2:
        raise InputError("validate: n, repeats and rollouts must be at least 1, direct and forked at least 2.")
    bench = _Bench(
        load_policy(policy) if isinstance(policy, str) else policy,
        load_intervention(intervention) if isinstance(intervention, str) else intervention,
        games(env),
        design,
    )
    first = _trial(bench, n, 0).data("trajectory")
    inside = first.frame.loc[first.eligible]
    rules = read_rules(policies or POLICIES)
    if not policies:
        fits = {name: set(rule.columns) <= set(inside.columns) for name, rule in rules.items()}
        rules = {name: rule for name, rule in rules.items() if fits[name] and rule(inside).any()}
    for rule in rules.values():
        rule(inside)
    base = default_model(first) if model is None else model
    values = direct_values(bench, rules, direct, progress)
    forks, forked_rollouts = direct_blips(bench, forked, rollouts, by, progress)
    gain_rows, blip_rows = [], []
    for repeat in range(repeats):
        trial = _trial(bench, n, repeat).data("trajectory") if repeat else first
        effects = gains(trial, rules, base)
        gain_rows.append(_gain_rows(effects, values).assign(repeat=repeat))
        for name, kind in CONTINUATIONS.items():
            fitted = blip(trial, kind, base, method="snmm")
            for group in ("pooled", *by):
                if kind == "randomized":
                    blip_rows.append(_blip_rows(blip(trial, kind, group), "aipw", name, forks).assign(repeat=repeat))
                blip_rows.append(_blip_rows(fitted.average(group), "snmm", name, forks).assign(repeat=repeat))
        progress("trials", repeat + 1, repeats)
    gained, blips = pd.concat(gain_rows, ignore_index=True), pd.concat(blip_rows, ignore_index=True)
    return Validation(gained, blips, _cost(gained, values, rules, n, direct, forked_rollouts), values[NEVER].mean, base)


def _trial(bench: _Bench, n: int, repeat: int) -> Any:
    # A seed of its own for every repeat, the design's own for the first.
    design = replace(bench.design, seed=bench.design.seed + repeat)
    return simulate(bench.policy, bench.intervention, bench.known, n, design)


def _gain_rows(effects: Effects, values: Mapping[str, Direct]) -> pd.DataFrame:
    table = effects.to_frame()[["term", "estimate", "se", "low", "high", "ess"]].rename(columns={"term": "policy"})
    never = values[NEVER]
    table["direct"] = [values[name].mean - never.mean for name in table["policy"]]
    table["direct_se"] = [float(np.hypot(values[name].se, never.se)) for name in table["policy"]]
    table["inside"] = (table["low"] <= table["direct"]) & (table["direct"] <= table["high"])
    return table.assign(agrees=_agrees(table))


def _blip_rows(effects: Effects, method: str, continuation: str, forks: pd.DataFrame) -> pd.DataFrame:
    table = effects.to_frame()[["term", "estimate", "se", "low", "high"]].rename(columns={"term": "group"})
    table["group"] = table["group"].replace("pooled", "all")
    table.insert(0, "method", method)
    table.insert(0, "continuation", continuation)
    here = forks[forks["continuation"] == continuation]
    table = table.merge(here[["group", "direct", "direct_se"]], on="group", how="left")
    return table.assign(agrees=_agrees(table))


def _agrees(table: pd.DataFrame) -> pd.Series:
    """Is estimate - direct inside its 95 % interval, the noise of both counted? Missing where either is."""
    there = table["estimate"].notna() & table["direct"].notna()
    half = np.hypot((table["high"] - table["low"]) / 2, stats.norm.isf(0.025) * table["direct_se"])
    return ((table["estimate"] - table["direct"]).abs() <= half).astype(float).where(there)


def _cost(
    gained: pd.DataFrame, values: Mapping[str, Direct], rules: Mapping[str, TextRule], n: int, direct: int, forked: int
) -> pd.DataFrame:
    """Rollouts by purpose; what direct Monte Carlo would have needed for the precision of the trial's gains.

    Equal precision: both arms of each gain as large, the arm of never treating shared and as large as the largest.
    """
    se = gained.groupby("policy", sort=False)["se"].mean()
    never = values[NEVER].variance
    each = {name: (values[name].variance + never) / se[name] ** 2 for name in rules}
    equal = sum(each.values()) + max(each.values())
    m = len(rules)
    spent = direct * m + _never_rollouts(direct, m)
    return pd.DataFrame(
        [
            (f"one trial: gains of {m} policies, all blips", n, round(n / m)),
            (f"direct Monte Carlo of {m} policies, as run", spent, round(spent / m)),
            (f"direct Monte Carlo of {m} policies, at the trial's precision", round(equal), round(equal / m)),
            ("direct blips by forking, as run", forked, None),
        ],
        columns=["purpose", "rollouts", "rollouts_a_policy"],
        dtype=object,  # whole numbers beside a missing one
    ).astype({"rollouts": int})
