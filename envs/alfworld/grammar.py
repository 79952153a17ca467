"""The text grammar of an ALFWorld game (`alfred.twl2`): parsed once into plain data, never evaluated.

Knows: the surface syntax of TextWorld's context-sensitive grammars, including its quirks (leading white
space of a line is dropped, an unparsable tail of a right-hand side is ignored), and the small expression
language that ALFWorld grammars use. Hides: both. Out come frozen nodes that `text.py` specialises.

The stock engine runs Python's `eval` on every `{expression}`. Here an expression is names, attributes,
string literals, `+` and `or`; anything else is an `InputError` and nothing of it runs.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from envs.core import InputError

ATTRIBUTES = ("id", "type", "name", "noun", "adj", "desc", "room_type", "definite", "indefinite", "synonyms")
MAX_EXPRESSION = 300
MAX_GRAMMAR = 1_000_000


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that is printed as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """`#rule#`: the text of another rule."""

    rule: str


@dataclass(frozen=True, slots=True)
class Attribute:
    """`x` or `x.name`; a bare `x` is printed as its name."""

    variable: str
    attribute: str


@dataclass(frozen=True, slots=True)
class Join:
    """`a + b`: both parts must be text."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class FirstOf:
    """`a or b`: the first part that is not empty or missing."""

    parts: tuple[Expression, ...]


Expression = Literal | Attribute | Join | FirstOf


@dataclass(frozen=True, slots=True)
class Predicate:
    """One condition of a query, e.g. `inreceptacle(o:object, r:receptacle)`.

    A placeholder is its text, `name:type`: two of one name and different types are different.
    """

    name: str
    parameters: tuple[str, ...]


Query = tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """`{body | query}`: the body once for every match of the query (once, if there is no query)."""

    body: Reference | Expression
    query: Query


@dataclass(frozen=True, slots=True)
class Enumeration:
    """`[{body | query}]`: the items joined with the grammar's separators."""

    item: Item


Node = Literal | Reference | Item | Enumeration


@dataclass(frozen=True, slots=True)
class Rule:
    """One alternative of a grammar rule; the first alternative whose condition holds is used."""

    condition: Query
    rhs: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ActionText:
    """How an action reads as a command and what is said after it."""

    template: tuple[Node, ...]
    feedback: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """All text of a game. `actions` by lower-case PDDL action name, `rules` by rule name."""

    actions: dict[str, ActionText]
    rules: dict[str, tuple[Rule, ...]]

    def queries(self) -> Iterator[Query]:
        """Every query in the grammar."""
        for rule in (rule for alternatives in self.rules.values() for rule in alternatives):
            yield rule.condition
            yield from (item.query for item in items_of(rule.rhs))
        for action in self.actions.values():
            yield from (item.query for item in items_of(action.template + action.feedback))


def items_of(nodes: tuple[Node, ...]) -> list[Item]:
    """The items in a right-hand side, inside enumerations too."""
    return [
        node.item if isinstance(node, Enumeration) else node for node in nodes if isinstance(node, (Enumeration, Item))
    ]


# Surface syntax of a right-hand side -----------------------------------------------------------------------

_LINE_START = re.compile(r"(?://.*|\s*)\n?")
_TABS = re.compile(r"[\t]+")
_LITERAL = re.compile(r'[^;|"<>\[\]#{}]*')
_TAG = re.compile(r"[\w()/!<>\-\s,.]+")
_STATEMENT = re.compile(r"[^|\[\]{}\n<>]+")
_BAR = re.compile(r"\s*\|\s*")
_GIVEN = re.compile(r"[^;|{}\n\[\]#]+")


def _skip(text: str, at: int) -> int:
    """Past what the stock parser treats as blank: tabs anywhere; white space and `//` where a line starts."""
    before = -1
    while at != before:
        before = at
        while at == 0 or text[at - 1] == "\n":
            match = _LINE_START.match(text, at)
            if match is None or match.end() == at:
                break
            at = match.end()
        match = _TABS.match(text, at)
        at = match.end() if match else at
    return at


@lru_cache(maxsize=4096)
def parse_symbols(text: str) -> tuple[Node, ...]:
    """Parse one right-hand side, template or feedback string.

    As in the stock parser, what follows the longest parsable prefix is ignored.
    """
    nodes: list[Node] = []
    at = 0
    while True:
        parsed = _symbol(text, _skip(text, at))
        if parsed is None:
            break
        node, end = parsed
        if end <= at:
            break
        nodes.append(node)
        at = end
    return tuple(nodes)


