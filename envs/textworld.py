"""The stock TextWorld engine behind the Environment protocol: any TextWorld game, and the reference for fidelity.

Knows: how to start a game exactly as ALFWorld's AlfredTWEnv does (without domain randomisation), how to come
back to a state of an engine that cannot be copied, and what the engine does to the process it runs in. Hides:
the engine and its one cursor.

TRUSTED FILES ONLY. The stock engine runs what others wrote: it calls `eval` on the expressions in the grammar
of a game.tw-pddl, gives its PDDL to a planner written in C++, and runs a .z8 in an interpreter written in C.
Grammars with more than names, attributes, string literals, `+` and `or` are refused unless `trusted=True`; that
closes the known hole, and is no sandbox. The compiled world (`envs.alfworld`) runs nothing of a game file.

Slow, as measured on official ALFWorld games: .3-1.4 s to reset (it translates the PDDL twice), about 50 ms a
step; a restored state costs a reset and all its commands again, unless it is where the engine stands. A .z8 of
tw-make resets in 5 ms and steps in 1 ms. An engine keeps some megabytes; `close` hands them to the next game.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envs.core import InputError, Turn

State = tuple[str, ...]

NOTHING_HAPPENS = "Nothing happens."
# The interpreter of .z8 games hangs or crashes on control characters and cuts long lines; its own commands write
# files into the working directory (save, script), stop the game or change what TextWorld reads back from it.
_SENDABLE = re.compile(r"[ -~]{0,150}")
_INTERPRETER = re.compile(
    r"(?:save|restore|restart|quit|q|die|undo|script|transcript|noscript|recording|replay|verify|version|"
    r"superbrief|verbose|brief|short|long|normal|notify|tw-.*)(?:\s.*)?",
    re.IGNORECASE,
)
# Planner engines of closed worlds. Unloading their C++ library crashes the process at its end (measured), and each
# keeps megabytes, so they are loaded with the next game instead.
_IDLE: list[Any] = []
_SEED = 1  # of the interpreter's chance, which otherwise depends on the time


class StockWorld:
    """One game played by the stock engine: game.tw-pddl (ALFWorld) or .z8 of tw-make (with its .json beside).

    A state is the tuple of all commands so far, refused ones included, so that a restored turn is the engine's
    own answer character for character. Inside, the engine stands at one state: a step from there goes on, any
    other is a reset and a replay. One engine runs at a time in a process (a lock); use processes, not threads.

    Once an episode is over it stays over: a step gives the same turn. Commands that the .z8 interpreter must
    not get (control characters, non-ASCII, over 150 characters, its own commands such as `save`) are answered
    "Nothing happens." without being sent.
    """

    one_at_a_time = True  # rollouts that take turns would cost a reset at every step

    def __init__(self, path: str | Path, *, trusted: bool = False) -> None:
        """Check the file; the engine starts at the first use.

        trusted: also run a grammar with expressions outside the language of ALFWorld grammars.
        Raises InputError for a file that is missing, broken or of another kind, for a grammar that is refused, and
        where a package is missing (pip install "textworld[pddl]", alfworld).
        """
        self._path = Path(path)
        self._engine: Any = None
        self._here: State = ()
        self._turn: Turn | None = None
        self._data: dict[str, str] = {}
        if self._path.suffix == ".tw-pddl":
            self._pddl = True
            self._data, self._game_id = _read_pddl(self._path, trusted)
        elif self._path.suffix == ".z8":
            self._pddl = False
            self._game_id = _identify_z8(self._path)
        elif self._path.suffix == ".ulx":
            raise InputError(f"{path}: Glulx games are not played by TextWorld 1.7; make the game as .z8.")
        else:
            raise InputError(f"{path}: not a game of the stock engine; expected game.tw-pddl or a .z8 of tw-make.")

    @property
    def game_id(self) -> str:
        """Content hash of the game; for a game.tw-pddl the same as the compiled world's."""
        return self._game_id

    def reset(self) -> Turn:
        """The first turn."""
        return self._go(())

    def restore(self, state: Any) -> Turn:
        """The turn that was returned with `state`. Raises InputError for what is no state of this class."""
        if not isinstance(state, tuple) or not all(isinstance(command, str) for command in state):
            raise InputError(f"{self._path}: {state!r} is no state of the stock engine; expected a tuple of commands.")
        return self._go(state)

    def step(self, state: Any, command: str) -> Turn:
        """The turn after `command`; what the engine refuses leaves the world as it is."""
        here = self.restore(state)
        return here if here.done else self._go((*state, command))

    def close(self) -> None:
        """Give the engine back; the next use starts one again."""
        engine, self._engine, self._turn = self._engine, None, None
        if engine is not None and self._pddl:
            _IDLE.append(engine)
        elif engine is not None:
            engine.close()

    # The engine and its cursor

    def _go(self, state: State) -> Turn:
        """Bring the engine to a state: on from where it stands if it can be, else from the start."""
        turn, at = self._turn, len(self._here)
        if turn is not None and state == self._here:
            return turn
        with _guard(self._path):
            if turn is None or state[:at] != self._here:
                turn, at = self._start(), 0
            # While commands run the cursor is nowhere: an error must not leave it where the engine is not.
            self._turn = None
            for position in range(at, len(state)):
                if turn.done:
                    raise InputError(f"{self._path}: no state of this game: it is over after {position} commands.")
                turn = self._play(turn, state[position], state[: position + 1])
            self._here, self._turn = state, turn
        return turn

    def _start(self) -> Turn:
        if self._engine is None:
            self._engine = _pddl_engine(self._data) if self._pddl else _z8_engine(str(self._path))
        return _turn_of(self._engine.reset(), ())

    def _play(self, before: Turn, command: str, state: State) -> Turn:
        if not self._pddl and (not _SENDABLE.fullmatch(command.strip()) or _INTERPRETER.fullmatch(command.strip())):
            return Turn(NOTHING_HAPPENS, before.admissible, before.won, before.done, state)
        answer, _, _ = self._engine.step(command)
        return _turn_of(answer, state)


