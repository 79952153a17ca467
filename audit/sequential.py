"""Anytime-valid rounds at decision points: when may replay stop, and what may be said then.

Knows: a group-sequential design for the difference of two success rates whose intervals hold at every round at once,
whose p-value stays valid under any stopping, and which stops points that are decided or have little prospect of being
decided. Hides: exact enumeration over binomial paths, calibration of the boundaries, look-up tables.
It knows no records: cumulative counts in, states and intervals out; the leading axis is always the point.

Why this and not a confidence sequence: the rounds are declared, outcomes are won/lost, so the exact distribution of
every path is computable. Boundaries on the score statistic are calibrated to hold for all rates, near 0 and 1 too, and
cost 5-12 % over a single look, where betting sequences for bounded means cost a multiple at these sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from audit.exact_tests import Support
from audit.inference import Array, Interval, check_level, negligible, score_interval, score_statistic
from audit.records import content_id
from audit.store import write_whole
from envs.alfworld.games import cache_folder
from envs.core import InputError

Rounds = tuple[tuple[int, int], ...]

#: Cumulative (factual, pooled alternative) rollouts after each round. Balanced, because for a given sum the variance of
#: a difference is least then (102 + 102 rollouts measure as well as 64 + 4 * 64), and because four alternative rollouts
#: to a factual one need boundaries a sixth wider next to no effect, where rare successes make the statistic jump.
DEFAULT_ROUNDS: Rounds = tuple((n, n) for n in (8, 12, 16, 24, 32, 48, 64, 80, 96, 108, 120))

CALIBRATION = 1  # part of every cache key: raise it when the calibration below changes
_EFFECT_SHAPE = 0.2  # Wang-Tsiatis shape of the boundary against 0: 0.5 is Pocock's, 0 O'Brien and Fleming's
_MARGIN_SHAPE = 0.35  # the same against the margin: at 0 closeness is proved late, dear where rates are near 0 or 1
_ZONES = ((0.0, 0.1), (0.1, 0.8), (0.8, 0.95), (0.95, 1.0))  # |difference|; the rare extremes need wider boundaries
_OFF_GRID = 1.004  # calibrated bounds are raised by this factor to cover differences between the grid's
_NUISANCE = 120
_SMALLEST_P = 1e-10  # below this the enumeration's rounding error would show


class _Paths:
    """Exact probabilities of two cumulative binomial counts observed at declared rounds.

    Path counts do not depend on the rates, so one pass over the rounds serves all rates.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        previous = (0, 0)
        self.steps: list[tuple[Array, Array]] = []
        for first, second in rounds:
            self.steps.append((_ways(previous[0], first), _ways(previous[1], second)))
            previous = (first, second)

    def statistics(self, delta: float) -> list[Array]:
        """Score statistic of every outcome of every round for H: difference = delta."""
        return [
            score_statistic(np.arange(a + 1)[:, None], a, np.arange(b + 1)[None, :], b, delta) for a, b in self.rounds
        ]

    def absorb(self, stop: Sequence[Array], p1: Array, p2: Array) -> Array:
        """(rounds, rates): probability that the first outcome inside `stop` comes in each round."""
        ways = np.ones((1, 1))
        out = []
        for (first, second), inside, (a, b) in zip(self.steps, stop, self.rounds, strict=True):
            ways = first.T @ ways @ second
            out.append(_mass(np.where(inside, ways, 0.0), a, b, p1, p2))
            ways = np.where(inside, 0.0, ways)
        return np.array(out)

    def ever(self, stop: Sequence[Array], p1: Array, p2: Array) -> Array:
        """(rates,): probability that some round's outcome is inside `stop`."""
        ways = np.ones((1, 1))
        for (first, second), inside in zip(self.steps, stop, strict=True):
            ways = np.where(inside, 0.0, first.T @ ways @ second)
        return 1.0 - _mass(ways, *self.rounds[-1], p1, p2)


