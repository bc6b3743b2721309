"""Checks of several machines before the process group: all ranks run, have the same versions and reach each other.

Without these checks, torch waits half an hour for a missing rank, and a rank that publishes a loopback address ends in
an error that names neither the machine nor a fix.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore

from trainer.errors import RecipeError, RunError, require
from trainer.launching.local_store import INTERFACE, exchange_with_peers, interface_for_address
from trainer.report.summary import versions
from trainer.system.environment import read_int_variable
from trainer.system.text import escaped

FOREIGN = "the ranks' store holds content about rank {rank} that no rank wrote: check who can reach its port"
MAX_NAME_CHARS = 100  # characters of a name that a rank publishes


def rendezvous(seconds: float, environment: MutableMapping[str, str] = os.environ) -> TCPStore | None:
    """Wait for the other ranks of a torchrun over several machines, and compare their versions. Keep the returned store
    until the process group uses it; ``None`` on a single machine. Set ``GLOO_SOCKET_IFNAME`` if this machine's name
    would lead gloo to an address that no other machine can reach."""
    if "TORCHELASTIC_RUN_ID" not in environment or read_int_variable("GROUP_WORLD_SIZE", environment=environment) == 1:
        return None
    if "MASTER_ADDR" not in environment:
        raise RecipeError("MASTER_ADDR is not set: set it to the first rank's machine, as torchrun does")
    rank, size = (read_int_variable(name, environment=environment) for name in ("RANK", "WORLD_SIZE"))
    _choose_interface(environment)
    store = _store(rank, size, seconds, environment)
    libraries = {name: version for name, version in versions().items() if name != "python"}
    found = exchange_with_peers(store, rank, size, seconds, {"host": socket.gethostname(), "versions": libraries})
    _require_same_versions([_known(other, said) for other, said in enumerate(found)])
    return store


def _store(rank: int, size: int, seconds: float, environment: MutableMapping[str, str]) -> TCPStore:
    """Connect to the store that torchrun has chosen; the first rank hosts it if torchrun's agent does not."""
    address, port = environment["MASTER_ADDR"], read_int_variable("MASTER_PORT", environment=environment)
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and by_agent and environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        why = "a machine that leaves this run cannot come back, nor another one join"
        fix = "give torchrun TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, as launch/nodes.sh does"
        print(f"warning: {why}: {fix}", file=sys.stderr, flush=True)
    is_master, timeout = rank == 0 and not by_agent, timedelta(seconds=seconds)
    try:
        return TCPStore(address, port, size, is_master, timeout, wait_for_workers=False, multi_tenant=True)
    except (DistError, RuntimeError) as error:
        why = f"does not reach the first rank's machine, {address}, port {port} ({str(error).splitlines()[0]})"
        fix = "check that the name is known here and that ports are open between the machines, or set its address there"
        fix += " with torchrun --local-addr; see docs/launching/several-machines.md"
        raise RunError(f"rank {rank} on {socket.gethostname()} {why}: {fix}") from error


def _known(rank: int, said: Any) -> dict[str, Any]:
    """Return the machine and the library versions that a rank published, checked and escaped."""
    host, found = (said.get("host"), said.get("versions")) if isinstance(said, dict) else (None, None)
    if not isinstance(host, str) or not isinstance(found, dict):
        raise RunError(FOREIGN.format(rank=rank))
    libraries = {name: escaped(found[name])[:MAX_NAME_CHARS] for name in found}
    return {"host": escaped(host)[:MAX_NAME_CHARS], "versions": libraries}


def _require_same_versions(found: list[dict[str, Any]]) -> None:
    first = found[0]
    for other in found[1:]:
        for name, version in first["versions"].items():
            theirs = other["versions"].get(name)
            difference = f"{name} is {version} on {first['host']} and {theirs} on {other['host']}"
            require(theirs == version, f"{difference}: install the same version on all machines")


def _choose_interface(environment: MutableMapping[str, str]) -> None:
    """Choose gloo's interface if this machine's name leads to a loopback address, which gloo would publish."""
    name, head = socket.gethostname(), environment["MASTER_ADDR"]
    if INTERFACE in environment or not _leads_nowhere(name):
        return
    address = route_to(head)
    interface = interface_for_address(address) if address is not None else None
    if interface is None:
        known = ", ".join(other for _, other in socket.if_nameindex() if other != "lo") or "its interfaces"
        why = f"other machines can reach it (here, the name {name} is unknown or a loopback address)"
        fix = f"set {INTERFACE} (and NCCL_SOCKET_IFNAME on GPUs) to one of {known}"
        raise RecipeError(f"{name} finds no address by which {why}: {fix}")
    environment[INTERFACE] = interface
    if environment.get("LOCAL_RANK", "0") == "0":
        using = f"using {interface} ({address}), the way to {head}; {INTERFACE} sets another"
        print(f"{name} does not lead to this machine from others: {using}", file=sys.stderr, flush=True)


def _leads_nowhere(name: str) -> bool:
    """Return whether ``name`` is unknown here or a loopback address, such as Debian's 127.0.1.1."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def route_to(host: str) -> str | None:
    """Return the address from which this machine reaches ``host``; ``None`` for a loopback. Sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))
        address = str(way.getsockname()[0])
        return None if ipaddress.ip_address(address).is_loopback else address
    return None
