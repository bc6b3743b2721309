"""``run.profile``: where the time of some steps goes, by torch's profiler."""

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
from trainer.engine.step import Phases
from trainer.engine.window import MicroBatch
from trainer.errors import require
from trainer.memory.monitor import FIRST_STEPS
from trainer.run.listeners import Stopwatch
from trainer.run.session import Session
from trainer.system.files import scratch_folder, staged_file, write_atomic
from trainer.system.text import escaped

UNRECORDED = FIRST_STEPS
"""Steps before: the monitor looks at memory in all of them, losses are compared in the first (``LossCheck``)."""
OPERATIONS = 20  # in the table: those that take longest
RANGE, STEP = "trainer: ", "ProfilerStep"  # how what encloses operations is called in the trace
PARTS = {"data": "waiting for data", "forward": "forward", "backward": "backward", "step": "optimizer step"}
"""What a step consists of, one after the other; what is left is between them."""
COLLECTIVES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel", "c10d::", "_c10d_functional::")


def require_profilable(steps: int | None, run_steps: int) -> None:
    """Refuse ``run.profile`` for a run with too few steps."""
    most = run_steps - UNRECORDED
    fix = f"lower it to {most}" if most > 0 else "leave it out"
    require(
        steps is None or steps <= most,
        f"run.profile={steps} records {steps} steps after {UNRECORDED} to warm up, and the run has {run_steps} in all: "
        f"{fix}, or raise max_steps or epochs",
    )


class Profile(Phases, Listener):
    """Records the ``steps`` after the first :data:`UNRECORDED` of this process, and writes what it found.

    The run's monitor hears all that it hears. A run that ends within the steps writes those that were recorded.
    """

    def __init__(self, session: Session, steps: int, stopwatch: Stopwatch) -> None:
        self.monitor, self.stopwatch, fabric = session.monitor, stopwatch, session.fabric
        self.on_gpu = fabric.device.type == "cuda"
        self.summary = ""  # in one line, once it is written
        part = f".rank{fabric.global_rank}" if fabric.world_size > 1 else ""
        self.trace, self.table = (session.run_dir / f"profile{part}.{kind}" for kind in ("json.gz", "txt"))
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        stages = schedule(wait=UNRECORDED - 1, warmup=1, active=steps, repeat=1)
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else a build for GPUs tells of an error where there is none
        self.profiler = profile(activities=kinds, schedule=stages, on_trace_ready=self._write, acc_events=True)
        self._recording, self._range = False, None

    def load(self, samples: Sequence[int]) -> None:
        """As the monitor's."""
        self.monitor.load(samples)
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
        """Write what was recorded, if the run has ended within it."""
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
        except OSError as error:  # must not hide an error that the run ends with
            warnings.warn(f"{self.trace} could not be written: {error}", stacklevel=2)
        self.stopwatch.leave_out(time.perf_counter() - began)

    def _described(self, events: list[Any], averages: list[Any]) -> tuple[str, str]:
        """The shares in a line, and the whole text: shares of the time of all steps, and the longest operations."""
        on_host = [event for event in events if event.device_type == DeviceType.CPU]
        steps = [event.time_range for event in on_host if event.name.startswith(STEP)]
        count, total = len(steps), sum(step.elapsed_us() for step in steps)
        working = [event for event in events if event.device_type == DeviceType.CUDA] if self.on_gpu else on_host
        device, own = ("GPU", "self_device_time_total") if self.on_gpu else ("CPU", "self_cpu_time_total")

        def covered(found: list[Any], chosen: Callable[[Any], bool]) -> float:
            spans = [(event.time_range.start, event.time_range.end) for event in found if chosen(event)]
            return union(spans, steps[0].start, steps[-1].end)

        def row(name: str, time: float) -> str:
            return f"{100 * time / total:5.1f} %{time / count / 1e3:12.3f} ms  {name}"

        def table(title: str, rows: list[tuple[str, float]]) -> list[str]:
            return ["", f"  share         a step  {title}", *(row(*each) for each in rows)]

        def of_range(name: str) -> float:
            return covered(on_host, lambda event: event.name.startswith(name))

        parts = {name: of_range(RANGE + part) for part, name in PARTS.items()}
        idle = total - covered(working, lambda event: not encloses(event, event.name))
        beside = {
            "communication": covered(events, lambda event: event.name.startswith(COLLECTIVES)),
            "the optimizer's own work on the host": of_range("Optimizer.step#"),
            "the GPU computes nothing" if self.on_gpu else "no operation of torch runs: Python": idle,
        }
        operations = sorted((a for a in averages if not encloses(a, a.key)), key=lambda a: -getattr(a, own))
        rows = [(f"{a.count / count:5.0f}  {escaped(a.key)}", getattr(a, own)) for a in operations[:OPERATIONS]]
        between = {"between these": total - sum(parts.values())}
        lines = [
            f"{count} steps, {total / count / 1e3:.3f} ms a step with the profiler's own time in them",
            *table("on the host, one after the other", [*(parts | between).items()]),
            *table("of the same time, whatever it overlaps with", [*beside.items()]),
            *table(f"calls  operation, by its own time on the {device}", rows),
        ]
        told = [*parts.items(), ("communication", beside["communication"])]
        shares = ", ".join(f"{name} {100 * time / total:.1f} %" for name, time in told)
        where = f"{self.table.name}, {self.trace.name}; its records are in the host's peak"
        return f"profile of {count} steps: {shares}; {where}", "\n".join(lines) + "\n"


def encloses(found: Any, name: str) -> bool:
    """Whether something that was found is no operation, but a name for what is done within it, Python included."""
    return found.is_user_annotation or name.startswith(STEP)


def union(spans: list[tuple[float, float]], first: float, last: float) -> float:
    """How much of the time from ``first`` to ``last`` lies in at least one of ``spans`` of (begin, end)."""
    time, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        time += max(0.0, min(end, last) - max(begin, reached, first))
        reached = max(reached, end)
    return time
