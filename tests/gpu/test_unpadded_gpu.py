"""Packed texts on a GPU: torch's kernel of attention for them, one call for each length, and BigBird as a whole."""

from __future__ import annotations

import pytest
import torch
from helpers.problems import Problem, collate, make_model, make_samples

from trainer.models import padding_free
from trainer.models.padding_free import FULL, Lengths, Pattern, varlen_attention

LENGTHS = [130, 64, 64, 7, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [False, True])
def test_each_text_attends_to_itself(dtype: torch.dtype, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, as in fp64 text by text, with and without flash attention."""
    torch.manual_seed(0)
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    tensors = [torch.randn(sum(LENGTHS), 4, 32, device="cuda", dtype=torch.float64) for _ in range(3)]
    if first:
        tensors[0] = tensors[0][ends[:-1].long()]
    compared(tensors, ends, dtype, FULL, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 16])
def test_each_document_attends_to_what_is_before(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a head of keys for two of queries."""
    torch.manual_seed(0)
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    tensors = [torch.randn(sum(LENGTHS), heads, 32, device="cuda", dtype=torch.float64) for heads in (4, 2, 2)]
    compared(tensors, ends, dtype, Pattern(causal=True, window=window, scale=0.3), monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_has_the_gradient_of_its_mask_and_the_mask_of_its_seed(dtype: torch.dtype) -> None:
    """With values that are the identity the result shows the mask; the gradient is compared with that of the mask."""
    size, rate = 64, 0.25
    lengths = [size, 16]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    torch.manual_seed(0)
    query, key = (torch.randn(sum(lengths), 2, size, device="cuda", dtype=dtype) for _ in range(2))
    eye = torch.eye(size, device="cuda", dtype=dtype)
    value = torch.cat([eye[:length] for length in lengths])[:, None].expand(-1, 2, -1).contiguous()
    upstream = torch.randn(sum(lengths), 2 * size, device="cuda", dtype=dtype)

    def run(seed: int) -> list[torch.Tensor]:
        torch.cuda.manual_seed(seed)
        leaves = [part.clone().requires_grad_() for part in (query, key, value)]
        out = varlen_attention(*leaves, Lengths(lengths), ends, rate)
        out.backward(upstream)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    found, again, other = run(1), run(1), run(2)
    assert torch.equal(found[0], again[0])
    assert not torch.equal(found[0], other[0])
    begin = 0
    for number, length in enumerate(lengths):
        rows = slice(begin, begin + length)
        begin += length
        parts = [part[rows].double().transpose(0, 1).requires_grad_() for part in (query, key, value)]
        weights = (parts[0] @ parts[1].transpose(1, 2) * size**-0.5).softmax(-1)
        shown = found[0][rows].unflatten(1, (2, size)).transpose(0, 1)[..., :length].double()
        mask = (shown > 0).double() / (1 - rate)
        out = (weights * mask) @ parts[2]
        out.backward(upstream[rows].unflatten(1, (2, size)).transpose(0, 1).double())
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        assert abs(mask.count_nonzero().item() / mask.numel() - (1 - rate)) < 0.05
        assert (shown - (weights * mask).detach()).norm() <= tolerance * shown.norm(), number
        for ours, part in zip(found[1:], parts, strict=True):
            theirs = part.grad.transpose(0, 1)
            assert (ours[rows].double() - theirs).norm() <= tolerance * theirs.norm(), number


def compared(
    tensors: list[torch.Tensor],
    ends: torch.Tensor,
    dtype: torch.dtype,
    pattern: Pattern,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = computed(tensors, ends, pattern)
    has_kernel = torch.cuda.get_device_capability() >= (8, 0) and dtype != torch.float32
    assert padding_free.takes_flash(tensors[0].to(dtype), tensors[2].to(dtype), 0.0, pattern) == has_kernel
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    for allowed in (True, False):
        if not allowed:
            monkeypatch.setattr(padding_free, "takes_flash", lambda *args: False)
        found = computed([tensor.to(dtype) for tensor in tensors], ends, pattern)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


def computed(tensors: list[torch.Tensor], ends: torch.Tensor, pattern: Pattern) -> list[torch.Tensor]:
    """The result and the gradients of its sum of squares; in fp64 by whole weights of attention."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in tensors)
    if query.dtype != torch.float64:
        found = varlen_attention(query, key, value, Lengths(LENGTHS), ends, 0.0, pattern)
    else:
        asked, parts = query.split([1] * len(LENGTHS) if len(query) == len(LENGTHS) else LENGTHS), []
        for own, *others in zip(asked, key.split(LENGTHS), value.split(LENGTHS), strict=True):
            keys, values = (one.repeat_interleave(own.shape[1] // one.shape[1], 1) for one in others)
            scores = torch.einsum("qhd,khd->hqk", own, keys) * (pattern.scale or 32**-0.5)
            if (mask := pattern.mask(len(keys), scores.device)) is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1))
        found = torch.cat(parts)
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
