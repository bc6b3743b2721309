"""What listens to training: the progress display and the loggers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers import Logger

from trainer.engine.events import Counters, Listener
from trainer.engine.quarantine import BadSampleAt, Quarantine
from trainer.engine.step import StepResult
from trainer.memory.monitor import Monitor
from trainer.report.progress import Progress, warn
from trainer.system.files import write_atomic
from trainer.system.redact import redact_value


class Stopwatch(Listener):
    """Seconds of training and samples a second, without the time of evaluations."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.samples = 0
        self._since = 0.0

    def on_fit_start(self, counters: Counters, total_steps: int) -> None:
        self._since = time.perf_counter()

    def on_step(self, counters: Counters, result: StepResult) -> None:
        now = time.perf_counter()
        self.seconds += now - self._since
        self.samples += result.samples
        self._since = now

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        self._since = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "samples": self.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seconds, self.samples = state["seconds"], state["samples"]

    @property
    def samples_per_second(self) -> float:
        """Training throughput over all ranks so far."""
        return self.samples / self.seconds if self.seconds else 0.0


class ProgressListener(Listener):
    """Shows steps and evaluations to a person."""

    def __init__(self, progress: Progress, stopwatch: Stopwatch, monitor: Monitor, split: str) -> None:
        self.progress, self.stopwatch, self.monitor, self.split = progress, stopwatch, monitor, split

    def on_fit_start(self, counters: Counters, total_steps: int) -> None:
        self.progress.start(total_steps, first_step=counters.step)

    def on_step(self, counters: Counters, result: StepResult) -> None:
        self.progress.step(
            counters.step,
            loss=result.loss,
            lr=result.lr,
            samples_per_second=self.stopwatch.samples_per_second,
            memory=self.monitor.use().describe(),
            epoch=counters.epoch,
            skipped=counters.skipped_steps,
        )
        while self.monitor.warnings:
            self.progress.warning(self.monitor.warnings.pop(0))

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        self.progress.evaluation(counters.step, self.split, result.figures())

    def on_fit_end(self, counters: Counters) -> None:
        self.progress.close()


class LoggingListener(Listener):
    """Writes steps and evaluations to the loggers."""

    def __init__(self, loggers: list[Logger], stopwatch: Stopwatch, split: str) -> None:
        self.loggers, self.stopwatch, self.split = loggers, stopwatch, split

    def on_step(self, counters: Counters, result: StepResult) -> None:
        figures = {
            "epoch": counters.epoch,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "samples_per_second": round(self.stopwatch.samples_per_second, 2),
        }
        if len(result.losses) > 1:
            figures |= {f"loss_{name}": value for name, value in result.losses.items()}
        self.log(figures, counters.step)

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        figures = {f"{self.split}_{name}": value for name, value in result.figures().items()}
        self.log({"epoch": counters.epoch, **figures}, counters.step)

    def on_fit_end(self, counters: Counters) -> None:
        for logger in self.loggers:
            logger.save()

    def log(self, figures: dict[str, Any], step: int) -> None:
        """Write ``figures`` to every logger."""
        for logger in self.loggers:
            logger.log_metrics(figures, step)


def report_bad_samples(quarantine: Quarantine, new: list[BadSampleAt], run_dir: str | None) -> None:
    """Warn of each ``new`` finding, and write all to ``quarantine.json`` in ``run_dir``, if there is one: of each its
    split, its index there, its file or row, and why it could not be loaded."""
    for finding in new:
        warn(f"left out: {finding.describe()}")
    if run_dir is not None:
        content = {"max_bad_samples": quarantine.limit, **redact_value(quarantine.state_dict())}
        write_atomic(Path(run_dir) / "quarantine.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
