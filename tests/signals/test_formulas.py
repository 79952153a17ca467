"""The shipped signals on points whose numbers are written down."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from credit_signals import Missing, SignalPoint, load_signals, score

from .test_contract import trajectory


def value(name: str, point: SignalPoint) -> object:
    return load_signals([name])[0].score([point])[0]


WON, LOST = (trajectory("t", 2, won=won)[0] for won in (True, False))
FULL = {
    "logprob": -1.0,
    "tokens": 2,
    "logprob_success": -0.4,
    "logprob_failure": -2.0,
    "logprob_reference": -3.0,
    "probabilities": {"go to desk 0": 0.2, "look": 0.5, "help": 0.3},
    "plan_before": 5,
    "plan_after": 4,
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("confidence.logp", -1.0),
        ("confidence.margin", 0.2 - 0.5),
        ("confidence.entropy", -(0.2 * math.log(0.2) + 0.5 * math.log(0.5) + 0.3 * math.log(0.3))),
        ("implicit.m_no", -0.5),
        ("implicit.m_hind", -0.2),
        ("implicit.delta", 0.3),
        ("implicit.delta_success", 0.3),
        ("implicit.contrast", 0.8),
        ("implicit.sum_no", -1.0),
        ("implicit.sum_hind", -0.4),
        ("implicit.sum_delta", 0.6),
        ("implicit.tokens", 2.0),
        ("implicit.prime", 0.05 * 2.0),
        ("progress.plan", 1.0),
        ("baseline.fluency", -1.0),
        ("baseline.action_type", 1.0),
        ("baseline.action_length", 12.0),
        ("baseline.steps_left", 50.0),
    ],
)
def test_formulas(name: str, expected: float) -> None:
    assert value(name, replace(WON, **FULL)) == pytest.approx(expected)


def test_hindsight_takes_the_trajectorys_own_outcome() -> None:
    assert value("implicit.m_hind", replace(LOST, **FULL)) == pytest.approx(-1.0)
    assert value("implicit.delta", replace(LOST, **FULL)) == pytest.approx(-0.5)
    assert value("implicit.delta_success", replace(LOST, **FULL)) == pytest.approx(0.3)


def test_what_is_not_known_is_missing_with_its_own_reason() -> None:
    bare = replace(WON, logprob=None, tokens=None, why={"logprob": "the log kept none", "belief": "no twin"})
    assert value("confidence.logp", bare) == Missing("the log kept none")
    assert value("implicit.belief_change", bare) == Missing("no twin")
    for name in ("confidence.margin", "implicit.delta", "implicit.prime", "progress.plan", "baseline.text_length"):
        assert isinstance(value(name, bare), Missing), name
    assert value("implicit.prime", replace(WON, **{**FULL, "logprob_reference": -math.inf})) == Missing(
        "the reference policy gives this action probability 0"
    )
    assert isinstance(value("confidence.logp", replace(WON, logprob=-math.inf)), Missing)


def test_hcapo_is_clipped_and_says_so() -> None:
    points = [
        replace(p, logprob_success=logp, tokens=1)
        for p, logp in zip(trajectory("t", 3), (-0.1, -2.0, -9.0), strict=True)
    ]
    raw = [math.exp(logp / 5) for logp in (-0.1, -2.0, -9.0)]
    ratios = [r / (sum(raw) / 3) for r in raw]
    [rho] = load_signals(["implicit.rho"])
    assert rho.score(points) == [pytest.approx(min(max(r, 0.8), 1.2)) for r in ratios]
    assert score(rho, points).flags == tuple(not 0.8 <= r <= 1.2 for r in ratios) == (True, False, True)


def test_belief_change_ends_with_the_outcome() -> None:
    for won in (True, False):
        points = [replace(p, belief=b) for p, b in zip(trajectory("t", 3, won=won), (0.5, 0.7, 0.4), strict=True)]
        [signal] = load_signals(["implicit.belief_change"])
        assert signal.score(points) == [pytest.approx(x) for x in (0.2, -0.3, won - 0.4)]


def test_the_random_signal_follows_from_the_point() -> None:
    points = trajectory("t", 50)
    [signal] = load_signals(["baseline.random"])
    values = signal.score(points)
    assert values == signal.score(points) and len(set(values)) == 50
    assert all(0 <= v < 1 for v in values) and abs(sum(values) / 50 - 0.5) < 0.15
