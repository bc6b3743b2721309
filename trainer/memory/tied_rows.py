"""The gradient of an embedding tied to the head: copied to host memory in rows, never whole on a device.

Autograd would keep the head's gradient, as large as its weight, until that of the embedding is ready. The chunked loss
computes it in rows, so each chunk can be copied at once. The embedding's gradient is nonzero only in the rows of its
tokens. Both are summed in fp32; autograd would sum in the dtype of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

from trainer.memory.optimizer_offload import HostGradientSync, StreamedGradientSync


def offload_tied_gradient_by_rows(module: nn.Module, sync: HostGradientSync) -> None:
    """Let ``sync`` take the gradient of a tied embedding of ``module`` in rows, if its loss is computed in chunks.

    No-op for shards of several ranks, which FSDP sums whole, and for half-precision sums, which round after each row.
    """
    whole = (sync.sharded and sync.world_size > 1) or sync.pieces[0].itemsize == 2
    if getattr(module, "logit_transform", None) is None or whole:
        return
    words, head = module.get_input_embeddings(), module.get_output_embeddings()  # type: ignore[operator]
    plain = type(words) is nn.Embedding and words.max_norm is None and not words.scale_grad_by_freq
    if plain and type(head) is nn.Linear and head.weight is words.weight and head.weight in sync.accumulators:
        rows = TiedEmbeddingGradient(sync, head.weight)
        head.take_rows = rows.add_head_rows  # type: ignore[assignment]
        words.forward = lambda input: _Words.apply(words.weight, input, words.padding_idx, rows)
        sync.tied = rows
        if isinstance(sync, StreamedGradientSync):  # FSDP creates no shard for a gradient that it does not see
            sync.shards[head.weight] = shard = head.weight.detach()
            shard._local_tensor = rows.home


class TiedEmbeddingGradient:
    """Rows that are being copied to the host memory of ``sync``."""

    def __init__(self, sync: HostGradientSync, weight: nn.Parameter) -> None:
        self.sync, self.weight, self.home, self.adds = sync, weight, sync.accumulators[weight], False
        self.is_first = False  # whether the next rows are the first of a window
        self.coming: list[tuple[Tensor, Tensor]] = []  # tokens and their gradients, on the host or being copied there
        self.held: list[Tensor] = []  # the sources of these copies

    def add_head_rows(self, start: int, rows: Tensor) -> None:
        """Take rows of the head's gradient, starting at row ``start``. Each backward provides all rows, in order."""
        if start == 0:
            self.flush()
            self.adds = self._begun()
        self.sync.accumulate_on_host(rows, self.home[start : start + len(rows)], self.adds, held=True)

    def add_embedding_rows(self, ids: Tensor, gradient: Tensor) -> None:
        """Take the gradients of the embeddings of tokens, shapes ``(n,)`` and ``(n, width)``."""
        self.is_first |= not self._begun()
        carrier = self.sync.carrier
        self.coming.append((ids, gradient) if carrier is None else (carrier.fetch(ids), carrier.fetch(gradient)))
        self.held += [ids, gradient]

    def _begun(self) -> bool:
        begun = self.weight in self.sync.arrived
        self.sync.arrived.add(self.weight)
        return begun

    def flush(self) -> None:
        """Add the rows that arrived. The device runs a forward while the host waits for the previous micro-step."""
        if self.sync.carrier is not None:
            self.sync.carrier.wait()
        if self.is_first:
            self.home.zero_()
        for ids, gradient in self.coming:
            self.home.index_add_(0, ids, gradient.to(self.home.dtype))
        self.discard()

    def discard(self) -> None:
        self.coming, self.held, self.is_first = [], [], False


class _Words(torch.autograd.Function):
    """An embedding that gives its gradient to :class:`TiedEmbeddingGradient` instead of autograd."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, rows: TiedEmbeddingGradient) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.rows = padding, rows
        return embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (ids,), gradient = ctx.saved_tensors, gradient.flatten(0, -2)
        if ctx.padding is not None:
            gradient = gradient.masked_fill((ids.flatten() == ctx.padding)[:, None], 0)
        ctx.rows.add_embedding_rows(ids.flatten(), gradient)
        return None, None, None, None
