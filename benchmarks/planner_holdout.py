"""Would the planner have known what others measured? Published peaks of scripts that it was not made with.

``python benchmarks/planner_holdout.py``: about 17 minutes on one core; ``--only WORD`` for the rows with that word,
beside which the others of the result stay as they were. Every row is a script of :mod:`holdout_scripts` under
``fake_gpu`` for its card and its version of torch, in a process of its own. Older versions of torch than it knows are
emulated by ``tests/fakegpu/published.py``, which has ten rows more: those that the planner was made with.

*reserved* and *allocated* are the peaks of torch's allocator, *smi* what nvidia-smi shows less what it showed before
the model was there, and *fits* asks whether the batch fitted a card, and the next larger one did not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Record, table
from holdout_scripts import GPT2, BertLarge, Head, LitGPT, Peft, Timm, TorchTune

from trainer.fakegpu.target import OLDEST_KERNELS
from trainer.planner import fake_gpu
from trainer.system.child_jobs import run_in_children

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakegpu"))
import published

GIB, MIB, GB = 2**30, 2**20, 1e9
BF16, FP16 = torch.bfloat16, torch.float16
IN_SAMPLE = "in sample"  # seen before the planner was ready, and two rules of torch 2.1 found after it


@dataclass(frozen=True)
class Row:
    """A published figure, and what was run for it."""

    source: str
    configuration: str
    card: str
    torch: tuple[int, int]
    kind: str  # reserved, allocated, smi or fits
    published: float  # GB of 1e9 bytes; of fits 1 or 0
    script: Callable[[], object]
    step_ms: float | None = None  # published
    note: str = ""  # what else differs

    @property
    def eager(self) -> bool:
        """Whether it ran as it is traced: not compiled."""
        return not self.note.startswith("compiled")


def gib(figure: float) -> float:
    return figure * GIB / GB


def mib_over(occupied: float) -> float:
    """What the guide's nvidia-smi showed, less the context."""
    return (occupied - 1343) * MIB / GB


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)


def few_bits(name: str, parameters: Any) -> torch.optim.Optimizer:
    import torchao.optim

    return getattr(torchao.optim, name)(parameters, lr=1e-4)


eight_bits, four_bits = partial(few_bits, "AdamW8bit"), partial(few_bits, "AdamW4bit")


def on_the_host(parameters: Any, gradients: bool = False) -> Any:
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(parameters, torch.optim.AdamW, offload_gradients=gradients, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, foreach=False)


# github.com/rasbt/LLMs-from-scratch, ch05/10_llm-training-speed/README.md at 9a89948 and later; its GB are GiB
TUTORIAL = partial(Row, "rasbt/LLMs-from-scratch ch05/10")
GPT2_ROWS = [
    TUTORIAL(f"GPT-2 124M, 8 x 1024, {what}", "a100-80gb", (2, 6), "reserved", gib(size), script, 8192e3 / rate, note)
    for what, size, rate, script, note in (
        ("fp32 AdamW, own attention", 26.2617, 12525, GPT2(), ""),
        ("mask made on the fly", 26.2422, 12526, GPT2(True), ""),
        ("tf32, fused AdamW", 26.2422, 28399, GPT2(True, True, True), ""),
        ("bf16 weights", 13.7871, 45486, GPT2(True, True, True, True), ""),
        ("torch's LayerNorm and GELU", 11.5645, 55256, GPT2(True, True, True, True, True), ""),
        ("flash attention", 5.9004, 91901, GPT2(True, True, True, True, True, True), ""),
        ("compiled", 6.1875, 112046, GPT2(True, True, True, True, True, True, compiled=True), "compiled"),
        ("vocabulary of 50304", 5.8906, 127345, GPT2(*[True] * 6, 50304, compiled=True), "compiled"),
        ("batch 32", 22.5078, 142156 / 4, GPT2(True, True, True, True, True, True, 50304, 32, True), "compiled"),
    )
]

