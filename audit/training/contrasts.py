"""Contrasts of arms on held-out tasks, and how much of their spread is dose.

Knows: that training seeds and tasks are both samples and that arms are paired in both; what one training run can and
cannot say. Hides: the crossed analysis of variance, the bootstrap by counts, the paired test of single runs.

Interval and test: the mean of d[seed, task] has variance s^2/S + t^2/T + e^2/(ST), estimated from the mean squares of
seeds, tasks and their interaction (MS_S + MS_T - MS_E)/(ST), with Satterthwaite's degrees of freedom; it is not
taken to be less than what seeds or tasks alone imply. The hierarchical bootstrap (seeds and tasks resampled
independently, pairs kept; Owen 2007) is kept beside it and decides nothing: in simulations of 3 to 8 seeds and 30 to
134 tasks with binary outcomes this interval covered .94 to .99 of the time (nominal .95), the bootstrap's .75 to 1,
least with few seeds that differ much. Two seeds covered .90 where seeds differ much; there t has one degree of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from audit.training.outcomes import checked, play
from audit.training.response import DoseResponse, dose_response
from audit.training.trainer import Trained
from envs import Game
from envs.core import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]
Pair = tuple[str, str]

MATCHED, UNMATCHED, GREY = "#2166ac", "#b2182b", "#b0b0b0"


@dataclass(frozen=True, slots=True)
class Paired:
    """A mean paired difference. low, high: at 1 - alpha, missing with a reason. p: two-sided. se, df: of the mean.
    method: how it was judged."""

    estimate: float
    se: float
    df: float
    p: float
    method: str
    reason: str = ""
    shift: float = 0.0  # of the interval's centre from the estimate (single runs)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Limits at level 1 - alpha, inside [-1, 1]; NaN where there is no interval."""
        half, centre = self.quantile(1 - alpha / 2) * self.se, self.estimate + self.shift
        if not math.isfinite(half):
            return math.nan, math.nan
        return max(-1.0, centre - half), min(1.0, centre + half)

    def quantile(self, level: float) -> float:
        """Of the reference distribution."""
        return float(stats.t.ppf(level, self.df)) if math.isfinite(self.df) else float(stats.norm.ppf(level))


def paired(d: npt.ArrayLike) -> Paired:
    """Mean of (seeds, tasks) paired differences, both being samples. One seed: tasks alone, given that training run.

    With one seed and differences of -1, 0, 1: McNemar's exact test, and the interval of Bonett and Price (2012)
    for a paired difference of proportions; else one-sample t over tasks.
    """
    x = np.asarray(d, dtype=float)
    seeds, tasks = x.shape
    mean = float(x.mean())
    if tasks < 2:
        return Paired(mean, math.nan, math.nan, math.nan, "", "fewer than 2 tasks")
    if seeds == 1:
        return _single(x[0])
    by_seed, by_task = x.mean(axis=1), x.mean(axis=0)
    ms_seed = tasks * float(((by_seed - mean) ** 2).sum()) / (seeds - 1)
    ms_task = seeds * float(((by_task - mean) ** 2).sum()) / (tasks - 1)
    rest = x - by_seed[:, None] - by_task[None, :] + mean
    ms_rest = float((rest**2).sum()) / ((seeds - 1) * (tasks - 1))
    parts = (ms_seed, seeds - 1), (ms_task, tasks - 1), (ms_rest, (seeds - 1) * (tasks - 1))
    total = max(ms_seed + ms_task - ms_rest, ms_seed, ms_task)
    if total <= 1e-15:
        return Paired(mean, math.nan, math.nan, math.nan, "", "all differences are equal: nothing to measure spread by")
    df = total**2 / sum(ms**2 / degrees for ms, degrees in parts)
    df = 1.0 if seeds == 2 else max(df, float(min(seeds, tasks) - 1))
    se = math.sqrt(total / (seeds * tasks))
    p = float(2 * stats.t.sf(abs(mean) / se, df))
    return Paired(mean, se, df, p, f"crossed t ({seeds} seeds x {tasks} tasks)")


