"""What a traced run did to the memory and to the time of a device: the words that tracing, replay and cost share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Category = Literal["params", "gradients", "optimizer", "activations", "temporaries", "batch"]
Kind = Literal["compute", "to_device", "to_host", "collective"]
HOST_STREAM, HOST_THREAD = -1, -2  # streams of what the host computes, and of what a thread of it computes meanwhile
EMPTY_CACHE = -1  # the id of an event without a block: torch.cuda.empty_cache
INNER_BYTES: dict[Any, Callable[[Any, tuple[Any, ...], tuple[int, int] | None], tuple[int, ...]]] = {}
"""Registered beside each custom attention operation, as its FLOPs are: sizes in bytes of what it allocates for itself
and frees, called with the operation, its arguments, and the compute capability of the GPU (``None`` on a CPU)."""


class Event(NamedTuple):
    """A block of device memory asked for, or given back."""

    id: int  # of the block; one for its allocation and its free
    bytes: int  # that were asked for; 0 gives the block back
    op: str  # the operation that asked
    phase: str  # init, forward, backward, step, evaluation, saving or other
    stream: int = 0  # whose pool the block comes from; 0 computes


class Work(NamedTuple):
    """One operation of a step: a kernel, a copy over the bus, or a collective."""

    op: str  # that of ATen (``mm``), view, chunk (of the carrier), all_reduce, all_gather, reduce_scatter, broadcast
    kind: Kind  # to_device and to_host over the bus, collective between the ranks
    phase: str  # forward, backward or step; recomputation is of the backward
    stream: int  # that it runs on; 0 computes, below 0 is the host
    flops: int  # floating-point operations; 0 for what only moves memory
    bytes: int  # read and written on the device; over the bus; or of the whole (unsharded) tensor of a collective
    dtype: str  # that it computes in, as torch names it (``bfloat16``)
    ranks: int = 0  # that take part in a collective; 0 for all
    stride: int = 1  # how far apart they are
    waits: bool = False  # whether the next operation needs the result of a collective, also in backward
    again: bool = False  # recomputation, of activations that were not kept


@dataclass
class Trace:
    """What a run did, in order."""

    events: list[Event] = field(default_factory=list)  # allocations and frees on the device
    categories: dict[int, Category] = field(default_factory=dict)  # of blocks, by id; those not named are temporaries
    marks: list[tuple[int, str]] = field(default_factory=list)  # (index of the next event, phase) where phases begin
    work: list[Work] = field(default_factory=list)  # what the last traced optimizer step did, for its time
    micro_steps: list[int] = field(default_factory=list)  # where in it its micro-steps begin, and the last one ends
    host_bytes: int = 0  # the most host memory that tensors held
    skipped_micro_steps: int = 0  # that a real step has besides those that were traced; like those in its middle
    guesses: int = 0  # values that a branch depended on and that only a real run knows; they were guessed
    notes: list[str] = field(default_factory=list)  # what else a person must know to read the figures, a line each
    attention: list[str] = field(default_factory=list)  # the kernels that compute it, each with what it is called for

    def say(self, line: str) -> None:
        """Add a note, once."""
        self.notes += [line] if line not in self.notes else []

    def attend(self, kernel: str, query: Any, masked: bool) -> None:
        """Note the ``kernel`` of an attention whose ``query`` is ``(batch, heads, tokens, size)``, once."""
        dtype, size = str(query.dtype).removeprefix("torch."), query.shape[-1]
        line = f"{kernel} ({dtype}, heads of {size}{', masked' if masked else ''})"
        self.attention += [line] if line not in self.attention else []
