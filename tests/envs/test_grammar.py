"""The grammar parser reads what TextWorld's parser reads, and refuses what must not run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envs.alfworld.grammar import (
    Attribute,
    Enumeration,
    FirstOf,
    Item,
    Join,
    Literal,
    Reference,
    parse_expression,
    parse_grammar,
    parse_query,
    parse_symbols,
)
from envs.core import InputError

PIECES = ["#a#", "{o.name}", "[", "{", "}", "]", "\n", "\t", " ", "text", '"', "//c", "|", "\\n", "<", "x;y"]
PIECES += ["{o.name | p(o:object)}", "[{r.name | q(r:r, l:l)}]", "{#b# | p(o:o)}", '"quoted"', "[{o.name}]"]


def stock(text: str) -> list[Any] | None:
    """What TextWorld's own parser makes of a right-hand side (None: it fails)."""
    textgen = pytest.importorskip("textworld.envs.pddl.textgen")
    try:
        return [node for node in map(_plain, textgen._parse_and_convert(text, rule_name="symbols")) if node != ""]
    except Exception:  # whatever the reference raises
        return None


def _plain(node: Any) -> Any:
    kind = type(node).__name__
    if kind == "TerminalSymbol":
        return node.symbol
    if kind == "NonterminalSymbol":
        return ("reference", node.symbol)
    if kind == "ListSymbol":
        return ("list", _plain(node.symbol))
    if kind == "ConditionalSymbol":
        body = node.expression
        shown = _plain(body) if type(body).__name__ == "NonterminalSymbol" else parse_expression(body.expression)
        return ("item", shown, parse_query(node.given) if node.given else ())
    raise AssertionError(kind)


def ours(text: str) -> list[Any] | None:
    try:
        return [node for node in map(_own, parse_symbols(text)) if node != ""]
    except InputError:
        return None


def _own(node: Any) -> Any:
    if isinstance(node, Literal):
        return node.text
    if isinstance(node, Reference):
        return ("reference", node.rule)
    if isinstance(node, Enumeration):
        return ("list", _own(node.item))
    assert isinstance(node, Item)
    return ("item", _own(node.body) if isinstance(node.body, Reference) else node.body, node.query)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join))
@example("\nleading line")
@example(" (it is open)")
@example("{o.indefinite} {o.name} (in/on the {r.name})}")
@example("//c\n\t\n")
def test_right_hand_sides_parse_as_in_textworld(text: str) -> None:
    mine = ours(text)
    if mine is not None:  # what we refuse, we refuse; what we accept must mean the same
        assert mine == stock(text)


def test_what_alfworld_uses_is_accepted() -> None:
    assert parse_expression("o.indefinite + ' ' + o.name") == Join(
        (Join((Attribute("o", "indefinite"), Literal(" "))), Attribute("o", "name"))
    )
    assert parse_expression("r.name or r.id") == FirstOf((Attribute("r", "name"), Attribute("r", "id")))
    assert parse_expression("r") == Attribute("r", "name")


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os').system('touch hacked')",
        "o.__class__",
        "open('/etc/passwd').read()",
        "(lambda: 1)()",
        "o.name * 1000000",
        "[x for x in o.name]",
        "f'{o.name}'",
        "o.name if o else 1",
        "9" * 5000,
        "(" * 200,
        "o.name.upper",
        "",
    ],
)
def test_expressions_outside_the_language_are_refused(source: str) -> None:
    with pytest.raises(InputError, match="expression"):
        parse_expression(source)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_expression, parse_query, parse_symbols, parse_grammar):
        try:
            parse(text)
        except InputError as error:
            assert str(error)


def test_a_grammar_error_names_its_line() -> None:
    with pytest.raises(InputError, match="line 3"):
        parse_grammar('action look {\n  template :: "look";\n  feedbak :: "#look#";\n}')


def test_a_rule_of_the_wrong_shape_is_named() -> None:
    block = json.dumps({"intro": [{"text": "no rhs"}]})
    with pytest.raises(InputError, match="'intro'"):
        parse_grammar(f'grammar :: """{block}""";')
