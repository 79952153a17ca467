"""Other people's logs: read as they were written, replayed, certified, and nothing dropped silently.

The logs here are written by the tests, over generated games; the real ones are read where they are at hand.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from audit.importers import (
    Imported,
    Problem,
    certificate_table,
    compare_observation,
    import_log,
    read_trajectories,
    write_trajectories,
)
from audit.records import Trajectory
from envs import Game, InputError, games, make
from envs.alfworld.games import read_game
from tests.conftest import shared

Lines = list[tuple[str, str]]  # command in the old dialect, answer in the old wording


def old_command(command: str) -> str:
    return re.sub(r"^move (.+) to (.+)$", r"put \1 in/on \2", command)


def old_wording(text: str, arrival: str = "") -> str:
    text = re.sub(r"^You arrive at [a-z]+ \d+\. ", arrival, text)
    return re.sub(r"^You move the (.+) to the (.+)\.$", r"You put the \1 in/on the \2.", text)


def played(game: Game, commands: list[str], arrival: str = "") -> tuple[str, Lines]:
    """The first text and the steps of a run, as an older ALFWorld would have told them."""
    env = make(game.address)
    turn = env.reset()
    intro = turn.observation.split("\n\n", 1)[1].replace("\n\n", "\n")
    lines = []
    for command in commands:
        turn = env.step(turn.state, command)
        lines.append((old_command(command), old_wording(turn.observation, arrival)))
    return intro, lines


def walkthrough(game: Game) -> list[str]:
    return list(read_game(game.address).walkthrough or ())


def knowagent(game: Game, lines: Lines, intro: str, result: Any) -> dict[str, Any]:
    text = intro + "\n> Think: I look around first.\n> ActionPath: Start\n"
    text += "".join(f"> {command}\n{answer}\n> Think: What next?\n" for command, answer in lines)
    return {"name": game.name, "result": result, "traj": text}


def expert(game: Game, lines: Lines, intro: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": intro}]
    for command, answer in lines:
        turns += [{"from": "gpt", "value": command}, {"from": "human", "value": answer}]
    return {"game": game.name, "conversation": turns}


def adapt(parts: list[Lines], intro: str, reward: Any, ends: str = "\n>\n\n\n") -> dict[str, Any]:
    """Each part is a sub-plan's transcript; the prompt before its first line is not written."""
    trace = ""
    for part in parts:
        block = "".join(f"> {command}\n{answer}\n" for command, answer in part)
        trace += block.removeprefix(">").rstrip("\n") + ends
    return {"problem": intro, "trace": trace, "plans": ["all at depth 1, success: False"], "reward": reward}


def as_lines(path: Path, *entries: Any) -> Path:
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")
    return path


def only(imported: Imported) -> Trajectory:
    assert not imported.problems, [str(problem) for problem in imported.problems]
    (trajectory,) = imported.trajectories
    return trajectory


def certificate(trajectory: Trajectory) -> dict[str, Any]:
    assert trajectory.certificate is not None
    return dict(trajectory.certificate)


@pytest.fixture(scope="module")
def found() -> list[Game]:
    return games("generated:6:0")


@pytest.fixture(scope="module")
def game(found: list[Game]) -> Game:
    """A game that is won by putting something somewhere, in which something must be opened or visited before."""
    return next(g for g in found if g.task_type == "pick_clean_then_place_in_recep")


