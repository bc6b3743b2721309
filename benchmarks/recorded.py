"""A real run's allocations, as torch recorded them on a GPU: replayed, and compared with what really happened.

The recording is the dict of ``torch.cuda.memory._snapshot()`` after ``torch.cuda.memory._record_memory_history()``, or
the same written as JSON and read again. An ``alloc`` entry has the bytes that were asked for (``alloc_found_block`` in
torch's c10/cuda/CUDACachingAllocator.cpp); a recording with the bytes of the blocks is replayed to the same blocks,
since rounding leaves them as they are. The memory is free again at ``free_completed``, and segments come and go before
the ``alloc`` that made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import RecipeError, require
from trainer.fakegpu.allocator import SMALL_SIZE, AllocatorSettings, Block, CachingAllocator
from trainer.fakegpu.events import Event

COMES = ("segment_alloc", "segment_map")
GOES = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Difference:
    """The first allocation after which the simulated allocator had another amount of memory than the real one.

    Args:
        entry: its index in the recording.
        recorded: bytes that were reserved.
        simulated: bytes that the simulated allocator had reserved.
    """

    entry: int
    recorded: int
    simulated: int


@dataclass(frozen=True)
class Comparison:
    """The real and the simulated allocator after the same requests; all figures are bytes.

    Args:
        allocations: how many there were.
        peak_allocated: recorded, with what rounding adds; a block that only another stream still uses counts.
        peak_reserved: recorded.
        allocated_error: simulated less recorded peak; 0 if all is well.
        reserved_error: simulated less recorded peak; 0 if all is well.
        first_difference: in what was reserved; ``None`` if there was none.
        first_misplaced: index of the first entry that was given another address; ``None`` if there was none.
    """

    allocations: int
    peak_allocated: int
    peak_reserved: int
    allocated_error: int
    reserved_error: int
    first_difference: Difference | None
    first_misplaced: int | None


def recorded_settings(snapshot: Mapping[str, Any]) -> AllocatorSettings:
    """The settings that a recording was made with, as far as it says: whether segments were expandable."""
    known = snapshot.get("allocator_settings") or {}
    return AllocatorSettings(expandable_segments=bool(known.get("expandable_segments", False)))


def recorded_events(snapshot: Mapping[str, Any]) -> list[Event]:
    """The allocations and frees of a recording, for :func:`trainer.fakegpu.peaks.replay` with any settings.

    The operation is the innermost function of the recorded stack; the phase, which a recording does not know, is empty.

    Raises:
        RecipeError: if it did not begin with an empty allocator.
    """
    events: list[Event] = []
    live: dict[int, tuple[int, str]] = {}
    for entry in _entries(snapshot):
        if entry["action"] == "alloc":
            live[entry["addr"]] = (len(events), _op(entry))
            events.append(Event(len(events), entry["size"], _op(entry), "", entry["stream"]))
        elif entry["action"] == "free_completed":
            require(entry["addr"] in live, f"the recording frees a block from before it began: {ADVICE}")
            key, op = live.pop(entry["addr"])
            events.append(Event(key, 0, op, "", entry["stream"]))
    return events


def compare(snapshot: Mapping[str, Any], settings: AllocatorSettings | None = None) -> Comparison:
    """Replay a recording and hold every step against what really happened.

    The simulated driver has memory without end and gives the addresses that the real one gave. Where the real
    allocator gave memory back, for want of it or at ``empty_cache``, the simulated cache is released.

    Args:
        snapshot: the recording.
        settings: that it was made with; by default what it says itself.

    Raises:
        RecipeError: if it did not begin with an empty allocator, or if what it did cannot have come from ``settings``.
    """
    settings = settings or recorded_settings(snapshot)
    layout, allocator = Layout(settings), _Recorded(settings)
    live: dict[int, Block] = {}
    difference, misplaced, allocations, releasing = None, None, 0, False
    for index, entry in enumerate(_entries(snapshot)):
        action, address, size = entry["action"], entry.get("addr", 0), entry["size"]
        if action in COMES:
            layout.reserve(address, size, separate=action == "segment_alloc")
            allocator.upcoming.append(address)
        elif action in GOES:
            layout.release(address, size)
            if not releasing:
                allocator.release_cached()
        elif action == "alloc":
            layout.allocate(address, size)
            block = live[address] = allocator.malloc(size, entry["stream"])
            allocator.upcoming.clear()
            allocations += 1
            if misplaced is None and block.address != address:
                misplaced = index
            if difference is None and allocator.reserved != layout.reserved:
                difference = Difference(index, layout.reserved, allocator.reserved)
        elif action == "free_completed":
            layout.free(address)
            allocator.free(live.pop(address))
        releasing = action in GOES
    _require_same_end(snapshot, layout)
    return Comparison(
        allocations,
        layout.peak_active,
        layout.peak_reserved,
        allocator.peak_allocated - layout.peak_active,
        allocator.peak_reserved - layout.peak_reserved,
        difference,
        misplaced,
    )


class _Recorded(CachingAllocator):
    """With memory without end, at the addresses where the real driver gave it.

    Attributes:
        upcoming: addresses of the segments that came since the last allocation.
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        super().__init__(settings)
        self.upcoming: list[int] = []

    def new_address(self, size: int) -> int:
        return self.upcoming.pop(0) if self.upcoming else super().new_address(size)


