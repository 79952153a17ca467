"""The section on a micro-randomised trial: what intervening changed, where, and whether the coins can carry it.

Knows: that checks come before effects, and that a leaderboard speaks of the histories its trial met. Hides: which
tables a trial can give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from audit.mrt.data import MRTData
from audit.mrt.diagnostics import RandomizationCheck, positivity, randomization_check
from audit.mrt.impact import Leaderboard
from audit.mrt.reading import BY, Reading, read
from audit.mrt.results import Effects
from audit.mrt.trial import Trial
from audit.report.parts import Drawing, Facts, Missing, Part, Section, Table, Text, interval, number, short
from envs.core import InputError

COINS = ("t", "n_past_eligible", "n_past_treated")
MOST_LEVELS = 20
TRANSPORT = (
    "These are averages over the histories that this trial's policy met under this trial's coins. For another policy, "
    "another set of games or other coins they need not hold; --used-for TRIAL checks that against another trial."
)


def trial_section(trial: Trial, label: str, prefix: str, used_for: Trial | None = None) -> Section:
    """Everything of one trial."""
    title = f"Trial: what intervening changed ({short(label)})"
    parts: list[Part] = []
    try:
        data = trial.data()
        parts += _checks(data)
        reading = read(trial, by=groupings(data), used_for=used_for)
    except InputError as error:
        return Section(title, [*parts, Missing(f"The trial cannot be read: {error}")], "Trial")
    parts = [Facts(_card(trial.manifest, reading)), *_effects(reading, prefix), *parts]
    parts += [Text(note, "note") for note in reading.notes]
    return Section(title, parts, "Trial")


def groupings(data: MRTData) -> list[str]:
    """The features whose levels get a blip each: the usual ones where the trial has them, else its texts with few
    levels."""
    varied = [name for name in data.frame.columns if data.frame[name].nunique() > 1]
    usual = [name for name in BY if name in varied]
    words = [name for name in varied if not pd.api.types.is_numeric_dtype(data.frame[name])]
    return usual or [name for name in words if data.frame[name].nunique() <= MOST_LEVELS]


def _card(manifest: Mapping[str, Any], reading: Reading) -> tuple[tuple[str, str], ...]:
    policy, design = manifest.get("policy") or {}, manifest.get("design") or {}
    facts: list[tuple[str, str]] = []
    if policy:
        facts.append(("Policy", f"{policy.get('name', 'policy')} ({policy.get('kind', 'unknown kind')})"))
    if manifest.get("intervention"):
        about = manifest["intervention"]
        facts.append(
            ("Intervention", ", ".join(f"{k} {v}" for k, v in about.items() if isinstance(v, (str, int, float))))
        )
    if design:
        facts.append(("Design", ", ".join(f"{key} {value}" for key, value in design.items())))
    if manifest.get("env"):
        facts.append(("Games", str(manifest["env"])))
    facts += [(name[0].upper() + name[1:], value) for name, value in reading.headline]
    return tuple(facts)


def _effects(reading: Reading, prefix: str) -> list[Part]:
    pooled = reading.pooled.assign(interval=_pairs(reading.pooled, "low", "high"))
    names = {"continuation": "what happens later", "arm": "treatment", "estimate": "effect", "se": "se"}
    names |= {"interval": "95\u00a0% interval", "p_value": "p"}
    parts: list[Part] = [
        Text(
            "A blip is the effect on the outcome of intervening at one decision instead of not. What happens at later "
            "decisions matters: either coins go on as in the trial, or nobody intervenes again.",
            "how",
        ),
        Table.of("Blip over all decisions", pooled, names),
    ]
    for place, (name, board) in enumerate(reading.groups.items()):
        parts += _board(name, board, f"{prefix}blip-{place + 1}")
    parts.append(Text(TRANSPORT, "note"))
    if reading.gains is None:
        parts.append(Missing("With several treatments a rule in text does not name one, so there are no policy gains."))
        return parts
    gains = reading.gains
    table = gains.to_frame()
    parts.append(
        Drawing(
            f"{prefix}gains",
            "What whole policies of intervening would gain",
            "Each line is a rule for when to intervene. Its gain is the outcome it would reach minus that of never "
            "intervening, with a 95\u00a0% interval. Rules far from the trial's coins (a small effective sample size) "
            "lean on the blip model.",
            table,
            partial(_draw, gains, "gain in outcome over never intervening"),
            (6.0, 1.1 + 0.26 * len(gains.names)),
            alt="Forest of policy gains",
        )
    )
    table = table.assign(interval=_pairs(table, "low", "high"))
    names = {"term": "rule", "estimate": "gain", "se": "se", "interval": "95\u00a0% interval", "p_value": "p"}
    names |= {"ess": "effective sample size", "consistent": "consistent share"}
    parts.append(Table.of("Policy gains", table, names))
    return parts


def _board(name: str, board: Leaderboard, figure: str) -> list[Part]:
    table = board.to_frame()
    ordered = board.effects.select(list(table["term"]))
    levels = tuple(term.removeprefix(f"{name}=") for term in ordered.names)
    ordered = replace(ordered, names=levels)
    ranks = [_ranks(a, b) for a, b in zip(table["rank_best"], table["rank_worst"], strict=True)]
    table = table.assign(term=levels, interval=_pairs(table, "low", "high"), ranks=ranks)
    shown = {"term": short(name), "estimate": "effect", "interval": "simultaneous interval"}
    shown |= {"p_adjusted": "adjusted p", "ranks": "rank", "rows_treated": "decisions treated", "reason": "reason"}
    return [
        Drawing(
            figure,
            f"Where intervening matters, by {short(name)}",
            "The largest effect is on top. Lines are 95\u00a0% intervals one by one; the table has simultaneous ones "
            "and the ranks that a group may hold, given all comparisons at once.",
            board.to_frame(),
            partial(_draw, ordered, "effect of intervening once"),
            (6.0, 1.1 + 0.26 * len(ordered.names)),
            alt=f"Forest of blips by {short(name)}",
        ),
        Table.of(f"Leaderboard by {short(name)}", table, shown),
        *(Text(warning, "mark") for warning in board.warnings),
    ]


def _ranks(best: Any, worst: Any) -> str:
    if best is None or worst is None or best != best or worst != worst:
        return "–"
    return f"{int(best)}" if best == worst else f"{int(best)}–{int(worst)}"


def _draw(effects: Effects, label: str, figure: Figure) -> None:
    named = replace(effects, names=tuple(short(name, 36) for name in effects.names))
    ax = named.plot(figure.subplots())
    ax.set_xlabel(label)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _pairs(frame: pd.DataFrame, low: str, high: str) -> list[str]:
    return [interval(a, b) for a, b in zip(frame[low].astype(float), frame[high].astype(float), strict=True)]


def _checks(data: MRTData) -> list[Part]:
    support = positivity(data).assign(probability=lambda t: _pairs(t, "p_min", "p_max"))
    names = {"group": "group", "arm": "arm", "rows": "decisions", "clusters": "clusters"}
    names |= {"probability": "logged probability", "below": "share below .05", "warning": "warning"}
    parts: list[Part] = [Table.of("Positivity: does every arm have data (arm 0: not treated)", support, names)]
    try:
        check = randomization_check(data, list(COINS))
    except InputError as error:
        return [*parts, Missing(f"The randomisation check is not shown: {error}")]
    return [*parts, Text(_verdict(check), "plain"), _calibration(check)]


def _verdict(check: RandomizationCheck) -> str:
    said = "no sign that coins fell otherwise than logged" if check.p_value >= 0.05 else "coins did NOT fall as logged"
    return (
        f"Randomisation check: {said} (F({check.df}, {check.df_denominator}) = {number(check.statistic)}, "
        f"p = {number(check.p_value)}). A small p means that probabilities were logged wrongly, and then nothing else "
        "here can be trusted."
    )


def _calibration(check: RandomizationCheck) -> Table:
    return Table.of("Logged probability against how often coins fell so", check.calibration, folded=True)
