"""Packed texts on a GPU: torch's kernel of attention for them, one call for each length, and BigBird as a whole."""

from __future__ import annotations

import pytest
import torch
from helpers.problems import Problem, collate, make_model, make_samples
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


@pytest.mark.parametrize("training", [True, False])
def test_bigbird_without_padding_is_bigbird_with_it(training: bool) -> None:
    """More tokens in a row than its embeddings have types for; without dropout."""
    model = make_model("bigbird")
    module = model.build().cuda().train(training)
    batch = collate(make_samples(Problem("bigbird", 8, 8, 8)))
    packed, found = model.packed(batch), []
    assert packed["input_ids"].shape[1] > module.config.max_position_embeddings
    for inputs in (batch, packed):
        module.zero_grad()
        here = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        (loss,) = model.losses(module, here)
        loss.total.backward()
        found.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
    assert (found[1] - found[0]).norm() <= 1e-4 * found[0].norm()
