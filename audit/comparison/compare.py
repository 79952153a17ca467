"""From measures to verdicts: intervals, chance bands, the three words, confirmatory tests, runs side by side.

Knows: the rule of each verdict and that both controls are part of every comparison. Hides: the pairing of resamples.

`better`: the interval over games lies above chance and the shuffles agree (p <= alpha; p is two-sided, the larger of
the bootstrap's and of the shuffles'). `equivalent`: two one-sided tests place it within a declared margin of chance,
for correlations after correction for the reliability of the effects (noise puts every signal near chance); AUC,
precision and sign are about the states and signs as decided, noise included. `inconclusive`: neither, which is not
"no better than chance". A signal that is both (above chance, by less than the margin) is `better`, with a note; one
below chance is `inconclusive`, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from audit.comparison.confirm import PRIMARY as PRIMARY
from audit.comparison.confirm import confirm
from audit.comparison.controls import IMPORTANCE, ORACLE, PERMUTED, controls
from audit.comparison.frames import Joined, check_frames, effects_of, join, oriented
from audit.comparison.measures import MEASURES, SHARES, Found, Measured, measure
from audit.comparison.pivotal import at_budgets
from audit.comparison.resample import ROUNDING, Span, above, cluster_counts, enough, equivalence, span
from audit.plan import EQUIVALENCE, Hypothesis
from audit.results import Run
from envs.core import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUDGETS = (0.05, 0.1, 0.2, 0.3)
ADAPTIVE = (
    "adaptive rounds: points that stopped early overstate their effects a little, so the reliability and "
    "the corrected correlations are approximate; under a plan with rollouts.adaptive = false they are not"
)
VERDICTS = ("better", "equivalent", "inconclusive")


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two signals (or runs) in one measure, with its interval from paired resamples and two-sided p."""

    first: str
    second: str
    measure: str
    estimate: float
    low: float
    high: float
    p: float
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """Signals compared with the effects of one run. Made by `compare`.

    frame: one row a signal and measure. budgets: precision and recall at a budget. coverage: how many points each
    signal was compared on. confirmed: the confirmatory family with Holm (`confirm`). notes: what every output must say.
    """

    frame: pd.DataFrame
    budgets: pd.DataFrame
    coverage: pd.DataFrame
    confirmed: pd.DataFrame
    notes: tuple[str, ...]
    alpha: float
    margin: float
    joined: Joined = field(repr=False)
    importance: Mapping[str, str] = field(repr=False)
    measured: Measured = field(repr=False)
    counts: NDArray[np.int64] = field(repr=False)

    def to_frame(self) -> pd.DataFrame:
        """One row a signal and measure."""
        return self.frame

    def summary(self, measure: str = PRIMARY) -> pd.DataFrame:
        """The league: one row a signal in one measure, best first, controls last."""
        _known(measure)
        rows = self.frame[self.frame["measure"] == measure]
        control = rows["signal"].isin((ORACLE, PERMUTED))
        order = rows.assign(_c=control).sort_values(["_c", "estimate"], ascending=[True, False], kind="stable").index
        columns = ["signal", "estimate", "low", "high", "band_low", "band_high", "p", "verdict", "corrected"]
        columns += ["corrected_low", "corrected_high", "points", "trajectories", "games", "role", "note"]
        return rows.loc[order, columns].reset_index(drop=True)

    def conf_int(self, alpha: float | None = None) -> pd.DataFrame:
        """Columns low and high by (signal, measure) at level 1 - alpha (default: the plan's)."""
        level = 1 - (self.alpha if alpha is None else alpha)
        if not 0 < level < 1:
            raise InputError(f"conf_int: alpha is {alpha}; expected between 0 and 1.")
        rows = []
        for (signal, name), found in self.measured.found.items():
            interval = span(found.draws, found.clusters, level) if not found.reason else Span(np.nan, np.nan)
            rows.append({"signal": signal, "measure": name, "low": interval.low, "high": interval.high})
        return pd.DataFrame(rows).set_index(["signal", "measure"])

    def draws(self, signal: str, measure: str = PRIMARY) -> NDArray[np.float64]:
        """Bootstrap draws; draw i is of the same resample of games for every signal and measure."""
        return self._found(signal, measure).draws

    def difference(self, first: str, second: str, measure: str = PRIMARY) -> Difference:
        """first minus second, from paired resamples. Each signal on the points it has; compare like with like."""
        a, b = self._found(first, measure), self._found(second, measure)
        return _difference(first, second, measure, a, b, a.draws - b.draws, 1 - self.alpha)

    def differences(self, measure: str = PRIMARY) -> pd.DataFrame:
        """All pairs of signals (exploratory: no correction for their number)."""
        pairs = combinations(self.joined.names, 2)
        return pd.DataFrame([_as_row(self.difference(a, b, measure)) for a, b in pairs])

    @property
    def ceiling(self) -> float:
        """Largest correlation a signal can have with effects this noisy, sqrt(reliability within trajectories)."""
        best = max((r for r, _ in self.measured.reliability.values() if np.isfinite(r)), default=np.nan)
        return float(best**0.5) if best > 0 else float("nan")

    def _found(self, signal: str, measure: str) -> Found:
        _known(measure)
        if signal not in self.joined.names:
            raise InputError(f"{signal}: no such signal here; there are {', '.join(self.joined.names)}.")
        return self.measured.found[signal, measure]

    def plot(self, ax: Axes | None = None, measure: str = PRIMARY) -> Axes:
        """Forest of a measure: estimate and interval of each signal, its chance band in grey, the ceiling dashed."""
        frame = self.summary(measure).iloc[::-1].reset_index(drop=True)
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(6, 0.35 * len(frame) + 1))
        place = np.arange(len(frame))
        ax.barh(place, frame["band_high"] - frame["band_low"], left=frame["band_low"], height=0.7, color="#e0e0e0")
        for verdict, colour in zip(VERDICTS, ("#2166ac", "#4d4d4d", "#b0b0b0"), strict=True):
            part = (frame["verdict"] == verdict).to_numpy()
            shown = frame[part]
            ax.hlines(place[part], shown["low"], shown["high"], color=colour)
            ax.plot(shown["estimate"], place[part], "o", color=colour, markersize=4, label=verdict)
        if measure in ("spearman", "pearson") and np.isfinite(self.ceiling):
            ax.axvline(self.ceiling, linestyle="--", color="black", linewidth=0.8)
        ax.set_yticks(place, frame["signal"])
        ax.set_xlabel(MEASURES[measure])
        ax.legend(frameon=False, fontsize="small")
        return ax

    def points(self, signal: str) -> pd.DataFrame:
        """What a scatter of a signal shows: point, value of the signal, effect, pivotal; points it has a value for."""
        self._found(signal, PRIMARY)
        value = self.joined.values[:, self.joined.names.index(signal)]
        table = pd.DataFrame({"point": self.joined.points["point"], "value": value, "effect": self.joined.tau})
        return table.assign(pivotal=self.joined.pivotal)[np.isfinite(value)]

    def plot_points(self, signal: str, ax: Axes | None = None) -> Axes:
        """Scatter of the effect against a signal, pivotal points filled."""
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(4, 3.4))
        frame = self.points(signal)
        for part, colour, size in ((~frame["pivotal"], "#b0b0b0", 8), (frame["pivotal"], "#b2182b", 14)):
            ax.scatter(frame.loc[part, "value"], frame.loc[part, "effect"], s=size, color=colour, linewidths=0)
        ax.axhline(0, color="black", linewidth=0.6)
        ax.set_xlabel(signal)
        ax.set_ylabel("effect")
        return ax

    def plot_budgets(self, signal: str, ax: Axes | None = None) -> Axes:
        """Precision of a signal among the share of points it ranks highest, beside the band of chance."""
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(4, 3.4))
        frame = self.budgets[self.budgets["signal"] == signal]
        x = frame["budget"]
        low, high = frame["precision_band_low"], frame["precision_band_high"]
        ax.fill_between(x, low, high, color="#e0e0e0", label="chance band")
        ax.plot(x, frame["precision_chance"], "--", color="black", linewidth=0.8, label="chance")
        ax.plot(x, frame["precision"], "o-", color="#2166ac", markersize=4, label=signal)
        ax.set_xlabel("share of points chosen")
        ax.set_ylabel("share pivotal among them")
        ax.legend(frameon=False, fontsize="small")
        return ax


