"""Commands for ``kills.py`` to kill, forked from a process that has imported everything, and what each must leave.

A trial starts a command, kills it at its instant, sometimes once more, and repeats it until it has ended. What it has
then computed must equal an undisturbed run to the bit. No process and no file may be there that the undisturbed run
does not leave, neither beside its output nor in TMPDIR.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import thread
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from chaos.compare import MEASURED, newest_step
from chaos.forks import SECONDS_BETWEEN_LOOKS, fork, in_forks, living_children
from chaos.run import PATIENCE, ForkedRun, Shape

LANGUAGE = Path(__file__).with_name("recipes") / "language_to_kill.py"
EXACT = ("--run.deterministic", "true")
"""Keeps the bits the same on every world, so that a run that was resumed on another world can be compared."""
GOES_ON = ("--run.resume", "auto")
ELSEWHERE = ("--run.allow_change", '["memory.strategy"]')

TO_END, TO_LEAVE = 60.0, 5.0
"""Seconds in which all ranks must end after one was killed; after which no process may be left."""

Digest = dict[str, Any]


@dataclass
class Outcome:
    """What came of a kill.

    Args:
        number: the number of the trial, which decides who is killed, and when.
        scenario: what was killed.
        launcher: what had started it.
        world: strategy and ranks.
        victim: which of its processes were killed.
        instant: seconds from the start of the first process to the kill.
        code: the exit code of the first process.
        seconds: from the kill to its end.
        saved: the step of the newest checkpoint at that time.
        finished: whether the command had ended before the kill.
        kills: how often it was killed.
        left: command lines of processes that were there :data:`TO_LEAVE` seconds later.
        worlds: on which it was resumed.
        deviations: all that is not as promised.
        cpu_seconds: processor time of the trial, with all its processes.
    """

    number: int
    scenario: str
    launcher: str
    world: str
    victim: str
    instant: float
    code: int | None = None
    seconds: float = 0.0
    saved: int = 0
    finished: bool = False
    kills: int = 1
    left: list[str] = field(default_factory=list)
    worlds: list[str] = field(default_factory=list)
    deviations: list[str] = field(default_factory=list)
    cpu_seconds: float = 0.0


def cpu_seconds() -> float:
    """Return the processor time of this process and of all processes it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return round(sum(one.ru_utime + one.ru_stime for one in used), 2)


# ---------------------------------------------------------------------------------------------------- what is started


