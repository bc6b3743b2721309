"""Models on packed rows: no document sees another, and which operator of a GPU computes the attention."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.kernels import Dispatches
from helpers.language import FAMILIES
from helpers.rounding import ROUNDING
from packaging.version import Version
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from trainer.errors import RecipeError
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.fakegpu.tracer import tracing
from trainer.models import CausalLM, packed_attention, padding_free
from trainer.models.packed_attention import VERIFIED_ARCHITECTURES, pack_documents
from trainer.models.padding_free import FULL, Lengths, Pattern, varlen_attention
from trainer.models.text import UNPADDING_MODEL_TYPES
from trainer.system.child_jobs import run_in_child

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def packing() -> Any:
    """benchmarks/packing.py."""
    sys.path.insert(0, str(BENCHMARKS))
    import packing

    sys.path.remove(str(BENCHMARKS))
    return packing


DEFAULT = ("gpt2", "gemma2", "qwen3_moe", "gpt_oss", "bert", "modernbert", "mamba", "phimoe", "gptj")
OTHERS = sorted({*VERIFIED_ARCHITECTURES, *UNPADDING_MODEL_TYPES} - {*DEFAULT})


@pytest.mark.first(5)
@pytest.mark.parametrize("kind", [*DEFAULT, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_documents_do_not_see_each_other_or_the_module_that_leaks_is_named(kind: str, packing: Any) -> None:
    found, leaks = packing.certify(kind), VERIFIED_ARCHITECTURES.get(kind)
    measured = Version(json.loads((BENCHMARKS / "results/packing.json").read_text())["versions"]["transformers"])
    if leaks is not None and found.certified and Version(transformers.__version__) > measured:
        pytest.skip(f"transformers {transformers.__version__} has repaired {leaks}: run benchmarks/packing.py again")
    assert found.certified == (leaks is None)
    assert (found.module or "").partition(" (")[0] == (leaks or "")


def test_the_table_is_the_recorded_certificate(packing: Any) -> None:
    record = json.loads((BENCHMARKS / "results/packing.json").read_text())
    recorded, encoders = record["certificates"], record["encoders"]
    found = {kind: row["module"] and row["module"].partition(" ")[0] for kind, row in recorded.items()}
    assert found == VERIFIED_ARCHITECTURES
    assert {kind for kind, row in recorded.items() if row["certified"]} == {
        kind for kind, leak in VERIFIED_ARCHITECTURES.items() if leak is None
    }
    assert set(packing.TYPES) == set(VERIFIED_ARCHITECTURES)
    assert sum(leak is None for leak in VERIFIED_ARCHITECTURES.values()) >= 20
    assert (
        [kind for kind, row in encoders.items() if row["certified"]] == [*packing.ENCODERS] == [*UNPADDING_MODEL_TYPES]
    )
    page = (BENCHMARKS.parent / "docs/packing.md").read_text()
    assert packing.table(recorded) in page
    assert packing.table(encoders) in page


def leaking(*given: Any) -> Tensor:
    """Attention with a mask that is causal over the whole row."""
    query, key, value, lengths, ends, dropout, pattern = given
    return varlen_attention(query, key, value, Lengths([sum(lengths.tokens)]), ends[[0, -1]], dropout, pattern)


def leaking_little(*given: Any) -> Tensor:
    """Attention to which the other documents contribute a millionth."""
    return varlen_attention(*given) + 1e-6 * leaking(*given)


def rounding_otherwise(*given: Any) -> Tensor:
    """Attention whose last bit depends on the first document, as a sum in another order does."""
    eps = torch.finfo(torch.float64).eps
    return varlen_attention(*given) * (1 + eps * int(given[0][:5].sum().abs() * 1e6 % 64))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "modernbert"])
@pytest.mark.parametrize(("leak", "least"), [(leaking, 1e-2), (leaking_little, 1e-8)])
def test_the_certificate_finds_a_mask_that_leaks(kind, leak, least, packing, monkeypatch) -> None:
    monkeypatch.setattr(packed_attention, "varlen_attention", leak)
    found = packing.certify(kind)
    assert not found.certified
    assert min(found.difference, found.change) > least
    assert "Attention (" in found.module


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_rounding_that_depends_on_other_documents_is_no_leak(kind, packing, monkeypatch) -> None:
    monkeypatch.setattr(packed_attention, "varlen_attention", rounding_otherwise)
    found = packing.certify(kind)
    assert 0 < found.change <= packing.TOLERANCE
    assert found.certified


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_the_certificate_finds_positions_that_go_on(kind: str, packing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where positions are learned: of rotations, only what is between two of them counts, and that stays."""

    def going_on(batch: Any) -> Any:
        packed = pack_documents(batch)
        return {**(packed or {}), "position_ids": torch.arange(batch["attention_mask"].sum())[None]}

    monkeypatch.setattr(packing, "pack_documents", going_on)
    found = packing.certify(kind)
    assert not found.certified
    assert found.difference > 0.01