def _single(x: Floats) -> Paired:
    n, mean = x.size, float(x.mean())
    note = "one training run: says nothing of other seeds"
    if np.isin(x, (-1.0, 0.0, 1.0)).all():
        gained, lost = int((x > 0).sum()), int((x < 0).sum())
        p = float(mcnemar([[0, gained], [lost, 0]], exact=True).pvalue) if gained + lost else 1.0
        a, b = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
        se = math.sqrt((a + b - (a - b) ** 2) / (n + 2))
        return Paired(mean, se, math.inf, p, f"McNemar ({n} tasks)", note, shift=a - b - mean)
    se = float(x.std(ddof=1)) / math.sqrt(n)
    if se == 0:
        return Paired(mean, math.nan, math.nan, math.nan, "", "all differences are equal: nothing to measure spread by")
    return Paired(mean, se, n - 1.0, float(2 * stats.t.sf(abs(mean) / se, n - 1)), f"paired t ({n} tasks)", note)


def crossed_counts(seeds: int, tasks: int, resamples: int, seed: int) -> tuple[Floats, Floats]:
    """(resamples, seeds) and (resamples, tasks) shares of each in resamples of both."""
    rng = np.random.Generator(np.random.Philox(key=[seed, 6]))
    a = rng.multinomial(seeds, np.full(seeds, 1 / seeds), resamples) / seeds
    b = rng.multinomial(tasks, np.full(tasks, 1 / tasks), resamples) / tasks
    return a, b


