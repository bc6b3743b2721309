"""One exact optimizer step: forward, backward, sync on the last micro-step, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from trainer.contract import Model
from trainer.engine.batchnorm import BatchNormStatistics
from trainer.engine.check import LossCheck
from trainer.engine.forward import Forward
from trainer.engine.sync import GradientSync, gradient_sync
from trainer.engine.totals import LossTotals, TotalsInOrder
from trainer.engine.window import MicroBatch, Window
from trainer.errors import RunError

if TYPE_CHECKING:
    from trainer.engine.schedule import LearningRate


ASYNCHRONOUS = ("cuda",)
"""Types of devices on which operations are launched ahead, so that reading a result is a wait."""


@dataclass(slots=True)
class StepResult:
    """What a step did. ``losses`` are means over the whole batch and all ranks, ``loss`` is their sum.

    ``grad_norm`` is the global norm before clipping. Where it, or a loss, is not finite, or nothing has a weight, the
    step is ``skipped``: no weight moved.
    """

    loss: float
    losses: dict[str, float]
    grad_norm: float
    lr: float
    samples: int
    skipped: bool
    tokens: int = 0  # of the samples, without padding; 0 where lengths are not known


class Phases:
    """Hears where a step is, as it goes on, and does nothing; what wants to know is a subclass."""

    def begin_step(self) -> None:
        """An optimizer step begins."""

    def enter(self, phase: Literal["forward", "backward", "step"], micro: MicroBatch | None = None) -> None:
        """``phase`` begins, and the one before it ends; a forward says of which micro-batch."""

    def end_step(self) -> None:
        """The step has ended, and it did not fail."""


class Stepper(Forward):
    """Takes optimizer steps."""

    def __init__(
        self,
        fabric: Fabric,
        model: Model,
        module: nn.Module,
        optimizer: Optimizer,
        scheduler: LearningRate | None = None,  # stepped once per optimizer step, but not by a skipped one
        *,
        sync: GradientSync | None = None,  # by default, as the strategy wrapped the module
        clip_norm: float | None = None,  # largest global gradient norm
        correct_batchnorm: bool = True,  # see BatchNormStatistics
        phases: Phases | None = None,  # is told of every phase
        copies: int = 1,  # ranks that take the same share of a batch: memory.tensor_parallel
        average: Callable[[int], None] | None = None,  # called when a step was taken, after so many: optim.ema
    ) -> None:
        super().__init__(fabric, model, module)
        self.scheduler, self.clip_norm, self.correct_batchnorm = scheduler, clip_norm, correct_batchnorm
        self.phases, self.world_size = phases or Phases(), fabric.world_size // copies
        self.copies, self.average = copies, average
        self.check = LossCheck(model)
        self.generator = torch.default_generator  # of dropout; far cheaper to seed than by torch.manual_seed
        if self.device.type == "cuda":
            torch.cuda.init()
            self.generator = torch.cuda.default_generators[self.device.index or 0]
        self.skipped_steps = self.steps_taken = 0
        self.attach(module, optimizer, sync)

    def attach(self, module: nn.Module, optimizer: Optimizer, sync: GradientSync | None = None) -> None:
        """Train this module with this optimizer from now on."""
        self.use(module)
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.sync = sync or gradient_sync(self.module, self.model, self.parameters)
        batchnorm = BatchNormStatistics(self.module, self.correct_batchnorm)
        self.batchnorm = batchnorm if batchnorm.layers else None
        # The result of a step that is not settled yet, or what waits for it; and who gets it.
        self.launched: tuple[StepResult | Callable[[], StepResult], Callable[[StepResult], None]] | None = None
        self.reads_late = self.device.type in ASYNCHRONOUS and self.can_read_late()

    def can_read_late(self) -> bool:
        """Whether the host need not know a step's norm and losses before the next forward: a step that is not finite is
        skipped by the optimizer's kernel, or cannot be skipped at all.

        Torch's fused Adam and AdamW skip so. Its fused SGD would leave the momentum uninitialised if the first step is
        skipped. A loss scale, and batch statistics that must be put back, are the host's.
        """
        is_fused = type(self.optimizer) in (Adam, AdamW) and all(g["fused"] for g in self.optimizer.param_groups)
        is_here = all(p.device.type == self.device.type for p in self.parameters)
        return (is_fused or self.sync.applied) and is_here and self.scaler is None and self.batchnorm is None

    @property
    def scaler(self) -> Any:
        """The loss scale of fp16; ``None`` without one."""
        return getattr(self.precision, "scaler", None)

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks, as JSON; weights and optimizer are for who holds the module."""
        parts = {"scheduler": self.scheduler, "scaler": self.scaler}
        states = {name: part.state_dict() if part is not None else None for name, part in parts.items()}
        return {"skipped_steps": self.skipped_steps, **states, "overlapped": self.sync.overlapped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped_steps = state["skipped_steps"]  # which the schedule asks for
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if state["overlapped"]:
            self.sync.overlap()

    def step(self, window: Window) -> StepResult:
        """One exact optimizer step on one batch."""
        self.launch(window)
        return self.settle()

    def launch(self, window: Window, then: Callable[[StepResult], None] = lambda result: None) -> None:
        """Launch a step. Its result goes to ``then``: in the next step, when the device has a forward to do, or as soon
        as :meth:`settle` is called."""
        self.phases.begin_step()
        totals = self.accumulate(window)
        self.phases.enter("step")
        self.launched = self.update(self.clip_gradients(), totals, window), then
        self.phases.end_step()

    def settle(self) -> StepResult:
        """Wait for the result of the step that was launched last."""
        assert self.launched is not None
        (outcome, then), self.launched = self.launched, None
        result = outcome() if callable(outcome) else outcome
        then(result)
        return result

    def accumulate(self, window: Window) -> LossTotals:
        """Forward and backward, micro-batch by micro-batch; the gradients are then those of the whole batch."""
        totals = (TotalsInOrder if self.sync.in_order else LossTotals)(window, self.world_size, self.copies)
        if self.check:
            self.compare(self.check, window)
        self.sync.begin(window)
        if self.batchnorm:
            self.batchnorm.remember()
        for micro in window:
            self.prepare(micro, len(window))
            self.phases.enter("forward", micro)
            for number, loss in enumerate(self.losses(micro.batch, micro.packed), start=1):
                if self.launched is not None:  # the device has this forward to do while the host reads
                    self.settle()
                self.phases.enter("backward")
                if micro.is_last and number == len(self.model.loss_names):
                    self.sync.before_last_backward()
                self.precision.backward(loss.total, self.module, totals.scale(loss, micro.is_empty))
                totals.add(loss, micro.is_empty)
                if number < len(self.model.loss_names):  # the last backward goes on until gradients are synchronised
                    self.phases.enter("forward", micro)
        if self.check and self.check.end(len(window)):
            self.check = None
        self.sync.after()
        return totals

    def compare(self, check: LossCheck, window: Window) -> None:
        """Let ``check`` compare the losses of some samples of ``window``, which leaves no trace."""
        self.phases.enter("forward", window.micro_batches[0])
        check.compare(self, window, self.fabric.world_size, self.generator)

    def abandon(self) -> None:
        """Leave a step wherever it is, as if it had not begun."""
        self.sync.abandon()  # first: what goes on in another thread may leave gradients behind
        for parameter in (*self.parameters, *self.module.parameters()):
            parameter.grad = None
        if self.scaler is not None and self.scaler._scale is not None:  # else there is nothing it could have unscaled
            self.scaler.update(self.scaler.get_scale())  # the same scale; forgets that gradients were unscaled
        if self.batchnorm:
            self.batchnorm.restore()
        if not self.steps_taken:
            self.check = LossCheck(self.model)

    def prepare(self, micro: MicroBatch, micro_steps: int) -> None:
        """Bring everything that a micro-step depends on into the state that it asks for."""
        self.generator.manual_seed(micro.seed)
        self.sync.before(micro.is_last)
        if self.batchnorm:
            self.batchnorm.set(micro_steps, micro.is_empty)

    def clip_gradients(self) -> Tensor:
        """Scale the gradients down to ``clip_norm`` if they exceed it; return the global norm they had."""
        if self.sync.applied:
            return self.sync.norm()
        self.precision.unscale_gradients(self.optimizer)
        norm = self.sync.norm()
        self.sync.clip(norm, self.clip_norm)
        return norm.to(self.device)  # offloaded gradients are in host memory

    def update(self, norm: Tensor, totals: LossTotals, window: Window) -> StepResult | Callable[[], StepResult]:
        """Step the optimizer, or skip, on all ranks alike: the norm and the losses are those of the whole batch.
        Returns the result, or what waits for it."""
        first = self.optimizer.param_groups[0]
        lr = float(first["lr"]) / first.get("lr_scale", 1.0)  # torchao's is a tensor on the CPU
        gathered = totals.gather(norm)
        conclude = partial(self.conclude, totals, window, lr)
        if self.reads_late:
            arriving = gathered.to("cpu", non_blocking=True)  # torch pins it
            arrived = torch.cuda.current_stream().record_event() if gathered.is_cuda else None
            outcome: StepResult | Callable[[], StepResult] = partial(conclude, arriving, arrived)
            if any(window.weights.values()):
                self.optimizer.found_inf = totals.must_skip(gathered)  # type: ignore[attr-defined]
                self.precision.optimizer_step(self.optimizer)
                del self.optimizer.found_inf  # type: ignore[attr-defined]
        else:
            outcome = conclude(gathered)
        for parameter in self.parameters:  # what optimizer.zero_grad does, without its bookkeeping
            parameter.grad = None
        return outcome

    def conclude(
        self, totals: LossTotals, window: Window, lr: float, gathered: Tensor, arrived: torch.cuda.Event | None = None
    ) -> StepResult:
        """Read what the step has come to, update if the device has not done so, and count the step."""
        grad_norm, losses = totals.read(gathered, arrived)
        is_weighted = any(window.weights.values())
        skipped = not all(map(math.isfinite, (grad_norm, *losses.values()))) or not is_weighted
        if skipped and self.sync.applied:
            raise RunError(
                f"{why_skipped(grad_norm, losses)} in a step whose weights were updated during the backward, so it "
                "cannot be skipped: lower optim.lr, look for bad samples, or set memory.optimizer_in_backward to false"
            )
        self.skipped_steps += skipped
        if skipped:
            self.sync.skip()
            if self.scaler:
                self.scaler.update()  # fp16 must adapt
            if self.batchnorm:
                self.batchnorm.restore()
            if self.scheduler is not None:  # the rest of the schedule is one step shorter
                self.scheduler.refresh()
        else:
            if not self.reads_late:
                self.precision.optimizer_step(self.optimizer)
            if self.average is not None:
                self.average(self.scheduler.last_epoch if self.scheduler is not None else self.steps_taken)
            if self.scheduler is not None:
                self.scheduler.step()
        if self.batchnorm and self.fabric.world_size > 1:
            self.batchnorm.share()
        self.steps_taken += 1
        # The mean over no items at all is no number; 0 would be a perfect one.
        loss = sum(losses.values()) if is_weighted else math.nan
        return StepResult(loss, losses, grad_norm, lr, window.samples, skipped, window.tokens)


def why_skipped(grad_norm: float, losses: Mapping[str, float]) -> str:
    """What of a skipped step was not finite, or else that nothing had a weight."""
    bad = [f"loss {name!r} is {value}" for name, value in losses.items() if not math.isfinite(value)]
    if not bad and not math.isfinite(grad_norm):
        bad = [f"the gradient norm is {grad_norm}"]
    return ", ".join(bad) or "nothing in the batch has a weight (no label besides -100)"
