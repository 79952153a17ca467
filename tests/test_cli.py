"""The command line as a user meets it: examples in help, exit codes, one clear sentence for bad input."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from audit.cli import main


def audit(*arguments: str, text: str = "") -> Result:
    return CliRunner().invoke(main, list(arguments), input=text, catch_exceptions=False)


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name, command in group.commands.items():
        found += commands(command, (*path, name)) if isinstance(command, click.Group) else [((*path, name), command)]
    return found


@pytest.mark.parametrize("path", [path for path, _ in commands(main)], ids=" ".join)
def test_every_command_has_an_example(path: tuple[str, ...]) -> None:
    answer = audit(*path, "--help")
    assert answer.exit_code == 0
    assert f"audit {' '.join(path)}" in answer.output.split("Example", 1)[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["games", "list", "nowhere"], "no such folder"),
        (["games", "list", "alfworld:test"], "unknown split"),
        (["games", "play", "tabular:none"], "tabular"),
        (["games", "play", "tabular:chain", "--walkthrough"], "walkthrough"),
        (["replay", "nobody", "--env", "generated:1:0", "--out", "x"], "no such policy"),
        (["replay", "hasty", "--env", "generated:x", "--out", "x"], "expected generated"),
        (["replay", "hasty", "--env", "generated:1:0", "--plan", "none.toml", "--out", "x"], "no such plan"),
        (["collect", "scripted:none.json", "--env", "generated:1:0", "--out", "x"], "none.json"),
        (["show", "nowhere"], "holds no run"),
        (["plan", "check", "none.toml"], "no such plan"),
        (["plan", "lock", "none.toml"], "no such plan"),
        (["plan", "new", "x.toml", "--preset", "none"], "no such preset"),
        (["import", "none.jsonl", "--env", "generated:1:0", "--out", "x"], "none.jsonl"),
        (["train", "--out", "x.pkl"], "saved as .json"),
        (["plan", "cost", "quick", "--policy", "m.toml", "--env", "generated:1:0"], "--dry-run"),
        (["score", "nowhere"], "holds no run"),
        (["compare", "nowhere"], "holds no run"),
        (["export", "nowhere", "--benchmark", "x.jsonl.gz"], "holds no run"),
        (["league", "none.jsonl.gz", "none.csv"], "none.jsonl.gz"),
        (["doctor", "--server", "http://127.0.0.1:9/v1"], "--model"),
        (["doctor", "--server", "http://127.0.0.1:9/v1", "--model", "m"], "127.0.0.1:9"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = audit(*arguments)
    assert answer.exit_code == 2
    assert says in answer.stderr
    assert answer.stderr.startswith("audit: ") and answer.stderr.count("\n") == 1
    assert not list(tmp_path.glob("x*"))


def test_play_with_undo_and_restore() -> None:
    answer = audit(
        "games", "play", "tabular:chain:2", text="go right\n:undo\n:restore 7\n:list\n:what\nfly\ngo right\ngo right\n"
    )
    assert answer.exit_code == 0
    assert "(back at turn 0)" in answer.output
    assert "There is no such turn" in answer.output
    assert "  go right" in answer.output
    assert answer.output.rstrip().endswith("You won.")
    assert audit("games", "play", "tabular:chain:2", text="go right\n").exit_code == 1  # end of input: not won


def test_doctor_finds_what_is_here() -> None:
    answer = audit("doctor")
    assert answer.exit_code == 0, answer.output
    assert "self-check" in answer.output and "won by its walkthrough" in answer.output


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from audit import doctor

    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "alfworld" else "0.0")
    answer = audit("doctor")
    assert answer.exit_code == 1
    assert "FAIL  alfworld" in answer.output and "pip install" in answer.output
    assert "warn  textworld" in answer.output and "exactness was shown with 1.7.0" in answer.output
    assert str(tmp_path) in answer.output


def test_untested_versions_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap AgentGym #41: success collapsed with another version."""
    from audit import doctor

    monkeypatch.setattr(doctor, "installed", lambda name: "9.9")
    with pytest.warns(UserWarning, match=r"textworld 9\.9 is installed; exactness was shown with 1\.7\.0"):
        doctor.warn_of_untested_versions()


