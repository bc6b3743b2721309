"""What one plan of a recipe would need on a GPU: traced, replayed and costed, in a process of its own."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.contract import Data
from trainer.engine.feed import fill_from_data
from trainer.errors import RecipeError, require
from trainer.fakegpu.cost import StepCost, changed, cost_of, of_whole_step, peak_seconds
from trainer.fakegpu.events import Category, Trace, Work
from trainer.fakegpu.gpus import GPU
from trainer.fakegpu.network import Cluster, Interconnect, sent
from trainer.fakegpu.peaks import LARGEST, AllocatorSettings, in_gb, peaks_to_json, replay, retries_within, timeline_of
from trainer.fakegpu.target import Target
from trainer.memory.plan import Plan, decide_plan
from trainer.planner.knobs import applied
from trainer.planner.made_up import MadeUp
from trainer.planner.trace import draw_samples, trace_run
from trainer.recipe import Memory, Recipe

CPU_BUFFERS = 40_000_000
"""Bytes of buffers and threads of CPU kernels that no tensor shows: 30 to 55 MB in 20 plans of a ViT of 25 million
weights, see benchmarks/planner_cpu.py."""
MIN_GAIN = 0.1  # of the time of a step; a setting that saves less is not named
FASTER = {"precision bf16-mixed": "bfloat16", "matmul_precision high": "tfloat32", "compile blocks": None}
"""Settings of ``memory`` that may be faster, with the units for fp32 products."""
GROWING: tuple[Category, ...] = ("activations", "temporaries", "batch")  # with the micro-batch


@dataclass(frozen=True)
class Prediction:
    """What one rank of a run needs, and how long its steps take. Memory is in bytes."""

    allocated: int  # the most that tensors take at once, as torch.cuda.max_memory_allocated
    # The most that torch's allocator takes from the GPU, as torch.cuda.max_memory_reserved; on a CPU resident memory
    # over that of the idle process: ``allocated`` and ``CPU_BUFFERS``.
    reserved: int
    host: int  # the most that tensors take in host memory, pinned or not, besides Python and its libraries
    phases: dict[str, dict[str, int]]  # {phase: {"allocated", "reserved"}}, the peaks within each
    categories: dict[str, int]  # what is in use at the allocated peak, by what it is for
    largest: list[list[Any]]  # the largest of it: [category, operation, phase, bytes]
    peak_phase: str  # where the allocated peak is
    costs: dict[str, StepCost]  # of an optimizer step, estimated, by the name of what joins the GPUs
    traffic: dict[str, float]  # what this rank sends in a step, by collective
    leaving: float  # what a whole node sends to others in a step
    guesses: int = 0  # values that a branch depended on and that were guessed
    notes: list[str] = field(default_factory=list)  # what else a person must know, a line each
    attention: list[str] = field(default_factory=list)  # the kernels of a GPU that compute it, each with what for
    seconds: float = 0.0  # that the prediction took
    # How long the operations of forward and backward take at the peak rates of the data sheet, without recomputation:
    # seconds of this rank for each token of a batch (over all ranks), for each sample where lengths are not known.
    peak_seconds: float = 0.0
    fragmentation: int = 0  # what is reserved at the allocated peak and not in use
    # How often torch gives its cache back to stay within the capacity that was asked about; ``None``: it cannot
    retries: int | None = None
    faster: dict[str, float] = field(default_factory=dict)  # ms of a step with each of ``candidates``, by itself
    # Memory, for a plot, if wanted: {"allocated": {category: [...]}, "reserved": [...], "marks": [[at, phase]]}
    timeline: dict[str, Any] | None = None

    @classmethod
    def answered(cls, fields: dict[str, Any]) -> Prediction:
        """What :func:`predict_here` has answered from a child."""
        return cls(**fields | {"costs": {name: StepCost(**cost) for name, cost in fields["costs"].items()}})

    @property
    def cost(self) -> StepCost:
        """Over the first, or only, of what joins the GPUs."""
        return next(iter(self.costs.values()))

    @property
    def growing(self) -> int:
        """Of ``allocated``, what grows with the micro-batch."""
        return sum(self.categories.get(name, 0) for name in GROWING)

    @property
    def update(self) -> int:
        """Bytes that an update needs, whatever a forward keeps and of how many samples."""
        return self.phases.get("step", {}).get("allocated", 0)

    @property
    def sent(self) -> float:
        """What this rank sends in a step."""
        return sum(self.traffic.values())

    def to_json(self) -> dict[str, Any]:
        """What ``plan.json`` says of the chosen plan, in plain types, with memory in GB (1e9 bytes)."""
        cost = self.cost
        times = {name: getattr(cost, name) for name in (*vars(cost), "exposed_ms") if name != "alone_ms"}
        sizes = {name: getattr(self, name) for name in ("allocated", "reserved", "host", "fragmentation")}
        times["total_ms"], times["step_phase_ms"] = times.pop("step_ms"), times.pop("update_ms")
        return {
            "peak_phase": self.peak_phase,
            "guesses": self.guesses,
            "notes": self.notes,
            "attention": self.attention,
            "seconds": self.seconds,
            "step_ms": cost.step_ms,
            "times": times,
            **peaks_to_json(sizes, self.phases, self.categories),
            "largest": [[*names, in_gb(size)] for *names, size in self.largest],
        }


def prepared(recipe: Recipe, outlines: bool = False) -> Recipe:
    """The recipe with its data prepared and its model filled from it; no weights are fetched or read. ``outlines`` lets
    missing data be made up of its outline, as ``notes`` say, and a text model go without its tokenizer."""
    outline = recipe.data.outline() if outlines else None
    recipe.data.require_files()
    try:
        model = recipe.model if outline is None else recipe.model.outlined(outline)
        bare = model.unloaded()
        bare.prepare()
    except RecipeError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        needed = "a folder with config.json for model.name and one with the tokenizer for model.tokenizer are enough"
        if outline is not None:
            needed = "a folder with config.json for model.name, or a model type such as distilbert, is enough"
        raise RecipeError(f"{error}. To plan, no weights are needed: {needed}") from error
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # what is forked must not wait for its threads
    data = recipe.data if outline is None else MadeUp(outline, recipe.data)
    try:
        data.prepare(bare.tokenizer_or_none())
    except (RecipeError, OSError) as error:
        if not outlines or type(data).outline is not Data.outline or type(data).__module__.startswith("trainer."):
            raise
        fix = f"to plan without the data, define outline() in {type(data).__name__} (docs/your-own-model.md)"
        raise RecipeError(f"{type(data).__name__}: {error}; {fix}") from error
    require(len(data.train) > 0, "the training set is empty")
    return recipe.replace(model=fill_from_data(model, data), data=data)


def predict_here(
    recipe: Recipe,
    plan: Plan,
    target: Target,
    nodes: int = 1,
    timeline: bool = False,
    over: Sequence[Interconnect] = (),
    capacity: int | None = None,
) -> dict[str, Any]:
    """The fields of a :class:`Prediction`, as JSON holds them. It changes torch for its whole process: for a child.

    The first rank of a process group of that size is traced; the others are not there. ``recipe`` is a :func:`prepared`
    one; ``over`` are networks that may join the GPUs, by default that of ``target``; ``capacity``, in bytes, what
    ``retries`` are about.
    """
    began = time.perf_counter()
    samples = draw_samples(recipe, plan)
    trace = trace_run(recipe, plan, samples, target, nodes)
    settings = AllocatorSettings(target.expandable_segments)
    memory = replay(trace, settings)
    on_cpu = target.device.type == "cpu"  # where nothing is reserved: tensors take what they ask for
    allocated = memory.peak_requested if on_cpu else memory.peak_allocated
    cluster = Cluster(plan.world_size, nodes)
    traffic, leaving = traffic_of(trace, cluster)
    reserved = allocated + CPU_BUFFERS if on_cpu else memory.peak_reserved
    fits = capacity is None or reserved <= capacity
    retries = 0 if fits else None if on_cpu else retries_within(trace, capacity or 0, settings, memory)
    networks = over or [target.network]
    return {
        "allocated": allocated,
        "reserved": reserved,
        "host": trace.host_bytes,
        "phases": {name: peak._asdict() for name, peak in memory.phases.items()},
        "categories": memory.categories,
        "largest": [[*names, size] for names, size in list(memory.alive.items())[:LARGEST]],
        "peak_phase": memory.allocated_phase or "init",
        "costs": {one.name: asdict(cost_of(trace, target, cluster, one)) for one in networks},
        "traffic": traffic,
        "leaving": leaving,
        "guesses": trace.guesses,
        "notes": trace.notes,
        "attention": trace.attention,
        "seconds": time.perf_counter() - began,
        "peak_seconds": peak_seconds(trace, target.gpu) / (samples.first.tokens or samples.first.samples),
        "fragmentation": 0 if on_cpu else memory.fragmentation,
        "retries": retries,
        "faster": {
            flag: cost_of(replace(trace, work=changed(trace.work, FASTER[flag])), target, cluster, networks[0]).step_ms
            for flag in candidates(recipe, plan.world_size, target.gpu)
        },
        "timeline": timeline_of(memory, trace) if timeline else None,
    }


def candidates(recipe: Recipe, ranks: int, gpu: GPU) -> list[str]:
    """Those of ``FASTER`` that are not set, that ``gpu`` has units for, and that ``decide_plan`` accepts."""
    memory, found = recipe.memory, []
    for flag, units in FASTER.items():
        key, value = flag.split()
        able = memory.precision == "32-true" and units in gpu.flops if units else gpu.name != "cpu"
        with suppress(RecipeError):
            if able and getattr(memory, key) == getattr(Memory(), key):
                decide_plan(applied(recipe, {f"memory.{key}": value}), ranks)
                found.append(flag)
    return found


def faster(recipe: Recipe, ranks: int, gpu: GPU, found: Prediction | None) -> list[str]:
    """A line on what saves ``MIN_GAIN`` of a step, or on all ``candidates`` without a prediction; none if nothing."""
    known = found.faster if found else dict.fromkeys(candidates(recipe, ranks, gpu), 0.0)
    now = found.cost.step_ms if found else math.inf
    gains = sorted((ms, flag) for flag, ms in known.items() if ms <= (1 - MIN_GAIN) * now)
    names = [f"--memory.{flag}{f' ({ms:,.3g} ms)' if found else ''}" for ms, flag in gains]
    about = f"than {now:,.3g} ms a step, by estimate" if found else "perhaps"
    return [f"faster {about}, each alone: {', '.join(names)}"] if names else []


def traffic_of(trace: Trace, cluster: Cluster) -> tuple[dict[str, float], float]:
    """What a rank sends in a step, by collective, and what its node sends to others."""
    ops = list(dict.fromkeys(item.op for item in trace.work if item.kind == "collective"))

    def measure(work: Sequence[Work]) -> list[float]:
        by_op, leaving = dict.fromkeys(ops, 0.0), 0.0
        for item in work:
            if item.kind == "collective":
                group = cluster.group(item.ranks, item.stride)
                size = sent(item.op, item.bytes, group)
                by_op[item.op] += size
                leaving += size * group.beside if group.nodes > 1 else 0.0
        return [*by_op.values(), leaving]

    *sizes, leaving = of_whole_step(trace, measure)
    return dict(zip(ops, sizes, strict=True)), leaving
