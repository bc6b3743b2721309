"""The memory of a run without a GPU, predicted and measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.commands.measured_run import RETURN_FREED_MEMORY
from trainer.commands.recipes import load_recipe
from trainer.memory.plan import decide_plan
from trainer.planner.gpus import host_as_device
from trainer.planner.predict import CPU_BUFFERS, predict, prepared
from trainer.planner.target import Target

RECIPE = '''
"""A Vision Transformer of 10.9 million weights on 256 patches, three steps of four images."""

from dataclasses import dataclass

import torch

from trainer import Data, Memory, Optim, Recipe, Run
from trainer.models import VisionTransformer


@dataclass
class Blank(Data):
    """The same image again and again."""

    num_classes = 10
    image_size = 128

    def prepare(self, tokenizer=None):
        self.train = [{"pixel_values": torch.zeros(3, 128, 128), "labels": torch.tensor(0)}] * 12


recipe = Recipe(
    model=VisionTransformer("custom", patch_size=8, layers=6, heads=6, width=384, mlp_width=1536),
    data=Blank(),
    optim=Optim("adamw"),
    batch_size=4,
    memory=Memory(micro_batch_size=4),
    run=Run(accelerator="cpu", predict=False, evaluate=False, progress=False),
)
'''


def measured(file: Path, folder: Path) -> dict[str, Any]:
    """Of a run in a process of its own, with an allocator that gives back what is freed: what it says of memory."""
    environment = {**os.environ, **RETURN_FREED_MEMORY, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer", "fit", str(file), f"--run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "summary.json").read_text())["memory"]  # type: ignore[no-any-return]


@pytest.mark.skipif(sys.platform != "linux", reason="allocators of other systems keep what is freed")
def test_predicted_resident_memory_is_that_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "blank_images.py"
    file.write_text(RECIPE)
    recipe = prepared(load_recipe(str(file))[0])
    prediction = predict(recipe, decide_plan(recipe, 1), Target(host_as_device()))
    memory = measured(file, tmp_path / "run")
    over_idle = 1e9 * (memory["host_peak_gb"] - memory["host_idle_gb"])
    assert prediction.reserved == prediction.allocated + CPU_BUFFERS
    assert prediction.allocated == pytest.approx(over_idle, rel=0.12)
    assert prediction.reserved == pytest.approx(over_idle, rel=0.08)
