"""The ranks of one machine: their store, and every other socket, listen where no other machine reaches them.

Torch's store has no password, and listens on all interfaces: who reaches it reads and writes what the ranks tell each
other. One that this process hosts is given a listener of its own; the store of a launcher is the launcher's.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from trainer.errors import MOST_LISTED, RecipeError, RunError, listed
from trainer.launching.world import World
from trainer.system.environment import number
from trainer.system.files import parsed_object
from trainer.system.processes import has_told_launcher

ADDRESS = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
SECONDS_BETWEEN_LOOKS = 0.2
MOST_BYTES = 1 << 16  # of what a rank says of itself

SECONDS_TO_MEET = 45.0
"""How much later than this rank another one of the machine may come, where no launcher would end it if that is gone."""


def loopback_store(at: int | socket.socket = 0, seconds: float = SECONDS_TO_MEET) -> TCPStore:
    """A store that this process hosts on 127.0.0.1.

    Args:
        at: the port, 0 for a free one; or what listens there already. One that is taken is an OSError.
        seconds: that requests to it may take; a DistError when this machine does not reach itself.
    """
    listener = socket.create_server((ADDRESS, at)) if isinstance(at, int) else at
    return TCPStore(
        ADDRESS,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,  # torch finds it by its port when the process group is made
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )


def keep_to_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo and NCCL listen there, unless somebody has said where."""
    interface = interface_of(ADDRESS)
    if interface is not None:
        for name in (INTERFACE, "NCCL_SOCKET_IFNAME"):
            environment.setdefault(name, interface)


def gather_here(world: World, seconds: float, environment: MutableMapping[str, str] = os.environ) -> TCPStore | None:
    """Host the store of the ranks of one machine, or reach it, at the address that the environment names from then on.

    Where Fabric starts the ranks this is done before, and those find each other by it. Others wait for each other here:
    so many ``seconds`` for the last where a launcher ends all when one is gone, else less.

    Returns:
        The store, to be kept until the process group takes it up; none where the launcher hosts it, or the first rank
        does and this is another that it has started.

    Raises:
        RunError: naming the ranks that did not come, or the store that cannot be reached.
        RecipeError: for a port that is taken.
    """
    keep_to_loopback(environment)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    rank = number("LOCAL_RANK" if world.started_by_fabric else "RANK", 0, environment)
    if rank and world.started_by_fabric:
        return None
    environment["MASTER_ADDR"] = ADDRESS
    port = number("MASTER_PORT", 0, environment)
    if world.started_by_fabric or world.size == 1:
        return _hosted(port, environment)
    seconds = seconds if has_told_launcher() else min(seconds, SECONDS_TO_MEET)
    store: TCPStore | None = None
    try:
        if rank == 0:
            store = _hosted(port, environment)
        else:
            half = timedelta(seconds=seconds / 2)  # torch tries to connect twice, for so long each time
            store = TCPStore(ADDRESS, port, is_master=False, wait_for_workers=False, timeout=half)
            store.set_timeout(timedelta(seconds=seconds))
        all_that_come(store, rank, world.size, seconds, {})
    except DistError as error:
        why = "ended before the ranks met" if store is not None else f"has not come within {seconds:g} s"
        raise RunError(f"rank {rank}: the first rank {why}: nothing was trained, nothing is lost") from error
    return store


def _hosted(port: int, environment: MutableMapping[str, str]) -> TCPStore:
    try:
        store = loopback_store(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        try:  # an earlier run of this process may have left one there
            store = TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, multi_tenant=True)
        except DistError as error:
            fix = "is taken by another process: unset it, and a free one is chosen"
            raise RecipeError(f"MASTER_PORT={port} in the environment {fix}") from error
    environment["MASTER_PORT"] = str(store.port)
    return store


def all_that_come(store: Store, rank: int, size: int, seconds: float, own: dict[str, Any]) -> list[Any]:
    """What all ranks say of themselves, in their order; ``None`` for what none can, and the rest may be anybody's.

    Args:
        store, rank, size: of all ranks, this one, and how many there are.
        seconds: to wait for the last of them; a RunError names those that did not come.
        own: what this rank says.
    """
    meeting = PrefixStore("meeting", store)
    meeting.set(str(rank), json.dumps(own))
    until = time.monotonic() + seconds
    missing = list(range(size))
    while missing := [other for other in missing if not meeting.check([str(other)])]:
        if time.monotonic() > until:
            raise RunError(
                f"of {size} ranks, {listed(missing[: MOST_LISTED + 1])} have not come within {seconds:g} s: have they, "
                "or their machines, ended, or are they slower to start (run.hang_after)?"
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return [parsed_object(meeting.get(str(other)), MOST_BYTES) for other in range(size)]


def interface_of(address: str) -> str | None:
    """The interface of this machine that has ``address``."""
    known = psutil.net_if_addrs()
    return next((name for name, found in known.items() if address in (one.address for one in found)), None)
