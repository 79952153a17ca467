"""The section on credit signals: which of them know which steps mattered.

Knows: that a league stands beside its chance band, its ceiling and its controls. Hides: which signals of many are drawn
one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from audit.comparison.compare import Comparison, compare_run, side_by_side
from audit.comparison.confirm import family, in_short
from audit.comparison.controls import ORACLE, PERMUTED
from audit.comparison.measures import MEASURES
from audit.comparison.router import Router, router
from audit.report.parts import Drawing, Missing, Part, Section, Table, Text, interval, number, short
from audit.results import Run
from audit.scoring import Scores, load_scores
from envs.core import InputError

PRIMARY = next(iter(MEASURES))
DRAWN = 6  # signals that are drawn one by one
COLUMNS = 2  # panels beside each other


def scores_of(run: Run) -> Scores | None:
    """What was scored, None where nothing was."""
    try:
        return load_scores(run)
    except InputError:
        if (run.directory.path / "signals.parquet").exists():
            raise
        return None


def compared(run: Run, label: str) -> Comparison | Missing:
    """The run's signals held against its effects, or why they are not."""
    scores = scores_of(run)
    if scores is None:
        return Missing("No credit signal was asked about this run yet.", f"audit score {label}")
    try:
        return compare_run(run, scores.frame, scores.importance)
    except InputError as error:
        return Missing(f"The signals cannot be compared: {error}")


def signal_section(run: Run, done: Comparison | Missing, prefix: str) -> Section:
    """The league of one run and what lies behind it."""
    parts: list[Part] = [done] if isinstance(done, Missing) else _shown(run, done, prefix)
    return Section("Which signals know", parts, "Signals")


def _shown(run: Run, done: Comparison, prefix: str) -> list[Part]:
    return [*_league(run, done, prefix), *_panels(done, prefix), *_tables(done)]


def named(done: Comparison) -> Comparison:
    """The comparison under names that fit a figure."""
    return replace(done, frame=done.frame.assign(signal=done.frame["signal"].map(lambda name: short(name, 28))))


def _league(run: Run, done: Comparison, prefix: str) -> list[Part]:
    league = done.summary()
    real = league[~league["signal"].isin((ORACLE, PERMUTED))]
    best = [short(name, 32) for name in real.loc[real["verdict"] == "better", "signal"]]
    chance = int((real["verdict"] == "equivalent").sum())
    lead = (
        f"{len(real)} signals. Better than chance: {', '.join(best) if best else 'none'}. Equivalent to chance (shown "
        f"to be no better by more than the margin): {chance}. The rest are inconclusive: these data cannot tell."
    )
    ceiling = f"The dashed line at {number(done.ceiling, 2)} is the ceiling: " if done.ceiling == done.ceiling else ""
    how = (
        f"{MEASURES[PRIMARY][0].upper()}{MEASURES[PRIMARY][1:]}, with its interval over games. Grey boxes are where a "
        "signal without any knowledge falls, by shuffling it within trajectories. A signal is better if its interval "
        f"lies right of chance and the shuffles agree. {ceiling}"
        + ("no signal can correlate more with effects this noisy. " if ceiling else "")
        + "Two controls: the planted oracle must be found, the permuted signal must not."
    )
    parts: list[Part] = [Text(lead), *(Text(note, "note") for note in done.notes)]
    parts.append(
        Drawing(
            f"{prefix}league",
            "Signals against the effects",
            how,
            done.frame,
            partial(_draw_league, done),
            (6.0, 1.4 + 0.27 * len(league)),
            alt="Forest of signals with chance bands and ceiling",
        )
    )
    rows = pd.DataFrame(
        {
            "signal": league["signal"],
            "correlation": league["estimate"].astype(float),
            "interval": _pairs(league, "low", "high"),
            "chance band": _pairs(league, "band_low", "band_high"),
            "p": league["p"].astype(float),
            "verdict": league["verdict"],
            "corrected": league["corrected"].astype(float),
            "corrected interval": _pairs(league, "corrected_low", "corrected_high"),
            "note": [note if isinstance(note, str) else "" for note in league["note"]],
        }
    )
    parts.append(Table.of("The league (corrected: for the rollout noise of the effects)", rows, verdict="verdict"))
    if len(done.confirmed):
        parts.append(_confirmed(done.confirmed, [run]))
    return parts


