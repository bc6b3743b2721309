"""Before a run starts: the planner's decisions, and a prediction of its memory to compare with the measurement."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.engine.data_feed import fill_from_data
from trainer.engine.events import Counters, Listener
from trainer.errors import RecipeError, RunError, require
from trainer.fakegpu.gpus import CPU_BUFFERS, GPU, host_as_device
from trainer.fakegpu.peaks import Retries
from trainer.fakegpu.prediction import Prediction
from trainer.fakegpu.target import Target, budget_bytes, gpu_here
from trainer.launching.world import World
from trainer.memory.plan import Plan, with_precision
from trainer.planner.knobs import apply_settings, wants_plan
from trainer.planner.predict import predict_in_process, prepare_recipe
from trainer.planner.report import Candidate
from trainer.planner.search import BUDGET_MARGIN, Search
from trainer.recipe import Recipe
from trainer.system.child_jobs import ChildJob
from trainer.system.environment import is_local_rank_zero
from trainer.system.files import parse_json_object, read_json_object, write_atomic
from trainer.system.processes import ProcessId
from trainer.system.text import GB, format_bytes

PATIENCE = 20.0  # max seconds that a run waits for its prediction: before training on a GPU, else after the last step
MAX_SECONDS = 1800.0  # max wait of the other ranks for the plan, whose search may tokenise a large dataset
MAX_BYTES = 1 << 20  # max size of a plan file

IN_A_GROUP = (
    "this process has already joined a process group, and a forked process would keep its connections open after a "
    "rank fails: let the trainer create the group, or use trainer plan"
)

PLAN_VARIABLE = "TRAINER_PLANNED"  # environment variable with the plan, for the processes that Fabric starts


def this_device(accelerator: str) -> GPU:
    """Return the device on which the ranks of this machine compute."""
    if accelerator == "cpu":
        return host_as_device()
    if (found := gpu_here()) is None:
        raise RunError("torch sees a GPU but cannot identify it: check the driver with nvidia-smi")
    return found


def decided(recipe: Recipe, world: World) -> tuple[Recipe, World]:
    """Resolve ``memory.precision=auto`` for the first GPU of this machine, or for its CPU."""
    is_open = recipe.memory.precision == "auto"  # otherwise the device is not needed
    return (with_precision(recipe, this_device(world.accelerator).capability) if is_open else recipe), world


def resolve_plan(recipe: Recipe, world: World, say: Callable[[str], None]) -> tuple[Recipe, Prediction | None]:
    """Let the planner decide the open knobs of the recipe, the same on all ranks of a machine. Return the recipe, and
    its prediction if this process made it. RecipeError if no plan fits the budget."""
    if not wants_plan(recipe):
        return recipe, None
    found: list[Candidate] = []

    def decide() -> dict[str, Any]:
        found.append(_search(recipe, world, say))
        return dict(found[0].flags)

    return apply_settings(recipe, _shared_decision(recipe, world, decide)), found[0].prediction if found else None


def _search(recipe: Recipe, world: World, say: Callable[[str], None]) -> Candidate:
    def progress(done: int, total: int, text: str) -> None:
        say(f"planning: {done} of {total} predicted, last {text}")

    target = Target.here(this_device(world.accelerator))
    report = Search(prepare_recipe(recipe), target, world.world_size, world.nodes, progress=progress).run()
    if report.chosen is None:
        raise RecipeError("; ".join([f"memory.budget={recipe.memory.budget}", *report.explanations]))
    for line in (f"planner: {report.chosen.plan}: {report.chosen.reason}", *report.explanations):
        say(line)
    if world.nodes > 1:
        say(f"planner: assumes {target.joined_by} between the nodes; trainer plan --interconnect compares others")
    return report.chosen


def _shared_decision(recipe: Recipe, world: World, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the decision of the first process of this machine on all of its processes."""
    if world.world_size == 1:
        return decide()
    if world.started_by_fabric:  # Fabric starts the others from this process, with its environment
        asked = hashlib.sha256(repr(recipe).encode()).hexdigest()
        known = parse_json_object(os.fsencode(os.environ.get(PLAN_VARIABLE, "")), MAX_BYTES)
        if known is None or known.get("of") != asked:  # may be from an earlier run of this process
            known = {"of": asked, "settings": decide()}
            os.environ[PLAN_VARIABLE] = json.dumps(known)
        return known["settings"]
    return _through_file(_shared_plan_file(), decide)


def _shared_plan_file() -> Path:
    """Return a file that the processes of one launch share, in a folder that only this user can access. No store is
    used: it is opened after the plan, which decides if there is one, and the planner forks before that."""
    folder = Path(tempfile.gettempdir()) / f"trainer-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunError(
            f"{folder} must be a folder that belongs to you with mode 0700, so that the ranks of this machine can "
            "share a plan: remove it, or set TMPDIR to a private folder"
        )
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    launcher = ProcessId.of(os.getppid())  # includes its start time, because process numbers are reused
    launch = "|".join([str(launcher), str(os.getuid()), *(os.environ.get(name, "") for name in names)])
    return folder / f"plan-{hashlib.sha256(launch.encode()).hexdigest()[:20]}.json"


