"""How long a prediction takes and how much host memory, from a model of 67 million parameters to one of 8 billion; and
how long ``trainer plan`` of a small recipe, beside what it cannot do without: importing torch, and one trace.

``python benchmarks/planner_speed.py``: five minutes on two cores; ``--only-command`` one. Nothing is downloaded, and no
weights exist.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import Record, resolve, table, workplace

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
    """Measure, print a table and write the results as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip-searches", action="store_true", help="single predictions only")
    parser.add_argument("--only-command", action="store_true", help="the command only")
    parser.add_argument("--only-search", action="store_true", help="the first search only")
    parser.add_argument("--rounds", type=int, default=5, help="of the command, after one that is not counted")
    options = parser.parse_args()
    if options.only_command:
        found = command(options.rounds)
        asked = {"gpu": GPU_NAME, "recipe": COMMAND_RECIPE, "rounds": options.rounds}
        Record("planner_command", asked).write(True, **found)
        ratios = found.pop("ratios")
        print(table(["what", "CPU s", "wall s"], [[name, *map(str, row.values())] for name, row in found.items()]))
        print(*(f"{name}: {ratio}" for name, ratio in ratios.items()), sep="\n")
        return
    if options.only_search:
        name, ranks, budget = SEARCHES[0]
        once = search(load_recipe(str(RECIPES / f"{name}.py"))[0], ranks, budget)
        asked = {"gpu": GPU_NAME, "recipe": name, "ranks": ranks, "budget": budget}
        Record("planner_search", asked).write(True, **once)
        print(once)
        return
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
    ready = prepare_recipe(change(recipe, dict(settings), {}))
    target = Target(gpu_named(GPU_NAME))
    began = time.perf_counter()
    found = run_in_child(partial(measured, ready, ranks, target))
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


COMMAND_RECIPE = "vit_digits"
TORCH = "import torch"
STEPS = f"{TORCH}, torch._dynamo"
"""Each ``step`` of torch's optimizers imports it (``_use_grad`` in torch/optim/optimizer.py), and so does a
``FakeTensorMode``: no step can be traced, or taken, without."""
IMPORTS = f"""{TORCH}
from trainer.system.imports import quick_imports
with quick_imports():
    import trainer.planner.search
"""
TRACE = f"""{IMPORTS}
from trainer.commands.recipes import load_recipe
from trainer.memory.plan import decide_plan
from trainer.fakegpu.gpus import gpu_named
from trainer.planner.predict import predict_in_process, prepare_recipe
from trainer.fakegpu.target import Target
import os, time
recipe = prepare_recipe(load_recipe("{COMMAND_RECIPE}")[0])
began = time.process_time(), time.perf_counter()
predict_in_process(recipe, decide_plan(recipe, 1), Target(gpu_named("{GPU_NAME}")))
print(time.process_time() - began[0], time.perf_counter() - began[1], flush=True)
os._exit(0)
"""


def command(rounds: int) -> dict[str, dict[str, float]]:
    """Medians of seconds, all one after the other in each round: ``torch`` is its import, alone and with what any
    optimizer step imports, ``imports`` that of the planner with it, ``trace`` one trace after these, ``anew`` the
    command; and ``anew`` as a multiple of ``trace`` and each import, by CPU time."""
    times: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    with workplace(None) as folder:
        for number in range(rounds + 1):  # the first of each fills the caches of the disk, and is not counted
            plan_of = ["-m", "trainer", "plan", COMMAND_RECIPE, f"--gpu={GPU_NAME}"]
            once = {
                "torch": timed(["-c", TORCH])[:2],
                "torch and a step's import": timed(["-c", STEPS])[:2],
                "trace": tuple(map(float, timed(["-c", TRACE])[2].split())),
                "imports": timed(["-c", IMPORTS])[:2],
                "anew": timed([*plan_of, f"--out={folder}/{number}"])[:2],
            }
            for name, figures in once.items() if number else ():
                times[name].append(figures)
    found = {
        name: {"cpu": round(median(cpu for cpu, _ in rows), 2), "wall": round(median(wall for _, wall in rows), 2)}
        for name, rows in times.items()
    }
    ratios = {
        f"anew / ({name} + trace)": found["anew"]["cpu"] / (found[name]["cpu"] + found["trace"]["cpu"])
        for name in ("torch", "torch and a step's import", "imports")
    }
    return found | {"ratios": {name: round(ratio, 2) for name, ratio in ratios.items()}}


def timed(words: list[str]) -> tuple[float, float, str]:
    """Seconds of CPU with those of children, and of wall time, that Python takes for ``words``; and what it prints."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.perf_counter() - began, done.stdout


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
