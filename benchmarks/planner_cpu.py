"""Predicted beside measured memory without a GPU: the rungs of a ladder that was measured on a CPU.

``trainer ladder benchmarks/recipes/vit_cpu.py --run.accelerator cpu --out FOLDER`` measures; this predicts each of its
runs from the flags it had, in processes that compute nothing. About a minute. With ``--odd`` it also measures runs that
nothing was fitted to (``CPU_BUFFERS`` was found on the ladder): ten minutes; without, those of before are kept.

DDP makes its buckets anew in the third step, and until they are filled they are addresses without memory: a run of
three steps shows less than any longer one. ``steps`` of each row says how many were measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import RESULTS, Record, table

from trainer.commands.flags import RecipeParser
from trainer.commands.recipes import load_recipe
from trainer.fakegpu.gpus import host_as_device
from trainer.fakegpu.target import Target
from trainer.lab.measured_run import MALLOC_TRIM_ENV, run_trial
from trainer.memory.plan import decide_plan
from trainer.planner.predict import predict_in_process, prepare_recipe
from trainer.settings import change
from trainer.system.child_jobs import run_in_children
from trainer.system.text import GB

STEPS = 5  # of an odd run
SHAPE = "--model.layers=8 --model.heads=7 --model.width=448 --model.mlp_width=1792 --data.image_size=144"
ODD = {
    "a fraction 0.3 checkpointed, 2 x 7 of 14": f"{SHAPE} --memory.activation_checkpointing=0.3 --batch_size=14 "
    "--memory.micro_batch_size=7",
    "8-bit AdamW, 13 in micro-batches of 5": f"{SHAPE} --memory.optimizer_state_bits=8 --batch_size=13 "
    "--memory.micro_batch_size=5",
    "optimizer in backward, 9": f"{SHAPE} --memory.optimizer_in_backward=true --batch_size=9 "
    "--memory.micro_batch_size=9",
    "bf16-true, stochastic rounding, 7": f"{SHAPE} --memory.precision=bf16-true --memory.stochastic_rounding=true "
    "--batch_size=7 --memory.micro_batch_size=7",
    "fsdp, 2 ranks, 11 in micro-batches of 4": f"{SHAPE} --memory.strategy=fsdp --run.devices=2 --batch_size=11 "
    "--memory.micro_batch_size=4",
    "ddp, 2 ranks, 11 in micro-batches of 4": f"{SHAPE} --memory.strategy=ddp --run.devices=2 --batch_size=11 "
    "--memory.micro_batch_size=4",
    "ddp, 2 ranks, as in the ladder": "--memory.strategy=ddp --run.devices=2 --memory.micro_batch_size=8",
    "parameters offloaded, as in the ladder": "--memory.cpu_offload=parameters --memory.micro_batch_size=16",
}
"""Settings that the ladder has not, its DDP with more steps, and what takes more since it was measured."""


def main() -> None:
    """Predict every run that finished, and print and write how far off that is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ladder", nargs="?", type=Path, default=RESULTS / "ladder_cpu.json", help="a ladder.json")
    parser.add_argument("--odd", action="store_true", help="measure those anew that are not of the ladder")
    options = parser.parse_args()
    ladder = json.loads(options.ladder.read_text())
    record = Record("planner_cpu", {"ladder": options.ladder.name, "measured": ladder["date"]})
    before = json.loads(record.path.read_text()) if record.path.is_file() else {}
    rungs = [rung for rung in ladder["rungs"] if rung["status"] == "finished"]
    odd = measured(ladder["recipe"]) if options.odd else before.get("odd", [])
    recipe, _ = load_recipe(ladder["recipe"])
    runs = [*rungs, *odd]
    predictions = dict(run_in_children([partial(predicted, recipe, run["command"]) for run in runs]))
    rows = [row(run, predictions[number]) for number, run in enumerate(runs)]
    ways = {"of the ladder": rows[: len(rungs)], "odd": rows[len(rungs) :]}
    errors = {name: [abs(found["error"]) for found in of] for name, of in ways.items() if of}
    figures = {name: {"median": median(found), "worst": max(found)} for name, found in errors.items()}
    record.write(True, rows=rows, odd=odd, errors=figures)
    cells = [
        [
            r["name"],
            str(r["steps"]),
            f"{r['measured_gb']:.3f}",
            f"{r['predicted_gb']:.3f}",
            f"{100 * r['error']:+.1f} %",
        ]
        for r in rows
    ]
    print(table(["run", "steps", "measured, GB over idle", "predicted", "error"], cells))
    for name, found in figures.items():
        print(f"{name}: median {100 * found['median']:.1f} %, worst {100 * found['worst']:.1f} %")
    print(f"written to {record.path}")


def measured(recipe: str) -> list[dict[str, Any]]:
    """The odd runs, one after the other, as the ladder measures its own."""
    found = []
    fixed = ["--run.accelerator=cpu", f"--max_steps={STEPS}", "--epochs=5", "--run.evaluate=false", "--accumulate=null"]
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, flags) in enumerate(ODD.items()):
            words = [recipe, *fixed, *flags.split()]
            environment = MALLOC_TRIM_ENV | {"OMP_NUM_THREADS": "1"}
            trial = run_trial(words, Path(folder) / str(number), seconds=300, environment=environment)
            if trial.status != "finished":
                raise SystemExit(f"{name}: {trial.status}: {trial.reason}")
            print(f"  {name}: {trial.peak_gb:.3f} GB over idle", flush=True)
            command = shlex.join(["python", "-m", "trainer", "fit", *words])
            found.append({"name": name, "command": command, "steps": trial.steps, "peak_gb": trial.peak_gb})
    return found


def predicted(recipe: Any, command: str) -> dict[str, Any]:
    """The prediction for a run, from its command line."""
    flags = [word[2:].split("=", 1) for word in shlex.split(command) if word.startswith("--")]
    ranks = int(dict(flags).get("run.devices", 1))
    chosen = [(name, value) for name, value in flags if not name.startswith("run.")]
    changed = prepare_recipe(change(recipe, {}, RecipeParser(recipe).read_flags(chosen, {})))
    return predict_in_process(changed, decide_plan(changed, ranks), Target(host_as_device()), 1, False)


def row(rung: dict[str, Any], prediction: Any) -> dict[str, Any]:
    """A line of the result."""
    if isinstance(prediction, Exception):
        raise prediction
    measured, found = rung["peak_gb"], prediction["reserved"] / GB
    return {
        "name": rung["name"],
        "steps": rung["steps"],
        "measured_gb": round(measured, 4),
        "predicted_gb": round(found, 4),
        "error": round(found / measured - 1, 4),
        "seconds": round(prediction["seconds"], 2),
    }


if __name__ == "__main__":
    main()