def _entries(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the recording has of the one GPU of a run, up to the snapshot that ends it."""
    entries = next(iter(snapshot.get("device_traces") or []), [])
    require(bool(entries), f"the recording has no device_traces of GPU 0: {ADVICE}")
    pools = {tuple(entry.get("pool_id", (0, 0))) for entry in entries}
    require(pools == {(0, 0)}, f"the recording uses private memory pools, as CUDA graphs do: {ADVICE}")
    actions = {entry["action"] for entry in entries}
    require(
        "free_requested" not in actions or "free_completed" in actions, f"the recording has no free_completed: {ADVICE}"
    )
    ends = [index for index, entry in enumerate(entries) if entry["action"] == "snapshot"]
    return entries[: ends[-1]] if ends else entries


def _require_same_end(snapshot: Mapping[str, Any], layout: Layout) -> None:
    """Refuse a recording whose segments and blocks at its end are not those that its entries lead to."""
    segments = [segment for segment in snapshot.get("segments", ()) if segment.get("device", 0) == 0]
    blocks = []
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            blocks.append((address, block["size"], block["state"] != "inactive"))
            address += block["size"]
    for real, ours in zip(sorted(blocks), layout.blocks(), strict=False):
        require(
            real == ours,
            f"the recording ends with a block of {real[1]} bytes at {real[0]:#x} that its entries and the settings "
            f"do not lead to: give the settings it was made with, and {ADVICE}",
        )
    reserved = sum(segment["total_size"] for segment in segments)
    require(
        reserved == layout.reserved or "segments" not in snapshot,
        f"the recording ends with {reserved} bytes reserved and its entries with {layout.reserved}: {ADVICE}",
    )


def _op(entry: Mapping[str, Any]) -> str:
    frames = entry.get("frames") or []
    return frames[0]["name"] if frames else "alloc"


# What a recording says the allocator did: segments, and blocks at the addresses where they were seen.

ADVICE = (
    "start torch.cuda.memory._record_memory_history before the first tensor is on the GPU, with max_entries large "
    "enough for the whole run, and leave skip_actions and memory pools out"
)


class Layout:
    """Memory as a recording describes it; it decides nothing but where a block ends, by the rules of ``settings``.

    Nothing is shared with the simulated allocator but those rules, so that the two can be compared.

    Args:
        settings: that the recording was made with.

    Attributes:
        reserved: bytes of all segments, or of all mapped pages.
        active: bytes of the blocks in use; a block that only another stream still uses counts.
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.reserved = self.peak_reserved = self.active = self.peak_active = 0
        self._end_of: dict[int, int] = {}  # free ranges, by where they begin
        self._begin_of: dict[int, int] = {}  # and by where they end
        self._used: dict[int, int] = {}  # size of the block in use at an address
        self._fences: set[int] = set()  # where a segment begins: nothing is merged across

    def reserve(self, address: int, size: int, separate: bool) -> None:
        """A segment came; one that is ``separate`` is not merged with what lies before it."""
        if separate:
            self._fences.update((address, address + size))
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._insert(address, address + size)

    def release(self, address: int, size: int) -> None:
        """A segment, or some pages of one, went; all of it must be free.

        Raises:
            RecipeError: if it is not.
        """
        end = address + size
        begin = address if address in self._end_of else max((b for b in self._end_of if b < address), default=address)
        if self._end_of.get(begin, 0) < end:
            raise RecipeError(f"the recording gives back {size} bytes at {address:#x} that were not free: {ADVICE}")
        last = self._end_of[begin]
        self._remove(begin)
        if begin < address:
            self._insert(begin, address)
        if end < last:
            self._insert(end, last)
        self._fences -= {address, end}  # a segment that comes next to this one brings them back
        self.reserved -= size

    def allocate(self, address: int, requested: int) -> None:
        """A block was given out, with what was left over but not split off.

        Raises:
            RecipeError: if there is no room at its address.
        """
        size = self.settings.rounded(requested)
        end = self._end_of.get(address)
        if end is None or end - address < size:
            raise RecipeError(
                f"the recording has {requested} bytes at {address:#x}, which were not free: give the settings it was "
                f"made with, and {ADVICE}"
            )
        self._remove(address)
        if self.settings.splits(size <= SMALL_SIZE, end - address - size):
            self._insert(address + size, end)
        else:
            size = end - address
        self._used[address] = size
        self.active += size
        self.peak_active = max(self.peak_active, self.active)

    def free(self, address: int) -> None:
        """A block came back.

        Raises:
            RecipeError: if it was never given out.
        """
        size = self._used.pop(address, None)
        if size is None:
            raise RecipeError(f"the recording frees a block at {address:#x} from before it began: {ADVICE}")
        self.active -= size
        self._insert(address, address + size)

    def blocks(self) -> Iterator[tuple[int, int, bool]]:
        """Every block as ``(address, size, in use)``, by address."""
        used = [(address, size, True) for address, size in self._used.items()]
        yield from sorted(used + [(begin, end - begin, False) for begin, end in self._end_of.items()])

    def _insert(self, begin: int, end: int) -> None:
        if begin not in self._fences and begin in self._begin_of:
            before = self._begin_of[begin]
            self._remove(before)
            begin = before
        if end not in self._fences and end in self._end_of:
            after = self._end_of[end]
            self._remove(end)
            end = after
        self._end_of[begin], self._begin_of[end] = end, begin

    def _remove(self, begin: int) -> None:
        del self._begin_of[self._end_of.pop(begin)]
