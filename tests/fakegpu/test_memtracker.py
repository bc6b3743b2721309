"""The same training steps seen by torch's own ``MemTracker``, which knows fake tensors, and by our tracer.

``MemTracker`` follows tensors and nothing else, on the CPU here. So the model takes no path that a GPU has to itself,
and what our tracer knows of kernels' insides is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers.tiny import target_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torchvision.models import VisionTransformer

from trainer.fakegpu.tracer import tracing
from trainer.system.child_jobs import run_in_child
from trainer.weights.streaming import allocate, on_meta

CLASSES, WORDS, WIDTH = 10, 200, 64


class Pictured(nn.Module):
    """torchvision's transformer on pictures that are looked up by the number of a word."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 3 * 32 * 32)
        self.inner = VisionTransformer(32, 4, 2, 4, WIDTH, 4 * WIDTH, num_classes=CLASSES)
        if checkpointed:
            for block in self.inner.encoder.layers:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.inner(self.words(words).unflatten(-1, (3, 32, 32)))


def steps(module: nn.Module, device: str, after: Callable[[], None] = lambda: None) -> None:
    """Two of AdamW; ``after`` is called after each."""
    allocate(module, torch.device(device))
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    for _ in range(2):
        words, labels = (torch.zeros(32, dtype=torch.long).to(device) for _ in range(2))
        with sdpa_kernel(SDPBackend.MATH):  # the others differ from those of a CPU
            cross_entropy(module(words), labels).backward()
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
    """The most bytes at once on the GPU that were asked for, but for what kernels have inside."""
    with tracing(target_of()) as tracer:
        train("cuda:0")
    sizes: dict[int, int] = {}
    now = peak = 0
    for event in tracer.trace.events:
        if event.bytes:
            sizes[event.id] = 0 if event.op.endswith("(inside)") or "workspace" in event.op else event.bytes
            now += sizes[event.id]
        else:
            now -= sizes.pop(event.id)
        peak = max(peak, now)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_same_peak(checkpointed: bool) -> None:
    train = partial(steps, on_meta(partial(Pictured, checkpointed)))
    oracle, ours = run_in_child(lambda: by_memtracker(train)), run_in_child(lambda: by_tracer(train))
    assert ours == pytest.approx(oracle, rel=0.0001)
