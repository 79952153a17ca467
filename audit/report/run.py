"""The sections of a run: what it is, what it covers, which steps mattered, and the trajectories themselves.

Knows: what a reader must see first, and what must stand beside what. Hides: how transcripts are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from audit.report.distribution import beside_null, first_round
from audit.report.parts import (
    Drawing,
    Facts,
    Missing,
    Part,
    Section,
    Step,
    Table,
    Text,
    Timeline,
    Timelines,
    interval,
    number,
    plain,
    short,
    signed,
)
from audit.results import MARKERS, Run
from audit.show import groups
from audit.summary import GROUPS, SUPPORT_STATES
from envs.core import InputError

FOREST = 300  # points that a forest shows legibly
LARGEST = 15
SUPPORT_COLOURS = dict(zip(SUPPORT_STATES, ("#2166ac", "#b0b0b0", "#dfc27d", "#b2182b", "#762a83"), strict=True))
SUPPORT_WORDS = {
    "defined": "has an effect",
    "no_counterfactual": "no alternative: every draw of the policy was the step taken",
    "insufficient": "too few alternatives for the plan",
    "unfaithful": "the game did not reproduce",
    "error": "failed or not replayed",
}
STEP_COLUMNS = (
    "point", "state", "estimate", "low", "high", "pi", "n_factual", "wins_factual", "support", "reason",
)  # fmt: skip
HALF = 21.0  # pixels from the middle of a strip to an effect of 1


def run_sections(run: Run, prefix: str, trajectories: int) -> list[Section]:
    """All sections of one run. prefix: of its figures' names. trajectories: how many are shown in full."""
    return [
        Section("The run", [*_card(run), *_coverage(run, prefix)], "Run"),
        Section("Which steps mattered", _effects(run, prefix), "Effects"),
        Section("Trajectories", _trajectories(run, prefix, trajectories), "Trajectories"),
    ]


# What it is ------------------------------------------------------------------------------------------------------


def _card(run: Run) -> list[Part]:
    manifest, details = run.directory.manifest, run.details
    lock = "locked before the data" if manifest.get("locked") else "not locked"
    lock = "departs from its lock" if manifest.get("departed") else lock
    policy = manifest.get("policy") or {}
    versions = ", ".join(f"{name} {value}" for name, value in sorted((manifest.get("versions") or {}).items()))
    estimand, totals = details["estimand"], details["totals"]
    facts = (
        ("Policy", _policy(policy)),
        ("Policy identity", str(manifest.get("policy_id"))),
        ("Games", f"{totals['games']} of {manifest.get('env')}"),
        ("Plan", f"{run.plan.name}, {lock}"),
        ("Plan hash", str(manifest.get("plan_hash"))),
        (
            "Question",
            f"effect of the step taken on “{estimand['outcome']}” against {_contrast(estimand['contrast'])}; then the "
            f"policy itself, within {estimand['budget']} steps",
        ),
        ("Effort", f"{totals['rollouts']:,} rollouts, {totals['steps']:,} steps, {totals['failed_rollouts']} failed"),
        ("Versions", versions or "not recorded"),
    )
    return [*(Text(mark, "mark") for mark in run.marks), Text(_lead(run)), Facts(facts), _closing(run)]


def _policy(policy: Mapping[str, Any]) -> str:
    """Name, kind, model and temperature, where it has them; nothing else that a description may hold."""
    model, decode = policy.get("model"), policy.get("decode")
    said = [f"{policy.get('name', 'policy')} ({policy.get('kind', 'unknown kind')})"]
    if isinstance(model, Mapping):
        said += [str(model[key]) for key in ("model", "name", "local", "adapter") if isinstance(model.get(key), str)]
    temperature = decode.get("temperature") if isinstance(decode, Mapping) else policy.get("temperature")
    if isinstance(temperature, (int, float)):
        said.append(f"temperature {temperature:g}")
    return ", ".join(said)


def _contrast(name: str) -> str:
    words = {
        "alternatives": "what the policy would have done otherwise",
        "uniform": "its alternatives, each counted alike",
        "best": "its best alternative",
        "policy": "a fresh draw of the policy",
    }
    return words.get(name, name)


def _lead(run: Run) -> str:
    """What was found, in a few sentences."""
    details, shares = run.details, run.details["shares"]
    totals = details["totals"]
    if "pivotal" not in shares:
        return f"None of the {totals['points']:,} decision points has an effect that could be estimated."
    defined = int(shares["pivotal"]["points"])
    states = run.effects["state"].value_counts()
    percent = round(100 * (1 - details["estimand"]["alpha"]))
    return (
        f"{totals['points']:,} decision points in {totals['trajectories']} trajectories; {defined:,} have an effect "
        f"that can be estimated. Of these {states.get('pivotal', 0):,} are pivotal (an effect is shown), "
        f"{states.get('negligible', 0):,} negligible (shown to be smaller than {number(details['estimand']['sesoi'])}) "
        f"and {states.get('inconclusive', 0):,} inconclusive (too few rollouts to tell). Intervals of shares are over "
        f"games, at {percent}\u00a0%."
    )


