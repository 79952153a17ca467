"""A careful player of ALFWorld that reads the text alone, and the reading itself.

Knows: the wordings of tasks, commands and observations (both `move X to Y` and the older `put X in/on Y`), what
is worth remembering of a history (`Memory`), where things are usually found, and in which order a task is done.
Hides: parsing. Other policies build on `Reader`, which turns a history into a small memory once a moment.

The expert plays the six task types: it searches the likeliest receptacle first, opens what is closed, takes,
cleans, heats or cools, and places; with probability epsilon it gives a uniform admissible command instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from audit.policies import History
from audit.policies.scripted import Choice, ExactPolicy
from envs.core import InputError, Turn

MEMO_LIMIT = 60_000  # decisions (about 1 KB each) and memories a policy keeps before it starts afresh

# Tasks and commands ---------------------------------------------------------------------------------------------

Kind = Literal["place", "two", "clean", "heat", "cool", "light", "unknown"]
APPLIANCES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


class Task(NamedTuple):
    """What is asked: types of things and places, lower case; None where the sentence could not be read."""

    kind: Kind
    target: str | None
    destination: str | None  # the type of the lamp for `light`

    @property
    def appliance(self) -> str | None:
        """The type of place where the target is treated, None where it is not."""
        return APPLIANCES.get(self.kind)


_TASK = re.compile(r"Your task is to: *(.+?)\.?\s*$", re.MULTILINE)
_NAME, _PLACE = r"(?P<target>\w+)", r"(?:in|on|in/on) (?:the |a |an |some )?(?P<destination>\w+)"
_WORDINGS: tuple[tuple[re.Pattern[str], str | None], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (
            rf"(?:look at|examine) (?:the |a |an |some )?{_NAME} (?:under|with) (?:the |a )?(?P<destination>\w+)",
            "light",
        ),
        (rf"(?:put|find) two {_NAME} (?:and put them )?{_PLACE}", "two"),
        (rf"put (?:a |an |some |the )?(?P<kind>clean|hot|cool|cold) {_NAME} {_PLACE}", None),
        (rf"(?P<kind>clean|heat|cool) (?:a |an |some |the )?{_NAME} and put it {_PLACE}", None),
        (rf"put (?:a |an |some |the )?{_NAME} {_PLACE}", "place"),
    )
)
_TREATED = {"clean": "clean", "hot": "heat", "heat": "heat", "cool": "cool", "cold": "cool"}


@lru_cache(maxsize=4096)
def read_task(observation: str) -> Task:
    """The task in a first observation; kind `unknown` where there is none or its wording is not known."""
    sentence = _TASK.search(observation)
    for pattern, kind in _WORDINGS if sentence else ():
        match = pattern.fullmatch(sentence[1].strip().lower()) if sentence else None
        if match:
            name = kind or _TREATED[match["kind"]]
            return Task(name, match["target"], match["destination"])  # type: ignore[arg-type]
    return Task("unknown", None, None)


class Command(NamedTuple):
    """A command taken apart: `take mug 1 from desk 2` is ("take", "mug 1", "mug", "desk 2", "desk")."""

    kind: str  # go open close take put clean heat cool use examine look inventory help other
    thing: str = ""
    thing_type: str = ""
    place: str = ""
    place_type: str = ""


_COMMANDS = (
    re.compile(r"(?P<kind>go) to (?P<place>.+)"),
    re.compile(r"(?P<kind>open|close) (?P<place>.+)"),
    re.compile(r"(?P<kind>take) (?P<thing>.+) from (?P<place>.+)"),
    re.compile(r"(?P<kind>put) (?P<thing>.+?) (?:in/on|in|on) (?P<place>.+)"),
    re.compile(r"(?P<kind>move) (?P<thing>.+?) to (?P<place>.+)"),
    re.compile(r"(?P<kind>clean|heat|cool) (?P<thing>.+) with (?P<place>.+)"),
    re.compile(r"(?P<kind>use|examine) (?P<thing>.+)"),
    re.compile(r"(?P<kind>look|inventory|help)"),
)


@lru_cache(maxsize=65_536)
def read_command(text: str) -> Command:
    """Take a command apart; kind `other` where it has no known shape."""
    for pattern in _COMMANDS:
        match = pattern.fullmatch(text)
        if match:
            parts = match.groupdict(default="")
            thing, place = parts.get("thing", ""), parts.get("place", "")
            kind = "put" if parts["kind"] == "move" else parts["kind"]
            return Command(kind, thing, _type(thing), place, _type(place))
    return Command("other")


def _type(name: str) -> str:
    head, _, number = name.rpartition(" ")
    return head if number.isdigit() else name


# Memory ---------------------------------------------------------------------------------------------------------

# What is remembered of a place, in one byte: visits (0 to 3, 3 is more), what is known of its content, how many
# targets were last seen there (0 to 3), and whether the lamp is there.
VISITS, CLOSED, SEEN, KNOWN = 0x03, 0x04, 0x08, 0x0C
TARGET, TARGETS, LAMP = 0x10, 0x30, 0x40


class Room:
    """What does not change within one game: the task and the places, as the first turn lists them."""

    __slots__ = ("game_id", "index", "places", "task", "types")

    def __init__(self, first: History) -> None:
        self.game_id = first.game_id
        self.task = read_task(first.turn.observation)
        going = (read_command(command) for command in first.turn.admissible)
        self.places: tuple[str, ...] = tuple(command.place for command in going if command.kind == "go")
        self.types: tuple[str, ...] = tuple(_type(place) for place in self.places)
        self.index = {place: index for index, place in enumerate(self.places)}


class Memory:
    """What is remembered of a history: small, immutable, and one object for equal contents (so it hashes fast).

    status: one byte a place (see above). at: index of the place where the player stands, -1 before the first.
    holding: name of what is carried, None if nothing. treated: things cleaned, heated or cooled as the task asks.
    last: kind of the last command. again: the last command where it changed nothing and could be repeated.
    idle: how many commands in a row told or changed nothing (0 to 3, 3 is more).
    """

    __slots__ = ("again", "at", "holding", "idle", "last", "room", "status", "treated")

    def __init__(
        self,
        room: Room,
        status: bytes,
        at: int = -1,
        holding: str | None = None,
        treated: tuple[str, ...] = (),
        last: str = "",
        again: str | None = None,
        idle: int = 0,
    ) -> None:
        self.room, self.status, self.at, self.holding, self.treated = room, status, at, holding, treated
        self.last, self.again, self.idle = last, again, idle

    def home(self) -> int:
        """Index of the place of the destination's type that holds most targets (the first of them), -1 if none does."""
        best, most = -1, 0
        for index, place_type in enumerate(self.room.types):
            if place_type == self.room.task.destination and self.status[index] & TARGETS > most:
                best, most = index, self.status[index] & TARGETS
        return best


