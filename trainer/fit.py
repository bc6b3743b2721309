"""From a recipe to a finished run: the one place where the parts meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainer.checkpoint.export import load_model
from trainer.contract import Model
from trainer.engine.algorithms import deterministic_algorithms
from trainer.engine.events import Events
from trainer.engine.forward import Forward
from trainer.engine.loop import Engine, NonFiniteError, count_steps, epoch_at
from trainer.engine.schedule import lr_factor
from trainer.engine.step import Stepper
from trainer.engine.sync import GradientSync
from trainer.engine.window import Windows
from trainer.errors import require
from trainer.listeners import LoggingListener, ProgressListener, Stopwatch
from trainer.memory.initialize import build_module, home_of_weights
from trainer.memory.monitor import MonitoredStepper
from trainer.memory.oom import OutOfMemory, describe_oom, is_out_of_memory, sample_lengths, shapes_of
from trainer.memory.snapshot import recorded, snapshot_path
from trainer.memory.stack import Stack, apply_stack, build_updates, whole_state
from trainer.recipe import Recipe
from trainer.recovery import Recovery
from trainer.report.metrics import EvaluationResult
from trainer.report.progress import Progress
from trainer.report.summary import Summary
from trainer.rundir import (
    choose_run_dir,
    describe_run,
    open_loggers,
    print_results,
    report_text,
    summarise,
    write_recipe,
    write_results,
)
from trainer.session import Session, evaluation, open_session, training_windows

PREDICTION_BATCH = 32
"""Samples that are classified at once: few enough for any machine that can hold the model."""


def fit(recipe: Recipe, source: str | None = None) -> Summary:
    """Train as ``recipe`` says, evaluate on the test set, and write the run directory.

    Args:
        recipe: what to do.
        source: the packaged name or the path of the recipe file, kept in ``recipe.yaml`` so that the run can be
            repeated and evaluated; ``None`` for a recipe that has no file.

    Returns:
        What ``summary.json`` holds.

    Raises:
        RecipeError: for whatever in the recipe, the data or the weights makes the run impossible.
        NonFiniteError: when loss or gradient stayed non-finite for ``run.max_skipped_steps`` steps.
        OutOfMemory: when the device, or the host, has too little memory for it.
    """
    with (
        open_session(recipe) as session,
        deterministic_algorithms(recipe.run.deterministic),
        _out_of_memory_explained(session),
        ExitStack() as closing,
    ):
        run_dir = choose_run_dir(session, source)
        if recipe.run.snapshot:
            closing.enter_context(recorded(snapshot_path(run_dir, session.fabric.global_rank, session.plan.world_size)))
        progress = Progress(recipe.run.progress, session.fabric.global_rank)
        stack, stepper = _stepper(session, *_build(session))
        session.monitor.enter(None)
        windows = training_windows(session)
        _schedule(session, stepper, windows)
        loggers = open_loggers(session, run_dir)
        if session.is_first:
            write_recipe(session, run_dir, source)
            for line in describe_run(session, stack.module, windows):
                progress.message(line)
        return _train(session, run_dir, stack, stepper, windows, progress, loggers)


@contextmanager
def _out_of_memory_explained(session: Session) -> Iterator[None]:
    """Make of an out of memory a line that says where it was and what to try."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        monitor = session.monitor
        message = describe_oom(
            error,
            monitor.phase,
            session.fabric.global_rank,
            session.plan,
            sample_lengths(monitor.batch),
            shapes=shapes_of(monitor.batch),
            recipe=session.recipe,
            on_gpu=monitor.on_gpu,
        )
        raise OutOfMemory(message) from error


def _train(
    session: Session,
    run_dir: Path,
    stack: Stack,
    stepper: Stepper,
    windows: Windows,
    progress: Progress,
    loggers: list[Any],
) -> Summary:
    """Train and evaluate, and write the results however that ends."""
    recipe, fabric = session.recipe, session.fabric
    split = "val" if recipe.data.val is not None else "test"
    evaluate_split, evaluate_test = evaluation(session, stepper, split), evaluation(session, stepper, "test")
    if not recipe.run.evaluate:
        evaluate_split = evaluate_test = None
    stopwatch = Stopwatch()
    logging = LoggingListener(loggers, stopwatch, split)
    events = Events([stopwatch, ProgressListener(progress, stopwatch, session.monitor, split), logging])
    again = partial(_schedule, session, stepper, windows)
    recovery = Recovery(session, stack, stepper, windows, _build, again, progress.message)
    engine = Engine(stepper, windows, evaluate_split, events, recovery)
    result: EvaluationResult | None = None
    state: dict[str, Tensor] = {}
    status = "failed"
    all_ranks = False  # whether it is certain that every rank ends in this way
    try:
        if recipe.memory.micro_batch_size == "auto" and not stepper.sync.applied:
            engine.rehearse(recipe.epochs)
        engine.fit(recipe.epochs, recipe.max_steps, recipe.eval_every, recipe.run.max_skipped_steps)
        result = engine.last_result
        if split == "val" and evaluate_test is not None:
            result = evaluate_test()
            logging.log({f"test_{name}": value for name, value in result.figures().items()}, engine.counters.step)
        state = whole_state(stack)
        status, all_ranks = "finished", True
    except NonFiniteError:
        all_ranks = True
        raise
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        recovery.close()
        progress.close()
        summary = summarise(session, status, engine.counters, stopwatch, result, all_ranks)
        if session.is_first:
            write_results(session, run_dir, stack.module, state, summary, result, loggers)
    if session.is_first:
        print_results(session, run_dir, summary, result)
    fabric.barrier()
    return summary


