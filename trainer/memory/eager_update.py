"""Speculative updates: offloaded weights are updated during the last backward, and restored if that was wrong.

A host thread updates each parameter as soon as its gradient is complete, as if nothing were clipped or skipped, and
keeps a copy of the old values. When the norm of all gradients shows that the update was wrong, every bit is restored.
The result has the same bits either way. (Speculation, then validation: SuperOffload, Lian et al., 2025, arXiv
2509.21271, whose rollback recomputes the old values, which rounds. ZeRO-Offload's delayed update changes the result.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.memory.sharding import local_shard
from trainer.system.machine import available_bytes

CHUNK_ELEMENTS = 2**18  # min elements per update: with fewer, Python would take most of the time


class EagerOptimizerUpdate:
    """Updates parameters of ``optimizer``, whose weights are in host memory, before its step in a separate thread.

    The update of a parameter must not read other parameters; this holds for every ``optim.name``. Updates ahead start
    with the second step, when all other memory is allocated, and use at most this rank's share (of ``world_size``) of
    half of the host's free memory. After a clipped or skipped step they pause until a step that was neither. fp16
    gradients arrive scaled by ``scaler``. Nothing is updated ahead unless it ``pays``: if the host itself computes, no
    core is idle.
    """

    def __init__(self, optimizer: Optimizer, scaler: Any = None, world_size: int = 1, pays: bool = True) -> None:
        self.optimizer, self.scaler, self.world_size, self.pays = optimizer, scaler, world_size, pays
        self.hand = copy(optimizer)  # the same settings; gets a few parameters at a time, and runs no hooks
        self.group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.thread = ThreadPoolExecutor(1, "update ahead")  # starts with the first update
        self.has_stepped, self.was_right, self.is_open = False, True, False
        self.room: float | None = None  # bytes left for copies; ``None`` before the first
        self.copies: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)  # old values; memory is reused in each step
        self.before: dict[Tensor, dict[str, Any] | None] = {}  # old state of updated parameters; ``None``: no state
        self.norms: dict[Tensor, Tensor] = {}  # norms of the gradients that were used
        self.taken: set[Tensor] = set()
        self.next: list[tuple[Tensor, Tensor]] = []
        self.updates: list[Future[None]] = []

    def begin_last_backward(self) -> None:
        """Start updates ahead: gradients that arrive from now on are complete."""
        self.is_open = self.pays and self.has_stepped and self.was_right

    def take(self, parameter: Tensor, gradient: Tensor, arrived: Callable[[], object] | None = None) -> None:
        """Schedule the update of ``parameter`` and return; ``arrived`` blocks until ``gradient`` is available."""
        if not self.is_open:
            return
        self.taken.add(parameter)
        self.next.append((parameter, gradient))
        if sum(p.numel() for p, _ in self.next) >= CHUNK_ELEMENTS:
            self.submit(self.next, arrived)
            self.next = []

    def submit(self, gradients: list[tuple[Tensor, Tensor]], arrived: Callable[[], object] | None) -> None:
        self.updates.append(self.thread.submit(self.update, gradients, arrived))

    def stop(self) -> None:
        """Wait for updates that have started; leave the others to the optimizer."""
        for update in self.join():
            update.result()

    def join(self) -> list[Future[None]]:
        """Stop accepting updates, and wait for those that have started, even if they fail."""
        self.is_open, self.next = False, []
        wait(self.updates)
        ended, self.updates = self.updates, []
        return ended

    def commit_or_undo(self, norm: Tensor, largest: float | None) -> bool:
        """Return whether the updates stand, because ``norm`` does not lead to a skip or to clipping to ``largest``.

        Otherwise all updates are undone. Gradients of updates that stand are removed, so that the optimizer skips them.
        """
        self.was_right = self.needs_no_clipping(norm, largest)
        if not self.was_right:
            self.undo()
        for parameter in self.before:
            parameter.grad = None
        return self.was_right

    def needs_no_clipping(self, norm: Tensor, largest: float | None) -> bool:
        """Return whether the clipping factor, computed as in ``clip_grads_with_norm_``, is 1 and changes no bit."""
        factor = norm.isfinite() if largest is None else torch.clamp(largest / (norm + 1e-6), max=1.0)
        return factor.item() == 1

    @torch.no_grad()
    def undo(self) -> None:
        """Restore everything that was overwritten since the last step, even if updates failed."""
        self.join()
        for parameter, before in self.before.items():
            for name, value in _tensors(parameter, before or {}).items():
                value.copy_(self.copies[parameter][name])
            if before is None:
                self.optimizer.state.pop(parameter, None)
            else:
                self.optimizer.state[parameter] = before
        self.before.clear()
        self.norms.clear()
        self.taken.clear()

    def commit(self) -> None:
        """Make the updates final: the optimizer has taken its step."""
        self.before.clear()
        self.has_stepped = True

    @torch.no_grad()
    def update(self, gradients: list[tuple[Tensor, Tensor]], arrived: Callable[[], object] | None) -> None:
        """Update parameters in the thread, instead of the optimizer."""
        if arrived is not None:
            arrived()
        members: dict[int, list[Tensor]] = defaultdict(list)
        for parameter, gradient in gradients:
            if self.is_open and self._save_old_values(parameter):
                parameter.grad = gradient
                if self.scaler is not None:  # as ``GradScaler.unscale_`` computes it
                    parameter.grad = gradient * self.scaler._scale.double().reciprocal().float()
                self.norms[parameter] = torch.linalg.vector_norm(local_shard(parameter.grad))
                members[self.group_of[parameter]].append(parameter)
        groups = self.optimizer.param_groups  # with the current learning rates
        self.hand.state = self.optimizer.state
        self.hand.param_groups = [{**groups[number], "params": found} for number, found in members.items()]
        self.hand.step()
        for parameter, _ in gradients:
            parameter.grad = None

    def _save_old_values(self, parameter: Tensor) -> bool:
        state = self.optimizer.state.get(parameter)
        values, copies = _tensors(parameter, state or {}), self.copies[parameter]
        fresh = {name: value for name, value in values.items() if name not in copies}
        if self.room is None:
            self.room = available_bytes() / 2 / self.world_size
        needed = sum(value.nbytes for value in fresh.values())
        if needed > self.room:
            return False
        self.room -= needed
        copies.update({name: torch.empty_like(value) for name, value in fresh.items()})
        for name, value in values.items():
            copies[name].copy_(value)
        self.before[parameter] = None if state is None else dict(state)
        return True


def _tensors(parameter: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
    named = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: local_shard(value.detach()) for name, value in {"": parameter, **named}.items()}
