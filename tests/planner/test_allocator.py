"""The caching allocator: figures worked out by hand from torch's rules, its invariants, and a plain one beside it."""

from __future__ import annotations

import pytest
from helpers.plain_allocator import PlainAllocator
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import RecipeError
from trainer.planner.allocator import AllocatorSettings, Block, CachingAllocator

KiB, MiB = 2**10, 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def malloc(allocator: CachingAllocator, size: int, stream: int = 0) -> Block:
    block = allocator.malloc(size, stream)
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
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
    ],
)
def test_first_block(requested: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    malloc(allocator, requested)
    assert (allocator.allocated, allocator.reserved, allocator.requested) == (allocated, reserved, requested)


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (11 * MiB, 11 * MiB, 20 * MiB),
        (21 * MiB, 21 * MiB, 40 * MiB),
    ],
)
def test_first_block_of_an_expandable_segment(requested: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator(EXPANDABLE)
    malloc(allocator, requested)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


@pytest.mark.parametrize(
    ("divisions", "requested", "rounded"),
    [
        (4, 1200, 1536),  # not more than four times 512 bytes: the usual steps
        (4, 5 * KiB + 1, 6 * KiB),  # 4, 5, 6, 7, 8 KiB
        (4, 4 * KiB, 4 * KiB),
        (8, 65 * MiB, 72 * MiB),
        (1, 5 * KiB + 1, 5 * KiB + 512),
    ],
)
def test_rounding_to_parts_of_powers_of_two(divisions: int, requested: int, rounded: int) -> None:
    assert AllocatorSettings(roundup_power2_divisions=divisions).rounded(requested) == rounded


def test_small_blocks_share_a_segment_and_come_back_as_one() -> None:
    allocator = CachingAllocator()
    first, second, third = (malloc(allocator, 512 * KiB) for _ in range(3))
    assert allocator.reserved == 2 * MiB
    assert (second.address, third.address) == (first.address + 512 * KiB, first.address + MiB)
    allocator.free(first)
    allocator.free(third)
    assert [size for size, _, _ in allocator.pools[0, True].free] == [512 * KiB, MiB]
    allocator.free(second)
    assert [size for size, _, _ in allocator.pools[0, True].free] == [2 * MiB]


def test_best_fit_is_the_smallest_then_the_lowest() -> None:
    allocator = CachingAllocator()
    blocks = [malloc(allocator, size * MiB) for size in (30, 20, 40, 20)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        allocator.free(block)
    assert malloc(allocator, 20 * MiB - 512).address == addresses[1]
    assert malloc(allocator, 20 * MiB).address == addresses[3]
    assert malloc(allocator, 20 * MiB).address == addresses[0]
    assert allocator.reserved == 110 * MiB


def test_a_stream_gets_nothing_of_another_stream() -> None:
    allocator = CachingAllocator()
    allocator.free(malloc(allocator, 30 * MiB, stream=0))
    malloc(allocator, 30 * MiB, stream=7)
    assert allocator.reserved == 60 * MiB
    malloc(allocator, 30 * MiB, stream=0)
    assert allocator.reserved == 60 * MiB


def test_small_and_large_blocks_are_kept_apart() -> None:
    allocator = CachingAllocator()
    allocator.free(malloc(allocator, 30 * MiB))
    malloc(allocator, MiB)
    assert allocator.reserved == 32 * MiB


def test_cache_is_released_when_memory_runs_out() -> None:
    allocator = CachingAllocator(AllocatorSettings(capacity=100 * MiB))
    kept = malloc(allocator, 20 * MiB)
    allocator.free(malloc(allocator, 50 * MiB))
    assert (allocator.reserved, allocator.retries) == (70 * MiB, 0)
    malloc(allocator, 60 * MiB)  # the 50 MiB go back; 20 and 60 remain
    assert (allocator.reserved, allocator.retries) == (80 * MiB, 1)
    assert kept.allocated
    assert allocator.malloc(22 * MiB) is None
    assert (allocator.reserved, allocator.allocated, allocator.retries) == (80 * MiB, 80 * MiB, 2)
    malloc(allocator, 20 * MiB)


def test_a_segment_in_use_is_not_released() -> None:
    allocator = CachingAllocator()
    small, large = malloc(allocator, 512), malloc(allocator, 5 * MiB)
    allocator.free(malloc(allocator, 5 * MiB))
    allocator.release_cached()
    assert allocator.reserved == 22 * MiB
    allocator.free(small)
    allocator.free(large)
    allocator.release_cached()
    assert allocator.reserved == 0


def test_expandable_segment_grows_into_the_next_page() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first = malloc(allocator, 15 * MiB)
    second = malloc(allocator, 15 * MiB)  # 5 MiB are left of the first page
    assert second.address == first.address + 15 * MiB
    assert allocator.reserved == 40 * MiB
    malloc(allocator, 10 * MiB)
    assert allocator.reserved == 40 * MiB


def test_expandable_segment_gives_whole_pages_back_and_fills_the_gap_first() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first, middle, last = (malloc(allocator, size * MiB) for size in (10, 60, 10))  # four pages
    allocator.free(middle)  # 10..70 MiB: pages 20..40 and 40..60 are wholly free
    allocator.release_cached()
    assert allocator.reserved == 40 * MiB
    assert [size // MiB for size, _, _ in allocator.pools[0, False].free] == [10, 10]
    again = malloc(allocator, 25 * MiB)
    assert again.address == first.address + 10 * MiB  # 10 free, 15 of the page after
    assert allocator.reserved == 60 * MiB
    for block in (first, last, again):
        allocator.free(block)
    allocator.release_cached()
    assert allocator.reserved == 0
    assert allocator.pools[0, False].unmapped == []


def test_expandable_segment_maps_nothing_if_memory_is_too_little() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True, capacity=59 * MiB))
    malloc(allocator, 10 * MiB)
    assert allocator.malloc(40 * MiB) is None  # 30 MiB more are two pages, and there is one
    assert (allocator.reserved, allocator.retries) == (20 * MiB, 1)
    malloc(allocator, 30 * MiB)
    assert allocator.reserved == 40 * MiB


def test_a_gap_and_the_free_page_behind_it_are_one_block() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True, capacity=50 * MiB))
    first, second = malloc(allocator, 20 * MiB), malloc(allocator, 20 * MiB)
    allocator.free(first)
    allocator.release_cached()
    allocator.free(second)  # a gap, a free page, and unmapped addresses to the end
    assert (allocator.reserved, allocator.peak_reserved) == (20 * MiB, 40 * MiB)
    third = malloc(allocator, 40 * MiB)  # the gap, and the page
    assert (third.address, allocator.reserved) == (first.address, 40 * MiB)
    allocator.free(third)
    assert allocator.malloc(60 * MiB) is None
    assert (allocator.reserved, allocator.peak_reserved) == (0, 40 * MiB)


