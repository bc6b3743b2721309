"""Peaks by phase, the level over steps, and leaks: of models that really take memory."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from helpers.problems import make_fabric
from torch import Tensor, nn

from trainer.contract import Model
from trainer.engine.events import Counters
from trainer.engine.loop import evaluate
from trainer.engine.step import Stepper, StepResult
from trainer.engine.window import MicroBatch, Window
from trainer.memory.monitor import MAX_HISTORY, PHASES, LeakCheck, MemoryMonitor
from trainer.models.base import classification_loss
from trainer.report.progress import Progress
from trainer.run.listeners import ProgressListener, ThroughputMeter
from trainer.system.machine import HostMemory, process_peak
from trainer.system.text import GB, MB
from trainer.values import Loss

BALLAST = 200 * 1000 * 1000
MOST = 0.8 * BALLAST / GB
"""Of the ballast, what must be seen: other memory may be given back at the same moment."""

pytestmark = pytest.mark.skipif(HostMemory().peaks != "exact", reason="peaks need /proc")


def take_memory(*_: Any) -> None:
    """Have ``BALLAST`` bytes resident, and give them back."""
    torch.ones(BALLAST, dtype=torch.uint8)


@dataclasses.dataclass
class Heavy(Model):
    """A linear classifier that takes much memory in one phase, and keeps ``kept`` bytes of every micro-step."""

    phase: str = "none"
    kept: int = 0
    loss_names: ClassVar[tuple[str, ...]] = ("loss",)

    def __post_init__(self) -> None:
        self.list: list[Tensor] = []

    def build(self) -> nn.Module:
        if self.phase == "init":
            take_memory()
        return nn.Linear(8, 3)

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        for name in self.loss_names:
            logits = module(batch["x"])
            self.list.append(torch.ones(self.kept, dtype=torch.uint8))
            if self.phase == ("forward" if torch.is_grad_enabled() else "evaluation"):
                take_memory()
            if self.phase == "backward" and logits.requires_grad:
                logits.register_hook(take_memory)
            yield dataclasses.replace(classification_loss(logits, batch["labels"]), name=name)


class Twice(Heavy):
    """A classifier that yields two losses."""

    loss_names = ("one", "other")


def window(micro_steps: int = 2) -> Window:
    batch = {"x": torch.ones(16, 8), "labels": torch.zeros(16, dtype=torch.long)}
    micro = [MicroBatch(batch, seed=0, is_last=n == micro_steps - 1, is_empty=False) for n in range(micro_steps)]
    return Window(micro, {"loss": 16.0 * micro_steps}, 16 * micro_steps)


def stepper_of(model: Model, monitor: MemoryMonitor | None, module: nn.Module | None = None) -> Stepper:
    fabric, module = make_fabric("32-true", 1), module or model.build()
    if monitor is not None:
        monitor.enter(None)
    updates = torch.optim.SGD(module.parameters(), lr=0.1)
    if model.phase == "step":
        updates.register_step_pre_hook(take_memory)
    return Stepper(fabric, model, fabric.setup_module(module), updates, phases=monitor)


def always() -> MemoryMonitor:
    """A monitor that looks at every step."""
    return MemoryMonitor(torch.device("cpu"), share_of_time=1e9)


@pytest.mark.first(1)
@pytest.mark.parametrize("heavy", PHASES)
def test_a_peak_is_credited_to_the_phase_that_it_happened_in(heavy):
    monitor = always()
    stepper = stepper_of(Heavy(heavy), monitor)
    stepper.step(window())
    with monitor.evaluating():
        nothing = SimpleNamespace(reset=lambda: None, update=lambda loss: None, compute=lambda: None)
        evaluate(stepper, window().micro_batches, nothing)
    report = monitor.report(all_ranks=False)
    found = {phase: figures["host_gb"] for phase, figures in report["phases"].items()}
    others = max(value for phase, value in found.items() if phase != heavy)
    assert found[heavy] > others + MOST
    assert report["host_peak_gb"] >= found[heavy]
    assert report["host_idle_gb"] <= min(found.values())
    assert (report["allocated_gb"], report["phases"]["init"]["reserved_gb"]) == (None, None)
    assert (report["host_phase_peaks"], report["ranks_measured"]) == ("exact", 1)


def test_a_peak_between_looks_counts_for_the_run_and_for_no_phase():
    monitor = MemoryMonitor(torch.device("cpu"), share_of_time=1e-9)  # after the first steps it never looks again
    model = Heavy()
    stepper = stepper_of(model, monitor)
    for _ in range(4):
        stepper.step(window())
    before = monitor.report(all_ranks=False)
    model.phase = "forward"
    stepper.step(window())
    after = monitor.report(all_ranks=False)
    assert after["phases"] == before["phases"]
    assert after["phases"]["evaluation"]["host_gb"] is None
    assert after["host_peak_gb"] == monitor.run_peaks().host / GB > after["phases"]["forward"]["host_gb"] + MOST
    assert len(monitor.history) == 3


def test_every_forward_and_backward_is_announced_with_its_samples():
    monitor, heard = always(), []
    stepper = stepper_of(Twice(), monitor)
    steps = window()
    steps.weights = dict.fromkeys(Twice.loss_names, 32.0)
    for number, micro in enumerate(steps.micro_batches):
        micro.indices = [number]
    monitor.on_move = lambda: heard.append((monitor.activity, *monitor.samples))
    stepper.step(steps)
    micro_steps = [(phase, number) for number in range(2) for phase in ("forward", "backward") * 2]
    assert heard == [(None,), ("forward", 0), *micro_steps, ("step",), (None,)]  # the first step compares samples
    heard.clear()
    stepper.accumulate(steps)  # as a rehearsal does
    assert heard == micro_steps


def test_the_phase_that_failed_is_known_and_the_next_step_begins_anew():
    monitor = always()
    stepper = stepper_of(Heavy(), monitor)
    stepper.step(window())
    broken = window()
    broken.micro_batches[1].batch = {"x": torch.ones(4, 7), "labels": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(RuntimeError, match="shapes"):
        stepper.step(broken)
    assert (monitor.phase, monitor.batch["x"].shape) == ("forward", (4, 7))
    stepper.step(window())
    assert (monitor.phase, monitor.batch, monitor.step) == (None, None, 2)


# ------------------------------------------------------------------------------------------------- host memory


def test_without_permission_phases_are_sampled_and_it_is_said(tmp_path):
    host = HostMemory(clear_refs=tmp_path / "no" / "such" / "file")
    monitor = MemoryMonitor(torch.device("cpu"), share_of_time=1e9, host=host)
    stepper = stepper_of(Heavy("forward"), monitor)
    stepper.step(window())
    report = monitor.report(all_ranks=False)
    assert report["host_phase_peaks"] == "sampled"
    forward = report["phases"]["forward"]["host_gb"]
    assert 0 < forward < report["host_peak_gb"] - MOST  # what a sample misses, the peak of the process has


def test_a_kernel_that_keeps_no_record_of_the_peak(tmp_path):
    """gVisor's status has these lines only."""
    status = tmp_path / "status"
    status.write_text(
        "Name:\tpython\nState:\tR (running)\nTgid:\t7\nPid:\t7\nPPid:\t1\nTracerPid:\t0\nFDSize:\t64\n"
        "VmSize:\t  900000 kB\nVmRSS:\t  64000000 kB\nThreads:\t3\nCapEff:\t00000000a80405fb\nSeccomp:\t0\n"
    )
    host = HostMemory(status=status, clear_refs=tmp_path / "clear_refs")
    assert host.peaks == "sampled"
    host.reset_peak()
    reading = host.read()
    assert reading.resident == reading.anonymous == reading.peak == reading.process_peak == 64_000_000 * 1024
    status.write_text(status.read_text().replace("64000000", "7"))
    assert (host.read().peak, host.read().process_peak) == (7 * 1024, process_peak(status))
    for without in (status, tmp_path / "nothing"):  # the peak of the process is all there is
        status.write_text("Name:\tpython\n")
        host = HostMemory(status=without)
        assert host.peaks == "whole run"
        assert host.read().peak == host.read().process_peak == host.read().resident > 0


