"""The watch over a run, from its launch to its end on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.fabric import Fabric

from trainer.errors import RunError, Stopped
from trainer.faults.signals import StopSignals, end_start_watch
from trainer.faults.watchdog import Watchdog
from trainer.memory.monitor import Monitor
from trainer.memory.oom import OutOfMemory, describe_oom, is_out_of_memory, sample_lengths, shapes_of
from trainer.memory.plan import Plan
from trainer.recipe import Recipe


class Guard:
    """Watches over this rank and the others, and notes signals that ask to stop."""

    def __init__(self, recipe: Recipe, fabric: Fabric, monitor: Monitor) -> None:
        self.recipe, self.fabric, self.monitor = recipe, fabric, monitor
        self.watchdog: Watchdog | None = None
        self.signals: StopSignals | None = None

    def asked_to_stop(self) -> str | None:
        """The name of the signal that asked this process to stop, if one has."""
        return self.signals.received if self.signals is not None else None

    @contextmanager
    def watching(self, plan: Callable[[], Plan]) -> Iterator[None]:
        """Watch for as long as this lasts.

        What is raised within is reported with rank, step, phase and samples, and told to the other ranks; a collective
        that broke because another rank ended becomes the :class:`PeerError` that says why that one did. Within another
        such block it is only this: errors are told before what lies between the two is cleaned up.

        Args:
            plan: as it is when memory runs out.

        Raises:
            OutOfMemory: for any out of memory: where it was and what to try.
        """
        if self.watchdog is not None:
            with self._explained(self.watchdog, plan):
                yield
            return
        rank = self.fabric.global_rank
        watchdog = Watchdog(self.monitor, rank, self.fabric.world_size, self.recipe.run.hang_after)
        end_start_watch()
        try:
            with StopSignals(rank == 0, lambda: watchdog.heard is not None) as signals:
                self.watchdog, self.signals = watchdog, signals
                with self._explained(watchdog, plan):
                    yield
        finally:
            watchdog.close()
            self.watchdog = None

    @contextmanager
    def _explained(self, watchdog: Watchdog, plan: Callable[[], Plan]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if isinstance(error, Stopped) and self.signals is not None:
                self.signals.leaving = True
            raw = not isinstance(error, RunError) and is_out_of_memory(error)  # else a message, which may quote one
            known = self._out_of_memory(error, plan()) if raw else error
            explained = watchdog.explain(known)
            if explained is error:
                raise
            raise explained from error

    def _out_of_memory(self, error: BaseException, plan: Plan) -> OutOfMemory:
        """A line that says where memory ran out and what to try."""
        monitor = self.monitor
        message = describe_oom(
            error,
            monitor.phase,
            self.fabric.global_rank,
            plan,
            sample_lengths(monitor.batch),
            shapes=shapes_of(monitor.batch),
            recipe=self.recipe,
            on_gpu=monitor.on_gpu,
        )
        return OutOfMemory(message)
