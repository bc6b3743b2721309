"""The memory of a run without a GPU, predicted and measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny import predict

from trainer.commands.measured_run import RETURN_FREED_MEMORY
from trainer.commands.recipes import load_recipe
from trainer.memory.plan import decide_plan
from trainer.planner.gpus import host_as_device
from trainer.planner.predict import CPU_BUFFERS, prepared
from trainer.planner.target import Target
from trainer.settings import change
from trainer.system.text import as_text

LARGE = {"data.image_size": 16, "model.layers": 3, "model.heads": 6, "model.width": 768, "model.mlp_width": 3072}
SETTINGS = {**LARGE, "optim.name": "adamw", "batch_size": 16, "memory.micro_batch_size": 16, "max_steps": 2}
SETTINGS |= {"run.accelerator": "cpu", "run.predict": False, "run.evaluate": False, "run.progress": False}
"""A Vision Transformer of 21 million weights: beside less, the 40 MB that no tensor shows would count for more."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="allocators of other systems keep what is freed")
def test_predicted_resident_memory_is_that_of_a_run(tmp_path: Path) -> None:
    """Of one in a process of its own, with an allocator that gives back what is freed."""
    recipe = prepared(change(load_recipe("vit_digits")[0], SETTINGS))
    prediction = predict(recipe, decide_plan(recipe, 1), Target(host_as_device()))
    flags = [f"--{key}={as_text(value)}" for key, value in SETTINGS.items()]
    command = [sys.executable, "-m", "trainer", "fit", "vit_digits", f"--run.dir={tmp_path / 'run'}", *flags]
    environment = {**os.environ, **RETURN_FREED_MEMORY, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=480, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    memory = json.loads((tmp_path / "run" / "summary.json").read_text())["memory"]
    over_idle = 1e9 * (memory["host_peak_gb"] - memory["host_idle_gb"])
    assert prediction.reserved == prediction.allocated + CPU_BUFFERS
    assert prediction.allocated == pytest.approx(over_idle, rel=0.12)
    assert prediction.reserved == pytest.approx(over_idle, rel=0.08)
