"""Language models on a CPU: what the logits of a large vocabulary cost, and padding, and all weights of a model.

Three questions, each with contenders that take turns within a round: the peak memory of head and loss with and without
whole logits (``loss``), tokens a second of ragged chats padded and packed (``packing``), and full training against
adapters, on whole and on quantised weights (``adapters``). Every measurement is a process of its own, forked from one
that has imported everything; its memory is resident memory over what it had before. One step does not count.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import trl.trainer.sft_trainer  # noqa: F401  # before processes are forked
from common import Record, resident, table
from contenders import Clock, Job, plain, quiet, sft_rows, transformers_trainer, trl_sft
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM
from trl import pack_dataset
from trl.trainer.utils import add_fused_lm_head

import trainer.api
from trainer.contract import Data
from trainer.engine.order import batch_indices
from trainer.models import CausalLM, LoRA
from trainer.recipe import Checkpoint, Memory, Optim, Recipe, Run
from trainer.system.machine import cores
from trainer.system.processes import end_with_parent

Sample = dict[str, Tensor]
LR = 1e-4
SECONDS = 600.0  # that one measurement may take
WORDS, TOKENS, WIDTH = 50_000, 4_096, 512
"""Of the head whose loss is measured."""
CHATS, MICRO_BATCH, STEPS, MOST = 16, 4, 2, 1_024
"""Of the chats: a batch, a padded micro-batch, steps that count, most tokens of a chat and of a pack."""
SMALL = {
    "vocab_size": 16_384,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MOST,
    "tie_word_embeddings": True,
}
"""The model that trains on chats: 7.1 million weights."""
HEADED = SMALL | {"vocab_size": WORDS, "num_hidden_layers": 1, "hidden_size": WIDTH, "intermediate_size": 64}
"""A head of many words, tied to the embedding, on one narrow block."""
LARGE = SMALL | {"hidden_size": 1_024, "intermediate_size": 2_816, "num_hidden_layers": 8, "num_attention_heads": 16}
"""The model with adapters: 105 million weights."""
ADAPTED = (4, 128)
"""The sequences of a step with adapters, and their tokens."""
RANK = 16
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Of the adapters: their rank, and the layers that have one: all linear ones of a block."""


# ----------------------------------------------------------------------------------------------------------------------
# One measurement, in a process of its own


def apart(train: Callable[[Path], None]) -> dict[str, Any]:
    """What ``train`` writes to the file that it gets, from a forked process."""
    with tempfile.TemporaryDirectory(prefix="language-models-") as folder:
        out = Path(folder) / "rank-0.json"
        process = multiprocessing.get_context("fork").Process(target=_child, args=(train, out))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        if out.exists():
            return json.loads(out.read_text())
        print(out.with_suffix(".log").read_text()[-3000:], file=sys.stderr)
        return {"failure": f"ended with {process.exitcode} and no result"}


def _child(train: Callable[[Path], None], out: Path) -> None:
    end_with_parent()
    log = out.with_suffix(".log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    with redirect_stdout(log), redirect_stderr(log):
        try:
            quiet()
            torch.set_num_threads(cores())
            torch.manual_seed(0)
            train(out)
        except BaseException:
            traceback.print_exc()
        log.flush()
        os._exit(1)


# ----------------------------------------------------------------------------------------------------------------------
# The loss


def loss_of(kind: str, out: Path) -> None:
    """Forward and backward of ``TOKENS`` tokens: their peak over what model and batch take, and their seconds."""
    batch = {"input_ids": torch.randint(WORDS, (4, TOKENS // 4)), "attention_mask": torch.ones(4, TOKENS // 4)}
    batch["attention_mask"] = batch["attention_mask"].long()
    labels = batch["input_ids"]
    chunk = {"ours": None, "ours, whole logits": 0}.get(kind)
    model = CausalLM("llama", tokenizer="none", config=HEADED, loss_chunk=chunk)
    module: Any = (model.build() if kind.startswith("ours") else LlamaForCausalLM(LlamaConfig(**HEADED))).train()
    if kind == "TRL":
        add_fused_lm_head(module, outputs=("log_probs", "entropy", "is_top1"))  # as SFTTrainer does

    def loss() -> Tensor:
        if kind.startswith("ours"):
            (found,) = model.losses(module, batch | {"labels": labels})
            return found.total / model.weigh({"labels": labels})["loss"]
        if kind == "plain PyTorch":
            logits = module(**batch).logits
            return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return module(**batch, labels=labels, **{"fused_lm_head": True} if kind == "TRL" else {}).loss

    short = {key: value[:, :8] for key, value in batch.items()}
    module(**short).logits.sum().backward()  # what is set up once
    module.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    idle, begin, busy = resident("VmRSS"), time.perf_counter(), time.process_time()
    value = loss()
    value.backward()
    found = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - busy, "loss": value.item()}
    found |= {"peak": (peak := resident("VmHWM") - idle), "without_gradient_of_head": peak - WORDS * WIDTH * 4}
    out.write_text(json.dumps(found))


# ----------------------------------------------------------------------------------------------------------------------
# Ragged chats


def chats(number: int) -> list[Sample]:
    """The chats of a round: lengths are log-normal (median 180, a tenth above 570), cut at ``MOST``; of each the first
    third is the prompt, whose words are not predicted."""
    generator = torch.Generator().manual_seed(number)
    count = CHATS * (1 + STEPS)
    lengths = (torch.randn(count, generator=generator) * 0.9 + math.log(180)).exp().clamp(8, MOST).long()
    samples = []
    for length in lengths.tolist():
        ids = torch.randint(1, SMALL["vocab_size"], (length,), generator=generator)
        samples.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(length) < length // 3, -100)})
    return samples


def padded(samples: Sequence[Any]) -> dict[str, Tensor]:
    """A micro-batch as everybody pads it."""
    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], True, -100),
    }


