"""From the text of a game file to a `CompiledGame`: plain numbers that the world can run without any planner.

Knows: PDDL through fast_downward's translator (the one the stock engine uses), how the stock engine names
things, and which facts can matter. Hides: all of that; what comes out is integers, names and the grammar.

A state is one integer. Bit i says that atom i holds. Atoms that no precondition, goal or text can see are
dropped (the `checked` facts of look and examine, for instance), so that states that cannot be told apart are
one state. TextWorld's text layer also knows `not_p` facts, which exist from the moment an action deleted `p`
until it is added again; where the grammar asks for one it is an atom of its own.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from envs.alfworld.grammar import Grammar, parse_grammar
from envs.alfworld.text import Facts, Narrator
from envs.core import InputError

# Part of every cache key: raise it when the meaning of a compiled game changes.
FORMAT = 1
MAX_SOURCE = 4_000_000
MAX_DEPTH = 100
# Atoms of these predicates pin down where the agent is and what it holds; they get the lowest bits so that
# applicable operators can be looked up by them. A hint for speed, not for correctness.
KEY_PREDICATES = ("atlocation", "holdsany", "holds")

_TRANSLATOR = threading.Lock()  # fast_downward's translator keeps its options and sys.argv in globals


class Operator(NamedTuple):
    """One grounded action. `pre` and `eff` hold atom numbers, +(i + 1) for true and -(i + 1) for false."""

    command: int
    feedback: int
    pre: Sequence[int]
    eff: Sequence[int]


@dataclass(frozen=True, slots=True)
class CompiledGame:
    """Everything needed to play one game.

    game_id: content hash. objects: (id, type, display name). atoms: (predicate, object numbers...) by bit.
    facts: what never changes, by predicate, as object numbers. key_bits: how many low bits are key atoms.
    commands: text of commands, by number. feedbacks: (action, ((placeholder, type, object number), ...)).
    goal: clause lists; `goal[0]` is a conjunction over literals: +-(i + 1) for atom i, and beyond the atoms
    (i >= len(atoms)) derived fact i - len(atoms), true if any conjunction in goal[1 + that] holds.
    """

    game_id: str
    objects: Sequence[Sequence[str]]
    atoms: Sequence[Sequence[Any]]
    key_bits: int
    facts: Mapping[str, Sequence[Sequence[int]]]
    initial: int
    commands: Sequence[str]
    feedbacks: Sequence[tuple[str, Sequence[tuple[str, str, int]]]]
    operators: Sequence[Operator]
    goal: Sequence[Sequence[Sequence[int]]]
    grammar: str

    def narrator(self) -> Narrator:
        """The text of this game."""
        return Narrator(Facts(self.objects, self.atoms, self.facts), parse_grammar(self.grammar))


def content_id(domain: str, problem: str, grammar: str) -> str:
    """blake2b over what defines the game; the same on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (domain, problem, grammar):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def compile_game(domain: str, problem: str, grammar_source: str) -> CompiledGame:
    """Compile a game. About .2 s, nearly all of it fast_downward's translation.

    Raises InputError where the PDDL or the grammar does not parse or uses what ALFWorld games do not.
    """
    for what, text in (("pddl_domain", domain), ("pddl_problem", problem), ("grammar", grammar_source)):
        if len(text) > MAX_SOURCE:
            raise InputError(f"The game's {what} has {len(text)} characters; at most {MAX_SOURCE} are read.")
    grammar = parse_grammar(grammar_source)
    task, sas = _translate(domain, problem)
    return _Builder(task, _read_sas(sas), grammar, grammar_source).build(content_id(domain, problem, grammar_source))


# fast_downward ------------------------------------------------------------------------------------------------


def _translate(domain: str, problem: str) -> tuple[Any, str]:
    try:
        import fast_downward
    except ImportError:
        raise InputError(
            "The package fast-downward-textworld is missing, and ALFWorld games cannot be translated without it: "
            "pip install 'textworld[pddl]==1.7.0' (it needs a C++ compiler and cmake)."
        ) from None
    for what, text in (("pddl_domain", domain), ("pddl_problem", problem)):
        _check_nesting(what, text)
    with translator():
        try:
            task, sas = fast_downward.pddl2sas(domain, problem)
        except (Exception, SystemExit) as error:  # the translator raises whatever it meets, SystemExit included
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise InputError(f"The game's PDDL cannot be translated by fast_downward: {reason}") from None
    return task, sas