def compare(
    effects: pd.DataFrame,
    signals: pd.DataFrame,
    *,
    importance: Mapping[str, str] | None = None,
    hypotheses: Sequence[Hypothesis] = (),
    alpha: float = 0.05,
    margin: float = 0.1,
    draws: int = 10_000,
    shuffles: int = 2_000,
    seed: int = 0,
    noise: float = 1.0,
    games: Sequence[str] | None = None,
) -> Comparison:
    """Compare every signal (a column of `signals`) with the effects, both controls beside them.

    effects: a row a point (`Run.effects`, or `effects_of(run)` where the contrast is not the default). signals: a
    row a point with the column `point`. importance: how a signal's value reads as size ("value", "absolute",
    "negated"). hypotheses: the confirmatory family. margin: of equivalence for correlations; half of it for shares
    (sign, AUC, average precision). draws, shuffles: of the bootstrap and of chance. noise: of the planted oracle.
    games: what to resample, where several runs share it.
    Raises InputError on frames that do not fit (see `frames.join`) or a hypothesis that names no measure.
    """
    if not 0 < alpha < 0.5 or not margin > 0 or draws < 100 or shuffles < 100:
        raise InputError("compare: alpha in (0, .5), a margin above 0, and 100 draws and shuffles or more are needed.")
    check_frames(effects, signals)
    taken = [name for name in (ORACLE, PERMUTED) if name in signals.columns]
    if taken:
        raise InputError(f"compare: {taken[0]} is the name of a control, which is made here; rename the signal.")
    both = signals.merge(controls(effects, noise=noise, seed=seed), on="point", how="left")
    joined = join(effects, both, games)
    reading = {**(importance or {}), **IMPORTANCE}
    counts = cluster_counts(len(joined.games), draws, seed)
    measured = measure(joined, reading, counts, shuffles=shuffles, seed=seed)
    frame = pd.DataFrame(
        [
            _row(signal, name, measured.found[signal, name], alpha, margin)
            for name in MEASURES
            for signal in joined.names
        ]
    )
    silent = joined.coverage[joined.coverage["compared"] == 0].set_index("signal")["reason"].dropna()
    frame["note"] = frame["signal"].map(silent).map("no value: {}".format, na_action="ignore").fillna(frame["note"])
    family = {(h.signal, (h.measure or PRIMARY).removeprefix(EQUIVALENCE)) for h in hypotheses if h.than is None}
    frame["role"] = [
        "control" if s in (ORACLE, PERMUTED) else "confirmatory" if (s, m) in family else "exploratory"
        for s, m in zip(frame["signal"], frame["measure"], strict=True)
    ]
    ranked = oriented(joined.values, joined.names, reading)
    done = Comparison(
        frame,
        _budgets(joined, ranked, 1 - alpha),
        joined.coverage,
        pd.DataFrame(),
        tuple(_notes(frame, joined, alpha)),
        alpha,
        margin,
        joined,
        reading,
        measured,
        counts,
    )
    return replace(done, confirmed=confirm(hypotheses, done))


