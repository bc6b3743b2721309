"""Real work side by side: samples a second, peak memory and padding of seven ways to train, on one rank and on two.

Every contender trains the same model with the same weights, optimizer (AdamW), effective batch, micro-batch, precision
and greatest length on the same samples, in the same order, used as its documentation shows. Only transformers' Trainer
with group_by_length has an order of its own. A round takes other samples; contenders take turns within it. Every
measurement is a process of its own, forked from one that has imported everything: one step first that does not count
(of short texts), then those that do; the clock runs from the end of the one to the end of the last. Cut short, it goes
on where it was when it is called again with the same arguments.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that asking for a GPU leaves a process that may fork

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from common import Picked, Record, commit, sample_data, table, torchrun_variables
from contenders import CONTENDERS, Clock, Job, WithLoss, quiet
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.optim import AdamW
from torchvision.transforms import v2
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from transformers.trainer_pt_utils import LengthGroupedSampler

import trainer.api  # before processes are forked: it is in the baseline of all
from trainer.data import CIFAR10, IMDb
from trainer.data.images import IMAGENET_MEAN_STD
from trainer.engine.order import permutation
from trainer.models import BigBird, TextClassifier, VisionTransformer
from trainer.recipe import Checkpoint, Memory, Optim, Recipe, Run
from trainer.report.summary import versions
from trainer.system.child_jobs import run_in_child
from trainer.system.files import write_atomic
from trainer.system.machine import cores
from trainer.system.processes import end_with_parent

LR = 5e-5
SECONDS = 600.0  # that one measurement may take
OURS, GROUPED = "ours", "transformers-grouped"
NAMES = {name: label for name, (label, _) in CONTENDERS.items()} | {OURS: "ours"}


@dataclass(frozen=True)
class Work:
    """A model on its data.

    Args:
        kind: image, or the type of a text model.
        what: in words, for the table; with the number of layers.
        layers: blocks of the model.
        batch: samples of a step, over all ranks.
        micro_batch: samples of a micro-batch.
        steps: that count, in a measurement.
        max_length: tokens that a text is cut to.
        tokenizer: its folder among the samples.
    """

    kind: Literal["image", "distilbert", "big_bird"]
    what: str
    layers: int
    batch: int
    micro_batch: int
    steps: int
    max_length: int = 0
    tokenizer: str = ""

    @property
    def is_text(self) -> bool:
        return self.kind != "image"


VIT = Work("image", "ViT-B/32 on CIFAR-10 at 224, {} of 12 layers", 12, 8, 2, steps=1)
DISTILBERT = Work(
    "distilbert", "DistilBERT on IMDb, at most 512 tokens, {} of 6 layers", 6, 16, 4, 2, 512, "bert-base-uncased"
)
BIGBIRD = Work(
    "big_bird", "BigBird on IMDb, at most 4,096 tokens, {} of 12 layers", 12, 8, 2, 2, 4096, "bigbird-roberta-base"
)
WORKS = {"vit": VIT, "distilbert": DISTILBERT, "bigbird": BIGBIRD}
CPU_LAYERS = {"vit": 4, "distilbert": 6, "bigbird": 3}
"""Of so many of their blocks are the models when it is measured on a CPU: those of full width, as they are. Of a text
model ours computes the last one in part only: of a single block that would be most of the work, of 12 it is little."""


# ----------------------------------------------------------------------------------------------------------------------
# Data and models


@dataclass
class SomeReviews(IMDb):
    """IMDb, of which only ``picked`` are trained on."""

    picked: list[int] = field(default_factory=list)

    def prepare(self, tokenizer: Any = None) -> None:
        super().prepare(tokenizer)
        self.train = Picked(self.train, self.picked)


@dataclass
class SomeImages(CIFAR10):
    """CIFAR-10, of which only ``picked`` are trained on."""

    picked: list[int] = field(default_factory=list)

    def prepare(self, tokenizer: Any = None) -> None:
        super().prepare(tokenizer)
        self.train = Picked(self.train, self.picked)


def tokenise(work: Work, place: Path) -> None:
    """All training texts as token ids, for the others: one array, where each text ends, the labels; and our cache."""
    data = IMDb(str(sample_data() / "imdb"), max_length=work.max_length, cache_dir=str(place / "cache"))
    data.prepare(_tokenizer(work))
    samples = [data.train[index] for index in range(len(data.train))]
    np.savez(
        place / f"{work.kind}.npz",
        tokens=np.concatenate([sample["input_ids"] for sample in samples]),
        lengths=[len(sample["input_ids"]) for sample in samples],
        labels=[sample["labels"] for sample in samples],
    )


def _tokenizer(work: Work) -> Any:
    return AutoTokenizer.from_pretrained(sample_data() / "tokenizers" / work.tokenizer, trust_remote_code=False)


class Texts:
    """The texts of :func:`tokenise`, as transformers' collators and samplers like them."""

    def __init__(self, path: Path) -> None:
        found = np.load(path)
        self.lengths, self.labels = found["lengths"].tolist(), found["labels"].tolist()
        self.tokens = np.split(found["tokens"], np.cumsum(self.lengths)[:-1])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index].tolist(), "label": self.labels[index]}


