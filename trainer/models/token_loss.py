"""The loss of a language model, computed within its forward: there all weights are, however the ranks hold them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from trainer.values import IGNORED_LABEL


def give_loss(module: nn.Module) -> None:
    """Let ``module``, a causal language model of transformers, return the loss where its forward gets labels.

    Only its class changes: parameters and their names stay, and without labels it computes what it did.
    """
    module.__class__ = _with_loss(type(module))  # type: ignore[arg-type]


@cache
def _with_loss(kind: type[nn.Module]) -> type[nn.Module]:
    plain: Callable[..., Any] = kind.forward

    @wraps(plain)
    def forward(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return plain(self, *args, **kwargs)
        return token_loss(plain(self, *args, **kwargs).logits, labels)

    # Of the same name: transformers writes it to config.json, and finds what may not be split by it.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of every next token, summed, in at least fp32; a scalar.

    Args:
        logits: shape ``(n, length, words)``.
        labels: int64, shape ``(n, length)``: position t predicts label t + 1, -100 is not to be predicted.
    """
    following = pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL).flatten()
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return cross_entropy(logits.flatten(0, 1), following, ignore_index=IGNORED_LABEL, reduction="sum")
