"""Measured memory by phase, in GB of 1e9 bytes, from the allocator and the operating system, without device syncs."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from trainer.engine.step import PhaseHooks
from trainer.engine.window import MicroBatch
from trainer.errors import require
from trainer.recipe import Recipe
from trainer.system.files import staged_file
from trainer.system.machine import HostMemory, process_peak
from trainer.system.text import GB, MB, format_bytes

Phase = Literal["init", "forward", "backward", "step", "evaluation"]
PHASES: tuple[Phase, ...] = get_args(Phase)

FIRST_STEPS, SHARE_OF_TIME, MAX_HISTORY = 3, 0.01, 4096


class Peaks(NamedTuple):
    """Peak memory in bytes: tensors, memory held by the allocator, and host memory; ``-1`` if not measured."""

    allocated: int = -1
    reserved: int = -1
    host: int = -1

    def raised_to(self, other: Peaks) -> Peaks:
        return Peaks(*map(max, self, other))

    def describe(self) -> str:
        """Describe the peak: reserved memory on a GPU, otherwise the host peak."""
        on_gpu = self.reserved >= 0
        return f"{format_bytes(self.reserved)} reserved" if on_gpu else f"{format_bytes(self.host)} host peak"


class MemoryMonitor(PhaseHooks):
    """Measures memory peaks by phase. The first phase is init; memory at its start is called idle.

    The current phase is always recorded. Memory is read in the first steps, and then as often as ``share_of_time``, the
    max share of the run's time, allows. Peaks between two reads still count for the whole run.
    """

    def __init__(
        self, device: torch.device, share_of_time: float = SHARE_OF_TIME, host: HostMemory | None = None
    ) -> None:
        self.device, self.share_of_time, self.host = device, share_of_time, host or HostMemory()
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            torch.cuda.init()
        self.phase: Phase | None = "init"
        self.batch: Any = None  # the micro-batch in the model, on the host
        self.step = 0  # steps taken; set by a resumed run
        self.activity: str | None = "init"  # a phase, loading, or another activity; ``None`` between activities
        self.samples: Sequence[int] = ()  # samples of the current activity, as indices into the dataset
        self.moves = 0  # number of activities since the last step ended
        self.on_move: Callable[[], None] | None = None  # called at the start of each activity
        # True until the first step with the current module, which may take long because of compilation.
        self.fresh = True
        # Steps and GB at their ends: allocated memory on a GPU, resident memory elsewhere.
        self.history: list[tuple[int, float]] = []
        self.warnings: list[str] = []  # warnings that were not shown yet; the code that shows them removes them
        self.phases = dict.fromkeys(PHASES, Peaks())
        self._leaks = {"device": LeakCheck("allocated", 10 * MB), "host": LeakCheck("host", 100 * MB, 0.05)}
        self._looking, self._begun, self._levels, self._every = True, 0, 0, 1
        self._spent = self._next_look = 0.0
        before = self.host.read()
        self.host_idle = before.resident
        self.whole = Peaks(host=before.process_peak)
        self._restart()

    def enter(self, phase: Phase | None, micro: MicroBatch | None = None) -> None:
        """End the current phase and start ``phase``; ``None`` means between phases."""
        if self._looking:
            self._record_peaks()
        self.phase = phase
        if micro is not None:
            self.batch, self.samples = micro.batch, micro.indices
        elif phase != "backward":
            self.samples = ()
        self.set_activity(phase, self.samples)

    def set_activity(self, activity: str | None, samples: Sequence[int] = ()) -> None:
        """Record that this rank starts an activity; watchers see progress or, without it, where the rank stopped."""
        self.activity, self.samples = activity, samples
        self.moves += 1
        if self.on_move is not None:
            self.on_move()

    def on_load(self, samples: Sequence[int]) -> None:
        """Record that the rank waits for a micro-batch of these samples. No samples: the step's data has arrived."""
        self.set_activity("loading" if samples else None, samples)

    def begin_step(self) -> None:
        self.enter(None)  # ends init or a failed step
        self._begun += 1
        self._looking = self._begun <= FIRST_STEPS or time.perf_counter() >= self._next_look
        if self._looking:
            self._record_peaks()

    def end_step(self) -> None:
        self.batch = None
        self.step += 1
        self.fresh, self.moves = False, 0
        self.enter(None)
        if self._looking:
            self._check_growth()
            self._looking = False
            self._next_look = time.perf_counter() + self._spent / self.share_of_time
            self._spent = 0.0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Mark an evaluation. If it fails, evaluation remains the current phase."""
        self._looking = True
        self.enter("evaluation")
        yield
        self.enter(None)
        self.batch = None
        self._looking = False

    def _record_peaks(self) -> None:
        began = time.perf_counter()
        on_device, reading = self._device_peaks(), self.host.read()
        if self.phase is not None:
            self.phases[self.phase] = self.phases[self.phase].raised_to(on_device._replace(host=reading.peak))
        self.whole = self.whole.raised_to(on_device._replace(host=reading.process_peak))
        self._restart()
        self._spent += time.perf_counter() - began

    def _device_peaks(self) -> Peaks:
        if not self.on_gpu:
            return Peaks()
        # The allocator's own dictionary: memory_stats() takes five times as long, because it flattens it.
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return Peaks(stats["allocated_bytes"]["all"]["peak"], stats["reserved_bytes"]["all"]["peak"])

    def _restart(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.host.reset_peak()

    def _check_growth(self) -> None:
        reading = self.host.read()
        found = [self._leaks["host"].update(self.step, reading.anonymous)]
        level = reading.resident
        if self.on_gpu:
            level = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["current"]
            found.append(self._leaks["device"].update(self.step, level))
        self.warnings += filter(None, found)
        self._append_history(level / GB)

    def _append_history(self, gigabytes: float) -> None:
        if self._levels % self._every == 0:
            self.history.append((self.step, gigabytes))
        self._levels += 1
        if len(self.history) > MAX_HISTORY:
            self.history = self.history[::2]
            self._every *= 2

    def run_peaks(self) -> Peaks:
        return self.whole.raised_to(self._device_peaks()._replace(host=process_peak()))

    def report(self, all_ranks: bool) -> dict[str, Any]:
        """Return the memory section of ``summary.json``, in GB.

        ``all_ranks`` takes the max over ranks: a collective, which a rank that failed alone must not use.
        """
        if self._looking and self.phase is not None:  # the phase in which the run failed
            self._record_peaks()
        values = torch.tensor([self.host_idle, *chain(self.run_peaks(), *self.phases.values())])
        joined = all_ranks and torch.distributed.is_initialized()
        if joined:
            values = values.to(self.device)
            torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
        idle, *others = [value / GB if value >= 0 else None for value in values.tolist()]
        run, *phases = [others[at : at + 3] for at in range(0, len(others), 3)]
        names = "allocated_gb", "reserved_gb", "host_gb"
        return {
            **dict(zip((*names[:2], "host_peak_gb"), run, strict=True)),
            "host_idle_gb": idle,
            "phases": {p: dict(zip(names, one, strict=True)) for p, one in zip(PHASES, phases, strict=True)},
            "host_phase_peaks": self.host.peaks,
            "ranks_measured": torch.distributed.get_world_size() if joined else 1,
        }


class LeakCheck:
    """Warns once if memory of a ``kind`` keeps growing from step to step, and by more than both ``least`` values."""

    def __init__(self, kind: str, least_bytes: float, least_share: float = 0.0) -> None:
        self.kind, self.least_bytes, self.least_share = kind, least_bytes, least_share
        # Number of values to ignore: optimizer state, caches and buffers are allocated during the first steps.
        self.warm_up = 3
        self.first, self.has_warned = (0, 0), False
        self.levels: deque[int] = deque(maxlen=11)  # a leak grows in at least 9 of the last 10 steps

    def update(self, step: int, level: int) -> str | None:
        """Add the ``level`` in bytes after ``step``; return a warning the first time that it shows a leak."""
        if self.warm_up > 0:
            self.warm_up -= 1
            self.first = step, level
            self.levels.clear()
        self.levels.append(level)
        first_step, first = self.first
        still = sum(after <= before for before, after in pairwise(self.levels))
        grown = level - first > max(self.least_bytes, self.least_share * first)
        if self.has_warned or len(self.levels) < 11 or still > 1 or not grown:
            return None
        self.has_warned = True
        return (
            f"{self.kind} memory grows by {(level - first) / (step - first_step) / MB:.2f} MB per step: from "
            f"{format_bytes(first)} after step {first_step} to {format_bytes(level)} after step {step}. The usual "
            "cause is a reference to tensors with their graph, such as a list of losses: store loss.detach() instead"
        )


# ``run.snapshot``: every allocation on the GPU with its stack, in torch's format for pytorch.org/memory_viz.

MAX_EVENTS = 100_000  # max allocations and frees to keep (the last ones): some hundred MB of host memory


def require_recordable(recipe: Recipe, accelerator: str) -> None:
    """Reject ``run.snapshot`` on accelerators other than cuda, which have nothing to record."""
    cause = "run.snapshot=true records the history of torch's CUDA allocator, which a run on the CPU does not use"
    require(not recipe.run.snapshot or accelerator == "cuda", f"{cause}: remove it, or use run.accelerator cuda")


@contextmanager
def record_memory_history(run_dir: Path, rank: int, world_size: int) -> Iterator[None]:
    """Record allocations in this context. Write them as a pickle, one per rank, at its end, also after an error."""
    target = run_dir / (f"memory_snapshot.rank{rank}.pickle" if world_size > 1 else "memory_snapshot.pickle")
    torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")
    try:
        yield
    finally:
        try:
            with staged_file(target) as part:
                torch.cuda.memory._dump_snapshot(str(part))
        except OSError as error:  # must not hide the error that ends the run
            warnings.warn(f"{target} could not be written: {error}", stacklevel=2)
        torch.cuda.memory._record_memory_history(enabled=None)
