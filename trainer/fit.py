"""From a recipe to a finished run: the one place where the parts meet."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from trainer.checkpoint.export import load_model, save_model
from trainer.checkpoint.store import staged_folder, write_atomic
from trainer.data.loader import Loader
from trainer.engine.events import Counters, Events
from trainer.engine.forward import Forward
from trainer.engine.loop import Engine, count_steps, epoch_at
from trainer.engine.loop import evaluate as run_evaluation
from trainer.engine.schedule import lr_factor
from trainer.engine.step import Stepper
from trainer.engine.window import Cut, MicroBatch, Request, Windows, cut_batch, padding_share
from trainer.listeners import LoggingListener, ProgressListener, Stopwatch
from trainer.memory.initialize import build_on_device
from trainer.memory.monitor import measure
from trainer.memory.optimizer import build_optimizer
from trainer.memory.plan import Plan, cut_at, decide_plan
from trainer.recipe import Data, Model, Recipe, require
from trainer.report.loggers import close_loggers, make_loggers
from trainer.report.metrics import ClassificationMetrics, EvaluationResult, classification_report
from trainer.report.plots import plot_curves
from trainer.report.progress import Progress
from trainer.report.summary import Summary, summary_text, versions
from trainer.settings import dump_recipe
from trainer.world import adopt_fabric_run, detect_world, launch, on_first_rank_first

FILLED_FROM_DATA = ("num_classes", "image_size", "channels", "class_names")
EVALUATION_FACTOR = 2
"""Evaluation keeps no activations, so its micro-batches can be larger than training's and still peak below them."""


