"""torchtitan's ``Trainer.train_step`` and ``batch_generator``, on a model that is there already."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.trainer import DataloaderExhaustedError, Trainer

from conformance.cases import IGNORED
from conformance.job import Job, UnsupportedError

TITLE, VERSION_OF = "torchtitan", "torchtitan"
DOCS = "https://github.com/pytorch/torchtitan/blob/v0.3.0/torchtitan/trainer.py"
FEATURES = {"clip", "momentum"}
MESHES = ("dp", "pp", "cp", "ep", "dp_cp", "tp")


class Logits(nn.Module):
    """torchtitan's models return logits for tokens."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Any:
        return self.module(input_ids=tokens).logits


def train(job: Job) -> None:
    """Take steps until the data ends; what ``__init__`` makes of a configuration, a GPU and a log is set here."""
    if job.case.task != "causal_lm":
        raise UnsupportedError("it trains causal language models")

    def collate(samples: Any) -> Any:  # the labels of its datasets are shifted already
        batch = job.collate(samples)
        ignored = torch.full((len(samples), 1), IGNORED)
        return {"input": batch["input_ids"]}, torch.cat([batch["labels"][:, 1:], ignored], 1)

    trainer: Any = object.__new__(Trainer)
    off = {f"{name}_enabled": False for name in MESHES}
    model, off = Logits(job.module), off | {"get_optional_mesh": lambda name: None}
    settings = {"model_parts": [model], "device": torch.device("cpu"), "step": 0, "ntokens_seen": 0}
    settings |= {"parallel_dims": SimpleNamespace(**off), "loss_fn": CrossEntropyLoss(CrossEntropyLoss.Config())}
    settings |= {"optimizers": job.optimizer(), "train_context": contextlib.nullcontext, "model_config": None}
    settings |= {"gradient_accumulation_steps": job.case.accumulation, "num_pipeline_parallel_microbatches": 1}
    settings |= {name: MagicMock() for name in ("metrics_processor", "lr_schedulers", "checkpointer", "config")}
    vars(trainer).update(settings)
    trainer.fwd_bwd_fn = trainer._forward_backward_body
    trainer.metrics_processor.should_log.return_value = False
    trainer.config.training.max_norm, trainer.config.parallelism.spmd_backend = job.clip_norm or float("inf"), "default"
    for _ in range(job.case.epochs):
        batches = trainer.batch_generator(DataLoader(job.dataset, job.case.micro_batch_size, collate_fn=collate))  # type: ignore[arg-type]
        with contextlib.suppress(DataloaderExhaustedError):  # as in its ``train``: the last step is canceled
            while True:
                trainer.step += 1
                trainer.train_step(batches)
