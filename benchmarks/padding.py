"""What padding costs: DistilBERT on real reviews, padded and packed, beside transformers' group_by_length.

Every contender takes one step (AdamW, clipped) on 32 reviews of up to 512 tokens in micro-batches of 8, on one thread,
in a process of its own, after a step of short reviews that does not count. A round takes other reviews, and contenders
take turns within it. The plain loop and ours get a batch drawn at random; transformers gets micro-batches of the order
that its LengthGroupedSampler makes of all reviews, with as many tokens as the batch of the others has, to 1 in 200.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads: process time of several threads counts those that wait
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from common import Picked, Record, table
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoConfig, AutoModelForSequenceClassification, TrainingArguments
from transformers import Trainer as TransformersTrainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from trainer.api import fit
from trainer.data import IMDb
from trainer.engine.cut import padding_share
from trainer.engine.order import permutation
from trainer.models import TextClassifier
from trainer.recipe import Checkpoint, Memory, Optim, Recipe, Run

DATA = Path(os.environ.get("TRAINER_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
BATCH, MICRO_BATCH, MAX_LENGTH, LR, CLIP = 32, 8, 512, 5e-5, 1.0
PLAIN, GROUPED, PADDED, PACKED = "plain loop", "transformers Trainer, group_by_length", "ours, padded", "ours, packed"


class Prepared(IMDb):
    """Reviews that are prepared already."""

    def prepare(self, tokenizer: Any = None) -> None:
        """Nothing is left to do."""


def module_of(tokenizer: Any, dropout: float) -> torch.nn.Module:
    torch.manual_seed(0)
    rates = {"dropout": dropout, "attention_dropout": dropout, "seq_classif_dropout": dropout}
    config = AutoConfig.for_model("distilbert", vocab_size=len(tokenizer), num_labels=2, **rates)
    return AutoModelForSequenceClassification.from_config(config, trust_remote_code=False).train()


def plain(data: IMDb, tokenizer: Any, order: Sequence[int], dropout: float) -> None:
    """The loop that a person writes."""
    module = module_of(tokenizer, dropout)
    optimizer = torch.optim.AdamW(module.parameters(), LR)
    for start in range(0, len(order), MICRO_BATCH):
        batch = data.train.__getitems__(order[start : start + MICRO_BATCH])
        (module(**batch).loss / (BATCH // MICRO_BATCH)).backward()
        if (start + MICRO_BATCH) % BATCH == 0:
            clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


class Ordered(TransformersTrainer):
    """On samples in the order in which they lie."""

    def _get_train_sampler(self, *arguments: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def grouped(data: IMDb, tokenizer: Any, order: Sequence[int], dropout: float) -> None:
    """transformers' Trainer."""
    split = [{k: v for k, v in data.train[index].items() if k != "token_type_ids"} for index in order]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=BATCH // MICRO_BATCH,
            num_train_epochs=1,
            learning_rate=LR,
            max_grad_norm=CLIP,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Ordered(module_of(tokenizer, dropout), arguments, train_dataset=split, processing_class=tokenizer).train()


def ours(data: IMDb, tokenizer: Any, order: Sequence[int], dropout: float, padding_free: bool) -> None:
    """``trainer fit``."""
    places = permutation(0, 0, len(order)).tolist()  # where our order takes its samples from
    laid = [0] * len(order)
    for index, place in zip(order, places, strict=True):
        laid[place] = index
    prepared = Prepared(max_length=MAX_LENGTH)
    prepared.__dict__ |= data.__dict__ | {"train": Picked(data.train, laid), "test": None, "val": None}
    with tempfile.TemporaryDirectory() as folder:
        fit(
            Recipe(
                model=TextClassifier(tokenizer=tokenizer.name_or_path, dropout=dropout, padding_free=padding_free),
                data=prepared,
                optim=Optim("adamw", lr=LR, clip_norm=CLIP),
                batch_size=BATCH,
                max_steps=len(order) // BATCH,
                memory=Memory(micro_batch_size=MICRO_BATCH),
                run=Run(dir=f"{folder}/run", accelerator="cpu", evaluate=False, predict=False, progress=False),
                checkpoint=Checkpoint(every=None),
            )
        )


CONTENDERS: dict[str, Any] = {
    PLAIN: plain,
    GROUPED: grouped,
    PADDED: lambda *arguments: ours(*arguments, padding_free=False),
    PACKED: lambda *arguments: ours(*arguments, padding_free=True),
}


