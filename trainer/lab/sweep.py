"""``trainer sweep``: search good settings of a recipe with Optuna; each trial runs in a separate process."""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from queue import SimpleQueue
from random import Random
from statistics import mean, stdev
from typing import Any, get_args

from trainer.commands import CommandFlags
from trainer.commands.recipes import parse_command, parse_count, resolve
from trainer.contract import Metric
from trainer.errors import RecipeError, RunError, require, require_package
from trainer.lab.find_lr import as_words, find_lr
from trainer.lab.measured_run import CPU, Trial, probe_machine, run_trial
from trainer.recipe import HIGHER_IS_BETTER, Recipe
from trainer.settings import settings_of
from trainer.system import status_line
from trainer.system.error_reports import describe_error
from trainer.system.files import make_folder, read_json_object, write_atomic
from trainer.system.lock import RunLock
from trainer.system.machine import cores
from trainer.system.names import did_you_mean
from trainer.system.redact import redact_words
from trainer.system.text import align_columns, escaped

FLAGS = {
    "over": "a setting to vary: KEY=LOW..HIGH, on a log scale if HIGH >= 10 × LOW, or KEY=A,B,C; may be repeated",
    "trials": "number of runs, including those of earlier starts (default: 20)",
    "folds": "instead of --over: k-fold cross-validation, one run per fold of the training set",
    "parallel": "runs at the same time, each on its own GPU, or with its share of the CPU cores (default: 1)",
    "out": "folder of sweep.json and the runs; the same command resumes there (default: runs/RECIPE-sweep)",
}
SWITCHES = {"find-lr": "instead of --over: suggest a learning rate, from one run whose rate grows until it diverges"}
ABOUT = "Find good settings with many runs; trials that fall behind are ended early."
MAX_JSON_BYTES = 64 * 2**20
TAKEN = ("run.dir", "run.resume", "run.best", "run.metrics")
"""Settings that the sweep sets, or compares trials by."""
NUMBER, TEXT = (int, float, type(None)), (str, type(None))
FOUND: dict[str, Any] = {"score": NUMBER, "figure": TEXT, "value": NUMBER, "step": NUMBER}
ROW = {"number": int, "settings": dict, "status": str, "reason": TEXT, "scores": list, "seconds": NUMBER, **FOUND}
"""The fields of a trial in ``sweep.json``; those of ``FOUND``, the results of its evaluations, are all null or none."""
NO_VAL = "a sweep compares trials on a validation set, and the data has none"
NOT_COMPARED = f"{NO_VAL}: hold one out with --data.val_fraction 0.1, or give --run.best test_loss"


def sweep(argv: list[str]) -> None:
    """Run and compare the trials, and record all of them; resume an interrupted sweep."""
    asked = parse_command("sweep", "RECIPE", argv, CommandFlags(FLAGS, SWITCHES, description=ABOUT))
    if asked is None:
        return
    status_line.clear_status()
    recipe, source, reference, flags = asked
    own = {name: text or "" for name, text in flags if name in FLAGS}
    over = [text or "" for name, text in flags if name == "over"]
    passed = [(name, text) for name, text in flags if name not in (*FLAGS, *SWITCHES)]
    if ("find-lr", None) in flags:
        extra = own.keys() - {"out"}
        require(not extra, f"--find-lr is a single run: leave out --{', --'.join(extra)}")
        find_lr(recipe, reference, passed, own.get("out"))
        return
    for name in TAKEN[:2]:
        require(all(name != given for given, _ in flags), f"--{name} is set by the sweep: use --out")
    words = [reference, *as_words(passed)]
    compares = recipe.run.evaluate and recipe.run.best_metric() != "last"
    require(compares, "a sweep compares trials by run.best: leave out run.best=last and run.evaluate=false")
    ways = "--over KEY=LOW..HIGH (or KEY=A,B,C), once or more, or --folds 5, or --find-lr"
    require(bool(over) != ("folds" in own), f"sweep needs something to vary: give {ways}")
    if "folds" in own:
        trials = parse_count("folds", own["folds"])
        chooser: TrialSource = CrossValidation(recipe, trials)
    else:
        space = dict(parsed(recipe, source, text) for text in over)
        require(len(space) == len(over), "--over has a setting twice: give each setting once, with all its values")
        chooser, trials = OptunaSearch(space, recipe.seed), parse_count("trials", own.get("trials", "20"))
    parallel = parse_count("parallel", own.get("parallel", "1"))
    out = Path(own.get("out") or f"runs/{Path(reference).stem}-sweep").absolute()
    make_folder("--out", out)
    with RunLock(out):
        settings = {"command": redact_words(words), "over": over} | ({"folds": trials} if "folds" in own else {})
        Sweep(recipe, words, out, chooser, settings).run(trials, device_slots(recipe, parallel))


