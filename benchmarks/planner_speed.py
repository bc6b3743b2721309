"""How long a prediction takes, and a search, and how much host memory, from 303 million parameters to 8 billion.

``python benchmarks/planner_speed.py``: four minutes on two cores; ``--only-search`` runs the first search only. Nothing
is downloaded, and no weights exist. The time of the command ``trainer plan`` is in ``start.py``.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common import Record, child_cpu_seconds, resolve, table, workplace

from trainer.commands.recipes import load_recipe
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.memory.plan import decide_plan
from trainer.planner.predict import predict_in_process, prepare_recipe
from trainer.planner.search import plan
from trainer.recipe import Recipe
from trainer.settings import change
from trainer.system.child_jobs import run_in_child
from trainer.system.text import GB

RECIPES = Path(__file__).parent / "recipes"
GPU_NAME = "a100-80gb"
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
FULL = {"memory.activation_checkpointing": "full", "memory.precision": "bf16-mixed"}
STREAMED = FULL | {"memory.cpu_offload": "parameters"}
OFFLOADED = FULL | {"memory.cpu_offload": "optimizer"}
CASES: list[tuple[str, int, Mapping[str, Any]]] = [
    ("vit_l_16", 1, {}),
    ("vit_l_16", 1, {"memory.cpu_offload": "optimizer", "memory.micro_batch_size": 8}),
    ("vit_l_16", 8, {"memory.strategy": "fsdp", "memory.micro_batch_size": 2}),
    ("llama_8b", 1, FULL | {"memory.micro_batch_size": 1}),
    ("llama_8b", 1, OFFLOADED | {"memory.micro_batch_size": 1}),
    ("llama_8b", 1, STREAMED | {"memory.micro_batch_size": 1}),
    ("llama_8b", 8, FULL | {"memory.strategy": "fsdp", "memory.micro_batch_size": 1}),
]
SEARCHES = [("vit_l_16", 1, "4GB"), ("vit_l_16", 4, "8GB")]
"""A recipe, its ranks, and a budget that takes more than one technique."""


def main() -> None:
    """Measure, print two tables and write the results as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only-search", action="store_true", help="the first search only")
    only_search = parser.parse_args().only_search
    record = Record("planner_search" if only_search else "planner_speed", {"gpu": GPU_NAME})
    predictions: list[dict[str, Any]] = []
    searches: list[dict[str, Any]] = []
    with workplace(None) as folder:
        recipes = {"vit_l_16": load_recipe(str(RECIPES / "vit_l_16.py"))[0], "llama_8b": llama(folder)}
        for name, ranks, settings in [] if only_search else CASES:
            found = one(recipes[name], ranks, settings)
            predictions.append({"recipe": name, "ranks": ranks, "settings": dict(settings), **found})
            record.write(predictions=predictions)
        for name, ranks, budget in SEARCHES[:1] if only_search else SEARCHES:
            found = search(recipes[name], ranks, budget)
            searches.append({"recipe": name, "ranks": ranks, "budget": budget, **found})
            record.write(searches=searches)
    record.write(True)
    for rows in filter(None, (predictions, searches)):
        print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))


def llama(folder: Path) -> Recipe:
    """A classifier of 8 billion parameters from a configuration alone."""
    sys.path.insert(0, str(RECIPES))
    from synthetic import make_llama, make_tokenizer

    made = make_llama(folder, LLAMA_8B)
    words = make_tokenizer(folder, 32_000)
    return resolve([str(RECIPES / "llama.py"), f"--model.name={made}", f"--model.tokenizer={words}"])


def one(recipe: Recipe, ranks: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Predict once in a new process, whose imports do not count: time, memory and the prediction."""
    ready = prepare_recipe(change(recipe, dict(settings), {}))
    began = time.perf_counter()
    found = run_in_child(partial(measured, ready, ranks, Target(gpu_named(GPU_NAME))))
    return {"seconds": round(time.perf_counter() - began, 2), **found}


def measured(recipe: Recipe, ranks: int, target: Target) -> dict[str, Any]:
    """In the child: the prediction, and what this process used."""
    found = predict_in_process(recipe, decide_plan(recipe, ranks), target, 1, False)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "host_gb": round(usage.ru_maxrss * 1024 / GB, 3),
        "predicted_reserved_gb": round(found["reserved"] / GB, 3),
    }


def search(recipe: Recipe, ranks: int, budget: str) -> dict[str, Any]:
    """A whole search."""
    free = change(recipe, {"memory.micro_batch_size": "auto", "memory.precision": "bf16-mixed"}, {})
    before = child_cpu_seconds()
    report = plan(free, gpu=GPU_NAME, devices=ranks, budget=budget)
    assert report.chosen is not None
    return {
        "seconds": round(report.seconds, 1),
        "cpu_seconds": round(child_cpu_seconds() - before, 1),
        "candidates": len(report.candidates),
        "traced": sum(one.traced and one.reserved is not None for one in report.candidates),
        "chosen": report.chosen.plan,
    }


if __name__ == "__main__":
    main()
