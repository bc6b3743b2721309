"""``trainer plan --devices 1,2,4,8,64``: memory, communication and time on each, for every strategy, as a table."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
import time
from typing import Any

from trainer.checkpoint.store import write_atomic
from trainer.errors import RunError, require
from trainer.own_flags import count, new_folder
from trainer.recipe import Recipe
from trainer.redact import redact, redact_value
from trainer.system.text import escaped

WIDTH = 112


def wants_table(own: dict[str, str]) -> bool:
    """Whether flags of ``trainer plan`` ask for a table of several numbers of devices."""
    several = any("," in own.get(name, "") for name in ("devices", "nodes"))
    return several or "interconnect" in own or "per-node" in own


def counts(name: str, text: str) -> list[int]:
    """The value of ``--name``, integers of at least 1 with commas."""
    return [count(name, part.strip()) for part in text.split(",")]


def scale_command(recipe: Recipe, reference: str, own: dict[str, str], as_json: bool) -> None:
    """Simulate ``recipe`` on each number of devices, print the table and write it.

    Args:
        recipe: with all flags applied.
        reference: what names the recipe to ``trainer fit``.
        own: the flags of ``trainer plan`` that were given.
        as_json: print what ``scale.json`` holds, and nothing else, on stdout.

    Raises:
        RecipeError: for a flag that cannot work, or a recipe that cannot.
        RunError: when nothing fits; the table is printed and written all the same.
    """
    require("lossy" not in own, "--lossy searches for one number of devices: leave it out, or name one number")
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        content = _scaled(recipe, reference, own)
    if as_json:
        print(json.dumps(content, indent=1))
    if not any(row["fits"] for row in content["rows"]):
        raise RunError("nothing fits on any of these numbers of devices: shard over more, or plan one of them")


def _scaled(recipe: Recipe, reference: str, own: dict[str, str]) -> dict[str, Any]:
    from trainer.planner.cluster import clusters
    from trainer.planner.fabric import USUAL, interconnects
    from trainer.planner.predict import prepared
    from trainer.planner.scale import Scale
    from trainer.planner.scale_text import to_json
    from trainer.planner.search import devices_of, target_for

    devices = counts("devices", own["devices"]) if "devices" in own else [devices_of(recipe)]
    nodes = counts("nodes", own["nodes"]) if "nodes" in own else None
    per_node = count("per-node", own["per-node"]) if "per-node" in own else None
    sizes = clusters(devices, nodes, per_node)
    target = target_for(own.get("gpu"))
    fabrics = interconnects(own.get("interconnect", USUAL), target.gpu)
    scale = Scale(prepared(recipe), target, sizes, fabrics)
    out = new_folder("scale", own.get("out"), reference)
    report = _with_progress(scale)
    from trainer.report.summary import versions

    date = time.strftime("%Y-%m-%d %H:%M:%S %z")
    content = redact_value({"recipe": reference, "date": date, **to_json(report), "versions": versions()})
    _print(report, type(recipe.model).__name__)
    write_atomic(out / "scale.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"\nfiles: {escaped(out)}: scale.json")
    return content


def _with_progress(scale: Any) -> Any:
    """Run it, with a bar on a terminal and lines elsewhere."""
    from trainer.report.progress import Progress

    progress = Progress(scale.recipe.run.progress)
    progress.start(0)
    scale.progress = progress.count
    try:
        return scale.run()
    finally:
        progress.close()


def _print(report: Any, model: str) -> None:
    from trainer.planner.scale_text import ASSUMED, heading, refused, table, verdict

    labels = [("model", model), *heading(report)]
    width = max(len(label) for label, _ in labels)
    print("\n".join(_wrapped(f"{label:<{width}}  {text}", " " * (width + 2)) for label, text in labels))
    print(f"\n{table(report)}\n")
    lines = [verdict(report, fabric.name) for fabric in report.fabrics]
    lines += [f"not simulated: {line}" for line in refused(report)]
    lines += [f"assumed: {line}" for line in ASSUMED] + [f"note: {line}" for line in report.notes]
    print("\n".join(_wrapped(f"- {redact(line)}", "  ") for line in lines))


def _wrapped(line: str, indent: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