def compare_run(
    run: Run,
    signals: pd.DataFrame,
    importance: Mapping[str, str] | None = None,
    *,
    won: bool | None = None,
    **options: Any,
) -> Comparison:
    """`compare` with a run's effects (with their variances), its plan's hypotheses and alpha, and the run's marks.

    won: only the trajectories that were won (True) or lost (False); then nothing is confirmatory.
    """
    options = {"alpha": run.plan.decisions.alpha, "hypotheses": run.plan.hypotheses, **options}
    effects = effects_of(run)
    if won is not None:
        # What was announced is about all trajectories.
        options["hypotheses"] = ()
        ids = run.trajectories.loc[run.trajectories["won"] == won, "trajectory"]
        effects = effects[effects["trajectory"].isin(ids)]
        if effects.empty:
            raise InputError(f"No trajectory was {'won' if won else 'lost'}, so there is nothing to compare.")
    done = compare(effects, signals, importance=importance, **options)
    return replace(done, notes=(*run.marks, *done.notes, *([ADAPTIVE] if run.plan.rollouts.adaptive else [])))


def _known(measure: str) -> None:
    if measure not in MEASURES:
        raise InputError(f"{measure}: no such measure; expected one of {', '.join(MEASURES)}.")


def _margin(measure: str, margin: float) -> float:
    return margin / 2 if measure in SHARES else margin


def _row(signal: str, name: str, found: Found, alpha: float, margin: float) -> dict[str, Any]:
    level, width = 1 - alpha, _margin(name, margin)
    row: dict[str, Any] = {"signal": signal, "measure": name, "estimate": found.estimate, "chance": found.chance}
    interval, p, tost = Span(np.nan, np.nan, found.reason), np.nan, np.nan
    band = (np.nan, np.nan)
    verdict, note = "inconclusive", found.reason
    if not found.reason:
        interval = span(found.draws, found.clusters, level)
        shuffles = found.shuffles[np.isfinite(found.shuffles)]
        edges = np.quantile(shuffles, [alpha / 2, 1 - alpha / 2])
        band = float(edges[0]), float(edges[1])
        by_shuffle = (float((shuffles >= found.estimate - 1e-6).sum()) + 1) / (shuffles.size + 1)
        note = interval.reason
    if not found.reason and not interval.reason:
        p = min(1.0, 2 * max(above(found.draws, found.clusters, found.chance), by_shuffle))
        tost = equivalence(found.excess, found.clusters, 0.0, width)
        if p <= alpha and interval.low > found.chance + ROUNDING:
            verdict = "better"
            note = "but within the margin of chance" if tost <= alpha else ""
        elif tost <= alpha:
            verdict = "equivalent"
        elif interval.high < found.chance:
            note = "the interval lies below chance"
    corrected, low, high = np.nan, np.nan, np.nan
    uncorrected = found.uncorrected
    if found.corrected is not None:
        corrected, drawn = found.corrected
        between = span(drawn, found.clusters, level)
        low, high, uncorrected = between.low, between.high, between.reason
    return {
        **row,
        "low": interval.low,
        "high": interval.high,
        "band_low": band[0],
        "band_high": band[1],
        "p": p,
        "p_equivalence": tost,
        "margin": width,
        # How fluent a signal is, is a description; no verdict on it.
        "verdict": None if name == "fluency" else verdict,
        "corrected": corrected,
        "corrected_low": low,
        "corrected_high": high,
        "uncorrected": uncorrected or None,
        "points": found.points,
        "trajectories": found.trajectories,
        "games": found.clusters,
        "note": note or None,
    }