def test_the_peak_of_a_process_does_not_begin_with_that_of_its_parent():
    parent = process_peak()
    code = "from trainer.system.machine import process_peak; print(process_peak())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 * MB < 200 * MB < parent  # the parent has torch, the child has not


# ------------------------------------------------------------------------------------------------------- leaks


@pytest.mark.parametrize("kept", [8 * 10**6, 0])
def test_what_a_step_keeps_is_found_and_told_once(kept):
    ctypes.CDLL(None).malloc_trim(0)  # else what leaks takes the place of what earlier tests have freed
    monitor = always()
    stepper = stepper_of(Heavy(kept=kept), monitor)
    for _ in range(20):
        stepper.step(window())
    assert len(monitor.warnings) == bool(kept)
    for warning in monitor.warnings:
        assert "a list of losses" in warning
        each = warning.removeprefix("host memory grows by ").split(" MB")[0]
        assert 10 < float(each) < 40  # two micro-steps of 8 MB


MEGABYTES = [100, 300, 400]


@pytest.mark.parametrize(
    ("levels", "step_of_warning"),
    [
        ([*MEGABYTES, *range(402, 500, 2)], 13),  # 2 MB a step: 20 MB more than after the third
        ([*MEGABYTES, *[400] * 30, *range(402, 500, 2)], 42),  # begins later; one look without growth is let pass
        ([*MEGABYTES, *[400 + 50 * (n % 2) for n in range(60)]], None),  # up and down
        ([*MEGABYTES, *[400 + 20 * (n // 5) for n in range(60)]], None),  # now and then
        ([*MEGABYTES, *[400 + 0.1 * n for n in range(60)]], None),  # too little to mind
    ],
)
def test_growth_must_be_steady_and_large(levels, step_of_warning):
    check = LeakCheck("allocated", least_bytes=10 * MB)
    said = {step: check.update(step, int(level * MB)) for step, level in enumerate(levels, start=1)}
    told = {step: text for step, text in said.items() if text}
    assert [*told] == ([step_of_warning] if step_of_warning else [])
    if step_of_warning == 13:
        assert told[13].startswith(
            "allocated memory grows by 2.00 MB per step: from 400 MB after step 3 to 420 MB after step 13"
        )


def test_a_warning_is_shown_even_without_progress():
    stream = io.StringIO()
    monitor = always()
    listener = ProgressListener(Progress(False, rank=1, stream=stream), ThroughputMeter(), monitor, "val")
    monitor.warnings.append("host memory grows")
    for step in (1, 2):
        listener.on_step(Counters(step=step), StepResult(0.5, {"loss": 0.5}, 1.0, 0.1, 64, False))
    assert stream.getvalue() == "[rank 1] trainer: warning: host memory grows\n"


def test_a_long_history_is_thinned_evenly():
    monitor = always()
    for step in range(1, 3 * MAX_HISTORY):
        monitor.step = step
        monitor._append_history(step / 1000)
    steps = [step for step, _ in monitor.history]
    assert MAX_HISTORY // 2 <= len(steps) <= MAX_HISTORY
    assert steps[0] == 1
    assert {b - a for a, b in zip(steps, steps[1:], strict=False)} == {4}
