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
from trainer.engine.feed import fill_from_data
from trainer.errors import RecipeError, RunError
from trainer.faults.regroup import keep_ranks_alive, recovers
from trainer.faults.signals import SECONDS_TO_LEAVE, ended_after, watch_start
from trainer.launching.company import have_met, keep_company
from trainer.launching.meeting import meet
from trainer.launching.start import announced, host_threads, launch, on_first_rank_first
from trainer.launching.world import World, find_world
from trainer.memory.knobs import turned_off
from trainer.memory.monitor import require_recordable
from trainer.memory.plan import Plan, decide_plan
from trainer.recipe import Recipe
from trainer.report.loggers import require_loggers
from trainer.report.progress import Progress, warn
from trainer.run.directory import require_unused, with_run_dir
from trainer.run.forecast import Forecast, decided, forecast, forget_plan, planned
from trainer.run.session import Session, from_all, on_first
from trainer.system.environment import first_here
from trainer.system.reports import placed
from trainer.system.text import parse_budget
from trainer.system.waiting import doing

SECONDS_TO_START = 60.0  # min wait for ranks on machines that start later


@contextmanager
def training_session(recipe: Recipe, source: str | None = None) -> Iterator[Session]:
    """Decide open settings, launch the processes, prepare model and data, and create the run directory.

    ``source`` is the packaged name or the path of the recipe file, if there is one.
    """
    require_loggers(recipe.run.logger)
    recipe.data.require_files()
    doing("looking for devices")
    recipe, world = decided(*find_world(recipe))
    require_recordable(recipe, world.accelerator)
    unprepared = recipe.data.train
    recipe, known = planned(recipe, world, partial(print, flush=True))
    plan = decide_plan(recipe, world.size)  # reject invalid settings before other processes start
    outlook = forecast(recipe, plan, world, known)
    if recovers(recipe, plan):
        keep_ranks_alive()
    with _launched(recipe, plan, world, outlook) as (fabric, world):
        found = sorted({*from_all(fabric, recipe.memory.precision)})
        if len(found) > 1:
            raise RecipeError(f"memory.precision=auto is {' and '.join(found)} on different machines: set one of them")
        if recipe.run.dir is not None:  # checked again on creation; preparing data may take long
            on_first(fabric, partial(require_unused, _absolute(recipe.run.dir), recipe.run.resume))
        still = recipe.data.train is unprepared  # otherwise planned() has prepared it
        on_first_rank_first(fabric, partial(_prepare, recipe, model=True, data=still))
        have_met()
        forget_plan(world)
        yield Session(with_run_dir(_filled(recipe), fabric, source), plan, fabric, world, outlook)


def _absolute(folder: str) -> Path:
    try:
        return Path(folder).absolute()
    except FileNotFoundError as error:
        fix = "start from a folder that exists, or give an absolute --run.dir"
        raise RunError(f"the working directory was removed: {fix}") from error


@contextmanager
def evaluation_session(recipe: Recipe, folder: Path) -> Iterator[Session]:
    """Open a session for the trained model in ``folder``, without planning and without a run directory."""
    require_loggers(recipe.run.logger)
    recipe.data.require_files()
    recipe, world = decided(*find_world(recipe))
    if isinstance(recipe.model, Exportable) and recipe.model.own_format:
        recipe = recipe.replace(model=recipe.model.saved_in(folder))
    if world.size % (copies := recipe.memory.tensor_parallel):  # any number of ranks can evaluate
        recipe = recipe.replace(memory=replace(recipe.memory, **turned_off("tensor_parallel")))
        if first_here():
            warn(f"memory.tensor_parallel={copies} does not divide {world.size} rank(s): evaluated with 1")
    plan = decide_plan(recipe, world.size)
    with _launched(recipe, plan, world) as (fabric, world):
        on_first_rank_first(fabric, partial(_prepare, recipe, model=False, data=True))
        have_met()
        yield Session(_filled(recipe), plan, fabric, world)


@contextmanager
def _launched(
    recipe: Recipe, plan: Plan, world: World, outlook: Forecast | None = None
) -> Iterator[tuple[Fabric, World]]:
    """Launch the ranks and join their process group; leave it at the end unless it existed before."""
    joined = torch.distributed.is_initialized()
    try:
        patience = max(SECONDS_TO_START, recipe.run.hang_after)
        doing("gathering the ranks" if world.size > 1 else "starting")
        keep_company()
        meeting = meet(patience)
        fabric = launch(plan, world, watch_start, patience)
        del meeting
        say = Progress(recipe.run.progress, fabric.global_rank).message
        world = announced(world, plan, say)
        if (threads := host_threads(world, plan)) is not None:
            torch.set_num_threads(threads)
            say(f"memory.cpu_offload: {threads} thread(s) per rank update the weights; torchrun set OMP_NUM_THREADS=1")
        if recipe.memory.budget is not None and fabric.device.type == "cuda":  # a faulty run must not take all memory
            total = torch.cuda.get_device_properties(fabric.device).total_memory
            share = min(1.0, parse_budget(recipe.memory.budget, total) / total)
            torch.cuda.set_per_process_memory_fraction(share, fabric.device)
        yield fabric, world
    finally:
        if outlook is not None:
            outlook.close()
        if not joined and torch.distributed.is_initialized():
            with ended_after(SECONDS_TO_LEAVE):
                torch.distributed.destroy_process_group()  # otherwise gloo aborts one process in five at exit


def _prepare(recipe: Recipe, model: bool, data: bool) -> None:
    doing("preparing model and data")
    with placed("preparing model and data"):
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
