"""One exact optimizer step: forward and backward of each micro-batch, synchronisation, clipping, update."""

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

from trainer.contract import Model, WholeBatch
from trainer.engine.forward import Forward
from trainer.engine.loss_check import LossCheck
from trainer.engine.loss_totals import LossTotals
from trainer.engine.model_state import BatchNormStatistics
from trainer.engine.sync import GradientSync, gradient_sync
from trainer.engine.two_pass import first_pass
from trainer.engine.window import MicroBatch, Window
from trainer.errors import RunError

if TYPE_CHECKING:
    from trainer.engine.schedule import CheckpointableLambdaLR

ASYNCHRONOUS = ("cuda",)
"""Types of devices that run operations asynchronously, so that reading a result makes the host wait."""


@dataclass(slots=True)
class StepResult:
    """The result of one optimizer step over the whole batch and all ranks."""

    loss: float  # sum of ``losses``
    losses: dict[str, float]  # mean of each loss over the whole batch
    grad_norm: float  # global norm of the gradients before clipping
    lr: float
    samples: int
    skipped: bool  # whether no weight moved: a loss or the norm is not finite, or the batch has weight 0
    tokens: int = 0  # tokens of the samples without padding; 0 if lengths are unknown


class PhaseHooks:
    """No-op hooks, called when a step enters a phase. Subclass to observe."""

    def begin_step(self) -> None:
        """Called when an optimizer step begins."""

    def enter(self, phase: Literal["forward", "backward", "step"], micro: MicroBatch | None = None) -> None:
        """Called when ``phase`` begins and the previous one ends; ``micro`` is given for a forward only."""

    def end_step(self) -> None:
        """Called when a step has ended without an error."""


