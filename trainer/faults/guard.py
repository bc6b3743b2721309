"""The watch over a run, from its launch to its end on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainer.faults.launched import adopt_children
from trainer.faults.watchdog import Watchdog

if TYPE_CHECKING:
    from trainer.session import Session


@contextmanager
def guarded(session: Session) -> Iterator[Watchdog]:
    """Watch over this rank and the others for as long as this lasts; within another one, part of it.

    What is raised within is reported with rank, step, phase and samples, and told to the other ranks before anything
    that lies between an inner and the outer guard is cleaned up; a collective that broke because another rank ended
    becomes the :class:`PeerError` that says why that one did.
    """
    outermost = session.watchdog is None
    if session.watchdog is None:
        fabric = session.fabric
        adopt_children(fabric)
        session.watchdog = Watchdog(
            session.monitor, fabric.global_rank, fabric.world_size, session.recipe.run.hang_after
        )
    watchdog = session.watchdog
    try:
        yield watchdog
    except BaseException as error:
        explained = watchdog.explain(error)
        if explained is error:
            raise
        raise explained from error
    finally:
        if outermost:
            watchdog.close()
            session.watchdog = None
