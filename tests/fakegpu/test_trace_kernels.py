"""What a traced run takes for the target's kernels: attention, masks that mask nothing, and cuBLAS's workspaces."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from helpers.problems import make_model, tokenizer_folder
from helpers.tiny import InMemory
from helpers.traced import traced, traces
from torch import nn

from trainer.contract import Model
from trainer.fakegpu.events import Trace
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.fakegpu.tracer import LT_WORKSPACE, tracing
from trainer.models import TextClassifier
from trainer.planner.predict import prepare_recipe
from trainer.recipe import Memory, Optim, Recipe

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NEW = (2, 15)

CHOICES = [
    ("t4", NEW, FP16, {}, "efficient"),
    ("t4", NEW, BF16, {}, "math"),
    ("v100-32gb", NEW, FP16, {"size": 63}, "math"),
    ("a100-80gb", NEW, BF16, {}, "flash"),
    ("a100-80gb", NEW, BF16, {"size": 256}, "flash"),
    ("a100-80gb", NEW, BF16, {"size": 264}, "efficient"),
    ("a100-80gb", NEW, BF16, {"masked": True}, "efficient"),
    ("a100-80gb", NEW, FP32, {}, "efficient"),
    ("a100-80gb", NEW, FP32, {"size": 62}, "math"),
    ("a100-80gb", NEW, FP64, {}, "math"),
    ("a100-80gb", NEW, BF16, {"key_heads": 1}, "math"),
    ("a100-80gb", NEW, BF16, {"key_heads": 1, "grouped": True}, "flash"),
    ("h100-sxm", (2, 9), BF16, {}, "flash"),
    ("h100-sxm", (2, 10), BF16, {}, "cudnn"),
    ("h100-sxm", (2, 10), BF16, {"size": 192}, "flash"),
    ("h100-sxm", (2, 10), FP32, {}, "efficient"),
    ("b200", NEW, FP16, {}, "cudnn"),
]


def test_the_attention_kernel() -> None:
    for gpu, version, dtype, changes, kernel in CHOICES:
        rules = Target(gpu_named(gpu), version).attention
        assert rules.choose(*attended(dtype, **changes)) == kernel, (gpu, version, dtype, changes)


def attended(
    dtype: torch.dtype, size: int = 64, masked: bool = False, key_heads: int = 4, grouped: bool = False
) -> tuple[Any, ...]:
    """Two sequences of 16 tokens and 4 heads."""
    query = torch.empty(2, 4, 16, size, dtype=dtype)
    key = torch.empty(2, key_heads, 16, size, dtype=dtype)
    return query, key, key, torch.empty(2, 1, 16, 16, dtype=dtype) if masked else None, grouped


def test_of_the_kernels_only_those_that_are_allowed_are_chosen() -> None:
    backends = nn.attention.SDPBackend
    for allowed, kernel in ((backends.MATH, "math"), (backends.EFFICIENT_ATTENTION, "efficient")):
        with nn.attention.sdpa_kernel(allowed):
            assert Target(gpu_named("a100-80gb"), NEW).attention.choose(*attended(BF16)) == kernel


# ------------------------------------------------------------------------------------------------- masks and kernels


def text_recipe(model: Model, lengths: list[int]) -> Recipe:
    """A prepared recipe of texts, two in a batch, in order of their length."""
    samples = [{"input_ids": torch.full((length,), 5), "labels": torch.tensor(0)} for length in lengths]
    data, memory = InMemory(samples=samples), Memory(precision="bf16-mixed", micro_batch_size=2)
    return prepare_recipe(Recipe(model=model, data=data, optim=Optim("sgd"), batch_size=2, memory=memory))


def llama() -> Model:
    """A decoder of two layers, of which two heads share one of keys and values."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings"), 64)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = {"num_hidden_layers": 2, **sizes, **heads}
    return TextClassifier("llama", tokenizer=tokenizer_folder(), config=config, num_classes=5)


@pytest.fixture(scope="module")
def texts() -> dict[str, Trace]:
    recipes = {}
    encoder = dataclasses.replace(make_model("distilbert"), padding_free=False)
    for name, model in (("encoder", encoder), ("decoder", llama())):
        recipes[f"{name}, alike"] = (text_recipe(model, [16, 16]), 1)
        recipes[f"{name}, padded"] = (text_recipe(model, [16, 10]), 1)
    return traced(recipes)


def attention_of(trace: Trace) -> set[str]:
    """The kernels that its attention takes, forward and backward."""
    ops = {event.op for event in trace.events if event.bytes and not event.op.endswith("(inside)")}
    return {op.removeprefix("_scaled_dot_product_") for op in ops if "attention" in op}


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_a_mask_that_masks_nothing_is_left_out(name: str, texts: dict[str, Trace]) -> None:
    alike, padded = texts[f"{name}, alike"], texts[f"{name}, padded"]
    assert attention_of(alike) == {"flash_attention", "flash_attention_backward"}
    assert attention_of(padded) >= {"efficient_attention", "efficient_attention_backward"}
    assert alike.guesses == padded.guesses == 0
    size = {"encoder": 8, "decoder": 16}[name]
    assert alike.attention == [f"flash (bfloat16, heads of {size})"]
    assert f"efficient (bfloat16, heads of {size}, masked)" in padded.attention


