"""The trainer of language models: weighted fine-tuning, of an adapter or of all weights (extra [train]).

Knows: the loss (a step's log probability as the policy itself scores it: its own prompt, its own end, the answer's
tokens only), the optimiser (AdamW), and what makes two trainings bit-identical on a CPU. Hides: torch, padding, the
shape of adapter files, and going on where an interrupted study stopped.

The loss of a batch is sum_i w_i l_i / sum_i t_i: l_i the negative log probability of example i's answer, t_i its
tokens, w_i its weight. Doses have weights of mean 1 over what an arm keeps, so that doubling an arm's weights changes
nothing, and what has no weight is never read. A checkpoint is a policy file with the trained weights beside it in
safetensors: `audit evaluate` and `audit replay` take it like any other policy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from audit.llm.prompts import SHIPPED
from audit.policies.openai import DecodeSettings, PromptSettings, write_policy
from audit.records import content_id
from audit.store import write_whole
from audit.training.dose import Dose, Doses
from audit.training.examples import Checkpoint, Encoded
from envs.core import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Floats = npt.NDArray[np.float64]

HIGHEST_RATE = 0.01  # above it a language model is destroyed, and the rate was meant for the linear policy


@dataclass(frozen=True, slots=True)
class LanguageTrainer:
    """Trains the language model of a policy file ([local]), one arm and seed at a time.

    folder: where checkpoints go; one that is there already, of the same training, is taken as it is. method: `lora`
    trains the policy's own adapter further, or a fresh one of the given rank on all linear layers (alpha = 2 rank);
    `full` trains all weights. decay: AdamW's. clip: largest norm of a gradient. at_once: examples in one pass; the
    batch is the recipe's. probe: how many of the kept examples the losses before and after are of. device: cpu, cuda,
    or auto (cuda where there is one). dtype: of the frozen weights and of the arithmetic: float32, bfloat16, or auto
    (bfloat16 on cuda); trained weights are float32. threads: 0 for the policy file's, or else torch's own number.
    Dropout is off, so that arms differ in nothing but examples. Bits are equal on a CPU with equal threads.
    """

    folder: Path
    method: Literal["lora", "full"] = "lora"
    rank: int = 16
    decay: float = 0.0
    clip: float = 1.0
    at_once: int = 2
    probe: int = 32
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0

    def __call__(self, doses: Doses, run: Dose, start: Checkpoint) -> tuple[Checkpoint, dict[str, float]]:
        """Train one arm; see `Trainer`. Raises InputError where there is nothing it can train, or training diverges."""
        examples, recipe = doses.examples, doses.recipe
        if examples.encoded is None or start != examples.start:
            raise InputError("A language model is trained on examples made with its file: policy=Path('model.toml').")
        assert isinstance(start, Path)
        if recipe.optimiser != "adam" or recipe.rate > HIGHEST_RATE:
            raise InputError(
                f"A language model is trained by adam at a rate up to {HIGHEST_RATE:g} (2e-4 is usual for adapters, "
                f"1e-5 for all weights); the recipe says {recipe.optimiser} at {recipe.rate:g}."
            )
        about: dict[str, Any] = {
            "start": examples.start_id,
            "arm": run.arm,
            "dose": doses.dose,
            "seed": run.seed,
            "steps": run.steps,
            "recipe": asdict(recipe),
            "trainer": {key: value for key, value in asdict(self).items() if key != "folder"},
            "examples": _digest(doses, run),
        }
        name = f"{doses.dose}.{run.file_name()}"
        policy, record = self.folder / f"{name}.toml", self.folder / f"{name}.json"
        figures = _finished(record, about) if policy.exists() else None
        if figures is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            figures, took = self._train(doses, run, start, policy)
            write_whole(record, json.dumps({"training": about, "figures": figures, "took": took}, indent=1) + "\n")
        return policy, figures

    def _train(self, doses: Doses, run: Dose, start: Path, policy: Path) -> tuple[dict[str, float], Any]:
        try:
            import peft  # noqa: F401
            import torch

            from audit.llm.hf import LocalModel
        except ImportError:
            raise InputError("Training a language model needs the extra: pip install 'credit-audit[train]'.") from None
        encoded = doses.examples.encoded
        assert encoded is not None
        data = tomllib.loads(start.read_text(encoding="utf-8"))  # opened before, to make the examples
        local: dict[str, Any] = data["local"]
        device = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        dtype = self.dtype if self.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
        with _reproducible(run.seed, self.threads or int(local.get("threads", 0)), device):
            adapter = local.get("adapter") or None
            loaded = LocalModel.load(
                local["weights"], adapter=adapter if self.method == "full" else None, folder=start.parent
            )
            model = loaded.model
            if self.method == "full":
                model.requires_grad_(True)
            else:
                place = start.parent / adapter if adapter else None
                model = _adapted(model.to(getattr(torch, dtype)), place, self.rank)
            model = model.to(device).eval()
            trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
            before = {key: value.detach().clone() for key, value in trained.items()}
            optimiser = torch.optim.AdamW(trained.values(), lr=doses.recipe.rate, weight_decay=self.decay)
            batches = doses.batches(run)
            seen = list(dict.fromkeys(np.concatenate(batches).tolist()))[: self.probe]
            losses = [self._loss(model, encoded, run.weights, seen, dtype)]
            began = time.perf_counter(), time.process_time()
            for batch, rate in zip(batches, doses.recipe.rates(run.steps), strict=True):
                for group in optimiser.param_groups:
                    group["lr"] = float(rate)
                optimiser.zero_grad(set_to_none=True)
                tokens = sum(len(encoded[i].answer) for i in batch.tolist())
                for part in self._parts(encoded, batch.tolist()):
                    weights = torch.tensor(run.weights[part], dtype=torch.float32, device=device)
                    ((weights * _surprise(model, [encoded[i] for i in part], dtype)).sum() / tokens).backward()
                norm = torch.nn.utils.clip_grad_norm_(trained.values(), self.clip)
                if not torch.isfinite(norm):
                    raise InputError(f"Arm {run.arm}, seed {run.seed}: training diverged; lower the learning rate.")
                optimiser.step()
            took = {
                "seconds_a_step": round((time.perf_counter() - began[0]) / run.steps, 3),
                "cpu_seconds_a_step": round((time.process_time() - began[1]) / run.steps, 3),
                "threads": torch.get_num_threads(),
                "device": device,
            }
            losses.append(self._loss(model, encoded, run.weights, seen, dtype))
            figures = {"displacement": _displacement(model, before), "loss_before": losses[0], "loss_after": losses[1]}
            self._save(model, loaded.tokenizer, policy.with_suffix(""))
        self._write(policy, start, data, run)
        return figures, took

    def _parts(self, encoded: Sequence[Encoded], batch: Sequence[int]) -> Iterator[list[int]]:
        """A batch in passes; neighbours in length share one, for little padding."""
        order = sorted(batch, key=lambda i: (len(encoded[i].prompt) + len(encoded[i].answer), i))
        for first in range(0, len(order), self.at_once):
            yield order[first : first + self.at_once]

    def _loss(
        self, model: Any, encoded: Sequence[Encoded], weights: Floats, examples: Sequence[int], dtype: str
    ) -> float:
        """Weighted mean negative log likelihood of some examples."""
        import torch

        total = 0.0
        with torch.no_grad():
            for part in self._parts(encoded, examples):
                surprise = _surprise(model, [encoded[i] for i in part], dtype)
                total += float(weights[part] @ surprise.double().cpu().numpy())
        return total / float(weights[examples].sum())

    def _save(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """The trained weights, in a folder that appears when it is whole. No local path is in it."""
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if self.method == "full":
            model.save_pretrained(partial, safe_serialization=True)
            tokenizer.save_pretrained(partial)
        else:
            import peft
            from safetensors.torch import save_file

            state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
            save_file({key: value.float().cpu().contiguous() for key, value in state.items()}, partial / _ADAPTER)
            config = model.peft_config["default"].to_dict() | {"base_model_name_or_path": "", "inference_mode": True}
            text = json.dumps(config, indent=1, sort_keys=True, default=lambda value: sorted(map(str, value)))
            (partial / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def _write(self, policy: Path, start: Path, data: dict[str, Any], run: Dose) -> None:
        """The policy file: as the one that training began with, but for the weights. Paths are relative to it."""

        def moved(name: str) -> str:
            return os.path.relpath((start.parent / name).resolve(), policy.parent.resolve())

        local, prompt = dict(data["local"]), PromptSettings(**data.get("prompt", {}))
        if self.method == "full":
            local |= {"weights": policy.stem, "adapter": ""}
        else:
            if not local["weights"].startswith("package:"):
                local["weights"] = moved(local["weights"])
            local["adapter"] = policy.stem
        if prompt.template not in SHIPPED:
            prompt = PromptSettings(**{**asdict(prompt), "template": moved(prompt.template)})
        decode = DecodeSettings(**data.get("decode", {}))
        write_policy(policy, f"{data['name']}+{run.arm}", prompt=prompt, decode=decode, local=local)


_ADAPTER = "adapter_model.safetensors"


def _digest(doses: Doses, run: Dose) -> str:
    """What a run is trained on, and in which order: batches, weights and tokens."""
    encoded = doses.examples.encoded
    assert encoded is not None
    digest = hashlib.sha256()
    for batch in doses.batches(run):
        for i in batch.tolist():
            line = json.dumps([float(run.weights[i]), encoded[i].prompt, encoded[i].answer])
            digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _finished(record: Path, about: dict[str, Any]) -> dict[str, float] | None:
    """The figures of the same training, done before."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        same = content_id(found["training"]) == content_id(about)
        return {str(key): float(value) for key, value in found["figures"].items()} if same else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextmanager
