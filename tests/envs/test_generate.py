"""Generated games: the same everywhere, of the official structure, and won by their walkthrough on the stock engine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envs.alfworld import layouts
from envs.alfworld.generate import TASK_TYPES, GeneratedGame, generate, write_games
from envs.core import InputError

# SHA-256 over the files of games 0 to 11 of seed 0: pins the bytes over machines, Python versions and changes here.
# A change of it changes every user's games and belongs in the changelog.
DIGEST = "46c4165f070e0262a99c90a1f8307d81a42241317a8d5b566965b51e52f5fddf"
MANY = 300


def digest(games: Iterator[GeneratedGame]) -> str:
    total = hashlib.sha256()
    for game in games:
        for part in (game.name.encode(), game.game, game.traj_data):
            total.update(len(part).to_bytes(8, "big") + part)
    return total.hexdigest()


class Problem:
    """The PDDL problem of one game as sets of facts, read with nothing of the generator."""

    def __init__(self, game: GeneratedGame) -> None:
        text = json.loads(game.game)["pddl_problem"]
        head, rest = text.split("(:init")
        init = rest.split("(:goal")[0]
        self.declared = dict(re.findall(r"(\S+) - (\w+)", head))
        self.names = re.findall(r"(\S+) - \w+", head)
        self.facts: dict[str, list[tuple[str, ...]]] = {}
        for name, arguments in re.findall(r"\((\w+) ([^()]*)\)", init):
            self.facts.setdefault(name, []).append(tuple(arguments.split()))
        self.type = {thing: kind.removesuffix("Type") for thing, kind in self["objectType"] + self["receptacleType"]}
        self.inside = dict(self["inReceptacle"])
        self.at = dict(self["objectAtLocation"] + self["receptacleAtLocation"])
        self.start = self["atLocation"][0][1]
        self.kind, self.target, _, self.destination, scene = game.name.split("/")[0].split("-")
        self.scene = int(scene)

    def __getitem__(self, name: str) -> list[Any]:
        return self.facts.get(name, [])

    def having(self, name: str) -> set[str]:
        return {arguments[0] for arguments in self[name]}


@pytest.fixture(scope="module")
def many() -> list[tuple[GeneratedGame, Problem]]:
    return [(game, Problem(game)) for game in generate(MANY, 7)]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The stock classes. Importing alfworld sets ALFWORLD_DATA and makes that folder; fast_downward sets sys.argv."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALFWORLD_DATA", str(tmp_path_factory.mktemp("alfworld")))
        patch.setattr(sys, "argv", list(sys.argv))
        textworld = pytest.importorskip("textworld")
        tw_env = pytest.importorskip("alfworld.agents.environment.alfred_tw_env")
        pddl = pytest.importorskip("textworld.envs")
        misc = pytest.importorskip("alfworld.agents.utils.misc")
        yield SimpleNamespace(textworld=textworld, tw_env=tw_env, PddlEnv=pddl.PddlEnv, Demangler=misc.Demangler)


def test_bytes_are_pinned() -> None:
    if importlib.metadata.version("alfworld") != "0.4.2":
        pytest.skip("the pinned digest is that of alfworld 0.4.2")
    assert digest(generate(12, 0)) == DIGEST


def test_bytes_do_not_depend_on_the_process() -> None:
    code = (
        "import sys; from tests.envs.test_generate import digest; from envs.alfworld.generate import generate;"
        "print(digest(generate(12, 5)))"
    )
    root = Path(__file__).resolve().parents[2]
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
        assert run.stdout.strip() == digest(generate(12, 5)), run.stderr


def test_generating_leaves_alfworld_unimported_and_the_environment_alone() -> None:
    code = (
        "import os, sys; from envs.alfworld.generate import generate; before = dict(os.environ); list(generate(6, 0));"
        "assert dict(os.environ) == before; assert 'alfworld' not in sys.modules and 'torch' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_prefixes_agree_and_seeds_differ() -> None:
    twelve = list(generate(12, 3))
    assert list(generate(5, 3)) == twelve[:5]
    assert list(islice(generate(1 << 40, 3), 7)) == twelve[:7]
    assert not {game.game for game in twelve} & {game.game for game in generate(12, 4)}
    assert list(generate(0, 3)) == []


def test_files_are_named_and_built_like_the_official_ones(tmp_path: Path) -> None:
    games = list(generate(12, 1))
    paths = write_games(12, 1, tmp_path)
    assert [path.parent.relative_to(tmp_path).as_posix() for path in paths] == [game.name for game in games]
    assert [game.task_type for game in games] == [*TASK_TYPES, *TASK_TYPES]
    for path, game in zip(paths, games, strict=True):
        assert path.read_bytes() == game.game
        assert (path.parent / "traj_data.json").read_bytes() == game.traj_data
        assert re.fullmatch(r"[a-z_]+-[A-Za-z]+-None-[A-Za-z]+-\d+/trial_\w+", game.name)
        data, traj = json.loads(game.game), json.loads(game.traj_data)
        assert set(data) == {"pddl_domain", "grammar", "pddl_problem", "solvable", "walkthrough"}
        assert data["solvable"] is True
        assert data["walkthrough"] == list(game.walkthrough)
        task, trial = game.name.split("/")
        kind, target, _, end, scene = task.split("-")
        assert (traj["task_id"], traj["task_type"], traj["scene"]["scene_num"]) == (trial, kind, int(scene))
        params = traj["pddl_params"]
        assert params["object_target"] == target
        assert end == (params["toggle_target"] if kind == "look_at_obj_in_light" else params["parent_target"])
        wordings = [annotation["task_desc"] for annotation in traj["turk_annotations"]["anns"]]
        said = re.search(r"Your task is to: ([^\"]*)\.\"", data["grammar"])
        assert said is not None and said.group(1) in wordings
        assert target.lower() in said.group(1) and end.lower() in said.group(1)
        assert [step["high_idx"] for step in traj["plan"]["high_pddl"]] == list(range(len(traj["plan"]["high_pddl"])))
        for content in (game.game, game.traj_data):
            assert str(tmp_path).encode() not in content
            assert sys.prefix.encode() not in content
            assert str(Path.home()).encode() + b"/" not in content
    write_games(12, 1, tmp_path)  # writing again is not an error
    assert len(list(tmp_path.rglob("game.tw-pddl"))) == 12


def test_every_problem_is_consistent(many: list[tuple[GeneratedGame, Problem]]) -> None:
    for game, problem in many:
        assert len(problem.names) == len({name.lower() for name in problem.names}), game.name
        for name, facts in problem.facts.items():
            assert len(facts) == len(set(facts)), (game.name, name)
            assert {argument for fact in facts for argument in fact} <= set(problem.declared), (game.name, name)
        receptacles = {name for name, kind in problem.declared.items() if kind == "receptacle"}
        assert Counter(r for r, _ in problem["receptacleAtLocation"]) == Counter(receptacles)
        assert problem.having("receptacleType") == receptacles
        assert problem.start not in {location for _, location in problem["receptacleAtLocation"]}
        assert not problem["opened"] and not problem["holds"] and not problem["isClean"] and not problem["isHot"]
        assert Counter(o for o, _ in problem["inReceptacle"]) <= Counter(problem.having("objectAtLocation"))
        may_hold = {(a.removesuffix("Type"), b.removesuffix("Type")) for a, b in problem["canContain"]}
        for thing, receptacle in problem.inside.items():
            assert problem.at[thing] == problem.at[receptacle], game.name
            pair = (problem.type[receptacle], problem.type[thing])
            assert pair in may_hold or pair[1] == "DeskLamp", (game.name, pair)
        for inner, outer in problem["inReceptacleObject"]:
            assert problem.inside[inner] == problem.inside[outer]
            assert outer in problem.having("isReceptacleObject")


def test_no_target_starts_where_it_would_spoil_the_task(many: list[tuple[GeneratedGame, Problem]]) -> None:
    appliance = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}
    for game, problem in many:
        targets = [thing for thing, kind in problem.type.items() if kind == problem.target]
        homes = {problem.type[problem.inside[thing]] for thing in targets}
        assert len(targets) >= (2 if "two" in problem.kind else 1)
        if problem.kind in ("pick_and_place_simple", "pick_two_obj_and_place"):
            assert problem.destination not in homes, game.name
        for verb, fixture in appliance.items():
            if verb in problem.kind:
                assert fixture not in homes and problem.destination != fixture, game.name
        cool = {thing for thing in targets if problem.type[problem.inside[thing]] == "Fridge"}
        assert problem.having("isCool") == cool, game.name


def test_games_vary_as_the_official_ones_do(many: list[tuple[GeneratedGame, Problem]]) -> None:
    """Wide brackets around the official valid_seen figures (in brackets): a sanity check, not an equality."""
    hidden, instances, lengths = Counter[bool](), Counter[int](), dict[str, list[int]]()
    sizes: dict[int, list[tuple[int, int]]] = {}
    for game, problem in many:
        openable = problem.having("openable")
        portable = problem.having("pickupable")
        hidden.update(problem.inside.get(thing) in openable for thing in portable)
        instances.update(Counter(problem.type[thing] for thing in portable).values())
        lengths.setdefault(problem.kind, []).append(len(game.walkthrough))
        sizes.setdefault(problem.scene // 100, []).append((len(problem["receptacleType"]), len(portable)))

    def mean(values: Any) -> float:
        values = list(values)
        return float(sum(values) / len(values))

    assert 0.1 < hidden[True] / hidden.total() < 0.3  # .22
    assert set(instances) == {1, 2, 3, 4}
    assert 1.7 < mean(instances.elements()) < 2.2  # 1.87
    official_sizes = {0: (34, 44), 2: (18, 23), 3: (14, 24), 4: (15, 19)}
    for rooms, official in official_sizes.items():
        for measured, expected in zip(zip(*sizes[rooms], strict=True), official, strict=True):
            assert abs(mean(measured) / expected - 1) < 0.25, rooms
    official_lengths = {"simple": 4.2, "light": 3.5, "clean": 6.3, "heat": 6.4, "cool": 6.2, "two": 8.1}
    for word, length in official_lengths.items():
        kind = next(kind for kind in TASK_TYPES if word in kind)
        assert abs(mean(lengths[kind]) - length) < 0.6, kind
    # Some walkthroughs must open what hides the target.
    assert any(game.walkthrough[1].startswith("open ") for game, _ in many)
    rules = layouts.load_rules()
    assert {problem.scene for _, problem in many} <= {scene for scenes in rules.scenes.values() for scene in scenes}
    assert all(problem.scene % 100 > 6 for _, problem in many)  # plans 1 to 6 of each kind are the official unseen ones


def wins_at(problem: Problem, names: dict[str, str], walkthrough: tuple[str, ...]) -> list[bool]:
    """Play by the domain's rules on the facts alone: whether the goal holds after each command."""
    thing = {name: thing for thing, name in names.items()}
    can_hold = {(a.removesuffix("Type"), b.removesuffix("Type")) for a, b in problem["canContain"]}
    where, inside, held = problem.start, dict(problem.inside), ""
    opened, treated, used = set[str](), set[str](), set[str]()
    won = []

    def reachable(receptacle: str) -> bool:
        return problem.at[receptacle] == where and (
            receptacle not in problem.having("openable") or receptacle in opened
        )

    def goal() -> bool:
        if problem.kind == "look_at_obj_in_light":
            lit = any(problem.at[problem.inside[lamp]] == where for lamp in used)
            return lit and bool(held) and problem.type[held] == problem.target
        ready = [
            o
            for o, r in inside.items()
            if problem.type[o] == problem.target and problem.type[r] == problem.destination
            if o in treated or problem.kind in ("pick_and_place_simple", "pick_two_obj_and_place")
        ]
        if "two" in problem.kind:
            return any(count > 1 for count in Counter(inside[o] for o in ready).values())
        return bool(ready)

    assert not goal()
    for command in walkthrough:
        match command.split():
            case ["go", "to", a, b]:
                where = problem.at[thing[f"{a} {b}"]]
            case ["open", a, b]:
                assert problem.at[thing[f"{a} {b}"]] == where and thing[f"{a} {b}"] not in opened
                assert thing[f"{a} {b}"] in problem.having("openable")
                opened.add(thing[f"{a} {b}"])
            case ["take", a, b, "from", c, d]:
                assert not held and inside[thing[f"{a} {b}"]] == thing[f"{c} {d}"] and reachable(thing[f"{c} {d}"])
                held = thing[f"{a} {b}"]
                assert held in problem.having("pickupable")
                del inside[held]
            case ["move", a, b, "to", c, d]:
                receptacle = thing[f"{c} {d}"]
                assert held == thing[f"{a} {b}"] and reachable(receptacle)
                assert (problem.type[receptacle], problem.type[held]) in can_hold
                inside[held], held = receptacle, ""
            case [("clean" | "heat" | "cool") as verb, a, b, "with", c, d]:
                fixture = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}[verb]
                assert held == thing[f"{a} {b}"] and held in problem.having(f"{verb}able")
                assert problem.type[thing[f"{c} {d}"]] == fixture and problem.at[thing[f"{c} {d}"]] == where
                treated.add(held)
            case ["use", a, b]:
                lamp = thing[f"{a} {b}"]
                assert lamp in problem.having("toggleable") and problem.at[problem.inside[lamp]] == where
                used.add(lamp)
            case _:
                raise AssertionError(command)
        won.append(goal())
    return won


