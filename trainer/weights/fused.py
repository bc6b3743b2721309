"""Detection of whether our Triton kernels run on a device. Triton is imported only if there is a GPU for it."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

OLDEST = (7, 5)  # minimum compute capability, as compiled in tests: Turing, such as a T4


def has_kernels(tensor: Tensor) -> bool:
    """Return whether the kernels support the device of ``tensor``: the current or simulated NVIDIA GPU."""
    if not tensor.is_cuda or torch.version.hip is not None:
        return False
    if torch.compiler.is_compiling():  # torch.compile needs Triton itself
        return True
    index = torch.cuda.current_device()
    fits = tensor.device.index == index and torch.cuda.get_device_capability(index) >= OLDEST
    return fits and (isinstance(tensor, FakeTensor) or _launches(index))


@cache
def _launches(index: int) -> bool:
    """Return whether an empty kernel runs: Triton needs a C compiler, Python's headers and a cache folder."""
    try:
        from trainer.weights.nf4_kernel import nothing

        nothing[(1,)]()
    except Exception as error:  # raised by the compiler, a subprocess or the system
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        effect = "NF4 weights and losses of language models use several torch operations instead, which is slower"
        warnings.warn(f"Triton cannot run a kernel on GPU {index} ({cause}): {effect}", stacklevel=2)
        return False
    return True
