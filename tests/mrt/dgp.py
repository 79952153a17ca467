"""Two trials with exact truth: DGP C (continuous outcome, random length and eligibility) and D (finite-state agent).

Knows: the specification in reference/dgp_truth.json; simulation and truth are written apart from each other, so that
each checks the other. Truth is by backward recursion (values) and forward recursion (which decisions are met).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from audit.mrt import MRTData

Floats = NDArray[np.float64]
PolicyC = Callable[[NDArray, NDArray], NDArray]

T_C, T_D = 10, 4
POLICIES_C: dict[str, PolicyC] = {
    "always": lambda s, g: np.ones_like(s, dtype=float),
    "S1": lambda s, g: (s == 1).astype(float),
    "S1orG0": lambda s, g: ((s == 1) | (g == 0)).astype(float),
}
POLICIES_D: dict[str, Callable[[NDArray, NDArray], NDArray]] = {
    "always": lambda s, g: np.ones_like(s, dtype=float),
    "writes": lambda s, g: (g == 1).astype(float),
    "writes&bad": lambda s, g: ((g == 1) & (s <= 1)).astype(float),
}


def draw_c(n: int, rng: np.random.Generator) -> MRTData:
    """n trajectories of DGP C; features S, G (per decision) and base (per trajectory)."""
    u = rng.standard_normal(n)
    base = u + 0.5 * rng.standard_normal(n)
    y = 1 + u + rng.standard_normal(n)
    s = (rng.random(n) < 0.4).astype(int)
    alive = np.ones(n, dtype=bool)
    blocks = []
    for t in range(1, T_C + 1):
        g = (rng.random(n) < 0.4).astype(int)
        eligible = rng.random(n) < 0.7 + 0.2 * s
        p = 0.3 + 0.4 * s
        a = ((rng.random(n) < p) & eligible).astype(int)
        ids = np.flatnonzero(alive)
        columns = (ids, np.full(len(ids), t), eligible[ids], a[ids], p[ids], s[ids], g[ids])
        blocks.append(np.column_stack(columns).astype(float))
        y += np.where(alive, a * (0.5 + s - 0.8 * g), 0.0)
        stop = rng.random(n) < 0.05 + 0.10 * (1 - s) + 0.10 * a
        s = (rng.random(n) < 0.3 + 0.3 * s - 0.2 * a + 0.1 * s * a).astype(int)
        alive &= ~stop
    return _tables(blocks, y, ["S", "G"], pd.DataFrame({"base": base}))


def draw_d(n: int, rng: np.random.Generator) -> MRTData:
    """n trajectories of DGP D; features s (state) and g (tool type), binary outcome."""
    s = rng.choice(3, n, p=INIT)
    alive = np.ones(n, dtype=bool)
    blocks = []
    for t in range(1, T_D + 1):
        g = _pick(TOOLS[s], rng)
        eligible = g != 2
        a = ((rng.random(n) < 0.5) & eligible).astype(int)
        ids = np.flatnonzero(alive)
        columns = (ids, np.full(len(ids), t), eligible[ids], a[ids], np.full(len(ids), 0.5), s[ids], g[ids])
        blocks.append(np.column_stack(columns).astype(float))
        stop = rng.random(n) < 0.05 + 0.15 * (s == 2) + 0.10 * a
        s = np.where(alive, _pick(_moves(a, g)[np.arange(n), s], rng), s)
        alive &= ~stop
    y = (rng.random(n) < WIN[s]).astype(float)
    return _tables(blocks, y, ["s", "g"], pd.DataFrame(index=range(n)))


def draw_exogenous(n: int, rng: np.random.Generator, arms: int = 1) -> MRTData:
    """Fixed T = 4, state S independent of treatment, so that every continuation has the same blip:

    arm 1: .5 + .6 S; arm 2: -.3 + .4 S. Columns prox and prox_bin are measured right after each decision: effects of
    arm 1 are .4 + .3 S (difference) and .3 + .2 S (log relative risk).
    """
    t = np.tile(np.arange(1, 5), n)
    unit = np.repeat(np.arange(n), 4)
    s = (rng.random(4 * n) < 0.5).astype(int)
    p = np.where(s == 1, 0.6, 0.4) if arms == 1 else np.full(4 * n, 0.3)
    draw = rng.random(4 * n)
    a = (draw < p).astype(int) if arms == 1 else np.select([draw < 0.3, draw < 0.6], [1, 2], 0)
    base = rng.standard_normal(n)
    effect = np.select([a == 1, a == 2], [0.5 + 0.6 * s, -0.3 + 0.4 * s], 0.0)
    y = base + np.bincount(unit, effect + 0.4 * s) + rng.standard_normal(n)
    own = 0.7 * base[unit]
    prox = own + 0.3 * s + 0.1 * t + (a == 1) * (0.4 + 0.3 * s) + rng.standard_normal(4 * n)
    chance = np.exp(-1.8 + 0.25 * np.tanh(own) + 0.2 * s + (a == 1) * (0.3 + 0.2 * s))
    table = {"trajectory": unit, "t": t, "eligible": 1, "arm": a, "S": s, "prox": prox}
    table["prox_bin"] = (rng.random(4 * n) < chance).astype(int)
    table |= {"p": p} if arms == 1 else {"p_1": p, "p_2": p}
    trajectories = pd.DataFrame({"trajectory": np.arange(n), "outcome": y, "base": base})
    return MRTData(pd.DataFrame(table), trajectories, features=["S", "base"])


def draw_log(n: int, rng: np.random.Generator) -> MRTData:
    """Binary outcome with a log-linear blip .15 + .15 S under no later treatment; treatment moves S."""
    base = rng.uniform(-1, 1, n)
    s, total, blocks = (rng.random(n) < 0.5).astype(int), np.zeros(n), []
    for t in range(1, 4):
        p = 0.4 + 0.2 * s
        a = (rng.random(n) < p).astype(int)
        blocks.append(np.column_stack([np.arange(n), np.full(n, t), np.ones(n), a, p, s, s]))
        total += a * (0.15 + 0.15 * s)
        s = (rng.random(n) < 0.5 - 0.3 * a + 0.2 * s).astype(int)
    y = (rng.random(n) < np.exp(-1.8 + 0.4 * base + total)).astype(float)
    return _tables(blocks, y, ["S", "G"], pd.DataFrame({"base": base}))


def draw_tasks(tasks: int, each: int, rng: np.random.Generator) -> tuple[MRTData, float]:
    """Tasks with effects .5 + N(0, .8^2), `each` trajectories of 3 decisions; and the mean effect of THESE tasks."""
    n = tasks * each
    task = np.repeat(np.arange(tasks), each)
    effect = 0.5 + 0.8 * rng.standard_normal(tasks)
    a = (rng.random((n, 3)) < 0.5).astype(int)
    y = rng.standard_normal(tasks)[task] + a.sum(axis=1) * effect[task] + rng.standard_normal(n)
    decisions = pd.DataFrame(
        {
            "trajectory": np.repeat(np.arange(n), 3),
            "t": np.tile([1, 2, 3], n),
            "eligible": True,
            "arm": a.ravel(),
            "p": 0.5,
        }
    )
    return MRTData(decisions, pd.DataFrame({"trajectory": np.arange(n), "outcome": y, "task": task})), effect.mean()


def _tables(blocks: list[Floats], y: Floats, names: list[str], baseline: pd.DataFrame) -> MRTData:
    rows = np.concatenate(blocks)
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    columns = ["trajectory", "t", "eligible", "arm", "p", *names]
    decisions = pd.DataFrame(rows, columns=columns)
    decisions = decisions.astype(dict.fromkeys(["trajectory", "t", "eligible", "arm", *names], int))
    trajectories = baseline.assign(trajectory=np.arange(len(y)), outcome=y)
    return MRTData(decisions, trajectories, features=[*names, *baseline.columns])


INIT = np.array([0.3, 0.5, 0.2])
TOOLS = np.array([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.3, 0.5, 0.2]])
WIN = np.array([0.1, 0.45, 0.9])
_BASE = np.array([[0.6, 0.3, 0.1], [0.25, 0.45, 0.3], [0.1, 0.3, 0.6]])
_HELP = np.array([[0.55, 0.3, 0.15], [0, 0.7, 0.3], [0, 0.05, 0.95]])
_HARM = np.array([[0.95, 0.05, 0], [0.1, 0.88, 0.02], [0.05, 0.15, 0.8]])
_KERNEL = np.stack([[_BASE] * 3, [_BASE @ _HARM, _BASE @ _HELP, _BASE]])  # arm, tool type, from, to


def _moves(a: NDArray, g: NDArray) -> Floats:
    return np.asarray(_KERNEL[a, g])


def _pick(rows: Floats, rng: np.random.Generator) -> NDArray:
    return np.minimum((rng.random(len(rows))[:, None] > rows.cumsum(axis=1)).sum(axis=1), rows.shape[1] - 1)


@dataclass(frozen=True)
class Truth:
    """tau: (T, S, G) blips; met: (T, S, G) expected eligible decisions a trajectory under the trial; value: E[Y].

    rows: expected decisions a trajectory, eligible or not.
    """

    tau: Floats
    met: Floats
    value: float
    rows: float

    def weighted(self, mask: Floats | None = None) -> float:
        """Mean blip over the decisions met, within a mask broadcastable to (T, S, G)."""
        w = self.met if mask is None else self.met * mask
        return float((w * self.tau).sum() / w.sum())

    def linear(self, features: list[Floats]) -> Floats:
        """Least-squares projection of the blip on features broadcastable to (T, S, G), weighted by `met`."""
        x = np.stack([np.broadcast_to(f, self.tau.shape).ravel() for f in features], axis=1)
        w = self.met.ravel()
        return np.linalg.solve(x.T @ (w[:, None] * x), x.T @ (w * self.tau.ravel()))


_S2 = np.array([[0, 0], [1, 1]])
_G2 = np.array([[0, 1], [0, 1]])
S_C, G_C = _S2[None].astype(float), _G2[None].astype(float)  # features of DGP C on the (T, S, G) grid


def truth_c(policy: PolicyC | None = None) -> Truth:
    """DGP C: blips with continuation `policy` (None: the trial's own coins) and the value of following it."""
    s, pg, pe = np.arange(2), np.array([0.6, 0.4]), 0.7 + 0.2 * np.arange(2)
    gamma = 0.5 + _S2 - 0.8 * _G2
    pi = np.repeat((0.3 + 0.4 * s)[:, None], 2, axis=1) if policy is None else policy(_S2, _G2)

    def on(a: int, later: Floats) -> Floats:  # (S,) value of what follows a step with arm a
        p1 = 0.3 + 0.3 * s - 0.2 * a + 0.1 * s * a
        return (1 - (0.05 + 0.10 * (1 - s) + 0.10 * a)) * ((1 - p1) * later[0] + p1 * later[1])

    tau, w = np.zeros((T_C, 2, 2)), np.zeros(2)
    for t in reversed(range(T_C)):
        q1, q0 = gamma + on(1, w)[:, None], np.repeat(on(0, w)[:, None], 2, axis=1)
        tau[t] = q1 - q0
        w = pe * ((pi * q1 + (1 - pi) * q0) @ pg) + (1 - pe) * on(0, w)
    met, alive, rows = np.zeros_like(tau), np.array([0.6, 0.4]), 0.0
    trial_p = 0.3 + 0.4 * s
    for t in range(T_C):
        met[t] = alive[:, None] * pe[:, None] * pg
        rows += alive.sum()
        after = np.zeros(2)
        for a, share in ((1, pe * trial_p), (0, 1 - pe * trial_p)):
            p1 = 0.3 + 0.3 * s - 0.2 * a + 0.1 * s * a
            stay = alive * share * (1 - (0.05 + 0.10 * (1 - s) + 0.10 * a))
            after += np.array([(stay * (1 - p1)).sum(), (stay * p1).sum()])
        alive = after
    return Truth(tau, met, 1.0 + float(0.6 * w[0] + 0.4 * w[1]), rows)


def trajectory_average_c() -> float:
    """DGP C: E[(1/T) sum I tau] / E[(1/T) sum I], tau with the trial's own coins, T the number of decisions."""
    trial = truth_c()
    s = np.arange(2)
    inverse = np.zeros((T_C, 2))  # E[1/T | an eligible decision at t in state s]
    following = np.zeros(2)  # E[1/T | alive at t + 1 in state s]
    for t in reversed(range(T_C)):
        by_arm = []
        for a in (0, 1):
            p1 = 0.3 + 0.3 * s - 0.2 * a + 0.1 * s * a
            stop = 0.05 + 0.10 * (1 - s) + 0.10 * a if t < T_C - 1 else np.ones(2)
            by_arm.append(stop / (t + 1) + (1 - stop) * ((1 - p1) * following[0] + p1 * following[1]))
        p, eligible = 0.3 + 0.4 * s, 0.7 + 0.2 * s
        inverse[t] = p * by_arm[1] + (1 - p) * by_arm[0]
        following = eligible * inverse[t] + (1 - eligible) * by_arm[0]
    w = trial.met * inverse[:, :, None]
    return float((w * trial.tau).sum() / w.sum())


def truth_d(policy: Callable[[NDArray, NDArray], NDArray] | None = None) -> Truth:
    """DGP D, as `truth_c`; tau and met are (T, 3, 2): only types 0 and 1 are eligible."""
    s3, g3 = np.meshgrid(np.arange(3), np.arange(2), indexing="ij")
    pi = np.full((3, 2), 0.5) if policy is None else policy(s3, g3)
    stop = 0.05 + 0.15 * (np.arange(3) == 2)
    tau, w = np.zeros((T_D, 3, 2)), WIN
    for t in reversed(range(T_D)):

        def follow(a: int, g: int, later: Floats = w) -> Floats:  # (3,) by state now
            ends = stop + 0.10 * a
            return ends * (_KERNEL[a, g] @ WIN) + (1 - ends) * (_KERNEL[a, g] @ later)

        q = np.stack([[follow(a, g) for g in range(2)] for a in (0, 1)])  # arm, type, state
        tau[t] = (q[1] - q[0]).T
        mixed = pi * q[1].T + (1 - pi) * q[0].T
        w = (TOOLS[:, :2] * mixed).sum(axis=1) + TOOLS[:, 2] * follow(0, 2)
    met, alive, rows = np.zeros_like(tau), INIT, 0.0
    for t in range(T_D):
        met[t] = alive[:, None] * TOOLS[:, :2]
        rows += alive.sum()
        after = np.zeros(3)
        for g in range(3):
            for a in (0, 1):
                share = (0.5 if g < 2 else float(a == 0)) * TOOLS[:, g] * alive
                after += (share * (1 - stop - 0.10 * a)) @ _KERNEL[a, g]
        alive = after
    return Truth(tau, met, float(INIT @ w), rows)