# github.com/pytorch/ao, torchao/optim/README.md at 072500a, benchmarks/benchmark_low_bit_adam.py
TORCHAO = partial(Row, "pytorch/ao torchao/optim README")
GIANT = Timm("vit_giant_patch14_dinov2", 32, fused, weights=BF16, checkpointing=True, options=(("img_size", 224),))
ALL_HOSTED = replace(GIANT, optimizer=partial(on_the_host, gradients=True))
HOSTED = replace(GIANT, optimizer=on_the_host, compiled=True)
AMP_GIANT = replace(GIANT, weights=torch.float32, amp=BF16)
HUGE = partial(Timm, "vit_huge_patch14_224", 8, amp=BF16, compiled=True)
ON_4070 = ("rtx-4070-ti-super", (2, 4), "allocated")
VIT_ROWS = [
    TORCHAO("ViT-giant/14, batch 32, bf16, checkpointing", *ON_4070, 9.82, GIANT, 1270),
    TORCHAO("the same, compiled", *ON_4070, 9.90, replace(GIANT, compiled=True), 1180, "compiled"),
    TORCHAO("ViT-H/14, batch 8, bf16 AMP", *ON_4070, 12.23, HUGE(fused), 8e3 / 41.9, "compiled"),
    TORCHAO("the same, 8-bit AdamW", *ON_4070, 8.33, HUGE(eight_bits), 8e3 / 42.5, "compiled"),
    TORCHAO("the same, 4-bit AdamW", *ON_4070, 7.72, HUGE(four_bits), 8e3 / 42.4, "compiled"),
    TORCHAO("ViT-giant/14, bf16, AdamW on the host", *ON_4070, 5.24, replace(GIANT, optimizer=on_the_host), 1520),
    TORCHAO("ViT-giant/14, bf16, AdamW and gradients on the host", *ON_4070, 4.01, ALL_HOSTED, 1530),
    TORCHAO("ViT-giant/14, bf16, AdamW on the host, compiled", *ON_4070, 5.33, HOSTED, 1750, "compiled"),
    TORCHAO("ViT-giant/14, bf16 AMP", "rtx-4070-ti-super", (2, 4), "fits", 0.0, replace(AMP_GIANT, optimizer=fused)),
    TORCHAO(
        "ViT-giant/14, bf16 AMP, AdamW on the host", *ON_4070, 9.90, replace(AMP_GIANT, optimizer=on_the_host), 2180
    ),
]

# github.com/pytorch/torchtune, README.md at 1814feb (18 November 2024) and, of 8B, 30b8519 (24 September); the recipes'
# defaults where it names nothing else, but for the optimizer of 3B before "+ 8-bit AdamW": it is not named, that of the
# config would be one of 8 bits already, and AdamW is assumed. The adapters of 3B are on all but keys. What
# it calls active memory is compared with what is allocated: they differ by what waits for another stream.
TORCHTUNE = partial(Row, "pytorch/torchtune README")
ON_A100_80 = ("a100-80gb", (2, 5), "allocated")
TUNE_3B = partial(TorchTune, layers=28, size=3072, heads=24, inner=8192, tokens=4096, tied=True)
SAVING: dict[str, Any] = {"chunks": 8, "checkpointing": True}
IN_BACKWARD = {**SAVING, "in_backward": True}
EVERY = ("q", "k", "v", "o", "w1", "w2", "w3")
ADAPTED = {**SAVING, "offloading": True, "rank": 64, "adapted": ("q", "v", "o", "w1", "w2", "w3")}
COMPILED = partial(TUNE_3B, compiled=True)
TUNE_8B = partial(COMPILED, layers=32, size=4096, heads=32, inner=14336, tokens=2048, tied=False, rank=8, **SAVING)
TUNE_ROWS = [
    TORCHTUNE("Llama 3.2 3B, 2 x 4096, packed", *ON_A100_80, gib(60.0), TUNE_3B(), 8192e3 / 7075),
    *(
        TORCHTUNE(f"Llama 3.2 3B, {what}", *ON_A100_80, gib(size), COMPILED(**options), 8192e3 / rate, "compiled")
        for what, size, rate, options in (
            ("compiled", 51.0, 8998, {}),
            ("loss in chunks", 42.9, 9174, {"chunks": 8}),
            ("+ activation checkpointing", 24.9, 7210, SAVING),
            ("+ optimizer in backward", 23.1, 7309, IN_BACKWARD),
            ("+ activation offloading", 21.8, 7301, {**IN_BACKWARD, "offloading": True}),
            ("+ 8-bit AdamW", 17.6, 6960, {**IN_BACKWARD, "offloading": True, "optimizer": eight_bits}),
            ("LoRA", 8.5, 8210, ADAPTED),
            ("QLoRA", 4.6, 8035, {**ADAPTED, "nf4": True}),
        )
    ),
    *(
        TORCHTUNE(f"Llama 3.1 8B, 2 x 2048, {what}", "rtx-4090", *ON_A100_80[1:], gib(size), script, ms, "compiled")
        for what, size, ms, script in (
            ("LoRA", 16.2, 4096e3 / 3083, TUNE_8B(adapted=("q", "v"))),
            ("QLoRA", 7.4, 4096e3 / 2413, TUNE_8B(adapted=EVERY, nf4=True)),
        )
    ),
]


