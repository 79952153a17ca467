"""Rooms and rules as the installed alfworld package ships them, read at run time and never copied.

Knows where the package keeps things and what they mean; hides the files. Taken from the package:

- `data/alfred.pddl`, `data/alfred.twl2`: the domain and the grammar of every game;
- `gen/goal_library.py`: the PDDL goal and the wordings of each task type;
- `gen/constants.py`: which receptacle type holds which object type, what can be cleaned, heated, cooled,
  switched, sliced or opened, which objects are themselves receptacles, how many instances of a type a room
  may have, which task type suits which kind of room, and which floor plans are for training;
- `gen/layouts/FloorPlan<n>-openable.json`: the receptacles of a floor plan that have a vetted standpoint,
  by their THOR identifier `Type|x|y|z`; `-objects.json`: every object type the plan has;
  `-layout.npy`: the points an agent can stand on.

Derived here, because the package does not have it: the place of a receptacle whose type the plan lists but
whose standpoint it lacks (stove burners, coffee machine, toaster, towel holders, half of the garbage cans),
and of immovable scenery. These stand at evenly spaced points along the edge of the reachable floor, the same
in every game of a plan, at a nominal height.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from envs.core import InputError

# Hundredths of a metre. THOR writes a coordinate as a sign, two digits, a point and two digits.
Point = tuple[int, int, int]

_STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))  # grid step of rotation 0, 90, 180, 270 degrees: north, east, south, west
_NOMINAL_HEIGHT = 90
_REACH = 50  # a derived fixture is half a metre in front of who uses it
_LAMP_STANDS = ("Desk", "SideTable", "Dresser", "Shelf")  # no package table says where a lamp stands


@dataclass(frozen=True, slots=True)
class Thing:
    """Something with a fixed place: a receptacle or a piece of scenery.

    id: THOR identifier; type: its type; location: the `loc|x|z|rotation|horizon` from which it is used
    (grid steps, quarter turns, degrees); openable: starts closed and can be opened; inside: the identifier of
    the receptacle it stands on, if any.
    """

    id: str
    type: str
    location: str
    openable: bool = False
    inside: str | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """A floor plan: its receptacles and scenery (in order of identifier), the portable object types it has
    (sorted) and the grid points (x, z) an agent can stand on (sorted)."""

    scene: int
    receptacles: tuple[Thing, ...]
    scenery: tuple[Thing, ...]
    portable: tuple[str, ...]
    floor: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds in every room, from the package's own tables.

    admits: receptacle type -> object types it can hold (fixed and portable receptacles alike);
    properties: "Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable" -> object types;
    containers: portable object types that are receptacles themselves; object_types, receptacle_types: every
    type of the domain, sorted; scenes: task type -> floor plans of the training split that suit it, sorted;
    goals, wordings: task type -> PDDL goal and its task descriptions, with `{obj}`, `{recep}`, `{toggle}`.
    """

    domain: str
    grammar: str
    admits: Mapping[str, frozenset[str]]
    properties: Mapping[str, frozenset[str]]
    containers: frozenset[str]
    openable: frozenset[str]
    object_types: tuple[str, ...]
    receptacle_types: tuple[str, ...]
    scenes: Mapping[str, tuple[int, ...]]
    goals: Mapping[str, str]
    wordings: Mapping[str, tuple[str, ...]]
    max_instances: int
    max_targets: int
    step: float


def identifier(kind: str, point: Point, part: str = "") -> str:
    """The THOR identifier of a thing of this kind at a point (x, y, z), in hundredths of a metre."""
    fields = "|".join(f"{'-' if c < 0 else '+'}{abs(c) // 100:02d}.{abs(c) % 100:02d}" for c in point)
    return f"{kind}|{fields}|{part}" if part else f"{kind}|{fields}"


def position(thing_id: str) -> Point:
    """The point (x, y, z) that a THOR identifier names, in hundredths of a metre."""
    x, y, z = (round(float(field) * 100) for field in thing_id.split("|")[1:4])
    return x, y, z


