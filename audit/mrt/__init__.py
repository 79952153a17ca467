"""Micro-randomised trials: randomise an intervention inside trajectories and estimate what it changed.

`MRTData` checks the two tables; `blip` estimates effects of single decisions, `policy_gain` the value of target
policies; `classic` holds WCLS, EMEE and DCEE; `diagnostics` says whether the data can carry any of it.
"""

from audit.mrt.blip import Blips, blip
from audit.mrt.data import MRTData
from audit.mrt.gain import Gains, policy_gain
from audit.mrt.results import Effects, stack

__all__ = ["Blips", "Effects", "Gains", "MRTData", "blip", "policy_gain", "stack"]
