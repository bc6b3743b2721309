"""The caching allocator: figures worked out by hand from torch's rules, its invariants, and a plain one beside it."""

from __future__ import annotations

import pytest
from helpers.plain_allocator import PlainAllocator
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.fakegpu.allocator import ADDRESSES, AllocatorSettings, Block, CachingAllocator, DriverOutOfMemory

MiB = 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)

FIRST = [  # (requested, allocated, reserved)
    (1, 512, 2 * MiB),
    (512, 512, 2 * MiB),
    (513, 1024, 2 * MiB),
    (MiB, MiB, 2 * MiB),
    (MiB + 1, MiB + 512, 20 * MiB),
    (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
    (10 * MiB - 511, 10 * MiB, 10 * MiB),
    (11 * MiB, 12 * MiB, 12 * MiB),  # 1 MiB left over is not split off: it counts as allocated
    (11 * MiB - 512, 11 * MiB - 512, 12 * MiB),  # 512 bytes more are
    (22 * MiB, 22 * MiB, 22 * MiB),
    (100 * MiB + 1, 100 * MiB + 512, 102 * MiB),
]
EXPANDABLE_FIRST = [(1, 512, 2 * MiB), (MiB + 1, MiB + 512, 20 * MiB), (11 * MiB, 11 * MiB, 20 * MiB)]
EXPANDABLE_FIRST += [(21 * MiB, 21 * MiB, 40 * MiB)]


@pytest.mark.parametrize(("expandable", "cases"), [(False, FIRST), (True, EXPANDABLE_FIRST)])
def test_first_block(expandable: bool, cases: list[tuple[int, int, int]]) -> None:
    for requested, allocated, reserved in cases:
        allocator = CachingAllocator(AllocatorSettings(expandable))
        allocator.malloc(requested)
        assert (allocator.allocated, allocator.reserved, allocator.requested) == (allocated, reserved, requested)


def test_best_fit_is_the_smallest_then_the_lowest() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MiB) for size in (30, 20, 40, 20)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        allocator.free(block)
    found = [allocator.malloc(size).address for size in (20 * MiB - 512, 20 * MiB, 20 * MiB)]
    assert found == [addresses[1], addresses[3], addresses[0]]
    assert allocator.reserved == 110 * MiB


