"""What strangers write in the ranks' store: data that is checked, never a traceback, and never a reason to kill."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers import wait_until
from torch.distributed import distributed_c10d

from trainer.faults import heartbeats, watchdog
from trainer.faults.heartbeats import EndReason, Heartbeat, Peers
from trainer.faults.rank_status import RankStatus
from trainer.faults.watchdog import Watchdog
from trainer.launching.local_store import loopback_store
from trainer.memory.monitor import MemoryMonitor
from trainer.system.processes import ProcessId

PLACE = RankStatus(1, 3, "forward", (1, 2)).to_dict()
GARBAGE = [
    b"",
    b"\xff\xfe",
    b"null",
    b"7",
    b"[" * 60_000,
    b"x" * 200_000,
    b'{"place": null, "process": null}',
    json.dumps({"text": 7, "process": 7, "place": PLACE | {"steps": "many"}}).encode(),
    json.dumps({"text": None, "place": PLACE | {"samples": [10**30]}}).encode(),
    json.dumps({"text": [], "place": PLACE | {"more": 1}}).encode(),
]


@pytest.fixture
def pair(monkeypatch):
    """What rank 0 and rank 1 know of each other, in one process, with a store of their own."""
    store = loopback_store()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    both = [Peers(rank, 2, MemoryMonitor(torch.device("cpu")), 600.0) for rank in range(2)]
    yield both
    for one in both:
        one.box.close()


def test_a_beat_that_is_none_is_as_if_it_were_not_there(pair):
    first, second = pair
    for content in GARBAGE:
        first.store.set(first._key("beat", 1), content)
        assert first.check_next_rank() is None
        assert not first.knows_next
    second.send_heartbeat(RankStatus(1, 3, "forward"))
    assert first.check_next_rank() is None
    assert first.knows_next
    for content in GARBAGE:
        first.store.set(first._key("beat", 1), content)
        assert first.check_next_rank() is None
        assert first.slowest_place() is None


def test_an_end_that_no_rank_has_told_is_one_line(pair):
    first, _ = pair
    for content in GARBAGE:
        first.store.set(first._key("ended"), content)
        assert first.end_reason() == EndReason(
            "the ranks' store holds content that no rank wrote: check who can reach its port"
        )


def test_words_of_a_stranger_steer_no_terminal_and_have_an_end(pair):
    first, _ = pair
    words = "pwned \x1b[31m by\ntrainer: error: a stranger\u202e " + "x" * 60_000
    first.store.set(first._key("ended"), json.dumps({"text": words, "process": None}))
    text = first.end_reason().text
    assert text.startswith(r"pwned \x1b[31m by\ntrainer: error: a stranger\u202e xxx")
    assert len(text) < 2100
    beat = Heartbeat.parse(json.dumps({"place": PLACE | {"activity": "\x1b[2J"}, "process": first.own}).encode(), 1)
    assert r"\x1b[2J" in str(beat.place)


@pytest.fixture
def stranger():
    """A stopped process that belongs to no run: neither this process nor its parent has started it."""
    command = ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    process = dataclasses.replace(
        ProcessId.current(), pid=pid, began=int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    )
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: process.state() == "stopped")
    yield process
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_process_that_is_no_rank_is_not_killed_because_of_the_store(pair, stranger, monkeypatch):
    first, _ = pair
    monkeypatch.setattr(heartbeats, "MAX_MISSED_HEARTBEATS", 2)
    beat = {"place": PLACE, "process": stranger.to_dict(), "beat": 1, "box": "/etc/hostname"}
    first.store.set(first._key("beat", 1), json.dumps(beat))
    told = [first.check_next_rank() for _ in range(4)][-1]
    assert "is stopped by a signal" in told.text
    first.kill_stopped()
    first.store.set(first._key("ended"), json.dumps({"text": "a", "process": stranger.to_dict()}))
    assert first.end_reason() == EndReason("a")
    time.sleep(0.1)
    assert stranger.state() == "stopped"


def test_a_rank_that_was_seen_is_not_another_process_later(pair, stranger, monkeypatch):
    first, second = pair
    monkeypatch.setattr(heartbeats, "MAX_MISSED_HEARTBEATS", 2)
    second.send_heartbeat(RankStatus(1, 3, "forward"))
    first.check_next_rank()
    first.store.set(first._key("beat", 1), json.dumps({"place": PLACE, "process": stranger.to_dict(), "beat": 2}))
    assert [first.check_next_rank() for _ in range(4)] == [None] * 4  # this process, which is rank 1, runs


def test_a_store_that_is_silent_because_its_rank_is_stopped_ends_both(pair, stranger, monkeypatch, capsys):
    first, _ = pair
    watch = Watchdog.__new__(Watchdog)
    watch.monitor, watch.rank, watch.peers = MemoryMonitor(torch.device("cpu")), 0, first
    watch._wake, watch._store_is_gone = threading.Event(), False
    first._next_process = stranger
    ended = []
    monkeypatch.setattr(watchdog, "MAX_MISSED_HEARTBEATS", 1)
    monkeypatch.setattr(ProcessId, "is_related", lambda self: True)
    monkeypatch.setattr(os, "_exit", lambda code: (ended.append(code), watch._wake.set()))
    watch._watch_store(first)
    assert ended == [1]
    text = f"rank 1 (pid {stranger.pid} on {stranger.host}) is stopped by a signal, and with it the store of all ranks"
    assert capsys.readouterr().err.endswith(f"{text}\n")
    wait_until(lambda: stranger.state() == "gone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "flags"), [("forks", ["--memory.strategy", "fsdp"]), ("torchrun.sh", ["--data.workers", "1"])]
)
def test_every_socket_of_a_run_on_one_machine_listens_on_loopback(launcher, flags, start):
    run = start(launcher, 2, *flags)
    run.wait_for()
    run.assert_on_loopback()
