"""What one rank says when it leaves a group is heard in time, once, and by nobody it does not concern."""

from __future__ import annotations

import threading
import time
import types
from types import SimpleNamespace

import pytest
import torch
from helpers import wait_until

from trainer import Memory, Recipe, Run
from trainer.data import Digits
from trainer.engine.loss_totals import LossTotals
from trainer.engine.window import Window
from trainer.faults import process_group_recovery
from trainer.faults.process_group_recovery import ProcessGroupRecovery
from trainer.models import MLP
from trainer.run import setup
from trainer.values import Loss


@pytest.fixture
def regrouping(monkeypatch):
    """On one rank, with a store of its own, in a process that is not ended and looks often."""
    monkeypatch.setattr(process_group_recovery, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(process_group_recovery, "REQUEST_TIMEOUT", 0.05)
    ended = []
    monkeypatch.setattr(process_group_recovery.os, "_exit", ended.append)
    store = torch.distributed.HashStore()
    monkeypatch.setattr(process_group_recovery.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed.HashStore, "clone", lambda self: self, raising=False)
    made = []

    def make(rank: int = 0, device: str = "cpu") -> ProcessGroupRecovery:
        fabric = SimpleNamespace(global_rank=rank, world_size=1, device=torch.device(device), strategy=None)
        made.append(ProcessGroupRecovery(fabric))
        return made[-1]

    yield SimpleNamespace(make=make, ended=ended)
    for one in made:
        one.close()


def test_a_step_whose_collectives_were_aborted_updates_nothing(monkeypatch):
    """NCCL ends an aborted collective without an error, and leaves the tensors as they are."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    totals = LossTotals(Window([], {"loss": 4.0}, samples=4), world_size=2)
    totals.add(Loss(torch.tensor(1.0), 2.0), is_empty=False)
    gathered = totals.gather(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="collectives were aborted"):
        totals.read(gathered)
    assert totals.must_skip(gathered) == 1  # if the host reads it too late


def test_a_rank_that_has_met_the_others_is_not_called_out_again_by_a_late_look(regrouping, monkeypatch):
    aborted = []
    monkeypatch.setattr(ProcessGroupRecovery, "_abort", lambda self: aborted.append(self.meetings))
    one = regrouping.make()
    with one.lock:
        one.request("out of memory")
        time.sleep(0.1)  # the thread has seen it, and waits for the lock
        one.meetings += 1
    time.sleep(0.1)
    assert aborted == []
    assert one.requested_reason() is None
    one.request("again")
    wait_until(lambda: aborted == [1])


def test_the_others_leave_before_the_connections_of_a_rank_break(regrouping, monkeypatch):
    """Over NCCL, a rank that sees broken connections before it is called may end."""
    left = []
    monkeypatch.setattr(ProcessGroupRecovery, "_abort", lambda self: left.append(self.fabric.global_rank))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    slept = []

    def sleep(seconds):
        if threading.current_thread() is threading.main_thread():
            slept.append(seconds)
            wait_until(lambda: left == [1])  # on a busy machine later than at the next look

    monkeypatch.setattr(process_group_recovery, "time", types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    before = threading.active_count()
    ranks = [regrouping.make(number, "cuda") for number in range(2)]
    ranks[0].done.set()
    wait_until(lambda: threading.active_count() <= before + 1)  # its own thread would leave, too, on a busy machine
    ranks[0].request("out of memory")
    ranks[0].rejoin()
    assert left == [1, 0]
    assert slept == [process_group_recovery.POLL_INTERVAL]


@pytest.mark.parametrize(("recover", "handling"), [(True, "0"), (False, "1")])
def test_torch_leaves_errors_of_nccl_to_a_run_that_recovers(tmp_path, monkeypatch, recover, handling):
    """Also under torchrun, which sets this for its ranks."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    seen = []

    def launch(*_):
        seen.append(process_group_recovery.os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "launch", launch)
    memory = Memory(micro_batch_size=1)
    recipe = Recipe(model=MLP([4]), data=Digits(), batch_size=2, memory=memory, run=Run(recover=recover))
    with pytest.raises(KeyboardInterrupt), setup.training_session(recipe):
        pass
    assert seen == [handling]


def test_when_a_run_has_ended_no_later_one_hears_what_it_called_and_its_process_is_not_ended(regrouping, monkeypatch):
    monkeypatch.setattr(process_group_recovery, "LEAVE_TIMEOUT", 0.1)
    first = regrouping.make()
    first.request("out of memory")
    assert first.requested_reason() == "out of memory"
    first.close()
    assert regrouping.make().requested_reason() is None
    time.sleep(0.3)
    assert regrouping.ended == []
