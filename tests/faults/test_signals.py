"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trainer.faults.signals import StopSignals

WAIT = """
import time
from trainer.faults.signals import StopSignals
with StopSignals() as signals:
    print("ready", flush=True)
    while signals.received is None:
        time.sleep(0.01)
    print(signals.received, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_the_first_is_noted_and_the_second_ends_the_process(name):
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    assert process.stdout.readline() == f"{name}\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == (
        f"{name} received: saving a checkpoint at the end of this step, then leaving; once more leaves at once\n"
    )


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with StopSignals(first=False) as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == "SIGUSR1"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_what_the_launcher_sends_after_a_failure_is_noted_without_a_word(capfd):
    with StopSignals(expected=lambda: True) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGTERM"
    assert capfd.readouterr().err == ""


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
            time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert signals.received is None
