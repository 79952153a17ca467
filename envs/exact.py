"""Exact values, support and effects of a policy in any environment, by dynamic programming.

Knows: the definitions of "Q, V and contrasts of an action" for a policy that depends on the state alone and a
budget of steps. Hides: the walk over the graph of states and the arrays. Needs nothing of an environment but
the protocol, so it serves tabular worlds and ALFWorld games alike; it is the truth that estimates from replay
are tested against.

The outcome is 1 if the game is won within the budget and else 0. A won or finished state absorbs.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from envs.core import Environment, InputError, Turn

Policy = Callable[[Turn], Mapping[str, float]]
Contrast = Literal["alternatives", "uniform", "policy", "best"]


class ExactValues:
    """What follows exactly from one environment, one state-only policy and one budget.

    turns: one turn a state, `turns[0]` the start; index i below is a position in it.
    depth: (n,) fewest steps from the start to each state.
    values: (n, budget + 1); `values[i, k]` is V(state i with k steps left), nan where that would need states
    beyond the budget.

    Made by `exact`.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        depth: Sequence[int],
        commands: Sequence[tuple[str, ...]],
        successors: array[int],
        probabilities: array[float],
        budget: int,
        key: Callable[[Any], Hashable],
    ) -> None:
        self.turns = tuple(turns)
        self.depth: NDArray[np.int32] = np.asarray(depth, dtype=np.int32)
        self.budget = budget
        self._key = key
        self._index = {key(turn.state): i for i, turn in enumerate(turns)}
        # Edges of state i: commands[i], and the slice offsets[i]:offsets[i + 1] of the two arrays.
        self._commands = commands
        self._offsets = np.cumsum([0] + [len(listed) for listed in commands])
        self._next: NDArray[np.int32] = np.array(successors, dtype=np.int32)
        self._probability: NDArray[np.float64] = np.array(probabilities, dtype=np.float64)
        self._kernel = self._transitions()
        self.values = self._backward()

    def _transitions(self) -> Any:
        """P(next state | state) under the policy; rows of states without edges are empty."""
        rows = np.repeat(np.arange(len(self.turns)), np.diff(self._offsets))
        taken = self._probability > 0  # a command of probability 0 must not carry nan * 0 into a value
        shape = (len(self.turns), len(self.turns))
        return csr_array((self._probability[taken], (rows[taken], self._next[taken])), shape=shape)

    def _backward(self) -> NDArray[np.float64]:
        won = np.array([turn.won for turn in self.turns])
        over = won | np.array([turn.done for turn in self.turns])
        unexplored = ~over & (np.diff(self._offsets) == 0)
        values = np.empty((len(self.turns), self.budget + 1))
        values[:, 0] = won
        for k in range(1, self.budget + 1):
            values[:, k] = self._kernel @ values[:, k - 1]
            values[over, k] = won[over]
            values[unexplored, k] = np.nan
        return values

    @property
    def states(self) -> tuple[Hashable, ...]:
        """The states, in the order of `turns`; all that explored commands reach within the budget."""
        return tuple(turn.state for turn in self.turns)

    def index(self, state: Any) -> int:
        """Position of a state in `turns`. Raises InputError where it was not reached."""
        try:
            return self._index[self._key(state)]
        except KeyError:
            raise InputError(f"State {state!r} is not among those reached from the start within the budget.") from None

    def commands(self, state: Any) -> tuple[str, ...]:
        """The commands whose effects are known in a state: the explored ones; none once the episode is over."""
        return self._commands[self.index(state)]

    def policy(self, state: Any) -> dict[str, float]:
        """The policy at a state, over `commands(state)`."""
        i = self.index(state)
        part = self._probability[self._offsets[i] : self._offsets[i + 1]]
        return dict(zip(self._commands[i], part.tolist(), strict=True))

    def v(self, state: Any, steps_left: int) -> float:
        """V: the probability to win from `state` within `steps_left` steps under the policy."""
        i = self.index(state)
        self._check_steps(steps_left)
        value = float(self.values[i, steps_left])
        if math.isnan(value):
            raise InputError(
                f"V with {steps_left} steps left is not known {self.depth[i]} steps from the start, since only "
                f"{self.budget} steps were explored; compute it with a larger budget."
            )
        return value

    def q(self, state: Any, steps_left: int, command: str) -> float:
        """Q: the same when the next step is `command` whatever the policy says, and the policy follows.

        Raises InputError for a command that was not explored there, and where no step or no state is left.
        """
        i = self.index(state)
        self._check_steps(steps_left)
        if steps_left == 0:
            raise InputError("Q needs at least one step left; with none, no command can be given.")
        if command not in self._commands[i]:
            raise InputError(
                f"Command {command!r} was not explored in this state; let the policy list it (with probability 0 if "
                f"it is never taken)."
            )
        j = int(self._next[self._offsets[i] + self._commands[i].index(command)])
        return self.v(self.turns[j].state, steps_left - 1)

    def spread(self, state: Any, steps_left: int) -> float:
        """Largest minus smallest Q over the explored commands: 0 where no command has an effect.

        nan where there is none to choose, as in a finished state.
        """
        values = [self.q(state, steps_left, command) for command in self.commands(state)]
        return max(values) - min(values) if values else math.nan

    def contrast(
        self,
        state: Any,
        steps_left: int,
        command: str,
        kind: Contrast = "alternatives",
        among: Collection[str] | None = None,
    ) -> float:
        """The effect tau of `command` at a state with `steps_left` steps left (a difference of win probabilities).

        kind "alternatives": Q(a) - sum of w(b) Q(b) over b != a, w(b) = pi(b) / (1 - pi(a)).
        "uniform": the same with equal weights over `among` without a (default: the policy's support).
        "policy": the advantage Q(a) - V.
        "best": Q(a) - max Q(b) over `among` without a (default: the policy's support).

        nan where there is no alternative (state of the point: `no_counterfactual`).
        Raises InputError for an unknown kind, and for `among` where the kind has no use for it.
        """
        if kind not in ("alternatives", "uniform", "policy", "best"):
            raise InputError(f"Contrast {kind!r} is not known; expected alternatives, uniform, policy or best.")
        if among is not None and kind not in ("uniform", "best"):
            raise InputError(f"Contrast {kind!r} weighs by the policy; `among` goes with uniform or best only.")
        factual = self.q(state, steps_left, command)
        if kind == "policy":
            return factual - self.v(state, steps_left)
        probabilities = self.policy(state)
        support = (
            [other for other, p in probabilities.items() if p > 0] if among is None else list(dict.fromkeys(among))
        )
        others = [other for other in support if other != command]
        if not others:
            return math.nan
        values = [self.q(state, steps_left, other) for other in others]
        if kind == "best":
            return factual - max(values)
        weights = [probabilities[other] if kind == "alternatives" else 1.0 for other in others]
        return factual - math.fsum(w * q for w, q in zip(weights, values, strict=True)) / math.fsum(weights)

    @cached_property
    def occupancy(self) -> NDArray[np.float64]:
        """(budget + 1, n): `occupancy[t, i]` is the probability to be in state i after t steps of the policy.

        An episode that is over stays where it ended.
        """
        ended = np.array([turn.done or turn.won for turn in self.turns])
        occupancy = np.zeros((self.budget + 1, len(self.turns)))
        occupancy[0, 0] = 1.0
        for t in range(1, self.budget + 1):
            occupancy[t] = self._kernel.T @ occupancy[t - 1]
            occupancy[t, ended] += occupancy[t - 1, ended]
        return occupancy

    def distribution(self, step: int) -> dict[Hashable, float]:
        """The states after `step` steps under the policy, with their probabilities (above 0)."""
        self._check_steps(step)
        row = self.occupancy[step]
        return {self.turns[i].state: float(row[i]) for i in np.flatnonzero(row)}

    def _check_steps(self, steps: int) -> None:
        if not 0 <= steps <= self.budget:
            raise InputError(f"{steps} steps are outside the budget; expected 0 to {self.budget}.")


