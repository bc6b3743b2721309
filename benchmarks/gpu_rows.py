"""The rows of ``gpu.py``: which runs, in which order, with which targets, and how long each may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REPRODUCED = 1.05
"""A published peak counts as reproduced when ours is at most 5 % above it: allocators and kernels differ."""

VOCABULARY = {"distilbert": 30_522, "bigbird": 50_358}
PART_SECONDS = {"exact": 470.0, "ladder": 240.0, "caps": 240.0, "text": 110.0, "lm": 470.0}
"""That each part may take: ``exact`` fits a call of ten minutes with what starts and stops around it."""


@dataclass(frozen=True)
class Row:
    """One run.

    Args:
        name: in the table.
        recipe: the file in benchmarks/recipes.
        settings: what differs from the recipe.
        target: ``(kind, GB)``: the most memory, allocated or reserved, that it may take.
        published: whether the target was published by others, and is to be reproduced, not undercut.
        cap_gb: the memory that the process is given, in GB; such a row needs a GPU.
        reference: the row whose losses and gradients it must have; ``None`` where it need not.
        steps: the first is not timed, and the last is under the profiler.
        seconds: the most that the process may take.
        environment: variables to set.
        speed: whether it is there for its speed: floating-point operations are counted, and its trace is kept.
        tokens_per_second: of others on their card, to stand beside what is measured.
    """

    name: str
    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    target: tuple[str, float] | None = None
    published: bool = False
    cap_gb: float | None = None
    reference: str | None = None
    steps: int = 4
    seconds: float = 60.0
    environment: Mapping[str, str] = field(default_factory=dict)
    speed: bool = False
    tokens_per_second: float | None = None

    @property
    def limit_gb(self) -> float | None:
        """The most memory that counts as meeting the target."""
        return self.target and self.target[1] * (REPRODUCED if self.published else 1)


def memory(micro_batch_size: int, precision: str = "bf16-mixed", **knobs: Any) -> dict[str, Any]:
    """Settings of ``memory``."""
    found = {"micro_batch_size": micro_batch_size, "precision": precision, **knobs}
    return {f"memory.{key}": value for key, value in found.items()}


CHECKPOINTED = {"activation_checkpointing": "full"}
OPTIMIZER = {**CHECKPOINTED, "cpu_offload": "optimizer"}
STREAMED = {**CHECKPOINTED, "cpu_offload": "parameters"}
SMALL_BATCH = {"batch_size": 16}
SMALL_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:1", "CUBLASLT_WORKSPACE_SIZE": "4096"}
"""4 MiB each for the scratch memory of matrix products, instead of 32 MiB on a Hopper GPU, which count as allocated."""
FEW_GAPS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Lets a cap on reserved memory be met: else the gaps in the allocator's segments of 20 MiB count, too."""
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""For what is compared in fp32: the convolution of the patches would have 10 bits of mantissa else."""
FP32, BF16 = "batch 64, 32-true", "bf16-mixed, uncapped"
MOST_STEPS = 32
"""Of a row of speed: one to warm up, 30 of which the last 20 count, and one under the profiler."""


def published(name: str, reserved_gb: float, settings: Mapping[str, Any]) -> Row:
    """A row of the published ladder."""
    return Row(name, "vit_l_16", settings, target=("reserved", reserved_gb), published=True, environment=NO_TF32)


def ours(
    name: str, settings: Mapping[str, Any], target_gb: float | None = None, steps: int = 4, seconds: float = 60.0
) -> Row:
    """A row of the exact ladder: batch 64 and AdamW throughout."""
    target = ("allocated", target_gb) if target_gb else None
    environment = SMALL_WORKSPACE if target else {}
    return Row(
        name, "vit_l_16", settings, target, reference=FP32, steps=steps, seconds=seconds, environment=environment
    )


def lossless(name: str, settings: Mapping[str, Any]) -> Row:
    """A technique in fp32, where nothing but the order of sums may differ."""
    return Row(name, "vit_l_16", settings, reference=FP32, steps=3, environment=NO_TF32)


def fast(name: str, batch_size: int, settings: Mapping[str, Any]) -> Row:
    """A row of speed."""
    loaded = {"batch_size": batch_size, "data.workers": 4, "data.size": MOST_STEPS * batch_size}
    return Row(name, "vit_l_16", {**settings, **loaded}, steps=MOST_STEPS, seconds=110.0, speed=True)


def capped(gigabytes: float, settings: Mapping[str, Any], steps: int = 4, seconds: float = 60.0) -> Row:
    """A row that must train under a cap, with the losses and gradients of the uncapped run."""
    return Row(
        f"under {gigabytes:g} GB",
        "vit_l_16",
        settings,
        ("reserved", gigabytes),
        cap_gb=gigabytes,
        reference=BF16,
        steps=steps,
        seconds=seconds,
        environment=SMALL_WORKSPACE | FEW_GAPS,
    )


def text(name: str, recipe: str, target_gb: float, reference: str) -> Row:
    """A row of a text model with all but its bf16 weights off the device."""
    settings, target = memory(1, **OPTIMIZER), ("allocated", target_gb)
    return Row(name, recipe, settings, target, reference=reference, environment=SMALL_WORKSPACE)


def language(
    name: str,
    model: str,
    settings: Mapping[str, Any],
    target_gb: float | None,
    samples: int,
    tokens: int,
    seconds: float,
    rate: float | None = None,
) -> Row:
    """A language model; a row with the ``rate`` of others, in tokens a second, reproduces what they published."""
    data = {"model.name": model, "batch_size": samples, "data.tokens": tokens, "memory.micro_batch_size": samples}
    target, environment = target_gb and ("allocated", target_gb), {} if rate else SMALL_WORKSPACE
    return Row(
        name,
        "language_model",
        {**data, **settings},
        target,
        published=rate is not None,
        steps=12 if rate else 4,
        seconds=seconds,
        environment=environment,
        tokens_per_second=rate,
    )


def adapted(rank: int, *targets: str, **knobs: Any) -> dict[str, Any]:
    """Adapters beside weights in bfloat16, or with ``base`` in NF4."""
    lora = {"model.lora.rank": rank, "model.lora.targets": f"[{', '.join(targets)}]"}
    lora |= {"model.lora.base": knobs.pop("base")} if "base" in knobs else {}
    return {**lora, **{f"memory.{key}": value for key, value in {"precision": "bf16-true", **knobs}.items()}}


EXACT_070 = ours("exact: optimizer offload, micro-batches of 1", memory(1, **OPTIMIZER), 0.70, steps=3, seconds=100)
EXACT_025 = ours("exact: parameters streamed, of 2", memory(2, **STREAMED), 0.25, steps=3, seconds=150)
IN_FP32 = published(FP32, 26.8, memory(64, "32-true"))
UNCAPPED = Row(BF16, "vit_l_16", memory(64), reference=FP32)
COMPILED = {"compile": "blocks"}
DISTILBERT = [
    Row("DistilBERT, whole batch", "distilbert", memory(12)),
    text("DistilBERT, offloaded", "distilbert", 0.30, reference="DistilBERT, whole batch"),
]

LLAMA_8B = "meta-llama/Llama-3.1-8B"
AWAY = {"memory.activation_offload": "true"}
ALL_STREAMED = {f"memory.{key}": value for key, value in STREAMED.items()} | AWAY
LORA = adapted(8, "q_proj", "v_proj", **CHECKPOINTED)
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QLORA = adapted(8, *EVERY, base="nf4", **CHECKPOINTED)
IN_BF16 = {
    "memory.precision": "bf16-true",
    "memory.stochastic_rounding": "true",
    "memory.optimizer_state_bits": 8,
    "memory.optimizer_in_backward": "true",
    "memory.activation_checkpointing": "full",
}
"""torchtune published 7.4, 16.2 and 18.9 GiB of Llama 3.1 8B, compiled, on an RTX 4090. The last is without the state
of its paged optimizer, and no target: the state of ours, of 8 bits, is on the GPU."""

PARTS: dict[str, list[Row]] = {
    "exact": [
        EXACT_070,
        EXACT_025,
        IN_FP32,
        lossless("fp32: optimizer offload, of 8", memory(8, "32-true", **OPTIMIZER)),
        fast("speed: bf16-mixed, blocks compiled, batch 256", 256, memory(256, **COMPILED)),
        UNCAPPED,
        fast("speed: bf16-mixed, blocks compiled, batch 128", 128, memory(128, **COMPILED)),
        lossless("fp32: parameters streamed, of 8", memory(8, "32-true", **STREAMED)),
        capped(0.25, memory(2, **STREAMED), steps=3, seconds=90),
        capped(1.0, memory(4, **OPTIMIZER), steps=3),
        *DISTILBERT,
        fast("speed: bf16-mixed, not compiled, batch 256", 256, memory(256)),
        fast("speed: bf16-true (lossy), model compiled, batch 256", 256, memory(256, "bf16-true", compile="model")),
    ],
    "ladder": [
        IN_FP32,
        published("batch 64, 16-mixed", 18.2, memory(64, "16-mixed")),
        published("batch 64, bf16-true (lossy)", 13.8, memory(64, "bf16-true")),
        published("batch 16, bf16-true (lossy)", 5.7, SMALL_BATCH | memory(16, "bf16-true")),
        published("batch 16 as 4 × 4, bf16-true (lossy)", 3.9, SMALL_BATCH | memory(4, "bf16-true")),
        published("the same with SGD", 2.02, SMALL_BATCH | memory(4, "bf16-true") | {"optim.name": "sgd"}),
        ours("exact: batch 64, bf16-mixed, full checkpointing", memory(64, **CHECKPOINTED)),
        ours("exact: + micro-batches of 4", memory(4, **CHECKPOINTED)),
        EXACT_070,
        EXACT_025,
    ],
    "caps": [
        IN_FP32,
        UNCAPPED,
        capped(2.0, memory(8, **OPTIMIZER)),
        capped(1.0, memory(4, **OPTIMIZER)),
        capped(0.7, memory(1, **OPTIMIZER), steps=3),
        capped(0.25, memory(2, **STREAMED), steps=3, seconds=90),
    ],
    "text": [
        *DISTILBERT,
        Row("BigBird, micro-batches of 1", "bigbird", memory(1)),
        text("BigBird, offloaded", "bigbird", 0.60, reference="BigBird, micro-batches of 1"),
    ],
    "lm": [
        language("Qwen3-4B, exact AdamW, streamed", "Qwen/Qwen3-4B", ALL_STREAMED, 2.5, 1, 4096, 150),
        language("Llama 3.1 8B, QLoRA, activations offloaded", LLAMA_8B, QLORA | AWAY, 7.0, 1, 2048, 90),
        language("Llama 3.1 8B, QLoRA, 2 x 2048", LLAMA_8B, QLORA, 7.946, 2, 2048, 90, rate=2413),
        language("Llama 3.1 8B, LoRA, 2 x 2048", LLAMA_8B, LORA, 17.395, 2, 2048, 90, rate=3083),
        language("Llama 3.1 8B, all weights in bf16 (lossy)", LLAMA_8B, IN_BF16, None, 2, 2048, 90, rate=1650),
        language("Phi-3 3.8B, exact AdamW, streamed", "phi3", ALL_STREAMED, 2.5, 1, 4096, 150),
    ],
}

SMALL_TEXT = {"data.tokens": 16}
TINY = {
    "vit_l_16": {
        "model.name": "custom",
        "model.patch_size": 8,
        "model.layers": 2,
        "model.heads": 2,
        "model.width": 64,
        "model.mlp_width": 128,
        "data.image_size": 16,
    },
    "distilbert": {**SMALL_TEXT, "model.config": "{n_layers: 2, dim: 16, hidden_dim: 16, n_heads: 2}"},
    "bigbird": {
        **SMALL_TEXT,
        "model.config": "{num_hidden_layers: 2, hidden_size: 16, intermediate_size: 16, num_attention_heads: 2}",
    },
    "language_model": {
        **SMALL_TEXT,
        "model.name": "llama",
        "model.config": "{num_hidden_layers: 2, hidden_size: 64, intermediate_size: 128, num_attention_heads: 2, "
        "num_key_value_heads: 2, vocab_size: 100}",
    },
}
"""The same runs with small models, to test this file where there is no GPU."""
LEFT_OUT = ("memory.compile", "data.workers")
"""Settings that those runs do without: they cost seconds, and show nothing there."""
