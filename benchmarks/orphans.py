"""Is a process left behind when the launcher is killed while its ranks start? kill -9 at instants spread evenly."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Record, table

from trainer.redact import redact

RECIPE = Path(__file__).parent / "recipes" / "paced.py"
MARK = "TRAINER_ORPHANS_MARK"
"""Variable in the environment of every process of a start, by which none is missed."""

STARTED = "step 1/"
"""What a run prints when its start is over."""

PROMISED = 5.0
"""Seconds after which nobody may be left."""

LONGEST = 300.0
SECONDS_BETWEEN_LOOKS = 0.02
FIT = ["-m", "trainer", "fit", str(RECIPE), "--run.predict", "false"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMANDS = {
    "--run.devices 2": [sys.executable, *FIT, "--run.devices", "2"],
    "torchrun": [sys.executable, *TORCHRUN, *FIT],
}


class Start:
    """A run that begins, in a session of its own.

    Args:
        command: without the run directory.
        folder: for the run, and what it prints.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        self.mark = f"{os.getpid()}-{folder.name}"
        self.output = folder / "output"
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"}
        words = [*command, "--run.dir", str(folder / "run")]
        self.began = time.monotonic()
        with open(self.output, "wb") as file:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    def wait(self, until: float) -> bool:
        """Wait for the end of its start, or until it is ``until`` seconds old; whether that came first."""
        while self.seconds() < until:
            if STARTED in self.output.read_text(errors="replace"):
                return False
            if self.process.poll() is not None:
                raise SystemExit(f"it ended by itself:\n{redact(self.output.read_text(errors='replace'))}")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return True

    def pids(self) -> list[int]:
        """Its processes that are alive."""
        return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if self._has(folder)]

    def _has(self, folder: Path) -> bool:
        try:
            return f"{MARK}={self.mark}\0".encode() in (folder / "environ").read_bytes()
        except OSError:  # it has ended
            return False

    def kill(self) -> dict[str, Any]:
        """SIGKILL to the process that was started; how long the others were there."""
        before, at = len(self.pids()), self.seconds()
        self.process.kill()
        self.process.wait()
        killed = time.monotonic()
        while (left := self.pids()) and time.monotonic() < killed + PROMISED:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        gone = time.monotonic() - killed
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return {"at_s": round(at, 2), "processes": before, "gone_after_s": round(gone, 2), "left": len(left)}


def measure(name: str, kills: int, record: Record, done: list[dict[str, Any]]) -> dict[str, Any]:
    """Kill as many starts of one launcher, each at another instant."""
    found: dict[str, Any] = {"launcher": name, "kills": []}
    done.append(found)
    with tempfile.TemporaryDirectory(prefix="orphans-") as folder:
        for number in range(-1, kills):
            place = Path(folder) / str(number)
            place.mkdir()
            start = Start(COMMANDS[name], place)
            if number < 0:  # undisturbed: how long a start takes
                start.wait(LONGEST)
                found["start_s"] = round(start.seconds(), 1)
                start.kill()
                continue
            in_start = start.wait(found["start_s"] * (number + 0.5) / kills)
            found["kills"].append(start.kill() | {"in_start": in_start})
            record.write(launchers=done)
            print(f"{name}: {found['kills'][-1]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Run the trials and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=25, help="of each launcher (default: 25)")
    wanted = parser.parse_args()
    record = Record("orphans", vars(wanted))
    done: list[dict[str, Any]] = []
    rows = [_row(measure(name, wanted.kills, record, done)) for name in COMMANDS]
    record.write(complete=True)
    print(table(["killed", "kills", "a start takes", "others gone after at most", "left after 5 s"], rows))


def _row(found: dict[str, Any]) -> list[str]:
    kills = found["kills"]
    within = sum(kill["in_start"] for kill in kills)
    longest = max(kill["gone_after_s"] for kill in kills)
    left = sum(kill["left"] for kill in kills)
    return [
        found["launcher"],
        f"{len(kills)} ({within} in the start)",
        f"{found['start_s']} s",
        f"{longest} s",
        f"{left}",
    ]


if __name__ == "__main__":
    main()
