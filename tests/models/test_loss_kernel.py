"""The kernels of the loss in chunks: within roundings of the reference, in every type, and code for every GPU."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.kernels import ARCHITECTURES, CHECKS, SHARED, AdaptedHead, Dispatches, compiled, interpreted, unwrap
from torch import Tensor, nn

from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.fakegpu.tracer import tracing
from trainer.models import chunked_loss as token_loss
from trainer.models.chunked_loss import FUSED, MAX_LOGITS, NO_TRANSFORM, LogitTransform, chunked_loss, default_chunk
from trainer.system.child_jobs import run_in_child

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is missing")
TRANSFORMS = {
    "plain": NO_TRANSFORM,
    "scaled": LogitTransform(1 / 3),
    "capped": LogitTransform(1.0, 30.0),
    "both": LogitTransform(4.0, 3.0),
}
TYPES = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half a unit in the last place
TINY = 2.0**-25  # half of the least fp16 number
TOKENS, WORDS, WIDTH = 7, 4099, 8
GRADIENT = 0.37


def exact(products: Tensor, targets: Tensor, transform: LogitTransform) -> tuple[Tensor, ...]:
    """In fp64: the logarithms of sums, the losses, the gradient by the products, and the probabilities."""
    wide = products.double().requires_grad_()
    logits = wide * transform.scale
    logits = logits if transform.cap is None else transform.cap * torch.tanh(logits / transform.cap)
    sums = logits.logsumexp(1, keepdim=True)
    losses = sums - logits.gather(1, targets[:, None])
    (errors,) = torch.autograd.grad(GRADIENT * losses.sum(), wide)
    return sums.detach(), losses.detach(), errors, (logits - sums).exp().detach()


def excess(transform: LogitTransform, dtype: torch.dtype) -> dict[str, float]:
    """The largest errors, as parts of what roundings may come to."""
    torch.manual_seed(0)
    products, targets = (8 * torch.randn(TOKENS, WORDS)).to(dtype), torch.randint(WORDS, (TOKENS,))
    sums, losses = torch.ops.trainer.token_losses(products, targets, *transform)
    ours = products.clone()
    for start, stop in pairwise([0, 1000, 4096, WORDS]):
        part = products[:, start:stop].contiguous()
        given = (sums, targets, torch.full_like(sums, GRADIENT), start)
        torch.ops.trainer.token_errors_(part, *given, *transform)
        ours[:, start:stop] = part
    *right, probabilities = exact(products, targets, transform)
    # A logit takes up to 4 roundings of numbers as large as the largest, a cap included; an exponential is off by what
    # its argument, a difference of two such numbers, is off by.
    largest = max(transform.cap or 0, float(transform.scale * products.abs().max()))
    off = 8 * TYPES[torch.float32] * largest
    reach = GRADIENT * transform.scale * (probabilities + nn.functional.one_hot(targets, WORDS))
    limits = off, off, TYPES[dtype] * right[2].abs() + off * reach + TINY
    found = zip(("sums", "losses", "errors"), (sums, losses, ours), right, limits, strict=True)
    return {name: float(((mine.double() - theirs).abs() / limit).max()) for name, mine, theirs, limit in found}


def whole(kind: str, dtype: torch.dtype, transform: LogitTransform, fused: bool) -> list[Tensor]:
    """The loss and all gradients, by the kernels or by the reference."""
    torch.manual_seed(0)
    head = AdaptedHead(WIDTH, 50) if kind == "adapted" else nn.Linear(WIDTH, 50, bias=kind == "biased")
    head = head.to(dtype)
    hidden, targets = torch.randn(20, WIDTH).to(dtype).requires_grad_(), torch.randint(50, (20,))
    with patch.object(token_loss, "has_kernels", lambda tensor: fused), Dispatches() as asked:
        loss = chunked_loss(hidden, head, targets, transform, chunk=6)
        trained = [p for p in head.parameters() if p.requires_grad]
        found = [loss.detach(), *torch.autograd.grad(0.3 * loss, [hidden, *trained])]
    names = {name for name in asked.names if name.startswith("token_")}
    used = {"token_losses.default", "token_errors_.default"} if fused and kind != "biased" else set()
    assert names == used, names
    return found


def compare() -> dict[str, Any]:
    """How far the kernels are off, by name, and what opcheck says."""
    from trainer.models import loss_kernel

    unwrap(loss_kernel)
    found: dict[str, Any] = {}
    for name, transform in TRANSFORMS.items():
        for dtype in TYPES:
            found |= {f"{what} {name} {dtype}": value for what, value in excess(transform, dtype).items()}
    for kind, dtype in product(("plain", "adapted", "biased"), TYPES):
        pairs = zip(*(whole(kind, dtype, TRANSFORMS["both"], fused) for fused in (True, False)), strict=True)
        off = max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)
        found[f"{kind} {dtype}"] = off / max(TYPES[dtype], 1e-6)
    products, targets = torch.randn(TOKENS, 100).bfloat16(), torch.arange(TOKENS)
    sums, _ = torch.ops.trainer.token_losses(products, targets, 1.0, None)
    given = (products, sums, targets, torch.full_like(sums, GRADIENT), 3, 1.0, 30.0)
    found["opcheck"] = [
        torch.library.opcheck(loss_kernel.token_losses, (products, targets, 1.0, 30.0), test_utils=CHECKS),
        torch.library.opcheck(loss_kernel.token_errors_, given, test_utils=CHECKS),
    ]
    infinite = products.clone().fill_(float("inf"))
    found["finite"] = bool(torch.ops.trainer.token_losses(infinite, targets, 1.0, None)[1].isfinite().any())
    return found


@pytest.mark.slow
@needs_triton
def test_losses_and_gradients_are_off_by_no_more_than_roundings() -> None:
    found = interpreted(compare)
    assert found.pop("opcheck") == [dict.fromkeys(CHECKS, "SUCCESS")] * 2
    assert found.pop("finite") is False  # a loss that is no number stays one
    assert len(found) == (len(TRANSFORMS) + 1) * len(TYPES) * 3
    assert {name: value for name, value in found.items() if value > 1} == {}


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_compile_for_every_gpu(architecture: int, tmp_path, monkeypatch) -> None:
    from trainer.models import loss_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kind, cap in (("bf16", None), ("fp16", None), ("fp32", 30.0)):
        common = {"products": f"*{kind}", "targets": "*i64", "sums": "*fp32", "scale": "fp32"}
        common |= {"cap": "fp32"} if cap else {}
        constants = {"BLOCK": loss_kernel.BLOCK} | ({} if cap else {"cap": None})
        sizes = constants | {"WORDS": 151_936}
        types = common | {"losses": "*fp32"}
        forward = compiled(loss_kernel._losses, architecture, types, sizes, fuses=False)
        more = {"gradient": "*fp32", "start": "i32", "words": "i32"}
        backward = compiled(loss_kernel._errors, architecture, common | more, constants, fuses=False)
        for one in (forward, backward):
            assert one.metadata.shared <= SHARED
            assert "ld.global.v4.b32" in one.asm["ptx"]  # 16 bytes at a time
        assert "st.global.v4.b32" in backward.asm["ptx"]


def traced(precision: torch.dtype, bias: bool) -> tuple[list[str], int]:
    """Operations on a simulated GPU of the loss of 1,000 tokens and 151,936 words, and the largest allocation."""
    with tracing(Target(gpu_named("h200"))) as tracer:
        head = nn.Linear(64, 151_936, bias=bias, device="cuda", dtype=precision)
        hidden = torch.empty(1000, 64, device="cuda", dtype=precision, requires_grad=True)
        targets = torch.empty(1000, dtype=torch.int64, device="cuda")
        tracer.trace.events.clear()
        with Dispatches() as asked:
            chunked_loss(hidden, head, targets).backward()
        return asked.names, max(event.bytes for event in tracer.trace.events)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_a_plan_sees_one_operation_a_chunk_and_no_copies(precision: torch.dtype) -> None:
    names, largest = run_in_child(partial(traced, precision, False))
    chunk = default_chunk(151_936, precision, fused=True)
    assert names.count("token_losses.default") == -(-1000 // chunk)
    assert 1 < names.count("token_errors_.default") <= -(-1000 // chunk) + 1
    assert not {"exp_.default", "scatter_.value", "gather.default"} & {*names}
    assert largest <= FUSED
    names, _ = run_in_child(partial(traced, precision, True))  # a bias that trains sums what is not rounded
    assert "token_losses.default" not in names


def test_chunks_are_multiples_of_128_tokens_where_kernels_read_them() -> None:
    sizes = [default_chunk(words, torch.bfloat16, fused=True) for words in (50_257, 128_256, 151_936, 262_144)]
    assert sizes == [1280, 512, 384, 256]
    assert default_chunk(2**20, torch.bfloat16, fused=True) == 64  # fewer than 128: as many as there is memory for
    assert default_chunk(2**30, torch.float32, fused=True) == 1
    assert default_chunk(151_936, torch.bfloat16, fused=False) == MAX_LOGITS // 151_936
