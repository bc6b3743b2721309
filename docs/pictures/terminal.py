"""Record docs/images/resume.svg: a run is killed, started again, and ends with the weights of an uninterrupted run.

    pip install pexpect termtosvg-ng
    python docs/pictures/terminal.py

The commands really run, in a shell on a pseudo-terminal, in an empty folder; ``trainer`` must be installed. The
recording takes half a minute, however long the runs take. The name of the folder is shown as ``~``, and that of the
machine as ``laptop``. Run it from any folder; it takes three minutes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pexpect

PICTURE = Path(__file__).resolve().parents[1] / "images" / "resume.svg"
COLUMNS, ROWS = 94, 24
TRAIN = "trainer fit vit_digits --epochs 6 --checkpoint.every 20 --run.resume auto --run.dir"
WEIGHTS = "model/model.safetensors"
COMMANDS = [
    f"{TRAIN} runs/a & sleep WAIT; kill -9 $!; wait",
    f"{TRAIN} runs/a",
    f"{TRAIN} runs/b",
    f"cmp runs/a/{WEIGHTS} runs/b/{WEIGHTS} && echo the weights are equal, byte by byte",
]
PROMPT = "$ "
READY = "\x1b[?2004h" + PROMPT  # bash switches on bracketed paste when it waits for a command
KILL_AFTER = 0.45  # as a share of the time of a whole run
FRAMES, SECONDS = 130, 32.0  # the recording has these, however long the runs take
READING = 6.0  # seconds between the end of a command and the next one


class Recording:
    """The output of a terminal with the time of each part; pexpect writes to it as to a log file."""

    def __init__(self) -> None:
        self.parts: list[tuple[float, str]] = []

    def write(self, text: str) -> None:
        self.parts.append((time.monotonic(), text))

    def flush(self) -> None:
        """Do nothing; pexpect requires the method."""

    def as_cast(self, names: dict[str, str]) -> str:
        """Return the recording as asciicast (version 2), with the texts of ``names`` replaced."""
        for name, other in names.items():
            self.parts = [(moment, text.replace(name, other)) for moment, text in self.parts]
        first, last = self.parts[0][0], self.parts[-1][0]
        frames: dict[int, str] = {}
        for moment, text in self.parts:
            number = int(FRAMES * (moment - first) / (last - first))
            frames[number] = frames.get(number, "") + text
        lines: list[object] = [{"version": 2, "width": COLUMNS, "height": ROWS}]
        lines += [[round(SECONDS * number / FRAMES, 3), "o", text] for number, text in frames.items()]
        return "".join(f"{json.dumps(line)}\n" for line in lines)


def main() -> None:
    """Run ``COMMANDS`` in a shell, and write the picture."""
    recording = Recording()
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PS1": PROMPT, "TERM": "xterm", "HOME": folder, "OMP_NUM_THREADS": "1"}
        environment |= {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
        shell = pexpect.spawn("bash", ["--norc", "--noprofile"], env=environment, cwd=folder, encoding="utf-8")
        shell.setwinsize(ROWS, COLUMNS)
        shell.expect_exact(READY)
        whole = run(shell, f"{TRAIN} runs/time; rm -r runs; clear")
        shell.logfile_read = recording
        recording.write(PROMPT)
        for command in COMMANDS:
            seconds = run(shell, command.replace("WAIT", f"{KILL_AFTER * whole:.0f}"))
            print(f"{seconds:5.1f} s  {command}", flush=True)
        shell.close()
        cast = Path(folder) / "resume.cast"
        cast.write_text(recording.as_cast({folder: "~", f" on {platform.node()} ": " on laptop "}), encoding="utf-8")
        words = ["render", str(cast), str(PICTURE), "--template", "window_frame", "--loop-delay", "6000"]
        subprocess.run([sys.executable, "-m", "termtosvg", *words], check=True)
    text = PICTURE.read_text(encoding="utf-8")
    if "the weights are equal, byte by byte" not in text or "resuming from" not in text or folder in text:
        raise SystemExit(f"{PICTURE} does not show what it should: run the script again, or look at the commands")


def run(shell: pexpect.spawn, command: str) -> float:
    """Type ``command``, wait until it has ended, and return its seconds."""
    for start in range(0, len(command), 4):
        shell.send(command[start : start + 4])
        shell.expect(pexpect.TIMEOUT, timeout=0.1)
    begin = time.monotonic()
    shell.sendline()
    shell.expect_exact(READY, timeout=600)
    seconds = time.monotonic() - begin
    shell.expect(pexpect.TIMEOUT, timeout=READING)
    return seconds


if __name__ == "__main__":
    main()
