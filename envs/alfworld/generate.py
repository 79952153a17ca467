"""Standard ALFWorld games made from what the installed alfworld package ships: no download, no planner.

Knows how a game is drawn, written and won; hides the PDDL text, the files' layout and the stream of chance.

Rooms, rules, goals and wordings come from `layouts.py`, that is from the package. Drawn by chance: the floor
plan among the training ones that suit the task (so the official unseen rooms stay unseen), the target and the
destination among the pairs the room and the tables allow, how many instances of each portable type there are,
where each stands, where the agent starts, and which wording of the task is used.

Rules observed in the official games and kept: nothing is open at first; no instance of the target starts in a
receptacle of the destination's type when moving it is the whole task, nor in the appliance that would clean,
heat or cool it; an instance of the target that starts in the fridge is cool (`isCool`); what stands in a
receptacle shares its location. Not kept: objects whose type is in no receptacle table (teddy bears, boots,
paper towel rolls) are scenery here, while the official games let them be taken and never put down.

The same seed gives the same bytes on every machine and Python, for one alfworld version; game i does not
depend on how many games are made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

from envs.alfworld.layouts import Room, Rules, Thing, identifier, load_room, load_rules, position
from envs.alfworld.translate import display_names
from envs.core import InputError

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

# What changes the target on its way: where, by which command and PDDL action, and who can be so changed.
_TREATMENTS = {
    "pick_clean_then_place_in_recep": ("SinkBasin", "clean", "CleanObject", "Cleanable"),
    "pick_heat_then_place_in_recep": ("Microwave", "heat", "HeatObject", "Heatable"),
    "pick_cool_then_place_in_recep": ("Fridge", "cool", "CoolObject", "Coolable"),
}
_LOOK = "look_at_obj_in_light"
_TWO = "pick_two_obj_and_place"
_LAMP = "DeskLamp"
_BASINS = frozenset({"SinkBasin", "BathtubBasin"})  # never a destination in the official games
_SLOT = 3  # a receptacle that admits at most this many types is made for one of them: a burner, a hanger

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GeneratedGame:
    """One game: `name` is `<task>/<trial>` as in the official release; `game` and `traj_data` are the bytes of
    `game.tw-pddl` and `traj_data.json`; `walkthrough` are the commands that win it at the last one."""

    name: str
    task_type: str
    walkthrough: tuple[str, ...]
    game: bytes
    traj_data: bytes


@dataclass(frozen=True, slots=True)
class _Task:
    kind: str
    room: Room
    target: str
    destination: str  # a receptacle type, or the lamp's type


def generate(n: int, seed: int) -> Iterator[GeneratedGame]:
    """Yield n games, the six task types in turn. Game i depends on seed and i alone.

    Raises InputError at once for an n or seed that is not an integer of 0 to 2^64 - 1, and when the alfworld
    package is missing or is laid out otherwise than the tested version.
    """
    for name, value in (("n", n), ("seed", seed)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
            raise InputError(f"{name} of the game generator is not an integer of 0 to 2^64 - 1: give it one")
    rules = load_rules()
    return (_game(rules, seed, index) for index in range(n))


def write_games(n: int, seed: int, out: Path) -> list[Path]:
    """Write n games as `<out>/<task>/<trial>/{game.tw-pddl,traj_data.json}` and return the paths of the game files.

    Raises InputError as `generate` does, and when a file cannot be written.
    """
    paths = []
    for game in generate(n, seed):
        folder = Path(out) / game.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The game file last: a folder that has it is complete.
            (folder / "traj_data.json").write_bytes(game.traj_data)
            (folder / "game.tw-pddl").write_bytes(game.game)
        except OSError as error:
            raise InputError(
                f"cannot write a generated game to {folder}: {error.strerror}; name a folder that can be written"
            ) from error
        paths.append(folder / "game.tw-pddl")
    return paths


class _Chance:
    """A stream of draws fixed by its key: BLAKE2b of the key and a counter, hence the same everywhere."""

    def __init__(self, *key: object) -> None:
        self._key = hashlib.blake2b("|".join(map(str, key)).encode()).digest()
        self._words: list[int] = []
        self._counter = 0

    def below(self, bound: int) -> int:
        """A uniform integer of 0 to bound - 1, without modulo bias."""
        while True:
            if not self._words:
                block = hashlib.blake2b(self._counter.to_bytes(8, "big"), key=self._key).digest()
                self._words = [int.from_bytes(block[i : i + 8], "big") for i in range(0, len(block), 8)]
                self._counter += 1
            word = self._words.pop()
            if word < (1 << 64) - (1 << 64) % bound:
                return word % bound

    def choice(self, items: Sequence[_T]) -> _T:
        return items[self.below(len(items))]

    def weighted(self, items: Sequence[_T], weights: Sequence[int]) -> _T:
        draw = self.below(sum(weights))
        for item, weight in zip(items, weights, strict=True):
            draw -= weight
            if draw < 0:
                return item
        raise AssertionError("weights are not negative")


def _game(rules: Rules, seed: int, index: int) -> GeneratedGame:
    chance = _Chance("credit-audit game", seed, index)
    task = _draw_task(rules, chance, TASK_TYPES[index % len(TASK_TYPES)])
    objects = _draw_objects(rules, chance, task)
    nested = _draw_nesting(rules, chance, task, objects)
    start = _draw_start(chance, task.room)
    plan = _plan(rules, task, objects, start)
    fill = {"obj": task.target, "recep": task.destination, "toggle": task.destination, "mrecep": ""}
    lower = {key: value.lower() for key, value in fill.items()}
    wordings = [wording.format(**lower) for wording in rules.wordings[task.kind]]
    trial = f"trial_G{seed}_{index:06d}"
    game = {
        "pddl_domain": rules.domain,
        "grammar": rules.grammar.replace("UNKNOWN GOAL", chance.choice(wordings)),
        "pddl_problem": _problem(rules, task, trial, objects, nested, start, rules.goals[task.kind].format(**fill)),
        "solvable": True,
        "walkthrough": [command for command, _ in plan],
    }
    x, z, rotation, horizon = (int(field) for field in start.split("|")[1:])
    looking = task.kind == _LOOK
    traj_data = {
        "task_id": trial,
        "task_type": task.kind,
        "pddl_params": {
            "mrecep_target": "",
            "object_sliced": False,
            "object_target": task.target,
            "parent_target": "" if looking else task.destination,
            "toggle_target": task.destination if looking else "",
        },
        "turk_annotations": {
            "anns": [{"assignment_id": "template", "high_descs": [], "task_desc": w, "votes": []} for w in wordings]
        },
        "scene": {
            "floor_plan": f"FloorPlan{task.room.scene}",
            "scene_num": task.room.scene,
            "init_action": {
                "action": "TeleportFull",
                "horizon": horizon,
                "rotateOnTeleport": True,
                "rotation": rotation * 90,
                "x": x * rules.step,
                "z": z * rules.step,
            },
        },
        "plan": {"high_pddl": _high_level(plan)},
        "images": [],
        "generated": {"by": "credit-audit", "seed": seed, "index": index},
    }
    return GeneratedGame(
        name=f"{task.kind}-{task.target}-None-{task.destination}-{task.room.scene}/{trial}",
        task_type=task.kind,
        walkthrough=tuple(command for command, _ in plan),
        game=json.dumps(game).encode(),
        traj_data=json.dumps(traj_data).encode(),
    )


def _draw_task(rules: Rules, chance: _Chance, kind: str) -> _Task:
    """A floor plan, then a target type among those it allows, then a destination type."""
    scenes = list(rules.scenes[kind])
    while scenes:
        room = load_room(scenes.pop(chance.below(len(scenes))))
        allowed = [(target, to) for target in room.portable if (to := _destinations(rules, room, kind, target))]
        if allowed:
            target, destinations = chance.choice(allowed)
            return _Task(kind, room, target, chance.choice(destinations))
    raise InputError(f"no floor plan of the installed alfworld allows the task {kind}: install the tested version")


def _destinations(rules: Rules, room: Room, kind: str, target: str) -> list[str]:
    if kind == _LOOK:
        lamp = any(s.type == _LAMP and s.inside for s in room.scenery)
        return [_LAMP] if lamp and _homes(rules, room, target, frozenset()) else []
    appliance, _, _, able = _TREATMENTS.get(kind, ("", "", "", ""))
    types = {r.type for r in room.receptacles}
    if appliance and (appliance not in types or target not in rules.properties[able]):
        return []
    return [
        to
        for to in sorted(types - _BASINS - {appliance})
        if target in rules.admits.get(to, frozenset())
        and not (kind == _TWO and _is_slot(rules, to))
        and _homes(rules, room, target, _barred(kind, to))
    ]


def _barred(kind: str, destination: str) -> frozenset[str]:
    """Receptacle types in which no instance of the target may start."""
    if kind == _LOOK:
        return frozenset()
    return frozenset({_TREATMENTS[kind][0] if kind in _TREATMENTS else destination})


def _is_slot(rules: Rules, kind: str) -> bool:
    return len(rules.admits.get(kind, ())) <= _SLOT


def _homes(rules: Rules, room: Room, kind: str, barred: frozenset[str]) -> list[str]:
    """Types of receptacle, roomy ones only, where an object of this type may stand."""
    types = sorted({r.type for r in room.receptacles} - barred)
    return [t for t in types if kind in rules.admits.get(t, frozenset()) and not _is_slot(rules, t)]


def _draw_objects(rules: Rules, chance: _Chance, task: _Task) -> list[Thing]:
    """Every portable object: 1 to 3 of each type the floor plan lists, 1 (or 2) to 4 of the target (the package's
    own limits). The target comes first, so that it finds a place."""
    placed: list[Thing] = []
    for kind in sorted(task.room.portable, key=lambda t: t != task.target):
        barred = _barred(task.kind, task.destination) if kind == task.target else frozenset[str]()
        least = 2 if kind == task.target and task.kind == _TWO else 1
        most = rules.max_targets if kind == task.target else rules.max_instances
        for _ in range(least + chance.below(most - least + 1)):
            placed.append(_place(rules, chance, task.room, kind, barred, placed))
    return placed


def _place(rules: Rules, chance: _Chance, room: Room, kind: str, barred: frozenset[str], placed: list[Thing]) -> Thing:
    """One object in a receptacle that admits it, or loose on the floor when there is none.

    A slot made for this type (a burner for a pan) is used half the time while one is free. Otherwise the type of
    receptacle is drawn in proportion to how many object types it admits, the best measure of its size that the
    package has, and then one of that type.
    """
    full = {thing.inside for thing in placed}
    slots = [
        r
        for r in room.receptacles
        if r.type not in barred
        and kind in rules.admits.get(r.type, ())
        and _is_slot(rules, r.type)
        and r.id not in full
    ]
    homes = _homes(rules, room, kind, barred)
    home: Thing | None = None
    if slots and (not homes or chance.below(2)):
        home = chance.choice(slots)
    elif homes:
        chosen = chance.weighted(homes, [len(rules.admits[t]) for t in homes])
        home = chance.choice([r for r in room.receptacles if r.type == chosen])
    used = {thing.id for thing in (*placed, *room.scenery)}
    while True:
        if home is not None:
            x, y, z = position(home.id)
            location, inside = home.location, home.id
        else:
            grid_x, grid_z = chance.choice(room.floor)
            metre = round(rules.step * 100)
            (x, y, z), inside = (grid_x * metre, 0, grid_z * metre), None
            location = f"loc|{grid_x}|{grid_z}|{chance.below(4)}|60"
        thing_id = identifier(kind, (x + chance.below(41) - 20, y + 5, z + chance.below(41) - 20))
        if thing_id not in used:
            return Thing(thing_id, kind, location, inside=inside)


def _draw_nesting(rules: Rules, chance: _Chance, task: _Task, objects: list[Thing]) -> tuple[Thing, Thing] | None:
    """In a quarter of the games one object lies in a bowl, cup, box or the like (inner, outer) in the same place."""
    if chance.below(4):
        return None
    pairs = [
        (inner, outer)
        for inner in objects
        for outer in objects
        if inner.inside is not None
        and inner.inside == outer.inside
        and inner.type != task.target
        and outer.type in rules.containers
        and inner.type in rules.admits.get(outer.type, frozenset())
    ]
    return chance.choice(pairs) if pairs else None


def _draw_start(chance: _Chance, room: Room) -> str:
    """A location from which no receptacle is used, so that the game opens with a look around the room."""
    taken = {r.location for r in room.receptacles}
    free = [loc for x, z in room.floor for rotation in range(4) if (loc := f"loc|{x}|{z}|{rotation}|30") not in taken]
    return chance.choice(free)


# One step of the walkthrough: the command and, where it is part of ALFRED's high-level plan, (action, arguments).
_Step = tuple[str, tuple[str, Thing, Thing] | None]


def _plan(rules: Rules, task: _Task, objects: list[Thing], start: str) -> list[_Step]:
    """The shortest walkthrough of the obvious shape, over the instances of target, appliance and destination."""
    names = _names([*objects, *task.room.scenery, *task.room.receptacles])
    by_id = {r.id: r for r in task.room.receptacles}
    targets = [o for o in objects if o.type == task.target and o.inside is not None]
    picks = list(permutations(targets, 2 if task.kind == _TWO else 1))
    if task.kind == _LOOK:
        lamps = [s for s in task.room.scenery if s.type == _LAMP and s.inside is not None]
        ends = [(lamp, by_id[str(lamp.inside)]) for lamp in lamps]
    else:
        ends = [(r, r) for r in task.room.receptacles if r.type == task.destination]
    appliance, verb, action, _ = _TREATMENTS.get(task.kind, ("", "", "", ""))
    stops: list[Thing | None] = [r for r in task.room.receptacles if r.type == appliance] or [None]

    treat = (verb, action)
    options = [(pick, goal, end, stop) for pick in picks for goal, end in ends for stop in stops]
    return min((_walk(names, by_id, start, *option, treat) for option in options), key=len)


def _walk(
    names: dict[str, str],
    receptacles: dict[str, Thing],
    start: str,
    pick: tuple[Thing, ...],
    goal: Thing,
    end: Thing,
    stop: Thing | None,
    treat: tuple[str, str],
) -> list[_Step]:
    """Bring each picked object to `end`, past the appliance `stop` if any; use `goal` there if it is a lamp."""
    steps: list[_Step] = []
    here, opened = start, set[str]()

    def visit(place: Thing, reach_in: bool) -> None:
        nonlocal here
        # Receptacles can share a location; one who is there need not go.
        if place.location != here:
            steps.append((f"go to {names[place.id]}", ("GotoLocation", place, place)))
        here = place.location
        if reach_in and place.openable and place.id not in opened:
            steps.append((f"open {names[place.id]}", None))
            opened.add(place.id)

    for thing in pick:
        name, source = names[thing.id], receptacles[str(thing.inside)]
        visit(source, True)
        steps.append((f"take {name} from {names[source.id]}", ("PickupObject", thing, source)))
        if stop is not None:
            visit(stop, False)
            steps.append((f"{treat[0]} {name} with {names[stop.id]}", (treat[1], thing, stop)))
        visit(end, goal is end)
        if goal is end:
            steps.append((f"move {name} to {names[end.id]}", ("PutObject", thing, end)))
        else:
            steps.append((f"use {names[goal.id]}", ("ToggleObject", goal, end)))
    return steps


def _names(things: Sequence[Thing]) -> dict[str, str]:
    """What the stock engine calls each thing, by its THOR identifier."""
    shown = display_names(_mangle(thing.id).lower() for thing in things)
    return {thing.id: shown[_mangle(thing.id).lower()] for thing in things}


def _high_level(plan: list[_Step]) -> list[dict[str, Any]]:
    """ALFRED's `high_pddl`: the plan without openings, by type and by identifier, closed by a NoOp."""
    entries: list[dict[str, Any]] = []
    for _, step in plan:
        if step is None:
            continue
        action, thing, place = step
        both = [thing.type.lower(), place.type.lower()]
        entries.append(
            {
                "discrete_action": {"action": action, "args": both if action == "PutObject" else both[:1]},
                "high_idx": len(entries),
                "planner_action": {"action": action, "location": place.location}
                if action == "GotoLocation"
                else {"action": action, "objectId": thing.id, "receptacleObjectId": place.id},
            }
        )
    end = {"action": "End", "value": 1}
    return [
        *entries,
        {"discrete_action": {"action": "NoOp", "args": []}, "high_idx": len(entries), "planner_action": end},
    ]


