"""What the game says: the grammar specialised to one game, as functions of the state integer.

Knows: how the stock engine answers a grammar's queries (which facts, in which order, no two variables for one
thing) and how it puts text together. Hides: all of it behind `Narrator.feedback(number, core)`.

A feedback is specialised once: its queries become rows of bit masks in the order in which the stock engine
would find them, so that telling it in a state is testing masks. Only the atoms in its masks can change it,
and the text is remembered by those.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from envs.alfworld.grammar import (
    Attribute,
    Enumeration,
    Expression,
    FirstOf,
    Grammar,
    Item,
    Join,
    Literal,
    Node,
    Predicate,
    Query,
    Reference,
    Rule,
    items_of,
)
from envs.core import InputError

Mapping = Sequence[tuple[str, str, int]]  # (placeholder, type, object number) for each argument of an action
StaticFacts = typing.Mapping[str, Sequence[Sequence[int]]]
Teller = Callable[[int], str]
Row = tuple[int, dict[str, int]]  # the atoms a match needs, and what it binds

MAX_ROWS = 100_000
MAX_DEPTH = 40
MEMO_LIMIT = 50_000


class Facts:
    """The facts of a game for queries: atoms that change (with their bit) and facts that do not."""

    def __init__(
        self,
        objects: Sequence[Sequence[str]],
        atoms: Sequence[Sequence[Any]],
        static: StaticFacts,
    ) -> None:
        self.objects = objects
        rows: dict[str, list[tuple[tuple[int, ...], int]]] = {}
        for name, facts in static.items():
            rows[name] = [(tuple(arguments), 0) for arguments in facts]
        for bit, atom in enumerate(atoms):
            rows.setdefault(atom[0], []).append((tuple(atom[1:]), 1 << bit))
        # Objects are numbered in the order of their ids, so this is the stock engine's order.
        self._rows = {name: sorted(found) for name, found in rows.items()}
        self._index: dict[tuple[str, int, int], list[tuple[tuple[int, ...], int]]] = {}
        self._indexed: set[tuple[str, int]] = set()

    def matching(self, predicate: Predicate, bound: dict[str, int]) -> list[tuple[tuple[int, ...], int]]:
        """Rows of `predicate` that agree with one bound argument (all rows if none is bound)."""
        for position, parameter in enumerate(predicate.parameters):
            if parameter in bound:
                key = (predicate.name, position)
                if key not in self._indexed:
                    self._indexed.add(key)
                    for row in self._rows.get(predicate.name, ()):
                        if position < len(row[0]):
                            self._index.setdefault((*key, row[0][position]), []).append(row)
                return self._index.get((*key, bound[parameter]), [])
        return self._rows.get(predicate.name, [])


class Context:
    """What placeholders and names stand for while a text is put together."""

    __slots__ = ("bound", "names")

    def __init__(self, bound: dict[str, int], names: dict[str, int]) -> None:
        self.bound, self.names = bound, names

    def extended(self, bound: dict[str, int]) -> Context:
        return Context(
            {**self.bound, **bound}, {**self.names, **{p.split(":")[0]: thing for p, thing in bound.items()}}
        )


class Feedback:
    """One text as a function of the state, remembered by the atoms that can change it."""

    __slots__ = ("_mask", "_memo", "_tell")

    def __init__(self, mask: int, tell: Teller) -> None:
        self._mask, self._tell = mask, tell
        self._memo: dict[int, str] = {}

    def __call__(self, core: int) -> str:
        seen = core & self._mask
        text = self._memo.get(seen)
        if text is None:
            if len(self._memo) >= MEMO_LIMIT:
                self._memo.clear()
            text = self._memo[seen] = self._tell(core)
        return text


class Narrator:
    """Tells the feedbacks of one game. Raises InputError where the grammar asks for what the game lacks."""

    def __init__(self, facts: Facts, grammar: Grammar) -> None:
        self._facts, self._grammar = facts, grammar
        self._reach: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        self._templates: dict[tuple[str, tuple[tuple[str, str, int], ...]], str] = {}
        self._rows_left = MAX_ROWS
        self._mask = 0
        self._words: dict[tuple[int, int], str] = {}  # by expression (they live in the grammar) and thing
        # Answers within one text; the context is held so that its id stays its own (queries live in the grammar).
        self._found: dict[tuple[int, int], tuple[Context, list[Row]]] = {}

    # Commands and feedback

    def command(self, action: str, mapping: Mapping) -> str:
        """The command of a grounded action."""
        key = (action, self.restrict(action, mapping, "template"))
        if key not in self._templates:
            mask, tell = self._specialise(self._grammar.actions[action].template, key[1])
            text = tell(0)
            if mask:
                raise InputError(f"The command of the action {action!r} depends on what happens; not supported.")
            if "{" in text or "}" in text:
                raise InputError(f"The command template of the action {action!r} leaves braces in {text!r}.")
            self._templates[key] = text
        return self._templates[key]

    def restrict(self, action: str, mapping: Mapping, part: str = "feedback") -> tuple[tuple[str, str, int], ...]:
        """The part of a mapping that can change the text: equal parts share one feedback."""
        names, kinds = self._reachable(action, part)
        return tuple(entry for entry in mapping if entry[0] in names or entry[1] in kinds)

    def intro(self, core: int) -> str:
        """The first observation."""
        return self._specialise((Reference("intro"),), ())[1](core)

    def feedback(self, action: str, mapping: Mapping) -> Feedback:
        """What is said after an action, as a function of the state that it led to."""
        return Feedback(*self._specialise(self._grammar.actions[action].feedback, mapping))

    def check(self, feedbacks: Iterable[tuple[str, Mapping]]) -> None:
        """Specialise everything once, so that a faulty grammar is found when the game is compiled."""
        self._specialise((Reference("intro"),), ())
        for action, mapping in feedbacks:
            self.feedback(action, mapping)

    def _reachable(self, action: str, part: str) -> tuple[frozenset[str], frozenset[str]]:
        """Names and types of the placeholders in all text that an action can lead to."""
        key = f"{part}:{action}"
        if key not in self._reach:
            names: set[str] = set()
            kinds: set[str] = set()
            seen: set[str] = set()
            text = self._grammar.actions[action]
            todo: list[tuple[Node, ...]] = [text.template if part == "template" else text.feedback]
            while todo:
                nodes = todo.pop()
                references = [node for node in nodes if isinstance(node, Reference)]
                queries = [item.query for item in items_of(nodes)]
                for item in items_of(nodes):
                    if isinstance(item.body, Reference):
                        references.append(item.body)
                    else:
                        names |= _variables(item.body)
                for reference in references:
                    if reference.rule not in seen:
                        seen.add(reference.rule)
                        for rule in self._grammar.rules.get(reference.rule, ()):
                            todo.append(rule.rhs)
                            queries.append(rule.condition)
                for placeholder in (p for query in queries for predicate in query for p in predicate.parameters):
                    name, kind = placeholder.split(":")
                    names.add(name)
                    kinds.add(kind)
            self._reach[key] = (frozenset(names), frozenset(kinds))
        return self._reach[key]

    # Specialisation

    def _specialise(self, nodes: tuple[Node, ...], mapping: Mapping) -> tuple[int, Teller]:
        """(mask of the atoms that can change the text, the text as a function of the state)."""
        self._mask, self._rows_left = 0, MAX_ROWS
        self._found.clear()
        context = Context(
            {f"{name}:{kind}": thing for name, kind, thing in mapping},
            {name: thing for name, _, thing in mapping},
        )
        told = self._sequence(nodes, context, 0)
        return self._mask, (lambda core: told) if isinstance(told, str) else told

    def _sequence(self, nodes: tuple[Node, ...], context: Context, depth: int) -> str | Teller:
        if depth > MAX_DEPTH:
            raise InputError(f"The game's grammar refers to itself more than {MAX_DEPTH} rules deep.")
        return _concatenate([self._node(node, context, depth) for node in nodes])

    def _node(self, node: Node, context: Context, depth: int) -> str | Teller:
        if isinstance(node, Literal):
            return node.text
        if isinstance(node, Reference):
            return self._reference(node, context, depth)
        item = node.item if isinstance(node, Enumeration) else node
        rows: list[Row] = self._rows(item.query, context) if item.query else [(0, {})]
        parts = [(mask, self._body(item, context, found, depth)) for mask, found in rows]
        if isinstance(node, Item):
            return _concatenate([_if(mask, part) for mask, part in parts])
        separators = [
            self._reference(Reference(rule), context, depth)
            for rule in ("list_empty", "list_separator", "list_last_separator")
        ]
        return _enumerate(parts, separators)

    def _body(self, item: Item, context: Context, found: dict[str, int], depth: int) -> str | Teller:
        """The body of an item for one match, with what the match binds."""
        if isinstance(item.body, Reference):
            return self._reference(item.body, context.extended(found) if found else context, depth)
        if len(found) == 1:  # the common case, a thing in a list: its words are the same wherever it is listed
            ((placeholder, thing),) = found.items()
            name = placeholder.split(":")[0]
            if _variables(item.body) == {name}:
                key = (id(item.body), thing)
                if key not in self._words:
                    self._words[key] = str(self._evaluate(item.body, {name: thing}))
                return self._words[key]
        return str(self._evaluate(item.body, (context.extended(found) if found else context).names))

    def _reference(self, reference: Reference, context: Context, depth: int) -> str | Teller:
        rules = self._grammar.rules.get(reference.rule)
        if not rules:
            raise InputError(f"The game's grammar has no rule {reference.rule!r}, which its text refers to.")
        choices: list[tuple[tuple[int, ...], str | Teller]] = []
        for rule in rules:
            masks = self._condition(rule, context)
            if masks:
                choices.append((masks, self._sequence(rule.rhs, context, depth + 1)))
            if 0 in masks:
                break
        if not choices:
            raise InputError(f"No alternative of the grammar rule {reference.rule!r} can apply in this game.")
        if choices[0][0] == (0,):
            return choices[0][1]
        return _choose(choices, reference.rule)

    def _condition(self, rule: Rule, context: Context) -> tuple[int, ...]:
        """Masks of which one must hold; (0,) if the rule always applies, () if it never does."""
        if not rule.condition:
            return (0,)
        masks = tuple(dict.fromkeys(mask for mask, _ in self._rows(rule.condition, context)))
        return (0,) if 0 in masks else masks

    def _rows(self, query: Query, context: Context) -> list[Row]:
        """Every way a query can match, in the stock engine's order, with the atoms each way needs."""
        key = (id(query), id(context))
        if key not in self._found:
            self._found[key] = (context, self._search(query, context))
        return self._found[key][1]

    def _search(self, query: Query, context: Context) -> list[Row]:
        rows: list[Row] = []
        bound = dict(context.bound)
        used = set(bound.values())
        new: dict[str, int] = {}
        types = self._facts.objects

        def search(depth: int, mask: int) -> None:
            if depth == len(query):
                self._mask |= mask
                self._rows_left -= 1
                if self._rows_left < 0:
                    raise InputError(f"A grammar query of the game has more than {MAX_ROWS} answers; not supported.")
                rows.append((mask, dict(new)))
                return
            parameters = query[depth].parameters
            for arguments, bit in self._facts.matching(query[depth], bound):
                fresh: list[str] = []
                fits = len(arguments) == len(parameters)
                for parameter, thing in zip(parameters, arguments, strict=False):
                    known = bound.get(parameter)
                    if known is None:
                        kind = parameter.split(":")[1]
                        if thing in used or not (kind == "object" or types[thing][1] == kind):
                            fits = False
                            break
                        bound[parameter] = new[parameter] = thing
                        used.add(thing)
                        fresh.append(parameter)
                    elif known != thing:
                        fits = False
                        break
                if fits:
                    search(depth + 1, mask | bit)
                for parameter in fresh:
                    used.discard(bound.pop(parameter))
                    del new[parameter]

        search(0, 0)
        return rows

    def _evaluate(self, expression: Expression, names: dict[str, int]) -> str | None:
        if isinstance(expression, Literal):
            return expression.text
        if isinstance(expression, Attribute):
            if expression.variable not in names:
                raise InputError(
                    f"The game's grammar uses {expression.variable!r} where nothing of that name is known."
                )
            identifier, kind, name = self._facts.objects[names[expression.variable]]
            known = {"id": identifier, "type": kind, "name": name, "indefinite": "a", "definite": "the"}
            return known.get(expression.attribute)
        values = [self._evaluate(part, names) for part in expression.parts]
        if isinstance(expression, FirstOf):
            return next((value for value in values if value), values[-1])
        if any(value is None for value in values):
            raise InputError("The game's grammar joins text with an attribute that ALFWorld things do not have.")
        return "".join(value for value in values if value is not None)


