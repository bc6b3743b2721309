"""Ranks that share every block, each on a GPU of its own: the loss curve of one, in less memory."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

STEPS = 4
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


def train(run_dir: Path, devices: int, **memory: object) -> tuple[list[list[float]], float]:
    """Losses and gradient norms of the first steps without dropout, and the first rank's peak in GB."""
    shape = {"width": 512, "heads": 8, "mlp_width": 2048, "layers": 4, "dropout": 0.0}
    run = {"dir": run_dir, "accelerator": "cuda", "devices": devices, "progress": False, "evaluate": False}
    flags = {f"--model.{key}": value for key, value in shape.items()} | {"--max_steps": STEPS}
    flags |= {f"--run.{key}": value for key, value in run.items()}
    flags |= {f"--memory.{key}": value for key, value in ({"micro_batch_size": 16} | memory).items()}
    words = [str(word) for flag in flags.items() for word in flag]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "fit", "vit_digits", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with open(run_dir / "metrics.csv", newline="") as file:
        rows = [[float(row[key]) for key in ("loss", "grad_norm")] for row in csv.DictReader(file) if row["loss"]]
    summary = json.loads((run_dir / "summary.json").read_text())
    return rows, summary["memory"]["allocated_gb"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[float]], float]:
    return train(tmp_path_factory.mktemp("one") / "run", 1)


@pytest.mark.parametrize(
    "memory",
    [
        {},
        {"sequence_parallel": True},
        {"sequence_parallel": True, "activation_checkpointing": "full"},
        {"sequence_parallel": True, "strategy": "fsdp"},
    ],
    ids=lambda memory: "-".join(memory) or "split",
)
def test_two_gpus_that_share_blocks_have_the_losses_of_one(memory, one, tmp_path):
    rows, peak = train(tmp_path / "run", 2, tensor_parallel=2, **memory)
    assert len(rows) == STEPS
    for ours, theirs in zip(rows, one[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert peak < 0.75 * one[1]


def test_sharing_tokens_needs_less_memory_on_gpus(tmp_path):
    split = train(tmp_path / "split", 2, tensor_parallel=2)[1]
    shared = train(tmp_path / "shared", 2, tensor_parallel=2, sequence_parallel=True)[1]
    assert shared < split