def test_expandable_segment_grows_gives_whole_pages_back_and_fills_the_gap_first() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first, middle, last = (allocator.malloc(size * MiB) for size in (10, 60, 10))  # four pages
    assert (middle.address, last.address) == (first.address + 10 * MiB, first.address + 70 * MiB)
    allocator.free(middle)  # 10..70 MiB: pages 20..40 and 40..60 are wholly free
    allocator.release_cached()
    assert allocator.reserved == 40 * MiB
    assert [size // MiB for size, _, _ in allocator.pools[0, False].free] == [10, 10]
    again = allocator.malloc(25 * MiB)
    assert again.address == first.address + 10 * MiB  # 10 free, 15 of the page after
    assert allocator.reserved == 60 * MiB
    for block in (first, last, again):
        allocator.free(block)
    allocator.release_cached()
    assert allocator.reserved == 0
    assert allocator.pools[0, False].unmapped == []


def test_the_cache_is_given_back_when_memory_runs_out() -> None:
    allocator = CachingAllocator(capacity=100 * MiB)
    allocator.malloc(20 * MiB)
    allocator.free(allocator.malloc(50 * MiB))
    assert (allocator.reserved, allocator.retries) == (70 * MiB, 0)
    allocator.malloc(60 * MiB)  # the 50 MiB go back; 20 and 60 remain
    assert (allocator.reserved, allocator.retries) == (80 * MiB, 1)
    with pytest.raises(DriverOutOfMemory):
        allocator.malloc(22 * MiB)
    assert (allocator.reserved, allocator.allocated, allocator.retries) == (80 * MiB, 80 * MiB, 2)
    allocator.malloc(20 * MiB)


def test_an_expandable_segment_without_memory_keeps_what_could_be_mapped() -> None:
    allocator = CachingAllocator(EXPANDABLE, 59 * MiB)
    allocator.malloc(10 * MiB)
    with pytest.raises(DriverOutOfMemory):
        allocator.malloc(40 * MiB)  # 30 MiB more are two pages, and there is one
    assert (allocator.reserved, allocator.retries) == (20 * MiB, 1)
    allocator.malloc(30 * MiB)
    assert allocator.reserved == 40 * MiB


def test_wrong_use_is_refused() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(100)
    allocator.free(block)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(block)
    with pytest.raises(ValueError, match="0 bytes"):
        allocator.malloc(0)


EDGES = [MiB, MiB + 1, 2 * MiB, 10 * MiB - 512, 10 * MiB, 11 * MiB, 19 * MiB, 20 * MiB, 21 * MiB]
SIZES = st.integers(1, 4096) | st.integers(1, 3 * MiB) | st.integers(MiB, 60 * MiB) | st.sampled_from(EDGES)
STEPS = st.lists(
    st.tuples(st.just("malloc"), SIZES, st.integers(0, 1))
    | st.tuples(st.just("free"), st.integers(0, 10**6), st.just(0))
    | st.tuples(st.just("release"), st.just(0), st.just(0)),
    max_size=60,
)


def check(allocator: CachingAllocator, live: list[Block]) -> None:
    """What is always so, of the blocks in use and of those on lists, linked to the chains that segments are."""
    assert allocator.allocated == sum(block.size for block in live)
    assert allocator.requested == sum(block.requested for block in live)
    assert all(block.mapped and block.size >= allocator.settings.rounded(block.requested) for block in live)
    known = set(live)
    for pool in allocator.pools.values():
        known |= {block for _, _, block in pool.free} | {block for _, block in pool.unmapped}
    spans, mapped = [], 0
    for head in [block for block in known if block.previous is None]:
        chain = [head]
        while (after := chain[-1].next) is not None:
            before = chain[-1]
            assert after.previous is before
            assert before.address + before.size == after.address  # no gap and no overlap
            assert before.allocated or after.allocated or before.mapped != after.mapped  # else they were one
            assert before.pool is after.pool
            chain.append(after)
        spans.append((head.address, chain[-1].address + chain[-1].size))
        known -= set(chain)
        if head.segment is not None:
            page = head.pool.page
            assert spans[-1] == (head.segment, head.segment + -(-ADDRESSES // page) * page)
            assert all(block.size % page == 0 for block in chain if not block.mapped)
        mapped += sum(block.size for block in chain if block.mapped)
    assert known == set()  # every block is on a list or in use, and linked once
    assert mapped == allocator.reserved >= allocator.allocated
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))


@settings(max_examples=200)
@given(expandable=st.booleans(), capacity=st.none() | st.integers(0, 200 * MiB), steps=STEPS)
def test_invariants_and_the_same_as_the_plain_allocator(
    expandable: bool, capacity: int | None, steps: list[tuple[str, int, int]]
) -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable), capacity)
    plain = PlainAllocator(expandable, capacity)
    live: list[Block] = []
    for kind, number, stream in steps:
        if kind == "malloc":
            address = plain.malloc(number, stream)
            try:
                live.append(allocator.malloc(number, stream))
            except DriverOutOfMemory:
                assert address is None
            else:
                assert live[-1].pool.stream == stream
                assert live[-1].address == address
        elif kind == "free" and live:
            block = live.pop(number % len(live))
            plain.free(block.address)
            allocator.free(block)
        elif kind == "release":
            allocator.release_cached()
            plain.release()
        assert (allocator.allocated, allocator.reserved) == (plain.allocated, plain.reserved)
        check(allocator, live)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (plain.peak_allocated, plain.peak_reserved)
    assert allocator.retries == plain.retries
    for block in live:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (0, 0, 0)
