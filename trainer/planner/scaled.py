"""One recipe on one number of devices under one strategy: its memory, what its ranks send, and the time of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.memory.plan import Plan
from trainer.planner.cluster import Cluster
from trainer.planner.cost import HOST_NETWORK
from trainer.planner.events import Trace, Work
from trainer.planner.fabric import Interconnect, sent
from trainer.planner.predict import CPU_BUFFERS
from trainer.planner.replay import AllocatorSettings, replay
from trainer.planner.target import Target
from trainer.planner.timeline import StepCost, one_more, step_cost
from trainer.planner.trace import draw_samples, trace_run
from trainer.recipe import Recipe

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
