"""NF4 on a GPU: the codes and the weights of the CPU, and memory of one whole weight at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.weights import nf4
from trainer.weights.fused import has_kernels
from trainer.weights.nf4 import CHUNK_ROWS, WEIGHTS_PER_ROW, NF4Linear, dequantise, quantise

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", [(66, 131), (33, 777), (512, 4096), (2 * CHUNK_ROWS, WEIGHTS_PER_ROW + 64)])
def test_codes_and_weights_are_those_of_the_cpu_bit_for_bit(shape, fused, monkeypatch):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 50
    codes = quantise(weight)
    assert torch.equal(quantise(weight.cuda()).cpu(), codes)
    assert has_kernels(codes.cuda()) == (torch.version.hip is None)
    if not fused:
        monkeypatch.setattr(nf4, "has_kernels", lambda codes: False)
    for dtype in TYPES:
        expected = dequantise(codes, shape, dtype)
        assert torch.equal(dequantise(codes.cuda(), shape, dtype).cpu(), expected)
        for cast in (torch.bfloat16, torch.float32):  # as torch 2.11's FSDP passes codes
            assert torch.equal(dequantise(codes.cuda().to(cast), shape, dtype).cpu(), expected)


@pytest.mark.skipif(torch.version.hip is not None, reason="for NVIDIA GPUs")
def test_a_weight_is_one_launch():
    codes = quantise(torch.randn(1024, 4096, device="cuda"))
    dequantise(codes, (1024, 4096), torch.bfloat16)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        dequantise(codes, (1024, 4096), torch.bfloat16)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


@pytest.mark.skipif(torch.version.hip is not None, reason="for NVIDIA GPUs")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_weights_have_the_same_bits(backend):
    codes = quantise(torch.randn(66, 131, generator=torch.Generator().manual_seed(0)))
    dequantise(codes.cuda(), (66, 131), torch.bfloat16)
    compiled = torch.compile(lambda codes: dequantise(codes, (66, 131), torch.bfloat16), backend=backend)
    assert torch.equal(compiled(codes.cuda()).cpu(), dequantise(codes, (66, 131), torch.bfloat16))


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
