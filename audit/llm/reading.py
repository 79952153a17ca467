"""How a model in this process reads: many prompts in one pass, each with a tree of what might follow it.

Knows: that prompts share their beginnings (a tree of keys and values by token, `Prefixes`) and that the answers to a
prompt share theirs (`Trie`), so that nothing is read twice. Hides: padding, positions, the mask under which a row's
tokens see their own past only, and the buffer of keys and values that a group of prompts is read into.

Needs a decoder of transformers with full attention in every layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from audit.llm.scoring import Ids
from envs.core import InputError

_ROWS = 16  # prompts that are read together
_PADDED = 2048  # tokens, padding included, of one pass
_SHARED = 32  # a prompt waits for another one of the batch if that saves it so many tokens
_SPARE = 64  # columns a buffer starts with beyond what is read first


class Trie:
    """Token sequences that share beginnings. Node 0 is the prompt's end; a node's parent has a smaller number."""

    def __init__(self) -> None:
        self.tokens: list[int] = [-1]
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.children: list[dict[int, int]] = [{}]

    def child(self, node: int, token: int) -> int:
        """The node after one more token, made if there is none."""
        found = self.children[node].get(token)
        if found is None:
            found = self.children[node][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
            self.children.append({})
        return found

    def add(self, ids: Sequence[int]) -> list[int]:
        """The nodes along a sequence, node 0 left out."""
        nodes, node = [], 0
        for token in ids:
            node = self.child(node, token)
            nodes.append(node)
        return nodes

    def ancestors(self, node: int) -> list[int]:
        """A node and all above it but node 0."""
        nodes: list[int] = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes

    def path(self, node: int) -> list[int]:
        """The tokens that lead to a node."""
        return [self.tokens[above] for above in reversed(self.ancestors(node))]


# Prefixes -----------------------------------------------------------------------------------------------------------


class _Stretch:
    """Tokens between two branchings, and what was computed for them (token axis: the last but one)."""

    __slots__ = ("children", "parent", "state", "tokens", "used")

    def __init__(self, tokens: Ids, state: Any, parent: _Stretch | None) -> None:
        self.tokens, self.state, self.parent = tokens, state, parent
        self.children: dict[int, _Stretch] = {}
        self.used = 0


class Prefixes:
    """Keys and values by the tokens that lead to them: a radix tree, the longest unused leaves dropped first.

    limit: bytes. A state is any array or tensor whose last but one axis is the tokens'.
    """

    def __init__(self, limit: int) -> None:
        self._root = _Stretch((), None, None)
        self._limit, self._bytes, self._clock = limit, 0, 0

    def find(self, ids: Ids) -> tuple[int, list[Any]]:
        """How many of the first tokens are known, and their states in order."""
        self._clock += 1
        known, states, at = 0, [], self._root
        while known < len(ids) and (below := at.children.get(ids[known])) is not None:
            shared = _common(below.tokens, ids[known:])
            below.used = self._clock
            known += shared
            states.append(below.state if shared == len(below.tokens) else below.state[..., :shared, :])
            if shared < len(below.tokens):
                break
            at = below
        return known, states

    def add(self, ids: Ids, state: Any, known: int) -> None:
        """Store the state of ids[known:]; what is stored already stays."""
        self._clock += 1
        place, at = 0, self._root
        while place < len(ids):
            below = at.children.get(ids[place])
            if below is None:
                if place < known:
                    return  # what it would hang on was dropped meanwhile
                kept = state[..., place - known :, :]
                leaf = _Stretch(ids[place:], _copy(kept), at)
                leaf.used = self._clock
                at.children[ids[place]] = leaf
                self._bytes += leaf.state.nbytes
                break
            shared = _common(below.tokens, ids[place:])
            below.used = self._clock
            place += shared
            if shared < len(below.tokens):
                below = self._split(below, shared)
            at = below
        while self._bytes > self._limit and self._drop():
            pass

    def _split(self, stretch: _Stretch, n: int) -> _Stretch:
        """Cut a stretch after n tokens; the upper part is returned."""
        assert stretch.parent is not None
        upper = _Stretch(stretch.tokens[:n], _copy(stretch.state[..., :n, :]), stretch.parent)
        upper.used = stretch.used
        stretch.parent.children[upper.tokens[0]] = upper
        stretch.tokens, stretch.state = stretch.tokens[n:], _copy(stretch.state[..., n:, :])
        stretch.parent = upper
        upper.children[stretch.tokens[0]] = stretch
        return upper

    def _drop(self) -> bool:
        """Drop the leaves that were not used for longest, an eighth of them; False where there is one at most."""
        leaves = sorted((leaf for leaf in self._stretches() if not leaf.children), key=lambda leaf: leaf.used)
        for leaf in leaves[: -(-len(leaves) // 8)]:
            if leaf.used == self._clock:
                return False
            assert leaf.parent is not None
            del leaf.parent.children[leaf.tokens[0]]
            self._bytes -= leaf.state.nbytes
        return bool(leaves)

    def _stretches(self) -> Iterator[_Stretch]:
        waiting = list(self._root.children.values())
        while waiting:
            stretch = waiting.pop()
            yield stretch
            waiting += stretch.children.values()


def _copy(state: Any) -> Any:
    return state.copy() if isinstance(state, np.ndarray) else state.clone()


def _common(a: Ids, b: Ids) -> int:
    """How many first tokens are the same."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n
    while low < high:  # the first difference, by halving
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# Reading ------------------------------------------------------------------------------------------------------------