@pytest.mark.parametrize(
    "pattern",
    [
        Pattern(causal=True),
        Pattern(causal=True, window=3, scale=0.7),
        Pattern(window=3),
        Pattern(causal=True, softcap=2.0),
        Pattern(causal=True, window=4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
    ],
    ids=str,
)
def test_attention_is_that_of_a_whole_matrix(pattern: Pattern) -> None:
    """With two heads of keys for four of queries, and values of another size."""
    torch.manual_seed(0)
    lengths = [7, 1, 5]
    query, key = torch.randn(13, 4, 8, dtype=torch.float64), torch.randn(13, 2, 8, dtype=torch.float64)
    value = torch.randn(13, 2, 6, dtype=torch.float64)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    found = varlen_attention(query, key, value, Lengths(lengths), ends, 0.0, pattern)
    place, number = torch.arange(13), torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    far = place[:, None] - place
    seen = (number[:, None] == number) & ((far >= 0) | (not pattern.causal)) & (far.abs() < (pattern.window or 99))
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * (pattern.scale or 8**-0.5)
    if pattern.softcap:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    extra = 0.0 if pattern.sinks is None else pattern.sinks.exp()[:, None, None]
    weights = weights / (weights.sum(-1, keepdim=True) + extra)
    expected = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, 1)).flatten(1)
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


def model_of(family: str, **settings: Any) -> CausalLM:
    name, config = FAMILIES[family]
    return CausalLM(name, config=config, tokenizer="none", **settings)


def test_a_row_has_the_documents_without_padding_and_predicts_nothing_across_a_border(packing: Any) -> None:
    model, texts = model_of("llama"), packing.documents()
    batch = packing.padded(texts)
    packed = model.packed(batch)
    assert packed["input_ids"].tolist() == [torch.cat(texts).tolist()]
    assert packed["position_ids"][0].tolist() == [place for text in texts for place in range(len(text))]
    assert packed["lengths"].tokens == [*packing.LENGTHS]
    assert packed["cu_seq_lens"].tolist() == [0, 9, 22, 27, 28, 39]
    assert packed["labels"][0, [0, 9, 22, 27, 28]].tolist() == [-100] * 5
    assert packed["places"].tolist() == [place for place in range(39) if place not in (8, 21, 26, 27, 38)]
    assert model.weigh(batch) == model.weigh(packed) == {"loss": 39.0 - 5}
    torn = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
    assert model.packed(torn)["input_ids"] is torn["input_ids"]


@pytest.mark.parametrize("name", ["bloom", "mamba", "xglm"])
def test_who_may_leak_is_padded_or_refused_by_name(name: str) -> None:
    assert not CausalLM(name, tokenizer="none").packs()
    why = (
        f"its {VERIFIED_ARCHITECTURES[name]} does not keep"
        if name in VERIFIED_ARCHITECTURES
        else "has no certificate for"
    )
    said = rf"model\.padding_free=true is not supported for model\.name='{name}'.*{why}"
    with pytest.raises(RecipeError, match=said):
        CausalLM(name, tokenizer="none", padding_free=True).packs()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type dynamic rotates"),
        ({"_attn_implementation": "flex_attention"}, "its attention is set to flex_attention"),
    ],
)
def test_settings_that_no_certificate_is_of_are_refused(config: dict[str, Any], why: str) -> None:
    name, sizes = FAMILIES["llama"]
    assert not CausalLM(name, config={**sizes, **config}, tokenizer="none").packs()
    with pytest.raises(RecipeError, match=f"padding_free=true .*{why}"):
        CausalLM(name, config={**sizes, **config}, tokenizer="none", padding_free=True).packs()


