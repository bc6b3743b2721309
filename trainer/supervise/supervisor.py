"""``trainer run``: restart a run after a crash until it finishes, is asked to stop or makes no progress."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import NamedTuple

from trainer.errors import EXIT_REQUEUE, require
from trainer.faults.signals import stop_signals
from trainer.supervise import attempt as looks
from trainer.supervise.attempt import Attempt, AttemptResult, FitCommand, Journal, newest_step, pop_flag, print_message
from trainer.system.files import default_folder, make_folder
from trainer.system.lock import RunLock
from trainer.system.processes import trainer_command
from trainer.system.redact import redact_words

LOCK = ".supervisor.lock"  # in addition to the run's lock, which is free between two attempts
FLAGS = {"restarts": (3, 0), "nproc": (None, 1), "grace": (None, 0.0), "patience": (2, 1), "backoff": (1.0, 0.0)}
"""Default and minimum value of each flag; an integer if the minimum is one."""
SEVERAL_MACHINES = ("nnodes", "nodes", "num_nodes", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "node-rank")
"""Flags of torchrun and Fabric for several machines, which are rejected with an explanation."""
WRONG_RECIPE, INTERRUPTED = 2, 130  # exit codes of an invalid setting and of Ctrl-C
MAX_BACKOFF = 60.0
SIGNAL_NOTICE_TIMEOUT = 1.0
"""Time in which a run may report a stop signal before the supervisor sends one.