def test_pages_that_are_mapped_in_vain_count_for_the_peak() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True, capacity=70 * MiB))
    first, second = malloc(allocator, 20 * MiB), malloc(allocator, 20 * MiB)
    allocator.free(first)
    allocator.release_cached()
    allocator.free(second)
    other = malloc(allocator, 20 * MiB, stream=1)
    assert allocator.reserved == 40 * MiB
    assert allocator.malloc(60 * MiB) is None  # maps the gap, finds nothing for a third page, and gives both back
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (20 * MiB, 60 * MiB, 1)
    assert other.allocated


def test_blocks_from_max_split_on_stay_whole() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=64 * MiB))
    large = malloc(allocator, 100 * MiB)
    allocator.free(large)
    malloc(allocator, 30 * MiB)  # may not cut it
    assert allocator.reserved == 130 * MiB
    malloc(allocator, 80 * MiB)  # 20 MiB too large
    assert allocator.reserved == 210 * MiB
    assert malloc(allocator, 90 * MiB).size == 100 * MiB


def test_blocks_from_max_split_on_are_the_first_to_be_released() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=64 * MiB, capacity=250 * MiB))
    for block in [malloc(allocator, size * MiB) for size in (30, 70, 100)]:
        allocator.free(block)
    malloc(allocator, 75 * MiB)  # 100 is too large to be given, and enough to make room
    assert (allocator.reserved, allocator.retries) == (175 * MiB + MiB, 0)
    malloc(allocator, 140 * MiB)  # 70 is not enough: all of the cache goes
    assert (allocator.reserved, allocator.retries) == (216 * MiB, 1)


def test_large_segments_of_another_size() -> None:
    allocator = CachingAllocator(AllocatorSettings(large_segment_bytes=40 * MiB))
    malloc(allocator, 2 * MiB)
    assert allocator.reserved == 40 * MiB


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_split_bytes": 10 * MiB},
        {"roundup_power2_divisions": 3},
        {"roundup_power2_divisions": -2},
        {"large_segment_bytes": 2 * MiB},
        {"large_segment_bytes": 21 * MiB},
        {"capacity": -1},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match=next(iter(wrong))):
        AllocatorSettings(**wrong)


def test_wrong_use_is_refused() -> None:
    allocator = CachingAllocator()
    block = malloc(allocator, 100)
    allocator.free(block)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(block)
    with pytest.raises(ValueError, match="0 bytes"):
        allocator.malloc(0)


