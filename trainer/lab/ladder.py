"""``trainer ladder``: measure the memory techniques, one by one and stacked, each in a fresh process."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.commands import CommandFlags
from trainer.commands.recipes import create_output_folder, parse_command, parse_count
from trainer.errors import require
from trainer.lab.find_lr import as_words
from trainer.lab.measured_run import CPU, MALLOC_TRIM_ENV, Trial, probe_machine, run_trial
from trainer.memory.knobs import KNOBS, Knob, KnobValue
from trainer.recipe import Memory, Recipe
from trainer.report.summary import versions
from trainer.settings import settings_of
from trainer.system import status_line
from trainer.system.files import write_atomic
from trainer.system.machine import cores
from trainer.system.names import did_you_mean
from trainer.system.redact import redact_words
from trainer.system.text import GB, as_text, escaped, format_bytes, format_number

FLAGS = {
    "steps": "optimizer steps of each rung (default: 5)",
    "rungs": "the rungs to measure, separated by commas; the baseline is always included (default: all that apply)",
    "out": "folder for ladder.json, ladder.png and the runs (default: runs/RECIPE/ladder-DATE-TIME-PID)",
    "minutes": "time limit of a rung, in minutes (default: 30)",
}
ABOUT = "Measure the memory techniques on a recipe, one by one and stacked: memory, speed, and change of the loss."
VARIED = {f"memory.{name}": value for name, value in vars(Memory()).items() if name in {knob.name for knob in KNOBS}}
# Set unless given as flags: another cut draws another dropout, and a tiny first learning rate would hide any loss.
DETERMINISTIC_SETTINGS: dict[str, Any] = {"model.dropout": 0.0, "model.attention_dropout": 0.0}
DETERMINISTIC_SETTINGS |= {"optim.schedule": "constant", "optim.warmup_steps": 0}
ON_HOST = "nothing to gain: the host is the device"  # for techniques that move memory to the host
OWN = {"run.dir": "--out", "max_steps": "--steps"}
ANY = {"accelerator": "cuda", "devices": 2}  # a machine on which every rung applies
STEP_CANDIDATES = [(knob, turn) for knob in KNOBS for turn in knob.candidates if turn.ladder_name]


@dataclass(frozen=True)
class LadderStep:
    """One row of the ladder: a name for ``--rungs``, settings that differ from the baseline's, and a note.

    The name starts with a plus if the rung is stacked on the ones before it."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name


def ladder(argv: list[str]) -> None:
    """Measure, print and write a row per rung, also for runs that fail."""
    asked = parse_command("ladder", "RECIPE", argv, CommandFlags(FLAGS, description=ABOUT))
    if asked is None:
        return
    recipe, _, reference, flags = asked
    for name, _ in flags:
        require(name not in OWN, f"--{name} is set by the ladder: use {OWN.get(name)}")
        require(name not in VARIED, f"--{name} is varied by the ladder: leave it out, and choose rungs with --rungs")
    own = {name: text or "" for name, text in flags if name in FLAGS}
    passed = as_words([(name, text) for name, text in flags if name not in FLAGS])
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    require(not launched, "trainer ladder starts its own processes: start it without a launcher")
    steps, minutes = parse_count("steps", own.get("steps", "5")), parse_count("minutes", own.get("minutes", "30"))
    base = baseline(recipe)
    choose(build_steps(recipe, base, ANY), own.get("rungs"))
    status_line.show_status("looking for GPUs")
    machine = CPU if recipe.run.accelerator == "cpu" else probe_machine()
    rungs = choose(build_steps(recipe, base, machine), own.get("rungs"))
    out = create_output_folder("ladder", own.get("out"), reference)
    report = LadderTable(out, reference, machine, {"steps": steps, "flags": redact_words(passed)}, rungs)
    given = {name for name, _ in flags}
    fixed = {"max_steps": steps, "epochs": max(recipe.epochs, steps), "run.logger": ["csv"]}
    fixed |= {"run.evaluate": False, "run.recover": False}
    fixed |= {key: value for key, value in DETERMINISTIC_SETTINGS.items() if key not in given}
    before = {key: setting.value for key, setting in settings_of(recipe).items()}
    try:
        for number, rung in enumerate(rungs, 1):
            report.show_running(number, rung)
            arguments = [reference, *passed, *_as_flags({**fixed, **base, **rung.changes}, before)]
            run_dir = out / f"{number:02d}-{rung.name.lstrip('+')}"
            report.add(rung, run_trial(arguments, run_dir, seconds=60 * minutes, environment=report.environment))
    finally:
        report.finish()


