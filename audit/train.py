"""Training of linear policies from the expert's demonstrations, and how often a policy succeeds.

Knows: how demonstrations are collected (with noise, so that recovery is seen), how a conditional logit is
fitted, and the recipes of the shipped policies. Hides: that like decisions are counted once.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import sparse
from scipy.optimize import minimize
from statsmodels.stats.proportion import proportion_confint

from audit.llm.journal import spending
from audit.policies import History, Policy
from audit.policies.expert import ExpertPolicy, Order, Reader
from audit.policies.linear import GROUPS, Features, LinearPolicy
from audit.policies.shipped import RECIPES
from audit.records import content_id, draws
from audit.rollouts import Start, roll
from envs import Game, make
from envs import games as find_games
from envs.core import InputError

Progress = Callable[[str, int, int], None]
_Decision = tuple[int, tuple[int, ...], int]  # context, codes of the commands, position of the one chosen


def train(
    games: str | Sequence[Game],
    *,
    name: str = "linear",
    groups: Sequence[str] = GROUPS,
    order: Order = "likely",
    tidy: bool = False,
    epsilon: float = 0.15,
    episodes: int = 1,
    budget: int = 50,
    penalty: float = 1.0,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> LinearPolicy:
    """Fit a conditional logit to what the expert would do, at the moments that its noisy play leads to.

    games: a set as in `envs.games`, or games. groups: optional features (`audit.policies.linear.GROUPS`).
    order, tidy, epsilon: the expert's character and its noise; what is learned is the expert's choice, never the
    noise. episodes: a game. budget: steps an episode. penalty: ridge, half of it times the squared weights is
    subtracted from the log likelihood (1 is a standard normal prior). temperature: of the policy, not of the fit.
    progress: called with (stage, done, total).
    Deterministic given seed and games. Raises InputError where there are no demonstrations or values make no sense.
    """
    if isinstance(games, str):
        spec, games = games, find_games(games)
    else:
        spec, games = "", list(games)
    if not games or episodes < 1 or budget < 1:
        raise InputError("Training needs at least one game, one episode a game and one step an episode.")
    if not penalty > 0:
        raise InputError(f"penalty is {penalty}; expected a number above 0 (without one the weights have no optimum).")
    features = Features(groups)
    expert = ExpertPolicy(epsilon, order=order, tidy=tidy)
    demonstrations: Counter[_Decision] = Counter()
    for number, game in enumerate(games):
        if progress is not None:
            progress("demonstrations", number, len(games))
        _demonstrate(game, expert, features, demonstrations, episodes=episodes, budget=budget, seed=seed)
    if progress is not None:
        progress("demonstrations", len(games), len(games))
    if not demonstrations:
        raise InputError("The demonstrations hold no choice between commands; are these ALFWorld games?")
    weights = _fit(features, demonstrations, penalty, progress)
    training = {
        # A folder's name is local to a machine; what was trained on is pinned by the games' content ids.
        "games": spec if spec.startswith(("generated:", "alfworld:", "stock:generated:", "stock:alfworld:")) else None,
        "n_games": len(games),
        "game_ids": content_id("games", [game.id for game in games]),
        "expert": expert.describe(),
        "episodes": episodes,
        "budget": budget,
        "penalty": penalty,
        "seed": seed,
        "n_decisions": sum(demonstrations.values()),
    }
    return LinearPolicy(name, groups, weights, temperature=temperature, training=training)


def retrain(name: str, *, progress: Progress | None = None) -> LinearPolicy:
    """Train a shipped policy again, by its recipe. Bit-identical on one machine, numerically close on others.

    Raises InputError where no policy of that name ships.
    """
    if name not in RECIPES:
        raise InputError(f"{name}: no shipped policy; expected one of {', '.join(RECIPES)}.")
    return train(**RECIPES[name], name=name, progress=progress)


def _demonstrate(
    game: Game,
    expert: ExpertPolicy,
    features: Features,
    demonstrations: Counter[_Decision],
    *,
    episodes: int,
    budget: int,
    seed: int,
) -> None:
    reader = Reader()
    world = make(game.address)
    for episode in range(episodes):
        history = History(world.game_id, world.reset())
        for noise in draws(budget, "demonstration", seed, world.game_id, episode):
            turn = history.turn
            if turn.done or not turn.admissible:
                break
            context, codes = features.moment(reader.memory(history), turn)
            demonstrations[context, tuple(codes), turn.admissible.index(expert.demonstration(history))] += 1
            choice = expert.choice(history)
            assert choice is not None
            command = choice.draw(noise).command
            history = history.then(command, world.step(turn.state, command))


def _fit(
    features: Features, demonstrations: Counter[_Decision], penalty: float, progress: Progress | None
) -> dict[str, float]:
    """Ridge-penalised maximum likelihood; commands with equal codes share a row of the design."""
    rows: dict[tuple[int, int], int] = {}
    names: dict[str, int] = {}
    entries: list[list[int]] = []
    members: list[int] = []  # row of each command of each decision
    starts: list[int] = []
    chosen: list[int] = []
    counts: list[int] = []
    for (context, codes, position), count in demonstrations.items():
        starts.append(len(members))
        counts.append(count)
        for code in codes:
            row = rows.get((context, code))
            if row is None:
                row = rows[context, code] = len(entries)
                entries.append([names.setdefault(name, len(names)) for name in features.names(context, code)])
            members.append(row)
        chosen.append(members[starts[-1] + position])
    design = sparse.csr_matrix(
        (
            np.ones(sum(map(len, entries))),
            [column for entry in entries for column in entry],
            np.cumsum([0, *map(len, entries)]),
        ),
        shape=(len(entries), len(names)),
    )
    where, first, weight = np.array(members), np.array(starts), np.array(counts, dtype=float)
    sizes = np.diff([*starts, len(members)])
    observed = design.T @ np.bincount(np.array(chosen), weights=weight, minlength=len(entries))

    def loss(beta: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        utility = (design @ beta)[where]
        top = np.maximum.reduceat(utility, first)
        exponential = np.exp(utility - np.repeat(top, sizes))
        total = np.add.reduceat(exponential, first)
        expected = np.bincount(where, exponential * np.repeat(weight / total, sizes), minlength=len(entries))
        value = weight @ (np.log(total) + top) - observed @ beta + penalty / 2 * beta @ beta
        return float(value), design.T @ expected - observed + penalty * beta

    if progress is not None:
        progress("fit", 0, 1)
    result = minimize(
        loss,
        np.zeros(len(names)),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 2000, "maxfun": 4000, "ftol": 1e-12, "gtol": 1e-5},
    )
    if not np.isfinite(result.x).all():
        raise InputError(f"The fit did not converge ({result.message}); raise the penalty.")
    if progress is not None:
        progress("fit", 1, 1)
    fitted = dict(zip(names, result.x.tolist(), strict=True))
    return {feature: fitted[feature] for feature in sorted(fitted)}


# How good a policy is --------------------------------------------------------------------------------------------


def evaluate(
    policy: Policy,
    games: str | Sequence[Game],
    *,
    budget: int = 50,
    seed: int = 0,
    n: int = 1,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Play n episodes of each game, all in lock-step, and count the successes.

    One row a task type and a last one `all`: index task_type; columns games, episodes, failed (the policy gave no
    command: they tell nothing and are in no other column), won, success, low, high (95 % Wilson interval over
    episodes; with n > 1 it takes the episodes of one game for independent, as they are given the game), steps (mean
    number of steps of the episodes that were won, NaN where none was), inadmissible (share of the commands that the
    game did not offer). Raises InputError where no episode could be played.
    """
    games = find_games(games) if isinstance(games, str) else list(games)
    if not games or n < 1 or budget < 1:
        raise InputError("Evaluation needs at least one game, one episode a game and one step an episode.")
    worlds = [make(game.address) for game in games]
    starts = [
        Start(world, History(world.game_id, world.reset()), budget, draws(budget, "evaluate", seed, world.game_id, k))
        for world in worlds
        for k in range(n)
    ]
    with spending("collect"):
        ends = asyncio.run(roll(policy, starts, progress=progress))
    if all(end.status == "error" for end in ends):
        raise InputError(f"{games[0].name}: the policy gave no command ({ends[0].reason}).")
    kinds = [game.task_type or "unknown" for game in games]
    rows = []
    for kind in (*sorted(set(kinds)), "all"):
        episodes = [end for number, end in enumerate(ends) if kind in ("all", kinds[number // n])]
        picked = [end for end in episodes if end.status != "error"]
        won = [end.steps for end in picked if end.won]
        low, high = proportion_confint(len(won), len(picked), method="wilson") if picked else (math.nan, math.nan)
        lines = [end.history.line() for end in picked]
        odd = [now.command not in before.turn.admissible for line in lines for before, now in pairwise(line)]
        rows.append(
            {
                "task_type": kind,
                "games": len(episodes) // n,
                "episodes": len(picked),
                "failed": len(episodes) - len(picked),
                "won": len(won),
                "success": len(won) / len(picked) if picked else math.nan,
                "low": float(low),
                "high": float(high),
                "steps": sum(won) / len(won) if won else math.nan,
                "inadmissible": sum(odd) / len(odd) if odd else math.nan,
            }
        )
    return pd.DataFrame(rows).set_index("task_type")
