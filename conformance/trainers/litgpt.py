"""litgpt's ``finetune_full``: its ``fit`` on a model and data that are there already."""

from __future__ import annotations

from typing import Any

import litgpt.finetune.full as full
from lightning.fabric import Fabric
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data.base import get_sft_collate_fn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from conformance.job import Job, UnsupportedError
from conformance.trainers.transformers import constant

TITLE, VERSION_OF = "litgpt finetune_full", "litgpt"
DOCS = "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/finetune_full.md"
FEATURES = {"ranks", "momentum", "evaluate"}


class Logits(nn.Module):
    """litgpt's models return logits for numbers of tokens."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.max_seq_length, self.config = module, 64, type("Config", (), {"block_size": 64})

    def forward(self, input_ids: Tensor) -> Any:
        return self.module(input_ids=input_ids).logits


def train(job: Job) -> None:
    """Train with the arguments of the page; ``setup``, which reads a checkpoint and a tokenizer, is left out."""
    case = job.case
    if case.task != "causal_lm":
        raise UnsupportedError("it trains causal language models")
    fabric = Fabric(accelerator="cpu", devices=case.ranks, strategy="ddp" if case.ranks > 1 else "auto")
    fabric.launch()
    loaders = [loader(job, samples) for samples in (job.dataset, job.evaluation_set)]
    model = fabric.setup(Logits(job.module))
    optimizer = fabric.setup_optimizers(job.optimizer())
    size = case.micro_batch_size * case.accumulation * case.ranks
    sizes = {"micro_batch_size": case.micro_batch_size, "global_batch_size": size, "epochs": case.epochs}
    full.Tokenizer = lambda folder: None  # only for examples that it prints
    state = {"model": model, "optimizer": optimizer, "scheduler": constant(optimizer), "iter_num": 0, "step_count": 0}
    full.fit(
        fabric,
        state,
        *fabric.setup_dataloaders(*loaders),
        devices=case.ranks,
        resume=False,
        checkpoint_dir=job.folder,
        out_dir=job.folder,
        data=None,
        train=TrainArgs(save_interval=None, lr_warmup_steps=0, **sizes),
        eval=EvalArgs(interval=10**9, max_iters=1),
    )
    if job.needs("evaluate"):
        job.evaluation_loss = float(full.validate(fabric, model, loaders[1], EvalArgs(max_iters=len(loaders[1]))))


def loader(job: Job, samples: list[Any]) -> DataLoader:
    """Return a loader with litgpt's collate function."""
    counts = ("raw", "raw_plus_prompt_template")
    rows = [sample | {"token_counts": dict.fromkeys(counts, len(sample["input_ids"]))} for sample in samples]
    return DataLoader(rows, job.case.micro_batch_size, collate_fn=get_sft_collate_fn())  # type: ignore[arg-type]
