"""Progress on stderr, so that what a command prints can be piped."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """A bar for each stage on stderr, with the time that is left."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._stage = ""

    def __enter__(self) -> Progress:
        return self

    def __call__(self, stage: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if stage != self._stage:
            self.close()
            self._bar, self._stage = tqdm(total=total, desc=stage, file=sys.stderr, mininterval=0.5), stage
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __exit__(self, *_: object) -> None:
        self.close()