def _through_file(place: Path, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if not is_local_rank_zero():
        answer = _awaited(place)
        require("error" not in answer, str(answer.get("error")))
        return answer["settings"]
    write_atomic(place, json.dumps({"decides": ProcessId.current().to_dict()}))
    try:
        settings = decide()
    except BaseException as error:
        write_atomic(place, json.dumps({"error": str(error) or type(error).__name__}))  # the others wait for it
        raise
    write_atomic(place, json.dumps({"settings": settings}))
    return settings


def remove_plan_file(world: World) -> None:
    """Remove the file of the plan; called after all ranks of this machine have read it."""
    if world.world_size > 1 and not world.started_by_fabric and is_local_rank_zero():
        _shared_plan_file().unlink(missing_ok=True)


def _awaited(place: Path) -> dict[str, Any]:
    until = time.monotonic() + MAX_SECONDS
    while time.monotonic() < until:
        answer = read_json_object(place, MAX_BYTES)
        if answer and "decides" not in answer:
            return answer
        first = ProcessId.from_dict(answer["decides"]) if answer else None
        if first and first.is_visible() and first.state() == "gone":
            raise RunError("the first rank of this machine was killed while planning, before training: start it again")
        time.sleep(0.1)
    raise RunError(f"the first rank of this machine made no plan within {MAX_SECONDS:g} s: read its output")


@dataclass
class RunPrediction:
    """The prediction of a run, made in a process that runs in parallel to its start."""

    child: ChildJob | None  # the predicting process, if any
    device: GPU
    limit: int  # max bytes of the run: the budget, or the memory of the device
    first: bool = True  # whether training waits for it
    prediction: Prediction | None = None
    failure: str | None = None
    _is_shown: bool = False

    def wait(self, seconds: float = PATIENCE) -> bool:
        """Wait up to ``seconds`` for the prediction; return whether it is available."""
        is_pending = self.prediction is None and self.failure is None
        if self.child is not None and is_pending and self.child.wait(seconds):
            result = self.child.result()
            if isinstance(result, Exception):
                self.failure = str(result)
            else:
                self.prediction = Prediction.from_child(result)
        return self.prediction is not None

    def lines(self, seconds: float) -> list[str]:
        """Return the lines that a user should read, once, if they are available within ``seconds``."""
        found = self.prediction if self.wait(seconds) else None
        if self._is_shown or (found is None and self.failure is None):
            return []
        self._is_shown = True
        if found is None:
            return [f"predicted peak: unknown: {self.failure}"]
        on_cpu, kernels = self.device.name == "cpu", f", plus about {format_bytes(CPU_BUFFERS)} for CPU kernels"
        kind = f" of host memory for training{kernels}" if on_cpu else " reserved"
        verdict = "DOES NOT FIT" if found.retries is None else str(Retries(found.retries))
        near = " (barely)" if verdict == "fits" and found.reserved * (1 + BUDGET_MARGIN) > self.limit else ""
        peak, limit = format_bytes(found.allocated if on_cpu else found.reserved), format_bytes(self.limit)
        lines = [f"predicted peak: {peak}{kind}; {limit} available: {verdict}{near}"]
        if found.retries is None:
            lines.append("warning: the run will probably run out of memory; --memory.budget 90% finds a plan that fits")
        return lines + [f"note: {note}" for note in found.notes]

    def peak_seconds(self) -> float | None:
        """Return the predicted seconds at peak speed, if available and if the peak comes from a data sheet."""
        is_known = not self.device.estimated and self.wait(0.0)
        return self.prediction.peak_seconds if is_known and self.prediction is not None else None

    def compare(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of ``summary.json`` on the prediction, given its ``measured`` memory."""
        if not self.wait(0.0) or self.prediction is None:
            return {}
        reserved, peak = self.prediction.reserved / GB, measured.get("reserved_gb")
        if self.device.name == "cpu":
            highest, idle = measured.get("host_peak_gb"), measured.get("host_idle_gb")
            peak = None if highest is None or idle is None else highest - idle
        return {
            "predicted_reserved_gb": reserved,
            "predicted_allocated_gb": self.prediction.allocated / GB,
            "predicted_host_gb": self.prediction.host / GB,
            "prediction_error": reserved / peak - 1 if peak else None,
        }

    def close(self) -> None:
        """End a prediction that is no longer needed."""
        if self.child is not None:
            self.child.kill()


def start_prediction(recipe: Recipe, plan: Plan, world: World, known: Prediction | None = None) -> RunPrediction | None:
    """Start to predict the memory of the run in its first process if ``run.predict`` is set, unless it is ``known``."""
    is_first = is_local_rank_zero() and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    if not recipe.run.predict or not is_first:
        return None
    device = this_device(world.accelerator)
    limit = budget_bytes(recipe.memory.budget, device, world.world_size)
    first = device.name != "cpu" or recipe.memory.budget is not None  # otherwise memory is rarely short
    if known or torch.distributed.is_initialized():
        return RunPrediction(None, device, limit, first, known, None if known else IN_A_GROUP)

    def predict() -> dict[str, Any]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not exist in a fork
        is_prepared = recipe.data.train is not None
        found = recipe.replace(model=fill_from_data(recipe.model, recipe.data)) if is_prepared else None
        options: dict[str, Any] = {"capacity": limit, "priced": device.name != "cpu"}
        return predict_in_process(found or prepare_recipe(recipe), plan, Target.here(device), world.nodes, **options)

    return RunPrediction(ChildJob(predict), device, limit, first)


class PredictionListener(Listener):
    """Shows a prediction that training did not wait for."""

    def __init__(self, prediction: RunPrediction, show: Callable[[str], None]) -> None:
        self.prediction, self.show = prediction, show

    def on_step(self, counters: Counters, result: Any) -> None:
        self._show(0.0)

    def on_fit_end(self, counters: Counters) -> None:
        self._show(PATIENCE)
        if not self.prediction.wait(0.0) and self.prediction.failure is None:
            self.show("predicted peak: unknown: the prediction takes longer than the run")

    def _show(self, seconds: float) -> None:
        for line in self.prediction.lines(seconds):
            self.show(line)
