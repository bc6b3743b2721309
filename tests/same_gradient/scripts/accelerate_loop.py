"""Accelerate's documented loop with ``accumulate``."""

import argparse

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--samples", type=int, default=32)
args = parser.parse_args()

torch.manual_seed(0)
data = TensorDataset(torch.randn(args.samples, 8), torch.randint(3, (args.samples,)))
model = torch.nn.Linear(8, 3)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model, sgd, loader = accelerator.prepare(model, sgd, DataLoader(data, batch_size=args.batch))
for inputs, labels in loader:
    with accelerator.accumulate(model):
        accelerator.backward(cross_entropy(model(inputs), labels))
        sgd.step()
        sgd.zero_grad()
