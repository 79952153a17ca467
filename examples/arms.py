"""Training arms of equal dose on generated games, about a minute: `python examples/arms.py`."""

from pathlib import Path

from audit.plan import load_plan
from audit.study import replay_study
from audit.summary import as_text
from audit.training import Rule, arms, contrast, match, seven, train, unmatched

run = replay_study("hasty", "generated:60:1", load_plan("quick"), Path("runs/arms-example"))
early = Rule("early", lambda points: 1.0 * (points["step"] < 5), "above", 0.5)  # a rule of one's own
found = arms(run, [*seven(), early])
trained = train(match(found, seeds=3), unmatched(found, seeds=3))
result = contrast(trained, "generated:60:2")
print(as_text(found.summary()), as_text(trained.summary()), sep="\n\n")
print(result.headline(), as_text(result.summary()), sep="\n\n")
result.plot().figure.savefig("runs/arms-example/forest.png", bbox_inches="tight")
