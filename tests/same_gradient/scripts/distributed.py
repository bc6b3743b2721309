"""DDP or FSDP2 under torchrun, or one process without it; each rank takes its share of every batch."""

import argparse
import os

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=12, help="samples in a batch of all ranks")
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--loss", choices=("mean", "sum"), default="mean")
args = parser.parse_args()

ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
inputs, labels = torch.randn(48, 8), torch.randint(3, (48,))
if "RANK" in os.environ:
    distributed.init_process_group("gloo")
    if args.fsdp:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (ranks,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for start in range(0, len(inputs), args.batch):
    own = slice(start + rank, start + args.batch, ranks)
    loss = cross_entropy(model(inputs[own]), labels[own], reduction=args.loss)
    (loss if args.loss == "mean" else loss / args.batch).backward()
    optimizer.step()
    optimizer.zero_grad()
if "RANK" in os.environ:
    distributed.destroy_process_group()
