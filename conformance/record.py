"""What every optimizer step is given: gradients, weights, learning rates, and the samples that the model saw before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from conformance.cases import FIRST_WORD


@dataclass
class Step:
    """One optimizer step.

    Args:
        gradients: by name of the parameter, as the optimizer is given them: after unscaling and clipping.
        weights: before the update.
        samples: for each forward pass of this rank since the step before, the numbers of the samples.
        rate: the learning rate of the first group.
    """

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    samples: list[list[int]]
    rate: float


@dataclass
class Recorder:
    """Watches a model and every optimizer of the process, as a context manager.

    Args:
        module: the model that the trainer is given; wrappers around it are of no importance.
    """

    module: nn.Module
    steps: list[Step] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)

    def __enter__(self) -> Recorder:
        self.handles = [
            self.module.register_forward_pre_hook(self._forward, with_kwargs=True),
            register_optimizer_step_pre_hook(self._step),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            self.seen.append(numbers_in(args, kwargs))

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

    def record(self, optimizer: Optimizer) -> None:
        """Keep what ``optimizer`` is given now."""
        ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        if not ours & {id(one) for one in named.values()}:
            return  # an optimizer of something else
        gradients = {name: one.grad for name, one in named.items() if one.grad is not None}
        self.keep(gradients, float(optimizer.param_groups[0]["lr"]))

    def keep(self, gradients: dict[str, Tensor], rate: float) -> None:
        """Keep a step; ``gradients`` are by the names of the parameters."""
        weights = {name: whole(one) for name, one in self.module.named_parameters()}
        copies = {name: whole(one) for name, one in gradients.items()}
        self.steps.append(Step(copies, weights, self.seen, rate))
        self.seen = []


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
