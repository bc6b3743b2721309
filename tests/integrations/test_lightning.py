"""The drop-in for Lightning: the gradient of the whole batch, or an error that names what prevents it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning.pytorch")

from lightning.pytorch import LightningModule, Trainer

from trainer.integrations.lightning import ExactAccumulation

CLASS_WEIGHTS = torch.tensor([0.1, 0.7, 0.2], dtype=torch.float64)  # no sum of them is exact in float32


class Classifier(ExactAccumulation, LightningModule):
    def __init__(self, normalization: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), normalization, nn.Linear(8, 3)).double()
        self.gradients: list[torch.Tensor] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        pixels, labels = batch
        total = cross_entropy(self.net(pixels), labels, CLASS_WEIGHTS, reduction="sum")
        return self.share(total, float(CLASS_WEIGHTS[labels].sum()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(11, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(pixels, torch.randint(3, (11,), generator=generator))


def fit(module: LightningModule, accumulate: int, folder: Any, size: int = 2) -> None:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        default_root_dir=folder,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(samples(), batch_size=size))


def test_every_window_has_the_gradient_of_its_samples(tmp_path):
    module = Classifier(nn.GroupNorm(2, 8))
    fit(module, 4, tmp_path)
    pixels, labels = samples().tensors
    for found, own in zip(module.gradients, (slice(0, 8), slice(8, 11)), strict=True):
        loss = cross_entropy(module.net(pixels[own]), labels[own], CLASS_WEIGHTS)  # a weighted mean
        wanted = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(module.net.parameters()))])
        assert (found - wanted).norm() <= 1e-12 * wanted.norm()


def test_batchnorm_is_rejected_in_a_batch_that_is_cut(tmp_path):
    with pytest.raises(ValueError, match=r"^BatchNorm normalizes each micro-batch by itself: use GroupNorm"):
        fit(Classifier(nn.BatchNorm1d(8)), 4, tmp_path)
    whole = Classifier(nn.BatchNorm1d(8))
    fit(whole, 1, tmp_path, size=11)
    assert len(whole.gradients) == 1


def test_what_is_not_shared_is_an_error(tmp_path):
    class Forgetful(Classifier):
        def training_step(self, batch: Any) -> torch.Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

    with pytest.raises(ValueError, match=r"return self\.share\(total, weight\)"):
        fit(Forgetful(nn.Identity()), 4, tmp_path)
