"""Torch's caching allocator for CUDA (its native backend), without a GPU: how much it reserves for what is allocated.

Source: torch's c10/cuda/CUDACachingAllocator.cpp, ``DeviceCachingAllocator``.
"""

from __future__ import annotations

from bisect import bisect_left

from trainer.planner.blocks import MOST_SMALL, AllocatorSettings, Block, Driver, ExpandableSegments, Pool, extent

__all__ = ["AllocatorSettings", "Block", "CachingAllocator"]


class CachingAllocator:
    """One device's allocator: best fit among the free blocks of a stream, else memory from the driver.

    A free block is split when enough is left over, and merged with its free neighbours when it is freed. Segments go
    back to the driver only when it has no memory left, or by :meth:`release_cached`.

    Args:
        settings: of the allocator.
        driver: where memory comes from; by default one with the capacity of ``settings``.

    Attributes:
        allocated: bytes of the blocks in use, as ``torch.cuda.memory_allocated`` counts: with what rounding adds and
            with what was left over but not split off.
        requested: bytes that were asked for.
        retries: how often the driver had no memory until the cache was released (num_alloc_retries).
    """

    def __init__(self, settings: AllocatorSettings | None = None, driver: Driver | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.driver = driver or Driver(self.settings.capacity)
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.expandable = ExpandableSegments(self.settings, self.driver)
        self.allocated = self.peak_allocated = 0
        self.requested = self.peak_requested = 0
        self.retries = 0

    @property
    def reserved(self) -> int:
        """Bytes that the driver has given, in use or free."""
        return self.driver.reserved

    @property
    def peak_reserved(self) -> int:
        """The most bytes that the driver had given at once."""
        return self.driver.peak_reserved

    def malloc(self, requested: int, stream: int = 0) -> Block | None:
        """A block for ``requested`` bytes on ``stream``; ``None`` when even a released cache leaves too little memory.

        Raises:
            ValueError: for no bytes at all; torch does not come here for an empty tensor.
        """
        if requested <= 0:
            raise ValueError(f"a block of {requested} bytes cannot be allocated")
        size = self.settings.rounded(requested)
        pool = self._pool(stream, size)
        block = self._cached(pool, size)
        if block is None:
            block = self._new(pool, size)
            if block is None:
                return None
        if self.settings.splits(pool.small, size, block.size - size):
            pool.insert(block.split(size))
        block.allocated, block.requested = True, requested
        self.allocated += block.size
        self.requested += requested
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_requested = max(self.peak_requested, self.requested)
        return block

    def free(self, block: Block) -> None:
        """Put ``block`` back in its pool, merged with its free neighbours.

        Raises:
            ValueError: if it is not in use.
        """
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
                    self.expandable.unmap(block)
                elif block.previous is None and block.next is None:
                    self._release(block)

    def _pool(self, stream: int, size: int) -> Pool:
        small = size <= MOST_SMALL
        pool = self.pools.get((stream, small))
        if pool is None:
            pool = self.pools[stream, small] = Pool(stream, small)
        return pool

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The free block that fits best, taken off its list (get_free_block)."""
        free = pool.free
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        if self.settings.expandable_segments:
            # A block that can grow counts as large as it could get: rather a larger one that cannot.
            while index + 1 < len(free) and extent(free[index + 1][2]) < extent(free[index][2]):
                index += 1
        if self._oversize(free[index][0], size):
            return None
        return free.pop(index)[2]

    def _oversize(self, found: int, size: int) -> bool:
        """Whether a block of ``found`` bytes must not be split, and is too large for ``size`` bytes as it is."""
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        if size < limit:
            return found >= limit
        return found >= size + self.settings.large_segment_bytes

    def _new(self, pool: Pool, size: int) -> Block | None:
        """A block with memory from the driver, if need be after giving it back what is cached."""
        block = self._from_driver(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._from_driver(pool, size)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._from_driver(pool, size)
        return block

    def _from_driver(self, pool: Pool, size: int) -> Block | None:
        if self.settings.expandable_segments:
            return self.expandable.allocate(pool, size)
        segment = self.settings.segment_bytes(size)
        if not self.driver.reserve(segment):
            return None
        return Block(self.driver.address(segment), segment, pool)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back free blocks too large to be split, until ``size`` bytes are free; whether there were enough.

        One that is large enough by itself, if there is one; else the largest first
        (release_available_cached_blocks).
        """
        limit = self.settings.max_split_bytes
        if limit is None or self.settings.expandable_segments:
            return False
        index = bisect_left(pool.free, (size, 0))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released = 0
        while released < size and pool.free and pool.free[-1][0] >= limit:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= size

    def _release(self, block: Block) -> None:
        """Give the driver a free block that is a whole segment."""
        block.pool.remove(block)
        self.driver.release(block.size)