def _turn_of(answer: Any, state: State) -> Turn:
    won, lost = bool(answer["won"]), bool(answer.get("lost"))
    return Turn(
        observation=str(answer["feedback"]),
        admissible=tuple(answer["admissible_commands"]),
        won=won,
        done=won or lost,  # as in both engines' step; reset itself reports none
        state=state,
    )


@contextmanager
def _guard(path: Path) -> Iterator[None]:
    """One engine at a time, with stdout and argv put back; whatever it raises becomes one clear error."""
    # The translator's options are globals that the compiled world's translation sets too: one lock for both.
    from envs.alfworld.translate import translator

    with translator():
        try:
            yield
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # the translator ends the process on PDDL it cannot read
            reason = " ".join(str(error).split())[:160]
            raise InputError(
                f"{path}: the stock engine cannot play this game ({type(error).__name__}: {reason})."
            ) from error


def _missing(package: str, error: ImportError) -> InputError:
    return InputError(f'The stock engine needs {package} ({error}); install it with: pip install "{package}"')


# ALFWorld games ---------------------------------------------------------------------------------------------------


def _read_pddl(path: Path, trusted: bool) -> tuple[dict[str, str], str]:
    from envs.alfworld.games import read_game

    game = read_game(path)
    if not trusted:
        try:
            _check_expressions(game.domain, game.grammar)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    return {"pddl_domain": game.domain, "pddl_problem": game.problem, "grammar": game.grammar}, game.game_id


def _check_expressions(domain: str, grammar: str) -> None:
    """Refuse a grammar whose expressions are more than those of ALFWorld grammars. Nothing is evaluated.

    The engine's own parser finds the expressions, so that what is checked is what would be run.
    """
    from envs.alfworld.grammar import parse_expression

    try:
        from textworld.envs.pddl.logic import GameLogic
        from textworld.envs.pddl.textgen import ConditionalSymbol, ContextSensitiveGrammar, EvalSymbol, ListSymbol
    except ImportError as error:
        raise _missing("textworld[pddl]", error) from None
    try:
        logic = GameLogic(domain=domain, grammar=grammar)
        # Templates and feedback lines are derived too; parse each as if it were a rule.
        lines = [text for action in logic.actions.values() for text in (action.template, action.feedback_rule)]
        parsed = [ContextSensitiveGrammar.parse(json.dumps({"line": [{"rhs": line}]})) for line in lines]
    except Exception as error:  # tatsu, json and textworld each raise their own
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"the game's grammar does not parse ({type(error).__name__}: {reason}).") from None
    symbols: list[Any] = [
        symbol
        for source in (logic.grammar, *parsed)
        for rules in source._rules.values()
        for rule in rules
        for symbol in rule.rhs
    ]
    while symbols:
        symbol = symbols.pop()
        if isinstance(symbol, EvalSymbol):
            parse_expression(symbol.expression)
        elif isinstance(symbol, ConditionalSymbol):
            symbols.append(symbol.expression)
        elif isinstance(symbol, ListSymbol):
            symbols.append(symbol.symbol)


def _pddl_engine(data: dict[str, str]) -> Any:
    """The engine as AlfredTWEnv starts it with domain_randomization off: names by type and number."""
    try:
        from textworld import EnvInfos
        from textworld.envs.pddl import PddlEnv
        from textworld.envs.pddl.textgen import EvalSymbol
    except ImportError as error:
        raise _missing("textworld[pddl]", error) from None
    try:
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    except ImportError as error:
        raise _missing("alfworld", error) from None
    try:
        EvalSymbol("probe").derive({"variables": {"probe": "found"}})
    except NameError:
        raise InputError(
            "The installed textworld cannot evaluate grammars on this Python (from 3.13 on, locals() is a copy); use "
            "Python 3.10-3.12 for the stock engine, or the compiled world."
        ) from None
    infos = EnvInfos(admissible_commands=True, won=True)
    engine = _IDLE.pop() if _IDLE else AlfredDemangler(shuffle=False)(PddlEnv(infos))
    engine.load(data)
    return engine


# Games of tw-make ---------------------------------------------------------------------------------------------------


def _identify_z8(path: Path) -> str:
    """Content hash of the two files of a game, checked for presence."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (path, path.with_suffix(".json")):
        try:
            content = part.read_bytes()
        except OSError as error:
            raise InputError(
                f"{part}: cannot be read ({error.strerror}); a tw-make game is a .z8 with its .json beside it."
            ) from None
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _z8_engine(path: str) -> Any:
    try:
        import textworld
        from textworld import EnvInfos
    except ImportError as error:
        raise _missing("textworld", error) from None
    with warnings.catch_warnings():
        # Jericho warns that it has no bindings for the game; the .json beside it serves instead.
        warnings.simplefilter("ignore")
        engine = textworld.start(path, request_infos=EnvInfos(admissible_commands=True, won=True, lost=True))
    engine.seed(_SEED)
    return engine
