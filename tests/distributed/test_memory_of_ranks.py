"""Memory over ranks: the largest figure counts, and a rank that fails alone waits for nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from trainer.memory.monitor import Monitor
from trainer.system.machine import HostMemory

BALLAST = 200 * 1000 * 1000
"""Bytes that one rank has more than the other."""

RECIPE = """
import os
from dataclasses import dataclass

import torch

from trainer import Memory, Recipe, main
from trainer.data import Digits
from trainer.models import MLP


@dataclass
class Hungry(MLP):
    def losses(self, module, batch):
        for loss in super().losses(module, batch):
            if os.environ["LOCAL_RANK"] == "1":
                torch.empty(1 << 60, dtype=torch.uint8)
            yield loss


recipe = Recipe(model=Hungry([8]), data=Digits(), batch_size=64, max_steps=6, memory=Memory(micro_batch_size=16))

if __name__ == "__main__":
    main(recipe)
"""


def measured(rank_with_peak: int) -> dict[str, Any]:
    monitor = Monitor(torch.device("cpu"))
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


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_alone_ends_the_run_and_says_why(tmp_path):
    (tmp_path / "own.py").write_text(RECIPE)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LT_", "TORCHELASTIC"))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "own.py"), "--run.dir", str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 1
    assert "[rank 1] trainer: error: out of memory in forward on rank 1" in done.stderr
    assert "--memory.strategy fsdp" in done.stderr
    summary = tmp_path / "run" / "summary.json"
    if summary.exists():  # torchrun may end the first rank before it has written anything
        assert json.loads(summary.read_text())["status"] == "failed"
