"""Judge signals: what is shown, both orders, states, both read-outs, on fake models with known habits."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from audit.llm.answers import Sample
from audit.policies.linear import LinearPolicy
from audit.policies.shipped import shipped_path
from audit.results import Run
from audit.scoring import DEFAULT, Source, check_leakage, score
from audit.scoring.judging import NOT_STUDIED, Interview, seated
from credit_signals import Missing, SignalError, check_signal, load_signals
from credit_signals.judge import Answer, Judged, Question, read_rubric, transcript
from envs.core import InputError

from .fakes import FakeBackend, model
from .test_contract import POINTS, trajectory

ALL = ("help3", "good5", "matter5")


def judged(name: str) -> Judged:
    (signal,) = load_signals([name])
    assert isinstance(signal, Judged)
    return signal


def bound(name: str, backend: FakeBackend, **options: Any) -> Judged:
    mode = options.pop("mode", "sample")
    return judged(name).bound(Interview(model(backend, mode), **options))


# What is shown ----------------------------------------------------------------------------------------------------


def test_a_prefix_question_shows_nothing_that_came_later() -> None:
    point = trajectory("a", 6)[3]
    for family in ALL:
        for question in judged(f"judge.{family}_prefix").questions([point]):
            assert "seen 3" in question.text and "seen 4" not in question.text
            assert "go to desk 0" in question.text and "reached its goal" not in question.text
            assert f"The agent has {point.steps_left} steps left" in question.text


def test_a_hindsight_question_shows_the_rest_and_the_outcome() -> None:
    for won, words in ((True, "The agent reached its goal."), (False, "The agent did not reach its goal.")):
        point = trajectory("a", 6, won=won)[3]
        for family in ALL:
            for question in judged(f"judge.{family}_hindsight").questions([point]):
                assert "seen 6" in question.text and words in question.text
                assert question.text.index(words) < question.text.index("Look back at step 4: go to desk 0")
    unfinished = judged("judge.help3_hindsight").bound(lambda questions: [])
    bare = replace(POINTS[0], hindsight=None)
    assert unfinished.score([bare]) == [Missing("the rest of the trajectory is not known")]


def test_questions_of_a_trajectory_share_their_beginning() -> None:
    """Transcript first, question last: what a prefix cache needs. Windows move in jumps, so most neighbours share."""
    points = trajectory("a", 60)
    for name, asks in (("judge.help3_prefix", "The agent has"), ("judge.help3_hindsight", "Look back")):
        texts = [question.text for question in judged(name).questions(points)][::2]
        pairs = list(itertools.pairwise(texts))
        whole = [after.startswith(before[: before.index(asks)].rstrip()) for before, after in pairs]
        assert whole.count(False) <= 2, name


def test_the_window_holds_the_step_and_says_what_it_leaves_out() -> None:
    commands = [f"c{i}." for i in range(100)]
    seen = ["-= Welcome to TextWorld, ALFRED! =-\n\nTask.", *(f"o{i}." for i in range(100))]
    for step in range(100):
        before = transcript(commands[:step], seen[: step + 1], step, 10)
        assert before.startswith("Task.")
        shown = re.findall(r"^Step (\d+):", before, re.M)
        assert len(shown) <= 10 and (step == 0 or int(shown[-1]) == step)
        assert ("left out" in before) == (step > 10)
        around = transcript(commands, seen, step, 10, won=True)
        shown = re.findall(r"^Step (\d+):", around, re.M)
        assert len(shown) == 10 and str(step + 1) in shown
        assert f"(steps {int(shown[-1]) + 1} to 100 are left out)" in around or int(shown[-1]) >= 99
    assert transcript(commands, [None] * 101, 3).count("(what was seen was not recorded)") == 101


def test_braces_in_a_transcript_stay_as_they_are() -> None:
    point = trajectory("a", 2)[1]
    hostile = replace(point, action="say {scale} {first}")
    (question, _) = judged("judge.help3_prefix").questions([hostile])
    assert "say {scale} {first}" in question.text


# Orders and states ------------------------------------------------------------------------------------------------


def test_a_judge_that_takes_what_is_listed_first_comes_to_the_middle_and_is_found_out() -> None:
    first = bound("judge.help3_prefix", FakeBackend(lambda text, draw: json.dumps({"rating": _scale(text)[0]})))
    assert first.score(POINTS) == [0.0] * len(POINTS)
    assert first.flags(POINTS) == [True] * len(POINTS)
    report = first.report(POINTS)
    assert report["order_effect"] == 2.0 and report["orders_disagree"] == 1.0
    assert report["states"] == {"parsed": 2 * len(POINTS)}
    steady = bound("judge.help3_prefix", FakeBackend(lambda text, draw: "-1"))
    assert steady.score(POINTS) == [-1.0] * len(POINTS)
    assert steady.flags(POINTS) == [False] * len(POINTS) and steady.report(POINTS)["order_effect"] == 0.0


def _scale(text: str) -> list[str]:
    return re.findall(r"^([+-]?\d): ", text, re.M)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("I'm sorry, I cannot judge people.", "refused: the judge refused"),
        ("It went well, 1 of 3 things worked", "unparsable: no rating in the answer"),
        ('{"rating": "+1"} or rather {"rating": "0"}', "unparsable: several ratings"),
        ("Rating: 7", "unparsable: a rating off the scale"),
        ("", "unparsable: no rating in the answer"),
        (Sample("", error="HTTP 400: the prompt is too long"), "error: HTTP 400: the prompt is too long"),
    ],
)
def test_what_is_no_rating_is_missing_with_its_state(answer: str | Sample, reason: str) -> None:
    signal = bound("judge.good5_hindsight", FakeBackend(lambda text, draw: answer))
    assert signal.score(POINTS) == [Missing(reason)] * len(POINTS)
    assert set(signal.report(POINTS)["states"]) == {reason.split(":")[0]}


def test_a_value_needs_an_answer_in_each_order() -> None:
    """Answers of one order alone carry its bias, so they are no value."""
    signal = bound("judge.help3_prefix", FakeBackend(lambda text, draw: "+1" if _scale(text)[0] == "+1" else "?"))
    assert signal.score(POINTS[:1]) == [Missing("one order of two has no rating (unparsable: no rating in the answer)")]
    assert signal.report(POINTS[:1])["states"] == {"parsed": 1, "unparsable": 1}


def test_repeats_are_averaged_over_what_was_parsed() -> None:
    says = ("5", "4", "hm")
    backend = FakeBackend(lambda text, draw: says[draw])
    signal = bound("judge.good5_prefix", backend, repeats=3)
    assert signal.score(POINTS[:1]) == [pytest.approx(0.75)]
    assert signal.report(POINTS[:1])["states"] == {"parsed": 4, "unparsable": 2}
    signal.score(POINTS[:1])
    assert len(backend.asked) == 6, "a question was asked twice"


def pair(text: str) -> tuple[str, str]:
    a, b = re.search(r"^A: (.+)$", text, re.M), re.search(r"^B: (.+)$", text, re.M)
    assert a and b
    return a[1], b[1]


def test_two_commands_are_compared_in_both_orders() -> None:
    commands = ("go to desk 0", "go to desk 1", "go to desk 2", "look")
    points = [replace(p, admissible=commands) for p in trajectory("a", 5)]
    shown: list[tuple[str, str]] = []

    def best(text: str, draw: int) -> str:
        shown.append(pair(text))
        return "A" if pair(text)[0] < pair(text)[1] else "B"

    signal = bound("judge.pair_random", FakeBackend(best))
    values = signal.score(points)
    assert shown[0::2] == [(b, a) for a, b in shown[1::2]]
    for point, value, (mine, other) in zip(points, values, shown[0::2], strict=True):
        assert mine == point.action and other != mine and value == (1.0 if mine < other else -1.0)
    assert signal.report(points)["position_bias"] == 0.0 and signal.flags(points) == [False] * 5
    lazy = bound("judge.pair_random", FakeBackend(lambda text, draw: "A"))
    assert lazy.score(points) == [0.0] * 5 and lazy.flags(points) == [True] * 5
    assert lazy.report(points)["position_bias"] == 0.5 and lazy.report(points)["orders_disagree"] == 1.0


def test_what_a_step_is_comparedreplace() -> None:
    point = trajectory("a", 2)[1]
    likeliest = judged("judge.pair_likeliest")
    with_p = replace(point, probabilities={"go to desk 1": 0.6, "look": 0.1, "go to desk 2": 0.3})
    assert pair(likeliest.questions([with_p])[0].text) == ("go to desk 1", "go to desk 2")
    bare = likeliest.bound(lambda questions: []).score([point])
    assert bare == [Missing("probabilities is not known here")]
    alone = judged("judge.pair_random").bound(lambda questions: [])
    assert alone.score([replace(point, admissible=("go to desk 1",))]) == [Missing("there is no other command")]


# The other read-out -----------------------------------------------------------------------------------------------


def test_the_likelihood_of_the_words_gives_an_expected_rating() -> None:
    chances = {"+1": 0.5, "0": 0.3, "-1": 0.2}
    backend = FakeBackend(likes=lambda text, word: math.log(chances.get(word, 0.5)))
    signal = bound("judge.help3_prefix", backend, mode="choice")
    # The fake puts a little on later tokens too, so that words of two tokens count both.
    weights = {w: p * math.exp(sum(-0.001 * ord(c) for c in w[1:])) for w, p in chances.items()}
    expected = (weights["+1"] - weights["-1"]) / sum(weights.values())
    assert signal.score(POINTS) == [pytest.approx(expected)] * len(POINTS)
    report = signal.report(POINTS)
    assert report["states"] == {"scored": 2 * len(POINTS)} and not backend.asked[1:]
    assert isinstance(signal.ask, Interview)
    about = signal.ask.describe()
    assert "likelihood" in about["readout"] and about["self_test"]["noise"] == 0.0


def test_the_temperature_of_the_model_shapes_the_expectation() -> None:
    backend = FakeBackend(likes=lambda text, word: -1.0 if word == "5" else -3.0)
    values = []
    for temperature in (0.5, 1.0, 4.0):
        interview = Interview(model(backend, "choice", temperature=temperature))
        values += judged("judge.good5_prefix").bound(interview).score(POINTS[:1])
        p = math.exp(2 / temperature)
        assert values[-1] == pytest.approx((p * 1 + 0.5 + 0 - 0.5 - 1) / (p + 4))
    assert values == sorted(values, reverse=True)


def test_scores_that_say_nothing_are_an_error() -> None:
    class Constant(FakeBackend):
        def tokens(self, text: str, word: str) -> tuple[float, ...]:
            return (0.0,) * len(word)

    from audit.llm.scoring import ScoresUnavailable

    with pytest.raises(ScoresUnavailable, match="log probability 0"):
        bound("judge.good5_prefix", Constant(), mode="choice").score(POINTS[:1])


def test_one_word_must_not_begin_another() -> None:
    interview = Interview(model(FakeBackend(likes=lambda text, word: -len(word)), "choice"))
    words = (("go to shelf 1", 0.0), ("go to shelf 10", 1.0))
    with pytest.raises(InputError, match="is the beginning of another"):
        interview([Question("", "which?", words)])
    ended = Interview(model(FakeBackend(likes=lambda text, word: -len(word)), "choice", end="\n"))
    assert ended([Question("", "which?", words)])[0].value is not None


# Rubrics ----------------------------------------------------------------------------------------------------------

MINE = """
format = "credit-audit rubric 1"
view = "prefix"
importance = "value"
orders = 1
turns = 2
question = "Step {step} of {steps_left}: {action}?\\n{scale}"
[[scale]]
word = "yes"
value = 1
meaning = "it is new"
[[scale]]
word = "no"
value = 0
meaning = "it is not"
"""


def test_a_rubric_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "fresh.toml").write_text(MINE)
    (signal,) = load_signals([str(tmp_path / "fresh.toml")])
    assert isinstance(signal, Judged) and (signal.name, signal.view) == ("judge.fresh", "prefix")
    backend = FakeBackend(lambda text, draw: "yes" if "desk 0?" in text else "no")
    check_signal(signal.bound(Interview(model(backend))), POINTS)  # type: ignore[arg-type]
    assert signal.bound(Interview(model(backend))).score(POINTS[:2]) == [1.0, 0.0]
    assert len(signal.questions(POINTS)) == len(POINTS)  # one order: one question a point


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"credit-audit rubric 1"', '"rubric"', "is no rubric"),
        ('view = "prefix"', 'view = "back"', "view is 'back'"),
        ("turns = 2", "turns = -2", "turns is -2"),
        ("turns = 2", "turn = 2", "unknown key 'turn'"),
        ("orders = 1", "orders = true", "orders is True"),
        ("{action}", "{act}", "{act}"),
        ("{action}", "it", "needs {action} and {scale}"),
        ("{action}", "{action} {first}", "needs {action} and {scale}"),
        ('word = "no"', 'word = "Yes"', "two different words"),
        ("value = 0", "value = 1", "two different words"),
        ("value = 0", 'value = "0"', "no step of a scale"),
        ("question", "question = 3\nsystem", "question is 3"),
        ('format = "', 'format = ""', "does not parse as TOML"),
    ],
)
def test_a_bad_rubric_is_said(old: str, new: str, says: str) -> None:
    with pytest.raises(SignalError, match=re.escape(says)) as error:
        read_rubric(MINE.replace(old, new, 1), "mine.toml")
    assert str(error.value).startswith("mine.toml: ")


def test_rubrics_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SignalError, match="cannot be read as a rubric"):
        load_signals([str(tmp_path / "none.toml")])
    with pytest.raises(SignalError, match="at most 100000"):
        read_rubric("#" * 200_000, "long.toml")


# On a run -----------------------------------------------------------------------------------------------------------


def by_place(text: str, draw: int) -> str:
    """A judge that likes what is acted on and does not like walking; it refuses now and then."""
    step, command = re.findall(r"[Ss]tep (\d+)(?:, which it takes now, is)?: (\w+)", text)[-1]
    if int(step) % 5 == 4:
        return "I'm sorry, I cannot say."
    return "0" if command == "go" else "+1"


def test_columns_states_and_what_is_stored(small_run: Run) -> None:
    backend = FakeBackend(by_place)
    names = ["judge.help3_prefix", "judge.help3_hindsight"]
    found = score(small_run, names, judge=model(backend), save=False)
    assert len(backend.asked) == len(set(backend.asked)), "a question was asked twice"
    frame = found.frame
    refused = frame["judge.help3_prefix:why"].eq("refused: the judge refused").fillna(False).astype(bool)
    assert (refused == ((frame["step"] + 1) % 5 == 4)).all() and refused.any()
    assert (frame["judge.help3_prefix"].isna() == refused).all()
    about = found.about["judge.help3_prefix"]["judge"]
    assert about["states"] == {"parsed": 2 * int((~refused).sum()), "refused": 2 * int(refused.sum())}
    assert about["readout"] == "answers in words" and about["model"] == {"fake": True}
    assert about["rubric"]["scale"] == {"+1": 1.0, "0": 0.0, "-1": -1.0}
    json.dumps(dict(found.about))
    table = found.answers().set_index("signal")
    assert table.loc[names, "refused"].tolist() == [2 * int(refused.sum())] * 2
    assert not any(name.startswith("judge") or name == "confidence" for name in DEFAULT)


def test_a_judge_is_asked_about_the_points_of_the_study_alone(small_run: Run) -> None:
    whole = Source.of_run(small_run.directory)
    assert whole.studied == set(small_run.effects["point"])
    some = frozenset(sorted(small_run.effects["point"])[::3])
    backend = FakeBackend(by_place)
    frame = score(replace(whole, studied=some), ["judge.help3_prefix", "baseline.step"], judge=model(backend)).frame
    assert len(backend.asked) == 2 * len(some)
    left = ~frame["point"].isin(some)
    assert frame.loc[left, "judge.help3_prefix"].isna().all() and frame["judge.help3_prefix"].notna().any()
    assert (frame.loc[left, "judge.help3_prefix:why"] == NOT_STUDIED).all()
    assert frame["baseline.step"].notna().all()


def test_a_judge_passes_the_check_and_a_constant_one_does_not(small_run: Run) -> None:
    check_leakage(small_run, ["judge.help3_prefix"], judge=model(FakeBackend(by_place)))
    with pytest.raises(InputError, match="is 1 at every point"):
        check_leakage(small_run, ["judge.help3_prefix"], judge=model(FakeBackend(lambda text, draw: "+1")))


def test_a_judge_must_be_named_and_be_a_model(small_run: Run) -> None:
    with pytest.raises(InputError, match=r"judge.help3_prefix asks a language model: name one with --judge"):
        score(small_run, ["judge.help3_prefix"], save=False)
    with pytest.raises(InputError, match="is no judge"):
        score(small_run, ["judge.help3_prefix"], judge="hasty", save=False)
    with pytest.raises(InputError, match="is no language model"):
        score(small_run, ["judge.help3_prefix"], judge=LinearPolicy.load(shipped_path("hasty")), save=False)


def test_words_of_confidence_are_the_policys_own_or_the_judges(small_run: Run) -> None:
    name = "confidence.verbalised"
    bare = score(small_run, [name, "baseline.step"], save=False).frame
    assert bare[f"{name}:why"].eq("the policy is no language model, and no judge was named").all()

    def unsure_of_going(text: str, draw: int) -> str:
        return "unsure" if re.search(r"step \d+, is: go", text) else "Answer: very sure"

    judge = model(FakeBackend(unsure_of_going))
    frame = score(small_run, [name], judge=judge, save=False).frame
    assert set(frame[name].dropna()) == {0.25, 1.0} and frame[f"{name}:flag"].eq(False).all()
    player, other = model(FakeBackend(lambda text, draw: "sure")), model(FakeBackend(lambda text, draw: "unsure"))
    (signal,) = seated(load_signals([name]), other, lambda: player)
    assert isinstance(signal, Judged) and signal.score(POINTS[:1]) == [0.75]
    assert isinstance(signal.ask, Interview) and signal.ask.describe()["asked"] == "the policy itself"
    assert "Your next command, step 1, is: go to desk 0" in player.backend.asked[0]  # type: ignore[attr-defined]


def test_answers_of_a_model_in_process_are_kept(tmp_path: Path) -> None:
    """An interrupted scoring goes on: what was answered before the failure is not asked again."""
    from audit.llm.journal import Journal
    from audit.scoring import judging

    failing = {"on": True}

    def says(text: str, draw: int) -> str:
        if failing["on"] and len(backend.asked) > judging.TOGETHER + 10:
            raise RuntimeError("out of memory")
        return "+1"

    backend = FakeBackend(says)
    points = trajectory("a", 50)
    questions = judged("judge.help3_prefix").questions(points)

    def interview() -> Interview:
        return Interview(model(backend), answers=Journal(tmp_path / "answers.sqlite"))

    with pytest.raises(RuntimeError):
        interview()(questions)
    failing["on"] = False
    asked = len(backend.asked)
    answers: Sequence[Answer] = interview()(questions)
    assert len(backend.asked) - asked == len(questions) - judging.TOGETHER
    assert interview()(questions) == answers and len(backend.asked) - asked == len(questions) - judging.TOGETHER