def _symbol(text: str, at: int) -> tuple[Node, int] | None:
    opening = text[at : at + 1]
    if opening == "[":
        inner = _item(text, _skip(text, at + 1))
        if inner is None:
            return None
        end = _expect(text, inner[1], "]")
        return None if end is None else (Enumeration(inner[0]), end)
    if opening == "{":
        return _item(text, at)
    if opening == "#":
        return _reference(text, at)
    if opening == '"':
        match = _LITERAL.match(text, at + 1)
        end = None if match is None else _expect(text, match.end(), '"')
        return None if match is None or end is None else (Literal(match.group()), end)
    match = _LITERAL.match(text, at)
    return None if match is None or not match.group() else (Literal(match.group()), match.end())


def _expect(text: str, at: int, token: str) -> int | None:
    at = _skip(text, at)
    return at + len(token) if text.startswith(token, at) else None


def _reference(text: str, at: int) -> tuple[Reference, int] | None:
    match = _TAG.match(text, _skip(text, at + 1))
    end = None if match is None else _expect(text, match.end(), "#")
    return None if match is None or end is None else (Reference(match.group()), end)


def _item(text: str, at: int) -> tuple[Item, int] | None:
    if not text.startswith("{", at):
        return None
    inside = _skip(text, at + 1)
    body: Reference | Expression
    if text.startswith("#", inside):
        reference = _reference(text, inside)
        if reference is None:
            return None
        body, end = reference
    else:
        match = _STATEMENT.match(text, inside)
        if match is None:
            return None
        body, end = parse_expression(match.group()), match.end()
    query: Query = ()
    bar = _BAR.match(text, end)
    given = None if bar is None else _GIVEN.match(text, _skip(text, bar.end()))
    if given is not None:
        query, end = parse_query(given.group()), given.end()
    closing = _expect(text, end, "}")
    return None if closing is None else (Item(body, query), closing)


# Expressions and queries -----------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def parse_expression(source: str) -> Expression:
    """Parse `{...}` without running it.

    Raises InputError for anything but names, the attributes of an entity, string literals, `+` and `or`.
    """
    if len(source) > MAX_EXPRESSION:
        raise InputError(
            f"The grammar holds an expression of {len(source)} characters; ALFWorld grammars use at most "
            f"{MAX_EXPRESSION}. The game file is damaged or hostile; it was not run."
        )
    try:
        tree = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _forbidden(source) from None
    return _convert(tree, source)


def _convert(node: ast.expr, source: str) -> Expression:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return Literal(node.value)
    if isinstance(node, ast.Name):
        return Attribute(node.id, "name")
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in ATTRIBUTES:
        return Attribute(node.value.id, node.attr)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return Join((_convert(node.left, source), _convert(node.right, source)))
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        return FirstOf(tuple(_convert(value, source) for value in node.values))
    raise _forbidden(source)


def _forbidden(source: str) -> InputError:
    shown = source if len(source) <= 80 else source[:77] + "..."
    return InputError(
        f"The grammar holds the expression {shown!r}, which is outside the language of ALFWorld grammars (names, "
        f"attributes such as o.name, string literals, + and or); nothing was run. Is the file from a trusted source?"
    )


_PREDICATE = re.compile(r"\s*(!?[\w/]+)\s*\(([^()]*)\)\s*")
_PLACEHOLDER = re.compile(r"\s*([\w']+)\s*(?::\s*([\w/-]+)\s*)?")


@lru_cache(maxsize=4096)
def parse_query(source: str) -> Query:
    """Parse `p(a:t, b:u) & q(...)`. Raises InputError where it does not parse."""
    predicates = []
    for part in source.split("&"):
        match = _PREDICATE.fullmatch(part)
        if match is None:
            raise InputError(
                f"The grammar's condition {source!r} does not parse at {part.strip()!r}; expected p(x:type)."
            )
        arguments = match.group(2).split(",") if match.group(2).strip() else []
        placeholders = [_PLACEHOLDER.fullmatch(argument) for argument in arguments]
        if not all(placeholders):
            raise InputError(f"The grammar's condition {source!r} has a malformed argument in {part.strip()!r}.")
        predicates.append(
            Predicate(match.group(1), tuple(f"{p[1]}:{p[2] or p[1]}" for p in placeholders if p is not None))
        )
    return tuple(predicates)