class ForkedCommand:
    """A command of one process, which may start others; it has the methods of ``ForkedRun`` that a trial needs."""

    shape = Shape("single", 1)

    def __init__(self, folder: Path, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.output = folder / f"output-{len(list(folder.glob('output-*')))}.txt"
        self.codes: dict[int, int] = {}
        self.pid = fork(partial(_command, folder, list(words), dict(environment)), self.output)
        self.pids = {0: self.pid}

    def text(self, rank: int) -> str:
        """Return all that it has printed."""
        return self.output.read_text(errors="replace")

    def _look(self) -> None:
        if not self.codes:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.codes[0] = os.waitstatus_to_exitcode(status)

    def ended(self) -> bool:
        """Whether it has ended."""
        self._look()
        return bool(self.codes)

    def wait(self) -> bool:
        """Wait for its end; ``False`` if it takes too long, in which case it is killed."""
        until = time.monotonic() + PATIENCE
        while not self.ended():
            if time.monotonic() > until:
                os.killpg(self.pid, signal.SIGKILL)
                return False
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return True


def _command(folder: Path, words: list[str], environment: dict[str, str]) -> int:
    import torch

    from trainer.cli import entry

    os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    tempfile.tempdir = None  # that of TMPDIR
    torch.set_num_threads(1)  # OpenMP's threads did not survive the fork
    if words[0] == "sweep":
        from trainer.lab import measured_run
        from trainer.system import processes

        processes.subprocess = SimpleNamespace(Popen=ForkedPopen, DEVNULL=-3)  # type: ignore[assignment,attr-defined]
        measured_run.POLL_INTERVAL = 0.05
    _no_plots()
    sys.argv = ["trainer", *words]
    try:
        entry()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    raise AssertionError("entry() exits")


def _no_plots() -> None:
    """Leave out the plots, which take half of the time of runs as short as these."""
    from trainer.run import directory

    directory.plot_curves = directory.plot_memory = lambda *args: None  # type: ignore[assignment]


class ForkedPopen:
    """Stands in for ``subprocess.Popen`` with the command line of this package: a fork imports nothing again."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], preexec_fn: Callable[[], Any], stdout: Any, **_: Any
    ) -> None:
        self.returncode: int | None = None
        self.guard = threading.Lock()
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            preexec_fn()
            for standard in (1, 2):
                os.dup2(stdout.fileno(), standard)
            sys.stdout, sys.stderr = (os.fdopen(standard, "w", 1, closefd=False) for standard in (1, 2))
            os.environ.clear()
            os.environ.update(env)
            import torch

            from trainer.cli import entry

            torch.set_num_threads(1)
            thread._threads_queues.clear()  # type: ignore[attr-defined]  # threads that a fork does not have

            sys.argv = ["trainer", *command[2:]]
            entry()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        """Return the exit code, once it has ended."""
        with self.guard:
            if self.returncode is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                if found:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or raise ``TimeoutExpired``."""
        import subprocess

        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("trainer", timeout or 0.0)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


# ---------------------------------------------------------------------------------------------------------- scenarios


def digest_of_run(folder: Path) -> Digest:
    """Return what a finished run has computed: weights, adapters, metrics of every step, and its last step."""
    run = folder / "run"
    with open(run / "metrics.csv", newline="") as file:
        rows = [{name: text for name, text in row.items() if name not in MEASURED} for row in csv.DictReader(file)]
    weights = {str(path.relative_to(run)): _hash(path) for path in sorted((run / "model").rglob("*.safetensors"))}
    summary = json.loads((run / "summary.json").read_text())
    return {
        "weights": weights,
        "metrics": rows,
        "summary": {key: summary.get(key) for key in ("status", "steps", "best")},
    }


def digest_of_sweep(folder: Path) -> Digest:
    """Return the settings that a sweep has tried, and what each came to."""
    rows = json.loads((folder / "s" / "sweep.json").read_text())["trials"]
    return {"trials": sorted([row["settings"]["optim.lr"], row["status"], row["value"], row["step"]] for row in rows)}


def digest_of_files(folder: Path) -> Digest:
    """Return the hash of every file that was written; what is left over has other names."""
    found = sorted(name for name in names(folder) if not name.startswith((".", "tmp")))
    return {"files": {name: _hash(folder / name) for name in found if (folder / name).is_file()}}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names(folder: Path) -> set[str]:
    """Return all files and folders below, but for what the trial itself writes, and checkpoints.

    Which shards a checkpoint has depends on the world that has saved it. The user's own folder in TMPDIR is kept from
    run to run, but nothing may stay in it.
    """
    found = set()
    for place, folders, files in os.walk(folder):
        here = Path(place).relative_to(folder)
        folders[:] = [name for name in folders if not (here.name == "checkpoints" and name.startswith("step-"))]
        found |= {str(here / name) for name in (*folders, *files)}
    found.discard(f"tmp/trainer-{os.getuid()}")
    return {name for name in found if not name.startswith(("output-", "samples-", "store.txt"))}


@dataclass(frozen=True)
class Scenario:
    """A command that is killed.

    Args:
        words: of ``trainer``; ``BASE`` stands for the folder of what was made before. Those of a run are its flags.
        digest: what it must come to.
        worlds: on which a run is started and resumed; empty for a command of one process.
        output: a command is repeated until this is there; empty: until it ends well.
        environment: variables of all its processes.
    """

    words: Sequence[str]
    digest: Callable[[Path], Digest] = digest_of_run
    worlds: Sequence[Shape] = ()
    output: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, folder: Path, base: Path, world: Shape | None, port: int) -> ForkedRun | ForkedCommand:
        """Start it in ``folder``, as it was started there before."""
        words = [word.replace("BASE", str(base)) for word in self.words]
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        own = {**self.environment, "TMPDIR": str(folder / "tmp")}
        if world is None:
            return ForkedCommand(folder, words, own)
        given = {"environment": own, "port": port, "run_dir": folder / "run", "recipe": LANGUAGE}
        return ForkedRun(folder, world, *words, *GOES_ON, launched=port % 40 == 0, **given)

    def has_ended(self, folder: Path, run: ForkedRun | ForkedCommand) -> bool:
        """Whether the command need not be repeated."""
        if self.output:
            return (folder / self.output).exists()
        return run.codes.keys() == run.pids.keys() and not any(run.codes.values())


