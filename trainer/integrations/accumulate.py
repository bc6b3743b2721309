"""Exact gradient accumulation for custom training loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Group = torch.distributed.ProcessGroup
SAME_NORM = 1e-4  # maximum relative difference of the ranks' weight norms: hardware may differ


class AccumulatingOptimizer(Optimizer):
    """Wraps a torch optimizer so that every ``steps``-th call of :meth:`step` updates the weights.

    Use it in place of the optimizer, and call ``backward``, ``step`` and ``zero_grad`` for each micro-batch::

        optimizer = AccumulatingOptimizer(torch.optim.AdamW(model.parameters()), steps=8)
        for batch, target in loader:
            loss_function(model(batch), target).backward()
            if optimizer.step():        # True when the weights were updated
                scheduler.step()
            optimizer.zero_grad()       # does nothing within a window
        optimizer.flush()               # the rest of an incomplete window

    Two ways to be exact:

    * losses are means over micro-batches of equal size: ``step()`` divides by their number in the window;
    * losses are *sums*: ``step(weight=n)`` with the number of items of each micro-batch divides by their total, which
      is also exact when micro-batches differ in size.

    On several ranks gradients are summed over the ranks once per update, whether DDP has averaged them already or not,
    so micro-batches may differ in size between ranks, and a window may end anywhere (docs/your-own-loop.md).

    Args:
        optimizer: any optimizer that needs no closure.
        steps: micro-batches per window.
        clip_norm: maximum global norm of the window's gradient.
        group: the ranks that train this model; by default all. If each rank trains a separate model, use
            ``torch.distributed.new_subgroups(1)[0]``.
    """

    # Makes GradScaler.step pass the scale and overflow flag instead of unscaling the same gradient repeatedly.
    _step_supports_amp_scaling = True

    def __init__(
        self, optimizer: Optimizer, steps: int, *, clip_norm: float | None = None, group: Group | None = None
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps} must be at least 1")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(f"{type(optimizer).__name__} needs a closure, which accumulation cannot support")
        # No super().__init__(): schedulers must see the groups, state and defaults of the wrapped optimizer.
        self.optimizer, self.steps, self.clip_norm, self.group = optimizer, steps, clip_norm, group
        self.micro_step, self._weight = 0, 0.0
        self._weighted: bool | None = None
        self._unscaled: dict[Tensor, Tensor] = {}
        self._overflows: list[Tensor] = []
        self._overflows_ever, self._is_one_model = 0, False
        self._left: list[_LeftoverGradient] = []
        self._shards = _FSDPReduction()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state and the sum so far, without attributes that schedulers and hooks set on this object."""
        tied = ("step", "_left", "_shards", "grad_scale", "found_inf")
        state = {name: value for name, value in self.__dict__.items() if name not in tied}
        return state | {"_gradients": [parameter.grad for parameter in self._parameters()]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        gradients = state.pop("_gradients")
        self.__dict__.update(state, _left=[], _shards=_FSDPReduction())
        for parameter, gradient in zip(self._parameters(), gradients, strict=True):
            parameter.grad = gradient

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"AccumulatingOptimizer(steps={self.steps}, {self.optimizer!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def is_last(self) -> bool:
        """Whether the next ``step`` updates the weights: before it DDP may synchronise, and FSDP must."""
        return self.micro_step == self.steps - 1

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> bool:  # type: ignore[override]
        """End a micro-batch; return whether the weights were updated.

        Args:
            weight: number of items that the loss was summed over; ``None`` for a mean.

        Raises:
            RuntimeError: on all ranks, if the update would be wrong (see ``flush``); on this rank, if the sum so far
                was cleared or changed.
        """
        if closure is not None:
            raise ValueError("AccumulatingOptimizer.step takes no closure: call backward() before step()")
        while self._left:
            self._left.pop().check_untouched()
        if self._weighted not in (None, weight is not None):
            raise ValueError("weight= was passed for only some micro-batches of a window: pass it for all or none")
        if weight is not None and weight < 0:
            raise ValueError(f"weight={weight} must not be negative")
        self._weighted = weight is not None
        self._weight += 1.0 if weight is None else float(weight)
        self.micro_step += 1
        self._shards.after_backward(self._parameters())
        self._take_scaled()
        if self.micro_step == self.steps:
            return self._update(flushes=False)
        self._left = [_LeftoverGradient(parameter) for parameter in self._parameters() if parameter.grad is not None]
        return False

    def flush(self) -> bool:
        """Update with an incomplete window, divided by its total weight; return whether the weights were updated.

        All ranks must call it; they may have different numbers of micro-batches, or none.

        Raises:
            RuntimeError: as ``step``; on all ranks, if some flush while others end a full window, they have different
                models or scales, use ``weight`` differently, or FSDP has not reduced.
        """
        while self._left:
            self._left.pop().check_untouched()
        return self._update(flushes=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; no-op within a window, while they are being summed."""
        if self.micro_step == 0:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; an error within a window, whose gradients would be lost."""
        if self.micro_step:
            done = f"{self.micro_step} of {self.steps} micro-batches are accumulated"
            raise RuntimeError(f"{done}: call flush() before saving")
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state, and discard an incomplete window."""
        self.optimizer.load_state_dict(state_dict)
        self._start_window()

    def _take_scaled(self) -> None:
        """Add this micro-batch's unscaled gradient to the sum of the window, if a GradScaler is used."""
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if overflow is None:
            return
        if self._shards.stale:
            fix = "with a GradScaler, reduce in every backward (set_requires_gradient_sync(True))"
            raise RuntimeError(f"FSDP sums scaled gradients until it reduces them, and the scale may change: {fix}")
        self._overflows.append(overflow)
        for parameter in self._parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            gradient = gradient if scale is None else gradient / scale.to(gradient.dtype)
            if parameter in self._unscaled:
                self._unscaled[parameter] += gradient
            else:
                self._unscaled[parameter] = gradient

    def _update(self, flushes: bool) -> bool:
        """End the window: all ranks update, or all ranks drop it."""
        ranks = torch.distributed.get_world_size(self.group) if torch.distributed.is_initialized() else 1
        if ranks == 1 and self.micro_step == 0:
            return False
        parameters = self._parameters()
        for parameter, gradient in self._unscaled.items():
            parameter.grad = gradient
        if ranks > 1 and not self._is_one_model:
            self._require_one_model(parameters, ranks)
        overflow = any(bool(flag) for flag in self._overflows)
        kind = 0.0 if self._weighted is None else 1.0 + self._weighted
        stale = self.micro_step > 0 and self._shards.stale
        status = [flushes, kind, self._weight, overflow, self._overflows_ever, stale]
        rows = self._gather([*status, *map(_layout, parameters)], parameters[0].device, ranks)
        columns = list(zip(*rows, strict=True))
        weight = sum(columns[2])
        updates = weight > 0 and not any(columns[3])
        _require_agreement(columns, updates)
        if updates:
            self._finish_gradients(parameters, columns[len(status) :], weight, ranks)
            self.optimizer.step()
        self._overflows_ever += overflow
        self._start_window()
        return updates

    def _gather(self, row: Sequence[float], device: torch.device, ranks: int) -> list[list[float]]:
        if ranks == 1:
            return [list(row)]
        own = torch.tensor(row, dtype=torch.float64, device=device)
        rows = [torch.empty_like(own) for _ in range(ranks)]
        torch.distributed.all_gather(rows, own, group=self.group)
        return torch.stack(rows).tolist()

    def _require_one_model(self, parameters: Sequence[Tensor], ranks: int) -> None:
        """Reject ranks that train separate models, or replicas with different initial weights."""
        norm = sum(float(torch.linalg.vector_norm(p.detach())) for p in parameters if not isinstance(p, DTensor))
        row = [len(parameters), sum(p.numel() for p in parameters), norm]
        counts, sizes, norms = zip(*self._gather(row, parameters[0].device, ranks), strict=True)
        if len({*counts}) > 1 or len({*sizes}) > 1 or max(norms) - min(norms) > SAME_NORM * max(norms):
            wrap = "wrap the model in DistributedDataParallel, which copies those of rank 0"
            group = "group= with its ranks (torch.distributed.new_subgroups(1)[0] if each rank trains a separate model)"
            raise RuntimeError(f"the {ranks} ranks have different weights: {wrap}, or pass {group}")
        self._is_one_model = True

    def _finish_gradients(
        self, parameters: Sequence[Tensor], layouts: Sequence[Sequence[float]], weight: float, ranks: int
    ) -> None:
        """Turn the gradients, sums of this rank or means over the ranks, into the mean over all ranks' windows."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        for sharded, divisor in ((False, weight), (True, weight / ranks)):  # FSDP takes the mean over the ranks
            some = [gradient for gradient in gradients if isinstance(gradient, DTensor) == sharded]
            if some:
                torch._foreach_div_(tuple(some), divisor)
        if ranks > 1:
            _sum_over_ranks(parameters, layouts, self.group)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)

    def _start_window(self) -> None:
        self.micro_step, self._weight, self._weighted = 0, 0.0, None
        self._unscaled, self._overflows = {}, []
        while self._left:
            self._left.pop().gradient = None  # discarded: its hook checks nothing
        self._shards = _FSDPReduction()
        self.optimizer.zero_grad(set_to_none=True)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class _LeftoverGradient:
    """The gradient as the last micro-step left it, to detect changes before the next backward adds to it."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.gradient = parameter, parameter.grad
        assert self.gradient is not None
        # Gradients of shards are set without autograd hooks.
        self.version = None if isinstance(self.gradient, DTensor) else self.gradient._version
        self.handle = parameter.register_hook(self.check_untouched) if parameter.requires_grad else None

    def check_untouched(self, _: Tensor | None = None) -> None:
        """Check the gradient just before the next one is added, or at the end of a micro-step that adds none."""
        before, self.gradient = self.gradient, None
        if self.handle is not None:
            self.handle.remove()
        if before is None:  # checked already
            return
        if self.parameter.grad is not before or self.version not in (None, before._version):
            fix = "call optimizer.zero_grad(), which keeps them within a window, instead of model.zero_grad()"
            raise RuntimeError(f"accumulated gradients were cleared or changed between step() and backward(): {fix}")


class _FSDPReduction:
    """Tracks whether FSDP has reduced all gradients so far; the optimizer cannot see the others."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor | None, int]] = []
        self.stale = False

    def after_backward(self, parameters: Sequence[Tensor]) -> None:
        """Record the gradients after a backward: one that reduces changes the gradients of some shards."""
        gradients: list[Any] = [p.grad for p in parameters if isinstance(p, DTensor) and p.requires_grad]
        found = [(gradient, -1 if gradient is None else gradient._local_tensor._version) for gradient in gradients]
        pairs = zip(found, self.seen or [(None, -1)] * len(found), strict=True)
        changed = any(new is not None and (new is not old or now != then) for (new, now), (old, then) in pairs)
        self.seen, self.stale = found, bool(found) and not changed


def _layout(parameter: Tensor) -> int:
    """Return 0 without a gradient, 1 for a dense one, 1 + its sparse dimensions for a sparse one."""
    if parameter.grad is None:
        return 0
    return 1 + (parameter.grad.sparse_dim() if parameter.grad.is_sparse else 0)


def _require_agreement(columns: Sequence[Sequence[float]], updates: bool) -> None:
    flushing, kinds, _, _, overflows, stale = columns[:6]
    flushes, ranks = int(sum(flushing)), len(flushing)
    if 0 < flushes < ranks:
        fix = "give every rank the same number of micro-batches, with step(weight=0) for missing ones"
        raise RuntimeError(f"{flushes} of {ranks} ranks call flush() while the others complete a window: {fix}")
    if len({*kinds} - {0}) > 1:
        raise RuntimeError("weight= was passed on some ranks only: pass it on every rank, or on none")
    if any(stale):
        fix = "call set_requires_gradient_sync(True) on the module before the last backward of every window"
        raise RuntimeError(f"FSDP has not reduced the gradients of this window: {fix}, including flushed ones")
    if updates and len({*overflows}) > 1:
        scaler = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
        why = "the GradScalers of the ranks have different scales, because only some ranks saw an overflow"
        raise RuntimeError(f"{why}: use {scaler}, and unscale_(optimizer) before step")


@torch.no_grad()
def _sum_over_ranks(parameters: Sequence[Tensor], layouts: Sequence[Sequence[float]], group: Group | None) -> None:
    """Sum the gradients of unsharded parameters; a missing one counts as 0, unless it is missing on all ranks."""
    sent = []
    for parameter, layout in zip(parameters, layouts, strict=True):
        kinds = {int(kind) for kind in layout if kind}
        if isinstance(parameter, DTensor) or not kinds:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if kinds == {1} or len(kinds) > 1:
            gradient = gradient.to_dense().contiguous()  # strides may differ between ranks
        else:
            gradient = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(max(kinds) - 1)
        sent.append((parameter, gradient, torch.distributed.all_reduce(gradient, group=group, async_op=True)))
    for parameter, gradient, work in sent:
        work.wait()
        parameter.grad = gradient
