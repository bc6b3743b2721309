"""``python benchmarks/predict_cases.py ASKED.json FOUND.json``: predictions, in a process that sees no GPU.

ASKED has the ``gpu`` (fields of ``trainer.fakegpu.gpus.GPU``) and the ``cases``: name, arguments of ``trainer fit``,
ranks, environment, and whether the requests to the allocator are to be counted. FOUND is what came of them, by name.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from common import resolve

from trainer.errors import require
from trainer.fakegpu.gpus import GPU
from trainer.fakegpu.target import Target
from trainer.memory.plan import Plan, decide_plan
from trainer.planner.predict import predict_in_process, prepare_recipe
from trainer.planner.traced_run import draw_samples, trace_run
from trainer.recipe import Recipe
from trainer.system.child_jobs import run_in_children
from trainer.system.files import write_atomic
from trainer.system.machine import cores


def predict_case(case: dict[str, Any], gpu: GPU) -> dict[str, Any]:
    """The prediction for one configuration, with memory in bytes. For a child process: it changes torch."""
    recipe, plan, target = _prepared(case, gpu)
    return {"plan": plan.describe(), **predict_in_process(recipe, plan, target, nodes=case["ranks"], timeline=False)}


def requests_of(case: dict[str, Any], gpu: GPU) -> dict[str, int]:
    """How often each number of bytes would be asked for. For a child process: it changes torch."""
    recipe, plan, target = _prepared(case, gpu)
    trace = trace_run(recipe, plan, draw_samples(recipe, plan), target, nodes=case["ranks"])
    return {str(size): count for size, count in Counter(e.bytes for e in trace.events if e.bytes).items()}


def _prepared(case: dict[str, Any], gpu: GPU) -> tuple[Recipe, Plan, Target]:
    os.environ.update(case["environment"])
    recipe = prepare_recipe(resolve(case["arguments"]))
    allocator = case["environment"].get("PYTORCH_CUDA_ALLOC_CONF", "")
    target = Target(gpu, expandable_segments="expandable_segments:True" in allocator)
    return recipe, decide_plan(recipe, case["ranks"]), target


def main(asked: Path, found: Path) -> None:
    """Predict all, as many at once as there are cores."""
    import torch
    import torchvision  # noqa: F401  so that not every child has to
    import transformers  # noqa: F401

    require(not torch.cuda.is_available(), "CUDA_VISIBLE_DEVICES must be empty: a prediction may not look at the GPU")
    request = json.loads(asked.read_text())
    gpu = GPU(**{**request["gpu"], "capability": tuple(request["gpu"]["capability"])})
    jobs: dict[tuple[str, str], Any] = {}
    for kind, work in (("prediction", predict_case), ("requests", requests_of)):
        asked_for = [case for case in request["cases"] if kind == "prediction" or case["counted"]]
        jobs |= {(case["name"], kind): partial(work, case, gpu) for case in asked_for}
    results: dict[str, dict[str, Any]] = {case["name"]: {} for case in request["cases"]}
    for number, result in run_in_children(list(jobs.values()), max_workers=cores()):
        name, kind = list(jobs)[number]
        if isinstance(result, Exception):
            result = {"error": str(result), "traceback": "".join(getattr(result, "__notes__", []))}
        results[name][kind] = result
        write_atomic(found, json.dumps(results), sync_folder=False)  # the parent may run out of time and take it
        print(f"  predicted {name} ({kind})", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
