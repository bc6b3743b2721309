"""A signal to any rank: all save a checkpoint at the same step, and leave with the code that says so."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from faults.runs import LONGEST

from trainer.errors import EXIT_REQUEUE


def pid_of(run, rank):
    wanted = f"LOCAL_RANK={rank}\0".encode()
    return min(pid for pid in run.pids() if wanted in Path(f"/proc/{pid}/environ").read_bytes())  # and its workers


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("SIGINT", 1),
        pytest.param("SIGUSR1", 2, marks=pytest.mark.slow),
        ("SIGTERM", 2),
        pytest.param("SIGHUP", 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(name, ranks, start):
    run = start("plain", ranks, "--data.workers", "1")
    run.wait_for("step 1/2000")
    pid = pid_of(run, 1) if (name, ranks) == ("SIGTERM", 2) else run.process.pid
    os.kill(pid, getattr(signal, name))
    assert run.wait(LONGEST) == EXIT_REQUEUE
    run.assert_nothing_left()
    assert "Traceback" not in run.text
    step = int(re.search(r"stopped by .* after step (\d+); nothing is lost", run.text)[1])
    (checkpoint,) = (run.output.parent / "run" / "checkpoints").iterdir()
    assert checkpoint.name.endswith(str(step))


@pytest.mark.slow
def test_torchrun_passes_the_signal_on_and_waits_for_the_checkpoint(start):
    run = start("torchrun", 2, "--data.workers", "1")
    run.wait_for("step 1/2000")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) != 0
    run.assert_nothing_left()
    assert "nothing is lost" in run.text
    assert "DataLoader worker" not in run.text
    assert len(list((run.output.parent / "run" / "checkpoints").iterdir())) == 1
