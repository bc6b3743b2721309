"""The same training steps seen by torch's own ``MemTracker``, which knows fake tensors, and by our tracer.

``MemTracker`` follows tensors and nothing else, on the CPU here. So the models take no path that a GPU has to itself,
and what our tracer knows of kernels' insides is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torchvision.models import VisionTransformer

from trainer.planner.events import Event
from trainer.planner.gpus import gpu_named
from trainer.planner.target import Target
from trainer.planner.trace import tracing
from trainer.system.children import in_child
from trainer.weights.streaming import allocate, on_meta

TARGET = Target(gpu_named("a100-80gb"))
CLASSES, WORDS, LENGTH, WIDTH = 10, 1000, 96, 128


class Block(nn.Module):
    """A transformer's, with its attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.in_projection, self.out_projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.in_projection(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-1, -2) / 32**0.5).softmax(-1)
        x = x + self.out_projection((weights @ value).transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """A classifier of sentences."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.run = partial(checkpoint, use_reentrant=False) if checkpointed else _call

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x.mean(1))


class Vision(nn.Module):
    """torchvision's transformer."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.inner = VisionTransformer(32, 4, 3, 4, WIDTH, 4 * WIDTH, num_classes=CLASSES)
        if checkpointed:
            for block in self.inner.encoder.layers:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.inner(pixels)


def _call(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def steps(module: nn.Module, device: str, after: Callable[[], None] = lambda: None) -> None:
    """Two of AdamW; ``after`` is called after each."""
    allocate(module, torch.device(device))
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    for _ in range(2):
        inputs = (
            torch.zeros(32, LENGTH, dtype=torch.long) if isinstance(module, Transformer) else torch.zeros(32, 3, 32, 32)
        )
        with sdpa_kernel(SDPBackend.MATH):  # the others differ from those of a CPU
            loss = cross_entropy(module(inputs.to(device)), torch.zeros(32, dtype=torch.long).to(device))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def by_memtracker(train: Callable[..., None]) -> int:
    """The most bytes at once."""
    with FakeTensorMode(allow_non_fake_inputs=True), MemTracker() as tracker:
        train("cpu", after=tracker.reset_mod_stats)
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return int(peak["Total"])


def by_tracer(train: Callable[..., None]) -> int:
    """The most bytes at once on the GPU, in tensors."""
    with tracing(TARGET) as tracer:
        train("cuda:0")
    return peak_of_tensors(tracer.trace.events)


def peak_of_tensors(events: Iterable[Event]) -> int:
    """The most bytes that were asked for, but for what kernels have inside."""
    sizes: dict[int, int] = {}
    now = peak = 0
    for event in events:
        if event.bytes:
            sizes[event.id] = 0 if event.op.endswith("(inside)") or "workspace" in event.op else event.bytes
            now += sizes[event.id]
        else:
            now -= sizes.pop(event.id)
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("make", [Transformer, Vision])
def test_the_same_peak(make: Any, checkpointed: bool) -> None:
    train = partial(steps, on_meta(partial(make, checkpointed)))
    oracle, ours = in_child(lambda: by_memtracker(train)), in_child(lambda: by_tracer(train))
    assert ours == pytest.approx(oracle, rel=0.0001)
