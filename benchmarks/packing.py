"""Which models of transformers can be packed without leaks: a certificate for each.

A tiny model of every architecture, with random weights in fp64 on the CPU, computes documents packed in one row and
padded in several. An architecture is certified if (a) every parameter has the same gradient both ways, and (b) other
words in one document do not change the losses and gradients of the other documents. Both allow for rounding
(``TOLERANCE``). For an architecture that fails, the first module is named whose output for a document is not what the
document gets alone.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from common import Record
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from trainer.models import TextClassifier
from trainer.models.packed_attention import NAME, pack_documents, register_packed_attention

LENGTHS = (9, 13, 5, 1, 11)
"""Of the documents: 39 tokens, a number that no dimension of the tiny models has."""

TOLERANCE = 1e-12
"""Largest relative difference that counts as rounding.

Equal bits would be too strict: kernels may add in an order that depends on where a document lies in the row, on the
shapes, and on the processor. Sums of n terms in two orders differ by at most about n units of 2.2e-16. The longest sums
here (39 tokens times 61 words) have fewer than 2,400 terms: 5e-13. A document that sees another one changes by more
than 1e-2.
"""
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 4,
    "use_sliding_window": True,
    "tie_word_embeddings": False,
}
"""Of every architecture that has such a setting."""
# fmt: off
MORE: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "query_pre_attn_scalar": 8, "max_window_layers": 1, "attention_chunk_size": 4, "state_size": 8, "mamba_d_state": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "n_mamba_heads": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
# fmt: on
"""The sizes of the parts that few have."""
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
HEADS = {"n_embd": 32, "n_layer": 2, "n_head": 4}
OWN: dict[str, dict[str, Any]] = {
    **{kind: {**HEADS, "n_positions": 64} for kind in ("gpt2", "gpt_bigcode")},
    **{kind: {**HEADS, "rotary_dim": 4} for kind in ("gptj", "codegen")},
    **dict.fromkeys(("gemma2", "gemma3_text", "cohere2", "olmo3", "gpt_oss", "ministral"), SLIDING),
    "deepseek_v3": {"num_key_value_heads": 4},
    "qwen2_moe": {"use_sliding_window": False},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_groups": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_groups": 1},
    "falcon_h1": {"mamba_n_groups": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "modernbert": {"num_hidden_layers": 4, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
}
"""Of one architecture, in place of those."""
# fmt: off
TYPES = (
    "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "codegen", "opt", "biogpt", "bloom", "mpt", "falcon",
    "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "phi", "phi3", "phimoe", "stablelm", "olmo", "olmo2", "olmo3", "olmoe", "granite", "granitemoe",
    "cohere", "cohere2", "starcoder2", "smollm3", "glm", "glm4", "helium", "nemotron", "seed_oss", "gpt_oss",
    "deepseek_v3", "modernbert-decoder", "llama4_text", "mamba", "mamba2", "falcon_mamba", "rwkv", "jamba",
    "bamba", "recurrent_gemma", "lfm2", "qwen3_next", "granitemoehybrid", "falcon_h1",
)
# fmt: on
ENCODERS = ("distilbert", "bert", "roberta", "xlm-roberta", "modernbert")
"""As sequence classifiers, which read the first token of each text."""


class Double(TorchFunctionMode):
    """Computes in fp64 what transformers computes in fp32 whatever it gets: norms, weights of attention, rotations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = [torch.float64 if one is torch.float32 else one for one in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def sizes_of(kind: str) -> dict[str, Any]:
    """The settings of a configuration of the model type ``kind`` with few and small layers."""
    known = AutoConfig.for_model(kind).to_dict()
    known |= dict.fromkeys(getattr(AutoConfig.for_model(kind), "attribute_map", {}))
    own = OWN.get(kind, {})
    sizes = {key: value for key, value in (SMALL | MORE).items() if key in known and key not in own}
    return {**sizes, **own}


def tiny(kind: str) -> Any:
    """That configuration."""
    return AutoConfig.for_model(kind, **sizes_of(kind))


@cache
def classifier(kind: str) -> TextClassifier:
    return TextClassifier(kind, tokenizer="none", config=sizes_of(kind), num_classes=2, dropout=0.0)


def build(config: Any, implementation: str | None) -> nn.Module:
    """A model of ``config`` with random weights in fp64, without dropout."""
    torch.manual_seed(0)
    config.dtype = torch.float64
    config._experts_implementation = "eager"  # the other has no fp64
    options: dict[str, Any] = {"attn_implementation": implementation}
    auto = AutoModelForSequenceClassification if config.model_type in ENCODERS else AutoModelForCausalLM
    module = auto.from_config(config, trust_remote_code=False, **options).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():  # no weight is left at 0 or 1
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def documents(perturbed: int | None = None, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """The words of each document; those of ``perturbed`` are others."""
    found = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number + (100 if number == perturbed else 0))
        found.append(torch.randint(3, 61, (length,), generator=generator))
    return found


def padded(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """A batch of a language model, as the data's collate makes it."""
    fill = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    mask = fill([torch.ones_like(text) for text in texts])
    return {"input_ids": fill(list(texts)), "attention_mask": mask, "labels": fill(list(texts), padding_value=-100)}


def losses(module: nn.Module, batch: Mapping[str, Any], lengths: Sequence[int] = LENGTHS) -> Tensor:
    """The summed cross entropy of each document of a padded or packed batch."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if module.config.model_type in ENCODERS:  # type: ignore[union-attr]
        logits = module(**inputs).logits
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)) % 2, reduction="none")
    logits = module(**inputs, use_cache=False).logits
    each = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none"
    ).view(logits.shape[0], -1)
    if "lengths" not in batch:
        return each.sum(1)
    # The last token of a document predicts the first of the next, whose label is -100.
    return torch.stack([part.sum() for part in nn.functional.pad(each[0], (0, 1)).split(list(lengths))])


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@dataclass
class Certificate:
    """What was found out about an architecture."""

    architecture: str
    difference: float | None = None  # of the worst parameter's gradient, packed and padded
    change: float | None = None  # of the others' losses and gradients, where one document has other words
    attention: str = NAME  # that it computed with
    module: str | None = None  # the one that keeps it from being certified
    seconds: float = 0.0

    @property
    def certified(self) -> bool:
        exact = self.difference is not None and self.difference <= TOLERANCE
        return exact and self.apart and self.attention == NAME

    @property
    def apart(self) -> bool:
        """Whether no document sees another."""
        return self.change is not None and self.change <= TOLERANCE


def packed(module: nn.Module, texts: Sequence[Tensor]) -> dict[str, Any]:
    """The batch in one row, as ``module`` takes it."""
    config: Any = module.config
    if config.model_type in ENCODERS:
        return classifier(config.model_type).packed(padded(texts) | {"labels": torch.zeros(len(texts))})
    batch = pack_documents(padded(texts))
    assert batch is not None
    if module.config._attn_implementation != NAME:  # transformers makes masks of the positions, where it can
        batch["attention_mask"] = None
    return batch


def certify(kind: str) -> Certificate:
    """Try to certify the model type ``kind``, of a tiny configuration."""
    register_packed_attention()
    began = time.perf_counter()
    config = tiny(kind)
    # Before transformers 5.21, ``sdpa`` left the cap of scores out without a word.
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    reference = build(config, "eager" if capped else None)
    if kind in ENCODERS:  # as it is trained: its blocks know where a text begins, or its attention does
        module, attention = classifier(kind).build().double().eval(), NAME
        module.load_state_dict(reference.state_dict())
    else:
        can_ask = reference._can_set_attn_implementation()  # type: ignore[operator]
        module = build(tiny(kind), NAME if can_ask else None)
        attention = module.config._attn_implementation  # type: ignore[union-attr]
    found = Certificate(type(reference).__name__, attention=attention)
    with Double():
        examine(found, module, reference)
    found.seconds = round(time.perf_counter() - began, 2)
    return found


def examine(found: Certificate, module: nn.Module, reference: nn.Module) -> None:
    texts = documents()
    expected = gradients(reference, losses(reference, padded(texts)).sum())
    try:
        losses(module, packed(module, texts))
    except (ValueError, RuntimeError):  # it asks for no attention, and reads a mask of padding
        found.attention = "none"
        module.config._attn_implementation_internal = None
    ours = gradients(module, losses(module, packed(module, texts)).sum())
    found.difference = max(distances(ours, expected).values())
    changes = [changes_by(module, number) for number in (0, 2)]
    found.change = max(max(one.values()) for one in changes)
    if not found.certified:
        leaks = [first_leak(module, reference, texts), *(last_changed(module, one) for one in changes)]
        found.module = next(filter(None, leaks), None) or attention_of(module)


def distances(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each gradient is from the expected one, relative to its norm.

    Some gradients are 0 but for rounding (biases of attention's keys). The least norm is a thousandth of that of all.
    """
    whole = torch.stack([value.norm() for value in expected.values()]).norm()
    return {
        name: float((ours[name] - value).norm() / torch.maximum(value.norm(), 1e-3 * whole))
        for name, value in expected.items()
    }


def attention_of(module: nn.Module) -> str:
    """The first module of ``module`` that computes attention by itself."""
    return next(title(module, name) for name, part in module.named_modules() if "Attention" in type(part).__name__)


def title(module: nn.Module, name: str) -> str:
    """The class and the name of a part, for a reader; a part that is none of transformers' own goes by its owner."""
    while type(part := module.get_submodule(name)).__module__.startswith("torch."):
        name = name.rpartition(".")[0]
    return f"{type(part).__name__} ({name})"


def changes_by(module: nn.Module, number: int) -> dict[str, float]:
    """How far other words in document ``number`` change the losses of all others (named ""), and their gradients."""
    others = [place for place in range(len(LENGTHS)) if place != number]
    both = []
    for texts in (documents(), documents(number)):
        each = losses(module, packed(module, texts))[others]
        both.append({"": each.detach()} | gradients(module, each.sum()))
    before, after = both
    of_losses = distances({"": after.pop("")}, {"": before.pop("")})
    return of_losses | distances(after, before)


def last_changed(module: nn.Module, changes: Mapping[str, float]) -> str | None:
    """The last module in the forward, so the first in the backward, that has a parameter whose gradient changes."""
    owners = {name.rpartition(".")[0] for name, change in changes.items() if change > TOLERANCE}
    if not owners:
        return None
    with torch.no_grad():
        order = [*seen(module, packed(module, documents()))]
    return title(module, max(owners & {*order}, key=order.index, default=""))


def first_leak(module: nn.Module, reference: nn.Module, texts: Sequence[Tensor]) -> str | None:
    """The first module whose output for a document depends on the others, though its input does not.

    Its output changes with other words in one of them, or is not what transformers gives that document alone.
    """
    with torch.no_grad():
        here = seen(module, packed(module, texts))
        there = seen(module, packed(module, documents(0)))
        alone = [seen(reference, padded([text])) for text in texts]
    for name in here:
        changed = [differs(one, [two], texts, 1) for one, two in zip(here[name], there[name], strict=True)]
        own = zip(*(one[name] for one in alone), strict=True)
        other = [differs(one, two, texts, 0) for one, two in zip(here[name], own, strict=True)]
        if [False, True] in (changed, other):
            return title(module, name)
    return None


def differs(whole: Tensor, others: Sequence[Tensor], texts: Sequence[Tensor], first: int) -> bool:
    """Whether what a row holds of the documents from ``first`` on differs from what another, or each alone, has."""
    lengths = [len(text) for text in texts]
    for dim in (dim for dim, size in enumerate(whole.shape) if size == sum(lengths)):
        theirs = others[0].split(lengths, dim) if others[0].shape == whole.shape else others
        pairs = [*zip(whole.split(lengths, dim), theirs, strict=True)][first:]
        if all(part.shape == own.shape for part, own in pairs):
            return any((part - own).double().norm() > TOLERANCE * own.double().norm() for part, own in pairs)
    return False


def seen(module: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """What every part of ``module`` gets and gives for ``batch``, in the order in which they finish."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        gives = [one for one in (output if isinstance(output, tuple | list) else [output]) if isinstance(one, Tensor)]
        if name and given and gives:
            found.setdefault(name, (given[0].detach(), gives[0].detach()))

    parts = module.named_modules()
    hooks = [part.register_forward_hook(partial(keep, name), with_kwargs=True) for name, part in parts]
    losses(module, batch, [batch["input_ids"].shape[1]])
    for hook in hooks:
        hook.remove()
    return found


def table(certificates: Mapping[str, Mapping[str, Any]]) -> str:
    """Of what the record has, the rows as docs/packing.md shows them."""
    rows = [
        "| model type | class of transformers | gradient off by | other documents change by | certified |",
        "|---|---|---:|---:|---|",
    ]
    for kind, row in sorted(certificates.items()):
        said = "yes" if row["certified"] else f"no: `{row['module'].partition(' ')[0]}`"
        rows.append(f"| `{kind}` | {row['architecture']} | {row['difference']:.0e} | {row['change']:.0e} | {said} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "types", nargs="*", help=f"model types to certify (default: {len(TYPES)} of them, and encoders)"
    )
    wanted = parser.parse_args().types
    certificates = {}
    for kind in wanted or TYPES + ENCODERS:
        certificates[kind] = found = certify(kind)
        said = "certified" if found.certified else found.module
        print(f"{kind:20} {found.difference:8.1e} {found.change:8.1e}  {said}", flush=True)
    if wanted:
        return
    record = Record("packing", {"lengths": LENGTHS, "tolerance": TOLERANCE})
    rows = {kind: {**asdict(found), "certified": found.certified} for kind, found in certificates.items()}
    encoders = {kind: rows.pop(kind) for kind in ENCODERS}
    record.write(certificates=rows, encoders=encoders, complete=True)
    print(table(rows), table(encoders), sep="\n")
    print(f"{sum(row['certified'] for row in rows.values())} of {len(TYPES)} certified")


if __name__ == "__main__":
    main()
