"""The store of the ranks of one machine: where it listens, how they meet in it, and what is believed of it."""

from __future__ import annotations

import os
import socket
import sys
import threading

import pytest
from helpers import LONG
from helpers.ranks import free_port
from helpers.started import listening_addresses
from torch.distributed import DistError, TCPStore

from trainer.errors import RecipeError, RunError
from trainer.launching import local_store
from trainer.launching.local_store import ADDRESS, bind_to_loopback, join_local_store, loopback_store
from trainer.launching.world import World

if not sys.platform.startswith("linux"):
    pytest.skip("reads /proc", allow_module_level=True)

HERE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def rank_of(number, at, size=2):
    """What a launcher of one machine that hosts no store tells a rank."""
    return {"RANK": str(number), "WORLD_SIZE": str(size), "MASTER_ADDR": "node7", "MASTER_PORT": str(at)}


def test_the_store_listens_on_loopback_alone():
    before = set(listening_addresses([os.getpid()]))
    store = loopback_store()
    (new,) = set(listening_addresses([os.getpid()])) - before
    assert new == f"0100007F:{store.port:04X}"
    again = TCPStore(ADDRESS, store.port, is_master=True, wait_for_workers=False, multi_tenant=True)  # the group's
    again.set("a", "b")
    assert store.get("a") == b"b"
    assert set(listening_addresses([os.getpid()])) - before == {new}


def test_the_first_process_hosts_it_where_fabric_starts_the_others():
    told = {"MASTER_ADDR": "node7"}
    store = join_local_store(World("python", "cpu", 2), 1.0, told)
    assert told == {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(store.port), **HERE}
    assert join_local_store(World("python", "cpu", 2), 1.0, dict(told, LOCAL_RANK="1")) is None
    again = join_local_store(World("python", "cpu", 2), 1.0, dict(told, LOCAL_RANK="0"))  # a second run of the process
    again.set("a", "b")
    assert store.get("a") == b"b"


def test_a_store_of_the_launcher_is_left_to_it_and_interfaces_that_somebody_has_chosen_stay():
    told = rank_of(0, 1) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert join_local_store(World("torchrun", "cpu", 2), 1.0, told) is None
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("node7", "1")
    told = {"GLOO_SOCKET_IFNAME": "eth7"}
    bind_to_loopback(told)
    assert told == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "lo"}


def test_a_port_that_is_taken_and_one_that_is_none_are_refused():
    with socket.create_server((ADDRESS, 0)) as other:
        at = other.getsockname()[1]
        with pytest.raises(RecipeError, match=rf"^MASTER_PORT={at} in the environment is taken by another process: "):
            join_local_store(World("python", "cpu", 2), 1.0, {"MASTER_PORT": str(at)})
    for wrong in ("x", "-1", "65536", "²"):
        with pytest.raises(RecipeError, match="must be an integer from 0 to 65535"):
            join_local_store(World("python", "cpu", 2), 1.0, {"MASTER_PORT": wrong})


def test_ranks_of_no_launcher_meet_in_one_store():
    at, found = free_port(), {}

    def come(number):
        found[number] = join_local_store(World("slurm", "cpu", 2), LONG, rank_of(number, at))

    other = threading.Thread(target=come, args=(1,))
    other.start()
    come(0)
    other.join(LONG)
    found[0].set("a", "b")
    assert found[1].get("a") == b"b"


def test_a_rank_that_does_not_come_is_named_and_a_first_one_too():
    with pytest.raises(RunError, match=r"of 3 ranks, 1, 2 have not come within 0\.5 s"):
        join_local_store(World("slurm", "cpu", 3), 0.5, rank_of(0, free_port(), 3))
    with pytest.raises(RunError, match=r"rank 1: the first rank has not come within 0\.5 s: .* nothing is lost"):
        join_local_store(World("slurm", "cpu", 2), 0.5, rank_of(1, free_port()))


def test_the_wait_for_the_first_rank_takes_no_longer_than_it_may(monkeypatch):
    """Torch tries to connect twice, and takes the whole timeout for each."""
    asked = []

    def store(*args, timeout, **how):
        asked.append(timeout.total_seconds())
        raise DistError

    monkeypatch.setattr(local_store, "TCPStore", store)
    with pytest.raises(RunError, match=r"rank 1: the first rank has not come within 6 s"):
        join_local_store(World("slurm", "cpu", 2), 6.0, rank_of(1, 1))
    assert asked == [3.0]
