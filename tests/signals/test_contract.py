"""What a signal must obey, how signals are found, and that each breach is caught."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import credit_signals
from credit_signals import (
    REGISTRY,
    Hindsight,
    Missing,
    SignalError,
    SignalPoint,
    check_signal,
    known_signals,
    load_signals,
    score,
)


def trajectory(name: str, n: int, *, won: bool = True) -> list[SignalPoint]:
    commands = tuple(f"go to desk {i % 3}" for i in range(n))
    seen = tuple(f"seen {i}" for i in range(n + 1))
    return [
        SignalPoint(
            point=f"{name}{step}",
            trajectory=name,
            game="g",
            task_type=None,
            step=step,
            steps_left=50 - step,
            commands=commands[:step],
            observations=seen[: step + 1],
            action=commands[step],
            logprob=-0.1 * (step + 1),
            tokens=1,
            hindsight=Hindsight(won, commands, seen),
        )
        for step in range(n)
    ]


POINTS = [*trajectory("b", 5), *trajectory("a", 4, won=False)]


class Good:
    name = "good"
    view = "prefix"

    def score(self, points: Sequence[SignalPoint]) -> list[object]:
        return [float(p.step**2) for p in points]


def variant(**changes: object) -> object:
    return type("Variant", (Good,), changes)()


def test_a_good_signal_passes_and_answers_in_the_order_asked() -> None:
    check_signal(Good(), POINTS)
    shuffled = [POINTS[i] for i in (3, 8, 0, 5, 1, 7, 2, 6, 4)]
    assert score(Good(), shuffled).values == tuple(float(p.step**2) for p in shuffled)


def test_a_prefix_signal_does_not_see_the_outcome() -> None:
    seen = []

    def peek(self: object, points: Sequence[SignalPoint]) -> list[float]:
        seen.extend(p.hindsight for p in points)
        return [float(p.step) for p in points]

    score(variant(score=peek), POINTS)
    assert set(seen) == {None}
    seen.clear()
    score(variant(score=peek, view="hindsight"), POINTS)
    assert {h.won for h in seen} == {True, False}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda self, points: [0.0 for _ in points], "is 0 at every point"),
        (lambda self, points: [1.0], "gave 1 values for 9 points"),
        (lambda self, points: [math.nan for _ in points], "Missing"),
        (lambda self, points: [math.inf for _ in points], "gave inf"),
        (lambda self, points: ["high" for _ in points], "expected a number"),
        (lambda self, points: [Missing(" ") for _ in points], "without a reason"),
        (lambda self, points: [1 / 0 for _ in points], "failed .ZeroDivisionError"),
    ],
)
def test_what_is_no_answer(answer: object, said: str) -> None:
    with pytest.raises(SignalError, match=said):
        score(variant(score=answer), POINTS)


def test_missing_is_missing_with_a_reason() -> None:
    found = score(variant(score=lambda self, points: [None, *(float(p.step) for p in points[1:])]), POINTS)
    assert math.isnan(found.values[5]) and found.reasons[5] == "the signal gave no value"  # first of trajectory a
    assert found.reasons[0] is None and found.values[0] == 0.0


def test_breaches_that_only_show_on_a_second_look() -> None:
    counter = itertools.count()
    breaches = {
        "two calls give different values": lambda self, points: [float(next(counter)) for _ in points],
        "other trajectories": lambda self, points: [p.step / len(points) for p in points],
        "later points": lambda self, points: [
            p.step + max(q.step for q in points if q.trajectory == p.trajectory) for p in points
        ],
        "cannot rank steps": lambda self, points: [float(p.trajectory == "a") for p in points],
    }
    for said, answer in breaches.items():
        with pytest.raises(SignalError, match=said):
            check_signal(variant(score=answer), POINTS)
    with pytest.raises(SignalError, match="two points or more"):
        check_signal(Good(), POINTS[:1])


def test_a_signal_of_ones_own_file(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(
        "class Novelty:\n"
        '    name = "novelty"\n'
        '    view = "prefix"\n\n'
        "    def score(self, points):\n"
        "        return [1.0 / (1 + p.commands.count(p.action)) for p in points]\n"
    )
    [signal] = load_signals([f"{file}:Novelty"])
    check_signal(signal, POINTS)
    assert score(signal, POINTS).values[:5] == (1.0, 1.0, 1.0, 0.5, 0.5)
    with pytest.raises(SignalError, match="cannot be loaded"):
        load_signals([f"{file}:Nosuch"])
    with pytest.raises(SignalError, match="no such file"):
        load_signals([f"{tmp_path}/other.py:Novelty"])
    file.write_text("class Novelty:\n    name = 'novelty'\n    view = 'sideways'\n    def score(self, points): ...\n")
    with pytest.raises(SignalError, match="sideways"):
        load_signals([f"{file}:Novelty"])


def test_names_families_and_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {s.name for s in load_signals(["confidence"])} == {
        "confidence.logp",
        "confidence.margin",
        "confidence.entropy",
        "confidence.verbalised",
    }
    for name in REGISTRY:
        assert load_signals([name])[0].name == name
    with pytest.raises(SignalError, match="two signals have this name"):
        load_signals(["confidence", "confidence.logp"])
    with pytest.raises(SignalError, match="no such signal; expected"):
        load_signals(["confidenc"])
    entry = importlib.metadata.EntryPoint("theirs.step", "credit_signals.baselines:STEP", credit_signals.ENTRY_POINTS)
    monkeypatch.setattr(credit_signals, "entry_points", lambda group: [entry])
    assert known_signals()["theirs.step"] == entry.value
    assert load_signals(["theirs.step"])[0].name == "baseline.step"


def test_attributes_are_checked() -> None:
    for bad, said in (
        ({"needs": ("truth",)}, "needs 'truth'"),
        ({"importance": "big"}, "importance"),
        ({"name": "a:b"}, "colon"),
    ):
        with pytest.raises(SignalError, match=said):
            credit_signals._instance(variant(**bad), "x")


def test_points_are_frozen() -> None:
    with pytest.raises(AttributeError):
        POINTS[0].action = "look"  # type: ignore[misc]
    assert replace(POINTS[0], action="look").action == "look"