SIZES = st.one_of(
    st.integers(1, 4 * KiB),
    st.integers(1, 3 * MiB),
    st.integers(MiB, 60 * MiB),
    st.sampled_from([MiB, MiB + 1, 2 * MiB, 10 * MiB - 512, 10 * MiB, 11 * MiB, 19 * MiB, 20 * MiB, 21 * MiB]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 10**6), st.just(0)),
        st.tuples(st.just("release"), st.just(0), st.just(0)),
    ),
    max_size=60,
)
SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    capacity=st.one_of(st.none(), st.integers(0, 200 * MiB)),
    max_split_bytes=st.sampled_from([None, 20 * MiB, 32 * MiB]),
    roundup_power2_divisions=st.sampled_from([0, 8]),
)


def chains(allocator: CachingAllocator, live: list[Block]) -> list[list[Block]]:
    """The blocks of each segment, in the order of their links, reached from those in use and those on lists."""
    known = set(live)
    for pool in allocator.pools.values():
        known |= {block for _, _, block in pool.free} | {block for _, block in pool.unmapped}
    heads = [block for block in known if block.previous is None]
    found = []
    for head in heads:
        chain = [head]
        while chain[-1].next is not None:
            assert chain[-1].next.previous is chain[-1]
            chain.append(chain[-1].next)
        found.append(chain)
    assert sum(len(chain) for chain in found) == len(known)  # every block is on a list or in use, and linked once
    return found


def check(allocator: CachingAllocator, live: list[Block]) -> None:
    assert allocator.allocated == sum(block.size for block in live)
    assert allocator.requested == sum(block.requested for block in live)
    assert allocator.allocated <= allocator.reserved
    assert allocator.settings.capacity is None or allocator.reserved <= allocator.settings.capacity
    mapped = 0
    for chain in chains(allocator, live):
        for one, other in zip(chain, chain[1:], strict=False):
            assert one.address + one.size == other.address  # no gap and no overlap
            assert one.allocated or other.allocated or one.mapped != other.mapped  # else they were one
            assert one.pool is other.pool
        size, segment = sum(block.size for block in chain), chain[0].segment
        mapped += sum(block.size for block in chain if block.mapped)
        if segment is not None:
            assert (chain[0].address, size) == (segment.address, segment.size)
            assert all(b.size % segment.page == 0 for b in chain if not b.mapped)
        for block in chain:
            assert not block.allocated or block.mapped
            assert not block.allocated or block.size >= allocator.settings.rounded(block.requested)
    assert mapped == allocator.reserved
    spans = sorted((chain[0].address, chain[-1].address + chain[-1].size) for chain in chains(allocator, live))
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))


@settings(max_examples=150, deadline=None)
@given(how=SETTINGS, steps=STEPS)
def test_invariants(how: AllocatorSettings, steps: list[tuple[str, int, int]]) -> None:
    allocator, live = CachingAllocator(how), []
    for kind, number, stream in steps:
        if kind == "malloc":
            block = allocator.malloc(number, stream)
            if block is None:
                assert how.capacity is not None
            else:
                assert block.pool.stream == stream
                live.append(block)
        elif kind == "free" and live:
            allocator.free(live.pop(number % len(live)))
        elif kind == "release":
            allocator.release_cached()
        check(allocator, live)
    for block in live:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (0, 0, 0)


@settings(max_examples=300, deadline=None)
@given(
    expandable=st.booleans(),
    capacity=st.one_of(st.none(), st.integers(0, 200 * MiB)),
    steps=STEPS,
)
def test_same_as_the_plain_allocator(expandable: bool, capacity: int | None, steps: list[tuple[str, int, int]]) -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=expandable, capacity=capacity))
    plain = PlainAllocator(expandable, capacity)
    live: list[Block] = []
    for kind, number, stream in steps:
        if kind == "malloc":
            block, address = allocator.malloc(number, stream), plain.malloc(number, stream)
            assert (None if block is None else block.address) == address
            live += [] if block is None else [block]
        elif kind == "free" and live:
            block = live.pop(number % len(live))
            plain.free(block.address)
            allocator.free(block)
        elif kind == "release":
            allocator.release_cached()
            plain.release()
        assert (allocator.allocated, allocator.reserved) == (plain.allocated, plain.reserved)
    assert allocator.retries == plain.retries
    assert (allocator.peak_allocated, allocator.peak_reserved) == (plain.peak_allocated, plain.peak_reserved)


@settings(max_examples=100, deadline=None)
@given(page=st.sampled_from([2 * MiB, 20 * MiB]), sizes=st.lists(st.integers(1, 60 * MiB), min_size=1, max_size=20))
def test_expandable_segments_map_no_page_more_than_needed(page: int, sizes: list[int]) -> None:
    small = page == 2 * MiB
    sizes = [min(size, MiB) if small else size + MiB for size in sizes]
    allocator = CachingAllocator(EXPANDABLE)
    for size in sizes:
        malloc(allocator, size)
    assert allocator.reserved == -(-allocator.allocated // page) * page  # one run of blocks, and its last page