class Reader:
    """Turns histories into memories. One reader per policy: it owns the summaries kept in the histories."""

    def __init__(self, limit: int = MEMO_LIMIT) -> None:
        self._limit = limit
        self._rooms: dict[tuple[str, str], Memory] = {}
        self._kept: dict[tuple[object, ...], Memory] = {}
        self._updates: dict[tuple[Memory, str | None, Hashable], Memory] = {}

    def memory(self, history: History) -> Memory:
        """What is remembered at the end of a history."""
        return history.fold(self, self._start, self._update)

    def _start(self, first: History) -> Memory:
        key = first.game_id, first.turn.observation
        memory = self._rooms.get(key)
        if memory is None:
            if len(self._rooms) >= 10_000:
                self._rooms.clear()
            room = Room(first)
            memory = self._rooms[key] = Memory(room, bytes(len(room.places)))
        return memory

    def _update(self, memory: Memory, moment: History) -> Memory:
        # A state belongs to one turn of one game, and a memory to one game: the key says all that matters.
        key = memory, moment.command, moment.turn.state
        after = self._updates.get(key)
        if after is None:
            if len(self._updates) >= self._limit:
                self._updates.clear()
                self._kept.clear()
            after = self._updates[key] = self._keep(_remember(memory, moment.command or "", moment.turn))
        return after

    def _keep(self, memory: Memory) -> Memory:
        key = (
            memory.room,
            memory.status,
            memory.at,
            memory.holding,
            memory.treated,
            memory.last,
            memory.again,
            memory.idle,
        )
        return self._kept.setdefault(key, memory)


