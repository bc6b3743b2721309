"""``trainer ladder``: the memory techniques one by one and stacked, each measured in a fresh process."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.commands.measured_run import RETURN_FREED_MEMORY, Trial, probe_machine, run_trial
from trainer.commands.recipes import asked_for, count, new_folder
from trainer.errors import RecipeError, require
from trainer.memory.knobs import KNOBS, Knob, Turn
from trainer.recipe import Memory, Recipe
from trainer.report.summary import versions
from trainer.settings import did_you_mean, settings_of
from trainer.system.files import write_atomic
from trainer.system.machine import cores
from trainer.system.redact import redact_words
from trainer.system.text import as_text, escaped

FLAGS = {
    "steps": "steps that every rung takes (default: 5)",
    "rungs": "the rungs to measure, with commas; the baseline is always in (default: all that make sense here)",
    "out": "folder for ladder.json, ladder.png and the runs (default: runs/RECIPE/ladder-DATE-TIME-PID)",
    "minutes": "minutes after which a rung is ended as too slow (default: 30)",
}
NAMES = {knob.name for knob in KNOBS}
VARIED = {f"memory.{name}": value for name, value in vars(Memory()).items() if name in NAMES}
STEADY = {"model.dropout": 0.0, "model.attention_dropout": 0.0, "optim.schedule": "constant", "optim.warmup_steps": 0}
"""Set unless asked for otherwise: another cut draws another dropout, and a first step of hardly any learning rate would
make any technique look lossless."""
ON_HOST = "nothing to gain: the host is the device"
"""What to say of techniques that move memory from the device to the host, where there is no GPU."""
OWN = {"run.dir": "--out", "max_steps": "--steps"}
TURNS = [(knob, turn) for knob in KNOBS for turn in knob.turns if turn.rung]


@dataclass(frozen=True)
class Rung:
    """One row of the ladder.

    Args:
        name: for ``--rungs``; those that stack upon the ones before start with a plus.
        changes: settings that differ from the baseline's.
        note: what to know when reading its figures: that it is lossy, or another optimizer, or has nothing to gain.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A rung and what came of it; ``difference`` is that of its last loss from the baseline's, relative."""

    rung: Rung
    trial: Trial
    difference: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {"name": self.rung.name, "note": self.rung.note, "loss_difference": self.difference} | (
            self.trial.to_json()
        )


def ladder(argv: list[str]) -> None:
    """``trainer ladder``."""
    if asked := asked_for("ladder", "RECIPE", argv, FLAGS):
        climb(asked.recipe, asked.reference, asked.flags)


def climb(recipe: Recipe, reference: str, flags: Sequence[tuple[str, str | None]]) -> list[Row]:
    """Climb the ladder of ``recipe``: measure, print and write a row a rung, whatever becomes of the runs.

    Args:
        recipe: with all flags applied.
        reference: what names the recipe to ``trainer fit``.
        flags: all that were given; those of the ladder itself are in :data:`FLAGS`, the others go to every run.

    Raises:
        RecipeError: for a flag that the ladder cannot take.
        KeyboardInterrupt: when interrupted; the rows so far are written.
    """
    own, passed = _split(flags)
    require(
        "TORCHELASTIC_RUN_ID" not in os.environ, "trainer ladder starts its own processes: start it without a launcher"
    )
    steps, minutes = count("steps", own.get("steps", "5")), count("minutes", own.get("minutes", "30"))
    machine = probe_machine()
    if recipe.run.accelerator == "cpu":
        machine |= {"accelerator": "cpu", "device": "CPU", "devices": 1}
    base = baseline(recipe)
    rungs = choose(rungs_of(recipe, base, machine), own.get("rungs"))
    out = new_folder("ladder", own.get("out"), reference)
    report = Report(out, reference, machine, {"steps": steps, "flags": redact_words(passed)}, rungs)
    given = {name for name, _ in flags}
    fixed = {"max_steps": steps, "epochs": max(recipe.epochs, steps), "run.logger": ["csv"]}
    fixed |= {"run.evaluate": False, "run.recover": False}
    steady = {key: value for key, value in STEADY.items() if key not in given}
    before = settings_of(recipe)
    try:
        for number, rung in enumerate(rungs, 1):
            report.announce(number, len(rungs), rung)
            wanted = {**fixed, **steady, **base, **rung.changes}
            arguments = [reference, *passed, *_as_flags(wanted, {key: s.value for key, s in before.items()})]
            run_dir = out / f"{number:02d}-{rung.name.lstrip('+')}"
            trial = run_trial(arguments, run_dir, seconds=60 * minutes, environment=report.environment)
            report.add(rung, trial)
        report.complete = True
    finally:
        report.end()
    return report.rows


