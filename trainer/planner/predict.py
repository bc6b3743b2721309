"""Predict the memory and time of one plan on a GPU: trace it, replay the allocator and estimate the cost."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.contract import Data, Plannable, Preparable, capability, prepare_data, without_weights
from trainer.engine.data_feed import fill_from_data
from trainer.errors import RecipeError, require
from trainer.fakegpu import peaks
from trainer.fakegpu.cost import StepCost, changed, cost_of, peak_seconds, traffic_of
from trainer.fakegpu.events import Category, Trace
from trainer.fakegpu.gpus import CPU_BUFFERS, GPU
from trainer.fakegpu.network import Cluster, Interconnect
from trainer.fakegpu.snapshot import event_columns
from trainer.fakegpu.target import Target
from trainer.memory.plan import Plan, decide_plan
from trainer.planner.knobs import apply_settings
from trainer.planner.synthetic_data import SyntheticData
from trainer.planner.traced_run import draw_samples, trace_run
from trainer.recipe import Memory, Recipe

MIN_GAIN = 0.1  # share of a step's time that a setting must save to be suggested
FASTER = {"precision bf16-mixed": "bfloat16", "matmul_precision high": "tfloat32", "compile blocks": None}
"""Settings of ``memory`` that may be faster, with the units that then compute fp32 products."""
PER_SAMPLE_CATEGORIES: tuple[Category, ...] = ("activations", "temporaries", "batch")  # grow with the micro-batch


@dataclass(frozen=True)
class Prediction:
    """The memory of one rank of a run, and the time of its steps. Memory is in bytes."""

    allocated: int  # peak of tensors, as torch.cuda.max_memory_allocated
    # Peak of what torch's allocator takes from the GPU, as torch.cuda.max_memory_reserved. On a CPU: resident memory
    # above that of the idle process, ``allocated`` plus ``CPU_BUFFERS``.
    reserved: int
    host: int  # peak of tensors in host memory, pinned or not, without Python and its libraries
    phases: dict[str, dict[str, int]]  # {phase: {"allocated", "reserved"}}: the peaks within each phase
    categories: dict[str, int]  # memory in use at the allocated peak, by purpose
    largest: list[list[Any]]  # its largest parts: [category, operation, phase, bytes]
    peak_phase: str  # phase of the allocated peak
    costs: dict[str, StepCost]  # estimated cost of an optimizer step, by interconnect name
    traffic: dict[str, float]  # bytes that this rank sends per step, by collective
    leaving: float  # bytes that a whole node sends to other nodes per step
    guesses: int = 0  # number of guessed values that a branch depended on
    notes: list[str] = field(default_factory=list)  # one line each
    attention: list[str] = field(default_factory=list)  # the GPU kernels that compute it, each with its purpose
    seconds: float = 0.0  # duration of the prediction
    # Seconds of this rank's forward and backward at the data sheet's peak, without recomputation, per token of a batch
    peak_seconds: float = 0.0  # over all ranks; per sample if lengths are unknown
    fragmentation: int = 0  # bytes reserved but not in use at the allocated peak
    # How often torch must release its cache to stay within the capacity; ``None`` if it cannot stay within it
    retries: int | None = None
    faster: dict[str, float] = field(default_factory=dict)  # ms per step with each of ``candidates`` alone
    # Memory over time, for a plot: {"allocated": {category: [...]}, "reserved": [...], "marks": [[at, phase]]}
    timeline: dict[str, Any] | None = None
    columns: dict[str, Any] | None = None  # for the page "Will it fit?"

    @classmethod
    def from_child(cls, fields: dict[str, Any]) -> Prediction:
        """Rebuild the prediction from the answer of :func:`predict_in_process`, which ran in a child process."""
        return cls(**fields | {"costs": {name: StepCost(**cost) for name, cost in fields["costs"].items()}})

    @property
    def fits(self) -> bool:
        """Whether ``reserved`` stays within the capacity; with ``retries`` only the tensors do."""
        return self.retries == 0

    @property
    def cost(self) -> StepCost:
        """The cost over the first interconnect."""
        return next(iter(self.costs.values()))

    @property
    def per_sample_bytes(self) -> int:
        """The part of ``allocated`` that grows with the micro-batch."""
        return sum(self.categories.get(name, 0) for name in PER_SAMPLE_CATEGORIES)

    @property
    def update_peak_bytes(self) -> int:
        """Bytes that an update needs, independent of the activations and of the micro-batch."""
        return self.phases.get("step", {}).get("allocated", 0)

    @property
    def sent(self) -> float:
        return sum(self.traffic.values())

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the chosen plan in ``plan.json``, in plain types, with memory in GB (1e9 bytes)."""
        cost = self.cost
        times = {name: getattr(cost, name) for name in (*vars(cost), "exposed_ms") if name != "alone_ms"}
        sizes = {name: getattr(self, name) for name in ("allocated", "reserved", "host", "fragmentation")}
        times["total_ms"], times["step_phase_ms"] = times.pop("step_ms"), times.pop("update_ms")
        return {
            **{name: getattr(self, name) for name in ("peak_phase", "guesses", "notes", "attention", "seconds")},
            "step_ms": cost.step_ms,
            "times": times,
            **peaks.peaks_to_json(sizes, self.phases, self.categories),
            "largest": [[*names, peaks.in_gb(size)] for *names, size in self.largest],
        }


