"""Micro-randomised trials: randomise an intervention inside trajectories and estimate what it changed.

`MRTData` checks the two tables; `blip` estimates effects of single decisions, `policy_gain` the value of target
policies, `impact_scores` ranks kinds of decisions; `classic` holds WCLS, EMEE and DCEE; `positivity`,
`randomization_check` and `transport_check` say whether the data can carry any of it.
"""

from audit.mrt.blip import Blips, blip
from audit.mrt.data import MRTData
from audit.mrt.diagnostics import policy_positivity, positivity, randomization_check, transport_check
from audit.mrt.gain import Gains, policy_gain
from audit.mrt.impact import Leaderboard, impact_scores, select_representation
from audit.mrt.results import Effects, stack

__all__ = [
    "Blips",
    "Effects",
    "Gains",
    "Leaderboard",
    "MRTData",
    "blip",
    "impact_scores",
    "policy_gain",
    "policy_positivity",
    "positivity",
    "randomization_check",
    "select_representation",
    "stack",
    "transport_check",
]
