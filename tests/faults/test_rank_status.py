"""What is known of where a rank is, whether it waits for others, and what is said of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from helpers import wait_until

from trainer import Memory, Recipe, Run
from trainer.api import fit
from trainer.data import Digits
from trainer.engine.deterministic import DeterministicLossTotals
from trainer.engine.loss_totals import LossTotals
from trainer.engine.window import Window
from trainer.errors import RecipeError, RunError
from trainer.faults.rank_status import RankStatus, SharedStatus, open_shared_status, read_shared_status
from trainer.faults.watchdog import Watchdog
from trainer.memory.monitor import MemoryMonitor
from trainer.models import VisionTransformer
from trainer.system.error_reports import describe_error, get_location, report, set_location
from trainer.values import Loss

NINE = tuple(range(9))
FEW, MANY = "samples 4, 17, 23", "samples 0, 1, 2, 3, 4, 5, 6, 7, …"
PLACES = [
    (
        (1, 12, "backward", (4, 17, 23)),
        "step 13, backward, samples 4, 17, 23",
        "at step 13 in backward (samples 4, 17, 23)",
    ),
    (
        (0, 12, "evaluation", tuple(range(9))),
        f"after step 12, evaluation, {MANY}",
        f"after step 12 in evaluation ({MANY})",
    ),
    ((0, 12, None), "after step 12, between steps", "after step 12, between steps"),
    ((2, 0, "init"), "before step 1, building the model", "before step 1 in building the model"),
]


@pytest.mark.parametrize(("place", "line", "end"), PLACES)
def test_a_place_in_words(place, line, end):
    place = RankStatus(*place)
    assert str(place) == f"rank {place.rank}, {line}"
    assert place.without_rank() == end
    assert RankStatus.from_dict(place.to_dict()) == place


def test_a_black_box_is_read_by_another_after_its_rank_has_gone():
    monitor = MemoryMonitor(torch.device("cpu"))
    box = SharedStatus(monitor)
    memory = open_shared_status(os.getpid())
    monitor.step = 12
    monitor.samples = [4, 17, 23]
    monitor.enter("backward")
    place = read_shared_status(memory, 3)
    assert place == RankStatus(3, 12, "backward", (4, 17, 23), monitor.moves)
    monitor.on_load(range(1000))
    assert read_shared_status(memory, 3).samples == tuple(range(9))
    box.close()
    monitor.enter(None)
    assert read_shared_status(memory, 3).activity == "loading"
    memory.close()
    assert open_shared_status(os.getpid()) is None


def test_the_status_of_a_rank_is_not_that_of_the_rank_it_watches():
    """A rank that watches another has both open: its own was opened last here, and has the higher descriptor."""
    code = """if True:
        import time, torch
        from trainer.faults.rank_status import SharedStatus
        from trainer.memory.monitor import MemoryMonitor
        box = SharedStatus(MemoryMonitor(torch.device("cpu")))
        print("open", flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as watched:
        assert watched.stdout.readline() == "open\n"
        status = open_shared_status(watched.pid)
        assert open_shared_status(os.getpid()) is None
        monitor = MemoryMonitor(torch.device("cpu"))
        monitor.step = 5
        box = SharedStatus(monitor)
        own = open_shared_status(os.getpid())
        assert (read_shared_status(own, 0).steps, read_shared_status(status, 1).steps) == (5, 0)
        box.close()
        watched.kill()


class Watching(VisionTransformer):
    """Writes down what the monitor would say, from within the forward."""

    places = ()
    monitor = None

    def losses(self, module, batch):
        place = RankStatus.from_monitor(0, self.monitor)
        if module.training or place.activity == "evaluation":  # not what the first step compares beside it
            self.places.append((place.step_number(), place.activity, place.samples, batch["labels"].tolist()))
        yield from super().losses(module, batch)


def test_a_run_knows_its_samples_in_every_phase(tmp_path, monkeypatch):
    model = Watching("custom", patch_size=4, layers=1, heads=2, width=8, mlp_width=8)
    Watching.places = []

    def make(device):
        Watching.monitor = MemoryMonitor(device)
        return Watching.monitor

    monkeypatch.setattr("trainer.run.session.MemoryMonitor", make)
    data = Digits(test_fraction=0.97)
    run = Run(dir=str(tmp_path / "run"), progress=False)
    fit(Recipe(model=model, data=data, batch_size=24, max_steps=2, memory=Memory(micro_batch_size=8), run=run))
    in_training = [seen for seen in Watching.places if seen[1] == "forward"]
    assert [seen[0] for seen in in_training] == ["step 1"] * 3 + ["step 2"] * 3
    in_evaluation = [seen for seen in Watching.places if seen[1] == "evaluation"]
    assert {seen[0] for seen in in_evaluation} == {"after step 2"}
    for _, phase, samples, labels in in_training + in_evaluation:
        split = data.train if phase == "forward" else data.test
        assert [int(split[i]["labels"]) for i in samples] == labels[: len(samples)]
        assert len(samples) == min(len(labels), 9)


def test_an_error_of_ones_own_code_is_passed_on_with_its_place(tmp_path):
    class Fails(VisionTransformer):
        def losses(self, module, batch):
            raise KeyError("pixels")
            yield

    model = Fails("custom", patch_size=4, layers=1, heads=2, width=8, mlp_width=8)
    run = Run(dir=str(tmp_path / "run"), progress=False)
    recipe = Recipe(model=model, data=Digits(), batch_size=2, memory=Memory(micro_batch_size=2), run=run)
    with pytest.raises(KeyError) as caught:
        fit(recipe)
    assert get_location(caught.value).startswith("rank 0, step 1, forward, samples ")


def test_errors_are_reported_once_and_only_those_of_nobodys_making_with_a_traceback(capsys, monkeypatch):
    monkeypatch.setitem(os.environ, "RANK", "2")
    for error, expected in [
        (RecipeError("a key\n  and its fix"), "[rank 2] trainer: error: a key and its fix\n"),
        (RunError("too bad"), "[rank 2] trainer: error: too bad\n"),
    ]:
        set_location(error, "rank 2, step 1, forward")
        report(error)
        report(error)
        assert capsys.readouterr().err == expected
    error = ZeroDivisionError("division by zero")
    set_location(error, "rank 2, step 1, forward")
    report(error)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "[rank 2] trainer: error: rank 2, step 1, forward: ZeroDivisionError: division by zero"
    assert second == "ZeroDivisionError: division by zero"  # it was never raised: there are no frames
    assert describe_error(ValueError("x" * 1000)).endswith("x …")
    assert describe_error(AssertionError()) == "AssertionError"


# Waiting


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
        wait_until(lambda: sys._current_frames()[thread.ident].f_code.co_name in ("read", "job"))
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