def _closing(run: Run) -> Table:
    frame = run.summary()
    indented = frame["figure"].str.replace("^  ", "… ", regex=True)
    shown = pd.DataFrame(
        {
            "figure": indented,
            "estimate": frame["estimate"],
            "interval": [interval(low, high) for low, high in zip(frame["low"], frame["high"], strict=True)],
            "note": frame["note"].str.replace("+-", "±").str.replace("<=", "≤"),
        }
    )
    return Table.of("The closing table", shown)


# What it covers --------------------------------------------------------------------------------------------------


def coverage(run: Run) -> pd.DataFrame:
    """One row a group (all, then types of task) and state of support: points and share of the group's points."""
    effects = run.effects.assign(task_type=run.effects["task_type"].fillna("unknown").map(lambda v: short(v, 30)))
    parts = [("all", effects), *((str(name), part) for name, part in effects.groupby("task_type", sort=True))]
    rows = [
        {"group": name, "support": state, "points": int(hits), "share": hits / len(part)}
        for name, part in (parts if len(parts) > 2 else parts[:1])
        for state in SUPPORT_STATES
        for hits in [int((part["support"] == state).sum())]
    ]
    return pd.DataFrame(rows)


def _draw_coverage(frame: pd.DataFrame, figure: Figure) -> None:
    ax = figure.subplots()
    names = list(dict.fromkeys(frame["group"]))
    left = np.zeros(len(names))
    for state in SUPPORT_STATES:
        share = frame[frame["support"] == state]["share"].to_numpy()
        if share.any():
            ax.barh(names, share, left=left, color=SUPPORT_COLOURS[state], height=0.72, label=SUPPORT_WORDS[state])
        left += share
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.set_xlabel("share of decision points")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower left", ncols=1, frameon=False)


def _coverage(run: Run, prefix: str) -> list[Part]:
    frame = coverage(run)
    bars = frame["group"].nunique()
    reasons = pd.DataFrame(run.details["reasons"], columns=["support", "reason", "points"])
    drawing = Drawing(
        f"{prefix}coverage",
        "Coverage: for how many decision points there is an effect",
        "An effect needs something to compare with: where the policy would do nothing else, there is none. Undefined "
        "is not zero; these points are counted here and left out of every share.",
        frame,
        partial(_draw_coverage, frame),
        (6.0, 1.3 + 0.3 * bars + 0.18 * frame.loc[frame["points"] > 0, "support"].nunique()),
        alt=f"Stacked bars of support, {bars} in all",
    )
    parts: list[Part] = [drawing]
    if len(reasons):
        why = reasons.assign(support=reasons["support"].map(lambda s: s.replace("_", " ")))
        parts.append(Table.of("Why points are undefined", why))
    for by in GROUPS:
        table = groups(run, by)
        shown = pd.DataFrame({by.replace("_", " "): table[by].astype(str), "points": table["points"]})
        for name, heading in (("defined", "defined"), ("pivotal", "pivotal"), ("mean_effect", "mean effect")):
            shown[heading] = table[name].astype(float)
            shown[f"{heading} interval"] = _intervals(table[f"{name} low"], table[f"{name} high"])
        parts.append(Table.of(f"Figures by {by.replace('_', ' ')}", shown, folded=True))
    return parts


def _intervals(low: pd.Series, high: pd.Series) -> list[str]:
    return [interval(a, b) for a, b in zip(low.astype(float), high.astype(float), strict=True)]


# Which steps mattered ---------------------------------------------------------------------------------------------


def _draw_forest(run: Run, figure: Figure) -> None:
    ax = run.plot(figure.subplots(), most=FOREST)
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()
    figure.legend(loc="outside lower left", ncols=3, frameon=False)


def _draw_distribution(frame: pd.DataFrame, figure: Figure) -> None:
    ax = figure.subplots()
    middle = (frame["low"] + frame["high"]).to_numpy() / 2
    width = float(frame["high"].iloc[0] - frame["low"].iloc[0])
    ax.bar(middle, frame["observed"], width=0.86 * width, color="#2166ac", label="this run")
    edges = np.append(frame["low"].to_numpy(), frame["high"].iloc[-1])
    ax.stairs(frame["null"], edges, color="#d6604d", linewidth=1.4, label="no effect anywhere, same rollouts")
    ax.set_yscale("function", functions=(np.sqrt, np.square))  # small shares far from 0 are what is looked for
    top = float(max(frame["observed"].max(), frame["null"].max()))
    ax.set_yticks([tick for tick in (0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1) if tick <= 1.15 * top])
    ax.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    ax.set_xlabel("estimated effect")
    ax.set_ylabel("share of points (square-root scale)")
    figure.legend(loc="outside lower left", ncols=2, frameon=False)


