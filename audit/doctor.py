"""What is installed, which data is found where, and whether a game plays: the findings behind `audit doctor`.

Knows: the tested versions and the places data may lie. Hides: how each is looked up.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from envs import InputError, games, make
from envs.alfworld.games import SPLITS, cache_folder, data_folder, find_games, read_game, split_folder

# Exactness was shown with these; others may word or order things differently.
TESTED = {"textworld": "1.7.0", "alfworld": "0.4.2", "fast-downward-textworld": "20.6.4"}
OPTIONAL = ("ray",)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. mark: ok, note, warn or FAIL."""

    mark: str
    subject: str
    detail: str


def installed(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def warn_of_untested_versions() -> None:
    """Warn where a package on which exactness depends is not at the tested version."""
    for package, tested in TESTED.items():
        found = installed(package)
        if found not in (tested, None):
            warnings.warn(
                f"{package} {found} is installed; exactness was shown with {tested} (pip install {package}=={tested}).",
                stacklevel=2,
            )


def examine() -> list[Finding]:
    """All findings, in the order they are printed."""
    findings = [Finding("ok", "python", sys.version.split()[0])]
    for package, tested in TESTED.items():
        found = installed(package)
        if found is None:
            hint = "pip install 'textworld[pddl]==1.7.0' alfworld==0.4.2 (needs a C++ compiler, make and cmake)"
            findings.append(Finding("FAIL", package, f"missing; {hint}"))
        elif found == tested:
            findings.append(Finding("ok", package, found))
        else:
            findings.append(Finding("warn", package, f"{found}, but exactness was shown with {tested}"))
    for package in OPTIONAL:
        findings.append(Finding("note", package, installed(package) or "not installed (optional)"))
    findings += [_split(split) for split in SPLITS]
    findings.append(_cache())
    findings.append(_self_check())
    return findings


def _split(split: str) -> Finding:
    subject = f"alfworld:{split}"
    try:
        return Finding("ok", subject, f"{len(find_games(split_folder(split)))} games in {data_folder()}")
    except InputError as error:
        return Finding("note", subject, str(error).removeprefix(f"{subject}: "))


def _cache() -> Finding:
    folder = cache_folder()
    here = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        probe = here / ".credit-audit-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return Finding("warn", "cache", f"{folder} cannot be written ({error.strerror}); set AUDIT_CACHE")
    return Finding("ok", "cache", str(folder))


def _self_check() -> Finding:
    """Generate one game, compile it and win it by its walkthrough."""
    try:
        game = games("generated:1:0")[0]
        world = make(game.address)
        turn = world.reset()
        for command in read_game(Path(game.address)).walkthrough or ():
            turn = world.step(turn.state, command)
    except InputError as error:
        return Finding("FAIL", "self-check", str(error))
    if not turn.won:
        return Finding("FAIL", "self-check", f"the walkthrough of {game.name} does not win")
    return Finding("ok", "self-check", f"{game.name} won by its walkthrough")
