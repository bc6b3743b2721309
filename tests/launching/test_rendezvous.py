"""What the ranks of several machines find out of each other before they train."""

from __future__ import annotations

import json
import socket
import threading
from types import SimpleNamespace

import pytest
import torch
from helpers import LONG
from helpers.ranks import free_port
from torch.distributed import PrefixStore, TCPStore

from trainer.errors import RecipeError, RunError
from trainer.launching.rendezvous import INTERFACE, interface_for_address, rendezvous, route_to
from trainer.report.summary import versions
from trainer.run import collectives
from trainer.run.collectives import all_gather_json, broadcast_json


def torchrun(rank, at, size=2):
    """What torchrun tells a rank, one a machine, where it does not host their store."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "GROUP_WORLD_SIZE": size, "LOCAL_RANK": 0, "MASTER_PORT": at}
    texts = {"TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "127.0.0.1", INTERFACE: "lo"}
    return {name: str(number) for name, number in numbers.items()} | texts


def meet_beside(other, seconds=LONG):
    """Meet as rank 0, while ``other`` does in a thread what rank 1 would do with the store's port."""
    at = free_port()
    thread = threading.Thread(target=other, args=(at,), daemon=True)
    thread.start()
    try:
        return rendezvous(seconds, torchrun(0, at))
    finally:
        thread.join(LONG)


def words_of_rank_1(at, **changed):
    store = TCPStore("127.0.0.1", at, 2, is_master=False, wait_for_workers=False)
    PrefixStore("meeting", store).set("1", json.dumps({"host": "node2", "versions": versions() | changed}))


def test_two_ranks_meet_and_their_store_serves_the_process_group():
    met = []
    store = meet_beside(lambda at: met.append(rendezvous(LONG, torchrun(1, at))))
    store.set("afterwards", "1")
    assert met[0].get("afterwards") == b"1"


def test_a_single_machine_has_nobody_to_meet():
    assert rendezvous(1.0, {}) is None
    assert rendezvous(1.0, torchrun(0, 1) | {"GROUP_WORLD_SIZE": "1"}) is None


@pytest.mark.slow
def test_a_rank_that_does_not_come_and_a_store_that_cannot_be_reached_are_named():
    with pytest.raises(RunError, match=r"of 3 ranks, 1, 2 have not come within 0\.5 s"):
        rendezvous(0.5, torchrun(0, free_port(), size=3))
    at = free_port()
    said = rf"rank 1 on \S+ does not reach the first rank's machine, 127\.0\.0\.1, port {at}"
    with pytest.raises(RunError, match=said):
        rendezvous(1.0, torchrun(1, at))


def test_other_versions_are_refused_with_both_and_their_machines():
    mine = versions()["torch"]
    with pytest.raises(RecipeError, match=rf"torch is {mine} on {socket.gethostname()} and 1\.0 on node2: install"):
        meet_beside(lambda at: words_of_rank_1(at, torch="1.0"))
    meet_beside(lambda at: words_of_rank_1(at, python="2.7"))  # that alone changes nothing


def test_the_interface_of_an_address():
    assert interface_for_address("127.0.0.1") == "lo"
    assert interface_for_address("192.0.2.1") is None
    assert route_to("127.0.0.1") is None


def look(folders, rank_is_alone):
    """As on two machines of one rank each, with a directory each: the refusal of this rank."""
    rank = torch.distributed.get_rank()
    local, device = rank if rank_is_alone else 0, torch.device("cpu")
    fabric = SimpleNamespace(local_rank=local, world_size=2, global_rank=rank, device=device)
    patience, collectives.PROBE_TIMEOUT = collectives.PROBE_TIMEOUT, 0.5
    try:
        collectives.require_shared_filesystem(fabric, folders[rank])
    except RecipeError as refusal:
        return str(refusal)
    finally:
        collectives.PROBE_TIMEOUT = patience
    return None


def test_one_directory_of_two_machines_is_fine_and_left_as_it_was_and_ranks_of_one_are_not_asked(ranks, tmp_path):
    assert ranks(2).run(look, [tmp_path, tmp_path], False) == [None, None]
    assert list(tmp_path.glob(f"{collectives.PREFIX}*")) == []
    assert ranks(2).run(look, [tmp_path, tmp_path / "nowhere"], True) == [None, None]


def test_two_directories_are_refused_on_all_ranks(ranks, tmp_path):
    folders = [tmp_path, tmp_path / "other"]
    folders[1].mkdir()
    here = socket.gethostname()
    for folder, refusal in zip(folders, ranks(2).run(look, folders, False), strict=True):
        assert f"run.dir={folder} is not one directory for all machines: {here} does not see what" in refusal
    assert list(tmp_path.glob(f"**/{collectives.PREFIX}*")) == []


def exchange(value):
    fabric = SimpleNamespace(world_size=2, global_rank=torch.distributed.get_rank(), device=torch.device("cpu"))
    own = value * (fabric.global_rank + 1)
    return broadcast_json(fabric, own), all_gather_json(fabric, own)


def test_what_ranks_tell_each_other_is_json(ranks):
    first, second = ranks(2).run(exchange, ["ä\ud800", None, 1.5])
    assert first == second == (["ä\ud800", None, 1.5], [["ä\ud800", None, 1.5], ["ä\ud800", None, 1.5] * 2])
    with pytest.raises(AssertionError, match="not JSON serializable"):
        ranks(2).run(exchange, [{1}])