def _ways(n: int, m: int) -> Array:
    """(n + 1, m + 1): number of ways from x successes of n to y successes of m >= n."""
    added = m - n
    gain = np.arange(m + 1)[None, :] - np.arange(n + 1)[:, None]
    return np.where((gain >= 0) & (gain <= added), special.comb(added, np.clip(gain, 0, added)), 0.0)


def _mass(ways: Array, n1: int, n2: int, p1: Array, p2: Array) -> Array:
    x1, x2 = np.arange(n1 + 1), np.arange(n2 + 1)
    first = np.exp(special.xlogy(x1, p1[:, None]) + special.xlog1py(n1 - x1, -p1[:, None]))
    second = np.exp(special.xlogy(x2, p2[:, None]) + special.xlog1py(n2 - x2, -p2[:, None]))
    total: Array = ((first @ ways) * second).sum(axis=1)
    return total


def _nuisance(delta: float) -> tuple[Array, Array]:
    """Rates (p1, p2) with p1 - p2 = delta >= 0, dense towards both ends."""
    p2 = np.sin(np.linspace(0.0, np.pi / 2, _NUISANCE)) ** 2 * (1.0 - delta)
    return np.minimum(p2 + delta, 1.0), p2


def _raise_until(error: Callable[[float], float], level: float, start: float) -> float:
    """Least bound >= start (to 0.002) whose error, which falls with the bound, is at most `level`."""
    if error(start) <= level:
        return start
    low, high = start, start + 0.1
    while error(high) > level:
        low, high = high, high + 0.4
    while high - low > 0.002:
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) > level else (low, middle)
    return high


class _Bounds(NamedTuple):
    """Boundary |z_k| >= bound * scale_k. levels: ascending values of max_k |z_k| / scale_k; tails: their null tails."""

    scale: Array
    zones: tuple[float, ...]
    levels: Array
    tails: Array


def _scale(rounds: Rounds, shape: float) -> Array:
    information = np.array([a * b / (a + b) for a, b in rounds])
    return np.asarray((information / information[-1]) ** (shape - 0.5))


def _error(paths: _Paths, scale: Array, delta: float, side: Callable[[Array], Array]) -> Callable[[float], float]:
    """Largest probability, over the nuisance rate, that side(statistic) reaches bound * scale in any round."""
    sizes = [side(z) / s for z, s in zip(paths.statistics(delta), scale, strict=True)]
    rates = _nuisance(delta)
    return lambda bound: float(paths.ever([size >= bound for size in sizes], *rates).max())


@lru_cache(maxsize=32)
def _effect_bounds(rounds: Rounds, alpha: float) -> _Bounds:
    kept = _kept("effect", (rounds, alpha), lambda: _calibrated(rounds, alpha)._asdict())
    return _Bounds(kept["scale"], tuple(kept["zones"].tolist()), kept["levels"], kept["tails"])


def _kept(kind: str, key: tuple[object, ...], make: Callable[[], dict[str, npt.ArrayLike]]) -> dict[str, Array]:
    """Calibrated numbers from the cache on disk, or made and kept there: they cost seconds and never change.

    Plain JSON with its own hash; a damaged or missing file is made again, a cache that cannot be written is done
    without.
    """
    constants = (CALIBRATION, _EFFECT_SHAPE, _MARGIN_SHAPE, _ZONES, _OFF_GRID, _NUISANCE, _SMALLEST_P)
    file = cache_folder() / "designs" / f"{content_id(kind, key, constants)}.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["id"] == content_id(data["numbers"]):
            return {name: np.array(values, dtype=float) for name, values in data["numbers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        data = None  # not there or damaged: made again
    numbers = {name: np.asarray(values, dtype=float).tolist() for name, values in make().items()}
    with suppress(OSError):  # a cache that cannot be written costs seconds, not the run
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"id": content_id(numbers), "numbers": numbers}))
    return {name: np.array(values, dtype=float) for name, values in numbers.items()}


