"""The loss in chunks on a GPU: its kernels give what torch's operations give, in memory of one chunk."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.models import chunked_loss as token_loss
from trainer.models.chunked_loss import FUSED, LogitTransform, chunked_loss

TOKENS, WORDS, WIDTH = 1500, 50_257, 256  # words that no vector of the kernels divides
TYPES = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def found(dtype, transform, fused, monkeypatch):
    """The loss, its gradients, and the most bytes besides."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, WORDS, bias=False, device="cuda", dtype=dtype)
    hidden = torch.randn(TOKENS, WIDTH, device="cuda").to(dtype).requires_grad_()
    targets = torch.randint(WORDS, (TOKENS,), device="cuda")
    with monkeypatch.context() as context:
        if not fused:
            context.setattr(token_loss, "has_kernels", lambda tensor: False)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = chunked_loss(hidden, head, targets, transform)
        gradients = torch.autograd.grad(0.3 * loss, [hidden, head.weight])
        most = torch.cuda.max_memory_allocated() - before
    return [loss.detach(), *gradients], most


@pytest.mark.skipif(torch.version.hip is not None, reason="for NVIDIA GPUs")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5), LogitTransform(4.0, 30.0)])
def test_kernels_give_what_the_operations_give(dtype, transform, monkeypatch):
    ours, most = found(dtype, transform, True, monkeypatch)
    theirs, _ = found(dtype, transform, False, monkeypatch)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other.double()).norm() <= TYPES[dtype] * other.double().norm()
    gradients = sum(gradient.nbytes for gradient in ours)
    assert most < 1.5 * FUSED + 2 * gradients + 2**26  # and cuBLAS's workspace
