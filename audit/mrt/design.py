"""From a formula or column names to a design matrix, from a policy to probabilities; nothing after the coin gets in.

Knows: which columns existed before the coin (`MRTData.frame` holds no others), what a formula may call. Hides: patsy.

A formula is Python to patsy, so it is held to names, operators and a short list of functions before patsy sees it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import patsy

from audit.mrt.data import Bools, Floats, MRTData
from envs.core import InputError

Rule = str | float | Callable[[pd.DataFrame], Any]
Effect = str | Sequence[str] | Mapping[str, Any]

_CALLS = {
    "C",
    "I",
    "Q",
    "Treatment",
    "bs",
    "cr",
    "cc",
    "center",
    "standardize",
    "np.log",
    "np.log1p",
    "np.exp",
    "np.sqrt",
    "np.abs",
}
_CALLS |= {"np.minimum", "np.maximum"}
_CALL = re.compile(r"([A-Za-z_][\w.]*)\s*\(")
_SAFE = re.compile(r"[\w\s.+\-*/:~()<>=!&|,%\"'^]*\Z")


def formula_matrix(formula: str, frame: pd.DataFrame, what: str = "effect") -> tuple[Floats, tuple[str, ...]]:
    """Design matrix (rows, columns) and column names of a one-sided formula such as "~ S + C(tool)".

    Allowed calls: C (with Treatment), I, Q, bs, cr, cc, center, standardize and np.log, log1p, exp, sqrt, abs, minimum,
    maximum. Raises InputError for a column that is not a declared feature, a call not listed, a missing value.
    """
    text = formula if "~" in formula else f"~ {formula}"
    if not _SAFE.match(text) or "__" in text or text.split("~")[0].strip():
        raise InputError(f"{what}: formula {formula!r} must be one-sided (~ terms) and of names, operators and calls.")
    called = set(_CALL.findall(text))
    names = set(re.findall(r"(?<![\w.\"'])[A-Za-z_]\w*(?:\.\w+)+", text))
    if not called <= _CALLS or not names <= _CALLS:
        raise InputError(
            f"{what}: formula {formula!r} calls {sorted((called | names) - _CALLS)[0]}; allowed: {sorted(_CALLS)}."
        )
    environment = patsy.EvalEnvironment([{"np": np}])
    try:
        matrix = patsy.dmatrix(text, _coded(frame, text), eval_env=environment, NA_action="raise")
    except (patsy.PatsyError, SyntaxError, NameError, KeyError, TypeError, ValueError) as error:
        first = str(error).split("\n", maxsplit=1)[0]
        raise InputError(
            f"{what}: formula {formula!r} fails ({first}); its columns must be declared features without missing "
            f"values, here {list(frame.columns)}."
        ) from error
    values = np.asarray(matrix, dtype=np.float64)
    return values, tuple(str(n) for n in matrix.design_info.column_names)


def _coded(frame: pd.DataFrame, formula: str) -> pd.DataFrame:
    """Text as categories with sorted levels: what patsy makes of it anyway, row by row in Python."""
    words = [name for name in frame.columns if name in formula and not pd.api.types.is_numeric_dtype(frame[name])]
    return frame.assign(**{name: pd.Categorical(frame[name]) for name in words})


@dataclass(frozen=True)
class Projection:
    """What the effect is projected on. matrix: (rows, q). grouped: columns are groups, each estimated on its own.

    exclusive: no row is in two groups (always so for a plain design).
    """

    matrix: Floats
    names: tuple[str, ...]
    grouped: bool
    exclusive: bool = True


def projection(effect: Effect, frame: pd.DataFrame) -> Projection:
    """Read `effect`: "pooled"; a column or columns (a group a level or a combination of levels); a mapping name ->
    boolean column or rule (groups that may overlap); a formula (contains "~"). Raises InputError otherwise."""
    if isinstance(effect, str) and "~" in effect:
        matrix, names = formula_matrix(effect, frame)
        return Projection(matrix, tuple("Intercept" if n == "Intercept" else n for n in names), False)
    if effect == "pooled":
        return Projection(np.ones((len(frame), 1)), ("pooled",), True)
    if isinstance(effect, Mapping):
        if not effect:
            raise InputError("effect: no group given; name at least one.")
        matrix = np.column_stack([rule_values(rule, frame, f"group {name}") for name, rule in effect.items()])
        if not np.isin(matrix, (0, 1)).all():
            raise InputError("effect: groups must be boolean; use a formula for moderators with other values.")
        return Projection(matrix, tuple(map(str, effect)), True, bool((matrix.sum(axis=1) <= 1).all()))
    columns = [effect] if isinstance(effect, str) else list(effect)
    absent = [c for c in columns if c not in frame.columns]
    if absent or not columns:
        raise InputError(
            f"effect: {absent or effect!r} is neither 'pooled', a formula (~ ...) nor a declared feature; "
            f"features: {list(frame.columns)}."
        )
    labels = frame[columns].astype(str).agg(", ".join, axis=1) if len(columns) > 1 else frame[columns[0]]
    codes, levels = pd.factorize(labels, sort=True)
    matrix = (codes[:, None] == np.arange(len(levels))).astype(np.float64)
    head = ", ".join(columns)
    return Projection(matrix, tuple(f"{head}={level}" for level in levels), True)


def rule_values(rule: Rule, frame: pd.DataFrame, what: str) -> Floats:
    """(rows,) values of a rule: a feature's name, a constant, or a function of the feature frame."""
    if isinstance(rule, str):
        if rule not in frame.columns:
            raise InputError(f"{what}: `{rule}` is no declared feature; features: {list(frame.columns)}.")
        values = frame[rule].to_numpy(dtype=float, na_value=np.nan)
    elif callable(rule):
        values = np.asarray(rule(frame), dtype=float)
    else:
        values = np.full(len(frame), float(rule))
    if values.shape[:1] != (len(frame),) or not np.isfinite(values).all():
        raise InputError(
            f"{what}: the rule gives shape {values.shape} or missing values; expected {len(frame)} numbers."
        )
    return values