class Images:
    """CIFAR-10 at 224 pixels, through torchvision's transforms, an image at a time."""

    def __init__(self) -> None:
        with np.load(sample_data() / "cifar10" / "cifar10_subset.npz") as found:
            chosen = found["split"] == 0
            self.images, self.labels = found["images"][chosen], found["labels"][chosen].astype(np.int64)
        scaled = v2.ToDtype(torch.float32, scale=True)
        self.transform = v2.Compose([v2.ToImage(), v2.Resize((224, 224)), scaled, v2.Normalize(*IMAGENET_MEAN_STD)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.transform(self.images[index]), "labels": int(self.labels[index])}


def build(work: Work) -> nn.Module:
    """The model for the others, as transformers or torchvision makes it, with random weights."""
    torch.manual_seed(0)
    if not work.is_text:
        return WithLoss(_vit(work).build()).train()
    key = "n_layers" if work.kind == "distilbert" else "num_hidden_layers"
    config = AutoConfig.for_model(work.kind, num_labels=2, **{key: work.layers})
    if work.kind == "big_bird":
        config.vocab_size = len(_tokenizer(work))
    module = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False).train()
    if work.kind == "big_bird":  # its pooler gets no gradient, which DDP would wait for
        module.bert.pooler.requires_grad_(False)
    return module


def _vit(work: Work) -> VisionTransformer:
    shape = {"patch_size": 32, "layers": work.layers, "heads": 12, "width": 768, "mlp_width": 3072}
    return VisionTransformer("custom", num_classes=10, image_size=224, **shape)


@dataclass(frozen=True)
class Draw:
    """Which samples a round trains on: the first ``batch`` only warm up.

    Args:
        order: indices of the training set, in the order in which they are trained on.
        grouped: places in ``order``, as transformers' ``group_by_length`` would have them.
        tokens: of the samples that count, without padding.
    """

    order: list[int]
    grouped: list[int]
    tokens: int = 0