SINGLE, DDP, FSDP = Shape("single", 1), Shape("ddp", 2), Shape("fsdp", 2)
TEXTS = (
    "--data.train_files",
    "BASE/texts/train/*.txt",
    "--data.val_files",
    "BASE/texts/val/*.txt",
    "--data.cache_dir",
    "BASE/cache",
)
NF4 = (
    "--model.name",
    "BASE/weights",
    "--model.weights",
    "BASE/weights",
    "--model.config",
    "{}",
    "--model.lora.rank",
    "2",
    "--model.lora.base",
    "nf4",
)
SWEEP = ("sweep", "BASE/sweep.py", "--over=optim.lr=0.001..1.0", "--trials=4", "--out=s")
SCENARIOS: dict[str, Scenario] = {
    "packed LM, EMA, best": Scenario((*TEXTS, *EXACT, *ELSEWHERE, "--run.patience", "1"), worlds=(SINGLE, DDP, FSDP)),
    "NF4 + LoRA": Scenario((*TEXTS, *NF4, *EXACT, *ELSEWHERE), worlds=(SINGLE, DDP, FSDP)),
    "tensor parallel": Scenario(
        (*TEXTS, "--memory.tensor_parallel", "2", "--max_steps", "12"), worlds=(Shape("ddp", 2),)
    ),
    "update ahead": Scenario(
        (*TEXTS, "--memory.cpu_offload", "optimizer", "--optim.clip_norm", "2.5"),
        worlds=(FSDP,),
        environment={"UPDATE_AHEAD": "1"},
    ),
    "sweep": Scenario(SWEEP, digest_of_sweep),
    "sweep --parallel 2": Scenario((*SWEEP, "--parallel=2"), digest_of_sweep),
    "predict --output": Scenario(
        ("predict", "BASE/spoken", "BASE/table.csv", "--trust-recipe", "--output", "o.csv"),
        digest_of_files,
        output="o.csv",
    ),
    "export --to hf": Scenario(
        ("export", "BASE/spoken", "--trust-recipe", "--to", "hf", "--output", "hf"), digest_of_files, output="hf"
    ),
}


def prepared(folder: Path) -> Path:
    """Make what the scenarios read: texts, weights, a recipe to sweep, and a finished run."""
    from hostile import prepared as finished_runs

    base = finished_runs(folder)
    for part, count in (("train", 24), ("val", 6)):
        (base / "texts" / part).mkdir(parents=True)
        for number in range(count):
            (base / "texts" / part / f"{number}.txt").write_text(f"{number} green {part} bottles\n" * (1 + number % 5))
    dict(in_forks([partial(_weights, base / "weights")], 1))
    (base / "table.csv").write_text("text\n" + "good film\nbad film\n" * 4000)
    (base / "sweep.py").write_text(SWEPT)
    return base


def _weights(folder: Path) -> None:
    """Save a Llama with random weights, of the sizes of the recipe."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainer.commands.recipes import load_recipe
    from trainer.models.byte_tokenizer import byte_tokenizer

    tokenizer, model = byte_tokenizer(), load_recipe(str(LANGUAGE))[0].model
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **model.config)).save_pretrained(folder)  # type: ignore[attr-defined]
    tokenizer.save_pretrained(folder)


SWEPT = """
from trainer import Memory, Optim, Recipe, Run
from trainer.data import Digits
from trainer.models import MLP

