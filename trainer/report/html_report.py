"""HTML pages such as ``report.html``: self-contained files in a common style that need no network."""

from __future__ import annotations

import base64
import csv
import shlex
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from trainer.system.files import write_atomic
from trainer.system.redact import redact
from trainer.system.text import escaped

FOLDER = Path(__file__).parent
STYLE, REPORT = FOLDER / "style.css", FOLDER / "report.html"
MAX_ERRORS = 50  # max mistakes on the page; errors.csv has more

PICTURES = {
    "curves.png": "Loss, metrics of the evaluations, and learning rate over steps",
    "confusion.png": "What each class is taken for",
    "memory.png": "Memory by phase and over steps",
}


def write_page(path: Path, template: Path, **values: Any) -> None:
    """Render the Jinja ``template`` with ``values``, escaped and without secrets and control characters, to ``path``.

    The filter ``lines`` keeps line breaks, and ``style`` is the common style sheet.
    """
    jinja = Environment(autoescape=True, finalize=_as_html, undefined=StrictUndefined)
    jinja.trim_blocks = jinja.lstrip_blocks = jinja.keep_trailing_newline = True
    jinja.filters["lines"] = lambda text: _as_html(text, keep="\n")
    jinja.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    style = Markup(STYLE.read_text(encoding="utf-8").rstrip())
    write_atomic(path, jinja.from_string(template.read_text(encoding="utf-8")).render(values, style=style))


def _as_html(value: object, keep: str = "") -> Markup:
    """Escape a value for HTML, without secrets and control characters (except ``keep``); Markup is not changed."""
    return value if isinstance(value, Markup) else Markup.escape(escaped(redact(str(value)), keep))


def write_report(
    run_dir: Path,
    facts: Sequence[tuple[str, str]],
    plan: str,
    data: Mapping[str, Any],
    versions: Mapping[str, str | None],
) -> None:
    """Write ``report.html``: the settings of a run, its results, and the command to repeat it, in one file.

    Pictures, mistakes and settings come from ``run_dir``, if any. ``facts`` start with the status and the main metric.
    """
    (_, status), *rest = facts
    stored = run_dir / "recipe.yaml"
    recipe = _text_in(stored).partition("\n# sha256")[0]
    trust = " --trust-recipe" if recipe.startswith("recipe: ") and recipe.partition("\n")[0].endswith(".py") else ""
    columns, *mistakes = csv.reader(StringIO(_text_in(run_dir / "errors.csv") or "\n"))
    known = [(name, f"{value:,}" if type(value) is int else value) for name, value in data.items() if value is not None]
    write_page(
        run_dir / "report.html",
        REPORT,
        run_dir=run_dir,
        status=status,
        verdict=status + (f" · {rest[0][0]} {rest[0][1]}" if rest else ""),
        facts=[("plan", plan), *facts],
        pictures=[(title, name, _base64(run_dir / name)) for name, title in PICTURES.items()],
        classes=_text_in(run_dir / "classification_report.txt").strip(),
        columns=[name.replace("_", " ") for name in columns],
        mistakes=mistakes[:MAX_ERRORS],
        more=len(mistakes) - MAX_ERRORS,
        command=f"trainer fit {shlex.quote(str(stored))}{trust}",
        recipe=recipe,
        data=known,
        versions=[(name, version) for name, version in versions.items() if version],
    )


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode() if path.exists() else ""


def _text_in(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
