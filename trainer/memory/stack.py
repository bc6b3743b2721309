"""The memory-saving stack: every technique applied, in the one order in which they go together."""

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
from trainer.engine.deterministic import tree_sync
from trainer.engine.sync import GradientSync, gradient_sync
from trainer.errors import RecipeError
from trainer.memory.activation_checkpointing import checkpoint_blocks
from trainer.memory.activation_offload import offload_activations
from trainer.memory.initialize import HOST, materialise
from trainer.memory.optimizer import AppliedInBackward, OptimizerInBackward, build_optimizer
from trainer.memory.optimizer_offload import HostGradients, StreamedGradients, reduce_after_carrying, take_home
from trainer.memory.parameter_groups import Rule, layers_of, rule_of
from trainer.memory.plan import Plan
from trainer.memory.precision import weights_dtype
from trainer.memory.refusals import require_able, require_sparse, sparse_parameters
from trainer.memory.sharding import DATA, TENSOR, local, mesh_of, move_whole, shard
from trainer.memory.tensor_parallel import TensorParallelSync, split_over_ranks, trained_parts
from trainer.memory.tied_rows import leave_in_rows
from trainer.memory.weight_averages import WeightAverages
from trainer.recipe import Optim
from trainer.weights.blocks import describe_blocks, find_blocks, require_blocks
from trainer.weights.streaming import put_back, put_on_meta, stretches, tied_names


