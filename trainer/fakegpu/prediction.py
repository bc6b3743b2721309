"""Prediction from a trace: the memory of one rank, and the time of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.fakegpu import peaks
from trainer.fakegpu.cost import StepCost, changed, cost_of, peak_seconds, traffic_of
from trainer.fakegpu.events import Category, Trace
from trainer.fakegpu.gpus import CPU_BUFFERS
from trainer.fakegpu.network import Cluster, Interconnect
from trainer.fakegpu.target import Target

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
    expandable_segments: bool = False  # whether this is with ``memory.expandable_segments``
    faster: dict[str, float] = field(default_factory=dict)  # ms per step with each of ``candidates`` alone
    # Memory over time, for a plot: {"allocated": {category: [...]}, "reserved": [...], "marks": [[at, phase]]}
    timeline: dict[str, Any] | None = None
    columns: dict[str, Any] | None = None  # for the page "Will it fit?", see :func:`event_columns`

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


def predict_from_trace(
    trace: Trace,
    target: Target,
    cluster: Cluster,
    networks: Sequence[Interconnect],
    capacity: int | None,
    settings: peaks.AllocatorSettings,
    *,
    may_expand: bool,
    timeline: bool,
    units: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return the fields of a :class:`Prediction`, in JSON types; its ``peak_seconds`` are those of a whole step.

    ``retries`` are counted for a ``capacity`` in bytes, with expandable segments if they help and ``may_expand``.
    ``units`` are those of the settings that may be ``faster``, see :func:`changed`.
    """
    on_cpu = target.device.type == "cpu"  # a CPU reserves nothing in advance
    settings, memory = peaks.replay_within(trace, settings, capacity if may_expand and not on_cpu else None)
    allocated = memory.peak_requested if on_cpu else memory.peak_allocated
    traffic, leaving = traffic_of(trace, cluster)
    reserved = allocated + CPU_BUFFERS if on_cpu else memory.peak_reserved
    retries = peaks.Retries(0 if capacity is None or reserved <= capacity else None)
    if capacity is not None and retries.times is None and not on_cpu:
        retries = peaks.retries_within(trace, capacity, settings, memory)
    freed = retries.freed / max(1, sum(phase == "step" for _, phase in trace.marks))  # per step, in the mean

    def price(run: Trace, network: Interconnect = networks[0]) -> StepCost:
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
        **{name: getattr(trace, name) for name in ("guesses", "notes", "attention")},
        "peak_seconds": peak_seconds(trace, target.gpu),
        "fragmentation": 0 if on_cpu else memory.fragmentation,
        "retries": retries.times,
        "expandable_segments": settings.expandable_segments,
        "faster": {flag: price(replace(trace, work=changed(trace.work, unit))).step_ms for flag, unit in units.items()},
        "timeline": peaks.timeline_of(memory, trace) if timeline else None,
    }
