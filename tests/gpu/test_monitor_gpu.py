"""The monitor on a GPU: exact peaks of the allocator, leaks of single tensors, snapshots, out of memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn

from trainer import Memory, Recipe, Run
from trainer.api import fit
from trainer.contract import Model
from trainer.data import Digits
from trainer.engine.step import Stepper
from trainer.engine.window import MicroBatch, Window
from trainer.memory.monitor import MemoryMonitor
from trainer.memory.oom import OutOfMemoryError
from trainer.models import MLP
from trainer.models.base import classification_loss
from trainer.values import Loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BALLAST = 256 * 2**20


@dataclasses.dataclass
class Heavy(Model):
    """A linear classifier that takes ``BALLAST`` bytes in forward, and keeps ``kept`` bytes of each."""

    kept: int = 0

    def __post_init__(self) -> None:
        self.list: list[torch.Tensor] = []

    def build(self) -> nn.Module:
        return nn.Linear(8, 3)

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        logits = module(batch["x"])
        torch.empty(BALLAST, dtype=torch.uint8, device=logits.device)
        if self.kept:
            self.list.append(torch.empty(self.kept, dtype=torch.uint8, device=logits.device))
        yield classification_loss(logits, batch["labels"])


@dataclasses.dataclass
class Hungry(MLP):
    """Wants more than any device has, in the second step."""

    def __post_init__(self) -> None:
        self.seen = 0

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        self.seen += module.training  # not what the first step compares
        for loss in super().losses(module, batch):
            if self.seen > 4:
                torch.empty(1 << 50, dtype=torch.uint8, device=loss.total.device)
            yield loss


def steps(model: Model, count: int) -> MemoryMonitor:
    fabric = Fabric(accelerator="cuda", devices=1)
    fabric.launch()
    monitor = MemoryMonitor(fabric.device, share_of_time=1e9)  # look at every step
    with fabric.init_module():
        module = model.build()
    monitor.enter(None)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    stepper = Stepper(fabric, model, fabric.setup_module(module), optimizer, phases=monitor)
    batch = {"x": torch.ones(16, 8), "labels": torch.zeros(16, dtype=torch.long)}
    for _ in range(count):
        micro = [MicroBatch(batch, seed=0, is_last=last, is_empty=False) for last in (False, True)]
        stepper.step(Window(micro, {"loss": 32.0}, 32))
    return monitor


def recipe(run_dir: Any, **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": MLP([32]),
        "data": Digits(val_fraction=0.1),
        "batch_size": 64,
        "max_steps": 6,
        "memory": Memory(micro_batch_size=16),
        "run": Run(dir=str(run_dir), progress=False, accelerator="cuda", devices=1),
    }
    return Recipe(**(values | changes))


def test_the_allocator_s_peaks_are_credited_to_phases():
    monitor = steps(Heavy(), 3)
    report = monitor.report(all_ranks=False)
    phases = report["phases"]
    for kind in ("allocated_gb", "reserved_gb"):
        assert phases["forward"][kind] >= BALLAST / 1e9
        assert report[kind] == max(figures[kind] for figures in phases.values() if figures[kind] is not None)
    for phase in ("init", "step"):
        assert phases[phase]["allocated_gb"] < phases["forward"]["allocated_gb"] - 0.9 * BALLAST / 1e9
    assert phases["evaluation"]["allocated_gb"] is None
    assert monitor.run_peaks().describe().endswith("GB reserved")
    assert len({level for _, level in monitor.history}) == 1  # the allocator counts exactly
    assert monitor.warnings == []


def test_a_leak_of_two_megabytes_a_step_is_found():
    monitor = steps(Heavy(kept=2**20), 20)
    (warning,) = [text for text in monitor.warnings if text.startswith("allocated")]
    assert "allocated memory grows by 2.10 MB per step" in warning


def test_a_run_reports_phases_and_writes_a_snapshot(tmp_path):
    run = Run(dir=str(tmp_path / "r"), progress=False, accelerator="cuda", devices=1, snapshot=True)
    summary = fit(recipe(tmp_path / "r", run=run))
    assert all(figures["allocated_gb"] > 0 for figures in summary.memory["phases"].values())
    assert summary.memory["reserved_gb"] >= summary.memory["allocated_gb"]
    names = {path.name for path in (tmp_path / "r").iterdir()}
    assert {"memory.png", "memory_snapshot.pickle"} <= names
    assert (tmp_path / "r" / "memory_snapshot.pickle").stat().st_size > 1000  # not opened: a pickle is code


def test_out_of_memory_is_explained_and_leaves_a_snapshot(tmp_path):
    run = Run(dir=str(tmp_path / "r"), progress=False, accelerator="cuda", devices=1, snapshot=True)
    # By then the step has been tried again in micro-batches of 8, 4, 2 and 1.
    with pytest.raises(
        OutOfMemoryError, match=r"out of memory in forward on rank 0 \(.*try next: --memory\.precision bf16-mixed"
    ):
        fit(recipe(tmp_path / "r", model=Hungry([32]), run=run))
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "failed"
    assert (tmp_path / "r" / "memory_snapshot.pickle").exists()
