"""The configurations that ``gpu.py planner`` predicts and then measures: written down before anything was measured.

Every one is a run of a few steps with random weights. None was chosen, changed or left out after a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gpu_rows

VOCABULARY = {"distilbert": 30_522, "bigbird": 50_358, "llama": 32_000}
"""Words of the tokenizer, by recipe; a recipe that is not here reads images."""

LLAMAS: dict[str, dict[str, int]] = {
    "llama-100m": {
        "hidden_size": 640,
        "intermediate_size": 1_728,
        "num_hidden_layers": 16,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "vocab_size": 32_000,
    },
    "llama-400m": {
        "hidden_size": 1_024,
        "intermediate_size": 2_816,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
    },
    "llama-tiny": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 100,
    },
}
"""Shapes of decoders, by name: 99 and 355 million weights, and one for tests."""

STEPS = 3
SCALED_STEPS = 8
"""Steps of a run with fp16's loss scaling, which may skip some before the optimizer has a state."""


@dataclass(frozen=True)
class Case:
    """One configuration.

    Args:
        name: in the table, and of its files.
        recipe: the file in benchmarks/recipes.
        settings: what differs from the recipe.
        llama: name in ``LLAMAS``, for the recipe llama.
        ranks: of which this is the first; the others are not there (``fake_ranks.py``).
        recorded: whether the allocator's history is recorded and replayed.
        environment: variables to set.
        words: of the tokenizer; by default those of ``VOCABULARY``.
    """

    name: str
    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    llama: str | None = None
    ranks: int = 1
    recorded: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    words: int | None = None

    @property
    def vocabulary(self) -> int | None:
        """Words of its tokenizer; ``None`` if it reads images."""
        return self.words or VOCABULARY.get(self.recipe)


FLAGS = {"optim": "optim.name", "momentum": "optim.momentum", "clip": "optim.clip_norm", "lora": "model.lora.rank"}
DATA = ("tokens", "shortest", "size", "val_size", "image_size")
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
FULL, SELECTIVE = ({"activation_checkpointing": way} for way in ("full", "selective"))
FSDP: dict[str, Any] = {"strategy": "fsdp", "ranks": 8}
REPLICAS = {"replicas": 4, "sync_every_micro_step": "true"}
OPTIMIZER, PARAMETERS = {"cpu_offload": "optimizer"}, {"cpu_offload": "parameters"}
EVALUATED = {"run.evaluate": "true"}


def settings(micro: int | str, precision: str, batch: int | None = None, **knobs: Any) -> dict[str, Any]:
    """Settings of a recipe: micro-batch size, precision, batch size (one micro-batch by default) and anything else.

    Names with a dot are settings as they are; those of ``FLAGS`` and ``DATA`` their settings; the rest are of memory.
    """
    found: dict[str, Any] = {"batch_size": batch or micro, "memory.micro_batch_size": micro}
    found |= {"memory.precision": precision, "max_steps": SCALED_STEPS if precision == "16-mixed" else STEPS}
    for name, value in knobs.items():
        section = "data" if name in DATA else "memory"
        found[name if "." in name else FLAGS.get(name, f"{section}.{name}")] = value
    return found


def vit(name: str, size: str, *cut: Any, recorded: bool = False, ranks: int = 1, **knobs: Any) -> Case:
    """A Vision Transformer, B/16 (86 million weights) or L/16 (304 million)."""
    chosen = {"model.name": f"vit_{size}_16", **settings(*cut, **knobs)}
    return Case(f"ViT-{size.upper()} {name}", "vit_l_16", chosen, recorded=recorded, ranks=ranks)


def distilbert(name: str, *cut: Any, recorded: bool = False, ranks: int = 1, **knobs: Any) -> Case:
    """DistilBERT, 66 million weights."""
    return Case(f"DistilBERT {name}", "distilbert", settings(*cut, **knobs), recorded=recorded, ranks=ranks)


def bigbird(name: str, *cut: Any, recorded: bool = False, attention: str = "full", **knobs: Any) -> Case:
    """BigBird with 6 of its 12 layers."""
    chosen = {"model.attention": attention, "model.config": "{num_hidden_layers: 6}", **settings(*cut, **knobs)}
    return Case(f"BigBird {name}", "bigbird", chosen, recorded=recorded)