def test_a_padded_batch_is_computed_as_transformers_does(packing: Any) -> None:
    """Such as one whose mask has holes: of a model whose scores are capped, which ``sdpa`` cannot do."""
    packed_attention.register_packed_attention()
    name, batch = "gemma2", packing.padded(packing.documents())
    ours, theirs = (packing.build(packing.tiny(name), one) for one in (packed_attention.NAME, "eager"))
    with packing.Double():
        expected = packing.gradients(theirs, packing.losses(theirs, batch).sum())
        found = packing.gradients(ours, packing.losses(ours, batch).sum())
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=ROUNDING, atol=ROUNDING)


def test_a_pack_stores_no_matrix_of_all_its_tokens(packing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    kernel = padding_free.scaled_dot_product_attention

    def noted(*args: Any, **options: Any) -> Tensor:
        sizes.append(args[0].shape[2])
        return kernel(*args, **options)

    monkeypatch.setattr(padding_free, "scaled_dot_product_attention", noted)
    model = model_of("llama")
    module = model.build()
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(max(tensor.shape.count(39) if tensor.ndim else 0, 0))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        (loss,) = model.losses(module, model.packed(packing.padded(packing.documents())))
    loss.total.backward()
    assert sizes == [*packing.LENGTHS] * module.config.num_hidden_layers
    assert max(saved) == 1


# Attention on GPUs: which operator computes it, in how many operations, and with which arguments

FLASH = ["_flash_attention_forward.default", "_flash_attention_backward.default"]
LENGTHS = [9, 4, 4, 7, 1]
PATTERNS = {
    "full": FULL,
    "causal": Pattern(causal=True, scale=0.3),
    "causal window": Pattern(causal=True, window=3),
    "window": Pattern(window=3),
}


def operations(gpu: str, dtype: torch.dtype, texts: int, dropout: float, pattern: Pattern = FULL) -> Any:
    """The kernels that a plan names, and the operations of one attention, forward and backward, on a simulated GPU."""
    return run_in_child(partial(_operations, gpu, dtype, texts, dropout, pattern))


def _operations(gpu: str, dtype: torch.dtype, texts: int, dropout: float, pattern: Pattern) -> Any:
    with tracing(Target(gpu_named(gpu))) as tracer:
        tokens = [100 + number for number in range(texts)]
        ends = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32).cuda()
        parts = [torch.randn(sum(tokens), 12, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
        with Dispatches() as noted:
            varlen_attention(*parts, Lengths(tokens), ends, dropout, pattern).sum().backward()
        return list(tracer.trace.attention), noted.names


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["full", "causal", "causal window"])
def test_half_precision_on_an_h200_is_flash_attention_and_never_cudnn(name, dropout):
    kernels, names = operations("h200", torch.bfloat16, 8, dropout, PATTERNS[name])
    assert [one for one in names if "attention" in one] == FLASH
    assert kernels == ["flash over packed texts (bfloat16, heads of 64)"]


ROTATED = (torch.float32, torch.float32, torch.bfloat16)
"""Rotary embeddings leave queries and keys in the type of the residual stream; values come from a linear layer."""


def _rotated() -> tuple[list[str], list[str]]:
    with tracing(Target(gpu_named("h200"))), torch.autocast("cuda", torch.bfloat16), Dispatches() as noted:
        ends = torch.tensor([0, 9, 13], dtype=torch.int32).cuda()
        parts = [torch.randn(13, 2, 64, device="cuda", dtype=dtype, requires_grad=True) for dtype in ROTATED]
        found = varlen_attention(*parts, Lengths([9, 4]), ends, 0.0, PATTERNS["causal"])
        found.sum().backward()
        return noted.names, [str(found.dtype), *(str(part.grad.dtype) for part in parts)]


def test_autocast_lowers_rotated_queries_and_keys_for_flash_attention():
    names, dtypes = run_in_child(_rotated)
    assert [one for one in names if "attention" in one] == FLASH
    assert dtypes == [str(torch.bfloat16), *map(str, ROTATED)]


@pytest.mark.parametrize(("gpu", "dtype"), [("h200", torch.bfloat16), ("h200", torch.float32), ("t4", torch.float16)])
def test_with_dropout_the_number_of_operations_does_not_grow_with_the_number_of_texts(gpu, dtype):
    few, many = (len(operations(gpu, dtype, texts, 0.1)[1]) for texts in (4, 32))
    assert many == few


@pytest.mark.parametrize(
    ("capability", "size", "dropout", "expected"),
    [
        ((9, 0), 256, 0.1, True),
        ((8, 9), 192, 0.1, True),
        ((8, 9), 224, 0.0, False),
        ((8, 9), 256, 0.0, True),
        ((8, 9), 256, 0.1, False),
        ((12, 0), 256, 0.1, False),
        ((7, 5), 64, 0.0, False),
        ((9, 0), 60, 0.0, False),
    ],
)
def test_flash_is_used_for_the_heads_that_the_gpu_has_a_kernel_for(capability, size, dropout, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with torch._subclasses.FakeTensorMode():
        query = torch.empty(8, 2, size, dtype=torch.bfloat16, device="cuda")
    assert padding_free.takes_flash(query, query, dropout) is expected


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An implementation of the operator for CPUs, by whole weights of attention, as its source defines it."""

    def forward(query: Tensor, key: Tensor, value: Tensor, from_: Any, to: Any, *args: Any, **options: Any) -> Any:
        _, max_k, dropout, causal, _ = args
        left, right = options.get("window_size_left", -1), options.get("window_size_right", -1)
        left, right = (-1, 0) if causal and left < 0 else (left, right)
        found = []
        for number in range(len(to) - 1):
            asks, has = slice(*from_[number : number + 2].tolist()), slice(*to[number : number + 2].tolist())
            keys, values = (one[has].repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
            scale = options.get("scale") or query.shape[-1] ** -0.5
            scores = torch.einsum("qhd,khd->hqk", query[asks], keys) * scale
            # Aligned to the last query and the last key, as in flash attention.
            last = scores.shape[2] - scores.shape[1]
            apart = torch.arange(scores.shape[2]) - torch.arange(scores.shape[1])[:, None] - last
            unseen = (apart > right if right >= 0 else apart > max_k) | (-apart > left if left >= 0 else apart < -max_k)
            weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
            found.append(torch.einsum("hqk,khd->qhd", weights, values))
        assert dropout == 0.0
        none = torch.empty(0, dtype=torch.uint64)
        return torch.cat(found), torch.empty(query.shape[1], len(query)), none, none, torch.empty(0)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    monkeypatch.setattr(padding_free, "takes_flash", lambda *args: True)
    yield
    library._destroy()


def problem(first: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    query, key, value = (torch.randn(sum(LENGTHS), heads, 8, dtype=dtype) for heads in (4, 2, 2))
    return [query[ends[:-1].long()] if first else query, key, value], ends


@pytest.mark.parametrize(("name", "first"), [("full", True), *((name, False) for name in PATTERNS)])
def test_flash_is_asked_for_the_attention_that_is_computed_without_it(name, first, flash_on_cpu):
    parts, ends = problem(first)
    expected = padding_free._without_flash(*parts, Lengths(LENGTHS), ends, 0.0, PATTERNS[name])
    found = varlen_attention(*parts, Lengths(LENGTHS), ends, 0.0, PATTERNS[name])
    assert (found - expected).norm() <= ROUNDING * expected.norm()


def test_flash_is_in_one_graph_that_serves_all_lengths(flash_on_cpu):
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def layer(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, ends: Tensor) -> Tensor:
        return varlen_attention(query * 2, key, value, lengths, ends, 0.0) + 1

    for tokens in ([3, 4], [5, 6, 7], [2, 9, 4, 4], [8, 3, 1], [7] * 6):
        ends = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32)
        parts = [torch.randn(sum(tokens), 2, 8) for _ in range(3)]
        layer(*parts, Lengths(tokens), ends)
    assert counter.frame_count <= 2  # for the first lengths, then for any


@pytest.mark.parametrize(("name", "first"), [("full", True), ("full", False), ("causal", False)])
def test_padded_texts_have_the_result_and_the_gradients_of_single_ones(name, first):
    found = []
    for compute in (padding_free._without_flash, padding_free._padded):
        parts, ends = problem(first)
        leaves = [part.requires_grad_() for part in parts]
        out = compute(*leaves, Lengths(LENGTHS), ends, 0.0, PATTERNS[name])
        out.square().sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= ROUNDING * theirs.norm()
