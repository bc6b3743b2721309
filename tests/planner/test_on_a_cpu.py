"""The memory of a run without a GPU, predicted and measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny import predict

from trainer.commands.recipes import load_recipe
from trainer.fakegpu.gpus import CPU_BUFFERS, host_as_device
from trainer.fakegpu.target import Target
from trainer.lab.measured_run import MALLOC_TRIM_ENV
from trainer.memory.plan import decide_plan
from trainer.planner.predict import prepare_recipe
from trainer.settings import change
from trainer.system.text import as_text

LARGE = {"data.image_size": 16, "model.layers": 3, "model.heads": 6, "model.width": 768, "model.mlp_width": 3072}
SETTINGS = {**LARGE, "optim.name": "adamw", "batch_size": 16, "memory.micro_batch_size": 16, "max_steps": 2}
SETTINGS |= {"run.accelerator": "cpu", "run.predict": False, "run.evaluate": False, "run.progress": False}
"""A Vision Transformer of 21 million weights: beside less, the 40 MB that no tensor shows would count for more."""


LANGUAGE = str(Path(__file__).parents[2] / "benchmarks" / "recipes" / "language_model.py")
SHAPE = {"num_hidden_layers": 4, "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6}
WORDS = {"model.config": {**SHAPE, "num_key_value_heads": 6, "vocab_size": 50_000}, "data.tokens": 512, "max_steps": 2}
WORDS |= {"run.accelerator": "cpu", "run.predict": False, "run.evaluate": False, "run.progress": False}
WORDS |= {"batch_size": 4, "memory.micro_batch_size": 4, "memory.precision": "32-true"}
"""A Llama of 45 million weights, most of them of its words: whole logits of a step take 410 MB."""
CASES = {
    "vit": ("vit_digits", SETTINGS),
    "logits": (LANGUAGE, WORDS | {"model.loss_chunk": 0}),
    "chunks": (LANGUAGE, WORDS | {"model.loss_chunk": 64}),
    "LoRA in NF4": (LANGUAGE, WORDS | {"model.loss_chunk": 0, "model.lora.rank": 8, "model.lora.base": "nf4"}),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="allocators of other systems keep what is freed")
@pytest.mark.parametrize("case", CASES)
def test_predicted_resident_memory_is_that_of_a_run(case: str, tmp_path: Path) -> None:
    """Of one in a process of its own, with an allocator that gives back what is freed."""
    reference, settings = CASES[case]
    recipe = prepare_recipe(change(load_recipe(reference)[0], settings))
    prediction = predict(recipe, decide_plan(recipe, 1), Target(host_as_device()))
    flags = [f"--{key}={as_text(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "trainer", "fit", reference, f"--run.dir={tmp_path / 'run'}", *flags]
    environment = {**os.environ, **MALLOC_TRIM_ENV, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=480, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    memory = json.loads((tmp_path / "run" / "summary.json").read_text())["memory"]
    over_idle = 1e9 * (memory["host_peak_gb"] - memory["host_idle_gb"])
    assert prediction.reserved == prediction.allocated + CPU_BUFFERS
    assert prediction.allocated == pytest.approx(over_idle, rel=0.12)
    assert prediction.reserved == pytest.approx(over_idle, rel=0.08)
