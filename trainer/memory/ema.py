"""``optim.ema``: an exponential moving average of the weights, for evaluations and the saved model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.memory.sharding import local_shard
from trainer.recipe import Optim

POWER = 2 / 3  # warm-up as in timm (``ModelEmaV3``): the decay of update n, from 0, is at most 1 - (1 + n) ** -POWER


class WeightEMA:
    """The averages of the ``trained`` weights, in fp32 or wider, on the same device: of this rank's shards if sharded.

    They start as copies of the weights and are updated after each optimizer step (Polyak and Juditsky 1992), as in
    ``torch.optim.swa_utils``. Buffers are not averaged. ``trained`` has the tensors that the optimizer updates: masters
    in host memory if offloaded. ``sent`` is called after an exchange with the averages, to copy masters to the device.
    """

    def __init__(self, trained: Sequence[Tensor], optim: Optim, sent: Callable[[], None]) -> None:
        self.trained, self.optim, self.sent = list(trained), optim, sent
        self.values: dict[Tensor, Tensor] = {}
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        for trained in self.trained:
            weights = local_shard(trained.detach())
            self.values[trained] = weights.to(torch.promote_types(weights.dtype, torch.float32), copy=True)

    def decay(self, updates: int) -> float:
        """Return the decay of the next update, after ``updates`` updates."""
        assert self.optim.ema is not None
        return min(self.optim.ema, 1 - (1 + updates) ** -POWER) if self.optim.ema_warmup else self.optim.ema

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Update the averages after an optimizer step that followed ``updates`` other steps."""
        averages, share = list(self.values.values()), 1 - self.decay(updates)
        weights = [local_shard(trained.detach()) for trained in self.trained]
        pairs = list(zip(averages, weights, strict=True))
        if all(average.dtype == weight.dtype for average, weight in pairs):
            torch._foreach_lerp_(averages, weights, share)
            return
        for average, weight in pairs:  # only one fp32 copy at a time
            average.lerp_(weight.to(average.dtype), share)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the averages as weights in this context; afterwards restore the weights bit for bit."""
        kept = self._swap({})
        try:
            yield
        finally:
            self._swap(kept)

    @torch.no_grad()
    def _swap(self, kept: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Exchange weights and averages; return half-precision weights, which are ``kept`` for the exchange back."""
        found = dict[Tensor, Tensor]()
        for trained, average in self.values.items():
            weights = local_shard(trained.detach())
            before = weights.clone()
            weights.copy_(kept.get(trained, average))
            if before.dtype == average.dtype:
                average.copy_(before)
            elif trained not in kept:  # half-precision weights stay aside, because fp32 averages must not be rounded
                found[trained] = before
        self.sent()
        return found