Schedulers signal every process of a job, and a second signal would end the run at once.
"""


def run_command(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(Path(__file__).with_name("supervisor_usage.txt").read_text(encoding="utf-8"), end="")
        return 0
    own, words = split(argv)
    command = fit_command(words, own.nproc)
    folder = Path(command.run_dir)
    make_folder("run.dir", folder)
    with RunLock(folder, LOCK) as notice:
        if notice is not None:
            print_message(notice)
        policy = RestartPolicy(own.restarts, own.patience, own.backoff, newest_step(folder))
        announce(command)
        return Supervisor(command, policy, own.grace).run()


def split(argv: Sequence[str]) -> tuple[SimpleNamespace, list[str]]:
    """Split into the flags of ``trainer run`` and the words of ``trainer fit``; the ``--`` between is optional."""
    own = SimpleNamespace(**{name: value for name, (value, _) in FLAGS.items()})
    rest = list(argv)
    one = "trainer run starts ranks on one machine only: for several machines, run launch/nodes.sh on each"
    while rest and rest[0].startswith("--") and rest[0] != "--":
        name, equals, text = rest.pop(0)[2:].partition("=")
        require(name not in SEVERAL_MACHINES, f"--{name}: {one}, which also restarts them")
        require(name in FLAGS, f"unknown flag --{name}: put flags of the recipe after it (trainer run --help)")
        require(bool(equals or rest), f"flag --{name} needs a value")
        setattr(own, name, _number(name, text if equals else rest.pop(0)))
    return own, rest[1:] if rest[:1] == ["--"] else rest


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    smallest = FLAGS[name][1]
    whole = isinstance(smallest, int)
    is_valid = smallest <= value < float("inf") and (value.is_integer() or not whole)
    kind = "an integer" if whole else "a number"
    require(is_valid, f"--{name}={text!r} must be {kind} of at least {smallest:g}")
    return int(value) if whole else value


def fit_command(words: Sequence[str], ranks: int | None) -> FitCommand:
    """Return the command for the words after the flags of ``trainer run``; reject flags that the supervisor sets."""
    has_recipe, launched = bool(words) and not words[0].startswith("-"), "TORCHELASTIC_RUN_ID" in os.environ
    require(has_recipe, "run needs a RECIPE after its own flags: see trainer run --help")
    require(not launched, "trainer run starts the ranks itself: start it without torchrun and give --nproc")
    recipe, flags = words[0], tuple(words[1:])
    resume, flags = pop_flag(flags, "run.resume")
    require(resume in (None, "auto"), f"--run.resume {resume}: trainer run resumes from run.dir itself: leave it out")
    wanted, flags = pop_flag(flags, "run.dir")
    allowed, flags = pop_flag(flags, "run.allow_change")
    devices, flags = pop_flag(flags, "run.devices")
    if ranks is not None:
        require(devices in (None, str(ranks)), f"--nproc {ranks} and --run.devices {devices} contradict each other")
        devices = str(ranks)
    flags += ("--run.devices", devices) if devices is not None else ()
    names = [word.strip(" '\"") for word in (allowed or "").strip("[]()").split(",")]
    return FitCommand(recipe, flags, str(Path(wanted or default_folder(recipe)).absolute()), tuple(filter(None, names)))


def announce(command: FitCommand) -> None:
    print_message(f"run directory {command.run_dir}: trainer {shlex.join(redact_words(command.argv()))}")


Outcome = tuple[str, int]  # final status and exit code


class Supervisor:
    """Starts the attempts of a run; after a stop signal, an attempt has ``grace`` seconds (``None``: unlimited)."""

    def __init__(self, command: FitCommand, policy: RestartPolicy, grace: float | None = None) -> None:
        self.command, self.policy, self.grace = command, policy, grace
        self.run_dir = Path(command.run_dir)
        self.journal = Journal(self.run_dir, command.argv())
        self.asked: list[int] = []

    def run(self) -> int:
        """Run attempts until no restart follows; return the last exit code as in a shell."""
        with ExitStack() as closing:
            for number in stop_signals():
                closing.callback(signal.signal, number, signal.signal(number, self._ask))
            while (outcome := self._attempt()) is None:
                pass
        status, code = outcome
        self.journal.close(status)
        return code

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.asked or number != signal.SIGHUP:  # a closed terminal sends it twice
            self.asked.append(number)

    def _attempt(self) -> Outcome | None:
        """Run one attempt and wait before the next one; return the outcome if no other attempt follows."""
        if self.asked:
            return "stopped", EXIT_REQUEUE
        words = self.command.argv()
        self.journal.begin(newest_step(self.run_dir), words)
        kills, before, began = looks.count_oom_kills(), looks.attempts(self.run_dir), time.time()
        attempt = Attempt(trainer_command(*words))
        try:
            ending = self._watched(attempt)
        finally:
            attempt.kill()
        step = newest_step(self.run_dir)
        self.journal.end(ending.code, ending.cause, step)
        if (outcome := self._final(ending)) is not None:
            return outcome
        decision = self._decide(ending, step, looks.count_oom_kills() - kills, before)
        newest = f"newest checkpoint: step {step}" if step >= 0 else "no checkpoint yet"
        ended = f"the run ended after {time.time() - began:.0f} s ({ending.describe()})"
        print_message(f"{ended}; {newest}; {decision.why}")
        if decision.wait is None:
            return "failed", ending.exit_code
        self._sleep(decision.wait)
        return None

    def _watched(self, attempt: Attempt) -> AttemptResult:
        """Wait for the end of an attempt; forward the first stop signal, and kill the attempt at the second."""
        passed_on = False
        asked_at: float | None = None
        while (ending := attempt.wait()) is None:
            if not self.asked:
                continue
            now = time.monotonic()
            asked_at = now if asked_at is None else asked_at
            late = self.grace is not None and now - asked_at > self.grace
            if len(self.asked) > 1 or late:
                print_message("killing the run" + (f": it has not ended within {self.grace:g} s" if late else ""))
                attempt.kill()  # and wait for its end
            elif not passed_on and not attempt.noted and now - asked_at > SIGNAL_NOTICE_TIMEOUT:
                # Signal the first rank only: the ranks agree to stop at the same step.
                attempt.process.send_signal(self.asked[0])
                passed_on = True
        return ending

    def _final(self, ending: AttemptResult) -> Outcome | None:
        """Return the outcome if this end allows no restart, regardless of the number of restarts left."""
        if ending.code == 0:
            return "finished", 0
        if ending.exit_code == EXIT_REQUEUE:  # the scheduler's signal may reach this process later than the run
            self._sleep(SIGNAL_NOTICE_TIMEOUT)
        if ending.exit_code == INTERRUPTED:
            return "interrupted", INTERRUPTED
        if self.asked:
            died_of_it = ending.code == -self.asked[0]  # the signal came before its handler was set: nothing is lost
            return "stopped", EXIT_REQUEUE if died_of_it else ending.exit_code
        if ending.code == WRONG_RECIPE:
            print_message("the recipe is invalid and would fail again: not restarting")
            return "failed", WRONG_RECIPE
        return None

    def _decide(self, ending: AttemptResult, step: int, kills: int, before: int) -> Decision:
        if ending.code == EXIT_REQUEUE:
            return self.policy.after_preemption(step)
        if not looks.ran_out_of_memory(ending, kills):
            return self.policy.after_crash(step, ending.describe())
        cut = looks.known_cut(self.run_dir, before)
        smaller = None if cut is None else cut[1] // 2
        decision = self.policy.after_out_of_memory(step, smaller)
        if decision.wait is not None and cut is not None and smaller:
            self.command = self.command.with_smaller_micro_batch(cut[0], smaller)
        return decision

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.asked:
            time.sleep(looks.POLL_INTERVAL)


# The restart policy, based on the end of an attempt and on its checkpoints.


class Decision(NamedTuple):
    """Restart after ``wait`` seconds, or do not (``None``); ``why`` is the message about it."""

    wait: float | None
    why: str


@dataclass
class RestartPolicy:
    """Allows at most ``max_restarts`` restarts and fewer than ``max_crashes`` crashes in a row; a checkpoint after
    ``last_step`` (-1: none) resets both. The wait, ``first_wait`` seconds, doubles each time, up to one minute."""

    max_restarts: int
    max_crashes: int
    first_wait: float
    last_step: int = -1
    num_restarts: int = field(default=0, init=False)
    crashes: int = field(default=0, init=False)

    def after_crash(self, step: int, cause: str) -> Decision:
        """Decide after a crash, with the newest checkpoint at ``step``."""
        self._progress(step)
        self.crashes += 1
        if self.crashes < self.max_crashes or not self.max_restarts:
            return self._restart()
        since = f"step {self.last_step}" if self.last_step >= 0 else "the start"
        crashes = f"{self.crashes} crashes in a row without a checkpoint after {since}"
        return Decision(None, f"{crashes}: not restarting ({cause})")

    def after_out_of_memory(self, step: int, smaller: int | None) -> Decision:
        """Decide after out of memory; the next attempt, with micro-batches of ``smaller`` samples, resets earlier
        crashes. ``smaller`` is ``None`` if the cut is unknown and 0 if micro-batches had one sample."""
        if smaller == 0:
            why = "out of memory with micro-batches of one sample: see docs/faults.md for other ways to save memory"
            return Decision(None, why)
        if smaller is None:
            return self.after_crash(step, "out of memory, and its micro-batch size is unknown")
        self._progress(step)
        self.crashes = 0
        return self._restart(f" with micro-batches of {smaller}")

    def after_preemption(self, step: int) -> Decision:
        """Decide after a run was asked to stop while this process was not."""
        self._progress(step)
        return self._restart()

    def _progress(self, step: int) -> None:
        if step > self.last_step:
            self.last_step, self.num_restarts, self.crashes = step, 0, 0

    def _restart(self, how: str = "") -> Decision:
        if self.num_restarts >= self.max_restarts:
            used_up = f"all {self.max_restarts} restarts are used up"
            return Decision(None, used_up if self.max_restarts else "no restart is allowed")
        wait = min(MAX_BACKOFF, self.first_wait * 2**self.num_restarts)
        self.num_restarts += 1
        return Decision(wait, f"restart {self.num_restarts} of {self.max_restarts}{how} in {wait:g} s")
