"""The Python entry points: ``fit``, ``evaluate`` and ``FinishedRun``."""

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

    from trainer.after.predict import Predictor, verified_model_folder
    from trainer.checkpoint.export import load_model, restore_open_fields
    from trainer.engine.deterministic import deterministic_algorithms
    from trainer.engine.forward import Forward
    from trainer.errors import RecipeError
    from trainer.memory.initialize import build_on_host
    from trainer.memory.monitor import record_memory_history
    from trainer.memory.precision import matmul_precision
    from trainer.memory.stack import apply_stack
    from trainer.recipe import Recipe
    from trainer.report.metrics import EvaluationResult
    from trainer.report.progress import warn
    from trainer.report.summary import Summary, read_summary
    from trainer.run.collectives import run_on_rank_zero
    from trainer.run.directory import explain_disk_errors, report_text, status_file, write_evaluation
    from trainer.run.evaluation import make_evaluation
    from trainer.run.notebook import fit_in_subprocess, needs_subprocess
    from trainer.run.resume import ResumeState
    from trainer.run.setup import evaluation_session, training_session
    from trainer.run.training import Training
    from trainer.system.lock import RunLock
    from trainer.system.status_line import show_status, silenced, start_clock
    from trainer.system.text import escaped


class FinishedRun:
    """A finished run; the fields of its summary, such as ``run.steps``, are attributes too.

    Args:
        recipe: the recipe of the run.
        run_dir: the run directory; the attribute ``dir``.
        summary: the content of ``summary.json``; by default read from the run directory.
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
        """The content of ``summary.json``."""
        if self._summary is None:
            self._summary = read_summary(self.dir / "summary.json")
        return self._summary

    @property
    def metrics(self) -> dict[str, dict[str, float | None]]:
        """The final metrics by split: ``{"test": {"accuracy": 0 to 1, "loss": ...}}``."""
        return {split: dict(metrics) for split, metrics in self.summary.metrics.items()}

    @cached_property
    def model(self) -> nn.Module:
        """The trained module in eval mode on the CPU; loaded and verified on first use."""
        folder = verified_model_folder(self.dir)
        return load_model(restore_open_fields(self.recipe.model, folder), folder).eval()

    @cached_property
    def _predictor(self) -> Predictor:
        return Predictor(self.recipe, self.dir)

    def predict(
        self,
        texts: Sequence[str] | str = (),
        images: Sequence[str] | str = (),
        paths: Sequence[str] | str = (),
        **how: Any,
    ) -> list[Any]:
        """Call :func:`trainer.predict` on this run; return the answers without printing them. The weights stay loaded
        for the next call."""
        return self._predictor.predict(texts, images, paths, **{"quiet": True, **how})

    def evaluate(self, path: str | Path | None = None) -> EvaluationResult:
        """Call :func:`trainer.evaluate` on this run."""
        return evaluate(self.recipe, self.dir, path)


def fit(recipe: Recipe, source: str | None = None) -> FinishedRun:
    """Train ``recipe``, evaluate on the test set, and write the run directory.

    Args:
        recipe: the recipe to train.
        source: the packaged name or the path of the recipe file, if there is one. It is saved in ``recipe.yaml``, so
            that the run can be repeated and evaluated.

    In a notebook, which has no script to start other ranks from, all ranks run in separate processes. They read the
    recipe from a file.

    Returns:
        The finished run, with its model, its metrics and a method to predict.

    Raises:
        RecipeError: if the recipe, the data or the weights make the run impossible.
        NonFiniteError: if the loss or the gradient stayed non-finite for ``run.max_skipped_steps`` steps.
        OutOfMemoryError: if the device or the host has too little memory.
        RunStoppedError: if the run was asked to stop. Everything is saved, so the run can be resumed.
    """
    _require_recipe(recipe)
    start_clock(keep=source is not None)
    silent = source is None and not recipe.run.progress  # a command prints its result in any case
    if needs_subprocess(recipe):
        return FinishedRun(recipe, fit_in_subprocess(recipe))
    with silenced(silent), training_session(recipe, source) as session, session.watched(), ExitStack() as closing:
        closing.enter_context(deterministic_algorithms(recipe.run.deterministic))
        closing.enter_context(matmul_precision(session.plan.memory.matmul_precision))
        fabric, lock = session.fabric, RunLock(session.run_dir)
        closing.enter_context(explain_disk_errors(session.run_dir))
        if recipe.run.snapshot:
            where = session.run_dir, fabric.global_rank, session.plan.world_size
            closing.enter_context(record_memory_history(*where))
        closing.callback(lock.release)
        if notice := run_on_rank_zero(fabric, lock.acquire):
            session.progress.notice(notice)
        resumption = ResumeState(session)
        closing.enter_context(status_file(session))
        return FinishedRun(session.recipe, session.run_dir, Training(session, source, resumption).run())


def _require_recipe(given: object) -> None:
    if isinstance(given, str | Path):
        fix = f"recipe, _ = trainer.load_recipe({str(given)!r}) loads a packaged recipe or a recipe file"
        if Path(given).suffix in (".csv", ".tsv", ".jsonl", ".parquet") or Path(given).is_dir():
            fix = f"trainer fit {given} finds settings for it, and Recipe(data=TextFiles(...)) names them"
        raise RecipeError(f"fit takes a Recipe, not {str(given)!r}: {fix}")
    if not isinstance(given, Recipe):
        raise RecipeError(f"fit takes a Recipe, not {type(given).__name__}: give Recipe(model=..., data=..., ...)")


def evaluate(recipe: Recipe, run_dir: str | Path, path: str | Path | None = None) -> EvaluationResult:
    """Evaluate the model of ``run_dir``, and print the report.

    Args:
        recipe: the recipe of the run.
        run_dir: the run directory.
        path: a file with texts and labels, or for a language model with texts; by default the test set of ``recipe``,
            or else its validation set. The training file is not read if there is a test file.
    """
    folder = verified_model_folder(run_dir)
    if needs_subprocess(recipe):  # the result is the same on any number of ranks
        recipe = recipe.replace(run=replace(recipe.run, devices=1), memory=replace(recipe.memory, replicas=1))
    other = None if path is None else str(path)
    with evaluation_session(recipe, folder, other) as session, matmul_precision(recipe.memory.matmul_precision):
        show_status("loading the model")
        model, plan = session.recipe.model, session.plan.for_evaluation()
        module = build_on_host(session.fabric, plan, partial(load_model, model, folder))
        forward = Forward(session.fabric, model, apply_stack(session.fabric, model, module, plan).wrapped)
        run = make_evaluation(session, forward, "test") or make_evaluation(session, forward, "val")
        if run is None:
            raise RecipeError("the dataset has no test or validation set: create one, for example by data.val_fraction")
        show_status("evaluating")
        result = run()
        if session.is_first:
            out = Path(run_dir) / "evaluation"  # separate from the results of the run itself
            try:
                write_evaluation(out, result, session.recipe.data)
            except OSError as error:
                warn(f"{error.filename or out}: {error.strerror}: the metrics were not saved, and are printed only")
            print(report_text(result, session.recipe.data))
            print(escaped(" · ".join(f"{name} {value:.4f}" for name, value in result.metrics().items())))
        return result
