"""What a traced run did to the memory and to the time of a device: the words that tracing, replay and cost share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Category = Literal["params", "gradients", "optimizer", "activations", "temporaries", "batch"]
Kind = Literal["compute", "to_device", "to_host", "collective"]


class Event(NamedTuple):
    """A block of device memory asked for, or given back.

    Args:
        id: of the block; one for its allocation and its free.
        bytes: that were asked for; 0 gives the block back.
        op: the operation that asked.
        phase: init, forward, backward, step or evaluation.
        stream: whose pool the block comes from; 0 computes.
    """

    id: int
    bytes: int
    op: str
    phase: str
    stream: int = 0


class Work(NamedTuple):
    """One operation of a step: a kernel, a copy over the bus, or a collective.

    Args:
        op: its name: that of ATen (``mm``), or all_reduce, all_gather, reduce_scatter.
        kind: compute; to_device and to_host over the bus; collective between the ranks.
        phase: forward, backward or step; recomputation is of the backward.
        stream: that it runs on; 0 computes.
        flops: floating-point operations; 0 for what only moves memory.
        bytes: read and written on the device; over the bus; or of the whole (unsharded) tensor of a collective.
        dtype: that it computes in, as torch names it (``bfloat16``).
        ranks: that take part in a collective; 0 for all.
        stride: how far apart they are.
    """

    op: str
    kind: Kind
    phase: str
    stream: int
    flops: int
    bytes: int
    dtype: str
    ranks: int = 0
    stride: int = 1


@dataclass
class Trace:
    """What a run did, in order.

    Args:
        events: allocations and frees on the device.
        categories: what each block is for, by its id; a block that is not named is temporary.
        marks: ``(index of the next event, phase)`` wherever a phase begins.
        work: what the last traced optimizer step did, for its time.
        micro_steps: indices in ``work`` at which its micro-steps begin, and at which the last one ends.
        host_bytes: the most host memory that tensors held.
        skipped_micro_steps: how many micro-steps a real step has besides those that were traced; like those in its
            middle.
        guesses: values of tensors that a branch depended on and that only a real run knows; they were guessed.
        notes: what else a person must know to read the figures, a line each.
    """

    events: list[Event] = field(default_factory=list)
    categories: dict[int, Category] = field(default_factory=dict)
    marks: list[tuple[int, str]] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    micro_steps: list[int] = field(default_factory=list)
    host_bytes: int = 0
    skipped_micro_steps: int = 0
    guesses: int = 0
    notes: list[str] = field(default_factory=list)
