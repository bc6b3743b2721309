"""Simulated other ranks: a process group that answers at once, and DDP without its C++ reducer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.fakegpu.torch_patches import patch

MIB = 2**20
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB  # sizes at which DDP closes its first bucket of gradients, and later ones
BROADCAST_BUFFER = 250 * MIB  # size at which DDP closes a buffer of weights that rank 0 sends to all ranks


def fake_ranks(ranks: int, nodes: int = 1) -> None:
    """Make this process the first of ``ranks`` on ``nodes``. The simulated other ranks contribute what it does."""
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks // nodes, "GROUP_WORLD_SIZE": nodes}
    own = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT"), 0)
    os.environ.update({name: str(number) for name, number in (sizes | own).items()})
    os.environ.update(TORCHELASTIC_RUN_ID="planner", MASTER_ADDR="localhost")
    forget_process_group()
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    patch(nn.parallel, DistributedDataParallel=TracedDDP)


_FORGOTTEN: list[Any] = []


def forget_process_group() -> None:
    """Forget the parent's process group, if any. Destroying it would wait for threads that the fork does not have."""
    if not torch.distributed.is_initialized():
        return
    world = distributed_c10d._world
    _FORGOTTEN.append(dict(world.pg_map))
    distributed_c10d._update_default_pg(None)
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
        getattr(world, name).clear()


class TracedDDP(DistributedDataParallel):
    """DistributedDataParallel as far as memory is concerned: its broadcast, its buckets, and when they are filled.

    Source: torch/csrc/distributed/c10d/reducer.cpp with ``gradient_as_bucket_view``. A new gradient is copied to its
    place in a bucket and becomes a view of it. After the first reduced backward, the buckets are created again, in the
    order in which the gradients arrived.
    """

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync, self.rebuilt = True, False
        self.buckets: list[Tensor] = []
        self.waiting: list[set[Tensor]] = []
        self.arrived: list[Tensor] = []
        self.places: dict[Tensor, Tensor] = {}
        self.bucket_of: dict[Tensor, int] = {}
        trained: list[Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._broadcast([*module.parameters(), *module.buffers()])
        self._make_buckets(list(reversed(trained)))
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.require_backward_grad_sync and torch.is_grad_enabled() and self.arrived and not self.rebuilt:
            self.rebuilt = True
            self.places.clear()
            self.buckets.clear()  # before the new ones are made, as in C++
            self.waiting.clear()
            self._make_buckets(self.arrived)
        return self.module(*inputs, **kwargs)

    def _check_reducer_finalized(self) -> None:
        """No-op: a gradient is reduced as soon as it arrives."""

    @torch.no_grad()
    def _broadcast(self, tensors: list[Tensor]) -> None:
        """Broadcast the first rank's weights in buffers, at most two of them at the same time."""
        in_flight: list[Tensor] = []
        for group in _grouped([tensor.detach() for tensor in tensors], BROADCAST_BUFFER, BROADCAST_BUFFER):
            in_flight.append(torch.cat([tensor.reshape(-1) for tensor in group]))
            torch.distributed.broadcast(in_flight[-1], 0)
            in_flight = in_flight[-2:]

    def _make_buckets(self, parameters: list[Tensor]) -> None:
        for group in _grouped(parameters, FIRST_BUCKET, BUCKET):
            sizes = [parameter.numel() for parameter in group]
            bucket = torch.empty(sum(sizes), dtype=group[0].dtype, device=group[0].device)
            self.buckets.append(bucket)
            self.waiting.append(set(group))
            self.bucket_of |= dict.fromkeys(group, len(self.buckets) - 1)
            for parameter, place in zip(group, bucket.split(sizes), strict=True):
                self.places[parameter] = place.view(parameter.shape)

    @torch.no_grad()
    def _reduce(self, parameter: Tensor) -> None:
        if not self.require_backward_grad_sync:
            return
        if not self.rebuilt:
            self.arrived.append(parameter)
        place = self.places[parameter]
        if parameter.grad is not None and parameter.grad.untyped_storage()._cdata != place.untyped_storage()._cdata:
            place.copy_(parameter.grad)
            parameter.grad = place
        number = self.bucket_of[parameter]
        self.waiting[number].discard(parameter)
        if not self.waiting[number]:
            torch.distributed.all_reduce(self.buckets[number], async_op=True)
            self.waiting[number] = {p for p, own in self.bucket_of.items() if own == number}


def _grouped(tensors: list[Any], first: int, others: int) -> Iterator[list[Any]]:
    """Yield ``tensors`` in order, in groups of one type that are closed when they reach the limit in bytes."""
    open_groups: dict[torch.dtype, list[Any]] = {}
    limits: dict[torch.dtype, int] = {}
    for tensor in tensors:
        group = open_groups.setdefault(tensor.dtype, [])
        group.append(tensor)
        if sum(t.numel() * t.element_size() for t in group) >= limits.setdefault(tensor.dtype, first):
            limits[tensor.dtype] = others
            yield open_groups.pop(tensor.dtype)
    yield from open_groups.values()
