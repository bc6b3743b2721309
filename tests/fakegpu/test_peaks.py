"""Replay of a trace: peaks, who made them, and the timeline."""

from __future__ import annotations

import random

import pytest

from trainer.fakegpu.allocator import AllocatorSettings
from trainer.fakegpu.events import Event, Trace
from trainer.fakegpu.peaks import CATEGORIES, PhasePeak, replay, replay_within, retries_within

MiB = 2**20

EVENTS = [
    Event(1, 30 * MiB, "empty", "init"),
    Event(2, 40 * MiB, "mm", "forward"),
    Event(3, 20 * MiB, "mm", "forward"),
    Event(4, 10 * MiB, "gelu", "forward"),
    Event(4, 0, "gelu", "forward"),
    Event(2, 0, "mm_backward", "backward"),
    Event(5, 50 * MiB, "mm_backward", "backward"),
    Event(3, 0, "mm_backward", "backward"),
    Event(5, 0, "adam", "step"),
    Event(6, 20 * MiB, "mm", "forward"),
]
TRACE = Trace(events=EVENTS, categories={1: "params", 2: "activations", 3: "activations", 5: "gradients"})


def test_peaks_and_who_made_them() -> None:
    result = replay(TRACE)
    assert (result.peak_allocated, result.allocated_at, result.allocated_phase) == (100 * MiB, 3, "forward")
    assert (result.peak_reserved, result.peak_requested) == (150 * MiB, 100 * MiB)
    assert list(result.live_by_source.items()) == [
        (("activations", "mm", "forward"), 60 * MiB),
        (("params", "empty", "init"), 30 * MiB),
        (("temporaries", "gelu", "forward"), 10 * MiB),
    ]
    assert result.categories == {"activations": 60 * MiB, "params": 30 * MiB, "temporaries": 10 * MiB}
    assert (result.reserved_then, result.fragmentation) == (100 * MiB, 0)


def test_peaks_of_a_phase_count_what_it_began_with_and_phases_that_come_again_are_one() -> None:
    assert replay(TRACE).phases == {
        "init": PhasePeak(30 * MiB, 30 * MiB),
        "forward": PhasePeak(100 * MiB, 150 * MiB),  # reserved: the second one
        "backward": PhasePeak(100 * MiB, 150 * MiB),  # after the forward's last free 90, and 100 with the gradient
        "step": PhasePeak(80 * MiB, 150 * MiB),
    }


def test_fragmentation_is_what_is_reserved_and_not_in_use_at_the_peak() -> None:
    sizes = [(1, 30 * MiB), (1, 0), (2, 10 * MiB), (3, 28 * MiB)]
    events = [Event(number, size, "mm", "forward") for number, size in sizes]
    result, expandable = replay(events), replay(events, AllocatorSettings(expandable_segments=True))
    assert (result.peak_allocated, result.reserved_then, result.fragmentation) == (38 * MiB, 58 * MiB, 20 * MiB)
    assert (expandable.peak_allocated, expandable.peak_reserved) == (38 * MiB, 40 * MiB)


@pytest.mark.parametrize(("capacity", "expandable"), [(None, False), (58, False), (57, True), (40, True), (39, False)])
def test_expandable_segments_are_used_only_if_they_are_what_makes_a_run_fit(capacity, expandable) -> None:
    sizes = [(1, 30 * MiB), (1, 0), (2, 10 * MiB), (3, 28 * MiB)]
    trace = Trace(events=[Event(number, size, "mm", "forward") for number, size in sizes])
    settings, found = replay_within(trace, AllocatorSettings(), capacity and capacity * MiB)
    assert (settings.expandable_segments, found.peak_reserved) == (expandable, (40 if expandable else 58) * MiB)


def test_with_less_memory_the_cache_is_given_back_until_what_is_allocated_is_too_much() -> None:
    """30, 40, 20 and 10 MiB; then 50 more, for which the 40 and the 10 that are free go back."""
    assert replay(TRACE).peak_reserved == 150 * MiB
    found = [retries_within(TRACE, size * MiB) for size in (150, 110, 95)]
    assert found == [(0, 0), (1, 2), (None, 0)]
    assert list(map(str, found)) == ["fits", "fits after 1 allocator retry", "does not fit"]
    assert [one.cell for one in found] == ["yes", "after 1 retry", "no"]


def test_no_events() -> None:
    result = replay([])
    assert (result.peak_allocated, result.peak_reserved, result.fragmentation) == (0, 0, 0)
    assert (result.allocated_at, result.allocated_phase) == (None, None)
    assert (result.phases, result.live_by_source, result.timeline.events) == ({}, {}, [])


@pytest.mark.parametrize(
    ("sizes", "message"), [([8, 8], r"event 1 \(mm\) allocates block 1"), ([0], r"event 0 \(mm\) frees block 1")]
)
def test_impossible_events_are_refused(sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay([Event(1, size, "mm", "forward") for size in sizes])


def random_trace(count: int) -> Trace:
    chance, live, trace = random.Random(1), [], Trace()
    for number in range(count):
        phase = ("forward", "backward", "step")[number // 500 % 3]
        if live and chance.random() < 0.5:
            trace.events.append(Event(live.pop(chance.randrange(len(live))), 0, "free", phase))
        else:
            live.append(number)
            trace.categories[number] = chance.choice(CATEGORIES)
            trace.events.append(Event(number, chance.randrange(1, 64 * MiB), "mm", phase))
    return trace


def test_timeline_is_short_and_has_the_peaks() -> None:
    trace = random_trace(5_000)
    result = replay(trace, AllocatorSettings(expandable_segments=True))
    timeline = result.timeline
    assert 1000 <= len(timeline.events) <= 2000
    assert timeline.events == sorted(set(timeline.events))
    assert timeline.events[-1] == len(trace.events) - 1
    totals = [sum(parts) for parts in zip(*timeline.allocated.values(), strict=True)]
    assert max(totals) == result.peak_allocated
    assert max(timeline.reserved) == result.peak_reserved
    assert all(total <= reserved for total, reserved in zip(totals, timeline.reserved, strict=True))
    peak = totals.index(result.peak_allocated)
    assert timeline.events[peak] == result.allocated_at
    at_peak = {category: parts[peak] for category, parts in timeline.allocated.items() if parts[peak]}
    assert at_peak == result.categories
    assert max(phase.allocated for phase in result.phases.values()) == result.peak_allocated
    assert max(phase.reserved for phase in result.phases.values()) == result.peak_reserved
