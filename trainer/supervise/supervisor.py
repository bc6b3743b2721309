"""``trainer run``: a run that is started again when it dies, until it has finished, is asked to stop or gets stuck."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import NamedTuple

from trainer.errors import EXIT_REQUEUE, require
from trainer.faults.signals import is_hangup, stop_signals
from trainer.supervise import attempt as looks
from trainer.supervise.attempt import Attempt, Ending, FitCommand, Journal, newest_step, say, take
from trainer.system.files import default_folder, make_folder
from trainer.system.lock import RunLock
from trainer.system.processes import own_command
from trainer.system.redact import redact_words

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
LOCK = ".supervisor.lock"  # held besides the run's own lock, which is free between two attempts
FLAGS = {"restarts": (3, 0), "nproc": (None, 1), "grace": (None, 0), "patience": (2, 1), "backoff": (1.0, 0)}
"""Their values where they are not given, and the least that they may have."""
WHOLE = ("restarts", "nproc", "patience")
SEVERAL_MACHINES = ("nnodes", "nodes", "num_nodes", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "node-rank")
"""Flags of torchrun and of Fabric that one may look for here."""
WRONG_RECIPE, INTERRUPTED = 2, 130  # exit codes of a setting that cannot work, and of Ctrl-C
LONGEST_WAIT = 60.0
SECONDS_TO_NOTICE = 1.0
"""Schedulers signal every process of a job: a run that says within this time that it has heard is not told again, for
a second signal ends it at once."""


def run_command(argv: Sequence[str]) -> int:
    """``trainer run``: the exit code to leave with."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    own, words = split(argv)
    command = fit_command(words, own.nproc)
    folder = Path(command.run_dir)
    make_folder("run.dir", folder)
    lock = RunLock(folder, LOCK)
    notice = lock.acquire()
    try:
        if notice is not None:
            say(notice)
        policy = Policy(own.restarts, own.patience, own.backoff, newest_step(folder))
        announce(command)
        return Supervisor(command, policy, own.grace).run()
    finally:
        lock.release()


def split(argv: Sequence[str]) -> tuple[SimpleNamespace, list[str]]:
    """The flags of ``trainer run``, and the words of the recipe; the two dashes between may be left out."""
    own = SimpleNamespace(**{name: value for name, (value, _) in FLAGS.items()})
    rest = list(argv)
    one = "trainer run starts the ranks of one machine; for several, run launch/nodes.sh on each, which starts them"
    while rest and rest[0].startswith("--") and rest[0] != "--":
        name, equals, text = rest.pop(0)[2:].partition("=")
        require(name not in SEVERAL_MACHINES, f"--{name}: {one} again, too")
        require(name in FLAGS, f"unknown flag --{name}: flags of the recipe come after it (trainer run --help)")
        require(bool(equals or rest), f"flag --{name} needs a value")
        setattr(own, name, _number(name, text if equals else rest.pop(0)))
    return own, rest[1:] if rest[:1] == ["--"] else rest


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    kind, least = "an integer" if name in WHOLE else "a number", FLAGS[name][1]
    fine = least <= value < float("inf") and (name not in WHOLE or value.is_integer())
    require(fine, f"--{name}={text!r} must be {kind} of at least {least}")
    return int(value) if name in WHOLE else value


def fit_command(words: Sequence[str], ranks: int | None) -> FitCommand:
    """What is started for the words after the flags of ``trainer run``; flags that it gives itself are refused."""
    named = bool(words) and not words[0].startswith("-")
    require(named, "run needs a RECIPE after its own flags: see trainer run --help")
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
    names = [word.strip(" '\"") for word in (allowed or "").strip("[]()").split(",")]
    return FitCommand(recipe, flags, str(Path(wanted or default_folder(recipe)).absolute()), tuple(filter(None, names)))


def announce(command: FitCommand) -> None:
    """Say what is started, and where it writes."""
    say(f"run directory {command.run_dir}: trainer {shlex.join(redact_words(command.words()))}")


# The run: attempt after attempt.


Outcome = tuple[str, int]  # the status that is noted, and the exit code, when no other attempt follows