@dataclass
class Given(Data):
    """Samples for ours."""

    samples: list[Sample] = field(default_factory=list)

    def prepare(self, tokenizer: Any = None) -> None:
        self.train = Listed(self.samples)

    def collate(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        return padded(samples)


class Listed(list):
    """Samples whose lengths are known."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__(samples)
        self.lengths = [len(sample["input_ids"]) for sample in samples]


def ours(model: CausalLM, samples: list[Sample], batch_size: int, memory: Memory, folder: Path) -> None:
    """A run of ours over the samples; its order is its own."""
    run = Run(dir=str(folder), accelerator="cpu", evaluate=False, predict=False, progress=False)
    optim = Optim("adamw", lr=LR, weight_decay=0.01)
    data, checkpoint = Given(samples=samples), Checkpoint(every=None)
    parts: Any = {"model": model, "data": data, "optim": optim, "checkpoint": checkpoint, "run": run}
    trainer.api.fit(Recipe(**parts, batch_size=batch_size, memory=memory))


def chatting(kind: str, number: int, out: Path) -> None:
    """Steps of the small model on the chats of a round."""
    samples = chats(number)
    if kind.startswith("ours"):
        free = kind == "ours, packed"
        model = CausalLM("llama", tokenizer="none", config=SMALL, padding_free=free)
        cut = {"micro_batch_size": CHATS, "micro_batch_tokens": MOST} if free else {"micro_batch_size": MICRO_BATCH}
        Clock(STEPS, 1, out)
        ours(model, samples, CHATS, Memory(**cut, precision="32-true"), out.parent / "run")
        return
    module = LlamaForCausalLM(LlamaConfig(**SMALL)).train()
    job = Job(module, samples, padded, MICRO_BATCH, CHATS // MICRO_BATCH, lambda one: AdamW(one.parameters(), lr=LR))
    Clock(STEPS, 1, out)
    if kind == "plain PyTorch loop":
        plain(job)
    elif kind == "transformers Trainer":
        transformers_trainer(job)
    elif kind == "transformers Trainer, flattened":
        transformers_trainer(replace(job, collate=DataCollatorWithFlattening()))
    elif kind == "TRL, padding_free":
        trl_sft(job, padding_free=True)
    else:
        from datasets import Dataset

        packs = len(pack_dataset(Dataset.from_list(sft_rows(job)), MOST))
        trl_sft(replace(job, micro_batch_size=1, accumulate=packs // (1 + STEPS)), pack=MOST)


# ----------------------------------------------------------------------------------------------------------------------
# Adapters


def adapting(place: Path, kind: str, number: int, out: Path) -> None:
    """Steps of the large model, whose weights are in ``place``, on sequences of one length."""
    generator = torch.Generator().manual_seed(number)
    count, length = ADAPTED[0] * (1 + STEPS), ADAPTED[1]
    ids = torch.randint(1, LARGE["vocab_size"], (count, length), generator=generator)
    samples = [{"input_ids": row, "labels": row} for row in ids]
    Clock(STEPS, 1, out)
    if kind.startswith("ours"):
        base: Any = "nf4" if "NF4" in kind else "full"
        lora = LoRA() if "all" in kind else LoRA(rank=RANK, targets=list(LINEAR), base=base)
        model = CausalLM(str(place), weights=str(place), tokenizer="none", lora=lora)
        memory = Memory(micro_batch_size=ADAPTED[0], precision="32-true", init="meta")
        ours(model, samples, ADAPTED[0], memory, out.parent / "run")
        return
    module: Any = LlamaForCausalLM.from_pretrained(
        place, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    ).train()
    if kind == "TRL, LoRA":
        module = get_peft_model(module, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(LINEAR)))
    trains = lambda one: AdamW([p for p in one.parameters() if p.requires_grad], lr=LR)  # noqa: E731
    job = Job(module, samples, padded, ADAPTED[0], 1, trains)
    plain(job) if kind.startswith("plain") else trl_sft(job)


def save_large(place: Path) -> None:
    """Random weights of the large model, as ``from_pretrained`` reads them."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LARGE)).save_pretrained(place)


# ----------------------------------------------------------------------------------------------------------------------
# All of them

WHOLE = "plain PyTorch"
LOOP = "plain PyTorch loop"
KINDS: dict[str, tuple[str, ...]] = {
    "loss": (WHOLE, "transformers' loss", "TRL", "ours, whole logits", "ours"),
    "packing": (
        *(LOOP, "transformers Trainer", "transformers Trainer, flattened", "TRL, padding_free", "TRL, packing"),
        *("ours, padded", "ours, packed"),
    ),
    "adapters": ("plain loop, all weights", "TRL, LoRA", "ours, all weights", "ours, LoRA", "ours, LoRA on NF4"),
}
"""Of each question the contenders; the first is what the others are compared with."""


def tokens_of(part: str, number: int, kind: str) -> int:
    """The tokens that the steps that count train on, without padding."""
    if part == "loss":
        return TOKENS
    if part == "adapters":
        return STEPS * ADAPTED[0] * ADAPTED[1]
    samples = chats(number)
    taken: Iterable[int] = range(CHATS, len(samples))
    if kind.startswith("ours"):  # whose order is its own
        taken = chain.from_iterable(batch_indices(0, 0, step, len(samples), CHATS) for step in range(1, 1 + STEPS))
    return sum(len(samples[index]["input_ids"]) for index in taken)


def measure(part: str, kind: str, number: int, place: Path) -> dict[str, Any]:
    """Tokens a second, the peak memory and the share of padding of a contender in a round."""
    trains = {"loss": lambda out: loss_of(kind, out), "packing": lambda out: chatting(kind, number, out)}
    trains["adapters"] = lambda out: adapting(place, kind, number, out)
    found = apart(trains[part])
    if "failure" in found:
        return found
    # A step of TRL's packs has other chats than the others', without padding: what went through the embedding counts.
    tokens = found["positions"] if kind == "TRL, packing" else tokens_of(part, number, kind)
    figures = {
        "tokens_per_second": round(tokens / found["seconds"], 2),
        "seconds": round(found["seconds"], 3),
        "tokens": tokens,
        "peak_gb": round(found["peak"] / 1e9, 4),
    }
    return figures | {key: found[key] for key in ("cpu", "without_gradient_of_head", "loss") if key in found}


def rows_of(results: dict[str, dict[str, list[Any]]]) -> list[tuple[str, ...]]:
    """The table's rows: medians over the rounds, and of the ratios to the first contender in the same round."""
    rows = []
    for part, by_kind in results.items():
        first = next(iter(by_kind.values()))
        for number, (kind, rounds) in enumerate(by_kind.items()):
            label = part if number == 0 else ""
            pairs = [(own, one) for own, one in zip(rounds, first, strict=False) if "failure" not in own | one]
            if not pairs:
                rows.append((label, kind, "failed", "–", "–", "–", "–"))
                continue

            def middle(key: str, ratio: bool, pairs: Any = pairs) -> float:
                return statistics.median(own[key] / (one[key] if ratio else 1) for own, one in pairs)

            busy = statistics.median(1000 * own["cpu"] / own["tokens"] for own, _ in pairs)
            speeds = (
                f"{middle('tokens_per_second', False):,.0f}",
                f"{middle('tokens_per_second', True):.2f}",
                f"{busy:.2f}",
            )
            peaks = f"{middle('peak_gb', False):.2f}", f"{middle('peak_gb', True):.2f}"
            rows.append((label, kind, *speeds, *peaks))
    return rows


HEADER = ("question", "contender", "tokens/s", "× the first", "CPU s / 1,000 tokens", "GB peak", "of the first")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--out", default="language_models", help="name of the file of results")
    arguments = parser.parse_args()
    settings = {
        "rounds": arguments.rounds,
        "loss": {"words": WORDS, "tokens": TOKENS, "width": WIDTH},
        "packing": {"model": SMALL, "batch": CHATS, "micro_batch": MICRO_BATCH, "most": MOST, "steps": STEPS},
        "adapters": {"model": LARGE, "batch": ADAPTED, "rank": RANK, "targets": LINEAR, "steps": STEPS},
        "precision": "32-true",
        "memory": "resident, over that of the process before it builds the model (of the loss, before the forward)",
        "threads": cores(),
    }
    record = Record(arguments.out, settings)
    record.content["versions"] |= {name: version(name) for name in ("trl", "peft", "torchao")}
    results = {part: {kind: [] for kind in KINDS[part]} for part in arguments.parts}
    with tempfile.TemporaryDirectory(prefix="language-models-") as folder:
        place = Path(folder)
        if "adapters" in arguments.parts:
            process = multiprocessing.get_context("fork").Process(target=save_large, args=(place,))
            process.start()
            process.join()
        for number in range(arguments.rounds):
            for part, by_kind in results.items():
                start = number % len(by_kind)
                for kind in [*by_kind][start:] + [*by_kind][:start]:
                    load = round(os.getloadavg()[0], 2)
                    by_kind[kind].append(measure(part, kind, number, place) | {"load_average_1_min": load})
                    record.write(results=results)
                    print(f"round {number + 1}, {part}, {kind}: {by_kind[kind][-1]}", flush=True)
    record.write(complete=True, results=results)
    print(table(HEADER, rows_of(results)))


if __name__ == "__main__":
    main()
