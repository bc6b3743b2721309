"""Signals that ask a run to stop."""

from __future__ import annotations

import csv
import math
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest
from helpers import LONG
from helpers.resumed import TESTED, FewDigits, losses, recipe, saved

from trainer.api import fit
from trainer.data.workers import _init_worker
from trainer.engine.loss_check import COMPARED
from trainer.errors import RunStoppedError
from trainer.faults.signals import StopSignals, stop_signals
from trainer.models import MLP
from trainer.supervise.attempt import FitCommand
from trainer.supervise.supervisor import RestartPolicy, Supervisor
from trainer.system.processes import detach_from_rank

WAIT = """
import time
from trainer.faults.signals import StopSignals
with StopSignals() as signals:
    print("ready", flush=True)
    while signals.received is None:
        time.sleep(0.01)
    print(signals.received, flush=True)
    time.sleep(600)
"""


def waiting(*before, stderr=subprocess.PIPE):
    """A process that waits for signals, started by the command ``before``."""
    command, pipe = [*before, sys.executable, "-c", WAIT], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=stderr, text=True, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_the_first_is_noted_and_the_second_ends_the_process(name):
    process = waiting()
    process.send_signal(getattr(signal, name))
    assert process.stdout.readline() == f"{name}\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LONG)
    assert process.returncode == 128 + signal.SIGTERM
    said = "saving a checkpoint at the end of this step, then exiting; a second signal exits at once"
    assert errors == f"{name} received: {said}\n"


def test_a_terminal_that_is_closed_asks_once_however_often_it_says_so_and_is_written_to_no_more():
    ours, terminal = pty.openpty()
    process = waiting(stderr=terminal)
    os.close(terminal)
    os.close(ours)  # from here on, writing there is an input/output error
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "SIGHUP\n"
    process.send_signal(signal.SIGHUP)  # of the shell, after that of the kernel
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG) == 128 + signal.SIGTERM


def test_what_nohup_starts_is_not_asked_by_its_terminal():
    process = waiting("nohup")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    process.kill()
    process.communicate()


@pytest.mark.parametrize("is_closed", [False, True], ids=["none", "closed"])
def test_a_standard_error_that_is_closed_or_none_is_no_error_of_the_handler(is_closed, monkeypatch):
    stream = open(os.devnull, "w")  # noqa: SIM115
    stream.close()
    child = os.fork()
    if child == 0:
        os.close(2)
        sys.__stderr__ = stream if is_closed else None
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os._exit(0 if signals.received == "SIGHUP" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_helpers_and_data_workers_do_not_hear_of_a_closed_terminal():
    for begin in (detach_from_rank, partial(_init_worker, 0)):
        child = os.fork()
        if child == 0:
            begin()
            os.kill(os.getpid(), signal.SIGHUP)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_supervisor_takes_a_closed_terminal_for_one_request(tmp_path):
    supervisor = Supervisor(FitCommand("vit_digits", (), str(tmp_path)), RestartPolicy(0, 1, 0.0, -1))
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
        supervisor._ask(number, None)
    assert supervisor.asked == [signal.SIGHUP, signal.SIGTERM]
    assert signal.SIGHUP in stop_signals()


def test_handlers_are_put_back_and_what_the_launcher_sends_after_a_failure_is_noted_without_a_word(capfd):
    before = [signal.getsignal(number) for number in stop_signals()]
    with StopSignals(first=False) as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == "SIGUSR1"
    with StopSignals(expected=lambda: True) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGTERM"
    assert capfd.readouterr().err == ""
    assert [signal.getsignal(number) for number in stop_signals()] == before


def test_elsewhere_than_in_the_main_thread_it_does_nothing():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with StopSignals() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.received))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, None)]


def test_a_forked_child_dies_of_the_signal():
    with StopSignals() as signals:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert signals.received is None


# A signal during an evaluation: it is left at once, everything is saved, and the resumed run makes it again

pytestmark = pytest.mark.usefixtures("no_pictures")

EVALUATED_AT_ONCE = 8  # twice the micro-batch of training


class ValidatedDigits(FewDigits):
    """With a validation set, which is the test set."""

    def prepare(self, tokenizer: Any = None) -> None:
        super().prepare(tokenizer)
        self.val = self.test


class Interrupting(MLP):
    """This process gets a SIGTERM at the second forward of the n-th evaluation of a run."""

    evaluation: int | None = None
    forwards = 0

    def losses(self, module: Any, batch: Any) -> Any:
        if not module.training and len(batch["labels"]) > COMPARED:  # not what the first step compares beside it
            each = math.ceil(TESTED / EVALUATED_AT_ONCE)
            type(self).forwards += 1
            if self.evaluation is not None and self.forwards == (self.evaluation - 1) * each + 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().losses(module, batch)


def train(run_dir, monkeypatch, evaluation, **run):
    monkeypatch.setattr(Interrupting, "evaluation", evaluation)
    monkeypatch.setattr(Interrupting, "forwards", 0)
    settings = {"model": Interrupting([16], dropout=0.2), "data": ValidatedDigits(test_fraction=0.97), "eval_every": 2}
    return fit(recipe(run_dir, run={"evaluate": True} | run, **settings))


def history(run_dir):
    """All figures but those of time."""
    with open(run_dir / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if "second" not in key and key != "data_share"} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run_dir, train(run_dir, monkeypatch, None)


# Evaluated on val after steps 2, 3 (the end of the epoch), 4 and 6, then on test.
@pytest.mark.parametrize(("evaluation", "step", "left"), [(2, 3, 4), (5, 6, 1)])
def test_the_evaluation_is_left_and_made_again(evaluation, step, left, whole, tmp_path, monkeypatch):
    with pytest.raises(RunStoppedError, match=rf"stopped by SIGTERM after step {step}; everything is saved"):
        train(tmp_path, monkeypatch, evaluation)
    each = math.ceil(TESTED / EVALUATED_AT_ONCE)
    assert Interrupting.forwards == (evaluation - 1) * each + 2  # none after the one in the making
    assert (tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json").is_file()
    assert not (tmp_path / "model").exists()

    summary = train(tmp_path, monkeypatch, None, resume="auto")
    run_dir, undisturbed = whole
    assert Interrupting.forwards == left * each  # the one that was left, and those after it
    assert history(tmp_path) == history(run_dir)
    assert losses(tmp_path) == losses(run_dir)
    resumed, expected = saved(tmp_path, 6), saved(run_dir, 6)
    for one in (resumed, expected):
        del one["state"]["counters"]  # the end of an epoch is also the start of the next one
    assert resumed == expected
    assert summary.metrics == undisturbed.metrics
