"""What one plan of a recipe would need on a GPU: traced, replayed and costed, in a process of its own."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from trainer.engine.feed import fill_from_data
from trainer.errors import RecipeError, require
from trainer.memory.plan import Plan
from trainer.planner.cost import HOST_NETWORK, StepCost, one_more, step_cost, step_time
from trainer.planner.events import Trace, Work
from trainer.planner.network import Cluster, Interconnect, sent
from trainer.planner.replay import AllocatorSettings, Replay, replay
from trainer.planner.target import Target
from trainer.planner.trace import draw_samples, trace_run
from trainer.recipe import Recipe
from trainer.system.children import in_child
from trainer.system.text import GB

LARGEST = 12
"""How many of the largest blocks at the peak a prediction names."""

CPU_BUFFERS = 40_000_000
"""Bytes of buffers and threads of CPU kernels that no tensor shows: 30 to 55 MB in 20 plans of a ViT of 25 million
weights, see benchmarks/planner_cpu.py."""


@dataclass(frozen=True)
class Prediction:
    """What one rank of a run needs, and how long its steps take. Memory is in bytes.

    Args:
        allocated: the most that tensors take at once, as ``torch.cuda.max_memory_allocated``.
        reserved: the most that torch's allocator takes from the GPU, as ``torch.cuda.max_memory_reserved``; on a CPU
            resident memory, over that of the idle process: ``allocated`` and ``CPU_BUFFERS``.
        host: the most that tensors take in host memory, pinned or not, besides Python and its libraries.
        phases: ``{phase: {"allocated", "reserved"}}``, the peaks within each.
        categories: what is in use at the allocated peak, by what it is for.
        largest: the largest of it: ``[category, operation, phase, bytes]``.
        peak_phase: where the allocated peak is.
        step_ms: milliseconds of an optimizer step, an estimate.
        times: its parts, as :class:`trainer.planner.cost.Times` names them, and ``step_phase_ms``, of which all but
            the update is left when it is taken off.
        guesses: values that a branch depended on and that were guessed.
        notes: what else a person must know, a line each.
        seconds: that the prediction took.
        fragmentation: what is reserved at the allocated peak and not in use.
        timeline: memory over the run, for a plot: ``{"allocated": {category: [...]}, "reserved": [...], "marks":
            [[point, phase], ...]}``; ``None`` unless asked for.
    """

    allocated: int
    reserved: int
    host: int
    phases: dict[str, dict[str, int]]
    categories: dict[str, int]
    largest: list[list[Any]]
    peak_phase: str
    step_ms: float
    times: dict[str, float]
    guesses: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    fragmentation: int = 0
    timeline: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """All of it but the timeline, in plain types, with memory in GB (1e9 bytes)."""
        figures = dataclasses.asdict(self)
        del figures["timeline"]
        for name in ("allocated", "reserved", "host", "fragmentation"):
            figures[f"{name}_gb"] = round(figures.pop(name) / GB, 4)
        figures["phases"] = {
            phase: {f"{kind}_gb": round(value / GB, 4) for kind, value in peaks.items()}
            for phase, peaks in self.phases.items()
        }
        figures["categories"] = {name: round(value / GB, 4) for name, value in self.categories.items()}
        figures["largest"] = [[*names, round(value / GB, 4)] for *names, value in self.largest]
        return figures


def prepared(recipe: Recipe) -> Recipe:
    """The recipe with its data prepared and its model filled from it; no weights are fetched or read.

    Raises:
        RecipeError: when the configuration, the tokenizer or the data cannot be had.
    """
    model = recipe.model.unloaded()
    try:
        model.prepare()
    except RecipeError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        needed = "a folder with config.json for model.name and one with the tokenizer for model.tokenizer are enough"
        raise RecipeError(f"{error}. To plan, no weights are needed: {needed}") from error
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # what is forked must not wait for its threads
    recipe.data.prepare(model.tokenizer_or_none())
    require(len(recipe.data.train) > 0, "the training set is empty")
    return recipe.replace(model=fill_from_data(recipe.model, recipe.data))


def predict(recipe: Recipe, plan: Plan, target: Target, nodes: int = 1, timeline: bool = False) -> Prediction:
    """Predict what ``plan`` needs on ``target``.

    Args:
        recipe: from :func:`prepared`.
        plan: the decided knobs and the number of ranks.
        target: the GPU of every rank.
        nodes: machines that the ranks are spread over.
        timeline: whether to return the memory over time, too.

    Raises:
        RecipeError: when the recipe cannot work.
        Failed: when the model does something that cannot be traced; the message says what.
    """
    return Prediction(**in_child(partial(predict_here, recipe, plan, target, nodes, timeline)))


def predict_here(recipe: Recipe, plan: Plan, target: Target, nodes: int, timeline: bool) -> dict[str, Any]:
    """The fields of a :class:`Prediction`. It changes torch for the rest of the process: for a child."""
    began = time.perf_counter()
    trace = trace_run(recipe, plan, draw_samples(recipe, plan), target, nodes)
    memory = replay(trace, AllocatorSettings(expandable_segments=target.expandable_segments))
    on_cpu = target.device.type == "cpu"  # where nothing is reserved: tensors take what they ask for
    allocated = memory.peak_requested if on_cpu else memory.peak_allocated
    times = step_time(_whole_step(trace), target.gpu, plan.world_size, gpus_per_node=max(1, plan.world_size // nodes))
    parts = {f.name: getattr(times, f.name) for f in dataclasses.fields(times) if f.name != "phases"}
    parts["step_phase_ms"] = times.phases["step"].total_ms if "step" in times.phases else 0.0
    return {
        "allocated": allocated,
        "reserved": allocated + CPU_BUFFERS if on_cpu else memory.peak_reserved,
        "host": trace.host_bytes,
        "phases": {name: dataclasses.asdict(peak) for name, peak in memory.phases.items()},
        "categories": memory.categories,
        "largest": [[*names, size] for names, size in list(memory.alive.items())[:LARGEST]],
        "peak_phase": memory.allocated_phase or "init",
        "step_ms": times.total_ms,
        "times": parts,
        "guesses": trace.guesses,
        "notes": trace.notes,
        "seconds": time.perf_counter() - began,
        "fragmentation": 0 if on_cpu else memory.fragmentation,
        "timeline": _timeline(memory, trace) if timeline else None,
    }


def _whole_step(trace: Trace) -> list[Work]:
    """What a real step does: the micro-steps that were not traced are like the last but one of those that were."""
    if not trace.skipped_micro_steps:
        return trace.work
    start, end = trace.micro_steps[-3:-1]
    return trace.work + trace.work[start:end] * trace.skipped_micro_steps


def _timeline(memory: Replay, trace: Trace) -> dict[str, Any]:
    points = memory.timeline.events
    marks = []
    for event, phase in trace.marks:
        marks.append([next((at for at, index in enumerate(points) if index >= event), len(points) - 1), phase])
    return {"allocated": memory.timeline.allocated, "reserved": memory.timeline.reserved, "marks": marks}


# One recipe on one number of devices under one strategy: its memory, what its ranks send, and the time of a step.

GROWING = ("activations", "temporaries", "batch")
"""Categories of memory that grow with the micro-batch."""


@dataclass(frozen=True)
class Scaled:
    """What one rank needs and does. Memory and traffic are in bytes.

    Args:
        allocated: peak of tensors.
        reserved: peak of what torch's allocator takes.
        host: peak of tensors in host memory.
        growing: of ``allocated``, what grows with the micro-batch.
        traffic: what this rank sends in a step, by collective.
        leaving: what a whole node sends to others in a step.
        costs: of a step, by the name of the interconnect.
        notes: what else a person must know.
    """

    allocated: int
    reserved: int
    host: int
    growing: int
    traffic: dict[str, float]
    leaving: float
    costs: dict[str, StepCost]
    notes: list[str]

    @property
    def sent(self) -> float:
        """What this rank sends in a step."""
        return sum(self.traffic.values())


def scaled_here(
    recipe: Recipe, plan: Plan, target: Target, cluster: Cluster, fabrics: Sequence[Interconnect]
) -> dict[str, Any]:
    """The fields of a :class:`Scaled`, as JSON holds them. It changes torch for the rest of the process: for a child.

    The first rank of a process group of that size is traced; the others are not there.
    """
    trace = trace_run(recipe, plan, draw_samples(recipe, plan), target, cluster.nodes)
    memory = replay(trace, AllocatorSettings(expandable_segments=target.expandable_segments))
    on_cpu = target.device.type == "cpu"
    allocated = memory.peak_requested if on_cpu else memory.peak_allocated
    traffic, leaving = traffic_of(trace, cluster)
    return {
        "allocated": allocated,
        "reserved": allocated + CPU_BUFFERS if on_cpu else memory.peak_reserved,
        "host": trace.host_bytes,
        "growing": sum(memory.categories.get(name, 0) for name in GROWING),  # type: ignore[call-overload]
        "traffic": traffic,
        "leaving": leaving,
        "costs": {one.name: asdict(cost_of(trace, target, cluster, one)) for one in fabrics},
        "notes": trace.notes,
    }


def from_json(fields: dict[str, Any]) -> Scaled:
    """What a child has answered."""
    return Scaled(**fields | {"costs": {name: StepCost(**cost) for name, cost in fields["costs"].items()}})


def cost_of(trace: Trace, target: Target, cluster: Cluster, fabric: Interconnect) -> StepCost:
    """The time of a step over ``fabric``."""

    def seconds(item: Work) -> tuple[str, float]:
        group = cluster.group(item)
        link = "between" if group.nodes > 1 else "within"
        if item.stream < 0:  # gloo, in host memory
            network = min(HOST_NETWORK, fabric.between.bandwidth) if group.nodes > 1 else HOST_NETWORK
            return link, sent(item.op, item.bytes, group) / network
        return link, fabric.seconds(item.op, item.bytes, group)

    return step_cost(trace, target.gpu, seconds)


def traffic_of(trace: Trace, cluster: Cluster) -> tuple[dict[str, float], float]:
    """What a rank sends in a step, by collective, and what its node sends to others."""
    once, leaving = _traffic(trace.work, cluster)
    if not trace.skipped_micro_steps:
        return once, leaving
    more, leaving_more = _traffic(one_more(trace), cluster)
    times = trace.skipped_micro_steps
    whole = {op: once.get(op, 0.0) + times * (size - once.get(op, 0.0)) for op, size in more.items()}
    return whole, leaving + times * (leaving_more - leaving)


def _traffic(work: Sequence[Work], cluster: Cluster) -> tuple[dict[str, float], float]:
    by_op: dict[str, float] = defaultdict(float)
    leaving = 0.0
    for item in work:
        if item.kind != "collective":
            continue
        group = cluster.group(item)
        size = sent(item.op, item.bytes, group)
        by_op[item.op] += size
        leaving += size * group.beside if group.nodes > 1 else 0.0
    return dict(by_op), leaving
