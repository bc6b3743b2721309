"""Memory as it is, phase by phase: device peaks from the allocator, the host's from the operating system.

GB is 1e9 bytes. Nothing here waits for the device.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from trainer.engine.step import Phases
from trainer.engine.window import MicroBatch
from trainer.errors import require
from trainer.recipe import Recipe
from trainer.system.files import staged_file
from trainer.system.machine import HostMemory, process_peak
from trainer.system.text import GB, MB, gigabytes

Phase = Literal["init", "forward", "backward", "step", "evaluation"]
PHASES: tuple[Phase, ...] = get_args(Phase)

FIRST_STEPS, SHARE_OF_TIME, LONGEST_HISTORY = 3, 0.01, 4096


class Peaks(NamedTuple):
    """Highest memory in bytes: of tensors, of what the allocator holds, of the host; ``-1`` where not measured."""

    allocated: int = -1
    reserved: int = -1
    host: int = -1

    def raised_to(self, other: Peaks) -> Peaks:
        """The higher of each."""
        return Peaks(*map(max, self, other))

    def describe(self) -> str:
        """In one phrase: reserved memory on a GPU, resident memory elsewhere."""
        return f"{gigabytes(self.reserved)} reserved" if self.reserved >= 0 else f"{gigabytes(self.host)} host peak"


class Monitor(Phases):
    """Measures peaks by phase. It begins with the phase init, at the level that is called idle.

    Which phase it is, is always known; memory is looked at in the first steps, and then as often as takes
    ``share_of_time``: on a GPU usually in every step, for a tiny model on a CPU in one of many. What happens between
    two looks still counts for the peaks of the whole run.

    Args:
        device: of this rank.
        share_of_time: most of the run's time that looking may take.
        host: reads the host's memory.
    """

    def __init__(
        self, device: torch.device, share_of_time: float = SHARE_OF_TIME, host: HostMemory | None = None
    ) -> None:
        self.device, self.share_of_time, self.host = device, share_of_time, host or HostMemory()
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            torch.cuda.init()
        self.phase: Phase | None = "init"
        self.batch: Any = None  # what goes through the model at this moment, as it is on the host
        self.step = 0  # steps taken; a resumed run sets it
        self.activity: str | None = "init"  # a phase, loading, or what was announced; ``None`` is what lies between
        self.samples: Sequence[int] = ()  # that it is done with, by their place in the dataset
        self.moves = 0  # how often that changed since the last step ended
        self.on_move: Callable[[], None] | None = None  # called after each of them
        # No step has been taken with the module as it was built last: compiling may make it a long one.
        self.fresh = True
        # Steps, and GB at their ends: allocated on a GPU, resident elsewhere.
        self.history: list[tuple[int, float]] = []
        self.warnings: list[str] = []  # to be told to the person; whoever does takes them out
        self.phases = dict.fromkeys(PHASES, Peaks())
        self._leaks = {"device": LeakCheck("allocated", 10 * MB), "host": LeakCheck("host", 100 * MB, 0.05)}
        self._looking, self._begun, self._levels, self._every = True, 0, 0, 1
        self._spent = self._next_look = 0.0
        before = self.host.read()
        self.host_idle = before.resident
        self.whole = Peaks(host=before.process_peak)
        self._restart()

    def enter(self, phase: Phase | None, micro: MicroBatch | None = None) -> None:
        """``phase`` begins, and the one before it ends; ``None`` is what lies between phases."""
        if self._looking:
            self._look()
        self.phase = phase
        if micro is not None:
            self.batch, self.samples = micro.batch, micro.indices
        elif phase != "backward":
            self.samples = ()
        self.doing(phase, self.samples)

    def doing(self, activity: str | None, samples: Sequence[int] = ()) -> None:
        """This rank begins something: for those who watch that it moves on, and say where it was when it did not."""
        self.activity, self.samples = activity, samples
        self.moves += 1
        if self.on_move is not None:
            self.on_move()

    def load(self, samples: Sequence[int]) -> None:
        """A micro-batch of these is waited for; without any, all of the step are there."""
        self.doing("loading" if samples else None, samples)

    def begin_step(self) -> None:
        self.enter(None)  # ends init, or a step that failed
        self._begun += 1
        self._looking = self._begun <= FIRST_STEPS or time.perf_counter() >= self._next_look
        if self._looking:
            self._look()

    def end_step(self) -> None:
        self.batch = None
        self.step += 1
        self.fresh, self.moves = False, 0
        self.enter(None)
        if self._looking:
            self._look_at_level()
            self._looking = False
            self._next_look = time.perf_counter() + self._spent / self.share_of_time
            self._spent = 0.0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """An evaluation lasts as long as this context; one that fails stays the phase that it failed in."""
        self._looking = True
        self.enter("evaluation")
        yield
        self.enter(None)
        self.batch = None
        self._looking = False

    def _look(self) -> None:
        """Credit the peaks since the last look to the phase, and begin new ones."""
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
        # A dictionary straight from the allocator: memory_stats() would take five times as long to flatten it.
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return Peaks(stats["allocated_bytes"]["all"]["peak"], stats["reserved_bytes"]["all"]["peak"])

    def _restart(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.host.restart_peak()

    def _look_at_level(self) -> None:
        """Note the memory at the end of a step, and whether it keeps growing."""
        reading = self.host.read()
        found = [self._leaks["host"].look(self.step, reading.anonymous)]
        level = reading.resident
        if self.on_gpu:
            level = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["current"]
            found.append(self._leaks["device"].look(self.step, level))
        self.warnings += filter(None, found)
        self._remember(level / GB)

    def _remember(self, gigabytes: float) -> None:
        """Keep the history short: of a long run, every second, fourth, eighth ... look."""
        if self._levels % self._every == 0:
            self.history.append((self.step, gigabytes))
        self._levels += 1
        if len(self.history) > LONGEST_HISTORY:
            self.history = self.history[::2]
            self._every *= 2

    def use(self) -> Peaks:
        """The peaks of the run so far, on this rank."""
        return self.whole.raised_to(self._device_peaks()._replace(host=process_peak()))

    def report(self, all_ranks: bool) -> dict[str, Any]:
        """The memory section of ``summary.json``, in GB. ``all_ranks`` takes the largest over the ranks: a collective,
        in which a rank that failed alone must not wait."""
        if self._looking and self.phase is not None:  # the phase that the run died in
            self._look()
        values = torch.tensor([self.host_idle, *chain(self.use(), *self.phases.values())])
        joined = all_ranks and torch.distributed.is_initialized()
        if joined:
            values = values.to(self.device)
            torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
        idle, *others = [value / GB if value >= 0 else None for value in values.tolist()]
        run, *phases = [others[at : at + 3] for at in range(0, len(others), 3)]
        kinds = "allocated_gb", "reserved_gb"
        return {
            **dict(zip((*kinds, "host_peak_gb"), run, strict=True)),
            "host_idle_gb": idle,
            "phases": {
                p: dict(zip((*kinds, "host_gb"), figures, strict=True))
                for p, figures in zip(PHASES, phases, strict=True)
            },
            "host_phase_peaks": self.host.peaks,
            "ranks_measured": torch.distributed.get_world_size() if joined else 1,
        }


class LeakCheck:
    """Looks at memory at the ends of steps, and tells once when it keeps growing.

    Args:
        kind: which memory, for the message.
        least_bytes: growth since the first looks that is not yet a leak.
        least_share: the same, as a share of the first level.
    """

    def __init__(self, kind: str, least_bytes: float, least_share: float = 0.0) -> None:
        self.kind, self.least_bytes, self.least_share = kind, least_bytes, least_share
        # Looks before growth counts: optimizer state, caches and buffers come to be in the first steps.
        self.warm_up = 3
        self.first, self.told = (0, 0), False
        self.levels: deque[int] = deque(maxlen=11)  # since 10 looks ago: all but one of them must have grown

    def look(self, step: int, level: int) -> str | None:
        """Take in the ``level`` in bytes after ``step``; a warning the first time that it must be a leak."""
        if self.warm_up > 0:
            self.warm_up -= 1
            self.first = step, level
            self.levels.clear()
        self.levels.append(level)
        first_step, first = self.first
        levels = list(self.levels)
        still = sum(after <= before for before, after in zip(levels, levels[1:], strict=False))
        grown = level - first > max(self.least_bytes, self.least_share * first)
        if self.told or len(levels) < 11 or still > 1 or not grown:
            return None
        self.told = True
        return (
            f"{self.kind} memory grows by {(level - first) / (step - first_step) / MB:.2f} MB a step: "
            f"{gigabytes(first)} after step {first_step}, {gigabytes(level)} after step {step}. Usually something "
            "keeps tensors with their graph, such as a list of losses: keep loss.detach() instead"
        )


# ``run.snapshot``: every allocation on the GPU with its stack, in torch's own format for pytorch.org/memory_viz.

MOST_EVENTS = 100_000  # the last allocations and frees that are kept: some hundreds of MB of host memory


def require_recordable(recipe: Recipe, accelerator: str) -> None:
    """Refuse ``run.snapshot`` where there is nothing to record: on any accelerator but cuda."""
    require(
        not recipe.run.snapshot or accelerator == "cuda",
        "run.snapshot=true records the history of torch's CUDA allocator, which a run on the CPU does not use: "
        "leave it out, or use run.accelerator cuda",
    )


def snapshot_path(run_dir: Path, rank: int, world_size: int) -> Path:
    """Where ``rank`` writes: a file of its own when there are several."""
    return run_dir / (f"memory_snapshot.rank{rank}.pickle" if world_size > 1 else "memory_snapshot.pickle")


@contextmanager
def recorded(target: Path) -> Iterator[None]:
    """Record within this context and write ``target``, a pickle that nothing here reads, at its end or an error's."""
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")
    try:
        yield
    finally:
        try:
            with staged_file(target) as part:
                torch.cuda.memory._dump_snapshot(str(part))
        except OSError as error:  # must not hide an error that the run ends with
            warnings.warn(f"{target} could not be written: {error}", stacklevel=2)
        torch.cuda.memory._record_memory_history(enabled=None)
