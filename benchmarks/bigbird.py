"""BigBird's attention on the CPU: ours, transformers' block_sparse, and full, in time and in memory.

One layer of BigBird-base (768 wide, 12 heads, blocks of 64, 3 random ones; dropout as it has it) under a classifier,
one text, forward and backward, on one thread; the contenders take turns, and the median counts. Full is padded, as it
is beside longer texts, or without padding, as ``BigBird`` trains it, but for the last layer, which computes the first
token only: here it computes all, as any other does. Memory is how much the resident set of a process of its own grows
at most over that of before, in its second step; predicted is what the planner says of that step, with nothing for the
libraries' own buffers. transformers' block_sparse cannot run under autocast.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import ctypes
import statistics
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from common import Record, resident, table
from transformers import BigBirdConfig, BigBirdForSequenceClassification

from trainer.fakegpu.gpus import host_as_device
from trainer.fakegpu.peaks import replay
from trainer.fakegpu.target import Target
from trainer.fakegpu.tracer import tracing
from trainer.models.block_sparse import replace_attention
from trainer.models.padding_free import pack, unpad

OURS, THEIRS = "ours, block-sparse", "transformers, block_sparse"
FULL, PACKED = "full, SDPA", "full, without padding"
NAMES = (OURS, THEIRS, FULL, PACKED)
SHORTEST = 768  # tokens that the block-sparse pattern needs, and a block
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def build(name: str) -> Any:
    """A contender, always with the same weights."""
    torch.manual_seed(0)
    sparse = {} if name == THEIRS else {"attention_type": "original_full"}
    module = BigBirdForSequenceClassification(BigBirdConfig(vocab_size=1000, num_hidden_layers=1, **sparse)).train()
    if name != THEIRS:
        replace_attention(module)
    if name == OURS:
        module.config.attention_type = "block_sparse"
    if name == PACKED:
        unpad(module)
        module.bert.encoder.layer[0].reads_first = False
    return module


def text(name: str, tokens: int) -> dict[str, Any]:
    """A micro-batch of one text, as a contender takes it."""
    ids = torch.randint(2, 1000, (1, tokens), generator=torch.Generator().manual_seed(0))
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return (name == PACKED and pack(batch, None)) or batch


def step(module: Any, batch: dict[str, Any], precision: str) -> float:
    """Seconds of forward and backward."""
    begin = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = module(**batch).logits.float().square().sum()
    loss.backward()
    return time.perf_counter() - begin


def peak(name: str, module: Any, tokens: int, precision: str) -> float:
    """MB by which a child's resident set grows at most in a step, the first of this size."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        libc = ctypes.CDLL(None)  # what is freed goes back to the system at once
        libc.mallopt(M_MMAP_THRESHOLD, 131072)
        libc.mallopt(M_TRIM_THRESHOLD, 131072)
        step(module, text(name, SHORTEST), precision)  # so that libraries are in memory, and have their buffers
        module.zero_grad()
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = resident("VmRSS")
        step(module, text(name, tokens), precision)
        os.write(write, str((resident("VmHWM") - before) / 1e6).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = float(pipe.read())
    os.waitpid(child, 0)
    return found


def predicted(name: str, tokens: int, precision: str) -> float | None:
    """MB that the planner says a step takes beside the weights; of transformers' own attention it says nothing."""
    if name == THEIRS:
        return None
    batch = text(name, tokens)
    with tracing(Target(host_as_device())) as tracer:
        module = build(name)
        step(module, batch, precision)
        weights = sum(t.numel() * t.element_size() for t in chain(module.parameters(), module.buffers()))
    return (replay(tracer.trace).peak_requested - weights) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    record = Record("bigbird", vars(args))
    modules, rows = {name: build(name) for name in NAMES}, []
    cases = [(n, t, p) for t in args.tokens for p in ("fp32", "bf16") for n in NAMES if (p, n) != ("bf16", THEIRS)]
    memory = {case: peak(case[0], modules[case[0]], *case[1:]) for case in cases}  # before this process grows itself
    seconds: dict[Any, list[float]] = {case: [] for case in cases}
    for _ in range(args.repeats):
        for case in cases:
            seconds[case].append(step(modules[case[0]], text(*case[:2]), case[2]))
    for case in cases:
        name, tokens, precision = case
        median, planned = statistics.median(seconds[case]), predicted(*case)
        rows.append({"tokens": tokens, "precision": precision, "attention": name, "seconds": round(median, 3)})
        rows[-1]["peak_rss_mb"] = round(memory[case], 1)
        rows[-1]["predicted_mb"] = None if planned is None else round(planned, 1)
    record.write(complete=True, rows=rows)
    cells = [["–" if value is None else str(value) for value in row.values()] for row in rows]
    print(table([*rows[0]], cells))


if __name__ == "__main__":
    main()
