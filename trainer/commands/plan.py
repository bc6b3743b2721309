"""``trainer plan``: the fastest plan that fits a budget, as a table, as flags to paste, as JSON and as a picture."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands import TRUST
from trainer.commands.recipes import asked_for, count, new_folder, yes_or_no
from trainer.errors import RunError, require
from trainer.planner.gpus import gpu_named
from trainer.recipe import Recipe
from trainer.system.files import write_atomic
from trainer.system.redact import redact, redact_value
from trainer.system.text import as_text, escaped, wrapped

if TYPE_CHECKING:
    from trainer.planner.report import PlanReport
    from trainer.planner.search import Search

# The planner imports torch: it is imported where it is used, so that --help answers at once.

FLAGS = {
    "gpu": "the GPU to plan for, such as a100-80gb, or cpu (default: the GPU of this machine)",
    "devices": "ranks in all (default: run.devices, or 1 where that is auto); several, such as 1,8,64, make a table",
    "nodes": "machines that the ranks are spread over (default: 1; in a table what --per-node makes)",
    "per-node": "for a table: devices of a machine (default: 8)",
    "interconnect": "for a table: what joins the devices, such as 100gbe,8x-ib-hdr,pcie-4+25gbe",
    "lossy": "true: also consider plans that change the result: bf16 weights, 8-bit optimizer state (default: false)",
    "out": "folder for plan.json and plan.png, or a table's scale.json (default: runs/RECIPE/plan-DATE-TIME-PID)",
}
SWITCHES = {"json": "print what plan.json holds, and nothing else, on stdout"}


def plan(argv: list[str]) -> None:
    """``trainer plan``."""
    if asked := asked_for("plan", "RECIPE", argv, FLAGS, SWITCHES):
        plan_command(asked.recipe, asked.reference, asked.flags)


def plan_command(recipe: Recipe, reference: str, flags: Sequence[tuple[str, str | None]]) -> None:
    """Plan ``recipe`` for one number of devices, or make a table of several; print the answer and write it.

    Args:
        recipe: with all flags applied.
        reference: what names the recipe to ``trainer fit``.
        flags: all that were given; those of the command itself are in ``FLAGS`` and ``SWITCHES``.

    Raises:
        RecipeError: for a flag that cannot work, or a recipe that cannot.
        RunError: when nothing fits; the table is printed and the files are written all the same.
    """
    own = {name: text or "" for name, text in flags if name in FLAGS}
    passed = [(name, text) for name, text in flags if name not in {*FLAGS, *SWITCHES}]
    as_json = ("json", None) in flags
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    require(not launched, "trainer plan needs no ranks: start it without a launcher, and say --devices")
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        if wants_table(own):
            content, missing = _scaled(recipe, reference, own)
        else:
            content, missing = _planned(recipe, reference, own, passed)
    if as_json:
        print(json.dumps(content, indent=1))
    if missing:
        raise RunError(missing)


def _planned(
    recipe: Recipe, reference: str, own: dict[str, str], passed: list[tuple[str, str | None]]
) -> tuple[dict[str, Any], str]:
    """Search, print for a person, and write the files: what ``plan.json`` holds, and what is missing for a plan."""
    devices = count("devices", own["devices"]) if "devices" in own else None
    nodes, lossy = count("nodes", own.get("nodes", "1")), yes_or_no("lossy", own.get("lossy", "false"))
    gpu = own.get("gpu")
    if gpu not in (None, "cpu"):
        gpu_named(gpu)  # before anything takes time
    from trainer.planner.report import pasteable, table, why
    from trainer.planner.search import search_for

    search = search_for(recipe, gpu, devices, nodes)
    out = new_folder("plan", own.get("out"), reference)
    total, trained = _announce(search)
    with _progress(recipe) as progress:
        # The batch is the same in all of them, and has been said.
        search.progress = lambda done, total, text: progress(done, total, text.partition(" × ")[2])
        report = search.run(lossy)
    command = chosen_command(reference, passed, recipe, report)
    content = {"parameters": total, "trained_parameters": trained, **report.to_json()}
    print(redact(f"\n{table(report)}\n\n{why(report)}"))
    if command:
        print(f"\nthe chosen plan:\n{pasteable(command)}")
    content = _write(out / "plan.json", reference, content | {"command": " ".join(command) or None})
    _draw(out, reference, report)
    print(f"\nfiles: {escaped(out)}: plan.json, plan.png")
    if report.chosen is not None:
        return content, ""
    return content, next(line for line in reversed(report.explanations) if line.startswith(("nothing", "no comb")))


def _announce(search: Search) -> tuple[int, int]:
    """Say what is planned; the number of parameters, and of those that are trained."""
    from trainer.system.children import in_child
    from trainer.weights.streaming import on_meta

    def sizes() -> list[int]:
        parameters = list(on_meta(search.recipe.model.unloaded().build).parameters())
        return [sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)]

    total, trained = in_child(sizes)
    print(search.heading(total, trained))
    return total, trained


@contextlib.contextmanager
def _progress(recipe: Recipe) -> Iterator[Callable[[int, int, str], None]]:
    """What to tell of each prediction: a bar on a terminal, lines elsewhere."""
    from trainer.report.progress import Progress

    progress = Progress(recipe.run.progress)
    progress.start(0)
    try:
        yield progress.count
    finally:
        progress.close()


def _write(path: Path, reference: str, found: dict[str, Any]) -> dict[str, Any]:
    """Write what was found; what the file then holds."""
    from trainer.report.summary import versions

    date = time.strftime("%Y-%m-%d %H:%M:%S %z")
    content: dict[str, Any] = redact_value({"recipe": reference, "date": date, **found, "versions": versions()})
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return content


def chosen_command(
    reference: str, passed: Sequence[tuple[str, str | None]], recipe: Recipe, report: PlanReport
) -> list[str]:
    """The command that trains the chosen plan, with the flags that were given; what belongs together is one word.

    Empty when nothing was chosen.
    """
    if report.chosen is None:
        return []
    here = report.devices // report.nodes
    run: dict[str, Any] = {} if recipe.run.devices == here else {"run.devices": here}
    if report.device == "CPU" and recipe.run.accelerator != "cpu":
        run["run.accelerator"] = "cpu"
    start = f"trainer fit {shlex.quote(reference)}"
    if report.nodes > 1:
        ranks = f"--nnodes {report.nodes} --nproc-per-node {here}"
        start = f"torchrun {ranks} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m {start}"
    chosen = {**run, **report.chosen.flags}
    kept = [(name, text) for name, text in passed if name not in chosen and text is not None]
    decided = [(name, as_text(value)) for name, value in chosen.items()]
    start += f" --{TRUST}" if (TRUST, None) in passed else ""
    return [start, *(f"--{name} {shlex.quote(redact_value(text, name))}" for name, text in [*kept, *decided])]


def _draw(out: Path, reference: str, report: PlanReport) -> None:
    drawn = report.drawn
    if drawn is None or drawn.prediction is None or drawn.prediction.timeline is None:
        return
    from trainer.report.plots import plot_plan

    verdict = "" if drawn is report.chosen else ", which does not fit"
    name = Path(reference).stem
    title = f"{name} on {report.devices} × {report.device}, predicted{verdict}\n{drawn.plan}"
    plot_plan(drawn.prediction.timeline, report.budget, title, out / "plan.png")


def wants_table(own: dict[str, str]) -> bool:
    """Whether flags of ``trainer plan`` ask for a table of several numbers of devices."""
    several = any("," in own.get(name, "") for name in ("devices", "nodes"))
    return several or "interconnect" in own or "per-node" in own


def counts(name: str, text: str) -> list[int]:
    """The value of ``--name``, integers of at least 1 with commas."""
    return [count(name, part.strip()) for part in text.split(",")]


def _scaled(recipe: Recipe, reference: str, own: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Simulate each number of devices, print the table and write it: what ``scale.json`` holds, and what is missing."""
    require("lossy" not in own, "--lossy searches for one number of devices: leave it out, or name one number")
    from trainer.planner.network import USUAL, clusters, interconnects
    from trainer.planner.predict import prepared
    from trainer.planner.scale import Scale, to_json
    from trainer.planner.search import devices_of, target_for

    devices = counts("devices", own["devices"]) if "devices" in own else [devices_of(recipe)]
    nodes = counts("nodes", own["nodes"]) if "nodes" in own else None
    per_node = count("per-node", own["per-node"]) if "per-node" in own else None
    sizes = clusters(devices, nodes, per_node)
    target = target_for(own.get("gpu"))
    networks = interconnects(own.get("interconnect", USUAL), target.gpu)
    scale = Scale(prepared(recipe), target, sizes, networks)
    out = new_folder("scale", own.get("out"), reference)
    with _progress(recipe) as scale.progress:
        report = scale.run()
    _print(report, type(recipe.model).__name__)
    content = _write(out / "scale.json", reference, to_json(report))
    print(f"\nfiles: {escaped(out)}: scale.json")
    if any(row["fits"] for row in content["rows"]):
        return content, ""
    return content, "nothing fits on any of these numbers of devices: shard over more, or plan one of them"


def _print(report: Any, model: str) -> None:
    from trainer.planner.scale import ASSUMED, heading, refused, table, verdict

    labels = [("model", model), *heading(report)]
    width = max(len(label) for label, _ in labels)
    print("\n".join(wrapped(f"{label:<{width}}  {text}", " " * (width + 2)) for label, text in labels))
    print(f"\n{table(report)}\n")
    lines = [verdict(report, network.name) for network in report.networks]
    lines += [f"not simulated: {line}" for line in refused(report)]
    lines += [f"assumed: {line}" for line in ASSUMED] + [f"note: {line}" for line in report.notes]
    print("\n".join(wrapped(f"- {redact(line)}", "  ") for line in lines))
