"""The target of a prediction: GPU, version of torch and allocator settings."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainer.errors import RecipeError, RunError
from trainer.fakegpu.gpus import GPU, gpu_of, usable_memory
from trainer.fakegpu.kernels import WITH_CUDNN, AttentionRules
from trainer.fakegpu.network import DEFAULT_NETWORK, Interconnect, interconnects
from trainer.system.child_jobs import run_in_child
from trainer.system.machine import query_gpus, query_gpus_in_child
from trainer.system.text import format_bytes, parse_budget

Workspaces = Literal["kept, and one a call", "kept", "one a call"]
"""Whether matrix products allocate a workspace once for each thread and stream, and keep it, or at each call. Before
torch 2.9, products with a bias had an additional one. Source: aten/src/ATen/cuda/CublasHandlePool.cpp."""

# cuDNN's version after which torch prefers its attention; wheels for CUDA up to 12.9 have older ones.
FAST_CUDNN = 91500
OLDEST, NEWEST = (2, 11), (2, 15)  # range of tested versions of torch
# The oldest version that a plan may name. Errors are at most 0.4 % for seven published peaks of torch 2.4 to 2.6. Rules
# for older versions (flash attention 1, the softmax of 1.10) were fitted to the peaks that they are compared with.
OLDEST_KERNELS = (2, 4)


@dataclass(frozen=True)
class Target:
    """The GPU and the software of a planned run."""

    gpu: GPU
    torch_version: tuple[int, int] = (0, 0)  # (major, minor) of the kernels; (0, 0): this process's version
    expandable_segments: bool = False  # whether the run sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    joined_by: str = DEFAULT_NETWORK  # interconnect of the devices, as in ``--interconnect``

    def __post_init__(self) -> None:
        if not OLDEST_KERNELS <= self.version <= max(NEWEST, installed_version()):
            named = (*self.torch_version, *OLDEST_KERNELS, *NEWEST)
            raise RecipeError("torch_version={}.{}: kernels are known for torch {}.{} to {}.{}".format(*named))

    @classmethod
    def here(cls, gpu: GPU, joined_by: str = DEFAULT_NETWORK) -> Target:
        """Return ``gpu`` with this process's version of torch and allocator settings."""
        config = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        expandable = "expandable_segments:true" in config.lower().replace(" ", "")
        return cls(gpu, expandable_segments=expandable, joined_by=joined_by)

    @property
    def network(self) -> Interconnect:
        """The interconnect of the devices."""
        return interconnects(self.joined_by, self.gpu)[0]

    @property
    def device(self) -> torch.device:
        """The device of the run's tensors."""
        return torch.device("cpu") if self.gpu.name == "cpu" else torch.device("cuda", 0)

    @property
    def version(self) -> tuple[int, int]:
        """``torch_version``, or that of this process."""
        return self.torch_version if self.torch_version > (0, 0) else installed_version()

    @property
    def attention(self) -> AttentionRules:
        """The rules for attention kernels. A CPU build of torch has no cuDNN, so a fast one is assumed."""
        asked = self.version >= (2, 10) and self.gpu.capability in WITH_CUDNN  # cuDNN may reject other GPUs
        return AttentionRules(self.gpu.capability, asked and (torch.backends.cudnn.version() or 10**6) > FAST_CUDNN)

    @property
    def workspaces(self) -> Workspaces:
        """The lifetime of cuBLAS workspaces."""
        if self.version < (2, 9):
            return "kept, and one a call"
        kept = self.version < (2, 15) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
        return "kept" if kept else "one a call"


def installed_version() -> tuple[int, int]:
    """``(major, minor)`` of torch."""
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


# The GPU of this machine, and how much of a GPU a run may take.


def gpu_here() -> GPU | None:
    """Return the GPU of this machine, if any; a child process asks torch, so that this process can still fork."""
    if torch.cuda.is_initialized():
        return gpu_of(query_gpus()[torch.cuda.current_device()])
    found: list[dict[str, Any]] = []
    with suppress(RunError):
        found = run_in_child(query_gpus, sees_gpu=True)  # a fork is faster than a new interpreter
    if not found and torch.cuda.is_available():  # this process uses CUDA although is_initialized() is False
        with suppress(RunError):
            found = query_gpus_in_child()
    return gpu_of(found[0]) if found else None


def budget_bytes(text: str | None, gpu: GPU, ranks: int) -> int:
    """Return the bytes that torch's allocator may take: the budget, if any, but at most the GPU's usable memory."""
    usable = usable_memory(gpu, ranks)
    return usable if text is None else int(min(parse_budget(text, gpu.memory), usable))


def reduced_budget_note(text: str | None, gpu: GPU, ranks: int) -> list[str]:
    """Return a message if the budget ``text`` is more than :func:`budget_bytes`."""
    budget = budget_bytes(text, gpu, ranks)
    if text is None or int(parse_budget(text, gpu.memory)) <= budget:
        return []
    return [f"memory.budget: {text} was asked for, and {gpu.title} has no more than {format_bytes(budget)} for torch"]
