"""Comparison of signals with effects: which signals know which steps mattered.

Knows: which statistic stands beside which chance, and what a verdict means. Hides: the join, the shuffles, the
resampling. It takes frames and never imports a signal: a column is a signal, wherever it comes from.

Definitions: ../shared/statistics-replay.md, section 5. Every estimate has two comparisons with chance, and both must
hold for `better`: an interval over games (cluster bootstrap) and the shuffles of the signal within its trajectories.
"""

from audit.comparison.compare import Comparison, Difference, compare, compare_run, side_by_side
from audit.comparison.confirm import confirm, family
from audit.comparison.controls import controls
from audit.comparison.measures import MEASURES
from audit.comparison.router import Router, router

__all__ = [
    "MEASURES",
    "Comparison",
    "Difference",
    "Router",
    "compare",
    "compare_run",
    "confirm",
    "controls",
    "family",
    "router",
    "side_by_side",
]
