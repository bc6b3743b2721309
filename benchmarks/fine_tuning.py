"""DPO beside TRL's trainer, a masked language model (BERT-mini) beside transformers', a step of Muon beside torch's.

``python benchmarks/fine_tuning.py [ROUNDS]``, on a CPU; DPO needs ``pip install trl``. Each measurement is a process of
its own with one thread, in fp32. Systems take turns on the same weights and samples, in the same order.
"""

import csv
import hashlib
import json
import random
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Record, environment_here, process_memory, workplace
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainer import Memory, Optim
from trainer.engine.order import batch_indices
from trainer.memory.optimizer import build_optimizer

BATCH, STEPS, LR = 8, 10, 3e-4
BERT = {"vocab_size": 30_522, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
OTHERS = {"learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "num_train_epochs": 1}
OTHERS |= {
    "per_device_train_batch_size": BATCH,
    "train_sampling_strategy": "sequential",
    "use_cpu": True,
    "bf16": False,
}
OTHERS |= {"gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
SYSTEMS = {"DPO": ["ours", "TRL", "TRL, reference before"], "MLM": ["ours", "transformers"], "Muon": ["ours", "torch"]}
NEEDED = {"DPO": "trl", "MLM": "accelerate", "Muon": "torch"}


def prepare(work: Path) -> None:
    """Write the weights of both models, pairs of lm_dpo, and texts of 100 to 255 bytes; every byte is a token."""
    from transformers import BertConfig, BertForMaskedLM

    from trainer.commands.recipes import load_recipe
    from trainer.models.byte_tokenizer import byte_tokenizer

    recipe: Any = load_recipe("lm_dpo")[0]
    recipe.data.require_files()  # writes the pairs
    rows = [json.loads(line) for line in Path(recipe.data.train_files).read_text().splitlines() if line.isascii()]
    rows = [row for row in rows if all(100 <= len(text) < 256 for text in row.values())]
    pairs = random.Random(0).sample(rows, BATCH * STEPS)
    texts = [{"text": row["prompt"], "tokens": len(row["prompt"]) + 2} for row in pairs]
    pairs = [{**row, "tokens": sum(map(len, (*row.values(), row["prompt"]))) + 2} for row in pairs]
    modules = {"DPO": recipe.model.build(), "MLM": BertForMaskedLM(BertConfig(**BERT, intermediate_size=1024))}
    for part, samples in {"DPO": pairs, "MLM": texts}.items():
        (work / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
        for model in (modules[part], byte_tokenizer(masks=part == "MLM")):
            model.save_pretrained(work / part)


def ours(part: str) -> list[float]:
    from trainer import Checkpoint, Recipe, Run, fit
    from trainer.data import Documents, Preferences
    from trainer.models import CausalLM, MaskedLM

    run = Run(dir=f"{time.time_ns()}", accelerator="cpu", evaluate=False, predict=False, progress=False)
    files: Any = {"train_files": f"{part}.jsonl", "max_length": 512, "cache_dir": f"cache-{run.dir}"}
    model: Any = CausalLM(part, weights=part, loss="dpo") if part == "DPO" else MaskedLM(part, weights=part)
    data = Preferences(chat_template="plain", **files) if part == "DPO" else Documents(**files)
    own: Any = {"optim": Optim("adamw", lr=LR), "memory": Memory(micro_batch_size=BATCH), "run": run}
    fit(Recipe(model=model, data=data, batch_size=BATCH, max_steps=STEPS, checkpoint=Checkpoint(every=None), **own))
    rows = csv.DictReader(Path(f"{run.dir}/metrics.csv").read_text().splitlines())
    return [float(row["loss"]) for row in rows if row["loss"]]


def theirs(part: str, system: str, rows: list[dict[str, Any]]) -> list[float]:
    import transformers as hf

    tokenizer, trainer = hf.AutoTokenizer.from_pretrained(part), None
    if part == "DPO":
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        settings = DPOConfig("trl", precompute_ref_log_probs="before" in system, **OTHERS)
        model = hf.AutoModelForCausalLM.from_pretrained(part)
        trainer = DPOTrainer(model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    else:
        model, collate = hf.AutoModelForMaskedLM.from_pretrained(part), hf.DataCollatorForLanguageModeling(tokenizer)
        texts = [tokenizer(row["text"]) for row in rows]
        trainer = hf.Trainer(model, hf.TrainingArguments("hf", **OTHERS), collate, train_dataset=texts)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained(part: str, system: str) -> dict[str, Any]:
    """Train; tokens count from the end of the first step to the end of the last, those of a prompt twice."""
    rows = [json.loads(line) for line in Path(f"{part}.jsonl").read_text().splitlines()]
    rows = [rows[index] for step in range(STEPS) for index in batch_indices(0, 0, step, len(rows), BATCH)]
    clock: list[float] = []
    register_optimizer_step_post_hook(lambda *_: clock.append(time.process_time()))
    losses = ours(part) if system == "ours" else theirs(part, system, rows)
    assert len(clock) == len(losses) == STEPS
    speed = sum(row["tokens"] for row in rows[BATCH:]) / (clock[-1] - clock[0])
    return {"tokens_per_cpu_second": speed, "peak_mb": process_memory("VmHWM") / 1e6, "losses": losses}


def muon(system: str) -> dict[str, Any]:
    """Steps on tensors like those of the blocks of lm_dpo's Llama, with random gradients."""
    torch.manual_seed(0)
    used, spent, shapes = [], [], 4 * [*4 * [(128, 128)], (384, 128), (384, 128), (128, 384), (128,), (128,)]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    if system == "ours":
        used = [build_optimizer(parameters, Optim("muon", lr=LR), Memory(), torch.device("cpu"))]
    else:
        used = [torch.optim.Muon([p for p in parameters if p.ndim == 2], LR, 0.0, adjust_lr_fn="match_rms_adamw")]
        used += [torch.optim.AdamW([p for p in parameters if p.ndim == 1], LR, weight_decay=0.0, fused=True)]
    for _ in range(41):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        began = time.process_time()
        for optimizer in used:
            optimizer.step()
        spent.append(1000 * (time.process_time() - began))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()
    return {"cpu_ms_per_step": median(spent[1:]), "sha256_of_weights": digest}


def main() -> None:
    if len(sys.argv) == 3:
        measure = muon(sys.argv[2]) if sys.argv[1] == "Muon" else trained(*sys.argv[1:])
        Path("found.json").write_text(json.dumps(measure))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) == 2 else 2
    record, runs = Record("fine_tuning", {"rounds": rounds}), list[dict[str, Any]]()
    for part in (missing := [part for part, package in NEEDED.items() if not find_spec(package)]):
        print(f"{part} is skipped: pip install {NEEDED[part]}")
    systems = [(part, system) for part in SYSTEMS if part not in missing for system in SYSTEMS[part]]
    record.content["versions"] |= {NEEDED[part]: version(NEEDED[part]) for part, _ in systems}
    with workplace(None) as work:
        prepare(work)
        environment = environment_here() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        for number, (part, system) in product(range(rounds), systems):
            command = [sys.executable, str(Path(__file__).resolve()), part, system]
            subprocess.run(command, cwd=work, env=environment, check=True, capture_output=True)
            found = json.loads((work / "found.json").read_text())
            runs.append({"part": part, "system": system, "round": number, **found})
            record.write(rows=summary(runs), runs=runs)
            print(part, system, {key: value for key, value in found.items() if key != "losses"}, flush=True)
    record.write(complete=True)


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of the rounds; of DPO also the largest difference of a loss from ours."""
    rows = []
    for part, system in dict.fromkeys((run["part"], run["system"]) for run in runs):
        same = [run for run in runs if (run["part"], run["system"]) == (part, system)]
        keys = [key for key, value in same[0].items() if isinstance(value, float)]
        rows.append({"part": part, "system": system, **{key: median(run[key] for run in same) for key in keys}})
        if part == "DPO":
            pairs = zip(runs[0]["losses"], same[0]["losses"], strict=True)
            rows[-1]["largest_difference_of_losses"] = max(abs(own - other) for own, other in pairs)
    return rows


if __name__ == "__main__":
    main()