# The whole file ---------------------------------------------------------------------------------------------

_BLANK = re.compile(r"(?:\s+|#[^\n]*)*")
_STRING = re.compile(r'"([^"]*)"')
_BLOCK = re.compile(r'"""((?:.|\n)*?)"""')
_NAME = re.compile(r"[\w/-]+")
_FIELDS = {"template": _STRING, "feedback": _STRING, "pddl": _BLOCK, "grammar": _BLOCK}


class _Cursor:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def peek(self, token: str) -> bool:
        self._blank()
        return self.text.startswith(token, self.at)

    def take(self, token: str | re.Pattern[str], what: str) -> str:
        self._blank()
        if isinstance(token, str):
            if not self.text.startswith(token, self.at):
                raise self._error(what)
            self.at += len(token)
            return token
        match = token.match(self.text, self.at)
        if match is None:
            raise self._error(what)
        self.at = match.end()
        return match.group(1) if match.groups() else match.group()

    def ended(self) -> bool:
        self._blank()
        return self.at >= len(self.text)

    def _blank(self) -> None:
        match = _BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _error(self, what: str) -> InputError:
        line = self.text.count("\n", 0, self.at) + 1
        found = self.text[self.at : self.at + 30].split("\n")[0]
        return InputError(f"The game's grammar does not parse at line {line}: expected {what}, found {found!r}.")


def parse_grammar(text: str) -> Grammar:
    """Parse the `grammar` entry of a game file.

    Raises InputError (with the line) where it does not parse or holds an expression that is not allowed.
    """
    if len(text) > MAX_GRAMMAR:
        raise InputError(f"The game's grammar has {len(text)} characters; at most {MAX_GRAMMAR} are read.")
    cursor = _Cursor(text)
    templates: dict[str, tuple[str, str]] = {}
    blocks: list[str] = []
    while not cursor.ended():
        if cursor.peek("grammar"):
            blocks.append(_field(cursor, "grammar"))
            continue
        cursor.take("action", "'action' or 'grammar'")
        name = cursor.take(_NAME, "the name of an action")
        cursor.take("{", "'{'")
        fields: dict[str, str] = {}
        while not cursor.peek("}"):
            key = next((key for key in _FIELDS if cursor.peek(key)), None)
            if key is None:
                raise cursor._error(f"one of {', '.join(_FIELDS)}")
            fields[key] = _field(cursor, key)
        cursor.take("}", "'}'")
        if "template" not in fields or "feedback" not in fields:
            raise InputError(f"The game's grammar gives action {name!r} no template or no feedback; both are needed.")
        templates[name.lower()] = (fields["template"], fields["feedback"])
        block = textwrap.dedent(fields.get("grammar", "{}"))
        blocks.append("\n".join(line for line in block.split("\n") if not line.lstrip().startswith("#")))
    rules: dict[str, tuple[Rule, ...]] = {}
    for block in blocks:
        rules.update(_rules(block))
    actions = {
        name: ActionText(parse_symbols(template), parse_symbols(feedback))
        for name, (template, feedback) in templates.items()
    }
    return Grammar(actions, rules)


def _field(cursor: _Cursor, key: str) -> str:
    cursor.take(key, f"'{key}'")
    cursor.take("::", "'::'")
    value = cursor.take(_FIELDS[key], f"the quoted text of {key}")
    cursor.take(";", "';'")
    return value


def _rules(block: str) -> dict[str, tuple[Rule, ...]]:
    try:
        data = json.loads(block)
    except (ValueError, RecursionError) as error:
        raise InputError(f"A grammar block of the game is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise InputError("A grammar block of the game is not a JSON object of rules.")
    rules: dict[str, tuple[Rule, ...]] = {}
    for name, alternatives in data.items():
        if not isinstance(alternatives, list) or not all(
            isinstance(a, dict) and isinstance(a.get("rhs"), str) and isinstance(a.get("condition", ""), str)
            for a in alternatives
        ):
            raise InputError(f'The grammar rule {name!r} must be a list of {{"rhs": text, "condition": text}}.')
        rules[name] = tuple(
            Rule(parse_query(a["condition"]) if a.get("condition") else (), parse_symbols(a["rhs"]))
            for a in alternatives
        )
    return rules
