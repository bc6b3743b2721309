"""Parts of offloading whose faults show on a GPU only: what can be seen of them without one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.memory.activation_offload import Shelf
from trainer.memory.optimizer_offload import PIECE, _accumulators
from trainer.memory.precision import precision_plugin
from trainer.recipe import Memory

CPU = torch.device("cpu")


def test_an_expanded_tensor_stays():
    shelf = Shelf(CPU, 16, lambda tensor: False)
    mask = torch.ones(2, 1, 8, 8)
    assert shelf.put(mask) is not mask
    expanded = mask.expand(2, 4, 8, 8)
    assert shelf.put(expanded) is expanded


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_the_loss_scale_is_where_the_gradients_are(strategy, offload):
    plugin = precision_plugin(Memory(strategy=strategy, precision="16-mixed", cpu_offload=offload), "cpu")
    plugin.scaler._lazy_init_scale_growth_tracker(torch.device("meta"))  # as of a loss on a GPU
    assert plugin.scaler._scale.device.type == ("cpu" if offload == "optimizer" else "meta")


def test_accumulators_are_cut_between_parameters():
    masters = {nn.Parameter(torch.empty(0)): torch.empty(size, device="cpu") for size in (PIECE, 5, PIECE - 5, 1)}
    pieces, homes = _accumulators(masters, pinned=False)
    assert [piece.numel() for piece in pieces] == [PIECE, PIECE, 1]
    for parameter, master in masters.items():
        assert homes[parameter].shape == master.shape