def _confirmed(table: pd.DataFrame, runs: Sequence[Run]) -> Table:
    """What the plan of these runs announced: one family."""
    manifests = [run.directory.manifest for run in runs]
    locked = all(about.get("locked") and not about.get("departed") for about in manifests)
    caption = (
        f"Announced by plan {runs[0].plan.name} ({'locked' if locked else 'NOT as locked'}): Holm over "
        f"{int(table['signal'].notna().sum())} tests"
    )
    rows = in_short(table).assign(claim=table["claim"].to_numpy(), interval=_pairs(table, "low", "high"))
    columns = (
        "run",
        "hypothesis",
        "claim",
        "test",
        "estimate",
        "chance",
        "interval",
        "p",
        "p_holm",
        "verdict",
        "reason",
    )
    return Table.of(caption, rows, {name: name.replace("_", " ") for name in columns}, verdict="verdict")


def _pairs(frame: pd.DataFrame, low: str, high: str) -> list[str]:
    return [interval(a, b) for a, b in zip(frame[low].astype(float), frame[high].astype(float), strict=True)]


def _draw_league(done: Comparison, figure: Figure) -> None:
    ax = named(done).plot(figure.subplots())
    ax.axvline(0, color="black", linewidth=0.6)
    ax.set_xlabel("correlation with the effect (median over trajectories)")
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()
    figure.legend(loc="outside lower left", ncols=3, frameon=False)


def strongest(done: Comparison, count: int = DRAWN) -> list[str]:
    """The signals (no controls) that rank pivotal points best by average precision, then by correlation; best first."""
    rows = done.frame[~done.frame["signal"].isin((ORACLE, PERMUTED))]
    wide = rows.pivot(index="signal", columns="measure", values="estimate")
    order = wide.sort_values(["average_precision", PRIMARY], ascending=False, kind="stable", na_position="last")
    return [str(name) for name in order.index[:count]]


