"""``memory.cpu_offload parameters``: the gradients of weights that FSDP streams add up in host memory, unwaited for.

FSDP alone copies each gradient into pageable memory and waits for it, from the second micro-step on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.memory.optimizer_offload import HostGradients
from trainer.memory.sharding import local


class StreamedGradients(HostGradients):
    """Takes the gradients of each part of a module between FSDP's reducing and its copying.

    Args:
        module: after ``fully_shard``, its shards in host memory.
        parameters: those that train, in fp32: FSDP divides and casts none of their gradients once it has reduced them.
        device: that computes.
        optimizer: over ``parameters``.
        world_size: ranks.
        replicas: how many ranks hold each shard.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        optimizer: Optimizer,
        world_size: int,
        replicas: int = 1,
    ) -> None:
        super().__init__({p: local(p.detach()) for p in parameters}, device, optimizer, world_size, replicas)
        self.in_one, self.expected, self.unused = torch.empty(0), 0, torch.empty(0)
        self.shards: dict[nn.Parameter, DTensor] = {}
        parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        part_of = {p: part for part in parts for p in part.parameters() if p.requires_grad}  # the innermost comes last
        sizes = Counter(part_of.values())
        for part in parts:
            part.set_all_reduce_hook(partial(self._take, sizes[part]))

    def _take(self, expected: int, reduced: Tensor) -> None:
        """Called by FSDP with the shards of a part's gradients, one behind the other; gives it host memory instead.

        Nobody reads or writes that memory, the same for all parts. FSDP cuts it up, and has nothing left to copy.
        """
        if len(self.unused) < len(reduced):
            self.unused = torch.empty(reduced.shape, dtype=reduced.dtype, device="cpu")
        self.in_one, self.expected = reduced.detach(), expected
        reduced.data = self.unused[: len(reduced)]

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        shard = parameter.grad
        assert isinstance(shard, DTensor)
        cut = local(shard)
        gradient = self.in_one.as_strided(cut.shape, cut.stride(), cut.storage_offset())
        self.expected -= 1
        if not self.expected:  # else, where a loss did not reach all of the part, it is freed with the next one
            self.in_one = torch.empty(0)
        shard._local_tensor = self.homes[parameter]  # ``from_local`` would move it to the device
        self.shards[parameter] = shard
        return gradient

    @torch.no_grad()
    def after(self) -> None:
        """Wait for the last gradient; they are DTensors again, for the optimizer."""
        super().after()
        for parameter, master in self.masters.items():
            if master.grad is not None:
                parameter.grad = self.shards[parameter]

    def send_back(self) -> None:
        """Nothing: the weights are streamed from where the optimizer updates them."""
