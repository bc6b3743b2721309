"""Replay of a traced run's allocations: the peaks, who made them, and whether the memory is enough."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from trainer.planner.allocator import AllocatorSettings, Block, CachingAllocator
from trainer.planner.events import Category, Event, Trace

CATEGORIES: tuple[Category, ...] = get_args(Category)

BUCKETS = 999
"""Parts that a timeline cuts the events in; each leaves two points at most, the last event one more."""


@dataclass(frozen=True)
class PhasePeak:
    """The most bytes within one phase, with what was there when it began."""

    allocated: int
    reserved: int


@dataclass(frozen=True)
class Shortage:
    """The allocation that found no memory, also after the cache was released.

    Args:
        event: its index.
        op: that asked.
        phase: that it was in.
        bytes: that were asked for.
        allocated: bytes in use then.
        reserved: bytes that the driver had given then.
        capacity: bytes that it had altogether.
    """

    event: int
    op: str
    phase: str
    bytes: int
    allocated: int
    reserved: int
    capacity: int

    def __str__(self) -> str:
        return (
            f"out of memory in {self.phase}, {self.op} (event {self.event}): {self.bytes / 1e9:.3f} GB asked for, "
            f"{self.allocated / 1e9:.3f} GB allocated and {self.reserved / 1e9:.3f} GB reserved "
            f"of {self.capacity / 1e9:.3f} GB"
        )


@dataclass(frozen=True)
class Timeline:
    """Some 2000 moments at most, for a stacked plot; those of both peaks are among them.

    Args:
        events: index of the event that each point is just after.
        allocated: by category, bytes at each point; the categories add up to what is allocated.
        reserved: bytes at each point.
    """

    events: list[int]
    allocated: dict[Category, list[int]]
    reserved: list[int]


@dataclass(frozen=True)
class Replay:
    """What the allocator did with a run; all figures are bytes.

    Args:
        settings: of the allocator.
        peak_allocated: the most in use at once, with what rounding adds.
        peak_reserved: the most that the driver had given at once; also pages that one request mapped and lost again.
        peak_requested: the most that was asked for at once.
        allocated_at: index of the event at the allocated peak; ``None`` if nothing was allocated.
        reserved_at: index of the event after which the most was reserved.
        allocated_phase: phase of the allocated peak.
        reserved_phase: phase of the reserved peak.
        phases: peaks within each phase, in the order in which they first came.
        alive: in use at the allocated peak, by ``(category, op, phase)`` of the allocation; the largest first.
        reserved_then: reserved at the allocated peak.
        retries: how often the cache had to be released for lack of memory.
        oom: where the replay stopped for want of memory; ``None`` if it went through.
        timeline: for a plot.
    """

    settings: AllocatorSettings
    peak_allocated: int
    peak_reserved: int
    peak_requested: int
    allocated_at: int | None
    reserved_at: int | None
    allocated_phase: str | None
    reserved_phase: str | None
    phases: dict[str, PhasePeak]
    alive: dict[tuple[Category, str, str], int]
    reserved_then: int
    retries: int
    oom: Shortage | None
    timeline: Timeline

    @property
    def categories(self) -> dict[Category, int]:
        """In use at the allocated peak, by category, the largest first; without those that had nothing."""
        found: dict[Category, int] = defaultdict(int)
        for (category, _, _), size in self.alive.items():
            found[category] += size
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def fragmentation(self) -> int:
        """Reserved at the allocated peak and not in use."""
        return self.reserved_then - self.peak_allocated


def replay(run: Trace | Sequence[Event], settings: AllocatorSettings | None = None) -> Replay:
    """Let the allocator do what a run did, until its end or until there is no memory.

    Args:
        run: a trace, or its events alone, which then are all temporaries.
        settings: of the allocator, with the capacity of the device; without end by default.

    Raises:
        ValueError: for a block that is allocated twice, or freed when it is not in use.
    """
    events = run.events if isinstance(run, Trace) else run
    categories = run.categories if isinstance(run, Trace) else {}
    history = _History()
    allocator = CachingAllocator(settings)
    oom = _run(allocator, events, history)
    allocated_at, reserved_at = _first_maximum(history.allocated), _first_maximum(history.reserved)
    timeline, alive = _second_pass(events, categories, history, allocated_at)
    return Replay(
        settings=allocator.settings,
        peak_allocated=allocator.peak_allocated,
        peak_reserved=allocator.peak_reserved,
        peak_requested=allocator.peak_requested,
        allocated_at=allocated_at,
        reserved_at=reserved_at,
        allocated_phase=None if allocated_at is None else events[allocated_at].phase,
        reserved_phase=None if reserved_at is None else events[reserved_at].phase,
        phases=history.phases(events),
        alive=alive,
        reserved_then=0 if allocated_at is None else history.reserved[allocated_at],
        retries=allocator.retries,
        oom=oom,
        timeline=timeline,
    )


@dataclass
class _History:
    """Bytes after each event: of its block, negative if freed; allocated; and reserved."""

    sizes: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)

    def add(self, size: int, allocator: CachingAllocator) -> None:
        self.sizes.append(size)
        self.allocated.append(allocator.allocated)
        self.reserved.append(allocator.driver.reserved)

    def phases(self, events: Sequence[Event]) -> dict[str, PhasePeak]:
        peaks: dict[str, PhasePeak] = {}
        begin = 0
        for index in range(1, len(self.sizes) + 1):
            if index < len(self.sizes) and events[index].phase == events[begin].phase:
                continue
            phase, since = events[begin].phase, max(begin - 1, 0)
            before = peaks.get(phase, PhasePeak(0, 0))
            peaks[phase] = PhasePeak(
                max(before.allocated, *self.allocated[since:index]), max(before.reserved, *self.reserved[since:index])
            )
            begin = index
        return peaks


def _run(allocator: CachingAllocator, events: Sequence[Event], history: _History) -> Shortage | None:
    blocks: dict[int, Block] = {}
    for index, (key, requested, op, phase, stream) in enumerate(events):
        if requested:
            if key in blocks:
                raise ValueError(f"event {index} ({op}) allocates block {key}, which is in use")
            block = allocator.malloc(requested, stream)
            if block is None:
                history.add(0, allocator)
                allocated, reserved = allocator.allocated, allocator.reserved
                capacity = allocator.driver.capacity or 0
                return Shortage(index, op, phase, requested, allocated, reserved, capacity)
            blocks[key] = block
            history.add(block.size, allocator)
        else:
            block = blocks.pop(key, None)
            if block is None:
                raise ValueError(f"event {index} ({op}) frees block {key}, which is not in use")
            size = block.size
            allocator.free(block)
            history.add(-size, allocator)
    return None


def _first_maximum(values: list[int]) -> int | None:
    return values.index(max(values)) if values else None


def _second_pass(
    events: Sequence[Event], categories: Mapping[int, Category], history: _History, peak: int | None
) -> tuple[Timeline, dict[tuple[Category, str, str], int]]:
    """Who has what: at the points of the timeline by category, at the allocated peak by operation."""
    points = _points(history)
    timeline = Timeline(points, {category: [] for category in CATEGORIES}, [history.reserved[i] for i in points])
    wanted, held = set(points), dict.fromkeys(CATEGORIES, 0)
    live: dict[int, tuple[Event, int]] = {}
    alive: dict[tuple[Category, str, str], int] = defaultdict(int)
    for index, size in enumerate(history.sizes):
        event = events[index]
        held[categories.get(event.id, "temporaries")] += size
        if size > 0:
            live[event.id] = (event, size)
        else:
            live.pop(event.id, None)
        if index == peak:
            for owner, used in live.values():
                alive[categories.get(owner.id, "temporaries"), owner.op, owner.phase] += used
        if index in wanted:
            for category, used in held.items():
                timeline.allocated[category].append(used)
    return timeline, dict(sorted(alive.items(), key=lambda item: -item[1]))


def _points(history: _History) -> list[int]:
    """Indices of events: those with the most allocated and the most reserved in each bucket, and the last."""
    count = len(history.sizes)
    if count <= 2 * BUCKETS:
        return list(range(count))
    points = {count - 1}
    for bucket in range(BUCKETS):
        part = range(bucket * count // BUCKETS, (bucket + 1) * count // BUCKETS)
        points.add(max(part, key=history.allocated.__getitem__))
        points.add(max(part, key=history.reserved.__getitem__))
    return sorted(points)
