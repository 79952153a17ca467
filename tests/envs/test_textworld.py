"""The stock engine behind the protocol: equal to AlfredTWEnv, restorable, and careful about what it runs."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envs.check import check_env
from envs.core import InputError, Turn
from envs.exact import exact
from envs.textworld import NOTHING_HAPPENS, StockWorld

pytest.importorskip("textworld")
pytest.importorskip("alfworld")
# From 3.13 on the installed textworld cannot evaluate any grammar; StockWorld says so.
plays_alfworld = pytest.mark.skipif(sys.version_info >= (3, 13), reason="textworld 1.7.0 plays no PDDL game on 3.13")

COMMANDS = ["look", "inventory", "frobnicate the quux", " look ", "help"]


@pytest.fixture(scope="session")
def alfworld_game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from envs.alfworld.generate import write_games

    folder = tmp_path_factory.mktemp("alfworld")
    write_games(12, 0, folder)
    # Alone in its folder, and small, since the stock engine translates it many times below.
    game = min(folder.rglob("game.tw-pddl"), key=lambda file: (file.stat().st_size, file.parts))
    alone = tmp_path_factory.mktemp("one") / "task" / "trial"
    shutil.copytree(game.parent, alone)
    return alone / game.name


@pytest.fixture(scope="session")
def alfworld(alfworld_game: Path) -> StockWorld:
    return StockWorld(alfworld_game)


@pytest.fixture(scope="session")
def tw_make_game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-room game, made by the tw-make command."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = shutil.which("tw-make", path=places)
    if command is None:
        pytest.skip("the tw-make command is not installed")
    file = tmp_path_factory.mktemp("twmake") / "game.z8"
    sizes = ["--world-size", "2", "--nb-objects", "4", "--quest-length", "2", "--seed", "1"]
    made = subprocess.run(
        [command, "custom", *sizes, "--output", str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    if made.returncode or not file.exists():
        pytest.skip(f"tw-make does not work here: {made.stderr.strip().splitlines()[-1:]}")
    return file


def walkthrough(game: Path) -> list[str]:
    commands: list[str] = json.loads(game.read_text())["walkthrough"]
    return commands


def quest(game: Path) -> list[str]:
    """The winning commands of a tw-make game."""
    commands: list[str] = json.loads(game.with_suffix(".json").read_text())["metadata"]["walkthrough"]
    return commands


def play(world: StockWorld, commands: list[str]) -> list[Turn]:
    turns = [world.reset()]
    for command in commands:
        turns.append(world.step(turns[-1].state, command))
    return turns


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Record the calls of a function."""
    calls: list[str] = []
    function: Callable[..., Any] = getattr(owner, name)

    def wrapper(*arguments: Any) -> Any:
        calls.append(name)
        return function(*arguments)

    monkeypatch.setattr(owner, name, wrapper)
    return calls


def changed(game: Path, to: Path, old: str, new: str, key: str = "grammar") -> Path:
    data = json.loads(game.read_text())
    assert old in data[key]
    data[key] = data[key].replace(old, new)
    to.write_text(json.dumps(data))
    return to


# ALFWorld games


@plays_alfworld
@pytest.mark.slow
def test_equals_alfred_tw_env(alfworld_game: Path, alfworld: StockWorld) -> None:
    """Turn by turn what ALFWorld's own environment gives, through its own configuration and gym layer."""
    from alfworld.agents.environment import get_environment

    config: dict[str, Any] = {
        "env": {
            "goal_desc_human_anns_prob": 0,
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "expert_type": "handcoded",
        },
        "dataset": {"eval_ood_data_path": str(alfworld_game.parents[2]), "num_eval_games": 0},
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 50}},
    }
    gym = get_environment("AlfredTWEnv")(config, train_eval="eval_out_of_distribution").init_env(batch_size=1)
    observations, infos = gym.reset()
    commands = COMMANDS + walkthrough(alfworld_game)
    turns = play(alfworld, commands)
    assert (observations[0], tuple(infos["admissible_commands"][0])) == (turns[0].observation, turns[0].admissible)
    for command, turn in zip(commands, turns[1:], strict=True):
        observations, _, dones, infos = gym.step([command])
        assert observations[0] == turn.observation
        assert tuple(infos["admissible_commands"][0]) == turn.admissible
        assert (infos["won"][0], dones[0]) == (turn.won, turn.done)
    gym.close()
    assert turns[-1].won and turns[-1].done


@plays_alfworld
@pytest.mark.slow
def test_equals_the_compiled_world(alfworld_game: Path, alfworld: StockWorld, tmp_path: Path) -> None:
    from envs.alfworld.games import open_game

    compiled = open_game(alfworld_game, cache=tmp_path)
    assert compiled.game_id == alfworld.game_id
    rng = random.Random(4)
    state: Any
    ours, stock = compiled.reset(), alfworld.reset()
    for _ in range(25):
        assert (ours.observation, ours.admissible) == (stock.observation, stock.admissible)
        assert (ours.won, ours.done) == (stock.won, stock.done)
        if stock.done:
            break
        command = rng.choice([*stock.admissible, "frobnicate the quux"])
        state = ours.state
        ours, stock = compiled.step(state, command), alfworld.step(stock.state, command)


