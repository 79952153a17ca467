"""Planted worlds: where dose alone matters, only unmatched contrasts differ; where content matters, matched ones do."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from audit.training import Recipe, Rule, arms, contrast, match, train, unmatched
from audit.training.contrasts import Contrasts
from tests.training.planted import examples, held_out

RECIPE = Recipe(epochs=4, batch=8, rate=0.1)


def rejections(frame: pd.DataFrame, dose: str) -> int:
    return int((frame.loc[frame["dose"] == dose, "p"] <= 0.05).sum())


def most(n: int, p: float) -> int:
    """The most successes of n that probability p explains (one-sided .001)."""
    return int(stats.binom.ppf(0.999, n, p))


@pytest.mark.slow
def test_where_dose_alone_matters_unmatched_arms_differ_and_matched_ones_do_not() -> None:
    studies = 60
    found = []
    for seed in range(studies):
        world = examples(seed, games=100)
        made = arms(world, [Rule("all steps"), Rule("noise", "credit", "top", 0.1)], controls=False)
        trained = train(match(made, RECIPE, across="folds"), unmatched(made, RECIPE, across="folds"))
        outcomes = held_out(trained, seed)
        study = contrast(outcomes, pairs=[("all steps", "noise")], ledger=trained.ledger, resamples=20)
        found.append(study.frame.query("arm == 'all steps'"))
    frame = pd.concat(found)
    assert rejections(frame, "unmatched") >= 0.9 * studies
    assert (frame.query("dose == 'unmatched'")["estimate"] > 0).mean() >= 0.9
    assert rejections(frame, "matched") <= most(studies, 0.05)
    # Unbiased too: the mean of the matched differences is 0 to within its error.
    matched = frame.query("dose == 'matched'")["estimate"]
    assert abs(matched.mean()) < 4 * matched.std() / np.sqrt(studies)


@pytest.mark.slow
def test_where_content_matters_matched_arms_find_it_with_the_stated_power() -> None:
    studies = 60
    judged: list[Contrasts] = []
    for seed in range(studies):
        world = examples(seed, games=100, wrong=0.5, noise=1.0)
        made = arms(world, [Rule("credit", "credit", "top", 0.25)])
        judged.append(contrast(held_out(train(match(made, RECIPE, across="folds")), seed), resamples=20))
    pairs = [study._paired[0] for study in judged]
    effect = float(np.mean([one.estimate for one in pairs]))
    stated = float(np.mean([stats.nct.sf(stats.t.ppf(0.975, one.df), one.df, effect / one.se) for one in pairs]))
    found = float(np.mean([one.p <= 0.05 for one in pairs]))
    assert 0.5 < stated < 0.95  # neither too easy nor too hard to tell
    assert abs(found - stated) < 3.3 * np.sqrt(stated * (1 - stated) / studies)
    # The printed minimum detectable effect is the effect at which that power is .8.
    detectable = float(np.mean([study.frame["mde"][0] for study in judged]))
    assert (effect >= detectable) == (stated >= 0.8) or abs(stated - 0.8) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "tasks", "between_seeds"), [(2, 60, 0.8), (3, 60, 0.0), (3, 60, 0.8), (6, 100, 0.4)])
def test_the_interval_covers_over_seeds_and_tasks(seeds: int, tasks: int, between_seeds: float) -> None:
    """Binary outcomes, arms equal on average; seeds and tasks shift their difference at random."""
    from audit.training.contrasts import paired

    studies = 1000
    rng = np.random.default_rng(5)
    task = rng.normal(0, 1.5, (studies, 1, tasks))
    by_task = rng.normal(0, 0.5, (studies, 1, tasks))
    shift = rng.normal(0, between_seeds, (2, studies, seeds, 1))
    a = rng.random((studies, seeds, tasks)) < 1 / (1 + np.exp(-(task + by_task + shift[0])))
    b = rng.random((studies, seeds, tasks)) < 1 / (1 + np.exp(-(task - by_task + shift[1])))
    misses = 0
    for d in a.astype(float) - b:
        low, high = paired(d).interval(0.05)
        misses += not low <= 0 <= high
    assert misses <= most(studies, 0.06)
