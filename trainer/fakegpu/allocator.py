"""Torch's caching allocator for CUDA (its native backend), without a GPU: how much it reserves for what is allocated.

Source: torch's c10/cuda/CUDACachingAllocator.cpp, ``DeviceCachingAllocator``, and c10/core/AllocatorConfig.h (read at
2.10, constants at 2.15). Left out are private pools (CUDA graphs) and all of ``PYTORCH_CUDA_ALLOC_CONF`` but
``expandable_segments``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MiB = 2**20
LEAST_BLOCK = 512  # bytes that every block is a multiple of (kMinBlockSize)
MOST_SMALL = MiB  # of the largest block in the pool of small ones (kSmallSize); what a large one may waste unsplit
SMALL_SEGMENT = 2 * MiB  # what the driver is asked for at once for small blocks (kSmallBuffer); an expandable page
LARGE_SEGMENT = 20 * MiB  # for blocks between 1 and 10 MiB (large_segment_size_mb), and a large expandable page
LEAST_OWN_SEGMENT = 10 * MiB  # from here on a block that is not cached gets a segment of its own size (kMinLargeAlloc)
SEGMENT_STEP = 2 * MiB  # that such a segment is a multiple of (kRoundLarge)
ADDRESSES = 2**50  # bytes of addresses of an expandable segment


def round_up(number: int, step: int) -> int:
    """The first multiple of ``step`` that is not less than ``number``."""
    return -(-number // step) * step


@dataclass(frozen=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` says: whether a stream has one segment that grows, not one a large block."""

    expandable_segments: bool = False

    def rounded(self, requested: int) -> int:
        """Bytes of the block that a request of ``requested`` bytes looks for (round_size)."""
        return max(LEAST_BLOCK, round_up(requested, LEAST_BLOCK))

    def segment_bytes(self, size: int) -> int:
        """Bytes that the driver is asked for when no free block has ``size`` bytes (get_allocation_size)."""
        if size <= MOST_SMALL:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < LEAST_OWN_SEGMENT else round_up(size, SEGMENT_STEP)

    def splits(self, small: bool, remaining: int) -> bool:
        """Whether a block with ``remaining`` bytes more than were asked for is cut in two (should_split)."""
        return remaining >= LEAST_BLOCK if small or self.expandable_segments else remaining > MOST_SMALL


class Block:
    """``size`` bytes from ``address`` on, in a segment of ``pool``: in use, free, or, in an expandable segment (which
    begins at ``segment``), without memory behind them."""

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "previous", "requested", "segment", "size")

    def __init__(self, address: int, size: int, pool: Pool, segment: int | None = None) -> None:
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

    @property
    def extent(self) -> int:
        """Bytes that it has, or would have if it grew into the addresses behind it that have no memory."""
        return self.size if self.next is None or self.next.mapped else self.size + self.next.size

    def has_room(self, size: int) -> bool:
        """Whether the blocks from this one on that are not in use have ``size`` bytes of addresses."""
        found, block = 0, self
        while not block.allocated:
            found += block.size
            if found >= size or block.next is None:
                break
            block = block.next
        return found >= size


class Pool:
    """The free blocks of one stream, small or large; no other stream is given one.

    Attributes:
        page: bytes of memory that an expandable segment gets at once.
        free: ``(size, address, block)``, in this order: the first that is large enough is the best fit.
        unmapped: ``(address, block)`` of expandable segments, where no memory is, by address.
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


class Shortage(Exception):
    """The driver has no memory for a block, even after the cache was given back."""


class CachingAllocator:
    """One device's allocator: best fit among the free blocks of a stream, else memory from the driver.

    The driver has memory up to a ``capacity`` in bytes, without end by default; a process that calls
    ``torch.cuda.set_per_process_memory_fraction`` has one, too.
    A free block is split when enough is left over, and merged with its free neighbours when it is freed. Segments go
    back to the driver only when it has no memory left, or by :meth:`release_cached`. In an expandable segment memory
    is mapped a page at a time, at the lowest address where the request fits; gaps that released pages have left are
    the first to be filled.

    Attributes:
        allocated: bytes of the blocks in use, as ``torch.cuda.memory_allocated`` counts: with what rounding adds and
            with what was left over but not split off.
        requested: bytes that were asked for.
        reserved: bytes that the driver has given, in use or free.
        retries: how often the driver had no memory until the cache was given back (num_alloc_retries).
    """

    def __init__(self, settings: AllocatorSettings | None = None, capacity: int | None = None) -> None:
        self.settings, self.capacity = settings or AllocatorSettings(), capacity
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.allocated = self.peak_allocated = self.requested = self.peak_requested = self.retries = 0
        self.reserved = self.peak_reserved = 0
        self._next_address = 2**40

    def malloc(self, requested: int, stream: int = 0) -> Block:
        """A block for ``requested`` bytes on ``stream``; :class:`Shortage` if even a released cache is too small."""
        if requested <= 0:
            raise ValueError(f"a block of {requested} bytes cannot be allocated")
        size = self.settings.rounded(requested)
        small = size <= MOST_SMALL
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
        """Put ``block``, which is in use, back in its pool, merged with its free neighbours."""
        if not block.allocated:
            raise ValueError(f"the block at address {block.address} is not in use")
        block.allocated = False
        self.allocated -= block.size
        self.requested -= block.requested
        block.merge()
        block.pool.insert(block)

    def release_cached(self) -> None:
        """Give the driver every segment, or mapped page, that is wholly free (``torch.cuda.empty_cache``)."""
        for pool in self.pools.values():
            for _, _, block in list(pool.free):
                if block.segment is not None:
                    self._unmap(block, block.segment)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The free block that fits best, taken off its list (get_free_block)."""
        free = pool.free
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        if self.settings.expandable_segments:
            # A block that can grow counts as large as it could get: rather a larger one that cannot.
            while index + 1 < len(free) and free[index + 1][2].extent < free[index][2].extent:
                index += 1
        return free.pop(index)[2]

    def _retried(self, pool: Pool, size: int) -> Block:
        """A block of memory that others had cached: all that is wholly free goes back to the driver first."""
        self.release_cached()
        self.retries += 1
        if (block := self._from_driver(pool, size)) is None:
            raise Shortage
        return block

    def _from_driver(self, pool: Pool, size: int) -> Block | None:
        """A block of at least ``size`` bytes with new memory, on no list; ``None`` if the driver has too little.

        Of an expandable segment, what could be mapped until then stays mapped, and free.
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
            block = gap  # mapping has merged the two
        pool.remove(block)
        return block

    def _reserve(self, size: int) -> bool:
        """Take ``size`` bytes of the driver's memory, if there are so many."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def new_address(self, size: int) -> int:
        """Where the driver lets a segment of ``size`` bytes begin: addresses rise."""
        self._next_address += size
        return self._next_address - size

    # Source: find_expandable_block, map_block, try_allocate_expandable_block and unmap_block.

    def _lowest(self, pool: Pool, size: int) -> Block:
        """The first block, free or unmapped, from which on ``size`` bytes of addresses can be had."""
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
        """Put memory behind the pages of the first ``size`` bytes of ``block``, and merge it with free neighbours."""
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
        """Give back the memory of those pages that lie wholly in a free ``block``."""
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
        if middle.previous is not None or middle.next is not None:  # else nothing of the segment is left
            pool.insert(middle)