def _root() -> Path:
    # The package is found but not imported: importing alfworld makes a folder in the user's home and sets
    # ALFWORLD_DATA for this process, which would then look as if the user had set it.
    spec = importlib.util.find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            "games are generated from what the alfworld package ships, and it is not installed: "
            "pip install alfworld==0.4.2"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _unexpected(what: str, error: object = None) -> InputError:
    try:
        version = importlib.metadata.version("alfworld")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    detail = f" ({error})" if error is not None else ""
    return InputError(
        f"the installed alfworld {version} lacks {what}{detail}: install the tested version, alfworld==0.4.2"
    )


def _bytes(*parts: str) -> bytes:
    try:
        return _root().joinpath(*parts).read_bytes()
    except OSError as error:
        raise _unexpected("/".join(parts), error.strerror) from error


def _module(name: str) -> ModuleType:
    path = _root() / "gen" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_alfworld_gen_{name}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise _unexpected(f"gen/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sets(table: Mapping[str, Iterable[str]]) -> dict[str, frozenset[str]]:
    return {key: frozenset(o for o in table[key] if not o.endswith("Sliced")) for key in sorted(table)}


@cache
def load_rules() -> Rules:
    """The rules of the installed package; read once. InputError when the package is missing or laid out otherwise."""
    domain = _bytes("data", "alfred.pddl").decode()
    grammar = _bytes("data", "alfred.twl2").decode()
    if "UNKNOWN GOAL" not in grammar:
        raise _unexpected("the task placeholder 'UNKNOWN GOAL' in data/alfred.twl2")
    constants, library = _module("constants"), _module("goal_library")
    try:
        training = set(constants.TRAIN_SCENE_NUMBERS)
        containers = frozenset(constants.MOVABLE_RECEPTACLES)
        fixed = frozenset(constants.RECEPTACLES) - containers
        goals: Mapping[str, Mapping[str, Any]] = library.gdict
        return Rules(
            domain=domain,
            grammar=grammar,
            admits=_sets(constants.VAL_RECEPTACLE_OBJECTS),
            properties=_sets(constants.VAL_ACTION_OBJECTS),
            containers=containers,
            openable=frozenset(constants.OPENABLE_CLASS_LIST) - containers,
            object_types=tuple(sorted(frozenset(constants.OBJECTS_SET) - fixed)),
            receptacle_types=tuple(sorted(fixed)),
            scenes={
                task: tuple(sorted(n for kind in kinds for n in constants.SCENE_TYPE[kind] if n in training))
                for task, kinds in sorted(constants.GOALS_VALID.items())
            },
            goals={task: str(entry["pddl"]).replace("#", "-") for task, entry in goals.items()},
            wordings={task: tuple(entry["templates"]) for task, entry in goals.items()},
            max_instances=int(constants.MAX_NUM_OF_OBJ_INSTANCES),
            max_targets=int(constants.PICKUP_REPEAT_MAX),
            step=float(constants.AGENT_STEP_SIZE),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise _unexpected("a table in gen/constants.py or gen/goal_library.py", error) from error


@cache
def load_room(scene: int) -> Room:
    """The floor plan of this number; read once. InputError when the package lacks it."""
    rules = load_rules()
    try:
        vetted = json.loads(_bytes("gen", "layouts", f"FloorPlan{scene}-openable.json"))
        present = sorted(set(json.loads(_bytes("gen", "layouts", f"FloorPlan{scene}-objects.json"))))
        layout = _bytes("gen", "layouts", f"FloorPlan{scene}-layout.npy")
        points = np.load(io.BytesIO(layout), allow_pickle=False)
        floor = sorted({(round(x / rules.step), round(z / rules.step)) for x, z in points.tolist()})
        receptacles = [_vetted(name, at, rules) for name, at in vetted.items()]
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise _unexpected(f"a readable floor plan {scene} in gen/layouts", error) from error

    types = {r.type for r in receptacles}
    holdable = frozenset[str]().union(*rules.admits.values())
    missing = [t for t in present if t in rules.receptacle_types and t not in types]
    fixtures = [t for t in present if t in rules.object_types and t not in holdable]
    # A basin's identifier extends that of its sink or tub, which is a piece of scenery of its own.
    basins = {r.id.rsplit("|", 1)[0]: r for r in receptacles if r.id.count("|") == 4}
    scenery = [Thing(whole, whole.split("|")[0], basin.location) for whole, basin in basins.items()]
    stands = sorted(
        (r for r in receptacles if r.type in _LAMP_STANDS), key=lambda r: (_LAMP_STANDS.index(r.type), r.id)
    )
    loose = [t for t in fixtures if t not in {s.type for s in scenery} and not (t == "DeskLamp" and stands)]
    if "DeskLamp" in fixtures and stands:
        x, y, z = position(stands[0].id)
        scenery.append(
            Thing(identifier("DeskLamp", (x, y + 5, z)), "DeskLamp", stands[0].location, inside=stands[0].id)
        )

    edge = _edge(floor, {r.location for r in receptacles})
    spots = [edge[i * len(edge) // (len(missing) + len(loose))] for i in range(len(missing) + len(loose))]
    for kind, spot in zip(missing, spots, strict=False):
        receptacles += _derived(kind, spot, rules.step)
    for kind, spot in zip(loose, spots[len(missing) :], strict=True):
        scenery += _derived(kind, spot, rules.step)
    return Room(
        scene=scene,
        receptacles=tuple(sorted(receptacles, key=lambda r: r.id)),
        scenery=tuple(sorted(scenery, key=lambda s: s.id)),
        portable=tuple(t for t in present if t in holdable and t in rules.object_types),
        floor=tuple(floor),
    )


def _vetted(name: str, at: list[float], rules: Rules) -> Thing:
    x, z, rotation, horizon = at
    kind = name.split("|")[-1] if name.count("|") == 4 else name.split("|")[0]
    location = f"loc|{round(x / rules.step)}|{round(z / rules.step)}|{round(rotation) // 90 % 4}|{round(horizon)}"
    return Thing(name, kind, location, openable=kind in rules.openable)


def _edge(floor: list[tuple[int, int]], taken: set[str]) -> list[tuple[int, int, int]]:
    """Where one can stand with something unreachable straight ahead: (x, z, rotation), around the room's middle."""
    inside = set(floor)
    used = {tuple(location.split("|")[1:4]) for location in taken}
    sum_x, sum_z = (sum(c) for c in zip(*floor, strict=True))
    edge = [
        (x, z, rotation)
        for x, z in floor
        for rotation, (dx, dz) in enumerate(_STEPS)
        if (x + dx, z + dz) not in inside and (str(x), str(z), str(rotation)) not in used
    ]

    def direction(point: tuple[int, int, int]) -> Fraction:
        # Grows with the angle, and is exact: a machine's arctangent must not decide the order.
        x, z = point[0] * len(floor) - sum_x, point[1] * len(floor) - sum_z
        share = Fraction(z, abs(x) + abs(z) or 1)
        return share if x >= 0 else 2 - share

    return sorted(edge, key=lambda point: (direction(point), point))


def _derived(kind: str, spot: tuple[int, int, int], step: float) -> list[Thing]:
    x, z, rotation = spot
    dx, dz = _STEPS[rotation]
    metre = round(step * 100)
    ahead = (x * metre + dx * _REACH, z * metre + dz * _REACH)
    if kind not in ("StoveBurner", "StoveKnob"):
        return [Thing(identifier(kind, (ahead[0], _NOMINAL_HEIGHT, ahead[1])), kind, f"loc|{x}|{z}|{rotation}|30")]
    # A stove has four: left and right, and in two rows seen at two angles.
    return [
        Thing(
            identifier(kind, (ahead[0] + dx * far + dz * side, _NOMINAL_HEIGHT, ahead[1] + dz * far + dx * side)),
            kind,
            f"loc|{x}|{z}|{rotation}|{horizon}",
        )
        for far, horizon in ((0, 60), (30, 45))
        for side in (-15, 15)
    ]
