"""Replay of a traced run's allocations: memory peaks and the blocks in use at them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from trainer.fakegpu.allocator import AllocatorSettings, Block, CachingAllocator, DriverOutOfMemory
from trainer.fakegpu.events import EMPTY_CACHE, Category, Event, Trace
from trainer.system.text import GB

CATEGORIES: tuple[Category, ...] = get_args(Category)
LARGEST = 12  # number of largest blocks at the peak that are listed
BUCKETS = 999  # parts of the events in a timeline; each leaves two points at most, the last event one more


class PhasePeak(NamedTuple):
    """Peak bytes within one phase, including the memory in use at its start."""

    allocated: int
    reserved: int


def in_gb(size: int) -> float:
    """Convert bytes to rounded GB (1e9 bytes) for files."""
    return round(size / GB, 4)


def peaks_to_json(
    sizes: dict[str, int], phases: Mapping[str, dict[str, int]], categories: Mapping[Any, int]
) -> dict[str, Any]:
    """Return total ``sizes``, such as ``reserved``, the peaks of ``phases`` and the ``categories`` in GB, for files."""
    every = {"": sizes, **phases}
    named = {phase: {f"{name}_gb": in_gb(size) for name, size in own.items()} for phase, own in every.items()}
    of_all, shares = named.pop(""), {name: in_gb(size) for name, size in categories.items()}
    return {**of_all, "phases": named, "categories": shares}


@dataclass(frozen=True)
class Timeline:
    """Points for a stacked plot: about 2000 at most, including both peaks."""

    events: list[int]  # index of the event that each point is just after
    allocated: dict[Category, list[int]]  # bytes at each point; the categories add up to what is allocated
    reserved: list[int]


@dataclass(frozen=True)
class Replay:
    """The result of replaying a run; all sizes are bytes."""

    peak_allocated: int  # peak of blocks in use, including rounding
    peak_reserved: int  # peak of memory obtained from the driver
    peak_requested: int  # peak of requested bytes
    allocated_at: int | None  # index of the event at the allocated peak; ``None`` if nothing was allocated
    allocated_phase: str | None  # its phase
    phases: dict[str, PhasePeak]  # peaks within each phase, in the order in which they first came
    live_by_source: dict[tuple[Category, str, str], int]  # at this peak, by (category, op, phase); largest first
    blocks: list[Event]  # allocations of the blocks in use at the allocated peak
    reserved_then: int  # reserved at the allocated peak
    timeline: Timeline

    @property
    def categories(self) -> dict[Category, int]:
        """Memory at the allocated peak by category, the largest first, without empty categories."""
        found: Counter[Category] = Counter()
        for (category, _, _), size in self.live_by_source.items():
            found[category] += size
        return dict(found.most_common())

    @property
    def fragmentation(self) -> int:
        """Memory that is reserved but unused at the allocated peak."""
        return self.reserved_then - self.peak_allocated


class Retries(NamedTuple):
    """The retries with which torch's allocator stays within a capacity."""

    times: int | None  # how often it releases its cache; ``None`` if even that is not sufficient
    freed: int = 0  # segments that it then frees, each with a ``cudaFree``, which waits for the GPU

    def __str__(self) -> str:
        """Say whether it fits: without retries, after some, or not."""
        if not self.times:
            return "fits" if self.times == 0 else "does not fit"
        return f"fits {self.cell.replace('retr', 'allocator retr')}"

    @property
    def cell(self) -> str:
        """The same in a column of a table with the heading ``fits``."""
        if not self.times:
            return "yes" if self.times == 0 else "no"
        return f"after {self.times} {'retry' if self.times == 1 else 'retries'}"


class _Moment(NamedTuple):
    """Bytes after an event. ``size`` is its block's, negative for a free."""

    size: int
    allocated: int
    reserved: int


def replay(run: Trace | Sequence[Event], settings: AllocatorSettings | None = None) -> Replay:
    """Replay a trace, or a list of events, whose blocks are all temporaries; a ValueError for an impossible event."""
    events, categories = (run.events, run.categories) if isinstance(run, Trace) else (run, {})
    allocator = CachingAllocator(settings)
    history = _history(allocator, events)
    at = max(range(len(history)), key=lambda index: history[index].allocated, default=None)
    timeline, alive, blocks = _second_pass(events, categories, history, at)
    peaks = allocator.peak_allocated, allocator.peak_reserved, allocator.peak_requested
    phase, reserved = (None, 0) if at is None else (events[at].phase, history[at].reserved)
    return Replay(*peaks, at, phase, _phases(events, history), alive, blocks, reserved, timeline)


