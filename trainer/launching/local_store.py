"""Makes all sockets of the ranks of one machine listen on the loopback interface only.

Torch's store has no password and listens on all interfaces, so any machine that reaches it can read and write what the
ranks exchange. A store that this process hosts uses a loopback listener; a launcher's store is left as it is.
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

from trainer.errors import MAX_LISTED_ITEMS, RecipeError, RunError, format_list
from trainer.launching.world import World
from trainer.system.environment import read_int_variable
from trainer.system.files import parse_json_object
from trainer.system.processes import launcher_knows_pid

ADDRESS = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
POLL_INTERVAL = 0.2
MAX_MESSAGE_BYTES = 1 << 16  # maximum size of what a rank publishes about itself

RENDEZVOUS_TIMEOUT = 45.0
"""How long to wait for another rank of the machine if no launcher would report that it died."""


def loopback_store(at: int | socket.socket = 0, seconds: float = RENDEZVOUS_TIMEOUT) -> TCPStore:
    """Host a store on 127.0.0.1, at a port (0: a free one) or a listening socket; ``seconds`` is the timeout of
    requests. Raise OSError if the port is in use, and DistError if this machine cannot reach itself."""
    listener = socket.create_server((ADDRESS, at)) if isinstance(at, int) else at
    # Multi-tenant: torch finds it by its port when the process group is created.
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    port, timeout = listener.getsockname()[1], timedelta(seconds=seconds)
    return TCPStore(ADDRESS, port, timeout=timeout, master_listen_fd=listener.detach(), **options)


def bind_to_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make gloo and NCCL listen on the loopback interface, unless the environment names another one."""
    interface = interface_for_address(ADDRESS)
    if interface is not None:
        for name in (INTERFACE, "NCCL_SOCKET_IFNAME"):
            environment.setdefault(name, interface)


def join_local_store(
    world: World, seconds: float, environment: MutableMapping[str, str] = os.environ
) -> TCPStore | None:
    """Host the store of this machine's ranks, or connect to it, and write its address to the environment. Keep the
    returned store until the process group uses it; ``None`` if the launcher or the first rank hosts it. Wait at most
    ``seconds`` for the last rank if a launcher ends all ranks when one dies, otherwise :data:`RENDEZVOUS_TIMEOUT`."""
    bind_to_loopback(environment)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    rank = read_int_variable("LOCAL_RANK" if world.started_by_fabric else "RANK", 0, environment)
    if rank and world.started_by_fabric:
        return None
    environment["MASTER_ADDR"] = ADDRESS
    port = read_int_variable("MASTER_PORT", 0, environment)
    if world.started_by_fabric or world.world_size == 1:
        return _hosted(port, environment)
    seconds = seconds if launcher_knows_pid() else min(seconds, RENDEZVOUS_TIMEOUT)
    store: TCPStore | None = None
    try:
        if rank == 0:
            store = _hosted(port, environment)
        else:
            half = timedelta(seconds=seconds / 2)  # torch tries to connect twice, for this long each time
            store = TCPStore(ADDRESS, port, is_master=False, wait_for_workers=False, timeout=half)
            store.set_timeout(timedelta(seconds=seconds))
        exchange_with_peers(store, rank, world.world_size, seconds, {})
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
        try:  # an earlier run of this process may have left its store there
            store = TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, multi_tenant=True)
        except DistError as error:
            fix = "is taken by another process: unset it to use a free port"
            raise RecipeError(f"MASTER_PORT={port} in the environment {fix}") from error
    environment["MASTER_PORT"] = str(store.port)
    return store


def exchange_with_peers(store: Store, rank: int, size: int, seconds: float, own: dict[str, Any]) -> list[Any]:
    """Wait for all ranks and return what each published, in rank order. The content is untrusted: ``None`` if no rank
    can have written it. Raise RunError naming the ranks that are missing after ``seconds``."""
    meeting = PrefixStore("meeting", store)
    meeting.set(str(rank), json.dumps(own))
    until = time.monotonic() + seconds
    missing = list(range(size))
    while missing := [other for other in missing if not meeting.check([str(other)])]:
        if time.monotonic() > until:
            late = f"{format_list(missing[: MAX_LISTED_ITEMS + 1])} have not come within {seconds:g} s"
            fix = "check whether they or their machines have ended, or raise run.hang_after if they start slowly"
            raise RunError(f"of {size} ranks, {late}: {fix}")
        time.sleep(POLL_INTERVAL)
    return [parse_json_object(meeting.get(str(other)), MAX_MESSAGE_BYTES) for other in range(size)]


def interface_for_address(address: str) -> str | None:
    """Return the network interface of this machine that has ``address``."""
    known = psutil.net_if_addrs()
    return next((name for name, found in known.items() if address in (one.address for one in found)), None)
