"""From a recipe to a finished run: the one place where the parts meet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from trainer.system.imports import quick_imports

with quick_imports():
    from torch import nn

    from trainer.after.predict import checked, predict
    from trainer.checkpoint.export import filled_as_saved, load_model
    from trainer.engine.deterministic import deterministic_algorithms
    from trainer.engine.forward import Forward
    from trainer.errors import require
    from trainer.memory.initialize import built_at_home
    from trainer.memory.monitor import recorded, snapshot_path
    from trainer.memory.precision import matmul_precision
    from trainer.memory.stack import apply_stack
    from trainer.recipe import Recipe
    from trainer.report.metrics import EvaluationResult
    from trainer.report.progress import Progress, warn
    from trainer.report.summary import Summary, read_summary
    from trainer.run.directory import report_text, status_kept, write_evaluation, written_to
    from trainer.run.notebook import fit_beside, needs_processes
    from trainer.run.opening import evaluation_session, training_session
    from trainer.run.resume import Resumption
    from trainer.run.session import Session, evaluation, on_first
    from trainer.run.training import Training
    from trainer.system.lock import RunLock
    from trainer.system.text import escaped
    from trainer.system.waiting import doing


class FinishedRun:
    """A run that has ended; what its summary has, such as ``run.steps``, is an attribute, too.

    Args:
        recipe: what was trained.
        run_dir: the run directory, as ``dir``.
        summary: what its ``summary.json`` holds; by default read from there.
    """

    def __init__(self, recipe: Recipe, run_dir: str | Path, summary: Summary | None = None) -> None:
        self.recipe, self.dir, self._summary = recipe, Path(run_dir), summary

    def __repr__(self) -> str:
        return f"FinishedRun({str(self.dir)!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.summary, name)

    @property
    def summary(self) -> Summary:
        """What ``summary.json`` holds."""
        if self._summary is None:
            self._summary = read_summary(self.dir / "summary.json")
        return self._summary

    @property
    def metrics(self) -> dict[str, dict[str, float | None]]:
        """The figures at the end by split: ``{"test": {"accuracy": 0 to 1, "loss": ...}}``."""
        return {split: dict(figures) for split, figures in self.summary.metrics.items()}

    @cached_property
    def model(self) -> nn.Module:
        """The trained module, on the CPU, for evaluation; read when it is first asked for, and checked."""
        folder = checked(self.dir)
        return load_model(filled_as_saved(self.recipe.model, folder), folder).eval()

    def predict(
        self, texts: Sequence[str] = (), images: Sequence[str] = (), paths: Sequence[str] = (), **how: Any
    ) -> list[Any]:
        """As :func:`trainer.predict`, but answers are returned only."""
        return predict(self.recipe, self.dir, texts, images, paths, **{"quiet": True, **how})

    def evaluate(self) -> EvaluationResult:
        """As :func:`trainer.evaluate`."""
        return evaluate(self.recipe, self.dir)


def fit(recipe: Recipe, source: str | None = None) -> FinishedRun:
    """Train as ``recipe`` says, evaluate on the test set, and write the run directory.

    Args:
        recipe: what to do.
        source: the packaged name or the path of the recipe file, if it has one: kept in ``recipe.yaml``, so that the
            run can be repeated and evaluated.

    Where there is no script from which other ranks can be started, as in a notebook, several of them are processes of
    their own, which are told the recipe by a file.

    Returns:
        The run: its model, its figures, and what predicts.

    Raises:
        RecipeError: for whatever in the recipe, the data or the weights makes the run impossible.
        NonFiniteError: when loss or gradient stayed non-finite for ``run.max_skipped_steps`` steps.
        OutOfMemory: when the device, or the host, has too little memory for it.
        Stopped: when it was asked to stop; everything is saved then.
    """
    if needs_processes(recipe):
        return FinishedRun(recipe, fit_beside(recipe))
    with training_session(recipe, source) as session, session.guarded(), ExitStack() as closing:
        closing.enter_context(deterministic_algorithms(recipe.run.deterministic))
        closing.enter_context(matmul_precision(session.plan.memory.matmul_precision))
        fabric, lock = session.fabric, RunLock(session.run_dir)
        closing.enter_context(written_to(session.run_dir))
        if recipe.run.snapshot:
            path = snapshot_path(session.run_dir, fabric.global_rank, session.plan.world_size)
            closing.enter_context(recorded(path))
        progress = Progress(recipe.run.progress, fabric.global_rank)
        closing.callback(lock.release)
        if notice := on_first(fabric, lock.acquire):
            progress.notice(notice)
        resumption = Resumption(session, progress)
        closing.enter_context(status_kept(session))
        summary = Training(session, source, progress, resumption).run()
        return FinishedRun(session.recipe, session.run_dir, summary)


def evaluate(recipe: Recipe, run_dir: str | Path) -> EvaluationResult:
    """Evaluate the model of ``run_dir`` on the test set of ``recipe`` (or validation set), and print the report."""
    folder = checked(run_dir)
    if needs_processes(recipe):  # the result is the same on any number of ranks
        alone = {"run": replace(recipe.run, devices=1), "memory": replace(recipe.memory, replicas=1)}
        recipe = recipe.replace(**alone)
    with evaluation_session(recipe, folder) as session, matmul_precision(recipe.memory.matmul_precision):
        doing("loading the model")
        forward = _restore(session, folder)
        run = evaluation(session, forward, "test") or evaluation(session, forward, "val")
        require(run is not None, "the dataset has neither a test nor a validation set to evaluate on")
        assert run is not None
        doing("evaluating")
        result = run()
        if session.is_first:
            out = Path(run_dir) / "evaluation"  # beside what the run itself has found
            try:
                write_evaluation(out, result, session.recipe.data)
            except OSError as error:
                warn(f"{error.filename or out}: {error.strerror}: the figures are below, and no file has them")
            print(report_text(result, session.recipe.data))
            print(escaped(" · ".join(f"{name} {value:.4f}" for name, value in result.figures().items())))
        return result


def _restore(session: Session, folder: Path) -> Forward:
    fabric, model, plan = session.fabric, session.recipe.model, session.plan.for_evaluation()
    module = built_at_home(fabric, plan, partial(load_model, model, folder))
    return Forward(fabric, model, apply_stack(fabric, model, module, plan).wrapped)
