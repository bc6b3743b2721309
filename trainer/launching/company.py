"""Ranks of one machine that no launcher watches, such as srun tasks: if one ends before they have met, all end."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress

from trainer.system.environment import read_int_variable
from trainer.system.error_reports import print_error
from trainer.system.processes import launcher_knows_pid

SECONDS_TO_FAIL = 4.0
"""How long a rank has to end by itself when the rank that it watches has ended: all may have the same error."""

POLL_INTERVAL = 0.2
LAUNCH = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
_kept: list[Company] = []


class Company:
    """Watches the first rank (or, on the first rank, all others) until the ranks have ``met``. Each rank listens on an
    abstract socket, which the kernel closes when the process ends for any reason."""

    def __init__(self, rank: int, size: int, launch: str) -> None:
        self.met, self.others = threading.Event(), range(1, size) if rank == 0 else range(1)
        self.address = f"\0trainer-{hashlib.sha256(launch.encode()).hexdigest()[:20]}-{{}}".format
        self.door = socket.socket(socket.AF_UNIX)  # stays open: another rank may still watch it
        self.door.bind(self.address(rank))
        self.door.listen(size)
        threading.Thread(target=self._watch, name="company", daemon=True).start()

    def _watch(self) -> None:
        lines: dict[socket.socket, int] = {}
        while not self.met.is_set():
            for rank in {*self.others} - {*lines.values()}:
                line = socket.socket(socket.AF_UNIX)
                if line.connect_ex(self.address(rank)) == 0 and _user_of(line) == os.getuid():
                    lines[line] = rank
            ended = select.select(lines, [], [], POLL_INTERVAL)[0]  # readable only when the other end closes
            if ended and not self.met.wait(SECONDS_TO_FAIL):
                print_error(f"rank {lines[ended[0]]} was killed or has failed before training: nothing is lost")
                os._exit(1)


def _user_of(line: socket.socket) -> int:
    return struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]


def keep_company(environment: Mapping[str, str] = os.environ) -> None:
    """Start to watch the other ranks of this machine if no launcher does; :func:`have_met` ends it."""
    of_slurm = {"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 1, "SLURM_STEP_NUM_NODES": 1}
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 1} if "RANK" in environment else of_slurm
    rank, size, nodes = (read_int_variable(name, default, environment) for name, default in defaults.items())
    launched = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or "RAY_JOB_ID" in environment
    is_kept = launcher_knows_pid() or launched or (_kept and not _kept[-1].met.is_set())
    if size > 1 and nodes == 1 and sys.platform == "linux" and not is_kept:
        launch = [*(environment.get(name, "") for name in LAUNCH), str(len(_kept))]
        with suppress(OSError):  # another user has the address
            _kept.append(Company(rank, size, "|".join(launch)))


def have_met() -> None:
    """Stop watching: the ranks have met and have watchdogs."""
    for company in _kept:
        company.met.set()
