"""Whether our Triton kernels compute on a device. Triton is imported only where there is a GPU for it."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

OLDEST = (7, 5)  # the first compute capability that they are compiled for in tests: Turing, such as a T4


def has_kernels(tensor: Tensor) -> bool:
    """Whether they compute where ``tensor`` is: on the current NVIDIA GPU, or on the one that the planner simulates."""
    if not tensor.is_cuda or torch.version.hip is not None:
        return False
    if torch.compiler.is_compiling():  # which needs Triton itself
        return True
    index = torch.cuda.current_device()
    fits = tensor.device.index == index and torch.cuda.get_device_capability(index) >= OLDEST
    return fits and (isinstance(tensor, FakeTensor) or _launches(index))


@cache
def _launches(index: int) -> bool:
    """Whether a kernel that does nothing runs: Triton needs a C compiler, Python's headers and a cache folder."""
    try:
        from trainer.weights.nf4_kernel import nothing

        nothing[(1,)]()
    except Exception as error:  # of the compiler, of a subprocess, of the system
        what = f"Triton runs no kernel on GPU {index} ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        warnings.warn(
            f"{what}: NF4 weights and losses of language models take several operations, slower", stacklevel=2
        )
        return False
    return True