def _check_nesting(what: str, text: str) -> None:
    depth = 0
    for line in text.split("\n"):
        for sign in re.findall(r"[()]", line.split(";", 1)[0]):
            depth += 1 if sign == "(" else -1
            if depth > MAX_DEPTH:
                raise InputError(f"The game's {what} nests more than {MAX_DEPTH} parentheses deep; it was not read.")


@contextmanager
def translator() -> Iterator[None]:
    """The process while fast_downward's translator runs: one at a time; what it prints and sys.argv are put right."""
    with _TRANSLATOR:
        argv = sys.argv
        try:
            with redirect_stdout(io.StringIO()):
                yield
        finally:
            sys.argv = argv


@dataclass(frozen=True, slots=True)
class _Sas:
    atoms: list[str]  # name of each variable's atom
    layers: list[int]
    initial: list[bool]
    goal: list[tuple[int, bool]]
    operators: list[
        tuple[str, list[tuple[int, bool]], list[tuple[int, bool, bool]]]
    ]  # name, pre, (var, value, conditional)
    rules: list[tuple[list[tuple[int, bool]], int, bool]]


def _read_sas(text: str) -> _Sas:
    """Parse the translator's output format (version 3); every variable is one atom and its negation."""
    lines = iter(text.split("\n"))

    def until(marker: str) -> None:
        for line in lines:
            if line == marker:
                return
        raise InputError("fast_downward's output is not as expected; install the tested version (README).")

    def pair(line: str, negative: list[int]) -> tuple[int, bool]:
        var, value = line.split()
        return int(var), int(value) != negative[int(var)]

    until("end_metric")
    atoms, layers, negative = [], [], []
    for _ in range(int(next(lines))):
        until("begin_variable")
        next(lines)
        layers.append(int(next(lines)))
        values = [next(lines) for _ in range(int(next(lines)))]
        positive = [i for i, value in enumerate(values) if value.startswith("Atom ")]
        if len(values) != 2 or len(positive) != 1:
            raise InputError("The game's PDDL has a variable that is not a plain atom; ALFWorld games have none.")
        atoms.append(values[positive[0]][len("Atom ") :])
        negative.append(1 - positive[0])
    until("begin_state")
    initial = [int(next(lines)) != no for no in negative]
    until("begin_goal")
    goal = [pair(next(lines), negative) for _ in range(int(next(lines)))]
    next(lines)
    operators = []
    for _ in range(int(next(lines))):
        next(lines)
        name = next(lines)
        pre = [pair(next(lines), negative) for _ in range(int(next(lines)))]
        effects = []
        for _ in range(int(next(lines))):
            numbers = [int(number) for number in next(lines).split()]
            var, before, after = numbers[-3:]
            if before >= 0:
                pre.append((var, before != negative[var]))
            effects.append((var, after != negative[var], numbers[0] > 0))
        until("end_operator")
        operators.append((name, pre, effects))
    rules = []
    for _ in range(int(next(lines))):
        next(lines)
        body = [pair(next(lines), negative) for _ in range(int(next(lines)))]
        var, _, after = (int(number) for number in next(lines).split())
        rules.append((body, var, after != negative[var]))
        next(lines)
    return _Sas(atoms, layers, initial, goal, operators, rules)


# Names --------------------------------------------------------------------------------------------------------