def _calibrated(rounds: Rounds, alpha: float) -> _Bounds:
    paths, scale = _Paths(rounds), _scale(rounds, _EFFECT_SHAPE)
    # Swapping won and lost turns a difference into its negative, so delta >= 0 covers both signs.
    # The error jumps where an outcome enters or leaves its interval, closest together near 0 and 1; what still moves
    # between neighbours of an affordable grid is kept in hand (0.9-0.97).
    grids = (
        (np.union1d(np.linspace(0.0, 0.1, 41), np.geomspace(1e-3, 0.1, 60)), 0.95 * alpha),
        (np.arange(0.1, 0.8, 0.005), 0.97 * alpha),
        (1.0 - np.geomspace(0.2, 0.05, 100), 0.9 * alpha),
        (1.0 - np.geomspace(0.05, 1e-5, 100), 0.9 * alpha),
    )
    zones = []
    for grid, level in grids:
        bound = float(stats.norm.isf(alpha / 2))
        for delta in grid:
            bound = _raise_until(_error(paths, scale, float(delta), np.abs), level, bound)
        zones.append(bound * _OFF_GRID)
    null = _error(paths, scale, 0.0, np.abs)
    levels, tails = [0.0], [1.0]
    while tails[-1] > _SMALLEST_P:
        levels.append(levels[-1] + (0.02 if levels[-1] < 4 else 0.1))
        tails.append(min(tails[-1], null(levels[-1])))
    return _Bounds(scale, tuple(zones), np.array(levels), np.maximum(tails, _SMALLEST_P))


@lru_cache(maxsize=32)
def _limits(rounds: Rounds, alpha: float) -> list[tuple[Array, Array]]:
    """Limits of every outcome of every round: the hull of the differences kept by their own zone's bound."""
    bounds = _effect_bounds(rounds, alpha)
    out = []
    for (a, b), scale in zip(rounds, bounds.scale, strict=True):
        x1, x2 = np.arange(a + 1)[:, None], np.arange(b + 1)[None, :]
        low, high = np.full((a + 1, b + 1), np.inf), np.full((a + 1, b + 1), -np.inf)
        for (inner, outer), bound in zip(_ZONES, bounds.zones, strict=True):
            part = score_interval(x1, a, x2, b, critical=float(bound * scale))
            for left, right in ((inner, outer), (-outer, -inner)):
                first, last = np.maximum(part.low, left), np.minimum(part.high, right)
                kept = first <= last
                low, high = np.where(kept, np.minimum(low, first), low), np.where(kept, np.maximum(high, last), high)
        out.append((low, high))
    return out


@lru_cache(maxsize=32)
def _margin_bounds(rounds: Rounds, sesoi: float, alpha_tost: float) -> Array:
    """(rounds,) bound on the one-sided statistics against +sesoi and -sesoi."""

    def make() -> dict[str, npt.ArrayLike]:
        paths, scale = _Paths(rounds), _scale(rounds, _MARGIN_SHAPE)
        bound = float(stats.norm.isf(alpha_tost))
        for side in (np.positive, np.negative):
            bound = _raise_until(_error(paths, scale, sesoi, side), alpha_tost, bound)
        return {"bounds": scale * bound * _OFF_GRID}

    return _kept("margin", (rounds, sesoi, alpha_tost), make)["bounds"]


class Assessment(NamedTuple):
    """State of each point after the rounds it has had.

    state: "pivotal" (the interval excludes 0), "negligible" (inside +-sesoi), "futile" (undecided, and decision by
        the last round unlikely), "inconclusive" (undecided after the last round) or "continue" (owes another round).
    p: two-sided p-value of no effect, valid whenever and why ever sampling stopped.
    interval: for the difference at level 1 - alpha, all rounds at once: the intersection of the rounds' intervals.
    rounds: rounds used. factual, alternative: rollouts used.
    support: the p-values attainable, with their null cdf (the largest over the common rate); one row for all points.
    """

    state: npt.NDArray[np.str_]
    p: Array
    interval: Interval
    rounds: Array
    factual: Array
    alternative: Array
    support: Support


