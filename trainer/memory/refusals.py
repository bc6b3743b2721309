"""Which settings cannot work together, and why: found before any process is started, or when the module is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.engine.window import Cut
from trainer.errors import require
from trainer.memory.knobs import ADAM
from trainer.recipe import Optim, Recipe
from trainer.weights.files import PICKLED

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainer.memory.plan import Plan

DIVIDE_BY_SQUARES = (*ADAM, "adagrad", "rmsprop")
"""Optimizers that divide by the root of squared gradients, plus an epsilon of at most 1e-8."""


def require_compatible(recipe: Recipe, world_size: int, cuts: Sequence[Cut]) -> None:
    """Refuse wishes that contradict each other.

    Args:
        recipe: the wishes.
        world_size: ranks.
        cuts: how batches are cut, in every phase of an accumulation schedule.

    Raises:
        RecipeError: naming the key, the reason and what to change.
    """
    _strategy(recipe, world_size)
    _offload(recipe)
    _state(recipe)
    _half(recipe)
    if recipe.memory.init == "meta":
        _meta(recipe)
    if recipe.memory.optimizer_in_backward:
        _in_backward(recipe, world_size, cuts)
    if recipe.run.deterministic:
        _deterministic(recipe, world_size)


def _strategy(recipe: Recipe, world_size: int) -> None:
    memory = recipe.memory
    sharded = memory.strategy == "fsdp" or memory.cpu_offload == "parameters"
    require(
        memory.strategy != "single" or world_size == 1,
        f"memory.strategy=single cannot use {world_size} ranks: use ddp, fsdp or auto, or run.devices 1",
    )
    require(
        sharded or memory.replicas == 1,
        f"memory.replicas={memory.replicas} are copies of a sharded model: use memory.strategy fsdp, or replicas 1",
    )
    require(
        world_size % memory.replicas == 0,
        f"memory.replicas={memory.replicas} does not divide {world_size} rank(s): every replica needs as many",
    )
    require(
        sharded or memory.reshard_after_forward,
        "memory.reshard_after_forward=false is for memory.strategy fsdp: without sharding weights are always whole",
    )
    require(
        sharded or not memory.sync_every_micro_step,
        "memory.sync_every_micro_step=true is for memory.strategy fsdp: without sharding every rank keeps whole "
        "gradients either way, so reducing them more than once a step would only cost time",
    )
    require(
        not (sharded and recipe.model.conditional),
        f"memory.strategy=fsdp cannot train {type(recipe.model).__name__}: some of its micro-batches leave parameters "
        "without a gradient (conditional), and FSDP's collectives would wait for them; use ddp or single",
    )
    require(
        not (sharded and recipe.optim.name == "adafactor"),
        "optim.name=adafactor needs the rows and columns of whole matrices, and FSDP updates shards: use "
        "memory.strategy ddp, or adamw",
    )
    require(
        not (sharded and memory.compile == "model"),
        "memory.compile=model cannot see through the hooks of FSDP: use memory.compile blocks",
    )


def _offload(recipe: Recipe) -> None:
    memory = recipe.memory
    require(
        memory.cpu_offload != "parameters" or memory.strategy != "ddp",
        "memory.cpu_offload=parameters streams weights through FSDP, while DDP keeps them whole on every device: use "
        "memory.strategy fsdp or auto",
    )
    sharded = memory.strategy == "fsdp" or memory.cpu_offload == "parameters"
    require(
        not (sharded and memory.cpu_offload != "none" and memory.sync_every_micro_step is False),
        f"memory.sync_every_micro_step=false would keep whole gradients on the device, which memory.cpu_offload="
        f"{memory.cpu_offload} is there to avoid: leave it at null",
    )


def _meta(recipe: Recipe) -> None:
    model = recipe.model
    require(
        model.starts_on_meta(),
        f"memory.init=meta cannot start {type(model).__name__}: it has no skeleton() and pretrained(); "
        "use memory.init device",
    )
    adapters = getattr(model, "lora", None)
    require(
        adapters is None or not adapters.rank,
        "memory.init=meta streams weights by the names that they have without adapters: use memory.init device with "
        "model.lora",
    )
    weights = getattr(model, "weights", "its own")
    require(
        weights is not None,
        "memory.init=meta streams the weights of model.weights in, and there is nothing to stream: model.weights is "
        "null; give some, or use memory.init device",
    )
    require(
        Path(str(weights)).suffix not in PICKLED,
        f"memory.init=meta reads slices of safetensors files, and model.weights={weights} is a pickle: convert it with "
        "safetensors.torch.save_file, or use memory.init device",
    )


def _state(recipe: Recipe) -> None:
    memory, optim = recipe.memory, recipe.optim
    if memory.optimizer_state_bits < 32:
        key = f"memory.optimizer_state_bits={memory.optimizer_state_bits}"
        require(optim.name in ADAM, f"{key} is for adam and adamw: optim.name={optim.name} has no such version")
        require(
            memory.cpu_offload == "none",
            f"{key} saves device memory, and memory.cpu_offload={memory.cpu_offload} keeps the state in host memory: "
            "use one of the two",
        )
        require(memory.precision != "64-true", f"{key} makes no sense with memory.precision 64-true: use 32-true")
    if memory.stochastic_rounding:
        require(
            memory.precision == "bf16-true",
            f"memory.stochastic_rounding rounds bfloat16 weights, and memory.precision={memory.precision} has none: "
            "use bf16-true, or leave it out",
        )
        require(
            optim.name in ADAM, f"memory.stochastic_rounding is for adam and adamw: optim.name={optim.name} has none"
        )
        require(
            memory.cpu_offload == "none",
            f"memory.stochastic_rounding is done on the device, and memory.cpu_offload={memory.cpu_offload} updates "
            "in host memory: use one of the two",
        )


def _half(recipe: Recipe) -> None:
    memory, optim = recipe.memory, recipe.optim
    require(
        memory.precision != "16-true" or memory.cpu_offload == "optimizer" or optim.name not in DIVIDE_BY_SQUARES,
        f"memory.precision=16-true cannot be used with optim.name={optim.name}, which divides by squared gradients "
        "that fp16 rounds to 0 with its epsilon: use 16-mixed or bf16-true, memory.cpu_offload optimizer (fp32 "
        "masters), or optim.name sgd",
    )


def _in_backward(recipe: Recipe, world_size: int, cuts: Sequence[Cut]) -> None:
    memory, optim = recipe.memory, recipe.optim
    key = "memory.optimizer_in_backward"
    require(
        optim.clip_norm is None,
        f"{key} updates weights before the norm of all gradients is known: leave optim.clip_norm at null",
    )
    most = max(cut.accumulate for cut in cuts)
    require(
        most == 1 and memory.micro_batch_tokens is None,
        f"{key} updates weights in every backward, and a batch of {most} micro-batches has several: use accumulate 1"
        + (" and no memory.micro_batch_tokens" if memory.micro_batch_tokens else ""),
    )
    require(
        len(recipe.model.loss_names) == 1,
        f"{key} updates weights in every backward, and {type(recipe.model).__name__} has several losses a batch",
    )
    require(
        memory.precision != "16-mixed",
        f"{key} updates weights before it is known whether fp16 gradients overflowed: use bf16-mixed or 32-true",
    )
    require(
        world_size == 1 or memory.strategy == "fsdp",
        f"{key} would update weights before DDP has reduced their gradients: use memory.strategy fsdp, or one rank",
    )
    require(
        memory.cpu_offload == "none",
        f"{key} frees gradients on the device, and memory.cpu_offload={memory.cpu_offload} moves them to host memory: "
        "use one of the two",
    )


def _deterministic(recipe: Recipe, world_size: int) -> None:
    """What the bits of the weights must not depend on: the number of ranks, and how they share weights."""
    memory, key = recipe.memory, "run.deterministic=true"
    sharded = memory.strategy == "fsdp" or memory.cpu_offload == "parameters"
    require(
        world_size & (world_size - 1) == 0,
        f"{key} sums gradients along a binary tree over 1, 2, 4, 8, ... ranks, and there are {world_size}: use a power "
        "of two",
    )
    require(
        recipe.batch_size is not None,
        f"{key} needs the same batch on any number of ranks: give batch_size in the place of accumulate",
    )
    require(
        memory.micro_batch_size != "auto",
        f"{key} needs the same micro-batches on any number of ranks: give memory.micro_batch_size as a number",
    )
    require(
        memory.precision in ("32-true", "64-true", "bf16-mixed"),
        f"{key} sums gradients in fp32 or fp64, and not with memory.precision={memory.precision}: use 32-true, 64-true "
        "or bf16-mixed",
    )
    require(
        memory.compile == "none",
        f"{key} cannot be kept with memory.compile={memory.compile}: the compiler makes other code for other sequences "
        "of shapes, and each rank sees its own; use memory.compile none",
    )
    require(
        memory.cpu_offload != "optimizer",
        f"{key} sums gradients where they are computed, and memory.cpu_offload=optimizer adds them up in host memory "
        "as they come: use memory.cpu_offload none or parameters",
    )
    require(
        memory.replicas == 1,
        f"{key} sums gradients over all ranks along one tree, and not with memory.replicas={memory.replicas}: use "
        "replicas 1",
    )
    require(
        not memory.optimizer_in_backward,
        f"{key} needs the norm of all gradients before the update, and memory.optimizer_in_backward=true has updated "
        "by then: leave it at false",
    )
    require(
        memory.optimizer_state_bits == 32 and not memory.stochastic_rounding,
        f"{key} cannot be kept with memory.optimizer_state_bits below 32 or memory.stochastic_rounding: both round by "
        "where a weight is in its shard; use 32 and false",
    )
    require(
        memory.sync_every_micro_step is not False,
        f"{key} reduces gradients in every micro-step: leave memory.sync_every_micro_step at null",
    )
    require(
        not recipe.model.conditional,
        f"{key} cannot train {type(recipe.model).__name__}: some of its micro-batches leave parameters without a "
        "gradient (conditional), and the ranks sum in step",
    )
    require(
        not sharded or len(recipe.model.loss_names) == 1,
        f"{key} cannot train {type(recipe.model).__name__}, which has several losses a batch, with memory.strategy "
        "fsdp, which reduces after each: use memory.strategy ddp or single",
    )


def require_able(module: nn.Module, plan: Plan) -> None:
    """Refuse parameters that a technique of ``plan`` cannot hold, or not without changing what they learn.

    Raises:
        RecipeError: naming the parameter, the key and what to change.
    """
    memory = plan.memory
    fsdp = [("memory.strategy=fsdp", "use ddp or single", plan.strategy == "fsdp")]
    dense = [
        *fsdp,
        ("memory.cpu_offload=optimizer", "use none", memory.cpu_offload == "optimizer"),
        ("run.deterministic=true", "use false", plan.deterministic),
    ]
    # Safetensors has no complex numbers of double precision, and torch few operations for those of half.
    full = memory.precision in ("32-true", "bf16-mixed")
    bits = memory.optimizer_state_bits
    real = [
        *dense,
        (f"memory.precision={memory.precision}", "use 32-true", not full),
        (f"memory.optimizer_state_bits={bits}", "use 32", bits < 32),
    ]
    sparse = sparse_parameters(module)
    for name, parameter in module.named_parameters():
        for is_so, fault, excluded in (
            (parameter.ndim == 0, "has no dimension: give it the shape (1,)", fsdp),
            (name in sparse, "has sparse gradients: leave out sparse=True", dense),
            (parameter.is_complex(), "is complex: keep it as real numbers, for torch.view_as_complex", real),
        ):
            for key, remedy, is_on in excluded:
                require(not (is_so and is_on), f"{key} cannot train {name}, which {fault}, or {remedy}")


def require_first_order(output: Any, setting: str, remedy: str) -> None:
    """Refuse, when it is asked for, the gradient of a gradient (``create_graph=True``) of what a module returned.

    All ranks do so alike, and before a technique's own hooks on ``output`` if called before they are made.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    def check(gradient: Tensor) -> None:
        is_second_order = torch.is_grad_enabled()
        require(not is_second_order, f"{setting} cannot take the gradient of a gradient (create_graph=True): {remedy}")

    if not torch.compiler.is_compiling():  # the compiler has no second backward, and says so
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(check)


def require_sparse(module: nn.Module, optim: Optim) -> None:
    """Refuse an optimizer that cannot update from sparse gradients, where ``module`` has some.

    Raises:
        RecipeError: naming the parameter.
    """
    for name in sparse_parameters(module):
        require(
            optim.name in ("sgd", "adagrad") and not optim.weight_decay,
            f"optim.name={optim.name} with optim.weight_decay={optim.weight_decay} cannot update {name}, which has "
            "sparse gradients: leave out sparse=True, or use sgd or adagrad without decay",
        )


def sparse_parameters(module: nn.Module) -> set[str]:
    """The names of the parameters that train and get sparse gradients: those of embeddings with ``sparse=True``."""
    sparse = {
        id(part.weight) for part in module.modules() if getattr(part, "sparse", False) and hasattr(part, "weight")
    }
    return {name for name, p in module.named_parameters() if id(p) in sparse and p.requires_grad}
