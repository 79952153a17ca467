"""The compiled world beside the stock engine, in one run, on the same games and the same commands.

    python -m benchmarks.world alfworld:valid_unseen --games 6            (make bench; official games if they are here)
    python -m benchmarks.world generated:12:0 --games 6 --json            (anywhere)

Ratios are stock time over compiled time; absolute times depend on the machine and are shown for orientation only.
cold: steps into states never seen before, from a world that knows nothing yet. warm: the same walk again.
restore: coming back to a state at depth 10. load: opening a game whose translation is cached, against the stock
engine's load and reset. Memory: resident memory that games and states add.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import statistics
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from envs import Game, Turn, games
from envs.alfworld.games import compiled, open_game, read_game
from envs.alfworld.world import AlfredWorld
from envs.textworld import StockWorld

DEPTH = 10
clock = time.perf_counter


@dataclass
class Times:
    """Seconds of one game, for each thing measured."""

    stock_load: float
    stock_step: float
    stock_restore: float
    load: float
    cold_step: float
    first_walk: float
    warm_step: float
    restore: float
    new_states: int


def walk(world: AlfredWorld, steps: int, seed: int) -> tuple[list[str], list[int], float, int]:
    """A random walk: its commands, its states, seconds spent stepping into new states, and how many those were."""
    rng, turn = random.Random(seed), world.reset()
    seen, spent, new = {turn.state}, 0.0, 0
    commands, states = [], [turn.state]
    for _ in range(steps):
        command = choose(rng, turn)
        started = clock()
        turn = world.step(turn.state, command)
        taken = clock() - started
        if turn.state not in seen:
            seen.add(turn.state)
            spent, new = spent + taken, new + 1
        if turn.done:
            turn = world.reset()
        commands.append(command)
        states.append(turn.state)
    return commands, states, spent, new  # type: ignore[return-value]


def choose(rng: random.Random, turn: Turn) -> str:
    """Half of the time something other than going elsewhere, so that walks change the world."""
    acting = [command for command in turn.admissible if not command.startswith("go to ")]
    return rng.choice(acting) if rng.random() < 0.5 else rng.choice(turn.admissible)


def measure(game: Game, *, stock_steps: int, steps: int) -> Times:
    """All times of one game. The stock engine walks the beginning of the same walk."""
    path = Path(game.address)
    compiled(read_game(path))  # in the cache from here on
    loads = []
    for _ in range(5):
        started = clock()
        world = open_game(path)
        world.reset()
        loads.append(clock() - started)
    commands, states, cold, new = walk(world, steps, seed=1)
    short = open_game(path)
    _, _, first, first_new = walk(short, stock_steps, seed=1)
    warm = []
    for _ in range(3):
        turn = world.reset()
        started = clock()
        for command in commands[:2000]:
            turn = world.step(turn.state, command)
        warm.append((clock() - started) / min(len(commands), 2000))
    deep = states[DEPTH]
    started = clock()
    for _ in range(10_000):
        world.restore(deep)
    restore = (clock() - started) / 10_000

    stock = StockWorld(path)
    started = clock()
    theirs = stock.reset()
    stock_load = clock() - started
    started = clock()
    played = 0
    for command in commands[:stock_steps]:
        if theirs.done:
            break
        theirs, played = stock.step(theirs.state, command), played + 1
    stock_step = (clock() - started) / played
    at_depth = theirs.state[:DEPTH]
    started = clock()
    stock.restore(at_depth)
    stock_restore = clock() - started
    stock.close()
    return Times(
        stock_load, stock_step, stock_restore, statistics.median(loads), cold / new, first / max(first_new, 1),
        statistics.median(warm), restore, new,
    )  # fmt: skip


def memory(found: list[Game], states: int) -> tuple[float, float]:
    """MB that a loaded game adds (mean over the games), and MB for 10^5 distinct states of one game."""
    gc.collect()
    before = _now()
    worlds = [open_game(game.address) for game in found]
    for world in worlds:
        world.reset()
    gc.collect()
    a_game = (_now() - before) / len(worlds)
    world = open_game(found[-1].address)
    rng, turn, known = random.Random(0), world.reset(), set()
    gc.collect()
    before = _now()
    while len(known) < states:
        turn = world.step(turn.state, choose(rng, turn))
        known.add(turn.state)
        if turn.done or rng.random() < 0.01:
            turn = world.reset()
    gc.collect()
    return a_game, (_now() - before) * 100_000 / states


def _now() -> float:
    """Resident memory in MB at this moment (Linux), else the peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="?", default="alfworld:valid_unseen")
    parser.add_argument("--games", type=int, default=6, help="how many, spread over the set")
    parser.add_argument("--stock-steps", type=int, default=25)
    parser.add_argument("--steps", type=int, default=4000, help="length of the cold walk")
    parser.add_argument("--states", type=int, default=100_000, help="distinct states of the memory measurement")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = games(options.spec)
    found = found[:: max(1, len(found) // options.games)][: options.games]
    times = [measure(game, stock_steps=options.stock_steps, steps=options.steps) for game in found]
    with get_context("spawn").Pool(1) as fresh:  # a process of its own, whose memory nothing else has grown
        a_game, states = fresh.apply(memory, (found, options.states))

    def ratio(stock: str, ours: str) -> float:
        return statistics.median(getattr(t, stock) / getattr(t, ours) for t in times)

    def typical(name: str) -> float:
        return statistics.median(getattr(t, name) for t in times)

    figures = {
        "cold_ratio": ratio("stock_step", "cold_step"),
        "first_steps_ratio": ratio("stock_step", "first_walk"),
        "warm_ratio": ratio("stock_step", "warm_step"),
        "restore_ratio": ratio("stock_restore", "restore"),
        "load_ratio": ratio("stock_load", "load"),
        "mb_per_game": a_game,
        "mb_per_100k_states": states,
    }
    new = f"{typical('new_states'):.0f} new states each"
    print(f"{options.spec}: {len(found)} games, walks of {options.steps} steps, {new}")
    print(f"{'':<34}{'stock':>12}{'compiled':>12}{'ratio':>12}")
    for label, stock, ours, name in (
        ("step into a new state", "stock_step", "cold_step", "cold_ratio"),
        (f"  the first {options.stock_steps} steps of a game", "stock_step", "first_walk", "first_steps_ratio"),
        ("step seen before", "stock_step", "warm_step", "warm_ratio"),
        (f"restore at depth {DEPTH}", "stock_restore", "restore", "restore_ratio"),
        ("load (cached) and reset", "stock_load", "load", "load_ratio"),
    ):
        print(f"{label:<34}{typical(stock) * 1e3:>9.2f} ms{typical(ours) * 1e6:>9.2f} us{figures[name]:>12,.0f}")
    print(f"memory: {a_game:.2f} MB a loaded game, {states:.0f} MB for 100,000 distinct states")
    if options.json:
        print(json.dumps({key: round(value, 3) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