# Wordings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "replayed", "agreement"),
    [
        ("Nothing happens.", "Nothing happens.", "exact"),
        (None, "Nothing happens.", "missing"),
        ("Nothing happens", "Nothing happens.", "wording"),
        ("Nothing happens. \r\n", "Nothing happens.", "wording"),
        ("Nothing", "Nothing happens.", "different"),
        ("", "Nothing happens.", "different"),
        ("On the desk 1, you see a pen 1.", "You arrive at desk 1. On the desk 1, you see a pen 1.", "wording"),
        ("You arrive at loc 12. The safe 1 is closed.", "You arrive at safe 1. The safe 1 is closed.", "wording"),
        ("You arrive at the location. The safe 1 is closed.", "You arrive at safe 1. The safe 1 is closed.", "wording"),
        ("You arrive at desk 2. On the desk 1, you see a pen 1.", "On the desk 1, you see a pen 1.", "different"),
        ("You arrive at desk 1. On the desk 12, you see nothing.", "On the desk 12, you see nothing.", "different"),
        ("You arrive at loc 12.", "You arrive at safe 1. The safe 1 is closed.", "different"),
        ("On the desk 1, you see a pen 1.", "On the desk 1, you see a pen 12.", "different"),
        ("On the desk 1, you see a pen 1, and a cd 1.", "On the desk 1, you see a cd 1, and a pen 1.", "different"),
        ("You put the pen 1 in/on the desk 1.", "You move the pen 1 to the desk 1.", "wording"),
        ("You put the pen 1 in the desk 1.", "You move the pen 1 to the desk 1.", "wording"),
        ("You put the pen 1 in/on the desk 2.", "You move the pen 1 to the desk 1.", "different"),
        ("-= Welcome to TextWorld, ALFRED! =-\n\nA room.\n\nYour task: go.", "A room.\nYour task: go.", "wording"),
        ("you pick up the pen 1 from the desk 1.", "You pick up the pen 1 from the desk 1.", "different"),
    ],
)  # fmt: skip
def test_only_known_wordings_agree(recorded: str | None, replayed: str, agreement: str) -> None:
    assert compare_observation(recorded, replayed) == agreement
    if recorded is not None:
        assert compare_observation(replayed, recorded) == agreement


@given(st.text(max_size=40), st.text(max_size=40))
def test_comparing_is_symmetric_and_never_fuzzy(one: str, other: str) -> None:
    assert compare_observation(one, one) == "exact"
    agreement = compare_observation(one, other)
    assert agreement == compare_observation(other, one)
    if one.split() != other.split():
        assert agreement == "different"


# The kinds --------------------------------------------------------------------------------------------------------


def test_knowagent_thoughts_stay_thoughts_and_a_misspelt_one_was_sent(tmp_path: Path, game: Game) -> None:
    commands = walkthrough(game)
    intro, lines = played(game, [commands[0], "think: hm", "", *commands[1:]])
    log = as_lines(tmp_path / "log.jsonl", knowagent(game, lines, intro, True))
    trajectory = only(import_log(log, "generated:6:0"))
    assert trajectory.commands == (commands[0], "think: hm", "", *commands[1:])
    assert trajectory.won and trajectory.status == "ok" and trajectory.policy == "unknown"
    assert trajectory.texts[0] == f"Think: I look around first.\nActionPath: Start\n{commands[0]}"
    assert trajectory.origin["log"] == "knowagent" and trajectory.origin["entry"] == 1
    facts = certificate(trajectory)
    assert facts["observations"]["different"] == facts["observations"]["missing"] == 0
    assert facts["observations"]["wording"] >= 3 and facts["observations"]["exact"] >= 2
    assert facts["no_ops"] == 2 and facts["translated"] == 1 and facts["dialect"] == "old"
    assert facts["outcome_recorded"] is facts["outcome_equal"] is facts["task_equal"] is True
    assert facts["thoughts_after"] == 1
    json.dumps(facts, allow_nan=False)


def test_adapt_transcripts_are_joined_with_the_prompt_that_is_not_written(tmp_path: Path, game: Game) -> None:
    commands = walkthrough(game)
    intro, lines = played(game, commands, arrival="You arrive at the location. ")
    thought = [("think: first this", "OK.")]
    parts = [thought + lines[:2], lines[2:-1], [*thought, lines[-1]]]
    data = {"overall": {"rate": 1.0}, "some": {game.name: adapt(parts, intro, True)}}
    log = tmp_path / "log.json"
    log.write_text(json.dumps(data, indent=1), encoding="utf-8")
    imported = import_log(log, "generated:6:0")
    trajectory = only(imported)
    assert imported.kind == "adapt" and "overall" in imported.notes[0]
    assert list(trajectory.commands) == commands
    assert certificate(trajectory)["transcripts"] == 3 and certificate(trajectory)["failed_attempts"] == 1
    assert certificate(trajectory)["observations"]["different"] == 0 and trajectory.won
    assert trajectory.texts[0] == f"think: first this\n{commands[0]}"


