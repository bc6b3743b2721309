"""How others train: each takes a job and trains its module for one epoch, used as its documentation shows."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from common import process_memory
from lightning import LightningModule, Trainer
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from transformers import PrinterCallback, TrainingArguments
from transformers import Trainer as TransformersTrainer

from trainer.system.files import write_atomic

Batch = dict[str, Tensor]


@dataclass
class Job:
    """What is to be trained.

    Args:
        module: its forward takes a batch's entries by name and returns, by name, the mean ``loss`` and the ``logits``.
        dataset: the samples, in the order in which they are to be trained on.
        collate: makes a batch of samples.
        micro_batch_size: samples of a micro-batch.
        accumulate: micro-batches a step on each rank.
        optimizer: makes what the module is trained with.
        ranks: processes, of which this is one, in a group already.
        accelerator: where it trains.
        precision: in Lightning's words; the weights are float32 (or what ``module`` has, for 32-true).
        order: for transformers' Trainer, in the place of the dataset's: what its ``group_by_length`` made.
        arguments: more of transformers' ``TrainingArguments``.
    """

    module: nn.Module
    dataset: Any
    collate: Callable[[Sequence[Any]], Batch]
    micro_batch_size: int
    accumulate: int
    optimizer: Callable[[nn.Module], Optimizer]
    ranks: int = 1
    accelerator: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    order: Sequence[int] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def loader(self, sampler: Sampler | None = None) -> DataLoader:
        """Micro-batches in the dataset's order."""
        return DataLoader(self.dataset, self.micro_batch_size, sampler=sampler, collate_fn=self.collate)