class Supervisor:
    """The attempts of one run; one that is asked to stop may take ``grace`` seconds (``None``: as long as it takes)."""

    def __init__(self, command: FitCommand, policy: Policy, grace: float | None = None) -> None:
        self.command, self.policy, self.grace = command, policy, grace
        self.run_dir = Path(command.run_dir)
        self.journal = Journal(self.run_dir, command.words())
        self.asked: list[int] = []

    def run(self) -> int:
        """Attempt after attempt; the exit code of the last one, as a shell gives it."""
        before = {number: signal.signal(number, self._ask) for number in stop_signals()}
        try:
            while (outcome := self._attempt()) is None:
                pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        status, code = outcome
        self.journal.close(status)
        return code

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not (self.asked and is_hangup(number)):
            self.asked.append(number)

    def _attempt(self) -> Outcome | None:
        """One attempt, and the wait for the next one; what to leave with, if there is none."""
        if self.asked:
            return "stopped", EXIT_REQUEUE
        words = self.command.words()
        self.journal.begin(newest_step(self.run_dir), words)
        kills, before, began = looks.kernel_kills(), looks.attempts(self.run_dir), time.time()
        attempt = Attempt(own_command(*words))
        try:
            ending = self._watched(attempt)
        finally:
            attempt.kill()
        step = newest_step(self.run_dir)
        self.journal.end(ending.code, ending.cause, step)
        if (outcome := self._final(ending)) is not None:
            return outcome
        decision = self._decide(ending, step, looks.kernel_kills() - kills, before)
        newest = f"newest checkpoint: step {step}" if step >= 0 else "no checkpoint yet"
        say(f"the run ended after {time.time() - began:.0f} s ({ending.describe()}); {newest}; {decision.why}")
        if decision.wait is None:
            return "failed", ending.exit_code
        self._sleep(decision.wait)
        return None

    def _watched(self, attempt: Attempt) -> Ending:
        """Wait for the end of an attempt, and pass on what this process is asked meanwhile: once, and then by force."""
        passed_on = killed = False
        asked_at: float | None = None
        while (ending := attempt.wait()) is None:
            if not self.asked or killed:
                continue
            now = time.monotonic()
            asked_at = now if asked_at is None else asked_at
            late = self.grace is not None and now - asked_at > self.grace
            if len(self.asked) > 1 or late:
                say("killing the run" + (f": it has not ended within {self.grace:g} s" if late else ""))
                attempt.kill()
                killed = True
            elif not passed_on and not attempt.noted and now - asked_at > SECONDS_TO_NOTICE:
                # To the first rank: the ranks agree on what follows, and those that do not know it yet end with it.
                attempt.process.send_signal(self.asked[0])
                passed_on = True
        return ending

    def _final(self, ending: Ending) -> Outcome | None:
        """What to leave with when no restart is wanted, whatever the count says."""
        if ending.code == 0:
            return "finished", 0
        if ending.exit_code == EXIT_REQUEUE:  # a signal to the whole job may reach this process last
            self._sleep(SECONDS_TO_NOTICE)
        if ending.exit_code == INTERRUPTED:
            return "interrupted", INTERRUPTED
        if self.asked:
            died_of_it = ending.code == -self.asked[0]  # before it could note it: nothing was lost
            return "stopped", EXIT_REQUEUE if died_of_it else ending.exit_code
        if ending.code == WRONG_RECIPE:
            say("the recipe cannot work, and would not another time either: no restart")
            return "failed", WRONG_RECIPE
        return None

    def _decide(self, ending: Ending, step: int, kills: int, before: int) -> Decision:
        if ending.code == EXIT_REQUEUE:
            return self.policy.after_preemption(step)
        if not looks.ran_out_of_memory(ending, kills):
            return self.policy.after_crash(step, ending.describe())
        cut = looks.known_cut(self.run_dir, before)
        smaller = None if cut is None else cut[1] // 2
        decision = self.policy.after_out_of_memory(step, smaller)
        if decision.wait is not None and cut is not None and smaller:
            self.command = self.command.cut_smaller(cut[0], smaller)
        return decision

    def _sleep(self, seconds: float) -> None:
        """Wait, but no longer than until this process is asked to stop."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.asked:
            time.sleep(looks.SECONDS_BETWEEN_LOOKS)


# Whether a run that has ended is started again, when, and how: decided from how it ended and what it has saved.


class Decision(NamedTuple):
    """Start again after ``wait`` seconds, or not, for ``None``; ``why`` says so to the person."""

    wait: float | None
    why: str


@dataclass
class Policy:
    """Counts restarts, of which so many are ``allowed``, and crashes in a row, of which ``patience`` are too many.

    Both counts begin anew when there is a checkpoint after the step ``newest`` (-1: none). It waits ``first_wait``
    seconds before the first restart, and twice as long before each further one, up to a minute.
    """

    allowed: int
    patience: int
    first_wait: float
    newest: int = -1
    used: int = field(default=0, init=False)
    crashes: int = field(default=0, init=False)

    def after_crash(self, step: int, cause: str) -> Decision:
        """What to do after a crash, with the newest checkpoint at ``step``."""
        self._progress(step)
        self.crashes += 1
        if self.crashes < self.patience or not self.allowed:
            return self._restart()
        since = f"step {self.newest}" if self.newest >= 0 else "the start"
        why = f"{self.crashes} crashes in a row without a checkpoint after {since}: it would crash again ({cause})"
        return Decision(None, why)

    def after_out_of_memory(self, step: int, smaller: int | None) -> Decision:
        """As :meth:`after_crash`, where the next attempt has micro-batches of ``smaller`` samples: a crash before says
        nothing of that one. ``None`` where they cannot be made smaller; 0 after micro-batches of one sample."""
        if smaller == 0:
            why = "out of memory with micro-batches of one sample: docs/faults.md says what else may help"
            return Decision(None, why)
        if smaller is None:
            return self.after_crash(step, "out of memory, and it is not known how to cut its batches smaller")
        self._progress(step)
        self.crashes = 0
        return self._restart(f" with micro-batches of {smaller}")

    def after_preemption(self, step: int) -> Decision:
        """As :meth:`after_crash`, for a run that was asked to stop while this process was not."""
        self._progress(step)
        return self._restart()

    def _progress(self, step: int) -> None:
        if step > self.newest:
            self.newest, self.used, self.crashes = step, 0, 0

    def _restart(self, how: str = "") -> Decision:
        if self.used >= self.allowed:
            return Decision(
                None, f"all {self.allowed} restarts are used up" if self.allowed else "no restart is allowed"
            )
        wait = min(LONGEST_WAIT, self.first_wait * 2**self.used)
        self.used += 1
        return Decision(wait, f"restart {self.used} of {self.allowed}{how} in {wait:g} s")
