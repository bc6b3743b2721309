"""Is the table of scale near to what others have measured? torchtitan's Llama 3.1 8B under FSDP2 on 8 and 128 H100.

``python benchmarks/scale_published.py``: two minutes on two cores. The model is traced from its shape, without weights.

Published: https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3:
bfloat16 without compiling, 2 sequences of 8,192 tokens on each GPU, selective activation checkpointing, AdamW; eight
GPUs with NVLink in a host, 400 Gbit/s of RDMA network for each GPU. Their H100 have 96 GB of HBM2e at 2.4 TB/s and a
power limit of 500 W (an H100 SXM: 3.35 TB/s, 700 W).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import Record, table
from planner_speed import LLAMA_8B
from torch import nn

from trainer import Data, Loss, Memory, Model, Optim, Recipe
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.network import clusters, interconnects
from trainer.fakegpu.target import Target
from trainer.models.base import classification_loss
from trainer.planner.predict import prepare_recipe
from trainer.planner.scale import ScaleReport, ScaleRow, ScaleSearch

GIB = 2**30
TOKENS, SEQUENCES = 8192, 2
NETWORK = "8x-ib-ndr"
PUBLISHED = {8: (5762, 82.4), 128: (5605, 67.0)}
"""By the number of GPUs: tokens a second of each, and GiB of memory."""


@dataclass
class Decoder(Model):
    """Llama 3.1 8B, which predicts every next token."""

    def build(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**LLAMA_8B, max_position_embeddings=TOKENS, use_cache=False))

    @property
    def blocks(self) -> Sequence[type]:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        return (LlamaDecoderLayer,)

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        logits = module(input_ids=batch["input_ids"]).logits
        yield classification_loss(logits.flatten(0, 1), batch["labels"].flatten())


@dataclass
class Tokens(Data):
    """Sequences of one token, over and over."""

    def prepare(self, tokenizer: Any = None) -> None:
        ids = torch.ones(TOKENS, dtype=torch.int64)
        self.train = [{"input_ids": ids, "labels": ids}] * (SEQUENCES * max(PUBLISHED))


def main() -> None:
    """Simulate, print the comparison and write it."""
    gpu = replace(gpu_named("h100-sxm"), title="H100 96 GB HBM2e", memory=int(95 * GIB), bandwidth=2.4e12)
    recipe = Recipe(
        model=Decoder(),
        data=Tokens(),
        optim=Optim("adamw", lr=3e-4, clip_norm=1.0),
        accumulate=1,
        memory=Memory(
            micro_batch_size=SEQUENCES, strategy="fsdp", precision="bf16-mixed", activation_checkpointing="selective"
        ),
    )
    sizes = clusters(list(PUBLISHED), None, None)
    report = ScaleSearch(
        prepare_recipe(recipe), Target(gpu), sizes, interconnects(NETWORK, gpu), lambda *said: print(*said)
    ).run()
    record = Record("scale_published", {"gpu": gpu.title, "network": NETWORK, "tokens": TOKENS, "sequences": SEQUENCES})
    rows = [
        compared(row, report) for row in report.rows if row.strategy in ("fsdp", "hsdp") and row.prediction is not None
    ]
    record.write(True, rows=rows)
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))


def compared(row: ScaleRow, report: ScaleReport) -> dict[str, Any]:
    """A row beside what was published for as many GPUs."""
    assert row.prediction is not None
    speed, memory = PUBLISHED[row.cluster.devices]
    cost = row.prediction.costs[NETWORK]
    rate = row.samples_per_second(NETWORK) * TOKENS
    return {
        "strategy": row.strategy,
        "GPUs": row.cluster.devices,
        "tokens/s published": speed,
        "predicted": round(rate),
        "ratio": round(rate / speed, 2),
        "GiB published": memory,
        "GiB predicted": round(row.prediction.reserved / GIB, 1),
        "memory ratio": round(row.prediction.reserved / GIB / memory, 2),
        "exposed ms": round(cost.exposed_ms, 1),
        "step ms": round(cost.step_ms, 1),
    }


if __name__ == "__main__":
    main()
