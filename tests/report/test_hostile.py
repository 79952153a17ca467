"""Runs that attack their reader: nothing of theirs becomes an element, an attribute, a rule or a script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest

from audit.report import write_report
from audit.results import Run
from tests.report.conftest import study_of, trial_of
from tests.report.reading import Reader, read

matplotlib.use("Agg")

MARK = "document.title='hacked'"
ATTACKS = (
    f"<script>{MARK}</script>",
    f'<img src=x onerror="{MARK}">',
    f"<svg onload={MARK}><animate onbegin={MARK} attributeName=x></svg>",
    f'<a href="javascript:{MARK}">link</a>',
    f"</style><script>{MARK}</script><style>",
    f"</title></textarea></svg><script>{MARK}</script>",
    f'" onmouseover="{MARK}" x="',
    f"' autofocus onfocus={MARK} '",
    "}body{background:url(http://evil.example/x)}@import 'http://evil.example/y';",
    "{{ 7 * 191 }}{% for x in y %}",
    "<!-- <![CDATA[ ]]> -->",
    "\u2028alert(1)\u2029\u202egnp.exe\u0000\u0001\u001b[31m\u007f\u0085",
    r"$\frac{1}{0$ $x_{$",
    '<iframe srcdoc="<script>parent.document.title=1</script>"></iframe>',
    "<meta http-equiv=refresh content='0;url=http://evil.example'><base href='http://evil.example/'>",
    "<form action=http://evil.example><button formaction=javascript:alert(1)>go</button></form>",
)
ALL = " ".join(ATTACKS)
KEY = "sk-" + "abcdef0123456789" * 2
TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "footer", "nav", "section", "h1", "h2", "h3",
    "p", "a", "b", "code", "div", "span", "dl", "dt", "dd", "ol", "li", "table", "thead", "tbody", "tr", "th", "td",
    "details", "summary", "figure", "figcaption", "svg", "g", "defs", "clippath", "path", "use", "rect", "text",
    "tspan", "circle", "line",
}  # fmt: skip
NAMES = {
    "lang", "charset", "http-equiv", "content", "name", "class", "id", "href", "scope", "tabindex", "role",
    "aria-label", "aria-labelledby", "aria-hidden", "viewbox", "width", "height", "transform", "d", "x", "y",
    "x1", "x2", "y1", "y2", "cx", "cy", "r", "clip-path",
}  # fmt: skip


def poisoned(frame: pd.DataFrame, columns: tuple[str, ...]) -> pd.DataFrame:
    """Every text of these columns with all attacks behind it."""

    def poison(value: Any) -> Any:
        if isinstance(value, str):
            return f"{value} {ALL}"
        return [poison(v) for v in value] if isinstance(value, (list, np.ndarray)) else value

    return frame.assign(**{column: frame[column].map(poison) for column in columns})


def poison_run(run: Run, folder: Path) -> None:
    """A copy of a run in which every text that is not a key holds every attack."""
    shutil.copytree(run.directory.path, folder, ignore=shutil.ignore_patterns("report*"))
    texts = {
        "effects": ("game_name", "task_type", "action", "action_type", "reason"),
        "trajectories": ("game_name", "task_type", "commands", "observations", "origin"),
        "alternatives": ("command",),
        "points": ("action", "reason"),
    }
    for name, columns in texts.items():
        frame = poisoned(pd.read_parquet(folder / f"{name}.parquet"), columns)
        if name == "trajectories":
            frame["texts"] = [[ALL] * len(commands) for commands in frame["commands"]]
        if name in ("trajectories", "effects"):
            frame["trajectory"] = "<b onclick=alert(1)>" + frame["trajectory"]
        frame.to_parquet(folder / f"{name}.parquet", index=False)
    signals = pd.read_parquet(folder / "signals.parquet")
    about = json.loads((folder / "signals.json").read_text(encoding="utf-8"))
    for attack in ATTACKS:
        name = attack.replace(":", "")  # a column with a colon is not a signal
        signals[name] = np.arange(len(signals)) % 7 * 1.0
        signals[f"{name}:why"] = None
        about[name] = {"importance": "value", "view": "prefix"}
    signals.loc[signals.index[::3], "confidence.logp"] = np.nan
    signals["confidence.logp:why"] = ALL
    signals.to_parquet(folder / "signals.parquet", index=False)
    (folder / "signals.json").write_text(json.dumps(about), encoding="utf-8")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["policy"] = {"name": ALL, "kind": ALL, "api_key": KEY, "path": str(folder)}
    manifest |= {"policy_id": ALL, "env": ALL, "versions": {ALL: ALL}, "departed": [ALL], "plan_hash": ALL}
    manifest["surrogate"] = True
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    summary["reasons"] = [{"support": ALL, "reason": ALL, "points": 3}]
    for group in summary["groups"].values():
        for row in group:
            row["group"] = f"{row['group']} {ALL}"
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


@pytest.fixture(scope="module")
def hostile(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reader]:
    base = tmp_path_factory.mktemp("hostile")
    poison_run(run, base / "run")
    trial = trial_of(base, (ATTACKS[0], ATTACKS[1], ATTACKS[11].replace("\0", "")))
    study_of((f"random:{ATTACKS[2]}", ATTACKS[8], ATTACKS[2])).save(base / "arms")
    write_report([base / "run"], mrt=trial, arms=base / "arms")
    return base / "run" / "report.html", read(base / "run" / "report.html")


def test_no_element_or_attribute_is_theirs(hostile: tuple[Path, Reader]) -> None:
    _, page = hostile
    assert set(page.tags) <= TAGS
    assert {name for _, name, _ in page.attributes} <= NAMES
    assert page.tags.count("style") == 1 and page.tags.count("meta") == 4
    for link in page.links:
        assert re.fullmatch(r"#[\w-]+|report/[\w-]+\.(svg|png|csv)", link), link
    for tag, name, value in page.attributes:
        if name in ("class", "id", "clip-path", "transform", "d"):
            assert not re.search("[<>]|script>|javascript|hacked|evil", value), (tag, name, value)


def test_attacks_are_shown_as_text(hostile: tuple[Path, Reader]) -> None:
    """They are on the page, every one, as text: nothing was dropped and nothing was read as markup."""
    _, page = hostile
    for attack in ATTACKS[:11]:
        assert attack in page.text
    assert "\\u2028alert(1)\\u2029\\u202egnp.exe\\u0000\\u0001\\u001b[31m\\u007f\\u0085" in page.text
    assert "{{ 7 * 191 }}" in page.text and "1337" not in page.text


def test_nothing_unseen_is_in_any_file(hostile: tuple[Path, Reader]) -> None:
    out, _ = hostile
    for path in (out, *out.with_suffix("").glob("*.svg"), *out.with_suffix("").glob("*.csv")):
        unseen = set(re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e]", path.read_text(encoding="utf-8")))
        assert not unseen, (path.name, unseen)


def test_figures_hold_no_element_of_theirs(hostile: tuple[Path, Reader]) -> None:
    """Also the files: an SVG opened by itself could run scripts."""
    out, _ = hostile
    for path in out.with_suffix("").glob("*.svg"):
        figure = read(path)
        assert not {"script", "img", "a", "foreignobject", "iframe", "animate"} & set(figure.tags), path.name
        assert not [name for _, name, _ in figure.attributes if name.startswith("on")], path.name
        links = [value for _, name, value in figure.attributes if name in ("href", "xlink:href")]
        assert all(link.startswith("#") for link in links), path.name


def test_no_key_and_no_local_path(hostile: tuple[Path, Reader]) -> None:
    out, _ = hostile
    for path in (out, *out.with_suffix("").iterdir()):
        content = path.read_bytes()
        assert KEY.encode() not in content and str(out.parent).encode() not in content, path.name
        assert str(Path.home()).encode() + b"/" not in content, path.name


def test_the_policy_allows_the_one_stylesheet_and_nothing_else(hostile: tuple[Path, Reader]) -> None:
    _, page = hostile
    (policy,) = [value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value]
    digest = base64.b64encode(hashlib.sha256("".join(page.styles).encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in page.styles[0] and "@import" not in page.styles[0] and "evil" not in page.styles[0]
    assert not [name for _, name, _ in page.attributes if name == "style"]


# In a browser -----------------------------------------------------------------------------------------------------

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--virtual-time-budget=3000",
)  # fmt: skip
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium runs this test"
)


def dom(page: Path, profile: Path) -> str:
    """The page as the browser has it once it has run."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode("utf-8", "replace")


def title(text: str) -> str:
    found = re.search(r"<title>(.*?)</title>", text, re.S)
    assert found, text[:300]
    return found[1]


@needs_chromium
def test_nothing_runs_in_a_browser(hostile: tuple[Path, Reader], tmp_path: Path) -> None:
    out, page = hostile
    found = dom(out, tmp_path / "profile")
    assert title(found) == page.title == "Credit audit: run"
    assert len(found) > 100_000  # it was rendered


@needs_chromium
def test_the_browser_would_have_run_it(hostile: tuple[Path, Reader], tmp_path: Path) -> None:
    """The test can fail: the same attack unescaped runs, and even then the page's policy stops it."""
    out, page = hostile
    naked = tmp_path / "naked.html"
    naked.write_text(f"<title>quiet</title><body>{ATTACKS[1]}</body>", encoding="utf-8")
    assert title(dom(naked, tmp_path / "one")) == "hacked"
    text = out.read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("<main>", f"<main>{ATTACKS[0]}{ATTACKS[1]}{ATTACKS[2]}"), encoding="utf-8")
    assert title(dom(broken, tmp_path / "two")) == page.title
