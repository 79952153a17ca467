"""What target policies would gain over never treating, from the logs of one trial.

Knows: statistics section 3 and its trap: blips without later treatment summed over LOGGED histories are not the gain
wherever treatment moves states, eligibility or length. Hides: the blips of each policy's own continuation, influence
values of values and gains, occupancies, weights.

snmm (default)  E[Y^pi] = E[Y - sum I (A - pi) S'psi^pi], psi^pi with continuation pi; the same with pi = 0; difference.
occupancy       O_pi' psi^0 with O_pi = E_pi[sum I A S] by per-decision doubly robust weighting: one psi^0 serves all.
seqdr           sequential doubly robust values, no blip model: a check; unreliable once the ESS is small.
ipw             trajectory weights alone, self-normalised: the crudest check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from audit.mrt.blip import check_outcomes, continuation_probabilities, eligible_rows
from audit.mrt.data import Floats, Ints, MRTData
from audit.mrt.design import Effect, Rule, nuisance_matrix, projection
from audit.mrt.nuisance import check_learner
from audit.mrt.offpolicy import Overlap, doubly_robust, overlap
from audit.mrt.results import FEW_CLUSTERS, Correction, Effects, by_cluster
from audit.mrt.snmm import FEWEST_ROWS, GFit, Instrument, Rows, g_estimate, stacked
from envs.core import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Method = Literal["snmm", "occupancy", "seqdr", "ipw"]
LOW_ESS = 30.0
NOMINAL = {"snmm": True, "occupancy": True, "seqdr": False, "ipw": False}


@dataclass(frozen=True, eq=False)
class Gains(Effects):
    """Gains over never treating, a policy an effect; values: E[Y^pi] of never treating and of each policy."""

    values: Effects | None = None
    overlaps: Mapping[str, Overlap] = field(default_factory=dict)

    def plot(self, ax: Axes | None = None, alpha: float = 0.05) -> Axes:
        """Forest plot of the gains; returns the Axes."""
        ax = super().plot(ax, alpha)
        ax.set_xlabel(f"gain in outcome over never treating, {100 * (1 - alpha):g} % interval")
        return ax


def policy_gain(
    data: MRTData,
    policies: Mapping[str, Rule],
    effect: Effect = "pooled",
    *,
    method: Method = "snmm",
    learner: Any = None,
    nuisance: str | Sequence[str] | None = None,
    folds: int = 5,
    cluster: str | None = None,
    correction: Correction = "auto",
    instrument: Instrument = "features",
    seed: int = 0,
) -> Gains:
    """Gain E[Y^pi] - E[Y^never] of each policy, with joint covariance over policies.

    policies: name -> feature name, constant or function of the feature frame, P(treat) ((rows, K) for K arms) at the
    logged history; "none" and "randomized" are allowed. effect: the blip model (snmm, occupancy), as in `blip`; blips
    of a policy change near the end of the horizon, so let it contain t where horizons bind, and the counts a budget
    policy looks at. learner, nuisance, folds, cluster, correction: as in `blip`.
    Trajectories without an eligible decision count with their outcome and gain 0. The table shows ESS, largest weight
    and the share of trajectories consistent with the policy; below an ESS of 30 the blip methods lean on their model.
    Only snmm and occupancy have intervals with a nominal claim (given a right blip model).
    Raises InputError for policies that are no probabilities, or unknown methods.
    """
    if not policies:
        raise InputError("policy_gain: no policy given; pass name -> rule.")
    if method not in NOMINAL:
        raise InputError(f"policy_gain: unknown method {method!r}; use one of {', '.join(NOMINAL)}.")
    check_learner(learner, folds)
    if folds < 2:
        raise InputError("policy_gain: needs folds >= 2.")
    notes = check_outcomes(data)
    rows = eligible_rows(data, cluster)
    names = ["never", *policies]
    pis = [continuation_probabilities(rule, data)[0] for rule in ("none", *policies.values())]
    overlaps = {name: overlap(rows, pi) for name, pi in zip(names, pis, strict=True)}
    job = _Job(
        data, rows, data.folds(folds, cluster, seed)[data.eligible], nuisance_matrix(nuisance, data, data.eligible),
        learner, correction, instrument,
    )  # fmt: skip
    if method in ("snmm", "occupancy"):
        s = projection(effect, data.frame.loc[data.eligible])
        if not s.exclusive:
            raise InputError("effect: groups overlap; a blip model needs exclusive groups or a formula.")
        _check_support(rows, s.matrix, s.names)
        build = _by_snmm if method == "snmm" else _by_occupancy
        values = build(job, s.matrix, pis)
        notes += (f"blip model: {', '.join(s.names)}",)
    else:
        values = _by_weights(job, pis, overlaps, method)
        notes += ("a check without a blip model: its interval claims nothing where the ESS is small",)
    table = Effects(
        tuple(names), *values, what=f"expected outcome under each policy, method {method}",
        correction="CR3" if job.jackknife else ("CR0" if correction == "CR0" else "CR1"), notes=notes,
    )  # fmt: skip
    difference = np.hstack([-np.ones((len(policies), 1)), np.eye(len(policies))])
    gains = table.contrast(difference, list(policies))
    weak = [n for n in policies if overlaps[n].ess < LOW_ESS]
    if weak:
        notes += (f"effective sample size below {LOW_ESS:g} for {', '.join(weak)}: extrapolation by the model",)
    return Gains(
        gains.names,
        gains.estimate,
        gains.influence,
        gains.deviations,
        gains.df,
        f"gain over never treating, method {method}",
        table.correction,
        {
            "ess": [overlaps[n].ess for n in policies],
            "max_weight": [overlaps[n].max_weight for n in policies],
            "consistent": [overlaps[n].consistent for n in policies],
        },
        notes=notes,
        values=table,
        overlaps=overlaps,
    )


Columns = tuple[Floats, Floats, Floats, Floats]


@dataclass(frozen=True)
class _Job:
    data: MRTData
    rows: Rows
    fold: Ints
    x: Floats
    learner: Any
    correction: Correction
    instrument: Instrument

    @property
    def size(self) -> int:
        return int(self.rows.clusters.max()) + 1

    @property
    def jackknife(self) -> bool:
        return self.correction == "CR3" or (self.correction == "auto" and self.size < FEW_CLUSTERS)

    def fit(self, s: Floats, pi: Floats) -> GFit:
        rule: Correction = "CR3" if self.jackknife else "CR0"
        return g_estimate(
            self.rows, s, pi, self.x, self.fold,
            learner=self.learner, instrument=self.instrument, correction=rule,
        )  # fmt: skip

    def mean(self, terms: Floats) -> tuple[Floats, Floats, Floats]:
        """Mean over trajectories of (n, m) terms, influence (n, m) and cluster deviations without a factor."""
        mean = terms.mean(axis=0)
        centred = terms - mean
        sums = by_cluster(centred, self.rows.clusters, self.size)
        if not self.jackknife:
            return mean, centred, sums / self.rows.n
        left = self.rows.n - np.bincount(self.rows.clusters, minlength=self.size)
        return mean, centred, -sums / left[:, None]

    def factor(self, q: int) -> float:
        return 1.0 if self.jackknife or self.correction == "CR0" else float(np.sqrt(self.size / (self.size - q)))


def _by_snmm(job: _Job, s: Floats, pis: list[Floats]) -> Columns:
    columns = []
    for pi in pis:
        solved = job.fit(s, pi).solved
        moved = by_cluster(stacked(job.rows.given(pi), s), job.rows.unit, job.rows.n)
        terms = np.column_stack([job.data.y, moved])
        mean, influence, deviations = job.mean(terms)
        # V = mean(Y) - mean(C)'psi. A jackknife deviation is exact: the product of both changes is kept.
        change = solved.deviations
        estimate = mean[0] - mean[1:] @ solved.estimate
        part = influence[:, 0] - influence[:, 1:] @ solved.estimate - solved.influence @ mean[1:]
        shift = deviations[:, 0] - deviations[:, 1:] @ solved.estimate - change @ mean[1:]
        if job.jackknife:
            shift = shift - (deviations[:, 1:] * change).sum(axis=1)
        columns.append((estimate, part, shift))
    return _gathered(job, columns, stacked(job.rows.given(), s).shape[1])


def _by_occupancy(job: _Job, s: Floats, pis: list[Floats]) -> Columns:
    rows, q = job.rows, s.shape[1]
    index = job.data.index[job.data.eligible]
    reward = np.zeros((len(s), rows.arms + 1, rows.arms * q))
    for k in range(1, rows.arms + 1):
        reward[:, k, (k - 1) * q : k * q] = s
    never = pis[0]
    solved = job.fit(s, never).solved
    base = np.column_stack([job.data.y, by_cluster(stacked(rows.given(never), s), rows.unit, rows.n)])
    columns = []
    for pi in pis:
        met = doubly_robust(
            rows, index, pi, job.x, job.fold,
            reward=reward, start=np.zeros((rows.n, rows.arms * q)), learner=job.learner,
        )  # fmt: skip
        # E[Y^0] + O'psi0 = mean(Y) + (O - C)'psi0.
        terms = np.column_stack([base[:, 0], met - base[:, 1:]])
        mean, influence, deviations = job.mean(terms)
        part = influence[:, 0] + influence[:, 1:] @ solved.estimate + solved.influence @ mean[1:]
        shift = deviations[:, 0] + deviations[:, 1:] @ solved.estimate + solved.deviations @ mean[1:]
        if job.jackknife:
            shift = shift + (deviations[:, 1:] * solved.deviations).sum(axis=1)
        columns.append((mean[0] + mean[1:] @ solved.estimate, part, shift))
    return _gathered(job, columns, rows.arms * q)


def _by_weights(job: _Job, pis: list[Floats], overlaps: Mapping[str, Overlap], method: Method) -> Columns:
    columns = []
    index = job.data.index[job.data.eligible]
    for pi, seen in zip(pis, overlaps.values(), strict=True):
        if method == "ipw":
            if not seen.final.any():
                raise InputError("policy_gain: no logged trajectory is consistent with some policy; ipw cannot say.")
            share = seen.final / seen.final.mean()
            value = float((share * job.data.y).mean())
            _, influence, deviations = job.mean((share * (job.data.y - value))[:, None])
            columns.append((value, influence[:, 0], deviations[:, 0]))
            continue
        terms = doubly_robust(
            job.rows, index, pi, job.x, job.fold, reward=None, start=job.data.y[:, None], learner=job.learner
        )
        mean, influence, deviations = job.mean(terms)
        columns.append((mean[0], influence[:, 0], deviations[:, 0]))
    return _gathered(job, columns, 1)


def _gathered(job: _Job, columns: list[tuple[Any, Floats, Floats]], q: int) -> Columns:
    if job.size <= q:
        raise InputError(f"policy_gain: {job.size} clusters for {q} blip coefficients; more clusters are needed.")
    return (
        np.array([float(c[0]) for c in columns]),
        np.column_stack([c[1] for c in columns]),
        np.column_stack([c[2] for c in columns]) * job.factor(q),
        np.full(len(columns), float(job.size - q)),
    )


def _check_support(rows: Rows, s: Floats, names: Sequence[str]) -> None:
    for j, name in enumerate(names):
        for k in range(rows.arms + 1):
            found = int(((s[:, j] != 0) & (rows.arm == k)).sum())
            if found < FEWEST_ROWS:
                raise InputError(
                    f"effect: column `{name}` has {found} rows of arm {k}; g-estimation needs {FEWEST_ROWS}: "
                    "merge levels."
                )


def gain_table(gains: Sequence[Gains], alpha: float = 0.05) -> pd.DataFrame:
    """Several methods side by side, a row a policy and method."""
    return pd.concat([g.to_frame(alpha).assign(method=g.what.rsplit(" ", 1)[-1]) for g in gains], ignore_index=True)
