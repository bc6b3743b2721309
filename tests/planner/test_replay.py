"""Replay of a trace: peaks, who made them, out of memory, and the timeline."""

from __future__ import annotations

import random

import pytest

from trainer.planner.allocator import AllocatorSettings
from trainer.planner.events import Event, Trace
from trainer.planner.replay import CATEGORIES, PhasePeak, Shortage, replay

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
]
TRACE = Trace(events=EVENTS, categories={1: "params", 2: "activations", 3: "activations", 5: "gradients"})


def test_peaks_and_who_made_them() -> None:
    result = replay(TRACE)
    assert (result.peak_allocated, result.allocated_at, result.allocated_phase) == (100 * MiB, 3, "forward")
    assert (result.peak_reserved, result.reserved_at, result.reserved_phase) == (150 * MiB, 6, "backward")
    assert (result.peak_requested, result.retries, result.oom) == (100 * MiB, 0, None)
    assert result.alive == {
        ("activations", "mm", "forward"): 60 * MiB,
        ("params", "empty", "init"): 30 * MiB,
        ("temporaries", "gelu", "forward"): 10 * MiB,
    }
    assert list(result.alive.values()) == [60 * MiB, 30 * MiB, 10 * MiB]
    assert result.categories == {"activations": 60 * MiB, "params": 30 * MiB, "temporaries": 10 * MiB}
    assert (result.reserved_then, result.fragmentation) == (100 * MiB, 0)


def test_peaks_of_a_phase_count_what_it_began_with() -> None:
    assert replay(TRACE).phases == {
        "init": PhasePeak(30 * MiB, 30 * MiB),
        "forward": PhasePeak(100 * MiB, 100 * MiB),
        "backward": PhasePeak(100 * MiB, 150 * MiB),  # after the forward's last free 90, and 100 with the gradient
        "step": PhasePeak(80 * MiB, 150 * MiB),
    }


def test_phases_that_come_again_are_one() -> None:
    events = [
        Event(1, 30 * MiB, "mm", "forward"),
        Event(1, 0, "mm", "backward"),
        Event(2, 20 * MiB, "mm", "forward"),
    ]
    assert replay(events).phases == {
        "forward": PhasePeak(30 * MiB, 30 * MiB),
        "backward": PhasePeak(30 * MiB, 30 * MiB),
    }


def test_fragmentation_is_what_is_reserved_and_not_in_use_at_the_peak() -> None:
    events = [
        Event(1, 30 * MiB, "mm", "forward"),
        Event(1, 0, "mm", "forward"),
        Event(2, 10 * MiB, "mm", "forward"),
        Event(3, 28 * MiB, "mm", "forward"),
    ]
    result = replay(events)
    assert (result.peak_allocated, result.reserved_then, result.fragmentation) == (38 * MiB, 58 * MiB, 20 * MiB)
    expandable = replay(events, AllocatorSettings(expandable_segments=True))
    assert (expandable.peak_allocated, expandable.peak_reserved) == (38 * MiB, 40 * MiB)


def test_out_of_memory_says_where_and_how_much() -> None:
    result = replay(TRACE, AllocatorSettings(capacity=95 * MiB))
    assert result.oom == Shortage(3, "gelu", "forward", 10 * MiB, 90 * MiB, 90 * MiB, 95 * MiB)
    assert str(result.oom) == (
        "out of memory in forward, gelu (event 3): 0.010 GB asked for, "
        "0.094 GB allocated and 0.094 GB reserved of 0.100 GB"
    )
    assert (result.peak_allocated, result.retries) == (90 * MiB, 1)
    assert result.timeline.events == [0, 1, 2, 3]


def test_a_released_cache_is_enough() -> None:
    result = replay(TRACE, AllocatorSettings(capacity=110 * MiB))  # the gradient needs the place of an activation
    assert (result.oom, result.retries, result.peak_reserved) == (None, 1, 100 * MiB)


def test_no_events() -> None:
    result = replay([])
    assert (result.peak_allocated, result.peak_reserved, result.allocated_at, result.allocated_phase) == (
        0,
        0,
        None,
        None,
    )
    assert (result.phases, result.alive, result.fragmentation, result.timeline.events) == ({}, {}, 0, [])


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Event(1, 8, "mm", "forward"), Event(1, 8, "mm", "forward")], r"event 1 \(mm\) allocates block 1"),
        ([Event(1, 0, "mm", "forward")], r"event 0 \(mm\) frees block 1"),
    ],
)
def test_impossible_events_are_refused(events: list[Event], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(events)


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


@pytest.mark.parametrize("expandable", [False, True])
def test_timeline_is_short_and_has_the_peaks(expandable: bool) -> None:
    trace = random_trace(20_000)
    result = replay(trace, AllocatorSettings(expandable_segments=expandable))
    timeline = result.timeline
    assert 1000 <= len(timeline.events) <= 2000
    assert timeline.events == sorted(set(timeline.events))
    assert timeline.events[-1] == len(trace.events) - 1
    totals = [sum(parts) for parts in zip(*timeline.allocated.values(), strict=True)]
    assert max(totals) == result.peak_allocated
    assert max(timeline.reserved) == result.peak_reserved
    assert all(total <= reserved for total, reserved in zip(totals, timeline.reserved, strict=True))
    peak = next(i for i, total in enumerate(totals) if total == result.peak_allocated)
    assert timeline.events[peak] == result.allocated_at
    at_peak = {category: parts[peak] for category, parts in timeline.allocated.items() if parts[peak]}
    assert at_peak == result.categories
    assert max(phase.allocated for phase in result.phases.values()) == result.peak_allocated
    assert max(phase.reserved for phase in result.phases.values()) == result.peak_reserved


def test_timeline_keeps_a_reserved_peak_beside_the_allocated_one() -> None:
    events = [
        Event(1, 60 * MiB, "a", "forward"),
        Event(1, 0, "a", "forward"),
        Event(2, 40 * MiB, "b", "forward", stream=1),  # 100 MiB reserved
        Event(2, 0, "b", "forward"),
        Event(3, 70 * MiB, "c", "forward"),  # both go back
    ]
    events += [Event(4, size, "d", "forward") for _ in range(3500) for size in (512, 0)]
    result = replay(events, AllocatorSettings(capacity=102 * MiB))
    assert (result.peak_reserved, result.reserved_at, result.peak_allocated) == (100 * MiB, 2, 70 * MiB + 512)
    assert len(result.timeline.events) <= 2000
    assert max(result.timeline.reserved) == 100 * MiB


def test_same_trace_same_replay() -> None:
    trace, settings = random_trace(3000), AllocatorSettings(capacity=10_000 * MiB)
    assert replay(trace, settings) == replay(trace, settings)