def _budgets(joined: Joined, ranked: NDArray[np.float64], level: float) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(joined.names):
        there = np.isfinite(ranked[:, i])
        if there.any():
            found = at_budgets(ranked[there, i], joined.pivotal[there], BUDGETS, level)
            rows += [{"signal": name, **row} for row in found]
    return pd.DataFrame(rows)


def _notes(frame: pd.DataFrame, joined: Joined, alpha: float) -> list[str]:
    """What the controls and impossible results say about the comparison itself."""
    primary = frame[frame["measure"] == PRIMARY].set_index("signal")
    notes = []
    few = enough(len(joined.games), 1 - alpha)
    if few:
        notes.append(few)
    if primary.loc[ORACLE, "verdict"] != "better":
        notes.append("the planted oracle was not found: with so little data no verdict here can be expected")
    if primary.loc[PERMUTED, "verdict"] == "better":
        notes.append("the permuted control came out better, as it does by chance now and then: read with care")
    pearson = frame[(frame["measure"] == "pearson") & ~frame["signal"].isin((ORACLE, PERMUTED))]
    notes += [
        f"{signal}: correlates more with the effects than their noise allows; does it see replay results?"
        for signal in pearson.loc[pearson["corrected_low"] > 1, "signal"]
    ]
    return notes


def _difference(
    first: str, second: str, measure: str, a: Found, b: Found, draws: NDArray[np.float64], level: float
) -> Difference:
    estimate, clusters = a.estimate - b.estimate, min(a.clusters, b.clusters)
    if a.reason or b.reason:
        return Difference(first, second, measure, np.nan, np.nan, np.nan, np.nan, a.reason or b.reason)
    between = span(draws, clusters, level)
    if between.reason:
        return Difference(first, second, measure, estimate, np.nan, np.nan, np.nan, between.reason)
    p = min(1.0, 2 * min(above(draws, clusters, 0.0), above(-draws, clusters, 0.0)))
    return Difference(first, second, measure, estimate, between.low, between.high, p)


def _as_row(difference: Difference) -> dict[str, Any]:
    return {name: getattr(difference, name) for name in Difference.__dataclass_fields__}


def side_by_side(
    runs: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]],
    measure: str = PRIMARY,
    *,
    importance: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[dict[str, Comparison], pd.DataFrame]:
    """Several runs (two policies, say): (the comparison of each, every signal's differences between runs).

    runs: label -> (effects, signals). Runs that share games are resampled together, game by game, so that their
    differences are paired; runs with no game in common are independent. options: as `compare`.
    Raises InputError with fewer than two runs.
    """
    if len(runs) < 2:
        raise InputError("side_by_side: needs two runs or more.")
    seed = int(options.pop("seed", 0))
    played = {label: set(effects["game"]) for label, (effects, _) in runs.items()}
    union = sorted(set.union(*played.values()))
    shared = all(played[a] & played[b] for a, b in combinations(played, 2))
    done = {
        label: compare(
            effects,
            signals,
            importance=importance,
            seed=seed if shared else seed + number,
            games=union if shared else None,
            **options,
        )
        for number, (label, (effects, signals)) in enumerate(runs.items())
    }
    rows = []
    for (a, one), (b, two) in combinations(done.items(), 2):
        for signal in one.joined.names:
            if signal in two.joined.names:
                x, y = one._found(signal, measure), two._found(signal, measure)
                found = _difference(a, b, measure, x, y, x.draws - y.draws, 1 - one.alpha)
                rows.append({"signal": signal, "paired": shared, **_as_row(found)})
    return done, pd.DataFrame(rows)
