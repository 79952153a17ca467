"""The arrows between packages, the size of files, and what imports cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("audit", "credit_signals", "envs")


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module imported anywhere in a file, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_envs_imports_nothing_of_ours() -> None:
    for path in modules("envs"):
        ours = {name for name in imported(path) if under(name, "audit") or under(name, "credit_signals")}
        assert not ours, f"{path.name} imports {ours}"


def test_credit_signals_imports_records_only() -> None:
    for path in modules("credit_signals"):
        ours = {n for n in imported(path) if under(n, "audit") or under(n, "envs")}
        assert all(under(name, "audit.records") or name == "audit" for name in ours), f"{path.name} imports {ours}"


def test_only_the_cli_and_the_report_import_everything() -> None:
    """Nothing imports the command line; the comparison layer never imports a signal."""
    for path in modules("audit"):
        names = imported(path)
        if "cli" not in path.parts:
            assert not any(under(name, "audit.cli") for name in names), f"{path.name} imports the command line"
        if "comparison" in path.parts:
            assert not any(under(name, "credit_signals") for name in names), f"{path.name} imports a signal"


def test_the_straight_line_has_no_way_back() -> None:
    """Later stages read earlier ones, never the other way round."""
    line = ["records", "plan", "rollouts", "collect", "store", "effects", "replay", "tasks"]
    line += ["summary", "results", "study"]
    for i, stage in enumerate(line):
        names = imported(ROOT / "audit" / f"{stage}.py")
        later = {later for later in line[i + 1 :] if any(under(name, f"audit.{later}") for name in names)}
        assert not later, f"audit.{stage} imports the later {later}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is(package: str) -> None:
    for path in modules(package):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no docstring"


def test_no_eval_exec_or_pickle_in_the_product() -> None:
    for path in [p for package in PACKAGES for p in modules(package)]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile"}, f"{path}:{node.lineno}"
        assert "pickle" not in imported(path), path


def test_help_loads_nothing_heavy() -> None:
    heavy = ("numpy", "pandas", "scipy", "sklearn", "matplotlib", "textworld", "alfworld", "openai", "pyarrow")
    code = f"import sys, audit.cli; print([m for m in {heavy!r} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert answer.stdout.strip() == "[]"
