"""Which steps of an agent's trajectory caused its outcome: replay, effects, comparison.

`audit.load(run)` opens a finished run with a data frame of every grain. The stages are modules, in the order of
the straight line: plan, collect (or importers), replay, effects, summary, results; `study` runs them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from audit.results import Run

__all__ = ["load"]


def load(run: str | Path) -> Run:
    """Open a finished run directory. Raises InputError where there is none."""
    from audit.results import load as open_run

    return open_run(run)
