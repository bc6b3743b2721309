"""What one rank says when it leaves a group is heard in time, once, and by nobody it does not concern."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from trainer import regroup
from trainer.contract import Loss
from trainer.engine.totals import LossTotals
from trainer.engine.window import Window
from trainer.regroup import Regrouping


@pytest.fixture
def regrouping(monkeypatch):
    """On one rank, with a store of its own, in a process that is not ended and looks often."""
    monkeypatch.setattr(regroup, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(regroup, "SECONDS_TO_HEAR", 0.05)
    ended = []
    monkeypatch.setattr(regroup.os, "_exit", ended.append)
    store = torch.distributed.HashStore()
    monkeypatch.setattr(regroup.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed.HashStore, "clone", lambda self: self, raising=False)
    fabric = SimpleNamespace(global_rank=0, world_size=1, device=torch.device("cpu"))
    made = []

    def make() -> Regrouping:
        made.append(Regrouping(fabric))
        return made[-1]

    yield SimpleNamespace(make=make, ended=ended)
    for one in made:
        one.close()


def until(condition) -> bool:
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_step_whose_collectives_were_aborted_updates_nothing(monkeypatch):
    """NCCL ends an aborted collective without an error, and leaves the tensors as they are."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    totals = LossTotals(Window([], {"loss": 4.0}, samples=4), world_size=2)
    totals.add(Loss(torch.tensor(1.0), 2.0), is_empty=False)
    with pytest.raises(RuntimeError, match="collectives were aborted"):
        totals.read(torch.tensor(1.0))


def test_a_rank_that_has_met_the_others_is_not_called_out_again_by_a_late_look(regrouping, monkeypatch):
    aborted = []
    monkeypatch.setattr(Regrouping, "_abort", lambda self: aborted.append(self.meetings))
    one = regrouping.make()
    with one.lock:
        one.call("out of memory")
        time.sleep(0.1)  # the thread has seen it, and waits for the lock
        one.meetings += 1
    time.sleep(0.1)
    assert aborted == []
    assert one.called() is None
    one.call("again")
    assert until(lambda: aborted == [1])


def test_a_later_run_over_the_same_store_does_not_hear_what_an_earlier_one_called(regrouping):
    first = regrouping.make()
    first.call("out of memory")
    assert first.called() == "out of memory"
    first.close()
    second = regrouping.make()
    assert second.called() is None


def test_a_process_whose_training_has_ended_is_not_ended_later(regrouping, monkeypatch):
    monkeypatch.setattr(regroup, "SECONDS_TO_LEAVE", 0.1)
    one = regrouping.make()
    one.call("out of memory")
    assert one.called()
    one.close()
    time.sleep(0.3)
    assert regrouping.ended == []
