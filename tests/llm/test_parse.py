"""What a model wrote and the command it meant: a table of both, and answers that hold no command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.llm.parse import parse_command

ADMISSIBLE = ("go to desk 1", "go to desk 10", "take mug 1 from desk 1", "move mug 1 to desk 1", "look", "inventory")


@pytest.mark.parametrize(
    ("text", "command", "repairs"),
    [
        ("go to desk 1", "go to desk 1", ()),
        ("go to desk 1\n", "go to desk 1", ()),
        ("  go to desk 10  ", "go to desk 10", ()),
        ("> go to desk 1", "go to desk 1", ("marks",)),
        ('"Go to desk 1."', "go to desk 1", ("marks", "case")),
        ("**look**", "look", ("marks",)),
        ("- look", "look", ("marks",)),
        ("go  to   desk 1", "go to desk 1", ("spaces",)),
        ("Thought: the mug.\nAction: take mug 1 from desk 1", "take mug 1 from desk 1", ("action line",)),
        ("Thought: a\nAction: look\nObservation: b\nAction: inventory", "look", ("action line",)),
        ("Action:\nlook", "look", ("action line",)),
        ("**Action:** look", "look", ("action line", "marks")),
        ("Thought: hm\nlook", "look", ("thoughts",)),
        ("<think>go to desk 10?</think>\nlook", "look", ("thoughts",)),
        ("go to desk 10?</think>look", "look", ("thoughts",)),
        ("put mug 1 in/on desk 1", "move mug 1 to desk 1", ("dialect",)),
        ("put mug 1 on desk 1", "move mug 1 to desk 1", ("dialect",)),
        ("put the mug 1 on the desk 1", "move mug 1 to desk 1", ("articles, dialect",)),
        ("go to the desk 1", "go to desk 1", ("articles",)),
        ("look\nThen I would take the mug.", "look", ("first line",)),
        # Real actions of the policy that the game does not admit stay what they are.
        ("go to desk 2", "go to desk 2", ()),
        ("Eat mug 1", "eat mug 1", ("case",)),
        ("put mug 2 in/on desk 1", "put mug 2 in/on desk 1", ()),
        ("I would go to desk 1 now", "i would go to desk 1 now", ("case",)),
    ],
)
def test_what_is_meant(text: str, command: str, repairs: tuple[str, ...]) -> None:
    parsed = parse_command(text, ADMISSIBLE)
    assert (parsed.command, parsed.repairs) == (command, repairs)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n ", "empty"),
        ("<think>I should", "inside a thought"),
        ("Thought: I should", "no command"),
        ("...", "no command"),
    ],
)
def test_no_command_has_a_reason(text: str, reason: str) -> None:
    parsed = parse_command(text, ADMISSIBLE)
    assert parsed.command is None and reason in str(parsed.reason)


def test_the_other_dialect_is_read_too() -> None:
    assert parse_command("move mug 1 to desk 1", ("put mug 1 in/on desk 1",)).command == "put mug 1 in/on desk 1"


def test_without_repair_the_wording_stands() -> None:
    parsed = parse_command("<think>x</think>Go to desk 1.", ADMISSIBLE, repair=False)
    assert (parsed.command, parsed.repairs) == ("Go to desk 1.", ("thoughts",))


@given(st.text(max_size=80))
def test_any_text_gives_a_one_line_command_or_a_reason(text: str) -> None:
    parsed = parse_command(text, ADMISSIBLE)
    if parsed.command is None:
        assert parsed.reason
    else:
        assert parsed.command.strip() == parsed.command != "" and "\n" not in parsed.command


@given(st.sampled_from(ADMISSIBLE))
def test_a_command_of_the_game_is_never_repaired(command: str) -> None:
    assert parse_command(command, ADMISSIBLE) == parse_command(command, ADMISSIBLE, repair=False)