def test_adapt_failed_attempts_leave_an_empty_trace_which_is_a_problem(tmp_path: Path, game: Game) -> None:
    log = tmp_path / "log.json"
    log.write_text(json.dumps({"some": {game.name: adapt([], "intro", 0)}, "other": 3}), encoding="utf-8")
    imported = import_log(log, "generated:6:0")
    assert not imported.trajectories
    assert [problem.entry for problem in imported.problems] == [1, 2]
    assert "no action is recorded; what 1 failed" in imported.problems[0].reason
    assert str(imported.problems[0]).startswith(f"log.json, entry 1 ({game.name}): ")


def test_expert_conversations_record_no_outcome(tmp_path: Path, game: Game) -> None:
    intro, lines = played(game, walkthrough(game))
    trajectory = only(import_log(as_lines(tmp_path / "log", expert(game, lines, intro)), "generated:6:0"))
    facts = certificate(trajectory)
    assert trajectory.won and facts["outcome_recorded"] is None and facts["outcome_equal"] is None
    table = certificate_table([trajectory])
    assert table.loc[0, ["outcome_equal", "outcome_unrecorded", "won"]].tolist() == [0, 1, 1]


def test_our_own_lines_come_back_as_they_were(tmp_path: Path, game: Game) -> None:
    commands = walkthrough(game)
    env = make(game.address)
    turns = [env.reset()]
    for command in commands[:-1]:
        turns.append(env.step(turns[-1].state, command))
    ours = Trajectory(
        game=game.id, game_name=game.name, task_type=game.task_type, policy="p", budget=30,
        commands=tuple(commands[:-1]), observations=tuple(turn.observation for turn in turns), won=False,
        status="truncated", logprobs=(-0.5,) * (len(commands) - 1), texts=(None,) * (len(commands) - 1),
        origin={"seed": 1, "draw": 2},
    )  # fmt: skip
    log = tmp_path / "log.jsonl"
    assert write_trajectories(log, [ours]) == 1
    assert read_trajectories(log) == [ours]
    trajectory = only(import_log(log, [game]))
    assert trajectory.id == ours.id and trajectory.logprobs == ours.logprobs and trajectory.budget == 30
    assert certificate_table([trajectory]).loc[0, "exact"] == 1
    assert trajectory.texts == ours.texts


def test_the_least_that_our_schema_needs(tmp_path: Path, game: Game) -> None:
    log = as_lines(tmp_path / "log", {"game_name": game.name, "commands": walkthrough(game)})
    trajectory = only(import_log(log, [game], policy="me", budget=2))
    assert trajectory.won and trajectory.policy == "me" and trajectory.budget == len(trajectory.commands)
    assert certificate(trajectory)["observations"]["missing"] == len(trajectory.commands) + 1
    assert certificate(trajectory)["notes"] == ["longer than the 2 steps allowed"]
    assert certificate_table([trajectory]).loc[0, "incomplete"] == 1


# Traps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [True, False])
def test_either_dialect_imports_to_the_games_own(tmp_path: Path, game: Game, old: bool) -> None:
    commands = walkthrough(game)
    intro, lines = played(game, commands)
    if not old:
        env = make(game.address)
        turns = [env.reset()]
        for command in commands:
            turns.append(env.step(turns[-1].state, command))
        intro = turns[0].observation
        lines = [(c, turn.observation) for c, turn in zip(commands, turns[1:], strict=True)]
    trajectory = only(import_log(as_lines(tmp_path / "log", expert(game, lines, intro)), [game]))
    facts = certificate(trajectory)
    assert list(trajectory.commands) == commands
    assert facts["dialect"] == ("old" if old else "new") and facts["translated"] == old
    assert trajectory.texts[-1] == (lines[-1][0] if old else None)
    assert certificate_table([trajectory]).loc[0, "wording" if old else "exact"] == 1


