"""From a trial to tables: which blips, which target policies, and which blip model unless the user says otherwise.

Knows: what a reader of a trial wants first, and that a gain is only as right as its blip model, so the model always
contains what the target policy looks at. Hides: which columns of a trial can carry a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from audit.mrt.blip import blip, eligible_rows
from audit.mrt.data import TWO_TARGETS, Floats, MRTData
from audit.mrt.design import Rule, formula_matrix, rule_values
from audit.mrt.diagnostics import randomization_check
from audit.mrt.gain import LOW_ESS, Gains, Method, policy_gain
from audit.mrt.impact import Leaderboard, impact_scores
from audit.mrt.results import Effects, stack
from audit.mrt.rules import TextRule, read_rules
from audit.mrt.trial import Trial
from envs.core import InputError

LEVELS = 8  # a text feature with more levels than this enters no default model
SUPPORT = 10  # rows an arm that a level needs to enter one
COEFFICIENTS = 3  # clusters that every coefficient of a default model needs
BY = ("action_group", "action_type", "last_group", "last_action", "task_type", "phase")
POLICIES = (
    "always",
    "half: 0.5",
    "mostly: 0.8",
    "early: t<5",
    "late: t>=5",
    "first coin: n_past_eligible<1",
    "first three coins: n_past_eligible<3",
    "two treatments: n_past_treated<2",
    "moves: action_group=go",
    "handling: action_group!=go",
    "puts: action_group=put",
    "searching: phase=searching",
    "carrying: phase!=searching",
    "repeats: repeated=1",
    "two objects: task_type=pick_two_obj_and_place",
)


def default_policies(data: MRTData) -> dict[str, TextRule]:
    """The named target policies whose features the trial has and which sometimes treat."""
    rules = read_rules(POLICIES)
    known = set(data.frame.columns)
    inside = data.frame.loc[data.eligible]
    return {name: rule for name, rule in rules.items() if known >= set(rule.columns) and rule(inside).any()}


def default_model(data: MRTData) -> str:
    """A blip model of what the trial recorded: text features with few levels, by time, yes-or-no features, coins and
    treatments so far.

    Features that do not vary, that follow from the others, or whose levels are too rare to carry an effect are left
    out; so are those, in the order of the columns, that would need more than one coefficient for every three clusters.
    """
    rows = eligible_rows(data)
    inside = data.frame.loc[data.eligible]
    groups: list[str] = []
    numbers: list[str] = []
    for name in data.frame.columns:
        column = inside[name]
        number = pd.api.types.is_numeric_dtype(column)
        if name in ("t", "p") or name.startswith("p_") or column.nunique() < 2:
            continue
        if name in ("n_past_eligible", "n_past_treated"):
            numbers.append(name)
            continue
        few = column.nunique() <= (2 if number else LEVELS)
        if few and pd.crosstab(column, rows.arm).to_numpy().min() >= SUPPORT:
            (numbers if number else groups).append(name if number else f"C({name})")
    limit = (int(data.cluster_codes().max()) + 1) // COEFFICIENTS
    timed = inside["t"].nunique() > 1
    kept: list[str] = []
    used: list[str] = []
    for name in (*groups, *numbers):
        heads, tails = ([*kept, name], used) if name in groups else (kept, [*used, name])
        matrix, _ = formula_matrix(_formula(heads, tails, timed), inside)
        if matrix.shape[1] <= limit and _independent(matrix):
            kept, used = heads, tails
    return _formula(kept, used, timed)


def _formula(groups: Sequence[str], numbers: Sequence[str], timed: bool) -> str:
    head = " + ".join(groups)
    if timed:
        head = f"({head}) * t" if groups else "t"
    return "~ " + (" + ".join(part for part in (head, *numbers) if part) or "1")


def _independent(s: Floats) -> bool:
    scaled = s / np.sqrt((s**2).sum(axis=0))
    return bool(np.linalg.eigvalsh(scaled.T @ scaled)[0] > 1e-6)


def model_for(data: MRTData, rule: Rule, model: str) -> tuple[MRTData, str]:
    """The trial and the blip model for one target policy: with the policy's own probability as a further moderator.

    A blip whose continuation is the policy jumps where the policy jumps (a budget that runs out, a step from which it
    treats), so a model blind to that is wrong for this policy. Nothing is added where the model spans the policy.
    """
    if isinstance(rule, str):
        return data, model
    inside = data.eligible
    chance = np.zeros(len(inside))
    chance[inside] = rule_values(rule, data.frame.loc[inside], "policy")
    s, _ = formula_matrix(model, data.frame.loc[inside])
    if _spanned(s, chance[inside]) or not _supported(data, chance[inside]):
        return data, model
    decisions = data.decisions.assign(policy=chance)
    richer = MRTData(decisions, data.trajectories, features=(*data.features, "policy"), cluster=data.cluster)
    return richer, f"{model} + policy"


def _spanned(s: Floats, column: Floats) -> bool:
    fit = s @ np.linalg.lstsq(s, column, rcond=None)[0]
    total = float((column**2).sum())
    return total == 0 or float(((column - fit) ** 2).sum()) < 1e-3 * total


def _supported(data: MRTData, column: Floats) -> bool:
    arm = data.arm[data.eligible]
    return all(int(((column != 0) & (arm == k)).sum()) >= SUPPORT for k in range(data.arms + 1))


def gains(
    data: MRTData,
    policies: Mapping[str, Rule],
    model: str | None = None,
    *,
    method: Method = "snmm",
    **options: Any,
) -> Effects:
    """Gains over never treating, each policy by a blip model that contains the policy (`model_for`).

    model: a formula; None takes `default_model`. options: as in `policy_gain`. Joint covariance over policies.
    Raises InputError for policies that the trial cannot carry.
    """
    if not policies:
        raise InputError("gains: no policy given; name at least one, such as always.")
    base = default_model(data) if model is None else model
    plain: dict[str, Rule] = {}
    richer: dict[str, tuple[MRTData, str]] = {}
    for name, rule in policies.items():
        trial, formula = model_for(data, rule, base) if method in ("snmm", "occupancy") else (data, base)
        if trial is data:
            plain[name] = rule
        else:
            richer[name] = trial, formula
    parts: list[Gains] = [policy_gain(data, plain, base, method=method, **options)] if plain else []
    for name, (trial, formula) in richer.items():
        parts.append(policy_gain(trial, {name: policies[name]}, formula, method=method, **options))
    together = stack(parts).select(list(policies))
    weak = [name for name in policies if any(name in p.overlaps and p.overlaps[name].ess < LOW_ESS for p in parts)]
    notes = tuple(note for note in together.notes if not note.startswith(("effective sample size", "blip model:")))
    if method in ("snmm", "occupancy"):
        notes += (f"blip model: {base}, and each policy's own probability where the model does not span it",)
    if weak:
        notes += (f"effective sample size below {LOW_ESS:g}, so the blip model carries the gain: {', '.join(weak)}",)
    return replace(together, notes=notes)


@dataclass(frozen=True, eq=False)
class Reading:
    """What a trial shows. headline: label and value. pooled: blips over all decisions by continuation. groups: a
    leaderboard of impact scores a feature. gains: target policies over never treating; None with several treatments,
    where a rule in text does not say which one (`policy_gain` takes functions). notes: what a reader must know.
    """

    headline: tuple[tuple[str, str], ...]
    pooled: pd.DataFrame
    groups: Mapping[str, Leaderboard]
    gains: Effects | None
    notes: tuple[str, ...]


def read(
    trial: Trial,
    *,
    by: Sequence[str] = (),
    policies: Sequence[str] = (),
    model: str | None = None,
    method: Method = "snmm",
    cluster: str | None = None,
    alpha: float = 0.05,
    used_for: Trial | None = None,
) -> Reading:
    """Blips pooled and by feature, impact scores, and gains of target policies.

    by: features whose levels get a blip each (default those of `BY` that the trial has). policies: rules as text
    (default `default_policies`). model: the blip model of gains. used_for: another trial that the numbers are meant
    for. Raises InputError for names that the trial does not have, or data that cannot carry an estimate.
    """
    data = trial.data(cluster)
    names = list(by) or [name for name in BY if name in data.frame.columns and data.frame[name].nunique() > 1]
    rules = read_rules(policies) if policies else default_policies(data)
    for rule in rules.values():
        rule(data.frame.head(0))  # an unknown feature is said before anything is computed
    base = default_model(data) if model is None else model
    randomized, fitted = blip(data, "randomized"), blip(data, "none", base)
    parts = [randomized.to_frame(alpha).assign(continuation="as in the trial", arm=range(1, data.arms + 1))]
    for arm in range(1, data.arms + 1):
        average = fitted.average(arm=arm).to_frame(alpha)
        parts.append(average.assign(continuation="no later treatment", arm=arm))
    columns = ["continuation", "arm", "estimate", "se", "low", "high", "p_value"]
    pooled = pd.concat(parts, ignore_index=True)[columns]
    transport = None if used_for is None else used_for.data(cluster)
    boards = {name: impact_scores(data, name, alpha=alpha, used_for=transport) for name in names}
    if data.arms > 1 and policies:
        raise InputError("policies: a rule in text is for one treatment; use audit.mrt.policy_gain with functions.")
    gained = gains(data, rules, base, method=method) if data.arms == 1 else None
    notes = tuple(
        dict.fromkeys(
            [
                *randomized.notes,
                *fitted.notes,
                *(gained.notes if gained is not None else ()),
                *(warning for board in boards.values() for warning in board.warnings),
            ]
        )
    )
    if trial.failed:
        notes += (f"{trial.failed} trajectories failed and are left out",)
    return Reading(_headline(trial, data), pooled, boards, gained, notes)


def _headline(trial: Trial, data: MRTData) -> tuple[tuple[str, str], ...]:
    coins, treated = int(data.eligible.sum()), int((data.arm != 0).sum())
    try:
        check = randomization_check(data, ["t", "n_past_eligible", "n_past_treated"])
        coin = f"p = {check.p_value:.3f} of coins as logged"
    except InputError as error:
        coin = str(error)
    return (
        ("trajectories", f"{data.n:,}"),
        ("mean outcome", f"{data.y.mean():.3f}"),
        ("decisions", f"{len(data.decisions):,}"),
        ("coins", f"{coins:,} ({treated / coins:.3f} treated)"),
        ("randomisation check", coin),
        ("intervals over", f"{int(data.cluster_codes().max()) + 1:,} clusters by {data.cluster}; {TWO_TARGETS}"),
    )
