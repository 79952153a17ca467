"""The two tables of a micro-randomised trial, checked once, so that estimators need not doubt them.

Knows: what a valid trial looks like and which columns were known before each coin flip. Hides: column mapping, dtypes,
the codes of trajectories and clusters, history counts, folds.

Schema
------
decisions: one row a decision point, sorted by trajectory and t.

| column | type | meaning |
|---|---|---|
| trajectory | any hashable, not missing | to which trajectory the row belongs; rows of one trajectory are contiguous |
| t | whole number, strictly increasing within a trajectory | decision index |
| eligible | bool or 0/1 | whether a coin was flipped here (I_t) |
| arm | whole number 0..K | what was given (A_t); 0 wherever not eligible |
| p, or p_1 .. p_K | float, strictly inside (0, 1) where eligible | logged probability of arm 1 (of arms 1..K) |
| anything else | number, bool, text | a feature if named in `features`, else carried along unused |

trajectories: one row a trajectory, also those without an eligible decision (they count in values and gains).

| column | type | meaning |
|---|---|---|
| trajectory | unique | key |
| outcome | finite number | terminal outcome Y |
| task | optional | what was attempted; the default cluster where present |
| anything else | | a baseline feature if named in `features` |

`features` names what was known BEFORE the coin at each row. Only these (and t, p, n_past_eligible, n_past_treated,
which are derived) may moderate, adjust, weight or steer a target policy; a column recorded after the coin would bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from envs.core import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

DERIVED = ("t", "n_past_eligible", "n_past_treated")
TWO_TARGETS = (
    "clusters are tasks: the target is a population of tasks like these; "
    "clusters are trajectories: the target is these very tasks, met again"
)


class MRTData:
    """A checked trial.

    decisions, trajectories: the tables under canonical names (see the module). features: columns known before the coin.
    n: trajectories. arms: K. p_columns: names of the probability columns.
    All row arrays below keep the row order of `decisions`: unit (rows,) trajectory code; eligible, arm, t (rows,);
    p (rows, K + 1) probability of each arm, arm 0 first (1, 0, ... where not eligible); index (rows,) the number of
    earlier eligible rows of the trajectory. y: (n,) outcomes. frame: features and derived columns, a row a decision.
    cluster: name of the default clustering column.
    """

    def __init__(
        self,
        decisions: pd.DataFrame,
        trajectories: pd.DataFrame,
        *,
        features: Sequence[str] = (),
        columns: Mapping[str, str] | None = None,
        cluster: str | None = None,
    ) -> None:
        """Check two tables and keep them.

        columns: canonical name -> name in the tables, for those that differ. cluster: column of `trajectories`
        (default `task` where present, else `trajectory`). Raises InputError for the first thing that is wrong.
        """
        self.decisions = _renamed(decisions, columns, "decisions").reset_index(drop=True)
        self.trajectories = _renamed(trajectories, columns, "trajectories").reset_index(drop=True)
        self.features = tuple(features)
        self.p_columns = _probability_columns(self.decisions)
        self.arms = len(self.p_columns)
        _need(self.decisions, ["trajectory", "t", "eligible", "arm"], "decisions")
        _need(self.trajectories, ["trajectory", "outcome"], "trajectories")
        keys = self.trajectories["trajectory"]
        if keys.isna().any() or self.decisions["trajectory"].isna().any():
            raise InputError("trial tables: `trajectory` is missing in some row; every row needs its trajectory.")
        twice = keys[keys.duplicated()]
        if len(twice):
            raise InputError(f"trajectories table: {twice.iloc[0]!r} has two rows; expected one row a trajectory.")
        self.n = len(keys)
        self.y = _numbers(self.trajectories["outcome"], "trajectories", "outcome", "drop those trajectories knowingly")
        self.unit = np.asarray(pd.Index(keys).get_indexer(pd.Index(self.decisions["trajectory"])), dtype=np.int64)
        if (self.unit < 0).any():
            stray = self.decisions["trajectory"].iloc[int(np.argmax(self.unit < 0))]
            raise InputError(f"decisions table: trajectory {stray!r} has no row in the trajectories table.")
        self.t = _whole(self.decisions["t"], "t")
        self.eligible = _flags(self.decisions["eligible"])
        self.arm = _whole(self.decisions["arm"], "arm")
        self._check_order()
        self.p = self._probabilities()
        self._check_arms()
        self.index, treated = self._counts()
        self.frame = self._frame(treated)
        self.cluster = cluster or ("task" if "task" in self.trajectories.columns else "trajectory")
        self.cluster_codes()

    @classmethod
    def from_long(
        cls,
        table: pd.DataFrame,
        *,
        features: Sequence[str] = (),
        columns: Mapping[str, str] | None = None,
        cluster: str | None = None,
    ) -> MRTData:
        """One long table that repeats `outcome` (and `task`) on every row, as other harnesses write it.

        Trajectories without any row are lost in such a table; where there are some, pass the two tables.
        Raises InputError if the outcome or task varies within a trajectory.
        """
        long = _renamed(table, columns, "long")
        _need(long, ["trajectory", "outcome"], "long")
        wide = [c for c in ("outcome", "task", cluster or "") if c in long.columns and c != "trajectory"]
        for name in wide:
            if (long.groupby("trajectory", sort=False)[name].nunique(dropna=False) > 1).any():
                raise InputError(f"long table: `{name}` varies within a trajectory; expected one value a trajectory.")
        trajectories = long.drop_duplicates("trajectory")[["trajectory", *wide]]
        return cls(long.drop(columns=wide), trajectories, features=features, cluster=cluster)

    def cluster_codes(self, cluster: str | None = None) -> Ints:
        """(n,) cluster code of each trajectory by a column of `trajectories`; the sampling unit of every interval.

        Which to take: clusters are tasks -> the target is a population of tasks like these; clusters are trajectories
        -> the target is these very tasks, met again. Raises InputError for an unknown column or a single cluster.
        """
        name = cluster or self.cluster
        if name not in self.trajectories.columns:
            raise InputError(f"cluster {name!r} is no column of the trajectories table; use one of its columns.")
        if self.trajectories[name].isna().any():
            raise InputError(f"trajectories table: cluster column `{name}` has missing values.")
        codes = np.asarray(pd.factorize(self.trajectories[name])[0], dtype=np.int64)
        if codes.size == 0 or codes.max() < 1:
            raise InputError(
                f"trial tables: all trajectories are in a single cluster of `{name}`; variation between clusters "
                "cannot be measured with fewer than 2."
            )
        return codes

    def folds(self, k: int, cluster: str | None = None, seed: int = 0) -> Ints:
        """(rows,) fold 0..k-1 of each decision; whole clusters share a fold, folds hold nearly equal numbers of them.

        k = 1 puts everything in fold 0. Raises InputError when there are fewer clusters than folds.
        """
        codes = self.cluster_codes(cluster)
        size = int(codes.max()) + 1
        if not 1 <= k <= size:
            raise InputError(f"folds: {k} folds asked of {size} clusters; expected 1 <= folds <= clusters.")
        order = np.random.Generator(np.random.Philox(seed)).permutation(size)
        fold = np.empty(size, dtype=np.int64)
        fold[order] = np.arange(size) % k
        return fold[codes][self.unit]

    # --- checks ---------------------------------------------------------------------------------------------------

    def _check_order(self) -> None:
        same = self.unit[1:] == self.unit[:-1]
        runs = int((~same).sum()) + 1 if self.unit.size else 0
        step = np.diff(self.t)
        doubled = self.decisions.duplicated(["trajectory", "t"])
        if doubled.any():
            row = self.decisions.iloc[int(np.argmax(doubled.to_numpy()))]
            raise InputError(
                f"decisions table: trajectory {row['trajectory']!r} has two rows at t={row['t']}; "
                "expected one a decision."
            )
        if runs != np.unique(self.unit).size or (step[same] <= 0).any():
            raise InputError(
                "decisions table: rows are unsorted; sort by trajectory and t (later rows are read as the future)."
            )

    def _probabilities(self) -> Floats:
        p = np.zeros((len(self.decisions), self.arms + 1))
        for k, name in enumerate(self.p_columns, start=1):
            column = self.decisions[name]
            if not pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
                raise InputError(f"decisions table: `{name}` has dtype {column.dtype}; expected floats.")
            p[:, k] = np.where(self.eligible, column.to_numpy(dtype=float, na_value=np.nan), 0.0)
        p[:, 0] = 1 - p[:, 1:].sum(axis=1)
        bad = self.eligible & ~((p > 0) & (p < 1)).all(axis=1)
        if bad.any():
            row = int(np.argmax(bad))
            raise InputError(
                f"decisions table: row {row} is eligible but its probabilities are {p[row].round(6).tolist()} (arm 0 "
                "first); expected every arm strictly between 0 and 1: where there is no coin, set eligible to 0."
            )
        return p

    def _check_arms(self) -> None:
        bad = (self.arm < 0) | (self.arm > self.arms)
        if bad.any():
            raise InputError(
                f"decisions table: row {int(np.argmax(bad))} has arm {self.arm[bad][0]}; expected 0..{self.arms} "
                f"with probability column(s) {', '.join(self.p_columns)}."
            )
        bad = (self.arm != 0) & ~self.eligible
        if bad.any():
            raise InputError(
                f"decisions table: row {int(np.argmax(bad))} has arm {self.arm[bad][0]} but is not eligible; "
                "expected arm 0 wherever eligible is 0."
            )
        if not self.eligible.any():
            raise InputError("decisions table: no row is eligible; nothing was randomised.")
        given = np.bincount(self.arm[self.eligible], minlength=self.arms + 1)
        if (given == 0).any():
            absent = np.flatnonzero(given == 0).tolist()
            raise InputError(
                f"decisions table: treatment is constant or an arm is never given (no eligible row with arm {absent}); "
                "an effect needs every arm."
            )

    def _counts(self) -> tuple[Ints, Ints]:
        """Earlier eligible rows and earlier treated rows within the trajectory."""
        out = []
        for flag in (self.eligible, self.arm != 0):
            before = np.concatenate([[0], np.cumsum(flag)[:-1]]).astype(np.int64)
            first = np.concatenate([[True], self.unit[1:] != self.unit[:-1]])
            start = before[first][np.cumsum(first) - 1]
            out.append(before - start)
        return out[0], out[1]

    def _frame(self, treated: Ints) -> pd.DataFrame:
        derived: dict[str, Any] = {"t": self.t, "n_past_eligible": self.index, "n_past_treated": treated}
        if self.arms == 1:
            derived["p"] = np.where(self.eligible, self.p[:, 1], np.nan)
        else:
            derived |= {f"p_{k}": np.where(self.eligible, self.p[:, k], np.nan) for k in range(1, self.arms + 1)}
        frame = pd.DataFrame(derived)
        for name in self.features:
            if name in ("arm", "eligible", "outcome", "trajectory"):
                raise InputError(f"features: `{name}` is not known before the coin; leave it out of `features`.")
            if name in frame.columns:
                continue
            if name in self.decisions.columns:
                column = self.decisions[name]
            elif name in self.trajectories.columns:
                column = self.trajectories[name].iloc[self.unit].reset_index(drop=True)
            else:
                raise InputError(f"features: `{name}` is a column of neither table.")
            holes = column.isna() & self.eligible
            if holes.any():
                row = int(np.argmax(holes.to_numpy()))
                raise InputError(
                    f"features: `{name}` is missing at eligible row {row}; fill it and add an indicator feature."
                )
            frame[name] = column
        return frame


def _renamed(table: pd.DataFrame, columns: Mapping[str, str] | None, what: str) -> pd.DataFrame:
    if not isinstance(table, pd.DataFrame):
        raise InputError(f"{what} table: got {type(table).__name__}; expected a pandas DataFrame.")
    here = {theirs: ours for ours, theirs in (columns or {}).items() if theirs in table.columns and theirs != ours}
    hidden = [ours for ours in here.values() if ours in table.columns and ours not in here]
    if hidden:
        raise InputError(f"{what} table: `{hidden[0]}` is there already, so another column cannot be mapped to it.")
    renamed = table.rename(columns=here)
    if renamed.columns.duplicated().any():
        name = renamed.columns[renamed.columns.duplicated()][0]
        raise InputError(f"{what} table: two columns are called `{name}`.")
    return renamed


def _need(table: pd.DataFrame, names: Sequence[str], what: str) -> None:
    absent = [n for n in names if n not in table.columns]
    if absent:
        raise InputError(f"{what} table: column `{absent[0]}` is not there; name it or map it with columns=.")


def _probability_columns(table: pd.DataFrame) -> tuple[str, ...]:
    if "p" in table.columns:
        return ("p",)
    found: list[str] = []
    while f"p_{len(found) + 1}" in table.columns:
        found.append(f"p_{len(found) + 1}")
    if not found:
        raise InputError("decisions table: no probability column; expected `p` (one treatment) or `p_1` .. `p_K`.")
    return tuple(found)


def _numbers(column: pd.Series[Any], table: str, name: str, mend: str) -> Floats:
    if not pd.api.types.is_numeric_dtype(column):
        raise InputError(f"{table} table: `{name}` has dtype {column.dtype}; expected numbers.")
    values = column.to_numpy(dtype=float, na_value=np.nan)
    bad = ~np.isfinite(values)
    if bad.any():
        raise InputError(f"{table} table: `{name}` is missing or infinite in row {int(np.argmax(bad))}; {mend}.")
    return np.asarray(values, dtype=np.float64)


def _whole(column: pd.Series[Any], name: str) -> Ints:
    values = _numbers(column, "decisions", name, "expected a whole number in every row")
    if (values != np.floor(values)).any():
        raise InputError(f"decisions table: `{name}` has fractions; expected whole numbers.")
    return values.astype(np.int64)


def _flags(column: pd.Series[Any]) -> Bools:
    values = _numbers(column, "decisions", "eligible", "expected True/False or 0/1 in every row")
    if not np.isin(values, (0, 1)).all():
        raise InputError("decisions table: `eligible` holds other values than True/False or 0/1.")
    return np.asarray(values == 1, dtype=np.bool_)