def plain(job: Job) -> None:
    """The loop that a person writes, with DDP on several ranks."""
    device = torch.device("cpu" if job.accelerator == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    module: nn.Module = job.module.to(device)
    sampler = None
    if job.ranks > 1:
        module, sampler = DistributedDataParallel(module), DistributedSampler(job.dataset, shuffle=False)
    optimizer = job.optimizer(module)
    for number, batch in enumerate(job.loader(sampler), start=1):
        is_accumulating = number % job.accumulate != 0
        batch = {key: value.to(device) for key, value in batch.items()}
        silent = module.no_sync() if job.ranks > 1 and is_accumulating else contextlib.nullcontext()
        with silent:
            with torch.autocast(job.accelerator, torch.bfloat16, enabled=job.precision == "bf16-mixed"):
                loss = module(**batch)["loss"] / job.accumulate
            loss.backward()
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()


def fabric(job: Job) -> None:
    """Lightning Fabric's ``no_backward_sync``."""
    launched = Fabric(
        accelerator=job.accelerator,
        devices=job.ranks,
        strategy="ddp" if job.ranks > 1 else "auto",
        precision=job.precision,
    )
    launched.launch()
    module, optimizer = launched.setup(job.module, job.optimizer(job.module))
    for number, batch in enumerate(launched.setup_dataloaders(job.loader()), start=1):
        is_accumulating = number % job.accumulate != 0
        with launched.no_backward_sync(module, enabled=is_accumulating):
            launched.backward(module(**batch)["loss"] / job.accumulate)
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()


def accelerate(job: Job) -> None:
    """Accelerate's ``accumulate``."""
    accelerator = Accelerator(
        cpu=job.accelerator == "cpu",
        gradient_accumulation_steps=job.accumulate,
        mixed_precision="bf16" if job.precision == "bf16-mixed" else "no",
    )
    module, optimizer, loader = accelerator.prepare(job.module, job.optimizer(job.module), job.loader())
    for batch in loader:
        with accelerator.accumulate(module):
            accelerator.backward(module(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


class Lit(LightningModule):
    """A module for Lightning's Trainer, with the module's own loss."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.module, self.make_optimizer = job.module, job.optimizer

    def training_step(self, batch: Batch) -> Any:
        return self.module(**batch)["loss"]

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self.module)


def lightning_trainer(job: Job) -> None:
    """Lightning's Trainer with ``accumulate_grad_batches``."""
    Trainer(
        accelerator=job.accelerator,
        devices=job.ranks,
        strategy="ddp" if job.ranks > 1 else "auto",
        precision=job.precision,
        max_epochs=1,
        accumulate_grad_batches=job.accumulate,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    ).fit(Lit(job), job.loader())


class WithLoss(nn.Module):
    """A classifier of images whose forward returns the loss that a person writes, for those that take it from there."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.module(pixel_values)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class _OrderedTrainer(TransformersTrainer):
    """transformers' Trainer on samples in a given order."""

    order: Sequence[int] | None = None

    def _get_train_sampler(self, *arguments: Any) -> Any:
        return super()._get_train_sampler(*arguments) if self.order is None else self.order


def transformers_trainer(job: Job) -> None:
    """transformers' Trainer, with the model's own loss."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = bare_trainer(
            partial(_OrderedTrainer, data_collator=job.collate, train_dataset=job.dataset),
            job.module,
            job.optimizer(job.module),
            folder,
            use_cpu=job.accelerator == "cpu",
            bf16=job.precision == "bf16-mixed",
            per_device_train_batch_size=job.micro_batch_size,
            gradient_accumulation_steps=job.accumulate,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            **job.arguments,
        )
        trainer.order = job.order
        trainer.train()


def bare_trainer(
    kind: Callable[..., Any], module: nn.Module, optimizer: Optimizer, folder: str, **arguments: Any
) -> Any:
    """transformers' Trainer of a class, for an epoch, with a learning rate that stays, and all off that can be.

    Args:
        kind: the class, with what else it is to be made with.
        module: whose forward returns the loss.
        optimizer: of its parameters.
        folder: where it may write.
        arguments: more of its ``TrainingArguments``.
    """
    off = {"max_grad_norm": 0.0, "logging_strategy": "no", "save_strategy": "no", "eval_strategy": "no"}
    bare = TrainingArguments(folder, num_train_epochs=1, report_to="none", disable_tqdm=True, **off, **arguments)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = kind(model=module, args=bare, optimizers=(optimizer, constant))
    trainer.remove_callback(PrinterCallback)
    return trainer


class Clock:
    """Looks at a run from outside: torch calls it after every step of any optimizer.

    Args:
        steps: that count, after the first.
        ranks: processes that train.
        out: where to write what was found; then the process ends.
    """

    def __init__(self, steps: int, ranks: int, out: Path) -> None:
        self.steps, self.ranks, self.out = steps, ranks, out
        self.taken = self.positions = 0
        self.begin = self.begin_cpu = 0.0
        self.on_gpu = torch.cuda.is_available()
        self.idle = 0 if self.on_gpu else process_memory("VmRSS")
        register_optimizer_step_post_hook(self._stepped)
        self.finder = nn.modules.module.register_module_forward_pre_hook(self._find)

    def _find(self, module: nn.Module, _: Any) -> None:
        """Count the token positions that go through the word embedding."""
        if isinstance(module, nn.Embedding) and module.num_embeddings > 10_000:
            module.register_forward_pre_hook(self._count)
            self.finder.remove()
            self._count(module, _)

    def _count(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if self.taken and arguments:
            self.positions += arguments[0].numel()

    def _stepped(self, *_: Any) -> None:
        if self.on_gpu and self.taken in (0, self.steps):  # between, the host may run ahead of the device
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.taken += 1
        if self.taken == 1:
            self.begin, self.begin_cpu = time.perf_counter(), time.process_time()
        elif self.taken == 1 + self.steps:
            peak = torch.cuda.max_memory_reserved() if self.on_gpu else process_memory("VmHWM") - self.idle
            used = {"seconds": now - self.begin, "cpu": time.process_time() - self.begin_cpu, "peak": peak}
            write_atomic(self.out, json.dumps(used | {"positions": self.positions}), sync_folder=False)
            self._leave()

    def _leave(self) -> None:
        """Nothing after the last step is measured; but no rank leaves while another may still talk to it."""
        until = time.monotonic() + 60
        while time.monotonic() < until and len(list(self.out.parent.glob("rank-*.json"))) < self.ranks:
            time.sleep(0.01)
        os._exit(0)


CONTENDERS: dict[str, tuple[str, Callable[[Job], None]]] = {
    "plain": ("plain PyTorch loop", plain),
    "fabric": ("Fabric", fabric),
    "lightning": ("Lightning Trainer", lightning_trainer),
    "accelerate": ("Accelerate", accelerate),
    "transformers": ("transformers Trainer", transformers_trainer),
    "transformers-grouped": ("transformers Trainer, group_by_length", transformers_trainer),
}


def quiet() -> None:
    """No advice from the frameworks between our lines."""
    warnings.filterwarnings("ignore")
    for logger in ("lightning", "lightning.pytorch", "lightning.fabric", "transformers", "accelerate"):
        logging.getLogger(logger).setLevel(logging.ERROR)
