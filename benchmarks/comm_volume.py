"""Do ranks send the bytes that the planner says? Counted by the kernel, on the loopback of a network of their own.

``python benchmarks/comm_volume.py``, as root or where users may make network namespaces (``unshare``): two minutes on
two cores. Gloo ranks take real steps of a multilayer perceptron; what went over ``lo`` is compared with the traffic
that is traced for as many ranks. Each collective of gloo is also measured by itself: gloo's reduce-scatter sends more
than a ring needs, which NCCL's does not, so a step is compared with both.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from common import Record, table, torchrun_variables
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import start_processes

from trainer import Data, Loss, Memory, Model, Optim, Recipe
from trainer.memory.plan import decide_plan
from trainer.models.base import classification_loss
from trainer.planner.predict import prepare_recipe
from trainer.settings import change

WIDTH, BLOCKS, CLASSES = 768, 4, 10
STEPS = 5  # of which the least counts
SIZE = 16 * 2**20
"""Bytes of the tensor with which a collective is measured."""

FSDP = {"memory.strategy": "fsdp"}
CASES: list[tuple[str, Mapping[str, Any]]] = [
    ("ddp", {"memory.strategy": "ddp"}),
    ("fsdp", FSDP),
    ("fsdp, weights kept", FSDP | {"memory.reshard_after_forward": False}),
    ("fsdp, sync every micro-step", FSDP | {"memory.sync_every_micro_step": True}),
]
RANKS = (2, 3)


class Block(nn.Sequential):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.ReLU())


@dataclass
class Perceptron(Model):
    """Blocks, and a head."""

    blocks = (Block,)

    def build(self) -> nn.Module:
        return nn.Sequential(*[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, CLASSES))

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        yield classification_loss(module(batch["pixel_values"]), batch["labels"])


@dataclass
class Noise(Data):
    """As many samples as a batch of six ranks has."""

    def prepare(self, tokenizer: Any = None) -> None:
        self.train = [{"pixel_values": torch.randn(WIDTH), "labels": torch.tensor(0)} for _ in range(48)]


def recipe_of(settings: Mapping[str, Any]) -> Recipe:
    """Two micro-batches of four samples on each rank."""
    recipe = Recipe(
        model=Perceptron(), data=Noise(), optim=Optim("sgd", lr=0.01), accumulate=2, memory=Memory(micro_batch_size=4)
    )
    return prepare_recipe(change(recipe, dict(settings), {}))


def predicted(settings: Mapping[str, Any], ranks: int) -> dict[str, float]:
    """Bytes that a rank sends in a step, by collective, as the planner traces them."""
    from trainer.planner.predict import predict_in_process
    from trainer.planner.search import target_for
    from trainer.system.child_jobs import run_in_child

    recipe = recipe_of(settings)
    call = partial(predict_in_process, recipe, decide_plan(recipe, ranks), target_for("cpu"))
    return run_in_child(call)["traffic"]


def measured(ranks: int) -> dict[str, dict[str, float]]:
    """Bytes that a rank sends for a byte of each collective's tensor, and in a step of each case.

    Raises:
        RuntimeError: where no network namespace can be made, or a rank has failed.
    """
    again = shlex.join([sys.executable, __file__, "--ranks", str(ranks)])
    command = [*in_own_network(), "sh", "-c", f"ip link set lo up && exec {again}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def can_measure() -> bool:
    """Whether this machine lets us make a network of our own."""
    if not all(map(shutil.which, ("unshare", "ip"))):
        return False
    return not subprocess.run([*in_own_network(), "ip", "link", "set", "lo", "up"], check=False).returncode


def in_own_network() -> list[str]:
    """What to put before a command."""
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--net"]


# ------------------------------------------------------------------------------------------------ in the new network


def be_rank(rank: int, ranks: int, port: int) -> None:
    """One rank: do one collective after the other, take steps of each case, and count; the first prints the result."""
    os.environ.update(torchrun_variables(rank, ranks, port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    steps = {name: _of_steps(recipe_of(settings)) for name, settings in CASES}
    found = {"collectives": _of_collectives(), "steps": steps}
    if rank == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # gloo aborts at random when it is taken down in order


def _of_steps(recipe: Recipe) -> float:
    from fake_ranks import build_stepper

    from trainer.launching.start import launch
    from trainer.launching.world import World
    from trainer.planner.traced_run import draw_samples

    ranks = torch.distributed.get_world_size()
    plan = decide_plan(recipe, ranks)
    fabric = launch(plan, World("torchrun", "cpu", devices=ranks, nodes=1))
    stepper, _ = build_stepper(fabric, recipe, plan)
    window = draw_samples(recipe, plan).first
    for _ in range(2):  # the first step of DDP reduces in another way
        stepper.step(window)
    return _counted(lambda: stepper.step(window))


def _of_collectives() -> dict[str, float]:
    ranks = torch.distributed.get_world_size()
    whole = torch.ones(SIZE // 4 // ranks * ranks)
    part = torch.ones(whole.numel() // ranks)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: torch.distributed.all_reduce(whole),
        "all_gather": lambda: torch.distributed.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: torch.distributed.reduce_scatter_tensor(part, whole),
    }
    for call in calls.values():
        call()  # connections are made when they are first needed
    return {name: _counted(call) / (whole.numel() * 4) for name, call in calls.items()}


def _counted(call: Callable[[], Any]) -> float:
    """Bytes that each rank sent for a call: the least of ``STEPS``, for what a busy machine sends again only adds."""
    found = []
    for _ in range(STEPS):
        torch.distributed.barrier()
        before = loopback_bytes()
        torch.distributed.barrier()
        call()
        torch.distributed.barrier()
        found.append(loopback_bytes() - before)
    return min(found) / torch.distributed.get_world_size()


def loopback_bytes() -> int:
    """What has been sent over ``lo`` in this network, with the headers of TCP."""
    line = next(text for text in Path("/proc/net/dev").read_text().splitlines() if text.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


# ------------------------------------------------------------------------------------------------------------- all


def compare() -> dict[str, list[dict[str, Any]]]:
    """Everything, measured and predicted."""
    collectives, steps = [], []
    for ranks in RANKS:
        traffic = {name: predicted(settings, ranks) for name, settings in CASES}
        found = measured(ranks)
        factors = found["collectives"]
        ring = {name: (2 if name == "all_reduce" else 1) * (ranks - 1) / ranks for name in factors}
        collectives += [
            {"ranks": ranks, "collective": name, "measured": factors[name], "ring": ring[name]} for name in factors
        ]
        for name, sent in found["steps"].items():
            by_gloo = sum(size / ring[op] * factors[op] for op, size in traffic[name].items())
            figures = {"measured": sent, "predicted": sum(traffic[name].values()), "predicted_for_gloo": by_gloo}
            steps.append({"ranks": ranks, "case": name, **figures, "traffic": traffic[name]})
    return {"collectives": collectives, "steps": steps}


def main() -> None:
    """Compare, print two tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, help="start so many ranks in this network")
    options = parser.parse_args()
    if options.ranks:
        # Forks import nothing anew.
        start_processes(be_rank, (options.ranks, get_free_port()), options.ranks, start_method="fork")
        return
    record = Record("comm_volume", {"steps": STEPS, "width": WIDTH, "blocks": BLOCKS})
    found = compare()
    record.write(True, **found)
    rows = [
        [str(one["ranks"]), one["collective"], f"{one['measured']:.4f}", f"{one['ring']:.4f}"]
        for one in found["collectives"]
    ]
    print(table(["ranks", "collective", "sent / tensor, measured", "as a ring"], rows) + "\n")
    rows = []
    for one in found["steps"]:
        sizes = [f"{one[key] / 1e6:.2f}" for key in ("measured", "predicted", "predicted_for_gloo")]
        ratio = f"{one['measured'] / one['predicted_for_gloo']:.3f}"
        rows.append([one["case"], str(one["ranks"]), *sizes, ratio])
    sizes = ["MB sent, measured", "predicted, rings", "predicted, gloo"]
    print(table(["step", "ranks", *sizes, "measured / predicted for gloo"], rows))


if __name__ == "__main__":
    main()
