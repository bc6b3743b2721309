"""What a recording says the allocator did: segments, and blocks at the addresses where they were seen."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.errors import RecipeError
from trainer.planner.blocks import MOST_SMALL, AllocatorSettings

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

    def allocate(self, address: int, requested: int) -> int:
        """A block was given out; returns its size, with what was left over but not split off.

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
        if self.settings.splits(size <= MOST_SMALL, size, end - address - size):
            self._insert(address + size, end)
        else:
            size = end - address
        self._used[address] = size
        self.active += size
        self.peak_active = max(self.peak_active, self.active)
        return size

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
