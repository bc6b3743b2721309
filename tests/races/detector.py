"""Which accesses to memory nobody has put in order: a happens-before detector for streams, events and the host.

Every stream, and the host, has a vector clock: how far it knows each other one to be. Work that is launched on a stream
comes after all that the host knows at that moment; events, waits and synchronisations join clocks. Nothing is computed
and no time passes, so what is found does not depend on which order happened to occur. Found are

* a *race*: two accesses to the same bytes, at least one of them a write, of which neither is known to come first;
* a block *reused in use*: the caching allocator gives a freed block to the next that asks on the stream it was made on,
  at once, and trusts that whoever used it on another stream was waited for, or was named to ``record_stream``
  (CUDACachingAllocator.cpp; https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html);
* a *pageable copy*: one that is asked not to block, but from or to memory that is not pinned, or by way of a temporary
  copy there (Copy.cu, ``copy_requires_temporaries``): the host waits for it all the same.

Pinned memory may be freed at any time: its allocator records an event for every copy (CachingHostAllocator.h).
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import trainer
from trainer.fakegpu.events import HOST_STREAM, HOST_THREAD

HOST, THREAD = HOST_STREAM, HOST_THREAD
"""The host among the streams, and the thread in which it updates weights ahead."""

Clock = dict[int, int]
"""For each stream the number of its last operation that is known to be over, or ordered before."""

TRAINER = f"{Path(trainer.__file__).parent}/"
MACHINERY = (
    "/torch/_",
    "/torch/nn/",
    "/torch/utils/",
    "/torch/autograd/",
    f"{TRAINER}fakegpu/",
    f"{TRAINER}planner/",
    f"{Path(__file__).parent}/watched",
)


class Place(NamedTuple):
    """A line of code, and the function that it is in."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def here() -> Place:
    """The innermost place that is neither torch's machinery nor that of the tracing."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = _file_of(frame.f_code)
        if file:
            return Place(file, frame.f_code.co_name, frame.f_lineno)
        frame = frame.f_back
    return Place("?", "?", 0)


@cache
def _file_of(code: CodeType) -> str:
    """How a file is called here: ours by its path in the project; nothing for machinery."""
    path = code.co_filename
    if path == __file__ or any(part in path for part in MACHINERY):
        return ""
    return f"trainer/{path.removeprefix(TRAINER)}" if path.startswith(TRAINER) else "/".join(path.split("/")[-2:])


@dataclass(frozen=True, slots=True)
class Access:
    """An operation that touches the bytes from ``low`` to ``high`` of a block."""

    stream: int
    number: int  # of the operation, among all of them
    writes: bool
    low: int
    high: int
    operation: str
    place: Place

    def __str__(self) -> str:
        return f"{self.operation} that {'writes' if self.writes else 'reads'} on {label(self.stream)} at {self.place}"


@dataclass(eq=False, slots=True)
class Block:
    """Memory of one storage."""

    pool: int  # the stream that it was made on and returns to; of host memory, the host
    origin: str  # what made it
    accesses: list[Access] = field(default_factory=list)  # those that later ones must still be compared with
    recorded: set[int] = field(default_factory=set)  # streams that record_stream has named
    is_new: bool = True  # nobody has used it


class Detector:
    """Watches accesses and waits; of a ``forgotten`` order (kind, place) it is as if the line were missing."""

    def __init__(self, forgotten: tuple[str, str] | None = None) -> None:
        self.forgotten = forgotten
        self.clocks: dict[int, Clock] = {HOST: {}}
        self.freed: dict[int, dict[int, tuple[Access, str]]] = {}
        """For each pool, and each stream, the last use of a block that was given back there, and what made it."""
        self.findings: Counter[str] = Counter()
        self.syncs: Counter[tuple[str, str, Place]] = Counter()
        self.orders: Counter[tuple[str, str]] = Counter()
        self.entered: Counter[str] = Counter()
        self.last_wait: tuple[Place, int] | None = None
        self.phase, self.operations = "init", 0
        self.host = HOST  # the thread of it that is at work

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.entered[phase] += 1

    # ------------------------------------------------------------------------------------------------------- clocks

    def clock(self, stream: int) -> Clock:
        return self.clocks.setdefault(stream, {})

    def join(self, stream: int, other: Clock) -> None:
        """What comes next on ``stream`` comes after all that ``other`` knows."""
        own = self.clock(stream)
        for known, number in other.items():
            own[known] = max(own.get(known, 0), number)

    def recorded(self, stream: int) -> Clock:
        """What an event stands for that is recorded on ``stream`` now: also what the host knows already."""
        self.join(stream, self.clock(self.host))
        return dict(self.clock(stream))

    def heeds(self, order: str) -> bool:
        """Whether an order that our code gives is heeded; see ``forgotten``."""
        place = here()
        if not place.file.startswith("trainer/"):
            return True
        self.orders[order, str(place)] += 1
        return (order, str(place)) != self.forgotten

    def host_waits(self, clock: Clock, what: str) -> None:
        self.join(self.host, clock)
        if self.host != HOST:  # only that thread waits
            return
        place = here()
        # Numbers that are read one by one, with nothing between them, are one list on a GPU.
        if (place, self.operations - 1) != self.last_wait:
            self.syncs[self.phase, what, place] += 1
        self.last_wait = place, self.operations

    def launch(self, stream: int) -> int:
        """The number of the next operation on ``stream``."""
        self.operations += 1
        if stream >= 0:
            self.join(stream, self.clock(self.host))
        self.clock(stream)[stream] = self.operations
        return self.operations

    def _is_before(self, access: Access, stream: int) -> bool:
        return access.stream == stream or access.number <= self.clock(stream).get(access.stream, 0)

    # ------------------------------------------------------------------------------------------------------- memory

    def touch(self, block: Block, extent: tuple[int, int], writes: bool, stream: int, number: int, what: str) -> None:
        access = Access(stream, number, writes, *extent, what, here())
        if block.is_new:
            self._begin_use(block, access)
        kept = []
        for earlier in block.accesses:
            is_before = self._is_before(earlier, stream)
            meets = earlier.low < access.high and access.low < earlier.high
            if meets and (writes or earlier.writes) and not is_before:
                self.report("race", f"{earlier}, then {access}")
            # Who comes after this one will come after the earlier one, too.
            covered = (
                is_before and writes >= earlier.writes and access.low <= earlier.low and earlier.high <= access.high
            )
            if not covered:
                kept.append(earlier)
        block.accesses = [*kept, access]

    def _begin_use(self, block: Block, access: Access) -> None:
        """The block may be any that was given back to its pool: its first use must come after every use of that."""
        block.is_new = False
        for last, origin in self.freed.get(block.pool, {}).values():
            if not self._is_before(last, access.stream):
                old = f"which may be that of {origin}, last used by {last}"
                self.report("reused in use", f"block from the pool of {label(block.pool)}, {old}; then {access}")

    def free(self, block: Block) -> None:
        """The block goes back to the stream that it came from; see the top."""
        if block.pool == HOST:
            return
        pool = self.freed.setdefault(block.pool, {})
        for access in block.accesses:
            last = pool.get(access.stream)
            if (
                access.stream >= 0
                and access.stream not in block.recorded
                and (last is None or last[0].number < access.number)
            ):
                pool[access.stream] = access, block.origin

    def report(self, kind: str, what: str) -> None:
        self.findings[f"{kind} in {self.phase}: {what}"] += 1


def label(stream: int) -> str:
    """How a stream is called: 0 is the one that computes."""
    return {HOST: "the host", THREAD: "the host's thread"}.get(stream, f"stream {stream}")