@lru_cache(maxsize=1024)
def _variables(expression: Expression) -> set[str]:
    if isinstance(expression, Attribute):
        return {expression.variable}
    if isinstance(expression, (Join, FirstOf)):
        return set().union(*(_variables(part) for part in expression.parts))
    return set()


# Ways of putting text together; each returns text where nothing can change ------------------------------------


def _concatenate(parts: list[str | Teller]) -> str | Teller:
    merged: list[str | Teller] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    if not merged:
        return ""
    if len(merged) == 1:
        return merged[0]
    return lambda core: "".join([part if isinstance(part, str) else part(core) for part in merged])


def _if(mask: int, part: str | Teller) -> str | Teller:
    if mask == 0:
        return part
    return lambda core: _tell(part, core) if core & mask == mask else ""


def _tell(part: str | Teller, core: int) -> str:
    return part if isinstance(part, str) else part(core)


def _choose(choices: list[tuple[tuple[int, ...], str | Teller]], rule: str) -> Teller:
    def choose(core: int) -> str:
        for masks, part in choices:
            for mask in masks:
                if core & mask == mask:
                    return part if isinstance(part, str) else part(core)
        raise InputError(f"No alternative of the grammar rule {rule!r} applies in this state.")

    return choose


def _enumerate(parts: list[tuple[int, str | Teller]], separators: list[str | Teller]) -> str | Teller:
    def enumerate_(core: int) -> str:
        told = [part if isinstance(part, str) else part(core) for mask, part in parts if core & mask == mask]
        if not told:
            return _tell(separators[0], core)
        if len(told) == 1:
            return told[0]
        return _tell(separators[1], core).join(told[:-1]) + _tell(separators[2], core) + told[-1]

    changing = any(mask or not isinstance(part, str) for mask, part in parts)
    changing = changing or any(not isinstance(separator, str) for separator in separators)
    return enumerate_ if changing else enumerate_(0)
