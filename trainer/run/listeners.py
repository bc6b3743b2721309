"""Listeners of training: throughput, progress display, loggers and the recipe's own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any

from lightning_fabric.loggers import Logger

from trainer.engine.events import Counters, Listener
from trainer.engine.quarantine import BadSampleAt, Quarantine
from trainer.engine.step import StepResult
from trainer.engine.window import OnLoad
from trainer.errors import RecipeError, RunError
from trainer.memory.monitor import MemoryMonitor
from trainer.recipe import Recipe
from trainer.report.loggers import make_loggers
from trainer.report.progress import Progress, warn
from trainer.report.summary import Speed
from trainer.system.error_reports import describe_error
from trainer.system.files import write_atomic
from trainer.system.redact import redact, redact_value
from trainer.values import TASK_METRICS, TASKS_WITHOUT_CLASSES


class ThroughputMeter(Listener):
    """Training throughput so far, without the time of evaluations; ``peak_seconds`` is that of ``RunPrediction``."""

    def __init__(
        self, peak_seconds: Callable[[], float | None] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = self.waited = 0.0  # ``waited``: the part of ``seconds`` that this rank waited for data
        self.samples = self.tokens = 0
        self._peak_seconds, self._clock = peak_seconds, clock
        self._asked: float | None = None  # when the data that is still missing was requested
        self.restart()

    def restart(self) -> None:
        """Exclude the time since the last step."""
        self._since, self._asked = self._clock(), None

    def leave_out(self, seconds: float) -> None:
        """Exclude the last ``seconds``."""
        self._since += seconds

    def wrap_on_load(self, on_load: OnLoad) -> OnLoad:
        """Return ``on_load`` with a timer around the loading that it announces."""

        def load(samples: Sequence[int]) -> None:
            on_load(samples)
            now = self._clock()
            if self._asked is not None:
                self.waited += now - self._asked
            self._asked = now if samples else None

        return load

    def on_fit_start(self, counters: Counters, total_steps: int) -> None:
        self.restart()

    def on_step(self, counters: Counters, result: StepResult) -> None:
        self.seconds += self._clock() - self._since
        self.samples += result.samples
        self.tokens += result.tokens
        self.restart()

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        self.restart()

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("seconds", "waited", "samples", "tokens")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seconds, self.samples = state["seconds"], state["samples"]
        self.waited, self.tokens = state.get("waited", 0.0), state.get("tokens", 0)  # older checkpoints have none

    @property
    def speed(self) -> Speed:
        """The average speed until the last step."""
        seconds, peak = self.seconds, self._peak_seconds()
        if not seconds:
            return Speed(0.0)
        tokens = self.tokens / seconds if self.tokens else None
        samples, waited = self.samples / seconds, min(1.0, self.waited / seconds)
        return Speed(samples, tokens, waited, peak * (tokens or samples) if peak else None)


class ProgressListener(Listener):
    """Shows steps and evaluations in the terminal."""

    def __init__(self, progress: Progress, stopwatch: ThroughputMeter, monitor: MemoryMonitor, split: str) -> None:
        self.progress, self.stopwatch, self.monitor, self.split = progress, stopwatch, monitor, split

    def on_fit_start(self, counters: Counters, total_steps: int) -> None:
        self.progress.start(total_steps, first_step=counters.step)

    def on_step(self, counters: Counters, result: StepResult) -> None:
        speed, memory = self.stopwatch.speed, self.monitor.run_peaks().describe()
        counts = {"epoch": counters.epoch, "skipped": counters.skipped_steps}
        self.progress.step(counters.step, loss=result.loss, lr=result.lr, speed=speed, memory=memory, **counts)
        while self.monitor.warnings:
            self.progress.warning(self.monitor.warnings.pop(0))

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        self.progress.evaluation(counters.step, self.split, result.metrics())

    def on_fit_end(self, counters: Counters) -> None:
        self.progress.close()


class LoggingListener(Listener):
    """Writes steps and evaluations to the loggers. Only the first rank opens some."""

    def __init__(self, stopwatch: ThroughputMeter, split: str) -> None:
        self.loggers, self.stopwatch, self.split = list[Logger](), stopwatch, split

    def open(self, recipe: Recipe, run_dir: Path, resumed_at: int, run: str) -> None:
        """Open the loggers of the recipe for ``run``, which starts at step ``resumed_at``."""
        names, task = recipe.model.loss_names, recipe.model.task or "single_label"
        extra = [f"loss_{name}" for name in names] if len(names) > 1 else []
        # Sections as text, without secrets.
        config = {name: redact(str(p)) if is_dataclass(p) else p for name, p in vars(recipe).items()}
        has_metrics = task in TASKS_WITHOUT_CLASSES or recipe.model.num_classes is not None
        asked = [metric if isinstance(metric, str) else metric.name for metric in recipe.run.requested_metrics()]
        known = TASK_METRICS[task if has_metrics else None]
        metrics = [name for name in dict.fromkeys((*known, *asked)) if name != "loss"]
        self.loggers = make_loggers(recipe.run.logger, run_dir, config, extra, metrics, resumed_at, recipe.run, run)

    def on_step(self, counters: Counters, result: StepResult) -> None:
        metrics = {"epoch": counters.epoch, "loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm}
        speed = self.stopwatch.speed._asdict()
        metrics |= {name: round(value, 4) for name, value in speed.items() if value is not None}
        if len(result.losses) > 1:
            metrics |= {f"loss_{name}": value for name, value in result.losses.items()}
        self.log(metrics, counters.step)

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        metrics = {f"{self.split}_{name}": value for name, value in result.metrics().items()}
        self.log({"epoch": counters.epoch, **metrics}, counters.step)

    def on_fit_end(self, counters: Counters) -> None:
        for logger in self.loggers:
            logger.save()

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for logger in self.loggers:
            logger.log_metrics(metrics, step)


class CustomListener(Listener):
    """A wrapper of a recipe's listener, whose errors name the listener, the event and the step."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def _call(self, event: str, counters: Counters, *values: Any) -> None:
        try:
            getattr(self.listener, event)(replace(counters), *values)  # a copy: only the engine may change counters
        except Exception as error:
            who = f"listener {type(self.listener).__name__}.{event} after step {counters.step}"
            raise RunError(f"{who}: {describe_error(error)}") from error

    on_fit_start = partialmethod(_call, "on_fit_start")
    on_step = partialmethod(_call, "on_step")
    on_evaluation = partialmethod(_call, "on_evaluation")
    on_fit_end = partialmethod(_call, "on_fit_end")


def wrap_custom_listeners(listeners: Sequence[Any]) -> list[Listener]:
    """Wrap the listeners of a recipe in :class:`CustomListener`; reject objects of other classes."""
    for number, listener in enumerate(listeners):
        if not isinstance(listener, Listener):
            raise RecipeError(f"listeners[{number}]={listener!r} is not a trainer.Listener: give an instance of one")
    return [CustomListener(listener) for listener in listeners]


def report_bad_samples(quarantine: Quarantine, new: list[BadSampleAt], run_dir: str | None) -> None:
    """Warn of each ``new`` bad sample, and write all to ``quarantine.json`` in ``run_dir``, if it is given. The file
    has the split, index, file or row and error of each sample."""
    for finding in new:
        warn(f"left out: {finding.describe()}")
    if run_dir is not None:
        content = {"max_bad_samples": quarantine.limit, **redact_value(quarantine.state_dict())}
        write_atomic(Path(run_dir) / "quarantine.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
