"""A launched recipe with its prepared data, its loaders and its watchdog."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric

from trainer.data.loader import Loader, make_loader
from trainer.data.workers import decide_workers
from trainer.engine.cut import Cut
from trainer.engine.data_feed import make_windows
from trainer.engine.quarantine import Quarantine
from trainer.engine.window import Windows
from trainer.errors import RunError, RunStoppedError
from trainer.faults.signals import StopSignals, end_startup_watch
from trainer.faults.watchdog import PeerError, Watchdog
from trainer.launching.world import World
from trainer.memory.monitor import MemoryMonitor
from trainer.memory.oom import OutOfMemoryError, describe_oom, is_out_of_memory, sample_lengths, shapes_of
from trainer.memory.plan import Plan
from trainer.recipe import Recipe
from trainer.report.progress import Progress
from trainer.run.collectives import VotedSum, make_host_sum, sum_over_data_parallel
from trainer.run.listeners import report_bad_samples
from trainer.run.run_prediction import RunPrediction


class Session:
    """A recipe whose processes are launched and whose data is prepared, with the watchdog of this rank. All ranks
    create it together, before the model. Later, only :meth:`set_cut` and :meth:`watched` change it."""

    def __init__(
        self, recipe: Recipe, plan: Plan, fabric: Fabric, world: World, forecast: RunPrediction | None = None
    ) -> None:
        self.recipe, self.plan, self.fabric, self.world, self.forecast = recipe, plan, fabric, world, forecast
        self.monitor, self.agreement = MemoryMonitor(fabric.device), VotedSum(make_host_sum(fabric))
        self.progress = Progress(recipe.run.progress, fabric.global_rank)
        report = partial(report_bad_samples, run_dir=recipe.run.dir) if self.is_first else None
        self.quarantine = Quarantine(recipe.data.max_bad_samples, report)
        self.watchdog: Watchdog | None = None
        self.signals: StopSignals | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which prints and writes."""
        return self.fabric.global_rank == 0

    @property
    def run_dir(self) -> Path:
        return Path(str(self.recipe.run.dir))

    def set_cut(self, cut: Cut) -> None:
        self.plan = replace(self.plan, initial_cut=cut)

    def asked_to_stop(self) -> str | None:
        """Return the name of the signal that asked this process to stop, if any."""
        return self.signals.received if self.signals is not None else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the watchdog of this rank and record signals that ask to stop.

        An exception is reported with rank, step, phase and samples, and announced to the other ranks. If a collective
        failed because another rank ended, the exception becomes a :class:`PeerError` with the reason of that rank.
        Contexts can be nested: the inner one announces an error before the outer one cleans up.

        Raises:
            OutOfMemoryError: for any out of memory, with its place and settings to try.
        """
        with ExitStack() as closing:
            if self.watchdog is None:  # the outermost context
                fabric = self.fabric
                watchdog = Watchdog(self.monitor, fabric.global_rank, fabric.world_size, self.recipe.run.hang_after)
                end_startup_watch()
                closing.callback(setattr, self, "watchdog", None)
                closing.callback(watchdog.close)
                self.signals = closing.enter_context(StopSignals(self.is_first, lambda: watchdog.heard is not None))
                self.watchdog = watchdog
            closing.enter_context(self._explained(self.watchdog))
            yield

    @contextmanager
    def _explained(self, watchdog: Watchdog) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            raw = not isinstance(error, RunError) and is_out_of_memory(error)  # a RunError may only quote one
            explained = watchdog.root_error(self._out_of_memory(error) if raw else error)
            if self.signals is not None and isinstance(explained, RunStoppedError | PeerError):
                self.signals.leaving = True
            if explained is error:
                raise
            raise explained from error

    def _out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        monitor, batch = self.monitor, self.monitor.batch
        place = monitor.phase, self.fabric.global_rank, self.plan, sample_lengths(batch)
        shapes = shapes_of(batch)
        return OutOfMemoryError(describe_oom(error, *place, shapes=shapes, recipe=self.recipe, on_gpu=monitor.on_gpu))


def loader_of(session: Session, split: Any) -> Loader:
    recipe, world = session.recipe, session.world
    workers = decide_workers(recipe.data, world.accelerator, world.devices)
    return make_loader(recipe, split, workers, pin_memory=session.fabric.device.type == "cuda")


def training_windows(session: Session) -> Windows:
    """Return this rank's share of the training batches."""
    recipe, ranks = session.recipe, (session.fabric.global_rank, session.fabric.world_size)
    loader = loader_of(session, recipe.data.train)
    once = sum_over_data_parallel(recipe.memory, ranks[0], session.agreement)
    windows = make_windows(recipe, loader, *ranks, once, quarantine=session.quarantine)
    return replace(windows, on_epoch=partial(setattr, loader, "at_once"))
