"""The kernel that makes a weight of NF4 codes: the bits of the reference, one launch, and code for every GPU."""

from __future__ import annotations

import re
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from helpers.kernels import ARCHITECTURES, CHECKS, SHARED, Dispatches, compiled, interpreted, unwrap
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.fakegpu.tracer import tracing
from trainer.system.child_jobs import run_in_child
from trainer.weights import fused, nf4
from trainer.weights.nf4 import BYTES_PER_ROW, WEIGHTS_PER_ROW, WEIGHTS_PER_SCALE, dequantise, num_code_rows, quantise

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is missing")
SHAPES = [(66, 131), (16, 4096), (33, 777), (1, 1), (5, 4096)]
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
LARGE = (4096, 14336)  # of Llama-3.1-8B


def weight_of(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 50


def by_kernel(codes: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.ops.trainer.nf4_weight(codes, nf4._pair_table_on(codes), WEIGHTS_PER_SCALE, shape, dtype)


def unaligned(codes: Tensor) -> Tensor:
    """The same codes, one byte behind where fp32 numbers may begin."""
    return torch.cat([torch.zeros(1, dtype=torch.uint8), codes.flatten()])[1:].view(codes.shape)


def in_bits(weight: Tensor) -> Tensor:
    return weight.view(torch.int32 if weight.dtype == torch.float32 else torch.int16)


def compare() -> dict[str, Any]:
    """What is the same, by name, and what opcheck says."""
    from trainer.weights import nf4_kernel

    unwrap(nf4_kernel)
    found: dict[str, Any] = {}
    for shape in SHAPES:
        codes = quantise(weight_of(shape))
        for dtype in TYPES:
            ours, theirs = by_kernel(codes, shape, dtype), dequantise(codes, shape, dtype)
            found[f"{shape} {dtype}"] = ours.shape == theirs.shape and torch.equal(in_bits(ours), in_bits(theirs))
    shape, dtype = (3, 4096), torch.bfloat16
    codes = quantise(weight_of(shape))
    found["unaligned"] = torch.equal(by_kernel(unaligned(codes), shape, dtype), dequantise(codes, shape, dtype))
    infinite = quantise(torch.full(shape, float("inf")))  # its weights are no numbers
    found["nan"] = torch.equal(by_kernel(infinite, shape, dtype).isnan(), dequantise(infinite, shape, dtype).isnan())
    inputs = (codes, nf4._pair_table_on(codes), WEIGHTS_PER_SCALE, shape, dtype)
    found["opcheck"] = torch.library.opcheck(nf4_kernel.nf4_weight, inputs, test_utils=CHECKS)
    return found


@pytest.mark.slow
@needs_triton
def test_every_bit_is_that_of_the_reference() -> None:
    found = interpreted(compare)
    assert found.pop("opcheck") == dict.fromkeys(CHECKS, "SUCCESS")
    assert len(found) == len(SHAPES) * len(TYPES) + 2
    assert found == dict.fromkeys(found, True)


@pytest.mark.first(1)
@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles_for_every_gpu_and_rounds_as_torch_does(architecture: int, tmp_path, monkeypatch) -> None:
    from trainer.weights import nf4_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"ROW": BYTES_PER_ROW, "BLOCKS": WEIGHTS_PER_ROW // WEIGHTS_PER_SCALE, "BLOCK": WEIGHTS_PER_SCALE}
    for kind in TYPES.values():
        types = {"codes": "*u8", "table": "*fp32", "out": f"*{kind}", "count": "i32"}
        # Also where fusing is allowed: the compiler of torch 2.11 ignores the option of the launch.
        found = compiled(nf4_kernel._weight, architecture, types, constants, fuses=True)
        added = re.findall(r"\bfma\.\S+\s+\S+ \S+ \S+ (\S+);", found.asm["ptx"])
        assert added  # the product that is rounded by itself
        assert set(added) == {"0f00000000"}
        assert found.metadata.shared <= SHARED
        assert "st.global.v4.b32" in found.asm["ptx"]  # 16 bytes at a time
    assert compiled(nf4_kernel.nothing, architecture, {}, {}, fuses=False).asm["ptx"]


def traced(gpu: str, dtype: torch.dtype, hidden: bool = False) -> tuple[list[str], list[int], list[int]]:
    """Of one weight on a simulated ``gpu``: names of operations, bytes that each moves, bytes of allocations."""
    if hidden:
        sys.modules.pop("trainer.weights.nf4_kernel", None)
        sys.modules["triton"] = None  # type: ignore[assignment]
    with tracing(Target(gpu_named(gpu))) as it:
        codes = torch.empty(num_code_rows(LARGE[0] * LARGE[1]), BYTES_PER_ROW, dtype=torch.uint8, device="cuda")
        it.records_work, before = True, len(it.trace.events)
        it.trace.work.clear()
        with Dispatches() as asked:
            weight = dequantise(codes, LARGE, dtype)
        assert weight.shape == LARGE
        assert not hidden or sys.modules["trainer.weights.nf4_kernel"].tl is None
        return asked.names, [work.bytes for work in it.trace.work], [e.bytes for e in it.trace.events[before:]]


@pytest.mark.parametrize("hidden", [False, True], ids=["", "without Triton"])
def test_a_plan_sees_one_operation_and_one_allocation(hidden: bool) -> None:
    for dtype in TYPES:
        names, moved, allocated = run_in_child(partial(traced, "h200", dtype, hidden))
        assert names == ["nf4_weight.default"]
        count = LARGE[0] * LARGE[1]
        assert allocated == [count * dtype.itemsize]
        assert sum(moved) / count == pytest.approx(BYTES_PER_ROW / WEIGHTS_PER_ROW + dtype.itemsize)
    assert sum(moved) / count <= 2.6


@pytest.mark.parametrize(("gpu", "dtype"), [("v100-32gb", torch.bfloat16), ("h200", torch.float64)])
def test_old_gpus_and_fp64_keep_the_operations_of_torch(gpu: str, dtype: torch.dtype) -> None:
    names, _, _ = run_in_child(partial(traced, gpu, dtype))
    assert len(names) > 100
    assert "nf4_weight.default" not in names


def graph() -> tuple[list[str], list[str]]:
    """The operations on simulated CUDA tensors that ``torch.compile`` sees, and those that its backend gets."""
    from torch._dynamo.backends.common import aot_autograd

    seen: list[str] = []
    given: list[str] = []

    def note(names: list[str], module: Any) -> Any:
        names += [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
        return module

    def backend(module: Any, inputs: Any) -> Any:
        return aot_autograd(fw_compiler=lambda inner, _: note(given, inner))(note(seen, module), inputs)

    with FakeTensorMode(allow_non_fake_inputs=True):
        codes = torch.empty(2, BYTES_PER_ROW, dtype=torch.uint8, device="cuda")
        nf4._pairs[codes.device] = torch.empty(256, 2, device="cuda")
        made = torch.compile(
            lambda codes: dequantise(codes, (64, 100), torch.bfloat16), backend=backend, fullgraph=True
        )
        made(codes)
    return seen, given


@needs_triton
@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
def test_the_compiler_sees_the_kernel() -> None:
    seen, given = run_in_child(graph)
    assert seen.count("trainer.nf4_weight.default") == 1
    called = [name for name in given if "getitem" not in name]
    assert called == ["aten.new_empty.default", "triton_kernel_wrapper_functional"]


@needs_triton
def test_what_keeps_triton_from_running_is_a_warning(monkeypatch) -> None:
    from trainer.weights import nf4_kernel

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(nf4_kernel, "nothing", Broken())
    said = r"cannot run a kernel on GPU 3 \(RuntimeError: Failed to find C compiler\.\): NF4"
    with pytest.warns(UserWarning, match=said):
        assert not fused._launches.__wrapped__(3)
