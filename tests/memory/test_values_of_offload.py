"""What offloading computes on a GPU, bit for bit, on a CPU: its branch for CUDA, with streams that do all at once.

On a CPU the trainer takes other branches, and ``tests/test_races.py``, which takes these, computes nothing. Here
chunks, the first and later micro-steps, types and strides are compared with the plain result.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainer.memory import activation_offload, optimizer_offload
from trainer.planner.fake_patches import FakeEvent, FakeStream, OnStream

CPU = torch.device("cpu")


def unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without a GPU no memory can be pinned."""
    return lambda *args, pin_memory=False, **options: make(*args, **options)


@pytest.fixture
def streams(monkeypatch):
    """Streams without a GPU, small chunks, and every tensor large enough to be moved."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", OnStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream.current)
    monkeypatch.setattr(activation_offload, "_stream", lambda device: FakeStream())
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 16)
    monkeypatch.setattr(optimizer_offload, "CHUNK", 37)
    for name in ("empty", "empty_like", "zeros"):
        monkeypatch.setattr(torch, name, unpinned(getattr(torch, name)))


class Branching(nn.Module):
    """A convolution, linear layers, and a head that only some micro-batches reach."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(180, 11), nn.LayerNorm(11))
        self.head = nn.Linear(11, 7)

    def forward(self, x: Tensor, to_the_end: bool) -> Tensor:
        x = self.stem(x)
        return self.head(x) if to_the_end else x


def trained(dtype: torch.dtype, carried: bool) -> list[Tensor]:
    """The weights after three steps of three micro-steps."""
    torch.manual_seed(0)
    module = Branching()
    masters: dict[nn.Parameter, Tensor] = {p: p.detach().clone().requires_grad_() for p in module.parameters()}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    optimizer = torch.optim.AdamW(list(masters.values()), lr=0.1, fused=True)
    sync = optimizer_offload.HostGradients(masters, CPU, optimizer, 1)
    if carried:
        sync.carrier = optimizer_offload.Carrier(CPU, torch.float32)
    for step in range(3):
        for micro in range(3):
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(micro)).to(dtype)
            module(x, to_the_end=micro == step).float().square().sum().backward()
        sync.after()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_that_are_carried_in_chunks(dtype, streams):
    assert all(p.numel() % optimizer_offload.CHUNK for p in Branching().parameters())  # the last chunk is short
    for plain, carried in zip(trained(dtype, False), trained(dtype, True), strict=True):
        assert plain.dtype == dtype
        assert torch.equal(plain, carried)


def test_gradients_with_other_strides(streams):
    carrier, home = optimizer_offload.Carrier(CPU, torch.float32), torch.empty(20, 10)
    gradient = torch.randn(10, 20).t()
    for micro in range(3):
        carrier.carry(gradient, home, adds=micro > 0)
    carrier.wait()
    assert torch.equal(home, gradient + gradient + gradient)


class Packed(nn.Module):
    """Attention whose queries, keys and values are slices of one tensor, with gaps between their elements."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, dtype=dtype)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 16)
        return self.block(y) * y.exp()


def gradients(dtype: torch.dtype, offloaded: bool) -> list[Tensor]:
    """Of two micro-steps."""
    torch.manual_seed(0)
    module = Packed(dtype)
    if offloaded:
        activation_offload.offload_activations(module, CPU)
    for _ in range(2):
        module(torch.randn(2, 6, 16, dtype=dtype)).sum().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_activations_that_were_away(dtype, streams):
    plain = gradients(dtype, False)
    offloaded = gradients(dtype, True)
    assert len(plain) == len(list(Packed(dtype).parameters()))
    assert all(map(torch.equal, plain, offloaded))