def baseline(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of the reference run: no technique, and each rank's share as one micro-batch."""
    ranks = recipe.run.devices if recipe.run.devices != "auto" else 1
    batch_size: Any = recipe.batch_size
    if batch_size is None:  # samples per step in epoch 0; computed here, because the plan imports torch
        accumulate: Any = recipe.accumulate
        first = accumulate[0] if isinstance(accumulate, dict) else accumulate
        batch_size = first * recipe.memory.micro_batch_size * ranks
    cut = {"batch_size": batch_size, "accumulate": None, "memory.micro_batch_size": -(-batch_size // ranks)}
    return {**VARIED, "run.devices": ranks, **cut}


def build_steps(recipe: Recipe, base: Mapping[str, Any], machine: Mapping[str, Any]) -> list[LadderStep]:
    """Return the rungs that apply to the recipe on this machine: the baseline, one by one, then stacked."""
    share, ranks, cuda = base["memory.micro_batch_size"], base["run.devices"], machine["accelerator"] == "cuda"
    sizes = [size for power in range(1, 6) if (size := -(-share // 4**power)) < -(-share // 4 ** (power - 1))]
    found = [LadderStep("baseline")]
    found += [LadderStep(f"micro-batch-{size}", {"memory.micro_batch_size": size}) for size in sizes]
    found += [
        _rung(knob, turn, cuda)
        for knob, turn in STEP_CANDIDATES
        if (cuda or not turn.needs_gpu) and (not knob.optimizers or recipe.optim.kind in knob.optimizers)
    ]
    if recipe.optim.name != "sgd":  # before the last, which is bf16-true
        found.insert(-1, LadderStep("sgd", {"optim.name": "sgd"}, note="another optimizer"))
    if ranks > 1 or not cuda or machine["devices"] > 1:
        several = max(2, ranks)
        changes = {"run.devices": several, "memory.micro_batch_size": -(-base["batch_size"] // several)}
        names = ["fsdp"] if ranks > 1 else ["ddp", "fsdp"]
        found += [LadderStep(f"{name}-{several}-ranks", {**changes, "memory.strategy": name}) for name in names]
    # Stacked: each on top of all before it; streaming parameters replaces offloading the optimizer.
    steps = [_rung(knob, turn, cuda) for knob, turn in STEP_CANDIDATES if turn.stacks]
    smallest = max(1, share // 16)
    if smallest < share:
        steps.insert(0, LadderStep(f"micro-batch-{smallest}", {"memory.micro_batch_size": smallest}))
    stacked: dict[str, Any] = {}
    for rung in steps:
        stacked = {**stacked, **rung.changes}
        found.append(LadderStep(f"+{rung.name}", stacked, rung.note))
    return found


def _rung(knob: Knob, turn: KnobValue, cuda: bool) -> LadderStep:
    note = "lossy" if knob.lossy else ON_HOST if knob.to_host and not cuda else ""
    return LadderStep(turn.ladder_name, {f"memory.{knob.name}": turn.value}, note)


def choose(rungs: Sequence[LadderStep], wanted: str | None) -> list[LadderStep]:
    """Return the baseline and the rungs named in ``wanted``, in the ladder's order; all of them for ``None``."""
    if wanted is None:
        return list(rungs)
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    known = [rung.name for rung in rungs]
    for name in names:
        require(name in known, f"--rungs: no rung {name!r} here{did_you_mean(name, known)} (rungs: {', '.join(known)})")
    return [rung for rung in rungs if rung.name in ("baseline", *names)]


class LadderTable:
    """The printed table, ``ladder.json`` and ``ladder.png``."""

    def __init__(
        self, out: Path, reference: str, machine: Mapping[str, Any], settings: Any, rungs: Sequence[LadderStep]
    ) -> None:
        self.out, self.reference, self.settings, self.rungs = out, reference, settings, rungs
        self.cuda = machine["accelerator"] == "cuda"
        given = {key: os.environ[key] for key in (*MALLOC_TRIM_ENV, "OMP_NUM_THREADS") if key in os.environ}
        self.environment = ({} if self.cuda else MALLOC_TRIM_ENV) | given  # variables that change the measurements
        self.machine = {**machine, "cores": cores(), "system": f"{platform.system()} {platform.machine()}"}
        self.rows: list[tuple[LadderStep, Trial, float | None]] = []
        self._date, self._versions = time.strftime("%Y-%m-%d %H:%M:%S %z"), versions()
        self._width = max(len(rung.label) for rung in rungs)

    def show_running(self, number: int, rung: LadderStep) -> None:
        """Print which rung is being measured; on a terminal its row then replaces the line."""
        status_line.clear_status()
        line = f"rung {number}/{len(self.rungs)}: {rung.name}".ljust(self._width)
        print(line, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    def add(self, rung: LadderStep, trial: Trial) -> None:
        """Print and write a row, with the relative difference of its last loss to the baseline's."""
        first = self.rows[0][1] if self.rows else trial
        difference = None
        if trial is not first and trial.losses and len(trial.losses) == len(first.losses) and first.losses[-1]:
            difference = abs(trial.losses[-1] / first.losses[-1] - 1)
        self.rows.append((rung, trial, difference))
        if trial is first:
            idle = "over idle" if trial.memory.get("host_idle_gb") is not None else "in total"
            memory = ["allocated", "reserved"] if self.cuda else [idle]
            loss = f"loss, step {self.settings['steps']}"
            header = ["rung", *memory, "of baseline", "samples/s", loss, "difference", "status"]
            print(self._line(header))
            print(self._line(["-" * self._width, *("-" * 11 + ":" for _ in header[1:-1]), "------"]))
        own, whole = self._memory(trial), self._memory(first)[0]
        values = [
            *("–" if value is None else format_bytes(value * GB) for value in own),
            format_number(own[0] / whole if own[0] is not None and whole else None, ".0%", "–"),
            format_number(trial.samples_per_second, ",.1f", "–"),
            format_number(trial.losses[-1] if trial.losses else None, ".5f", "–"),
            format_number(difference, ".1e", "–"),
        ]
        reason = (trial.reason or "").replace("|", "/")  # a vertical bar would end the cell
        status = f"{trial.status}: {reason}" if reason else trial.status
        print(escaped(self._line([rung.label, *values, status])), flush=True)
        self._write()

    def finish(self) -> None:
        self._write()
        if self.rows:
            from trainer.report.plots import plot_ladder

            kinds = ["allocated", "reserved"] if self.cuda else ["resident"]
            bars = [(rung.label, [*self._memory(trial)], trial.status) for rung, trial, _ in self.rows]
            plot_ladder(bars, kinds, f"{self.reference} on {self.machine['device']}", self.out / "ladder.png")
        done, wanted = len(self.rows), len(self.rungs)
        missing = "" if done == wanted else f" (stopped after {done} of {wanted} rungs)"
        print(f"files: {escaped(self.out)}: ladder.json, ladder.png and a folder and a log per rung{missing}")

    def _write(self) -> None:
        rows = [{"name": rung.name, "note": rung.note, "loss_difference": d} | t.to_json() for rung, t, d in self.rows]
        content = {"recipe": self.reference, "date": self._date, "complete": len(self.rows) == len(self.rungs)}
        content |= {"settings": {**self.settings, "rungs": [rung.name for rung in self.rungs]}, "machine": self.machine}
        content |= {"environment": self.environment, "versions": self._versions, "rungs": rows}
        write_atomic(self.out / "ladder.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def _memory(self, trial: Trial) -> tuple[float | None, ...]:
        if self.cuda:
            return trial.memory.get("allocated_gb"), trial.memory.get("reserved_gb")
        return (trial.host_gb,)

    def _line(self, cells: Sequence[str]) -> str:
        middle = " | ".join(f"{cell:>12}" for cell in cells[1:-1])
        return f"| {cells[0]:<{self._width}} | {middle} | {cells[-1]} |"


def _as_flags(wanted: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the flags that change ``before`` to ``wanted``. The cut is always given, as its defaults may adjust."""
    cut = ("batch_size", "accumulate", "memory.micro_batch_size")
    changed = {key: value for key, value in wanted.items() if key in cut or (key in before and before[key] != value)}
    return [f"--{key}={as_text(value)}" for key, value in changed.items()]