def parsed(recipe: Recipe, source: str | None, text: str) -> tuple[str, Any]:
    """Return the setting and the Optuna distribution of one ``--over``; check its bounds or choices."""
    require_package("trainer sweep", "optuna", "sweep")
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    key, equals, values = text.partition("=")
    settings = settings_of(recipe)
    require(bool(equals and values), f"--over {text!r} must be KEY=LOW..HIGH or KEY=A,B,C")
    require(key in settings, f"--over {key!r} is not a setting of the recipe{did_you_mean(key, settings)}")
    require(key not in TAKEN, f"--over {key} is set by the sweep or compares its trials: vary another setting")
    low, dots, high = values.partition("..")
    choices = [low, high] if dots else [choice.strip() for choice in values.split(",")]
    if len(set(choices)) < 2 or not all(choices):
        raise RecipeError(f"--over {text!r} has nothing to choose from: give at least two values, as in {key}=1,2")
    for choice in choices:
        resolve(recipe, source, [(key, choice)], "")
    if not dots:
        return key, CategoricalDistribution(choices)
    hint = settings[key].hint
    whole = float not in (hint, *get_args(hint)) and all(word.lstrip("-").isdecimal() for word in choices)
    try:
        first, last = (int(low), int(high)) if whole else (float(low), float(high))
    except ValueError:
        raise RecipeError(f"--over {text!r}: {key} takes no numbers: give its values separated by commas") from None
    require(-math.inf < first < last < math.inf, f"--over {text!r} must have two finite numbers, the lower one first")
    log = first > 0 and last >= 10 * first
    return key, IntDistribution(int(first), int(last), log=log) if whole else FloatDistribution(first, last, log=log)


def device_slots(recipe: Recipe, parallel: int) -> list[dict[str, str]]:
    """Return the environment variables of each parallel trial: its GPU, or its share of the CPU cores."""
    if parallel == 1:
        return [{}]
    machine: dict[str, Any] = CPU if recipe.run.accelerator == "cpu" else probe_machine()
    if machine["accelerator"] == "cpu":
        return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // parallel)))}] * parallel
    found = machine["devices"]
    require(parallel <= found, f"--parallel={parallel} needs a GPU per run, and this machine has {found}: lower it")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(found)))
    return [{"CUDA_VISIBLE_DEVICES": device} for device in visible.split(",")[:parallel]]