def test_walkthroughs_win_at_the_last_step_by_the_domain_rules(
    many: list[tuple[GeneratedGame, Problem]], stock: SimpleNamespace
) -> None:
    """All games, cheaply; the stock engine itself plays one of each type below. Names come from the stock numbering."""
    for game, problem in many:
        infos = {name: SimpleNamespace(id=name.lower()) for name in problem.type}
        demangler = stock.Demangler(game_infos=infos)
        names = {name: demangler.demangle_alfred_name(name.lower()) for name in problem.type}
        won = wins_at(problem, names, game.walkthrough)
        assert won == [False] * (len(won) - 1) + [True], game.name


def test_stock_environment_loads_and_plays_every_task_type(stock: SimpleNamespace, tmp_path: Path) -> None:
    paths = write_games(6, 0, tmp_path)
    config = {
        "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]},
        "dataset": {"data_path": str(tmp_path), "num_train_games": 0},
    }
    assert sorted(stock.tw_env.AlfredTWEnv(config).game_files) == sorted(str(path) for path in paths)
    infos = stock.textworld.EnvInfos(won=True, admissible_commands=True)
    for path in paths:
        env = stock.tw_env.AlfredDemangler(stock.PddlEnv(infos), shuffle=False)
        env.load(str(path))
        state = env.reset()
        assert not state["won"]
        assert "You are in the middle of a room." in state.feedback
        walkthrough = json.loads(path.read_text())["walkthrough"]
        for index, command in enumerate(walkthrough):
            assert command in state["admissible_commands"], (path, command)
            state, _, _ = env.step(command)
            assert state["won"] == (index == len(walkthrough) - 1), (path, command)


