"""Create weights where and in the type that they will be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from trainer.contract import Model
from trainer.memory.plan import Plan


def build_module(fabric: Fabric, model: Model, seed: int, plan: Plan) -> nn.Module:
    """``model.build()`` where the weights will live: on the rank's device, or in host memory when they are offloaded.

    On the device they have the precision's type at once: no copy in host memory, no cast afterwards. The same ``seed``
    on every rank gives every rank the same weights. (A GPU draws other random weights from it than the host.)
    """
    torch.manual_seed(seed)
    with home_of_weights(fabric, plan):
        module = model.build()
    return module.train()


def home_of_weights(fabric: Fabric, plan: Plan) -> AbstractContextManager[Any]:
    """A context in which tensors are created on the device, or in host memory, where ``plan`` will keep weights."""
    return _on_host(plan) if plan.memory.cpu_offload != "none" else fabric.init_module(empty_init=False)


@contextmanager
def _on_host(plan: Plan) -> Iterator[None]:
    """Build in host memory: masters in fp32, and weights that are streamed in the type that they are used in."""
    types = {"64-true": torch.float64}
    if plan.memory.cpu_offload == "parameters":
        types |= {"bf16-true": torch.bfloat16, "16-true": torch.float16}
    before = torch.get_default_dtype()
    torch.set_default_dtype(types.get(plan.memory.precision, torch.float32))
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
