"""``run.profile``: records some steps with torch's profiler and summarizes where their time goes."""

from __future__ import annotations

import gzip
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch.autograd import DeviceType
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from trainer.engine.events import Counters, Listener
from trainer.engine.step import PhaseHooks
from trainer.engine.window import MicroBatch
from trainer.errors import RecipeError
from trainer.memory.monitor import FIRST_STEPS
from trainer.run.listeners import ThroughputMeter
from trainer.run.session import Session
from trainer.system.files import scratch_folder, staged_file, write_atomic
from trainer.system.text import escaped

WARMUP_STEPS = FIRST_STEPS
"""Steps before the recording: the memory monitor checks all of them, and ``LossCheck`` the first."""
OPERATIONS = 20  # longest operations in the table
RANGE, STEP = "trainer: ", "ProfilerStep"  # name prefixes of the ranges that enclose operations in the trace
PARTS = {"data": "waiting for data", "forward": "forward", "backward": "backward", "step": "optimizer step"}
"""The sequential parts of a step; the rest of its time is between them."""
COLLECTIVES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel", "c10d::", "_c10d_functional::")


def require_profilable(steps: int | None, run_steps: int) -> None:
    """Reject ``run.profile`` for a run with too few steps."""
    available = run_steps - WARMUP_STEPS
    if steps is not None and steps > available:
        fix = f"lower it to {available}" if available > 0 else "leave it out"
        cause = f"run.profile={steps} records {steps} steps after {WARMUP_STEPS} warm-up steps"
        raise RecipeError(f"{cause}, but the run has only {run_steps}: {fix}, or raise max_steps or epochs")


class Profile(PhaseHooks, Listener):
    """Records ``steps`` steps after the first :data:`WARMUP_STEPS`, and writes trace and table, also if the run ends
    early. Forwards all events to the run's memory monitor."""

    def __init__(self, session: Session, steps: int, stopwatch: ThroughputMeter) -> None:
        self.monitor, self.stopwatch, fabric = session.monitor, stopwatch, session.fabric
        self.on_gpu = fabric.device.type == "cuda"
        self.summary = ""  # one line, empty until the files are written
        part = f".rank{fabric.global_rank}" if fabric.world_size > 1 else ""
        self.trace, self.table = (session.run_dir / f"profile{part}.{kind}" for kind in ("json.gz", "txt"))
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        stages = schedule(wait=WARMUP_STEPS - 1, warmup=1, active=steps, repeat=1)
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # a CUDA build without a GPU would log an error
        self.profiler = profile(activities=kinds, schedule=stages, on_trace_ready=self._write, acc_events=True)
        self._recording, self._range = False, None

    def on_load(self, samples: Sequence[int]) -> None:
        self.monitor.on_load(samples)
        self._enter("data" if samples else None)

    def begin_step(self) -> None:
        self.monitor.begin_step()

    def enter(self, phase: Literal["forward", "backward", "step"], micro: MicroBatch | None = None) -> None:
        self.monitor.enter(phase, micro)
        self._enter(phase)

    def end_step(self) -> None:
        self.monitor.end_step()
        self._enter(None)
        self.profiler.step()
        self._recording = self.profiler.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)

    def on_fit_start(self, counters: Counters, total_steps: int) -> None:
        self.profiler.start()

    def on_fit_end(self, counters: Counters) -> None:
        self.close()

    def close(self) -> None:
        """Write the recorded steps, if the run ends during the recording."""
        self._enter(None)
        if self._recording:
            self._recording = False
            self.profiler.stop()

    def _enter(self, part: str | None) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = record_function(RANGE + part).__enter__() if part is not None and self._recording else None

    def _write(self, found: profile) -> None:
        began = time.perf_counter()
        try:
            with scratch_folder(self.trace) as folder, staged_file(self.trace) as part:
                found.export_chrome_trace(plain := f"{folder}/trace.json")
                part.write_bytes(gzip.compress(Path(plain).read_bytes(), 5))
            self.summary, table = self._described(list(found.events() or ()), list(found.key_averages()))
            write_atomic(self.table, table)
        except OSError as error:  # must not replace the error with which the run ends
            warnings.warn(f"{self.trace} could not be written: {error}", stacklevel=2)
        self.stopwatch.leave_out(time.perf_counter() - began)

    def _described(self, events: list[Any], averages: list[Any]) -> tuple[str, str]:
        on_host = [event for event in events if event.device_type == DeviceType.CPU]
        steps = [event.time_range for event in on_host if event.name.startswith(STEP)]
        count, total = len(steps), sum(step.elapsed_us() for step in steps)
        working = [event for event in events if event.device_type == DeviceType.CUDA] if self.on_gpu else on_host
        device, own = ("GPU", "self_device_time_total") if self.on_gpu else ("CPU", "self_cpu_time_total")

        def covered(found: list[Any], chosen: Callable[[Any], bool]) -> float:
            spans = [(event.time_range.start, event.time_range.end) for event in found if chosen(event)]
            return union(spans, steps[0].start, steps[-1].end)

        def table(title: str, rows: list[tuple[str, float]]) -> list[str]:
            lines = [f"{100 * time / total:5.1f} %{time / count / 1e3:12.3f} ms  {name}" for name, time in rows]
            return ["", f"  share       per step  {title}", *lines]

        def of_range(name: str) -> float:
            return covered(on_host, lambda event: event.name.startswith(name))

        parts = {name: of_range(RANGE + part) for part, name in PARTS.items()}
        idle = total - covered(working, lambda event: not is_annotation(event, event.name))
        overlapping = {
            "communication": covered(events, lambda event: event.name.startswith(COLLECTIVES)),
            "optimizer.step on the CPU": of_range("Optimizer.step#"),
            "GPU idle" if self.on_gpu else "no torch operation: Python": idle,
        }
        operations = sorted((a for a in averages if not is_annotation(a, a.key)), key=lambda a: -getattr(a, own))
        rows = [(f"{a.count / count:5.0f}  {escaped(a.key)}", getattr(a, own)) for a in operations[:OPERATIONS]]
        between = {"between these": total - sum(parts.values())}
        lines = [
            f"{count} steps, {total / count / 1e3:.3f} ms per step, including the profiler's own time",
            *table("sequential parts, on the CPU", [*(parts | between).items()]),
            *table("shares of the same time, which overlap with the parts", [*overlapping.items()]),
            *table(f"calls  operation, by its own time on the {device}", rows),
        ]
        main = [*parts.items(), ("communication", overlapping["communication"])]
        shares = ", ".join(f"{name} {100 * time / total:.1f} %" for name, time in main)
        where = f"{self.table.name}, {self.trace.name}; peak CPU memory includes the profiler's records"
        return f"profile of {count} steps: {shares}; {where}", "\n".join(lines) + "\n"


def is_annotation(found: Any, name: str) -> bool:
    """Return whether an event is not an operation but a named range around operations and Python code."""
    return found.is_user_annotation or name.startswith(STEP)


def union(spans: list[tuple[float, float]], first: float, last: float) -> float:
    """Return the time between ``first`` and ``last`` that at least one of ``spans``, (begin, end), covers."""
    time, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        time += max(0.0, min(end, last) - max(begin, reached, first))
        reached = max(reached, end)
    return time
