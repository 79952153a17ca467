"""The run directory: a manifest, append-only shards while it runs, parquet when it is done.

Knows: which files a run has, how to add to them without losing anything, and how to find out what is still owed.
Hides: shards, torn lines and row groups. Several sessions may write to one run; every session has its own shard,
a line that was torn by a kill is simply owed again, and equal lines written twice count once.

    manifest.json        what was run: plan and its lock, versions, policy, games; no secret, no local path
    trajectories.jsonl   the trajectories under study
    shards/000000.jsonl  one line for each point and for each of its rounds
    *.parquet            trajectories, points, alternatives, rollouts, effects: one row each (written by `finish`)
    summary.json         the run-level results
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from envs.core import InputError

FORMAT = 1
MANIFEST = "manifest.json"
TRAJECTORIES = "trajectories.jsonl"
SHARDS = "shards"

Key = tuple[str, int]  # (point id, round); round 0 is the point itself


def dumps(record: Mapping[str, Any]) -> str:
    """Canonical JSON of a record: equal records are equal lines."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a line lies."""

    shard: Path
    offset: int


class RunDirectory:
    """One run on disk. Opened with `create` (new, or the same run again) or `open` (to read)."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self.manifest = path, dict(manifest)

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any], trajectories: Iterable[Mapping[str, Any]]) -> RunDirectory:
        """Start a run, or go on with it if the directory holds the same one.

        Raises InputError if the directory holds another run (what differs is named) or something else.
        """
        manifest = json.loads(dumps({"format": FORMAT, **manifest}))
        file = path / MANIFEST
        if file.exists():
            run = cls.open(path)
            differing = sorted(k for k in {*manifest, *run.manifest} if manifest.get(k) != run.manifest.get(k))
            if differing:
                raise InputError(
                    f"{path}: holds another run (its {', '.join(differing)} differ); "
                    f"name a new directory, or repeat the run's own command to go on with it."
                )
            return run
        if path.exists() and any(path.iterdir()):
            raise InputError(f"{path}: is not empty and holds no run; name a new directory.")
        try:
            (path / SHARDS).mkdir(parents=True)
        except OSError as error:
            raise InputError(f"{path}: cannot be made ({error.strerror}).") from None
        write_whole(path / TRAJECTORIES, "".join(dumps(trajectory) + "\n" for trajectory in trajectories))
        write_whole(file, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        return cls(path, manifest)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open a run to read. Raises InputError where there is none, or one of another format."""
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except OSError:
            raise InputError(f"{path}: holds no run (no {MANIFEST}); audit replay makes one.") from None
        except ValueError:
            raise InputError(f"{path / MANIFEST}: is damaged; it is not JSON.") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise InputError(f"{path}: was written in another format; this version reads format {FORMAT}.")
        return cls(path, manifest)

    def appender(self) -> Appender:
        """A new shard of its own for this session."""
        folder = self.path / SHARDS
        number = len(list(folder.glob("*.jsonl")))
        while True:
            try:
                return Appender((folder / f"{number:06d}.jsonl").open("x", encoding="utf-8"))
            except FileExistsError:
                number += 1

    def index(self) -> Index:
        """What has been done so far."""
        places: dict[Key, _Place] = {}
        for shard in sorted((self.path / SHARDS).glob("*.jsonl")):
            for offset, record in _lines(shard):
                places.setdefault((record["point"], record["round"]), _Place(shard, offset))
        return Index(places)


class Appender:
    """Adds lines; each is handed to the operating system whole, so that a killed process loses at most one."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add records."""
        self._stream.write("".join(dumps(record) + "\n" for record in records))
        self._stream.flush()

    def __enter__(self) -> Appender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()


class Index:
    """Finds the lines of a point without holding them: memory grows with points, not with rollouts."""

    def __init__(self, places: dict[Key, _Place]) -> None:
        self._places = places
        self._open: tuple[Path, IO[bytes]] | None = None

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def records(self, point: str) -> list[dict[str, Any]]:
        """The point's own record and its rounds so far, in order ([] if it is owed)."""
        found: list[dict[str, Any]] = []
        while (place := self._places.get((point, len(found)))) is not None:
            if self._open is None or self._open[0] != place.shard:
                if self._open is not None:
                    self._open[1].close()
                self._open = (place.shard, place.shard.open("rb"))
            self._open[1].seek(place.offset)
            found.append(json.loads(self._open[1].readline()))
        return found


def _lines(shard: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset, record) of every whole line; a torn last line is left out, damage elsewhere is an InputError."""
    offset = 0
    with shard.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                record = json.loads(line)
                if not line.endswith(b"\n") or not isinstance(record, dict):
                    raise ValueError
                record["point"], record["round"]
            except (ValueError, KeyError):
                if stream.read(1):
                    raise InputError(
                        f"{shard}: line {number} is damaged; delete the shard to replay what it held."
                    ) from None
                return
            yield offset, record
            offset += len(line)