# Studies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contrasts:
    """What a study of arms showed. frame: one row a pair and dose. outcomes: what it rests on. dose: the fit of outcome
    against dose, missing where there is no ledger or no arm with a dose. given: for what the results hold."""

    frame: pd.DataFrame
    outcomes: pd.DataFrame
    dose: DoseResponse | None
    alpha: float
    sesoi: float
    power: float
    given: str
    _paired: tuple[Paired, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row a pair and dose: success of both, estimate (difference of shares), low, high, p, p_holm (confirmatory
        rows), interval for equivalence (tost_low, tost_high, level 1 - 2 alpha), mde, bootstrap interval, verdict."""
        return self.frame

    def summary(self) -> pd.DataFrame:
        """What is printed: verdicts beside their intervals and what could have been found."""
        columns = ["arm", "against", "dose", "family", "success", "estimate", "low", "high", "p_holm", "mde", "verdict"]
        return self.frame[columns]

    def conf_int(self, alpha: float | None = None) -> pd.DataFrame:
        """low and high of every row at level 1 - alpha (default: the study's)."""
        level = self.alpha if alpha is None else alpha
        if not 0 < level < 1:
            raise InputError(f"conf_int: alpha is {alpha}; expected between 0 and 1.")
        limits = pd.DataFrame([one.interval(level) for one in self._paired], columns=["low", "high"])
        return limits.set_index(pd.MultiIndex.from_frame(self.frame[["dose", "arm", "against"]]))

    def headline(self) -> str:
        """One paragraph: what was compared, on what, and for what it holds."""
        f = self.frame.iloc[0]
        runs = self.outcomes.groupby("dose", sort=False)["arm"].nunique()
        most = int(self.frame["left_out"].max())
        lost = f" (up to {most} left out for want of an outcome)" if most else ""
        return (
            f"{', '.join(f'{n} arms {dose}' for dose, n in runs.items())}: {f['seeds']} training seeds, "
            f"{f['tasks']} held-out tasks{lost}, {f['draws']} draws a task. Holds for {self.given}, "
            f"other seeds and tasks.\n"
            f"Intervals at {100 * (1 - self.alpha):g} %; Holm over confirmatory rows; equivalent: inside "
            f"+-{self.sesoi:g} at {100 * (1 - 2 * self.alpha):g} %; mde: found with power {self.power:g} before Holm."
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Forest: each arm's difference from what it is compared with, matched (filled) beside unmatched (open)."""
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(6.4, 4))
        pairs = self.frame["arm"] + "  vs  " + self.frame["against"]
        forest(self.frame.assign(name=pairs), "estimate", ax)
        ax.axvspan(-self.sesoi, self.sesoi, color=GREY, alpha=0.25, linewidth=0, zorder=0)
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set_xlabel("difference in success on held-out tasks")
        return ax


def forest(frame: pd.DataFrame, value: str, ax: Axes) -> None:
    """Draw a row a `name`: `value` with low and high, the first dose set filled, others open beside it."""
    names = list(dict.fromkeys(frame["name"]))
    doses = list(dict.fromkeys(frame["dose"]))
    for number, dose in enumerate(doses):
        part = frame[frame["dose"] == dose]
        y = np.array([names.index(name) for name in part["name"]]) + 0.3 * (number - (len(doses) - 1) / 2)
        colour = MATCHED if number == 0 else UNMATCHED
        ax.hlines(y, part["low"], part["high"], color=colour, linewidth=1.2)
        face = colour if number == 0 else "white"
        ax.plot(part[value], y, "o", markersize=4, color=colour, markerfacecolor=face, label=dose)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize="small")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(axis="y", length=0)


def contrast(
    source: Trained | pd.DataFrame,
    games: str | Sequence[Game] | None = None,
    *,
    pairs: Sequence[Pair] | None = None,
    ledger: pd.DataFrame | None = None,
    n: int = 1,
    budget: int = 50,
    alpha: float = 0.05,
    sesoi: float = 0.05,
    power: float = 0.8,
    resamples: int = 10_000,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Contrasts:
    """Compare arms on held-out tasks.

    source: trained arms (with `games`, which are played n times by each checkpoint), or a table of outcomes
    (`read_outcomes`; ledger: its doses, for the fit). pairs: the confirmatory family, (arm, what it is compared with);
    default: every arm that has a random control with it. It is tested on the first dose only (the matched one), with
    Holm; the same pairs at other doses, and every arm against all steps, are exploratory.
    Verdicts: better or worse (confirmatory: Holm-adjusted p <= alpha; exploratory: p <= alpha), equivalent (interval at
    1 - 2 alpha inside +-sesoi), else inconclusive.
    Raises InputError where outcomes are not well-formed or a pair names no arm.
    """
    if not (0 < alpha < 0.5 and 0 < sesoi < 1 and 0.5 <= power < 1 and resamples >= 1):
        raise InputError("contrast: expected alpha in (0, .5), sesoi in (0, 1), power in [.5, 1), resamples >= 1.")
    controls: dict[str, str] = {}
    if isinstance(source, Trained):
        if games is None:
            raise InputError("contrast of trained arms needs held-out games.")
        outcomes = play(source, games, n=n, budget=budget, seed=seed, progress=progress)
        ledger, controls, given = source.ledger, dict(source.controls), source.given
    else:
        outcomes, given = source, "the training data that were used"
    outcomes = checked(outcomes)
    tables = {str(dose): success_table(part) for dose, part in outcomes.groupby("dose", sort=False)}
    arms = list(dict.fromkeys(outcomes["arm"]))
    controls = controls or {name: name[7:] for name in arms if name.startswith("random:") and name[7:] in arms}
    confirmatory = list(pairs) if pairs is not None else [(arm, control) for control, arm in controls.items()]
    for pair in confirmatory:
        for arm in pair:
            if arm not in arms:
                raise InputError(f"Pair {pair}: no arm {arm!r}; arms: {', '.join(arms)}.")
    reference = next((arm for arm in ("all steps", "untrained") if arm in arms), arms[0])
    others = [(arm, reference) for arm in arms if arm != reference and (arm, reference) not in confirmatory]
    first = next(iter(tables))
    rows: list[dict[str, Any]] = []
    judged: list[Paired] = []
    for dose, table in tables.items():
        for pair in (*confirmatory, *others):
            if pair[0] not in table or pair[1] not in table:
                continue
            family = "confirmatory" if dose == first and pair in confirmatory else "exploratory"
            row, one = _compare(table, pair, alpha, power, resamples, seed)
            draws = int(outcomes.loc[outcomes["dose"] == dose, "draws"].max())
            rows.append({"arm": pair[0], "against": pair[1], "dose": dose, "family": family, "draws": draws, **row})
            judged.append(one)
    if not rows:
        raise InputError("There is no pair of arms to compare; give at least two arms.")
    frame = _verdicts(pd.DataFrame(rows), alpha, sesoi)
    response = None if ledger is None else dose_response(outcomes, ledger, resamples=resamples, seed=seed)
    return Contrasts(frame, outcomes, response, alpha, sesoi, power, given, tuple(judged))


def success_table(part: pd.DataFrame) -> dict[str, Floats]:
    """arm -> (seeds, tasks) outcomes, seeds and tasks in one order."""
    wide = part.pivot(index=["arm", "seed"], columns="task", values="won").sort_index()
    return {arm: wide.loc[arm].to_numpy(dtype=float) for arm in dict.fromkeys(part["arm"])}


def _compare(
    table: dict[str, Floats], pair: Pair, alpha: float, power: float, resamples: int, seed: int
) -> tuple[dict[str, Any], Paired]:
    a, b = table[pair[0]], table[pair[1]]
    whole = ~np.isnan(a - b).any(axis=0)  # a task counts where every run of both arms has an outcome
    d = (a - b)[:, whole]
    if not d.size:
        raise InputError(f"Arms {pair[0]} and {pair[1]} share no task with outcomes of all their runs.")
    one = paired(d)
    low, high = one.interval(alpha)
    tost_low, tost_high = one.interval(2 * alpha)
    boot: tuple[float, float] = (math.nan, math.nan)
    if min(d.shape) > 1 and np.ptp(d) > 0:
        on_seeds, on_tasks = crossed_counts(d.shape[0], d.shape[1], resamples, seed)
        means = ((on_seeds @ d) * on_tasks).sum(axis=1)
        boot = (float(np.quantile(means, alpha / 2)), float(np.quantile(means, 1 - alpha / 2)))
    return {
        "seeds": d.shape[0],
        "tasks": d.shape[1],
        "left_out": int((~whole).sum()),
        "success": float(a[:, whole].mean()),
        "success_against": float(b[:, whole].mean()),
        "estimate": one.estimate,
        "low": low,
        "high": high,
        "p": one.p,
        "tost_low": tost_low,
        "tost_high": tost_high,
        "mde": detectable(one, alpha, power),
        "boot_low": boot[0],
        "boot_high": boot[1],
        "method": one.method,
        "reason": one.reason,
    }, one


def detectable(one: Paired, alpha: float, power: float) -> float:
    """The difference that a study with this standard error would find with the given power (normal or noncentral t,
    approximated by the sum of two quantiles); before Holm. NaN where there is no standard error."""
    return (one.quantile(1 - alpha / 2) + one.quantile(power)) * one.se if math.isfinite(one.se) else math.nan


def _verdicts(frame: pd.DataFrame, alpha: float, sesoi: float) -> pd.DataFrame:
    frame["p_holm"] = np.nan
    family = (frame["family"] == "confirmatory") & frame["p"].notna()
    if family.any():
        frame.loc[family, "p_holm"] = multipletests(frame.loc[family, "p"], method="holm")[1]
    p = frame["p_holm"].where(frame["family"] == "confirmatory", frame["p"])
    found = p <= alpha
    equivalent = (frame["tost_low"] > -sesoi) & (frame["tost_high"] < sesoi)
    frame["verdict"] = np.select(
        [found & (frame["estimate"] > 0), found & (frame["estimate"] < 0), equivalent],
        ["better", "worse", "equivalent"],
        "inconclusive",
    )
    return frame
