"""Traces of several micro-batches as the columns that the page "Will it fit?" replays (docs/planner/fit.md)."""

from __future__ import annotations

from typing import Any

from trainer.fakegpu.events import EMPTY_CACHE, Trace


def event_columns(traces: dict[int, Trace]) -> dict[str, Any] | None:
    """Return ``traces`` by micro-batch in JSON types; ``None`` if more than sizes differs."""
    runs, blocks, operations, code, live = [*traces.values()], {}, {}, [], []  # type: ignore[var-annotated]
    alike = [([(e[0], *e[2:], e.bytes > 0) for e in run.events], [(*w[:4], *w[6:]) for w in run.work]) for run in runs]
    if any(one != alike[0] for one in alike) or any(run.categories != runs[0].categories for run in runs):
        return None
    for event, *more in zip(*(run.events for run in runs), strict=True):
        if event.bytes:  # a new block: 1 + the number of its kind; a free: minus its place among the newest
            live.insert(0, event.id)
            kind = event.op, event.phase, event.stream, runs[0].categories.get(event.id, "temporaries")
            code.append(1 + blocks.setdefault((*kind, event.bytes, *(e.bytes for e in more)), len(blocks)))
        else:
            code.append(0 if event.id == EMPTY_CACHE else -1 - live.index(event.id))
            live[: -code[-1]] = [one for one in live[: -code[-1]] if one != event.id]
    work = []
    for own in zip(*(run.work for run in runs), strict=True):
        first, sizes = own[0], [(one.flops, one.bytes) for one in own]
        row = (first.op, first.kind, first.phase, first.stream, first.dtype, *(f for f, _ in sizes), *(b for _, b in sizes))
        work.append(operations.setdefault(row, len(operations)))
    columns = {"blocks": [*blocks], "code": code, "operations": [*operations], "work": work}
    return {"sizes": [*traces], **columns, "marks": runs[0].marks, "micro_steps": runs[0].micro_steps}