class TrialSource:
    """Chooses the settings of trials, depending only on the rows of earlier trials."""

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise a ValueError if this sweep cannot have written this row of ``sweep.json``."""

    def example(self) -> dict[str, Any]:
        """Return possible settings of a trial."""
        return self.ask([], 0, None)[1]

    def ask(self, earlier: Sequence[Mapping[str, Any]], results: int, known: Any) -> tuple[Any, dict[str, Any]]:
        """Return the next trial and its settings, which are ``known`` if an earlier start has chosen them.

        Only the first ``results`` of the ``earlier`` rows may be used with their results, the others by their settings.
        """
        raise NotImplementedError

    def report(self, trial: Any, score: float, number: int) -> bool:
        """Record the score of evaluation ``number`` of a trial (higher is better); return whether to end the trial."""
        return False


class CrossValidation(TrialSource):
    """Cross-validation: one trial per fold of the training set, which is held out."""

    def __init__(self, recipe: Recipe, folds: int) -> None:
        if not {"data.val_fraction", "data.val_fold"} <= settings_of(recipe).keys():
            lacking = f"{type(recipe.data).__name__} does not have both"
            raise RecipeError(f"--folds needs data.val_fraction and data.val_fold: {lacking}")
        require(folds > 1, f"--folds={folds} must be at least 2: each fold is validated by a model of the others")
        self.folds = [{"data.val_fraction": repr(1 / folds), "data.val_fold": str(fold)} for fold in range(folds)]

    def check(self, row: Mapping[str, Any]) -> None:
        require(row["settings"] == self.folds[row["number"] - 1], "its settings differ from those of its fold")

    def ask(self, earlier: Sequence[Mapping[str, Any]], results: int, known: Any) -> tuple[Any, dict[str, Any]]:
        return None, dict(self.folds[len(earlier)])


class OptunaSearch(TrialSource):
    """Optuna's Tree-structured Parzen Estimator; trials below the median of the others are ended early.

    Each trial has its own study and seed. The draws of one study would depend on the order in which trials end, so a
    resumed sweep would try other settings.
    """

    def __init__(self, space: Mapping[str, Any], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna, self.space, self.seed = optuna, dict(space), seed

    def check(self, row: Mapping[str, Any]) -> None:
        self._frozen(row, True)

    def example(self) -> dict[str, Any]:
        ends = {key: getattr(values, "choices", None) or [values.low] for key, values in self.space.items()}
        return {key: first for key, (first, *_) in ends.items()}

    def ask(self, earlier: Sequence[Mapping[str, Any]], results: int, known: Any) -> tuple[Any, dict[str, Any]]:
        seed = Random(f"{self.seed} {len(earlier)}").getrandbits(32)
        sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        pruner = self.optuna.pruners.MedianPruner()
        study = self.optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        study.add_trials([self._frozen(row, place < results) for place, row in enumerate(earlier)])
        if known is not None:
            study.enqueue_trial(known)
        trial = study.ask(self.space)
        return trial, dict(trial.params)

    def report(self, trial: Any, score: float, number: int) -> bool:
        trial.report(score, number)
        return bool(trial.should_prune())

    def _frozen(self, row: Mapping[str, Any], with_result: bool) -> Any:
        states = self.optuna.trial.TrialState
        ended = {"finished": states.COMPLETE, "pruned": states.PRUNED, "running": states.RUNNING}
        state = ended.get(row["status"], states.FAIL) if with_result else states.RUNNING
        value = row["score"] if state == states.COMPLETE else None
        scores = dict(enumerate(row["scores"])) if state.is_finished() else {}
        known: dict[str, Any] = {"params": row["settings"], "distributions": self.space}
        return self.optuna.trial.create_trial(state=state, value=value, intermediate_values=scores, **known)


class Sweep:
    """The trials of a recipe, each in a folder of ``out``, and ``sweep.json``, from which the sweep can resume.

    ``words`` are the recipe and flags of the command line. A sweep resumes only with the same ``settings``.
    """

    def __init__(
        self, recipe: Recipe, words: Sequence[str], out: Path, chooser: TrialSource, settings: Mapping[str, Any]
    ) -> None:
        self.recipe, self.words, self.out, self.chooser, self.settings = recipe, words, out, chooser, dict(settings)
        before = read_json_object(out / "sweep.json", MAX_JSON_BYTES)
        same = all(before.get(key) == self.settings.get(key) for key in ("command", "over", "folds"))
        require(not before or same, f"--out={out} holds another sweep: give the flags of that sweep, or another folder")
        self.rows: list[dict[str, Any]] = []
        try:
            require(bool(before) or not os.path.lexists(out / "sweep.json"), "it is not a JSON object")
            for row in before.get("trials", []):
                wrong = [name for name, kind in ROW.items() if not _matches_type(row[name], kind)]
                wrong += [] if all(_matches_type(score, (int, float)) for score in row["scores"]) else ["scores"]
                wrong += [] if row["number"] == len(self.rows) + 1 else ["number"]
                wrong += [name for name in FOUND if (row[name] is None) != (row["score"] is None)]
                require(not wrong, f"invalid {', '.join(wrong)}")
                chooser.check(row)
                self.rows.append(row)
        except (LookupError, TypeError, ValueError, OverflowError) as error:  # RecipeError is a ValueError
            why = f"{out / 'sweep.json'} is damaged (trial {len(self.rows) + 1}: {describe_error(error)})"
            raise RecipeError(f"{why}: restore a copy of it, or start again in another folder with --out") from error
        self.guard, self.stop = threading.Lock(), threading.Event()
        self.free: SimpleQueue[Mapping[str, str]] = SimpleQueue()
        self.column = next((row["figure"] for row in self.rows if row["figure"]), None)

    def run(self, trials: int, slots: Sequence[Mapping[str, str]]) -> None:
        """Run the remaining trials in the order of their numbers, one per slot.

        A trial waits for the trials at least ``lag`` before it and uses only their results. So its settings do not
        depend on which parallel trial ends first, and slots rarely wait.
        """
        done = [row["number"] for row in self.rows if row["status"] != "running"]
        if self.rows:
            print(escaped(f"resuming in {self.out}: {len(done)} of {trials} trials are done"), flush=True)
        for folder in (self.out / f"trial-{number:03d}" for number in done):
            if not folder.is_symlink():  # left behind if an earlier start was killed
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        for slot in slots:
            self.free.put(slot)
        self.trials, self.lag = trials, 2 * len(slots) - 1
        if self.column is None and trials > len(done):
            self._require_compared()
        pool = ThreadPoolExecutor(len(slots))
        running: dict[int, Future[None]] = {}
        try:
            for number in sorted({*range(1, trials + 1)} - {*done}):
                slot = self.free.get()
                for earlier, future in running.items():
                    if earlier <= number - self.lag or future.done():
                        future.result()
                running[number] = pool.submit(self._one, *self._begin(number), slot)
            for future in running.values():
                future.result()
        except BaseException:
            self.stop.set()  # unfinished runs resume when the sweep resumes
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        self._end()

    def _require_compared(self) -> None:
        """Prepare the data like a trial; raise an error if it has no set to compare trials on."""
        from trainer.planner.predict import prepare_recipe
        from trainer.run.best_tracker import BestTracker

        recipe = resolve(self.recipe, None, [(key, str(value)) for key, value in self.chooser.example().items()], "")
        assert recipe is not None
        data = prepare_recipe(recipe.replace(data=deepcopy(recipe.data))).data
        best = BestTracker(recipe, "val" if data.val is not None else "test")
        require(best.is_chosen and (data.val or data.test) is not None, NOT_COMPARED)

    def _begin(self, number: int) -> tuple[Any, dict[str, Any]]:
        with self.guard:
            earlier, (row, *_) = self.rows[: number - 1], [*self.rows[number - 1 :], {}]
            trial, settings = self.chooser.ask(earlier, number - self.lag, row.get("settings"))
            if not row:
                self.rows.append(row)
            row |= {**dict.fromkeys(ROW), "number": number, "settings": settings, "status": "running", "scores": []}
            self._write()
        return trial, row

    def _one(self, trial: Any, row: dict[str, Any], slot: Mapping[str, str]) -> None:
        try:
            words = [*self.words, *(f"--{key}={value}" for key, value in row["settings"].items())]
            run_dir = self.out / f"trial-{row['number']:03d}"
            resumed = ["--run.resume=auto"] if (run_dir / "recipe.yaml").exists() else []
            one = ["--run.devices=1"] if "CUDA_VISIBLE_DEVICES" in slot else []

            def watch() -> str | None:
                return "stopped" if self.stop.is_set() else self._look(trial, row, run_dir)

            found = run_trial([*words, *one, *resumed], run_dir, environment=slot, watch=watch, keep_model=True)
        finally:
            self.free.put(slot)
        if found.status != "stopped" and not self.stop.is_set():
            self._note(trial, row, run_dir, found)

    def _look(self, trial: Any, row: dict[str, Any], run_dir: Path) -> str | None:
        scores = [self._score(column, value) for column, value, _ in evaluations(run_dir, self.recipe)]
        with self.guard:
            for number in range(len(row["scores"]), len(scores)):
                row["scores"].append(scores[number])
                if self.chooser.report(trial, scores[number], number):
                    return "pruned"
        return None

    def _note(self, trial: Any, row: dict[str, Any], run_dir: Path, found: Trial) -> None:
        """Record the end of a trial, and remove its checkpoints.

        A trial to prune is recorded as pruned even if it finished first: the settings of later trials depend on it.
        """
        status = found.status if found.status == "pruned" else self._look(trial, row, run_dir) or found.status
        with self.guard:
            row |= {"status": status, "reason": found.reason, "seconds": round(found.seconds, 1)}
            if known := evaluations(run_dir, self.recipe)[: len(row["scores"])]:
                column, value, step = max(known, key=lambda one: (self._score(*one[:2]), -one[2]))
                row |= {"figure": column, "value": value, "step": step, "score": self._score(column, value)}
                self.column = column
            elif status == "finished":
                row |= {"status": "failed", "reason": "no evaluation has a finite metric"}
            self._write()
            print(escaped(f"trial {row['number']}/{self.trials}: {_told(row)}"), flush=True)
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)

    def _score(self, column: str, value: float) -> float:
        """Return the value of a metric with the sign for which higher is better."""
        name = column.partition("_")[2]
        own = [metric for metric in self.recipe.run.metrics if isinstance(metric, Metric) and metric.name == name]
        return value if name in HIGHER_IS_BETTER or any(metric.higher_is_better for metric in own) else -value

    def _ranked(self) -> list[dict[str, Any]]:
        rated = [row for row in self.rows if row["score"] is not None and row["status"] in ("finished", "pruned")]
        return sorted(rated, key=lambda row: (row["status"] == "pruned", -row["score"]))

    def _command(self, row: Mapping[str, Any]) -> str:
        words = redact_words([*self.words, *(f"--{key}={value}" for key, value in row["settings"].items())])
        return shlex.join(["trainer", "fit", *words])

    def _write(self) -> None:
        finished = [row for row in self._ranked() if row["status"] == "finished"]
        found: dict[str, Any] = {}
        if "folds" in self.settings:
            values = [row["value"] for row in finished]
            found = {"mean": mean(values), "deviation": stdev(values)} if len(values) > 1 else {}
        elif finished:
            found = {"best": finished[0]["number"], "best_command": self._command(finished[0])}
        content = {**self.settings, "figure": self.column, **found, "trials": self.rows}
        write_atomic(self.out / "sweep.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def _end(self) -> None:
        ranked = self._ranked()
        if not ranked:
            ended = _told(self.rows[0])
            raise RunError(f"none of the {len(self.rows)} trials finished; {ended} (see {self.out}/*.log)")
        keys = list(ranked[0]["settings"])
        names = ["trial", *keys, str(self.column), "step", "status"]
        others = [row for row in self.rows if row not in ranked]
        table = []
        for row in [*ranked, *others]:
            value = "–" if row["value"] is None else f"{row['value']:.4f}"
            cells = [str(row["number"]), *(_short(row["settings"][key]) for key in keys), value]
            table.append([*cells, str(row["step"] or "–"), row["status"]])
        for line in align_columns(names, table, ("status",)).splitlines():
            print(escaped(line))
        if "folds" in self.settings:
            values = [row["value"] for row in ranked]
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
            lacking = f"; left out: {len(others)} without a finite value" if others else ""
            found = f"{self.column} over {len(values)} folds: {mean(values):.4f}{spread}"
            print(f"{found} (mean and standard deviation{lacking})")
        else:
            print(escaped(f"best: trial {ranked[0]['number']}, {self.column} {ranked[0]['value']:.4f}"))
            print(escaped(f"  {self._command(ranked[0])}"))
        print(escaped(f"files: {self.out}: sweep.json, and a folder and a log per trial"))


def evaluations(run_dir: Path, recipe: Recipe) -> list[tuple[str, float, int]]:
    """Return the column, value and step of each evaluation so far, for the metric of ``run.best``, if it is finite."""
    with suppress(OSError), open(run_dir / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
        split = "test" if (recipe.run.best or "").startswith("test_") else "val"
        name = recipe.run.best_metric()
        if name is None:
            name = "accuracy" if any(row.get(f"{split}_accuracy") for row in rows) else "loss"
        column = f"{split}_{name}"
        found = [(column, float(row[column]), int(row["step"])) for row in rows if row.get(column)]
        return [one for one in found if math.isfinite(one[1])]
    return []


def _matches_type(value: Any, kind: Any) -> bool:
    """Return whether a value of ``sweep.json`` has the type ``kind``, and is finite if it is a number."""
    return isinstance(value, kind) and not (isinstance(value, int | float) and not abs(value) <= sys.float_info.max)


def _told(row: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key}={_short(value)}" for key, value in row["settings"].items())
    result = "" if row["value"] is None else f" · {row['figure']} {row['value']:.4f} after step {row['step']:,}"
    why = f" ({row['reason']})" if row["reason"] else ""
    return f"{row['status']}{why}{result} · {settings}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