def _remember(memory: Memory, text: str, turn: Turn) -> Memory:
    """The memory after one more command and what was seen then."""
    room, task = memory.room, memory.room.task
    command, seen = read_command(text), turn.observation
    status = bytearray(memory.status)
    at, holding, treated = memory.at, memory.holding, memory.treated
    place = room.index.get(command.place or command.thing, -1)
    kind = command.kind
    happened = not seen.startswith("Nothing happens")
    if happened:
        if kind == "go" and place >= 0:
            at = place
            status[place] += status[place] & VISITS < VISITS
        elif kind == "take":
            holding = command.thing
            if command.thing_type == task.target and place >= 0 and status[place] & TARGETS:
                status[place] -= TARGET
        elif kind == "put":
            holding = None
            if command.thing_type == task.target and place >= 0 and status[place] & TARGETS < TARGETS:
                status[place] += TARGET
        elif kind in APPLIANCES:
            if kind == task.kind:
                treated = tuple(sorted({*treated, command.thing}))
            elif {kind, task.kind} == {"heat", "cool"}:
                treated = tuple(name for name in treated if name != command.thing)
        if place >= 0 and kind in ("go", "open", "examine"):
            status[place] = _read_place(status[place], room.places[place], task, seen)
        _look_around(status, room, turn, at, happened and kind not in ("take", "put"))
    after = bytes(status)
    told = (after, at, holding, treated) != (memory.status, memory.at, memory.holding, memory.treated) or kind == "open"
    # A visit alone is no news: what counts is what is known, held or done.
    news = told and (kind != "go" or any((a ^ b) & ~VISITS for a, b in zip(after, memory.status, strict=True)))
    idle = 0 if news else min(3, memory.idle + 1)
    again = text if not told and text in turn.admissible else None
    return Memory(room, after, at, holding, treated, kind, again, idle)


def _read_place(status: int, place: str, task: Task, seen: str) -> int:
    """What an observation tells of a place that was reached, opened or examined."""
    if f"The {place} is closed" in seen:
        return status if status & SEEN else status & ~KNOWN | CLOSED
    if "you see" not in seen:
        return status
    targets = min(3, seen.count(f" a {task.target} ") + seen.count(f" an {task.target} "))
    lamp = task.kind == "light" and f" a {task.destination} " in seen
    return status & VISITS | SEEN | targets * TARGET | (LAMP if lamp else 0)


def _look_around(status: bytearray, room: Room, turn: Turn, at: int, empty_handed: bool) -> None:
    """Places that share a spot with the one named: their content shows in what can be taken or used here."""
    around: dict[int, int] = {}
    for text in turn.admissible:
        command = read_command(text)
        if command.kind == "take":
            index = room.index.get(command.place, -1)
            if index >= 0:
                around[index] = around.get(index, 0) + (command.thing_type == room.task.target)
        elif command.kind == "use" and at >= 0 and command.thing_type == room.task.destination:
            status[at] |= LAMP
    for index, targets in around.items():
        status[index] = status[index] & (VISITS | LAMP) | SEEN | min(3, targets) * TARGET


# The expert -----------------------------------------------------------------------------------------------------

# Where things are usually found, likeliest first: written by hand, with an eye on where official train games put them.
_FOOD = ("fridge", "countertop", "diningtable", "microwave", "garbagecan", "sinkbasin")
_DISH = ("countertop", "cabinet", "diningtable", "coffeemachine", "fridge", "sinkbasin", "desk", "microwave", "shelf")
_CUTLERY = ("countertop", "diningtable", "drawer", "sinkbasin", "sidetable")
_COOKWARE = ("stoveburner", "countertop", "cabinet", "diningtable", "fridge", "sinkbasin")
_SPICE = ("countertop", "cabinet", "diningtable", "drawer", "shelf", "sidetable")
_BOTTLE = ("countertop", "cabinet", "toilet", "diningtable", "garbagecan", "shelf", "sinkbasin", "fridge")
_BATH = ("toilet", "countertop", "sinkbasin", "bathtubbasin", "cabinet", "drawer", "toiletpaperhanger", "garbagecan")
_DESK = ("desk", "sidetable", "dresser", "shelf", "drawer", "diningtable", "coffeetable", "bed", "garbagecan")
_SMALL = ("sidetable", "dresser", "desk", "coffeetable", "shelf", "drawer", "sofa", "armchair", "diningtable", "safe")
_SOFT = ("bed", "sofa", "armchair", "ottoman")
_SHOW = ("shelf", "coffeetable", "dresser", "sidetable", "countertop", "diningtable", "tvstand", "cabinet", "safe")
_LAMP = ("desk", "sidetable", "dresser", "shelf", "coffeetable")
_NEVER = 99  # after every place that is on a list
_ANYWHERE = ("countertop", "diningtable", "desk", "sidetable", "dresser", "coffeetable", "shelf")
HAUNTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("apple", "bread", "egg", "lettuce", "potato", "tomato"), _FOOD),
    **dict.fromkeys(("bowl", "cup", "mug", "plate"), _DISH),
    **dict.fromkeys(("butterknife", "fork", "knife", "ladle", "spatula", "spoon"), _CUTLERY),
    **dict.fromkeys(("kettle", "pan", "pot"), _COOKWARE),
    **dict.fromkeys(("peppershaker", "saltshaker"), _SPICE),
    **dict.fromkeys(("dishsponge", "glassbottle", "soapbottle", "spraybottle", "winebottle"), _BOTTLE),
    **dict.fromkeys(("candle", "cloth", "soapbar", "toiletpaper", "tissuebox"), _BATH),
    **dict.fromkeys(("handtowel", "towel"), ("handtowelholder", "towelholder", "countertop")),
    **dict.fromkeys(("alarmclock", "book", "cd", "cellphone", "pen", "pencil"), _DESK),
    **dict.fromkeys(("creditcard", "keychain", "newspaper", "remotecontrol", "watch"), _SMALL),
    **dict.fromkeys(("laptop", "pillow", "teddybear"), _SOFT),
    **dict.fromkeys(("basketball", "baseballbat", "boots", "tennisracket"), ("bed", "desk", "dresser", "armchair")),
    **dict.fromkeys(("box", "houseplant", "statue", "vase", "wateringcan"), _SHOW),
    **dict.fromkeys(("desklamp", "floorlamp"), _LAMP),
}


