"""Trajectories from other people's logs, each with a certificate of how faithfully it replays.

Knows: which wordings of ALFWorld's text are known to mean the same, and what a faithful replay is. Hides: finding
the games, replaying and comparing. Every entry of a log becomes exactly one trajectory or one problem with its
reason; outcomes come from the goal, never from text. How logs are written is known to `audit.logs`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from audit.logs import Entry, Kind, read_log, read_trajectories, write_trajectories
from audit.records import Trajectory
from envs import Environment, Game, InputError, make
from envs import games as list_games
from envs.alfworld.games import open_game
from envs.alfworld.world import AlfredWorld

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Imported",
    "Problem",
    "certificate_table",
    "compare_observation",
    "import_log",
    "read_trajectories",
    "write_trajectories",
]

Agreement = Literal["exact", "wording", "different", "missing"]
AGREEMENTS: tuple[Agreement, ...] = ("exact", "wording", "different", "missing")
DEFAULT_BUDGET = 50  # ALFWorld's own limit of steps

# Comparing texts ------------------------------------------------------------------------------------------------

_BANNER = "-= Welcome to TextWorld, ALFRED! =-"
_ARRIVAL = re.compile(
    r"You arrive at (?:loc -?\d+|the location|(?P<place>[a-z]+ \d+))\. (?=(?:On the|The) (?P<seen>[a-z]+ \d+)\b)"
)
_PUT = re.compile(r"You put the ([a-z]+ \d+) (?:in/on|in|on) the ([a-z]+ \d+)\.")
_TASK = re.compile(r"Your task is to:[ \t]*(\S.*)")
_OLD_COMMAND = re.compile(r"put .+ (?:in/on|in|on) .+")
_NEW_COMMAND = re.compile(r"move .+ to .+")


def compare_observation(recorded: str | None, replayed: str) -> Agreement:
    """How a recorded observation agrees with the replayed one.

    exact: the same characters. wording: the same once both are put into one of the known wordings. missing: the
    log kept none. different: anything else. The known wordings, and no others:

    - blank lines, blanks and carriage returns at line ends, blanks around the whole; the banner of the first text;
    - the arrival before what is seen: absent, `You arrive at loc 12.`, `You arrive at the location.`, or
      `You arrive at desk 1.` where the text after it names the same place;
    - `You put the X in/on the Y.` (also in, on) for `You move the X to the Y.`;
    - `Nothing happens` without its full stop.
    """
    if recorded is None:
        return "missing"
    if recorded == replayed:
        return "exact"
    return "wording" if _plain(recorded) == _plain(replayed) else "different"


def _plain(text: str) -> str:
    lines = [line for line in map(str.rstrip, text.strip().split("\n")) if line]
    if lines and lines[0] == _BANNER:
        del lines[0]
    plain = "\n".join(lines)
    arrival = _ARRIVAL.match(plain)
    if arrival and arrival["place"] in (None, arrival["seen"]):
        plain = plain[arrival.end() :]
    put = _PUT.fullmatch(plain)
    if put:
        plain = f"You move the {put[1]} to the {put[2]}."
    return "Nothing happens." if plain == "Nothing happens" else plain


def _task(text: str | None) -> str | None:
    found = _TASK.findall(text or "")
    return str(found[-1]).strip() if found else None


def _dialects(command: str, accepted: bool, observation: str | None) -> set[str]:
    """Which dialects of ALFWorld a step gives evidence of; a command that was refused is evidence of none."""
    seen = observation or ""
    arrival = _ARRIVAL.match(seen)
    old = seen.startswith(("You put the ", "You arrive at loc ")) or (accepted and _OLD_COMMAND.fullmatch(command))
    new = seen.startswith("You move the ") or (accepted and _NEW_COMMAND.fullmatch(command))
    return ({"old"} if old else set()) | ({"new"} if new or (arrival and arrival["place"]) else set())


# Importing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """An entry of a log that could not be imported. entry: its line (JSON lines) or its place in the document,
    from 1. name: the game it names, if that could be read. reason: why, in words."""

    file: str
    kind: Kind
    entry: int
    name: str | None
    reason: str

    def __str__(self) -> str:
        named = "" if self.name is None else f" ({self.name})"
        return f"{self.file}, {'entry' if self.kind == 'adapt' else 'line'} {self.entry}{named}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Imported:
    """A log, imported. trajectories and problems are in the log's order and together are all of its entries.

    notes: what the log holds besides entries.
    """

    file: str
    kind: Kind
    trajectories: tuple[Trajectory, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def import_log(
    path: str | Path,
    games: str | Path | Sequence[str | Path | Game],
    *,
    kind: Kind | None = None,
    policy: str = "unknown",
    budget: int = DEFAULT_BUDGET,
    done: Callable[[int, int], None] = lambda finished, of: None,
) -> Imported:
    """Import a log: read it, replay every entry in its game, certify each.

    games: where the entries' games are, as specs (`alfworld:train`), folders or games; an entry's game is found by
    its whole name `<task>/<trial>` (our own logs: by content id where given), never by a part of it.
    kind: of the log (`audit.logs`); told from its content if None. policy: who played, where the log does not say.
    budget: steps an episode was allowed, where the log does not say; a longer trajectory keeps its own length.
    done: told how many entries are dealt with, of how many.

    Commands come out in the game's dialect, what the policy wrote in `texts`, observations as recorded, `won` from
    the goal. A trajectory ends where the game does. Its certificate (JSON-ready) holds:

    log, file, entry: where it is from. actions, replayed: how many the log holds, and how many were replayed.
    observations: how many are exact, wording, different, missing (`compare_observation`; the first text counts);
    each: the same, one by one; first_difference: {step, command, recorded, replayed} or None.
    outcome_recorded (None: the log does not say), outcome_replayed, outcome_equal (None: cannot be compared).
    dialect: old, new, both, or None where nothing in the entry tells. no_ops: commands that were not admissible.
    translated: commands taken over from the other dialect. task_recorded, task_replayed, task_equal.
    notes: whatever else was found, in words. thoughts_after: thoughts after the last action (kinds with thoughts).
    transcripts, failed_attempts (adapt): sub-plans that the trace joins, and attempts that it leaves out.

    Raises InputError where the file cannot be read, is of no known kind, or the games cannot be found.
    """
    if budget < 1:
        raise InputError(f"budget is {budget}; expected the number of steps an episode was allowed, at least 1.")
    file = Path(path).name
    log = read_log(path, kind)
    catalogue = _Catalogue(games)

    results: dict[int, Trajectory | str] = {}  # a trajectory, or the reason why there is none
    by_game: dict[str, tuple[Game, list[Entry]]] = {}
    for entry in log.entries:
        found = catalogue.find(entry) if isinstance(entry, Entry) else entry.reason
        if isinstance(found, Game) and isinstance(entry, Entry):
            by_game.setdefault(found.id, (found, []))[1].append(entry)
        else:
            results[entry.number] = str(found)
    # One game at a time: no game is opened twice, and one world is in memory.
    for game, entries in by_game.values():
        try:
            env = _open(game)
        except InputError as error:
            why = str(error).replace(game.address, game.name)
            results.update((entry.number, f"its game cannot be opened: {why}") for entry in entries)
            continue
        for entry in entries:
            results[entry.number] = _replay(entry, game, env, log.kind, file, policy, budget)
            done(len(results), len(log.entries))

    trajectories: list[Trajectory] = []
    problems: list[Problem] = []
    first: dict[str, int] = {}
    for entry in log.entries:
        result = results[entry.number]
        if isinstance(result, Trajectory) and first.setdefault(result.id, entry.number) != entry.number:
            result = f"a repetition: the same trajectory as line {first[result.id]}"
        if isinstance(result, Trajectory):
            trajectories.append(result)
        else:
            problems.append(Problem(file, log.kind, entry.number, entry.name, result))
    return Imported(file, log.kind, tuple(trajectories), tuple(problems), log.notes)


class _Catalogue:
    """Games by their whole name and by their content."""

    def __init__(self, games: str | Path | Sequence[str | Path | Game]) -> None:
        self._by_id: dict[str, Game] = {}
        self._by_name: dict[str, dict[str, Game]] = {}
        for given in [games] if isinstance(games, (str, Path)) else games:
            for game in [given] if isinstance(given, Game) else list_games(given):
                self._by_id.setdefault(game.id, game)
                self._by_name.setdefault(game.name, {}).setdefault(game.id, game)

    def find(self, entry: Entry) -> Game | str:
        """The game of an entry, or the reason why there is none."""
        named = self._by_name.get(entry.name, {})
        identifier = entry.kept.get("game")
        if identifier:
            if identifier in self._by_id:
                return self._by_id[identifier]
            if named:
                here = ", ".join(known[:12] for known in named)
                return f"another version of its game: content {identifier[:12]} in the log, {here} here"
        if len(named) > 1:
            return f"ambiguous game: {len(named)} different games here have this name"
        for game in named.values():
            return game
        return f"unknown game: none of the {len(self._by_id)} games given has exactly this name"


def _open(game: Game) -> Environment:
    if game.address.endswith(".tw-pddl") and not game.address.startswith("stock:"):
        return open_game(game.address, dialect="any")
    return make(game.address)


def _replay(entry: Entry, game: Game, env: Environment, kind: Kind, file: str, policy: str, budget: int) -> Trajectory:
    turn = env.reset()
    each: list[Agreement] = []
    difference: dict[str, Any] | None = None

    def compare(command: str | None, recorded: str | None, replayed: str) -> None:
        nonlocal difference
        agreement = compare_observation(recorded, replayed)
        if agreement == "different" and difference is None:
            difference = {"step": len(each), "command": command, "recorded": recorded, "replayed": replayed}
        each.append(agreement)

    compare(None, entry.intro, turn.observation)
    task_recorded, task_replayed = _task(entry.intro), _task(turn.observation)
    commands: list[str] = []
    texts: list[str | None] = []
    no_ops = translated = 0
    dialects: set[str] = set()
    for step in entry.steps:
        if turn.done:
            break
        written = step.command.strip()
        command = env.canonical(written, turn.admissible) if isinstance(env, AlfredWorld) else written
        accepted = command in turn.admissible
        no_ops += not accepted
        translated += command != written
        dialects |= _dialects(written, accepted, step.observation)
        commands.append(command)
        texts.append(step.text if step.text is not None or command == step.command else step.command)
        turn = env.step(turn.state, command)
        compare(command, step.observation, turn.observation)

    kept, notes, n = entry.kept, list(entry.notes), len(commands)
    if n < len(entry.steps):
        notes.append(f"{len(entry.steps) - n} actions after the end of the game are left out")
    allowed = int(kept.get("budget") or budget)
    if n > allowed:
        notes.append(f"longer than the {allowed} steps allowed")
    counts = Counter(each)
    certificate = {
        "log": kind,
        "file": file,
        "entry": entry.number,
        "actions": len(entry.steps),
        "replayed": n,
        "observations": {agreement: counts[agreement] for agreement in AGREEMENTS},
        "each": each,
        "first_difference": difference,
        "outcome_recorded": entry.won,
        "outcome_replayed": turn.won,
        "outcome_equal": None if entry.won is None else entry.won == turn.won,
        "dialect": "both" if len(dialects) > 1 else next(iter(dialects), None),
        "no_ops": no_ops,
        "translated": translated,
        "task_recorded": task_recorded,
        "task_replayed": task_replayed,
        "task_equal": None if task_recorded is None else task_recorded == task_replayed,
        "notes": notes,
        **entry.facts,
    }
    return Trajectory(
        game=game.id,
        game_name=game.name,
        task_type=game.task_type,
        policy=str(kept.get("policy") or policy),
        budget=max(allowed, n),
        commands=tuple(commands),
        observations=(entry.intro, *(step.observation for step in entry.steps[:n])),
        won=turn.won,
        status="ok" if turn.done else "truncated",
        logprobs=tuple((kept.get("logprobs") or [None] * n)[:n]),
        texts=tuple(texts),
        origin=kept.get("origin") or {"log": kind, "entry": entry.number, "name": entry.name, "digest": entry.digest},
        certificate=certificate,
    )


# The table ------------------------------------------------------------------------------------------------------

_COLUMNS = (
    *("entries", "imported", "exact", "wording", "different", "incomplete"),
    *("outcome_equal", "outcome_different", "outcome_unrecorded", "won", "task_different"),
    *("actions", "no_ops", "translated", "not_replayed"),
)


def certificate_table(trajectories: Iterable[Trajectory], problems: Iterable[Problem] = ()) -> pd.DataFrame:
    """How faithfully logs replay: one row a log (its file's name), counts of entries unless said otherwise.

    entries = imported + not_replayed; imported = exact + wording + different + incomplete, where exact means that
    every observation is the same character for character, wording that all are once the known wordings are made
    one, different that at least one differs, incomplete that none differs and at least one was not recorded.
    outcome_equal, outcome_different, outcome_unrecorded; won (by the goal); task_different: task text is not the
    game's. actions, no_ops, translated: numbers of commands. reasons: why entries could not be replayed, with
    counts. Trajectories without a certificate are not counted: they are from no log.
    """
    import pandas as pd

    rows: dict[str, Counter[str]] = {}
    kinds: dict[str, str] = {}
    reasons: dict[str, Counter[str]] = {}
    outcomes = {True: "outcome_equal", False: "outcome_different", None: "outcome_unrecorded"}
    for trajectory in trajectories:
        certificate = trajectory.certificate
        if certificate is None:
            continue
        kinds[certificate["file"]] = certificate["log"]
        row = rows.setdefault(certificate["file"], Counter())
        row.update(("entries", "imported", outcomes[certificate["outcome_equal"]]))
        row[_faithfulness(certificate["observations"])] += 1
        row["won"] += trajectory.won
        row["task_different"] += certificate["task_equal"] is False
        row["actions"] += certificate["replayed"]
        row["no_ops"] += certificate["no_ops"]
        row["translated"] += certificate["translated"]
    for problem in problems:
        kinds[problem.file] = problem.kind
        rows.setdefault(problem.file, Counter()).update(("entries", "not_replayed"))
        reasons.setdefault(problem.file, Counter())[re.split("[:;]", problem.reason)[0]] += 1
    table = [
        {
            "log": file,
            "kind": kinds[file],
            **{column: row[column] for column in _COLUMNS},
            "reasons": "; ".join(f"{reason} ({n})" for reason, n in reasons.get(file, Counter()).most_common()),
        }
        for file, row in sorted(rows.items())
    ]
    return pd.DataFrame(table, columns=["log", "kind", *_COLUMNS, "reasons"])


def _faithfulness(observations: Mapping[str, int]) -> str:
    if observations["different"]:
        return "different"
    if observations["missing"]:
        return "incomplete"
    return "wording" if observations["wording"] else "exact"
