"""CPU time that a training loop spends on a micro-step, for a network so small that little else is left.

Every contender trains the same network with the same optimizer on the same micro-batches, made beforehand, 4 a step.
What it costs is read off the data: the clock starts when a contender asks for one micro-batch and stops when it asks
for another, thousands later. So setting up is never measured, and every contender is measured in the same way.
"""

from __future__ import annotations

import os

# Before torch loads: with several threads, the process's CPU time would count those that wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from common import Record, table
from contenders import WithLoss, bare_trainer, quiet
from lightning import LightningModule, Trainer
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from transformers import Trainer as TransformersTrainer

from trainer.contract import Data
from trainer.engine.cut import cut_at
from trainer.engine.loop import Engine
from trainer.engine.step import PhaseHooks, Stepper
from trainer.engine.window import MicroBatch, Window, Windows
from trainer.faults.watchdog import Watchdog
from trainer.memory.monitor import MemoryMonitor
from trainer.models import MLP
from trainer.recipe import Memory, Recipe
from trainer.run.state import RNGState

ACCUMULATE = 4
MICRO_BATCH_SIZE = 8
LR = 1e-3
WARM_UP_STEPS = 25
MODEL = MLP(hidden=[64, 64], image_size=4, channels=2, num_classes=10)

Batch = dict[str, Tensor]


class MicroBatches:
    """A loader of micro-batches that are all in memory, and the stopwatch.

    Args:
        micro_steps: how many are measured; as many as ``WARM_UP_STEPS`` steps take come before them.
    """

    def __init__(self, micro_steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches: list[Batch] = [
            {
                "pixel_values": torch.randn(MICRO_BATCH_SIZE, 2, 4, 4, generator=generator),
                "labels": torch.randint(10, (MICRO_BATCH_SIZE,), generator=generator),
            }
            for _ in range(64)
        ]
        self.first = WARM_UP_STEPS * ACCUMULATE
        self.micro_steps = micro_steps
        self.started = self.ended = 0.0

    def __len__(self) -> int:
        # One step more than is measured, so that no contender is at its end, and winding up, when the clock stops.
        return self.first + self.micro_steps + ACCUMULATE

    def __iter__(self) -> Iterator[Batch]:
        last = self.first + self.micro_steps
        for number in range(len(self)):
            if number == self.first:
                self.started = time.process_time()
            elif number == last:
                self.ended = time.process_time()
            yield self.batches[number % len(self.batches)]

    @property
    def microseconds(self) -> float:
        """CPU time of a micro-step."""
        return 1e6 * (self.ended - self.started) / self.micro_steps


def build() -> tuple[nn.Module, Optimizer]:
    """The network, always with the same weights, and its optimizer."""
    torch.manual_seed(0)
    module = MODEL.build()
    return module, SGD(module.parameters(), lr=LR)


# ----------------------------------------------------------------------------------------------------------------------
# The contenders


def plain(loader: MicroBatches) -> None:
    """The loop that a person writes."""
    module, optimizer = build()
    for number, batch in enumerate(loader, start=1):
        loss = cross_entropy(module(batch["pixel_values"]), batch["labels"]) / ACCUMULATE
        loss.backward()
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()


def plain_observed(loader: MicroBatches) -> None:
    """The same with what ours does besides: every step's loss and gradient norm are known, non-finite ones refused."""
    module, optimizer = build()
    total = torch.zeros(())
    for number, batch in enumerate(loader, start=1):
        loss = cross_entropy(module(batch["pixel_values"]), batch["labels"]) / ACCUMULATE
        loss.backward()
        total += loss.detach()
        if number % ACCUMULATE == 0:
            norm = nn.utils.clip_grad_norm_(module.parameters(), float("inf"))
            if torch.isfinite(norm) and torch.isfinite(total):
                optimizer.step()
            optimizer.zero_grad()
            total.item()
            total.zero_()


def bare_fabric(loader: MicroBatches) -> None:
    """Lightning Fabric, as its documentation accumulates."""
    fabric = Fabric(accelerator="cpu", devices=1)
    module, optimizer = fabric.setup(*build())
    for number, batch in enumerate(loader, start=1):
        is_accumulating = number % ACCUMULATE != 0
        with fabric.no_backward_sync(module, enabled=is_accumulating):
            loss = cross_entropy(module(batch["pixel_values"]), batch["labels"]) / ACCUMULATE
            fabric.backward(loss)
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()


def accelerate(loader: MicroBatches) -> None:
    """Accelerate, as its documentation accumulates; the loader stays unprepared, which costs less."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    module, optimizer = accelerator.prepare(*build())
    for batch in loader:
        with accelerator.accumulate(module):
            loss = cross_entropy(module(batch["pixel_values"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


class Lit(LightningModule):
    """The network for Lightning's Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.optimizer = build()

    def training_step(self, batch: Batch) -> Tensor:
        return cross_entropy(self.module(batch["pixel_values"]), batch["labels"])

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer


def lightning_trainer(loader: MicroBatches) -> None:
    """Lightning's Trainer in its bare-bones mode, made to measure its overhead."""
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=ACCUMULATE, barebones=True)
    trainer.fit(Lit(), loader)


class PremadeTrainer(TransformersTrainer):
    """transformers' Trainer on a loader that is handed to it: no workers, no collating, no sharding."""

    loader: MicroBatches

    def get_train_dataloader(self) -> Any:
        return self.loader


def transformers_trainer(loader: MicroBatches) -> None:
    """transformers' Trainer with everything off that can be."""
    module, optimizer = build()
    with tempfile.TemporaryDirectory() as folder:
        trainer = bare_trainer(
            partial(PremadeTrainer, train_dataset=[0]),
            WithLoss(module),
            optimizer,
            folder,
            use_cpu=True,
            per_device_train_batch_size=MICRO_BATCH_SIZE,
            gradient_accumulation_steps=ACCUMULATE,
            logging_nan_inf_filter=False,
        )
        trainer.loader = loader
        trainer.train()


