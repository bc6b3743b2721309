"""A few steps on a GPU: precisions, memory techniques, and the loss curve of the CPU."""

from __future__ import annotations

import csv
import dataclasses
import gc

import pytest
import torch

from trainer import Memory, Run
from trainer.fit import fit
from trainer.locate import load_recipe

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _exact_fp32():
    """No TF32: its products have 10 bits of mantissa, and the CPU's 23."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def train(run_dir, accelerator="cuda", **memory):
    """Losses of a few steps of vit_digits without dropout and warm-up, and the summary."""
    recipe, source = load_recipe("vit_digits")
    recipe = recipe.replace(
        model=dataclasses.replace(recipe.model, dropout=0.0),
        optim=dataclasses.replace(recipe.optim, warmup_steps=0, schedule="constant", clip_norm=None),
        max_steps=STEPS,
        memory=Memory(**({"micro_batch_size": 16} | memory)),
        run=Run(dir=str(run_dir), accelerator=accelerator, devices=1, progress=False, evaluate=False),
    )
    gc.collect()
    if accelerator == "cuda":
        torch.cuda.reset_peak_memory_stats()  # all runs of this file share a process
    summary = fit(recipe, source)
    with open(run_dir / "metrics.csv", newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert (summary.status, len(losses)) == ("finished", STEPS)
    return losses, summary


@pytest.fixture(scope="module")
def plain(_exact_fp32, tmp_path_factory):
    """Losses on the GPU in 32-true, without techniques."""
    return train(tmp_path_factory.mktemp("plain") / "run")[0]


def test_the_gpu_has_the_loss_curve_of_the_cpu(plain, tmp_path):
    on_cpu, _ = train(tmp_path / "cpu", accelerator="cpu")
    assert plain == pytest.approx(on_cpu, rel=1e-3)
    assert plain[0] > plain[-1]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains(precision, plain, tmp_path):
    losses, summary = train(tmp_path / "run", precision=precision)
    assert losses[0] == pytest.approx(plain[0], rel=0.02)
    if not summary.skipped_steps:  # fp16 may give up its first steps to find the loss scale
        assert losses == pytest.approx(plain, rel=0.02)


def test_device_memory_is_measured(tmp_path):
    _, summary = train(tmp_path / "run")
    assert 0 < summary.memory["allocated_gb"] <= summary.memory["reserved_gb"]


@pytest.mark.parametrize(
    "memory",
    [
        {"micro_batch_size": 64},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": 0.5},
        {"activation_offload": True},
        {"cpu_offload": "optimizer"},
        {"cpu_offload": "parameters"},
        {"strategy": "fsdp"},
        {"optimizer_in_backward": True, "micro_batch_size": 64},
        {"activation_checkpointing": "full", "activation_offload": True, "cpu_offload": "parameters"},
    ],
    ids=lambda memory: " ".join(f"{key}={value}" for key, value in memory.items()),
)
def test_a_technique_changes_memory_and_not_the_losses(memory, plain, tmp_path):
    losses, _ = train(tmp_path / "run", **memory)
    assert losses == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_offload_and_checkpointing_need_less_of_the_device(precision, tmp_path):
    _, before = train(tmp_path / "before", micro_batch_size=64, precision=precision)
    knobs = {"activation_checkpointing": "full", "cpu_offload": "optimizer", "micro_batch_size": 4}
    _, after = train(tmp_path / "after", precision=precision, **knobs)
    assert after.memory["allocated_gb"] < before.memory["allocated_gb"]
