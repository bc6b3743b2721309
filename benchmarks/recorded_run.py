"""``python benchmarks/recorded_run.py TRACE.json.gz fit RECIPE ...``: the trainer, with the allocator's history kept.

The history begins before the first allocation, and is written as JSON at the end, in torch's own words, with what
``benchmarks/recorded.py`` reads of it. Without a GPU there is none, and no file is written.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.cli import run

MOST_ENTRIES = 5_000_000
"""Far more than a few steps make: a history that lost its beginning cannot be replayed."""

ENTRY = ("action", "addr", "size", "stream")
SEGMENT = ("address", "total_size", "stream", "segment_type", "device")
BLOCK = ("size", "requested_size", "state")


def recorded(argv: list[str], target: Path) -> int:
    """Run the command line, write its history to ``target``, and return its exit code."""
    import torch

    if not torch.cuda.is_available():
        return run(argv)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=MOST_ENTRIES)
    code = run(argv)
    write_recording(torch.cuda.memory._snapshot(), target)
    return code


def write_recording(snapshot: Mapping[str, Any], target: Path) -> None:
    """Write what a replay needs of a snapshot: no stacks, and frees only when they are complete."""
    kept = {
        "allocator_settings": snapshot.get("allocator_settings", {}),
        "device_traces": [
            [_entry(e) for e in trace if e["action"] != "free_requested"]
            for trace in snapshot["device_traces"][:1]  # of the one GPU of a run
        ],
        "segments": [
            {key: segment[key] for key in SEGMENT if key in segment}
            | {"blocks": [{key: block[key] for key in BLOCK if key in block} for block in segment["blocks"]]}
            for segment in snapshot["segments"]
        ],
    }
    content = json.dumps(kept, separators=(",", ":"), default=str).encode()
    target.write_bytes(gzip.compress(content, mtime=0))  # without a date: the same history gives the same file


def read_recording(source: Path) -> dict[str, Any]:
    """What ``write_recording`` has written."""
    return json.loads(gzip.decompress(source.read_bytes()))


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: entry[key] for key in ENTRY if key in entry}
    pool = tuple(entry.get("pool_id", (0, 0)))
    return kept if pool == (0, 0) else {**kept, "pool_id": pool}


if __name__ == "__main__":
    sys.exit(recorded(sys.argv[2:], Path(sys.argv[1])))