def stepper_for_mlp(phases: PhaseHooks | None = None) -> Stepper:
    """Ours, put together as ``trainer.fit`` does."""
    fabric = Fabric(accelerator="cpu", devices=1)
    module, optimizer = build()
    return Stepper(fabric, MODEL, fabric.setup_module(module), optimizer, phases=phases)


def windows_of_mlp(loader: MicroBatches) -> Windows:
    """Order, cut and weights as in ``trainer.fit``; fetching hands out what was made."""
    memory = Memory(micro_batch_size=MICRO_BATCH_SIZE)
    recipe = Recipe(model=MODEL, data=Data(), batch_size=MICRO_BATCH_SIZE * ACCUMULATE, memory=memory)
    return Windows(
        size=len(loader) * MICRO_BATCH_SIZE,
        cut_at=partial(cut_at, recipe, 1),
        fetch=lambda requests: (batch for batch, _ in zip(loader, requests, strict=False)),
        weigh=MODEL.weigh,
        seed=0,
    )


def ours(loader: MicroBatches) -> None:
    """``Engine.fit``: windows, steps, events."""
    Engine(stepper_for_mlp(), windows_of_mlp(loader)).fit(epochs=1)


def ours_watched(loader: MicroBatches) -> None:
    """``Engine.fit`` with what a run has besides: peaks by phase, the watchdog, the generators kept for checkpoints."""
    device = torch.device("cpu")
    monitor, windows = MemoryMonitor(device), windows_of_mlp(loader)
    windows.on_load = monitor.on_load
    watchdog = Watchdog(monitor, 0, 1, hang_after=600.0)
    Engine(stepper_for_mlp(monitor), windows, listeners=[RNGState(device)]).fit(1)
    watchdog.close()


def ours_step(loader: MicroBatches) -> None:
    """``Stepper.step`` alone, on windows whose weights are known."""
    stepper = stepper_for_mlp()
    batches = iter(loader)
    samples = MICRO_BATCH_SIZE * ACCUMULATE
    for _ in range(len(loader) // ACCUMULATE):
        micro_batches = [MicroBatch(next(batches), 0, number == ACCUMULATE - 1, False) for number in range(ACCUMULATE)]
        stepper.step(Window(micro_batches, {"loss": float(samples)}, samples))


CONTENDERS: dict[str, tuple[str, Callable[[MicroBatches], None]]] = {
    "plain": ("plain PyTorch loop", plain),
    "plain-observed": ("plain loop + norm, finite check, loss", plain_observed),
    "fabric": ("bare Fabric", bare_fabric),
    "accelerate": ("Accelerate", accelerate),
    "lightning": ("Lightning Trainer", lightning_trainer),
    "transformers": ("transformers Trainer", transformers_trainer),
    "ours": ("ours: Engine.fit", ours),
    "ours-watched": ("ours: the same, watched over", ours_watched),
    "ours-step": ("ours: Stepper.step alone", ours_step),
}


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def measure(contender: str, micro_steps: int) -> float:
    """Microseconds of CPU time per micro-step."""
    loader = MicroBatches(micro_steps)
    gc.collect()  # nobody pays for what the one before left behind
    CONTENDERS[contender][1](loader)
    return loader.microseconds


def report(rounds: dict[str, list[float]]) -> str:
    """The table: medians, their ratio to the plain loop, and how far the rounds lie apart."""
    reference = statistics.median(rounds["plain"])
    rows = []
    for name, figures in rounds.items():
        median = statistics.median(figures)
        # The ratio within a round is free of what slows down the machine for a while.
        ratio = statistics.median(own / plain for own, plain in zip(figures, rounds["plain"], strict=True))
        spread = f"{min(figures):.0f} to {max(figures):.0f}"
        rows.append((CONTENDERS[name][0], f"{median:.0f}", f"{median - reference:+.0f}", f"{ratio:.2f}", spread))
    return table(("contender", "µs per micro-step", "over plain", "× plain", "range"), rows)


def run(names: Sequence[str], rounds: int, micro_steps: int) -> dict[str, list[float]]:
    """Measure in rounds, each contender once a round, each round starting with another; the first is thrown away."""
    record = Record("overhead", {"rounds": rounds, "micro_steps": micro_steps, "accumulate": ACCUMULATE})
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        start = number % len(names)
        for name in [*names[start:], *names[:start]]:
            microseconds = measure(name, micro_steps)
            if number > 0:
                figures[name].append(round(microseconds, 2))
        print(f"round {number} of {rounds}" if number else "warm-up round", flush=True)
        if number > 0:
            medians = {name: round(statistics.median(values), 2) for name, values in figures.items()}
            record.write(complete=number == rounds, median_us=medians, rounds_us=figures)
    return figures


def _names(text: str) -> list[str]:
    names = [name for name in CONTENDERS if name == "plain" or name in text.split(",")]
    unknown = set(text.split(",")) - set(CONTENDERS)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(CONTENDERS)}")
    return names


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--micro-steps", type=int, default=2000, help="measured in a round; a multiple of 4")
    parser.add_argument("--only", type=_names, default=list(CONTENDERS), help="contenders; plain is always in")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.micro_steps < ACCUMULATE or arguments.micro_steps % ACCUMULATE:
        parser.error(f"--rounds must be at least 1 and --micro-steps a positive multiple of {ACCUMULATE}")
    torch.set_num_threads(1)
    quiet()
    print(report(run(arguments.only, arguments.rounds, arguments.micro_steps)))


if __name__ == "__main__":
    main()
