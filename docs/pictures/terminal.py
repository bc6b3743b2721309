"""Record docs/images/resume.svg: a run is killed, started again, and ends with the weights of an uninterrupted run.

    pip install pexpect termtosvg-ng
    python docs/pictures/terminal.py

The commands really run, in a shell on a pseudo-terminal, in an empty folder. Long waits are shortened in the
recording: its times are not those of the runs. Run it from the root of the repository; it takes two minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pexpect

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "resume.svg"
COLUMNS, ROWS = 92, 24
TRAIN = "trainer fit vit_digits --epochs 6 --checkpoint.every 20 --run.resume auto --run.dir"
COMMANDS = [
    f"{TRAIN} runs/whole",
    f"{TRAIN} runs/killed & sleep SECONDS; kill -9 $!",
    f"{TRAIN} runs/killed",
    "cmp runs/whole/model/model.safetensors runs/killed/model/model.safetensors && echo the same weights",
]
PROMPT = "$ "
READY = "\x1b[?2004h" + PROMPT  # readline has switched on bracketed paste: the shell waits for a command
MIN_GAP, MAX_GAP = 0.12, 0.6  # seconds between two events of the recording
READING = 2.5  # seconds that the output of a command stays before the next one is typed


class Recording:
    """The output of a terminal with the time of each part, as pexpect writes it to a log file."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str]] = []

    def write(self, text: str) -> None:
        self.events.append((time.monotonic(), text))

    def flush(self) -> None:
        pass


def main() -> None:
    """Run ``COMMANDS`` in a shell, and write the picture."""
    recording = Recording()
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PS1": PROMPT, "TERM": "xterm", "HOME": folder, "OMP_NUM_THREADS": "1"}
        environment |= {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
        shell = pexpect.spawn("bash", ["--norc", "--noprofile"], env=environment, cwd=folder, encoding="utf-8")
        shell.setwinsize(ROWS, COLUMNS)
        shell.expect_exact(READY)
        shell.logfile_read = recording
        for command in COMMANDS:
            start = time.monotonic()
            run(shell, command.replace("SECONDS", "18"))
            print(f"{time.monotonic() - start:5.1f} s  {command}", flush=True)
        shell.close()
    Path("/tmp/pics/events.json").write_text(json.dumps(recording.events))


def run(shell: pexpect.spawn, command: str) -> None:
    """Type ``command`` and wait until it has ended."""
    for start in range(0, len(command), 4):
        shell.send(command[start : start + 4])
        shell.expect(pexpect.TIMEOUT, timeout=0.05)
    shell.sendline()
    shell.expect_exact(READY, timeout=600)


if __name__ == "__main__":
    main()
