"""Exact accumulation for people with a training loop of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class AccumulatingOptimizer(Optimizer):
    """Wraps a torch optimizer so that every ``steps``-th call of :meth:`step` updates the weights.

    Put it in place of the optimizer, and call ``backward``, ``step`` and ``zero_grad`` once a micro-batch, as before::

        optimizer = AccumulatingOptimizer(torch.optim.AdamW(model.parameters()), steps=8)
        for batch, target in loader:
            loss_function(model(batch), target).backward()
            if optimizer.step():        # True when the weights were updated
                scheduler.step()
            optimizer.zero_grad()       # does nothing within a window
        optimizer.flush()               # the rest of an incomplete window

    Two ways to be exact:

    * losses are means over micro-batches of equal size: ``step()`` divides by the number of micro-batches in the
      window, by fewer when a window is flushed early;
    * losses are *sums*: ``step(weight=n)`` with the number of items of each micro-batch divides by their total, which
      is also exact when micro-batches differ in size.

    With ``torch.amp.GradScaler``, call ``scaler.step(optimizer)`` and ``scaler.update()`` once a micro-batch: gradients
    are unscaled as they come, so the scale may change within a window. A window with an overflow is dropped whole.

    Args:
        optimizer: any torch optimizer that needs no closure.
        steps: micro-batches in a window.
        clip_norm: largest global norm of the window's gradient. Clipping in the loop instead would see the sum so far.
    """

    # Tells GradScaler.step to hand over scale and overflow flag instead of unscaling the same gradient again and again.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer, steps: int, *, clip_norm: float | None = None) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps} must be at least 1")
        # No super().__init__(): groups, state and defaults are the wrapped optimizer's own, for schedulers to see.
        self.optimizer = optimizer
        self.steps = steps
        self.clip_norm = clip_norm
        self.micro_step = 0
        self._weight: float = 0.0
        self._weighted: bool | None = None
        self._unscaled: dict[Tensor, Tensor] = {}
        self._overflows: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"AccumulatingOptimizer(steps={self.steps}, {self.optimizer!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.state

    @property
    def is_last(self) -> bool:
        """Whether the next ``step`` updates the weights: the one before which DDP must synchronise."""
        return self.micro_step == self.steps - 1

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> bool:  # type: ignore[override]
        """End a micro-batch. Returns whether the weights were updated.

        Args:
            closure: not supported, as the wrapped optimizer would accumulate inside it.
            weight: how many items the loss was summed over; leave out when losses are means.

        Raises:
            ValueError: when ``weight`` is given for some micro-batches of a window only, or is negative.
        """
        if closure is not None:
            raise ValueError("AccumulatingOptimizer.step takes no closure: call backward() before step()")
        self._count(weight)
        self._take_scaled()
        return self.flush() if self.micro_step == self.steps else False

    def flush(self) -> bool:
        """Update with an incomplete window, divided by what it holds. Returns whether the weights were updated."""
        if self.micro_step == 0:
            return False
        overflow = any(bool(flag) for flag in self._overflows)
        updates = self._weight > 0 and not overflow
        if updates:
            self._finish_gradients()
            self.optimizer.step()
        self._start_window()
        return updates

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, but not within a window, where they are still being summed."""
        if self.micro_step == 0:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state; refused within a window, whose gradients it would lose."""
        if self.micro_step:
            raise RuntimeError(
                f"{self.micro_step} of {self.steps} micro-batches are accumulated: call flush() before saving"
            )
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state; an incomplete window is forgotten."""
        self.optimizer.load_state_dict(state_dict)
        self._start_window()

    def _count(self, weight: float | None) -> None:
        if self._weighted not in (None, weight is not None):
            raise ValueError("give weight= for every micro-batch of a window, or for none")
        if weight is not None and weight < 0:
            raise ValueError(f"weight={weight} must not be negative")
        self._weighted = weight is not None
        self._weight += 1.0 if weight is None else float(weight)
        self.micro_step += 1

    def _take_scaled(self) -> None:
        """Under a GradScaler, move this micro-batch's gradient, unscaled, into the window's own sum."""
        scale = getattr(self, "grad_scale", None)
        overflow = getattr(self, "found_inf", None)
        if overflow is None:
            return
        self._overflows.append(overflow)
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad if scale is None else parameter.grad / scale.to(parameter.grad.dtype)
            if parameter in self._unscaled:
                self._unscaled[parameter] += gradient
            else:
                self._unscaled[parameter] = gradient
            parameter.grad = None

    def _finish_gradients(self) -> None:
        for parameter, gradient in self._unscaled.items():
            parameter.grad = gradient
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        torch._foreach_div_(gradients, self._weight)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters(), self.clip_norm)

    def _start_window(self) -> None:
        self.micro_step, self._weight, self._weighted = 0, 0.0, None
        self._unscaled.clear()
        self._overflows.clear()
        self.optimizer.zero_grad(set_to_none=True)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]
