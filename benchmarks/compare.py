"""The comparison layer beside a plain loop over scipy.stats.spearmanr.

    python -m benchmarks.compare --json

The job: the median over trajectories of Spearman's correlation, of every signal, in every bootstrap resample of
games. loop_ratio: seconds of the plain loop (resample the games, call spearmanr for each trajectory and signal) over
ours for that same job. The loop is timed on `loop_draws` resamples with all signals and multiplied up, since whole it
takes hours; its results are checked to equal ours. reuse_ratio: the same against a cleverer loop that calls
spearmanr once a trajectory and signal, and takes medians in Python for each resample. whole_s: everything that
`compare` does (12 measures, shuffles, both controls, intervals).
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from audit.comparison import compare
from audit.comparison.frames import Joined, join
from audit.comparison.ranks import by_trajectory
from audit.comparison.resample import cluster_counts, median_draws

clock = time.perf_counter


def made(points: int, signals: int, games: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A study of equally long trajectories, one a game."""
    rng = np.random.default_rng(0)
    per = points // games
    n = per * games
    game = np.repeat(np.arange(games), per)
    wins = rng.binomial(24, rng.uniform(0.2, 0.8, (2, n)))
    frame = pd.DataFrame(
        {
            "point": [f"p{i}" for i in range(n)],
            "trajectory": [f"t{g}" for g in game],
            "game": [f"g{g}" for g in game],
            "step": np.tile(np.arange(per), games),
            "support": "defined",
            "state": np.where(rng.random(n) < 0.2, "pivotal", "inconclusive"),
            "estimate": (wins[0] - wins[1]) / 24,
            "variance": sum(w / 24 * (1 - w / 24) / 23 for w in wins),
            "pi": rng.uniform(0.05, 0.95, n),
        }
    )
    columns = {f"signal{s}": frame["estimate"] * s / signals + 0.3 * rng.standard_normal(n) for s in range(signals)}
    return frame, pd.DataFrame({"point": frame["point"], **columns})


def loop(joined: Joined, counts: Any) -> Any:
    """(draws, signals) the plain way."""
    members = [np.flatnonzero(joined.home == game) for game in range(len(joined.games))]
    found = []
    for row in counts:
        drawn = [t for game, n in enumerate(row.tolist()) for _ in range(n) for t in members[game].tolist()]
        found.append(
            [
                np.median(
                    [
                        stats.spearmanr(joined.values[joined.groups[t], s], joined.tau[joined.groups[t]]).statistic
                        for t in drawn
                    ]
                )
                for s in range(joined.values.shape[1])
            ]
        )
    return np.array(found)


def reuse(joined: Joined, counts: Any) -> Any:
    """(draws, signals) with each correlation computed once."""
    values = np.array(
        [
            [stats.spearmanr(joined.values[rows, s], joined.tau[rows]).statistic for s in range(joined.values.shape[1])]
            for rows in joined.groups
        ]
    )
    return np.array([np.median(values[np.repeat(np.arange(len(values)), row[joined.home])], axis=0) for row in counts])


def ours(joined: Joined, counts: Any) -> Any:
    """(draws, signals) as `audit.comparison` does it."""
    values = by_trajectory(joined.values, joined.tau, joined.groups)
    return np.column_stack([median_draws(column, joined.home, counts) for column in values.T])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--signals", type=int, default=20)
    parser.add_argument("--games", type=int, default=50)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--loop-draws", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    effects, signals = made(asked.points, asked.signals, asked.games)
    joined = join(effects, signals)
    counts = cluster_counts(len(joined.games), asked.draws, 0)
    started = clock()
    mine = ours(joined, counts)
    seconds = clock() - started
    started = clock()
    plain = loop(joined, counts[: asked.loop_draws])
    looped = (clock() - started) / asked.loop_draws * asked.draws
    started = clock()
    clever = reuse(joined, counts)
    reused = clock() - started
    assert np.allclose(plain, mine[: asked.loop_draws]) and np.allclose(clever, mine)
    started = clock()
    compare(effects, signals, draws=asked.draws)
    whole = clock() - started
    result = {
        "points": len(joined.tau),
        "signals": asked.signals,
        "games": len(joined.games),
        "draws": asked.draws,
        "ours_s": round(seconds, 3),
        "loop_s_extrapolated": round(looped, 1),
        "loop_draws": asked.loop_draws,
        "loop_ratio": round(looped / seconds, 1),
        "loop_ratio_of_whole": round(looped / whole, 1),
        "reuse_s": round(reused, 2),
        "reuse_ratio": round(reused / seconds, 1),
        "whole_s": round(whole, 2),
    }
    print(json.dumps(result) if asked.json else "\n".join(f"{key:<22} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
