"""torchtune's ``full_finetune_single_device``: its ``_setup_data`` and ``train`` on a model that is there already."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchtune
from omegaconf import OmegaConf
from torch import Tensor, nn

from conformance.job import Job, UnsupportedError

TITLE, VERSION_OF = "torchtune full_finetune_single_device", "torchtune"
DOCS = "https://pytorch.org/torchtune/0.6/deep_dives/recipe_deepdive.html"
FEATURES = {"clip", "momentum"}
ROWS: list[Any] = []


class Rows(list):
    """What the configuration names as dataset; torchtune passes the tokenizer first."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(ROWS)


class Logits(nn.Module):
    """torchtune's models return logits for tokens."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Any:
        return self.module(input_ids=tokens).logits


def train(job: Job) -> None:
    """Train; what ``setup`` reads from a checkpoint of a known model is set here."""
    if job.case.task != "causal_lm":
        raise UnsupportedError("it trains causal language models")
    path = Path(torchtune.__path__[0]).parent / "recipes" / "full_finetune_single_device.py"
    spec: Any = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ROWS[:] = [{"tokens": one["input_ids"].tolist(), "labels": one["labels"].tolist()} for one in job.dataset]
    recipe = object.__new__(module.FullFinetuneRecipeSingleDevice)
    nothing = SimpleNamespace(
        **{name: lambda *_, **__: None for name in ("start", "stop", "step", "log_dict", "close")}
    )
    loss, case = nn.CrossEntropyLoss(), job.case
    settings = {"_device": torch.device("cpu"), "_compile": False, "_optimizer_in_bwd": False, "_lr_scheduler": None}
    settings |= {"_profiler": nothing, "_metric_logger": nothing, "profiler_profile_memory": False}
    settings |= {"_log_every_n_steps": 1, "_log_peak_memory_stats": False, "_clip_grad_norm": job.clip_norm}
    settings |= {"_model": Logits(job.module), "_loss_fn": loss, "_tokenizer": SimpleNamespace(pad_id=0)}
    settings |= {"_optimizer": job.optimizer(), "_gradient_accumulation_steps": case.accumulation, "epochs_run": 0}
    settings |= {"max_steps_per_epoch": None, "global_step": 0, "total_epochs": case.epochs}
    settings |= {"activations_handling_ctx": contextlib.nullcontext(), "save_checkpoint": lambda epoch: None}
    settings |= {"ignore_labels_cache": torch.full((case.micro_batch_size, 1), loss.ignore_index)}
    vars(recipe).update(settings)
    data = OmegaConf.create({"_component_": f"{__name__}.Rows"})
    recipe._dataloader = recipe._setup_data(data, False, case.micro_batch_size, "torchtune.data.padded_collate_sft")
    recipe._steps_per_epoch = len(recipe._dataloader) // case.accumulation
    recipe.train()
