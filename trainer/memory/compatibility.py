"""Checks of settings that cannot be combined: before any process starts, and when the module is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.contract import Model, Streamable, WholeBatch
from trainer.engine.cut import Cut
from trainer.errors import RecipeError, require
from trainer.memory.knobs import ADAM, KNOBS, UNTESTED_WITH_TP, is_sharded, turned_off
from trainer.recipe import Memory, Optim, Recipe
from trainer.system.text import as_text
from trainer.weights.files import PICKLED

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainer.memory.plan import Plan

ADAPTIVE_OPTIMIZERS = (*ADAM, "adagrad", "rmsprop", "muon")  # by the root of squares plus an epsilon of at most 1e-8

CONDITIONAL = "which is conditional (some micro-batches leave parameters without a gradient)"


def require_compatible(recipe: Recipe, world_size: int, cuts: Sequence[Cut]) -> None:
    """Reject settings that contradict each other; ``cuts`` has the cut of every phase of an accumulation schedule."""
    if recipe.optim.is_custom:
        from trainer.memory.custom_optimizer import custom_optimizer_conflicts

        for reason in custom_optimizer_conflicts(recipe.optim, recipe.memory):
            raise RecipeError(reason)
    if recipe.optim.name == "muon" and recipe.optim.arguments:
        from trainer.memory.custom_optimizer import probe_optimizer

        probe_optimizer(Optim("torch.optim.Muon", arguments=recipe.optim.arguments))  # or its first step would fail
    checks: list[Callable[[Recipe, int, Sequence[Cut]], Iterator[str]]] = [_strategy, _state]
    checks += [_tensor_parallel] if recipe.memory.tensor_parallel > 1 else []
    checks += [_meta] if recipe.memory.init == "meta" else []
    checks += [_cuda_graphs] if recipe.memory.compile == "cuda_graphs" else []
    checks += [_in_backward] if recipe.memory.optimizer_in_backward else []
    checks += [_deterministic] if recipe.run.deterministic else []
    for reason in chain.from_iterable(check(recipe, world_size, cuts) for check in checks):
        raise RecipeError(reason)


def _strategy(recipe: Recipe, world_size: int, _: Sequence[Cut]) -> Iterator[str]:
    memory, sharded, offload = recipe.memory, is_sharded(recipe.memory), recipe.memory.cpu_offload
    replicas, kind = memory.replicas, type(recipe.model).__name__
    if memory.strategy == "single" and world_size > 1:
        yield f"memory.strategy=single cannot use {world_size} ranks: use ddp, fsdp or auto, or run.devices 1"
    if recipe.model.task == "regression" and memory.precision in ("bf16-true", "16-true"):
        mixed = memory.precision.replace("true", "mixed")
        yield f"memory.precision={memory.precision} would round the labels of model.task=regression: use {mixed}"
    whole, off = f"cannot train {kind}, whose loss compares whole batches", "leave it out"
    if isinstance(recipe.model, WholeBatch) and memory.compile != "none":
        yield f"memory.compile={memory.compile} {whole}: its two forwards might draw other dropout masks; {off}"
    if isinstance(recipe.model, WholeBatch) and memory.tensor_parallel > 1:
        yield f"memory.tensor_parallel={memory.tensor_parallel} {whole}: ranks would count samples twice; {off}"
    if replicas > 1 and not sharded:
        yield f"memory.replicas={replicas} requires a sharded model: use memory.strategy fsdp, or replicas 1"
    if world_size % replicas:
        yield f"memory.replicas={replicas} does not divide {world_size} rank(s): use a divisor"
    if not memory.reshard_after_forward and not sharded:
        key, fix = "memory.reshard_after_forward=false", "use true"
        yield f"{key} requires memory.strategy fsdp, because other strategies never shard weights: {fix}"
    if memory.sync_every_micro_step and not sharded:
        key = "memory.sync_every_micro_step=true"
        yield f"{key} requires memory.strategy fsdp, because otherwise every rank keeps whole gradients: use null"
    if sharded and recipe.model.conditional:
        yield f"memory.strategy=fsdp cannot train {kind}, {CONDITIONAL}: it would wait for them; use ddp or single"
    if sharded and recipe.optim.name == "adafactor":
        yield "optim.name=adafactor needs whole matrices, but FSDP updates shards: use memory.strategy ddp, or adamw"
    if sharded and memory.compile == "model":
        yield "memory.compile=model cannot trace the hooks of FSDP: use memory.compile blocks"
    if offload == "parameters" and memory.strategy == "ddp":
        yield "memory.cpu_offload=parameters streams weights through FSDP, not DDP: use memory.strategy fsdp or auto"
    for knob in KNOBS:
        needed = knob.only_with
        if needed and knob.is_on(memory) and getattr(memory, needed) == turned_off(needed)[needed]:
            key, other = f"memory.{knob.name}={as_text(getattr(memory, knob.name))}", as_text(getattr(memory, needed))
            yield f"{key} has no effect with memory.{needed}={other}: change one of the two"
    if sharded and offload != "none" and memory.sync_every_micro_step is False:
        yield f"memory.sync_every_micro_step=false keeps what memory.cpu_offload={offload} moves: leave it at null"


def _tensor_parallel(recipe: Recipe, world_size: int, _: Sequence[Cut]) -> Iterator[str]:
    memory, key = recipe.memory, f"memory.tensor_parallel={recipe.memory.tensor_parallel}"
    if world_size % memory.tensor_parallel:
        yield f"{key} does not divide {world_size} rank(s): use a divisor (1 is off), or more run.devices"
    adapters = recipe.model.lora
    if adapters is not None and adapters.rank:
        yield f"{key} cannot split the adapters of model.lora: use only one of the two"
    if recipe.optim.name == "adafactor":
        yield f"optim.name=adafactor needs whole matrices, but {key} splits them: use adamw"
    if memory.precision in ("16-mixed", "16-true"):
        yield f"{key} has not been verified with memory.precision={memory.precision}: use bf16-mixed or 32-true"
    for name in UNTESTED_WITH_TP:
        value, usual = getattr(memory, name), getattr(Memory(), name)
        if value not in (usual, False):
            problem = f"{key} has not been verified with memory.{name}={as_text(value)}"
            yield f"{problem}: use {as_text(usual)}, or memory.tensor_parallel 1"
    if recipe.run.deterministic:
        yield f"{key} sums over ranks within a layer, which run.deterministic=true excludes: use only one of the two"


def _state(recipe: Recipe, _: int, __: Sequence[Cut]) -> Iterator[str]:
    memory, name, offload = recipe.memory, recipe.optim.kind, f"memory.cpu_offload={recipe.memory.cpu_offload}"
    on_host = memory.cpu_offload != "none"
    if memory.optimizer_state_bits < 32:
        key = f"memory.optimizer_state_bits={memory.optimizer_state_bits}"
        if name not in ADAM:
            yield f"{key} requires adam or adamw, not optim.name={name}: use adamw, or 32 bits"
        if on_host:
            yield f"{key} saves device memory, but {offload} keeps the state in host memory: use only one of the two"
        if memory.precision == "64-true":
            yield f"{key} contradicts memory.precision=64-true: use 32-true"
    if memory.stochastic_rounding:
        key = "memory.stochastic_rounding"
        if memory.precision != "bf16-true":
            yield f"{key} rounds bfloat16 weights, but memory.precision={memory.precision}: use bf16-true, or false"
        if name not in ADAM:
            yield f"{key} requires adam or adamw, not optim.name={name}: use adamw, or false"
        if on_host:
            yield f"{key} needs updates on the device, but {offload} updates in host memory: use only one of the two"
    if memory.matmul_precision != "highest" and memory.precision.endswith("-true") and memory.precision != "32-true":
        key = f"memory.matmul_precision={memory.matmul_precision}"
        yield f"{key} rounds products of fp32, but memory.precision={memory.precision} has none: use highest"
    if memory.precision == "16-true" and memory.cpu_offload != "optimizer" and name in ADAPTIVE_OPTIMIZERS:
        cause = "which divides by squared gradients that fp16 rounds to 0 with its epsilon"
        fix = "use 16-mixed or bf16-true, memory.cpu_offload optimizer (fp32 masters), or optim.name sgd"
        yield f"memory.precision=16-true cannot be used with optim.name={name}, {cause}: {fix}"


def _meta(recipe: Recipe, _: int, __: Sequence[Cut]) -> Iterator[str]:
    model, key = recipe.model, "memory.init=meta"
    weights = vars(model).get("weights", "its own")
    if not (isinstance(model, Streamable) and model.starts_on_meta()):
        kind = type(model).__name__
        yield f"{key} needs skeleton() and pretrained(), which {kind} does not define: use memory.init device"
    if weights is None:
        yield f"{key} streams pretrained weights, but model.weights is null: use memory.init device"
    if Path(str(weights)).suffix in PICKLED:
        fix = "convert it with safetensors.torch.save_file, or use memory.init device"
        yield f"{key} reads slices of safetensors files, but model.weights={weights} is a pickle: {fix}"


def _cuda_graphs(recipe: Recipe, _: int, __: Sequence[Cut]) -> Iterator[str]:
    memory, key = recipe.memory, "memory.compile=cuda_graphs"
    if is_sharded(memory):
        yield f"{key} needs weights at fixed addresses, but FSDP gathers them to new ones: use memory.compile blocks"
    for name in ("activation_checkpointing", "activation_offload", "cpu_offload"):
        if (value := getattr(memory, name)) not in (None, False, 0, "none"):
            yield f"{key} replays code that memory.{name}={value} interrupts: use memory.compile blocks, or no {name}"
    if memory.micro_batch_tokens is not None:
        yield f"{key} needs a single shape, but memory.micro_batch_tokens has many: use memory.compile blocks"


def _in_backward(recipe: Recipe, world_size: int, cuts: Sequence[Cut]) -> Iterator[str]:
    memory, key, most = recipe.memory, "memory.optimizer_in_backward", max(cut.accumulate for cut in cuts)
    if recipe.optim.clip_norm is not None:
        yield f"{key} updates weights before the norm of all gradients is known: leave optim.clip_norm at null"
    if most > 1 or memory.micro_batch_tokens is not None:
        fix = "accumulate 1" + (" and no memory.micro_batch_tokens" if memory.micro_batch_tokens else "")
        yield f"{key} updates weights in every backward, and a batch of {most} micro-batches has several: use {fix}"
    if len(recipe.model.loss_names) > 1:
        yield f"{key} updates weights in every backward, and {type(recipe.model).__name__} has several losses per batch"
    if memory.precision in ("16-mixed", "16-true"):
        yield f"{key} cannot skip a step whose fp16 gradients overflow: use bf16-mixed or 32-true"
    if world_size > 1 and memory.strategy != "fsdp":
        yield f"{key} would update weights before DDP reduces their gradients: use memory.strategy fsdp, or one rank"
    if world_size > 1 and recipe.optim.name == "muon":
        fix = "use false, or adamw"
        yield f"{key} updates one parameter at a time, but optim.name=muon shares matrices out over ranks: {fix}"
    if memory.cpu_offload != "none":
        yield f"{key} frees gradients that memory.cpu_offload={memory.cpu_offload} moves: use only one of the two"
    if memory.compile == "cuda_graphs":
        yield f"memory.compile=cuda_graphs replays code that {key}=true interrupts: use memory.compile blocks"
    if recipe.run.deterministic:
        yield f"run.deterministic=true needs the norm before the update, not after, as {key}=true: use false"


def _deterministic(recipe: Recipe, world_size: int, _: Sequence[Cut]) -> Iterator[str]:
    memory, key, kind = recipe.memory, "run.deterministic=true", type(recipe.model).__name__
    if world_size & (world_size - 1):
        yield f"{key} sums gradients over 1, 2, 4, 8, ... ranks, but there are {world_size}: use a power of two"
    if recipe.batch_size is None:
        yield f"{key} needs the same batch on any number of ranks: set batch_size instead of accumulate"
    if memory.micro_batch_size == "auto":
        yield f"{key} needs the same micro-batches on any number of ranks: set memory.micro_batch_size to a number"
    if memory.precision not in ("32-true", "64-true", "bf16-mixed"):
        yield f"{key} cannot sum gradients of memory.precision={memory.precision}: use 32-true, 64-true or bf16-mixed"
    if memory.compile != "none":
        yield f"{key} excludes memory.compile={memory.compile}, whose code depends on a rank's shapes: use none"
    if memory.cpu_offload == "optimizer":
        yield f"{key} sums gradients on the device, memory.cpu_offload=optimizer on the host: use none or parameters"
    if memory.replicas > 1:
        yield f"{key} sums over all ranks along one tree, without memory.replicas={memory.replicas}: use replicas 1"
    if memory.optimizer_state_bits < 32 or memory.stochastic_rounding:
        fix = "their rounding depends on the position of a weight in its shard; use 32 and false"
        yield f"{key} excludes memory.optimizer_state_bits below 32 and memory.stochastic_rounding: {fix}"
    if memory.sync_every_micro_step is False:
        yield f"{key} reduces gradients in every micro-step: leave memory.sync_every_micro_step at null"
    if recipe.model.conditional:
        yield f"{key} cannot train {kind}, {CONDITIONAL}, because all ranks sum in the same order: use false"
    if is_sharded(memory) and len(recipe.model.loss_names) > 1:
        yield f"{key} cannot train {kind} with memory.strategy fsdp, which reduces after each loss: use ddp or single"


def require_supported_parameters(module: nn.Module, plan: Plan, model: Model) -> None:
    """Reject parameters that a technique of ``plan`` does not support, or would train differently."""
    _require_local_norms(module, plan)
    _require_no_router_loss(module, model)
    memory, bits = plan.memory, plan.memory.optimizer_state_bits
    fsdp = [("memory.strategy=fsdp", "use ddp or single", plan.strategy == "fsdp")]
    dense = [
        *fsdp,
        ("memory.cpu_offload=optimizer", "use none", memory.cpu_offload == "optimizer"),
        ("run.deterministic=true", "use false", plan.deterministic),
        ("memory.tensor_parallel", "use 1", memory.tensor_parallel > 1),
    ]
    real = [  # safetensors has no complex128, and torch has few operations for complex32
        *dense,
        (f"memory.precision={memory.precision}", "use 32-true", memory.precision not in ("32-true", "bf16-mixed")),
        (f"memory.optimizer_state_bits={bits}", "use 32", bits < 32),
    ]
    sparse = sparse_parameters(module)
    for name, parameter in module.named_parameters():
        for is_so, fault, excluded in (
            (parameter.ndim == 0, "has no dimension: give it the shape (1,)", fsdp),
            (name in sparse, "has sparse gradients: remove sparse=True", dense),
            (parameter.is_complex(), "is complex: store it as real numbers and use torch.view_as_complex", real),
        ):
            for key, remedy, is_on in excluded:
                require(not (is_so and is_on), f"{key} cannot train {name}, which {fault}, or {remedy}")


def _require_local_norms(module: nn.Module, plan: Plan) -> None:
    """Reject SyncBatchNorm if it would synchronise. On a CPU its forward raises an error."""
    from torch.nn import SyncBatchNorm

    if plan.world_size == 1 and plan.strategy == "single":
        return
    for name, part in module.named_modules():
        if isinstance(part, SyncBatchNorm):
            raise RecipeError(
                f"memory.strategy={plan.strategy} cannot train {name or 'a module'}, a SyncBatchNorm, whose statistics "
                "cover one micro-step of all ranks instead of the batch, and change with the cut: use LayerNorm or "
                "GroupNorm"
            )


def may_cut_batchnorm(memory: Memory, model: Model) -> bool:
    """Return whether the user accepts that BatchNorm normalizes each micro-batch by itself."""
    return memory.correct_batchnorm is not None or model.samples_interact


def require_whole_batchnorm(module: nn.Module, plan: Plan, recipe: Recipe) -> None:
    """Reject BatchNorm in a batch that is cut: no accumulation gives the gradient of the whole batch then."""
    from torch.nn.modules.batchnorm import _BatchNorm

    cut = plan.initial_cut
    is_cut = cut.micro_batch_size < cut.batch_size or isinstance(recipe.accumulate, dict)
    names = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    if names and is_cut and not may_cut_batchnorm(recipe.memory, recipe.model):
        raise RecipeError(
            f"layer {names[0]!r} is a BatchNorm: it normalizes each micro-batch by itself, here {cut.micro_batch_size} "
            f"of {cut.batch_size} samples, which does not give the gradient of the whole batch. Use GroupNorm, train "
            "whole batches on one device, or accept another gradient with memory.correct_batchnorm true"
        )


def _require_no_router_loss(module: nn.Module, model: Model) -> None:
    """Reject a mixture of experts whose loss includes that of its router, which is no sum over samples."""
    has_loss = any(getattr(getattr(part, "config", None), "output_router_logits", False) for part in module.modules())
    if has_loss and not model.samples_interact:
        fault = f"{type(model).__name__}: output_router_logits=True adds a loss that depends on how the batch is cut"
        raise RecipeError(f"{fault}: set it to False in the configuration of the model, or set samples_interact = True")


def require_first_order(output: Any, setting: str, remedy: str) -> None:
    """Reject a second-order backward through ``output`` on all ranks; call this before other hooks are registered."""
    import torch
    from torch.utils._pytree import tree_leaves

    def check(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RecipeError(f"{setting} cannot compute second-order gradients (create_graph=True): {remedy}")

    if not torch.compiler.is_compiling():  # the compiler itself rejects a second backward
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(check)


def require_sparse_support(module: nn.Module, optim: Optim) -> None:
    """Reject an optimizer that does not support sparse gradients if ``module`` has some."""
    names = sparse_parameters(module)
    decays = optim.weight_decay or any(settings.get("weight_decay") for settings in optim.groups.values())
    if names and (optim.name not in ("sgd", "adagrad") or decays):
        cause = f"optim.name={optim.kind} with optim.weight_decay={optim.weight_decay} cannot update {min(names)}"
        fix = "remove sparse=True, or use sgd or adagrad without decay"
        raise RecipeError(f"{cause}, which has sparse gradients: {fix}")


def sparse_parameters(module: nn.Module) -> set[str]:
    """Return the names of trained parameters with sparse gradients: embeddings with ``sparse=True``."""
    layers = [part for part in module.modules() if getattr(part, "sparse", False)]
    sparse = {id(layer.weight) for layer in layers if hasattr(layer, "weight")}
    return {name for name, p in module.named_parameters() if id(p) in sparse and p.requires_grad}