@dataclass
class Session:
    """A launched, checked and loaded recipe: what training and evaluation share."""

    recipe: Recipe
    plan: Plan
    fabric: Fabric

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.fabric.global_rank == 0


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
    """
    session = _open(recipe)
    fabric, plan = session.fabric, session.plan
    run_dir = _run_dir(session, source)
    recipe = session.recipe
    progress = Progress(recipe.run.progress, fabric.global_rank)
    module, stepper = _build(session)
    windows = _windows(session)
    if session.is_first:
        another = recipe.replace(run=dataclasses.replace(recipe.run, dir=None))  # repeated, it is another run
        write_atomic(run_dir / "recipe.yaml", dump_recipe(another, source))
        progress.message(f"plan: {plan.describe()} on {_device_name(fabric.device)}")
        progress.message(_describe_run(session, module, windows))

    stopwatch = Stopwatch()
    split = "val" if recipe.data.val is not None else "test"
    loggers = _loggers(session, run_dir)
    logging = LoggingListener(loggers, stopwatch, split)
    listeners = [stopwatch, ProgressListener(progress, stopwatch, fabric.device, split), logging]
    evaluation = _evaluation(session, stepper, split)
    engine = Engine(stepper, windows, evaluation, Events(listeners))
    _schedule(session, stepper, windows)
    result: EvaluationResult | None = None
    status = "failed"
    try:
        engine.fit(recipe.epochs, recipe.max_steps, recipe.eval_every, recipe.run.max_skipped_steps)
        final = _evaluation(session, stepper, "test") or evaluation
        result = final() if final else None
        if result is not None:
            logging.log({f"test_{name}": value for name, value in result.figures().items()}, engine.counters.step)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        progress.close()
        summary = _summary(session, status, engine.counters, stopwatch, result)
        if session.is_first:
            _write_results(session, run_dir, module, summary, result, loggers)
    if session.is_first:
        _print_results(run_dir, summary, result, recipe)
    fabric.barrier()
    return summary


def evaluate(recipe: Recipe, run_dir: str | Path) -> EvaluationResult:
    """Evaluate the model of ``run_dir`` on the test set of ``recipe`` (or validation set), and print the report."""
    folder = Path(run_dir) / "model"
    session = _open(recipe, saved_in=folder)
    forward = _restore(session, folder)
    evaluation = _evaluation(session, forward, "test") or _evaluation(session, forward, "val")
    require(evaluation is not None, "the dataset has neither a test nor a validation set to evaluate on")
    assert evaluation is not None
    result: EvaluationResult = evaluation()
    if session.is_first:
        print(_report(result, session.recipe.data))
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
    if texts:
        batch = dict(data.encode(texts, tokenizer))
    else:
        batch = {"pixel_values": torch.stack([data.load_image(image) for image in images or []])}
    batch["labels"] = torch.zeros(
        len(texts or images or []), dtype=torch.long
    )  # no loss is read, but losses() wants some
    with torch.no_grad():
        logits = next(model.losses(module, batch)).logits
    require(logits is not None, f"{type(model).__name__}.losses gives no logits to predict with")
    probabilities, classes = logits.softmax(-1).max(-1)
    names = model.class_names or [str(number) for number in range(logits.shape[-1])]
    found = [(names[number], float(p)) for number, p in zip(classes.tolist(), probabilities, strict=True)]
    for sample, (name, probability) in zip(texts or images or [], found, strict=True):
        print(f"{name}\t{probability:.4f}\t{sample}")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The parts, in the order in which they are needed


def _open(recipe: Recipe, saved_in: Path | None = None) -> Session:
    """Launch the processes, prepare model and data, and fill in what only the data knows."""
    recipe = adopt_fabric_run(recipe)
    world = detect_world(recipe)
    decide_plan(recipe, world.size)  # refuse what cannot work before other processes are started
    fabric = launch(recipe, world)
    if saved_in is not None and recipe.model.own_format:
        recipe = recipe.replace(model=recipe.model.saved_in(saved_in))

    def prepare() -> None:
        if saved_in is None:
            recipe.model.prepare()
        recipe.data.prepare(recipe.model.tokenizer_or_none())

    on_first_rank_first(fabric, prepare)
    require(len(recipe.data.train) > 0, "the training set is empty")
    recipe = recipe.replace(model=fill_from_data(recipe.model, recipe.data))
    return Session(recipe, decide_plan(recipe, world.size), fabric)


def fill_from_data(model: Model, data: Data) -> Model:
    """The model with the fields that were left at ``None`` taken from the dataset.

    Raises:
        RecipeError: when both know and do not agree.
    """
    changes = {}
    for name in FILLED_FROM_DATA:
        own, known = getattr(model, name, None), getattr(data, name, None)
        if known is None or not hasattr(model, name):
            continue
        if own is None:
            changes[name] = known
        elif name != "class_names":
            require(
                own == known, f"model.{name}={own} does not fit the data, which has {known}: leave model.{name} at null"
            )
    return dataclasses.replace(model, **changes) if changes else model  # type: ignore[type-var]


def _build(session: Session) -> tuple[nn.Module, Stepper]:
    """The model on its device, its optimizer, and what takes steps with both."""
    recipe, fabric = session.recipe, session.fabric
    module = build_on_device(fabric, recipe.model, recipe.seed)
    optimizer = build_optimizer(module, recipe.optim, recipe.memory.precision, fabric.device)
    stepper = Stepper(
        fabric,
        recipe.model,
        fabric.setup_module(module),
        optimizer,
        clip_norm=recipe.optim.clip_norm,
        correct_batchnorm=recipe.memory.correct_batchnorm,
    )
    return module, stepper


def _restore(session: Session, folder: Path) -> Forward:
    """The model with the weights in ``folder``, for evaluation."""
    with session.fabric.init_module(empty_init=False):
        module = load_model(session.recipe.model, folder)
    return Forward(session.fabric, session.recipe.model, session.fabric.setup_module(module))


def _loader(session: Session, split: Any) -> Loader:
    data, fabric = session.recipe.data, session.fabric
    return Loader(split, data.collate, workers=data.workers, pin_memory=fabric.device.type == "cuda")


def _windows(session: Session) -> Windows:
    recipe, fabric = session.recipe, session.fabric
    train = recipe.data.train
    return Windows(
        size=len(train),
        cut_at=partial(cut_at, recipe, fabric.world_size),
        fetch=_loader(session, train),
        weigh=recipe.model.weigh,
        seed=recipe.seed,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        reduce=_host_sum(fabric),
        lengths=getattr(train, "lengths", None),
    )


def _host_sum(fabric: Fabric) -> Callable[[list[float]], list[float]]:
    """Sums floats over the ranks on the host: through gloo, so that no rank waits for its GPU."""
    if fabric.world_size == 1:
        return list
    on_gpu = fabric.device.type == "cuda"
    group: Any = torch.distributed.new_group(backend="gloo") if on_gpu else None

    def total(values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(tensor, group=group)
        return tensor.tolist()

    return total


def _schedule(session: Session, stepper: Stepper, windows: Windows) -> None:
    """Give the stepper its learning-rate schedule, over all steps of the run."""
    recipe = session.recipe
    total = count_steps(windows, recipe.epochs, recipe.max_steps)
    epoch_of = epoch_at(windows, recipe.epochs)
    factor = lr_factor(recipe.optim, total, lambda step: windows.cut_at(epoch_of(step)).batch_size)
    stepper.scheduler = LambdaLR(stepper.optimizer, factor)


def _evaluation(session: Session, forward: Forward, split: str) -> Callable[[], EvaluationResult] | None:
    """A function that evaluates on ``split``, every sample once over all ranks; ``None`` if there is no such split."""
    data, fabric, cut = session.recipe.data, session.fabric, session.plan.first_cut
    dataset = getattr(data, split)
    if dataset is None:
        return None
    larger = Cut(
        batch_size=len(dataset),
        micro_batch_size=cut.micro_batch_size * EVALUATION_FACTOR,
        accumulate=1,
        micro_batch_tokens=cut.micro_batch_tokens and cut.micro_batch_tokens * EVALUATION_FACTOR,
    )
    pieces = cut_batch(range(len(dataset)), larger, fabric.world_size, getattr(dataset, "lengths", None))
    own = pieces[fabric.global_rank :: fabric.world_size]
    loader = _loader(session, dataset)
    num_classes = getattr(session.recipe.model, "num_classes", None)
    metrics = ClassificationMetrics(num_classes, fabric.device, session.recipe.model.loss_names)

    def micro_batches() -> Iterator[MicroBatch]:
        # An empty piece borrows a sample, as in training: every rank makes the same number of forwards.
        batches = loader(Request(piece or pieces[0][-1:], []) for piece in own)
        for piece, batch in zip(own, batches, strict=True):
            yield MicroBatch(batch, seed=0, is_last=False, is_empty=not piece)

    def run() -> EvaluationResult:
        return run_evaluation(forward, micro_batches(), metrics)

    return run


# ----------------------------------------------------------------------------------------------------------------------
# The run directory


def _run_dir(session: Session, source: str | None) -> Path:
    """The directory of this run, the same on every rank; one that holds a finished run is refused."""
    wanted = session.recipe.run.dir
    name = Path(source).stem if source else "recipe"
    chosen = wanted or f"runs/{name}/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir = Path(session.fabric.broadcast(chosen)).absolute()
    require(
        not (run_dir / "recipe.yaml").exists(),
        f"run.dir={run_dir} already holds a run: choose another directory, or remove it",
    )
    session.recipe = session.recipe.replace(run=dataclasses.replace(session.recipe.run, dir=str(run_dir)))
    session.fabric.barrier()
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def _loggers(session: Session, run_dir: Path) -> list[Any]:
    if not session.is_first:
        return []
    names = session.recipe.model.loss_names
    extra = [f"loss_{name}" for name in names] if len(names) > 1 else []
    config = {field.name: getattr(session.recipe, field.name) for field in dataclasses.fields(session.recipe)}
    return make_loggers(session.recipe.run.logger, run_dir, config, extra)


def _summary(
    session: Session, status: str, counters: Counters, stopwatch: Stopwatch, result: EvaluationResult | None
) -> Summary:
    recipe, plan = session.recipe, session.plan
    memory = measure(session.fabric.device)
    return Summary(
        status=status,
        steps=counters.step,
        skipped_steps=counters.skipped_steps,
        world_size=plan.world_size,
        batch_size=plan.first_cut.batch_size,
        micro_batch_size=plan.first_cut.micro_batch_size,
        accumulate=recipe.accumulate if isinstance(recipe.accumulate, dict) else plan.first_cut.accumulate,
        metrics={"test": {"accuracy": result.accuracy, "loss": result.loss}} if result else {},
        memory=dataclasses.asdict(memory),
        samples_per_second=stopwatch.samples_per_second,
        seconds=stopwatch.seconds,
        versions=versions(),
    )


def _write_results(
    session: Session,
    run_dir: Path,
    module: nn.Module,
    summary: Summary,
    result: EvaluationResult | None,
    loggers: list[Any],
) -> None:
    """Write what there is to write; of a run that failed, its figures and no model."""
    close_loggers(loggers, summary.status)
    write_atomic(run_dir / "summary.json", summary.to_json())
    if summary.status == "finished":
        with staged_folder(run_dir / "model") as folder:
            save_model(session.recipe.model, module, folder)
    if result is not None:
        write_atomic(run_dir / "classification_report.txt", _report(result, session.recipe.data) + "\n")
    if (run_dir / "metrics.csv").exists():
        plot_curves(run_dir / "metrics.csv", run_dir / "curves.png")


def _print_results(run_dir: Path, summary: Summary, result: EvaluationResult | None, recipe: Recipe) -> None:
    if result is not None:
        print(_report(result, recipe.data))
    print(summary_text(summary, run_dir))


def _report(result: EvaluationResult, data: Any) -> str:
    if result.confusion is None:
        return "\n".join(f"{name} {value:.6f}" for name, value in result.losses.items())
    return classification_report(result.confusion, getattr(data, "class_names", None))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _describe_run(session: Session, module: nn.Module, windows: Windows) -> str:
    """Parameters, steps and, for texts, what cutting by length saves."""
    parameters = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    steps = count_steps(windows, session.recipe.epochs, session.recipe.max_steps)
    frozen = f" ({trained:,} trained)" if trained < parameters else ""
    name = type(session.recipe.model).__name__
    text = f"{name}: {parameters:,} parameters{frozen}; {windows.size:,} samples, {steps:,} steps"
    if windows.lengths is None:
        return text
    before, after = padding_shares(windows)
    return f"{text}; padding {100 * after:.1f} % of the tokens, cut by length ({100 * before:.1f} % in the order drawn)"


def padding_shares(windows: Windows) -> tuple[float, float]:
    """The share of padding in the first epoch: with batches cut in the order drawn, and cut by length."""
    assert windows.lengths is not None
    unsorted = dataclasses.replace(windows, lengths=None)
    shares = []
    for cut in (unsorted, windows):
        pieces = [piece for step in range(windows.steps(0)) for piece in cut.pieces(0, step)]
        shares.append(padding_share(pieces, windows.lengths))
    return shares[0], shares[1]