def test_a_study_from_plan_to_timeline(tmp_path: Path) -> None:
    plan, run = tmp_path / "study.toml", tmp_path / "run"
    assert audit("plan", "new", str(plan), "--preset", "quick").exit_code == 0
    text = plan.read_text().replace("trajectories = 12", "trajectories = 3")
    plan.write_text(text.replace("rounds = [8, 16, 32]", "rounds = [4, 8]"))
    assert "locked" in audit("plan", "check", str(plan)).output
    assert audit("plan", "lock", str(plan)).exit_code == 0
    cost = audit("plan", "cost", str(plan), "--policy", "hasty", "--env", "generated:6:0")
    assert "minimum detectable effect" in cost.output and "3" in cost.output.split("\n")[0]
    done = audit("replay", "hasty", "--env", "generated:6:0", "--plan", str(plan), "--out", str(run))
    assert done.exit_code == 0, done.stderr
    for figure in ("coverage: defined", "nonzero share", "with no effect anywhere", "pivotal share", "(locked)"):
        assert figure in done.output
    assert audit("show", str(run)).stdout == done.stdout
    again = audit("replay", "hasty", "--env", "generated:6:0", "--plan", str(plan), "--out", str(run))
    assert again.stdout == done.stdout
    import audit as package

    loaded = package.load(run)
    trajectory = loaded.trajectories["trajectory"][0]
    timeline = audit("show", str(run), trajectory[:10])
    assert timeline.exit_code == 0
    assert timeline.output.count("\n") >= 2 + loaded.trajectories["steps"][0]
    assert audit("show", str(run), "zzz").exit_code == 2
    assert "action_type" in audit("show", str(run), "--by", "action_type").output
    # A run that departs from its locked plan says so in every output.
    plan.write_text(plan.read_text().replace("sesoi = 0.2", "sesoi = 0.3"))
    assert audit("plan", "check", str(plan)).exit_code == 1
    departed = audit("replay", "hasty", "--env", "generated:6:0", "--plan", str(plan), "--out", str(tmp_path / "other"))
    assert "!! departs from the locked plan: decisions.sesoi: 0.2 -> 0.3" in departed.output
    assert "!! departs" in audit("show", str(tmp_path / "other")).output
    refused = audit("replay", "thorough", "--env", "generated:6:0", "--plan", str(plan), "--out", str(run))
    assert refused.exit_code == 2 and "another run" in refused.stderr


def test_a_surrogate_policy_is_marked_in_every_output(tmp_path: Path) -> None:
    log, run = tmp_path / "log.jsonl", tmp_path / "run"
    assert audit("collect", "hasty", "--env", "generated:6:0", "--n", "1", "--out", str(log)).exit_code == 0
    plan = tmp_path / "tiny.toml"
    plan.write_text("[rollouts]\nrounds = [2]\nadaptive = false\n[points]\nper_trajectory = 2\n")
    done = audit(
        "replay", "random", "--trajectories", str(log), "--env", "generated:6:0", "--plan", str(plan), "--out", str(run)
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "!! surrogate policy" in done.output
    assert "!! surrogate policy" in audit("show", str(run)).output


def test_from_a_run_to_a_league_of_signals(tmp_path: Path) -> None:
    """Score, compare, export, league: a new signal is ten lines in a user's file, and nothing is replayed."""
    plan, run = tmp_path / "tiny.toml", tmp_path / "run"
    plan.write_text("[rollouts]\nrounds = [8]\nadaptive = false\n[collection]\ntrajectories = 6\n")
    assert audit("replay", "hasty", "--env", "generated:6:0", "--plan", str(plan), "--out", str(run)).exit_code == 0
    mine = tmp_path / "my.py"
    mine.write_text(
        "class Novelty:\n"
        "    name = 'novelty'\n"
        "    view = 'prefix'\n"
        "    def score(self, points):\n"
        "        return [1.0 / (1 + point.commands.count(point.action)) for point in points]\n"
    )
    scored = audit("score", str(run), "confidence", "baseline.step", "--signal", f"{mine}:Novelty")
    assert scored.exit_code == 0, scored.stderr
    assert "novelty" in scored.stdout and "confidence.logp" in scored.stdout
    compared = audit("compare", str(run), "--csv", str(tmp_path / "all.csv"))
    assert compared.exit_code == 0, compared.stderr
    for signal in ("control.oracle", "control.permuted", "novelty"):
        assert signal in compared.stdout
    assert (tmp_path / "all.csv").read_text().count("novelty") > 3
    benchmark = tmp_path / "bench.jsonl.gz"
    assert audit("export", str(run), "--benchmark", str(benchmark)).exit_code == 0
    from audit.results import load

    signals = tmp_path / "mine.csv"
    load(run).effects[["point", "step"]].rename(columns={"step": "late"}).to_csv(signals, index=False)
    ranked = audit("league", str(benchmark), str(signals), "--split", "all")
    assert ranked.exit_code == 0, ranked.stderr
    assert "late" in ranked.stdout
