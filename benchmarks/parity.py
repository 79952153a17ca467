"""Is the compiled world the stock engine? Lock-step walks, character for character, and every game's walkthrough.

    python -m benchmarks.parity alfworld:valid_seen alfworld:valid_unseen           lock-step and walkthroughs
    python -m benchmarks.parity alfworld:train --walkthrough-only --jobs 2          walkthroughs alone
    python -m benchmarks.parity alfworld:valid_unseen --games 12 --steps 60 --json  a sample, one JSON line at the end

Exit code 1 if anything differs; every difference is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pool
from pathlib import Path

from envs import Environment, Game, Turn, games, make
from envs.alfworld.games import read_game
from envs.textworld import StockWorld

ACTING = ("take", "move", "put", "open", "close", "heat", "cool", "clean", "use", "slice", "examine")
NONSENSE = ("", "look ", "GO TO fridge 1", "go to nowhere 1", "put apple 1 in/on fridge 1", "take me home", "help me")


@dataclass
class Report:
    """What a comparison covered and where it differed."""

    game: str
    steps: int = 0
    verbs: Counter[str] = field(default_factory=Counter)
    difference: str | None = None


def difference(ours: Turn, theirs: Turn) -> str | None:
    """The first thing in which two turns differ, or None."""
    for name in ("observation", "admissible", "won", "done"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            return f"{name}: {a!r} instead of {b!r}"
    return None


def choose(rng: random.Random, turn: Turn, script: list[str]) -> str:
    """A command that leads everywhere: the walkthrough's next, something that acts, anything, or nonsense."""
    roll = rng.random()
    if roll < 0.35 and script:
        return script.pop(0)
    if roll < 0.42:
        return rng.choice(NONSENSE)
    acting = [command for command in turn.admissible if command.startswith(ACTING)]
    if roll < 0.80 and acting:
        return rng.choice(acting)
    return rng.choice(turn.admissible)


def lockstep(
    ours: Environment, theirs: Environment, walkthrough: Sequence[str], *, steps: int, seed: str, name: str = ""
) -> Report:
    """Walk both worlds with the same commands and compare every turn; stops at the first difference.

    The walkthrough is followed in pieces, and its last command kept for the end, so that the walk is long.
    """
    rng, report, script = random.Random(seed), Report(name), list(walkthrough[:-1])
    mine, stock = ours.reset(), theirs.reset()
    report.difference = difference(mine, stock)
    while report.difference is None and report.steps < steps and not stock.done:
        command = choose(rng, stock, script)
        if report.steps == steps - 1 and walkthrough:
            command = walkthrough[-1]
        mine, stock = ours.step(mine.state, command), theirs.step(stock.state, command)
        report.steps += 1
        report.verbs[command.split(" ", 1)[0] if stock.observation != "Nothing happens." else "(nothing happens)"] += 1
        found = difference(mine, stock)
        if found is not None:
            report.difference = f"step {report.steps}, after {command!r}: {found}"
    return report


def walkthrough_wins(env: Environment, walkthrough: Sequence[str]) -> str | None:
    """None if every command is admissible and the last one, and only it, wins; else what is wrong."""
    turn = env.reset()
    for i, command in enumerate(walkthrough):
        if turn.won:
            return f"won already before step {i}"
        if command not in turn.admissible:
            return f"step {i}: {command!r} is not admissible"
        turn = env.step(turn.state, command)
    return None if turn.won else "the walkthrough does not win"


def check(game: Game, steps: int) -> Report:
    """Walkthrough on the compiled world and, if steps > 0, lock-step with the stock engine."""
    env = make(game.address)
    walkthrough = read_game(game.address).walkthrough or ()
    report = Report(game.name)
    if steps:
        stock = StockWorld(Path(game.address))
        report = lockstep(env, stock, walkthrough, steps=steps, seed=game.id, name=game.name)
        stock.close()
    report.difference = report.difference or walkthrough_wins(env, walkthrough)
    return report


def _check(job: tuple[Game, int]) -> Report:
    return check(*job)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--games", type=int, default=0, help="at most this many of each set (spread over it)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--walkthrough-only", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen: list[Game] = []
    for spec in options.specs:
        found = games(spec)
        chosen += found[:: max(1, len(found) // options.games)][: options.games] if options.games else found
    jobs = [(game, 0 if options.walkthrough_only else options.steps) for game in chosen]
    verbs: Counter[str] = Counter()
    failed = steps = 0
    with Pool(options.jobs, maxtasksperchild=50) as pool:  # the stock engine keeps memory for every game
        for done, report in enumerate(pool.imap_unordered(_check, jobs), 1):
            steps += report.steps
            verbs += report.verbs
            if report.difference is not None:
                failed += 1
                print(f"DIFFERENT {report.game}: {report.difference}", flush=True)
            if done % 50 == 0:
                print(f"{done}/{len(jobs)} games, {failed} differ", file=sys.stderr, flush=True)
    print(f"{len(jobs)} games, {steps} steps in lock-step, {failed} games differ")
    print("steps by verb:", ", ".join(f"{verb} {n}" for verb, n in verbs.most_common()))
    if options.json:
        print(json.dumps({"games": len(jobs), "steps": steps, "differ": failed}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
