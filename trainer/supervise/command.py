"""The command line of ``trainer run``, and that of the ``trainer fit`` that it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import require
from trainer.supervise.attempt import FitCommand, take
from trainer.system.files import default_folder, make_folder

USAGE = """\
usage: trainer run [flags] -- RECIPE [flags of trainer fit]

Trains RECIPE, and starts it again from its newest checkpoint when it dies; in smaller micro-batches when memory ran
out. See docs/supervisor.md.

flags:
  --restarts N       restarts at most; counted anew whenever there is a newer checkpoint (default: 3)
  --nproc N          ranks on this machine: --run.devices of each attempt
  --grace SECONDS    how long a run that was asked to stop may take until it is killed (default: as long as it takes)
  --patience N       crashes in a row with the same newest checkpoint after which it gives up (default: 2)
  --backoff SECONDS  wait before the first restart, and twice as long before each further one, up to 60 (default: 1)
  -h, --help         show this page

The run directory is --run.dir, or one that is chosen and printed; --run.resume is auto.
"""

LOCK = ".supervisor.lock"
"""Held besides the run's own lock, which is free between two attempts."""

LEAST = {"restarts": 0, "nproc": 1, "grace": 0, "patience": 1, "backoff": 0}
WHOLE = ("restarts", "nproc", "patience")
SEVERAL_MACHINES = ("nnodes", "nodes", "num_nodes", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "node-rank")
"""Flags of torchrun and of Fabric that one may look for here."""


@dataclass
class OwnFlags:
    """The flags of ``trainer run``, as ``USAGE`` describes them."""

    restarts: float = 3
    nproc: float | None = None
    grace: float | None = None
    patience: float = 2
    backoff: float = 1.0


def split(argv: Sequence[str]) -> tuple[OwnFlags, list[str]]:
    """The flags of ``trainer run``, and the words of the recipe; the two dashes between may be left out.

    Raises:
        RecipeError: for a flag that cannot work.
    """
    own = OwnFlags()
    rest = list(argv)
    while rest and rest[0].startswith("--") and rest[0] != "--":
        name, equals, text = rest.pop(0)[2:].partition("=")
        require(
            name not in SEVERAL_MACHINES,
            f"--{name}: trainer run starts the ranks of one machine; for several, run launch/nodes.sh on each, which "
            "starts them again, too",
        )
        require(name in LEAST, f"unknown flag --{name}: flags of the recipe come after it (trainer run --help)")
        require(bool(equals or rest), f"flag --{name} needs a value")
        setattr(own, name, _number(name, text if equals else rest.pop(0)))
    return own, rest[1:] if rest[:1] == ["--"] else rest


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    kind = "an integer" if name in WHOLE else "a number"
    fine = LEAST[name] <= value < float("inf") and (name not in WHOLE or value.is_integer())
    require(fine, f"--{name}={text!r} must be {kind} of at least {LEAST[name]}")
    return value


def fit_command(words: Sequence[str], ranks: int | None) -> FitCommand:
    """What is started for the words after the flags of ``trainer run``.

    Raises:
        RecipeError: when there is no recipe, or a flag that the supervisor gives itself.
    """
    require(
        bool(words) and not words[0].startswith("-"), "run needs a RECIPE after its own flags: see trainer run --help"
    )
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    require(not launched, "trainer run starts the ranks itself: start it without torchrun, and say --nproc")
    recipe, flags = words[0], tuple(words[1:])
    resume, flags = take(flags, "run.resume")
    require(resume in (None, "auto"), f"--run.resume {resume}: trainer run resumes by itself, from run.dir")
    wanted, flags = take(flags, "run.dir")
    allowed, flags = take(flags, "run.allow_change")
    devices, flags = take(flags, "run.devices")
    if ranks is not None:
        require(devices in (None, str(ranks)), f"--nproc {ranks} and --run.devices {devices} contradict each other")
        devices = str(ranks)
    flags += ("--run.devices", devices) if devices is not None else ()
    return FitCommand(recipe, flags, str(Path(wanted or default_folder(recipe)).absolute()), _names(allowed))


def _names(text: str | None) -> tuple[str, ...]:
    """The names in a list as it is written on a command line."""
    words = (text or "").strip("[]()").split(",")
    return tuple(word.strip(" '\"") for word in words if word.strip(" '\""))


def run_command(argv: Sequence[str]) -> int:
    """``trainer run``: the exit code to leave with.

    Raises:
        RecipeError: for a command line that cannot work, or a run directory that cannot be used.
    """
    from trainer.supervise.attempt import newest_step, say
    from trainer.supervise.supervisor import Policy, Supervisor, announce
    from trainer.system.lock import RunLock

    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    own, words = split(argv)
    command = fit_command(words, None if own.nproc is None else int(own.nproc))
    folder = Path(command.run_dir)
    make_folder("run.dir", folder)
    lock = RunLock(folder, LOCK)
    notice = lock.acquire()
    try:
        if notice is not None:
            say(notice)
        policy = Policy(int(own.restarts), int(own.patience), own.backoff, newest_step(folder))
        announce(command)
        return Supervisor(command, policy, own.grace).run()
    finally:
        lock.release()