@pytest.mark.parametrize("refused", ["move pan 9 to nowhere 1", "put pan 9 in/on nowhere 1"])
def test_a_refused_command_is_no_evidence_of_a_dialect(tmp_path: Path, game: Game, refused: str) -> None:
    intro, lines = played(game, ["look"])
    lines.insert(0, (refused, "Nothing happens."))
    facts = certificate(only(import_log(as_lines(tmp_path / "log", expert(game, lines, intro)), [game])))
    assert facts["dialect"] is None and facts["no_ops"] == 1


def test_the_outcome_is_the_goals_and_never_the_texts(tmp_path: Path, game: Game) -> None:
    intro, lines = played(game, [*walkthrough(game)[:-1], "look"])
    lines[-1] = (lines[-1][0], "You won! Task completed.")
    trajectory = only(import_log(as_lines(tmp_path / "log", knowagent(game, lines, intro, True)), [game]))
    facts = certificate(trajectory)
    assert not trajectory.won and trajectory.status == "truncated"
    assert facts["outcome_recorded"] is True and facts["outcome_equal"] is False
    assert facts["first_difference"]["step"] == len(lines)
    assert facts["first_difference"]["recorded"] == "You won! Task completed."
    assert facts["first_difference"]["replayed"].startswith("You are facing")
    table = certificate_table([trajectory])
    assert table.loc[0, ["different", "outcome_different", "won"]].tolist() == [1, 1, 0]


@pytest.mark.parametrize(("result", "outcome"), [(0, False), (1, True), (1.0, True), ("True", None), (None, None)])
def test_recorded_outcomes_that_say_nothing_certain_are_none(
    tmp_path: Path, game: Game, result: Any, outcome: bool | None
) -> None:
    intro, lines = played(game, walkthrough(game))
    trajectory = only(import_log(as_lines(tmp_path / "log", knowagent(game, lines, intro, result)), [game]))
    facts = certificate(trajectory)
    assert facts["outcome_recorded"] is outcome
    assert facts["outcome_equal"] is (None if outcome is None else outcome)


def test_another_task_text_is_seen(tmp_path: Path, game: Game) -> None:
    intro, lines = played(game, walkthrough(game))
    intro = re.sub("Your task is to: .*", "Your task is to: make tea.", intro)
    facts = certificate(only(import_log(as_lines(tmp_path / "log", expert(game, lines, intro)), [game])))
    assert facts["task_equal"] is False and facts["task_recorded"] == "make tea." and facts["each"][0] == "different"
    assert facts["outcome_replayed"] is True


def test_games_are_found_by_their_whole_name(tmp_path: Path, game: Game, found: list[Game]) -> None:
    """trial_T1 is not trial_T12, in either direction, and paths are names like any other."""
    other = next(g for g in found if g.id != game.id)
    short = Game(game.id, "task/trial_T1", game.task_type, game.address)
    long = Game(other.id, "task/trial_T12", other.task_type, other.address)
    intro, lines = played(game, walkthrough(game))
    entry = expert(game, lines, intro)
    names = ["task/trial_T1", "task/trial_T", "trial_T1", "task/trial_T12", "task/trial_T1 ", f"../{game.name}"]
    names += [game.address, "/etc/passwd"]
    log = as_lines(tmp_path / "log", *({**entry, "game": name} for name in names))
    imported = import_log(log, [long, short])
    assert [(t.game, t.game_name) for t in imported.trajectories] == [
        (game.id, "task/trial_T1"),
        (other.id, "task/trial_T12"),
    ]
    assert certificate(imported.trajectories[1])["observations"]["different"] > 3
    assert [problem.entry for problem in imported.problems] == [2, 3, 5, 6, 7, 8]
    assert all(problem.reason.startswith("unknown game: none of the 2 games") for problem in imported.problems)


def test_two_games_of_one_name_and_another_version_of_a_game(tmp_path: Path, game: Game, found: list[Game]) -> None:
    other = next(g for g in found if g.id != game.id)
    twin = Game(other.id, game.name, None, other.address)
    entry = {"game_name": game.name, "commands": ["look"]}
    log = as_lines(tmp_path / "log", entry, {**entry, "game": game.id}, {**entry, "game": "0" * 32})
    imported = import_log(log, [game, twin])
    assert [t.game for t in imported.trajectories] == [game.id]
    assert imported.problems[0].reason.startswith("ambiguous game: 2 different games")
    assert imported.problems[1].reason.startswith("another version of its game: content 000000000000 in the log")


