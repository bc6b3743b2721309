"""The page "Will it fit?": it replays templates of traces in a browser (docs/planner/fit.md)."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trainer.errors import RunError
from trainer.fakegpu import cost
from trainer.fakegpu.event_columns import event_columns
from trainer.fakegpu.events import Event, Operation, Trace
from trainer.fakegpu.expected_error import PUBLISHED
from trainer.fakegpu.gpus import GPU, GPUS, usable_memory
from trainer.fakegpu.kernels import WITH_CUDNN
from trainer.fakegpu.target import Target
from trainer.memory.plan import Plan, decide_plan
from trainer.planner.knobs import apply_settings
from trainer.planner.search import BUDGET_MARGIN, with_size
from trainer.planner.traced_run import draw_samples, trace_run
from trainer.recipe import Recipe
from trainer.report import html_report
from trainer.report.plots import CATEGORIES
from trainer.system.child_jobs import run_in_children

FOLDER = Path(__file__).parent
SCRIPTS = ("allocator.js", "template.js", "page.js")
COSTS = ("LAUNCH", "NO_KERNEL", "KERNEL", "EXPOSED", "ELEMENTS", "ATTENTION", "COPY", "HOST_MEMORY", "CUDA_FREE")


def trace_columns(recipes: Mapping[int, Recipe], settings: Mapping[str, Any], target: Target) -> dict[str, Any] | None:
    """Return the columns of prepared ``recipes`` by micro-batch with ``settings``; ``None`` if their events differ."""
    runs = [apply_settings(recipe, with_size(settings, size)) for size, recipe in recipes.items()]
    jobs = [partial(_traced, run, decide_plan(run, 1), target) for run in runs]
    found = dict(run_in_children(jobs, 1))
    for answer in found.values():
        if isinstance(answer, Exception):
            raise RunError(f"a plan cannot be traced: {answer}") from answer
    return event_columns({size: _trace(found[place]) for place, size in enumerate(recipes)})


def _traced(recipe: Recipe, plan: Plan, target: Target) -> dict[str, Any]:
    trace = trace_run(recipe, plan, draw_samples(recipe, plan), target)
    return {name: getattr(trace, name) for name in ("events", "work", "categories", "marks", "micro_steps")}


def _trace(fields: dict[str, Any]) -> Trace:
    """Rebuild a trace from JSON, whose keys are texts and whose records are lists."""
    categories = {int(block): category for block, category in fields["categories"].items()}
    records = {"events": [Event(*one) for one in fields["events"]], "work": [Operation(*one) for one in fields["work"]]}
    return Trace(**{**fields, **records, "categories": categories})


def data_script(name: str, plans: Sequence[Mapping[str, Any]]) -> str:
    """Return JavaScript that gives the page the ``plans`` of the model ``name``."""
    packed = zlib.compress(json.dumps(plans, separators=(",", ":")).encode(), 9)
    return f'fit.add({json.dumps(name)}, "{base64.b64encode(packed).decode()}");\n'


def write_fit_page(path: Path, facts: Mapping[str, Any], data: str = "") -> None:
    """Write the page about the models in ``facts``, whose data is the script ``data``, or in files beside the page."""
    cards = [_card(gpu) for gpu in GPUS.values() if (8, 0) <= gpu.capability and gpu.reported.startswith("NVIDIA")]
    costs = {name: getattr(cost, name) for name in COSTS}
    errors = {kind: one._asdict() for kind, one in PUBLISHED.items()}
    own = {"cards": cards, "costs": costs, "errors": errors, "margin": BUDGET_MARGIN, "categories": CATEGORIES}
    scripts = [Markup((FOLDER / name).read_text(encoding="utf-8")) for name in SCRIPTS]
    html_report.write_page(path, FOLDER / "page.html", facts={**own, **facts}, scripts=scripts, data=Markup(data))


def _card(gpu: GPU) -> dict[str, Any]:
    rates = {dtype: gpu.product_rate(dtype) for dtype in gpu.flops}
    speed = {"rates": rates, "moves": gpu.bandwidth * cost.MEMORY, "clocks": gpu.clocks, "bus": gpu.bus}
    memory = {"memory": gpu.memory, "usable": usable_memory(gpu, 1), "workspace": gpu.cublas_workspace}
    return {"name": gpu.name, "title": gpu.title, "cudnn": gpu.capability in WITH_CUDNN, **memory, **speed}