def _effects(run: Run, prefix: str) -> list[Part]:
    effects = run.effects[run.effects["support"] == "defined"]
    if effects.empty:
        return [Missing("No point is defined, so there are no effects to show; the table above says why.")]
    ordered = effects.sort_values("estimate", kind="stable", ignore_index=True)
    columns = ["point", "trajectory", "step", "action", "state", "estimate", "low", "high", "p", "q"]
    shown = min(FOREST, len(ordered))
    every = f"all {shown:,}" if shown == len(ordered) else f"{shown} of {len(ordered):,}, evenly spaced in this order,"
    parts: list[Part] = [
        Drawing(
            f"{prefix}forest",
            "Effects with their intervals",
            f"One line a decision point, from the most harmful to the most helpful; {every} are drawn, the CSV has "
            "all. Right of zero the step helped, left of it the step harmed. Pivotal comes from a test that accounts "
            "for how many points were tested, so a pivotal line may sit beside an inconclusive one like it.",
            ordered[columns],
            partial(_draw_forest, run),
            (6.0, 5.2),
            alt="Forest of effects, coloured by state",
        )
    ]
    try:
        counts = first_round(run)
        frame = beside_null(counts)
        shares = run.details["shares"]
        nonzero = shares.get("nonzero", {})
        read = ""
        if nonzero:
            observed, null = nonzero["observed"]["estimate"], nonzero["null"]["estimate"]
            read = f" Here {number(observed)} of the estimates are not zero; chance alone would give {number(null)}."
        parts.append(
            Drawing(
                f"{prefix}distribution",
                "Estimates beside what chance alone would give",
                "Bars: this run's estimates after the first round of rollouts. Line: what the same counts would give "
                f"if no step had any effect (exact). Only what rises above the line is evidence.{read}",
                frame,
                partial(_draw_distribution, frame),
                (6.0, 3.6),
                alt="Histogram of estimates with the null as an outline",
            )
        )
    except InputError as error:
        parts.append(Missing(f"The distribution beside its null is not shown: {error}."))
    if "deconvolved" in run.details["shares"]:
        found = run.details["shares"]["deconvolved"]
        parts.append(
            Text(
                f"Taking rollout noise out by a model, {number(found['estimate'])} "
                f"{interval(found['low'], found['high'])} of the points have an effect of .1 or more (deconvolved "
                f"share; read its lower end).",
                "note",
            )
        )
    parts.append(_largest(effects))
    return parts


def _largest(effects: pd.DataFrame) -> Table:
    found = effects.assign(size=effects["estimate"].abs())
    found = found.sort_values(["size", "point"], ascending=[False, True], kind="stable").head(LARGEST)
    rows = pd.DataFrame(
        {
            "trajectory": found["trajectory"].str[:8],
            "step": found["step"].astype(int),
            "action": found["action"].map(lambda text: short(text, 60)),
            "effect": [signed(v) for v in found["estimate"]],
            "interval": [interval(a, b, signed, 2) for a, b in zip(found["low"], found["high"], strict=True)],
            "q": found["q"].astype(float),
            "state": found["state"],
        }
    )
    title = f"The {len(rows)} largest estimates (the largest of many are overstated; trust the intervals)"
    return Table.of(title, rows, verdict="state")


# Trajectories -----------------------------------------------------------------------------------------------------


def steps_of(run: Run, count: int) -> pd.DataFrame:
    """One row a step of the first `count` trajectories: what was done, its state, effect, interval and reason.

    state: as in the effects, or `not asked` where the plan did not take the step for a decision point.
    """
    known = run.effects.set_index(["trajectory", "step"])
    rows = []
    for row in run.trajectories.head(count).to_dict("records"):
        for step, action in enumerate(row["commands"]):
            entry: dict[str, Any] = {"trajectory": row["trajectory"], "step": step, "action": action}
            key = (row["trajectory"], step)
            if key in known.index:
                point = known.loc[key]
                entry |= {name: point[name] for name in STEP_COLUMNS}
            else:
                entry["state"] = "not asked"
            rows.append(entry)
    return pd.DataFrame(rows, columns=["trajectory", "step", "action", *STEP_COLUMNS])