def measure(pipe: Any, name: str, *arguments: Any) -> None:
    """In a process of its own: seconds of CPU of the second step, and the most bytes that it had resident by then."""
    idle, found = resident("VmRSS"), []

    def stepped(*_: Any) -> None:
        found.append((time.process_time(), resident("VmHWM") - idle))

    register_optimizer_step_post_hook(stepped)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        CONTENDERS[name](*arguments)
    pipe.send({"seconds": found[1][0] - found[0][0], "bytes": found[1][1]})


def resident(name: str) -> int:
    """Bytes of memory of this process: VmRSS now, VmHWM at most."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def draw(lengths: Sequence[int], groups: Sequence[Sequence[int]], chance: random.Random) -> tuple[list[int], list[int]]:
    """A batch at random, and micro-batches of transformers' order with as many tokens."""
    batch = chance.sample(range(len(lengths)), BATCH)
    wanted = sum(lengths[index] for index in batch)
    while True:
        found = [index for group in chance.sample(groups, BATCH // MICRO_BATCH) for index in group]
        if abs(sum(lengths[index] for index in found) / wanted - 1) < 1 / 200:
            return batch, found


def shares(lengths: Sequence[int], groups: Sequence[Sequence[int]], chance: random.Random) -> dict[str, float]:
    """Of padding among all tokens of an epoch."""
    order = chance.sample(range(len(lengths)), len(lengths))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    by_length = [sorted(batch, key=lambda index: -lengths[index]) for batch in batches]
    cut = {
        PLAIN: [batch[at : at + MICRO_BATCH] for batch in batches for at in range(0, BATCH, MICRO_BATCH)],
        GROUPED: groups,
        PADDED: [batch[at : at + MICRO_BATCH] for batch in by_length for at in range(0, BATCH, MICRO_BATCH)],
    }
    return {name: padding_share(pieces, lengths) for name, pieces in cut.items()} | {PACKED: 0.0}


def main() -> None:
    """Measure, print a table and keep everything in results/padding.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--done", type=int, default=0, help="rounds that the file has already, and that are kept")
    parser.add_argument("--dropout", type=float, default=0.1, help="of everything; default: 0.1, DistilBERT's own")
    parser.add_argument("--name", default="padding", help="of the file of results")
    arguments = parser.parse_args()
    tokenizer = TextClassifier(tokenizer=str(DATA / "tokenizers" / "bert-base-uncased")).tokenizer_or_none()
    data = IMDb(root=str(DATA / "imdb"), max_length=MAX_LENGTH)
    data.prepare(tokenizer)
    lengths = list(data.train.lengths)
    sampler = LengthGroupedSampler(MICRO_BATCH, lengths=lengths, generator=torch.Generator().manual_seed(0))
    order = list(sampler)
    groups = [order[start : start + MICRO_BATCH] for start in range(0, len(order), MICRO_BATCH)]
    padding = shares(lengths, groups, random.Random(0))
    short = sorted(range(len(lengths)), key=lambda index: lengths[index])[:BATCH]
    record, rounds = Record(arguments.name, {key: getattr(arguments, key) for key in ("rounds", "dropout")}), []
    names = list(CONTENDERS)
    rounds += json.loads(record.path.read_text())["rounds"][: arguments.done] if arguments.done else []
    for number in range(arguments.done, arguments.rounds):
        batch, found = draw(lengths, groups, random.Random(number))
        measured = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            here, there = multiprocessing.Pipe()
            chosen = short + (found if name == GROUPED else batch)
            work = (there, name, data, tokenizer, chosen, arguments.dropout)
            process = multiprocessing.get_context("fork").Process(target=measure, args=work)
            process.start()
            there.close()
            measured[name] = here.recv()
            process.join()
            print(number, name, measured[name], file=sys.stderr, flush=True)
        rounds.append(measured)
        record.write(complete=number + 1 == arguments.rounds, padding=padding, rounds=rounds)
    rows = []
    for name in names:
        ratios = [one[GROUPED]["seconds"] / one[name]["seconds"] for one in rounds]
        speed = statistics.median(BATCH / one[name]["seconds"] for one in rounds)
        peak = statistics.median(one[name]["bytes"] for one in rounds) / 1e9
        rows.append([name, f"{speed:.2f}", f"{statistics.median(ratios):.2f}", f"{peak:.2f}", f"{padding[name]:.1%}"])
    print(table(["", "samples/s of CPU", "× group_by_length", "peak GB", "padding"], rows))


if __name__ == "__main__":
    main()
