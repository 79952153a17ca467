"""Training: the fit is the penalised optimum, seeds decide, recipes reproduce what ships, rates are counted right."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from statsmodels.stats.proportion import proportion_confint

import audit.train as training
from audit.policies import History, Proposal, load_policy
from audit.policies.expert import ExpertPolicy
from audit.policies.linear import GROUPS, Features, LinearPolicy
from audit.policies.scripted import ScriptedPolicy, UniformPolicy
from audit.policies.shipped import SHIPPED
from audit.train import evaluate, retrain, train
from envs import InputError, games, make

SMALL = "generated:12:0"


def test_the_fit_is_the_optimum_of_the_penalised_likelihood() -> None:
    # At the optimum, observed minus expected feature counts equal penalty times weight, for each feature.
    groups, penalty = ("visits", "likely", "habits"), 0.7
    policy = train(SMALL, groups=groups, penalty=penalty, epsilon=0.3, seed=5)
    weights = policy.weights()["weight"].to_dict()
    features, expert = Features(groups), ExpertPolicy(0.3)
    demonstrations: Counter[tuple[int, tuple[int, ...], int]] = Counter()
    for game in games(SMALL):
        training._demonstrate(game, expert, features, demonstrations, episodes=1, budget=50, seed=5)
    gap: Counter[str] = Counter()
    for (context, codes, position), count in demonstrations.items():
        names = [features.names(context, code) for code in codes]
        odds = np.exp([sum(weights[name] for name in command) for command in names])
        for number, (command, p) in enumerate(zip(names, odds / odds.sum(), strict=True)):
            for name in command:
                gap[name] += count * ((number == position) - p)
    assert sum(demonstrations.values()) == policy.training["n_decisions"] > 100
    assert set(gap) == set(weights)
    assert max(abs(gap[name] - penalty * weight) for name, weight in weights.items()) < 0.01
    assert max(abs(weight) for weight in weights.values()) > 1


def test_training_is_decided_by_games_options_and_seed() -> None:
    one, again, other = (train(SMALL, episodes=1, seed=seed) for seed in (1, 1, 2))
    assert one.describe() == again.describe()
    assert one.describe()["weights"] != other.describe()["weights"]
    assert train(SMALL, seed=1, temperature=2.0).weights().equals(one.weights())


def test_games_by_name_or_by_list_train_the_same_and_a_folder_is_not_named(tmp_path: Path) -> None:
    by_list = train(games(SMALL), seed=1)
    assert by_list.weights().equals(train(SMALL, seed=1).weights())
    folder = Path(games(SMALL)[0].address).parent.parent.parent
    by_folder = train(str(folder), seed=1)
    assert by_folder.training["game_ids"] == by_list.training["game_ids"]
    assert by_folder.training["games"] is None
    assert str(folder) not in json.dumps(by_folder.describe())


def test_what_is_learned_plays_unseen_games() -> None:
    held_out = games("generated:12:1")
    table = evaluate(train(SMALL, episodes=3, temperature=0.5), held_out)
    assert table.loc["all", "success"] >= 0.9
    assert evaluate(UniformPolicy(), held_out).loc["all", "success"] <= 0.2


def test_demonstrations_of_another_character_make_another_policy() -> None:
    tidy = train(SMALL, order="listed", tidy=True).weights()["weight"]
    direct = train(SMALL).weights()["weight"]
    assert tidy["examine after open"] > 1 > direct["examine after open"]


def test_success_is_counted_by_task_type_with_wilson_intervals() -> None:
    found = games(SMALL)
    table = evaluate(ExpertPolicy(0.6), found, n=4, seed=3)
    assert list(table.index[-1:]) == ["all"] and len(table) == 7
    assert table.loc["all", "episodes"] == 48 and table["episodes"].iloc[:-1].sum() == 48
    assert table["won"].iloc[:-1].sum() == table.loc["all", "won"]
    assert 0 < table.loc["all", "won"] < 48  # else this test would show nothing
    for _, row in table.iterrows():
        low, high = proportion_confint(row["won"], row["episodes"], method="wilson")
        assert (row["low"], row["high"]) == pytest.approx((low, high))
    assert evaluate(ExpertPolicy(0.6), found, n=4, seed=3).equals(table)
    # A game's episodes do not depend on which others are played with it.
    singly = [evaluate(ExpertPolicy(0.6), [game], n=4, seed=3).loc["all", "won"] for game in found]
    assert sum(singly) == table.loc["all", "won"]


def test_a_walkthrough_wins_at_its_last_step_and_not_before() -> None:
    game = games(SMALL)[0]
    commands = json.loads(Path(game.address).read_text())["walkthrough"]
    table = evaluate(ScriptedPolicy(commands), [game])
    assert (table.loc["all", "won"], table.loc["all", "steps"]) == (1, len(commands))
    assert evaluate(ScriptedPolicy(commands), [game], budget=len(commands) - 1).loc["all", "won"] == 0


class Broken(UniformPolicy):
    async def propose(self, requests: Sequence[History], *, seeds: Sequence[int]) -> list[Proposal]:
        return [Proposal("", status="error", reason="the server is down") for _ in requests]


def test_a_policy_that_fails_is_no_policy_that_loses() -> None:
    with pytest.raises(InputError, match="the server is down"):
        evaluate(Broken(), SMALL)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"groups": ("telepathy",)}, "telepathy"),
        ({"penalty": 0.0}, "penalty"),
        ({"episodes": 0}, "episode"),
        ({"budget": 0}, "step"),
        ({"games": []}, "game"),
        ({"epsilon": 2.0}, "epsilon"),
        ({"order": "random"}, "order"),
        ({"temperature": 0.0}, "temperature"),
        ({"games": "generated:x"}, "generated"),
    ],
)
def test_values_that_make_no_sense_are_refused(change: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        train(**{"games": "generated:1:0", **change})  # type: ignore[arg-type]


def test_progress_is_told_from_start_to_end() -> None:
    told: list[tuple[str, int, int]] = []
    train("generated:2:0", progress=lambda *event: told.append(event))
    assert told[0] == ("demonstrations", 0, 2) and ("demonstrations", 2, 2) in told and told[-1] == ("fit", 1, 1)
    told.clear()
    evaluate(UniformPolicy(), "generated:2:0", budget=5, progress=lambda *event: told.append(event))
    assert told[-1] == ("episodes", 2, 2) and [over for _, over, _ in told] == sorted(over for _, over, _ in told)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_is_trained_again_by_its_recipe(name: str) -> None:
    fresh, shipped = retrain(name), load_policy(name)
    assert isinstance(shipped, LinearPolicy)
    assert fresh.training == shipped.training
    ours, theirs = fresh.weights()["weight"].sort_index(), shipped.weights()["weight"].sort_index()
    assert list(ours.index) == list(theirs.index)
    assert ours.to_numpy() == pytest.approx(theirs.to_numpy(), abs=0.01)  # other machines round otherwise
    world = make(games("generated:1:0")[0].address)
    history = History(world.game_id, world.reset())
    for command in ExpertPolicy().demonstration(history), "look":
        p, q = (asyncio.run(policy.distributions([history]))[0] for policy in (fresh, shipped))
        assert p is not None and q is not None and p == pytest.approx(dict(q), abs=1e-3)
        history = history.then(command, world.step(history.turn.state, command))


def test_nobody_else_has_a_recipe() -> None:
    with pytest.raises(InputError, match="no shipped policy"):
        retrain("nobody")
    assert set(GROUPS) > {group for name in SHIPPED for group in load_policy(name).describe()["groups"]}


@pytest.mark.slow
def test_outcomes_of_the_shipped_policies_vary_on_the_official_unseen_games(official: Callable[[str], Path]) -> None:
    found = games(official("valid_unseen"))
    for name in SHIPPED:
        assert 0.4 < evaluate(load_policy(name), found, n=2).loc["all", "success"] < 0.8
