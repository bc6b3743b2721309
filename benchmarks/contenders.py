"""How others train: each takes a job and trains its module for one epoch, used as its documentation shows."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
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

from trainer.integrations.transformers import ExactGradients
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
        even_batches: Accelerate's, and transformers': a rank that has nothing left repeats samples.
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
    even_batches: bool = True
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
    accelerator = _accelerator(job)
    module, optimizer, loader = accelerator.prepare(job.module, job.optimizer(job.module), job.loader())
    for batch in loader:
        with accelerator.accumulate(module):
            accelerator.backward(module(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def accelerate_by_hand(job: Job, loss_sum: Callable[[Any, Tensor], Tensor], count: Callable[[Tensor], Tensor]) -> None:
    """Accelerate, as its page on gradient accumulation says for samples of variable size: items are counted ahead.

    Args:
        job: what is to be trained.
        loss_sum: the sum of the losses of the items of ``(outputs, labels)``.
        count: how many items ``labels`` has.
    """
    accelerator = _accelerator(job)
    module, optimizer, loader = accelerator.prepare(job.module, job.optimizer(job.module), job.loader())
    batches = iter(loader)
    steps = math.ceil(len(loader) / job.accumulate)
    for step in range(steps):
        window = [next(batches) for _ in range(min(job.accumulate, len(loader) - step * job.accumulate))]
        items = sum((count(batch["labels"]) for batch in window), torch.tensor(0)).to(accelerator.device)
        total = accelerator.gather(items).sum().item()
        for number, batch in enumerate(window, start=1):
            silent = job.ranks > 1 and number < len(window)
            with module.no_sync() if silent else contextlib.nullcontext():
                outputs = module(**batch)
                # backward divides by the micro-batches of a step, and DDP by the ranks
                scale = job.accumulate * accelerator.num_processes / total
                accelerator.backward(loss_sum(outputs, batch["labels"]) * scale)
        optimizer.step()
        optimizer.zero_grad()


def _accelerator(job: Job) -> Accelerator:
    forget_accelerators()
    return Accelerator(
        cpu=job.accelerator == "cpu",
        gradient_accumulation_steps=job.accumulate,
        mixed_precision="bf16" if job.precision == "bf16-mixed" else "no",
        dataloader_config=DataLoaderConfiguration(even_batches=job.even_batches),
    )


def forget_accelerators() -> None:
    """Accelerate keeps its settings for the life of a process, and transformers' Trainer uses it too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Lit(LightningModule):
    """A module for Lightning's Trainer, with the module's own loss."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.module, self.make_optimizer = job.module, job.optimizer

    def training_step(self, batch: Batch) -> Any:
        return self.module(**batch)["loss"]

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self.module)


class ManualLit(Lit):
    """The same with manual optimization, as Lightning's page on it accumulates."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.automatic_optimization = False
        self.accumulate = job.accumulate

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.module(**batch)["loss"] / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def lightning_trainer(job: Job, lit: type[Lit] = Lit, batches: Any = None) -> None:
    """Lightning's Trainer with ``accumulate_grad_batches``, or with manual optimization."""
    trainer = Trainer(
        accelerator=job.accelerator,
        devices=job.ranks,
        strategy="ddp" if job.ranks > 1 else "auto",
        precision=job.precision,
        max_epochs=1,
        accumulate_grad_batches=1 if lit is ManualLit else job.accumulate,
        use_distributed_sampler=batches is None,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    own = None if batches is None else DataLoader(job.dataset, batch_sampler=batches, collate_fn=job.collate)
    trainer.fit(lit(job), own or job.loader())


class WithLoss(nn.Module):
    """A classifier of images whose forward returns the loss that a person writes, for those that take it from there."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.module(pixel_values)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class _Given(Sampler):
    """Samples in a given order."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class _OrderedTrainer(TransformersTrainer):
    """transformers' Trainer on samples in a given order."""

    order: Sequence[int] | None = None

    def _get_train_sampler(self, *arguments: Any) -> Any:
        return super()._get_train_sampler(*arguments) if self.order is None else _Given(self.order)


class ExactTrainer(ExactGradients, _OrderedTrainer):
    """The same with our drop-in."""


def transformers_trainer(job: Job, kind: type = _OrderedTrainer, **given: Any) -> None:
    """transformers' Trainer, with the model's own loss, or with ``compute_loss_func(outputs, labels, items)``."""
    forget_accelerators()
    given |= {"data_collator": job.collate, "train_dataset": job.dataset}
    with tempfile.TemporaryDirectory() as folder:
        own = {"accelerator_config": {"even_batches": job.even_batches}, "remove_unused_columns": False}
        trainer = _of_job(partial(kind, **given), job, folder, **own, **job.arguments)
        trainer.order = job.order
        trainer.train()


def trl_sft(job: Job, padding_free: bool = False, pack: int | None = None, mixins: tuple[type, ...] = ()) -> None:
    """TRL's SFTTrainer with its own loss, on tokens and labels that are there already.

    Args:
        job: what is to be trained; its ``collate`` is not used, TRL has its own.
        padding_free: the texts of a micro-batch one after another, in one row.
        pack: tokens of a pack of best fit ("bfd"), which is then what a micro-batch has ``micro_batch_size`` of.
        mixins: in front of SFTTrainer.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    forget_accelerators()
    words = Tokenizer(WordLevel({"[PAD]": 0}, unk_token="[PAD]"))  # only its padding token is asked for
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[PAD]")
    given = {"train_dataset": Dataset.from_list(sft_rows(job)), "processing_class": tokenizer}
    with tempfile.TemporaryDirectory() as folder:
        kind = partial(type("Sft", (*mixins, SFTTrainer), {}), **given)
        own = {"padding_free": padding_free, "packing": pack is not None, "max_length": pack}
        _of_job(kind, job, folder, config=SFTConfig, gradient_checkpointing=False, **own).train()


def _of_job(kind: Callable[..., Any], job: Job, folder: str, **arguments: Any) -> Any:
    """A bare trainer in the micro-batches and the order of a job."""
    return bare_trainer(
        kind,
        job.module,
        job.optimizer(job.module),
        folder,
        use_cpu=job.accelerator == "cpu",
        bf16=job.precision == "bf16-mixed",
        per_device_train_batch_size=job.micro_batch_size,
        gradient_accumulation_steps=job.accumulate,
        train_sampling_strategy="sequential",
        **arguments,
    )


def sft_rows(job: Job) -> list[dict[str, list[int]]]:
    """The samples of a job as TRL takes them: ``input_ids`` and ``labels``."""
    samples = (job.dataset[index] for index in range(len(job.dataset)))
    return [{key: torch.as_tensor(sample[key]).tolist() for key in ("input_ids", "labels")} for sample in samples]


def bare_trainer(
    kind: Callable[..., Any],
    module: nn.Module,
    optimizer: Optimizer,
    folder: str,
    config: type[TrainingArguments] = TrainingArguments,
    **arguments: Any,
) -> Any:
    """transformers' Trainer of a class, for an epoch, with a learning rate that stays, and all off that can be.

    Args:
        kind: the class, with what else it is to be made with.
        module: whose forward returns the loss.
        optimizer: of its parameters.
        folder: where it may write.
        config: the class of its arguments.
        arguments: more of them.
    """
    off = {"max_grad_norm": 0.0, "logging_strategy": "no", "save_strategy": "no", "eval_strategy": "no"}
    bare = config(folder, num_train_epochs=1, report_to="none", disable_tqdm=True, **off, **arguments)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = kind(model=module, args=bare, optimizers=(optimizer, constant))
    trainer.remove_callback(PrinterCallback)
    return trainer


def keras_fit(job: Job, epochs: int = 1) -> None:
    """Keras 3 on torch: ``fit`` with the optimizer's ``gradient_accumulation_steps``; the labels are a class a sample.

    The module's loss is not used: Keras computes the mean cross entropy of the logits.
    """
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    keras.config.set_floatx(str(next(job.module.parameters()).dtype).removeprefix("torch."))
    rate = job.optimizer(job.module).param_groups[0]["lr"]

    class Logits(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = keras.layers.TorchModuleWrapper(job.module)

        def call(self, inputs: Batch) -> Tensor:
            return self.wrapped(**inputs)["logits"]

    model = Logits()
    model.compile(
        keras.optimizers.SGD(rate, gradient_accumulation_steps=job.accumulate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    batch = {key: value.numpy() for key, value in job.collate(list(job.dataset)).items()}
    labels = batch.pop("labels")
    model.fit(batch, labels, batch_size=job.micro_batch_size, epochs=epochs, shuffle=False, verbose=0)


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
