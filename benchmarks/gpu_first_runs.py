"""Processes that ``gpu_first.py`` starts: ``gpu_first_runs.py --kind=KIND --out=FILE ... fit RECIPE --key=value ...``.

``speed`` trains with ours or with transformers' Trainer, until enough steps are timed; ``nf4`` times kernels;
``kernel`` launches one, for a sanitizer. What was measured is written to FILE as JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trainer.recipe import Recipe

NF4_SHAPE = (14_336, 4_096)
TIMES = 100


# ----------------------------------------------------------------------------------------------------------------------
# Training


def train(recipe: Recipe, source: str, who: str, out: Path, steps: int) -> None:
    """Train until ``steps`` after the first one are timed; the clock writes ``out`` and ends the process."""
    from contenders import Clock, quiet

    quiet()
    torch.manual_seed(0)
    clock = Clock(steps, 1, out)
    if who == "ours":
        from trainer.api import fit

        fit(recipe, source)
    else:
        theirs(recipe)
    raise SystemExit(f"the run ended after {clock.taken} steps of {steps + 1}")


def theirs(recipe: Recipe) -> None:
    """The same model, samples, micro-batches and precision with transformers' Trainer."""
    from contenders import Job, transformers_trainer
    from torch.optim import AdamW

    from trainer.contract import Preparable, capability, prepare_data
    from trainer.engine.data_feed import fill_from_data

    data = recipe.data
    prepare_data(data, recipe.model, capability(recipe.model, Preparable).tokenizer_or_none())
    recipe = recipe.replace(model=fill_from_data(recipe.model, data))
    on_gpu, micro = torch.cuda.is_available(), recipe.memory.micro_batch_size
    assert isinstance(micro, int)
    arguments: dict[str, Any] = {"max_steps": recipe.max_steps, "dataloader_num_workers": 4 if on_gpu else 0}
    if recipe.memory.activation_checkpointing == "full":
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    job = Job(
        build(recipe, "cuda" if on_gpu else "cpu"),
        data.train,
        lambda batch: batch,  # these datasets give whole micro-batches
        micro,
        recipe.batch_size // micro,
        lambda module: AdamW([p for p in module.parameters() if p.requires_grad], lr=recipe.optim.lr, fused=on_gpu),
        accelerator="cuda" if on_gpu else "cpu",
        precision="bf16-mixed" if recipe.memory.precision == "bf16-mixed" else "32-true",
        arguments=arguments,
    )
    transformers_trainer(job)


def build(recipe: Recipe, device: str) -> torch.nn.Module:
    """The recipe's model as transformers or torchvision makes it, with random weights, on ``device``."""
    from contenders import WithLoss

    model: Any = recipe.model
    if model.task not in ("language", "single_label") or not hasattr(model, "auto"):
        return WithLoss(model.build()).train()
    import transformers

    config = model._configuration()
    if model.task == "language":
        config.use_cache = False
    dtype = torch.bfloat16 if recipe.memory.precision == "bf16-true" else torch.float32
    with torch.device(device):
        module = getattr(transformers, model.auto).from_config(config, trust_remote_code=False, dtype=dtype)
    if model.lora.rank:
        module = adapted(module, model.lora)
    if device == "cuda":  # of the memory that is measured, the whole weights in bf16 are no part
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return module.train()


def adapted(module: torch.nn.Module, lora: Any) -> torch.nn.Module:
    """With peft's adapters, and with bitsandbytes' NF4 where the recipe has NF4."""
    from peft import LoraConfig, get_peft_model

    if lora.base == "nf4":
        import bitsandbytes

        for parent in list(module.modules()):
            for name, layer in list(parent.named_children()):
                if name in lora.targets and isinstance(layer, torch.nn.Linear):
                    setattr(parent, name, _quantised(bitsandbytes, layer))
        module.is_loaded_in_4bit = True  # type: ignore[assignment]  # peft then takes its layers for such weights
    config = LoraConfig(r=lora.rank, lora_alpha=2 * lora.rank, lora_dropout=0.0, target_modules=list(lora.targets))
    found = get_peft_model(module, config).train()
    found.enable_input_require_grads()  # checkpointed blocks need an input that has a gradient
    return found


