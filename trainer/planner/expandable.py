"""``expandable_segments:True``: segments of addresses whose pages get memory when it is needed.

Source: torch's c10/cuda/CUDACachingAllocator.cpp, ``ExpandableSegment``, ``find_expandable_block``, ``map_block``,
``try_allocate_expandable_block`` and ``unmap_block``. Memory is mapped a page at a time, 2 MiB for small and 20 MiB for
large blocks, at the lowest address where the request fits; pages that are wholly free lose it again when the cache is
released, and leave gaps that are the first to be filled.
"""

from __future__ import annotations

from trainer.planner.blocks import SMALL_SEGMENT, AllocatorSettings, Block, Driver, Pool, round_up

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
