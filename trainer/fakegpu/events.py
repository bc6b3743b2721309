"""Records of a traced run, shared by tracing, replay and cost: allocations, operations and categories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Category = Literal["params", "gradients", "optimizer", "activations", "temporaries", "batch"]
Kind = Literal["compute", "to_device", "to_host", "collective"]
HOST_STREAM, HOST_THREAD = -1, -2  # stream numbers of host computation and of a concurrent host thread
EMPTY_CACHE = -1  # event id of torch.cuda.empty_cache, which has no block
INNER_BYTES: dict[Any, Callable[[Any, tuple[Any, ...], tuple[int, int] | None], tuple[int, ...]]] = {}
"""Functions that return the bytes of each temporary allocation of a custom attention operation.

Their arguments: the operation, its arguments and the GPU's compute capability (``None`` on a CPU)."""


class Event(NamedTuple):
    """An allocation or a free of a block of device memory."""

    id: int  # number of the block, the same for its allocation and its free
    bytes: int  # requested bytes; 0 for a free
    op: str  # allocating operation
    phase: str  # init, forward, backward, step, evaluation, saving or other
    stream: int = 0  # stream of the block's pool; 0 is the compute stream


class Operation(NamedTuple):
    """One operation of a step: a kernel, a copy over the bus, or a collective."""

    op: str  # ATen's name (``mm``), view, chunk (optimizer offload), all_reduce, all_gather, reduce_scatter, broadcast
    kind: Kind  # compute, copy over the bus (to_device, to_host) or collective
    phase: str  # forward, backward (including recomputation) or step
    stream: int  # 0 is the compute stream; negative numbers are the host
    flops: int  # floating-point operations; 0 if it only moves memory
    bytes: int  # bytes read and written, copied over the bus, or in the whole (unsharded) tensor of a collective
    dtype: str  # dtype of the computation, as torch names it (``bfloat16``)
    ranks: int = 0  # number of ranks in a collective; 0 for all
    stride: int = 1  # distance between those ranks
    is_blocking: bool = False  # whether the next operation needs the result of a collective, also in backward
    is_recompute: bool = False  # whether this is recomputation (activation checkpointing)


@dataclass
class Trace:
    """Everything that a traced run did, in order."""

    events: list[Event] = field(default_factory=list)  # allocations and frees on the device
    categories: dict[int, Category] = field(default_factory=dict)  # category by block id; default: temporaries
    marks: list[tuple[int, str]] = field(default_factory=list)  # (index of the next event, phase) at phase starts
    work: list[Operation] = field(default_factory=list)  # operations of the last traced optimizer step
    micro_steps: list[int] = field(default_factory=list)  # starts of micro-steps in ``work``, and the last one's end
    host_bytes: int = 0  # peak host memory of tensors
    skipped_micro_steps: int = 0  # micro-steps of a real step that were not traced; they repeat the middle one
    guesses: int = 0  # number of guessed values that only a real run would know
    notes: list[str] = field(default_factory=list)  # limits of the prediction, one line each
    attention: list[str] = field(default_factory=list)  # attention kernels with dtype and head size

    def add_note(self, line: str) -> None:
        """Add a note unless it exists."""
        self.notes += [line] if line not in self.notes else []

    def note_attention(self, kernel: str, query: Any, masked: bool) -> None:
        """Record an attention ``kernel`` once; ``query`` has the shape ``(batch, heads, tokens, size)``."""
        dtype, size = str(query.dtype).removeprefix("torch."), query.shape[-1]
        line = f"{kernel} ({dtype}, heads of {size}{', masked' if masked else ''})"
        self.attention += [line] if line not in self.attention else []
