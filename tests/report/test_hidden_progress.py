"""``run.progress false`` hides how far a run is, and nothing that happened otherwise than it was asked for."""

from __future__ import annotations

import json
import socket

import pytest

from trainer.cli import run

RECIPE = """
from dataclasses import dataclass

import torch
from trainer import Checkpoint, Data, Memory, Recipe, Run
from trainer.models import MLP


@dataclass
class Hungry(MLP):
    most: int = 2

    def losses(self, module, batch):
        if module.training and len(batch["labels"]) > self.most:
            raise torch.OutOfMemoryError("no memory, says the test")
        yield from super().losses(module, batch)


@dataclass
class Own(Data):
    workers: int = 0
    num_classes = 2
    channels = 1
    image_size = 4

    def prepare(self, tokenizer=None):
        self.train = [{"pixel_values": torch.ones(1, 4, 4), "labels": i % 2} for i in range(16)]
        self.test = self.train[:4]


recipe = Recipe(model=Hungry([4]), data=Own(), batch_size=8, epochs=2, max_steps=2, eval_every=1,
                memory=Memory(micro_batch_size=4, cpu_offload="optimizer"), checkpoint=Checkpoint(every=1),
                run=Run(progress=False, predict=False))
"""

HIDDEN = ("step 1/", "after step 1 ·", "plan: ", "parameters;", "rank on 1 node")


@pytest.mark.slow
def test_notices_stay(tmp_path, capsys):
    (tmp_path / "own.py").write_text(RECIPE)
    argv = ["fit", str(tmp_path / "own.py"), "--run.dir", str(tmp_path / "run")]
    assert run(argv) == 0
    _, err = capsys.readouterr()
    assert "warning: memory.cpu_offload=optimizer moves data to host memory" in err
    assert "out of memory in forward on rank 0: retrying the step; micro-batches now have" in err
    assert [text for text in HIDDEN if text in err] == []

    owner = {"host": socket.gethostname(), "pid": 1, "boot_id": "of another start", "started": "then"}
    (tmp_path / "run" / ".run.lock").write_text(json.dumps(owner))
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    (newest / "manifest.json").write_text("{}")
    assert run([*argv, "--run.resume", "auto", "--optim.lr", "0.5", "--run.allow_change", "optim.lr"]) == 0
    _, err = capsys.readouterr()
    assert "pid 1 on " in err
    assert "manifest.json is corrupt: " in err
    assert "changed since the checkpoint: optim.lr" in err
    assert "step-00000002 is newer than the resumed checkpoint: renamed to " in err
    assert "resuming from " in err
    assert ", after step 1" in err
    assert [text for text in HIDDEN if text in err] == []

    (tmp_path / "other").mkdir()
    argv = ["fit", str(tmp_path / "own.py"), "--run.dir", str(tmp_path / "other"), "--run.resume", "auto"]
    assert run([*argv, "--model.most", "4", "--run.progress", "true"]) == 0
    _, err = capsys.readouterr()
    assert "starting from step 0" in err
    assert [text for text in HIDDEN if text not in err] == []