def baseline(recipe: Recipe) -> dict[str, Any]:
    """The settings of the run that everything is compared with: no technique, a rank's share as one micro-batch."""
    ranks = recipe.run.devices if recipe.run.devices != "auto" else 1
    batch_size = _batch_size(recipe, ranks)
    return VARIED | {
        "run.devices": ranks,
        "batch_size": batch_size,
        "accumulate": None,
        "memory.micro_batch_size": -(-batch_size // ranks),
    }


def rungs_of(recipe: Recipe, base: Mapping[str, Any], machine: Mapping[str, Any]) -> list[Rung]:
    """The rungs that make sense for this recipe on this machine: the baseline, one by one, then stacked."""
    share, ranks, cuda = base["memory.micro_batch_size"], base["run.devices"], machine["accelerator"] == "cuda"
    sizes = [size for power in range(1, 6) if (size := -(-share // 4**power)) < -(-share // 4 ** (power - 1))]
    found = [Rung("baseline"), *(Rung(f"micro-batch-{size}", {"memory.micro_batch_size": size}) for size in sizes)]
    found += [
        _rung(knob, turn, cuda)
        for knob, turn in TURNS
        if (cuda or not turn.needs_gpu) and (not knob.optimizers or recipe.optim.name in knob.optimizers)
    ]
    if recipe.optim.name != "sgd":  # before the last, which is bf16-true
        found.insert(-1, Rung("sgd", {"optim.name": "sgd"}, note="another optimizer"))
    found += _several_ranks(base, ranks, not cuda or machine["devices"] > 1)
    return found + _stacked(max(1, share // 16), share, cuda)


def _several_ranks(base: Mapping[str, Any], ranks: int, possible: bool) -> list[Rung]:
    """DDP and FSDP on two ranks, or on as many as the baseline has."""
    if ranks == 1 and not possible:
        return []
    several = max(2, ranks)
    changes = {"run.devices": several, "memory.micro_batch_size": -(-base["batch_size"] // several)}
    names = ["fsdp"] if ranks > 1 else ["ddp", "fsdp"]
    return [Rung(f"{name}-{several}-ranks", {**changes, "memory.strategy": name}) for name in names]


def _stacked(micro_batch_size: int, share: int, cuda: bool) -> list[Rung]:
    """Each technique on top of all before it; streaming parameters takes the place of offloading the optimizer."""
    steps = [_rung(knob, turn, cuda) for knob, turn in TURNS if turn.stacked]
    if micro_batch_size < share:
        steps.insert(0, Rung(f"micro-batch-{micro_batch_size}", {"memory.micro_batch_size": micro_batch_size}))
    changes: dict[str, Any] = {}
    found = []
    for rung in steps:
        changes = {**changes, **rung.changes}
        found.append(Rung(f"+{rung.name}", changes, rung.note))
    return found


def _rung(knob: Knob, turn: Turn, cuda: bool) -> Rung:
    note = "lossy" if knob.lossy else ON_HOST if knob.to_host and not cuda else ""
    return Rung(turn.rung, {f"memory.{knob.name}": turn.value}, note)


def choose(rungs: Sequence[Rung], wanted: str | None) -> list[Rung]:
    """The rungs named in ``wanted``, in the ladder's order, and the baseline; all of them for ``None``."""
    if wanted is None:
        return list(rungs)
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    known = [rung.name for rung in rungs]
    for name in names:
        if name not in known:
            raise RecipeError(f"--rungs: no rung {name!r} here{did_you_mean(name, known)} (rungs: {', '.join(known)})")
    return [rung for rung in rungs if rung.name in ("baseline", *names)]


class Report:
    """The table that is printed row by row, ``ladder.json`` and ``ladder.png``.

    Args:
        out: the folder.
        reference: names the recipe.
        machine: as :func:`trainer.commands.measured_run.probe_machine` found it.
        settings: what was asked for.
        rungs: those to be measured.
    """

    def __init__(
        self, out: Path, reference: str, machine: Mapping[str, Any], settings: Mapping[str, Any], rungs: Sequence[Rung]
    ) -> None:
        self.out, self.machine, self.reference = out, machine, reference
        self.environment = {
            **({} if machine["accelerator"] == "cuda" else RETURN_FREED_MEMORY),
            **{key: os.environ[key] for key in (*RETURN_FREED_MEMORY, "OMP_NUM_THREADS") if key in os.environ},
        }
        """Variables that figures depend on; those that the person has set win."""
        self.settings = {**settings, "rungs": [rung.name for rung in rungs]}
        self.cuda = machine["accelerator"] == "cuda"
        self.rows: list[Row] = []
        self.complete = False
        self._date = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._versions = versions()
        self._width = max(len(self._label(rung)) for rung in rungs)

    def announce(self, number: int, total: int, rung: Rung) -> None:
        """Say which rung is being measured; on a terminal its row then takes the line's place."""
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{f'rung {number}/{total}: {rung.name}':<{self._width}}", end=end, file=sys.stderr, flush=True)

    def add(self, rung: Rung, trial: Trial) -> None:
        """Print and write a row."""
        first = self.rows[0].trial if self.rows else trial
        self.rows.append(Row(rung, trial, _difference(trial, first)))
        if len(self.rows) == 1:
            self._print_header()
        print(escaped(self._line(self._cells(self.rows[-1]))), flush=True)
        self._write()

    def end(self) -> None:
        """Write what there is and draw it."""
        self._write()
        if self.rows:
            from trainer.report.plots import plot_ladder

            kinds = ["allocated", "reserved"] if self.cuda else ["resident"]
            bars = [
                (self._label(row.rung), [*(self._memory(row.trial))], _status(row.trial, full=False))
                for row in self.rows
            ]
            plot_ladder(bars, kinds, f"{self.reference} on {self.machine['device']}", self.out / "ladder.png")
        missing = "" if self.complete else f" (stopped after {len(self.rows)} of {len(self.settings['rungs'])} rungs)"
        print(f"files: {escaped(self.out)}: ladder.json, ladder.png and a folder and a log for each rung{missing}")

    def _write(self) -> None:
        content = {
            "recipe": self.reference,
            "date": self._date,
            "complete": self.complete,
            "settings": self.settings,
            "machine": {**self.machine, "cores": cores(), "system": f"{platform.system()} {platform.machine()}"},
            "environment": self.environment,
            "versions": self._versions,
            "rungs": [row.to_json() for row in self.rows],
        }
        write_atomic(self.out / "ladder.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def _memory(self, trial: Trial) -> tuple[float | None, ...]:
        if self.cuda:
            return trial.memory.get("allocated_gb"), trial.memory.get("reserved_gb")
        return (trial.host_gb,)

    def _share(self, trial: Trial) -> float | None:
        """Of the baseline's memory; of its allocated memory on a GPU."""
        own, first = self._memory(trial)[0], self._memory(self.rows[0].trial)[0]
        return own / first if own is not None and first else None

    def _label(self, rung: Rung) -> str:
        return f"{rung.name} ({rung.note})" if rung.note else rung.name

    def _print_header(self) -> None:
        idle = "over idle" if self.rows[0].trial.memory.get("host_idle_gb") is not None else "in all"
        memory = ["GB allocated", "GB reserved"] if self.cuda else [f"GB {idle}"]
        header = [
            "rung",
            *memory,
            "of baseline",
            "samples/s",
            f"loss, step {self.settings['steps']}",
            "difference",
            "status",
        ]
        print(self._line(header))
        print(self._line(["-" * self._width, *("-" * 11 + ":" for _ in header[1:-1]), "------"]))

    def _cells(self, row: Row) -> list[str]:
        trial = row.trial
        return [
            self._label(row.rung),
            *(_figure(value, ".3f") for value in self._memory(trial)),
            _figure(self._share(trial), ".0%"),
            _figure(trial.samples_per_second, ",.1f"),
            _figure(trial.losses[-1] if trial.losses else None, ".5f"),
            _figure(row.difference, ".1e"),
            _status(trial),
        ]

    def _line(self, cells: Sequence[str]) -> str:
        figures = " | ".join(f"{cell:>12}" for cell in cells[1:-1])
        return f"| {cells[0]:<{self._width}} | {figures} | {cells[-1]} |"


def _status(trial: Trial, full: bool = True) -> str:
    reason = (trial.reason or "").replace("|", "/")  # a bar would end the cell
    return f"{trial.status}: {reason}" if full and reason else trial.status


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def _difference(trial: Trial, first: Trial) -> float | None:
    """The relative difference of the last loss from the baseline's; ``None`` unless both took as many steps."""
    if trial is first or not trial.losses or len(trial.losses) != len(first.losses) or not first.losses[-1]:
        return None
    return abs(trial.losses[-1] / first.losses[-1] - 1)


def _split(flags: Sequence[tuple[str, str | None]]) -> tuple[dict[str, str], list[str]]:
    """The ladder's own flags, and those of the recipe as words of a command line."""
    own: dict[str, str] = {}
    passed: list[str] = []
    for name, text in flags:
        if name in FLAGS:
            own[name] = text or ""
        elif name in OWN:
            raise RecipeError(f"--{name} is the ladder's to set: use {OWN[name]}")
        elif name in VARIED:
            raise RecipeError(f"--{name} is what the ladder varies: leave it out, and choose rungs with --rungs")
        else:
            passed.append(f"--{name}" if text is None else f"--{name}={text}")
    return own, passed


def _batch_size(recipe: Recipe, ranks: int) -> int:
    """Samples a step in epoch 0. Not through the plan, which imports torch: see trial.py."""
    if recipe.batch_size is not None:
        return recipe.batch_size
    accumulate, micro_batch_size = recipe.accumulate, recipe.memory.micro_batch_size
    first = accumulate[0] if isinstance(accumulate, dict) else accumulate
    assert isinstance(first, int)  # the recipe has checked that: without batch_size both are given
    assert isinstance(micro_batch_size, int)
    return first * micro_batch_size * ranks


def _as_flags(wanted: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The flags that make of the settings ``before`` those that are ``wanted``, as far as the recipe has them.

    Those of the cut are always said: of what is not asked for, something may give way.
    """
    cut = ("batch_size", "accumulate", "memory.micro_batch_size")
    changed = {key: value for key, value in wanted.items() if key in cut or (key in before and before[key] != value)}
    return [f"--{key}={as_text(value)}" for key, value in changed.items()]
