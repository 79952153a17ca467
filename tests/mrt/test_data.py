"""Bad tables: each gives one clear error; good ones survive mapping, codes and folds unchanged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.mrt import MRTData, blip
from audit.mrt.design import formula_matrix
from envs.core import InputError


def tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    decisions = pd.DataFrame(
        {
            "trajectory": ["a", "a", "b", "b", "c", "c"],
            "t": [1, 2, 1, 2, 1, 3],
            "eligible": [True, True, True, False, True, True],
            "arm": [0, 1, 1, 0, 0, 1],
            "p": [0.4, 0.6, 0.4, 0.0, 0.5, 0.5],
            "x": [1.0, 2.0, 3.0, np.nan, 5.0, 6.0],
            "tool": ["go", "go", "put", "put", "go", "put"],
        }
    )
    trajectories = pd.DataFrame({"trajectory": ["c", "a", "b", "d"], "outcome": [1.0, 0.0, 1.0, 0.5]})
    return decisions, trajectories


Change = Callable[[pd.DataFrame, pd.DataFrame], tuple[pd.DataFrame, pd.DataFrame]]
BAD: dict[str, tuple[Change, str]] = {
    "arm where ineligible": (lambda d, t: (d.assign(arm=[0, 1, 1, 1, 0, 1]), t), "not eligible"),
    "p of 0": (lambda d, t: (d.assign(p=[0.0, 0.6, 0.4, 0, 0.5, 0.5]), t), "strictly between 0 and 1"),
    "p of 1": (lambda d, t: (d.assign(p=[0.4, 1.0, 0.4, 0, 0.5, 0.5]), t), "strictly between 0 and 1"),
    "p missing": (lambda d, t: (d.assign(p=[0.4, np.nan, 0.4, 0, 0.5, 0.5]), t), "strictly between 0 and 1"),
    "outcome missing": (lambda d, t: (d, t.assign(outcome=[1, np.nan, 0, 1])), "`outcome` is missing"),
    "outcome infinite": (lambda d, t: (d, t.assign(outcome=[1, np.inf, 0, 1])), "`outcome` is missing or infinite"),
    "unsorted in t": (lambda d, t: (d.iloc[[1, 0, 2, 3, 4, 5]], t), "unsorted"),
    "unsorted trajectories": (lambda d, t: (d.iloc[[0, 2, 1, 3, 4, 5]], t), "unsorted"),
    "doubled decision": (lambda d, t: (d.iloc[[0, 0, 1, 2, 3, 4, 5]], t), "two rows at t=1"),
    "doubled trajectory": (lambda d, t: (d, pd.concat([t, t.iloc[[0]]])), "'c' has two rows"),
    "stray trajectory": (lambda d, t: (d, t.iloc[[0, 1, 3]]), "'b' has no row in the trajectories table"),
    "arm as text": (lambda d, t: (d.assign(arm=["no", "yes"] * 3), t), "expected numbers"),
    "arm with fractions": (lambda d, t: (d.assign(arm=[0, 0.5, 1, 0, 0, 1]), t), "fractions"),
    "arm unknown": (lambda d, t: (d.assign(arm=[0, 2, 1, 0, 0, 1]), t), "expected 0..1"),
    "arm missing": (lambda d, t: (d.assign(arm=[0, np.nan, 1, 0, 0, 1]), t), "`arm` is missing"),
    "p as text": (lambda d, t: (d.assign(p=["0.5"] * 6), t), "expected floats"),
    "t as text": (lambda d, t: (d.assign(t=list("121213")), t), "expected numbers"),
    "eligible of 2": (lambda d, t: (d.assign(eligible=2), t), "True/False or 0/1"),
    "outcome as text": (lambda d, t: (d, t.assign(outcome=["won"] * 4)), "expected numbers"),
    "constant treatment": (lambda d, t: (d.assign(arm=0), t), "treatment is constant"),
    "nobody eligible": (lambda d, t: (d.assign(eligible=False, arm=0), t), "nothing was randomised"),
    "single cluster": (lambda d, t: (d, t.assign(task="one")), "single cluster"),
    "cluster missing": (lambda d, t: (d, t.assign(task=["x", None, "y", "z"])), "missing values"),
    "no probability": (lambda d, t: (d.drop(columns="p"), t), "no probability column"),
    "no eligibility": (lambda d, t: (d.drop(columns="eligible"), t), "column `eligible` is not there"),
    "key missing": (lambda d, t: (d.assign(trajectory=[None, *"aabbc"]), t), "`trajectory` is missing"),
    "two columns of one name": (lambda d, t: (d.assign(u=1).rename(columns={"u": "t"}), t), "two columns"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_bad_tables_give_one_clear_error(name: str) -> None:
    change, message = BAD[name]
    MRTData(*tables())
    with pytest.raises(InputError, match=message) as caught:
        MRTData(*change(*tables()))
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 300


def test_probabilities_of_several_arms_must_leave_some_for_arm_zero() -> None:
    decisions, trajectories = tables()
    bad = decisions.drop(columns="p").assign(p_1=0.6, p_2=0.4)
    with pytest.raises(InputError, match=r"\[0.0, 0.6, 0.4\]"):
        MRTData(bad, trajectories)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (["x"], "missing at eligible row 1"),
        (["nothing"], "column of neither table"),
        (["arm"], "not known before the coin"),
    ],
)
def test_features_are_checked(features: list[str], message: str) -> None:
    decisions, trajectories = tables()
    decisions.loc[1, "x"] = np.nan
    with pytest.raises(InputError, match=message):
        MRTData(decisions, trajectories, features=features)


def test_missing_features_are_allowed_where_nobody_is_eligible() -> None:
    data = MRTData(*tables(), features=["x", "tool"])
    assert data.frame.loc[data.eligible, "x"].tolist() == [1, 2, 3, 5, 6]


def test_codes_follow_the_trajectories_table() -> None:
    data = MRTData(*tables())
    assert data.unit.tolist() == [1, 1, 2, 2, 0, 0]
    assert data.y[data.unit].tolist() == [0, 0, 1, 1, 1, 1]
    assert data.p[3].tolist() == [1, 0]
    assert data.frame["n_past_eligible"].tolist() == [0, 1, 0, 1, 0, 1]
    assert data.frame["n_past_treated"].tolist() == [0, 0, 0, 1, 0, 0]


def test_columns_can_be_mapped_and_a_long_table_split() -> None:
    decisions, trajectories = tables()
    long = decisions.merge(trajectories).rename(columns={"trajectory": "id", "arm": "A", "outcome": "Y"})
    data = MRTData.from_long(long, columns={"trajectory": "id", "arm": "A", "outcome": "Y"}, features=["tool"])
    assert data.n == 3
    assert sorted(data.y) == [0, 1, 1]
    with pytest.raises(InputError, match="varies within a trajectory"):
        MRTData.from_long(long.assign(Y=range(6)), columns={"trajectory": "id", "arm": "A", "outcome": "Y"})
    with pytest.raises(InputError, match="there already"):
        MRTData(decisions.assign(A=0), trajectories, columns={"arm": "A"})


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 40), st.integers(1, 10), st.integers(0, 10))
def test_folds_split_clusters_evenly(tasks: int, k: int, seed: int) -> None:
    k = min(k, tasks)
    n = 3 * tasks
    decisions = pd.DataFrame(
        {"trajectory": np.arange(n), "t": 1, "eligible": 1, "arm": np.arange(n) % 2, "p": np.full(n, 0.5)}
    )
    trajectories = pd.DataFrame({"trajectory": np.arange(n), "outcome": 0.0, "task": np.arange(n) // 3})
    data = MRTData(decisions, trajectories)
    fold = data.folds(k, seed=seed)
    by_task = pd.Series(fold).groupby(np.arange(n) // 3).nunique()
    assert (by_task == 1).all()
    counts = np.bincount(fold[::3], minlength=k)
    assert counts.max() - counts.min() <= 1
    with pytest.raises(InputError, match="folds"):
        data.folds(tasks + 1)


def test_formulas_read_text_columns() -> None:
    rng = np.random.default_rng(0)
    n = 200
    decisions = pd.DataFrame(
        {
            "trajectory": np.arange(n).astype(str),
            "t": 1,
            "eligible": True,
            "arm": np.arange(n) % 2,
            "p": 0.5,
            "tool kind": rng.choice(["go", "put", "take"], n),
        }
    )
    trajectories = pd.DataFrame({"trajectory": np.arange(n).astype(str), "outcome": rng.standard_normal(n)})
    data = MRTData(decisions, trajectories, features=["tool kind"])
    by_formula = blip(data, effect='~ 0 + Q("tool kind")')
    by_group = blip(data, effect="tool kind")
    np.testing.assert_allclose(by_formula.estimate, by_group.estimate)
    assert by_group.names == ("tool kind=go", "tool kind=put", "tool kind=take")
    shifted = blip(data, effect="~ C(Q('tool kind'), Treatment('put'))")
    assert shifted.estimate[0] == pytest.approx(by_group.estimate[1])


@pytest.mark.parametrize(
    "formula",
    [
        "~ __import__('os')",
        "~ x.sum()",
        "~ open('f')",
        "y ~ x",
        "~ np.random.rand(3)",
        "~ x[0]",
        "~ {x}",
        "~ lambda: 1",
    ],
)
def test_formulas_cannot_call_what_they_like(formula: str) -> None:
    with pytest.raises(InputError):
        blip(MRTData(*tables(), features=["x", "tool"]), effect=formula, folds=2)


@pytest.mark.parametrize("formula", ["my col", "a +", "C(a", "`a`", "__import__('os')", "open('x')", "b"])
def test_a_formula_that_cannot_be_read_gives_one_sentence(formula: str) -> None:
    with pytest.raises(InputError, match="formula"):
        formula_matrix(formula, pd.DataFrame({"a": [1.0, 2.0]}))
