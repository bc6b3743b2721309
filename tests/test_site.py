"""The documentation site: it builds without a warning, shows what the code has, and fits into narrow windows."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from helpers.page import BROWSER, QUIET

from trainer.cli import COMMANDS
from trainer.commands.recipes import load_recipe
from trainer.settings import settings_of

ROOT = Path(__file__).parents[1]
PAGES = [
    "index",
    "techniques/index",
    "techniques/offload",
    "planner/accuracy",
    "reference/recipe",
    "reference/data",
    "reference/commands",
    "reference/run-directory",
    "reference/python/trainer",
    "repository/benchmarks/index",
]
MEASURE = """
    const wide = document.documentElement.scrollWidth, window = document.documentElement.clientWidth;
    const parts = [...document.querySelectorAll(".md-content__inner > *")].filter(one => one.offsetHeight);
    const boxes = parts.map(one => one.getBoundingClientRect()).filter(box => box.height);
    const over = boxes.filter((box, at) => at && box.top < boxes[at - 1].bottom - 1 && box.left < boxes[at - 1].right);
    return {wide, window, parts: parts.length, over: over.length};"""

needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="the extra docs is not installed",
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as CI builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # a notice of Material about another project
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600, env=quiet)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


@needs_mkdocs
def test_the_reference_has_every_setting_command_exit_code_and_name(site):
    text = {path.stem: path.read_text() for path in (site / "reference").rglob("*.html")}
    for name in ("vit_digits", "lm_bytes", "text_files"):
        for key in settings_of(load_recipe(name)[0]):
            assert re.search(rf'id="([A-Za-z]+\.)?{re.escape(key)}"', text[part_of(key)]), key
    assert all(f">trainer {name}<" in text["commands"] for name in COMMANDS)
    for code, error in ((2, "RecipeError"), (1, "RunError"), (75, "RunStoppedError"), (130, "KeyboardInterrupt")):
        assert re.search(rf"<td>{code}</td>\s*<td><code>{error}</code>", text["exit-codes"]), error
    assert 'id="trainer.api.fit"' in text["trainer"]
    assert "trainer.AccumulatingOptimizer" in text["trainer"]
    assert not re.search(r">_[a-z]\w*<", text["trainer"]), "private names"


def part_of(key: str) -> str:
    section = key.partition(".")[0]
    return section if section in ("model", "data") else "recipe"


@needs_mkdocs
def test_the_site_asks_no_other_host(site):
    for path in site.rglob("*.html"):
        asked = re.findall(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(https?:[^"]*)"', path.read_text())
        assert asked == [], path


@needs_mkdocs
@pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", PAGES)
def test_pages_fit_into_the_window(site, tmp_path, page, width):
    found = ask(site / f"{page}.html", MEASURE, tmp_path, width)
    assert found["parts"] > 3, found
    assert found["wide"] == found["window"], found
    assert found["over"] == 0, found


def ask(page: Path, script: str, folder: Path, width: int) -> dict:
    """What ``script`` returns in a page of the site, opened from the disk in a frame of ``width`` pixels."""
    inside = page.with_name(f"asked-{folder.name}.html")
    result = f"parent.postMessage(JSON.stringify((() => {{ {script} }})()), '*')"
    wait = f"<script>addEventListener('load', () => setTimeout(() => {result}, 500))</script></body>"
    inside.write_text(page.read_text().replace("</body>", wait))
    outside = folder / "frame.html"
    listen = "<script>addEventListener('message', got => document.body.textContent = got.data)</script>"
    frame = f'<iframe style="border: 0; width: {width}px; height: 900px" src="{inside.as_uri()}"></iframe>'
    outside.write_text(f"<meta charset=utf-8><body>{listen}{frame}")
    flags = [f"--user-data-dir={folder / 'browser'}", "--allow-file-access-from-files", "--virtual-time-budget=10000"]
    command = [str(BROWSER), *QUIET, *flags, "--window-size=1400,1000", "--dump-dom", outside.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (body,) = re.findall(r"<body>(\{.*\})</body>", done.stdout, re.DOTALL)
    return json.loads(unescape(body))


def test_every_file_of_a_run_is_in_the_reference(tmp_path):
    from trainer.cli import run

    sys.path.insert(0, str(ROOT / "docs" / "generate"))
    try:
        from reference import RUN_FILES, first_paragraph
    finally:
        sys.path.pop(0)
    assert all(first_paragraph(path) for path in RUN_FILES.values())
    named = {file for files in RUN_FILES for file in files.split(", ")}
    flags = ["--max_steps", "8", "--checkpoint.every", "3", "--run.logger", "csv,tensorboard", "--run.profile", "2"]
    assert run(["fit", "vit_digits", "--run.dir", str(tmp_path / "run"), "--run.predict", "false", *flags]) == 0
    written = [str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) > 20
    for path in written:
        general = re.sub(r"step-\d+", "step-N", path)
        assert general in named or any(general.startswith(file) for file in named if file.endswith("/")), path
