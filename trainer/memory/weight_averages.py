"""``optim.ema``: an exponential moving average of the weights, for evaluations and for the model that is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.memory.sharding import local
from trainer.recipe import Optim

POWER = 2 / 3  # of timm's warm-up (``ModelEmaV3``): the n-th update, from 0, decays by at most 1 - (1 + n) ** -POWER


class WeightAverages:
    """The averages of the ``trained`` weights, in fp32 or wider: beside them, so of the shards that this rank has.

    They begin as the weights are, and go on in the optimizer's steps (Polyak and Juditsky 1992), computed as
    ``torch.optim.swa_utils`` does. Buffers are those of the model.

    Args:
        trained: what the optimizer updates; masters in host memory where it is offloaded.
        optim: has the decay.
        sent: called when the weights have been exchanged; brings masters to the device.
    """

    def __init__(self, trained: Sequence[Tensor], optim: Optim, sent: Callable[[], None]) -> None:
        self.trained, self.optim, self.sent = list(trained), optim, sent
        self.values: dict[Tensor, Tensor] = {}
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """The averages are the weights."""
        for trained in self.trained:
            weights = local(trained.detach())
            self.values[trained] = weights.to(torch.promote_types(weights.dtype, torch.float32), copy=True)

    def decay(self, updates: int) -> float:
        """Of the update that comes after so many."""
        assert self.optim.ema is not None
        return min(self.optim.ema, 1 - (1 + updates) ** -POWER) if self.optim.ema_warmup else self.optim.ema

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """A step of the optimizer was taken, after so many others."""
        averages, share = list(self.values.values()), 1 - self.decay(updates)
        weights = [local(trained.detach()) for trained in self.trained]
        if all(average.dtype == weight.dtype for average, weight in zip(averages, weights, strict=True)):
            torch._foreach_lerp_(averages, weights, share)
            return
        for average, weight in zip(averages, weights, strict=True):  # one copy in fp32 at a time
            average.lerp_(weight.to(average.dtype), share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averages for weights inside of the context, and what it had when that ends, bit for bit."""
        kept = self._exchange({})
        try:
            yield
        finally:
            self._exchange(kept)

    @torch.no_grad()
    def _exchange(self, kept: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Put averages in the place of weights, or back; what cannot wait in the averages' memory is ``kept``."""
        found = dict[Tensor, Tensor]()
        for trained, average in self.values.items():
            weights = local(trained.detach())
            before = weights.clone()
            weights.copy_(kept.get(trained, average))
            if before.dtype == average.dtype:
                average.copy_(before)
            elif trained not in kept:  # weights of half precision, which the averages know better
                found[trained] = before
        self.sent()
        return found
