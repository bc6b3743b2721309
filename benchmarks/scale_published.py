"""Is a script on many ranks predicted as others have measured it? torchtitan's Llama 3.1 8B under FSDP2 on H100s.

``python benchmarks/scale_published.py``: two minutes on two cores. Published:
https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: bfloat16
without compiling, 2 sequences of 8,192 tokens on each GPU, selective activation checkpointing, AdamW, expandable
segments (``run_llama_train.sh``); eight GPUs with NVLink in a host, 400 Gbit/s of RDMA network for each GPU. Their H100
have 96 GB of HBM2e at 2.4 TB/s and a power limit of 500 W (an H100 SXM: 3.35 TB/s, 700 W).

The loop is written anew after torchtitan's at 9dec370. ``trainer plan --script train.py`` traces the original, with the
same peaks; it needs torchtitan's requirements, a tokenizer of 128,256 words and ``--columns text:str:20000``.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import Record, table
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.fakegpu import fake_gpu
from trainer.fakegpu.gpus import gpu_named
from trainer.system.child_jobs import run_in_children

GIB = 2**30
TOKENS, SEQUENCES, STEPS = 8192, 2, 3
NETWORK = "8x-ib-ndr"
PUBLISHED = {8: (5762, 82.4), 128: (5605, 67.0)}
"""By the number of GPUs: tokens a second of each, and GiB of memory."""
SIZE, LAYERS, HEADS, GROUPS, HEAD, INNER, WORDS = 4096, 32, 32, 8, 128, 14336, 128_256
aten = torch.ops.aten
SAVED = {aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_flash_attention.default}
Linear = partial(nn.Linear, bias=False)


def contexts() -> Any:
    """Save attention and every second matrix product of a block, and recompute everything else."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        counts[context.is_recompute] += operation is aten.mm.default
        is_saved = counts[context.is_recompute] % 2 if operation is aten.mm.default else operation in SAVED
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Norm(nn.Module):
    """RMSNorm of single operations in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        whole = x.float()
        normal = (whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normal * self.weight


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


def repeated(x: Tensor) -> Tensor:
    batch, tokens = x.shape[:2]
    expanded = x.unsqueeze(3).expand(batch, tokens, GROUPS, HEADS // GROUPS, HEAD)
    return expanded.reshape(batch, tokens, HEADS, HEAD)


class Block(nn.Module):
    """A block of Llama, with its checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = Linear(SIZE, SIZE), Linear(SIZE, SIZE)
        self.key, self.value = Linear(SIZE, GROUPS * HEAD), Linear(SIZE, GROUPS * HEAD)
        self.gate, self.up, self.down = Linear(SIZE, INNER), Linear(SIZE, INNER), Linear(INNER, SIZE)
        self.norm1, self.norm2 = Norm(), Norm()

    def attend(self, x: Tensor, angles: Tensor) -> Tensor:
        parts = [
            linear(x).view(*x.shape[:2], -1, HEAD) for linear in (self.query, self.key, self.value)
        ]  # in this order: every second product is saved
        query, key = rotated(parts[0], angles), rotated(parts[1], angles)
        heads = [part.transpose(1, 2) for part in (query, repeated(key), repeated(parts[2]))]
        found = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(found.transpose(1, 2).contiguous().view(x.shape))

    def compute(self, x: Tensor, angles: Tensor) -> Tensor:
        h = x + self.attend(self.norm1(x), angles)
        y = self.norm2(h)
        return h + self.down(functional.silu(self.gate(y)) * self.up(y))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return checkpoint(self.compute, x, angles, use_reentrant=False, context_fn=contexts, preserve_rng_state=False)


class Llama(nn.Module):
    """Llama 3.1 8B."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, SIZE)
        self.register_buffer("angles", torch.zeros(TOKENS, HEAD // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(), Linear(SIZE, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.head(self.norm(x))


def trained(ranks: int) -> None:
    """The first steps."""
    torch.cuda.empty_cache()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = Llama()
    shard = partial(fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for number, layer in enumerate(model.layers):
        shard(layer, reshard_after_forward=number < LAYERS - 1)
    shard(model, reshard_after_forward=True)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.trunc_normal_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    for _ in range(STEPS):
        ids = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long)
        ids, labels = ids.to("cuda"), ids.clone().to("cuda")
        optimizer.zero_grad()
        logits = model(ids)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


def compared(ranks: int) -> dict[str, Any]:
    """What was predicted beside what was published for as many GPUs."""
    gpu = replace(gpu_named("h100-sxm"), title="H100 96 GB HBM2e", memory=int(95 * GIB), bandwidth=2.4e12)
    nodes, version = max(1, ranks // 8), "2.6"  # a nightly build of 23 December 2024
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with fake_gpu(gpu, torch_version=version, ranks=ranks, nodes=nodes, interconnect=NETWORK) as found:
        trained(ranks)
    (speed, memory), rate = PUBLISHED[ranks], 1e3 * SEQUENCES * TOKENS / (found.step_ms or 0)
    return {
        "strategy": "fsdp",
        "GPUs": ranks,
        "tokens/s published": speed,
        "predicted": round(rate),
        "ratio": round(rate / speed, 2),
        "GiB published": memory,
        "GiB predicted": round(found.reserved / GIB, 1),
        "memory ratio": round(found.reserved / GIB / memory, 3),
        "GiB of tensors": round(found.allocated / GIB, 1),
        "exposed ms": round(found.exposed_ms or 0, 1),
        "step ms": round(found.step_ms or 0, 1),
    }


def main() -> None:
    """Simulate, print the comparison and write it."""
    settings = {"gpu": "H100 96 GB HBM2e", "network": NETWORK, "tokens": TOKENS, "sequences": SEQUENCES}
    record = Record("scale_published", settings)
    rows = [row for _, row in sorted(run_in_children([partial(compared, ranks) for ranks in PUBLISHED]))]
    record.write(True, rows=rows)
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))


if __name__ == "__main__":
    main()
