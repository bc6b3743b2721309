"""Snapshots of simulated memory in the format of ``torch.cuda.memory._snapshot``, for https://pytorch.org/memory_viz."""

from __future__ import annotations

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
            for address in segments.keys() - _first_blocks(allocator, blocks).keys():
                add("segment_free", address, segments.pop(address), event)
        elif event.bytes:
            block = blocks[event.id]
            if allocator.reserved > reserved and not settings.expandable_segments:
                segments[block.address] = allocator.reserved - reserved
                add("segment_alloc", block.address, segments[block.address], event)
            owners[block.address] = event.id
            add("alloc", block.address, block.requested, event)

    firsts = _first_blocks(allocator, blocks)
    labels = {address: frames.get(number, []) for address, number in owners.items()}
    found = [_segment(address, size, firsts[address], labels) for address, size in segments.items()]
    return {"segments": found, "device_traces": [history]}


def _first_blocks(allocator: CachingAllocator, used: Mapping[int, Block]) -> dict[int, Block]:
    """Return the first block of each segment by its address, which is that of the segment."""
    free = (block for pool in allocator.pools.values() for _, _, block in pool.free)
    return {block.address: block for block in (*used.values(), *free) if block.previous is None}


def _segment(address: int, size: int, first: Block, labels: Mapping[int, Any]) -> dict[str, Any]:
    block: Block | None = first
    blocks: list[dict[str, Any]] = []
    used = requested = 0
    while block is not None:
        state, asked = ("active_allocated", block.requested) if block.allocated else ("inactive", 0)
        used, requested = used + block.size * block.allocated, requested + asked
        shown = {"frames": labels.get(block.address, []), "requested_size": asked}
        blocks.append({"address": block.address, "size": block.size, "state": state, **shown})
        block = block.next
    totals = {"allocated_size": used, "active_size": used, "requested_size": requested}
    about = {"device": 0, "address": address, "total_size": size, "stream": first.pool.stream, "is_expandable": False}
    return {**about, **totals, "blocks": blocks}


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
