"""A tiny recipe, as a person writes one, whose model and data do what a test wants; see ``started.own_recipe``."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer import Checkpoint, Memory, Optim, Recipe, Run, main
from trainer.data import Digits
from trainer.errors import RunError
from trainer.faults.heartbeats import POLL_INTERVAL
from trainer.models import VisionTransformer

START = f"{os.uname().nodename}-{time.time_ns()}"  # pids begin anew on every machine


def rank():
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def disturb(what):
    if what == "raise":
        1 / 0  # noqa: B018
    elif what == "exit":
        raise SystemExit(0)
    elif what in ("kill", "stop"):
        time.sleep(2 * POLL_INTERVAL)  # until a heartbeat names this step
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    elif what == "hang":
        time.sleep(1000)
    elif what == "no memory":
        raise torch.OutOfMemoryError("no memory for these activations")
    elif what == "run error":
        raise RunError("this rank has had enough")


@dataclass
class Disturbed(VisionTransformer):
    """A Vision Transformer that does ``what`` on ``rank`` as its step ``at`` begins; once, where there is a ``done``.

    Its micro-batches take ``seconds`` more, with ``marks`` from step ``at`` on, where it leaves its pid, and in a job
    that Slurm has not started again. It has memory for micro-batches of ``most`` samples.
    """

    what: str = "nothing"
    rank: int = 0
    at: int = 3
    cut: int = 6  # micro-batches of a step, over all ranks
    done: str | None = None
    seconds: float = 0.0
    marks: str | None = None
    most: int = 1000
    micro_batches: int = 0

    def losses(self, module, batch):
        self.micro_batches += module.training
        if module.training and len(batch["labels"]) > self.most:
            disturb("no memory")
        before = (self.at - 1) * self.cut // int(os.environ.get("WORLD_SIZE", 1))
        is_now = module.training and rank() == self.rank and self.micro_batches == before + 1
        if is_now and not (self.done and Path(self.done).exists()):
            if self.done is not None:
                Path(self.done).touch()
            disturb(self.what)
        if self.marks is None:
            time.sleep(self.seconds * module.training)
        elif self.micro_batches > before and "SLURM_RESTART_COUNT" not in os.environ:
            Path(self.marks, str(rank())).write_text(str(os.getpid()))
            time.sleep(self.seconds)
        yield from super().losses(module, batch)


class Split:
    """One that hangs at its seventh micro-batch on every rank but the first, or writes down what is asked of it."""

    def __init__(self, split, waits):
        self.split, self.waits, self.fetched = split, waits, 0

    def __getattr__(self, name):
        return getattr(self.split, name)

    def __len__(self):
        return len(self.split)

    def __getitem__(self, i):
        return self.split[i]

    def __getitems__(self, indices):
        self.fetched += 1
        if self.waits and self.fetched == 7 and rank():
            time.sleep(1000)
        if folder := os.environ.get("TRAINER_TEST_SAMPLES"):
            with open(f"{folder}/{START}", "a") as file:
                file.write(json.dumps(list(map(int, indices))) + "\n")
        return self.split.__getitems__(indices)


@dataclass
class OwnDigits(Digits):
    waits: bool = False

    def prepare(self, tokenizer=None):
        super().prepare(tokenizer)
        self.train = Split(self.train, self.waits)


recipe = Recipe(
    model=Disturbed("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32),
    data=OwnDigits(),
    optim=Optim("sgd", lr=0.1),
    batch_size=24,
    max_steps=2000,
    epochs=1000,
    memory=Memory(micro_batch_size=4),
    checkpoint=Checkpoint(),
    run=Run(evaluate=False, predict=False),
)

if __name__ == "__main__":
    main(recipe)
