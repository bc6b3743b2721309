"""Predicted beside measured memory without a GPU: the rungs of a ladder that was measured on a CPU.

``trainer ladder benchmarks/recipes/vit_cpu.py --run.accelerator cpu --out FOLDER`` measures; this predicts each of its
runs from the flags it had, in processes that compute nothing. About a minute.
"""

from __future__ import annotations

import argparse
import json
import shlex
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import RESULTS, Record, table

from trainer.commands.flags import RecipeParser
from trainer.commands.recipes import load_recipe
from trainer.memory.plan import decide_plan
from trainer.planner.gpus import host_as_device
from trainer.planner.predict import predict_here, prepared
from trainer.planner.target import Target
from trainer.settings import change
from trainer.system.children import in_children
from trainer.system.text import GB


def main() -> None:
    """Predict every rung that finished, and print and write how far off that is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ladder", nargs="?", type=Path, default=RESULTS / "ladder_cpu.json", help="a ladder.json")
    options = parser.parse_args()
    ladder = json.loads(options.ladder.read_text())
    rungs = [rung for rung in ladder["rungs"] if rung["status"] == "finished"]
    recipe, _ = load_recipe(ladder["recipe"])
    recipe = prepared(recipe)
    predictions = dict(in_children([partial(predicted, recipe, rung["command"]) for rung in rungs]))
    rows = [row(rung, predictions[number]) for number, rung in enumerate(rungs)]
    errors = [abs(found["error"]) for found in rows]
    record = Record("planner_cpu", {"ladder": options.ladder.name, "measured": ladder["date"]})
    record.write(True, rows=rows, median_error=median(errors), worst_error=max(errors))
    cells = [
        [r["name"], f"{r['measured_gb']:.3f}", f"{r['predicted_gb']:.3f}", f"{100 * r['error']:+.1f} %"] for r in rows
    ]
    print(table(["run", "measured, GB over idle", "predicted", "error"], cells))
    print(f"median {100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %; written to {record.path}")


def predicted(recipe: Any, command: str) -> dict[str, Any]:
    """The prediction for a run of the ladder, from its command line."""
    flags = [word[2:].split("=", 1) for word in shlex.split(command) if word.startswith("--")]
    ranks = int(dict(flags).get("run.devices", 1))
    chosen = [(name, value) for name, value in flags if not name.startswith("run.")]
    changed = change(recipe, {}, RecipeParser(recipe).read_flags(chosen, {}))
    return predict_here(changed, decide_plan(changed, ranks), Target(host_as_device()), 1, False)


def row(rung: dict[str, Any], prediction: Any) -> dict[str, Any]:
    """A line of the result."""
    if isinstance(prediction, Exception):
        raise prediction
    measured, found = rung["peak_gb"], prediction["reserved"] / GB
    return {
        "name": rung["name"],
        "measured_gb": round(measured, 4),
        "predicted_gb": round(found, 4),
        "error": round(found / measured - 1, 4),
        "seconds": round(prediction["seconds"], 2),
    }


if __name__ == "__main__":
    main()
