"""``trainer same-gradient``: compare the gradients of two runs of unmodified scripts."""

import os
import re
import shutil
from pathlib import Path
from subprocess import DEVNULL, run
from tempfile import TemporaryDirectory
from typing import Any

from trainer.commands.flags import split_argv
from trainer.commands.recipes import parse_count
from trainer.errors import MissingArgumentError, RunError, require
from trainer.system.names import did_you_mean

NUMBER = r"[0-9]*\.?[0-9]+(e-?[0-9]+)?"
ROUNDING = 256 * 2.0**-23  # for sums over 2**16 terms in float32; in fp16 and bf16 only results are rounded


def same_gradient(argv: list[str]) -> None:
    """Run both commands and print how their gradients compare; raise a ``RunError`` if they differ."""
    marks = [*(at for at, word in enumerate(argv) if word == "--"), len(argv)]
    commands = [list(argv[start + 1 : end]) for start, end in zip(marks, marks[1:], strict=False)]
    positionals, flags = split_argv(argv[: marks[0]])
    given = {"steps": "3", "tolerance": "0"} | {name: text or "" for name, text in flags}
    for name in [*given][2:]:
        require(name == "help", f"same-gradient has no flag --{name}{did_you_mean(name, [*given][:2], '--')}")
    if "help" in given or positionals or len(commands) != 2 or not all(commands):
        raise MissingArgumentError("same-gradient takes -- COMMAND A -- COMMAND B, and --steps and --tolerance before")
    steps, is_number = parse_count("steps", given["steps"]), re.fullmatch(NUMBER, given["tolerance"])
    require(bool(is_number), f"--tolerance={given['tolerance']!r} must be a number such as 1e-4")
    for command in commands:
        require(shutil.which(command[0]) is not None, f"{command[0]}: command not found")
    with TemporaryDirectory(prefix="same-gradient-") as folder:
        a, b = (record(name, command, folder, steps) for name, command in zip("AB", commands, strict=True))
        compare(a, b, float(given["tolerance"]))


def record(name: str, command: list[str], folder: str, steps: int) -> list[dict[str, Any]]:
    """Return the first optimizer steps of a command, as the hook in its processes has recorded them."""
    import torch

    out, hook = Path(folder, name), Path(__file__).with_name("gradient_hook.py").read_text()
    out.mkdir()
    Path(out, "sitecustomize.py").write_text(f"{hook}\nsys.meta_path.insert(0, Recorder({str(out)!r}, {steps}))\n")
    environment = os.environ | {"PYTHONPATH": f"{out}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)}
    code = run(command, env=environment, stdin=DEVNULL, stdout=DEVNULL, check=False).returncode
    found = sorted(out.glob("step-*"))
    require(code == 0 or len(found) == steps, f"{name} failed with exit code {code}: its last lines are above")
    require(bool(found), f"{name} took no optimizer step: does it train with torch, in a Python without -E, -I and -S?")
    return [torch.load(path, weights_only=True, mmap=True) for path in found]


def compare(a: list[dict[str, Any]], b: list[dict[str, Any]], tolerance: float) -> None:
    """Print the relative error of each step; raise a ``RunError`` if gradients, learning rates or weights differ."""
    found = list[str]()
    for number, (one, other) in enumerate(zip(a, b, strict=False), 1):
        (aa, ab), (_, bb) = other["products"].tolist()
        error = (max(aa - 2 * ab + bb, 0.0) / (aa or 1.0)) ** 0.5
        limit = tolerance or max(ROUNDING, 4 * one["eps"], 4 * other["eps"])
        print("\n" * (number == 1) + f"step {number}: relative error {error:.1e}, up to {limit:.1e} is rounding")
        apart = bool((one["weights"] - other["weights"]).norm() > ROUNDING * one["weights"].norm())
        require(number > 1 or not apart, "A and B start from different weights: set one seed, and resume no checkpoint")
        kinds = (
            (one["rates"] != other["rates"], f"the learning rate is {one['rates'][0]} in A, {other['rates'][0]} in B"),
            (apart, "the weights differ after equal gradients: so do settings of the optimizer"),
            (not error <= limit, explain(aa, ab, bb, limit)),
        )
        found += [f"step {number}{', not before' * (number > 1)}: {text}" for is_found, text in kinds if is_found][:1]
    found[1:] = [f"A takes {len(a)} optimizer steps, B takes {len(b)}"] if len(a) != len(b) else []
    if found:
        raise RunError(f"not the same: {'; '.join(found)}")
    print(f"the same gradient in {len(b)} optimizer steps")


def explain(aa: float, ab: float, bb: float, limit: float) -> str:
    """Return how two gradients differ, and the usual reason, from their scalar products."""
    cosine = ab / (aa * bb) ** 0.5 if aa * bb > 0 else float("nan")
    if cosine > 0 and 1 - cosine**2 <= limit**2:
        return f"B's gradient is {ab / aa:.6g} times A's: is it divided by the number of micro-batches, ranks or items?"
    usual = "samples do not weigh the same (a mean of means), are not the same, or something is random"
    return f"the gradients have different directions (cosine {cosine:.3f}): {usual}; compare A with itself"
