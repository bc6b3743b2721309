"""Create weights where and in the type that they will be used."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch import nn

from trainer.contract import Model


def build_on_device(fabric: Fabric, model: Model, seed: int) -> nn.Module:
    """``model.build()`` on the rank's device in the precision's type: no copy in host memory, no cast afterwards.

    The same ``seed`` on every rank gives every rank the same weights.
    """
    torch.manual_seed(seed)
    with fabric.init_module(empty_init=False):
        module = model.build()
    return module.train()