def _draw_timelines(frame: pd.DataFrame, figure: Figure) -> None:
    ax = figure.subplots()
    names = list(dict.fromkeys(frame["trajectory"]))
    row = frame["trajectory"].map({name: place for place, name in enumerate(names)})
    for place, name in enumerate(names):
        ax.hlines(
            place, 0, frame.loc[frame["trajectory"] == name, "step"].max(), color="#d0d7de", linewidth=0.8, zorder=0
        )
    for state, colour in MARKERS.items():
        part = frame["state"] == state
        size = 10 + 90 * frame.loc[part, "estimate"].abs()
        ax.scatter(frame.loc[part, "step"], row[part], s=size, color=colour, label=state, linewidths=0)
    part = frame["state"] == "undefined"
    ax.scatter(
        frame.loc[part, "step"],
        row[part],
        s=16,
        facecolors="white",
        edgecolors="#8c959f",
        linewidths=1,
        label="undefined",
    )
    ax.set_yticks(range(len(names)), [name[:8] for name in names])
    ax.invert_yaxis()
    ax.set_xlabel("step")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower left", ncols=4, frameon=False)


def _trajectories(run: Run, prefix: str, count: int) -> list[Part]:
    total = len(run.trajectories)
    if count < 1:
        return [Missing("No trajectory is shown, as asked.", "audit report RUN --trajectories 20")]
    frame = steps_of(run, count)
    shown = min(count, total)
    some = "All" if shown == total else f"The first {shown} of"
    parts: list[Part] = [
        Text(
            f"{some} {total} trajectories, one line each; --trajectories N shows more or fewer. Every mark is a step: "
            "above the line it helped, below it harmed, by its estimated effect (the strip's height is an effect of "
            "one, certain failure turned into certain success). Red marks are pivotal. Hollow marks have no effect, "
            "with a reason. Open a line to read the transcript.",
            "how",
        ),
        _timelines(run, frame, count),
        Drawing(
            f"{prefix}timelines",
            "Timelines as a figure",
            "The same steps, sized by the size of the effect.",
            frame,
            partial(_draw_timelines, frame),
            (6.0, 1.2 + 0.26 * shown),
            shown=False,
        ),
    ]
    return parts


def _timelines(run: Run, frame: pd.DataFrame, count: int) -> Timelines:
    last = int(frame["step"].max()) + 1 if len(frame) else 1
    tried = run.alternatives[~run.alternatives["factual"].astype(bool)]
    tried = tried.sort_values(["rollouts", "command"], ascending=[False, True], kind="stable")
    instead = {str(point): part for point, part in tried.groupby("point", sort=False)}
    by_trajectory = {str(name): part for name, part in frame.groupby("trajectory", sort=False)}
    rows = []
    for row in run.trajectories.head(count).to_dict("records"):
        part = by_trajectory.get(row["trajectory"], frame.head(0))
        steps = tuple(_step(row, point, last, instead) for point in part.to_dict("records"))
        n = sum(step.kind == "pivotal" for step in steps)
        note = f"{n} pivotal" if n else ""
        rows.append(
            Timeline(
                str(row["trajectory"])[:8],
                short(row["task_type"] or row["game_name"], 48),
                f"{'won' if row['won'] else 'not won'} · {row['steps']} steps",
                _seen(row["observations"][0]),
                steps,
                note,
            )
        )
    return Timelines(tuple(rows), HALF + 3, 2 * (HALF + 3), last)


def _seen(observation: str | None) -> str:
    return "(what was seen is not in the log)" if observation is None else plain(observation).strip()


def _step(row: Mapping[Any, Any], point: Mapping[Any, Any], last: int, instead: Mapping[str, pd.DataFrame]) -> Step:
    number_, state = int(point["step"]), str(point["state"])
    estimate = float(point["estimate"]) if state in MARKERS else 0.0
    effect = reason = others = ""
    if state in MARKERS:
        effect = f"{signed(estimate)} {interval(point['low'], point['high'], signed, 2)}"
    elif state == "undefined":
        reason = f"{str(point['support']).replace('_', ' ')}: {point['reason']}"
    else:
        reason = "not among the plan's decision points"
    found = instead.get(str(point["point"]))
    if found is not None:
        listed = [
            f"{short(other['command'], 60)} ({other['wins']} of {other['rollouts']} won)"
            for other in found.head(3).to_dict("records")
            if other["rollouts"]
        ]
        others = "; ".join(listed) + (f"; and {len(found) - 3} more" if len(found) > 3 and listed else "")
    if others and state in MARKERS:
        own = f"This action: {int(point['wins_factual'])} of {int(point['n_factual'])} won."
        others = f"{own} Instead: {others}."
    wrote = row["texts"][number_]
    return Step(
        number_,
        plain(str(point["action"])),
        _seen(row["observations"][number_ + 1]),
        "" if wrote is None else plain(str(wrote)),
        state.replace(" ", "-"),
        effect,
        plain(reason),
        others,
        round(100 * (number_ + 0.5) / last, 2),
        round(HALF + 3 - HALF * estimate, 2),
        2.2 + (1.6 if state == "pivotal" else 0.0) + (2.0 * abs(estimate) if state in MARKERS else 0.6),
    )
