"""What every optimizer step is given: gradients, weights, learning rates, and the samples that the model saw before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from conformance.cases import FIRST_WORD


@dataclass
class Pass:
    """One forward pass in training mode.

    Args:
        samples: their numbers, in the order of the rows.
        masks: for each dropout in the order of their calls, which entries were kept; shape (samples, ...).
    """

    samples: list[int]
    masks: list[Tensor] = field(default_factory=list)


@dataclass
class Step:
    """One optimizer step.

    Args:
        gradients: by name of the parameter, as the optimizer is given them: after unscaling and clipping.
        weights: before the update.
        passes: the forward passes of this rank since the step before.
        rate: the learning rate of the first group.
    """

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    passes: list[Pass]
    rate: float


@dataclass
class Recorder:
    """Watches a model and every optimizer of the process, as a context manager.

    Args:
        module: the model that the trainer is given; wrappers around it do not matter.
    """

    module: nn.Module
    steps: list[Step] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    last: dict[str, Tensor] | None = None

    def __enter__(self) -> Recorder:
        self.watch(self.module)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def watch(self, module: nn.Module) -> None:
        """Watch ``module`` instead of the model before it."""
        self.__exit__()
        self.module, self.passes = module, []
        dropouts = [one for one in module.modules() if isinstance(one, nn.Dropout) and one.p]
        self.handles = [
            module.register_forward_pre_hook(self._forward, with_kwargs=True),
            register_optimizer_step_pre_hook(self._step),
            register_optimizer_step_post_hook(self._after),
            *(one.register_forward_hook(self._dropout) for one in dropouts),
        ]

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self.passes.append(Pass(numbers_in(args, kwargs)))

    def _dropout(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if module.training and torch.is_grad_enabled():
            self.passes[-1].masks.append(output.detach() != 0)

    def _step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a step; with a closure, after it, because the closure computes the gradients."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            self.record(optimizer)
            return None

        def closed() -> Any:
            loss = closure()
            self.record(optimizer)
            return loss

        return args[:1], {"closure": closed}

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_trained_by(optimizer):
            self.last = self.weights()

    def _is_trained_by(self, optimizer: Optimizer) -> bool:
        given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(one) in given for one in self.module.parameters())

    def record(self, optimizer: Optimizer) -> None:
        """Keep what ``optimizer`` is given now."""
        if not self._is_trained_by(optimizer):
            return
        if not self.passes and not float(optimizer.param_groups[0]["lr"]):
            return  # a step without effect, which creates the optimizer's state before it is loaded
        named = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        gradients = {name: one.grad for name, one in named.items() if one.grad is not None}
        self.keep(gradients, float(optimizer.param_groups[0]["lr"]))

    def keep(self, gradients: dict[str, Tensor], rate: float) -> None:
        """Keep a step; ``gradients`` are by the names of the parameters."""
        copies = {name: whole(one) for name, one in gradients.items()}
        self.steps.append(Step(copies, self.weights(), self.passes, rate))
        self.passes = []

    def last_weights(self) -> dict[str, Tensor]:
        """Return the weights after the last step; a trainer may replace them by an average afterwards."""
        return self.last or self.weights()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of now."""
        return {name: whole(one) for name, one in self.module.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """Return a copy in float64 of a tensor that may be sharded over ranks."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().to(torch.float64, copy=True).cpu()


def numbers_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the numbers of the samples: tokens below ``FIRST_WORD`` in the first tensor of whole numbers."""
    for value in (kwargs.get("input_ids"), *args, *kwargs.values()):
        if isinstance(value, Tensor) and not value.is_floating_point() and value.ndim:
            flat = value.flatten()
            return [int(token) for token in flat[(flat > 0) & (flat < FIRST_WORD)]]
    return []
