"""A loop in plain torch over texts of different lengths."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8, help="texts in a micro-batch")
parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in an optimizer step")
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--loss", choices=("sum", "mean", "undivided"), default="sum")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--out", default="", help="write the weights of each step to this file")
args = parser.parse_args()

generator = torch.Generator().manual_seed(0)
texts = [torch.randint(1, 32, (length,), generator=generator) for length in range(2, 34)]
torch.manual_seed(args.seed)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=args.lr)

size = args.batch * args.accumulate
for start in range(0, len(texts), size):
    window = texts[start : start + size]
    targets = sum(len(text) - 1 for text in window)
    for first in range(0, size, args.batch):
        batch = pad_sequence(window[first : first + args.batch], batch_first=True, padding_value=0)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = model(batch[:, :-1]).flatten(0, 1)
        labels = batch[:, 1:].flatten()
        total = cross_entropy(logits.float(), labels, ignore_index=0, reduction="sum")
        if args.loss == "sum":
            loss = total / targets
        else:
            loss = total / (labels > 0).sum()
            loss = loss / args.accumulate if args.loss == "mean" else loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if args.out:
        torch.save(model.state_dict(), args.out)
