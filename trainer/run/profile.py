"""``run.profile``: where the time of some steps goes, by torch's profiler, with a trace for perfetto.dev."""

from __future__ import annotations

import gzip
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch.autograd import DeviceType
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from trainer.engine.events import Counters, Listener
from trainer.engine.step import Phases, StepResult
from trainer.engine.window import MicroBatch
from trainer.errors import require
from trainer.memory.monitor import FIRST_STEPS
from trainer.run.listeners import Stopwatch
from trainer.system.files import staged_file, write_atomic
from trainer.system.text import escaped

if TYPE_CHECKING:
    from trainer.run.session import Session

UNRECORDED = FIRST_STEPS
"""Steps before: the monitor looks at memory in all of them, losses are compared in the first (``LossCheck``)."""
OPERATIONS = 20  # in the table: those that take longest
RANGE, STEP = "trainer: ", "ProfilerStep"  # how what encloses operations is called in the trace
PARTS = {"data": "waiting for data", "forward": "forward", "backward": "backward", "step": "optimizer step"}
"""What a step consists of, one after the other; what is left is between them: progress, logs, evaluation, checkpoints,
and the sum of the batch's weights over the ranks."""
COLLECTIVES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel", "c10d::", "_c10d_functional::")

Chosen = Callable[[Any], bool]


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

    It stands before the run's monitor, which hears what it hears. A run that ends within the steps writes those that
    were recorded; one that is killed writes nothing.
    """

    def __init__(self, session: Session, steps: int, stopwatch: Stopwatch) -> None:
        self.monitor, self.stopwatch, fabric = session.monitor, stopwatch, session.fabric
        self.on_gpu = fabric.device.type == "cuda"
        part = f".rank{fabric.global_rank}" if fabric.world_size > 1 else ""
        self.trace, self.table = (session.run_dir / f"profile{part}.{kind}" for kind in ("json.gz", "txt"))
        self.who = f"rank {fabric.global_rank} of {fabric.world_size}" if part else "one rank"
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])],
            schedule=schedule(wait=UNRECORDED - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self.summary = ""  # in one line, once it is written
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

    def on_fit_start(self, counters: Counters, total_steps: int) -> None:
        self.profiler.start()

    def on_step(self, counters: Counters, result: StepResult) -> None:
        self.profiler.step()
        self._recording = self.profiler.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)

    def close(self) -> None:
        """Write what was recorded, if a step was left in the middle; may be called twice, or without a start."""
        self._enter(None)
        if self._recording:
            self._recording = False
            self.profiler.stop()

    def _enter(self, part: str | None) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = record_function(RANGE + part) if part is not None and self._recording else None
        if self._range is not None:
            self._range.__enter__()

    def _write(self, found: profile) -> None:
        try:
            with staged_file(self.trace) as part:
                plain = part.with_suffix(".json")
                try:
                    found.export_chrome_trace(str(plain))
                    part.write_bytes(gzip.compress(plain.read_bytes(), 5))
                finally:
                    plain.unlink(missing_ok=True)
            self.summary, table = self._described(list(found.events() or ()), found.key_averages())
            write_atomic(self.table, table)
        except OSError as error:  # must not hide an error that the run ends with
            warnings.warn(f"{self.trace} could not be written: {error}", stacklevel=2)
        self.stopwatch.restart()

    def _described(self, events: list[Any], averages: Iterable[Any]) -> tuple[str, str]:
        """The shares in one line, and the whole text: shares of the time of all steps, and the longest operations."""
        steps = [event for event in events if event.name.startswith(STEP) and event.device_type == DeviceType.CPU]
        count = len(steps)
        total = sum(event.time_range.elapsed_us() for event in steps)

        def microseconds(chosen: Chosen) -> float:
            return covered([(e.time_range.start, e.time_range.end) for e in events if chosen(e)], steps)

        def of_range(name: str) -> Chosen:
            return lambda e: e.name.startswith(name) and e.device_type == DeviceType.CPU

        parts = {name: microseconds(of_range(RANGE + part)) for part, name in PARTS.items()}
        rest = total - sum(parts.values())
        working = DeviceType.CUDA if self.on_gpu else DeviceType.CPU
        busy = microseconds(lambda e: e.device_type == working and not encloses(e, e.name))
        within = {
            "communication": microseconds(lambda e: e.name.startswith(COLLECTIVES)),
            "the optimizer's own work on the host": microseconds(of_range("Optimizer.step#")),
            "the GPU computes nothing" if self.on_gpu else "no operation of torch runs: Python": total - busy,
        }

        def row(name: str, time: float) -> str:
            return f"{100 * time / total:5.1f} %{time / count / 1e3:12.3f} ms  {name}"

        kind = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
        operations = [average for average in averages if not encloses(average, average.key)]
        operations.sort(key=lambda average: -getattr(average, kind))
        lines = [
            f"{count} steps of {self.who}, {total / count / 1e3:.3f} ms a step with the profiler's own time in them",
            "",
            "  share         a step  on the host, one after the other",
            *(row(name, time) for name, time in (parts | {"between these": rest}).items()),
            "",
            "  share         a step  of the same time, whatever it overlaps with",
            *(row(name, time) for name, time in within.items()),
            "",
            f"  share         a step  calls  operation, by its own time on the {'GPU' if self.on_gpu else 'CPU'}",
            *(
                row(f"{average.count / count:5.0f}  {escaped(average.key)}", getattr(average, kind))
                for average in operations[:OPERATIONS]
            ),
        ]
        told = parts | {"communication": within["communication"]}
        shares = ", ".join(f"{name} {100 * time / total:.1f} %" for name, time in told.items())
        return f"profile of {count} steps: {shares}; {self.table.name}, {self.trace.name}", "\n".join(lines) + "\n"


def encloses(found: Any, name: str) -> bool:
    """Whether something that was found is no operation, but a name for what is done within it, Python included."""
    return found.is_user_annotation or name.startswith(STEP)


def covered(spans: Iterable[tuple[float, float]], steps: Sequence[Any]) -> float:
    """How much of the time of ``steps`` lies in at least one of ``spans`` of (begin, end)."""
    first, last = steps[0].time_range.start, steps[-1].time_range.end
    time, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        time += max(0.0, min(end, last) - max(begin, reached, first))
        reached = max(reached, end)
    return time