def policy_probabilities(rule: Rule, data: MRTData, rows: Bools, what: str) -> Floats:
    """(rows, K + 1) probability of each arm under a target policy at the LOGGED histories of `rows`.

    rule: feature name, constant or function of the feature frame; (rows,) probability of arm 1 with one treatment,
    (rows, K) probabilities of arms 1..K otherwise. Raises InputError unless these are probabilities.
    """
    values = rule_values(rule, data.frame.loc[rows], what)
    values = values[:, None] if values.ndim == 1 else values
    if values.shape[1] != data.arms:
        raise InputError(f"{what}: gives {values.shape[1]} probabilities a row; expected one an arm, {data.arms}.")
    full = np.column_stack([1 - values.sum(axis=1), values])
    if (full < -1e-12).any():
        raise InputError(f"{what}: values are not probabilities; expected numbers in [0, 1] that sum to at most 1.")
    return np.asarray(np.clip(full, 0, 1), dtype=np.float64)


def nuisance_matrix(spec: str | Sequence[str] | None, data: MRTData, rows: Bools) -> Floats:
    """(rows, d) features for nuisance models; see `nuisance_columns`."""
    return nuisance_columns(spec, data, rows)[0]


def nuisance_columns(spec: str | Sequence[str] | None, data: MRTData, rows: Bools) -> tuple[Floats, tuple[str, ...]]:
    """Features for nuisance models (rows, d), first column ones, and their names; default all declared features and
    history counts.

    spec: a formula, names of features, or None. Text and categories become indicators; constants drop out.
    """
    frame = data.frame.loc[rows]
    if isinstance(spec, str):
        return formula_matrix(spec, frame, "nuisance")
    names = list(frame.columns) if spec is None else list(spec)
    parts, labels = [np.ones((len(frame), 1))], ["Intercept"]
    for name in names:
        if name not in frame.columns:
            raise InputError(f"nuisance: `{name}` is no declared feature; features: {list(frame.columns)}.")
        column = frame[name]
        if pd.api.types.is_numeric_dtype(column):
            values, found = column.to_numpy(dtype=float)[:, None], [name]
        else:
            codes, levels = pd.factorize(column, sort=True)
            values = (codes[:, None] == np.arange(1, len(levels))).astype(float)
            found = [f"{name}={level}" for level in levels[1:]]
        varies = (values != values[:1]).any(axis=0)
        parts.append(values[:, varies])
        labels += [label for label, keep in zip(found, varies, strict=True) if keep]
    return np.column_stack(parts), tuple(labels)