class Sequential:
    """Declared rounds for the difference of two success rates: factual minus pooled alternatives.

    For the design "draws" exactly; for K fixed alternatives with uniform weights and equal rollouts use their pooled
    count too: a sum of unequal Bernoullis varies less than the binomial of the same mean (Hoeffding 1956), so errors
    only fall. For other weights, or bounded scores, use `spending_levels` with an interval of audit.inference.

    sesoi: smallest effect size of interest. alpha: level of intervals and of `pivotal`. alpha_tost: one-sided level
    of `negligible`. rounds: cumulative (factual, alternative) rollouts. futility: a point stops undecided when the
    predictive probability (independent uniform priors) of deciding it by the last round falls below this; 0 never.
    pivotal_at: stop as pivotal only at p <= this (None: alpha); set it near the p-value that the false discovery
    rate over all points will ask for, or points stop too early for it.

    Guarantees, by exact enumeration over a grid of rates at construction (5-10 s, cached; audited off the grid in
    tests/audit/test_sequential.py): simultaneous coverage >= 1 - alpha for every pair of rates, false pivotal <= alpha,
    false negligible <= alpha_tost. They hold for the rounds as declared, whatever stops them.
    Sources: Miettinen & Nurminen (1985) for the statistic, Wang & Tsiatis (1987) for the shape of the boundaries,
    Jennison & Turnbull (1989) for repeated intervals and p-values.
    """

    def __init__(
        self,
        sesoi: float,
        *,
        alpha: float = 0.05,
        alpha_tost: float = 0.05,
        rounds: Sequence[tuple[int, int]] = DEFAULT_ROUNDS,
        futility: float = 0.1,
        pivotal_at: float | None = None,
    ) -> None:
        self.rounds: Rounds = tuple((int(a), int(b)) for a, b in rounds)
        steps = np.diff(np.array(((0, 0), *self.rounds)), axis=0)
        if len(self.rounds) == 0 or np.any(steps < 0) or np.any(steps.sum(axis=1) == 0) or min(self.rounds[0]) < 1:
            raise InputError(
                f"Sequential: rounds {self.rounds} must be cumulative (factual, alternative) counts that grow from "
                "at least 1 each, such as ((8, 8), (16, 16))."
            )
        if sum(self.rounds[-1]) > 1000:
            raise InputError("Sequential: exact enumeration is limited to 1000 rollouts a point; declare fewer.")
        if not 0 < sesoi < 1 or not 0 <= futility < 1:
            raise InputError("Sequential: sesoi must lie in (0, 1) and futility in [0, 1).")
        self.sesoi, self.futility = float(sesoi), float(futility)
        self.alpha, self.alpha_tost = check_level(alpha), check_level(alpha_tost, "alpha_tost")
        self.pivotal_at = self.alpha if pivotal_at is None else check_level(pivotal_at, "pivotal_at")
        self._paths = _Paths(self.rounds)
        self._bounds = _effect_bounds(self.rounds, self.alpha)
        self._limits = _limits(self.rounds, self.alpha)
        null = self._paths.statistics(0.0)
        self._size = [np.abs(z) / scale for z, scale in zip(null, self._bounds.scale, strict=True)]
        above, below = self._paths.statistics(self.sesoi), self._paths.statistics(-self.sesoi)
        margin = _margin_bounds(self.rounds, self.sesoi, self.alpha_tost)
        self._negligible = [(u <= -m) & (v >= m) for u, v, m in zip(above, below, margin, strict=True)]
        self._pivotal = [
            ((low > 0) | (high < 0)) & (self._p_value(size) <= self.pivotal_at)
            for (low, high), size in zip(self._limits, self._size, strict=True)
        ]
        self._prospect = self._prospects()

    def _p_value(self, statistic: Array) -> Array:
        b = self._bounds
        return b.tails[np.searchsorted(b.levels, statistic * (1 + 1e-9), side="right") - 1]

    def _prospects(self) -> list[Array]:
        """Predictive probability of a decision by the last round, for every outcome of every round."""
        decided = [p | n for p, n in zip(self._pivotal, self._negligible, strict=True)]
        out = [decided[-1].astype(float)]
        for k in range(len(self.rounds) - 2, -1, -1):
            (a, b), (c, d) = self.rounds[k], self.rounds[k + 1]
            ahead = _predictive(a, c) @ out[0] @ _predictive(b, d).T
            out.insert(0, np.where(decided[k], 1.0, ahead))
        return out

    @property
    def support(self) -> tuple[Array, Array]:
        """Attainable p-values, ascending, and the largest null probability of each or less."""
        values = np.unique(self._bounds.tails)
        return values, values

    def assess(self, factual: npt.ArrayLike, alternative: npt.ArrayLike) -> Assessment:
        """Judge points after the rounds they have had.

        factual, alternative: (points, r) cumulative successes after rounds 1..r, r at most the declared rounds; NaN
        from the first round a point has not had. Raises InputError for counts that no path can give.
        """
        first, second = np.asarray(factual, dtype=float), np.asarray(alternative, dtype=float)
        if first.ndim != 2 or first.shape != second.shape or not 1 <= first.shape[1] <= len(self.rounds):
            raise InputError(
                f"Sequential.assess: counts {first.shape} and {second.shape} must both be (points, rounds so far)."
            )
        had = np.isfinite(first)
        used = had.sum(axis=1)
        if np.any(had != np.isfinite(second)) or np.any(had[:, 1:] & ~had[:, :-1]) or np.any(used == 0):
            raise InputError("Sequential.assess: both counts must be given for every round up to a point's last.")
        n = len(first)
        size, prospect = np.zeros(n), np.zeros(n)
        low, high = np.full(n, -np.inf), np.full(n, np.inf)
        last_low, last_high, estimate = np.zeros(n), np.zeros(n), np.zeros(n)
        pivotal, close = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        previous = np.zeros((2, n), dtype=np.int64), (0, 0)
        for k in range(first.shape[1]):
            rows = np.flatnonzero(had[:, k])
            a, b = self.rounds[k]
            x1, x2 = first[rows, k].astype(np.int64), second[rows, k].astype(np.int64)
            gain1, gain2 = x1 - previous[0][0, rows], x2 - previous[0][1, rows]
            step1, step2 = a - previous[1][0], b - previous[1][1]
            whole = np.all(x1 == first[rows, k]) and np.all(x2 == second[rows, k])
            if not whole or np.any((gain1 < 0) | (gain1 > step1) | (gain2 < 0) | (gain2 > step2)):
                raise InputError(
                    f"Sequential.assess: round {k + 1} adds {step1} factual and {step2} alternative rollouts; "
                    "cumulative successes must be whole and grow by at most that."
                )
            previous[0][0, rows], previous[0][1, rows] = x1, x2
            previous = previous[0], (a, b)
            last_low[rows], last_high[rows] = self._limits[k][0][x1, x2], self._limits[k][1][x1, x2]
            low[rows], high[rows] = np.maximum(low[rows], last_low[rows]), np.minimum(high[rows], last_high[rows])
            size[rows] = np.maximum(size[rows], self._size[k][x1, x2])
            pivotal[rows] |= self._pivotal[k][x1, x2]
            close[rows] |= self._negligible[k][x1, x2]
            prospect[rows] = self._prospect[k][x1, x2]
            estimate[rows] = x1 / a - x2 / b
        # Rounds that contradict each other leave nothing over (probability <= alpha): then the last one speaks.
        empty = low > high
        low, high = np.where(empty, last_low, low), np.where(empty, last_high, high)
        over = used == len(self.rounds)
        undecided = np.where(over, "inconclusive", np.where(prospect < self.futility, "futile", "continue"))
        state = np.where(pivotal, "pivotal", np.where(close, "negligible", undecided))
        sizes = np.array(self.rounds)[used - 1]
        values, cdf = self.support
        support = Support(values, cdf, np.array([0, len(values)]), np.zeros(n, dtype=np.int64))
        p = self._p_value(size)
        return Assessment(state, p, Interval(estimate, low, high), used, sizes[:, 0], sizes[:, 1], support)

    def noncoverage(self, p1: npt.ArrayLike, p2: npt.ArrayLike) -> Array:
        """Exact probability that some round's interval misses p1 - p2, at pairs of true rates (same length)."""
        first, second = np.atleast_1d(np.asarray(p1, dtype=float)), np.atleast_1d(np.asarray(p2, dtype=float))
        out = np.empty(len(first))
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            delta = a - b
            outside = [(low > delta + 1e-12) | (high < delta - 1e-12) for low, high in self._limits]
            out[i] = self._paths.ever(outside, first[[i]], second[[i]])[0]
        return out

    def operating(self, p1: npt.ArrayLike, p2: npt.ArrayLike) -> Operating:
        """Exact probabilities of each way to stop and expected rollouts, at pairs of true rates (same length)."""
        first, second = np.atleast_1d(np.asarray(p1, dtype=float)), np.atleast_1d(np.asarray(p2, dtype=float))
        stop = [
            p | n | (v < self.futility) for p, n, v in zip(self._pivotal, self._negligible, self._prospect, strict=True)
        ]
        stop[-1] = np.ones_like(stop[-1])
        ways = np.ones((1, 1))
        pivotal, close, cost = np.zeros(len(first)), np.zeros(len(first)), np.zeros(len(first))
        for k, (a, b) in enumerate(self.rounds):
            ways = self._paths.steps[k][0].T @ ways @ self._paths.steps[k][1]
            pivotal += _mass(np.where(self._pivotal[k], ways, 0.0), a, b, first, second)
            close += _mass(np.where(self._negligible[k] & ~self._pivotal[k], ways, 0.0), a, b, first, second)
            cost += (a + b) * _mass(np.where(stop[k], ways, 0.0), a, b, first, second)
            ways = np.where(stop[k], 0.0, ways)
        return Operating(pivotal, close, cost)


