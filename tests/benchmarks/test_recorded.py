"""Recordings of the allocator: made here by the plain one in torch's format, since there is no GPU."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from helpers.plain_allocator import PlainAllocator
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.recorded import Difference, compare, recorded_events, recorded_settings
from trainer.errors import RecipeError
from trainer.fakegpu.allocator import AllocatorSettings
from trainer.fakegpu.peaks import replay

MiB = 2**20


def recording(
    seed: int, *, expandable: bool = False, capacity: int | None = None, steps: int = 80, release: bool = False
) -> PlainAllocator:
    """A run with blocks of all sizes on two streams, whose segments lie anywhere."""
    chance = random.Random(seed)
    addresses = [2**51 * (i + 1) for i in range(400)]
    chance.shuffle(addresses)
    plain, live = PlainAllocator(expandable, capacity, addresses), []
    for _ in range(steps):
        if live and chance.random() < 0.4:
            plain.free(live.pop(chance.randrange(len(live))))
        elif release and chance.random() < 0.1:
            plain.release()
        else:
            size = int(2 ** chance.uniform(1, 26))
            address = plain.malloc(size, stream=chance.choice([0, 0, 94_650_000]))
            live += [] if address is None else [address]
    return plain


@pytest.mark.slow
@settings(max_examples=80)
@given(st.integers(0, 10**9), st.booleans(), st.booleans(), st.sampled_from([None, 150 * MiB]))
def test_no_difference_to_a_recording(seed: int, expandable: bool, release: bool, capacity: int | None) -> None:
    """Nor to one that ran out of memory."""
    plain = recording(seed, expandable=expandable, release=release, capacity=None if expandable else capacity)
    result = compare(json.loads(json.dumps(plain.snapshot())))
    assert (result.first_difference, result.first_misplaced) == (None, None)
    assert (result.allocated_error, result.reserved_error) == (0, 0)
    assert (result.peak_allocated, result.peak_reserved) == (plain.peak_allocated, plain.peak_reserved)
    assert result.allocations == sum(entry["action"] == "alloc" for entry in plain.entries)


def test_sizes_may_be_those_of_the_blocks() -> None:
    plain = PlainAllocator(expandable=False, capacity=None)
    kept = plain.malloc(3000)
    for _ in range(2):
        plain.free(plain.malloc(11 * MiB))
    plain.free(kept)
    asked = compare(plain.snapshot())
    for entry in plain.entries:
        entry["size"] = {3000: 3072, 11 * MiB: 12 * MiB}.get(entry["size"], entry["size"])
    assert compare(plain.snapshot()) == asked
    assert (asked.peak_allocated, asked.peak_reserved) == (12 * MiB + 3072, 14 * MiB)


def test_events_replay_to_the_same_peaks() -> None:
    plain = recording(5)
    events = recorded_events(plain.snapshot())
    result = replay(events)
    assert result.peak_allocated == plain.peak_allocated
    assert {event.stream for event in events} == {0, 94_650_000}
    assert sum(event.bytes == 0 for event in events) == sum(e["action"] == "free_completed" for e in plain.entries)


def test_operation_is_the_innermost_function() -> None:
    snapshot = recording(5).snapshot()
    first = next(entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc")
    first["frames"] = [{"name": name, "filename": "x.py", "line": 1} for name in ("linear", "main")]
    assert [event.op for event in recorded_events(snapshot)][:2] == ["linear", "alloc"]


def test_difference_is_found_and_named() -> None:
    plain = PlainAllocator(expandable=False, capacity=None)
    plain.malloc(30 * MiB)
    plain.malloc(5 * MiB)
    snapshot = plain.snapshot()
    allocation = next(entry for entry in plain.entries if entry["size"] == 20 * MiB)
    allocation["size"] = 24 * MiB  # another version of torch, say
    snapshot["segments"][1]["total_size"] = 24 * MiB
    snapshot["segments"][1]["blocks"][1]["size"] = 19 * MiB
    result = compare(snapshot)
    assert result.first_difference == Difference(entry=3, recorded=54 * MiB, simulated=50 * MiB)
    assert (result.reserved_error, result.allocated_error) == (-4 * MiB, 0)


def test_another_placement_is_found() -> None:
    plain = PlainAllocator(expandable=False, capacity=None)
    for address in [plain.malloc(size * MiB) for size in (20, 20)]:
        plain.free(address)
    second = plain.malloc(20 * MiB) + 20 * MiB
    snapshot = plain.snapshot()
    plain.entries[-2]["addr"] = second
    for segment, state in zip(snapshot["segments"], ("inactive", "active_allocated"), strict=True):
        segment["blocks"][0]["state"] = state
    result = compare(snapshot)
    assert result.first_misplaced == len(plain.entries) - 2
    assert result.first_difference is None


def test_settings_are_those_of_the_recording() -> None:
    assert recorded_settings(recording(1, expandable=True).snapshot()) == AllocatorSettings(expandable_segments=True)
    assert recorded_settings({}) == AllocatorSettings()


def change(snapshot: dict, what: str) -> dict:
    entries = snapshot["device_traces"][0]
    if what == "late":
        del entries[:10]
    elif what == "pool":
        entries[0]["pool_id"] = [0, 1]
    elif what == "completed":
        snapshot["device_traces"][0] = [entry for entry in entries if entry["action"] != "free_completed"]
    elif what == "nothing":
        snapshot["device_traces"] = [[]]
    elif what == "end":
        snapshot["segments"].append({**snapshot["segments"][-1], "address": 2**60})
    elif what == "block":
        snapshot["segments"][0]["blocks"][0]["size"] += 512
    elif what == "release":
        busy = next(entry for entry in entries if entry["action"] == "alloc")
        entries.insert(-1, {**busy, "action": "segment_free", "size": 2**30})
    return snapshot


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("late", "before the first tensor is on the GPU"),
        ("pool", "private memory pools"),
        ("completed", "no free_completed"),
        ("nothing", "no device_traces of GPU 0"),
        ("end", "bytes reserved"),
        ("block", "do not lead to"),
        ("release", "were not free"),
        ("settings", "give the settings it was made with"),
    ],
)
def test_incomplete_recordings_are_refused(what: str, message: str) -> None:
    settings = AllocatorSettings(expandable_segments=True) if what == "settings" else None
    with pytest.raises(RecipeError, match=message):
        compare(change(recording(2).snapshot(), what), settings)


TRACES = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "traces").glob("*.json.gz"))


@pytest.mark.skipif(not TRACES, reason="no recording from a GPU is kept: benchmarks/gpu.py planner makes some")
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_the_simulated_allocator_does_what_the_real_one_did(path: Path) -> None:
    """In histories from runs on a real GPU, which ``python benchmarks/gpu.py planner`` writes."""
    snapshot = json.loads(gzip.decompress(path.read_bytes()))
    found = compare(snapshot)
    assert found.allocations > 1000
    assert (found.allocated_error, found.reserved_error) == (0, 0)
    assert (found.first_difference, found.first_misplaced) == (None, None)
    assert replay(recorded_events(snapshot), recorded_settings(snapshot)).peak_allocated == found.peak_allocated
