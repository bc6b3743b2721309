"""Trace a few real steps of the engine on a simulated GPU.

The code of a run is used throughout, from launch to gathering the weights to save. But no weights are read, and
nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.contract import Model, Packable, Streamable, as_samples, capability, without_weights
from trainer.data.loader import make_loader
from trainer.engine.cut import cut_batch, data_parallel_rank, largest_micro_batch
from trainer.engine.data_feed import evaluation_cut, evaluation_micro_batches, make_windows
from trainer.engine.deterministic import Node, PartialSums, TreeSync
from trainer.engine.loop import evaluate
from trainer.engine.loss_check import LossCheck
from trainer.engine.memory_rehearsal import longest_window, rehearse
from trainer.engine.quarantine import Quarantine
from trainer.engine.step import PhaseHooks, Stepper
from trainer.engine.window import MicroBatch, Window
from trainer.fakegpu.events import Trace
from trainer.fakegpu.fake_process_group import fake_ranks
from trainer.fakegpu.target import Target
from trainer.fakegpu.torch_patches import FakeStream, patch_libraries
from trainer.fakegpu.torch_patches import patch as replace_attributes
from trainer.fakegpu.tracer import Tracer, tracing
from trainer.launching.start import launch
from trainer.launching.world import World
from trainer.memory.compatibility import require_whole_batchnorm
from trainer.memory.eager_update import EagerOptimizerUpdate
from trainer.memory.initialize import HOST, weights_device
from trainer.memory.optimizer_offload import HostGradientSync
from trainer.memory.parameter_groups import set_requires_grad
from trainer.memory.plan import Plan
from trainer.memory.precision import matmul_precision, weights_dtype
from trainer.memory.stack import PreparedModel, apply_stack, build_optimizer_and_sync
from trainer.models.causal import CausalLM
from trainer.recipe import Recipe
from trainer.system.text import format_bytes
from trainer.values import Loss
from trainer.weights import nf4
from trainer.weights.streaming import allocate, default_dtype, on_meta


@dataclass
class TracedSamples:
    """The input of the traced steps, on the host."""

    first: Window  # the first batch, reduced to its first and last micro-step, and a middle one if lengths vary
    longest: Window  # a batch of the longest micro-batches that can occur
    evaluation: list[MicroBatch]  # the longest micro-batches of an evaluation; empty without one
    skipped: int  # number of micro-steps left out of the first batch
    varies: bool  # whether samples differ in length


def draw_samples(recipe: Recipe, plan: Plan) -> TracedSamples:
    """Return the first samples of a run with ``plan``, and the longest ones, from the recipe's prepared data."""
    ranks, loader = plan.world_size, make_loader(recipe, recipe.data.train)
    _, shares = data_parallel_rank(plan.memory, 0, ranks)
    windows = make_windows(recipe, loader, world_size=ranks, reduce=lambda values: [value * shares for value in values])
    varies = windows.lengths is not None and min(windows.lengths) < max(windows.lengths)
    most, window = 3 if varies else 2, next(iter(windows.epoch(0, 0, 1)))
    own = window.micro_batches
    if len(own) > most:
        own = [own[0], *own[len(own) // 2 :][: most - 2], own[-1]]
    first, skipped = replace(window, micro_batches=own), len(window) - len(own)
    return TracedSamples(first, longest_window(windows, recipe.epochs), _evaluated(recipe, plan), skipped, varies)


def _evaluated(recipe: Recipe, plan: Plan) -> list[MicroBatch]:
    dataset = recipe.data.val if recipe.data.val is not None else recipe.data.test
    if dataset is None or not recipe.run.evaluate:
        return []
    cut = evaluation_cut(plan.initial_cut, len(dataset))
    lengths, packs = as_samples(dataset).lengths, capability(recipe.model, Packable).packs()
    shares = data_parallel_rank(plan.memory, 0, plan.world_size)[1]
    piece = largest_micro_batch(cut_batch(range(len(dataset)), cut, shares, lengths, packs), lengths, packs)
    return list(evaluation_micro_batches("val", [piece], make_loader(recipe, dataset), Quarantine(limit=None)))


def trace_run(
    recipe: Recipe, plan: Plan, samples: TracedSamples, target: Target, nodes: int = 1, priced: bool = True
) -> Trace:
    """Trace a run of a prepared recipe with ``plan`` on ``target``, on the first of its ranks, over ``nodes``; without
    the work of its operations unless it is to be ``priced``.

    This changes torch for the rest of the process: see :func:`trainer.fakegpu.torch_patches.install`.
    """
    ranks = plan.world_size
    if plan.strategy != "single":
        fake_ranks(ranks, nodes)
    with matmul_precision(plan.memory.matmul_precision), tracing(target, ranks, nodes) as tracer:
        _few_pieces(tracer)
        with _disable_current_modes():
            launcher = "torchrun" if ranks > 1 else "python"
            fabric = launch(plan, World(launcher, target.device.type, ranks // nodes, nodes))
            module = empty_module(recipe, weights_dtype(plan.memory))
        patch_libraries(tracer.launch)
        _Run(recipe, plan, fabric, tracer).run(module, samples, priced)
    trace = tracer.trace
    trace.notes += _notes(recipe, plan, module)
    trace.skipped_micro_steps = samples.skipped
    return trace


def _few_pieces(tracer: Tracer) -> None:
    """Trace only the first and last piece in which a CPU dequantizes an NF4 weight; the first stands for the others."""
    all_pieces = nf4.iter_chunks

    def first_and_last(codes: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        *others, last = all_pieces(codes, whole)
        tracer.repeat = len(others)
        yield from others[:1]
        tracer.repeat = 1
        yield last

    replace_attributes(nf4, iter_chunks=first_and_last)


def _notes(recipe: Recipe, plan: Plan, module: nn.Module) -> list[str]:
    notes = []
    if recipe.optim.ema is not None:
        notes.append("optim.ema: the averages (4 bytes per trained weight) count as optimizer state")
    if plan.memory.compile != "none":
        bound = "fused kernels keep fewer tensors, so this is an upper bound, except for the compiler's own buffers"
        notes.append(f"memory.compile={plan.memory.compile} is predicted without compiling: {bound}")
    if plan.memory.compile == "cuda_graphs":
        notes.append("memory.compile=cuda_graphs: not tested on a GPU yet; memory kept by its graphs is not predicted")
    if isinstance(recipe.model, CausalLM) and recipe.model.needs_reference:
        size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        second = f"{format_bytes(size)} of weights of a second model"
        saved = "a second forward pass" if recipe.model.lora.rank else second
        what = "the reference is computed once before training and takes 16 bytes per pair on the host"
        notes.append(f"model.loss={recipe.model.loss}: {what}, which saves {saved}")
    if any(isinstance(part, nn.RNNBase) for part in module.modules()):
        notes.append("recurrent layers are predicted step by step: cuDNN's kernels differ in time and memory")
    return notes


def empty_module(recipe: Recipe, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the module of ``recipe`` on meta, in ``dtype`` or, by default, fp32."""
    model = without_weights(recipe.model)
    build = model.build
    if isinstance(model, Streamable) and type(model).build is Model.build:  # the default reads the weights
        build = model.skeleton
    with default_dtype(dtype or torch.float32):
        module = on_meta(build).train()
    set_requires_grad(module, recipe.model, recipe.optim)
    return module


class _Run(PhaseHooks):
    def __init__(self, recipe: Recipe, plan: Plan, fabric: Fabric, tracer: Tracer) -> None:
        self.recipe, self.plan, self.fabric, self.tracer = recipe, plan, fabric, tracer

    def run(self, module: nn.Module, samples: TracedSamples, priced: bool) -> None:
        """Build, rehearse, step, evaluate and gather the weights."""
        self.tracer.enter("init")
        self.stack = stack = self._build(module)
        memory, optim, fabric, model = self.recipe.memory, self.recipe.optim, self.fabric, self.recipe.model
        self.optimizer, sync = build_optimizer_and_sync(fabric, model, stack, optim, self.plan)
        if isinstance(sync, TreeSync):  # keep the sums of the micro-steps that are left out
            traced = len(samples.first)
            sync.sums = LatePartialSums(max_partial_sums(traced + samples.skipped) - max_partial_sums(traced))
        if isinstance(sync, HostGradientSync) and sync.carrier is not None:
            sync.carrier.chunks = self._first_chunk
        if isinstance(sync, HostGradientSync):
            sync.ahead = _TracedUpdates(self.tracer, self.optimizer, sync.ahead.scaler, pays=sync.ahead.pays)
        if stack.averages is not None:
            self.tracer.categorise(stack.averages.values.values(), "optimizer")
        options: dict[str, Any] = {"clip_norm": optim.clip_norm, "correct_batchnorm": memory.correct_batchnorm}
        options |= {"copies": memory.tensor_parallel, "average": stack.update_averages, "sync": sync, "phases": self}
        stepper = _FakeStepper(self.tracer, fabric, model, stack.wrapped, self.optimizer, **options)
        stepper.module.train()
        if memory.micro_batch_size == "auto" and not sync.updates_in_backward:
            rehearse(stepper, samples.longest)
        stepper.launch(samples.first)
        if samples.varies:
            stepper.launch(samples.longest)
        if priced or not samples.varies:  # a second step, whose optimizer has its state
            self.tracer.records_work = priced
            stepper.launch(samples.first)
            self.tracer.records_work = False
        stepper.settle()
        if samples.evaluation:
            self.tracer.enter("evaluation")
            with stack.averaged():
                evaluate(stepper, samples.evaluation, _Nothing())
        self.tracer.enter("saving")
        _gather(stack.module, self.tracer.target.device)

    def begin_step(self) -> None:
        self.tracer.trace.work.clear()
        self.tracer.trace.micro_steps.clear()

    def enter(self, phase: str, micro: MicroBatch | None = None) -> None:
        if phase in ("forward", "step"):
            if self.tracer.phase != phase:
                self.tracer.trace.micro_steps.append(len(self.tracer.trace.work))
            self.tracer.categorise(_gradients(self.stack), "gradients")
        self.tracer.enter(phase)

    def end_step(self) -> None:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        self.tracer.categorise([value for value in states if isinstance(value, Tensor)], "optimizer")

    def _build(self, module: nn.Module) -> PreparedModel:
        plan, dtype = self.plan, weights_dtype(self.plan.memory)
        require_whole_batchnorm(module, self.plan, self.recipe)
        if plan.memory.cpu_offload == "parameters":  # the stack puts them on meta, which counts as the device
            plan = replace(plan, memory=replace(plan.memory, init="meta"))
        if plan.memory.init != "meta":
            allocate(module, HOST, dtype)
            module.to(weights_device(self.fabric, plan))
            self._categorise(module)
        stack = apply_stack(self.fabric, self.recipe.model, module, plan, stream=lambda m, _, *to: allocate(m, *to[:2]))
        self._categorise(module)
        return stack

    def _first_chunk(self, ours: Tensor, theirs: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield only the first of thousands of chunks of a transfer: chunks allocate no memory."""
        self.tracer.repeat = -(-ours.numel() // size)
        if FakeStream.current.number:  # in parallel to the computation, with events and waits
            self.tracer.record_operation("chunk", "compute", 0, 0, "")
        yield ours[:size], theirs[:size]
        self.tracer.repeat = 1

    def _categorise(self, module: nn.Module) -> None:
        self.tracer.categorise([*module.parameters(), *module.buffers()], "params")


class _TracedUpdates(EagerOptimizerUpdate):
    """Updates without a thread: no step is clipped or skipped, and host memory is unlimited."""

    def __init__(self, tracer: Tracer, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tracer, self.room = tracer, math.inf

    def submit(self, gradients: list[tuple[Tensor, Tensor]], arrived: Callable[[], object] | None) -> None:
        with self.tracer.on_host_thread():
            self.update(gradients, arrived)

    def join(self) -> list[Any]:
        self.tracer.join()
        return super().join()

    def needs_no_clipping(self, norm: Tensor, largest: float | None) -> bool:
        return True


class _FakeStepper(Stepper):
    """A stepper for fake tensors; its ``tracer`` has the device and categorises the batch."""

    def __init__(self, tracer: Tracer, *arguments: Any, **options: Any) -> None:
        self.tracer = tracer
        super().__init__(*arguments, **options)

    def compare(self, check: LossCheck, window: Window) -> None:
        """No-op: a few samples without gradients do not change the peak."""

    def to_device(self, batch: Any) -> Any:
        fake, device = self.tracer.mode.fake, self.tracer.target.device
        moved = tree_map_only(Tensor, lambda item: fake(item).to(device), batch)
        self.tracer.categorise([item for item in tree_leaves(moved) if isinstance(item, Tensor)], "batch")
        return moved


@torch.no_grad()
def _gather(module: nn.Module, device: torch.device) -> None:
    """Allocate what ``full_state_dict`` has on the device: one whole tensor at a time, of each sharded one."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            shard = parameter.to_local().to(device)
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            del shard, whole


def _gradients(stack: PreparedModel) -> Iterator[Tensor]:
    for tensor in (*stack.module.parameters(), *(stack.masters or {}).values()):
        if tensor.grad is not None:
            yield tensor.grad
    for part in stack.module.modules():
        group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
        for held in group.fsdp_params if group is not None else ():
            whole = getattr(held, "_unsharded_param", None)  # missing before the first gathering
            kept = (getattr(held, "unsharded_accumulated_grad", None), getattr(whole, "grad", None))
            yield from (gradient for gradient in kept if gradient is not None)


class _Nothing:
    def update(self, loss: Loss) -> None: ...
    def compute(self) -> None: ...
    def reset(self) -> None: ...


# The sums that ``run.deterministic`` keeps of the micro-steps that a trace leaves out.

ABOVE_ALL = 64  # above all real heights: these sums are combined only at the end of a window


class LatePartialSums(PartialSums):
    """Partial sums that start with ``earlier`` sums of untraced micro-steps."""

    def __init__(self, earlier: int) -> None:
        super().__init__()
        self.earlier = earlier

    def add(self, node: Node) -> None:
        """Add a node; before the first one, create the earlier sums."""
        if not self.sums and node is not None:
            heights = range(ABOVE_ALL + self.earlier, ABOVE_ALL, -1)
            self.sums = [(height, [torch.empty_like(tensor) for tensor in node]) for height in heights]
        super().add(node)


def max_partial_sums(micro_steps: int) -> int:
    """Return the maximum number of sums kept: the most one bits of a smaller number in binary."""
    return micro_steps.bit_length() - 1
