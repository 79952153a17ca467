"""Training arms of equal dose on generated games, about a minute: `python examples/arms.py`.

With a language model's file, a few arms of its adapter (extra [train], some minutes on two cores):
`python examples/arms.py examples/policies/smollm2-early-sample.toml`.
"""

import sys
from pathlib import Path

from audit.plan import load_plan
from audit.study import replay_study
from audit.summary import as_text
from audit.training import LanguageTrainer, Recipe, Rule, arms, contrast, match, seven, train, unmatched

folder = Path("runs/arms-example")
run = replay_study("hasty", "generated:60:1", load_plan("quick"), folder)
if len(sys.argv) > 1:
    found = arms(run, [seven()[0], seven()[-1]], policy=Path(sys.argv[1]))  # untrained, causal, random:causal
    doses = match(found, Recipe(rate=2e-4, batch=2, steps=10), seeds=2)
    trained = train(doses, trainer=LanguageTrainer(folder / "checkpoints"))
    result = contrast(trained, "generated:4:2", budget=20)
else:
    early = Rule("early", lambda points: 1.0 * (points["step"] < 5), "above", 0.5)  # a rule of one's own
    found = arms(run, [*seven(), early])
    trained = train(match(found, seeds=3), unmatched(found, seeds=3))
    result = contrast(trained, "generated:60:2")
print(as_text(found.summary()), as_text(trained.summary()), sep="\n\n")
print(result.headline(), as_text(result.summary()), sep="\n\n")
result.plot().figure.savefig(folder / "forest.png", bbox_inches="tight")
