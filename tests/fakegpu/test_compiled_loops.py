"""torch.compile on the simulated GPU: buffers as Inductor allocates them, and what happens when compiling fails."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.fakegpu import FakeGPU, fake_gpu
from trainer.fakegpu.compiled import COMPILED

pytest.importorskip("triton")  # Inductor generates its code

WIDE = 1024


def trained(model: Callable[[Tensor], Tensor], weights: list[nn.Parameter], *rows: int) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for count in rows:
        model(torch.randn(count, WIDE).to("cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class Chain(nn.Module):
    """A product and operations that one kernel can compute; ``breaks`` reads a value of the GPU in between."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.product, self.breaks = nn.Linear(WIDE, WIDE), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.product(x)
        if self.breaks and x.sum().item() < 0:
            return x
        return x.sin().exp().tanh().sin().exp()


def compile_parts(model: Any) -> None:
    for part in model.parts:
        part.compile()


def peak_of(compiles: Callable[[nn.Module], Any], *rows: int, module: nn.Module | None = None) -> FakeGPU:
    with fake_gpu("a100-80gb") as gpu:
        model = (Chain() if module is None else module).to("cuda")
        compiled = compiles(model)
        trained(model if compiled is None else compiled, list(model.parameters()), *(rows or (4096, 4096)))
    return gpu


def test_a_compiled_chain_keeps_its_input_for_its_backward() -> None:
    kept = 4096 * WIDE * 4
    before = torch.compile, nn.Module.compile, torch._inductor.config.compile_threads
    eager, whole = peak_of(lambda model: model), peak_of(torch.compile)
    assert before == (torch.compile, nn.Module.compile, torch._inductor.config.compile_threads)
    assert eager.phases["forward"].allocated - whole.phases["forward"].allocated == pytest.approx(3 * kept, rel=0.01)
    assert whole.notes == [COMPILED]
    assert whole.kind == "compiled"
    assert (whole.step_ms or 0) < (eager.step_ms or 0)
    assert "product.weight" in {block.name for block in whole.largest}


def test_what_is_compiled_for_the_cpu_computes() -> None:
    with fake_gpu("a100-80gb") as gpu:
        assert torch.compile(lambda x: (2 * x).sin().sum())(torch.zeros(16)).item() == 0
        assert torch.compile(lambda x: (2 * x).sum())(torch.ones(16)).item() == 32
    assert any("it computes on the CPU, where its values are real" in note for note in gpu.notes)


@pytest.mark.slow
def test_module_compile_and_graph_breaks_and_other_batch_sizes() -> None:
    alone = peak_of(lambda model: model.compile())
    assert alone.notes == [COMPILED]
    assert alone.allocated == peak_of(torch.compile).allocated
    broken = peak_of(torch.compile, 4096, 2048, 1024, module=Chain(breaks=True))
    assert broken.notes == [COMPILED]
    assert broken.phases["forward"].allocated <= alone.phases["forward"].allocated + 2**20


@pytest.mark.slow
def test_checkpointing_in_a_compiled_model() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Chain() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
            return x

    inside = peak_of(torch.compile, module=Two())
    each = peak_of(compile_parts, module=Two())
    assert inside.notes == each.notes == [COMPILED]
    assert inside.allocated == pytest.approx(each.allocated, rel=0.1)


def test_what_cannot_be_compiled_is_predicted_eagerly_and_named() -> None:
    def fails(graph: Any) -> None:
        raise ValueError("this pass fails")

    eager = peak_of(lambda model: model)
    other = peak_of(lambda model: torch.compile(model, backend="aot_eager"))
    assert "backend='aot_eager'" in other.notes[0]
    assert other.allocated == eager.allocated
    with torch._inductor.config.patch(post_grad_custom_pre_pass=fails):
        failed = peak_of(torch.compile)
    assert any("forward (test_compiled_loops.py" in note and "this pass fails" in note for note in failed.notes)
    assert failed.allocated == eager.allocated
    assert failed.kind == "eager"


@pytest.mark.slow
def test_buffers_are_those_of_code_compiled_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        inner = (x @ first).sin().exp()
        return ((inner * inner.tanh()) @ second).square().mean()

    shapes = (512, WIDE), (WIDE, 2 * WIDE), (2 * WIDE, WIDE)
    make, live, peaks = torch._C._dynamo.guards._empty_strided_cpu, [0], [0]

    def counted(*args: Any) -> Tensor:
        made = make(*args)
        size = made.untyped_storage().nbytes()
        live[0] += size
        peaks.append(live[0])
        weakref.finalize(made.untyped_storage(), lambda: live.append(live.pop() - size))
        return made

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", counted)
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(computed)(*(torch.randn(shape, requires_grad=True) for shape in shapes)).backward()
    monkeypatch.undo()
    torch._dynamo.reset()

    with fake_gpu("a100-80gb") as gpu:
        torch.compile(computed)(*(torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes)).backward()
    blocks: dict[int, int] = {}
    simulated = [0]
    for event in gpu._tracer.trace.events:
        if event.op == "empty_strided":
            blocks[event.id] = event.bytes
        elif not event.bytes:
            blocks.pop(event.id, None)
        simulated.append(sum(blocks.values()))
    assert max(simulated) == pytest.approx(max(peaks), rel=0.001)
