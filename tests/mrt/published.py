"""Where the published numbers lie, and how they are compared.

reference/ is ours to ship. The example data of GPL packages are read from ../shared at test time (AUDIT_SHARED names
another place) and their tests skipped where absent.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audit.mrt import Effects

OWN = Path(__file__).parent / "reference"
SHARED = Path(os.environ.get("AUDIT_SHARED", Path(__file__).parents[2].parent / "shared"))
GPL = SHARED / "reference" / "gpl"
ROOT = 5e-8  # the package stops its root finder at about 1e-8; ours goes on
needs_gpl = pytest.mark.skipif(
    not GPL.is_dir(),
    reason="example data of GPL packages are not shipped; set AUDIT_SHARED to the folder that has them",
)


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def rows_of(effects: Effects, names: dict[str, str] | None = None) -> dict[str, list[float]]:
    """Term -> estimate, se, low, high, p, df."""
    low, high = effects.conf_int().T
    columns = zip(effects.estimate, effects.se, low, high, effects.p_value, effects.df, strict=True)
    return {(names or {}).get(n, n): list(map(float, c)) for n, c in zip(effects.names, columns, strict=True)}


def same_as_r(effects: Effects, expected: list[dict[str, Any]], df: str, rtol: float = 1e-8) -> None:
    found = rows_of(effects, {"Intercept": "(Intercept)"})
    assert len(found) == len(expected)
    for row in expected:
        keys = ("Estimate", "StdErr", "95% LCL", "95% UCL", "p-value", df)
        # R prints a p-value below 1e-16 or so as 0, and its tails carry a dozen digits.
        np.testing.assert_allclose(found[row["term"]], [row[k] for k in keys], rtol=rtol, atol=2e-14)