@plays_alfworld
@pytest.mark.slow
def test_alfworld_keeps_the_contract(alfworld_game: Path) -> None:
    report = check_env(f"stock:{alfworld_game}", script=walkthrough(alfworld_game), steps=4, restores=2, processes=1)
    assert report.unchecked == ()


@plays_alfworld
def test_consecutive_steps_do_not_replay(alfworld: StockWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    from textworld.envs.pddl import PddlEnv

    first = alfworld.reset()
    resets = counted(monkeypatch, PddlEnv, "reset")
    one = alfworld.step(first.state, "look")
    two = alfworld.step(one.state, "frobnicate the quux")
    three = alfworld.step(two.state, "inventory")
    assert (two.observation, len(resets)) == (NOTHING_HAPPENS, 0)
    # Elsewhere it does, and gives what it gave before.
    assert alfworld.restore(one.state) == one
    assert len(resets) == 1
    assert alfworld.restore(three.state) == three
    assert len(resets) == 1


@plays_alfworld
def test_the_process_is_left_as_it_was(alfworld_game: Path) -> None:
    argv, stdout = sys.argv, sys.stdout
    kept = list(argv)
    world = StockWorld(alfworld_game)
    world.reset()
    world.close()
    assert sys.argv is argv and sys.argv == kept and sys.stdout is stdout


@plays_alfworld
def test_a_closed_world_hands_its_engine_on_and_starts_again(alfworld_game: Path, monkeypatch: Any) -> None:
    import fast_downward

    world, other = StockWorld(alfworld_game), StockWorld(alfworld_game)
    turns = play(world, COMMANDS[:2])
    world.close()
    loaded = counted(monkeypatch, fast_downward, "load_lib")
    assert play(other, COMMANDS[:2]) == turns
    assert not loaded
    assert world.restore(turns[-1].state) == turns[-1]
    assert len(loaded) == 1


@plays_alfworld
def test_what_is_over_stays_over_and_has_no_states_after_it(alfworld_game: Path, alfworld: StockWorld) -> None:
    last = play(alfworld, walkthrough(alfworld_game))[-1]
    assert last.won
    for command in last.admissible[:3]:
        assert alfworld.step(last.state, command) == last
    assert isinstance(last.state, tuple)
    with pytest.raises(InputError, match="over after"):
        alfworld.restore((*last.state, "look"))
    for state in (None, 7, "look", ["look"], (1, 2)):
        with pytest.raises(InputError, match="no state of the stock engine"):
            alfworld.restore(state)


@plays_alfworld
def test_an_error_of_the_engine_does_not_move_the_world(alfworld_game: Path, tmp_path: Path) -> None:
    broken = changed(alfworld_game, tmp_path / "game.tw-pddl", "#inventory.feedback#", "#nowhere#")
    world = StockWorld(broken)
    first = world.reset()
    look = world.step(first.state, "look")
    with pytest.raises(InputError, match=r"cannot play this game.*nowhere"):
        world.step(look.state, "inventory")
    assert world.step(first.state, "look") == look
    world.close()


# What a hostile game would have run


@plays_alfworld
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(
    ("old", "where"),
    [
        ('template :: "inventory"', 'template :: "inventory%s"'),
        ('feedback :: "#inventory.feedback#"', 'feedback :: "%s"'),
        ("You are not carrying anything.", "You are not carrying anything.%s"),
        ("-= Welcome to TextWorld, ALFRED! =-", "-= Welcome! =-%s"),
        ("-= Welcome to TextWorld, ALFRED! =-", "-= Welcome! =-[%s]"),
    ],
)
def test_code_in_a_grammar_is_refused(
    alfworld_game: Path, tmp_path: Path, old: str, where: str, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "{__import__('pathlib').Path('touched').write_text('x') and 'a'}"
    hostile = changed(alfworld_game, tmp_path / "game.tw-pddl", old, where % code)
    if not trusted:
        with pytest.raises(InputError, match="nothing was run"):
            StockWorld(hostile)
        assert not (tmp_path / "touched").exists()
        return
    # The same file taken on trust does run, so the test above can fail.
    world = StockWorld(hostile, trusted=True)
    play(world, ["inventory"])
    world.close()
    assert (tmp_path / "touched").exists()


@plays_alfworld
def test_only_the_small_language_is_allowed(alfworld_game: Path, tmp_path: Path) -> None:
    calls = ("o.__class__", "o.name()", "o.name.upper", "(lambda: o.name)()", "o.name or f'x'")
    for expression in (*calls, "1", "o if o else o", "o.name * 9", "o.name or", "__import__('os')"):
        hostile = changed(alfworld_game, tmp_path / "game.tw-pddl", "{o.name}", "{" + expression + "}")
        with pytest.raises(InputError, match="nothing was run"):
            StockWorld(hostile)
    StockWorld(changed(alfworld_game, tmp_path / "game.tw-pddl", "{o.name}", "{o.name or 'a ' + o.id}"))


def test_broken_files_are_one_clear_error(alfworld_game: Path, tmp_path: Path) -> None:
    for name in ("missing.tw-pddl", "missing.z8"):
        with pytest.raises(InputError, match=f"{name}: cannot be read"):
            StockWorld(tmp_path / name)
    file = tmp_path / "game.tw-pddl"
    for text, reason in (("{", "not a JSON file"), ("[]", "expected a JSON object"), ("{}", "missing or not text")):
        file.write_text(text)
        with pytest.raises(InputError, match=reason):
            StockWorld(file)
    changed(alfworld_game, file, "action", "akcion")
    with pytest.raises(InputError, match="grammar does not parse"):
        StockWorld(file)
    for name, reason in (("game.ulx", "Glulx"), ("game.txt", "not a game of the stock engine"), ("g", "not a game")):
        with pytest.raises(InputError, match=reason):
            StockWorld(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        StockWorld(tmp_path / "folder.z8")
    (tmp_path / "alone.z8").write_bytes(b"x")
    with pytest.raises(InputError, match=r"alone\.json: cannot be read"):
        StockWorld(tmp_path / "alone.z8")


@plays_alfworld
@pytest.mark.parametrize(("old", "new"), [("(define", "(defin"), ("(:goal", "(:gaol"), ("(:init", "(:init (nowhere")])
def test_pddl_that_does_not_translate_is_one_clear_error(
    alfworld_game: Path, tmp_path: Path, old: str, new: str
) -> None:
    world = StockWorld(changed(alfworld_game, tmp_path / "game.tw-pddl", old, new, "pddl_problem"))
    with pytest.raises(InputError, match="the stock engine cannot play this game"):
        world.reset()


@pytest.mark.parametrize(
    ("module", "package"),
    [("textworld", r"textworld\[pddl\]"), ("alfworld", "alfworld"), ("alfworld.agents", "alfworld")],
)
def test_a_missing_package_is_named(
    alfworld_game: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=f'pip install "{package}"'):
        StockWorld(alfworld_game).reset()


@plays_alfworld
def test_a_python_that_the_engine_cannot_use_is_named(alfworld_game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from textworld.envs.pddl.textgen import EvalSymbol

    def fails(self: Any, context: Any = None) -> Any:
        raise NameError("name 'probe' is not defined")

    monkeypatch.setattr(EvalSymbol, "derive", fails)
    with pytest.raises(InputError, match=r"Python 3\.10-3\.12"):
        StockWorld(alfworld_game).reset()


# Games of tw-make


def test_tw_make_game_keeps_the_contract(tw_make_game: Path) -> None:
    report = check_env(f"stock:{tw_make_game}", script=quest(tw_make_game), steps=20, restores=8, processes=1)
    assert report.unchecked == ()
    assert report.finished


def test_tw_make_game_is_won_by_its_quest(tw_make_game: Path) -> None:
    world = StockWorld(tw_make_game)
    turns = play(world, quest(tw_make_game))
    assert [turn.won for turn in turns] == [False] * (len(turns) - 1) + [True]
    assert turns[-1].done
    assert all(command in turn.admissible for command, turn in zip(quest(tw_make_game), turns, strict=False))
    world.close()
    assert world.restore(turns[1].state) == turns[1]


def test_commands_that_would_hurt_the_interpreter_are_not_sent(
    tw_make_game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NUL hangs it, `save` and `script` write files, `quit` leaves it at a question, long lines are cut."""
    monkeypatch.chdir(tmp_path)
    world = StockWorld(tw_make_game)
    here = world.reset()
    for command in (
        "look\0",
        "lo\nok",
        "é",
        "x" * 151,
        "save",
        "SAVE",
        "script",
        "restart",
        "quit",
        "q",
        "tw-extra-infos score",
    ):
        turn = world.step(here.state, command)
        assert turn.observation == NOTHING_HAPPENS
        assert (turn.admissible, turn.won, turn.done) == (here.admissible, here.won, here.done)
        assert world.step(turn.state, "look").observation == world.step(here.state, "look").observation
    assert list(tmp_path.iterdir()) == []
    # Words that the game does not know are sent, and the answer is the game's own.
    assert world.step(here.state, "frobnicate").observation not in ("", NOTHING_HAPPENS)


def test_exact_values_of_a_tw_make_game(tw_make_game: Path) -> None:
    """States are histories here, so the graph is a tree; the value is that of the one winning history."""
    commands = quest(tw_make_game)
    policy = {command: 1 / (len(commands) + 1) for command in [*commands, "look"]}
    values = exact(StockWorld(tw_make_game), lambda turn: policy, 2, explore="policy")
    assert len(commands) == 2
    assert values.v((), 2) == pytest.approx((1 / 3) ** 2)
    assert values.contrast((), 2, commands[0]) == pytest.approx(1 / 3)
