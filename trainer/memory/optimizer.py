"""The optimizer: which parameters decay, which implementation runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.errors import RecipeError, require_package
from trainer.memory.optimizer_in_backward import OptimizerInBackward
from trainer.recipe import Memory, Optim

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def build_optimizer(
    parameters: Sequence[Tensor], optim: Optim, memory: Memory, device: torch.device, fused: bool = True
) -> Optimizer:
    """The optimizer over the ``parameters`` that train.

    Matrices decay; biases and norm weights do not, for decay would pull scales to 0 (as in transformers and nanoGPT).

    Args:
        parameters: weights, sharded already where they are to be, or their masters in host memory.
        optim: which optimizer, and its learning rate and decay.
        memory: how many bits its state has, how it rounds, and whether it updates during the backward.
        device: where the parameters are.
        fused: use torch's fused kernels where there are some; they take no complex parameters and no sparse gradients.
            On a CPU they round the last elements of a tensor otherwise than the others, so that a weight's update
            depends on where it is in its shard.

    Raises:
        RecipeError: when no parameter trains, or the optimizer's package is not installed.
    """
    if not parameters:
        raise RecipeError("every parameter is frozen: raise model.train_last_blocks")
    matrices, others = ([p for p in parameters if (p.ndim >= 2) is wide] for wide in (True, False))
    decays = ((matrices, optim.weight_decay), (others, 0.0))
    groups = [{"params": members, "weight_decay": decay} for members, decay in decays if members]
    optimizer = _optimizer_of(
        groups, optim, memory, device, fused and _has_fused_kernel(optim.name, device, parameters)
    )
    return OptimizerInBackward(optimizer) if memory.optimizer_in_backward else optimizer


def _optimizer_of(groups: Any, optim: Optim, memory: Memory, device: torch.device, fused: bool) -> Optimizer:
    if memory.optimizer_state_bits < 32 or memory.stochastic_rounding:
        key = "stochastic_rounding" if memory.stochastic_rounding else "optimizer_state_bits"
        require_package(f"memory.{key}={getattr(memory, key)}", "torchao", "lean")
        from trainer.memory.lean_adam import lean_adam

        return lean_adam(groups, optim, memory, device)
    if optim.name == "lion":
        require_package("optim.name=lion", "timm", "lean")
        from timm.optim.lion import Lion

        return Lion(groups, lr=optim.lr)
    options: dict[str, Any] = {"momentum": optim.momentum} if optim.momentum else {}
    # Fused kernels want to unscale fp16 gradients themselves, which clipping comes too late for.
    if fused and memory.precision != "16-mixed":
        options["fused"] = True
    return OPTIMIZERS[optim.name](groups, lr=optim.lr, **options)  # type: ignore[call-arg]


def _has_fused_kernel(name: str, device: torch.device, parameters: Sequence[Tensor]) -> bool:
    if not all(p.is_floating_point() for p in parameters):
        return False
    if any(isinstance(p, DTensor) for p in parameters):  # DTensor knows the kernels of these two only
        return name in ("adamw", "adam")
    return name in ("adamw", "adam", "sgd") or (name == "adagrad" and device.type == "cpu")
