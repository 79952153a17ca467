"""The policies that come with the package.

Knows: their names and where their files lie. Hides: the layout of the installed package.
"""

from __future__ import annotations

from pathlib import Path

SHIPPED = ("thorough", "hasty")


def shipped_path(name: str) -> Path:
    """The .json file of a shipped policy; its weights lie beside it. KeyError for any other name."""
    if name not in SHIPPED:
        raise KeyError(name)
    return Path(__file__).parent / "saved" / f"{name}.json"