def test_a_log_that_goes_on_after_the_goal_stops_there(tmp_path: Path, game: Game) -> None:
    commands = walkthrough(game)
    intro, lines = played(game, [*commands, "look", "look"])
    trajectory = only(import_log(as_lines(tmp_path / "log", expert(game, lines, intro)), [game]))
    assert list(trajectory.commands) == commands and trajectory.won
    facts = certificate(trajectory)
    assert facts["actions"] == len(commands) + 2 and facts["replayed"] == len(commands)
    assert facts["notes"] == ["2 actions after the end of the game are left out"]


def test_a_log_that_is_cut_in_the_middle_is_missing_what_it_lacks(tmp_path: Path, game: Game) -> None:
    intro, lines = played(game, walkthrough(game))
    entry = expert(game, lines[:2], intro)
    entry["conversation"].pop()
    trajectory = only(import_log(as_lines(tmp_path / "log", entry), [game]))
    assert trajectory.observations[-1] is None and trajectory.status == "truncated"
    assert certificate(trajectory)["each"][-1] == "missing"
    assert certificate_table([trajectory]).loc[0, "incomplete"] == 1


def test_a_repeated_line_is_imported_once_and_said(tmp_path: Path, game: Game) -> None:
    ours = {"game_name": game.name, "commands": ["look"], "origin": {"seed": 1}}
    imported = import_log(as_lines(tmp_path / "log", ours, ours), [game])
    assert len(imported.trajectories) == 1
    assert imported.problems[0].reason == "a repetition: the same trajectory as line 1"


# Bad input --------------------------------------------------------------------------------------------------------


def test_every_bad_line_has_its_reason_and_counts_add_up(tmp_path: Path, game: Game) -> None:
    intro, lines = played(game, walkthrough(game))
    good = json.dumps(knowagent(game, lines, intro, True))
    bad = [
        ("{", "not readable as JSON"),
        ('{"name": "a", "name": "b", "traj": ""}', "not readable as JSON: the key 'name' occurs twice"),
        ('{"name": "a", "traj": NaN}', "not readable as JSON: NaN"),
        (r'{"name": "a", "traj": "\ud800"}', "not UTF-8 text"),
        ("[" * 100_000, "not readable as JSON"),
        ("[]", "'name' is missing"),
        ('{"name": 3, "traj": ""}', "'name' is missing or no text"),
        ('{"name": "a/b", "traj": null}', "'traj' is missing or no text"),
        ('{"name": "a/b", "traj": "no prompt"}', "no action is recorded"),
        ('{"name": "a/b", "traj": "> look"}', "unknown game"),
        (json.dumps({"name": "x" * 600, "traj": "> look"}), "too long: a name"),
        (json.dumps({"name": "a/b", "traj": "> look\n" * 2_001}), "too long: 2001 actions"),
        (json.dumps({"name": "a/b", "traj": "> " + "x" * 2_001}), "too long: a command"),
        (json.dumps({"name": "a/b", "traj": "x" * 8_000_001}), "too long: more than 8000000 bytes"),
    ]
    log = tmp_path / "log.jsonl"
    torn = good[: len(good) // 2].encode()
    log.write_bytes(
        b"\xef\xbb\xbf" + "\r\n".join([good, "", *(line for line, _ in bad)]).encode() + b"\n\xff\xfe\n" + torn
    )
    imported = import_log(log, [game])
    assert len(imported.trajectories) == 1
    expected = [*(reason for _, reason in bad), "not UTF-8 text", "torn: the file ends within it"]
    assert [problem.entry for problem in imported.problems] == list(range(3, 3 + len(expected)))
    for problem, reason in zip(imported.problems, expected, strict=True):
        assert problem.reason.startswith(reason), str(problem)
    row = certificate_table(imported.trajectories, imported.problems).iloc[0]
    assert row["entries"] == row["imported"] + row["not_replayed"] == 1 + len(expected)
    assert "too long (4)" in row["reasons"] and "no action is recorded (1)" in row["reasons"]


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "hello", "{}", "[1]", '{"a": {"b": {}}}', '{"name": 1}', "3", '{"name": "a/b"}\n{"traj": ""}\n'],
)
def test_files_of_no_known_kind_are_refused(tmp_path: Path, game: Game, text: str) -> None:
    log = tmp_path / "log"
    log.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"is empty|no log of a known kind"):
        import_log(log, [game])