def _quantised(bitsandbytes: Any, layer: torch.nn.Linear) -> torch.nn.Module:
    weight = layer.weight
    new = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=weight.dtype,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    data = bitsandbytes.nn.Params4bit(
        weight.data.cpu(), requires_grad=False, compress_statistics=True, quant_type="nf4", module=new
    )
    new.weight, new.bias = data, layer.bias
    return new.to(weight.device)


# ----------------------------------------------------------------------------------------------------------------------
# Kernels


def seconds_of(work: Callable[[], Any], times: int) -> float:
    """Mean seconds of ``work``, by the device's own clock where there is one."""
    for _ in range(3):
        work()
    if not torch.cuda.is_available():
        began = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - began) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def time_nf4(tiny: bool) -> dict[str, Any]:
    """Seconds and GB/s of making one weight whole: by the kernel, by torch's operations, by bitsandbytes."""
    from trainer.weights import nf4

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, times = ((64, 512), 3) if tiny else (NF4_SHAPE, TIMES)
    weight = torch.randn(shape, device=device)
    codes, count = nf4.quantise(weight), weight.numel()
    moved = codes.numel() + 2 * count  # what must be read and written at the least
    found: dict[str, Any] = {"shape": list(shape), "bytes": moved, "has_kernel": nf4.has_kernels(codes)}

    def note(name: str, work: Callable[[], Any]) -> None:
        seconds = seconds_of(work, times)
        found[name] = {"seconds": seconds, "gb_per_second": moved / seconds / 1e9}

    if found["has_kernel"]:
        note("kernel", lambda: nf4.dequantise(codes, shape, torch.bfloat16))
    kernels, nf4.has_kernels = nf4.has_kernels, lambda tensor: False
    note("operations", lambda: nf4.dequantise(codes, shape, torch.bfloat16))
    nf4.has_kernels = kernels
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    except ImportError:
        return found | {"bitsandbytes": "not installed"}
    try:
        packed, state = quantize_4bit(weight.bfloat16(), compress_statistics=True, quant_type="nf4")
        note("bitsandbytes", lambda: dequantize_4bit(packed, state))
    except Exception as error:
        found["bitsandbytes"] = f"failed: {type(error).__name__}: {error}"[:300]
    return found


def launch_kernel(name: str) -> dict[str, Any]:
    """Launch a kernel on odd shapes, for a sanitizer that watches it."""
    if name == "nf4":
        from trainer.weights.nf4 import dequantise, quantise

        for shape in ((66, 131), (33, 777)):
            dequantise(quantise(torch.randn(shape, device="cuda")), shape, torch.bfloat16)
    else:
        from trainer.models.chunked_loss import chunked_loss

        head = torch.nn.Linear(64, 777, bias=False, device="cuda", dtype=torch.bfloat16)
        hidden = torch.randn(37, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        chunked_loss(hidden, head, torch.randint(777, (37,), device="cuda"), chunk=16).backward()
    torch.cuda.synchronize()
    return {"kernel": name}


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["speed", "nf4", "kernel"], required=True)
    parser.add_argument("--out", type=Path, required=True, help="file to write what was measured to")
    parser.add_argument("--who", choices=["ours", "transformers"], default="ours")
    parser.add_argument("--steps", type=int, default=1, help="that are timed, after one that is not")
    parser.add_argument("--kernel", choices=["nf4", "loss"], default="nf4")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="fit RECIPE --key=value ...")
    asked = parser.parse_args(argv)
    if asked.kind == "speed":
        from measured_run import read

        recipe, source = read(asked.words[1:])
        train(recipe, source, asked.who, asked.out, asked.steps)
    found = time_nf4(asked.tiny) if asked.kind == "nf4" else launch_kernel(asked.kernel)
    asked.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
