"""Open a session from a recipe: decide every value once, in the order of their dependencies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from lightning_fabric import Fabric

from trainer.contract import Exportable, Preparable, capability, prepare_data, splits_of
from trainer.engine.data_feed import fill_from_data
from trainer.errors import RecipeError, RunError
from trainer.faults.process_group_recovery import can_recover, disable_nccl_error_handling
from trainer.faults.signals import LEAVE_TIMEOUT, begin_startup_watch, exit_after
from trainer.launching.company import have_met, keep_company
from trainer.launching.rendezvous import rendezvous
from trainer.launching.start import describe_launch, host_threads, launch, local_rank_zero_first
from trainer.launching.world import World, resolve_world
from trainer.memory.knobs import turned_off
from trainer.memory.monitor import require_recordable
from trainer.memory.plan import Plan, decide_plan
from trainer.recipe import Recipe
from trainer.report.loggers import require_loggers
from trainer.report.progress import Progress, warn
from trainer.run.collectives import all_gather_json, run_on_rank_zero
from trainer.run.directory import create_run_dir, require_unused
from trainer.run.run_prediction import RunPrediction, decided, remove_plan_file, resolve_plan, start_prediction
from trainer.run.session import Session
from trainer.system.environment import is_local_rank_zero
from trainer.system.error_reports import error_location
from trainer.system.status_line import show_status
from trainer.system.text import parse_budget

LAUNCH_SKEW_TIMEOUT = 60.0  # min wait for ranks on machines that start later


@contextmanager
def training_session(recipe: Recipe, source: str | None = None) -> Iterator[Session]:
    """Decide open settings, launch the processes, prepare model and data, and create the run directory."""
    require_loggers(recipe.run.logger)
    recipe.data.use_model(recipe.model)
    recipe.data.require_files()
    show_status("looking for devices")
    recipe, world = decided(*resolve_world(recipe))
    require_recordable(recipe, world.accelerator)
    unprepared = recipe.data.train
    recipe, known = resolve_plan(recipe, world, partial(print, flush=True))
    plan = decide_plan(recipe, world.world_size)  # reject invalid settings before other processes start
    still = recipe.data.train is unprepared  # otherwise resolve_plan has prepared it
    prepare = partial(_prepare, recipe, model=True, data=still)
    if alone := world.world_size == 1:  # now, so that the prediction does not have to do it, too
        _require_unused(recipe)
        prepare()
    outlook = start_prediction(recipe, plan, world, known)
    if can_recover(recipe, plan):
        disable_nccl_error_handling()
    with _launched(recipe, plan, world, outlook) as (fabric, world):
        found = sorted({*all_gather_json(fabric, recipe.memory.precision)})
        if len(found) > 1:
            raise RecipeError(f"memory.precision=auto is {' and '.join(found)} on different machines: set one of them")
        if not alone:
            run_on_rank_zero(fabric, partial(_require_unused, recipe))
            local_rank_zero_first(fabric, prepare)
        have_met()
        remove_plan_file(world)
        yield Session(create_run_dir(_filled(recipe), fabric, source), plan, fabric, world, outlook)


def _require_unused(recipe: Recipe) -> None:
    if recipe.run.dir is None:
        return
    try:
        run_dir = Path(recipe.run.dir).absolute()
    except FileNotFoundError as error:
        fix = "start from a folder that exists, or give an absolute --run.dir"
        raise RunError(f"the working directory was removed: {fix}") from error
    require_unused(run_dir, recipe.run.resume)  # checked again on creation; preparing data may take long


@contextmanager
def evaluation_session(recipe: Recipe, folder: Path, path: str | None = None) -> Iterator[Session]:
    """Open a session for the trained model in ``folder``, without planning and without a run directory;
    ``path`` replaces the test set."""
    require_loggers(recipe.run.logger)
    recipe, world = decided(*resolve_world(recipe))
    if isinstance(recipe.model, Exportable) and recipe.model.own_format:
        recipe = recipe.replace(model=recipe.model.saved_in(folder))
    recipe = recipe.replace(data=recipe.data.for_evaluation(recipe.model, path))
    recipe.data.use_model(recipe.model)
    recipe.data.require_files()
    if world.world_size % (copies := recipe.memory.tensor_parallel):  # any number of ranks can evaluate
        recipe = recipe.replace(memory=replace(recipe.memory, **turned_off("tensor_parallel")))
        if is_local_rank_zero():
            warn(f"memory.tensor_parallel={copies} does not divide {world.world_size} rank(s): evaluated with 1")
    plan = decide_plan(recipe, world.world_size)
    with _launched(recipe, plan, world) as (fabric, world):
        local_rank_zero_first(fabric, partial(_prepare, recipe, model=False, data=True))
        have_met()
        yield Session(_filled(recipe), plan, fabric, world)


@contextmanager
def _launched(
    recipe: Recipe, plan: Plan, world: World, forecast: RunPrediction | None = None
) -> Iterator[tuple[Fabric, World]]:
    """Launch the ranks and join their process group; leave it at the end unless it existed before."""
    joined = torch.distributed.is_initialized()
    try:
        patience = max(LAUNCH_SKEW_TIMEOUT, recipe.run.hang_after)
        show_status("gathering the ranks" if world.world_size > 1 else "starting")
        keep_company()
        meeting = rendezvous(patience)
        fabric = launch(plan, world, begin_startup_watch, patience)
        del meeting
        say = Progress(recipe.run.progress, fabric.global_rank).message
        world = describe_launch(world, plan, say)
        if (threads := host_threads(world, plan)) is not None:
            torch.set_num_threads(threads)
            say(f"memory.cpu_offload: {threads} thread(s) per rank update the weights; torchrun set OMP_NUM_THREADS=1")
        if recipe.memory.budget is not None and fabric.device.type == "cuda":  # a faulty run must not take all memory
            total = torch.cuda.get_device_properties(fabric.device).total_memory
            share = min(1.0, parse_budget(recipe.memory.budget, total) / total)
            torch.cuda.set_per_process_memory_fraction(share, fabric.device)
        yield fabric, world
    finally:
        if forecast is not None:
            forecast.close()
        if not joined and torch.distributed.is_initialized():
            with exit_after(LEAVE_TIMEOUT):
                torch.distributed.destroy_process_group()  # otherwise gloo aborts one process in five at exit


def _prepare(recipe: Recipe, model: bool, data: bool) -> None:
    show_status("preparing model and data")
    with error_location("preparing model and data"):
        prepared = capability(recipe.model, Preparable)
        if model:
            prepared.prepare()
        if data:
            prepare_data(recipe.data, recipe.model, prepared.tokenizer_or_none())
        name = type(recipe.data).__name__
        if recipe.data.train is None:
            raise RecipeError(f"{name}.prepare() has not set train: set it to the training samples")
        words = {"train": "training", "val": "validation", "test": "test"}
        for split, samples in splits_of(recipe.data).items():
            if len(samples) == 0:
                hint = "add samples" if split == "train" else f"leave {name}.{split} at None"
                raise RecipeError(f"the {words[split]} set is empty: {hint}")


def _filled(recipe: Recipe) -> Recipe:
    return recipe.replace(model=fill_from_data(recipe.model, recipe.data))
