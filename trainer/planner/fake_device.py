"""A CUDA device that is not there.

Python sees tensors on ``cuda:0``; to C++ they are on meta, so that autograd works on any build of torch, without a GPU,
a driver, or memory. Whatever asks which device it has before it chooses (autocast, attention, dropout, the optimizers,
FSDP2) is told what the target GPU would say.

``install`` changes torch for the rest of the process: call it in one that does nothing else, see ``children``.
"""

from __future__ import annotations

import warnings

import torch

from trainer.planner import fake_patches as patches
from trainer.planner.fake_kernels import install_kernels
from trainer.planner.fake_mode import install_autocast
from trainer.planner.target import NEWEST, OLDEST, Target, installed_version

_library: torch.library.Library | None = None


def install(target: Target, ranks: int = 1) -> list[str]:
    """Give this process ``target`` as its device, once and for all; return warnings for a person.

    Args:
        target: the card, or the CPU, and the version of torch.
        ranks: how many such cards this machine says that it has.
    """
    global _library
    if _library is not None:
        raise RuntimeError("a process can have one fake device only: use another process")
    _library = torch.library.Library("aten", "IMPL")
    patches.patch_modules()
    patches.patch_data()
    patches.patch_ranks()
    if target.device.type == "cpu":  # there is one: nothing but memory is pretended
        return []
    patches.patch_tensors()
    patches.patch_cuda(target, ranks)
    patches.patch_compile()
    patches.patch_amp()
    patches.patch_optimizers()
    patches.patch_fsdp()
    with warnings.catch_warnings():  # that kernels are replaced is the purpose
        warnings.simplefilter("ignore")
        uncast = install_autocast(_library, patches.is_on_gpu)
        install_kernels(_library, target.attention)
    return _version_warnings(uncast)


def _version_warnings(uncast: list[str]) -> list[str]:
    version = installed_version()
    if OLDEST <= version <= NEWEST:
        return []
    what = f"; autocast also casts {', '.join(uncast)}, which are left alone here" if uncast else ""
    return [
        f"torch {torch.__version__} is not among the versions that predictions were tested with "
        f"({OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}): attention kernels, casts and the buffers of FSDP may "
        f"differ, and with them the predicted memory{what}"
    ]
