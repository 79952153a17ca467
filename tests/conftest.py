"""Shared data for tests: official games (unpacked once a session), caches that never touch the user's own."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shared(*parts: str) -> Path:
    """A path in the data beside the project (AUDIT_SHARED_DATA names another place for `data`)."""
    if parts[0] == "data" and os.environ.get("AUDIT_SHARED_DATA"):
        return Path(os.environ["AUDIT_SHARED_DATA"]).joinpath(*parts[1:])
    return ROOT.parent.joinpath("shared", *parts)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled games are cached for this test session only, shared by its workers."""
    base = tmp_path_factory.getbasetemp()
    os.environ["AUDIT_CACHE"] = str((base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "audit-cache")


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """official(split) is the folder of that split's official games, unpacked from the shared archives.

    Sets ALFWORLD_DATA to the folder above it. Skips the test where the archives are absent.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "alfworld-data"

    def unpack(split: str) -> Path:
        archive = shared("data", "alfworld", f"{split}.tar.xz")
        if not archive.exists():
            pytest.skip(f"official games are not here ({archive.parent}); set AUDIT_SHARED_DATA to run this test")
        os.environ["ALFWORLD_DATA"] = str(root)
        folder = root / "json_2.1.1" / split
        if not folder.exists():
            fresh = tmp_path_factory.mktemp("unpack")
            with tarfile.open(archive) as tar:
                tar.extractall(fresh, filter="data")
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                (fresh / "json_2.1.1" / split).rename(folder)
            except OSError:
                assert folder.exists(), f"cannot unpack to {folder}"  # another worker was faster
        return folder

    return unpack