class Operating(NamedTuple):
    """Exact properties of a design at given rates: P(pivotal), P(negligible), expected rollouts of both arms."""

    pivotal: Array
    negligible: Array
    rollouts: Array


def _predictive(n: int, m: int) -> Array:
    """(n + 1, m + 1): P(y successes of m | x of the first n) under a uniform prior on the rate."""
    x, y = np.arange(n + 1)[:, None], np.arange(m + 1)[None, :]
    added, gain = m - n, y - x
    possible = (gain >= 0) & (gain <= added)
    inside = np.clip(gain, 0, added)
    log = special.betaln(x + inside + 1, n - x + added - inside + 1) - special.betaln(x + 1, n - x + 1)
    return np.where(possible, special.comb(added, inside) * np.exp(log), 0.0)


def spending_levels(information: npt.ArrayLike, alpha: float = 0.05, *, shape: float = 0.2) -> Array:
    """Nominal two-sided level of each declared round, summing to alpha (Bonferroni over rounds).

    information: (rounds,) increasing, such as rollouts. Fixed-sample intervals at these levels hold at all rounds at
    once whatever their dependence: the way for weighted arms (`contrast_interval`) and scores
    (`score_means_interval`). Levels follow a Wang-Tsiatis boundary of the given shape, shrunk until they fit.
    """
    share = np.asarray(information, dtype=float)
    if share.ndim != 1 or len(share) == 0 or share[0] <= 0 or np.any(np.diff(share) <= 0):
        raise InputError("spending_levels: information must be a positive, strictly increasing list, one a round.")
    check_level(alpha)
    scale = (share / share[-1]) ** (shape - 0.5)
    low, high = 0.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 2 * stats.norm.sf(middle * scale).sum() > alpha else (low, middle)
    return np.asarray(2 * stats.norm.sf(high * scale))