def draw(work: Work, place: Path, number: int, ranks: int) -> Draw:
    """The samples of a round.

    group_by_length sorts within 50 batches of a rank. So few steps would not show what it gains: micro-batches at even
    distances are taken of its order of the whole training set, and everybody trains on their samples. With two steps of
    16 the padding of all is near to that of a whole epoch; with one, ours would find the same neighbours again.
    """
    generator = torch.Generator().manual_seed(number)
    count = work.steps * work.batch
    if not work.is_text:
        total = len(Images())
        return Draw(torch.randperm(total, generator=generator)[: work.batch + count].tolist(), [])
    lengths = Texts(place / f"{work.kind}.npz").lengths
    sampler = LengthGroupedSampler(work.batch // ranks, lengths=lengths, generator=generator)
    grouped = list(sampler)[: 50 * work.batch // ranks]  # the first of its stretches, sorted
    together = work.micro_batch * ranks  # micro-batches of the ranks at the same time: neighbours in its order
    places = count // together
    starts = [(2 * number + 1) * len(grouped) // (2 * places) // together * together for number in range(places)]
    chosen = [grouped[start + offset] for start in starts for offset in range(together)]
    short = [index for index in np.argsort(lengths, kind="stable").tolist() if index not in set(chosen)][: work.batch]
    mixed = [chosen[index] for index in torch.randperm(count, generator=generator).tolist()]
    where = {index: position for position, index in enumerate([*short, *mixed])}
    return Draw([*short, *mixed], [where[index] for index in [*short, *chosen]], sum(lengths[i] for i in chosen))


# ----------------------------------------------------------------------------------------------------------------------
# One measurement, in a process of its own


def rank_main(name: str, work: Work, drawn: Draw, place: Path, out: Path, rank: int, ranks: int, port: int) -> None:
    """Train, until the clock ends the process; an exception is written down."""
    end_with_parent()
    found = out / f"rank-{rank}.json"
    log = (out / f"rank-{rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    with redirect_stdout(log), redirect_stderr(log):
        try:
            quiet()
            torch.set_num_threads(max(1, cores() // ranks))
            on_gpu = torch.cuda.is_available()
            if ranks > 1:
                os.environ.update(torchrun_variables(rank, ranks, port))
                torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
            clock = Clock(work.steps, ranks, found)
            train(name, work, drawn, place, out, ranks, on_gpu)
            failure = f"the run ended after {clock.taken} steps of {clock.steps + 1}"
        except BaseException as error:
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"[:500]
        write_atomic(found, json.dumps({"failure": failure}), sync_folder=False)
        log.flush()
        os._exit(1)


def train(name: str, work: Work, drawn: Draw, place: Path, out: Path, ranks: int, on_gpu: bool) -> None:
    """One epoch over what was drawn."""
    precision: Any = "bf16-mixed" if on_gpu else "32-true"
    if name == OURS:
        trainer.api.fit(recipe(work, drawn, place, out, ranks, precision))
        return
    dataset: Any = Texts(place / f"{work.kind}.npz") if work.is_text else Images()
    CONTENDERS[name][1](
        Job(
            build(work),
            torch.utils.data.Subset(dataset, drawn.order),
            DataCollatorWithPadding(_tokenizer(work)) if work.is_text else torch.utils.data.default_collate,
            work.micro_batch,
            work.batch // work.micro_batch // ranks,
            lambda module: AdamW([p for p in module.parameters() if p.requires_grad], lr=LR),
            ranks,
            "cuda" if on_gpu else "cpu",
            precision,
            drawn.grouped if name == GROUPED else None,
        )
    )


def recipe(work: Work, drawn: Draw, place: Path, out: Path, ranks: int, precision: Any) -> Recipe:
    """Ours: the model and data of the packaged recipes with their defaults, and the same samples in the same order."""
    order = permutation(0, 0, len(drawn.order)).tolist()  # which puts drawn.order back
    picked = [index for _, index in sorted(zip(order, drawn.order, strict=True))]
    if work.is_text:
        key = "n_layers" if work.kind == "distilbert" else "num_hidden_layers"
        kind = TextClassifier if work.kind == "distilbert" else BigBird
        tokenizer = str(sample_data() / "tokenizers" / work.tokenizer)
        model: Any = kind(work.kind, tokenizer=tokenizer, config={key: work.layers})
        data: Any = SomeReviews(
            str(sample_data() / "imdb"), max_length=work.max_length, cache_dir=str(place / "cache"), picked=picked
        )
    else:
        model = _vit(work)
        data = SomeImages(str(sample_data() / "cifar10" / "cifar10_subset.npz"), image_size=224, picked=picked)
        data.normalize = "imagenet"
    return Recipe(
        model=model,
        data=data,
        optim=Optim("adamw", lr=LR, weight_decay=0.01),
        batch_size=work.batch,
        memory=Memory(micro_batch_size=work.micro_batch, precision=precision),
        checkpoint=Checkpoint(every=None),
        run=Run(
            dir=str(out / "run"),
            accelerator="cuda" if precision == "bf16-mixed" else "cpu",
            devices=ranks,
            evaluate=False,
            predict=False,
            progress=False,
        ),
    )


def measure(name: str, work: Work, drawn: Draw, place: Path, ranks: int) -> dict[str, Any]:
    """Samples a second over all ranks, the peak memory of the rank that took the most, and the share of padding."""
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="throughput-", dir=place) as folder:
        out, port = Path(folder), get_free_port()
        processes = [
            forks.Process(target=rank_main, args=(name, work, drawn, place, out, rank, ranks, port))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        until = time.monotonic() + SECONDS
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        found = [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]
        failures = [one["failure"] for one in found if "failure" in one]
        if failures or len(found) < ranks:
            logs = "".join(path.read_text()[-3000:] for path in sorted(out.glob("rank-*.log")))
            print(logs, file=sys.stderr)
            why = f"no end within {SECONDS:.0f} s" if late else "a process ended without a result"
            return {"failure": failures[0] if failures else why}
    seconds, positions = max(one["seconds"] for one in found), sum(one["positions"] for one in found)
    return {
        "samples_per_second": round((len(drawn.order) - work.batch) / seconds, 4),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(sum(one["cpu"] for one in found), 2),
        "peak_gb": round(max(one["peak"] for one in found) / 1e9, 3),
        "padding": round(1 - drawn.tokens / positions, 4) if positions else None,
    }


# ----------------------------------------------------------------------------------------------------------------------
# All of them


def rows_of(results: dict[str, dict[str, list[Any]]], works: dict[str, Work]) -> Iterator[tuple[str, ...]]:
    """The table's rows: medians over the rounds, and of the ratios to the plain loop in the same round."""
    for row, by_name in results.items():
        work, ranks = row.split(" × ")
        label = f"{works[work].what.format(works[work].layers)}, {ranks}"
        for position, (name, rounds) in enumerate(by_name.items()):
            good = [one for one in rounds if "failure" not in one]
            if not good:
                yield label * (position == 0), NAMES[name], "failed", "–", "–", "–"
                continue
            ratios = [
                plain["seconds"] / own["seconds"]
                for own, plain in zip(rounds, by_name.get("plain", []), strict=False)
                if "seconds" in own and "seconds" in plain
            ]
            padding = [one["padding"] for one in good if one["padding"] is not None]
            yield (
                label * (position == 0),
                NAMES[name],
                f"{statistics.median(one['samples_per_second'] for one in good):.2f}",
                f"{statistics.median(ratios):.2f}" if ratios else "–",
                f"{statistics.median(one['peak_gb'] for one in good):.2f}",
                f"{statistics.median(padding):.0%}" if padding else "–",
            )


HEADER = ("work", "contender", "samples/s", "× plain", "GB peak", "padding")


def run(arguments: argparse.Namespace) -> None:
    """All rounds of all rows, each written as soon as it is measured."""
    on_gpu = torch.cuda.is_available()
    works = {name: WORKS[name] for name in arguments.works}
    if not on_gpu and not arguments.whole:
        works = {name: replace(work, layers=CPU_LAYERS[name]) for name, work in works.items()}
    if arguments.steps is not None:
        works = {name: replace(work, steps=arguments.steps) for name, work in works.items()}
    settings = {
        "rounds": arguments.rounds,
        "contenders": arguments.only,
        "ranks": arguments.ranks,
        "works": {name: asdict(work) for name, work in works.items()},
        "precision": "bf16-mixed" if on_gpu else "32-true",
        "memory": "reserved by torch" if on_gpu else "resident, over that of the process before it builds the model",
    }
    record = Record(arguments.out, settings)
    results = resumed(record) if not arguments.anew else {}
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        place = Path(folder)
        for work in works.values():
            if work.is_text:
                run_in_child(partial(tokenise, work, place))  # this process must stay without threads, to be forked
        for name, work in works.items():
            for ranks in arguments.ranks:
                meant = [one for one in arguments.only if work.is_text or one != GROUPED]  # images have no length
                row = results.setdefault(f"{name} × {ranks} rank{'s' * (ranks > 1)}", {one: [] for one in meant})
                for number in range(arguments.rounds):
                    waiting = [one for one in meant if len(row[one]) == number]
                    if not waiting:
                        continue
                    drawn = draw(work, place, number, ranks)
                    start = number % len(waiting)
                    for one in [*waiting[start:], *waiting[:start]]:
                        row[one].append(measure(one, work, drawn, place, ranks))
                        record.write(results=results)
                        print(f"{name} × {ranks}, round {number + 1}, {NAMES[one]}: {row[one][-1]}", flush=True)
    record.write(complete=True, results=results)
    print(table(HEADER, list(rows_of(results, works))))


def resumed(record: Record) -> dict[str, Any]:
    """What an earlier call with the same settings, code and versions has measured and not ended."""
    if not record.path.exists():
        return {}
    before = json.loads(record.path.read_text())
    same = before.get("settings") == json.loads(json.dumps(record.content["settings"]))
    here, there = (str(found).rstrip("+") for found in (commit(), before["commit"]))  # this file may be what differs
    same = same and here == there and before["versions"] == json.loads(json.dumps(versions()))
    if before["complete"] or not same:
        return {}
    print(f"going on with {record.path}")
    record.content |= {key: before[key] for key in ("date", "machine")}
    return before.get("results", {})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="that count; by default 1 of images and 2 of texts")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--only", nargs="+", choices=list(NAMES), default=list(NAMES), help="contenders")
    parser.add_argument("--whole", action="store_true", help="all layers, also on a CPU: 5 times as long")
    parser.add_argument("--anew", action="store_true", help="begin anew what was cut short")
    parser.add_argument("--out", default="throughput", help="name of the file of results")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or (arguments.steps is not None and arguments.steps < 1):
        parser.error("--rounds and --steps must be at least 1")
    for work in (WORKS[name] for name in arguments.works):
        if any(ranks < 1 or work.batch % (ranks * work.micro_batch) for ranks in arguments.ranks):
            parser.error(
                f"--ranks: {work.batch} samples a step do not come to whole micro-batches of {work.micro_batch}"
            )
    if torch.cuda.is_available() and max(arguments.ranks) > torch.cuda.device_count():
        parser.error(f"--ranks: there are {torch.cuda.device_count()} GPUs")
    run(arguments)


if __name__ == "__main__":
    main()
