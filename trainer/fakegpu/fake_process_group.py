"""Simulated other ranks: a process group that answers at once, and DDP without its C++ reducer."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.rpc
from torch import Tensor, nn
from torch.distributed import distributed_c10d, fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from trainer.errors import RecipeError, require
from trainer.fakegpu.mode import GPU_DEVICE
from trainer.fakegpu.network import Cluster
from trainer.fakegpu.torch_patches import _nothing, _undo_stack, patch

MIB = 2**20
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB  # sizes at which DDP closes its first bucket of gradients, and later ones
BROADCAST_BUFFER = 250 * MIB  # size at which DDP closes a buffer of weights that rank 0 sends to all ranks
FSDP1 = "FSDP1 is not simulated: use fully_shard (FSDP2), in Accelerate with FSDP_VERSION=2"
BACKENDS = re.compile(r"((cpu|cuda):)?(nccl|gloo|fake|undefined)")  # backends whose collectives are simulated
PIPELINES = "pipelines and other messages between two ranks are not simulated: plan without pipeline parallelism"
MESSAGES = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")


def launcher_environment(ranks: int, nodes: int, rank: int = 0) -> dict[str, str]:
    """Return the environment variables that torchrun sets for one of ``ranks`` on ``nodes``."""
    here = ranks // nodes
    group, local = divmod(rank, here)
    numbers = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here, "GROUP_WORLD_SIZE": nodes, "ROLE_WORLD_SIZE": ranks}
    numbers |= {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": group, "ROLE_RANK": rank, "MASTER_PORT": 29500}
    texts = {"TORCHELASTIC_RUN_ID": "planner", "MASTER_ADDR": "localhost"}
    return {name: str(number) for name, number in numbers.items()} | texts


def fake_ranks(ranks: int, nodes: int = 1) -> None:
    """Make this process the first of ``ranks`` on ``nodes``. The simulated other ranks contribute what it does."""
    os.environ.update(launcher_environment(ranks, nodes))
    forget_process_group()
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    patch(nn.parallel, DistributedDataParallel=TracedDDP)


def simulate_ranks(cluster: Cluster, rank: int, is_launched: bool) -> None:
    """Let this process be ``rank`` of the cluster for any code; with ``is_launched``, as torchrun starts it."""
    ranks = cluster.devices
    if is_launched:
        _undo_stack.callback(os.environ.update, dict(os.environ))
        _undo_stack.callback(os.environ.clear)
        os.environ.update(launcher_environment(ranks, cluster.nodes, rank))
    if not torch.distributed.is_initialized():
        _undo_stack.callback(forget_process_group)
    patch(sys, excepthook=sys.excepthook)  # init_process_group replaces it
    own: dict[str, Any] = {name: _refusing(name, PIPELINES) for name in MESSAGES}
    own |= dict.fromkeys(("barrier", "monitored_barrier"), _nothing) | {"all_gather_object": _all_gather_object}
    own |= {"gather_object": lambda obj, objects=None, *_, **__: _all_gather_object(objects or [], obj)}
    own |= {"broadcast_object_list": _broadcast_object_list, "scatter_object_list": _scatter_object_list}

    def check(asked: int) -> None:
        fix = f"plan with --devices {asked}, or ranks={asked} in fake_gpu"
        require(asked == ranks, f"the script starts {asked} ranks, but {ranks} are planned: {fix}")

    def rendezvous(url: Any, _: int = -1, world_size: int = -1, **options: Any) -> Iterator[Any]:
        check(ranks if world_size == -1 else world_size)
        yield FakeStore(), rank, ranks

    def spawn(fn: Callable[..., Any], args: Any = (), nprocs: int = 1, *_: Any, **options: Any) -> None:
        check(nprocs * cluster.nodes)
        fn(rank % nprocs, *args)

    for module in (distributed_c10d, torch.distributed):
        patch(module, rendezvous=rendezvous, **own)
    patch(distributed_c10d, _new_process_group_helper=_fake_group(distributed_c10d._new_process_group_helper))
    patch(torch.cuda.nccl, version=lambda: (2, 27, 5))  # for the log of collectives, on a CPU build of torch
    patch(torch.distributed.rpc, init_rpc=_refusing("init_rpc", "RPC is not simulated: use collectives"))
    patch(fsdp.FullyShardedDataParallel, __init__=_refusing("FullyShardedDataParallel", FSDP1))
    patch(DistributedDataParallel, __init__=_init_ddp)
    patch(torch.multiprocessing, spawn=spawn, start_processes=spawn)


def _refusing(name: str, reason: str) -> Callable[..., Any]:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RecipeError(f"{name}: {reason}")

    return refuse


def _fake_group(make: Callable[..., Any]) -> Callable[..., Any]:
    def helper(size: int, rank: Any, members: Any, backend: Any, store: Any, name: Any, *_: Any, **options: Any) -> Any:
        known = all(BACKENDS.fullmatch(part) for part in str(backend).split(","))
        require(known, f"the backend {backend} cannot be simulated: use init_process_group('nccl')")
        kept = {key: value for key, value in options.items() if key in ("timeout", "pg_tag", "group_desc")}
        group, prefix = make(size, rank, members, "fake", FakeStore(), name, **kept)
        if group in distributed_c10d._world.pg_map:  # what get_backend returns
            distributed_c10d._world.pg_map[group] = backend, prefix
        return group, prefix

    return helper


# Collectives of Python objects: every rank has what this one has.


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [copy.deepcopy(obj) for _ in object_list]


def _broadcast_object_list(object_list: list[Any], src: Any = None, *args: Any, **options: Any) -> None:
    if options.get("group_src", src or 0) != torch.distributed.get_rank(options.get("group")) and None in object_list:
        raise RecipeError(f"broadcast_object_list: what rank {src or 0} sends is not known to another simulated rank")


def _scatter_object_list(output: list[Any], objects: Any = None, *args: Any, **options: Any) -> None:
    require(bool(objects), "scatter_object_list: what another rank sends is not known to this simulated rank")
    output[0] = objects[torch.distributed.get_rank(options.get("group"))]


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
    order in which the gradients arrived. Without ``gradient_as_bucket_view``, gradients and buckets are both in memory.
    """

    def __init__(self, module: nn.Module, device_ids: Any = None, *args: Any, **options: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids = module, device_ids
        self.gradient_as_bucket_view = bool(options.get("gradient_as_bucket_view"))
        self.bucket = int(MIB * (options.get("bucket_cap_mb") or BUCKET // MIB))
        self.require_backward_grad_sync, self.rebuilt = True, False
        self.buckets: list[Tensor] = []
        self.waiting: list[set[Tensor]] = []
        self.arrived: list[Tensor] = []
        self.places: dict[Tensor, tuple[int, Tensor]] = {}  # bucket and view of each gradient
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
        if self.device_ids:
            inputs, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(GPU_DEVICE), (inputs, kwargs))
        return self.module(*inputs, **kwargs)

    register_comm_hook = _refusing("register_comm_hook", "hooks of DDP are not simulated: plan without them")

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
        for group in _grouped(parameters, FIRST_BUCKET, self.bucket):
            sizes = [parameter.numel() for parameter in group]
            bucket = torch.empty(sum(sizes), dtype=group[0].dtype, device=group[0].device)
            self.buckets.append(bucket)
            self.waiting.append(set(group))
            for parameter, place in zip(group, bucket.split(sizes), strict=True):
                self.places[parameter] = len(self.buckets) - 1, place.view(parameter.shape)

    @torch.no_grad()
    def _reduce(self, parameter: Tensor) -> None:
        if not self.require_backward_grad_sync:
            return
        if not self.rebuilt:
            self.arrived.append(parameter)
        number, place = self.places[parameter]
        if parameter.grad is not None and parameter.grad.untyped_storage()._cdata != place.untyped_storage()._cdata:
            place.copy_(parameter.grad)
            if self.gradient_as_bucket_view:
                parameter.grad = place
        self.waiting[number].discard(parameter)
        if not self.waiting[number]:
            torch.distributed.all_reduce(self.buckets[number], async_op=True)
            self.waiting[number] = {p for p, (own, _) in self.places.items() if own == number}
            for one in () if self.gradient_as_bucket_view else self.waiting[number]:
                one.grad.copy_(self.places[one][1])  # type: ignore[union-attr]


def _init_ddp(self: Any, *args: Any, **options: Any) -> None:
    """Replace the constructor of DDP: the object becomes a :class:`TracedDDP`, also one of a subclass."""
    own = type(self)
    self.__class__ = TracedDDP if own is DistributedDataParallel else type(own.__name__, (own, TracedDDP), {})
    TracedDDP.__init__(self, *args, **options)


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
