"""Rules over what is known before a coin, written as text: target policies, eligibility.

Knows: the small language and how a rule is evaluated on one decision or on a table of them. Hides: parsing; nothing is
ever run as code.

    always   never   .25                    a probability
    action_type=put|take & step<10          comparisons joined by &; =, !=, <, <=, >, >=; | between values of = and !=
    early: step<10                          the same with a name
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from audit.mrt.data import Floats
from envs.core import InputError

_TERM = re.compile(r"\s*([A-Za-z_]\w*)\s*(<=|>=|!=|=|<|>)\s*(.+?)\s*\Z")
_NAMED = re.compile(r"\s*([\w .+-]+?)\s*:\s*(.+)\Z")
_ORDER: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_WORDS = {"always": 1.0, "never": 0.0}


@dataclass(frozen=True, slots=True)
class Term:
    """One comparison. values: texts for = and !=, a single number for an order."""

    column: str
    sign: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class TextRule:
    """A rule read from text: P(treat) of one decision (`at`) or of each row of a feature frame (call).

    constant: the probability where there are no terms; else the rule is 1 where all terms hold and 0 elsewhere.
    """

    name: str
    text: str
    constant: float = 1.0
    terms: tuple[Term, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def columns(self) -> tuple[str, ...]:
        """The features the rule looks at."""
        return tuple(dict.fromkeys(term.column for term in self.terms))

    def at(self, row: Mapping[str, Any]) -> float:
        """P(treat) at one decision. Raises InputError for a column that the decision does not have."""
        for term in self.terms:
            if term.column not in row:
                raise InputError(f"rule {self.text!r}: `{term.column}` is none of the features: {', '.join(row)}.")
            if not self._holds(row[term.column], term):
                return 0.0
        return self.constant

    def _holds(self, value: Any, term: Term) -> bool:
        if term.sign in _ORDER:
            try:
                return bool(_ORDER[term.sign](float(value), float(term.values[0])))
            except (TypeError, ValueError):
                raise InputError(f"rule {self.text!r}: {term.column} is {value!r}, which has no order.") from None
        return _same(value, term.values) == (term.sign == "=")

    def __call__(self, frame: pd.DataFrame) -> Floats:
        """(rows,) P(treat) at the rows of a feature frame."""
        inside = np.full(len(frame), self.constant)
        for term in self.terms:
            if term.column not in frame.columns:
                raise InputError(
                    f"rule {self.text!r}: `{term.column}` is no declared feature; features: {', '.join(frame.columns)}."
                )
            codes, levels = pd.factorize(frame[term.column])
            holds = np.array([self._holds(level, term) for level in levels] + [False])
            inside[~holds[codes]] = 0.0
        return inside


def _same(value: Any, wanted: tuple[str, ...]) -> bool:
    if isinstance(value, str):
        return value in wanted
    for text in wanted:
        try:
            if float(value) == float(text):
                return True
        except (TypeError, ValueError):
            continue
    return False


def read_rule(text: str) -> TextRule:
    """Read a rule (see the module). Raises InputError where the text is none."""
    named = _NAMED.match(text)
    name, body = (named[1], named[2].strip()) if named else (text.strip(), text.strip())
    if body in _WORDS:
        return TextRule(name, body, _WORDS[body])
    try:
        value = float(body)
    except ValueError:
        return TextRule(name, body, 1.0, tuple(_term(part, body) for part in body.split("&")))
    if not 0 <= value <= 1:
        raise InputError(f"rule {text!r}: {value:g} is no probability; expected a number between 0 and 1.")
    return TextRule(name, body, value)


def _term(part: str, body: str) -> Term:
    match = _TERM.match(part)
    if match is None:
        raise InputError(
            f"rule {body!r}: {part.strip()!r} is no comparison; expected always, never, a probability, or comparisons "
            f"such as action_type=put|take & step<10."
        )
    column, sign, right = match.groups()
    values = tuple(value.strip() for value in right.split("|"))
    if sign in _ORDER:
        try:
            float(right)
        except ValueError:
            raise InputError(f"rule {body!r}: {right!r} after {sign} is no number.") from None
    return Term(column, sign, values)


def read_rules(texts: Iterable[str]) -> dict[str, TextRule]:
    """Rules by name. Raises InputError where two have one name."""
    rules: dict[str, TextRule] = {}
    for text in texts:
        rule = read_rule(text)
        if rule.name in rules:
            raise InputError(f"two rules are called {rule.name!r}; name them, as in 'early: step<10'.")
        rules[rule.name] = rule
    return rules
