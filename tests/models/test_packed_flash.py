"""Attention of packed texts on GPUs: which operator computes it, in how many operations, and with which arguments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers.kernels import Dispatches
from helpers.rounding import ROUNDING
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.fakegpu.tracer import tracing
from trainer.models import padding_free
from trainer.models.padding_free import FULL, AttentionPattern, SequenceLengths, varlen_attention
from trainer.system.child_jobs import run_in_child

FLASH = ["_flash_attention_forward.default", "_flash_attention_backward.default"]
LENGTHS = [9, 4, 4, 7, 1]
PATTERNS = {
    "full": FULL,
    "causal": AttentionPattern(causal=True, scale=0.3),
    "causal window": AttentionPattern(causal=True, window=3),
    "window": AttentionPattern(window=3),
}


def operations(gpu: str, dtype: torch.dtype, texts: int, dropout: float, pattern: AttentionPattern = FULL) -> Any:
    """The kernels that a plan names, and the operations of one attention, forward and backward, on a simulated GPU."""
    return run_in_child(partial(_operations, gpu, dtype, texts, dropout, pattern))


def _operations(gpu: str, dtype: torch.dtype, texts: int, dropout: float, pattern: AttentionPattern) -> Any:
    with tracing(Target(gpu_named(gpu))) as tracer:
        tokens = [100 + number for number in range(texts)]
        ends = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32).cuda()
        parts = [torch.randn(sum(tokens), 12, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
        with Dispatches() as noted:
            varlen_attention(*parts, SequenceLengths(tokens), ends, dropout, pattern).sum().backward()
        return list(tracer.trace.attention), noted.names


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["full", "causal", "causal window"])
def test_half_precision_on_an_h200_is_flash_attention_and_never_cudnn(name, dropout):
    kernels, names = operations("h200", torch.bfloat16, 8, dropout, PATTERNS[name])
    assert [one for one in names if "attention" in one] == FLASH
    assert kernels == ["flash over packed texts (bfloat16, heads of 64)"]


ROTATED = (torch.float32, torch.float32, torch.bfloat16)
"""Rotary embeddings leave queries and keys in the type of the residual stream; values come from a linear layer."""


def _rotated() -> tuple[list[str], list[str]]:
    with tracing(Target(gpu_named("h200"))), torch.autocast("cuda", torch.bfloat16), Dispatches() as noted:
        ends = torch.tensor([0, 9, 13], dtype=torch.int32).cuda()
        parts = [torch.randn(13, 2, 64, device="cuda", dtype=dtype, requires_grad=True) for dtype in ROTATED]
        found = varlen_attention(*parts, SequenceLengths([9, 4]), ends, 0.0, PATTERNS["causal"])
        found.sum().backward()
        return noted.names, [str(found.dtype), *(str(part.grad.dtype) for part in parts)]


def test_autocast_lowers_rotated_queries_and_keys_for_flash_attention():
    names, dtypes = run_in_child(_rotated)
    assert [one for one in names if "attention" in one] == FLASH
    assert dtypes == [str(torch.bfloat16), *map(str, ROTATED)]


@pytest.mark.parametrize(("gpu", "dtype"), [("h200", torch.bfloat16), ("h200", torch.float32), ("t4", torch.float16)])
def test_with_dropout_the_number_of_operations_does_not_grow_with_the_number_of_texts(gpu, dtype):
    few, many = (len(operations(gpu, dtype, texts, 0.1)[1]) for texts in (4, 32))
    assert many == few


@pytest.mark.parametrize(
    ("capability", "size", "dropout", "expected"),
    [
        ((9, 0), 256, 0.1, True),
        ((8, 9), 192, 0.1, True),
        ((8, 9), 224, 0.0, False),
        ((8, 9), 256, 0.0, True),
        ((8, 9), 256, 0.1, False),
        ((12, 0), 256, 0.1, False),
        ((7, 5), 64, 0.0, False),
        ((9, 0), 60, 0.0, False),
    ],
)
def test_flash_is_used_for_the_heads_that_the_gpu_has_a_kernel_for(capability, size, dropout, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with torch._subclasses.FakeTensorMode():
        query = torch.empty(8, 2, size, dtype=torch.bfloat16, device="cuda")
    assert padding_free.takes_flash(query, query, dropout) is expected


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An implementation of the operator for CPUs, by whole weights of attention, as its source defines it."""

    def forward(query: Tensor, key: Tensor, value: Tensor, from_: Any, to: Any, *args: Any, **options: Any) -> Any:
        _, max_k, dropout, causal, _ = args
        left, right = options.get("window_size_left", -1), options.get("window_size_right", -1)
        left, right = (-1, 0) if causal and left < 0 else (left, right)
        found = []
        for number in range(len(to) - 1):
            asks, has = slice(*from_[number : number + 2].tolist()), slice(*to[number : number + 2].tolist())
            keys, values = (one[has].repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
            scale = options.get("scale") or query.shape[-1] ** -0.5
            scores = torch.einsum("qhd,khd->hqk", query[asks], keys) * scale
            # Aligned to the last query and the last key, as in flash attention.
            last = scores.shape[2] - scores.shape[1]
            apart = torch.arange(scores.shape[2]) - torch.arange(scores.shape[1])[:, None] - last
            unseen = (apart > right if right >= 0 else apart > max_k) | (-apart > left if left >= 0 else apart < -max_k)
            weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
            found.append(torch.einsum("hqk,khd->qhd", weights, values))
        assert dropout == 0.0
        none = torch.empty(0, dtype=torch.uint64)
        return torch.cat(found), torch.empty(query.shape[1], len(query)), none, none, torch.empty(0)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    monkeypatch.setattr(padding_free, "takes_flash", lambda *args: True)
    yield
    library._destroy()


def problem(first: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    query, key, value = (torch.randn(sum(LENGTHS), heads, 8, dtype=dtype) for heads in (4, 2, 2))
    return [query[ends[:-1].long()] if first else query, key, value], ends


@pytest.mark.parametrize(("name", "first"), [("full", True), *((name, False) for name in PATTERNS)])
def test_flash_is_asked_for_the_attention_that_is_computed_without_it(name, first, flash_on_cpu):
    parts, ends = problem(first)
    expected = padding_free._without_flash(*parts, SequenceLengths(LENGTHS), ends, 0.0, PATTERNS[name])
    found = varlen_attention(*parts, SequenceLengths(LENGTHS), ends, 0.0, PATTERNS[name])
    assert (found - expected).norm() <= ROUNDING * expected.norm()


def test_flash_is_in_one_graph_that_serves_all_lengths(flash_on_cpu):
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def layer(query: Tensor, key: Tensor, value: Tensor, lengths: SequenceLengths, ends: Tensor) -> Tensor:
        return varlen_attention(query * 2, key, value, lengths, ends, 0.0) + 1

    for tokens in ([3, 4], [5, 6, 7], [2, 9, 4, 4], [8, 3, 1], [7] * 6):
        ends = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32)
        parts = [torch.randn(sum(tokens), 2, 8) for _ in range(3)]
        layer(*parts, SequenceLengths(tokens), ends)
    assert counter.frame_count <= 2  # for the first lengths, then for any


@pytest.mark.parametrize(("name", "first"), [("full", True), ("full", False), ("causal", False)])
def test_padded_texts_have_the_result_and_the_gradients_of_single_ones(name, first):
    found = []
    for compute in (padding_free._without_flash, padding_free._padded):
        parts, ends = problem(first)
        leaves = [part.requires_grad_() for part in parts]
        out = compute(*leaves, SequenceLengths(LENGTHS), ends, 0.0, PATTERNS[name])
        out.square().sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= ROUNDING * theirs.norm()
