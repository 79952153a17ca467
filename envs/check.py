"""The contract test of an environment, shipped to whoever adds one.

Knows: what the Environment protocol promises and how each promise is broken in practice (a hidden cursor, a
state that later steps change, an order that depends on hashing). Hides: the walks, the probes and the child
processes. Usable from pytest: `check_env(MyWorld)` or `check_env("tabular:two-key")`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from envs.core import Environment, Turn

NONSENSE = "frobnicate the quux"
_NOT_IMPORTABLE = 3
_T = TypeVar("_T")


class ContractError(AssertionError):
    """An environment breaks its contract: which clause, where, and what was seen."""


@dataclass(frozen=True, slots=True)
class ContractReport:
    """What a passed check has covered.

    turns: turns of the walks that were compared. restored: restores compared. refused: inadmissible commands
    tried. finished: episodes that ended. processes: child processes compared. unchecked: clauses that could
    not be checked, each with the reason.
    """

    game_id: str
    turns: int
    restored: int
    refused: int
    finished: int
    processes: int
    unchecked: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Edge:
    number: int
    before: Turn
    command: str
    after: Turn

    def __str__(self) -> str:
        return f"step {self.number} (command {self.command!r})"


def check_env(
    make_env: Callable[[], Environment] | str,
    *,
    steps: int = 40,
    seed: int = 0,
    script: Sequence[str] = (),
    restores: int = 12,
    processes: int = 2,
    won_ends: bool = True,
    timeout: float = 300.0,
) -> ContractReport:
    """Check that an environment keeps the contract of `envs.core.Environment`; the same arguments, the same check.

    make_env: makes a fresh environment of one game; or an address for `envs.make`.
    steps: length of the random walk; an episode that ends is begun anew. script: commands to play first, such as
    a walkthrough, so that a won turn is among those checked. restores: how many turns and steps are tried again
    out of order (dear where restoring is a replay). processes: child processes with different PYTHONHASHSEED that
    must see the same walk; needs an address, or a function or class that can be imported by name. won_ends: a won
    turn must be done; set False for a game documented to go on. timeout: seconds a child may take.

    Clauses: a turn has its types, `admissible` is a tuple of distinct strings, states are hashable and equal
    states mean equal turns; reset gives the same turn again; restore gives the turn that came with the state, at
    any depth and in any order, in a fresh instance too; a step depends on state and command alone and changes no
    earlier state; an inadmissible command is no error and changes neither what is admissible, won or done nor
    what follows; an episode that is over stays over; instances and processes agree.

    Raises ContractError, with the clause, at the first breach.
    """
    factory = _opener(make_env)
    env = factory()
    edges = _walk(env, steps=steps, seed=seed, script=script, won_ends=won_ends)
    first = edges[0].before if edges else _form(env.reset(), "reset", won_ends)
    turns = [first, *(edge.after for edge in edges)]
    hashes = [hash(turn.state) for turn in turns]
    rng = random.Random(f"check {seed}")

    _same("reset gives the same turn again", "second reset", first, env.reset())
    _equal_states(turns)
    restored = _check_restores(env, turns, rng, restores, "restore gives the turn that came with the state")
    again = rng.sample(edges, min(restores, len(edges)))
    _check_steps(env, again)
    refused = _check_refusals(env, turns, rng, restores)
    finished = _check_over(env, [turn for turn in turns if turn.done][: max(1, restores)])
    restored += _check_restores(env, turns, rng, restores, "a step changes no earlier state")
    for turn, number in zip(turns, hashes, strict=True):
        _demand(hash(turn.state) == number, "a step changes no earlier state", "the walk", "a state changed its hash")

    other = factory()
    _demand(
        isinstance(env.game_id, str) and bool(env.game_id) and env.game_id == other.game_id,
        "instances agree",
        "game_id",
        f"expected the same non-empty text, got {env.game_id!r} and {other.game_id!r}",
    )
    fresh = _walk(other, steps=steps, seed=seed, script=script, won_ends=won_ends)
    _demand(len(fresh) == len(edges), "instances agree", "the walk", f"{len(edges)} and {len(fresh)} steps")
    for edge, twin in zip(edges, fresh, strict=True):
        _same("instances agree", str(edge), edge.after, twin.after)
    restored += _check_restores(factory(), turns, rng, max(1, restores // 3), "restore works in a fresh instance")

    unchecked = [] if finished else [f"an episode that is over: none ended in {len(edges)} steps; give a script"]
    digest = _digest(env.game_id, first, edges)
    address = _address(make_env)
    agreed = 0
    if processes and address is None:
        unchecked.append("determinism over processes: give an address or a function that can be imported by name")
    elif processes and address is not None:
        arguments = json.dumps([*address, steps, seed, list(script), won_ends])
        for hash_seed in range(1, processes + 1):
            reason = _check_process(arguments, digest, hash_seed, timeout)
            if reason is not None:
                unchecked.append(f"determinism over processes: {reason}")
                break
            agreed += 1
    return ContractReport(env.game_id, len(turns), restored, refused, finished, agreed, tuple(unchecked))


# The walk ---------------------------------------------------------------------------------------------------------


def _walk(env: Environment, *, steps: int, seed: int, script: Sequence[str], won_ends: bool) -> list[_Edge]:
    """The script, then a random walk: mostly admissible commands, now and then one that is not."""
    rng = random.Random(f"walk {seed}")
    first = turn = _form(env.reset(), "reset", won_ends)
    edges: list[_Edge] = []
    for number in range(len(script) + steps):
        if turn.done:
            if first.done:
                break
            turn = first
        if number < len(script):
            command = script[number]
        elif turn.admissible and rng.random() < 0.9:
            command = rng.choice(turn.admissible)
        else:
            command = NONSENSE
        after = _attempt("a step is no error", f"step {number} (command {command!r})", env.step, turn.state, command)
        edges.append(_Edge(number, turn, command, after))
        turn = _form(after, str(edges[-1]), won_ends)
    return edges


def _form(turn: Turn, where: str, won_ends: bool) -> Turn:
    """Check the shape of one turn."""
    clause = "a turn has its types"
    _demand(isinstance(turn, Turn), clause, where, f"expected an envs.Turn, got {type(turn).__name__}")
    _demand(isinstance(turn.observation, str), clause, where, "the observation is not text")
    _demand(isinstance(turn.won, bool) and isinstance(turn.done, bool), clause, where, "won and done must be bool")
    clause = "admissible is a tuple of distinct strings"
    listed = turn.admissible
    _demand(isinstance(listed, tuple), clause, where, f"got a {type(listed).__name__}")
    _demand(all(isinstance(command, str) and command for command in listed), clause, where, f"got {_short(listed)}")
    repeated = sorted({command for command in listed if listed.count(command) > 1})
    _demand(not repeated, clause, where, f"repeated: {_short(repeated)}")
    _demand(isinstance(turn.state, Hashable), "a state is hashable", where, f"got a {type(turn.state).__name__}")
    _attempt("a state is hashable", where, hash, turn.state)
    if won_ends:
        _demand(turn.done or not turn.won, "won implies done", where, "the turn is won and not done")
    return turn


# Clauses ----------------------------------------------------------------------------------------------------------


def _equal_states(turns: Sequence[Turn]) -> None:
    for i, turn in enumerate(turns):
        for j in range(i):
            if turns[j].state == turn.state:
                where = f"turns {j} and {i} of the walk"
                _demand(
                    hash(turns[j].state) == hash(turn.state), "equal states have equal hashes", where, "they differ"
                )
                _same("equal states mean equal turns", where, turns[j], turn)


def _check_restores(env: Environment, turns: Sequence[Turn], rng: random.Random, count: int, clause: str) -> int:
    """Restore a sample of turns in two shuffled orders."""
    sample = rng.sample(range(len(turns)), min(count, len(turns)))
    for order in (sample, sample[::-1]):
        for i in order:
            where = f"restoring turn {i} of the walk"
            back = _attempt(clause, where, env.restore, turns[i].state)
            _same(clause, where, turns[i], back)
            _demand(hash(back.state) == hash(turns[i].state), clause, where, "the state came back with another hash")
    return 2 * len(sample)


def _check_steps(env: Environment, edges: Sequence[_Edge]) -> None:
    """Step again out of order, from the state as it was given and from the restored one."""
    clause = "a step depends on state and command alone"
    for edge in edges:
        where = f"{edge}, taken again out of order"
        _same(clause, where, edge.after, _attempt(clause, where, env.step, edge.before.state, edge.command))
        where = f"{edge}, taken again from the restored state"
        back = env.restore(edge.before.state)
        _same(clause, where, edge.after, _attempt(clause, where, env.step, back.state, edge.command))


def _check_refusals(env: Environment, turns: Sequence[Turn], rng: random.Random, count: int) -> int:
    clause = "an inadmissible command leaves the state as it is"
    going = [turn for turn in turns if not turn.done]
    sample = rng.sample(going, min(count, len(going)))
    tried = 0
    for turn in sample:
        command = "" if tried % 4 == 3 else NONSENSE
        where = f"command {command!r} after {_short(turn.observation)}"
        if command in turn.admissible:
            continue
        refusal = _attempt(clause, where, env.step, turn.state, command)
        tried += 1
        _same(clause, where, turn, refusal, only=("admissible", "won", "done"))
        _same(clause, f"restoring the turn of {where}", refusal, env.restore(refusal.state))
        if turn.admissible:
            follow = rng.choice(turn.admissible)
            there, then = env.step(turn.state, follow), env.step(refusal.state, follow)
            told = ("observation", "admissible", "won", "done")
            _same(clause, f"{follow!r} following {where}", there, then, only=told)
    return tried


def _check_over(env: Environment, over: Sequence[Turn]) -> int:
    clause = "an episode that is over stays over"
    for turn in over:
        for command in (*turn.admissible, NONSENSE):
            where = f"command {command!r} after {_short(turn.observation)}"
            after = _attempt(clause, where, env.step, turn.state, command)
            _same(clause, where, turn, after, only=("won", "done"))
    return len(over)


# Processes --------------------------------------------------------------------------------------------------------


def _opener(make_env: Callable[[], Environment] | str) -> Callable[[], Environment]:
    if not isinstance(make_env, str):
        return make_env
    address = make_env
    from envs import make

    return lambda: make(address)


def _address(make_env: Callable[[], Environment] | str) -> tuple[str, str] | None:
    """How a child finds the factory: ("", address) or (module, name); None if it cannot."""
    if isinstance(make_env, str):
        return "", make_env
    module, name = getattr(make_env, "__module__", None), getattr(make_env, "__qualname__", None)
    if not module or not name or module == "__main__" or getattr(sys.modules.get(module), name, None) is not make_env:
        return None
    return module, name


def _check_process(arguments: str, digest: str, hash_seed: int, timeout: float) -> str | None:
    """Compare the walk in a fresh process. Returns why it could not be compared, or None."""
    clause = "processes agree"
    where = f"a process with PYTHONHASHSEED={hash_seed}"
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        child = subprocess.run(
            [sys.executable, "-c", "from envs.check import _child; _child()", arguments],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ContractError(f"{clause}: {where} did not end within {timeout:g} s.") from None
    last = (child.stdout.strip().splitlines() or [""])[-1]
    if child.returncode == _NOT_IMPORTABLE:
        return last
    tail = " ".join(child.stderr.strip().splitlines()[-1:])
    _demand(child.returncode == 0, clause, where, f"it failed: {tail}")
    _demand(last == digest, clause, where, "the same commands gave other turns (an order that depends on hashing?)")
    return None


def _child() -> None:
    """What a child process does: the same walk, and its digest on the last line."""
    module, name, steps, seed, script, won_ends = json.loads(sys.argv[1])
    if module:
        try:
            factory = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            print(f"{module}.{name} cannot be imported in another process ({error})")
            sys.exit(_NOT_IMPORTABLE)
    else:
        factory = _opener(name)
    env = factory()
    edges = _walk(env, steps=steps, seed=seed, script=script, won_ends=won_ends)
    print(_digest(env.game_id, env.reset(), edges))


def _digest(game_id: str, first: Turn, edges: Sequence[_Edge]) -> str:
    """Of all that is told, in order; states are opaque and left out."""
    told = [[turn.observation, turn.admissible, turn.won, turn.done] for turn in (first, *(e.after for e in edges))]
    return hashlib.blake2b(json.dumps([game_id, told]).encode(), digest_size=16).hexdigest()


# Saying what is wrong ---------------------------------------------------------------------------------------------


def _attempt(clause: str, where: str, act: Callable[..., _T], *arguments: object) -> _T:
    try:
        return act(*arguments)
    except Exception as error:
        raise ContractError(f"{clause}: {where} raised {type(error).__name__}: {error}") from error


def _same(clause: str, where: str, expected: Turn, got: Turn, only: Sequence[str] = ()) -> None:
    for name in only or [field.name for field in fields(Turn)]:
        wanted, found = getattr(expected, name), getattr(got, name, None)
        if wanted != found:
            raise ContractError(f"{clause}: {where}: {name} should be {_short(wanted)}, got {_short(found)}.")


def _demand(holds: bool, clause: str, where: str, seen: str) -> None:
    if not holds:
        raise ContractError(f"{clause}: {where}: {seen}.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
