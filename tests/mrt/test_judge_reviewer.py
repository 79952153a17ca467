"""A language model as reviewer: it approves, replaces, or says nothing that can be read."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chisquare

from audit.mrt.interventions import Act, JudgeReviewer, Review, load_intervention
from audit.mrt.trial import Design, run_trial, simulate
from audit.records import draws
from envs import InputError, games
from tests.llm.conftest import write
from tests.llm.loopback import FakeModel, Loopback
from tests.mrt.test_interventions import moment
from tests.mrt.worlds import Wanderer
from tests.signals.fakes import FakeBackend, model


def act(backend: FakeBackend, proposal: str, mode: str = "sample", seed: int = 0, **decode: Any) -> Act:
    reviewer = JudgeReviewer(model(backend, mode, **decode))
    return asyncio.run(reviewer.review([moment(["wait"], proposal)], seeds=[seed]))[0]  # type: ignore[return-value]


def says(answer: str) -> FakeBackend:
    return FakeBackend(lambda text, draw: answer)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"rating": "wait"}', Act()),
        ('{"rating": "go right"}', Act(command="go right")),
        ("Go right.", Act(command="go right")),
        ("I'm sorry, I cannot do that", Act(reason="refused: the judge refused")),
        ("go right or go left", Act(reason="unparsable: no rating in the answer")),
        ('{"rating": "fly"}', Act(reason="unparsable: a rating off the scale")),
    ],
)
def test_answers(answer: str, expected: Act) -> None:
    assert act(says(answer), "wait") == expected


def test_it_sees_the_past_the_proposal_and_the_possible_commands() -> None:
    backend = says("wait")
    assert act(backend, "fly").command == "wait"  # what is not possible may be proposed, and be replaced
    (text,) = backend.asked
    assert (
        "Step 1: wait" in text and "Step 2, which it proposes to take now, is: fly" in text and "9 steps left" in text
    )
    for command in ("go left", "go right", "wait", "fly"):
        assert f'"{command}"' in text
    assert act(says("fly"), "fly") == Act()


def test_a_model_that_scores_draws_with_its_probabilities() -> None:
    """The log odds are 5 at temperature 2.5 (and a little for the letters); equal seeds draw equal commands."""
    backend = FakeBackend(likes=lambda text, word: -1.0 if word.startswith("go right") else -6.0)
    seeds = draws(400, "review")
    settings = {"mode": "choice", "temperature": 2.5, "end": "\n"}
    drawn = [act(backend, "wait", seed=seed, **settings) for seed in seeds]  # type: ignore[arg-type]
    counts = Counter(found.command for found in drawn)
    words = ("go left", "go right", "wait")
    letters = {word: sum(-0.001 * ord(letter) for letter in f"{word}\n"[1:]) for word in words}
    weights = {w: math.exp(((-1.0 if w == "go right" else -6.0) + extra) / 2.5) for w, extra in letters.items()}
    expected = [400 * weights[w] / sum(weights.values()) for w in words]
    assert chisquare([counts["go left"], counts["go right"], counts[None]], expected).pvalue > 0.001
    assert [act(backend, "wait", seed=seed, **settings) for seed in seeds[:20]] == drawn[:20]  # type: ignore[arg-type]


def test_a_trial_is_logged_with_what_became_of_each_review() -> None:
    def often(text: str, draw: int) -> str:
        if "Step 2," in text:
            return "I'm sorry, no."
        return "go right"

    trial = simulate(
        Wanderer(), Review(JudgeReviewer(model(FakeBackend(often)))), games("tabular:chain:3"), 60, Design(budget=6)
    )
    rows = trial.decisions
    treated = rows[rows["arm"] == 1]
    second = treated[treated["t"] == 1]
    assert len(second) and (second["reason"] == "refused: the judge refused").all() and not second["delivered"].any()
    assert (second["command"] == second["proposal"]).all()
    rest = treated[treated["t"] != 1]
    assert (rest["command"] == "go right").all() and rest["delivered"].all() and "disagrees" not in trial.features


def test_over_a_server_and_again(tmp_path: Path) -> None:
    """The file on the command line; the same trial again asks nothing and equals the first one."""
    with Loopback(FakeModel(says=['{"rating": "go right"}'])) as server:
        file = write(tmp_path / "judge.toml", server.url, kind="openai", decode={"temperature": 0.0})
        spec = f"review:judge:{file}"
        about = load_intervention(spec).describe()
        assert about["reviewer"] == "judge" and server.url not in str(about) and str(tmp_path) not in str(about)
        design = Design(p=0.5, budget=6, seed=3)
        first = run_trial("random", spec, "tabular:chain:3", tmp_path / "trial", n=8, design=design)
        asked = server.requests
        again = run_trial("random", spec, "tabular:chain:3", tmp_path / "again", n=8, design=design)
        assert server.requests == asked > 0
    treated = first.decisions[first.decisions["arm"] == 1]
    assert len(treated) and (treated["command"] == "go right").all()
    assert first.decisions.drop(columns="trajectory").equals(again.decisions.drop(columns="trajectory"))


def test_what_is_no_reviewer(tmp_path: Path) -> None:
    for spec in ("review:judge:", "review:judge:hasty"):
        with pytest.raises(InputError, match=re.escape(spec)):
            load_intervention(spec)
    with pytest.raises(InputError, match="cannot be read"):
        load_intervention(f"review:judge:{tmp_path / 'none.toml'}")
    endless = write(tmp_path / "endless.toml", "http://127.0.0.1:9/v1", decode={"mode": "choice"})
    with pytest.raises(InputError, match="must say what ends one"):
        load_intervention(f"review:judge:{endless}")