def _panels(done: Comparison, prefix: str) -> list[Part]:
    names = strongest(done)
    some = f"The {len(names)} signals that rank pivotal steps best" if len(names) > 1 else "The signal"
    points = pd.concat([done.points(name).assign(signal=name) for name in names], ignore_index=True)
    size = (6.0, 0.4 + 2.0 * -(-len(names) // COLUMNS))
    parts: list[Part] = [
        Drawing(
            f"{prefix}scatter",
            "Signal against effect, point by point",
            f"{some}; red points are pivotal. The league ranks within trajectories, so a cloud without a slope may "
            "still hold a correlation.",
            points[["signal", "point", "value", "effect", "pivotal"]],
            partial(_grid, names, partial(_scatter, done)),
            size,
            alt="Scatter of each signal against the effect",
        )
    ]
    if not done.joined.pivotal.any():
        return [*parts, Missing("No point is pivotal, so precision and router curves are not defined.")]
    parts.append(
        Drawing(
            f"{prefix}precision",
            "Precision: of the steps a signal picks, how many are pivotal",
            f"{some}. Along the axis, the share of all steps that is picked. Above the grey band a signal does better "
            "than picking at random.",
            done.budgets,
            partial(_grid, names, partial(_budgets, done)),
            size,
            alt="Precision at budgets with the band of chance",
        )
    )
    curves = _routers(done, names)
    if curves:
        frame = pd.concat([curve.frame.assign(signal=name) for name, curve in curves.items()], ignore_index=True)
        parts.append(
            Drawing(
                f"{prefix}router",
                "Router: send the most doubtful steps to a judge",
                "How many of the pivotal steps are among the share that a signal sends on. On the diagonal it does no "
                "better than sending steps at random. Blue: Wilson's band.",
                frame,
                partial(_grid, list(curves), partial(_router, curves)),
                size,
                alt="Recall against the share sent",
            )
        )
        kept = ("share", "recall", "low", "high", "lift", "calls_saved_per_trajectory", "cost_of_all")
        first, curve = next(iter(curves.items()))
        table = curve.summary()
        names_ = {column: column.replace("_", " ") for column in kept if column in table}
        parts.append(Table.of(f"Router by {short(first)}, five points of the curve", table, names_, folded=True))
    return parts


def _routers(done: Comparison, names: Sequence[str]) -> dict[str, Router]:
    curves = {}
    for name in names:
        try:
            curves[name] = router(done, name)
        except InputError:  # no pivotal point has a value of it
            continue
    return curves


def _grid(names: Sequence[str], panel: partial[None], figure: Figure) -> None:
    columns = min(COLUMNS, len(names))
    axes = figure.subplots(-(-len(names) // columns), columns, squeeze=False)
    for place, ax in enumerate(axes.flat):
        if place >= len(names):
            ax.remove()
            continue
        panel(names[place], ax)
        ax.set_title(short(names[place], 26))
        legend = ax.get_legend()
        if legend is not None:
            legend.remove()
        if place % columns:
            ax.set_ylabel("")
        if place + columns < len(names):
            ax.set_xlabel("")


def _scatter(done: Comparison, name: str, ax: object) -> None:
    done.plot_points(name, ax).set_xlabel("value of the signal")  # type: ignore[arg-type]


def _budgets(done: Comparison, name: str, ax: object) -> None:
    axes = done.plot_budgets(name, ax)  # type: ignore[arg-type]
    axes.set_ylim(0, max(0.3, min(1.0, 1.1 * float(done.budgets[["precision", "precision_band_high"]].max().max()))))
    axes.set_xlabel("share picked")
    axes.set_ylabel("pivotal among them")


def _router(curves: Mapping[str, Router], name: str, ax: object) -> None:
    axes = curves[name].plot(ax)  # type: ignore[arg-type]
    axes.set_xlabel("share sent")
    axes.set_ylabel("pivotal steps found")


def _tables(done: Comparison) -> list[Part]:
    coverage = done.coverage.assign(reason=[reason or "" for reason in done.coverage["reason"]])
    names = {column: column.replace("_", " ") for column in ("signal", "defined", "compared", "missing", "reason")}
    frame = done.frame.assign(interval=_pairs(done.frame, "low", "high"))
    columns = {column: column for column in ("measure", "signal", "estimate", "interval", "p", "verdict")}
    meaning = pd.DataFrame({"measure": list(MEASURES), "what it is": list(MEASURES.values())})
    return [
        Table.of("On how many points each signal was compared", coverage, names, folded=True),
        Table.of("Every measure of every signal", frame, columns, verdict="verdict", folded=True),
        Table.of("What the measures are", meaning, folded=True),
    ]


def between_runs(opened: Mapping[str, tuple[Run, Comparison | Missing]]) -> Section:
    """The closing tables beside each other, each plan's hypotheses over its runs, how signals differ between runs."""
    title, short_name = "The runs side by side", "Side by side"
    parts: list[Part] = [_totals({label: run for label, (run, _) in opened.items()})]
    done = {label: found for label, (_, found) in opened.items() if isinstance(found, Comparison)}
    if len(done) < 2:
        parts.append(Missing("Fewer than two of these runs have signals to compare.", "audit score RUN"))
        return Section(title, parts, short_name)
    plans: dict[str, list[str]] = {}
    for label, one in done.items():
        if len(one.confirmed):
            plans.setdefault(opened[label][0].plan.hash, []).append(label)
    for names in plans.values():
        table = family({label: done[label] for label in names})
        parts.append(_confirmed(table, [opened[label][0] for label in names]))
    reading = {key: value for one in done.values() for key, value in one.importance.items()}
    frames = {label: (one.joined.points, _signals(opened[label][0])) for label, one in done.items()}
    _, between = side_by_side(frames, PRIMARY, importance=reading)
    between = between.assign(interval=_pairs(between, "low", "high"))
    columns = ("signal", "first", "second", "estimate", "interval", "p", "paired", "reason")
    parts.append(Text("First minus second, in the correlation with the effect; exploratory, not corrected.", "how"))
    parts.append(Table.of("Differences between runs", between, {name: name for name in columns}))
    return Section(title, parts, short_name)


def _signals(run: Run) -> pd.DataFrame:
    scores = scores_of(run)
    assert scores is not None  # it was compared
    return scores.frame


def _totals(runs: Mapping[str, Run]) -> Table:
    """One row a figure, one column a run."""
    columns: dict[str, dict[str, str]] = {}
    for label, run in runs.items():
        columns[label] = {
            row["figure"].strip(): f"{number(row['estimate'])} {interval(row['low'], row['high'])}".removesuffix(" –")
            for row in run.summary().to_dict("records")
        }
    figures = list(dict.fromkeys(figure for told in columns.values() for figure in told))
    rows = tuple((figure, *(told.get(figure, "–") for told in columns.values())) for figure in figures)
    return Table("The closing tables", (("figure", False), *((label, False) for label in columns)), rows)
