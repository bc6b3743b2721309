"""The memory-saving stack: applies every technique of a plan, in the only order in which they work together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.contract import Model
from trainer.engine.deterministic import make_tree_sync
from trainer.engine.sync import GradientSync, gradient_sync
from trainer.errors import RecipeError
from trainer.memory.activation_checkpointing import checkpoint_blocks
from trainer.memory.activation_offload import offload_activations
from trainer.memory.compatibility import require_sparse_support, require_supported_parameters, sparse_parameters
from trainer.memory.compilation import compile_module
from trainer.memory.ema import WeightEMA
from trainer.memory.initialize import HOST, materialise
from trainer.memory.optimizer import OptimizerInBackward, UpdateInBackwardSync, build_optimizer
from trainer.memory.optimizer_offload import (
    HostGradientSync,
    StreamedGradientSync,
    make_host_master_weights,
    reduce_after_offload,
)
from trainer.memory.parameter_groups import UpdateRule, block_matrices, layer_depths, update_rule_for
from trainer.memory.plan import Plan
from trainer.memory.precision import weights_dtype
from trainer.memory.sharding import DATA, TENSOR, local_shard, make_device_mesh, move_unsplit, shard
from trainer.memory.tensor_parallel import TensorParallelSync, split_over_ranks
from trainer.memory.tied_rows import offload_tied_gradient_by_rows
from trainer.recipe import Optim
from trainer.weights.blocks import describe_blocks, find_blocks, require_blocks
from trainer.weights.streaming import find_packed_slices, move_to_meta, restore_from_meta, tied_names


@dataclass
class PreparedModel:
    """A module with every technique of the plan applied."""

    module: nn.Module  # as built by the model; its parameters may be sharded
    wrapped: nn.Module  # the module that the engine calls
    # The tensors that the optimizer updates instead of the parameters: in host memory if offloaded
    # (``make_host_master_weights``), or plain tensors in the memory of this rank's parts if split.
    masters: dict[nn.Parameter, Tensor] | None = None
    blocks: str = ""  # a description of the blocks that were found
    warning: str | None = None  # a warning to show to the user
    mesh: DeviceMesh | None = None  # the ranks, with tensor parallelism only
    layers: dict[str, int] = field(default_factory=dict)  # layer number of each parameter by name: see layers_of
    matrices: frozenset[str] = frozenset()  # names of the matrices of blocks: see block_matrices
    averages: WeightEMA | None = None  # moving averages of the trained weights, with optim.ema

    def replace_with(self, other: PreparedModel) -> None:
        """Take over the contents of ``other`` in place, so that all references to this stack see them."""
        vars(self).update(vars(other))

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield each trained parameter: its name in the model, the parameter, and the tensor to optimize."""
        packed, masters = find_packed_slices(self.module), self.masters or {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield packed[name].name if name in packed else name, parameter, masters.get(parameter, parameter)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averages as weights in this context, if there are any."""
        with self.averages.swapped_in() if self.averages is not None else nullcontext():
            yield

    def update_averages(self, updates: int) -> None:
        """Update the averages, if there are any, after an optimizer step that followed ``updates`` other steps."""
        if self.averages is not None:
            self.averages.update(updates)

    @torch.no_grad()
    def copy_masters_to_device(self) -> None:
        """Copy the masters to the parameters on the device, in the dtype of the parameters."""
        for parameter, master in (self.masters or {}).items():
            local_shard(parameter.detach()).copy_(master)

    def update_rules(self, optim: Optim) -> dict[Tensor, UpdateRule]:
        """Return the update rule (decay, scale of the learning rate) of each tensor to optimize."""
        trained = ((t, n, p if n in self.matrices else None) for n, p, t in self.trainable_parameters())
        return {tensor: update_rule_for(tensor, optim, name, self.layers, matrix) for tensor, name, matrix in trained}


def apply_stack(
    fabric: Fabric, model: Model, module: nn.Module, plan: Plan, seed: int = 0, stream: Callable[..., Any] = materialise
) -> PreparedModel:
    """Apply ``plan`` to ``module``: split, checkpoint and compile, offload activations, shard, offload weights.

    The order matters. Layers are split before checkpointing, so that a recomputed block repeats its sums over ranks.
    Blocks are checkpointed before sharding, so that FSDP gathers a block once for recomputation and backward.
    Compilation comes before offloading, so that the offloading hooks are not traced. Weights on meta are streamed in
    last by ``stream``, when every rank knows its shards; weights that are in no file are drawn with ``seed``.
    """
    memory, known = plan.memory, (layer_depths(module, model.blocks), block_matrices(module, model.blocks))
    splits, sharded = memory.tensor_parallel > 1, plan.strategy == "fsdp"
    mesh = make_device_mesh(plan, fabric.device) if splits or sharded else None
    with raise_on_rank_zero_only(fabric):
        require_supported_parameters(module, plan, model)
        if splits and mesh is not None:
            split_over_ranks(module, model, mesh[TENSOR], memory.sequence_parallel)
        blocks = _blocks(model, module, plan)
    found = describe_blocks(blocks)  # before FSDP changes their classes
    checkpoint_blocks(module, blocks, memory.activation_checkpointing)
    compile_module(module, blocks, memory.compile)
    if memory.activation_offload:
        offload_activations(module, fabric.device)
    data_mesh = mesh[DATA] if mesh is not None and splits else mesh
    streamed = memory.cpu_offload == "parameters" and memory.init != "meta"
    # To shard a block, FSDP would move it to the device, and then move the shards back. Meta tensors avoid that.
    values = move_to_meta(module) if streamed else {}
    warning = shard(module, blocks, plan, fabric.device, data_mesh) if sharded and data_mesh is not None else None
    if streamed:
        restore_from_meta(module, values, HOST)
    if splits and not sharded:
        move_unsplit(module, fabric.device)
    if memory.init == "meta":
        on_host = memory.cpu_offload == "parameters" or (memory.cpu_offload == "optimizer" and not sharded)
        stream(module, model, HOST if on_host else fabric.device, weights_dtype(memory), seed)
    masters = make_host_master_weights(module, plan, fabric.device) if memory.cpu_offload == "optimizer" else None
    wrapped = fabric.setup_module(module)
    masters = {p: local_shard(p.detach()) for p in module.parameters() if p.requires_grad} if splits else masters
    return PreparedModel(module, wrapped, masters, found, warning, mesh if splits else None, *known)


@contextmanager
def raise_on_rank_zero_only(fabric: Fabric) -> Iterator[None]:
    """Let only the first rank report a ``RecipeError`` that every rank raises in this context."""
    try:
        yield
    except RecipeError as error:
        error.is_reported = fabric.global_rank > 0
        raise


def _blocks(model: Model, module: nn.Module, plan: Plan) -> Sequence[nn.Module]:
    memory = plan.memory
    needs_blocks = {
        f"memory.strategy={memory.strategy}": plan.strategy == "fsdp",
        f"memory.activation_checkpointing={memory.activation_checkpointing}": memory.activation_checkpointing != "none",
        f"memory.compile={memory.compile}": memory.compile in ("blocks", "cuda_graphs"),
    }
    settings = [setting for setting, is_on in needs_blocks.items() if is_on]
    return require_blocks(module, model.blocks, settings[0]) if settings else find_blocks(module, model.blocks)


def build_optimizer_and_sync(
    fabric: Fabric, model: Model, stack: PreparedModel, optim: Optim, plan: Plan
) -> tuple[Optimizer, GradientSync]:
    """Build the optimizer, and the object that combines its gradients over ranks."""
    if optim.ema is not None:
        stack.averages = WeightEMA([t for *_, t in stack.trainable_parameters()], optim, stack.copy_masters_to_device)
    require_sparse_support(stack.module, optim)
    fused = not plan.deterministic and not sparse_parameters(stack.module)
    device = HOST if plan.memory.cpu_offload != "none" else fabric.device
    optimizer = build_optimizer(stack.update_rules(optim), optim, plan.memory, device, fused)
    return optimizer, _build_sync(fabric, model, stack, optimizer, plan)


def _build_sync(fabric: Fabric, model: Model, stack: PreparedModel, optimizer: Optimizer, plan: Plan) -> GradientSync:
    memory, every = plan.memory, bool(plan.memory.sync_every_micro_step)
    forward_module = getattr(stack.wrapped, "_forward_module", stack.wrapped)
    parameters = [p for p in stack.module.parameters() if p.requires_grad]
    if stack.mesh is not None and stack.masters is not None:
        return TensorParallelSync(stack.module, stack.masters, stack.mesh, every, model)
    if isinstance(optimizer, OptimizerInBackward):
        return UpdateInBackwardSync(optimizer)
    if plan.deterministic:
        return make_tree_sync(forward_module, parameters, plan.world_size)
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    offload = fabric.device, optimizer, plan.world_size, memory.replicas, scaler
    if stack.masters is not None:
        sync = HostGradientSync({parameter: stack.masters[parameter] for parameter in parameters}, *offload)
    elif memory.cpu_offload == "parameters" and StreamedGradientSync.serves(parameters, plan.world_size):
        sync = StreamedGradientSync(stack.module, parameters, *offload)
    else:
        return gradient_sync(forward_module, model, parameters, every, memory.replicas)
    reduce_after_offload(stack.module, sync)
    if memory.compile != "model":  # the backward of a compiled model would not call the code that takes the rows
        offload_tied_gradient_by_rows(stack.module, sync)
    return sync


def full_state_dict(stack: PreparedModel) -> dict[str, Tensor]:
    """Return every weight and persistent buffer by name, for saving; in full precision if masters exist.

    All ranks must call it. Under FSDP, the first rank gets the tensors in host memory, one at a time, the others an
    empty dict. All names of a tied weight map to one tensor. With ``optim.ema``, the averages replace the weights.
    """
    averages = stack.averages
    if any(isinstance(p, DTensor) for p in stack.module.parameters()):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        is_whole = all(p.device_mesh.size() == 1 for p in stack.module.parameters() if isinstance(p, DTensor))
        with stack.averaged():
            if is_whole:  # on the host if offloaded; gathering would copy it through the device
                shards = stack.module.state_dict().items()
                gathered: dict[str, Any] = {name: local_shard(value).cpu() for name, value in shards}
            else:
                gathered = get_model_state_dict(stack.module, options=options)
            if averages is not None:  # tensors that were not gathered still share memory with the model
                gathered = {name: value.clone() for name, value in gathered.items()}
        first = {name: names[0] for names in tied_names(stack.module) for name in names}
        state: dict[str, Any] = {name: gathered.get(first.get(name, name), value) for name, value in gathered.items()}
        for name, part in find_packed_slices(stack.module).items():  # in the order of their rows
            if name in state:
                rows = [state[part.name]] if part.name in state else []
                state[part.name] = torch.cat([*rows, state.pop(name)])
        return state
    own = {p: _with_own_storage(master.detach()) for p, master in (stack.masters or {}).items()}
    if stack.masters is not None:  # a frozen weight that half precision represents exactly has no master
        own |= {p: p.detach().cpu().float() for p in stack.module.parameters() if p not in own and p.itemsize == 2}
    if averages is not None:
        own |= {p: averages.values[trained].to(trained.dtype) for _, p, trained in stack.trainable_parameters()}
    named = stack.module.named_parameters(remove_duplicate=False)
    return stack.module.state_dict() | {name: own[p] for name, p in named if p in own}


def _with_own_storage(part: Tensor) -> Tensor:
    """Return a view of a host tensor that fills its storage: saving a part of a larger storage would copy it."""
    if not part.numel():
        return part
    return torch.from_numpy(part.reshape(-1).view(torch.uint8).numpy()).view(part.dtype).view(part.shape)
