"""Blocks of device memory as torch's caching allocator keeps them: settings, pools of free blocks, splits and merges.

Source: torch's c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (read at 2.10, constants at 2.15).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from trainer.errors import require

MiB = 2**20

LEAST_BLOCK = 512
"""Bytes that every block is a multiple of (kMinBlockSize)."""

MOST_SMALL = MiB
"""Bytes of the largest block in the pool of small ones (kSmallSize); what a large block may waste unsplit."""

SMALL_SEGMENT = 2 * MiB
"""Bytes that the driver is asked for at once for small blocks (kSmallBuffer)."""

LEAST_OWN_SEGMENT = 10 * MiB
"""From this size on a block that is not in the cache gets a segment of its own size (kMinLargeAlloc)."""

SEGMENT_STEP = 2 * MiB
"""Bytes that such a segment is a multiple of (kRoundLarge)."""


@dataclass(frozen=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` says, and the memory that there is.

    Left out: ``garbage_collection_threshold`` (needs the age of each block), a list of ``roundup_power2_divisions``,
    private pools (CUDA graphs), and the limit of ``set_per_process_memory_fraction``, which unlike ``capacity`` is
    held against the segment that a request would need before expandable segments look what is mapped.

    Args:
        expandable_segments: one segment a stream that grows, instead of one for each large block.
        capacity: bytes that the driver has for segments, all others' memory taken off; without end if ``None``.
        max_split_bytes: blocks from this size on are not split (max_split_size_mb); ``None`` splits all.
        roundup_power2_divisions: steps between two powers of two that sizes are rounded up to; 0 or 1 for 512 bytes.
        large_segment_bytes: of a segment for blocks between 1 and 10 MiB, and of a large page of an expandable
            segment (large_segment_size_mb).

    Raises:
        RecipeError: for a value that torch refuses or that is not modelled.
    """

    expandable_segments: bool = False
    capacity: int | None = None
    max_split_bytes: int | None = None
    roundup_power2_divisions: int = 0
    large_segment_bytes: int = 20 * MiB

    def __post_init__(self) -> None:
        divisions, large, split = self.roundup_power2_divisions, self.large_segment_bytes, self.max_split_bytes
        require(
            divisions >= 0 and divisions & (divisions - 1) == 0,
            f"roundup_power2_divisions={divisions} must be 0 or a power of two",
        )
        require(
            large >= LEAST_OWN_SEGMENT and large % SEGMENT_STEP == 0,
            f"large_segment_bytes={large} must be a multiple of 2 MiB and at least 10 MiB",
        )
        require(
            split is None or split >= large, f"max_split_bytes={split} must be at least large_segment_bytes={large}"
        )
        require(self.capacity is None or self.capacity >= 0, f"capacity={self.capacity} must not be negative")

    def rounded(self, requested: int) -> int:
        """Bytes of the block that a request of ``requested`` bytes looks for (round_size)."""
        divisions = self.roundup_power2_divisions
        if divisions > 1 and requested > LEAST_BLOCK * divisions:
            step = (1 << (requested.bit_length() - 1)) // divisions
            return round_up(requested, step)
        return max(LEAST_BLOCK, round_up(requested, LEAST_BLOCK))

    def segment_bytes(self, size: int) -> int:
        """Bytes that the driver is asked for when no free block has ``size`` bytes (get_allocation_size)."""
        if size <= MOST_SMALL:
            return SMALL_SEGMENT
        return self.large_segment_bytes if size < LEAST_OWN_SEGMENT else round_up(size, SEGMENT_STEP)

    def splits(self, small: bool, size: int, remaining: int) -> bool:
        """Whether a block with ``remaining`` bytes more than the ``size`` asked for is cut in two (should_split)."""
        if small or self.expandable_segments:
            return remaining >= LEAST_BLOCK
        return remaining > MOST_SMALL and (self.max_split_bytes is None or size < self.max_split_bytes)


class Block:
    """A range of addresses in one segment: in use, free, or (in an expandable segment) without memory behind it.

    Args:
        address: of its first byte.
        size: bytes.
        pool: whose block it is.
        segment: that it lies in, if that is expandable.
    """

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "previous", "requested", "segment", "size")

    def __init__(self, address: int, size: int, pool: Pool, segment: ExpandableSegment | None = None) -> None:
        self.address, self.size, self.pool, self.segment = address, size, pool, segment
        self.requested, self.allocated, self.mapped = 0, False, True
        self.previous: Block | None = None
        self.next: Block | None = None

    def split(self, size: int) -> Block:
        """Keep the first ``size`` bytes; returns the block of the others, which is in no list yet."""
        rest = Block(self.address + size, self.size - size, self.pool, self.segment)
        rest.mapped = self.mapped
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def merge(self) -> None:
        """Take in the blocks before and after that are free like this one, or without memory like this one."""
        before, after = self.previous, self.next
        if before is not None and not before.allocated and before.mapped == self.mapped:
            before.pool.remove(before)
            self.address, self.size, self.previous = before.address, self.size + before.size, before.previous
            if self.previous is not None:
                self.previous.next = self
        if after is not None and not after.allocated and after.mapped == self.mapped:
            after.pool.remove(after)
            self.size, self.next = self.size + after.size, after.next
            if self.next is not None:
                self.next.previous = self


