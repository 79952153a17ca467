"""The outcome-conditioned twin of a policy with exact probabilities, and its belief in success.

Knows: which play the twin may learn from. It learns from fresh trajectories, played for it with seeds of their own,
and for every game only from the other games (cross-fitting by game): never from the rollouts that define the truth,
nor from where things lie in the game that is scored. Hides: the conditional logit with the policy as its offset.

p(a|h, z) is proportional to pi(a|h) exp(w_z f(h, a)), fitted by ridge-penalised maximum likelihood to the steps of
trajectories with outcome z; with little data it falls back on the policy itself (a ratio of 1), never on noise.
f are the features of the embedded policy (`audit.policies.linear`), all groups of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from audit.collect import collect
from audit.policies import History, Policy
from audit.policies.expert import TARGETS, VISITS, Memory, Reader
from audit.policies.linear import GROUPS, PHASES, Features
from audit.records import content_id
from envs import Environment, Game, InputError, Turn, make

Floats = npt.NDArray[np.float64]

FOLDS = 5
LEAST = 20  # trajectories of an outcome below which its conditional is missing


@dataclass(frozen=True, slots=True)
class TwinSettings:
    """trajectories: how many are played for it, spread over the games. folds: of games. penalty: ridge. seed: of
    the play (its streams are named apart from those of collecting and replaying)."""

    trajectories: int = 300
    folds: int = FOLDS
    penalty: float = 3.0
    seed: int = 0


@dataclass(slots=True)
class _Play:
    """The steps of some games: one entry a step, commands of a step side by side."""

    games: list[str] = field(default_factory=list)
    won: list[bool] = field(default_factory=list)
    trajectory: list[int] = field(default_factory=list)
    situation: list[list[float]] = field(default_factory=list)
    codes: list[tuple[int, list[int]]] = field(default_factory=list)
    offsets: list[list[float]] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)


class Twin:
    """Conditionals and beliefs by game. Made by `fit_twin`."""

    def __init__(self, features: Features, reader: Reader, settings: TwinSettings) -> None:
        self._features, self._reader, self.settings = features, reader, settings
        self._weights: dict[tuple[int, bool], dict[str, float] | str] = {}
        self._beliefs: dict[int, Any] = {}

    def fold(self, game: str) -> int:
        """The fold of a game: a function of its id alone."""
        return int(content_id("twin fold", game)[:13], 16) % self.settings.folds

    def logprob(
        self, history: History, probabilities: Mapping[str, float], action: str, *, success: bool
    ) -> float | str:
        """log p(action | history, outcome), or why there is none."""
        weights = self._weights[self.fold(history.game_id), success]
        if isinstance(weights, str):
            return weights
        if not probabilities.get(action, 0.0) > 0:
            return "the policy gives this action probability 0"
        context, codes = self._features.moment(self._reader.memory(history), history.turn)
        scores = {}
        for command, code in zip(history.turn.admissible, codes, strict=True):
            p = probabilities.get(command, 0.0)
            if p > 0:
                tilt = sum(weights.get(name, 0.0) for name in self._features.names(context, code))
                scores[command] = math.log(p) + tilt
        if action not in scores:
            return "the action is not admissible, so the twin has no features of it"
        top = max(scores.values())
        return scores[action] - top - math.log(sum(math.exp(score - top) for score in scores.values()))

    def belief(self, history: History, budget: int) -> float | str:
        """Probability of success from here, or why there is none."""
        model = self._beliefs[self.fold(history.game_id)]
        if isinstance(model, str):
            return model
        row = _situation(self._features, self._reader.memory(history), history.turn, budget - history.steps)
        return float(model.predict_proba([row])[0, 1])


def fit_twin(policy: Policy, games: Sequence[Game], budget: int, settings: TwinSettings | None = None) -> Twin:
    """Play and fit. games: those that are scored, or more. budget: steps an episode.

    Raises InputError where a policy has no exact probabilities or there are fewer games than folds.
    """
    settings = settings or TwinSettings()
    if len(games) < settings.folds:
        raise InputError(
            f"The twin is fitted on other games than the one it scores, {settings.folds} folds of them; "
            f"{len(games)} games are too few. Name a larger set with --env."
        )
    twin = Twin(Features(GROUPS), Reader(), settings)
    play = _play(policy, games, budget, settings, twin)
    folds = np.array([twin.fold(game) for game in play.games])
    won, trajectory = np.array(play.won), np.array(play.trajectory)
    for fold in range(settings.folds):
        outside = folds != fold
        twin._beliefs[fold] = _fit_belief(play, np.flatnonzero(outside))
        for success in (True, False):
            steps = np.flatnonzero(outside & (won == success))
            n = len(set(trajectory[steps].tolist()))
            word = "success" if success else "failure"
            twin._weights[fold, success] = (
                _fit(play, steps, twin._features, settings.penalty)
                if n >= LEAST
                else f"only {n} trajectories of other games ended in {word}; at least {LEAST} are needed"
            )
    return twin


def _play(policy: Policy, games: Sequence[Game], budget: int, settings: TwinSettings, twin: Twin) -> _Play:
    play = _Play()
    addresses = {game.id: game.address for game in games}
    worlds: dict[str, Environment] = {}  # those that are played: a set may hold thousands
    seed = int(content_id("twin", settings.seed)[:15], 16)  # apart from every seed a plan would choose
    for number, trajectory in enumerate(collect(policy, games, settings.trajectories, budget=budget, seed=seed)):
        if trajectory.status == "error":
            continue
        if trajectory.game not in worlds:
            worlds[trajectory.game] = make(addresses[trajectory.game])
        env = worlds[trajectory.game]
        history = History(trajectory.game, env.reset())
        histories = []
        for command in trajectory.commands:
            histories.append(history)
            history = history.then(command, env.step(history.turn.state, command))
        known = asyncio.run(policy.distributions(histories))
        for moment, command, probabilities in zip(histories, trajectory.commands, known, strict=True):
            if probabilities is None:
                raise InputError("The embedded twin needs a policy with exact probabilities; this one has none.")
            admissible = moment.turn.admissible
            if command not in admissible:
                continue
            memory = twin._reader.memory(moment)
            play.games.append(trajectory.game)
            play.won.append(trajectory.won)
            play.trajectory.append(number)
            play.situation.append(_situation(twin._features, memory, moment.turn, budget - moment.steps))
            play.codes.append(twin._features.moment(memory, moment.turn))
            play.offsets.append([math.log(max(probabilities.get(text, 0.0), 1e-300)) for text in admissible])
            play.chosen.append(admissible.index(command))
    return play


def _fit(play: _Play, steps: npt.NDArray[np.int64], features: Features, penalty: float) -> dict[str, float]:
    """Weights of a conditional logit with offsets, by ridge-penalised maximum likelihood."""
    rows: dict[tuple[int, int], int] = {}
    names: dict[str, int] = {}
    entries: list[list[int]] = []
    members: list[int] = []
    starts: list[int] = []
    picked: list[int] = []
    offset: list[float] = []
    for step in steps.tolist():
        context, codes = play.codes[step]
        starts.append(len(members))
        for code in codes:
            row = rows.get((context, code))
            if row is None:
                row = rows[context, code] = len(entries)
                entries.append([names.setdefault(name, len(names)) for name in features.names(context, code)])
            members.append(row)
        offset += play.offsets[step]
        picked.append(members[starts[-1] + play.chosen[step]])
    columns = [column for entry in entries for column in entry]
    pointers = np.cumsum([0, *map(len, entries)])
    design = sparse.csr_matrix((np.ones(len(columns)), columns, pointers), shape=(len(entries), len(names)))
    where, first, base = np.array(members), np.array(starts), np.array(offset)
    sizes = np.diff([*starts, len(members)])
    observed = design.T @ np.bincount(np.array(picked), minlength=len(entries)).astype(float)

    def loss(beta: Floats) -> tuple[float, Floats]:
        utility = (design @ beta)[where] + base
        top = np.maximum.reduceat(utility, first)
        exponential = np.exp(utility - np.repeat(top, sizes))
        total = np.add.reduceat(exponential, first)
        expected = np.bincount(where, exponential / np.repeat(total, sizes), minlength=len(entries))
        value = float((np.log(total) + top).sum()) - float(observed @ beta) + penalty / 2 * float(beta @ beta)
        return value, np.asarray(design.T @ expected - observed + penalty * beta)

    found = minimize(loss, np.zeros(len(names)), jac=True, method="L-BFGS-B", options={"maxiter": 500})
    return dict(zip(names, found.x.tolist(), strict=True))


_TASKS = ("place", "two", "clean", "heat", "cool", "light")


def _situation(features: Features, memory: Memory, turn: Turn, left: int) -> list[float]:
    """What a belief in success looks at: phase, task, steps left, what is held, done, seen and visited."""
    context, _ = features.moment(memory, turn)
    phase, status = context >> 4, memory.status
    seen = sum(1 for known in status if known & VISITS) / max(1, len(status))
    room = memory.room.task
    return [
        *(float(phase == number) for number in range(len(PHASES))),
        *(float(room.kind == kind) for kind in _TASKS),
        left,
        math.log1p(left),
        math.log1p(left) * (room.kind == "two"),
        float(len(memory.treated)),
        float(memory.idle),
        float(sum(known & TARGETS > 0 for known in status)),
        float(memory.home() >= 0),
        seen,
        left * seen,
    ]


def _fit_belief(play: _Play, steps: npt.NDArray[np.int64]) -> Any:
    won = [play.won[step] for step in steps.tolist()]
    if len(set(won)) < 2:
        return "the trajectories of other games all end alike, so a belief in success cannot be fitted"
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    return model.fit([play.situation[step] for step in steps.tolist()], won)
