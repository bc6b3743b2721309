"""``trainer plan --script FILE -- ARGS``: what an unmodified training script would take of a GPU that need not be there."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.commands import OwnFlags
from trainer.commands.recipes import count, new_folder
from trainer.errors import RecipeError, RunError, require
from trainer.planner.gpus import gpu_named
from trainer.planner.script import LOG, Script
from trainer.planner.script import plan_script as traced
from trainer.settings import did_you_mean
from trainer.system.files import write_atomic
from trainer.system.redact import redact_value
from trainer.system.text import columns, escaped, parse_budget, wrapped

VALUED = {
    "script": "the Python file; it runs as `python FILE ARGS` would, in this directory, and is stopped",
    "gpu": "the GPU to plan for, such as a100-80gb (default: the GPU of this machine)",
    "memory.budget": "what torch may take of it: 8GB, 7.5GiB or 90%% (default: all that the context leaves)",
    "steps": "optimizer steps after which the script is stopped (default: 3)",
    "seconds": "that it may take (default: 600)",
    "config": "NAME=FOLDER: a folder with config.json for what the script calls NAME; may be given several times",
    "columns": "of data sets of the hub that are not here: text:str:1000,label:int:2 (name:kind:number; kinds are str "
    "and chat with their characters, int with its classes, float, image with its side)",
    "rows": "of each split of them (default: 1000)",
    "out": "folder for plan.json, plan.png and script.log (default: runs/SCRIPT/plan-DATE-TIME-PID)",
}
FLAGS = OwnFlags(VALUED, {"json": "print what plan.json holds, and nothing else, on stdout"})
USAGE = "usage: trainer plan --script FILE [flags] [-- ARGS OF THE SCRIPT]"
SHOWN = 6  # of the largest tensors


def plan_script(argv: Sequence[str]) -> None:
    """Plan a script; print the answer and write it.

    Raises:
        RecipeError: for a flag that cannot be meant, and when the script fails or cannot be traced.
        RunError: when it does not fit; all is printed and written all the same.
    """
    from trainer.commands.flags import scan

    at = list(argv).index("--") if "--" in argv else len(argv)
    positionals, flags = scan(argv[:at], FLAGS)
    if ("help", None) in flags:
        rows = [(name, text.replace("%%", "%")) for name, text in {**VALUED, **FLAGS.switches}.items()]
        print("\n".join([USAGE, "", *(wrapped(f"  --{name:<14} {text}", " " * 19) for name, text in rows)]))
        return
    require(not positionals, f"unexpected {positionals[:1]}: the script's own arguments come after --")
    for name, _ in flags:
        known = name in VALUED or name in FLAGS.switches
        require(known, f"unknown flag --{name}{did_you_mean(name, VALUED)}: those of the script come after --")
    own = {name: text or "" for name, text in flags}
    script, as_json = _script(own, [text or "" for name, text in flags if name == "config"], argv[at + 1 :]), "json" in own
    began = time.perf_counter()
    found = traced(script)
    found = {"script": script.path, "args": list(script.args)} | found | {"seconds": time.perf_counter() - began}
    content = redact_value(found)
    write_atomic(Path(script.out) / "plan.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    text = json.dumps(content, indent=1) if as_json else described(content)
    print(text if as_json else f"{text}\n\nfiles: {escaped(Path(script.out))}: plan.json, plan.png, {LOG}")
    if not content["fits"]:
        reserved, budget = content["reserved_gb"], content["budget_gb"]
        raise RunError(f"nothing fits: the script takes {reserved:.2f} GB, and there are {budget:.2f} GB")


def _script(own: dict[str, str], named: Sequence[str], args: Sequence[str]) -> Script:
    path, configs = own["script"], dict[str, str]()
    require(Path(path).is_file(), f"--script {path}: no such file")
    if "gpu" in own:
        gpu_named(own["gpu"])
    if "memory.budget" in own:
        parse_budget(own["memory.budget"], 1)
    for text in named:
        name, _, folder = text.partition("=")
        if not (Path(folder) / "config.json").is_file():
            raise RecipeError(f"--config {text}: must be NAME=FOLDER, and FOLDER must hold config.json")
        configs[name] = str(Path(folder).absolute())
    numbers = {name: count(name, own[name]) for name in ("steps", "seconds", "rows") if name in own}
    out = new_folder("plan", own.get("out"), path)
    budget, said = own.get("memory.budget"), own.get("columns")
    return Script(path, args, str(out), own.get("gpu"), budget, configs=configs, columns=said, **numbers)


def described(found: dict[str, Any]) -> str:
    """What was found, for a person."""
    def gb(value: float) -> str:
        return f"{value:.2f} GB" if value >= 1 else f"{1e3 * value:.1f} MB"

    verdict = "fits" if found["fits"] else "does not fit"
    spare = gb(abs(found["budget_gb"] - found["reserved_gb"]))
    rows = [
        ("script", " ".join([found["script"], *found["args"]])),
        ("device", f"1 × {found['title']}, {gb(found['budget_gb'])} for torch"),
        ("peak", f"{gb(found['reserved_gb'])} reserved, {gb(found['allocated_gb'])} allocated, in {found['peak_phase']}"),
        ("verdict", f"{verdict}: {spare} {'to spare' if found['fits'] else 'too much'}"),
        ("host", f"{gb(found['host_gb'])} by tensors"),
        ("step", f"about {found['step_ms']:,.1f} ms; {found['steps']} optimizer steps were traced"),
        ("at peak", ", ".join(f"{name} {gb(size)}" for name, size in found["categories"].items())),
        ("phases", ", ".join(f"{name} {gb(peak['allocated_gb'])}" for name, peak in found["phases"].items())),
    ]
    lines = [wrapped(f"{label:<8} {text}", " " * 9) for label, text in rows]
    largest = [
        [gb(one["gb"]), one["category"], one["name"], f"{one['dtype']} {tuple(one['shape'])}" if one["dtype"] else ""]
        for one in found["largest"][:SHOWN]
    ]
    lines += ["", columns(["largest", "for", "what", "tensor"], largest, ("for", "what", "tensor")), ""]
    notes = [*(f"outlined: {line}" for line in found["outlined"]), *(f"note: {line}" for line in found["notes"])]
    return "\n".join([*lines, *(wrapped(f"- {line}", "  ") for line in notes)]).rstrip()
