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
COSTS = (
    "LAUNCH",
    "NO_KERNEL",
    "KERNEL",
    "EXPOSED",
    "ELEMENTS",
    "ATTENTION",
    "COPY",
    "HOST_MEMORY",
    "CUDA_FREE",
    "MEMORY",
)
CARDS = [gpu for gpu in GPUS.values() if gpu.capability >= (8, 0) and gpu.reported.startswith("NVIDIA")]  # with bf16


def data_script(name: str, plans: Sequence[Mapping[str, Any]]) -> str:
    """Return JavaScript that gives the page the ``plans`` of the model ``name``: flags, and columns of their traces."""
    packed = zlib.compress(json.dumps(plans, separators=(",", ":")).encode(), 9)
    safe = json.dumps(name).replace("<", "\\u003c")  # HTML ends a script at the first </script>
    return f'fit.add({safe}, "{base64.b64encode(packed).decode()}");\n'


def facts(cards: Sequence[GPU] = CARDS) -> dict[str, Any]:
    """Return what the page knows about cards, times and errors."""
    known = [{**vars(one), "usable": usable_memory(one, 1), "workspace": one.cublas_workspace} for one in cards]
    costs, errors = (
        {name: getattr(cost, name) for name in COSTS},
        {name: one._asdict() for name, one in PUBLISHED.items()},
    )
    return {"cards": known, "costs": costs, "errors": errors, "margin": BUDGET_MARGIN, "categories": CATEGORIES}


def write_fit_page(path: Path, known: Mapping[str, Any], data: str = "") -> None:
    """Write the page about the models in ``known``, whose data is the script ``data``, or in files beside the page."""
    scripts = [
        Markup((FOLDER / f"{name}.js").read_text(encoding="utf-8")) for name in ("allocator", "template", "page")
    ]
    write_page(path, FOLDER / "page.html", facts={**facts(), **known}, scripts=scripts, data=Markup(data))
