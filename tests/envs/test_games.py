"""Game files, good and hostile; the cache of compiled games; finding games."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs import InputError, games, make
from envs.alfworld import games as files
from envs.alfworld.games import GAME_FILE, compiled, find_games, open_game, read_game
from envs.alfworld.translate import from_json, to_json


@pytest.fixture(scope="module")
def source() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(games("generated:1:0")[0].address).read_text(encoding="utf-8"))
    return data


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def to_file(data: Any) -> Path:
        path = tmp_path / "task" / "trial" / GAME_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return path

    return to_file


# Hostile files ---------------------------------------------------------------------------------------------------


def test_code_in_an_expression_is_never_run(
    source: dict[str, Any], write: Callable[[Any], Path], tmp_path: Path
) -> None:
    """The stock engine's hole: it evals every expression of a game's grammar. The example runs there, not here."""
    mark = tmp_path / "hacked"
    attack = f"__import__('pathlib').Path({str(mark)!r}).touch() or 'x'"
    path = write({**source, "grammar": source["grammar"].replace("{r.name}", "{" + attack + "}", 1)})
    with pytest.raises(InputError, match="nothing was run"):
        open_game(path)
    assert not mark.exists()

    from envs.textworld import StockWorld

    with pytest.raises(InputError):
        StockWorld(path).reset()
    assert not mark.exists()
    StockWorld(path, trusted=True).reset()  # and this is why: the hole is real
    turn_of_stock = mark.exists()
    if not turn_of_stock:  # the poisoned rule is told when the agent arrives somewhere
        stock = StockWorld(path, trusted=True)
        first = stock.reset()
        stock.step(first.state, next(c for c in first.admissible if c.startswith("go to")))
    assert mark.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pddl_domain": None}, "pddl_domain"),
        ({"pddl_problem": 7}, "pddl_problem"),
        ({"grammar": ["x"]}, "grammar"),
        ({"walkthrough": "go"}, "walkthrough"),
        ({"walkthrough": [1]}, "walkthrough"),
        ({"pddl_domain": "(define (domain"}, "PDDL"),
        ({"pddl_problem": "(define (problem x) (:domain alfred))"}, "PDDL"),
        ({"pddl_problem": "(" * 5000}, "parentheses"),
        ({"pddl_problem": ""}, "PDDL"),
        ({"grammar": ""}, "no text for the action"),
        ({"grammar": 'grammar :: """{"a": 1}""";'}, "grammar rule"),
        ({"grammar": 'grammar :: """{""";'}, "JSON"),
        ({"pddl_domain": "x" * 5_000_000}, "characters"),
    ],
)
def test_a_damaged_game_gives_one_clear_error(
    source: dict[str, Any], write: Callable[[Any], Path], change: dict[str, Any], says: str
) -> None:
    path = write({key: value for key, value in {**source, **change}.items() if value is not None})
    with pytest.raises(InputError, match=says) as error:
        open_game(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"pddl_domain": ' + "9" * 10_000 + "}", "[" * 100_000, "\x00"]
)
def test_what_is_not_json_gives_one_clear_error(write: Callable[[Any], Path], text: str) -> None:
    with pytest.raises(InputError, match=GAME_FILE):
        open_game(write(text))


def test_a_binary_file_gives_one_clear_error(write: Callable[[Any], Path]) -> None:
    path = write("x")
    path.write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match="not a JSON file"):
        open_game(path)


def test_a_path_in_a_name_leads_nowhere(source: dict[str, Any], write: Callable[[Any], Path], tmp_path: Path) -> None:
    path = write(
        {**source, "pddl_problem": source["pddl_problem"].replace("(problem ", "(problem ../../../../evil_", 1)}
    )
    before = set(tmp_path.rglob("*"))
    world = open_game(path, cache=tmp_path / "cache")
    assert world.reset().admissible
    new = set(tmp_path.rglob("*")) - before
    assert all(str(p).startswith(str(tmp_path / "cache")) for p in new)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_game_files_never_crash(
    source: dict[str, Any], write: Callable[[Any], Path], data: st.DataObject
) -> None:
    """Cut, swap or repeat a piece of one entry: the game still plays, or there is one clear error."""
    key = data.draw(st.sampled_from(["pddl_domain", "pddl_problem", "grammar"]))
    text: str = source[key]
    start = data.draw(st.integers(0, len(text) - 1))
    length = data.draw(st.integers(1, 80))
    piece = data.draw(st.sampled_from(["", "(", ")", '"', "{", "}", "#", "\n", "not ", "0", "::", "[", "é"]))
    path = write({**source, key: text[:start] + piece + text[start + length :]})
    try:
        world = open_game(path)
        turn = world.reset()
        for command in turn.admissible[:3]:
            world.step(turn.state, command)
    except InputError as error:
        assert "\n" not in str(error)


# The cache ---------------------------------------------------------------------------------------------------------


def test_a_cached_game_equals_a_fresh_one(source: dict[str, Any], write: Callable[[Any], Path], tmp_path: Path) -> None:
    game = read_game(write(source))
    fresh = compiled(game, tmp_path / "cache")
    again = compiled(game, tmp_path / "cache")
    assert json.dumps(to_json(fresh)) == json.dumps(to_json(again))
    assert json.dumps(to_json(from_json(json.loads(json.dumps(to_json(fresh)))))) == json.dumps(to_json(fresh))
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == 1


@pytest.mark.parametrize("damage", ["torn", "flipped", "foreign", "empty"])
def test_a_damaged_cache_file_is_made_again(
    source: dict[str, Any], write: Callable[[Any], Path], tmp_path: Path, damage: str
) -> None:
    path, cache = write(source), tmp_path / "cache"
    first = open_game(path, cache=cache).reset()
    file = next(cache.rglob("*.bin"))
    whole = file.read_bytes()
    broken = {"torn": whole[: len(whole) // 2], "flipped": whole[:-1] + b"?", "foreign": b"PK\x03\x04", "empty": b""}
    file.write_bytes(broken[damage])
    assert open_game(path, cache=cache).reset() == first
    assert file.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_done_without(
    source: dict[str, Any], write: Callable[[Any], Path], tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")
    assert open_game(write(source), cache=blocked).reset().admissible


def _open(arguments: tuple[str, str]) -> str:
    path, cache = arguments
    return open_game(path, cache=Path(cache)).reset().observation


def test_concurrent_writers_agree(source: dict[str, Any], write: Callable[[Any], Path], tmp_path: Path) -> None:
    path, cache = write(source), tmp_path / "cache"
    with multiprocessing.Pool(4) as pool:
        seen = set(pool.map(_open, [(str(path), str(cache))] * 8))
    assert len(seen) == 1
    assert [p.suffix for p in cache.rglob("*") if p.is_file()] == [".bin"]


# Finding games ------------------------------------------------------------------------------------------------------


def test_games_come_in_the_order_of_their_content(tmp_path: Path) -> None:
    """Trap Agent-G2 #1, SEED #2: file-system order changed the task panel."""
    files.write_games(6, 0, tmp_path / "a")
    for i, found in enumerate(find_games(tmp_path / "a")):
        target = tmp_path / "b" / f"{9 - i}" / found.name
        target.parent.mkdir(parents=True)
        found.path.parent.rename(target)
    ids = [game.id for game in games(tmp_path / "b")]
    assert ids == sorted(ids) == [game.id for game in games("generated:6:0")]


def test_games_that_cannot_be_found_say_where_was_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap alfworld #88, #104, #129: game not found, 0 games."""
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"json_2\.1\.1") as error:
        games("alfworld:valid_seen")
    assert str(tmp_path) in str(error.value)
    with pytest.raises(InputError, match="unknown split"):
        games("alfworld:test")
    with pytest.raises(InputError, match="no playable"):
        games(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        games(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "spec", ["generated:6", "generated:x:0", "generated:-1:0", "generated:0:0", "generated:999999:0"]
)
def test_a_bad_size_of_generated_games_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match="generated"):
        games(spec)


@pytest.mark.parametrize("address", ["nowhere.tw-pddl", "tabular:none", "thing.z8", "unknown", "."])
def test_an_address_without_a_game_is_refused(address: str) -> None:
    with pytest.raises(InputError):
        make(address)


def test_unsolvable_and_unsupported_games_are_left_out(source: dict[str, Any], tmp_path: Path) -> None:
    for name, solvable in (("plain", True), ("impossible", False), ("pick_movable_recep", True), ("AppleSliced", True)):
        path = tmp_path / name / "trial" / GAME_FILE
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**source, "solvable": solvable}))
    assert [game.name for game in games(tmp_path)] == ["plain/trial"]
