"""``trainer plan``: the fastest plan that fits a budget, as a table, flags to paste, JSON and HTML."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands import TRUST_RECIPE, CommandFlags
from trainer.commands.recipes import ParsedCommand, create_output_folder, parse_command, parse_count, write_content
from trainer.errors import RecipeError, RunError, require
from trainer.fakegpu.gpus import NO_GPU, gpu_named, host_as_device
from trainer.recipe import Recipe
from trainer.system.imports import quick_imports
from trainer.system.machine import gpu_possible
from trainer.system.redact import redact, redact_value
from trainer.system.status_line import show_status
from trainer.system.text import as_text, escaped, wrapped

if TYPE_CHECKING:
    from trainer.commands.flags import Flags
    from trainer.fakegpu.network import Cluster
    from trainer.planner.report import PlanReport
    from trainer.planner.search import Search

# Modules that import torch are imported inside the functions, so that --help and errors in flags are fast.

HUB_FLAGS = {
    "task": "for hf:MODEL: causal-lm, masked-lm, sequence-classification, ... (default: from its config.json)",
    "tokens": "for hf:MODEL: tokens per text (default: the maximum of the model, but at most 4096)",
    "batch": "for hf:MODEL: samples per step (default: 8)",
    "lora": "for hf:MODEL: rank of LoRA adapters to train instead of the weights",
}
VALUED_FLAGS = {
    "gpu": "the GPU to plan for, such as a100-80gb, or cpu (default: the GPU of this machine)",
    "devices": "total ranks (default: run.devices, or 1 if that is auto); several, such as 1,8,64, make a table",
    "nodes": "number of machines; several, one for each of --devices, make a table (default: 1)",
    "per-node": "instead of --nodes: devices per machine (default in a table: 8)",
    "interconnect": "network between devices, such as 100gbe or pcie-4+25gbe (default: ib-hdr); several, such as "
    "100gbe,8x-ib-hdr, make a table",
    "lossy": "true: also consider plans that change the result: bf16 weights, 8-bit state, TF32 (default: false)",
    **HUB_FLAGS,
    "out": "folder for plan.json and .html, or a table's scale.json (default: runs/RECIPE/plan-DATE-TIME-PID)",
}
SWITCHES = {
    "all": "also predict plans that cannot be chosen, because they are slower than one that fits, or too large",
    "page": 'also write fit.html, the page "Will it fit?" about the traced plans: they are replayed for any card',
    "json": "print only the content of plan.json on stdout",
}
DESCRIPTION = (
    "Find the fastest plan that fits a memory budget; no GPU is needed. RECIPE may be hf:MODEL, or hf:FOLDER with a "
    "config.json. Several --devices make a table. To plan any training script: trainer plan --script FILE --help."
)
FLAGS = CommandFlags(VALUED_FLAGS, SWITCHES, description=DESCRIPTION)


def plan(argv: list[str]) -> None:
    """Plan a recipe for one or several numbers of devices; print and write it; a RunError at the end if none fits."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    require(not launched, "trainer plan needs no ranks: start it without a launcher, and give --devices")
    if any(word.partition("=")[0] == "--script" for word in argv):
        from trainer.commands.plan_script import plan_script

        plan_script(argv)
        return
    asked = parse_command("plan", "RECIPE", argv, FLAGS, make_recipe=_recipe_from_hub_config)
    if asked is None:
        return
    own = {name: text or "" for name, text in asked.flags if name in VALUED_FLAGS}
    as_json = ("json", None) in asked.flags
    # Several values of one of these make a table; otherwise the fastest plan is searched.
    several = any("," in own.get(name, "") for name in ("devices", "nodes", "interconnect"))
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        content, missing = (_run_scale if several else _run_search)(asked, own)
    if as_json:
        print(json.dumps(content, indent=1))
    if missing:
        raise RunError(missing)


def _recipe_from_hub_config(reference: str, flags: Flags) -> Recipe | None:
    given = {name: text or "" for name, text in flags if name in HUB_FLAGS}
    if not reference.startswith("hf:"):
        for name in given:
            raise RecipeError(f"--{name} is for hf:MODEL, and {reference} is a recipe that sets it: leave it out")
        return None
    from trainer.planner.hub_config import hub_recipe

    numbers = {name: parse_count(name, text) for name, text in given.items() if name != "task"}
    revision = dict(flags).get("model.revision")
    return hub_recipe(reference.removeprefix("hf:"), given.get("task"), revision=revision, **numbers)