@dataclass
class Stack:
    """A module with every technique of the plan applied."""

    module: nn.Module  # as the model built it; its parameters may be sharded now
    wrapped: nn.Module  # what forward is called on
    # What the optimizer updates in their place: in host memory, when it is offloaded (``take_home``), or in the memory
    # of the parameters, when they are split (``trained_parts``).
    masters: dict[nn.Parameter, Tensor] | None = None
    blocks: str = ""  # the repeated modules that were found, in words
    warning: str | None = None  # what is to be said of how it was done
    mesh: DeviceMesh | None = None  # of the ranks, with tensor parallelism
    layers: dict[str, int] = field(default_factory=dict)  # by the name of a parameter as it was built: see layers_of
    averages: WeightAverages | None = None  # of what trains, with optim.ema

    def become(self, other: Stack) -> None:
        """Hold what ``other`` holds from now on, for all who know this one."""
        self.module, self.wrapped, self.masters, self.mesh = other.module, other.wrapped, other.masters, other.mesh
        self.layers, self.averages = other.layers, other.averages

    def trained(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Every parameter that trains: the name it was built by, itself, and what the optimizer updates."""
        packed, masters = stretches(self.module), self.masters or {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield packed[name].name if name in packed else name, parameter, masters.get(parameter, parameter)

    @torch.no_grad()
    def send_back(self) -> None:
        """Give the device what the masters have, in the type that it keeps it in."""
        for parameter, master in (self.masters or {}).items():
            local(parameter.detach()).copy_(master)

    def rules(self, optim: Optim) -> dict[Tensor, Rule]:
        """How each of them is updated."""
        return {trained: rule_of(trained, optim, name, self.layers) for name, _, trained in self.trained()}


def apply_stack(
    fabric: Fabric,
    model: Model,
    module: nn.Module,
    plan: Plan,
    seed: int = 0,
    stream: Callable[..., None] = materialise,
) -> Stack:
    """Apply ``plan`` to ``module``: split, checkpoint and compile, offload activations, shard, offload weights.

    Layers are split over ranks first, so that a block that is computed again sums over the ranks again. Checkpointing
    comes before sharding, so that FSDP gathers a block once for both of its passes in backward, and compiling before
    offloading, so that the compiler need not look into the hooks. Weights that are on meta are streamed once every rank
    knows its shards.

    Args:
        fabric: launched.
        model: what built ``module``.
        module: from ``build_module``, or restored.
        plan: the decided knobs.
        seed: of the weights that no file has, with ``memory.init`` meta.
        stream: what gives weights on meta their memory and values.

    Raises:
        RecipeError: when a technique needs blocks and none are found, or a parameter cannot be held.
    """
    memory, layers = plan.memory, layers_of(module, model.blocks)
    splits, sharded = memory.tensor_parallel > 1, plan.strategy == "fsdp"
    mesh = mesh_of(plan, fabric.device) if splits or sharded else None
    with refused_alike(fabric):
        require_able(module, plan)
        if splits and mesh is not None:
            split_over_ranks(module, model, mesh[TENSOR], memory.sequence_parallel)
        blocks = _blocks(model, module, plan)
    found = describe_blocks(blocks)  # FSDP gives them other classes
    checkpoint_blocks(module, blocks, memory.activation_checkpointing)
    if memory.compile != "none":
        _compile([module] if memory.compile == "model" else blocks, memory.compile == "cuda_graphs")
    if memory.compile == "cuda_graphs":  # all blocks of a forward, and their backward, belong together
        module.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
        keep_gradients(module)
    if memory.activation_offload:
        offload_activations(module, fabric.device)
    over = mesh[DATA] if mesh is not None and splits else mesh
    streamed = memory.cpu_offload == "parameters" and memory.init != "meta"
    # FSDP would move all that it gathers at once to the device, to cut it there and move the shards back.
    values = put_on_meta(module) if streamed else {}
    warning = shard(module, blocks, plan, fabric.device, over) if sharded and over is not None else None
    if streamed:
        put_back(module, values, HOST)
    if splits and not sharded:
        move_whole(module, fabric.device)
    if memory.init == "meta":
        on_host = memory.cpu_offload == "parameters" or (memory.cpu_offload == "optimizer" and not sharded)
        stream(module, model, HOST if on_host else fabric.device, weights_dtype(memory), seed)
    masters = take_home(module, plan, fabric.device) if memory.cpu_offload == "optimizer" else None
    wrapped = fabric.setup_module(module)
    if splits:
        masters = trained_parts(module)
    return Stack(module, wrapped, masters, found, warning, mesh if splits else None, layers)


@contextmanager
def refused_alike(fabric: Fabric) -> Iterator[None]:
    """What all ranks refuse, the first one says."""
    try:
        yield
    except RecipeError as error:
        vars(error)["trainer_reported"] = fabric.global_rank > 0
        raise


def _blocks(model: Model, module: nn.Module, plan: Plan) -> Sequence[nn.Module]:
    memory = plan.memory
    wishes = {
        f"memory.strategy={memory.strategy}": plan.strategy == "fsdp",
        f"memory.activation_checkpointing={memory.activation_checkpointing}": memory.activation_checkpointing != "none",
        f"memory.compile={memory.compile}": memory.compile in ("blocks", "cuda_graphs"),
    }
    asked = [wish for wish, is_on in wishes.items() if is_on]
    return require_blocks(module, model.blocks, asked[0]) if asked else find_blocks(module, model.blocks)


def build_updates(
    fabric: Fabric, model: Model, stack: Stack, optim: Optim, plan: Plan
) -> tuple[Optimizer, GradientSync]:
    """What turns gradients into new weights: the optimizer, and how its gradients come together over the ranks."""
    memory, scaler = plan.memory, getattr(fabric.strategy.precision, "scaler", None)
    if optim.ema is not None:
        stack.averages = WeightAverages([trained for *_, trained in stack.trained()], optim, stack.send_back)
    if stack.mesh is not None and stack.masters is not None:
        require_sparse(stack.module, optim)
        optimizer = build_optimizer(stack.rules(optim), optim, memory, fabric.device)
        every = bool(memory.sync_every_micro_step)
        return optimizer, TensorParallelSync(stack.module, stack.masters, stack.mesh, every, model)
    if stack.masters is not None:
        trained = {parameter: master for parameter, master in stack.masters.items() if parameter.requires_grad}
        optimizer = build_optimizer(stack.rules(optim), optim, memory, HOST)
        sync = HostGradients(trained, fabric.device, optimizer, plan.world_size, memory.replicas, scaler)
    else:
        parameters = [p for p in stack.module.parameters() if p.requires_grad]
        require_sparse(stack.module, optim)
        fused = not plan.deterministic and not sparse_parameters(stack.module)
        device = HOST if memory.cpu_offload == "parameters" else fabric.device
        optimizer = build_optimizer(stack.rules(optim), optim, memory, device, fused)
        if isinstance(optimizer, OptimizerInBackward):
            return optimizer, AppliedInBackward(optimizer)
        forward_module = getattr(stack.wrapped, "_forward_module", stack.wrapped)
        if plan.deterministic:
            return optimizer, tree_sync(forward_module, parameters, plan.world_size)
        if memory.cpu_offload != "parameters" or not StreamedGradients.serves(parameters, plan.world_size):
            every = bool(memory.sync_every_micro_step)
            return optimizer, gradient_sync(
                forward_module, model, parameters, every_micro_step=every, replicas=memory.replicas
            )
        ranks = plan.world_size, memory.replicas
        sync = StreamedGradients(stack.module, parameters, fabric.device, optimizer, *ranks, scaler)
    reduce_after_carrying(stack.module, sync)
    if memory.compile != "model":  # whose backward would not call what takes the rows
        leave_in_rows(stack.module, sync)
    return optimizer, sync


def whole_state(stack: Stack) -> dict[str, Tensor]:
    """Every weight and persistent buffer by name, in full precision where there is one, for saving.

    Called on all ranks. Under FSDP the first rank gets whole tensors in host memory, one gathered after the other, and
    the others an empty dict. The names of a tied weight have the same tensor, so that it is saved once. With
    ``optim.ema`` it is the averages that are saved.
    """
    averages = stack.averages
    if any(isinstance(p, DTensor) for p in stack.module.parameters()):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        alone = all(p.device_mesh.size() == 1 for p in stack.module.parameters() if isinstance(p, DTensor))
        with averages.applied() if averages is not None else nullcontext():
            # One rank has all there is, on the host where it is offloaded: gathered, it would pass through the device.
            whole = {name: local(value).cpu() for name, value in stack.module.state_dict().items()} if alone else None
            gathered: dict[str, Any] = whole or get_model_state_dict(stack.module, options=options)
            if averages is not None:  # what was whole in host memory is still the model's own
                gathered = {name: value.clone() for name, value in gathered.items()}
        first = {name: names[0] for names in tied_names(stack.module) for name in names}
        state: dict[str, Any] = {name: gathered.get(first.get(name, name), value) for name, value in gathered.items()}
        for name, stretch in stretches(stack.module).items():  # in their order
            if name in state:
                rows = [state[stretch.name]] if stretch.name in state else []
                state[stretch.name] = torch.cat([*rows, state.pop(name)])
        return state
    own = {p: _alone(master.detach()) for p, master in (stack.masters or {}).items()}
    if stack.masters is not None:  # a frozen weight that half precision has in full needs no master
        own |= {p: p.detach().cpu().float() for p in stack.module.parameters() if p not in own and p.itemsize == 2}
    if averages is not None:
        own |= {p: averages.values[trained].to(trained.dtype) for _, p, trained in stack.trained()}
    named = stack.module.named_parameters(remove_duplicate=False)
    return stack.module.state_dict() | {name: own[p] for name, p in named if p in own}


def _alone(part: Tensor) -> Tensor:
    """A contiguous tensor in host memory as one that fills its storage, without a copy: those who save tensors would
    copy each that is part of a larger one."""
    if not part.numel():
        return part
    return torch.from_numpy(part.reshape(-1).view(torch.uint8).numpy()).view(part.dtype).view(part.shape)


def keep_gradients(module: nn.Module) -> None:
    """Accumulate the gradients of ``module`` in memory of their own, allocated once.

    Autograd takes the first gradient of a step as it is. A CUDA graph writes it to the graph's memory pool, which the
    next replay overwrites: torch then raises an error, or adds to the wrong values.
    """
    kept: dict[int, Tensor] = {}  # by the number of a parameter: its hook must not refer to it, or neither is freed

    def leave_pool(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient is not kept.get(id(parameter)):
            own = kept[id(parameter)] if id(parameter) in kept else torch.empty_like(gradient)
            kept[id(parameter)] = parameter.grad = own.copy_(gradient)

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(leave_pool)


def _compile(parts: Sequence[nn.Module], graphs: bool = False) -> None:
    """Compile in place, so that no parameter is renamed; happens at the first forward.

    Blocks share one compiled graph as they have the same code: compiling takes as long for 24 of them as for one. A
    second length or number of samples has it compiled for any, so that what is compiled does not grow with them; with
    ``graphs``, only what is compiled for one shape becomes a CUDA graph, for each shape would need one.
    Dropout draws its masks from the generators that eager torch draws from, in the same order.
    """
    import torch._inductor.config as inductor

    inductor.fallback_random = True  # else the compiler's own random numbers, which no seed of ours replays
    inductor.triton.cudagraph_skip_dynamic_graphs = True
    for part in parts:
        part.compile(mode="reduce-overhead" if graphs else None)
