"""The GPU of this machine, and how much of a GPU a run may take."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from contextlib import suppress

import torch

from trainer.planner.children import Failed, in_child
from trainer.planner.gpus import GPU, detected_gpu, usable_memory
from trainer.processes import own_code
from trainer.quantities import parse_budget

ASK = """
import dataclasses, json
from trainer.planner.gpus import detected_gpu
gpu = detected_gpu()
print(json.dumps(gpu and dataclasses.asdict(gpu)))
"""
"""For a new process, which is slower than a forked one."""


def gpu_here() -> GPU | None:
    """The GPU of this machine, if it has one; a process of its own asks, so that this one can still fork."""
    if torch.cuda.is_initialized():
        return detected_gpu()
    found = None
    with suppress(Failed):
        found = in_child(lambda: dataclasses.asdict(gpu) if (gpu := detected_gpu()) else None, sees_gpu=True)
    if found is None and torch.cuda.is_available():  # this process has begun with CUDA in a way that it does not tell
        done = subprocess.run(own_code(ASK), capture_output=True, text=True, check=False)
        found = json.loads(done.stdout) if done.returncode == 0 else None
    return found and GPU(**found | {"capability": tuple(found["capability"])})


def budget_bytes(text: str, gpu: GPU, ranks: int) -> int:
    """Bytes that torch's allocator may take: the budget, but no more than the GPU has left for it."""
    size, is_fraction = parse_budget(text)
    return int(min(size * gpu.memory if is_fraction else size, usable_memory(gpu, ranks)))
