"""Offloaded weights are updated while the last backward goes on, and the old ones put back if that was too early.

The gradient of a parameter is complete long before the norm of all of them is known. A thread of the host updates the
parameter at once, as if nothing were clipped or skipped, and keeps what it has overwritten. The norm then says whether
that stands; if not, every bit is put back and the step goes on as if nothing had been done. The same bits either way.
(Speculation, then validation: SuperOffload, Lian et al., 2025, arXiv 2509.21271. Its rollback computes the old values
back, which rounds; here they are copied. ZeRO-Offload's delayed update is another optimizer: it is not done.)
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

from trainer.memory.sharding import local
from trainer.system.machine import available_bytes

AT_ONCE = 2**18  # elements updated at once: with fewer, Python would take most of the time


class UpdateAhead:
    """Updates parameters of ``optimizer`` before it is asked to, in a thread of its own.

    Any optimizer will do whose update of a parameter reads no other one, as all of ``optim.name`` are. It begins with
    the second step, when all else has its memory, and takes at most its share of half of what the host has left. From
    a step that was clipped or skipped on it waits for one that was not: who clips in every step pays for one mistake.

    Args:
        optimizer: over weights in host memory.
        scaler: of fp16 gradients, which are as they arrived: scaled.
        world_size: ranks, which may share the host.
        pays: whether to do it at all: where the host itself computes, no core is idle.
    """

    def __init__(self, optimizer: Optimizer, scaler: Any = None, world_size: int = 1, pays: bool = True) -> None:
        self.optimizer, self.scaler, self.world_size, self.pays = optimizer, scaler, world_size, pays
        self.hand = copy(optimizer)  # of the same settings, for it is shown a few parameters at a time, and no hooks
        self.group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.thread = ThreadPoolExecutor(1, "update ahead")  # which starts with the first update
        self.has_stepped, self.was_right, self.is_open = False, True, False
        self.room: float | None = None  # bytes that are left for copies; ``None`` before the first
        self.copies: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)  # memory that is kept from step to step
        self.before: dict[Tensor, dict[str, Any] | None] = {}  # the state of what was updated; ``None`` had none
        self.norms: dict[Tensor, Tensor] = {}  # of the gradients that were used
        self.taken: set[Tensor] = set()
        self.next: list[tuple[Tensor, Tensor]] = []
        self.updates: list[Future[None]] = []

    def open(self) -> None:
        """Gradients that arrive from now on are those of the whole batch."""
        self.is_open = self.pays and self.has_stepped and self.was_right

    def take(self, parameter: Tensor, gradient: Tensor, arrived: Callable[[], object] | None = None) -> None:
        """Update ``parameter`` as soon as ``arrived`` returns, which waits for ``gradient``; this returns at once."""
        if not self.is_open:
            return
        self.taken.add(parameter)
        self.next.append((parameter, gradient))
        if sum(p.numel() for p, _ in self.next) >= AT_ONCE:
            self.submit(self.next, arrived)
            self.next = []

    def submit(self, gradients: list[tuple[Tensor, Tensor]], arrived: Callable[[], object] | None) -> None:
        self.updates.append(self.thread.submit(self.update, gradients, arrived))

    def stop(self) -> None:
        """Wait for the update that has begun; those that have not are left to the optimizer."""
        for update in self.join():
            update.result()

    def join(self) -> list[Future[None]]:
        """Begin nothing any more, and wait for what has begun, however it ends."""
        self.is_open, self.next = False, []
        wait(self.updates)
        ended, self.updates = self.updates, []
        return ended

    def settle(self, norm: Tensor, largest: float | None) -> bool:
        """Whether gradients of this ``norm`` are neither clipped to ``largest`` nor skipped; else undo all. If so, the
        optimizer finds no gradient where it has nothing left to do."""
        self.was_right = self.is_right(norm, largest)
        if not self.was_right:
            self.undo()
        for parameter in self.before:
            parameter.grad = None
        return self.was_right

    def is_right(self, norm: Tensor, largest: float | None) -> bool:
        """As ``clip_grads_with_norm_`` computes it: a factor of 1 changes no bit."""
        factor = norm.isfinite() if largest is None else torch.clamp(largest / (norm + 1e-6), max=1.0)
        return factor.item() == 1

    @torch.no_grad()
    def undo(self) -> None:
        """Put back all that was overwritten since the last step, however the updates have ended."""
        self.join()
        for parameter, before in self.before.items():
            for name, value in _tensors(parameter, before or {}).items():
                value.copy_(self.copies[parameter][name])
            state = self.optimizer.state.get(parameter)
            if state is not None and before is not None:
                state.clear()
                state.update(before)
            elif state is not None:
                del self.optimizer.state[parameter]
        self.before.clear()
        self.norms.clear()
        self.taken.clear()

    def commit(self) -> None:
        """The optimizer has taken its step: there is nothing left to undo."""
        self.before.clear()
        self.has_stepped = True

    @torch.no_grad()
    def update(self, gradients: list[tuple[Tensor, Tensor]], arrived: Callable[[], object] | None) -> None:
        """What the thread does, in the place of the optimizer."""
        if arrived is not None:
            arrived()
        members: dict[int, list[Tensor]] = defaultdict(list)
        for parameter, gradient in gradients:
            if self.is_open and self._keep(parameter):
                parameter.grad = gradient
                if self.scaler is not None:  # as ``GradScaler.unscale_`` computes it
                    parameter.grad = gradient * self.scaler._scale.double().reciprocal().float()
                self.norms[parameter] = torch.linalg.vector_norm(local(parameter.grad))
                members[self.group_of[parameter]].append(parameter)
        groups = self.optimizer.param_groups  # with what the schedule says now
        self.hand.state = self.optimizer.state
        self.hand.param_groups = [{**groups[number], "params": found} for number, found in members.items()]
        self.hand.step()
        for parameter, _ in gradients:
            parameter.grad = None

    def _keep(self, parameter: Tensor) -> bool:
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
    """A parameter and the tensors of its state; this rank's shards."""
    named = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: local(value.detach()) for name, value in {"": parameter, **named}.items()}