def replay_within(run: Trace, settings: AllocatorSettings, capacity: int | None) -> tuple[AllocatorSettings, Replay]:
    """Replay a trace; with expandable segments if only then at most ``capacity`` bytes are reserved."""
    memory = replay(run, settings)
    if capacity is not None and memory.peak_allocated <= capacity < memory.peak_reserved:
        expandable = AllocatorSettings(expandable_segments=True)
        denser = replay(run, expandable)
        if denser.peak_reserved <= capacity:
            return expandable, denser
    return settings, memory


def timeline_of(memory: Replay, trace: Trace) -> dict[str, Any]:
    points = memory.timeline.events
    marks = [[min(bisect_left(points, event), len(points) - 1), phase] for event, phase in trace.marks]
    return {"allocated": memory.timeline.allocated, "reserved": memory.timeline.reserved, "marks": marks}


def retries_within(
    run: Trace, capacity: int, settings: AllocatorSettings | None = None, memory: Replay | None = None
) -> Retries:
    """Return how often torch must release its cache to stay within ``capacity`` bytes."""
    if memory and not memory.peak_allocated <= capacity < memory.peak_reserved:  # its replay without a limit knows
        return Retries(0 if memory.peak_reserved <= capacity else None)
    allocator = CachingAllocator(settings, capacity)
    try:
        _history(allocator, run.events)
    except DriverOutOfMemory:
        return Retries(None)
    return Retries(allocator.retries, allocator.freed)


def _history(allocator: CachingAllocator, events: Sequence[Event]) -> list[_Moment]:
    blocks: dict[int, Block] = {}
    history = []
    for index, event in enumerate(events):
        if event.id != EMPTY_CACHE and bool(event.bytes) == (event.id in blocks):
            what = "allocates block {}, which is in use" if event.bytes else "frees block {}, which is not in use"
            raise ValueError(f"event {index} ({event.op}) {what.format(event.id)}")
        history.append(_Moment(apply_event(allocator, blocks, event), allocator.allocated, allocator.reserved))
    return history


def apply_event(allocator: CachingAllocator, blocks: dict[int, Block], event: Event) -> int:
    """Apply ``event`` to the ``blocks`` in use; return the bytes of its block, negative for a free."""
    if event.id == EMPTY_CACHE:
        allocator.release_cached()
        return 0
    if event.bytes:
        block = blocks[event.id] = allocator.malloc(event.bytes, event.stream)
        return block.size
    block = blocks.pop(event.id)
    size = block.size  # before it is merged with its neighbours
    allocator.free(block)
    return -size


def _phases(events: Sequence[Event], history: Sequence[_Moment]) -> dict[str, PhasePeak]:
    peaks: dict[str, PhasePeak] = {}
    for event, before, after in zip(events, [*history[:1], *history], history, strict=False):
        allocated, reserved = peaks.get(event.phase, (0, 0))
        allocated = max(allocated, before.allocated, after.allocated)
        peaks[event.phase] = PhasePeak(allocated, max(reserved, before.reserved, after.reserved))
    return peaks


def _second_pass(
    events: Sequence[Event], categories: Mapping[int, Category], history: Sequence[_Moment], peak: int | None
) -> tuple[Timeline, dict[tuple[Category, str, str], int], list[Event]]:
    """Return memory by category at the timeline's points, and by operation and block at the allocated peak."""
    points = _points(history)
    timeline = Timeline(points, {category: [] for category in CATEGORIES}, [history[i].reserved for i in points])
    wanted, held = set(points), dict.fromkeys(CATEGORIES, 0)
    live: dict[int, tuple[Event, int]] = {}
    alive: dict[tuple[Category, str, str], int] = defaultdict(int)
    blocks: list[Event] = []
    for index, (event, moment) in enumerate(zip(events, history, strict=True)):
        held[categories.get(event.id, "temporaries")] += moment.size
        if moment.size > 0:
            live[event.id] = (event, moment.size)
        else:
            live.pop(event.id, None)
        if index == peak:
            blocks = [owner for owner, _ in live.values()]
            for owner, used in live.values():
                alive[categories.get(owner.id, "temporaries"), owner.op, owner.phase] += used
        if index in wanted:
            for category, used in held.items():
                timeline.allocated[category].append(used)
    return timeline, dict(sorted(alive.items(), key=lambda item: -item[1])), blocks


def _points(history: Sequence[_Moment]) -> list[int]:
    """Return the indices of the events with the most allocated and reserved in each bucket, and the last index."""
    count = len(history)
    if count <= 2 * BUCKETS:
        return list(range(count))
    points = {count - 1}
    for bucket in range(BUCKETS):
        part = range(bucket * count // BUCKETS, (bucket + 1) * count // BUCKETS)
        points.add(max(part, key=lambda index: history[index].allocated))
        points.add(max(part, key=lambda index: history[index].reserved))
    return sorted(points)
