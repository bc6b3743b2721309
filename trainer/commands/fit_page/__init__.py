"""The page "Will it fit?": it replays the allocations of traced runs in a browser (docs/planner/fit.md)."""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trainer.fakegpu import cost
from trainer.fakegpu.expected_error import PUBLISHED
from trainer.fakegpu.gpus import GPU, GPUS, usable_memory
from trainer.planner.search import BUDGET_MARGIN
from trainer.report.html_report import write_page
from trainer.report.plots import CATEGORIES

FOLDER = Path(__file__).parent


def data_script(name: str, plans: Sequence[Mapping[str, Any]]) -> str:
    """Return JavaScript that gives the page the ``plans`` of the model ``name``: flags, and columns of their traces."""
    packed = base64.b64encode(zlib.compress(json.dumps(plans, separators=(",", ":")).encode(), 9)).decode()
    return "fit.add({}, {});\n".format(*(json.dumps(text).replace("<", "\\u003c") for text in (name, packed)))


def facts(gpu: GPU | None = None) -> dict[str, Any]:
    """Return what the page knows about cards, with ``gpu`` if it is in no table, about times and about errors."""
    cards = GPUS.values() if gpu is None else {**GPUS, gpu.name: gpu}.values()
    known = [{**vars(one), "usable": usable_memory(one, 1), "workspace": one.cublas_workspace} for one in cards]
    costs = {name: value for name, value in vars(cost).items() if isinstance(value, float) or name == "NO_KERNEL"}
    errors = {name: one._asdict() for name, one in PUBLISHED.items()}
    return {"cards": known, "costs": costs, "errors": errors, "margin": BUDGET_MARGIN, "categories": CATEGORIES}


def write_fit_page(path: Path, known: Mapping[str, Any], data: str = "", gpu: GPU | None = None) -> None:
    """Write the page about the models in ``known``; ``data`` is a script with their plans, if they are not in files."""
    texts = [(FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in ("allocator", "template", "page")]
    write_page(path, FOLDER / "page.html", facts=facts(gpu) | {**known}, scripts=map(Markup, texts), data=Markup(data))