@lru_cache(maxsize=65_536)
def rank(thing_type: str | None, place_type: str) -> int | None:
    """The position of a place on the list of a thing's usual places, 0 first; None where it is not on it."""
    haunts = HAUNTS.get(thing_type or "", _ANYWHERE)
    return haunts.index(place_type) if place_type in haunts else None


Order = Literal["likely", "listed"]


class ExpertPolicy(ExactPolicy):
    """The hand-coded player, with noise.

    epsilon: probability of a uniform admissible command in place of the expert's own.
    order: search the likeliest place first, or all places in the order they are listed.
    tidy: examine every place that is searched and the thing that is taken, and close what was opened, which costs
    steps and tells nothing.
    """

    def __init__(self, epsilon: float = 0.0, *, order: Order = "likely", tidy: bool = False) -> None:
        if not 0 <= epsilon <= 1:
            raise InputError(f"epsilon of the expert is {epsilon}; expected a probability between 0 and 1.")
        if order not in ("likely", "listed"):
            raise InputError(f"The expert's order of search is {order!r}; expected 'likely' or 'listed'.")
        self.epsilon, self.order, self.tidy = float(epsilon), order, bool(tidy)
        self._reader = Reader()
        self._choices: dict[tuple[Memory, Hashable], Choice] = {}

    @classmethod
    def from_spec(cls, spec: str) -> ExpertPolicy:
        """The expert of `expert[:epsilon]`; "" is epsilon 0. Raises InputError for what is no probability."""
        try:
            return cls(float(spec) if spec else 0.0)
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"expert:{spec}: epsilon must be a number between 0 and 1, as in expert:0.1.") from None

    def describe(self) -> dict[str, Any]:
        """What the policy is."""
        return {"kind": "expert", "epsilon": self.epsilon, "order": self.order, "tidy": self.tidy}

    def choice(self, history: History) -> Choice | None:
        """The expert's command with probability 1 - epsilon, else uniform over the admissible ones."""
        if not history.turn.admissible:
            return None
        memory = self._reader.memory(history)
        key = memory, history.turn.state
        choice = self._choices.get(key)
        if choice is None:
            if len(self._choices) >= MEMO_LIMIT:
                self._choices.clear()
            choice = self._choices[key] = self._mix(self.best(memory, history.turn), history.turn.admissible)
        return choice

    def demonstration(self, history: History) -> str:
        """What the expert itself would do, noise apart."""
        return self.best(self._reader.memory(history), history.turn)

    def _mix(self, best: str, admissible: Sequence[str]) -> Choice:
        if self.epsilon == 0:
            return Choice((best,), (1.0,), (0.0,))
        share = self.epsilon / len(admissible)
        probabilities = [share + (1 - self.epsilon) * (command == best) for command in admissible]
        return Choice(tuple(admissible), probabilities, [math.log(p) for p in probabilities])

    def best(self, memory: Memory, turn: Turn) -> str:
        """The command the expert gives: always an admissible one."""
        here = [(read_command(text), text) for text in turn.admissible]
        task = memory.room.task
        habit = self._habit(memory, here) if self.tidy else None
        if habit is not None:
            return habit
        if memory.holding is not None and _type(memory.holding) == task.target:
            command = self._bring(memory, here)
        elif memory.holding is not None:
            command = _first(here, "put") or self._anywhere(memory, here)
        else:
            command = self._fetch(memory, here)
        return command or self._explore(memory, here, task.target) or turn.admissible[0]

    def _habit(self, memory: Memory, here: list[tuple[Command, str]]) -> str | None:
        place = memory.room.places[memory.at] if memory.at >= 0 else ""
        if memory.last == "take" and memory.holding is not None:
            return _first(here, "examine", thing=memory.holding)
        if memory.last in ("go", "open") and memory.holding is None and not _first(here, "open", place=place):
            return _first(here, "examine", thing=place)
        if memory.last == "examine" and not _first(here, "take", thing_type=memory.room.task.target):
            return _first(here, "close", place=place)
        return None

    def _fetch(self, memory: Memory, here: list[tuple[Command, str]]) -> str | None:
        """Take a target that is not yet where it belongs, or go to one."""
        task, home = memory.room.task, memory.home() if memory.room.task.kind in ("two", "place") else -1
        kept = memory.room.places[home] if home >= 0 else None
        for command, text in here:
            if command.kind == "take" and command.thing_type == task.target and command.place != kept:
                if command.thing in memory.treated and command.place_type == task.destination:
                    continue
                return text
        for index, status in enumerate(memory.status):
            if status & TARGETS and index not in (home, memory.at):
                return _go(memory, here, index)
        return None

    def _bring(self, memory: Memory, here: list[tuple[Command, str]]) -> str | None:
        """Treat what is held if the task asks for it, then bring it where it belongs."""
        task = memory.room.task
        if task.appliance is not None and memory.holding not in memory.treated:
            return _first(here, task.kind) or self._visit(memory, here, task.appliance)
        if task.kind == "light":
            used = _first(here, "use", thing_type=task.destination)
            lamps = [index for index, status in enumerate(memory.status) if status & LAMP]
            if used and memory.again != used:
                return used
            for index in lamps:
                if index != memory.at:
                    return _go(memory, here, index)
            return self._explore(memory, here, task.destination)
        home = memory.home() if task.kind == "two" else -1
        if home >= 0:
            place = memory.room.places[home]
            return _first(here, "put", place=place) or _first(here, "open", place=place) or _go(memory, here, home)
        return (
            _first(here, "put", place_type=task.destination)
            or _first(here, "open", place_type=task.destination)
            or self._visit(memory, here, task.destination)
        )

    def _visit(self, memory: Memory, here: list[tuple[Command, str]], place_type: str | None) -> str | None:
        """Go to the place of a type that was visited least, the first of them."""
        fits = [(memory.status[i] & VISITS, i) for i, kind in enumerate(memory.room.types) if kind == place_type]
        return next((text for _, i in sorted(fits) if (text := _go(memory, here, i))), None)

    def _explore(self, memory: Memory, here: list[tuple[Command, str]], thing_type: str | None) -> str | None:
        """Open or examine what is within reach and not seen; else go where nothing was seen yet, else anywhere."""
        unseen = {place for place, status in zip(memory.room.places, memory.status, strict=True) if not status & SEEN}
        going = {command.place for command, _ in here if command.kind == "go"}
        for command, text in here:
            if command.kind == "open" and command.place in unseen:
                return text
        for command, text in here:  # places that share this spot cannot be gone to from here
            if command.kind == "examine" and command.thing in unseen - going:
                return text
        return self._anywhere(memory, here, thing_type)

    def _anywhere(self, memory: Memory, here: list[tuple[Command, str]], thing_type: str | None = None) -> str | None:
        def order(command: Command) -> tuple[bool, int, int, int]:
            index = memory.room.index.get(command.place, -1)
            status = memory.status[index] if index >= 0 else 0
            found = rank(thing_type, command.place_type) if self.order == "likely" else 0
            likely = _NEVER if found is None else found
            seen = bool(status & SEEN)
            return seen, status & VISITS if seen else 0, likely, index

        return min(((order(command), text) for command, text in here if command.kind == "go"), default=(0, None))[1]


def _first(here: list[tuple[Command, str]], kind: str, **wanted: str | None) -> str | None:
    for command, text in here:
        if command.kind == kind and all(getattr(command, name) == value for name, value in wanted.items()):
            return text
    return None


def _go(memory: Memory, here: list[tuple[Command, str]], index: int) -> str | None:
    return _first(here, "go", place=memory.room.places[index])
