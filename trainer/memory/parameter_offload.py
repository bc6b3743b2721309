"""``memory.cpu_offload parameters``: the gradients of weights that FSDP streams add up in host memory, unwaited for.

FSDP alone copies each gradient into pageable memory and waits for it, from the second micro-step on.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self.in_one = torch.empty(0)
        self.shards: dict[nn.Parameter, DTensor] = {}
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_all_reduce_hook(self._take)

    def _take(self, reduced: Tensor) -> None:
        """Called by FSDP with the shards of a part's gradients, one behind the other; gives it host memory instead.

        Nobody writes to that memory, and FSDP, which cuts it up, has nothing left to copy.
        """
        self.in_one = reduced.detach()
        reduced.data = torch.empty(reduced.shape, dtype=reduced.dtype, device="cpu")

    def _gradient(self, arrived: Tensor) -> Tensor:
        cut = local(arrived)
        return self.in_one.as_strided(cut.shape, cut.stride(), cut.storage_offset())

    @torch.no_grad()
    def _leave(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if isinstance(parameter.grad, DTensor):
            self.shards[parameter] = parameter.grad
        super()._leave(parameter)

    @torch.no_grad()
    def after(self) -> None:
        """Wait for the last gradient; they are DTensors again, for the optimizer."""
        super().after()
        self.in_one = torch.empty(0)
        for (parameter, master), shard in ((item, self.shards.get(item[0])) for item in self.masters.items()):
            if shard is not None and master.grad is not None:
                local(shard).data = master.grad
                parameter.grad = shard
        self.shards.clear()

    def send_back(self) -> None:
        """Nothing: the weights are streamed from where the optimizer updates them."""
