"""``memory.strategy``: how the ranks hold the weights.

Sharding is FSDP2 (``fully_shard``) on Fabric's ``ModelParallelStrategy``, which launches the process groups. Its faults
are fixed here or in the engine. It leaves gradient sync off after ``no_backward_sync(enabled=False)``, implements
bf16-mixed as autocast with fp32 all-gathers (here a ``MixedPrecisionPolicy``), loses real buffers of a module on meta,
and sizes its mesh by the number of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.memory.compatibility import require_first_order
from trainer.memory.plan import Plan

DATA, TENSOR = "data", "tensor"  # mesh dimensions: over ranks with different samples; over ranks that share blocks

AMP_DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}


def fabric_strategy(plan: Plan, accelerator: str) -> Strategy:
    """Build the Fabric strategy of ``plan`` for a ``"cpu"`` or ``"cuda"`` accelerator."""
    if plan.strategy == "single":
        return SingleDeviceStrategy(device="cuda:0" if accelerator == "cuda" else "cpu")
    # Offloaded gradients are reduced in host memory, which NCCL does not support.
    backend = "cpu:gloo,cuda:nccl" if accelerator == "cuda" and plan.memory.cpu_offload != "none" else None
    if plan.strategy == "fsdp" or plan.memory.tensor_parallel > 1:
        return ShardedStrategy(backend)
    if plan.memory.cpu_offload == "optimizer" or plan.deterministic:
        return ReplicatedStrategy(process_group_backend=backend)
    return DDPStreamStrategy(gradient_as_bucket_view=True)  # gradients live in DDP's buckets: one copy, not two


class DDPStreamStrategy(DDPStrategy):
    """DDP, constructed on the computing stream.

    Lightning uses a side stream that nothing waits for, so the first broadcast could overwrite restored weights.
    """

    def setup_module(self, module: nn.Module) -> nn.parallel.DistributedDataParallel:
        wrap = nn.parallel.DistributedDataParallel  # looked up at the call, because a simulated GPU replaces it
        return wrap(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)


class ReplicatedStrategy(DDPStrategy):
    """The same weights on every rank, without DDP's buckets: for offloaded gradients and deterministic sums."""

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        for tensor in [*module.parameters(), *module.buffers()]:
            torch.distributed.broadcast(tensor.detach(), 0)
        return module


class ShardedStrategy(ModelParallelStrategy):
    """Processes and devices for modules that are sharded or split before ``setup_module``."""

    def __init__(self, backend: str | None = None) -> None:
        super().__init__(
            lambda module, mesh: module, data_parallel_size=1, tensor_parallel_size=1, process_group_backend=backend
        )

    def setup_environment(self) -> None:
        """Start the process group. ``make_device_mesh`` creates the mesh, because it supports replicas."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup_module(self, module: nn.Module) -> nn.Module:
        return module


def shard(
    module: nn.Module, blocks: Sequence[nn.Module], plan: Plan, device: torch.device, mesh: DeviceMesh
) -> str | None:
    """Shard ``module`` over ``mesh`` in place: each block is gathered separately, the rest of the model together.

    The weights are whole, on any device or on meta. Returns a warning if blocks that share weights join the rest.
    """
    memory, half = plan.memory, plan.memory.precision in AMP_DTYPES
    streamed = memory.cpu_offload == "parameters"
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": memory.reshard_after_forward}
    options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda") if streamed else OffloadPolicy()
    # Weights are gathered and used in half precision, gradients reduced in fp32.
    policy = MixedPrecisionPolicy(AMP_DTYPES[memory.precision], torch.float32) if half else MixedPrecisionPolicy()
    if half and any(p.dtype == torch.float32 for p in module.parameters()):
        # BatchNorm accepts inputs in half precision, but its weights must have the dtype of its running statistics.
        for layer in [part for part in module.modules() if isinstance(part, _BatchNorm)]:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(), **options)
    alone = without_shared_parameters(module, blocks)
    with _allow_uint8_shards():
        for part in [*alone, *large_embeddings(module, blocks)]:
            part.register_forward_hook(_watch_backward)  # before FSDP's hooks
            fully_shard(part, mp_policy=policy, **options)
        module.register_forward_hook(_watch_backward)
        # Only the root's outputs go to a loss, which is computed in fp32.
        outwards = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, policy.param_dtype and torch.float32)
        fully_shard(module, mp_policy=outwards, **options)
    move_buffers(module, device)
    if len(alone) == len(blocks):
        return None
    whole = f"{len(blocks) - len(alone)} of {len(blocks)} blocks whole during a micro-step, like the rest of the model"
    return f"memory.strategy=fsdp keeps {whole}, because they share weights with each other or with the rest"


@contextmanager
def _allow_uint8_shards() -> Iterator[None]:
    """Work around torch 2.11: ``fully_shard`` first makes every shard trainable, which fails for bytes."""

    def parameter(data: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        return nn.Parameter(data, data.is_floating_point() if requires_grad is None else requires_grad)

    plain = _fsdp_param.nn
    _fsdp_param.nn = SimpleNamespace(**vars(nn) | {"Parameter": parameter})  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param.nn = plain


def move_buffers(module: nn.Module, device: torch.device) -> None:
    for buffers in (part._buffers for part in module.modules()):
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = buffer.to(device)


def move_unsplit(module: nn.Module, device: torch.device) -> None:
    """Move everything that is not split to ``device``; split weights are there already."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    move_buffers(module, device)


def _watch_backward(module: nn.Module, args: Any, output: Any) -> None:
    """Reject a second-order backward: FSDP frees weights that it reads, and the process would end silently."""
    require_first_order(output, "memory.strategy=fsdp", "use ddp or single")


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_device_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """Return the mesh of ranks for FSDP and tensor parallelism; ranks that share blocks are neighbours, on one node."""
    world, replicas, copies = plan.world_size, plan.memory.replicas, plan.memory.tensor_parallel
    dimensions = {"shard": world}
    if copies > 1:
        dimensions = {DATA: world // copies, TENSOR: copies}
    elif replicas > 1:
        dimensions = {"replicate": replicas, "shard": world // replicas}
    return device_mesh.init_device_mesh(device.type, (*dimensions.values(),), mesh_dim_names=(*dimensions,))


def large_embeddings(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return embeddings larger than a block with untied weights: sharded with the root, they would always be whole."""
    limit = max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0)
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding) and part.weight.numel() > limit]
    return without_shared_parameters(module, embeddings)


def without_shared_parameters(module: nn.Module, parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the ``parts`` whose parameters no other part of ``module`` uses: FSDP gathers a parameter in one place."""

    def owners(whole: nn.Module) -> Counter[nn.Parameter]:
        return Counter(p for part in whole.modules() for p in dict.fromkeys(part.parameters(recurse=False)))

    everywhere = owners(module)
    return [part for part in parts if owners(part).items() <= everywhere.items()]
