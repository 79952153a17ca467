"""The policies that come with the package.

Knows: their names, how each was trained, and where their files lie. Hides: the layout of the installed package.

Both are trained on generated games alone, so that anyone can train them again (`audit.train.retrain`). They differ
in character, not in quality: `thorough` learned from a tidy player that searches the room in the order it is
listed, examines what it finds and closes what it opens; it has firm habits, is sure of the next step, and runs
out of steps. `hasty` learned from a player that goes straight to the likeliest places; it has hunches and no
habits, is unsure between many places, and forgets what it has done to the thing in its hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "thorough": {
        "games": "generated:60:0",
        "groups": ("visits", "listed", "habits", "repeats"),
        "order": "listed",
        "tidy": True,
        "epsilon": 0.15,
        "episodes": 3,
        "temperature": 0.9,
        "seed": 0,
    },
    "hasty": {
        "games": "generated:60:0",
        "groups": ("visits", "likely"),
        "order": "likely",
        "tidy": False,
        "epsilon": 0.15,
        "episodes": 3,
        "temperature": 1.0,
        "seed": 0,
    },
}
SHIPPED = tuple(RECIPES)


def shipped_path(name: str) -> Path:
    """The .json file of a shipped policy; its weights lie beside it. KeyError for any other name."""
    if name not in SHIPPED:
        raise KeyError(name)
    return Path(__file__).parent / "saved" / f"{name}.json"