def prepare_recipe(recipe: Recipe, outlines: bool = False) -> Recipe:
    """Return the recipe with prepared data and the model filled from it; no weights are downloaded or read.

    With ``outlines``, missing data is replaced by synthetic samples from its spec, as ``notes`` say, and a text
    model needs no tokenizer."""
    recipe.data.use_model(recipe.model)
    spec = recipe.data.spec() if outlines else None
    recipe.data.require_files()
    try:
        model = recipe.model
        if spec is not None and isinstance(model, Plannable):
            model = model.for_spec(spec)
        bare = capability(without_weights(model), Preparable)
        bare.prepare()
    except RecipeError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        needed = "give a folder with config.json as model.name and one with the tokenizer as model.tokenizer"
        if spec is not None:
            needed = "give a folder with config.json as model.name, or a model type such as distilbert"
        raise RecipeError(f"{error}. A plan needs no weights: {needed}") from error
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked children must not wait for its threads
    data = recipe.data if spec is None else SyntheticData(spec, recipe.data)
    try:
        prepare_data(data, recipe.model, bare.tokenizer_or_none())
    except (RecipeError, OSError) as error:
        if not outlines or type(data).spec is not Data.spec or type(data).__module__.startswith("trainer."):
            raise
        fix = f"to plan without the data, define spec() in {type(data).__name__} (docs/your-own-model.md)"
        raise RecipeError(f"{type(data).__name__}: {error}; {fix}") from error
    require(len(data.train) > 0, "the training set is empty")
    return recipe.replace(model=fill_from_data(model, data), data=data)


def predict_in_process(
    recipe: Recipe,
    plan: Plan,
    target: Target,
    nodes: int = 1,
    timeline: bool = False,
    interconnects: Sequence[Interconnect] = (),
    capacity: int | None = None,
    priced: bool = True,
    columns: bool = False,
) -> dict[str, Any]:
    """Return the fields of a :class:`Prediction`, in JSON types. Call it in a child process: it changes torch.

    Only the first rank is traced. ``recipe`` is from :func:`prepare_recipe`. ``interconnects`` are compared, by default
    that of ``target``. ``retries`` are counted for a ``capacity`` in bytes. Times are 0 if it is not ``priced``, which
    may save a third of the work.
    """
    began = time.perf_counter()
    samples = draw_samples(recipe, plan)
    trace = trace_run(recipe, plan, samples, target, nodes, priced)
    settings = peaks.AllocatorSettings(target.expandable_segments)
    memory = peaks.replay(trace, settings)
    on_cpu = target.device.type == "cpu"  # a CPU reserves nothing in advance
    allocated = memory.peak_requested if on_cpu else memory.peak_allocated
    cluster = Cluster(plan.world_size, nodes)
    traffic, leaving = traffic_of(trace, cluster)
    reserved = allocated + CPU_BUFFERS if on_cpu else memory.peak_reserved
    retries = peaks.Retries(0 if capacity is None or reserved <= capacity else None)
    if capacity is not None and retries.times is None and not on_cpu:
        retries = peaks.retries_within(trace, capacity, settings, memory)
    networks = interconnects or [target.network]
    freed = retries.freed / max(1, sum(phase == "step" for _, phase in trace.marks))  # per step, in the mean

    def price(run: Trace, network: Interconnect) -> StepCost:
        return cost_of(run, target, cluster, network).with_retries(freed)

    return {
        "allocated": allocated,
        "reserved": reserved,
        "host": trace.host_bytes,
        "phases": {name: peak._asdict() for name, peak in memory.phases.items()},
        "categories": memory.categories,
        "largest": [[*names, size] for names, size in list(memory.live_by_source.items())[: peaks.LARGEST]],
        "peak_phase": memory.allocated_phase or "init",
        "costs": {one.name: asdict(price(trace, one)) for one in networks},
        "traffic": traffic,
        "leaving": leaving,
        "guesses": trace.guesses,
        "notes": trace.notes,
        "attention": trace.attention,
        "seconds": time.perf_counter() - began,
        "peak_seconds": peak_seconds(trace, target.gpu) / (samples.first.tokens or samples.first.samples),
        "fragmentation": 0 if on_cpu else memory.fragmentation,
        "retries": retries.times,
        "faster": {
            flag: price(replace(trace, work=changed(trace.work, FASTER[flag])), networks[0]).step_ms
            for flag in candidates(recipe, plan.world_size, target.gpu)
        },
        "timeline": peaks.timeline_of(memory, trace) if timeline else None,
        "columns": event_columns({plan.initial_cut.micro_batch_size: trace}) if columns else None,
    }


def candidates(recipe: Recipe, ranks: int, gpu: GPU) -> list[str]:
    """Return the settings of ``FASTER`` that are at their default, supported by ``gpu`` and valid for the recipe."""
    memory, found = recipe.memory, []
    for flag, units in FASTER.items():
        key, value = flag.split()
        able = memory.precision == "32-true" and units in gpu.flops if units else gpu.name != "cpu"
        with suppress(RecipeError):
            if able and getattr(memory, key) == getattr(Memory(), key):
                decide_plan(apply_settings(recipe, {f"memory.{key}": value}), ranks)
                found.append(flag)
    return found


def faster(recipe: Recipe, ranks: int, gpu: GPU, found: Prediction | None) -> list[str]:
    """Suggest in a line the settings that save ``MIN_GAIN`` of a step; without a prediction, all ``candidates``."""
    known = found.faster if found else dict.fromkeys(candidates(recipe, ranks, gpu), 0.0)
    now = found.cost.step_ms if found else math.inf
    gains = sorted((ms, flag) for flag, ms in known.items() if ms <= (1 - MIN_GAIN) * now)
    names = [f"--memory.{flag}{f' ({ms:,.3g} ms)' if found else ''}" for ms, flag in gains]
    about = f"than {now:,.3g} ms per step (estimate)" if found else "perhaps"
    return [f"faster {about}, each on its own: {', '.join(names)}"] if names else []