def adapters(kind: str = "LoraConfig", **options: Any) -> Any:
    import peft

    return getattr(peft, kind)(task_type="CAUSAL_LM", **options)


# github.com/huggingface/peft, method_comparison/MetaMathQA/results at 5d602fd: runs of July 2026 on an L40S. The length
# of the longest batch is not published: it is what the row of rank 32 needs, which therefore is in sample.
PEFT = partial(Row, "huggingface/peft MetaMathQA")
LONGEST = 695
ALL_HEADS = ["q_proj", "v_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
PEFT_ROWS = [
    PEFT(f"Llama 3.2 3B, {what}", "l40s", (2, 13), "reserved", size, Peft(options, LONGEST), note=note)
    for what, size, options, note in (
        ("LoRA of rank 32 on queries and values", 22.293, partial(adapters, r=32, target_modules=ALL_HEADS), IN_SAMPLE),
        ("all weights", 38.869, None, ""),
        ("LoRA of rank 64", 22.553, partial(adapters, r=64, target_modules=ALL_HEADS), ""),
        ("LoRA of rank 10 on the MLP", 24.698, partial(adapters, r=10, target_modules=MLP), ""),
        ("DoRA of rank 32", 24.532, partial(adapters, r=32, target_modules=ALL_HEADS, use_dora=True), ""),
        ("norms", 21.181, partial(adapters, "LNTuningConfig"), ""),
    )
]

# arxiv.org/abs/2411.09009, table 1, with benchmark/__main__.py of github.com/apple/ml-cross-entropy; over the inputs
APPLE = partial(Row, "Cut Your Losses, table 1")
INPUTS = (8192 + 256_000) * 2304 * 2 / GB
HEAD_CARD = ("a100-80gb", (2, 4), "allocated")
HEAD_ROWS = [
    APPLE("the loss of 8192 tokens of Gemma 2", *HEAD_CARD, 24_000 * MIB / GB + INPUTS, Head(False)),
    APPLE("the loss and its gradients", *HEAD_CARD, 28_000 * MIB / GB + INPUTS, Head(True)),
]

# huggingface/transformers docs/source/en/perf_train_gpu_one.mdx at 0016acf; run on 11 January 2022, torch 1.10
GUIDE = partial(Row, "HF perf_train_gpu_one")
ON_V100 = ("v100-16gb", (1, 10), "smi")
BERT_ROWS = [
    GUIDE(f"BERT-large, {what}", *ON_V100, mib_over(occupied), script, 4e3 / rate, note)
    for what, occupied, rate, options in (
        ("4 x 1 of 512 tokens, checkpointing", 6775, 5.99, {"micro_batch": 1, "checkpointing": True}),
        ("4 x 1, checkpointing, fp16", 7275, 10.09, {"micro_batch": 1, "checkpointing": True, "amp": FP16}),
        ("4 x 1", 8681, 7.75, {"micro_batch": 1}),
        ("batch 4", 14949, 8.86, {}),
        ("batch 4, fp16", 13939, 18.64, {"amp": FP16}),
        ("batch 4, Adafactor", 12295, 7.96, {"adafactor": True}),
        (
            "4 x 1, checkpointing, fp16, Adafactor",
            4847,
            9.06,
            {"micro_batch": 1, "checkpointing": True, "amp": FP16, "adafactor": True},
        ),
    )
    for script, note in (
        (BertLarge(**options), ""),
        (BertLarge(**options, keeps_input=True), "with the softmax of torch 1.10"),
    )[options.get("adafactor", False) :]
]

# github.com/Lightning-AI/litgpt, tutorials/resource-tables.md of 20 October 2023, code of commit 8641822
LITGPT = partial(Row, "Lightning-AI/litgpt resource tables")
LATER = "with the RMSNorm of 24 October 2023, in fp32"  # commit 6178c7c, three days before the tables were merged
ON_A100 = ("a100-40gb", (2, 1), "allocated")
PHI = partial(
    LitGPT, tokens=1044, layers=24, size=2048, heads=32, vocabulary=51200, inner=8192, rotary=0.5, shared_norm=True,
    head_bias=True,
)  # fmt: skip
STABLELM = partial(LitGPT, tokens=1034, layers=16, size=4096, heads=32, vocabulary=50688, inner=16384, rotary=0.25)
LLAMA = partial(LitGPT, tokens=1304, vocabulary=32000, rotary=1.0, llama=True)
LLAMA_7B = partial(LLAMA, layers=32, size=4096, heads=32, inner=11008)
LLAMA_13B = partial(LLAMA, layers=40, size=5120, heads=40, inner=13824)
LORA_ROWS = [
    LITGPT(f"LoRA {what}, {batch} x {script.keywords['tokens']}", *ON_A100, size, script(batch, **options), note=note)
    for what, batch, size, script in (
        ("phi-1.5", 1, 4.82, PHI),
        ("phi-1.5", 2, 6.76, PHI),
        ("phi-1.5", 4, 10.68, PHI),
        ("StableLM 3B", 1, 9.69, STABLELM),
        ("StableLM 3B", 2, 12.10, STABLELM),
        ("StableLM 3B", 4, 16.92, STABLELM),
        ("Llama-2 7B", 1, 21.30, LLAMA_7B),
        ("Llama-2 7B", 2, 29.07, LLAMA_7B),
        ("Llama-2 13B", 1, 38.12, LLAMA_13B),
    )
    for note, options in [("", {}), (LATER, {"norm_in_fp32": True})][: 1 + ("Llama" in what)]
]

# github.com/huggingface/pytorch-image-models, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv: batches of 512,
# 384, 256, ... are tried until one fits
TIMM = partial(Row, "timm benchmark-train")
FITS_ROWS = [
    TIMM(f"{name}, AMP, batch {batch}", "rtx-3090", (1, 12), "fits", float(ms is not None),
         Timm(name, batch, sgd, amp=FP16, benchmark=True), ms)
    for name, batch, ms in (
        ("vit_small_patch16_224", 384, 363.872),
        ("vit_small_patch16_224", 512, None),
        ("convnext_tiny", 256, 313.859),
        ("convnext_tiny", 384, None),
        ("resnet50", 512, 618.983),
        ("resnet18", 512, 184.877),
        ("mobilenetv2_100", 512, 278.633),
        ("efficientnet_b0", 384, 262.1),
        ("efficientnet_b0", 512, None),
        ("densenet121", 256, 348.758),
        ("densenet121", 384, None),
        ("swin_tiny_patch4_window7_224", 256, 394.841),
        ("swin_tiny_patch4_window7_224", 384, None),
    )
]  # fmt: skip

# github.com/rasbt/pytorch-memory-optim, logs.md
LADDER_ROWS = [
    Row(
        "rasbt/pytorch-memory-optim", f"ViT-L/16, {name}", "a100-80gb", (2, 1), "reserved", size, script, note=IN_SAMPLE
    )
    for name, (size, script) in published.ROWS.items()
]

ROWS = [*GPT2_ROWS, *TUNE_ROWS, *PEFT_ROWS, *HEAD_ROWS, *VIT_ROWS, *BERT_ROWS, *LORA_ROWS, *LADDER_ROWS, *FITS_ROWS]
"""All rows, by their source."""

NOT_REBUILT = {
    "HF perf_train_gpu_one, 8-bit Adam (2 rows)": "kernels of bitsandbytes, which is not installed",
    "pytorch/ao, bitsandbytes, FP8 and lpmm optimizers; DeepSpeed": "kernels that are not torch's",
    "pytorch/ao, Llama-2 7B by torchtune; torchtune, 3B without packing": "how long its samples were is not known",
    "torchtune, 8B with all weights": "a paged optimizer of bitsandbytes, whose state torch does not count",
    "torchtune, LoRA in 30.3 GiB on an A6000": "which settings differ from those in 16.2 GiB is not said",
    "torchtune, 70B and 405B": "FSDP on eight GPUs, with samples and settings that are not said",
    "unsloth, longest context by card; its Hugging Face + FA2 column": "kernels of its own, and of bitsandbytes",
    "Cut Your Losses, the other rows of table 1; Liger": "kernels of Triton, or compiled",
    "huggingface/peft, the other methods": "not looked at",
    "litgpt, config_hub": "how long its samples were is not known",
    "torchtitan, tables 2 to 6": "float8, tensor parallel",
    "litgpt, quantised rows": "kernels of bitsandbytes",
    "litgpt, rows on several GPUs; rasbt/pytorch-memory-optim 08 to 10": "FSDP1, which the project does not have",
}
"""Published figures that were looked at and left out, and why."""


def predicted(row: Row) -> dict[str, Any]:
    """Peaks in bytes, whether it fits, and the time of a step."""
    known = row.torch >= OLDEST_KERNELS
    with (fake_gpu if known else published.old_gpu)(row.card, torch_version=".".join(map(str, row.torch))) as gpu:
        row.script()
    return {"allocated": gpu.allocated, "reserved": gpu.reserved, "fits": gpu.retries is not None, "ms": gpu.step_ms}


def compared(row: Row, found: Any) -> dict[str, Any]:
    """A row beside what was predicted, or why it was not."""
    known: dict[str, Any] = {
        "source": row.source,
        "configuration": row.configuration,
        "card": row.card,
        "torch": ".".join(map(str, row.torch)),
        "kind": row.kind,
        "eager": row.eager,
        "note": row.note,
        "published_gb": None if row.kind == "fits" else round(row.published, 3),
        "published_ms": row.step_ms and round(row.step_ms, 1),
    }
    if isinstance(found, Exception):
        return known | {"refused": str(found)}
    size = found["allocated" if row.kind == "allocated" else "reserved"]
    known |= {"predicted_gb": round(size / GB, 3), "allocated_gb": round(found["allocated"] / GB, 3)}
    known["predicted_ms"] = found["ms"] and round(found["ms"], 1)
    if row.step_ms:
        known["error_ms"] = round(found["ms"] / row.step_ms - 1, 4)
    if row.kind == "fits":
        return known | {"fitted": bool(row.published), "predicted_fits": found["fits"]}
    return known | {"error": round(size / (row.published * GB) - 1, 5)}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians and worst errors of what ran uncompiled, by versions of torch, and of the times."""
    eager = [row for row in rows if row["eager"] and "error" in row]
    groups = {
        "torch 2.4 to 2.6": [row for row in eager if row["torch"] in ("2.4", "2.5", "2.6")],
        "torch 2.13, one length found": [row for row in eager if row["torch"] == "2.13" and not row["note"]],
        "torch 2.1": [row for row in eager if row["torch"] == "2.1" and not row["note"]],
        "torch 2.1, LoRA with RMSNorm in fp32": [row for row in eager if row["note"] == LATER],
        "torch 2.1, in sample": [row for row in eager if row["note"] == IN_SAMPLE and row["torch"] == "2.1"],
        "torch 1.10": [row for row in eager if row["torch"] == "1.10" and not row["note"]],
        "torch 1.10, with its softmax": [row for row in eager if row["torch"] == "1.10" and row["note"]],
        "compiled, traced eager": [row for row in rows if not row["eager"] and "error" in row],
    }
    found: dict[str, Any] = {}
    for name, of in groups.items():
        errors = [abs(row["error"]) for row in of]
        if errors:
            found[name] = {"rows": len(errors), "median": median(errors), "worst": max(errors)}
    asked = [row for row in rows if "fitted" in row]
    found["fits"] = {"rows": len(asked), "right": sum(row["fitted"] == row["predicted_fits"] for row in asked)}
    times = [abs(row["error_ms"]) for row in rows if "error_ms" in row]
    if times:
        found["step times"] = {"rows": len(times), "median": median(times), "worst": max(times)}
    return found


def memory_cells(row: dict[str, Any]) -> list[str]:
    """A line of the table of docs/planner/accuracy.md."""
    note = f" ({row['note']})" if row["note"] else ""
    if row["kind"] == "fits":
        published, verdict = "fitted" if row["fitted"] else "did not fit", row["fitted"] == row.get("predicted_fits")
        error = "right" if verdict else "**wrong**"
    else:
        published = f"{row['published_gb']:.3f}"
        error = f"{100 * row['error']:+.2f} %".replace("-", "−") if "error" in row else "**refused**"
    found = f"{row['predicted_gb']:.3f}" if "predicted_gb" in row else ""
    place = f"{row['card']}, {row['torch']}"
    return [f"{row['source']}: {row['configuration']}{note}", place, row["kind"], published, found, error]


def time_cells(row: dict[str, Any]) -> list[str]:
    """A line of the table of step times."""
    error = f"{100 * row['error_ms']:+.0f} %"
    return [row["configuration"], row["card"], f"{row['published_ms']:.0f}", f"{row['predicted_ms']:.0f}", error]


def main() -> None:
    """Predict every row, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows with this word in their source or configuration; others stay")
    parser.add_argument("--at-once", type=int, default=1, help="predictions at the same time")
    options = parser.parse_args()
    wanted = [row for row in ROWS if options.only.lower() in f"{row.source} {row.configuration} {row.note}".lower()]
    import timm  # noqa: F401 - once, not in every child
    import transformers  # noqa: F401

    record = Record("planner_holdout", {"only": options.only})
    before = json.loads(record.path.read_text())["rows"] if options.only and record.path.is_file() else []
    found = {(row["source"], row["configuration"], row["note"]): row for row in before}
    names = [(row.source, row.configuration, row.note) for row in ROWS]
    for number, answer in run_in_children([partial(predicted, row) for row in wanted], options.at_once):
        row = compared(wanted[number], answer)
        found[wanted[number].source, wanted[number].configuration, wanted[number].note] = row
        print(" | ".join(memory_cells(row)), row.get("refused", ""), flush=True)
        rows = [found[name] for name in names if name in found]
        record.write(len(rows) == len(names), rows=rows, summary=summary(rows), not_rebuilt=NOT_REBUILT)
    header = ["script", "card, torch", "kind", "published GB", "predicted", "error"]
    print(table(header, [memory_cells(row) for row in rows]))
    timed = [time_cells(row) for row in rows if "error_ms" in row]
    print(table(["step", "card", "published ms", "predicted", "error"], timed))
    for name, figures in summary(rows).items():
        print(name, figures)


if __name__ == "__main__":
    main()