def test_grouped_heads_count_like_others(texts: dict[str, Trace]) -> None:
    """A batch of 2, 4 heads of 16 that ask and 2 that answer, 16 tokens; 2 products forward, and 5 backward.

    Each token sees those before it: half of a product is left out.
    """
    work = [work for work in texts["decoder, alike"].work if "attention" in work.op]
    product = 2 * (2 * 4 * 16 * 16 * 16) // 2
    counted = Counter((one.phase, one.flops) for one in work)
    assert counted == {("forward", 2 * product): 2, ("backward", 5 * product): 2}


# --------------------------------------------------------------------------------------------------------- workspaces


def products(version: tuple[int, int]) -> Trace:
    """Two steps of a linear layer, each of two products: with a bias forward, and without backward."""
    with tracing(Target(gpu_named("a100-80gb"), version)) as tracer:
        layer = nn.Linear(64, 64).to("cuda")
        for _ in range(2):
            tracer.enter("forward")
            loss = layer(torch.empty(4, 64).to("cuda")).sum()
            tracer.enter("backward")
            loss.backward()
    return tracer.trace


@pytest.fixture(scope="module")
def workspaces() -> dict[str, Trace]:
    versions = {"2.8": (2, 8), "2.11": (2, 11), "2.15": (2, 15)}
    return traces({name: partial(products, version) for name, version in versions.items()})


def sizes_of(trace: Trace, ending: str) -> Counter[tuple[str, int]]:
    """How often each phase allocates something of this name, of which size."""
    return Counter((event.phase, event.bytes) for event in trace.events if event.op.endswith(ending))


WORKSPACE = gpu_named("a100-80gb").cublas_workspace


def test_older_versions_keep_a_workspace_for_each_thread(workspaces: dict[str, Trace]) -> None:
    """The oldest have another at each product with a bias."""
    for version in ("2.8", "2.11"):
        trace = workspaces[version]
        kept = {event.id for event in trace.events if event.op == "cuBLAS workspace"}
        assert sizes_of(trace, "workspace") == {("forward", WORKSPACE): 1, ("backward", WORKSPACE): 1}
        assert not kept & {event.id for event in trace.events if not event.bytes}
    assert sizes_of(workspaces["2.8"], "addmm (inside)") == {("forward", LT_WORKSPACE): 2}
    assert not sizes_of(workspaces["2.11"], "(inside)")


def test_the_newest_take_one_at_each_call(workspaces: dict[str, Trace]) -> None:
    newest = workspaces["2.15"]
    assert not sizes_of(newest, "workspace")
    assert sizes_of(newest, " (inside)") == {("forward", LT_WORKSPACE): 2, ("backward", WORKSPACE): 2}
    inside = {event.id for event in newest.events if event.op.endswith("(inside)")}
    assert inside <= {event.id for event in newest.events if not event.bytes}


def looked_up(rows: int, ids: int, dtype: torch.dtype, **options: Any) -> Trace:
    """A backward of an embedding of 768 features; its gradient is contiguous."""
    with tracing(Target(gpu_named("a100-80gb"))) as tracer:
        words = nn.Embedding(rows, 768, device="cuda", dtype=dtype, **options)
        found = words(torch.zeros(ids, dtype=torch.long, device="cuda"))
        found.backward(torch.empty_like(found))
    return tracer.trace


def test_the_backward_of_many_ids_sorts_them_and_sums_rows_in_fp32() -> None:
    many, rows, few, counted = 32 * 512, 32_768, 3072, {"scale_grad_by_freq": True}
    calls = {
        "many": partial(looked_up, rows, many, FP32),
        "few rows": partial(looked_up, 256, many, BF16),
        "few ids": partial(looked_up, rows, few, FP32),
        "few ids, counted": partial(looked_up, rows, few, FP32, **counted),
    }
    found = {name: sizes_of(trace, " (inside)") for name, trace in traces(calls).items()}
    inside = {name: [size for _, size in sizes.elements()] for name, sizes in found.items()}
    parts = many // 10 + many
    assert sorted(inside["many"]) == sorted([8 * many] * 5 + [8 * parts, 4 * 768 * parts])
    parts = many // 10 + 256
    assert sorted(inside["few rows"]) == sorted([8 * many] * 3 + [8 * 256] * 2 + [8 * parts, 4 * 768 * parts])
    assert inside["few ids"] == []
    assert len(inside["few ids, counted"]) == 8
