"""What others measured with versions of torch that the planner does not know, and what those did otherwise.

The scripts and their logs are in github.com/rasbt/pytorch-memory-optim (logs.md): ViT-L/16 on CIFAR-10 at 224 pixels on
an A100, with torch 2.1.0.dev20230623 and lightning 2.1.0.dev0. Lightning Fabric is the installed one; what differs in
the torch of then is ``OldTarget`` and ``OldAdam``, found after the figures had been seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models import vit_l_16

from trainer.fakegpu.allocator import round_up
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.kernels import AttentionRules
from trainer.fakegpu.target import Target
from trainer.fakegpu.tracer import tracing
from trainer.fakegpu.user_loop import FakeGPU, UserLoopTracer


@dataclass(frozen=True)
class FlashOne(AttentionRules):
    """The first flash attention, of torch before 2.2, which packs what it gets token by token.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu and flash_attn/fmha_api.cpp of torch 2.1.
    """

    def fits_flash(self, sizes: tuple[int, ...], grouped: bool) -> bool:
        return super().fits_flash(sizes, grouped) and sizes[0] % 8 == 0 and sizes[0] <= 128 and not grouped

    def flash(self, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
        out = super().flash(query, key, value, *options)  # so that a caller's .contiguous() makes a copy:
        return out.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)

    def workspace_bytes(self, name: str, args: tuple) -> tuple[int, ...]:
        if name == "_scaled_dot_product_flash_attention":
            return (3 * args[0].numel() * args[0].element_size(),)
        if name != "_scaled_dot_product_flash_attention_backward":
            return super().workspace_bytes(name, args)
        batch, heads, tokens, size = args[1].shape
        return 3 * args[1].numel() * args[1].element_size(), batch * heads * round_up(tokens, 128) * size * 4


@dataclass(frozen=True)
class OldTarget(Target):
    """A card under a version of torch before those that can be asked for."""

    def __post_init__(self) -> None: ...

    @property
    def attention(self) -> AttentionRules:
        return FlashOne(self.gpu.capability) if self.version < (2, 2) else super().attention


@contextmanager
def old_gpu(card: str, torch_version: str) -> Iterator[FakeGPU]:
    """As ``fake_gpu``, with the kernels of an older torch."""
    major, minor = map(int, torch_version.split("."))
    with tracing(OldTarget(gpu_named(card), (major, minor)), kind=UserLoopTracer) as tracer:
        assert isinstance(tracer, UserLoopTracer)
        tracer.enter("init")
        yield FakeGPU(tracer)


class OldAdam(torch.optim.Adam):
    """``foreach`` Adam as it was in torch 2.1's nightlies: with two intermediates of the size of the parameters.

    Source: torch/optim/adam.py, _multi_tensor_adam, of torch 2.0.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[], [], [], [], []]
            weights, gradients, means, squares, steps = lists
            self._init_group(group, weights, gradients, means, squares, [], steps)
            torch._foreach_add_(steps, 1)
            torch._foreach_lerp_(means, gradients, 0.1)
            torch._foreach_mul_(squares, 0.999)
            torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
            roots = torch._foreach_sqrt(squares)
            torch._foreach_div_(roots, [0.5] * len(roots))
            denominators = torch._foreach_add(roots, 1e-8)
            torch._foreach_addcdiv_(weights, means, denominators, [-5e-5] * len(weights))


def trained(precision: Any = None, batch: int = 64, accumulation: int = 1, optimizer: Any = OldAdam) -> None:
    """The first steps of an epoch, and a batch of the evaluation after it.

    Args:
        precision: of Fabric; ``None`` for plain PyTorch.
        batch: samples of a micro-batch.
        accumulation: micro-batches to a step; the scripts take the first step after one already, and give the
            gradients back right after a step instead of before the next backward.
        optimizer: made from parameters.
    """
    fabric = None if precision is None else Fabric(accelerator="cuda", devices=1, precision=precision)
    module: Any = vit_l_16(weights=None)
    module.heads.head = nn.Linear(1024, 10)
    module = module.to("cuda") if fabric is None else fabric.setup(module)
    updates = optimizer(module.parameters())
    updates = updates if fabric is None else fabric.setup_optimizers(updates)
    backward: Any = Tensor.backward if fabric is None else fabric.backward
    features = targets = None
    for number in range(2 * accumulation + 1):
        if fabric is None:  # there the script's own name for the batch is that of the one on the CPU, for a moment
            features = targets = None
        features, targets = _batch(batch)
        module.train()
        logits = module(features)
        loss = cross_entropy(logits, targets) / accumulation
        if accumulation == 1:
            updates.zero_grad()
        backward(loss)
        if number % accumulation == 0:
            updates.step()
            if accumulation > 1:
                updates.zero_grad()
    module.eval()
    with torch.no_grad():
        features, targets = _batch(batch)
        module(features).argmax(1)


def _batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.empty(size, 3, 224, 224).to("cuda"), torch.zeros(size, dtype=torch.long).to("cuda")


def converted_on_the_gpu() -> nn.Module:
    """Moved as it is, and converted there."""
    return vit_l_16(weights=None).to("cuda").to(torch.float16)


def converted_by_fabric() -> nn.Module:
    """Converted on the CPU, and moved."""
    return Fabric(accelerator="cuda", devices=1, precision="16-true").setup(vit_l_16(weights=None))  # type: ignore[no-any-return]


def made_on_the_gpu() -> nn.Module:
    """Made in half precision where it is to be."""
    fabric = Fabric(accelerator="cuda", devices=1, precision="16-true")
    fabric.launch()
    with fabric.init_module():
        return vit_l_16(weights=None)


SMALL = partial(trained, "bf16-true", batch=4, accumulation=4)
ROWS: dict[str, tuple[float, Callable[[], object]]] = {  # the peak of reserved memory, GB, and what was run
    "01_pytorch-vit.py": (26.79, trained),
    "01-2_pytorch-fabric.py": (26.84, partial(trained, "32-true")),
    "02_mixed-precision.py": (18.21, partial(trained, "16-mixed")),
    "03-bfloat16.py": (13.82, partial(trained, "bf16-true")),
    "04-lower-batchsize.py": (5.69, partial(trained, "bf16-true", batch=16)),
    "05_gradient-accum.py": (3.91, SMALL),
    "06_sgd-with-scheduler.py": (2.02, partial(SMALL, optimizer=partial(torch.optim.SGD, lr=0.01))),
    "07_01_init-module.py": (1.24, converted_on_the_gpu),
    "07-02_init-module.py": (0.65, converted_by_fabric),
    "07-03_init-module.py": (0.65, made_on_the_gpu),
}
