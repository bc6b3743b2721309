"""Simulation of torch's native caching allocator for CUDA: computes reserved memory from allocations and frees.

Source: torch's c10/cuda/CUDACachingAllocator.cpp, ``DeviceCachingAllocator``, and c10/core/AllocatorConfig.h (read at
2.10, constants at 2.15). Private pools (CUDA graphs) are not simulated. Of ``PYTORCH_CUDA_ALLOC_CONF``, only
``expandable_segments`` is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MiB = 2**20
MIN_BLOCK = 512  # block sizes are multiples of this (kMinBlockSize)
SMALL_SIZE = MiB  # max size in the small pool (kSmallSize), and max unsplit rest of a large block
SMALL_SEGMENT = 2 * MiB  # segment for small blocks (kSmallBuffer), and page of a small expandable segment
LARGE_SEGMENT = 20 * MiB  # segment for blocks of 1 to 10 MiB (large_segment_size_mb), and large expandable page
MIN_LARGE_ALLOC = 10 * MiB  # min size of a block that gets a separate segment (kMinLargeAlloc)
SEGMENT_STEP = 2 * MiB  # separate segments are multiples of this (kRoundLarge)
ADDRESSES = 2**50  # bytes of address space of an expandable segment


def round_up(number: int, step: int) -> int:
    """Round ``number`` up to a multiple of ``step``."""
    return -(-number // step) * step


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of ``PYTORCH_CUDA_ALLOC_CONF``: expandable segments grow, so a stream has one for all large blocks."""

    expandable_segments: bool = False

    def rounded(self, requested: int) -> int:
        """Return the block size for a request of ``requested`` bytes (round_size)."""
        return max(MIN_BLOCK, round_up(requested, MIN_BLOCK))

    def segment_bytes(self, size: int) -> int:
        """Return the bytes to request from the driver if no free block has ``size`` bytes (get_allocation_size)."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < MIN_LARGE_ALLOC else round_up(size, SEGMENT_STEP)

    def splits(self, small: bool, remaining: int) -> bool:
        """Return whether a block with ``remaining`` unneeded bytes is split (should_split)."""
        return remaining >= MIN_BLOCK if small or self.expandable_segments else remaining > SMALL_SIZE


class Block:
    """A block of ``size`` bytes at ``address`` in a segment of ``pool``: in use, free or unmapped.

    Only blocks of an expandable segment, which starts at ``segment``, can be unmapped (without memory).
    """

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "previous", "requested", "segment", "size")

    def __init__(self, address: int, size: int, pool: Pool, segment: int | None = None) -> None:
        self.address, self.size, self.pool, self.segment = address, size, pool, segment
        self.requested, self.allocated, self.mapped = 0, False, True
        self.previous: Block | None = None
        self.next: Block | None = None

    def split(self, size: int) -> Block:
        """Keep the first ``size`` bytes and return a block of the rest, which is in no list yet."""
        rest = Block(self.address + size, self.size - size, self.pool, self.segment)
        rest.mapped = self.mapped
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def merge(self) -> None:
        """Merge with the neighbours that are free and, like this block, mapped or unmapped."""
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

    @property
    def extent(self) -> int:
        """The size of the block including an unmapped block after it."""
        return self.size if self.next is None or self.next.mapped else self.size + self.next.size

    def has_room(self, size: int) -> bool:
        """Return whether this block and the unused blocks after it have ``size`` bytes of addresses."""
        found, block = 0, self
        while not block.allocated:
            found += block.size
            if found >= size or block.next is None:
                break
            block = block.next
        return found >= size


class Pool:
    """The free blocks of one stream, small or large. Streams do not share blocks.

    Attributes:
        page: bytes that an expandable segment maps at once.
        free: sorted ``(size, address, block)``; the first that is large enough is the best fit.
        unmapped: sorted ``(address, block)`` of unmapped blocks in expandable segments.
    """

    __slots__ = ("free", "page", "small", "stream", "unmapped")

    def __init__(self, stream: int, small: bool) -> None:
        self.stream, self.small = stream, small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def insert(self, block: Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address, block))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address, block))]


class DriverOutOfMemory(Exception):
    """Raised when the driver has no memory for a block, even after the cache was released."""


class CachingAllocator:
    """The allocator of one device: best fit among the free blocks of a stream, otherwise memory from the driver.

    ``capacity`` limits the memory in bytes, like ``torch.cuda.set_per_process_memory_fraction``; default: unlimited.

    A free block is split if the rest is large enough, and merged with its free neighbours when it is freed. Segments
    return to the driver only if it has no memory left, or by :meth:`release_cached`. An expandable segment maps whole
    pages at the lowest address where the request fits, so gaps of released pages are filled first.

    Attributes:
        allocated: bytes of the blocks in use as in ``torch.cuda.memory_allocated``, with rounding and unsplit rests.
        requested: bytes requested by the program.
        reserved: bytes obtained from the driver, in use or free.
        retries: number of times that the cache was released because the driver had no memory (num_alloc_retries).
        freed: number of segments, or of runs of pages, that these retries returned to the driver.
    """

    def __init__(self, settings: AllocatorSettings | None = None, capacity: int | None = None) -> None:
        self.settings, self.capacity = settings or AllocatorSettings(), capacity
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.allocated = self.peak_allocated = self.requested = self.peak_requested = 0
        self.reserved = self.peak_reserved = self.retries = self.freed = 0
        self._next_address = 2**40

    def malloc(self, requested: int, stream: int = 0) -> Block:
        """Return a block for ``requested`` bytes on ``stream``; may raise :class:`DriverOutOfMemory`."""
        if requested <= 0:
            raise ValueError(f"a block of {requested} bytes cannot be allocated")
        size = self.settings.rounded(requested)
        small = size <= SMALL_SIZE
        if (stream, small) not in self.pools:
            self.pools[stream, small] = Pool(stream, small)
        pool = self.pools[stream, small]
        block = self._cached(pool, size) or self._from_driver(pool, size) or self._retried(pool, size)
        if self.settings.splits(small, block.size - size):
            pool.insert(block.split(size))
        block.allocated, block.requested = True, requested
        self.allocated += block.size
        self.requested += requested
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_requested = max(self.peak_requested, self.requested)
        return block

    def free(self, block: Block) -> None:
        """Return a used ``block`` to its pool, merged with its free neighbours."""
        if not block.allocated:
            raise ValueError(f"the block at address {block.address} is not in use")
        block.allocated = False
        self.allocated -= block.size
        self.requested -= block.requested
        block.merge()
        block.pool.insert(block)

    def release_cached(self) -> int:
        """Return all unused segments and mapped pages to the driver (``torch.cuda.empty_cache``); return how many."""
        freed = 0
        for pool in self.pools.values():
            for _, _, block in list(pool.free):
                before = self.reserved
                if block.segment is not None:
                    self._unmap(block, block.segment)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size
                freed += self.reserved < before
        return freed

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """Remove the best fitting free block from its list and return it (get_free_block)."""
        free = pool.free
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        if self.settings.expandable_segments:
            # The extent of a block counts, so a larger block with a smaller extent is preferred.
            while index + 1 < len(free) and free[index + 1][2].extent < free[index][2].extent:
                index += 1
        return free.pop(index)[2]

    def _retried(self, pool: Pool, size: int) -> Block:
        """Release the cache, then return a block from the driver."""
        self.freed += self.release_cached()
        self.retries += 1
        if (block := self._from_driver(pool, size)) is None:
            raise DriverOutOfMemory
        return block

    def _from_driver(self, pool: Pool, size: int) -> Block | None:
        """Return a block of at least ``size`` bytes with new memory, in no list; ``None`` if the driver has too little.

        In an expandable segment, pages mapped before the failure stay mapped and free.
        """
        if not self.settings.expandable_segments:
            segment = self.settings.segment_bytes(size)
            return Block(self.new_address(segment), segment, pool) if self._reserve(segment) else None
        block = self._lowest(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            gap = block.next
            assert gap is not None
            if not self._map(gap, min(gap.size, size - block.size)):
                return None
            block = gap  # mapping merged both
        pool.remove(block)
        return block

    def _reserve(self, size: int) -> bool:
        """Reserve ``size`` bytes if the driver has them; return whether it does."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def new_address(self, size: int) -> int:
        """Return the address of a new segment of ``size`` bytes; addresses increase."""
        self._next_address += size
        return self._next_address - size

    # Source: find_expandable_block, map_block, try_allocate_expandable_block and unmap_block.

    def _lowest(self, pool: Pool, size: int) -> Block:
        """Return the first free or unmapped block at which ``size`` bytes of addresses are unused."""
        for _, gap in pool.unmapped:
            before = gap.previous
            first = before if before is not None and not before.allocated else gap
            if first.has_room(size):
                return first
        addresses = round_up(max(ADDRESSES, size), pool.page)
        address = self.new_address(addresses)
        block = Block(address, addresses, pool, segment=address)
        block.mapped = False
        pool.insert(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the pages of the first ``size`` bytes of ``block`` and merge it with its free neighbours."""
        pool, mapped = block.pool, round_up(size, block.pool.page)
        if not self._reserve(mapped):
            return False
        pool.remove(block)
        if mapped < block.size:
            pool.insert(block.split(mapped))
        block.mapped = True
        block.merge()
        pool.insert(block)
        return True

    def _unmap(self, block: Block, segment: int) -> None:
        """Unmap the pages that lie completely in a free ``block``."""
        pool = block.pool
        begin = segment + round_up(block.address - segment, pool.page)
        end = block.address + block.size
        end -= (end - segment) % pool.page
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
        self.reserved -= end - begin
        if middle.previous is not None or middle.next is not None:  # otherwise the whole segment is gone
            pool.insert(middle)
