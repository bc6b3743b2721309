"""One run: build its parts, train, evaluate, and write the results, also if training fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainer.checkpoint.writer import HISTORY
from trainer.contract import Streamable, capability, splits_of
from trainer.engine.cut import data_parallel_rank
from trainer.engine.events import Listener
from trainer.engine.loop import Engine, NonFiniteError, count_steps, epoch_at
from trainer.engine.schedule import CheckpointableLambdaLR, PlateauListener, ReduceOnPlateau, lr_factor
from trainer.engine.step import Stepper
from trainer.engine.sync import GradientSync
from trainer.engine.window import Windows
from trainer.errors import EvaluationInterruptedError, RecipeError, RunStoppedError
from trainer.memory.compatibility import require_whole_batchnorm
from trainer.memory.initialize import build_module
from trainer.memory.parameter_groups import describe_groups, set_requires_grad
from trainer.memory.stack import (
    PreparedModel,
    apply_stack,
    build_optimizer_and_sync,
    full_state_dict,
    raise_on_rank_zero_only,
)
from trainer.recipe import Recipe
from trainer.report.loggers import close_loggers
from trainer.report.metrics import EvaluationResult
from trainer.report.summary import Summary, summary_text, versions
from trainer.run.attention import record_attention_kernels
from trainer.run.best_tracker import BestTracker
from trainer.run.checkpoints import Checkpointer
from trainer.run.description import describe_run
from trainer.run.directory import explain_disk_errors, report_text, status_after, write_recipe, write_results
from trainer.run.evaluation import make_evaluation
from trainer.run.listeners import LoggingListener, ProgressListener, ThroughputMeter, wrap_custom_listeners
from trainer.run.profile import Profile, require_profilable
from trainer.run.recovery import OOMRecovery
from trainer.run.reference import compute_reference
from trainer.run.resume import ResumeState
from trainer.run.run_prediction import PredictionListener
from trainer.run.session import Session, training_windows
from trainer.run.state import RNGState, RunState, TensorState, seed_random_state
from trainer.system.error_reports import describe_error
from trainer.system.status_line import elapsed, say, show_status


@dataclass(frozen=True)
class Parts:
    """The parts of a run that :func:`build` makes from a session; a recovery changes the stack and stepper in place."""

    split: str  # evaluated while the run trains: val, or test without a validation set
    best: BestTracker
    own: list[Listener]  # custom listeners of the recipe
    windows: Windows
    stopwatch: ThroughputMeter
    profile: Profile | None
    stack: PreparedModel
    stepper: Stepper  # the only owner of the optimizer, so that a recovery can free it
    tensors: TensorState
    attention: list[str]  # see record_attention_kernels


def build(session: Session) -> Parts:
    """Check the remaining settings, then build the batches, the model and the stepper of a run."""
    recipe, fabric, monitor = session.recipe, session.fabric, session.monitor
    if recipe.optim.schedule == "plateau" and recipe.data.val is None:
        raise RecipeError("optim.schedule=plateau needs a validation set: create one, for example by data.val_fraction")
    split = "test" if recipe.data.val is None else "val"
    best, own = BestTracker(recipe, split), wrap_custom_listeners(recipe.listeners)
    windows = training_windows(session)
    require_profilable(recipe.run.profile, count_steps(windows, recipe.epochs, recipe.max_steps))
    stopwatch = ThroughputMeter(session.forecast.peak_seconds if session.forecast else lambda: None)
    profile = Profile(session, recipe.run.profile, stopwatch) if recipe.run.profile else None
    windows.on_load = stopwatch.wrap_on_load((profile or monitor).on_load)

    seed_random_state(recipe.seed, data_parallel_rank(recipe.memory, fabric.global_rank, fabric.world_size)[0])
    stack, optimizer, sync = build_model(session)
    stepper = Stepper(
        fabric,
        recipe.model,
        stack.wrapped,
        optimizer,
        sync=sync,
        clip_norm=recipe.optim.clip_norm,
        correct_batchnorm=recipe.memory.correct_batchnorm,
        phases=profile or monitor,
        copies=recipe.memory.tensor_parallel,
        average=stack.update_averages,
    )
    monitor.enter(None)
    # If the whole module is compiled, a hook in it would be compiled too.
    attention = record_attention_kernels(stepper.module) if recipe.memory.compile != "model" else []
    set_schedule(recipe, windows, stepper)
    tensors = TensorState(stack, stepper, capability(recipe.model, Streamable).in_base(stack.module))
    return Parts(split, best, own, windows, stopwatch, profile, stack, stepper, tensors, attention)


def build_model(session: Session) -> tuple[PreparedModel, Optimizer, GradientSync]:
    """Build the model with all memory techniques of the plan, its optimizer and its gradient synchronisation."""
    recipe, fabric, plan = session.recipe, session.fabric, session.plan
    show_status("building the model")
    module = build_module(fabric, recipe.model, recipe.seed, plan)
    with raise_on_rank_zero_only(fabric):
        set_requires_grad(module, recipe.model, recipe.optim)
        require_whole_batchnorm(module, plan, recipe)
    stack = apply_stack(fabric, recipe.model, module, plan, recipe.seed)
    return stack, *build_optimizer_and_sync(fabric, recipe.model, stack, recipe.optim, plan)


def set_schedule(recipe: Recipe, windows: Windows, stepper: Stepper) -> None:
    """Give the stepper its learning-rate schedule over all steps of the run."""
    plateau = ReduceOnPlateau(recipe.optim) if recipe.optim.schedule == "plateau" else None
    factor = lr_factor(
        recipe.optim,
        count_steps(windows, recipe.epochs, recipe.max_steps),
        batch_size_at=lambda step: windows.cut_at(epoch_at(windows, recipe.epochs, step)).batch_size,
        skipped_steps=lambda: stepper.skipped_steps,
        plateau=plateau,
    )
    stepper.scheduler = CheckpointableLambdaLR(stepper.optimizer, factor, plateau)


class Training:
    """Connects the parts of a run; ``source`` is the packaged name or the path of the recipe file, if there is one."""

    def __init__(self, session: Session, source: str | None, resumption: ResumeState) -> None:
        self.session, self.resumption, progress = session, resumption, session.progress
        self.parts = parts = build(session)
        compute_reference(session, parts.stepper)  # with the weights before training
        resumption.restore_tensors(parts.tensors)
        self.logging = LoggingListener(parts.stopwatch, parts.split)
        if session.is_first:
            self.logging.open(session.recipe, session.run_dir, resumption.step, resumption.origin.run)
            write_recipe(session, source)
            for line in [*describe_run(session, parts.stack, parts.windows), *describe_groups(parts.stepper.optimizer)]:
                (progress.notice if line.startswith("warning: ") else progress.message)(line)
        shown = ProgressListener(progress, parts.stopwatch, session.monitor, parts.split)
        self.recovery = OOMRecovery(session, parts.tensors, parts.windows, self.rebuild)
        state = RunState(parts.tensors, parts.stopwatch, RNGState(session.fabric.device), parts.best, self._history)
        self.checkpointer = Checkpointer(session, resumption, state)
        first = (parts.stopwatch, PlateauListener(parts.stepper), parts.best)
        late = PredictionListener(session.forecast, progress.message) if session.forecast else None
        self.engine = Engine(
            parts.stepper,
            parts.windows,
            self.evaluation(parts.split) if session.recipe.run.evaluate else None,
            [*first, shown, self.logging, *parts.own, state.generators, *filter(None, [parts.profile, late])],
            self.recovery,
            self.checkpointer,
            parts.best.is_over,
            overlaps=not parts.own,  # custom listeners may read weights, which FSDP gathers during a forward
        )
        resumption.restore(self.engine, state)
        self.checkpointer.mark_saved(self.engine.counters.step)
        # Entry of summary.json about the step whose weights are in model/; None for the last step.
        self.best_weights_info: dict[str, Any] | None = None

    def rebuild(self) -> None:
        """Build the model and its optimizer again, into the same stack and stepper."""
        parts = self.parts
        stack, optimizer, sync = build_model(self.session)
        parts.stack.replace_with(stack)
        parts.stepper.attach(stack.wrapped, optimizer, sync)
        set_schedule(self.session.recipe, parts.windows, parts.stepper)

    def evaluation(self, split: str) -> Callable[[], EvaluationResult] | None:
        """Return a function that evaluates on ``split``, with averaged weights if ``optim.ema`` is set; or ``None``."""
        run = make_evaluation(self.session, self.parts.stepper, split)
        return None if run is None else self.parts.stack.averaged()(run)  # enters the context in every call

    def run(self) -> Summary:
        """Train, evaluate, and write the results, also if training fails."""
        session, engine, recipe, parts = self.session, self.engine, self.session.recipe, self.parts
        result: EvaluationResult | None = None
        state: dict[str, Tensor] = {}
        status, all_ranks = "failed", False  # ``all_ranks``: whether every rank is known to end with this status
        try:
            # Report an exception to the other ranks before writing results.
            with session.watched(), explain_disk_errors(session.run_dir):
                try:
                    show_status("taking the first step")
                    if recipe.memory.micro_batch_size == "auto" and not parts.stepper.sync.updates_in_backward:
                        engine.rehearse(recipe.epochs)
                    engine.fit(recipe.epochs, recipe.max_steps, recipe.eval_every, recipe.run.max_skipped_steps)
                    self.checkpointer.at_end(engine)
                    self.best_weights_info = self._take_best()
                    result = self._test()
                except EvaluationInterruptedError:
                    self.checkpointer.stop(engine)
                state = full_state_dict(parts.stack)
            status, all_ranks = "finished", True
        except BaseException as error:
            status, all_ranks = status_after(error), isinstance(error, NonFiniteError | RunStoppedError)
            raise
        finally:
            if parts.profile is not None:
                parts.profile.close()
            self.checkpointer.close()
            self.recovery.close()
            session.progress.close()
            summary = self._summary(status, result, all_ranks)
            if session.is_first:
                close_loggers(self.logging.loggers, status)
                write_results(session, parts.stack.module, state, summary, result)
        if session.is_first:
            report = "" if result is None else report_text(result, recipe.data)
            text = summary_text(summary, session.run_dir, writes=recipe.model.task in ("language", "preference"))
            say("\n".join(filter(None, [report, text, parts.profile.summary if parts.profile else ""])))
        session.fabric.barrier()
        return summary

    def _summary(self, status: str, result: EvaluationResult | None, all_ranks: bool) -> Summary:
        """Return the content of ``summary.json``; a collective if ``all_ranks`` are known to call this."""
        session, counters, parts = self.session, self.engine.counters, self.parts
        recipe, world, cut = session.recipe, session.world, session.plan.initial_cut
        memory = session.monitor.report(all_ranks)
        memory |= session.forecast.compare(memory) if session.forecast is not None else {}
        final_split = "val" if recipe.data.test is None else "test"
        metrics = result.metrics() if result else {}
        metrics |= {"loss": metrics.pop("loss")} if metrics else {}  # loss last: users look for other metrics first
        return Summary(
            status=status,
            steps=counters.step,
            skipped_steps=counters.skipped_steps,
            recoveries=self.recovery.recoveries,
            world_size=session.plan.world_size,
            launcher=world.launcher,
            nodes=world.nodes,
            backend=world.backend,
            batch_size=min(cut.batch_size, parts.windows.size),
            micro_batch_size=cut.micro_batch_size,
            accumulate=recipe.accumulate if isinstance(recipe.accumulate, dict) else cut.accumulate,
            metrics={final_split: metrics} if result else {},
            best=self.best_weights_info,
            memory=memory,
            **parts.stopwatch.speed._asdict(),
            seconds=parts.stopwatch.seconds,
            total_seconds=elapsed(),
            versions=versions(),
            data=self._data(status == "finished"),
            attention=parts.attention,
        )

    def _data(self, finished: bool) -> dict[str, Any]:
        """Return the entry of ``summary.json`` about the data. The first rank may take seconds for its fingerprint."""
        data, origin = self.session.recipe.data, self.resumption.origin
        sizes = dict.fromkeys(("train", "val", "test")) | {name: len(split) for name, split in splits_of(data).items()}
        known = origin.known_dataset
        if finished and self.session.is_first:
            try:
                known = origin.dataset
            except Exception as error:  # a custom dataset may fail; the run is complete without it
                self.session.progress.warning(f"the data has no fingerprint ({describe_error(error)})")
        return {"class": type(data).__name__, **sizes, "fingerprint": known}

    def _take_best(self) -> dict[str, Any] | None:
        """Load the weights of the best step. Return the entry of ``summary.json`` about it."""
        best, counters, progress = self.parts.best, self.engine.counters, self.session.progress
        if best.is_over():
            why = f"no {best.metric_column} better than {best.best_value:.4f} in {best.since} evaluations"
            progress.notice(f"run.patience={best.patience}: training ends after step {counters.step:,}: {why}")
        if not best.step:
            return None
        if best.step != counters.step:
            if problem := self.resumption.restore_best(best.step, self.parts.tensors):
                progress.warning(f"{problem}: model/ has the weights of the last step instead of the best")
                return None
            self.engine.last_result = best.result
        return {"step": best.step, "figure": best.metric_column, "best": best.best_value, "last": best.last}

    def _test(self) -> EvaluationResult | None:
        """Evaluate the kept model on the test set, or else return the last evaluation of training."""
        session, engine, split = self.session, self.engine, self.parts.split
        if not session.recipe.run.evaluate:
            return None
        if split == "val" and (on_test := self.evaluation("test")) is not None:
            result = on_test()
            step = self.best_weights_info["step"] if self.best_weights_info else engine.counters.step
            self.logging.log({f"test_{name}": value for name, value in result.metrics().items()}, step)
            return result
        if engine.last_result is None and engine.evaluation is not None:  # evaluated before the run was resumed
            return engine.evaluation()
        return engine.last_result

    def _history(self) -> bytes:
        for logger in self.logging.loggers:
            logger.save()
        path = self.session.run_dir / HISTORY
        return path.read_bytes() if path.exists() else b""
