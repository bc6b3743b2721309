"""How long a prediction takes and how much host memory, from a model of 67 million parameters to one of 8 billion.

``python benchmarks/planner_speed.py``: five minutes on two cores. Nothing is downloaded, and no weights exist.
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

from common import Record, resolve, table, workplace

from trainer.commands.recipes import load_recipe
from trainer.memory.plan import decide_plan
from trainer.planner.gpus import gpu_named
from trainer.planner.predict import predict_here, prepared
from trainer.planner.search import plan
from trainer.planner.target import Target
from trainer.recipe import Recipe
from trainer.settings import change
from trainer.system.children import in_child
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
    """Measure, print a table and write the results as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip-searches", action="store_true", help="single predictions only")
    options = parser.parse_args()
    record = Record("planner_speed", {"gpu": GPU_NAME})
    rows: list[dict[str, Any]] = []
    searches: list[dict[str, Any]] = []
    with workplace(None) as folder:
        recipes = {"vit_l_16": load_recipe(str(RECIPES / "vit_l_16.py"))[0], "llama_8b": llama(folder)}
        for name, ranks, settings in CASES:
            rows.append(
                {"recipe": name, "ranks": ranks, "settings": dict(settings), **one(recipes[name], ranks, settings)}
            )
            record.write(predictions=rows)
        for name, ranks, budget in [] if options.skip_searches else SEARCHES:
            searches.append({"recipe": name, "ranks": ranks, "budget": budget, **search(recipes[name], ranks, budget)})
            record.write(predictions=rows, searches=searches)
    record.write(True, predictions=rows, searches=searches)
    header = ["recipe", "ranks", "plan", "wall s", "CPU s", "host GB", "predicted GB"]
    print(table(header, [cells(row) for row in rows]))
    for found in searches:
        print(
            f"search: {found['recipe']} on {found['ranks']} rank(s) in {found['budget']}: "
            f"{found['candidates']} candidates ({found['traced']} traced) in {found['seconds']:.0f} s, "
            f"{found['cpu_seconds']:.0f} s of CPU"
        )


def llama(folder: Path) -> Recipe:
    """A classifier of 8 billion parameters from a configuration alone."""
    sys.path.insert(0, str(RECIPES))
    from synthetic import make_llama, make_tokenizer

    made = make_llama(folder, LLAMA_8B)
    words = make_tokenizer(folder, 32_000)
    return resolve([str(RECIPES / "llama.py"), f"--model.name={made}", f"--model.tokenizer={words}"])


def one(recipe: Recipe, ranks: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One prediction in a process of its own, its imports not counted: what it took, and what it said."""
    ready = prepared(change(recipe, dict(settings), {}))
    target = Target(gpu_named(GPU_NAME))
    began = time.perf_counter()
    found = in_child(partial(measured, ready, ranks, target))
    return {"seconds": round(time.perf_counter() - began, 2), **found}


def measured(recipe: Recipe, ranks: int, target: Target) -> dict[str, Any]:
    """In the child: the prediction, and what this process used."""
    found = predict_here(recipe, decide_plan(recipe, ranks), target, 1, False)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "host_gb": round(usage.ru_maxrss * 1024 / GB, 3),
        "predicted_reserved_gb": round(found["reserved"] / GB, 3),
    }


def search(recipe: Recipe, ranks: int, budget: str) -> dict[str, Any]:
    """A whole search."""
    free = change(recipe, {"memory.micro_batch_size": "auto", "memory.precision": "bf16-mixed"}, {})
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = plan(free, gpu=GPU_NAME, devices=ranks, budget=budget)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert report.chosen is not None
    return {
        "seconds": round(report.seconds, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "candidates": len(report.candidates),
        "traced": sum(one.traced and one.reserved is not None for one in report.candidates),
        "chosen": report.chosen.plan,
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    plan_of = ", ".join(str(value) for key, value in row["settings"].items() if key != "memory.micro_batch_size")
    figures = [f"{row[key]:.1f}" for key in ("seconds", "cpu_seconds")]
    return [
        row["recipe"],
        str(row["ranks"]),
        plan_of,
        *figures,
        *(f"{row[k]:.2f}" for k in ("host_gb", "predicted_reserved_gb")),
    ]


if __name__ == "__main__":
    main()