def llama(name: str, size: str, *cut: Any, recorded: bool = False, ranks: int = 1, **knobs: Any) -> Case:
    """A decoder of 100m or 400m weights, as a classifier."""
    chosen = settings(*cut, **knobs)
    return Case(f"Llama-{size} {name}", "llama", chosen, f"llama-{size}", recorded=recorded, ranks=ranks)


CASES: list[Case] = [
    vit("fp32 · 8", "b", 8, "32-true"),
    vit("fp32 · 32", "b", 32, "32-true"),
    vit("bf16-mixed · 16", "b", 16, "bf16-mixed", recorded=True),
    vit("fp16-mixed · 16", "b", 16, "16-mixed"),
    vit("bf16-true · 16", "b", 16, "bf16-true"),
    vit("bf16-mixed · 4 × 4", "b", 4, "bf16-mixed", 16),
    vit("bf16-mixed · 2 × 16", "b", 16, "bf16-mixed", 32),
    vit("bf16-mixed · 10 in micro-batches of 4", "b", 4, "bf16-mixed", 10),
    vit("bf16-mixed · 16", "l", 16, "bf16-mixed"),
    vit("fp32 · 2 × 4", "l", 4, "32-true", 8),
    vit("full checkpointing · 32", "l", 32, "bf16-mixed", recorded=True, **FULL),
    vit("selective checkpointing · 16", "l", 16, "bf16-mixed", **SELECTIVE),
    vit("half checkpointing · fp32 · 8", "b", 8, "32-true", activation_checkpointing=0.5),
    vit("activations offloaded · 16", "b", 16, "bf16-mixed", activation_offload="true"),
    vit("full checkpointing · activations offloaded · 16", "l", 16, "bf16-mixed", activation_offload="true", **FULL),
    vit("optimizer offloaded · 2 × 4", "l", 4, "bf16-mixed", 8, **OPTIMIZER, **FULL),
    vit("parameters offloaded · 2 × 4", "l", 4, "bf16-mixed", 8, **PARAMETERS, **FULL),
    vit("parameters offloaded · fp32 · 2 × 8", "b", 8, "32-true", 16, **PARAMETERS),
    vit("DDP on one rank · 2 × 8", "b", 8, "bf16-mixed", 16, strategy="ddp"),
    vit("FSDP on one rank · 16", "b", 16, "bf16-mixed", strategy="fsdp"),
    vit("SGD · bf16-true · 4 × 4", "b", 4, "bf16-true", 16, optim="sgd"),
    vit("SGD in backward · fp32 · 8", "b", 8, "32-true", optim="sgd", momentum=0.9, optimizer_in_backward="true"),
    vit("AdamW in backward · 16", "l", 16, "bf16-mixed", recorded=True, optimizer_in_backward="true"),
    vit("8-bit AdamW · 8", "b", 8, "bf16-mixed", optimizer_state_bits=8),
    vit("stochastic rounding · 8", "b", 8, "bf16-true", stochastic_rounding="true"),
    vit("8-bit · stochastic rounding · 8", "b", 8, "bf16-true", optimizer_state_bits=8, stochastic_rounding="true"),
    vit("Adafactor · 8", "b", 8, "bf16-mixed", optim="adafactor"),
    vit("Adam · clipped · fp16-mixed · 2 × 8", "b", 8, "16-mixed", 16, optim="adam", clip=1.0),
    vit("LoRA · 16", "b", 16, "bf16-mixed", lora=8),
    vit("evaluated · 16", "b", 16, "bf16-mixed", val_size=64, **EVALUATED),
    vit("micro-batch size found · 16", "b", "auto", "bf16-mixed", 16),
    Case(
        "ViT-B expandable segments · 16",
        "vit_l_16",
        {"model.name": "vit_b_16", **settings(16, "bf16-mixed")},
        recorded=True,
        environment=EXPANDABLE,
    ),
    distilbert("bf16-mixed · 12 × 512 tokens", 12, "bf16-mixed", recorded=True),
    distilbert("Adam · fp32 · 2 × 6 × 256 tokens", 6, "32-true", 12, optim="adam", tokens=256),
    distilbert("ragged texts · 3 × 4", 4, "bf16-mixed", 12, shortest=64, size=36),
    distilbert("ragged texts · 2048 tokens", 12, "bf16-mixed", shortest=64, size=36, micro_batch_tokens=2048),
    distilbert("optimizer offloaded · 6 × 2", 2, "bf16-mixed", 12, **OPTIMIZER, **FULL),
    distilbert("LoRA · bf16-true · 12", 12, "bf16-true", lora=8),
    distilbert("selective checkpointing · fp16-mixed · 12", 12, "16-mixed", **SELECTIVE),
    distilbert("ragged texts · evaluated · 12", 12, "bf16-mixed", shortest=64, size=36, val_size=48, **EVALUATED),
    bigbird("full · 2 × 4096 tokens", 1, "bf16-mixed", 2, tokens=4096),
    bigbird("full · fp32 · 4 × 1024 tokens", 4, "32-true", tokens=1024),
    bigbird("full · checkpointing · Adafactor · 4 × 2048", 4, "bf16-mixed", tokens=2048, optim="adafactor", **FULL),
    bigbird("full · parameters offloaded · 4096", 1, "bf16-mixed", 2, tokens=4096, **PARAMETERS, **FULL),
    bigbird("block-sparse · 2 × 1024 tokens", 2, "32-true", attention="block_sparse", tokens=1024),
    bigbird("block-sparse · checkpointing · 2048", 1, "32-true", attention="block_sparse", tokens=2048, **FULL),
    llama("bf16-mixed · 8 × 512 tokens", "100m", 8, "bf16-mixed", recorded=True),
    llama("fp32 · 2 × 4 × 256 tokens", "100m", 4, "32-true", 8, tokens=256),
    llama("full checkpointing · 4 × 1024", "400m", 4, "bf16-mixed", tokens=1024, **FULL),
    llama("SGD · bf16-true · 4 × 512", "400m", 4, "bf16-true", optim="sgd"),
    llama("optimizer offloaded · 2 × 2 × 512", "400m", 2, "bf16-mixed", 4, **OPTIMIZER, **FULL),
    llama("parameters offloaded · 4 × 512", "400m", 4, "bf16-mixed", **PARAMETERS, **FULL),
    llama("LoRA · bf16-true · 8 × 512", "100m", 8, "bf16-true", lora=8),
    llama("8-bit AdamW · selective · 4 × 512", "100m", 4, "bf16-mixed", optimizer_state_bits=8, **SELECTIVE),
    vit("FSDP · 64 on 8 ranks", "l", 8, "bf16-mixed", 64, **FSDP),
    vit("FSDP · checkpointing · 2 × 8 on 8 ranks", "l", 8, "bf16-mixed", 128, **FSDP, **FULL),
    vit("FSDP · kept whole · fp32 · 64 on 8", "b", 8, "32-true", 64, **FSDP, reshard_after_forward="false"),
    vit("FSDP · 4 replicas · synced · 128 on 8", "b", 8, "bf16-mixed", 128, **FSDP, **REPLICAS),
    distilbert("FSDP · optimizer offloaded · 32 on 8", 4, "bf16-mixed", 32, **FSDP, **OPTIMIZER),
    llama("FSDP · parameters offloaded · 16 on 8", "400m", 2, "bf16-mixed", 16, ranks=8, **PARAMETERS, **FULL),
]

SMALL_VIT = gpu_rows.TINY["vit_l_16"]
TINY: list[Case] = [
    Case("tiny ViT", "vit_l_16", {**SMALL_VIT, **settings(4, "bf16-mixed", 8)}, recorded=True),
    Case("tiny ViT on 8 ranks", "vit_l_16", {**SMALL_VIT, **settings(2, "32-true", 16, strategy="fsdp")}, ranks=8),
    Case(
        "tiny Llama · ragged texts",
        "llama",
        settings(2, "32-true", 4, tokens=24, shortest=8, size=12, **FULL),
        llama="llama-tiny",
        words=100,
    ),
]
"""Small ones that also run without a GPU, where no memory of a device can be measured: to test the scripts."""
