"""After an out of memory: the same step again, in micro-batches of half the size."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable

import torch

from trainer.engine.sync import GradientSync
from trainer.engine.window import Windows
from trainer.errors import RunError
from trainer.faults.regroup import Regrouping, recovers
from trainer.memory.oom import is_out_of_memory
from trainer.memory.stack import Stack
from trainer.run.directory import write_status
from trainer.run.session import Session, host_sum
from trainer.run.state import Tensors

GRAPH = ("forward", "backward")  # which a smaller micro-batch helps, and in which no weight has been updated yet


class Recovery:
    """Mends a step that ran out of memory on any rank: called by the engine with the error that ended it.

    On one device without FSDP the step is given up and taken again. Otherwise a rank may have failed inside a
    collective, so all ranks leave the process group, keep in host memory what training has changed (``tensors``), meet
    in a new group, ``build`` and shard the model anew, put everything back and take the step again.
    """

    def __init__(
        self,
        session: Session,
        tensors: Tensors,
        windows: Windows,
        build: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.session, self.tensors, self.windows, self.build, self.say = session, tensors, windows, build, say
        self.stepper, self.recoveries = tensors.stepper, 0
        self.wanted = recovers(session.recipe, session.plan)
        several = session.fabric.world_size > 1
        self.regrouping = Regrouping(session.fabric) if several and self.wanted else None

    def __call__(self, error: Exception) -> bool:
        """Whether the step can be taken again."""
        if not self.wanted or self.stepper.sync.applied:  # then some weights are updated already
            return False
        why = self._reason(error)
        if why is None:
            return False
        forget(error)
        self.stepper.abandon()
        if self.session.plan.strategy != "single":
            self._start_again()
        cut = self.windows.halve()
        self.session.recut(cut)
        self.recoveries += 1
        write_status(self.session, "running")
        self.say(f"{why}: the step is taken again, from here on in micro-batches of at most {cut.micro_batch_size}")
        return True

    def close(self) -> None:
        """Training has ended: nothing is mended any more."""
        if self.regrouping is not None:
            self.regrouping.close()

    def _reason(self, error: Exception) -> str | None:
        """What happened, if it is an out of memory, here or on another rank, that smaller micro-batches may mend."""
        phase, regrouping = self.session.monitor.phase, self.regrouping
        if is_out_of_memory(error):
            if phase not in GRAPH or not self.windows.can_halve():
                return None
            why = f"out of memory in {phase} on rank {self.session.fabric.global_rank}"
            if regrouping is not None:
                regrouping.call(why)
            return why
        # Once this rank's part is aborted there is no group any more, of which torch says so by a ValueError.
        is_broken = isinstance(error, RuntimeError) or not torch.distributed.is_initialized()
        is_broken = is_broken and not isinstance(error, RunError)
        return regrouping.called() if is_broken and regrouping is not None else None

    def _start_again(self) -> None:
        """Build everything on the ranks anew, with what training has changed."""
        stepper, session = self.stepper, self.session
        assert stepper.scheduler is not None
        kept, position = self.tensors.on_host(), stepper.scheduler.state_dict()
        self._let_go()
        session.agreement.total = list  # the other one keeps the connections of its group
        if self.regrouping is not None:
            self.regrouping.meet()
        self.build()
        stepper.scheduler.load_state_dict(position)
        self.tensors.make_state(kept)
        self.tensors.load_state_dict(kept)
        stepper.module.train()
        session.agreement.total = host_sum(session.fabric)

    def _let_go(self) -> None:
        """Free the device of the old model before there is a new one."""
        empty, parameter = torch.nn.Module(), torch.nn.Parameter(torch.zeros(()))
        self.tensors.stack.become(Stack(empty, empty))
        self.stepper.scheduler = None
        self.session.monitor.fresh = True
        self.stepper.attach(empty, torch.optim.SGD([parameter]), GradientSync([parameter]))
        gc.collect()
        if self.session.fabric.device.type == "cuda":
            torch.cuda.empty_cache()


def forget(error: BaseException | None) -> None:
    """Free what the frames that ``error`` came through still hold: activations, most of all."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
