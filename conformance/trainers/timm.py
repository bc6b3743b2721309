"""timm: ``train_one_epoch`` of its training script.

The script is not in the package. It is downloaded from the repository, and checked, so it is of a commit and not of the
version of the package. Three things differ from its command line: the model is wrapped, because timm gives a model one
tensor; the loader is a plain one, because timm's drops an incomplete micro-batch; and the order is that of the case.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.task import ClassificationTask
from torch import Tensor, nn
from torch.hub import download_url_to_file
from torch.utils.data import DistributedSampler

from conformance.environments import CACHE
from conformance.job import Job, UnsupportedError

TITLE, VERSION_OF = "timm train.py", "timm"
DOCS = "https://huggingface.co/docs/timm/training_script"
FEATURES = {"ranks"}
COMMIT = "aa4b5850c1543fa488abf260f18390eda46cf85d"
SHA256 = "f0bb70b9e1c8c576eb1f7beba9cb46953d01ec1308d68c59ec055a6266f76388"


@cache
def script() -> ModuleType:
    """Return the training script as a module."""
    path = CACHE / f"timm_train_{COMMIT[:8]}.py"
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        url = f"https://raw.githubusercontent.com/huggingface/pytorch-image-models/{COMMIT}/train.py"
        download_url_to_file(url, str(path), hash_prefix=SHA256, progress=False)
    spec: Any = importlib.util.spec_from_file_location("timm_train", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Logits(nn.Module):
    """timm's models return logits for one tensor: here the tokens and their mask."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Any:
        tokens, mask = images.long().unbind(1)
        return self.module(input_ids=tokens, attention_mask=mask)["logits"]


def train(job: Job) -> None:
    """Train each epoch with the arguments of the page."""
    case = job.case
    if case.model not in ("bag", "classifier", "batch norm", "smoothed"):
        raise UnsupportedError("train.py trains classifiers, without weights of classes")

    def collate(samples: Any) -> tuple[Tensor, Tensor]:
        batch = job.collate(samples)
        return torch.stack([batch["input_ids"], batch["attention_mask"]], 1), batch["labels"]

    given = ["--grad-accum-steps", str(case.accumulation), "--device", "cpu", "--no-prefetcher"]
    args = script().parser.parse_args(given)
    args.prefetcher, args.distributed, args.rank, args.world_size = False, case.ranks > 1, job.rank, case.ranks
    model, device = Logits(job.module), torch.device("cpu")
    loss = LabelSmoothingCrossEntropy() if case.model == "smoothed" else nn.CrossEntropyLoss()  # as --smoothing
    task = ClassificationTask(model, loss, device=device, verbose=False)
    sampler = None
    if case.ranks > 1:
        task.prepare_distributed(device_ids=None)
        sampler = DistributedSampler(job.dataset, shuffle=False)  # type: ignore[arg-type]
    loader, optimizer = job.loader(sampler), job.optimizer()
    loader.collate_fn = collate
    settings = {"task": task, "device": device, "model_dtype": torch.float64}
    for epoch in range(case.epochs):
        script().train_one_epoch(epoch, model, loader, optimizer, args, **settings)
