"""Policies: exact probabilities, draws that follow them, a reading of the text that is true, files that are safe."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

import audit.policies.linear as linear
from audit.policies import History, Policy, load_policy
from audit.policies.expert import (
    CLOSED,
    KNOWN,
    SEEN,
    TARGET,
    TARGETS,
    VISITS,
    ExpertPolicy,
    Reader,
    Task,
    read_command,
    read_task,
)
from audit.policies.linear import GROUPS, Features, LinearPolicy
from audit.policies.scripted import ScriptedPolicy, UniformPolicy
from audit.policies.shipped import SHIPPED, shipped_path
from audit.records import draws
from envs import Environment, InputError, Turn, games, make
from envs.alfworld.generate import TASK_TYPES
from envs.alfworld.layouts import load_rules

KINDS = dict(zip(TASK_TYPES, ("place", "light", "clean", "heat", "cool", "two"), strict=True))


@pytest.fixture(scope="module")
def worlds() -> list[Environment]:
    """One generated game of each task type."""
    return [make(game.address) for game in games("generated:6:0")]


def propose(policy: Policy, history: History, seed: int) -> str:
    return asyncio.run(policy.propose([history], seeds=[seed]))[0].command


def play(policy: Policy, world: Environment, steps: int = 50, seed: int = 0) -> History:
    history = History(world.game_id, world.reset())
    for number in draws(steps, "test", seed, world.game_id):
        if history.turn.done:
            break
        command = propose(policy, history, number)
        history = history.then(command, world.step(history.turn.state, command))
    return history


# Reading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_every_wording_of_the_six_task_types_is_read(task_type: str) -> None:
    wordings = load_rules().wordings[task_type]
    assert wordings
    for wording in wordings:
        sentence = wording.format(obj="soapbar", recep="countertop", toggle="desklamp", mrecep="")
        place = "desklamp" if KINDS[task_type] == "light" else "countertop"
        assert read_task(f"You see a bed 1.\n\nYour task is to: {sentence}.") == (KINDS[task_type], "soapbar", place)


@pytest.mark.parametrize(
    "text", ["", "Your task is to: dance.", "Your task is to: put a slice of apple in fridge and sing."]
)
def test_a_task_that_cannot_be_read_is_unknown_not_guessed(text: str) -> None:
    assert read_task(text) == Task("unknown", None, None)


def test_commands_of_both_dialects_read_alike() -> None:
    new, old = read_command("move mug 1 to coffeetable 2"), read_command("put mug 1 in/on coffeetable 2")
    assert new == old == ("put", "mug 1", "mug", "coffeetable 2", "coffeetable")
    assert read_command("go to drawer 12")[:1] + read_command("go to drawer 12")[3:] == ("go", "drawer 12", "drawer")
    assert read_command("heat egg 2 with microwave 1") == ("heat", "egg 2", "egg", "microwave 1", "microwave")
    assert read_command("sing") == ("other", "", "", "", "")


def turn(observation: str, *admissible: str) -> Turn:
    return Turn(observation, admissible, False, False, (observation, admissible))


def test_memory_of_a_history_that_is_told_by_hand() -> None:
    reader = Reader()
    go = ("go to cabinet 1", "go to fridge 1", "go to shelf 1")
    start = History("game", turn("You are in a room.\n\nYour task is to: put a cool cup in shelf.", *go))
    first = reader.memory(start)
    assert first.room.places == ("cabinet 1", "fridge 1", "shelf 1") and first.at == -1 and first.status == bytes(3)

    closed = start.then("go to cabinet 1", turn("You arrive at cabinet 1. The cabinet 1 is closed.", *go))
    assert (reader.memory(closed).status[0] & KNOWN, reader.memory(closed).status[0] & VISITS) == (CLOSED, 1)

    text = "You open the cabinet 1. The cabinet 1 is open. In it, you see a cup 1, a cupholder 1, and a cup 2."
    opened = closed.then("open cabinet 1", turn(text, "take cup 1 from cabinet 1", "take cup 2 from cabinet 1", *go))
    assert reader.memory(opened).status[0] & KNOWN == SEEN
    assert reader.memory(opened).status[0] & TARGETS == 2 * TARGET  # a cupholder is no cup

    took = opened.then("take cup 1 from cabinet 1", turn("You pick up the cup 1 from the cabinet 1.", *go))
    assert reader.memory(took).holding == "cup 1" and reader.memory(took).status[0] & TARGETS == TARGET

    cooled = took.then("cool cup 1 with fridge 1", turn("You cool the cup 1 using the fridge 1.", *go))
    assert reader.memory(cooled).treated == ("cup 1",)
    heated = cooled.then("heat cup 1 with microwave 1", turn("You heat the cup 1 using the microwave 1.", *go))
    assert reader.memory(heated).treated == ()

    refused = cooled.then("take cup 2 from cabinet 1", turn("Nothing happens.", *go))
    assert reader.memory(refused).holding == "cup 1" and reader.memory(refused).idle > reader.memory(cooled).idle

    placed = cooled.then("put cup 1 in/on shelf 1", turn("You put the cup 1 in/on the shelf 1.", *go))
    assert reader.memory(placed).holding is None and reader.memory(placed).home() == 2


def test_memory_agrees_with_the_game_wherever_a_random_player_goes(worlds: list[Environment]) -> None:
    rng, reader = random.Random(0), Reader()
    checked = Counter[str]()
    for world in worlds:
        history = History(world.game_id, world.reset())
        target = read_task(history.turn.observation).target
        for _ in range(150):
            commands = history.turn.admissible
            doing = [c for c in commands if c.split()[0] in ("take", "open", "move", "clean", "heat", "cool")]
            command = rng.choice(doing if doing and rng.random() < 0.5 else commands)
            history = history.then(command, world.step(history.turn.state, command))
            memory = reader.memory(history)
            carried = world.step(history.turn.state, "inventory").observation
            assert carried == (
                f"You are carrying: a {memory.holding}." if memory.holding else "You are not carrying anything."
            )
            checked["held" if memory.holding else "free"] += 1
            if memory.holding is None:
                takes = Counter(
                    read_command(c).place for c in history.turn.admissible if c.startswith(f"take {target} ")
                )
                for place, n in takes.items():
                    assert memory.status[memory.room.index[place]] & TARGETS == min(3, n) * TARGET
                    checked["target"] += 1
    assert min(checked[key] for key in ("held", "free", "target")) > 20


def test_memory_does_not_depend_on_what_was_remembered_before(worlds: list[Environment]) -> None:
    warm, world = Reader(), worlds[0]
    for seed in range(5):
        history = play(UniformPolicy(), world, steps=40, seed=seed)
        for reader in (warm, Reader(limit=3)):
            kept = [
                (m.status, m.at, m.holding, m.treated, m.last, m.again, m.idle)
                for m in (reader.memory(h) for h in history.line())
            ]
            if reader is warm:
                reference = kept
        assert kept == reference


# Exact probabilities --------------------------------------------------------------------------------------------


def policies() -> dict[str, Callable[[], Policy]]:
    return {
        "uniform": UniformPolicy,
        "expert": lambda: ExpertPolicy(0.3),
        "tidy": lambda: ExpertPolicy(0.2, order="listed", tidy=True),
        **{name: lambda name=name: load_policy(name) for name in SHIPPED},  # type: ignore[misc]
    }


@pytest.mark.parametrize("name", list(policies()))
def test_probabilities_are_exact_and_draws_follow_them(name: str, worlds: list[Environment]) -> None:
    policy = policies()[name]()
    moments = play(policy, worlds[1], steps=12).line()[:-1][::4]
    for number, history in enumerate(moments):
        (distribution,) = asyncio.run(policy.distributions([history]))
        assert distribution is not None and math.fsum(distribution.values()) == pytest.approx(1, abs=1e-12)
        commands = list(distribution)
        scores = asyncio.run(policy.logprobs([history] * len(commands), commands))
        assert scores == pytest.approx([math.log(p) for p in distribution.values()], abs=1e-9)
        n = 20_000
        proposals = asyncio.run(policy.propose([history] * n, seeds=draws(n, "frequencies", name, number)))
        counts = Counter(proposal.command for proposal in proposals)
        assert all(p.logprob == pytest.approx(math.log(distribution[p.command])) for p in proposals[:50])
        common = [c for c in commands if distribution[c] * n >= 10]
        observed = [counts[c] for c in common] + [n - sum(counts[c] for c in common)]
        expected = [distribution[c] * n for c in common] + [n - sum(distribution[c] * n for c in common)]
        if expected[-1] < 1:  # fold an almost empty remainder into the last cell
            observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
        if len(observed) > 1:
            assert chisquare(observed, np.array(expected) * sum(observed) / sum(expected)).pvalue > 1e-4


def test_the_ends_of_the_seed_range_draw_the_first_and_the_last_command(worlds: list[Environment]) -> None:
    history = History(worlds[0].game_id, worlds[0].reset())
    admissible = history.turn.admissible
    assert propose(UniformPolicy(), history, 0) == admissible[0]
    assert propose(UniformPolicy(), history, 2**64 - 1) == admissible[-1]


def test_no_twin_no_conditional_score_and_no_probability_is_minus_infinity(worlds: list[Environment]) -> None:
    history = History(worlds[0].game_id, worlds[0].reset())
    for policy in (UniformPolicy(), ExpertPolicy(0.1), load_policy("hasty"), ScriptedPolicy(["look"])):
        assert asyncio.run(policy.logprobs([history], ["look"], condition="success")) == [None]
        assert asyncio.run(policy.logprobs([history], ["sing a song"])) == [-math.inf]


def test_a_moment_without_commands_is_an_error_with_a_reason() -> None:
    history = History("game", turn("The end."))
    for policy in (UniformPolicy(), ExpertPolicy(), load_policy("hasty")):
        (proposal,) = asyncio.run(policy.propose([history], seeds=[1]))
        assert proposal.status == "error" and proposal.reason
        assert asyncio.run(policy.distributions([history])) == [None]
        assert asyncio.run(policy.logprobs([history], ["look"])) == [None]


@pytest.mark.parametrize("name", SHIPPED)
def test_draws_depend_on_history_and_seed_alone(
    name: str, worlds: list[Environment], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = load_policy(name)
    before = [play(warm, world, seed=3).commands() for world in worlds]
    monkeypatch.setattr(linear, "MEMO_LIMIT", 2)  # forgets all the time
    assert [play(load_policy(name), world, seed=3).commands() for world in reversed(worlds)] == before[::-1]
    assert [play(warm, world, seed=3).commands() for world in worlds] == before
    assert [play(warm, world, seed=4).commands() for world in worlds] != before


# The expert -----------------------------------------------------------------------------------------------------


class OldDialect:
    """A world whose put command is worded as before alfworld 0.4."""

    def __init__(self, world: Environment) -> None:
        self._world, self.game_id = world, world.game_id

    def _old(self, new: Turn) -> Turn:
        words = [
            c.replace("move ", "put ").replace(" to ", " in/on ") if c[:5] == "move " else c for c in new.admissible
        ]
        return Turn(new.observation, tuple(words), new.won, new.done, new.state)

    def reset(self) -> Turn:
        return self._old(self._world.reset())

    def restore(self, state: object) -> Turn:
        return self._old(self._world.restore(state))

    def step(self, state: object, command: str) -> Turn:
        if command.startswith("put "):
            command = command.replace("put ", "move ", 1).replace(" in/on ", " to ")
        return self._old(self._world.step(state, command))


def test_the_expert_wins_the_six_task_types_in_both_dialects(worlds: list[Environment]) -> None:
    for world in worlds:
        assert play(ExpertPolicy(), world).turn.won
        old = play(ExpertPolicy(), OldDialect(world))
        assert old.turn.won and any(" in/on " in c for c in old.commands()) == any(
            c.startswith("move ") for c in play(ExpertPolicy(), world).commands()
        )


def test_a_tidy_expert_takes_longer_and_still_wins(worlds: list[Environment]) -> None:
    tidy = [play(ExpertPolicy(order="listed", tidy=True), world, steps=200) for world in worlds]
    assert all(history.turn.won for history in tidy)
    direct = [play(ExpertPolicy(), world) for world in worlds]
    assert sum(h.steps for h in tidy) > 1.5 * sum(h.steps for h in direct)


def test_noise_is_the_declared_mixture(worlds: list[Environment]) -> None:
    history = History(worlds[2].game_id, worlds[2].reset())
    policy, n = ExpertPolicy(0.3), len(history.turn.admissible)
    best = policy.demonstration(history)
    (distribution,) = asyncio.run(policy.distributions([history]))
    assert distribution is not None
    assert distribution == pytest.approx({c: 0.3 / n + 0.7 * (c == best) for c in history.turn.admissible})


@pytest.mark.slow
def test_the_expert_wins_the_official_unseen_games(official: Callable[[str], Path]) -> None:
    found = games(official("valid_unseen"))
    by_type: dict[str | None, list[bool]] = {}
    for game in found:
        by_type.setdefault(game.task_type, []).append(play(ExpertPolicy(), make(game.address)).turn.won)
    assert len(found) == 134 and len(by_type) == 6
    assert sum(map(sum, by_type.values())) / 134 > 0.95
    assert all(sum(won) / len(won) > 0.9 for won in by_type.values())


@pytest.mark.parametrize("spec", ["x", "1.5", "-0.1", "nan", "inf"])
def test_epsilon_must_be_a_probability(spec: str) -> None:
    with pytest.raises(InputError, match="epsilon"):
        load_policy(f"expert:{spec}")


# The linear policy ----------------------------------------------------------------------------------------------


def test_probability_is_the_logit_of_the_named_weights(worlds: list[Environment]) -> None:
    policy = load_policy("thorough")
    assert isinstance(policy, LinearPolicy)
    weights = policy.weights()["weight"]
    features, reader = Features(policy.groups), Reader()
    for history in play(policy, worlds[3], steps=30).line()[:-1]:
        context, codes = features.moment(reader.memory(history), history.turn)
        utility = np.array([sum(weights.get(name, 0.0) for name in features.names(context, code)) for code in codes])
        expected = np.exp(utility / policy.temperature)
        (distribution,) = asyncio.run(policy.distributions([history]))
        assert distribution is not None
        assert list(distribution.values()) == pytest.approx((expected / expected.sum()).tolist(), abs=1e-9)


def test_temperature_scales_log_odds(worlds: list[Environment]) -> None:
    policy = load_policy("hasty")
    assert isinstance(policy, LinearPolicy)
    history = play(policy, worlds[0], steps=3)
    one, two = (
        np.array(asyncio.run(p.logprobs([history] * 5, history.turn.admissible[:5])), dtype=float)
        for p in (policy.at(1.0), policy.at(2.0))
    )
    assert np.diff(two) == pytest.approx(np.diff(one) / 2, abs=1e-9)
    assert np.abs(np.diff(one)).max() > 0


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_adds_features_and_nothing_else_sees_them(group: str, worlds: list[Environment]) -> None:
    everything, without, reader = Features(GROUPS), Features([g for g in GROUPS if g != group]), Reader()
    more: set[str] = set()
    less: set[str] = set()
    for world in worlds:
        for seed in range(3):
            for history in play(ExpertPolicy(0.5), world, seed=seed).line():
                for features, names in ((everything, more), (without, less)):
                    context, codes = features.moment(reader.memory(history), history.turn)
                    for code in codes:
                        names.update(features.names(context, code))
    assert less != more
    if group not in ("contents", "progress"):  # these two also refine the phase
        assert less < more


def test_equal_codes_have_equal_names_and_features_are_few(worlds: list[Environment]) -> None:
    for name in SHIPPED:
        policy = load_policy(name)
        assert isinstance(policy, LinearPolicy)
        assert 50 < len(policy.weights()) < 1000


def test_saved_and_loaded_is_the_same_policy(tmp_path: Path, worlds: list[Environment]) -> None:
    policy = load_policy("thorough")
    assert isinstance(policy, LinearPolicy)
    policy.save(tmp_path / "mine.json")
    again = load_policy(str(tmp_path / "mine.json"))
    assert again.describe() == policy.describe()
    assert play(again, worlds[4]).commands() == play(policy, worlds[4]).commands()
    assert json.dumps(policy.describe(), allow_nan=False)


def damage(kind: str, path: Path) -> None:
    about, npz = json.loads(path.read_text()), path.with_suffix(".npz")
    weights = np.load(npz)["weights"]
    if kind == "no weights":
        npz.unlink()
    elif kind == "torn weights":
        npz.write_bytes(npz.read_bytes()[:-40])
    elif kind == "short weights":
        np.savez(npz, weights=weights[:-1])
    elif kind == "other weights":
        np.savez(npz, weights=weights + 1)
    elif kind == "infinite weights":
        np.savez(npz, weights=np.where(np.arange(len(weights)) == 0, np.inf, weights))
    elif kind == "two arrays":
        np.savez(npz, weights=weights, more=weights)
    elif kind == "pickled objects":
        np.savez(npz, weights=np.array([print] * len(weights), dtype=object), allow_pickle=True)
    elif kind == "float32":
        np.savez(npz, weights=weights.astype(np.float32))
    elif kind == "huge array":
        np.savez_compressed(npz, weights=np.zeros(10_000_000))
    elif kind == "no JSON":
        path.write_text("{")
    elif kind == "deep JSON":
        path.write_text("[" * 100_000)
    else:
        key, value = {
            "other format": ("format", "something else 1"),
            "unknown group": ("groups", ["visits", "telepathy"]),
            "zero temperature": ("temperature", 0),
            "infinite temperature": ("temperature", math.inf),
            "huge temperature": ("temperature", 10**400),
            "true temperature": ("temperature", "1"),
            "repeated features": ("features", [about["features"][0]] * len(about["features"])),
            "renamed features": ("features", [f"{name}!" for name in about["features"]]),
            "no training": ("training", None),
        }[kind]
        path.write_text(json.dumps({**about, key: value}))


@pytest.mark.parametrize(
    "kind",
    [
        *("no weights", "torn weights", "short weights", "other weights", "infinite weights", "two arrays"),
        *("pickled objects", "float32", "huge array", "no JSON", "deep JSON", "other format", "unknown group"),
        *("zero temperature", "infinite temperature", "huge temperature", "true temperature", "repeated features"),
        *("renamed features", "no training"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    policy = load_policy("hasty")
    assert isinstance(policy, LinearPolicy)
    policy.save(tmp_path / "mine.json")
    damage(kind, tmp_path / "mine.json")
    with pytest.raises(InputError, match="mine") as caught:
        load_policy(str(tmp_path / "mine.json"))
    assert "\n" not in str(caught.value)


def test_a_policy_is_saved_as_json_beside_its_weights(tmp_path: Path) -> None:
    policy = load_policy("hasty")
    assert isinstance(policy, LinearPolicy)
    with pytest.raises(InputError, match="json"):
        policy.save(tmp_path / "mine.pkl")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        policy.save(tmp_path / "file" / "mine.json")


def test_values_out_of_range_are_refused() -> None:
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="temperature"):
            LinearPolicy("x", (), {}, temperature=temperature)
    with pytest.raises(InputError, match="finite"):
        LinearPolicy("x", (), {"go | search": math.nan})


# Scripts, shipped files, names ----------------------------------------------------------------------------------


def test_a_script_is_followed_and_then_looks(tmp_path: Path, worlds: list[Environment]) -> None:
    world = worlds[0]
    first = world.reset().admissible[0]
    for data in ([first, "sing"], {"commands": [first, "sing"]}):
        (tmp_path / "script.json").write_text(json.dumps(data))
        policy = load_policy(f"scripted:{tmp_path / 'script.json'}")
        assert play(policy, world, steps=4).commands() == (first, "sing", "look", "look")
        assert str(tmp_path) not in json.dumps(policy.describe())


@pytest.mark.parametrize("text", ["", "{", "3", "[1]", '{"steps": []}', '["a", null]', "[" * 100_000])
def test_a_script_of_another_shape_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(text)
    with pytest.raises(InputError, match="script"):
        load_policy(f"scripted:{tmp_path / 'script.json'}")


def test_a_missing_script_and_a_bare_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_policy(f"scripted:{tmp_path / 'nowhere.json'}")
    with pytest.raises(InputError, match="list of commands"):
        ScriptedPolicy("look")


def test_shipped_files_are_small_and_name_no_place() -> None:
    files = [path for name in SHIPPED for path in (shipped_path(name), shipped_path(name).with_suffix(".npz"))]
    assert sum(path.stat().st_size for path in files) < 200_000
    for name in SHIPPED:
        text = shipped_path(name).read_text()
        assert "/work" not in text and "/tmp" not in text and "/home" not in text
        assert json.loads(text)["training"]["games"].startswith("generated:")
        assert load_policy(name).describe()["name"] == name
    with pytest.raises(KeyError):
        shipped_path("nobody")


def test_the_shipped_policies_differ_in_support(worlds: list[Environment]) -> None:
    peaked = {}
    for name in SHIPPED:
        policy = load_policy(name)
        moments = [h for world in worlds for seed in range(4) for h in play(policy, world, seed=seed).line()[:-1]]
        distributions = asyncio.run(policy.distributions(moments))
        # Chance that 16 draws all give one command, averaged over the commands the policy takes
        peaked[name] = float(np.mean([sum(p**17 for p in d.values()) for d in distributions if d is not None]))
    assert peaked["thorough"] > 1.5 * peaked["hasty"]