def test_arguments_that_cannot_be_are_refused(tmp_path: Path, game: Game) -> None:
    log = as_lines(tmp_path / "log", {"game_name": game.name, "commands": ["look"]})
    with pytest.raises(InputError, match="kind is 'other'"):
        import_log(log, [game], kind="other")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="budget is 0"):
        import_log(log, [game], budget=0)
    with pytest.raises(InputError, match="cannot be read"):
        import_log(tmp_path / "absent", [game])


def test_a_game_that_cannot_be_opened_is_a_problem_without_its_path(tmp_path: Path, game: Game) -> None:
    broken = tmp_path / "game.tw-pddl"
    broken.write_text("{}", encoding="utf-8")
    log = as_lines(tmp_path / "log", {"game_name": "a/b", "commands": ["look"]})
    (problem,) = import_log(log, [Game("1" * 32, "a/b", None, str(broken))]).problems
    assert problem.reason.startswith("its game cannot be opened: ") and str(tmp_path) not in problem.reason


GOOD: dict[str, Any] = {"game": "g", "game_name": "a/b", "budget": 5, "commands": ["look"], "won": False}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"commands": "look"}, "'commands' is not a list of texts"),
        ({"commands": ["look", None]}, "'commands' is not a list of texts"),
        ({"won": 1}, "'won' is not true or false"),
        ({"budget": True}, "'budget' is not a whole number"),
        ({"budget": 0}, "'budget' is not a whole number"),
        ({"observations": [None]}, "'observations' has 1 items; 1 commands need 2"),
        ({"logprobs": [0.5]}, "'logprobs' is not a list of finite numbers"),
        ({"texts": []}, "'texts' has 0 items"),
        ({"status": "fine"}, "'status' is not one of"),
        ({"status": ["ok"]}, "'status' is not one of"),
        ({"origin": {"x": 1e400}}, "not readable as JSON: Infinity"),
        ({"origin": []}, "'origin' is not an object"),
        ({"id": "0" * 32}, "its id does not follow from its content"),
    ],
)
def test_reading_names_the_line_and_what_is_wrong(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = as_lines(tmp_path / "t.jsonl", GOOD, {**GOOD, **change})
    with pytest.raises(InputError, match=f"line 2: {re.escape(reason)}"):
        read_trajectories(path)


def test_a_torn_last_line_is_named_as_such(tmp_path: Path) -> None:
    path = as_lines(tmp_path / "t.jsonl", GOOD, GOOD)
    assert len(read_trajectories(path)) == 2
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match="line 2: torn: the file ends within it"):
        read_trajectories(path)
    path.write_text('{"game": "g", "game_name"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="line 1: not readable as JSON"):
        read_trajectories(path)
    path.write_text(json.dumps({**GOOD, "origin": {"x": 7}}).replace("7", "1e999"), encoding="utf-8")
    with pytest.raises(InputError, match="line 1: 'origin' or 'certificate' holds a number that is not finite"):
        read_trajectories(path)


def test_writing_is_whole_or_not_at_all(tmp_path: Path) -> None:
    path = as_lines(tmp_path / "t.jsonl", GOOD)
    before = path.read_bytes()

    def broken() -> Any:
        yield Trajectory.from_json(GOOD)
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        write_trajectories(path, broken())
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["t.jsonl"]
    with pytest.raises(InputError, match="cannot be written"):
        write_trajectories(tmp_path / "absent" / "t.jsonl", [])


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
line_of_text = st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=12)
text_lines = st.lists(st.sampled_from(["> look", ">", "> Think: a", " think: b", "OK.", ""]) | line_of_text, max_size=8)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_malformed_entries_become_problems_and_never_crashes(tmp_path: Path, game: Game, data: st.DataObject) -> None:
    name = st.sampled_from([game.name, game.name[:-1], "a/b"]) | json_like
    text = text_lines.map("\n".join) | json_like
    turns = st.lists(
        st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "x"]), "value": text}) | json_like, max_size=5
    )
    listed = st.lists(st.sampled_from(["look", "inventory", None]) | json_like, max_size=3)
    entries = {
        "knowagent": st.fixed_dictionaries({"name": name, "traj": text, "result": json_like}),
        "expert": st.fixed_dictionaries({"game": name, "conversation": turns | json_like}),
        "audit": st.fixed_dictionaries(
            {"game_name": name, "commands": listed | json_like},
            optional=dict.fromkeys(("observations", "origin", "won", "budget", "logprobs", "game"), listed | json_like),
        ),
    }
    log = tmp_path / "fuzz"
    kind = data.draw(st.sampled_from(["knowagent", "expert", "audit", "adapt"]))
    if kind == "adapt":
        group = st.dictionaries(
            st.sampled_from([game.name, "a/b"]), st.fixed_dictionaries({"trace": text, "problem": text}) | json_like
        )
        document = data.draw(st.dictionaries(st.sampled_from(["x", "overall", "y"]), group | json_like, max_size=3))
        log.write_text(json.dumps(document), encoding="utf-8")
        n = None
    else:
        lines = data.draw(st.lists(entries[kind] | json_like, max_size=4))
        as_lines(log, *lines)
        n = len(lines)
    imported = import_log(log, [game], kind=kind)
    assert n is None or len(imported.trajectories) + len(imported.problems) == n
    assert all(isinstance(problem, Problem) and problem.reason for problem in imported.problems)
    for trajectory in imported.trajectories:
        assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json(), allow_nan=False))) == trajectory