def _run_search(asked: ParsedCommand, own: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Search, print and write files; return the content of ``plan.json``, and why there is no plan (or "")."""
    recipe, _, reference, flags = asked
    cluster = _parse_clusters(recipe, own, False)[-1]
    lossy, gpu = own.get("lossy", "false"), own.get("gpu")
    require(lossy.lower() in ("true", "false"), f"--lossy={lossy!r} must be true or false")
    with quick_imports():
        import accelerate  # noqa: F401  # imported once here instead of in each forked child

        from trainer.planner.hub_config import recipe_to_train
        from trainer.planner.report import NOTHING, explanation_text, settings, table, wrap_command
        from trainer.planner.search import search_for
        from trainer.report.progress import Progress

    show_status("preparing model and data")
    search = search_for(recipe, gpu, cluster.devices, cluster.nodes, interconnect=own.get("interconnect"))
    search.keeps_columns = ("page", None) in flags
    one_gpu = search.devices == 1 and search.target.device.type == "cuda"
    require(one_gpu or not search.keeps_columns, "--page shows a run on one GPU: give --gpu and --devices 1")
    out = create_output_folder("plan", own.get("out"), reference)
    print(search.heading())
    with contextlib.closing(Progress(recipe.run.progress)) as progress:
        progress.start(0)
        show_status("predicting")
        search.progress = progress.count
        report = search.run(lossy.lower() == "true", ("all", None) in flags)
    by, own_flags = recipe_to_train(reference, recipe)
    passed = [(name, text) for name, text in flags if name not in (*VALUED_FLAGS, *SWITCHES, *own_flags)]
    command = command_for_plan(by, [*own_flags.items(), *passed], recipe, report) if by else []
    print(redact(f"\n{table(report)}\n\n{explanation_text(report)}"))
    over = f", over {report.interconnect}" if report.interconnect else ""
    if command:
        print(f"\nthe chosen plan{over}:\n{wrap_command(command)}")
    elif report.chosen is not None:
        print(f"\nthe chosen plan{over} (no packaged recipe trains this model):\n{settings(report)}")
    counts = search.size.counts
    found = {"parameters": counts.parameters, "trained_parameters": counts.trained, **report.to_json()}
    found["command"] = " ".join(command) or None
    content = write_content(out / "plan.json", {"recipe": redact(reference)}, found)
    drawn = report.drawn.prediction if report.drawn is not None else None
    write_page(out / "plan.html", content, drawn.timeline if drawn is not None else None)
    pages = "plan.json, plan.html"
    if search.keeps_columns and any(one.prediction for one in report.candidates):
        pages += ", fit.html"
        words = [f"trainer {'fit' if by else 'plan'} {shlex.quote(by or reference)}"]
        words += _as_words([*own_flags.items(), *passed])
        write_own_page(out / "fit.html", redact(reference), words, search, report)
    print(f"\nfiles: {escaped(out)}: {pages}")
    missing = [line for line in report.explanations if line.startswith(NOTHING)]
    return content, missing[0] if report.chosen is None else ""


def _parse_clusters(recipe: Recipe, own: dict[str, str], several: bool) -> list[Cluster]:
    """Return the devices and nodes; invalid flags are rejected here, before anything slow."""
    from trainer.fakegpu.network import DEFAULT_NETWORKS, clusters, interconnects
    from trainer.planner.knobs import devices_of

    if own.get("gpu") not in (None, "cpu"):
        gpu_named(own["gpu"])
    interconnects(own.get("interconnect", DEFAULT_NETWORKS), host_as_device())  # rejects unknown names
    given = {name: own[name].split(",") for name in ("devices", "nodes") if name in own}
    numbers = {name: [parse_count(name, part.strip()) for part in parts] for name, parts in given.items()}
    devices, nodes = numbers.get("devices"), numbers.get("nodes")
    per_node = parse_count("per-node", own["per-node"]) if "per-node" in own else None
    is_one_node = nodes is None and per_node is None and not several
    found = clusters(devices or [devices_of(recipe)], [1] if is_one_node else nodes, per_node)
    require("gpu" in own or gpu_possible(), NO_GPU)
    recipe.data.use_model(recipe.model)
    recipe.data.require_files()
    return found


def command_for_plan(reference: str, passed: Flags, recipe: Recipe, report: PlanReport) -> list[str]:
    """Return the command that trains the chosen plan, including the given flags; empty without a plan."""
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
    decided = {"memory.precision": report.recipe.memory.precision} if recipe.memory.precision == "auto" else {}
    chosen = {**run, **decided, **report.chosen.flags}
    kept = [(name, text) for name, text in passed if name not in chosen]
    start += f" --{TRUST_RECIPE}" if (TRUST_RECIPE, None) in passed else ""
    return [start, *_as_words([*kept, *((name, as_text(value)) for name, value in chosen.items())])]


def _as_words(flags: Flags) -> list[str]:
    return [f"--{name} {shlex.quote(redact_value(text, name))}" for name, text in flags if text is not None]


def _run_scale(asked: ParsedCommand, own: dict[str, str]) -> tuple[dict[str, Any], str]:
    recipe, _, reference, _ = asked
    for name in {"lossy", "all", "page"} & {name for name, _ in asked.flags}:
        raise RecipeError(f"--{name} is for a search with one number of devices: leave it out, or give one number")
    sizes = _parse_clusters(recipe, own, True)
    with quick_imports():
        from trainer.fakegpu.network import DEFAULT_NETWORKS, interconnects
        from trainer.planner.predict import prepare_recipe
        from trainer.planner.scale import ASSUMED, ScaleSearch, heading, refused, summary_text, table, to_json
        from trainer.planner.search import target_for
        from trainer.report.progress import Progress

    target = target_for(own.get("gpu"))
    networks = interconnects(own.get("interconnect", DEFAULT_NETWORKS), target.gpu)
    scale = ScaleSearch(prepare_recipe(recipe, outlines=True), target, sizes, networks)
    out = create_output_folder("scale", own.get("out"), reference)
    with contextlib.closing(Progress(recipe.run.progress)) as progress:
        progress.start(0)
        scale.progress = progress.count
        report = scale.run()
    labels = [("model", type(recipe.model).__name__), *heading(report)]
    width = max(len(label) for label, _ in labels)
    print("\n".join(wrapped(f"{label:<{width}}  {text}", " " * (width + 2)) for label, text in labels))
    print(f"\n{table(report)}\n")
    lines = [summary_text(report, network.name) for network in report.networks]
    lines += [f"not simulated: {line}" for line in refused(report)]
    lines += [f"assumed: {line}" for line in ASSUMED] + [f"note: {line}" for line in report.notes]
    print("\n".join(wrapped(f"- {redact(line)}", "  ") for line in lines))
    content = write_content(out / "scale.json", {"recipe": redact(reference)}, to_json(report))
    print(f"\nfiles: {escaped(out)}: scale.json")
    missing = "nothing fits on any of these numbers of devices: use more devices, or plan for one number"
    return content, "" if any(row["retries"] is not None for row in content["rows"]) else missing


def write_page(path: Path, content: Mapping[str, Any], timeline: Mapping[str, Any] | None) -> None:
    """Write ``plan.html``: the content of ``plan.json`` with two sliders, and the curve of ``timeline``, if given."""
    from trainer.report import html_report
    from trainer.report.plots import CATEGORIES

    curve = None if timeline is None else {**timeline, "categories": CATEGORIES}
    template = Path(__file__).with_name("page.html")
    html_report.write_page(path, template, title=content["recipe"], plan=content, curve=curve)


def write_own_page(path: Path, name: str, command: list[str], search: Search, report: PlanReport) -> None:
    """Write the page "Will it fit?" about the traced plans of a search, which ``command`` with their flags trains."""
    from trainer.commands.fit_page import data_script, write_fit_page
    from trainer.planner.knobs import without_size

    traced = [(one.flags, one.prediction.columns) for one in report.candidates if one.prediction is not None]
    plans = [{"flags": without_size(flags), **(columns or {})} for flags, columns in traced]
    gpu, model = search.target.gpu, {"name": name, "command": " ".join(command), "batch": search.recipe.batch_size}
    about = {"card": gpu.name, "traced": gpu.title, "budget": 100 * report.budget / gpu.memory, "models": [model]}
    write_fit_page(path, about, data_script(name, plans), gpu)
