"""Language models on packed rows: no document sees another, and who may let it is padded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.language import FAMILIES
from helpers.rounding import ROUNDING
from torch import Tensor

from trainer.errors import RecipeError
from trainer.models import CausalLM, packed_attention, padding_free
from trainer.models.packed_attention import VERIFIED_ARCHITECTURES, pack_documents
from trainer.models.padding_free import AttentionPattern, SequenceLengths, varlen_attention
from trainer.models.text import UNPADDING_MODEL_TYPES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def packing() -> Any:
    """benchmarks/packing.py."""
    sys.path.insert(0, str(BENCHMARKS))
    import packing

    sys.path.remove(str(BENCHMARKS))
    return packing


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "qwen3_moe", "gpt_oss", "bert", "modernbert"])
def test_documents_do_not_see_each_other(kind: str, packing: Any) -> None:
    found = packing.certify(kind)
    assert found.certified
    assert found.module is None


@pytest.mark.parametrize("kind", ["mamba", "phimoe", "gptj"])
def test_what_is_not_certified_is_named(kind: str, packing: Any) -> None:
    found = packing.certify(kind)
    assert not found.certified
    assert found.module.startswith(f"{VERIFIED_ARCHITECTURES[kind]} (")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*sorted(VERIFIED_ARCHITECTURES), *UNPADDING_MODEL_TYPES])
def test_every_architecture_is_what_the_table_says(kind: str, packing: Any) -> None:
    found = packing.certify(kind)
    assert (found.module or "").partition(" ")[0] == (VERIFIED_ARCHITECTURES.get(kind) or "")
    assert found.certified == (VERIFIED_ARCHITECTURES.get(kind) is None)


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
    return varlen_attention(query, key, value, SequenceLengths([sum(lengths.tokens)]), ends[[0, -1]], dropout, pattern)


def leaking_little(*given: Any) -> Tensor:
    """Attention to which the other documents contribute a millionth."""
    return varlen_attention(*given) + 1e-6 * leaking(*given)


def rounding_otherwise(*given: Any) -> Tensor:
    """Attention whose last bit depends on the first document, as a sum in another order does."""
    eps = torch.finfo(torch.float64).eps
    return varlen_attention(*given) * (1 + eps * int(given[0][:5].sum().abs() * 1e6 % 64))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "modernbert"])
@pytest.mark.parametrize(("leak", "least"), [(leaking, 1e-2), (leaking_little, 1e-8)])
def test_the_certificate_finds_a_mask_that_leaks(
    kind: str, leak: Any, least: float, packing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "varlen_attention", leak)
    found = packing.certify(kind)
    assert not found.certified
    assert min(found.difference, found.change) > least
    assert "Attention (" in found.module


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_rounding_that_depends_on_other_documents_is_no_leak(
    kind: str, packing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        AttentionPattern(causal=True),
        AttentionPattern(causal=True, window=3, scale=0.7),
        AttentionPattern(window=3),
        AttentionPattern(causal=True, softcap=2.0),
        AttentionPattern(causal=True, window=4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
    ],
    ids=str,
)
def test_attention_is_that_of_a_whole_matrix(pattern: AttentionPattern) -> None:
    """With two heads of keys for four of queries, and values of another size."""
    torch.manual_seed(0)
    lengths = [7, 1, 5]
    query, key = torch.randn(13, 4, 8, dtype=torch.float64), torch.randn(13, 2, 8, dtype=torch.float64)
    value = torch.randn(13, 2, 6, dtype=torch.float64)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    found = varlen_attention(query, key, value, SequenceLengths(lengths), ends, 0.0, pattern)
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
    with pytest.raises(
        RecipeError, match=rf"model\.padding_free=true is not supported for model\.name='{name}'.*{why}"
    ):
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
    name, batch = "gemma2", packing.padded(packing.documents())
    ours, theirs = (packing.build(packing.tiny(name), one) for one in (packed_attention.NAME, "eager"))
    with packing.Double():
        expected = packing.gradients(theirs, packing.losses(theirs, batch).sum())
        found = packing.gradients(ours, packing.losses(ours, batch).sum())
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=ROUNDING, atol=ROUNDING)


def test_dropout_follows_from_the_seed_and_the_texts(packing: Any) -> None:
    model = model_of("gpt2", dropout=0.4)
    torch.manual_seed(0)
    module, found = model.build().train(), []
    texts = packing.documents()
    wide = {key: torch.nn.functional.pad(value, (0, 9)) for key, value in packing.padded(texts).items()}
    for batch, seed in ((packing.padded(texts), 1), (wide, 1), (wide, 2)):
        torch.manual_seed(seed)
        (loss,) = model.losses(module, model.packed(batch))
        found.append(loss.total)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_pack_stores_no_matrix_of_all_its_tokens(packing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    kernel = padding_free.scaled_dot_product_attention
    monkeypatch.setattr(
        padding_free, "scaled_dot_product_attention", lambda *a, **k: (sizes.append(a[0].shape[2]), kernel(*a, **k))[1]
    )
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
