"""Attention of packed texts on a GPU: torch's kernel for them, and one call for each length."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trainer.models import unpadded
from trainer.models.unpadded import Lengths, attend

LENGTHS = [130, 64, 64, 7, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [False, True])
def test_each_text_attends_to_itself(dtype: torch.dtype, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, as in fp64 text by text, with and without ``varlen_attn``."""
    torch.manual_seed(0)
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    tensors = [torch.randn(sum(LENGTHS), 128, device="cuda", dtype=torch.float64) for _ in range(3)]
    if first:
        tensors[0] = tensors[0][ends[:-1].long()]
    expected = computed(tensors, ends, first)
    has_kernel = torch.cuda.get_device_capability() >= (8, 0) and dtype != torch.float32
    assert unpadded._has_varlen(tensors[0].to(dtype)) == has_kernel
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    for allowed in (True, False):
        if not allowed:
            monkeypatch.setattr(unpadded, "_has_varlen", lambda query: False)
        found = computed([tensor.to(dtype) for tensor in tensors], ends, first)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


def computed(tensors: list[torch.Tensor], ends: torch.Tensor, first: bool) -> list[torch.Tensor]:
    """The result and the gradients of its sum of squares; in fp64 by torch alone."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in tensors)
    if query.dtype != torch.float64:
        found = attend(query, key, value, 32, Lengths(LENGTHS), ends, 0.0)
    else:
        asked = query.split([1] * len(LENGTHS) if first else LENGTHS)
        parts = zip(asked, key.split(LENGTHS), value.split(LENGTHS), strict=True)
        heads = [[part.unflatten(-1, (-1, 32)).transpose(0, 1) for part in text] for text in parts]
        found = torch.cat([scaled_dot_product_attention(*text).transpose(0, 1).flatten(1) for text in heads])
    found.square().sum().backward()
    return [found.detach(), *(tensor.grad for tensor in (query, key, value) if tensor.grad is not None)]