@pytest.fixture
def fresh() -> Iterator[None]:
    def forget() -> None:
        layouts.load_rules.cache_clear()
        layouts.load_room.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.parametrize("n, seed", [(-1, 0), (1, -1), (1.5, 0), (1, "x"), (True, 0), (1, 1 << 64)])
def test_bad_counts_and_seeds_are_refused_at_once(n: Any, seed: Any) -> None:
    with pytest.raises(InputError, match="integer"):
        generate(n, seed)


def test_missing_package_is_named(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "alfworld" else found(name, *rest)
    )
    with pytest.raises(InputError, match=r"not installed: pip install alfworld==0\.4\.2"):
        generate(1, 0)


def copy_package(to: Path, *leave_out: str) -> Path:
    source = Path(str(importlib.util.find_spec("alfworld").submodule_search_locations[0]))  # type: ignore[union-attr, index]
    for name in ("data/alfred.pddl", "data/alfred.twl2", "gen/constants.py", "gen/goal_library.py"):
        if name not in leave_out:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes((source / name).read_bytes())
    return to


@pytest.mark.parametrize("name", ["data/alfred.pddl", "data/alfred.twl2", "gen/constants.py", "gen/goal_library.py"])
def test_missing_file_is_named_with_the_version(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    package = copy_package(tmp_path, name)
    monkeypatch.setattr(layouts, "_root", lambda: package)
    with pytest.raises(InputError, match=f"alfworld {re.escape(importlib.metadata.version('alfworld'))} lacks {name}"):
        generate(1, 0)


def test_unfamiliar_package_is_an_error_not_a_crash(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = copy_package(tmp_path)
    monkeypatch.setattr(layouts, "_root", lambda: package)
    with pytest.raises(InputError, match=r"lacks gen/layouts/FloorPlan\d+-openable.json"):
        next(generate(1, 0))
    layouts.load_rules.cache_clear()
    (package / "gen/constants.py").write_text("OBJECTS = 3\n")
    with pytest.raises(InputError, match="lacks a table"):
        generate(1, 0)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_games(1, 0, tmp_path / "file")
