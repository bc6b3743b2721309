"""Lightning's Trainer with ``accumulate_grad_batches``."""

import argparse

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--samples", type=int, default=32)
args = parser.parse_args()


class Classifier(LightningModule):
    """A linear classifier."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)

    def training_step(self, batch):
        """Return the loss of a micro-batch."""
        return cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


seed_everything(0)
data = TensorDataset(torch.randn(args.samples, 8), torch.randint(3, (args.samples,)))
off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=args.accumulate, **off)
trainer.fit(Classifier(), DataLoader(data, batch_size=args.batch))
