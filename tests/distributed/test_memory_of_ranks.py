"""Memory over ranks: the largest figure counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.memory.monitor import MemoryMonitor
from trainer.system.machine import HostMemory

BALLAST = 200 * 1000 * 1000
"""Bytes that one rank has more than the other."""


def measured(rank_with_peak: int) -> dict[str, Any]:
    monitor = MemoryMonitor(torch.device("cpu"))
    resident = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    torch.distributed.all_gather(resident, torch.tensor([HostMemory().read().resident]))
    monitor.enter("forward")
    if torch.distributed.get_rank() == rank_with_peak:  # whatever tests before have left with the other one
        torch.ones(BALLAST + max(0, int(resident[1 - rank_with_peak] - resident[rank_with_peak])), dtype=torch.uint8)
    monitor.enter(None)
    return {"alone": monitor.report(all_ranks=False), "together": monitor.report(all_ranks=True)}


@pytest.mark.skipif(HostMemory().peaks != "exact", reason="peaks need /proc")
@pytest.mark.parametrize("rank_with_peak", [0, 1])
def test_the_largest_figure_over_ranks_counts(ranks, rank_with_peak):
    results = ranks(2).run(measured, rank_with_peak)
    forward = [result["alone"]["phases"]["forward"]["host_gb"] for result in results]
    assert forward[rank_with_peak] > forward[1 - rank_with_peak] + 0.1
    for result in results:
        together = result["together"]
        assert together["phases"]["forward"]["host_gb"] == forward[rank_with_peak]
        assert together["phases"]["backward"]["host_gb"] is None
        assert together["allocated_gb"] is None
        assert (together["ranks_measured"], result["alone"]["ranks_measured"]) == (2, 1)
    assert results[0]["together"] == results[1]["together"]
