"""``python benchmarks/measured_run.py --out MEASURED.json fit RECIPE ...``: a run, looked at from outside.

torch calls a hook before every step of any optimizer. By then the engine has read the loss, so the host has waited for
the device: times are those of whole steps, and the gradients are those that the weights will be updated with, wherever
a technique keeps them. The flags of the recipe are read without jsonargparse, as plain YAML values: a machine that
lacks it can run a row all the same.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from trainer.api import fit
from trainer.commands.recipes import load_recipe
from trainer.engine.data_feed import fill_from_data
from trainer.errors import RecipeError, RunError
from trainer.recipe import Recipe
from trainer.settings import change
from trainer.system.error_reports import report
from trainer.system.files import write_atomic

KEPT = 5
"""Gradients of matrices that are kept whole, from the first to the last; of all others there are the norms."""
QUESTION = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
DIRECTIONS = {"HtoD": "to_device", "DtoH": "to_host"}


class Meter:
    """Looks at a run whenever its optimizer is about to step; what it found is written each time.

    Args:
        out: the file; gradients go to another beside it.
        profiled: the step at which one step under the profiler begins; ``None`` for none.
        trace: where to keep the profiler's trace; ``None`` throws it away once the copies are counted.
        killed_at: the step before which the process kills itself, as ``kill -9`` does; ``None`` for none.
        until: ``time.time()`` by which the last step must have ended: one that would end later is not begun.
    """

    def __init__(
        self,
        out: Path,
        profiled: int | None = None,
        trace: Path | None = None,
        killed_at: int | None = None,
        until: float = math.inf,
    ) -> None:
        self.out, self.profiled, self.trace, self.killed_at, self.until = out, profiled, trace, killed_at, until
        self.found: dict[str, Any] = {"step_seconds": [], "on_gpu": torch.cuda.is_available()}
        self.steps = 0
        self.ended = 0.0
        self.names: list[tuple[str, tuple[int, ...]]] = []
        self.profiler: profile | None = None

    def __enter__(self) -> Meter:
        self.hooks = [register_module_forward_pre_hook(self._meet), register_optimizer_step_pre_hook(self._before_step)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def write(self, **found: Any) -> None:
        """Add to what was found, and write all of it."""
        self.found |= found
        write_atomic(self.out, json.dumps(self.found), sync_folder=False)

    def _meet(self, module: nn.Module, _: Any) -> None:
        """The first module that is called is the whole one: its weights, by name."""
        self.hooks.pop(0).remove()
        self.ended = time.perf_counter()
        trained = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
        self.names = [(name.replace("_orig_mod.", ""), shape) for name, shape in trained]

    def _before_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        took = time.perf_counter() - self.ended
        if not any(group["lr"] for group in optimizer.param_groups):  # by which a resumed run makes its state
            return
        self.steps += 1
        if self.steps == 1:
            self._keep_gradients(optimizer)
        else:
            self.found["step_seconds"].append(took)
        if self.profiler is not None:
            self._read_profile(self.profiler)
            self.profiler = None
        if self.steps == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == self.profiled:
            self.found |= process_memory() | {"profiled": len(self.found["step_seconds"])}
            self.profiler = self._begin_profile()
        if time.time() + took > self.until:
            self.write(cut_at=self.steps)
            raise KeyboardInterrupt  # the run ends with its summary, and saves nothing
        self.write()
        self.ended = time.perf_counter()

    def _keep_gradients(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        in_order = sorted(self.names, key=lambda one: len(one[1]) < 2)  # matrices are the optimizer's first group
        if [shape for _, shape in in_order] != [tuple(p.shape) for p in parameters]:
            self.found["gradient_problem"] = "the optimizer's weights are not those of the module, in order"
            return
        found = {name: _local(p.grad) for (name, _), p in zip(in_order, parameters, strict=True) if p.grad is not None}
        norms = {name: torch.linalg.vector_norm(g, dtype=torch.float32).item() for name, g in found.items()}
        matrices = [name for name, g in found.items() if g.ndim >= 2]
        chosen = {matrices[number * (len(matrices) - 1) // (KEPT - 1)] for number in range(KEPT)}
        save_file({name: found[name].cpu().float().contiguous() for name in chosen}, gradients_beside(self.out))
        self.found |= {"grad_norm": math.hypot(*norms.values()), "grad_norms": norms}

    def _begin_profile(self) -> profile | None:
        if not torch.cuda.is_available():
            return None
        kinds = [ProfilerActivity.CUDA] if self.trace is None else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        profiler = profile(activities=kinds)
        profiler.start()
        return profiler

    def _read_profile(self, profiler: profile) -> None:
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(written))
            content = written.read_bytes()
        self.found["copied"] = copied(json.loads(content))
        if self.trace is not None:
            self.trace.write_bytes(gzip.compress(content, mtime=0))


def gradients_beside(out: Path) -> Path:
    """The file of gradients that belongs to ``out``."""
    return out.with_suffix(".safetensors")


def _local(gradient: Tensor) -> Tensor:
    """What this rank, the only one, holds: all of it."""
    gradient = gradient.detach()
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def copied(trace: Mapping[str, Any]) -> dict[str, int] | None:
    """Bytes over the bus in each direction, from a trace of the profiler; ``None`` where it saw nothing of a GPU."""
    kinds = {event.get("cat") for event in trace["traceEvents"]}
    if not kinds & {"kernel", "gpu_memcpy"}:
        return None
    total = dict.fromkeys(DIRECTIONS.values(), 0)
    for event in trace["traceEvents"]:
        if event.get("cat") == "gpu_memcpy":
            for sign, direction in DIRECTIONS.items():
                total[direction] += event["args"]["bytes"] * (sign in event["name"])
    return total


def process_memory() -> dict[str, Any]:
    """GB that the driver counts for this process: the allocator's, and CUDA's own."""
    if not torch.cuda.is_available():
        return {"process_gb": None, "process_from": "not known"}
    try:
        said = subprocess.run(QUESTION, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        said = ""
    used = of_process(said, os.getpid())
    if used is not None:
        return {"process_gb": used / 1e9, "process_from": "NVML"}
    free, total = torch.cuda.mem_get_info()
    return {"process_gb": (total - free) / 1e9, "process_from": "the whole device"}


def of_process(said: str, pid: int) -> int | None:
    """Bytes of a process, from what nvidia-smi says of all; of the only one, for a container has numbers of its own."""
    rows = [line.split(",") for line in said.splitlines() if line.count(",") == 1]
    used = {int(number): int(mib) * 2**20 for number, mib in rows if mib.strip().isdigit()}
    return used.get(pid, next(iter(used.values())) if len(used) == 1 else None)


def flops_per_sample(recipe: Recipe) -> float:
    """Floating-point operations of forward and backward for a sample, without what checkpointing computes again."""
    model = fill_from_data(recipe.model, recipe.data)
    with torch.device("meta"):
        module = model.build()
    batch = {key: value.to("meta") for key, value in recipe.data.train.__getitems__([0, 1]).items()}
    with FlopCounterMode(display=False) as counter:
        for loss in model.losses(module, batch):
            loss.total.backward()
    return counter.get_total_flops() / 2


def read(words: Sequence[str]) -> tuple[Recipe, str]:
    """The recipe that ``RECIPE --key=value ...`` means, and its source."""
    recipe, source = load_recipe(words[0])
    flags = dict(word.removeprefix("--").split("=", 1) for word in words[1:])
    return change(recipe, {key: yaml.safe_load(value) for key, value in flags.items()}), source


def cap(gigabytes: float) -> None:
    """Make the allocator refuse to hold more; what CUDA itself takes (its context, the kernels) is not counted."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total), 0)


def main(argv: Sequence[str]) -> int:
    """The command line; the exit code is that of ``trainer fit``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write what was measured to")
    parser.add_argument("--cap", type=float, help="GB that the allocator may hold")
    parser.add_argument("--profile", type=int, help="the step at which one step under the profiler begins")
    parser.add_argument("--trace", type=Path, help="where to keep the profiler's trace, compressed")
    parser.add_argument("--kill", type=int, help="the step before which the process kills itself")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds since 1970: no step ends later")
    parser.add_argument("--flops", action="store_true", help="count the floating-point operations of a sample")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="fit RECIPE --key=value ...")
    asked = parser.parse_args(argv)
    if asked.cap is not None:
        cap(asked.cap)
    try:
        recipe, source = read(asked.words[1:])
        with Meter(asked.out, asked.profile, asked.trace, asked.kill, asked.until) as meter:
            meter.write(batch_size=recipe.batch_size, precision=recipe.memory.precision)
            try:
                fit(recipe, source)
            except KeyboardInterrupt:
                if "cut_at" not in meter.found:
                    raise
        if asked.flops:
            meter.write(flops_per_sample=flops_per_sample(recipe))
    except (RecipeError, RunError) as error:
        report(error)
        return 2 if isinstance(error, RecipeError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
