"""NF4 on a GPU: the codes and the weights of the CPU, and memory of one whole weight at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.weights.nf4 import AT_ONCE, GROUP, NF4Linear, dequantise, quantise


@pytest.mark.parametrize("shape", [(66, 131), (512, 4096), (2 * AT_ONCE, GROUP + 64)])
def test_codes_and_weights_are_those_of_the_cpu_bit_for_bit(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 50
    codes = quantise(weight)
    assert torch.equal(quantise(weight.cuda()).cpu(), codes)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(dequantise(codes.cuda(), shape, dtype).cpu(), dequantise(codes, shape, dtype))


def test_a_pass_needs_one_whole_weight_at_a_time():
    with torch.device("cuda"):
        layers = nn.Sequential(*(NF4Linear(nn.Linear(4096, 4096, bias=False)) for _ in range(8)))
        inputs = torch.randn(16, 4096, dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layers(inputs).sum().backward()
    whole = 2 * 4096**2
    assert torch.cuda.max_memory_allocated() - before < 2.5 * whole  # the weight, and some of it in fp32
