"""A few steps of our own engine, taken on a simulated GPU.

Everything that a run does is done here by the same code: launch, build, wrap, rehearse, steps, evaluation, gathering
the weights to save. Only the weights are never read and nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from trainer.contract import Model, Packable, Streamable, as_samples, capability, without_weights
from trainer.data.loader import loader_of
from trainer.engine.check import LossCheck
from trainer.engine.deterministic import Node, PartialSums, TreeSync
from trainer.engine.feed import evaluation_cut, evaluation_micro_batches, windows_of
from trainer.engine.loop import evaluate
from trainer.engine.quarantine import Quarantine
from trainer.engine.rehearsal import rehearse
from trainer.engine.step import Phases, Stepper
from trainer.engine.window import MicroBatch, Window, cut_batch, fullest, share_of
from trainer.fakegpu.events import Trace
from trainer.fakegpu.patches import FakeStream, patch_libraries
from trainer.fakegpu.patches import replace as replace_attributes
from trainer.fakegpu.ranks import fake_ranks
from trainer.fakegpu.target import Target
from trainer.fakegpu.tracer import Tracer, tracing
from trainer.launching.start import launch
from trainer.launching.world import World
from trainer.memory.initialize import HOST, home_of_weights
from trainer.memory.optimizer_offload import HostGradients
from trainer.memory.parameter_groups import choose_trained
from trainer.memory.plan import Plan
from trainer.memory.precision import matmul_precision, weights_dtype
from trainer.memory.stack import Stack, apply_stack, build_updates
from trainer.memory.update_ahead import UpdateAhead
from trainer.recipe import Recipe
from trainer.values import Loss
from trainer.weights import nf4
from trainer.weights.streaming import allocate, default_dtype, on_meta


@dataclass
class TracedSamples:
    """What the traced steps are fed, on the host."""

    # The first batch of the run, with no more micro-steps than differ from each other: the first and the last or, of
    # samples that differ in length and are sorted by it, also one in the middle.
    first: Window
    longest: Window  # a batch of the longest micro-batches that can occur
    evaluation: list[MicroBatch]  # the longest micro-batches of an evaluation; empty without one
    skipped: int  # how many micro-steps of the first batch were left out
    varies: bool  # whether samples differ in length


def draw_samples(recipe: Recipe, plan: Plan) -> TracedSamples:
    """The samples that ``plan`` would meet first, and the longest ones, from the recipe's prepared data."""
    ranks, loader = plan.world_size, loader_of(recipe, recipe.data.train)
    _, shares = share_of(plan.memory, 0, ranks)
    windows = windows_of(recipe, loader, world_size=ranks, reduce=lambda values: [value * shares for value in values])
    varies = windows.lengths is not None and min(windows.lengths) < max(windows.lengths)
    most, window = 3 if varies else 2, next(iter(windows.epoch(0, 0, 1)))
    own = window.micro_batches
    if len(own) > most:
        own = [own[0], *own[len(own) // 2 :][: most - 2], own[-1]]
    first, skipped = replace(window, micro_batches=own), len(window) - len(own)
    return TracedSamples(first, windows.longest(recipe.epochs), _evaluated(recipe, plan), skipped, varies)


def _evaluated(recipe: Recipe, plan: Plan) -> list[MicroBatch]:
    dataset = recipe.data.val if recipe.data.val is not None else recipe.data.test
    if dataset is None or not recipe.run.evaluate:
        return []
    cut = evaluation_cut(plan.first_cut, len(dataset))
    lengths, packs = as_samples(dataset).lengths, capability(recipe.model, Packable).packs()
    shares = share_of(plan.memory, 0, plan.world_size)[1]
    piece = fullest(cut_batch(range(len(dataset)), cut, shares, lengths, packs), lengths, packs)
    return list(evaluation_micro_batches("val", [piece], loader_of(recipe, dataset), Quarantine(limit=None)))


def trace_run(
    recipe: Recipe,
    plan: Plan,
    samples: TracedSamples,
    target: Target,
    nodes: int = 1,
    look: Callable[[nn.Module], None] | None = None,
) -> Trace:
    """Trace a run of a prepared recipe as ``plan`` says on ``target``, on the first of its ranks, over ``nodes``.

    ``look`` is called with the module as it was built, before anything is traced; what it raises is passed on.
    This changes torch for the rest of the process: see :func:`trainer.fakegpu.patches.install`.
    """
    ranks = plan.world_size
    if plan.strategy != "single":
        fake_ranks(ranks, nodes)
    with matmul_precision(plan.memory.matmul_precision), tracing(target, ranks, nodes) as tracer:
        _few_pieces(tracer)
        with _disable_current_modes():
            launcher = "torchrun" if ranks > 1 else "python"
            fabric = launch(plan, World(launcher, target.device.type, ranks // nodes, nodes))
            module = _empty(recipe, plan)
            if look is not None:
                look(module)
        patch_libraries(tracer.launch)
        _Run(recipe, plan, fabric, tracer).take(module, samples)
    trace = tracer.trace
    trace.notes += _notes(recipe, plan, module)
    trace.skipped_micro_steps = samples.skipped
    return trace


def _few_pieces(tracer: Tracer) -> None:
    """Let the first of the pieces in which a CPU makes a weight in NF4 whole be traced for all but the last."""
    all_pieces = nf4.in_pieces

    def first_and_last(codes: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        *others, last = all_pieces(codes, whole)
        tracer.repeat = len(others)
        yield from others[:1]
        tracer.repeat = 1
        yield last

    replace_attributes(nf4, in_pieces=first_and_last)


def _notes(recipe: Recipe, plan: Plan, module: nn.Module) -> list[str]:
    notes = []
    if recipe.optim.ema is not None:
        notes.append("optim.ema: the averages of the weights (4 bytes each that trains) count as optimizer state")
    if plan.memory.compile != "none":
        notes.append(
            f"memory.compile={plan.memory.compile} is predicted without compiling: fused kernels keep fewer "
            "intermediate tensors, so this is an upper bound, but for what the compiler's own buffers take"
        )
    if plan.memory.compile == "cuda_graphs":
        notes.append("memory.compile=cuda_graphs: no GPU has seen it yet, and what its graphs keep is not predicted")
    if any(isinstance(part, nn.RNNBase) for part in module.modules()):
        notes.append("recurrent layers are predicted step by step: cuDNN's kernels take less time and other memory")
    return notes


def _empty(recipe: Recipe, plan: Plan) -> nn.Module:
    model = without_weights(recipe.model)
    build = model.build
    if isinstance(model, Streamable) and type(model).build is Model.build:  # the default reads the weights
        build = model.skeleton
    with default_dtype(weights_dtype(plan.memory) or torch.float32):
        module = on_meta(build).train()
    choose_trained(module, recipe.model, recipe.optim)
    return module


class _Run(Phases):
    def __init__(self, recipe: Recipe, plan: Plan, fabric: Fabric, tracer: Tracer) -> None:
        self.recipe, self.plan, self.fabric, self.tracer = recipe, plan, fabric, tracer

    def take(self, module: nn.Module, samples: TracedSamples) -> None:
        """Build, rehearse, step, evaluate and gather."""
        self.tracer.enter("init")
        self.stack = stack = self._build(module)
        self.optimizer, sync = build_updates(self.fabric, self.recipe.model, stack, self.recipe.optim, self.plan)
        if isinstance(sync, TreeSync):  # to keep as many sums as in a window with the micro-steps that are left out
            traced = len(samples.first)
            sync.sums = LaterSums(most_sums(traced + samples.skipped) - most_sums(traced))
        if isinstance(sync, HostGradients) and sync.carrier is not None:
            sync.carrier.chunks = self._first_chunk
        if isinstance(sync, HostGradients):
            sync.ahead = _TracedUpdates(self.tracer, self.optimizer, sync.ahead.scaler, pays=sync.ahead.pays)
        memory, clip_norm = self.recipe.memory, self.recipe.optim.clip_norm
        places = (self.tracer, self.fabric, self.recipe.model, stack.wrapped, self.optimizer)
        options: dict[str, Any] = {"clip_norm": clip_norm, "correct_batchnorm": memory.correct_batchnorm}
        options["copies"] = memory.tensor_parallel
        averages = stack.averages
        if averages is not None:
            self.tracer.categorise(averages.values.values(), "optimizer")
            options["average"] = averages.update
        stepper = _FakeStepper(*places, sync=sync, phases=self, **options)
        stepper.module.train()
        if memory.micro_batch_size == "auto" and not sync.applied:
            rehearse(stepper, samples.longest)
        stepper.launch(samples.first)
        if samples.varies:
            stepper.launch(samples.longest)
        self.tracer.records_work = True
        stepper.launch(samples.first)
        self.tracer.records_work = False
        stepper.settle()
        if samples.evaluation:
            self.tracer.enter("evaluation")
            with averages.applied() if averages is not None else nullcontext():
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

    def _build(self, module: nn.Module) -> Stack:
        plan, dtype = self.plan, weights_dtype(self.plan.memory)
        if plan.memory.cpu_offload == "parameters":  # the stack puts them on meta, which to a trace is the device
            plan = replace(plan, memory=replace(plan.memory, init="meta"))
        if plan.memory.init != "meta":
            allocate(module, HOST, dtype)
            module.to(home_of_weights(self.fabric, plan))
            self._categorise(module)
        stack = apply_stack(self.fabric, self.recipe.model, module, plan, stream=_allocated)
        self._categorise(module)
        return stack

    def _first_chunk(self, ours: Tensor, theirs: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of a transfer in thousands of chunks that need no memory of their own, one, for all of them."""
        self.tracer.repeat = -(-ours.numel() // size)
        if FakeStream.current.number:  # beside the computation, with events and waits
            self.tracer.note("chunk", "compute", 0, 0, "")
        yield ours[:size], theirs[:size]
        self.tracer.repeat = 1

    def _categorise(self, module: nn.Module) -> None:
        self.tracer.categorise([*module.parameters(), *module.buffers()], "params")


def _allocated(module: nn.Module, model: Model, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    allocate(module, device, dtype)


class _TracedUpdates(UpdateAhead):
    """Does at once what its thread would do. No step is clipped or skipped, and the host has memory for it."""

    def __init__(self, tracer: Tracer, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tracer, self.room = tracer, math.inf

    def submit(self, gradients: list[tuple[Tensor, Tensor]], arrived: Callable[[], object] | None) -> None:
        with self.tracer.beside():
            self.update(gradients, arrived)

    def join(self) -> list[Any]:
        self.tracer.join()
        return super().join()

    def is_right(self, norm: Tensor, largest: float | None) -> bool:
        return True


class _FakeStepper(Stepper):
    """Takes steps on fake tensors; its ``tracer`` knows the device, and what a batch is."""

    def __init__(self, tracer: Tracer, *arguments: Any, **options: Any) -> None:
        self.tracer = tracer
        super().__init__(*arguments, **options)

    def compare(self, check: LossCheck, window: Window) -> None:
        """Nothing: a few samples without gradients are no peak."""

    def to_device(self, batch: Any) -> Any:
        def move(item: Any) -> Any:
            return self.tracer.mode.fake(item).to(self.tracer.target.device) if isinstance(item, Tensor) else item

        moved = tree_map(move, batch)
        self.tracer.categorise([item for item in tree_leaves(moved) if isinstance(item, Tensor)], "batch")
        return moved


@torch.no_grad()
def _gather(module: nn.Module, device: torch.device) -> None:
    """What ``whole_state`` has on the device at a time: one whole tensor, of whatever is sharded."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            shard = parameter.to_local().to(device)
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            del shard, whole


def _gradients(stack: Stack) -> Iterator[Tensor]:
    for tensor in (*stack.module.parameters(), *(stack.masters or {}).values()):
        if tensor.grad is not None:
            yield tensor.grad
    for part in stack.module.modules():
        group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
        if group is None:
            continue
        for held in group.fsdp_params:
            whole = getattr(held, "_unsharded_param", None)  # not there before the first gathering
            kept = (getattr(held, "unsharded_accumulated_grad", None), getattr(whole, "grad", None))
            yield from (gradient for gradient in kept if gradient is not None)


class _Nothing:
    def update(self, loss: Loss) -> None: ...
    def compute(self) -> None: ...
    def reset(self) -> None: ...


# What ``run.deterministic`` keeps of the micro-steps that a trace leaves out.

ABOVE_ALL = 64  # no sum of micro-steps reaches this height: such sums are added to nothing until the end of a window


class LaterSums(PartialSums):
    """A counter that begins with the sums of ``earlier`` micro-steps that nobody has traced."""

    def __init__(self, earlier: int) -> None:
        super().__init__()
        self.earlier = earlier

    def add(self, node: Node) -> None:
        """As if the first node of a window came late in it."""
        if not self.sums and node is not None:
            heights = range(ABOVE_ALL + self.earlier, ABOVE_ALL, -1)
            self.sums = [(height, [torch.empty_like(tensor) for tensor in node]) for height in heights]
        super().add(node)


def most_sums(micro_steps: int) -> int:
    """How many sums are kept at most while a gradient is computed: the most ones in binary of a smaller number."""
    return micro_steps.bit_length() - 1
