"""A run from its model to its results: the parts put together, trained, and written down however it ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from trainer.checkpoint.writer import HISTORY
from trainer.contract import Streamable, capability, splits_of
from trainer.engine.loop import Engine, NonFiniteError, count_steps, epoch_at
from trainer.engine.schedule import LearningRate, Plateau, PlateauListener, lr_factor
from trainer.engine.step import Stepper
from trainer.engine.sync import GradientSync
from trainer.engine.window import share_of
from trainer.errors import EvaluationStopped, Stopped, require
from trainer.memory.initialize import build_module
from trainer.memory.parameter_groups import choose_trained, describe_groups
from trainer.memory.stack import Stack, apply_stack, build_updates, refused_alike, whole_state
from trainer.report.loggers import close_loggers
from trainer.report.metrics import EvaluationResult
from trainer.report.progress import Progress
from trainer.report.summary import Summary, summary_text, versions
from trainer.run.best import Best
from trainer.run.checkpoints import Checkpointer
from trainer.run.directory import describe_run, open_loggers, report_text, write_recipe, write_results, written_to
from trainer.run.listeners import LoggingListener, ProgressListener, Stopwatch, own_listeners
from trainer.run.profile import Profile, require_profilable
from trainer.run.recovery import Recovery
from trainer.run.resume import Resumption
from trainer.run.session import Session, evaluation, training_windows
from trainer.run.state import RandomState, State, Tensors, seed_random_state
from trainer.system.reports import cause
from trainer.system.waiting import doing

SPLITS = ("train", "val", "test")


class Training:
    """The parts of one run; ``source`` is the packaged name or the path of the recipe file, if there is one."""

    def __init__(self, session: Session, source: str | None, progress: Progress, resumption: Resumption) -> None:
        self.session, self.progress, recipe = session, progress, session.recipe
        why = "optim.schedule=plateau needs a validation set: give the data one (data.val_fraction, say)"
        require(recipe.data.val is not None or recipe.optim.schedule != "plateau", why)
        self.split = "val" if recipe.data.val is not None else "test"
        self.best, self.resumption, own = Best(recipe, self.split), resumption, own_listeners(recipe.listeners)
        self.windows = training_windows(session)
        require_profilable(recipe.run.profile, count_steps(self.windows, recipe.epochs, recipe.max_steps))
        self.stopwatch = Stopwatch(session.forecast.peak_seconds if session.forecast else lambda: None)
        self.profile = Profile(session, recipe.run.profile, self.stopwatch) if recipe.run.profile else None
        heard = self.profile or session.monitor
        self.windows.on_load = self.stopwatch.timed(heard.load)
        fabric = session.fabric
        seed_random_state(recipe.seed, share_of(recipe.memory, fabric.global_rank, fabric.world_size)[0])
        self.stack, optimizer, sync = build(session)
        # It alone holds the optimizer, so that a recovery can free it.
        self.stepper = Stepper(
            session.fabric,
            recipe.model,
            self.stack.wrapped,
            optimizer,
            sync=sync,
            clip_norm=recipe.optim.clip_norm,
            correct_batchnorm=recipe.memory.correct_batchnorm,
            phases=heard,
            copies=recipe.memory.tensor_parallel,
            average=self.average if recipe.optim.ema is not None else None,
        )
        del optimizer, sync
        session.monitor.enter(None)
        # Within a module that is compiled as a whole a hook would be compiled, too.
        self.attention = note_attention(self.stepper.module) if recipe.memory.compile != "model" else []
        self.schedule()
        tensors = Tensors(self.stack, self.stepper, capability(recipe.model, Streamable).in_base(self.stack.module))
        resumption.restore_tensors(tensors)
        self.loggers = open_loggers(session, resumption.step, resumption.origin.run)
        if session.is_first:
            write_recipe(session, source)
            lines = [*describe_run(session, self.stack, self.windows), *describe_groups(self.stepper.optimizer)]
            for line in lines:
                (progress.notice if line.startswith("warning: ") else progress.message)(line)
        self.logging = LoggingListener(self.loggers, self.stopwatch, self.split)
        shown = ProgressListener(progress, self.stopwatch, session.monitor, self.split)
        self.recovery = Recovery(session, tensors, self.windows, self.build_again, progress.notice)
        state = State(tensors, self.stopwatch, RandomState(session.fabric.device), self.best)
        self.checkpointer = Checkpointer(session, resumption, state, self._history)
        heard_first = (self.stopwatch, PlateauListener(self.stepper))
        self.engine = Engine(
            self.stepper,
            self.windows,
            self.evaluation(self.split) if recipe.run.evaluate else None,
            [*heard_first, self.best, shown, self.logging, *own, state.generators, *filter(None, [self.profile])],
            self.recovery,
            self.checkpointer,
            self.best.is_over,
            overlaps=not own,  # a listener of the recipe may look at weights, which FSDP gathers during a forward
        )
        resumption.restore(self.engine, state)
        self.checkpointer.begin_at(self.engine.counters.step)

    def build_again(self) -> None:
        """A new model and all that updates it, for those who hold the stack and the stepper."""
        stack, optimizer, sync = build(self.session)
        self.stack.become(stack)
        self.stepper.attach(stack.wrapped, optimizer, sync)
        self.schedule()

    def average(self, updates: int) -> None:
        """Update the averages of the weights, whichever they are by then."""
        assert self.stack.averages is not None
        self.stack.averages.update(updates)

    def evaluation(self, split: str) -> Callable[[], EvaluationResult] | None:
        """A function that evaluates on ``split``, if there is one: the averages of the weights with ``optim.ema``."""
        run = evaluation(self.session, self.stepper, split)

        def averaged() -> EvaluationResult:
            assert run is not None
            with self.stack.averages.applied() if self.stack.averages is not None else nullcontext():
                return run()

        return averaged if run is not None else None

    def schedule(self) -> None:
        """Give the stepper its learning-rate schedule, over all steps of the run."""
        recipe, windows, stepper = self.session.recipe, self.windows, self.stepper
        total = count_steps(windows, recipe.epochs, recipe.max_steps)
        epoch_of = epoch_at(windows, recipe.epochs)
        plateau = Plateau(recipe.optim) if recipe.optim.schedule == "plateau" else None
        factor = lr_factor(
            recipe.optim,
            total,
            batch_size_at=lambda step: windows.cut_at(epoch_of(step)).batch_size,
            skipped_steps=lambda: stepper.skipped_steps,
            plateau=plateau,
        )
        stepper.scheduler = LearningRate(stepper.optimizer, factor, plateau)

    kept: dict[str, Any] | None = None
    """What ``summary.json`` says of the step whose weights are in ``model/``; ``None`` for the last."""

    def run(self) -> Summary:
        """Train and evaluate, and write the results however that ends."""
        session, engine, recipe = self.session, self.engine, self.session.recipe
        result: EvaluationResult | None = None
        state: dict[str, Tensor] = {}
        status = "failed"
        all_ranks = False  # whether it is certain that every rank ends in this way
        try:
            # What is raised is told to the other ranks before results are written.
            with session.guarded(), written_to(session.run_dir):
                try:
                    doing("taking the first step")
                    if recipe.memory.micro_batch_size == "auto" and not self.stepper.sync.applied:
                        engine.rehearse(recipe.epochs)
                    engine.fit(recipe.epochs, recipe.max_steps, recipe.eval_every, recipe.run.max_skipped_steps)
                    self.checkpointer.at_end(engine)
                    self.kept = self._take_best()
                    result = self._test()
                except EvaluationStopped:
                    self.checkpointer.stop(engine)
                state = whole_state(self.stack)
            status, all_ranks = "finished", True
        except NonFiniteError:
            all_ranks = True
            raise
        except Stopped:
            status, all_ranks = "stopped", True
            raise
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            if self.profile is not None:
                self.profile.close()
            self.checkpointer.close()
            self.recovery.close()
            self.progress.close()
            summary = self._summary(status, result, all_ranks)
            if session.is_first:
                close_loggers(self.loggers, status)
                write_results(session, self.stack.module, state, summary, result)
        if session.is_first:
            if result is not None:
                print(report_text(result, session.recipe.data))
            writes = recipe.model.task == "language"
            print(summary_text(summary, session.run_dir, writes))
            if self.profile is not None and self.profile.summary:
                print(self.profile.summary)
        session.fabric.barrier()
        return summary

    def _summary(self, status: str, result: EvaluationResult | None, all_ranks: bool) -> Summary:
        """What ``summary.json`` will hold; a collective if ``all_ranks`` of the run are known to come here."""
        session, counters, stopwatch = self.session, self.engine.counters, self.stopwatch
        recipe, world, cut = session.recipe, session.world, session.plan.first_cut
        memory = session.monitor.report(all_ranks)
        if session.forecast is not None:
            memory |= session.forecast.beside(memory)
        final_split = "val" if recipe.data.test is None else "test"
        figures = result.figures() if result else {}
        figures |= {"loss": figures.pop("loss")} if figures else {}  # what is told first is what people ask for
        return Summary(
            status=status,
            steps=counters.step,
            skipped_steps=counters.skipped_steps,
            recoveries=self.recovery.recoveries,
            world_size=session.plan.world_size,
            launcher=world.launcher,
            nodes=world.nodes,
            backend=world.backend,
            batch_size=min(cut.batch_size, self.windows.size),
            micro_batch_size=cut.micro_batch_size,
            accumulate=recipe.accumulate if isinstance(recipe.accumulate, dict) else cut.accumulate,
            metrics={final_split: figures} if result else {},
            best=self.kept,
            memory=memory,
            **stopwatch.speed._asdict(),
            seconds=stopwatch.seconds,
            versions=versions(),
            data=self._data(status == "finished"),
            attention=self.attention,
        )

    def _data(self, finished: bool) -> dict[str, Any]:
        """What ``summary.json`` says of the data; its fingerprint takes seconds, on the first rank."""
        data, origin = self.session.recipe.data, self.resumption.origin
        sizes = dict.fromkeys(SPLITS) | {name: len(split) for name, split in splits_of(data).items()}
        known = vars(origin).get("dataset")
        if finished and self.session.is_first:
            try:
                known = origin.dataset
            except Exception as error:  # anybody's data; the run has come to its end without it
                self.progress.warning(f"the data has no fingerprint ({cause(error)})")
        return {"class": type(data).__name__, **sizes, "fingerprint": known}

    def _take_best(self) -> dict[str, Any] | None:
        """Put the weights of the best step in place of the last ones; what ``summary.json`` says of it."""
        best, counters = self.best, self.engine.counters
        if best.is_over():
            why = f"{best.since} evaluations in a row found no better {best.column} than {best.figure:.4f} of step"
            self.progress.notice(f"training ends after step {counters.step:,}, by run.patience: {why} {best.step:,}")
        if not best.step:
            return None
        step = best.step
        if step != counters.step:
            tensors = self.checkpointer.state.tensors
            if problem := self.resumption.restore_best(step, tensors):
                self.progress.warning(f"{problem}: model/ has the weights of the last step instead of the best")
                return None
            self.engine.last_result = best.result
        return {"step": step, "figure": best.column, "best": best.figure, "last": best.last}

    def _test(self) -> EvaluationResult | None:
        """The final figures of the model that is kept: on the test set, or on what is evaluated while it trains."""
        session, engine, step = self.session, self.engine, self.kept["step"] if self.kept else self.engine.counters.step
        if not session.recipe.run.evaluate:
            return None
        on_test = self.evaluation("test")
        if on_test is not None and (self.split == "val" or engine.last_result is None):
            result = on_test()
            if self.split == "val":
                figures = {f"test_{name}": value for name, value in result.figures().items()}
                self.logging.log(figures, step)
            return result
        if engine.last_result is None and engine.evaluation is not None:  # evaluated before the run was resumed
            return engine.evaluation()
        return engine.last_result

    def _history(self) -> bytes:
        for logger in self.loggers:
            logger.save()
        path = self.session.run_dir / HISTORY
        return path.read_bytes() if path.exists() else b""


def build(session: Session) -> tuple[Stack, Optimizer, GradientSync]:
    """The model with every memory technique of the plan, and what updates it."""
    recipe, fabric, plan = session.recipe, session.fabric, session.plan
    doing("building the model")
    module = build_module(fabric, recipe.model, recipe.seed, plan)
    with refused_alike(fabric):
        choose_trained(module, recipe.model, recipe.optim)
    stack = apply_stack(fabric, recipe.model, module, plan, recipe.seed)
    return stack, *build_updates(fabric, recipe.model, stack, recipe.optim, plan)


KERNELS = re.compile(r"ScaledDotProduct(\w+?)Attention(?:ForCpu)?Backward|SafeSoftmaxBackward|(Liger\w+)Function")
"""Autograd's names of the backward of each kernel of attention, of the softmax of math, and of Liger's kernels."""


def note_attention(module: nn.Module) -> list[str]:
    """A list that the first forward with gradients fills: torch's kernels of attention, and Liger's, by what the
    backward calls; the compiler hides them."""
    found: list[str] = []

    def look(_: nn.Module, __: Any, output: Any) -> None:
        starts = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        if not starts:
            return
        handle.remove()
        left, seen = starts, set(starts)
        while left:
            node = left.pop()
            if kind := KERNELS.match(node.name()):
                found.append(kind[2] or (kind[1] or "math").lower())
            new = {after for after, _ in node.next_functions if after is not None} - seen
            seen |= new
            left += new
        found[:] = sorted(set(found))

    handle = module.register_forward_hook(look)
    return found