def _mangle(text: str) -> str:
    """PDDL allows neither of these characters in a name; ALFWorld spells them out."""
    for character, word in (("|", "_bar_"), ("-", "_minus_"), ("+", "_plus_"), (".", "_dot_")):
        text = text.replace(character, word)
    return text


def _problem(
    rules: Rules,
    task: _Task,
    trial: str,
    objects: list[Thing],
    nested: tuple[Thing, Thing] | None,
    start: str,
    goal: str,
) -> str:
    """The PDDL problem, section by section in the order of the official files, each section sorted."""
    receptacles, scenery = task.room.receptacles, task.room.scenery
    portable = sorted(objects, key=lambda o: o.id)
    things = sorted((*objects, *scenery), key=lambda o: o.id)
    held = {thing.type for thing in things}
    fridges = {r.id for r in receptacles if r.type == "Fridge"}

    def having(key: str) -> list[Thing]:
        return [thing for thing in things if thing.type in rules.properties[key]]

    declared = ["agent1 - agent"]
    declared += [f"{kind} - object" for kind in rules.object_types]
    declared += [f"{kind}Type - otype" for kind in rules.object_types]
    declared += [f"{kind}Type - rtype" for kind in rules.receptacle_types]
    declared += [f"{_mangle(thing.id)} - object" for thing in things]
    declared += [f"{_mangle(r.id)} - receptacle" for r in receptacles]
    locations = sorted({start, *(r.location for r in receptacles), *(thing.location for thing in things)})
    declared += [f"{_mangle(location)} - location" for location in locations]

    facts = [f"receptacleType {r.id} {r.type}Type" for r in receptacles]
    facts += [f"objectType {thing.id} {thing.type}Type" for thing in things]
    facts += [
        f"canContain {kind}Type {inner}Type"
        for kind in sorted({r.type for r in receptacles})
        for inner in sorted(rules.admits.get(kind, frozenset()) & held)
    ]
    facts += [f"pickupable {thing.id}" for thing in portable]
    facts += [f"isReceptacleObject {thing.id}" for thing in portable if thing.type in rules.containers]
    facts += [f"openable {r.id}" for r in receptacles if r.openable]
    facts += [f"atLocation agent1 {start}"]
    facts += [f"cleanable {thing.id}" for thing in having("Cleanable")]
    facts += [f"heatable {thing.id}" for thing in having("Heatable")]
    facts += [f"coolable {thing.id}" for thing in having("Coolable")]
    facts += [f"isCool {o.id}" for o in portable if o.type == task.target and o.inside in fridges]
    facts += [f"toggleable {thing.id}" for thing in having("Toggleable")]
    facts += [f"sliceable {thing.id}" for thing in having("Sliceable")]
    facts += [f"inReceptacle {thing.id} {thing.inside}" for thing in things if thing.inside is not None]
    facts += [f"inReceptacleObject {inner.id} {outer.id}" for inner, outer in ([nested] if nested else [])]
    facts += [f"receptacleAtLocation {r.id} {r.location}" for r in receptacles]
    facts += [f"objectAtLocation {thing.id} {thing.location}" for thing in things]

    indent = "\n        "
    return (
        f"\n(define (problem plan_{trial})\n    (:domain alfred)\n    (:objects{indent}{indent.join(declared)}\n    )\n"
        f"    (:init{indent}{indent.join(f'({_mangle(fact)})' for fact in facts)}\n    )\n{goal}"
    )
