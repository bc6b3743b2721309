"""BigBird's attention on the CPU: ours, transformers' block_sparse, and full SDPA, in time and in memory.

One layer of BigBird-base (768 wide, 12 heads, blocks of 64, 3 random ones) under a classifier, one text, forward and
backward, on one thread; the three take turns, and the median counts. Memory is how much the largest resident set of a
process of its own grows over that of before. transformers' block_sparse cannot run under autocast.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import copy
import resource
import statistics
import time
from typing import Any

import torch
from common import Record, table
from transformers import BigBirdConfig, BigBirdForSequenceClassification

from trainer.models.block_sparse import use_own_attention

OURS, THEIRS, FULL = "ours, block-sparse", "transformers, block_sparse", "full, SDPA"


def contenders() -> dict[str, Any]:
    """The three, with the same weights."""
    config = BigBirdConfig(vocab_size=1000, num_hidden_layers=1, attention_type="original_full")
    full = BigBirdForSequenceClassification(config)
    theirs = BigBirdForSequenceClassification(BigBirdConfig(vocab_size=1000, num_hidden_layers=1))
    theirs.load_state_dict(full.state_dict())
    use_own_attention(full)
    ours = copy.deepcopy(full)
    ours.config.attention_type = "block_sparse"
    return {OURS: ours.train(), THEIRS: theirs.train(), FULL: full.train()}


def step(module: Any, tokens: int, precision: str) -> float:
    """Seconds of forward and backward."""
    ids = torch.randint(2, 1000, (1, tokens), generator=torch.Generator().manual_seed(0))
    begin = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = module(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().square().sum()
    loss.backward()
    return time.perf_counter() - begin


def peak(module: Any, tokens: int, precision: str) -> float:
    """MB by which a child's largest resident set grows in one step."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step(module, tokens, precision)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(write, str(grown * 1024 / 1e6).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = float(pipe.read())
    os.waitpid(child, 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    record = Record("bigbird", vars(args))
    modules, rows = contenders(), []
    cases = [(t, p, n) for t in args.tokens for p in ("fp32", "bf16") for n in modules if (p, n) != ("bf16", THEIRS)]
    memory = {case: peak(modules[case[2]], *case[:2]) for case in cases}  # before this process grows itself
    seconds: dict[Any, list[float]] = {case: [] for case in cases}
    for _ in range(args.repeats):
        for case in cases:
            seconds[case].append(step(modules[case[2]], *case[:2]))
    for tokens, precision, name in cases:
        case = (tokens, precision, name)
        median = statistics.median(seconds[case])
        rows.append({"tokens": tokens, "precision": precision, "attention": name, "seconds": round(median, 3)})
        rows[-1]["peak_rss_mb"] = round(memory[case], 1)
    record.write(complete=True, rows=rows)
    print(table([*rows[0]], [[str(value) for value in row.values()] for row in rows]))


if __name__ == "__main__":
    main()
