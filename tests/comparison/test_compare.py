"""The join, what a comparison holds, and what it refuses or says aloud."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pandas as pd
import pytest

from audit.comparison import MEASURES, Comparison, compare, controls, router, side_by_side
from audit.comparison.controls import ORACLE, PERMUTED
from audit.plan import Hypothesis
from envs.core import InputError

from .dgp import World, study

FAST = {"draws": 400, "shuffles": 200}


@pytest.fixture(scope="module")
def frames() -> tuple[pd.DataFrame, pd.DataFrame]:
    return study(World(games=16, per_game=1, strength=0.7), np.random.default_rng(0))


@pytest.fixture(scope="module")
def compared(frames: tuple[pd.DataFrame, pd.DataFrame]) -> Comparison:
    effects, signals = frames
    extra = signals.assign(
        half=signals["signal"].where(np.arange(len(signals)) % 2 == 0),
        flat=1.0,
        silent=np.nan,
        noise=np.random.default_rng(1).normal(size=len(signals)),
    )
    extra["silent:why"] = "the policy does not tell"
    extra["half:why"] = pd.Series(np.where(extra["half"].isna(), "not said", None), dtype="string")
    hypotheses = (
        Hypothesis("H1", "the signal ranks steps", "signal", "spearman"),
        Hypothesis("H2", "noise does not", "noise", "equivalence:spearman"),
        Hypothesis("H3", "about something else"),
    )
    return compare(effects, extra, hypotheses=hypotheses, **FAST)


def test_every_signal_has_every_measure_beside_both_controls(compared: Comparison) -> None:
    frame = compared.to_frame()
    assert set(frame["measure"]) == set(MEASURES)
    assert set(frame["signal"]) == {"signal", "half", "flat", "silent", "noise", ORACLE, PERMUTED}
    assert not frame.duplicated(["signal", "measure"]).any()
    found = frame.set_index(["signal", "measure"])
    assert found.loc[("signal", "spearman"), "verdict"] == "better"
    assert found.loc[(ORACLE, "spearman"), "verdict"] == "better"
    assert found.loc[(PERMUTED, "spearman"), "verdict"] != "better"
    assert found.loc[(ORACLE, "auc"), "verdict"] == "better"
    assert found["verdict"].dropna().isin(["better", "equivalent", "inconclusive"]).all()


def test_what_is_missing_has_a_reason_and_is_counted(compared: Comparison) -> None:
    flat = compared.frame[compared.frame["signal"] == "flat"].set_index("measure")
    assert np.isnan(flat.loc["spearman", "estimate"]) and "nothing varies" in flat.loc["spearman", "note"]
    assert "one sign" in flat.loc["sign", "note"]
    assert flat.loc["spearman", "verdict"] == "inconclusive"
    silent = compared.frame[compared.frame["signal"] == "silent"]
    assert silent["estimate"].isna().all() and (silent["note"] == "no value: the policy does not tell").all()
    coverage = compared.coverage.set_index("signal")
    assert coverage.loc["half", "reason"] == "not said"
    assert coverage.loc["half", "compared"] + coverage.loc["half", "missing"] == coverage.loc["half", "points"]


def test_the_confirmatory_family_and_the_rest(compared: Comparison) -> None:
    table = compared.confirmed.set_index("hypothesis")
    assert table["tested"].tolist() == [True, True, False]
    assert table.loc["H1", "p_holm"] >= table.loc["H1", "p"]
    assert np.isnan(table.loc["H3", "p_holm"])
    roles = compared.frame.set_index(["signal", "measure"])["role"]
    assert roles["signal", "spearman"] == roles["noise", "spearman"] == "confirmatory"
    assert roles["signal", "auc"] == "exploratory" and roles[ORACLE, "auc"] == "control"


def test_differences_are_paired(compared: Comparison) -> None:
    itself = compared.difference("signal", "signal")
    assert (itself.estimate, itself.low, itself.high) == (0.0, 0.0, 0.0)
    real = compared.difference("signal", "noise")
    assert real.low > 0 and real.p < 0.05
    assert real.estimate == pytest.approx(-compared.difference("noise", "signal").estimate)
    assert len(compared.differences()) == 7 * 6 / 2
    with pytest.raises(InputError, match="no such signal"):
        compared.difference("signal", "nosuch")
    with pytest.raises(InputError, match="no such measure"):
        compared.difference("signal", "noise", "pearsons")


def test_the_face_of_a_result(compared: Comparison) -> None:
    summary = compared.summary()
    assert summary["signal"].tolist()[-2:] == [ORACLE, PERMUTED]
    wide, narrow = compared.conf_int(0.01), compared.conf_int()
    key = ("signal", "spearman")
    assert wide.loc[key, "low"] < narrow.loc[key, "low"] <= narrow.loc[key, "high"] < wide.loc[key, "high"]
    assert narrow.loc[key, "low"] == compared.frame.set_index(["signal", "measure"]).loc[key, "low"]
    ax = compared.plot()
    assert [t.get_text() for t in ax.get_yticklabels()][::-1] == summary["signal"].tolist()
    curve = router(compared, "signal")
    ends = curve.to_frame().iloc[[0, -1]]
    assert ends["recall"].tolist() == [0.0, 1.0] and ends["share"].tolist() == [0.0, 1.0]
    assert (curve.conf_int()["low"] <= curve.frame.set_index("share")["recall"] + 1e-12).all()
    assert curve.plot() is not ax
    assert len(curve.summary()) == 5


def test_the_same_seed_gives_the_same_and_the_order_of_rows_does_not_matter(
    frames: tuple[pd.DataFrame, pd.DataFrame],
) -> None:
    effects, signals = frames
    one = compare(effects, signals, **FAST)
    two = compare(effects.sample(frac=1, random_state=0), signals.sample(frac=1, random_state=1), **FAST)
    pd.testing.assert_frame_equal(one.frame, two.frame)


def test_undefined_effects_are_left_out_and_counted(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    effects, signals = frames
    gone = effects["step"] == 0
    some = effects.assign(support=np.where(gone, "no_counterfactual", "defined"))
    some.loc[gone, ["estimate", "variance"]] = np.nan
    found = compare(some, signals, **FAST)
    row = found.coverage.set_index("signal").loc["signal"]
    assert row["defined"] == len(effects) - gone.sum() and row["points"] == len(effects)
    trimmed = compare(effects[~gone], signals, **FAST)
    pd.testing.assert_frame_equal(found.frame, trimmed.frame)


def test_a_signal_that_saw_the_results_is_named(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    effects, signals = study(World(games=30, rollouts=6), np.random.default_rng(3))
    leaky = compare(effects, effects[["point", "estimate"]].rename(columns={"estimate": "leak"}), **FAST)
    assert any("leak" in note and "replay results" in note for note in leaky.notes)
    assert not any("replay results" in note for note in compare(effects, signals, **FAST).notes)


def test_without_any_effect_the_oracle_says_that_nothing_can_be_found() -> None:
    effects, signals = study(World(games=16, spread=1e-9, rollouts=8), np.random.default_rng(4))
    noise = np.random.default_rng(8).normal(size=len(effects))
    flat = effects.assign(estimate=0.0, variance=0.0, state="negligible")
    found = compare(flat, signals.assign(signal=noise), **FAST)
    assert any("planted oracle was not found" in note for note in found.notes)
    assert set(found.frame.loc[found.frame["measure"] == "auc", "note"]) == {"no point is pivotal"}
    with pytest.raises(InputError, match="no pivotal point"):
        router(found, "signal")


def test_equivalence_needs_reliable_effects() -> None:
    """With effects that are all noise every signal is near chance; that is no evidence that it is no good."""
    world = World(games=40, per_game=3, points=(20, 30), spread=0.02, rollouts=8)
    effects, signals = study(world, np.random.default_rng(3))
    found = compare(effects, signals, **FAST).frame.set_index(["signal", "measure"])
    row = found.loc[("signal", "spearman")]
    assert -0.1 < row["low"] < row["high"] < 0.1  # inside the margin, as it stands
    assert row["verdict"] == "inconclusive" and np.isnan(row["corrected_high"]) and "too noisy" in row["uncorrected"]


def test_the_noise_of_the_shuffles_never_lowers_chance() -> None:
    """Else an interval that ends at exactly 0 would lie "above" it."""
    for seed in range(6):
        frames = study(World(games=12, per_game=1, strength=0.0), np.random.default_rng(seed))
        found = compare(*frames, seed=seed, **FAST).frame
        ranked = found["measure"].isin(["spearman", "spearman_abs", "kendall", "kendall_abs", "pearson"])
        assert (found.loc[ranked, "chance"] >= 0).all()


def test_runs_side_by_side() -> None:
    rng = np.random.default_rng(6)
    strong, weak = (study(World(games=20, strength=s, wander=0.0), rng) for s in (0.8, 0.0))
    done, table = side_by_side({"strong": strong, "weak": weak}, **FAST)
    assert set(done) == {"strong", "weak"} and table["paired"].all()
    row = table.set_index("signal").loc["signal"]
    assert row["low"] > 0 and row["first"] == "strong"
    elsewhere = (weak[0].assign(game="x" + weak[0]["game"]), weak[1])
    _, apart = side_by_side({"strong": strong, "weak": elsewhere}, **FAST)
    assert not apart["paired"].any() and apart.set_index("signal").loc["signal", "low"] > 0
    _, same = side_by_side({"a": strong, "b": strong}, **FAST)
    assert (same.set_index("signal").loc["signal", ["low", "high"]] == 0).all()
    with pytest.raises(InputError, match="two runs"):
        side_by_side({"one": strong})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e, s: (e.drop(columns="game"), s), "no column 'game'"),
        (lambda e, s: (e, s.drop(columns="point")), "no column 'point'"),
        (lambda e, s: (e, s[["point"]]), "no column but their keys"),
        (lambda e, s: (e, pd.concat([s, s.head(1)])), "twice in the signals"),
        (lambda e, s: (pd.concat([e, e.head(1)]), s), "twice in the effects"),
        (lambda e, s: (e, s.assign(point="x" + s["point"])), "no point of the effects"),
        (lambda e, s: (e, s.assign(signal="high")), "not numeric"),
        (lambda e, s: (e, s.assign(signal=np.inf)), "infinite"),
        (lambda e, s: (e.assign(support="error"), s), "no effect is defined"),
        (lambda e, s: (e, s.rename(columns={"signal": ORACLE})), "name of a control"),
    ],
)
def test_frames_that_do_not_fit(frames: tuple[pd.DataFrame, pd.DataFrame], change, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=said):
        compare(*change(*frames), **FAST)


def test_settings_that_make_no_sense(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    for bad in ({"alpha": 0.7}, {"margin": 0.0}, {"draws": 5}, {"noise": 0.0}, {"importance": {"signal": "big"}}):
        with pytest.raises(InputError):
            compare(*frames, **{**FAST, **bad})
    with pytest.raises(InputError, match="nosuch is no measure"):
        compare(*frames, hypotheses=(Hypothesis("H", "c", "signal", "nosuch"),), **FAST)


def test_the_planted_oracle_has_the_noise_that_was_asked_for(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    effects, _ = study(World(games=200), np.random.default_rng(7))
    for noise in (0.5, 2.0):
        made = controls(effects, noise=noise).merge(effects, on="point")
        assert np.corrcoef(made[ORACLE], made["estimate"])[0, 1] == pytest.approx((1 + noise**2) ** -0.5, abs=0.03)
        for _, part in made.groupby("trajectory"):
            assert sorted(part[ORACLE]) == sorted(part[PERMUTED])
