"""``trainer plan --script FILE -- ARGS``: predict the GPU memory of any training script, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.commands import CommandFlags
from trainer.commands.recipes import create_output_folder, parse_count, write_content
from trainer.errors import RunError, require
from trainer.fakegpu import script as scripts
from trainer.fakegpu.gpus import gpu_named
from trainer.system.names import did_you_mean
from trainer.system.redact import redact, redact_words
from trainer.system.text import escaped, parse_budget, wrapped

VALUED = {
    "script": "the Python file; it runs like `python FILE ARGS` in this directory, until it is stopped",
    "gpu": "the GPU to plan for, such as a100-80gb (default: the GPU of this machine)",
    "memory.budget": "memory for torch: 8GB, 7.5GiB or 90% (default: all except the CUDA context)",
    "devices": "number of ranks, as torchrun starts them (default: one, without torchrun)",
    "nodes": "number of machines (default: 1)",
    "interconnect": "network between devices, such as 100gbe or pcie-4+25gbe (default: ib-hdr)",
    "steps": "optimizer steps after which the script is stopped (default: 3)",
    "seconds": "time limit of the script (default: 600)",
    "config": "NAME=FOLDER with a config.json, for a hub model that the script loads; may be repeated",
    "columns": "columns of missing datasets, such as text:str:1000,label:int:2; kinds: str, chat, int, float, image",
    "rows": "rows in each split of missing datasets (default: 1000)",
    "out": "folder for plan.json, plan.png and script.log (default: runs/SCRIPT/plan-DATE-TIME-PID)",
}
FLAGS = CommandFlags(VALUED, {"json": "print only the content of plan.json on stdout"})
USAGE = "usage: trainer plan --script FILE [flags] [-- ARGS OF THE SCRIPT]"


def plan_script(argv: Sequence[str]) -> None:
    """Plan a script; print and write the result; raise a ``RunError`` at the end if it does not fit."""
    from trainer.commands.flags import split_argv
    from trainer.report.plots import plot_plan

    end = list(argv).index("--") if "--" in argv else len(argv)
    words, args = argv[:end], argv[end + 1 :]
    own = "put the arguments of the script after --"
    for name in (word.partition("=")[0][2:] for word in words if word.startswith("--")):
        known = {"help": "", **VALUED, **FLAGS.switches}
        require(name in known, f"unexpected --{name}: {own}{did_you_mean(name, known, '--')}")
    positionals, flags = split_argv(words, FLAGS)
    if ("help", None) in flags:
        rows = (VALUED | dict(FLAGS.switches)).items()
        print("\n".join([f"{USAGE}\n", *(wrapped(f"  --{name:<14} {text}", " " * 19) for name, text in rows)]))
        return
    require(not positionals, f"unexpected {' '.join(positionals)}: {own}")
    configs = [text or "" for name, text in flags if name == "config"]
    script = _parse_script({name: text or "" for name, text in flags}, configs, args)
    shown, answer = redact_words(args), scripts.plan_script(script)
    (timeline, capacity, title), text = answer.pop("picture"), redact(answer.pop("text"))
    plot_plan(timeline, capacity, title, Path(script.out, "plan.png"))
    found = write_content(Path(script.out, "plan.json"), {"script": script.path, "args": shown}, answer)
    left_out = (wrapped(f"left out  {line}", " " * 10) for line in found["outlined"])
    lines = [wrapped(f"script    {' '.join([script.path, *shown])}", " " * 10), text, *left_out]
    lines += [f"\nfiles: {escaped(Path(script.out))}: plan.json, plan.png, {scripts.LOG}"]
    print(json.dumps(found, indent=1) if ("json", None) in flags else "\n".join(lines))
    if found["retries"] is None:
        needs, limit = f"{found['reserved_gb']:.3f} GB", f"{found['capacity_gb']:.3f} GB"
        raise RunError(f"it does not fit: {script.path} needs {needs}, and torch can use {limit}")


def _parse_script(own: dict[str, str], named: Sequence[str], args: Sequence[str]) -> scripts.Script:
    require(Path(own["script"]).is_file(), f"--script {own['script']}: no such file")
    require(own.get("gpu") != "cpu", "--gpu=cpu is not supported for scripts: give a GPU, such as --gpu rtx-4090")
    gpu_named(own.get("gpu", "t4"))
    parse_budget(own.get("memory.budget", "1GB"), 1)
    configs = {name: f"{Path(folder).absolute()}" for name, _, folder in (text.partition("=") for text in named)}
    for name, folder in configs.items():
        require(Path(folder, "config.json").is_file(), f"--config {name}={folder}: the folder has no config.json")
    given: dict[str, Any] = {key: own[key] for key in ("gpu", "columns", "interconnect") if key in own}
    given |= {key: parse_count(key, own[key]) for key in ("steps", "seconds", "rows", "devices", "nodes") if key in own}
    out = str(create_output_folder("plan", own.get("out"), own["script"]))
    return scripts.Script(own["script"], args, out, budget=own.get("memory.budget"), configs=configs, **given)
