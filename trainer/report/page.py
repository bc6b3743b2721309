"""Pages of HTML: each a file that stands alone, without a network, in the one style; ``report.html`` is one of them."""

from __future__ import annotations

import base64
import csv
import html
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from trainer.system.files import write_atomic
from trainer.system.redact import redact
from trainer.system.text import escaped

FOLDER = Path(__file__).parent
STYLE, REPORT = FOLDER / "style.css", FOLDER / "report.html"
LINES = "\n"
MOST_ERRORS = 50  # mistakes on the page; errors.csv has all of them

PICTURES = {
    "curves.png": "Loss, figures of the evaluations, and learning rate over steps",
    "confusion.png": "What each class is taken for",
    "memory.png": "Memory by phase and over steps",
}


def write_page(path: Path, template: Path, parts: Mapping[str, str]) -> None:
    """Write a page from a template in which ``$style`` is the one style, and ``parts`` are HTML already."""
    style = STYLE.read_text(encoding="utf-8").rstrip()
    write_atomic(path, Template(template.read_text(encoding="utf-8")).substitute(parts, style=style))


def write_report(
    run_dir: Path,
    facts: Sequence[tuple[str, str]],
    plan: str,
    data: Mapping[str, Any],
    versions: Mapping[str, str | None],
) -> None:
    """Write ``report.html``: what a run was asked, what came of it, and how to do it again, in one file.

    Pictures, mistakes and settings are those in ``run_dir``; what is not there is left out. ``facts`` are labels and
    texts, the status and the main metric first; ``plan`` is how the batch was cut, and what saved memory.
    """
    stored = run_dir / "recipe.yaml"
    recipe = stored.read_text(encoding="utf-8").partition("\n# sha256")[0] if stored.exists() else ""
    trust = " --trust-recipe" if recipe.startswith("recipe: ") and recipe.partition("\n")[0].endswith(".py") else ""
    again = f"trainer fit {shlex.quote(str(stored))}{trust}"
    known = [(name, f"{value:,}" if type(value) is int else value) for name, value in data.items() if value is not None]
    settings = _text(recipe, keep=LINES)
    sections = [
        ("Figures", _facts([("plan", plan), *facts])),
        *((title, _picture(run_dir / name)) for name, title in PICTURES.items()),
        ("Classes", _preformatted(run_dir / "classification_report.txt")),
        ("What it was surest of, and wrong", _errors(run_dir / "errors.csv")),
        ("Do it again", f"<pre><code>{_text(again)}</code></pre>" if recipe else ""),
        ("Data", _facts(known)),
        ("Settings", f"<details><summary>recipe.yaml</summary><pre>{settings}</pre></details>" if recipe else ""),
        ("Versions", _facts([(name, version) for name, version in versions.items() if version])),
    ]
    body = "\n".join(f"<h2>{title}</h2>\n{content}" for title, content in sections if content)
    (_, status), *rest = facts
    verdict = f"{status}" + (f" · {rest[0][0]} {rest[0][1]}" if rest else "")
    sign = "yes" if status == "finished" else "no"
    about = _text(f"{run_dir}")
    parts = {"title": _text(run_dir.name), "about": about, "verdict": _text(verdict), "sign": sign, "body": body}
    write_page(run_dir / "report.html", REPORT, parts)


def _text(text: object, keep: str = "") -> str:
    """A text as HTML: without secrets, and nothing in it steers the page."""
    return html.escape(escaped(redact(str(text)), keep))


def _facts(rows: Sequence[tuple[str, Any]]) -> str:
    lines = [f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows]
    return f'<table class="facts">{"".join(lines)}</table>' if rows else ""


def _picture(path: Path) -> str:
    if not path.exists():
        return ""
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{_text(path.name)}" src="data:image/png;base64,{content}">'


def _preformatted(path: Path) -> str:
    return f"<pre>{_text(path.read_text(encoding='utf-8').strip(), LINES)}</pre>" if path.exists() else ""


def _errors(path: Path) -> str:
    if not path.exists():
        return ""
    with open(path, newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    heads = "".join(f"<th>{_text(name.replace('_', ' '))}</th>" for name in header)
    lines = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows[:MOST_ERRORS]]
    more = f'<p class="dim">{len(rows) - MOST_ERRORS} more in errors.csv</p>' if len(rows) > MOST_ERRORS else ""
    table = f'<div class="table"><table><tr>{heads}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'
    return f"{table}{more}" if rows else "<p>no mistakes</p>"
