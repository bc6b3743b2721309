"""Workers that die or hang are found and named, and leave nothing behind; signals to a group do not end them."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.contract import Data
from trainer.data.loader import Loader
from trainer.data.workers import MAX_AHEAD, WorkerError, _WorkerMonitor
from trainer.engine.quarantine import Quarantine
from trainer.launching.world import World
from trainer.models import MLP
from trainer.recipe import Memory, Recipe
from trainer.run.session import training_windows
from trainer.values import Request


class Faulty:
    """Sample ``at`` does something to the process that loads it."""

    def __init__(self, at, act):
        self.at, self.act = at, act

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == self.at:
            self.act()
        return torch.tensor(index), torch.tensor(os.getpid())


def die(number):
    os.kill(os.getpid(), number)


def loader(at, act, workers=2, **settings):
    return Loader(Faulty(at, act), Data().collate, workers=workers, **settings)


def load(act, **settings):
    requests = [Request([0]), Request([1]), Request([2, 3]), Request([6, 7]), Request([8]), Request([9])]
    return [batch for batch, _ in loader(7, act, **settings)(requests)]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("act", "ended"),
    [
        (lambda: die(signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: sys.exit(0), "exited with code 0"),
    ],
)
def test_a_dead_worker_is_named_with_what_it_was_loading(act, ended):
    said = rf"^data worker 1 of 2 \(pid \d+\) {ended} while loading samples (1, )?6, 7"
    with pytest.raises(WorkerError, match=said):
        load(act)


class Ending:
    """A worker's process as it is while it ends: its descriptors are closed some time before it can be waited for."""

    pid, exitcode = 1234, 3

    def __init__(self, seconds):
        self.sentinel, self.theirs = os.pipe()
        self.gone = threading.Event()
        self.closing = threading.Timer(seconds, os.close, [self.theirs])
        self.closing.start()

    def join(self, timeout):
        assert timeout > 1
        self.gone.set()

    def is_alive(self):
        return not self.gone.is_set()


@pytest.fixture
def ending():
    """A worker that is ending, and a function: the first of what it loads, when loading it raises an error."""
    process = Ending(0.2)

    def first(error):
        def hand_over():
            raise error

        watch = _WorkerMonitor(300.0)
        next(watch.record([Request([4, 5])]))
        watch.begin(SimpleNamespace(_workers=[process], _shutdown_workers=None))
        watch.batches = iter(hand_over, None)
        return next(iter(watch))

    yield process, first
    process.closing.join()
    os.close(process.sentinel)


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError, FileNotFoundError])
def test_a_worker_that_ends_while_it_hands_a_micro_batch_over_is_named(ending, error):
    with pytest.raises(WorkerError, match=r"data worker 0 of 1 \(pid 1234\) exited with code 3 .*samples 4, 5"):
        ending[1](error())


def test_an_error_that_a_worker_passes_on_is_not_waited_for(ending):
    ending[0].join = lambda timeout: pytest.fail("waited for the end of a worker that lives")
    with pytest.raises(FileNotFoundError, match="Caught"):
        ending[1](FileNotFoundError("Caught FileNotFoundError in DataLoader"))


def test_workers_that_a_thread_keeps_do_not_keep_the_run(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 1e4)  # torch waits so long for each
    monkeypatch.setattr("trainer.data.workers.WORKER_CLOSE_TIMEOUT", 0.3)
    batches = loader(0, lambda: threading.Thread(target=threading.Event().wait).start(), workers=1)
    assert len(list(batches([Request([0]), Request([1])]))) == 2


def children():
    pid = os.getpid()
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
def test_a_worker_that_stands_still_is_named_and_none_is_left_then_or_after_an_early_end():
    before = children()
    batches = loader(-1, None)(Request([i]) for i in range(50))
    next(batches)
    assert len(children() - before) >= 2
    batches.close()
    said = r"worker 1 of 2 \(pid \d+\) has not answered for 2 s .* 6, 7.*worker_timeout"
    with pytest.raises(WorkerError, match=said):
        load(lambda: die(signal.SIGSTOP), worker_timeout=2)
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children() - before]
    assert [command for command in commands if "resource_tracker" not in command] == []


def test_a_slow_worker_is_waited_for(monkeypatch):
    monkeypatch.setattr("trainer.data.workers.POLL_INTERVAL", 0.1)
    assert len(load(lambda: time.sleep(0.5), worker_timeout=300)) == 6


@pytest.mark.parametrize(("micro_batches", "ahead"), [(16, 18), (64, 66), (300, MAX_AHEAD)])
def test_a_whole_window_is_loaded_while_the_one_before_is_computed(micro_batches, ahead):
    """A window is taken whole before it is computed: with a fixed depth the device would wait for most of the next."""
    data = Data()
    data.workers = 2
    data.train = [{"pixel_values": torch.zeros(1, 8, 8), "labels": torch.tensor(0)}] * 4 * micro_batches
    memory = Memory(micro_batch_size=1)
    recipe = Recipe(model=MLP(image_size=8, num_classes=2), data=data, batch_size=micro_batches, memory=memory)
    fabric = SimpleNamespace(global_rank=0, world_size=1, device=torch.device("cpu"))
    parts = {"recipe": recipe, "fabric": fabric, "world": World("python", "cpu", 1), "quarantine": Quarantine()}
    windows, asked = training_windows(SimpleNamespace(agreement=list, **parts)), []
    load = windows.fetch
    windows.fetch = lambda requests: load(asked.append(request) or request for request in requests)
    found = windows.epoch(0)
    assert len(next(found)) == micro_batches
    assert len(asked) == micro_batches + ahead
    found.close()


def group_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        die(number)


def test_a_signal_to_the_whole_group_does_not_end_the_workers():
    assert len(load(group_signals)) == 6


def test_torchs_handler_does_not_interrupt_the_process_elsewhere():
    before = signal.getsignal(signal.SIGCHLD)
    batches = loader(-1, None, workers=1)(Request([i]) for i in range(9))
    _, pid = next(batches)
    assert signal.getsignal(signal.SIGCHLD) == before
    os.kill(int(pid), signal.SIGKILL)
    os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOWAIT)  # a handler would raise in here
    with pytest.raises(WorkerError, match="SIGKILL"):
        list(batches)
