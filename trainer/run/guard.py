"""The watch over a run, from its launch to its end on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainer.errors import RunError, Stopped
from trainer.faults.signals import StopSignals, end_start_watch
from trainer.faults.watchdog import Watchdog
from trainer.memory.oom import OutOfMemory, describe_oom, is_out_of_memory, sample_lengths, shapes_of

if TYPE_CHECKING:
    from trainer.run.session import Session


@contextmanager
def guarded(session: Session) -> Iterator[None]:
    """Watch over this rank and the others for as long as this lasts, and note signals that ask to stop.

    What is raised within is reported with rank, step, phase and samples, and told to the other ranks; a collective
    that broke because another rank ended becomes the :class:`PeerError` that says why that one did. Within another
    guard it is only this: errors are told before what lies between the two is cleaned up.

    Raises:
        OutOfMemory: for any out of memory: where it was and what to try.
    """
    if session.watchdog is not None:
        with _explained(session, session.watchdog):
            yield
        return
    fabric = session.fabric
    watchdog = Watchdog(session.monitor, fabric.global_rank, fabric.world_size, session.recipe.run.hang_after)
    end_start_watch()
    try:
        with StopSignals(session.is_first, lambda: watchdog.heard is not None) as signals:
            session.watchdog, session.signals = watchdog, signals
            with _explained(session, watchdog):
                yield
    finally:
        watchdog.close()
        session.watchdog = None


@contextmanager
def _explained(session: Session, watchdog: Watchdog) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if isinstance(error, Stopped) and session.signals is not None:
            session.signals.leaving = True
        raw = not isinstance(error, RunError) and is_out_of_memory(error)  # else a message, which may quote one
        known = _out_of_memory(session, error) if raw else error
        explained = watchdog.explain(known)
        if explained is error:
            raise
        raise explained from error


def _out_of_memory(session: Session, error: BaseException) -> OutOfMemory:
    """A line that says where memory ran out and what to try."""
    monitor = session.monitor
    message = describe_oom(
        error,
        monitor.phase,
        session.fabric.global_rank,
        session.plan,
        sample_lengths(monitor.batch),
        shapes=shapes_of(monitor.batch),
        recipe=session.recipe,
        on_gpu=monitor.on_gpu,
    )
    return OutOfMemory(message)
