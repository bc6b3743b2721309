"""HTML pages such as ``report.html``: self-contained files in a common style that need no network."""

from __future__ import annotations

import base64
import csv
import shlex
import time
from collections.abc import Sequence
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from trainer.report.conclusion import describe_failures, suggest_next
from trainer.report.plots import read_metrics
from trainer.report.summary import Summary, summary_rows
from trainer.system.files import write_atomic
from trainer.system.redact import redact
from trainer.system.text import escaped

FOLDER = Path(__file__).parent
STYLE, REPORT = FOLDER / "style.css", FOLDER / "report.html"
MAX_ERRORS = 50  # max mistakes on the page; errors.csv has more
PICTURES = ("curves.png", "memory.png", "confusion.png")
MAX_TABLE = 10  # max classes of a confusion matrix that is a table; otherwise it is a picture


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
    run_dir: Path, summary: Summary, plan: str, confusion: np.ndarray | None = None, names: Sequence[str] = ()
) -> None:
    """Write ``report.html``: the conclusion of a run, its results, and the command to repeat it, in one file.

    Pictures, mistakes and settings come from ``run_dir``, if any. ``confusion`` has the ``names`` of its classes.
    """
    (_, status), *rest = rows = summary_rows(summary)
    split, values = next(iter(summary.metrics.items()), ("", {}))
    stored = run_dir / "recipe.yaml"  # written when the run starts
    seconds = time.time() - stored.stat().st_mtime if stored.exists() else 0
    recipe = _text_in(stored).partition("\n# sha256")[0]
    trust = " --trust-recipe" if recipe.startswith("recipe: ") and recipe.partition("\n")[0].endswith(".py") else ""
    columns, *mistakes = [line[2:] for line in csv.reader(StringIO(_text_in(run_dir / "errors.csv") or "\n"))]
    kept = [f"model/ holds {value}." for name, value in rest if name == "model/"]
    failures = [] if confusion is None else describe_failures(confusion, names)
    curves, has_val = read_metrics(run_dir / "metrics.csv"), bool(summary.data.get("val"))
    ways = suggest_next(confusion, curves, has_val, yaml.safe_load(recipe) or {}) if status == "finished" else []
    drawn = [name for name in PICTURES if (run_dir / name).exists()]
    data = [(f"data: {key}", f"{value:,}" if type(value) is int else value) for key, value in summary.data.items()]
    write_page(
        run_dir / "report.html",
        REPORT,
        run_dir=run_dir,
        dates=f"{time.strftime('%Y-%m-%d %H:%M:%S %z')} · took {timedelta(seconds=max(0, round(seconds)))}",
        status=status,
        verdict=" · ".join([status, *(f"{name} {value}" for name, value in rest[: len(values) or 1])]),
        conclusion=[" ".join(kept + failures), *(f"Try {way}." for way in ways)],
        split=split,
        names=names,
        matrix=confusion.tolist() if confusion is not None and len(names) <= MAX_TABLE else [],
        classes=_text_in(run_dir / "classification_report.txt").rstrip(),
        columns=[name.replace("_", " ") for name in columns],
        mistakes=mistakes[:MAX_ERRORS],
        more=len(mistakes) - MAX_ERRORS,
        pictures={name: base64.b64encode((run_dir / name).read_bytes()).decode() for name in drawn},
        facts=[("plan", plan), *rows, *data, *summary.versions.items()],
        command=f"trainer fit {shlex.quote(str(stored))}{trust}",
        recipe=recipe,
    )


def _text_in(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
