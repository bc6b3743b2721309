"""A parameter that no loss reaches stays as it is, on every strategy and with every offload."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.matrix import Case, set_up, steps_of
from torch import Tensor, nn

from trainer.memory.plan import decide_plan
from trainer.memory.stack import whole_state
from trainer.models import MLP
from trainer.models.common import classification_loss
from trainer.recipe import Memory
from trainer.values import Loss


class Block(nn.Module):
    """A layer, and one that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(192, 192), nn.Linear(192, 192)

    def forward(self, features: Tensor) -> Tensor:
        return self.used(features).tanh()


@dataclasses.dataclass
class PartlyUsed(MLP):
    """Two such blocks and a head."""

    blocks = (Block,)

    def build(self) -> nn.Module:
        return nn.Sequential(Block(), Block(), nn.Linear(192, 5))

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        yield classification_loss(module(batch["pixel_values"].flatten(1)), batch["labels"])


@dataclasses.dataclass(frozen=True)
class PartlyUsedCase(Case):
    """On the images of the Vision Transformer's tests."""

    @property
    def model(self) -> PartlyUsed:
        return PartlyUsed([16], num_classes=5, image_size=8, channels=3)


def three_steps(case: Case) -> dict[str, Tensor]:
    _, stepper, windows, stack = set_up(case, decide_plan(case.recipe, case.world_size))
    for epoch, step in steps_of(case):
        stepper.step(*windows.epoch(epoch, step, step + 1))
    return {name: tensor.cpu().clone() for name, tensor in whole_state(stack).items()}


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [("ddp", "none"), ("ddp", "optimizer"), ("fsdp", "none"), ("fsdp", "optimizer"), ("fsdp", "parameters")],
)
def test_it_is_neither_updated_nor_decayed(strategy, offload, ranks):
    alone = three_steps(PartlyUsedCase("vit", Memory(micro_batch_size=3, precision="64-true")))
    memory = Memory(micro_batch_size=3, precision="64-true", strategy=strategy, cpu_offload=offload)
    ours = ranks(2).run(three_steps, PartlyUsedCase("vit", memory, 2))[0]
    for name, tensor in alone.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-12, msg=name)
