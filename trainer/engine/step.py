"""One exact optimizer step: forward, backward, sync on the last micro-step, clip, update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.engine.batchnorm import BatchNormStatistics
from trainer.engine.forward import Forward
from trainer.engine.sync import gradient_sync
from trainer.engine.window import Window
from trainer.recipe import Loss, Model, RecipeError


@dataclass(slots=True)
class StepResult:
    """What a step did. ``losses`` are means over the whole batch and all ranks, ``loss`` is their sum.

    ``grad_norm`` is the global norm before clipping. ``skipped`` says that it, or a loss, was not finite, and that no
    weight moved.
    """

    loss: float
    losses: dict[str, float]
    grad_norm: float
    lr: float
    samples: int
    skipped: bool


class Stepper(Forward):
    """Takes optimizer steps.

    Args:
        fabric: launched; gives device, precision, strategy and world size.
        model: gives the losses.
        module: what ``fabric.setup_module`` returned.
        optimizer: a torch optimizer over the module's parameters.
        scheduler: stepped once an optimizer step, never on a skipped one.
        clip_norm: largest global gradient norm.
        correct_batchnorm: see :class:`BatchNormStatistics`.
    """

    def __init__(
        self,
        fabric: Fabric,
        model: Model,
        module: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        clip_norm: float | None = None,
        correct_batchnorm: bool = True,
    ) -> None:
        super().__init__(fabric, model, module)
        self.optimizer, self.scheduler, self.clip_norm = optimizer, scheduler, clip_norm
        self.world_size = fabric.world_size
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.alike = len({(p.device, p.dtype, type(p)) for p in self.parameters}) == 1
        self.sync = gradient_sync(self.module, model)
        batchnorm = BatchNormStatistics(self.module, correct_batchnorm)
        self.batchnorm = batchnorm if batchnorm.layers else None
        self.generator = _generator(self.device)
        self.checked = False

    def step(self, window: Window) -> StepResult:
        """One exact optimizer step on one batch: ``window`` is this rank's share of it."""
        if self.batchnorm:
            self.batchnorm.remember()
        totals: dict[str, list[Tensor]] = {name: [] for name in window.weights}
        scales: dict[str, Tensor] = {}
        micro_steps = len(window)
        for micro in window:
            self.prepare(micro.seed, micro_steps, micro.is_empty, micro.is_last)
            for loss in self.losses(micro.batch):
                if not self.checked:
                    self.check_loss(loss, micro.batch)
                total = loss.total.detach()
                if loss.name not in scales:
                    scales[loss.name] = torch.full_like(total, self.world_size / (window.weights[loss.name] or 1.0))
                scale = scales[loss.name]
                # Backward from the scale instead of from loss × scale: the same gradient, three operations less.
                self.precision.backward(loss.total, self.module, torch.zeros_like(scale) if micro.is_empty else scale)
                totals[loss.name].append(torch.zeros_like(total) if micro.is_empty else total)
        if not self.checked:
            self.check_names(totals, micro_steps)
        self.sync.after()
        norm = self.clip_gradients()
        return self.update(norm, totals, window)

    def prepare(self, seed: int, micro_steps: int, is_empty: bool, is_last: bool) -> None:
        """Bring everything that a micro-step depends on into the state that it asks for."""
        self.generator.manual_seed(seed)
        self.sync.before(is_last)
        if self.batchnorm:
            self.batchnorm.set(micro_steps, is_empty)

    def clip_gradients(self) -> Tensor:
        """Scale the gradients down to ``clip_norm`` if they exceed it; return the global norm they had."""
        self.precision.unscale_gradients(self.optimizer)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = total_norm(gradients, self.alike)
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        return norm

    def update(self, norm: Tensor, totals: dict[str, list[Tensor]], window: Window) -> StepResult:
        """Step the optimizer, or skip, on all ranks alike: the norm and the losses are those of the whole batch."""
        norm_value, *sums = self.read(norm, list(totals.values()))
        losses = {name: total / (window.weights[name] or 1.0) for name, total in zip(totals, sums, strict=True)}
        skipped = not all(map(math.isfinite, (norm_value, *sums))) or not any(window.weights.values())
        lr = self.optimizer.param_groups[0]["lr"]
        if not skipped:
            self.precision.optimizer_step(self.optimizer)
            if self.scheduler is not None:
                self.scheduler.step()
        else:
            if scaler := getattr(self.precision, "scaler", None):
                scaler.update()
            if self.batchnorm:
                self.batchnorm.restore()
        self.optimizer.zero_grad(set_to_none=True)
        self.checked = True
        return StepResult(sum(losses.values()), losses, norm_value, lr, window.samples, skipped)

    def read(self, norm: Tensor, totals: list[list[Tensor]]) -> list[float]:
        """The norm and the sums of the losses over all ranks: the one host sync of a step."""
        if self.world_size > 1:
            # In float64: thousands of samples would lose digits in float32.
            sums = torch.stack([torch.stack(parts).sum(dtype=torch.float64) for parts in totals])
            torch.distributed.all_reduce(sums)
            return torch.cat([norm.detach().double().reshape(1), sums]).tolist()
        first, *values = torch.stack([norm, *chain.from_iterable(totals)]).tolist()
        left = iter(values)
        return [first, *(sum(islice(left, len(parts))) for parts in totals)]

    def check_loss(self, loss: Loss, batch: Any) -> None:
        """In the first step: a loss must have a declared name and report the weight that it is divided by."""
        kind, promised = type(self.model).__name__, self.model.weigh(batch)
        if loss.name not in promised or loss.name not in self.model.loss_names:
            raise RecipeError(
                f"{kind}: losses() yields {loss.name!r}, loss_names are {', '.join(self.model.loss_names)} and weigh() "
                f"weighs {', '.join(promised)}: use the same names in all three"
            )
        reported = float(loss.counted())
        if not math.isclose(promised[loss.name], reported, rel_tol=1e-6):
            raise RecipeError(
                f"{kind}: loss {loss.name!r} reports weight {reported:g} for a micro-batch that weigh() weighed "
                f"{promised[loss.name]:g}: make losses() and weigh() count the same items"
            )

    def check_names(self, totals: dict[str, list[Tensor]], micro_steps: int) -> None:
        """In the first step: every declared loss must come once a micro-batch."""
        for name, parts in totals.items():
            if len(parts) != micro_steps:
                raise RecipeError(
                    f"{type(self.model).__name__}: losses() yielded {name!r} {len(parts)} times in {micro_steps} "
                    "micro-batches: yield every one of loss_names once for each"
                )


def total_norm(gradients: list[Tensor], alike: bool) -> Tensor:
    """The norm of all gradients together: ``get_total_norm``, at half its cost where all are of one device and type."""
    if not alike or not gradients:
        return nn.utils.get_total_norm(gradients, error_if_nonfinite=False)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def _generator(device: torch.device) -> torch.Generator:
    """What dropout on ``device`` draws from: seeding it alone is far cheaper than ``torch.manual_seed``."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[device.index or 0]
