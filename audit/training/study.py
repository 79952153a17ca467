"""A study of arms from plan to verdict, in one or several rounds.

Knows: every setting of such a study, how its plan is locked, and what a round is: each checkpoint plays the training
games, its steps get credit, its arm's rule and its dose are applied to them, and training goes on from it. Hides: that
doses of rounds add up in one ledger. The replay that the first round's causal credit comes from has a plan of its own;
`replay_plan` pins it by hash.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

from audit.collect import collect, policy_id
from audit.plan import PlanFile, lock_path, setting
from audit.policies.linear import LinearPolicy
from audit.records import Trajectory, content_id, draws
from audit.results import Run
from audit.store import write_whole
from audit.study import replay_study
from audit.training.contrasts import Contrasts, contrast
from audit.training.dose import Across, Doses, Recipe, fold_of, match, unmatched
from audit.training.examples import Checkpoint, examples_of
from audit.training.levels import ArmLevels, arm_levels
from audit.training.outcomes import read_outcomes
from audit.training.rules import JUDGE, Arm, Arms, Rule, arms, seven
from audit.training.trainer import Key, Trained, Trainer, embedded, train
from envs import Game
from envs import games as find_games
from envs.core import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Progress = Callable[[str, int, int], None]
Credit = Callable[[LinearPolicy, Sequence[Trajectory], str], pd.DataFrame]
ADDED = (
    "trajectories", "examples", "left_out", "dropped", "no_credit", "unusable", "weight", "steps", "shown",
    "rate_integral",
)  # fmt: skip


ABOUT = ("alpha", "sesoi", "power", "given")  # of the contrasts, beside their tables


def _silent(stage: str, done: int, total: int) -> None:
    return None


def _above(low: float, high: float) -> dict[str, Any]:
    return {"check": lambda value: low < value <= high, "expected": f"above {low:g}, at most {high:g}"}


def _among(*names: str) -> dict[str, Any]:
    return {"check": lambda value: value in names, "expected": f"one of {', '.join(names)}"}


@dataclass(frozen=True, slots=True)
class ArmsPlan:
    """The one configuration of a study of arms."""

    name: str = setting("arms", "what the study is called")
    seed: int = setting(0, "of held-out rollouts and of later rounds' play", **_above(-1, 2**31))
    policy: str = setting("", "name of the policy that starts all arms; empty: any")
    train: str = setting("", "set of training games; empty: any")
    held_out: str = setting("", "set of held-out games; empty: any")
    replay_plan: str = setting("", "hash of the plan that the replay run must have; empty: any")
    share: float = setting(0.25, "share of the steps with credit that credit arms keep", **_above(0, 1))
    judge: str = setting(JUDGE, "column of the judge's credit: a signal that audit score RUN judge made")
    implicit: str = setting(
        "implicit.delta_success", "column of implicit credit: how much likelier success makes the step"
    )
    confidence: str = setting("logprob", "column of confidence; logprob is what the trajectory recorded")
    seeds: int = setting(5, "training seeds", **_above(0, 1000))
    across: str = setting(
        "seeds", "seeds share all training games (seeds) or have their own (folds)", **_among(*get_args(Across))
    )
    effective: float = setting(
        0.0, "effective sample size of matched arms; 0: the smallest arm's", **_above(-1e-9, 1e9)
    )
    epochs: float = setting(4.0, "passes over what an arm keeps, where steps does not say", **_above(0, 1e6))
    steps: int = setting(
        0, "optimiser steps of matched arms a round; 0: what the smallest arm takes", **_above(-1, 10**7)
    )
    batch: int = setting(16, "examples a step; 0: all", **_above(-1, 10**6))
    rate: float = setting(0.02, "learning rate", **_above(0, 1e3))
    optimiser: str = setting("adam", "adam or sgd", **_among("adam", "sgd"))
    schedule: str = setting("constant", "constant or linear (down to 0)", **_among("constant", "linear"))
    rounds: int = setting(1, "rounds of play, credit and training; the run is the first one's", **_above(0, 100))
    draws: int = setting(1, "rollouts of a checkpoint in each held-out game", **_above(0, 1000))
    budget: int = setting(50, "steps a held-out episode may take", **_above(0, 10_000))
    alpha: float = setting(0.05, "error rate of intervals, tests and Holm's family", **_above(0, 0.49))
    sesoi: float = setting(0.05, "smallest difference of interest; inside it arms are equivalent", **_above(0, 0.99))
    power: float = setting(0.8, "power at which minimum detectable effects are printed", **_above(0.49, 0.999))
    pairs: list[list[str]] = setting(
        [["outcome only", "random:outcome only"], ["judge", "random:judge"], ["implicit", "random:implicit"],
         ["confidence", "random:confidence"], ["causal", "random:causal"]],
        "the confirmatory family: an arm and what it is compared with, at matched dose; Holm over these",
        lambda value: bool(value) and all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(arm, str) for arm in pair) for pair in value
        ),
        "pairs of arms",
    )  # fmt: skip

    @property
    def hash(self) -> str:
        """Content hash of every setting."""
        return content_id("arms-plan", asdict(self))

    @classmethod
    def from_json(cls, data: dict[str, Any], where: str = "plan") -> ArmsPlan:
        """Check and build. Raises InputError naming the key, what was found and what is expected."""
        known = {part.name: part for part in fields(cls)}
        default = cls()
        for key, value in data.items():
            if key not in known:
                raise InputError(f"{where}: unknown key {key!r}; known: {', '.join(known)}.")
            standard = getattr(default, key)
            if isinstance(standard, float) and isinstance(value, int) and not isinstance(value, bool):
                value = data[key] = float(value)
            check, expected = known[key].metadata["check"], known[key].metadata["expected"]
            if type(value) is not type(standard) or (check is not None and not check(value)):
                raise InputError(f"{where}: {key} is {value!r}; expected {expected or type(standard).__name__}.")
        return cls(**data)

    def to_toml(self) -> str:
        """The plan as a commented TOML file."""
        lines = [f"# {ArmsPlan.__doc__}"]
        for part in fields(self):
            lines += ["", f"# {part.metadata['meaning']}", f"{part.name} = {json.dumps(getattr(self, part.name))}"]
        return "\n".join(lines) + "\n"

    def rules(self) -> tuple[Rule, ...]:
        """The seven arms at this plan's share and columns."""
        return seven(self.share, judge=self.judge, implicit=self.implicit, confidence=self.confidence)

    def recipe(self, dose: str) -> Recipe:
        """How arms are trained at a dose: the step budget is for matched ones."""
        return Recipe(
            epochs=self.epochs,
            steps=(self.steps or None) if dose == "matched" else None,
            batch=self.batch,
            rate=self.rate,
            optimiser="adam" if self.optimiser == "adam" else "sgd",
            schedule="linear" if self.schedule == "linear" else "constant",
        )

    def doses(self, found: Arms) -> tuple[Doses, Doses]:
        """Matched and unmatched doses of arms."""
        across: Across = "folds" if self.across == "folds" else "seeds"
        size = self.effective or None
        matched = match(found, self.recipe("matched"), seeds=self.seeds, effective_size=size, across=across)
        return matched, unmatched(found, self.recipe("unmatched"), seeds=self.seeds, across=across)


