"""``plan.html``: what ``plan.json`` holds as a table, the memory curve and two sliders, in a file without a network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from trainer.report.plots import CATEGORIES
from trainer.system.files import write_atomic

TEMPLATE = Path(__file__).with_name("page.html")


def write_page(path: Path, content: Mapping[str, Any], timeline: Mapping[str, Any] | None) -> None:
    """Write the page.

    Args:
        path: where.
        content: what ``plan.json`` holds; the page keeps it as it is.
        timeline: of the plan whose memory is drawn, as for ``plot_plan``; without one there is no curve.
    """
    curve = None if timeline is None else {**timeline, "categories": CATEGORIES}
    parts = {"title": html.escape(str(content["recipe"])), "plan": _embedded(content), "curve": _embedded(curve)}
    write_atomic(path, Template(TEMPLATE.read_text(encoding="utf-8")).substitute(parts))


def _embedded(value: Any) -> str:
    """JSON that HTML cannot take for the end of a script, whatever somebody has called something."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
