"""DPO beside TRL's trainer, a masked language model (BERT-mini) beside transformers', a step of Muon beside torch's.

``python benchmarks/fine_tuning.py``, on a CPU; DPO needs ``pip install trl``. Each measurement is a process of
its own with one thread, in fp32. Systems take turns on the same weights and samples, in the same order.
"""

import csv
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

import torch
import transformers as hf
from common import Record, environment_here, process_memory, resolve, workplace
from torch.optim.optimizer import register_optimizer_step_post_hook

import trainer
from trainer import Memory, Optim
from trainer.engine.order import batch_indices
from trainer.models.byte_tokenizer import byte_tokenizer

ROUNDS, BATCH, STEPS, LR = 2, 8, 10, 3e-4
RECIPES = {"DPO": "lm_dpo --memory.micro_batch_tokens null", "MLM": "masked_lm --optim.weight_decay 0"}
OURS = "--model.name {0} --model.weights {0} --model.tokenizer null --model.config {{}} --data.train_files {0}.jsonl"
OURS += " --data.val_files null --data.max_length 512 --data.cache_dir cache{1} --run.dir run{1} --run.predict false"
OURS += " --run.evaluate false --checkpoint.every null --run.accelerator cpu --optim.schedule constant"
OURS += f" --optim.warmup_steps 0 --optim.clip_norm null --optim.lr {LR} --max_steps {STEPS} --batch_size {BATCH}"
OURS += f" --memory.micro_batch_size {BATCH} --run.progress false"
BERT: Any = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
OTHERS: Any = {"learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "num_train_epochs": 1}
OTHERS |= {"per_device_train_batch_size": BATCH, "train_sampling_strategy": "sequential", "bf16": False, "use_cpu": 1}
OTHERS |= {"gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
SYSTEMS = {"DPO": ["ours", "TRL", "TRL, reference before"], "MLM": ["ours", "transformers"], "Muon": ["ours", "torch"]}
NEEDED = {"DPO": "trl", "MLM": "accelerate", "Muon": "torch"}


def prepare(work: Path) -> None:
    """Write the weights of both models, pairs of lm_dpo, and texts of 100 to 255 bytes; every byte is a token."""
    torch.manual_seed(0)
    recipe: Any = resolve(["lm_dpo"])
    recipe.data.require_files()  # writes the pairs
    rows = [json.loads(line) for line in Path(recipe.data.train_files).read_text().splitlines() if line.isascii()]
    rows = [row for row in rows if all(100 <= len(text) < 256 for text in row.values())]
    rows = random.Random(0).sample(rows, BATCH * STEPS)
    texts, bert = [{"text": row["prompt"]} for row in rows], hf.BertForMaskedLM(hf.BertConfig(**BERT))
    for part, samples, model in (("DPO", rows, recipe.model.build()), ("MLM", texts, bert)):
        (work / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
        model.save_pretrained(work / part)
        byte_tokenizer(masks=part == "MLM").save_pretrained(work / part)


def ours(part: str) -> list[float]:
    recipe = resolve([*RECIPES[part].split(), *OURS.format(part, time.time_ns()).split()])
    trainer.fit(recipe)
    with open(f"{recipe.run.dir}/metrics.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def theirs(part: str, system: str, rows: list[dict[str, Any]]) -> list[float]:
    kind: Any = hf.AutoModelForCausalLM if part == "DPO" else hf.AutoModelForMaskedLM
    model = kind.from_pretrained(part, trust_remote_code=False, use_safetensors=True)
    tokenizer = hf.AutoTokenizer.from_pretrained(part, trust_remote_code=False)
    if part == "DPO":
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        used: Any = DPOConfig("trl", precompute_ref_log_probs="before" in system, **OTHERS)
        trainer: Any = DPOTrainer(model, None, used, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    else:
        used, collate = hf.TrainingArguments("hf", **OTHERS), hf.DataCollatorForLanguageModeling(tokenizer)
        trainer = hf.Trainer(model, used, collate, train_dataset=[tokenizer(row["text"]) for row in rows])
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
    tokens = sum(sum(map(len, row.values())) + len(row.get("prompt", "")) + 2 for row in rows[BATCH:])
    found = {"tokens_per_cpu_second": tokens / (clock[-1] - clock[0]), "peak_mb": process_memory("VmHWM") / 1e6}
    return found | {"losses": losses}


def muon(system: str) -> dict[str, Any]:
    """Steps on tensors like those of the blocks of lm_dpo's Llama, with random gradients."""
    from trainer.memory.optimizer import build_optimizer  # takes memory

    torch.manual_seed(0)
    shapes = 4 * [*4 * [(128, 128)], (384, 128), (384, 128), (128, 384), (128,), (128,)]
    parameters, spent = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes], []
    matrices, vectors = ([p for p in parameters if p.ndim == dimensions] for dimensions in (2, 1))
    used: Any = [build_optimizer(parameters, Optim("muon", lr=LR), Memory(), torch.device("cpu"))]
    if system == "torch":
        used = [torch.optim.Muon(matrices, LR, 0.0, adjust_lr_fn="match_rms_adamw")]
        used += [torch.optim.AdamW(vectors, LR, weight_decay=0.0, fused=True)]
    for _ in range(41):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        began = time.process_time()
        for optimizer in used:
            optimizer.step()
        spent.append(1000 * (time.process_time() - began))
    bits = b"".join(p.detach().numpy().tobytes() for p in parameters)
    return {"cpu_ms_per_step": median(spent[1:]), "crc32_of_weights": crc32(bits)}


def main() -> None:
    record, found = Record("fine_tuning", {"rounds": ROUNDS}), defaultdict[Any, Any](lambda: defaultdict(list))
    parts = [part for part, package in NEEDED.items() if find_spec(package) or print(f"{part}: pip install {package}")]
    record.content["versions"] |= {NEEDED[part]: version(NEEDED[part]) for part in parts}
    with workplace(None) as work:
        prepare(work)
        for part, system in ROUNDS * [(one, name) for one in parts for name in SYSTEMS[one]]:
            command = [sys.executable, str(Path(__file__).resolve()), part, system]
            subprocess.run(command, cwd=work, env=environment_here() | {"OMP_NUM_THREADS": "1"}, check=True)
            for key, value in json.loads((work / "found.json").read_text()).items():
                found[part, system][key].append(value)
            record.write(rows=[{"part": one, "system": name, **row} for (one, name), row in found.items()])
    if "DPO" in parts:
        (own,), (other,) = ({tuple(one) for one in found["DPO", system]["losses"]} for system in ("ours", "TRL"))
        record.write(largest_difference_of_losses=max(abs(a - b) for a, b in zip(own, other, strict=True)))
    record.write(complete=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        measured = muon(sys.argv[2]) if sys.argv[1] == "Muon" else trained(*sys.argv[1:])
        Path("found.json").write_text(json.dumps(measured))
    else:
        main()