def evaluate(recipe: Recipe, run_dir: str | Path) -> EvaluationResult:
    """Evaluate the model of ``run_dir`` on the test set of ``recipe`` (or validation set), and print the report."""
    folder = Path(run_dir) / "model"
    with open_session(recipe, saved_in=folder) as session:
        forward = _restore(session, folder)
        run = evaluation(session, forward, "test") or evaluation(session, forward, "val")
        require(run is not None, "the dataset has neither a test nor a validation set to evaluate on")
        assert run is not None
        result = run()
        if session.is_first:
            print(report_text(result, session.recipe.data))
            print(" · ".join(f"{name} {value:.4f}" for name, value in result.figures().items()))
        return result


def predict(
    recipe: Recipe, run_dir: str | Path, texts: list[str] | None = None, images: list[str] | None = None
) -> list[tuple[str, float]]:
    """The most probable class of each text or image, and its probability, by the model of ``run_dir``; also printed."""
    folder = Path(run_dir) / "model"
    model: Any = recipe.model.saved_in(folder) if recipe.model.own_format else recipe.model
    data: Any = recipe.data
    tokenizer = model.tokenizer_or_none()
    require(not texts or tokenizer is not None, f"--text needs a text model; {type(model).__name__} reads images")
    require(
        not images or hasattr(data, "load_image"), f"--image needs an image model; {type(model).__name__} reads texts"
    )
    module = load_model(model, folder).eval()
    samples = texts or images or []
    names = model.class_names or []
    found = []
    for start in range(0, len(samples), PREDICTION_BATCH):
        chunk = samples[start : start + PREDICTION_BATCH]
        if texts:
            batch = dict(data.encode(chunk, tokenizer))
        else:
            batch = {"pixel_values": torch.stack([data.load_image(image) for image in chunk])}
        probabilities, classes = _probabilities(model, module, batch, len(chunk)).max(-1)
        for sample, probability, number in zip(chunk, probabilities.tolist(), classes.tolist(), strict=True):
            found.append((names[number] if names else str(number), probability))
            print(f"{found[-1][0]}\t{probability:.4f}\t{sample}")
    return found


@torch.no_grad()
def _probabilities(model: Model, module: nn.Module, batch: dict[str, Any], count: int) -> torch.Tensor:
    """Of every class, shape ``(count, classes)``."""
    batch["labels"] = torch.zeros(count, dtype=torch.long)  # no loss is read, but losses() wants some
    logits = next(model.losses(module, batch)).logits
    require(logits is not None, f"{type(model).__name__}.losses gives no logits to predict with")
    assert logits is not None
    return logits.softmax(-1)


def _build(session: Session) -> tuple[Stack, Optimizer, GradientSync]:
    """The model with every memory technique of the plan, and what updates it."""
    recipe, fabric, plan = session.recipe, session.fabric, session.plan
    module = build_module(fabric, recipe.model, recipe.seed, plan)
    stack = apply_stack(fabric, recipe.model, module, plan, recipe.seed)
    return stack, *build_updates(fabric, recipe.model, stack, recipe.optim, plan)


def _stepper(session: Session, stack: Stack, optimizer: Optimizer, sync: GradientSync) -> tuple[Stack, Stepper]:
    """What takes steps. It alone holds the optimizer, so that a recovery can free it."""
    recipe = session.recipe
    stepper = MonitoredStepper(
        session.monitor,
        session.fabric,
        recipe.model,
        stack.wrapped,
        optimizer,
        sync=sync,
        clip_norm=recipe.optim.clip_norm,
        correct_batchnorm=recipe.memory.correct_batchnorm,
    )
    return stack, stepper


def _restore(session: Session, folder: Path) -> Forward:
    """The model with the weights in ``folder``, for evaluation."""
    fabric, model, plan = session.fabric, session.recipe.model, session.plan.for_evaluation()
    with home_of_weights(fabric, plan):
        module = load_model(model, folder)
    return Forward(fabric, model, apply_stack(fabric, model, module, plan).wrapped)


def _schedule(session: Session, stepper: Stepper, windows: Windows) -> None:
    """Give the stepper its learning-rate schedule, over all steps of the run."""
    recipe = session.recipe
    total = count_steps(windows, recipe.epochs, recipe.max_steps)
    epoch_of = epoch_at(windows, recipe.epochs)
    factor = lr_factor(
        recipe.optim,
        total,
        batch_size_at=lambda step: windows.cut_at(epoch_of(step)).batch_size,
        skipped_steps=lambda: stepper.skipped_steps,
    )
    stepper.scheduler = LambdaLR(stepper.optimizer, factor)