class Pool:
    """The free blocks of one stream, small or large.

    Args:
        stream: that allocated them; no other is given one.
        small: whether its blocks have at most 1 MiB when they are in use.

    Attributes:
        free: ``(size, address, block)``, in this order: the first that is large enough is the best fit.
        unmapped: ``(address, block)`` of expandable segments, where no memory is, by address.
    """

    __slots__ = ("free", "small", "stream", "unmapped")

    def __init__(self, stream: int, small: bool) -> None:
        self.stream, self.small = stream, small
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def insert(self, block: Block) -> None:
        """List a block that is not in use."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block off the list that it is on."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address, block))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address, block))]


class Driver:
    """What the CUDA driver does for the allocator: memory, as long as there is some, and addresses in rising order.

    Args:
        capacity: bytes; without end if ``None``.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.reserved = self.peak_reserved = 0
        self._next_address = 2**40

    def reserve(self, size: int) -> bool:
        """Take ``size`` bytes of memory; false if there are not so many."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def release(self, size: int) -> None:
        """Give ``size`` bytes of memory back."""
        self.reserved -= size

    def address(self, size: int) -> int:
        """Where a segment of ``size`` bytes begins."""
        address = self._next_address
        self._next_address += size
        return address


def round_up(number: int, step: int) -> int:
    """The first multiple of ``step`` that is not less than ``number``."""
    return -(-number // step) * step


# ``expandable_segments:True``: segments of addresses whose pages get memory when it is needed.
#
# Source: torch's c10/cuda/CUDACachingAllocator.cpp, ``ExpandableSegment``, ``find_expandable_block``, ``map_block``,
# ``try_allocate_expandable_block`` and ``unmap_block``. Memory is mapped a page at a time, 2 MiB for small and 20 MiB
# for large blocks, at the lowest address where the request fits; pages that are wholly free lose it again when the
# cache is released, and leave gaps that are the first to be filled.

UNLIMITED_ADDRESSES = 2**50
"""Bytes of addresses of a segment on a device without end."""


class ExpandableSegment:
    """A range of addresses.

    Args:
        address: of its first byte.
        size: bytes of addresses, a multiple of ``page``.
        page: bytes of memory that are mapped and unmapped at once.
    """

    __slots__ = ("address", "page", "size")

    def __init__(self, address: int, size: int, page: int) -> None:
        self.address, self.size, self.page = address, size, page


class ExpandableSegments:
    """Maps and unmaps.

    Args:
        settings: of the allocator.
        driver: that gives addresses and memory.
    """

    def __init__(self, settings: AllocatorSettings, driver: Driver) -> None:
        self.settings, self.driver = settings, driver

    def allocate(self, pool: Pool, size: int) -> Block | None:
        """A block of at least ``size`` mapped bytes that is on no list; ``None`` if the driver has no memory.

        What could be mapped before memory ran out stays mapped, as a free block.
        """
        block = self._lowest(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            gap = block.next
            assert gap is not None
            if not self._map(gap, min(gap.size, size - block.size)):
                return None
            block = gap  # mapping has merged the two
        pool.remove(block)
        return block

    def unmap(self, block: Block) -> None:
        """Give back the memory of those pages that lie wholly in a free ``block``."""
        segment, pool = block.segment, block.pool
        assert segment is not None
        begin = segment.address + round_up(block.address - segment.address, segment.page)
        end = block.address + block.size
        end -= (end - segment.address) % segment.page
        if begin >= end:
            return
        pool.remove(block)
        middle = block
        if begin > block.address:
            middle = block.split(begin - block.address)
            pool.insert(block)
        if middle.size > end - begin:
            pool.insert(middle.split(end - begin))
        middle.mapped = False
        middle.merge()
        self.driver.release(end - begin)
        if middle.previous is not None or middle.next is not None:  # else nothing of the segment is left
            pool.insert(middle)

    def _lowest(self, pool: Pool, size: int) -> Block:
        """The first block, free or unmapped, from which on ``size`` bytes of addresses can be had."""
        for _, gap in pool.unmapped:
            before = gap.previous
            first = before if before is not None and not before.allocated else gap
            if _has_room(first, size):
                return first
        page = SMALL_SEGMENT if pool.small else self.settings.large_segment_bytes
        capacity = self.driver.capacity
        addresses = round_up(UNLIMITED_ADDRESSES if capacity is None else capacity * 9 // 8, page)
        addresses = max(addresses, round_up(size, page))
        segment = ExpandableSegment(self.driver.address(addresses), addresses, page)
        block = Block(segment.address, addresses, pool, segment)
        block.mapped = False
        pool.insert(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the pages of the first ``size`` bytes of ``block``, and merge it with free neighbours."""
        assert block.segment is not None
        mapped = round_up(size, block.segment.page)
        if not self.driver.reserve(mapped):
            return False
        pool = block.pool
        pool.remove(block)
        if mapped < block.size:
            pool.insert(block.split(mapped))
        block.mapped = True
        block.merge()
        pool.insert(block)
        return True


def extent(block: Block) -> int:
    """Bytes that a free block has, or would have if it grew into the addresses behind it."""
    after = block.next
    return block.size if after is None or after.mapped else block.size + after.size


def _has_room(block: Block | None, size: int) -> bool:
    """Whether the blocks from ``block`` on that are not in use have ``size`` bytes of addresses."""
    found = 0
    while found < size and block is not None and not block.allocated:
        found += block.size
        block = block.next
    return found >= size
