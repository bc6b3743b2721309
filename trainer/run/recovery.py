"""Recovery from out of memory: retry the step in micro-batches of half the size."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable

import torch

from trainer.engine.sync import GradientSync
from trainer.engine.window import Windows
from trainer.errors import RunError
from trainer.faults.process_group_recovery import ProcessGroupRecovery, can_recover
from trainer.memory.compatibility import may_cut_batchnorm
from trainer.memory.oom import is_out_of_memory
from trainer.memory.stack import PreparedModel
from trainer.run.collectives import make_host_sum
from trainer.run.directory import write_status
from trainer.run.session import Session
from trainer.run.state import TensorState

GRAPH = ("forward", "backward")  # phases that a smaller micro-batch helps, before any weight is updated


class OOMRecovery:
    """Recovers from out of memory on any rank; the engine calls it with the error that ended a step.

    On one device without FSDP, the step is simply retried. Otherwise a rank may have failed inside a collective. All
    ranks then leave the process group, keep the changed ``tensors`` in host memory, and meet in a new group. They
    ``build`` and shard the model again, restore the tensors, and retry the step.
    """

    def __init__(self, session: Session, tensors: TensorState, windows: Windows, build: Callable[[], None]) -> None:
        self.session, self.tensors, self.windows, self.build = session, tensors, windows, build
        self.stepper, self.recoveries = tensors.stepper, 0
        recipe = session.recipe
        may_halve = not self.stepper.batchnorm.layers or may_cut_batchnorm(recipe.memory, recipe.model)
        self.wanted = can_recover(recipe, session.plan) and may_halve
        several = session.fabric.world_size > 1
        self.regrouping = ProcessGroupRecovery(session.fabric) if several and self.wanted else None

    def __call__(self, error: Exception) -> bool:
        """Recover from ``error`` if possible; return whether the step can be retried."""
        # With updates in backward, some weights are already updated.
        why = self._reason(error) if self.wanted and not self.stepper.sync.updates_in_backward else None
        if why is None:
            return False
        cause: BaseException | None = error
        while cause is not None:  # free what the frames of the failed step still hold, mainly activations
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        self.stepper.abandon()
        if self.session.plan.strategy != "single":
            self._rebuild()
        cut = self.windows.halve()
        self.session.set_cut(cut)
        self.recoveries += 1
        write_status(self.session, "running")
        now = f"micro-batches now have at most {cut.micro_batch_size} samples"
        self.session.progress.notice(f"{why}: retrying the step; {now}")
        return True

    def close(self) -> None:
        """End the listening for other ranks, after training."""
        if self.regrouping is not None:
            self.regrouping.close()

    def _reason(self, error: Exception) -> str | None:
        """Describe an out of memory, on this or another rank, that smaller micro-batches may avoid; else ``None``."""
        phase, regrouping = self.session.monitor.phase, self.regrouping
        if is_out_of_memory(error):
            if phase not in GRAPH or self.windows.cut(self.windows.current_epoch).micro_batch_size == 1:
                return None
            why = f"out of memory in {phase} on rank {self.session.fabric.global_rank}"
            if regrouping is not None:
                regrouping.request(why)
            return why
        # After this rank has aborted its part there is no process group any more, and torch raises a ValueError.
        is_broken = isinstance(error, RuntimeError) or not torch.distributed.is_initialized()
        is_broken = is_broken and not isinstance(error, RunError)
        return regrouping.requested_reason() if is_broken and regrouping is not None else None

    def _rebuild(self) -> None:
        """Reconnect the ranks, rebuild model and optimizer, then restore everything that training has changed."""
        stepper, session = self.stepper, self.session
        assert stepper.scheduler is not None
        kept, position = self.tensors.on_host(), stepper.scheduler.state_dict()
        self._free_model()
        session.agreement.total = list  # the old sum would keep the connections of its group
        if self.regrouping is not None:
            self.regrouping.rejoin()
        self.build()
        stepper.scheduler.load_state_dict(position)
        self.tensors.make_state(kept)
        self.tensors.load_state_dict(kept)
        stepper.module.train()
        session.agreement.total = make_host_sum(session.fabric)

    def _free_model(self) -> None:
        empty, parameter = torch.nn.Module(), torch.nn.Parameter(torch.zeros(()))
        self.tensors.stack.replace_with(PreparedModel(empty, empty))
        self.stepper.scheduler = None
        self.session.monitor.fresh = True
        self.stepper.attach(empty, torch.optim.SGD([parameter]), GradientSync([parameter]))
        gc.collect()
        if self.session.fabric.device.type == "cuda":
            torch.cuda.empty_cache()