def spent_p_value(p: npt.ArrayLike, levels: npt.ArrayLike) -> Array:
    """P-value valid at any stopping from each round's own p-values: min over rounds of p_k * sum(levels) / level_k.

    p: (points, rounds), NaN for rounds not had. levels: from `spending_levels`. Weighted Bonferroni, so p-values that
    are valid alone at each round are all that is asked.
    """
    own, share = np.asarray(p, dtype=float), np.asarray(levels, dtype=float)
    if own.ndim != 2 or own.shape[1] > len(share) or np.any(np.isnan(own[:, 0])):
        raise InputError("spent_p_value: p must be (points, rounds) with the first round present, one level a round.")
    scaled = own * share.sum() / share[: own.shape[1]]
    return np.asarray(np.minimum(np.nanmin(scaled, axis=1), 1.0))


class Savings(NamedTuple):
    """What a sequential design spends beside an equal allocation on the same simulated points.

    ratio: rollouts of the rounds / rollouts of the equal allocation. decided, decided_equal: share of points pivotal or
    negligible. both: share of the points decided by the equal allocation that the rounds decide too.
    false_pivotal: share of points without effect called pivotal by the rounds.
    """

    ratio: float
    decided: float
    decided_equal: float
    both: float
    false_pivotal: float


def simulate_savings(
    design: Sequential,
    rng: np.random.Generator,
    *,
    equal: tuple[int, int] = (64, 256),
    points: int = 10_000,
    null_share: float = 0.7,
    effects: tuple[float, float] = (0.1, 0.6),
) -> Savings:
    """Compare a design with a fixed allocation `equal` judged once by fixed-sample intervals (1 - alpha, TOST).

    Points: `null_share` without effect at a uniform rate, the others with |tau| uniform on `effects`, either sign, and
    the alternatives' rate uniform on what tau admits. The default `equal` is 64 rollouts for each of five arms. Beside
    `both`, know that a second equal allocation decides 82, 83, 96 % of the first one's points (sesoi .1, .15, .2).
    """
    real = rng.random(points) >= null_share
    tau = np.where(real, rng.uniform(*effects, points) * rng.choice([-1.0, 1.0], points), 0.0)
    p2 = rng.random(points) * (1 - np.abs(tau)) + np.maximum(-tau, 0.0)
    (n1, n2), (m1, m2) = equal, design.rounds[-1]
    wins1 = np.cumsum(rng.random((points, max(n1, m1))) < (p2 + tau)[:, None], axis=1, dtype=np.int32)
    wins2 = np.cumsum(rng.random((points, max(n2, m2))) < p2[:, None], axis=1, dtype=np.int32)
    state = np.full(points, "continue", dtype="<U12")
    spent = np.zeros(points)
    stops = np.array(design.rounds)
    for k in range(len(stops)):
        rows = np.flatnonzero(state == "continue")
        seen = design.assess(wins1[rows][:, stops[: k + 1, 0] - 1], wins2[rows][:, stops[: k + 1, 1] - 1])
        state[rows], spent[rows] = seen.state, stops[k].sum()
    decided = (state == "pivotal") | (state == "negligible")
    x1, x2 = wins1[:, n1 - 1], wins2[:, n2 - 1]
    fixed = score_interval(x1, n1, x2, n2, design.alpha)
    close = negligible(score_interval(x1, n1, x2, n2, 2 * design.alpha_tost), design.sesoi)
    equally = (fixed.low > 0) | (fixed.high < 0) | close
    return Savings(
        ratio=float(spent.mean() / (n1 + n2)),
        decided=float(decided.mean()),
        decided_equal=float(equally.mean()),
        both=float((decided & equally).sum() / max(equally.sum(), 1)),
        false_pivotal=float((state[~real] == "pivotal").mean()),
    )