def display_names(ids: Iterable[str]) -> dict[str, str]:
    """The names the stock engine shows: `cabinet_bar__minus_01...` becomes `cabinet 7`.

    Instances of a kind are numbered from the last to the first in the order of their ids. Ids without
    coordinates keep their text and a trailing blank, as in the stock engine.
    """
    ordered = sorted(ids)
    kinds: dict[str, str] = {}
    for identifier in ordered:
        if "_bar_" in identifier:
            kind = identifier.split("_bar_", 1)[0]
            kinds[identifier] = kind + ("basin" if "basin" in identifier else "")
    left = Counter(kinds.values())
    names = {}
    for identifier in ordered:
        if identifier in kinds:
            kind = kinds[identifier]
            shown = kind
            for mark, sign in (("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ",")):
                shown = shown.replace(mark, sign)
            names[identifier] = f"{shown} {left[kind]}"
            left[kind] -= 1
        else:
            names[identifier] = f"{identifier} "
    return names


# Building -----------------------------------------------------------------------------------------------------


def _split_atom(text: str) -> tuple[str, tuple[str, ...]]:
    name, arguments = text.split("(", 1)
    return name, tuple(part for part in arguments[:-1].split(", ") if part)


class _Builder:
    def __init__(self, task: Any, sas: _Sas, grammar: Grammar, source: str) -> None:
        self.sas, self.grammar, self.source = sas, grammar, source
        self.types = {thing.name: thing.type_name for thing in task.objects}
        # As in the stock engine, an action that the translator split keeps its last version's parameters.
        self.parameters = {
            action.name: [(parameter.name.strip("?"), parameter.type_name) for parameter in action.parameters]
            for action in task.actions
        }
        self.initial_facts = [fact for fact in map(_initial_fact, task.init) if fact is not None]
        self.fluents = [_split_atom(atom) for atom in sas.atoms]

    def build(self, game_id: str) -> CompiledGame:
        named = {argument for _, arguments in self.initial_facts for argument in arguments}
        named |= {a for (_, args), true in zip(self.fluents, self.sas.initial, strict=True) if true for a in args}
        names = display_names(named)
        self.objects = sorted(set(self.types) | named)
        self.number = {thing: i for i, thing in enumerate(self.objects)}
        objects = tuple((thing, self.types.get(thing, "object"), names.get(thing, thing)) for thing in self.objects)

        self._choose_atoms()
        atoms = tuple((name, *(self.number[a] for a in arguments)) for name, arguments in self.layout)
        fluent = set(self.fluents)
        asked = self.grammar_predicates
        facts: dict[str, list[tuple[int, ...]]] = {}
        for name, arguments in self.initial_facts:
            if name in asked and (name, arguments) not in fluent:
                facts.setdefault(name, []).append(tuple(self.number[a] for a in arguments))
        static = {name: tuple(sorted(set(rows))) for name, rows in sorted(facts.items())}
        initial = sum(
            1 << self.bit[variable] for variable, true in enumerate(self.sas.initial) if true and variable in self.bit
        )

        narrator = Narrator(Facts(objects, atoms, static), self.grammar)
        commands, feedbacks, operators = self._operators(narrator, initial)
        goal = self._goal(len(atoms))
        narrator.check(feedbacks)
        key_bits = sum(1 for atom in atoms if atom[0] in KEY_PREDICATES)
        return CompiledGame(
            game_id, objects, atoms, key_bits, static, initial, commands, feedbacks, operators, goal, self.source
        )

    @property
    def grammar_predicates(self) -> set[str]:
        return {predicate.name for query in self.grammar.queries() for predicate in query}

    def _choose_atoms(self) -> None:
        """Keep the atoms that something can see; key atoms first, otherwise in the translator's order."""
        seen = {var for _, pre, _ in self.sas.operators for var, _ in pre}
        seen |= {var for var, _ in self.sas.goal} | {var for body, _, _ in self.sas.rules for var, _ in body}
        asked = self.grammar_predicates
        kept = [
            var
            for var, (name, _) in enumerate(self.fluents)
            if self.sas.layers[var] < 0 and (var in seen or name in asked)
        ]
        rank = {name: i for i, name in enumerate(KEY_PREDICATES)}
        kept.sort(key=lambda var: (rank.get(self.fluents[var][0], len(rank)), var))
        self.bit = {var: bit for bit, var in enumerate(kept)}
        self.layout = [self.fluents[var] for var in kept]
        deleted = {var for _, _, effects in self.sas.operators for var, value, _ in effects if not value}
        self.absent: dict[int, int] = {}
        for var in kept:
            name, arguments = self.fluents[var]
            if f"not_{name}" in asked and var in deleted:
                self.absent[var] = len(self.layout)
                self.layout.append((f"not_{name}", arguments))

    def _operators(self, narrator: Narrator, initial: int) -> tuple[Any, Any, tuple[Operator, ...]]:
        commands: dict[str, int] = {}
        feedbacks: dict[Any, int] = {}
        built: dict[tuple[Any, ...], Operator] = {}
        for name, pre, effects in self.sas.operators:
            action, *arguments = name.split()
            if action not in self.grammar.actions:
                raise InputError(f"The game's grammar has no text for the action {action!r} of its PDDL domain.")
            mapping = tuple(
                (placeholder, kind, self.number[argument])
                for (placeholder, kind), argument in zip(self.parameters[action], arguments, strict=False)
            )
            command = narrator.command(action, mapping)
            feedback = (action, narrator.restrict(action, mapping))
            operator = Operator(
                commands.setdefault(command, len(commands)),
                feedbacks.setdefault(feedback, len(feedbacks)),
                tuple(sorted(self._literal(var, value) for var, value in pre)),
                self._effect(name, effects),
            )
            built[name, operator.pre] = operator
        operators = tuple(dict.fromkeys(built.values()))
        places = range(sum(1 for atom in self.layout if atom[0] == KEY_PREDICATES[0]))
        _check_one_place(operators, places, initial)
        _check_unambiguous(operators, tuple(commands), places)
        return tuple(commands), tuple(feedbacks), operators

    def _literal(self, var: int, value: bool) -> int:
        return self.bit[var] + 1 if value else -self.bit[var] - 1

    def _effect(self, name: str, effects: list[tuple[int, bool, bool]]) -> tuple[int, ...]:
        literals = []
        for var, value, conditional in effects:
            if var not in self.bit:
                continue
            if conditional:
                raise InputError(
                    f"The action {name.split()[0]!r} has a conditional effect that matters; not supported."
                )
            literals.append(self._literal(var, value))
            if var in self.absent:
                literals.append(-self.absent[var] - 1 if value else self.absent[var] + 1)
        return tuple(sorted(literals))

    def _goal(self, n_atoms: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        derived = [var for var, layer in enumerate(self.sas.layers) if layer >= 0]
        position = {var: n_atoms + i for i, var in enumerate(derived)}

        def literal(var: int, value: bool) -> int:
            if var not in position:
                return self._literal(var, value)
            true = value == (not self.sas.initial[var])  # a derived fact is "true" when it left its default
            return position[var] + 1 if true else -position[var] - 1

        bodies: dict[int, list[tuple[int, ...]]] = {var: [] for var in derived}
        for body, var, _ in self.sas.rules:
            bodies[var].append(tuple(literal(v, value) for v, value in body))
        done: set[int] = set()

        def visit(var: int, path: tuple[int, ...]) -> None:
            if var in path:
                raise InputError("The game's goal has recursive derived facts; ALFWorld goals have none.")
            if var not in done:
                for body in bodies[var]:
                    for needed in {abs(x) - 1 - n_atoms for x in body if abs(x) > n_atoms}:
                        visit(derived[needed], (*path, var))
                done.add(var)

        for var in derived:
            visit(var, ())
        top = tuple(literal(var, value) for var, value in self.sas.goal)
        return ((top,), *(tuple(bodies[var]) for var in derived))


def _initial_fact(fact: Any) -> tuple[str, tuple[str, ...]] | None:
    """A PDDL init entry as a fact, by the stock engine's rules (numbers such as distances are no facts)."""
    if hasattr(fact, "predicate"):
        return None if fact.predicate == "=" else (fact.predicate, tuple(fact.args))
    name = str(fact.expression.value)
    return None if fact.fluent.symbol == "total-cost" or name.isdigit() else (name, tuple(fact.fluent.args))


def _check_unambiguous(operators: tuple[Operator, ...], commands: tuple[str, ...], places: range) -> None:
    """One command must mean one thing: the stock engine would take the planner's first, which we do not know."""
    by_command: dict[int, list[Operator]] = {}
    for operator in operators:
        by_command.setdefault(operator.command, []).append(operator)
    for command, rivals in by_command.items():
        for i, one in enumerate(rivals):
            for other in rivals[i + 1 :]:
                same = one.eff == other.eff and one.feedback == other.feedback
                apart = any(-literal in other.pre for literal in one.pre)
                here, there = (tuple(x for x in op.pre if x - 1 in places) for op in (one, other))
                if not (same or apart or (here and there and here != there)):
                    raise InputError(f"The command {commands[command]!r} can mean two different actions at once.")


def _check_one_place(operators: tuple[Operator, ...], places: range, initial: int) -> None:
    """The agent is in exactly one place: true at first, and every move leaves where it was."""
    kept = sum(initial >> bit & 1 for bit in places) == 1
    for operator in operators:
        moves = sorted(x for x in operator.eff if abs(x) - 1 in places)
        kept = kept and (not moves or (len(moves) == 2 and moves[0] < 0 < moves[1] and -moves[0] in operator.pre))
    if places and not kept:
        raise InputError("The game's PDDL lets the agent be in several places at once; ALFWorld games do not.")


def to_json(game: CompiledGame) -> dict[str, Any]:
    """A compiled game as JSON-ready data; `from_json` is the inverse."""
    data = {field.name: getattr(game, field.name) for field in fields(game)}
    return data | {"initial": hex(game.initial)}


def from_json(data: Mapping[str, Any]) -> CompiledGame:
    """Rebuild a compiled game; raises KeyError, TypeError or ValueError on data of another shape."""
    values = {field.name: data[field.name] for field in fields(CompiledGame)}
    operators = list(map(Operator._make, data["operators"]))
    return CompiledGame(**values | {"initial": int(data["initial"], 16), "operators": operators})
