"""What updating offloaded weights beside the last backward saves or costs: clipping never, in some steps, always.

A CPU stands in for the GPU, so cores must be left to the host's thread: one thread computes, and another core updates.
The steps of both ways take turns on the same model; medians.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import Record, table
from torch import nn

from trainer.memory.optimizer_offload import HostGradientSync

CLIPPED: dict[str, Callable[[int], bool]] = {
    "never": lambda step: False,
    "in every fourth step": lambda step: step % 4 == 3,
    "always": lambda step: True,
}
WARM_UP = 2  # steps: the state, and the copies, are made


class Contender:
    """A network of linear layers whose weights are updated by the host, ahead or afterwards."""

    def __init__(self, layers: int, width: int, is_ahead: bool) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        masters = {p: p.detach().clone().requires_grad_() for p in self.module.parameters()}
        self.optimizer = torch.optim.AdamW(list(masters.values()), lr=1e-6, fused=True)
        self.sync = HostGradientSync(masters, torch.device("cpu"), self.optimizer, 1)
        self.sync.ahead.pays = is_ahead
        self.updated: list[float] = []

    def step(self, samples: torch.Tensor, largest: float) -> float:
        """Seconds of an optimizer step."""
        began = time.perf_counter()
        self.sync.ahead.undo()
        loss = self.module(samples).square().mean()
        self.sync.before_last_backward()
        loss.backward()
        self.sync.after_last_backward()
        self.updated.append(len(self.sync.ahead.before) / len(self.sync.masters))
        self.sync.clip(self.sync.norm(), largest)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    record, results, rows = Record("update_ahead", vars(args)), {}, []
    samples = torch.randn(args.samples, args.width)
    for name, is_clipped in CLIPPED.items():
        ways = {
            "afterwards": Contender(args.layers, args.width, False),
            "ahead": Contender(args.layers, args.width, True),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for step in range(args.steps + WARM_UP):
            for way, contender in ways.items():
                seconds[way].append(contender.step(samples, 1e-9 if is_clipped(step) else 1e9))
        for ours, theirs in zip(
            ways["ahead"].sync.masters.values(), ways["afterwards"].sync.masters.values(), strict=True
        ):
            assert torch.equal(ours, theirs)
        mean = {way: 1e3 * statistics.mean(found[WARM_UP:]) for way, found in seconds.items()}
        median = {way: 1e3 * statistics.median(found[WARM_UP:]) for way, found in seconds.items()}
        share = statistics.mean(ways["ahead"].updated[WARM_UP:])
        results[name] = {"median_ms": median, "mean_ms": mean, "updated_ahead": share}
        figures = [f"{median['afterwards']:.1f}", f"{median['ahead']:.1f}", f"{mean['ahead'] / mean['afterwards']:.2f}"]
        rows.append([name, *figures, f"{100 * share:.0f} %"])
        record.write(rows=results)
    record.write(complete=True, rows=results)
    print(table(["clipped", "afterwards, ms", "ahead, ms", "ahead / afterwards, means", "updated ahead"], rows))


if __name__ == "__main__":
    main()
