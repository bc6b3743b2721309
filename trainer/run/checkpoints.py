"""Decides when a checkpoint is saved, and collects its content."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from trainer.checkpoint.folder import disk_full_message, disk_space_shortfall
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.tensor_parts import HostStagingBuffers, assign_to_rank, view_on_host
from trainer.checkpoint.writer import BackgroundTask, CheckpointWriter, Snapshot
from trainer.engine.loop import Engine
from trainer.errors import RunError, RunStoppedError
from trainer.report.progress import warn
from trainer.report.summary import versions
from trainer.run.best_tracker import WORST
from trainer.run.resume import ResumeState
from trainer.run.session import Session
from trainer.run.state import RunState
from trainer.system.text import parse_duration

FINISH_TIMEOUT = 5.0  # how long a failed run waits for a checkpoint in progress: a dead rank never writes its part
POLL_INTERVAL = 1.0


class Checkpointer:
    """Saves checkpoints that are due, and ends training on request. The engine calls it at every step boundary. A
    checkpoint holds the engine's state, ``state`` and, from the first rank, ``metrics.csv``."""

    def __init__(self, session: Session, resumption: ResumeState, state: RunState) -> None:
        self.session, self.folder, self.origin = session, resumption.folder, resumption.origin
        self.state, self.best, self.wishes = state, state.best, session.recipe.checkpoint
        self.keep_best = max(self.wishes.keep_best, int(self.best.is_chosen))
        every, fabric = self.wishes.every, session.fabric
        self.every_steps = every if isinstance(every, int) else math.inf
        self.every_seconds = parse_duration(every) if isinstance(every, str) else math.inf
        if session.is_first:
            _ = self.origin.base  # hash the files now, as they were loaded: they may change during training
        self.mark_saved(0)
        self.background = BackgroundTask()
        self.on_host = HostStagingBuffers().copy if self.wishes.asynchronous else view_on_host
        self.has_moved = threading.Event()  # a part of the checkpoint was written
        who = fabric.global_rank, fabric.world_size, self.origin.attempt, session.recipe.run.hang_after
        kept = self.wishes.keep_last, self.keep_best, self.best.score_of
        self.writer = CheckpointWriter(self.folder, *who, *kept, self.has_moved.set, warn)
        session.agreement.votes = self._rank_flags

    def _rank_flags(self) -> tuple[float, float, float]:
        """Return whether this rank should stop, a checkpoint is due by the first rank's clock, and the last failed."""
        is_time = self.session.is_first and time.monotonic() - self.saved_when >= self.every_seconds
        has_failed = self.background.failure is not None
        return float(self.session.asked_to_stop() is not None), float(is_time), float(has_failed)

    def __call__(self, engine: Engine) -> None:
        """Save what is due, before a step. Raise RunStoppedError on all ranks, after saving, if one was asked to stop.
        Raise RunError on all ranks if a checkpoint could not be written."""
        stop, is_time, has_failed = self.session.agreement.agreed
        if has_failed:
            self._wait()
        if self._is_unsaved(engine) and (is_time or self._is_due(engine)):
            self.save(engine)
        if stop:
            self.stop(engine)

    def stop(self, engine: Engine) -> NoReturn:
        """End training between two steps on all ranks; save a checkpoint first if the last step has none."""
        engine.settle()
        if self._is_unsaved(engine):
            self.save(engine)
        self._wait()
        signal = self.session.asked_to_stop() or "a signal to another rank"
        fix = f"resume with --run.dir {self.folder.path.parent} --run.resume auto"
        raise RunStoppedError(f"stopped by {signal} after step {engine.counters.step}; everything is saved: {fix}")

    def mark_saved(self, step: int) -> None:
        """Record that the state after ``step`` is saved; at step 0 nothing is."""
        self.saved_at, self.saved_when, self.best_saved = step, time.monotonic(), self.best.step

    def at_end(self, engine: Engine) -> None:
        """Save the state after the last step if checkpoints were due during training."""
        if self._is_unsaved(engine) and (self.saved_at > 0 or self._is_due(engine)):
            self.save(engine)
        self._wait()

    def close(self) -> None:
        """Give a checkpoint that is being written a few seconds. Called when training ends, also after an error."""
        self.background.join(FINISH_TIMEOUT)

    def _wait(self) -> None:
        """Wait until the last checkpoint is on disk; raise on all ranks if it could not be written. A collective."""
        with self._announced():
            while not self.background.join(POLL_INTERVAL):
                if self.has_moved.is_set():  # a slow disk is not a hang as long as it accepts bytes
                    self.has_moved.clear()
                    self.session.monitor.set_activity("checkpoint")
            failures = self._total(self.background.failure is not None)
        self.background.wait()
        if failures:
            raise RunError("another rank could not write its part of a checkpoint; see that rank's error for the cause")

    @contextmanager
    def _announced(self) -> Iterator[None]:
        self.session.monitor.set_activity("checkpoint")
        yield
        self.session.monitor.set_activity(None)

    def _is_unsaved(self, engine: Engine) -> bool:
        """Also true if the best step was saved before it was evaluated: its checkpoint must contain the score."""
        return engine.steps > self.saved_at or self.best.step > self.best_saved

    def _is_due(self, engine: Engine) -> bool:
        """Return whether the number of steps, the best evaluation or ``checkpoint.keep_best`` requires a checkpoint."""
        if engine.steps // self.every_steps > self.saved_at // self.every_steps or self.best.step > self.best_saved:
            return True
        return self.wishes.keep_best > 0 and self._current_metrics(engine) is not None

    def _current_metrics(self, engine: Engine) -> dict[str, float] | None:
        """The model's finite metrics; ``None`` if it was not evaluated at this step, or its score is not finite."""
        if engine.last_result is None or engine.counters.evaluated_at != engine.steps:
            return None
        metrics = {name: value for name, value in engine.last_result.metrics().items() if math.isfinite(value)}
        return metrics if self.best.score_of(metrics) != WORST else None

    def save(self, engine: Engine) -> None:
        """Copy the state to host memory and write it, in the background if ``checkpoint.asynchronous`` is set. RunError
        on all ranks, if the disk has not enough space."""
        engine.settle()
        self._wait()  # one copy in host memory at a time
        with self._announced():
            snapshot = self._snapshot(engine)
            # The first rank checks the space for all: no rank may write while another gives up.
            needed = int(self._total(snapshot.nbytes))
            self.folder.make()
            missing = int(self._total(disk_space_shortfall(self.folder.path, needed) if self.session.is_first else 0))
            if missing:
                raise disk_full_message(self.folder.path, snapshot.step, needed, missing)
        self.mark_saved(engine.counters.step)
        self.background.run(partial(self.writer.write, snapshot))
        if not self.wishes.asynchronous:
            self._wait()

    def _total(self, value: float) -> float:
        return self.session.agreement.total([float(value)])[0]

    def _snapshot(self, engine: Engine) -> Snapshot:
        fabric, tensors = self.session.fabric, self.state.tensors
        return Snapshot(
            step=engine.counters.step,
            parts=self.on_host(assign_to_rank(tensors.parts(), fabric.global_rank, fabric.world_size)),
            rank_state={"random": self.state.generators.state_dict(), "values": tensors.scalars()},
            shared_state=self.state.common(engine),
            history=self.state.history() if self.session.is_first else b"",
            manifest=self._manifest(engine),
        )

    def _manifest(self, engine: Engine) -> Callable[[Mapping[str, Any]], Manifest]:
        """Return a function from the written files to the manifest. Everything else is read now, because reading
        samples during training would seed the random generators that dropout draws from."""
        session = self.session
        facts = {name: getattr(engine.counters, name) for name in ("step", "epoch", "step_in_epoch")}
        facts |= {"seed": session.recipe.seed, "world_size": session.fabric.world_size, "plan": session.plan.describe()}
        facts |= {"versions": versions(), "figures": self._current_metrics(engine)}
        facts["created"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if session.is_first:
            names = ("run", "recipe", "dataset", "tokenizer", "data_files", "base")
            facts |= {name: getattr(self.origin, name) for name in names}
        return lambda files: Manifest(files=files, **facts)