# The real logs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("knowagent_llama2-13b_d1.jsonl", "train"),
        ("expert_train.jsonl", "train"),
        ("adapt_text-davinci-003_valid-unseen.json", "valid_unseen"),
    ],
)
def test_real_logs_replay_to_the_recorded_outcomes(
    tmp_path: Path, official: Callable[[str], Path], name: str, split: str
) -> None:
    """All entries by AUDIT_IMPORT_STRIDE=1; else a part (a game that is new takes .4 s to compile)."""
    log = shared("data", "trajectories", name)
    if not log.exists():
        pytest.skip(f"the logs are not here ({log.parent}); set AUDIT_SHARED_DATA to run this test")
    folder = official(split)
    stride = int(os.environ.get("AUDIT_IMPORT_STRIDE", "16"))
    part = tmp_path / name
    unusable = 0
    if name.endswith(".jsonl"):
        lines = log.read_bytes().splitlines()
        # 133, 153: `> think:` was sent to the game. 297: an empty command was.
        chosen = sorted({*range(0, len(lines), stride), 133, 153, 297})
        part.write_bytes(b"\n".join(lines[number] for number in chosen))
        n = len(chosen)
    else:
        data = json.loads(log.read_bytes())
        part.write_text(
            json.dumps(
                {
                    group: {k: v for i, (k, v) in enumerate(entries.items()) if i % (stride // 4 or 1) == 0}
                    for group, entries in data.items()
                    if group != "overall"
                }
            ),
            encoding="utf-8",
        )
        kept = [entry for entries in json.loads(part.read_bytes()).values() for entry in entries.values()]
        n, unusable = len(kept), sum(not entry["trace"].strip() for entry in kept)
    imported = import_log(part, folder)
    assert len(imported.trajectories) == n - unusable
    assert all(problem.reason.startswith("no action is recorded; ") for problem in imported.problems)
    row = certificate_table(imported.trajectories, imported.problems).iloc[0]
    assert row["entries"] == n and row["wording"] == row["imported"] == n - unusable
    assert row["different"] == row["incomplete"] == row["outcome_different"] == row["task_different"] == 0
    assert row["translated"] > 0
    assert row["outcome_unrecorded" if "expert" in name else "outcome_equal"] == n - unusable
    assert row["won"] == n if "expert" in name else 0 < row["won"] < n - unusable
