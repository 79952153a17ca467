"""The tree of shared prefixes, with numbers in place of keys and values (needs no torch)."""

from __future__ import annotations

import random

import numpy as np

from audit.llm.reading import Prefixes, Trie


def state(ids: tuple[int, ...], start: int = 0) -> np.ndarray:
    """A state that says which tokens, and which tokens before them, it is of."""
    sums = np.cumsum(ids).astype(float)[start:]
    return np.stack([sums, np.array(ids, dtype=float)[start:]], axis=-1)[None]


def test_what_was_stored_is_found_whatever_the_order() -> None:
    chance = random.Random(3)
    prefixes = Prefixes(10**9)
    stored = []
    for _ in range(300):
        ids = tuple(chance.randrange(3) for _ in range(chance.randrange(1, 12)))
        known, states = prefixes.find(ids)
        if states:
            assert np.array_equal(np.concatenate(states, axis=-2), state(ids[:known]))
        best = max((sum(1 for _ in takewhile_equal(ids, other)) for other in stored), default=0)
        assert known == best
        if known < len(ids):
            prefixes.add(ids, state(ids, known), known)
            stored.append(ids)


def takewhile_equal(a: tuple[int, ...], b: tuple[int, ...]) -> list[int]:
    same = []
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same.append(x)
    return same


def test_the_limit_holds_and_what_is_in_use_stays() -> None:
    one = state((1,) * 10).nbytes
    prefixes = Prefixes(5 * one)
    for first in range(40):
        ids = (first, *[1] * 9)
        prefixes.add(ids, state(ids), 0)
        assert prefixes.find(ids)[0] == 10, "the newest was dropped"
    assert sum(prefixes.find((first, *[1] * 9))[0] == 10 for first in range(40)) <= 5
    # What a dropped beginning would carry is not stored without it.
    prefixes.add((0, *[1] * 9, 7), state((7,)), 10)
    assert prefixes.find((0, *[1] * 9, 7))[0] in (0, 11)


def test_a_trie_shares_beginnings() -> None:
    trie = Trie()
    assert trie.add([5, 6, 7]) == [1, 2, 3] and trie.add([5, 6, 8]) == [1, 2, 4]
    assert trie.path(4) == [5, 6, 8] and trie.ancestors(4) == [4, 2, 1] and trie.depths[4] == 3