recipe = Recipe(
    model=MLP([16]), data=Digits(val_fraction=0.5, test_fraction=0.94), optim=Optim("sgd", lr=0.1, momentum=0.9),
    batch_size=16, max_steps=6, epochs=9, eval_every=1, memory=Memory(),
    run=Run(predict=False, progress=False, accelerator="cpu"),
)
"""


# ------------------------------------------------------------------------------------------------------------- a trial


def undisturbed(name: str, folder: Path, base: Path, port: int) -> dict[str, Any]:
    """Return how long a scenario takes on each of its worlds, and what it comes to and leaves."""
    scenario, seconds, found = SCENARIOS[name], {}, {}
    for at, world in enumerate(scenario.worlds or (None,)):
        here, began = folder / str(at), time.monotonic()
        run = scenario.start(here, base, world, port + 20 * at)
        run.wait()
        if not scenario.has_ended(here, run):
            raise RuntimeError(f"{name}: the undisturbed run ended with {run.codes}: {run.text(0)[-2000:]}")
        seconds[str(world)] = time.monotonic() - began
        own = {"digest": scenario.digest(here), "names": sorted(names(here))}
        if found and own != found:
            raise RuntimeError(f"{name}: undisturbed runs on {', '.join(seconds)} differ: {_different(own, found)}")
        found = own
    return {"seconds": seconds, **found}


def _different(own: Digest, other: Digest) -> str:
    return "; ".join(f"{key}: {own[key]!r:.600} and {other[key]!r:.600}" for key in own if own[key] != other[key])


def try_forked(name: str, number: int, share: float, reference: dict[str, Any], base: Path, folder: Path) -> Outcome:
    """Kill a scenario after ``share`` of its time, one time in three again, repeat it until it ends, and compare."""
    scenario, random = SCENARIOS[name], Random(number)
    worlds: list[Shape | None] = list(scenario.worlds) or [None]
    world = worlds[number % len(worlds)]
    instant = share * reference["seconds"][str(world)]
    outcome = Outcome(number, name, "forked", str(world or "one process"), "", round(instant, 3))
    folder = folder / str(number)
    run = scenario.start(folder, base, world, 20 * number)
    _kill(outcome, run, instant, random)
    outcome.finished = scenario.has_ended(folder, run)
    others = [other for other in worlds if other is not world] or worlds
    for attempt in range(6):
        if scenario.has_ended(folder, run):
            break
        world = random.choice(others)
        outcome.worlds.append(str(world or "one process"))
        run = scenario.start(folder, base, world, 20 * number)
        if attempt == 0 and random.random() < 1 / 3:
            outcome.kills += 1
            _kill(outcome, run, random.random() * reference["seconds"][str(world)], random)
        elif not run.wait():
            outcome.deviations.append(f"has not ended after {PATIENCE:g} s: {run.text(0)[-500:]}")
        elif not scenario.has_ended(folder, run):
            said = [run.text(rank)[-700:] for rank in run.pids]
            outcome.deviations.append(f"repeated, it ended with {run.codes}: {said}")
            break
    _note_left(outcome, 0.0)
    if not outcome.deviations:
        try:
            outcome.deviations += _compared(scenario, folder, reference)
        except (OSError, LookupError, ValueError) as error:
            outcome.deviations.append(f"cannot be compared: {type(error).__name__}: {error}")
    outcome.cpu_seconds = cpu_seconds()
    if not outcome.deviations:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _kill(outcome: Outcome, run: ForkedRun | ForkedCommand, instant: float, random: Random) -> None:
    """Kill some processes of ``run`` after ``instant`` seconds, and wait for the others."""
    until = time.monotonic() + instant
    while time.monotonic() < until and run.codes.keys() != run.pids.keys():
        run._look()
        time.sleep(SECONDS_BETWEEN_LOOKS)
    victim = random.choice(("first process", "a rank", "all") if len(run.pids) > 1 else ("first process", "all"))
    outcome.victim = outcome.victim or victim
    since = time.monotonic()
    if isinstance(run, ForkedRun) and outcome.kills == 1:
        outcome.saved = newest_step(run.run_dir)
    if run.codes.keys() != run.pids.keys():
        killed = {"first process": [0], "a rank": [random.choice(list(run.pids))], "all": list(run.pids)}[victim]
        for rank in killed:
            if rank not in run.codes:
                with suppress(ProcessLookupError):
                    (os.killpg if victim == "all" and isinstance(run, ForkedCommand) else os.kill)(
                        run.pids[rank], signal.SIGKILL
                    )
    if not run.wait():  # also ends what hosts the ranks' store
        outcome.deviations.append(f"killed, and the others have not ended after {PATIENCE:g} s")
    outcome.seconds = round(max(outcome.seconds, time.monotonic() - since), 2)
    outcome.code = run.codes.get(0)
    _note_left(outcome, TO_LEAVE)


def _note_left(outcome: Outcome, seconds: float) -> None:
    left = living_children(seconds)
    outcome.left += [f"pid {pid}: {_words(pid)}" for pid in left]
    outcome.deviations += [f"left behind: pid {pid}: {_words(pid)}" for pid in left]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    living_children(TO_LEAVE)


def _words(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" ").decode(errors="replace")
    return ""


def _compared(scenario: Scenario, folder: Path, reference: dict[str, Any]) -> list[str]:
    own, there = scenario.digest(folder), names(folder)
    found = [
        f"{key} differ: {own[key]!r:.1000} and {reference['digest'][key]!r:.1000}"
        for key in own
        if own[key] != reference["digest"][key]
    ]
    found += [f"left over: {name}" for name in sorted(there - {*reference["names"]})]
    return found + [f"missing: {name}" for name in sorted({*reference["names"]} - there)]