def _reproducible(seed: int, threads: int, device: str) -> Iterator[None]:
    """Deterministic arithmetic from a seed; torch's settings are as before afterwards."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    count = torch.get_num_threads()
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(True, warn_only=device != "cpu")
    torch.set_num_threads(threads or count)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.set_num_threads(count)


def _adapted(model: Any, adapter: Path | None, rank: int) -> Any:
    """The model with an adapter that can be trained: the one in a folder, or a fresh one."""
    import peft

    if adapter is None:
        config = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        return peft.get_peft_model(model, config)
    if not (adapter / _ADAPTER).exists():
        raise InputError(f"{adapter.name}: holds no {_ADAPTER}.")
    return peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=True)


def _surprise(model: Any, examples: Sequence[Encoded], dtype: str) -> Any:
    """(examples,) negative log probability of each answer after its prompt, summed over the answer's tokens."""
    import torch

    device = next(model.parameters()).device
    lines = [[*one.prompt, *one.answer] for one in examples]
    width = max(map(len, lines))
    ids = torch.tensor([line + [0] * (width - len(line)) for line in lines], device=device)
    mask = torch.tensor([[1] * len(line) + [0] * (width - len(line)) for line in lines], device=device)
    places = [list(range(len(one.prompt) - 1, len(one.prompt) - 1 + len(one.answer))) for one in examples]
    wanted = sorted({place for some in places for place in some})
    column = {place: number for number, place in enumerate(wanted)}
    rows = torch.tensor([row for row, some in enumerate(places) for _ in some], device=device)
    columns = torch.tensor([column[place] for some in places for place in some], device=device)
    answers = torch.tensor([token for one in examples for token in one.answer], device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        logits = model(
            input_ids=ids,
            attention_mask=mask if len(lines) > 1 else None,
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, device=device),
        ).logits
    chosen = logits[rows, columns].float()
    surprise = chosen.logsumexp(-1) - chosen.gather(-1, answers[:, None])[:, 0]
    belongs = torch.nn.functional.one_hot(rows, len(lines)).to(surprise.dtype)
    return surprise @ belongs


def _displacement(model: Any, before: dict[str, Any]) -> float:
    """Euclidean length of what training added to the weights; an adapter's is that of its product B A, scaled."""
    import torch

    total = 0.0
    with torch.no_grad():
        now = {key: value.detach().double() for key, value in model.named_parameters() if key in before}
        for key, value in now.items():
            if ".lora_B." in key:
                continue
            if ".lora_A." not in key:
                total += float((value - before[key].double()).square().sum())
                continue
            other = key.replace(".lora_A.", ".lora_B.")
            scale = model.get_submodule(key.split(".lora_A.")[0]).scaling["default"]
            b = torch.cat([now[other], -before[other].double()], dim=1)
            a = torch.cat([value, before[key].double()], dim=0)
            total += scale**2 * float(((b.T @ b) * (a @ a.T)).sum())  # |b a|^2 without the large product
    return float(np.sqrt(max(total, 0.0)))
