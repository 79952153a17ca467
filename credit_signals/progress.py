"""Progress: whether the step shortened the way to the goal, by the world's own state.

Knows: how a change of plan length reads. Hides: nothing. It is close to an oracle of step correctness (it looks at
the game's state, which no agent sees), so it says what an ideal process reward could know, not what one does know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from credit_signals import SignalPoint, Value, View


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """Steps of a shortest plan before the action minus after it: +1 on the way, 0 idle, -1 or less astray."""

    name: str = "progress.plan"
    view: View = "prefix"
    needs: tuple[str, ...] = ("plan",)
    importance: str = "absolute"

    def score(self, points: Sequence[SignalPoint]) -> list[Value]:
        """One number a point."""
        return [self._change(point) for point in points]

    def _change(self, point: SignalPoint) -> Value:
        if point.plan_before is None:
            return point.missing("plan_before")
        if point.plan_after is None:
            return point.missing("plan_after")
        return float(point.plan_before - point.plan_after)


PLAN = PlanProgress()