class Stepper(Forward):
    """Takes optimizer steps."""

    def __init__(
        self,
        fabric: Fabric,
        model: Model,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        sync: GradientSync | None = None,  # by default chosen from the strategy's wrapper
        clip_norm: float | None = None,  # max global gradient norm
        correct_batchnorm: bool | None = None,  # see BatchNormStatistics
        phases: PhaseHooks | None = None,
        copies: int = 1,  # ranks that take the same share of a batch: memory.tensor_parallel
        average: Callable[[int], None] = lambda updates: None,  # optim.ema; called with the number of updates so far
    ) -> None:
        super().__init__(fabric, model, module)
        self.scheduler: CheckpointableLambdaLR | None = None  # stepped after every step that is not skipped
        self.clip_norm, self.correct_batchnorm, self.average = clip_norm, correct_batchnorm, average
        self.phases, self.copies, self.world_size = phases or PhaseHooks(), copies, fabric.world_size // copies
        self.check = LossCheck(model)
        self.generator = torch.default_generator  # for dropout; seeding it is much faster than torch.manual_seed
        if self.device.type == "cuda":
            torch.cuda.init()
            self.generator = torch.cuda.default_generators[self.device.index or 0]
        self.skipped_steps = self.steps_taken = 0
        self.attach(module, optimizer, sync)

    def attach(self, module: nn.Module, optimizer: Optimizer, sync: GradientSync | None = None) -> None:
        self.set_module(module)
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.sync = sync or gradient_sync(self.module, self.model, self.parameters)
        self.batchnorm = BatchNormStatistics(self.module, self.correct_batchnorm)
        # The last step until it is settled: its result, or a function that waits for it, and who receives the result.
        self.launched: tuple[StepResult | Callable[[], StepResult], Callable[[StepResult], None]] | None = None
        self.reads_late = self.device.type in ASYNCHRONOUS and self.can_read_late()

    def can_read_late(self) -> bool:
        """Return whether the next forward may start before the host knows the norm and the losses of a step.

        Either the device skips a step that is not finite by itself, as fused Adam and AdamW do, or no step can be
        skipped. Fused SGD does not qualify: if it skips the first step, the momentum stays uninitialised. A loss scale
        and BatchNorm statistics exclude it, because the host updates them.
        """
        is_fused = type(self.optimizer) in (Adam, AdamW) and all(g["fused"] for g in self.optimizer.param_groups)
        is_here = all(p.device.type == self.device.type for p in self.parameters)
        skips = is_fused or self.sync.updates_in_backward
        return skips and is_here and self.scaler is None and not self.batchnorm.layers

    @property
    def scaler(self) -> Any:
        """The loss scaler of fp16, or ``None``."""
        return getattr(self.precision, "scaler", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON, equal on all ranks; it has no weights and no optimizer state."""
        parts = {"scheduler": self.scheduler, "scaler": self.scaler}
        states = {name: part.state_dict() if part is not None else None for name, part in parts.items()}
        return {"skipped_steps": self.skipped_steps, **states, "overlapped": self.sync.overlaps_update}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped_steps = state["skipped_steps"]  # first, because the schedule reads it
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if state["overlapped"]:
            self.sync.enable_overlap()

    def step(self, window: Window) -> StepResult:
        """Take one exact optimizer step on one batch; ``window`` is this rank's share of it."""
        self.launch(window)
        return self.settle()

    def launch(self, window: Window, then: Callable[[StepResult], None] = lambda result: None) -> None:
        """Start a step. ``then`` receives its result in the first forward of the next step, or in :meth:`settle`."""
        self.phases.begin_step()
        totals = self.accumulate(window)
        self.phases.enter("step")
        norm = self.clip_gradients()
        self.launched = self.update(norm, totals, window), then
        self.phases.end_step()

    def settle(self) -> StepResult:
        """Wait for the result of the last launched step."""
        assert self.launched is not None
        (outcome, then), self.launched = self.launched, None
        result = outcome() if callable(outcome) else outcome
        then(result)
        return result

    def accumulate(self, window: Window) -> LossTotals:
        """Run forward and backward on each micro-batch; the gradients are then those of the whole batch."""
        self.batchnorm.save()
        if self.check:
            self.compare(self.check, window)
        self.sync.begin(window)
        totals = self.sync.loss_totals(window, self.world_size, self.copies)
        last_loss = len(self.model.loss_names)
        losses_of = first_pass(self, window) if isinstance(self.model, WholeBatch) else self.losses
        for micro in window:
            self.prepare(micro, len(window))
            self.phases.enter("forward", micro)
            for number, loss in enumerate(losses_of(micro.batch, micro.packed), start=1):  # one graph at a time
                if self.launched is not None:  # read the result of the previous step while the device computes
                    self.settle()
                self.phases.enter("backward")
                if micro.is_last and number == last_loss:
                    self.sync.before_last_backward()
                # The scale is the number of ranks / the weight of the whole batch.
                self.precision.backward(loss.total, self.module, totals.scale(loss, micro.is_empty))
                totals.add(loss, micro.is_empty)
                if number < last_loss:  # the last backward phase includes the synchronisation of the gradients
                    self.phases.enter("forward", micro)
        if self.check and self.check.check_complete(len(window)):
            self.check = None
        self.sync.after_last_backward()
        return totals

    def compare(self, check: LossCheck, window: Window) -> None:
        """Check that losses are sums over samples: compare those of a few samples of ``window`` with their halves."""
        self.phases.enter("forward", window.micro_batches[0])
        check.check_additive(self, window, self.fabric.world_size, self.generator)

    def prepare(self, micro: MicroBatch, micro_steps: int) -> None:
        """Set the seed of dropout, whether gradients are synchronised, and the momentum of BatchNorm."""
        self.generator.manual_seed(micro.seed)
        self.sync.before_forward(micro.is_last)
        self.batchnorm.set_momentum(micro_steps, micro.is_empty)

    def abandon(self) -> None:
        """Cancel a step at any point, as if it had not begun."""
        self.sync.abandon()  # first, because work in another thread may still write gradients
        for parameter in (*self.parameters, *self.module.parameters()):
            parameter.grad = None
        if self.scaler is not None and self.scaler._scale is not None:  # otherwise no gradient was unscaled
            self.scaler.update(self.scaler.get_scale())  # same scale, but the gradients no longer count as unscaled
        self.batchnorm.restore()
        if not self.steps_taken:
            self.check = LossCheck(self.model)

    def clip_gradients(self) -> Tensor:
        """Scale the gradients down to ``clip_norm`` if their norm exceeds it; return the norm before that."""
        if self.sync.updates_in_backward:
            return self.sync.norm()
        self.precision.unscale_gradients(self.optimizer)
        norm = self.sync.norm()
        self.sync.clip(norm, self.clip_norm)
        return norm.to(self.device)  # offloaded gradients are in host memory

    def update(self, norm: Tensor, totals: LossTotals, window: Window) -> StepResult | Callable[[], StepResult]:
        """Update the weights, or skip the step on all ranks. Return the result, or a function that waits for it."""
        first = self.optimizer.param_groups[0]
        lr = float(first["lr"]) / first.get("lr_scale", 1.0)  # with torchao, lr is a tensor on the CPU
        gathered = totals.gather(norm)
        outcome: StepResult | Callable[[], StepResult]
        if self.reads_late:
            copy = gathered.to("cpu", non_blocking=True)  # torch allocates pinned memory for it
            arrived = torch.cuda.current_stream().record_event() if gathered.is_cuda else None
            outcome = partial(self.conclude, totals, window, lr, copy, arrived)
            if any(window.weights.values()):
                self.optimizer.found_inf = totals.must_skip(gathered)  # type: ignore[attr-defined]
                self.precision.optimizer_step(self.optimizer)
                del self.optimizer.found_inf  # type: ignore[attr-defined]
        else:
            outcome = self.conclude(totals, window, lr, gathered)
        for parameter in self.parameters:  # same effect as optimizer.zero_grad, without its overhead
            parameter.grad = None
        return outcome

    def conclude(
        self, totals: LossTotals, window: Window, lr: float, gathered: Tensor, arrived: torch.cuda.Event | None = None
    ) -> StepResult:
        """Read the norm and the losses, update the weights if the device has not done so, and count the step."""
        grad_norm, losses = totals.read(gathered, arrived)
        is_weighted = any(window.weights.values())
        skipped = not all(map(math.isfinite, (grad_norm, *losses.values()))) or not is_weighted
        if skipped and self.sync.updates_in_backward:
            raise RunError(
                f"{skip_reason(grad_norm, losses)}, but the weights were already updated during backward, so the step "
                "cannot be skipped: lower optim.lr, look for bad samples, or set memory.optimizer_in_backward to false"
            )
        self.skipped_steps += skipped
        if skipped:
            self.sync.skip()
            if self.scaler:
                self.scaler.update()  # lowers the loss scale of fp16
            self.batchnorm.restore()
            if self.scheduler is not None:  # the schedule now ends one step earlier
                self.scheduler.refresh()
        else:
            if not self.reads_late:
                self.precision.optimizer_step(self.optimizer)
            self.average(self.scheduler.last_epoch if self.scheduler is not None else self.steps_taken)
            if self.scheduler is not None:
                self.scheduler.step()
        if self.fabric.world_size > 1:
            self.batchnorm.broadcast()
        self.steps_taken += 1
        # The mean over zero items is undefined, so report NaN. A loss of 0 would look perfect.
        loss = sum(losses.values()) if is_weighted else math.nan
        return StepResult(loss, losses, grad_norm, lr, window.samples, skipped, window.tokens)


def skip_reason(grad_norm: float, losses: Mapping[str, float]) -> str:
    """Return which values of a skipped step are not finite, or that the batch has weight 0."""
    bad = [f"loss {name!r} is {value}" for name, value in losses.items() if not math.isfinite(value)]
    if not bad and not math.isfinite(grad_norm):
        bad = [f"the gradient norm is {grad_norm}"]
    return ", ".join(bad) or "all items of the batch have weight 0 (for example, all labels are -100)"
