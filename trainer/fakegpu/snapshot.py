"""Snapshots of simulated memory in the format of ``torch.cuda.memory._snapshot``, for https://pytorch.org/memory_viz."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.fakegpu.allocator import AllocatorSettings, Block, CachingAllocator
from trainer.fakegpu.events import EMPTY_CACHE, Event, Trace
from trainer.fakegpu.peaks import apply_event


def snapshot(events: Sequence[Event], settings: AllocatorSettings, frames: Mapping[int, Any]) -> dict[str, Any]:
    """Return the history of ``events`` and the memory after the last one.

    ``frames`` are shown for the blocks with these numbers. Expandable segments are left out, but not their blocks.
    """
    allocator, blocks = CachingAllocator(settings), dict[int, Block]()
    owners, segments = dict[int, int](), dict[int, int]()  # numbers of used blocks, sizes of segments, by address
    history: list[dict[str, Any]] = []

    def add(action: str, address: int, size: int, event: Event) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": event.stream, "time_us": len(history)}
        history.append(entry | {"frames": frames.get(event.id, [])})

    for event in events:
        reserved, freed = allocator.reserved, blocks.get(event.id)
        if event.id != EMPTY_CACHE and freed is not None:
            del owners[freed.address]
            add("free_requested", freed.address, freed.requested, event)
            add("free_completed", freed.address, freed.requested, event)
        apply_event(allocator, blocks, event)
        if event.id == EMPTY_CACHE:
            kept = {_start(segments, block.address) for block in _blocks(allocator, blocks)}
            for address in segments.keys() - kept:
                add("segment_free", address, segments.pop(address), event)
        elif event.bytes:
            block = blocks[event.id]
            if allocator.reserved > reserved and not settings.expandable_segments:
                segments[block.address] = allocator.reserved - reserved
                add("segment_alloc", block.address, segments[block.address], event)
            owners[block.address] = event.id
            add("alloc", block.address, block.requested, event)

    found: dict[int, list[dict[str, Any]]] = {address: [] for address in segments}
    streams = dict.fromkeys(segments, 0)
    for block in sorted(_blocks(allocator, blocks) if segments else (), key=lambda block: block.address):
        state = "active_allocated" if block.allocated else "inactive"
        requested = block.requested if block.allocated else 0
        shown = {"frames": frames.get(owners.get(block.address, 0), []), "requested_size": requested}
        start = _start(segments, block.address)
        found[start].append({"address": block.address, "size": block.size, "state": state, **shown})
        streams[start] = block.pool.stream
    return {
        "segments": [_segment(address, segments[address], streams[address], found[address]) for address in segments],
        "device_traces": [history],
    }


def _blocks(allocator: CachingAllocator, used: Mapping[int, Block]) -> list[Block]:
    return [*used.values(), *(block for pool in allocator.pools.values() for _, _, block in pool.free)]


def _start(segments: Mapping[int, int], address: int) -> int:
    """Return the address of the segment with ``address``; segments are in the order of their addresses."""
    starts = list(segments)
    return starts[bisect_right(starts, address) - 1]


def _segment(address: int, size: int, stream: int, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    used = [block for block in blocks if block["state"] == "active_allocated"]
    sizes = dict.fromkeys(("allocated_size", "active_size"), sum(block["size"] for block in used))
    about = {"device": 0, "address": address, "total_size": size, "stream": stream, "is_expandable": False}
    return {**about, **sizes, "requested_size": sum(block["requested_size"] for block in used), "blocks": blocks}


def event_columns(traces: Mapping[int, Trace]) -> dict[str, Any]:
    """Return ``traces`` by micro-batch, which differ only in sizes, as JSON for the page "Will it fit?"."""
    (run, *_), runs = traces.values(), traces.values()
    blocks, operations, code, live = dict[Any, int](), dict[Any, int](), list[int](), list[int]()
    for event, *more in zip(*(one.events for one in runs), strict=True):
        if event.bytes:  # 1 + the number of the block's kind; for a free, minus 1 and its place among the newest
            kind = (*event[2:], run.categories.get(event.id, "temporaries"), event.bytes, *(one.bytes for one in more))
            code.append(1 + blocks.setdefault(kind, len(blocks)))
            live.insert(0, event.id)
        else:
            code.append(0 if event.id == EMPTY_CACHE else -1 - live.index(event.id))
            live[-1 - code[-1] : -code[-1]] = []
    works = zip(*(one.work for one in runs), strict=True)
    rows = ((*w[0][:4], w[0].dtype, *(one.flops for one in w), *(one.bytes for one in w)) for w in works)
    found = {"sizes": [*traces], "work": [operations.setdefault(row, len(operations)) for row in rows], "code": code}
    found |= {"blocks": [*blocks], "operations": [*operations]}
    return {**found, "marks": run.marks, "micro_steps": run.micro_steps}