def exact(
    env: Environment,
    policy: Policy,
    budget: int,
    *,
    start: Hashable | None = None,
    explore: Literal["admissible", "policy"] = "admissible",
    key: Callable[[Any], Hashable] | None = None,
    max_states: int = 200_000,
) -> ExactValues:
    """Values, support and effects of `policy` in `env` within `budget` steps, without any simulation.

    policy: from a turn to the probabilities of its commands; it must depend on the state alone. It may list
    inadmissible commands (they are actions of the policy) and commands of probability 0.
    start: state to begin from, with the whole budget left (default: reset).
    explore: "admissible" follows every admissible command and every one that the policy lists; "policy" only
    the latter, for games whose whole graph is too large. Then Q is known for listed commands only.
    key: states of equal key are taken as one, for environments whose states tell apart more than matters
    (such as what was said last). The policy and what is admissible must not tell them apart: checked.
    max_states: bound on the states of the environment that are visited.

    By backward recursion over (state, steps left): V(s, k) = sum of pi(a|s) V(s', k - 1), with s' the state
    after a; V is 1 in won states and 0 in states that are over or out of steps otherwise. Time: one step of
    the environment for each (state, command); memory: states x (budget + 1) numbers.

    Raises InputError where the bound is exceeded or the policy is no distribution.
    """
    if budget < 0:
        raise InputError(f"The budget is {budget} steps; expected 0 or more.")
    if explore not in ("admissible", "policy"):
        raise InputError(f"explore is {explore!r}; expected 'admissible' or 'policy'.")
    merge: Callable[[Any], Hashable] = key if key is not None else lambda state: state
    first = env.reset() if start is None else env.restore(start)
    turns, depth = [first], [0]
    commands: list[tuple[str, ...]] = []
    successors, probabilities = array("i"), array("d")
    number = {merge(first.state): 0}
    visited = {first.state}

    def decide(turn: Turn) -> Mapping[str, float] | None:
        return None if turn.won or turn.done else _distribution(policy(turn))

    def arrive(turn: Turn, steps: int) -> int:
        found = number.get(merge(turn.state))
        if turn.state not in visited:
            if len(visited) >= max_states:
                raise InputError(
                    f"The game has more than {max_states} states within {budget} steps; use a smaller game or budget, "
                    f"a policy with less support and explore='policy', or raise max_states."
                )
            visited.add(turn.state)
            if found is not None:
                _check_merge(turns[found], turn, decide)
        if found is None:
            found = number[merge(turn.state)] = len(turns)
            turns.append(turn)
            depth.append(steps)
        return found

    for here, turn in enumerate(turns):  # grows while it is walked: breadth first
        chosen = decide(turn)
        listed: tuple[str, ...] = ()
        if chosen is not None and depth[here] < budget:
            extra = tuple(command for command in chosen if command not in turn.admissible)
            listed = tuple(chosen) if explore == "policy" else turn.admissible + extra
        for command in listed:
            successors.append(arrive(env.step(turn.state, command), depth[here] + 1))
            probabilities.append((chosen or {}).get(command, 0.0))
        commands.append(listed)
    return ExactValues(turns, depth, commands, successors, probabilities, budget, merge)


def _distribution(choice: Mapping[str, float]) -> dict[str, float]:
    probabilities = {command: float(p) for command, p in choice.items()}
    total = math.fsum(probabilities.values())
    if any(not p >= 0 for p in probabilities.values()) or not abs(total - 1) <= 1e-9:
        raise InputError(
            f"The policy's probabilities sum to {total:.12g} over {len(probabilities)} commands (or one is negative); "
            f"expected a distribution."
        )
    return probabilities


def _check_merge(
    kept: Turn,
    turn: Turn,
    decide: Callable[[Turn], Mapping[str, float] | None],
) -> None:
    """States of one key must be one to the policy."""
    same = (kept.admissible, kept.won, kept.done) == (turn.admissible, turn.won, turn.done)
    if not same or decide(turn) != decide(kept):
        raise InputError(
            f"The key takes two states for one that differ in what is admissible, won or done, or to the policy: "
            f"{kept.observation[:60]!r} and {turn.observation[:60]!r}; use a finer key."
        )
