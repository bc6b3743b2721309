"""Whether a rank that does not go on is itself what takes long, or waits for others."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from helpers import LONG

from trainer.engine.deterministic import DeterministicLossTotals
from trainer.engine.loss_totals import LossTotals
from trainer.engine.window import Window
from trainer.faults.rank_status import RankStatus
from trainer.faults.watchdog import Watchdog
from trainer.values import Loss


class OnItsWay(torch.Tensor):
    """A tensor that the host waits for when it reads it."""


def what_waits(job) -> str | None:
    """What the watchdog says of a thread that is in ``job``, which waits in C code until it is let go."""
    lock = threading.Lock()
    lock.acquire()
    OnItsWay.tolist = lock.acquire  # as torch's own: its caller is the innermost frame of Python

    def run() -> None:
        with suppress(TypeError):  # of what it reads in the end
            job()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until = time.monotonic() + LONG
        while sys._current_frames()[thread.ident].f_code.co_name not in ("read", "job") and time.monotonic() < until:
            time.sleep(0.01)
        watched, peers = SimpleNamespace(_main=thread), SimpleNamespace(slowest_place=lambda: None)
        return Watchdog._waits_for(watched, peers, RankStatus(0, 3, "step"))
    finally:
        lock.release()
        thread.join()


@pytest.mark.parametrize("kind", [LossTotals, DeterministicLossTotals])
def test_a_rank_that_reads_what_nccl_has_not_brought_waits_for_others(monkeypatch, kind):
    """NCCL's collectives return at once: the host waits where it reads a number that comes of them."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    totals = kind(Window([], {"loss": 4.0}, samples=4), world_size=2)
    totals.add(Loss(torch.tensor(1.0), 2.0), is_empty=False)
    gathered = totals.gather(torch.tensor(1.0)).as_subclass(OnItsWay)
    assert what_waits(lambda: totals.read(gathered)) == "waits for other ranks"


def test_a_rank_that_reads_something_of_its_own_takes_long_itself():
    def job() -> None:
        torch.tensor([1.0]).as_subclass(OnItsWay).tolist()

    assert what_waits(job) is None
