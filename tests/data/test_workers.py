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

from trainer.cli import run
from trainer.contract import Data
from trainer.data.loader import Loader
from trainer.data.workers import WorkerError, _Requests, _Watch
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


def load(act, **settings):
    loader = Loader(Faulty(7, act), Data().collate, workers=2, **settings)
    requests = [Request([0]), Request([1]), Request([2, 3]), Request([6, 7]), Request([8]), Request([9])]
    return [batch for batch, _ in loader(requests)]


@pytest.mark.parametrize(
    ("act", "ended"),
    [
        (lambda: die(signal.SIGKILL), r"was killed by SIGKILL .*memory"),
        (lambda: os._exit(3), "exited with code 3"),
    ],
)
def test_a_dead_worker_is_named_with_what_it_was_loading(act, ended):
    since = time.monotonic()
    with pytest.raises(WorkerError, match=rf"^data worker 1 of 2 \(pid \d+\) {ended.split(' .*')[0]}") as caught:
        load(act)
    assert time.monotonic() - since < 15
    assert "samples 6, 7" in str(caught.value) or "samples 1, 6, 7" in str(caught.value)


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


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError, FileNotFoundError])
def test_a_worker_that_ends_while_it_hands_a_micro_batch_over_is_named(error):
    def hand_over():
        raise error

    process = Ending(1.5)  # on a machine with much else to do
    log = _Requests([Request([4, 5])])
    next(iter(log))
    watch = _Watch(SimpleNamespace(_workers=[process], _shutdown_workers=None), log, 300.0)
    watch.batches = iter(hand_over, None)
    with pytest.raises(WorkerError, match=r"data worker 0 of 1 \(pid 1234\) exited with code 3 .*samples 4, 5"):
        next(iter(watch))
    process.closing.join()
    os.close(process.sentinel)


def test_an_error_that_a_worker_passes_on_is_not_waited_for():
    process = Ending(0.0)
    process.join = lambda timeout: pytest.fail("waited for the end of a worker that lives")
    watch = _Watch(SimpleNamespace(_workers=[process], _shutdown_workers=None), _Requests([]), 300.0)
    watch.batches = iter(lambda: (_ for _ in ()).throw(FileNotFoundError("Caught FileNotFoundError in DataLoader")), 0)
    with pytest.raises(FileNotFoundError, match="Caught"):
        next(iter(watch))
    process.closing.join()
    os.close(process.sentinel)


@pytest.mark.parametrize("code", [None, 0, 3, "enough"])
def test_a_worker_that_leaves_by_sys_exit_is_named(code):
    with pytest.raises(WorkerError, match=r"^data worker 1 of 2 \(pid \d+\) exited with code [013] while it loaded"):
        load(lambda: sys.exit(code))


def test_workers_that_a_thread_keeps_do_not_keep_the_run(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 120.0)  # torch waits so long for each
    batches = Loader(
        Faulty(0, lambda: threading.Thread(target=time.sleep, args=(600,)).start()), Data().collate, workers=1
    )
    since = time.monotonic()
    assert len(list(batches([Request([0]), Request([1])]))) == 2
    assert time.monotonic() - since < 100


def test_a_worker_that_stands_still_is_named_and_ended():
    since = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"worker 1 of 2 \(pid \d+\) has not answered for 2 s .* 6, 7.*worker_timeout"
    ):
        load(lambda: die(signal.SIGSTOP), worker_timeout=2)
    assert time.monotonic() - since < 20


def children():
    pid = os.getpid()
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
def test_no_worker_is_left_whether_it_ends_early_or_hangs():
    before = children()
    batches = Loader(Faulty(-1, None), Data().collate, workers=2)(Request([i]) for i in range(50))
    next(batches)
    assert len(children() - before) >= 2
    batches.close()
    with pytest.raises(WorkerError):
        load(lambda: die(signal.SIGSTOP), worker_timeout=1)
    left = children() - before
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
    assert [command for command in commands if "resource_tracker" not in command] == []


def test_a_slow_worker_is_waited_for():
    assert len(load(lambda: time.sleep(3), worker_timeout=30)) == 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_whole_group_does_not_end_the_workers(number):
    assert len(load(lambda: die(number))) == 6


def test_torchs_handler_does_not_interrupt_the_process_elsewhere():
    before = signal.getsignal(signal.SIGCHLD)
    batches = Loader(Faulty(-1, None), Data().collate, workers=1)(Request([i]) for i in range(9))
    _, pid = next(batches)
    assert signal.getsignal(signal.SIGCHLD) == before
    os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.5)  # a handler would have raised in here
    with pytest.raises(WorkerError, match="SIGKILL"):
        list(batches)


RECIPE = """
import os, signal
from dataclasses import dataclass
import torch
from trainer import Data, Memory, Recipe, Run
from trainer.models import MLP

class Split(list):
    def __getitem__(self, index):
        if index == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

@dataclass
class Own(Data):
    workers: int = 1
    num_classes = 2
    channels = 1
    image_size = 4

    def prepare(self, tokenizer=None):
        self.train = Split([{"pixel_values": torch.ones(1, 4, 4), "labels": i % 2} for i in range(40)])

recipe = Recipe(model=MLP([4]), data=Own(), batch_size=8, memory=Memory(micro_batch_size=4),
                run=Run(progress=False, predict=False))
"""


def test_a_run_whose_worker_is_killed_ends_with_one_line(tmp_path, capsys):
    path = tmp_path / "killed.py"
    path.write_text(RECIPE)
    assert run(["fit", str(path), "--run.dir", str(tmp_path / "run")]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert lines[0].startswith("trainer: error: data worker 0 of 1 (pid ")
    assert "11" in lines[0]
