"""Interventions and rules: what they do at a decision, and what they say to bad input."""

from __future__ import annotations

import asyncio

import pandas as pd
import pytest

from audit.mrt.interventions import Act, Moment, failed, given_before, load_intervention
from audit.mrt.rules import read_rule, read_rules
from audit.policies import History, Proposal
from envs import InputError, Turn, games, make
from tests.mrt.worlds import Wanderer


def moment(commands: list[str], proposal: str | None, env: str = "tabular:chain:4") -> Moment:
    world = make(env)
    history = History(world.game_id, world.reset())
    for command in commands:
        history = history.then(command, world.step(history.turn.state, command))
    return Moment(history, history, 10 - len(commands), None if proposal is None else Proposal(proposal))


def act(spec: str, at: Moment, seed: int = 0) -> Act:
    return asyncio.run(load_intervention(spec).act([at], policy=Wanderer(), seeds=[seed]))[0]  # type: ignore[return-value]


def test_the_rule_reviewer_replaces_what_cannot_help() -> None:
    assert act("review:rule", moment([], "go right")).command is None
    assert act("review:rule", moment([], "fly")).command == "go left"
    assert act("review:rule", moment(["wait"], "wait")).command == "go left"
    assert act("review:rule", moment(["wait", "go left", "go right"], "wait")).command is None  # another state
    review = load_intervention("review:rule")
    assert review.features(moment([], "fly")) == {"disagrees": 1}
    assert review.features(moment([], "wait")) == {"disagrees": 0}


def test_the_expert_reviewer_approves_what_it_would_do() -> None:
    address = games("generated:6:0")[0].address
    review = load_intervention("review:expert")
    first = moment([], "look", address)
    wanted = asyncio.run(review.act([first], policy=Wanderer(), seeds=[0]))[0].command
    assert wanted in first.history.turn.admissible and wanted != "look"
    assert asyncio.run(review.act([moment([], wanted, address)], policy=Wanderer(), seeds=[0]))[0].command is None
    assert review.features(first) == {"disagrees": 1}


def test_resample_takes_the_most_frequent_draw_of_the_policy() -> None:
    once = {act("resample", moment([], "wait"), seed).command for seed in range(40)}
    assert once == {"go left", "go right", "wait"}
    many = [act("resample:25", moment([], "wait"), seed).command for seed in range(40)]
    assert many.count("go right") >= 35  # half of all draws go right, a quarter each of the others
    assert act("resample:3", moment([], "wait"), 7) == act("resample:3", moment([], "wait"), 7)


def test_feedback_only_after_a_failure() -> None:
    for tone, word in (
        ("helpful", "Commands that work here: go left, go right, wait"),
        ("adversarial", "'fly' worked"),
    ):
        feedback = load_intervention(f"feedback:{tone}")
        assert feedback.before_proposal
        assert not feedback.eligible(moment([], None)) and not feedback.eligible(moment(["go right"], None))
        assert feedback.eligible(moment(["fly"], None))
        assert word in str(act(f"feedback:{tone}", moment(["fly"], None)).message)


def test_hints() -> None:
    assert act("hint:look around", moment([], None)).message == "[Hint] look around"
    address = games("generated:6:0")[0].address
    message = act("hint:expert", moment([], None, address)).message
    assert message is not None and message.split(": ")[1] in moment([], None, address).history.turn.admissible


def test_what_counts_as_failure_and_repetition() -> None:
    assert failed(moment(["fly"], None).history) and not failed(moment(["wait"], None).history)
    start = Turn("here", ("go",), False, False, 0)
    nothing = History("g", start).then("go", Turn("Nothing happens.", ("go",), False, False, 0))
    assert failed(nothing)
    assert given_before(moment(["wait"], None).history, "wait") and not given_before(moment([], None).history, "wait")


def test_interventions_of_ones_own() -> None:
    own = load_intervention("python:tests.mrt.worlds:Right")
    assert own.describe() == {"kind": "right"}
    for spec, says in (
        ("python:nowhere_at_all:Right", "cannot be made"),
        ("python:tests.mrt.worlds:Left", "cannot be made"),
        ("python:tests.mrt.worlds:Wanderer", "has no `before_proposal`"),
        ("review:nobody", "no such intervention"),
        ("resample:0", "number of draws"),
        ("hint:", "no such intervention"),
    ):
        with pytest.raises(InputError, match=says):
            load_intervention(spec)


def test_rules_hold_alike_on_one_decision_and_on_a_table() -> None:
    frame = pd.DataFrame(
        {"t": [0, 5, 9], "group": ["go", "put", "take"], "flag": [True, False, True], "x": [0.5, 1.0, 2.0]}
    )
    expected = {
        "always": [1, 1, 1],
        "never": [0, 0, 0],
        "0.3": [0.3, 0.3, 0.3],
        "t<5": [1, 0, 0],
        "late: t>=5": [0, 1, 1],
        "group=put|take & t<=5": [0, 1, 0],
        "group!=go": [0, 1, 1],
        "flag=1": [1, 0, 1],
        "x=1|2": [0, 1, 1],
        "x>0.5 & flag=1": [0, 0, 1],
    }
    for text, values in expected.items():
        rule = read_rule(text)
        assert rule(frame).tolist() == values, text
        assert [rule.at(row) for row in frame.to_dict("records")] == values, text
    assert read_rule("late: t>=5").name == "late" and str(read_rule("t>=5")) == "t>=5"
    assert list(read_rules(["always", "late: t>=5"])) == ["always", "late"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1.5", "no probability"),
        ("t<", "no comparison"),
        ("t<soon", "no number"),
        ("__import__('os')", "no comparison"),
        ("", "no comparison"),
    ],
)
def test_bad_rules(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_rule(text)


def test_rules_about_what_is_not_there() -> None:
    with pytest.raises(InputError, match="`z` is none of the features"):
        read_rule("z=1").at({"t": 1})
    with pytest.raises(InputError, match="`z` is no declared feature"):
        read_rule("z=1")(pd.DataFrame({"t": [1]}))
    with pytest.raises(InputError, match="no order"):
        read_rule("t<1").at({"t": "soon"})
    with pytest.raises(InputError, match="two rules"):
        read_rules(["a: t<1", "a: t<2"])