@dataclass(frozen=True, slots=True)
class ArmsPlanFile:
    """A plan with what its lock says. departed: what differs from the lock, as `key: locked -> now`."""

    plan: ArmsPlan
    locked: bool
    departed: tuple[str, ...]

    def judged_by(self, column: str) -> ArmsPlanFile:
        """The same with another column of the judge's credit, which departs from a lock."""
        was, now = json.dumps(self.plan.judge), json.dumps(column)
        changes = (f"judge: {was} -> {now}",) if self.locked and was != now else ()
        return ArmsPlanFile(replace(self.plan, judge=column), self.locked, (*self.departed, *changes))


def load_arms_plan(spec: str) -> ArmsPlanFile:
    """Open `default` or a TOML file, with the lock beside it. Raises InputError where it cannot be used."""
    if spec == "default":
        return ArmsPlanFile(ArmsPlan(), False, ())
    path = Path(spec)
    try:
        plan = ArmsPlan.from_json(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise InputError(f"{spec}: no such plan ({error.strerror}); expected default or a .toml file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{spec}: does not parse as TOML: {error}.") from None
    if not lock_path(path).exists():
        return ArmsPlanFile(plan, False, ())
    locked, now = asdict(_read_lock(lock_path(path))), asdict(plan)
    changes = [f"{key}: {json.dumps(locked[key])} -> {json.dumps(now[key])}" for key in now if now[key] != locked[key]]
    return ArmsPlanFile(plan, True, tuple(changes))


def lock_arms_plan(path: Path) -> Path:
    """Write a plan's content and hash beside it. Raises InputError if another content is locked already."""
    loaded = load_arms_plan(str(path))
    lock = lock_path(path)
    if loaded.departed:
        raise InputError(f"{lock}: locks another content ({', '.join(loaded.departed)}); change it under a new name.")
    write_whole(lock, json.dumps({"hash": loaded.plan.hash, "plan": asdict(loaded.plan)}, indent=1) + "\n")
    return lock


def _read_lock(lock: Path) -> ArmsPlan:
    try:
        data = json.loads(lock.read_text(encoding="utf-8"))
        plan, stated = ArmsPlan.from_json(data["plan"], str(lock)), data["hash"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{lock}: is damaged ({type(error).__name__}); restore it from version control.") from None
    if plan.hash != stated:
        raise InputError(f"{lock}: its content does not have the hash it states; restore it from version control.")
    return plan


# Running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArmsStudy:
    """A finished study. marks: what every output of it must say."""

    arms: Arms
    trained: Trained
    contrasts: Contrasts
    marks: tuple[str, ...]

    @property
    def levels(self) -> ArmLevels:
        """Each arm on its own, beside the untrained policy."""
        return arm_levels(self.contrasts, self.trained.to_frame())

    def save(self, folder: Path) -> None:
        """Write ledger, outcomes, levels and contrasts (CSV), what was decided before (JSON), and the figures (PNG):
        forest of contrasts, forest of arms, dose scatter."""
        from matplotlib.figure import Figure

        folder.mkdir(parents=True, exist_ok=True)
        tables = {
            "arms": self.arms.to_frame(),
            "ledger": self.trained.to_frame(),
            "levels": self.levels.to_frame(),
            "contrasts": self.contrasts.to_frame(),
            "outcomes": self.contrasts.outcomes,
        }
        for name, table in tables.items():
            table.to_csv(folder / f"{name}.csv", index=False)
        result = self.contrasts
        about = {key: getattr(result, key) for key in ABOUT} | {"marks": list(self.marks)}
        write_whole(folder / "study.json", json.dumps(about, indent=1) + "\n")
        plots = {"forest": self.contrasts.plot, "arms": self.levels.plot}
        if self.contrasts.dose is not None:
            plots["dose"] = self.contrasts.dose.plot
        for name, plot in plots.items():
            figure = Figure(figsize=(5.6, 4) if name == "dose" else (6.4, 4.4), layout="constrained")
            plot(figure.subplots())
            figure.savefig(folder / f"{name}.png", dpi=110)


def load_arms(folder: Path) -> tuple[Contrasts, ArmLevels, tuple[str, ...]]:
    """(contrasts, levels, marks) of a study that was saved, made again from its outcomes and its ledger.

    Raises InputError where the folder holds none, or one that was saved without its settings.
    """
    try:
        about = json.loads((folder / "study.json").read_text(encoding="utf-8"))
        table = pd.read_csv(folder / "contrasts.csv")
        ledger = pd.read_csv(folder / "ledger.csv")
        family = table[table["family"] == "confirmatory"]
        pairs = list(dict.fromkeys(zip(family["arm"].astype(str), family["against"].astype(str), strict=True)))
        alpha, sesoi, power = (float(about[key]) for key in ABOUT[:3])
        marks, given = tuple(map(str, about["marks"])), str(about["given"])
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise InputError(f"{folder}: holds no study of arms (no {missing}); audit arms --out writes one.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: is damaged ({type(error).__name__}); audit arms --out writes it again.") from None
    outcomes = read_outcomes(folder / "outcomes.csv")
    result = contrast(outcomes, pairs=pairs, ledger=ledger, alpha=alpha, sesoi=sesoi, power=power)
    return replace(result, given=given), arm_levels(result, ledger), marks


def arms_study(
    run: Run,
    plan: ArmsPlanFile,
    held_out: str | Sequence[Game],
    *,
    env: str | None = None,
    policy: Checkpoint | None = None,
    trainer: Trainer = embedded,
    signals: pd.DataFrame | None = None,
    credit: Credit | None = None,
    progress: Progress = _silent,
) -> ArmsStudy:
    """Arms of a run, trained matched and unmatched, in the plan's rounds, and compared on held-out games.

    env, policy: the run's games and linear policy, where they are not what the run says; or policy, trainer: a language
    model's file and a `LanguageTrainer`, for a plan of one round. signals: credit by point, for
    the first round. credit: credit of later rounds (policy, its trajectories, column -> a frame with `point` and that
    column); default: `scored_again`.
    Raises InputError where training games and held-out games overlap, or a round's arm has less than its dose.
    """
    settings = plan.plan
    tests = find_games(held_out) if isinstance(held_out, str) else list(held_out)
    trained_on = set(run.trajectories["game"])
    if trained_on & {game.id for game in tests}:
        raise InputError("Held-out games are among the training games; name another set.")
    if isinstance(policy, Path) and settings.rounds > 1:
        raise InputError("A language model's arms have one round; replay a trained policy and train on from that run.")
    found = arms(run, settings.rules(), signals=signals, env=env, policy=policy)
    pairs = [(a, b) for a, b in settings.pairs if a in found.by_name and b in found.by_name]
    if not pairs:
        raise InputError("None of the plan's pairs can be compared: their arms are absent (no credit).")
    trained = train(*settings.doses(found), trainer=trainer, progress=progress)
    spec = env or str(run.directory.manifest["env"])
    players = [game for game in find_games(spec) if game.id in trained_on]
    common = _Setting(found, settings, run, players, spec, credit or scored_again(run, spec))
    for number in range(2, settings.rounds + 1):
        trained = _round(number, trained, common, progress)
    result = contrast(
        trained, tests, pairs=pairs, n=settings.draws, budget=settings.budget, alpha=settings.alpha,
        sesoi=settings.sesoi, power=settings.power, seed=settings.seed, progress=progress,
    )  # fmt: skip
    manifest = run.directory.manifest
    pinned = {
        "policy": manifest["policy"].get("name", ""),
        "train": manifest["env"],
        "held_out": held_out if isinstance(held_out, str) else "games given one by one",
        "replay_plan": run.plan.hash,
    }
    departed = [*plan.departed]
    departed += [
        f"{key}: {getattr(settings, key)} -> {now}"
        for key, now in pinned.items()
        if getattr(settings, key) not in ("", now)
    ]
    surrogate = ["arms learn from what another policy played"] if found.examples.surrogate() else []
    marks = [*run.marks, *surrogate, *(f"departs from the plan: {change}" for change in departed)]
    marks += [f"arm {name} is absent: {why}" for name, why in found.absent.items()]
    return ArmsStudy(found, trained, result, tuple(marks))


@dataclass(frozen=True, slots=True)
class _Setting:
    """What rounds have in common. games: of the training set that were played. env: the set."""

    first: Arms
    plan: ArmsPlan
    run: Run
    games: Sequence[Game]
    env: str
    credit: Credit


def _round(number: int, before: Trained, study: _Setting, progress: Progress) -> Trained:
    """One more round for every checkpoint that has a dose; matched doses are those of the round before, again."""
    plan, first = study.plan, study.first
    rules = {rule.name: rule for rule in plan.rules()}
    folds = fold_of((game.id for game in study.games), plan.seeds) if plan.across == "folds" else None
    checkpoints: dict[Key, Checkpoint] = dict(before.checkpoints)
    rows = []
    for done, row in enumerate(_records(before.ledger)):
        key: Key = (row["dose"], row["arm"], row["seed"])
        progress(f"round {number}", done, len(checkpoints))
        if row["steps"]:
            arm = first.by_name[row["arm"]]
            games = [game for game in study.games if folds is None or folds[game.id] == row["seed"]]
            stream = draws(1, "round", plan.seed, number, row["seed"])[0] >> 1
            n = len(study.run.trajectories) // (plan.seeds if folds else 1)
            policy = checkpoints[key]
            assert isinstance(policy, LinearPolicy)  # `arms_study` refuses more rounds for others
            played = list(collect(policy, games, max(1, n), budget=study.run.plan.estimand.budget, seed=stream))
            one = _again(arm, rules, played, policy, study, number)
            doses = match(
                one,
                replace(
                    plan.recipe(row["dose"]), steps=row["steps"] // (number - 1) if row["dose"] == "matched" else None
                ),
                seeds=[row["seed"] + number * 1_000_000],
                by=("subsample", "steps") if row["dose"] == "matched" else (),
                effective_size=row["effective"] / (number - 1) if row["dose"] == "matched" else None,
                dose=row["dose"],
            )
            step = train(doses, start=policy)
            checkpoints[key] = next(iter(step.checkpoints.values()))
            row = _sum(row, _records(step.ledger)[0])
            row["displacement"] = _distance(first.examples.start, checkpoints[key])
        rows.append(row)
    return Trained(checkpoints, pd.DataFrame(rows), before.controls, before.given)


def _again(
    arm: Arm, rules: dict[str, Rule], played: Sequence[Trajectory], policy: LinearPolicy, study: _Setting, number: int
) -> Arms:
    """The arm on what its checkpoint played."""
    rule = rules[arm.control_of or arm.name]
    examples = examples_of(played, env=study.games, policy=policy, identity=policy_id(policy))
    built_in = not isinstance(rule.credit, str) or rule.credit in examples.points.columns
    signals = None if built_in else study.credit(policy, played, str(rule.credit))
    found = arms(examples, [rule], signals=signals, controls=arm.control_of is not None)
    if arm.name not in found.by_name:
        why = found.absent.get(rule.name, "it keeps all of its candidates alike")
        raise InputError(f"Round {number}: arm {arm.name} cannot be made from what it played ({why}).")
    return Arms(found.examples, {arm.name: found.by_name[arm.name]}, {})


def _sum(before: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
    """Doses of rounds together; effective sample size by its sums of weights (n) and squares (n^2 / effective)."""
    squares = sum(row["examples"] ** 2 / row["effective"] for row in (before, step))
    total = {**before, **{column: before[column] + step[column] for column in ADDED}}
    if before["tokens"] is not None and step["tokens"] is not None:
        total["tokens"] = before["tokens"] + step["tokens"]
    return {**total, "effective": total["examples"] ** 2 / squares, "loss_after": step["loss_after"]}


def _records(ledger: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(column): value for column, value in row.items()} for row in ledger.to_dict("records")]


def _distance(start: Checkpoint | None, end: Checkpoint) -> float:
    assert isinstance(start, LinearPolicy) and isinstance(end, LinearPolicy)
    a, b = start.weights()["weight"], end.weights()["weight"]
    return float(np.linalg.norm(b - a.reindex(b.index).fillna(0.0)))


def scored_again(run: Run, env: str) -> Credit:
    """Credit of later rounds by the run's own means: `tau` by replaying under its plan, other columns as signals that
    need no server, by their names."""

    def credit(policy: LinearPolicy, played: Sequence[Trajectory], column: str) -> pd.DataFrame:
        if column != "tau":
            from audit.scoring import Source, score

            source = Source(tuple(played), policy.describe(), policy_id(policy), env)
            return score(source, [column], policy=policy, env=env).frame
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint.json"
            policy.save(path)
            replayed = replay_study(
                str(path), env, PlanFile(run.plan, False, ()), Path(folder) / "run", trajectories=played
            )
            effects = replayed.effects
            return effects[["point"]].assign(tau=effects["estimate"].where(effects["support"] == "defined"))

    return credit
