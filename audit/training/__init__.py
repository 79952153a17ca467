"""Dose-matched training: arms from credit, a ledger of dose, trainers (embedded, language models), contrasts.

Knows: nothing itself; it gathers what a script needs. Sparse credit keeps fewer examples, so that arms differ in how
much they are trained before they differ in what on; here doses are equal unless unequal ones are asked for.

    from audit.training import arms, contrast, match, train, unmatched

    found = arms(run, signals=signals)
    trained = train(match(found), unmatched(found))
    print(contrast(trained, "alfworld:valid_unseen").summary())

A language model learns what it is shown of any run: `arms(run, policy=Path("model.toml"))`, then
`train(match(found, Recipe(rate=2e-4)), trainer=LanguageTrainer(folder))`.
"""

from audit.training.contrasts import Contrasts, contrast
from audit.training.dose import Doses, Recipe, match, unmatched
from audit.training.examples import Examples, examples_of, examples_of_run
from audit.training.language import LanguageTrainer
from audit.training.levels import ArmLevels, arm_levels
from audit.training.outcomes import export, play, read_outcomes
from audit.training.response import DoseResponse, dose_response
from audit.training.rules import Arms, Rule, arms, seven
from audit.training.trainer import Trained, train

__all__ = [
    "ArmLevels",
    "Arms",
    "Contrasts",
    "DoseResponse",
    "Doses",
    "Examples",
    "LanguageTrainer",
    "Recipe",
    "Rule",
    "Trained",
    "arm_levels",
    "arms",
    "contrast",
    "dose_response",
    "examples_of",
    "examples_of_run",
    "export",
    "match",
    "play",
    "read_outcomes",
    "seven",
    "train",
    "unmatched",
]