class Reader:
    """Reads prompts with a causal language model. megabytes: memory for what prompts share.

    Raises InputError for a model with layers that do not attend to everything before.
    """

    def __init__(self, model: Any, megabytes: int) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise InputError(
                f"A model with layers of the kind {', '.join(sorted(kinds - {'full_attention'}))} cannot be read in "
                f"process; serve it and name the server in [server]."
            )
        self.model, self.prefixes = model, Prefixes(megabytes * 1_000_000)
        names = inspect.signature(model.model.forward).parameters
        self.cache_word = "cache" if "cache" in names else "past_key_values"

    def groups(self, prompts: Sequence[Ids], tries: Sequence[Trie], expected: int) -> Iterator[tuple[list[int], Group]]:
        """Places of the prompts, a group at a time, and the group to read them with.

        expected: tokens that each prompt is about to be read with beyond its own. A prompt that begins like another
        one waits until that one is read.
        """
        waiting = sorted(range(len(prompts)), key=lambda place: prompts[place])
        while waiting:
            ready: list[tuple[int, int]] = []  # (tokens to read, place)
            later: list[int] = []
            for place in waiting:
                prompt = prompts[place]
                known = self.prefixes.find(prompt)[0]
                if ready and _common(prompts[ready[-1][1]], prompt) > known + _SHARED:
                    later.append(place)
                else:
                    ready.append((len(prompt) - known + expected, place))
            ready.sort(reverse=True)  # rows of about one length, so that little is padding
            while ready:
                rows = max(1, min(_ROWS, _PADDED // ready[0][0]))
                taken = [place for _, place in ready[:rows]]
                yield taken, Group(self, [prompts[place] for place in taken], [tries[place] for place in taken])
                ready = ready[rows:]
            waiting = later


class Group:
    """Prompts that are read together, a row each. A node of a row's trie is read once, in a column of its own.

    known: how many tokens of each prompt were read before.
    """

    def __init__(self, reader: Reader, prompts: Sequence[Ids], tries: Sequence[Trie]) -> None:
        self._reader, self.prompts, self.tries = reader, prompts, tries
        found = [reader.prefixes.find(prompt[:-1]) for prompt in prompts]  # the end is read, for what follows it
        self.known = [known for known, _ in found]
        self._states = [states for _, states in found]
        self._columns: list[dict[int, int]] = [{} for _ in prompts]  # of each node that was read
        self._used = 0
        self._buffer: Any = None  # (layers, keys and values, rows, heads, columns, width)
        self._visible = np.zeros((len(prompts), 0), dtype=bool)  # columns of each row's prompt

    @property
    def fresh(self) -> bool:
        """Whether the prompts are still to be read."""
        return self._buffer is None

    def read(self, wanted: Sequence[Sequence[int]]) -> list[Any]:
        """Next-token logits (float32, a row for each wanted node) of each prompt; None where nothing is wanted.

        The first time, the prompts themselves are read; node 0, their end, can be wanted only then.
        """
        import torch

        first = self.fresh
        rows = list(range(len(self.prompts))) if first else [i for i, nodes in enumerate(wanted) if nodes]
        needed = [self._needed(i, wanted[i]) for i in rows]
        fresh = [len(self.prompts[i]) - self.known[i] if first else 0 for i in rows]
        width = max(n + len(nodes) for n, nodes in zip(fresh, needed, strict=True))
        if first:
            self._begin(max(self.known), width)
        self._room(width)
        start = self._used
        tokens = np.zeros((len(rows), width), dtype=np.int64)
        positions = np.zeros((len(rows), width), dtype=np.int64)
        allowed = np.zeros((len(rows), width, start + width), dtype=bool)
        allowed[:, :, :start] = self._visible[rows][:, None, :]
        allowed[:, np.arange(width), start + np.arange(width)] = True  # padding sees itself: no row may see nothing
        places: list[dict[int, int]] = []
        for k, (i, n, nodes) in enumerate(zip(rows, fresh, needed, strict=True)):
            prompt, trie, columns = self.prompts[i], self.tries[i], self._columns[i]
            tokens[k, :n] = prompt[self.known[i] :] if n else ()
            positions[k, :n] = np.arange(self.known[i], self.known[i] + n)
            allowed[k, :n, start : start + n] = np.tri(n, dtype=bool)
            allowed[k, n:, start : start + n] = True
            place = {0: n - 1}
            for offset, node in enumerate(nodes, start=n):
                place[node] = offset
                columns[node] = start + offset
                tokens[k, offset] = trie.tokens[node]
                positions[k, offset] = len(prompt) - 1 + trie.depths[node]
                allowed[k, offset, [columns[above] for above in trie.ancestors(node)]] = True
            places.append(place)
        with torch.inference_mode():
            mask = torch.zeros(allowed.shape, dtype=self._reader.model.dtype)
            mask.masked_fill_(torch.from_numpy(~allowed), torch.finfo(mask.dtype).min)
            hidden = self._forward(torch.from_numpy(tokens), torch.from_numpy(positions), mask[:, None], rows)
            at = [(k, place[node]) for k, (i, place) in enumerate(zip(rows, places, strict=True)) for node in wanted[i]]
            logits = self._reader.model.lm_head(hidden[[k for k, _ in at], [p for _, p in at]]).float()
        self._used += width
        self._visible = np.pad(self._visible, ((0, 0), (0, width)))
        if first:
            for i, n in enumerate(fresh):
                self._visible[i, start : start + n] = True
                state = self._buffer[:, :, i, :, start : start + n]
                self._reader.prefixes.add(self.prompts[i], state, self.known[i])
        results: list[Any] = [None] * len(self.prompts)
        begin = 0
        for i in rows:
            results[i] = logits[begin : begin + len(wanted[i])] if wanted[i] else None
            begin += len(wanted[i])
        return results

    def _needed(self, row: int, wanted: Sequence[int]) -> list[int]:
        """The nodes that lead to the wanted ones and were not read yet, parents first."""
        trie, read = self.tries[row], self._columns[row]
        return sorted({above for node in wanted for above in trie.ancestors(node) if above not in read})

    def _begin(self, known: int, width: int) -> None:
        import torch

        config = self._reader.model.config
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, len(self.prompts), heads, known + width + _SPARE, size)
        # Zeros, since a masked column is multiplied by a weight of 0 and must hold a number.
        self._buffer = torch.zeros(shape, dtype=self._reader.model.dtype)
        self._visible = np.zeros((len(self.prompts), known), dtype=bool)
        for i, states in enumerate(self._states):
            place = 0
            for state in states:
                n = state.shape[-2]
                self._buffer[:, :, i, :, place : place + n] = state
                place += n
            self._visible[i, :place] = True
        self._states, self._used = [], known

    def _room(self, width: int) -> None:
        lacking = self._used + width - self._buffer.shape[-2]
        if lacking > 0:
            import torch

            self._buffer = torch.nn.functional.pad(self._buffer, (0, 0, 0, lacking + 2 * _SPARE))

    def _forward(self, tokens: Any, positions: Any, mask: Any, rows: Sequence[int]) -> Any:
        from transformers.cache_utils import Cache

        end = self._used + tokens.shape[1]
        whole = len(rows) == len(self.prompts)
        layers = [_Layer(layer, rows, self._used, end, whole) for layer in self._buffer]
        return self._reader.model.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._reader.cache_word: Cache(layers=layers)},  # type: ignore[arg-type, unused-ignore]
        ).last_hidden_state


class _Layer:
    """One layer of a group's buffer, as transformers' `Cache` asks for it."""

    is_sliding = False

    def __init__(self, buffer: Any, rows: Sequence[int], start: int, end: int, whole: bool) -> None:
        self._buffer, self._rows, self._start, self._end, self._whole = buffer, rows, start, end, whole

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Write the new columns and give all of them."""
        rows = slice(None) if self._whole else self._rows
        self._buffer[0, rows, :, self._start : self._end] = keys
        self._buffer[1, rows, :, self._start : self._end] = values
        return self._buffer[0, rows, :, : self._end], self._buffer[1, rows, :, : self._end]

    def get_seq_length(self) -> int:
        """Columns before the new ones."""
        return self._start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns in all, and the first."""
        return self._start + query_length, 0
