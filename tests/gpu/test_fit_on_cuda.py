"""A few steps on a GPU: precisions, memory techniques, and the loss curve of the CPU."""

from __future__ import annotations

import csv
import dataclasses
import gc
import time

import pytest
import torch
from helpers.resumed import losses
from torch import nn

from trainer import Memory, Run
from trainer.api import fit
from trainer.commands.recipes import load_recipe
from trainer.memory.eager_update import EagerOptimizerUpdate
from trainer.memory.plan import decide_plan
from trainer.models import VisionTransformer

STEPS = 3
SMALL = {"layers": 4, "heads": 4, "width": 64, "mlp_width": 256}
WIDE = {"layers": 4, "heads": 8, "width": 512, "mlp_width": 2048}


class WithHead(VisionTransformer):
    """A ViT whose head is not zero: else no gradient reaches the other weights in the first step."""

    def skeleton(self):
        module = super().skeleton()
        nn.init.normal_(module.heads.head.weight, std=0.02)
        return module


def train(run_dir, accelerator="cuda", shape=SMALL, clip_norm=None, **memory):
    """Losses and gradient norms of a few steps of vit_digits without dropout and warm-up, and the summary."""
    recipe, source = load_recipe("vit_digits")
    recipe = recipe.replace(
        model=WithHead("custom", patch_size=4, **shape),
        optim=dataclasses.replace(recipe.optim, warmup_steps=0, schedule="constant", clip_norm=clip_norm),
        max_steps=STEPS,
        memory=Memory(**({"micro_batch_size": 16} | memory)),
        run=Run(dir=str(run_dir), accelerator=accelerator, devices=1, progress=False, evaluate=False),
    )
    gc.collect()
    if accelerator == "cuda":
        torch.cuda.reset_peak_memory_stats()  # all runs of this file share a process
    summary = fit(recipe, source)
    with open(run_dir / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert (summary.status, len(rows)) == ("finished", STEPS)
    return Curve(*([float(row[key]) for row in rows] for key in ("loss", "grad_norm"))), summary


@dataclasses.dataclass
class Curve:
    """What happened in every step."""

    losses: list[float]
    norms: list[float]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The curve on the GPU in 32-true, without techniques."""
    return train(tmp_path_factory.mktemp("plain") / "run")[0]


def test_the_gpu_has_the_loss_curve_of_the_cpu(plain, tmp_path):
    on_cpu, _ = train(tmp_path / "cpu", accelerator="cpu")
    assert plain.losses == pytest.approx(on_cpu.losses, rel=1e-3)
    assert plain.norms[0] == pytest.approx(on_cpu.norms[0], rel=1e-3)
    assert plain.losses[0] > plain.losses[-1]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains(precision, plain, tmp_path):
    curve, summary = train(tmp_path / "run", precision=precision)
    assert curve.losses[0] == pytest.approx(plain.losses[0], rel=0.02)
    if not summary.skipped_steps:  # fp16 may give up its first steps to find the loss scale
        assert curve.losses == pytest.approx(plain.losses, rel=0.02)
        assert curve.norms[0] == pytest.approx(plain.norms[0], rel=0.02)


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
    curve, _ = train(tmp_path / "run", **memory)
    assert curve.losses == pytest.approx(plain.losses, rel=1e-4)
    assert curve.norms[0] == pytest.approx(plain.norms[0], rel=1e-4)
    assert curve.norms == pytest.approx(plain.norms, rel=1e-2)  # Adam makes much of the last bits of small gradients


def spoken(run_dir, accelerator="cuda", **memory):
    """The losses of steps of a language model whose head is tied to its embedding, in chunks of 50 tokens."""
    recipe, source = load_recipe("lm_bytes")
    config = recipe.model.config | {"num_hidden_layers": 2, "tie_word_embeddings": True}
    recipe = recipe.replace(
        model=dataclasses.replace(recipe.model, config=config, loss_chunk=50),
        optim=dataclasses.replace(recipe.optim, warmup_steps=0, schedule="constant"),
        batch_size=8,
        max_steps=STEPS,
        memory=Memory(micro_batch_size=2, precision="32-true", **memory),
        run=Run(dir=str(run_dir), accelerator=accelerator, devices=1, progress=False, evaluate=False, predict=False),
    )
    assert fit(recipe, source).status == "finished"
    return losses(run_dir)


def test_a_tied_embedding_trains_from_the_host(tmp_path):
    plain = spoken(tmp_path / "plain")
    for offload in ("optimizer", "parameters"):
        assert spoken(tmp_path / offload, cpu_offload=offload) == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
@pytest.mark.parametrize("memory", [{"cpu_offload": "optimizer"}, {"cpu_offload": "parameters"}], ids=str)
def test_updates_ahead_have_the_same_bits(memory, clip_norm, tmp_path, monkeypatch):
    """Where clipping makes them wrong, too; the seconds of both are printed."""

    def run(name):
        began = time.perf_counter()
        curve, _ = train(tmp_path / name, shape=WIDE, clip_norm=clip_norm, **memory)
        print(f"{name} {memory} clip_norm={clip_norm}: {time.perf_counter() - began:.2f} s")
        return curve

    made = []
    update = EagerOptimizerUpdate.update
    monkeypatch.setattr(EagerOptimizerUpdate, "update", lambda *args: made.append(1) or update(*args))
    monkeypatch.setattr(
        EagerOptimizerUpdate, "begin_last_backward", lambda ahead: setattr(ahead, "is_open", ahead.has_stepped)
    )
    ahead = run("ahead")
    assert made
    monkeypatch.setattr(EagerOptimizerUpdate, "begin_last_backward", lambda ahead: None)
    assert run("after") == ahead


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_offload_and_checkpointing_need_less_of_the_device(precision, tmp_path):
    large = {**SMALL, "width": 512, "mlp_width": 2048}  # 50 MB of weights: the buffers of offloading take 4 MB each
    _, before = train(tmp_path / "before", shape=large, micro_batch_size=64, precision=precision)
    knobs = {"activation_checkpointing": "full", "cpu_offload": "optimizer", "micro_batch_size": 4}
    _, after = train(tmp_path / "after", shape=large, precision=precision, **knobs)
    assert after.memory["allocated_gb"] < before.memory["allocated_gb"]


def test_tf32_rounds_products_and_only_for_its_run(plain, tmp_path):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no units for TF32")
    rounded, _ = train(tmp_path / "high", matmul_precision="high")
    again, _ = train(tmp_path / "again")
    assert again.losses == plain.losses
    assert rounded.losses != plain.losses
    assert rounded.losses == pytest.approx(plain.losses, rel=1e-2)


@pytest.mark.parametrize("micro_batch_size", [16, 24])  # the last micro-batch has another size
def test_cuda_graphs_have_the_losses_of_compiled_blocks(micro_batch_size, tmp_path):
    """Whose gradients several micro-batches add to."""
    curves = [
        train(tmp_path / how, compile=how, micro_batch_size=micro_batch_size)[0] for how in ("blocks", "cuda_graphs")
    ]
    assert curves[1].losses == pytest.approx(curves[0].losses, rel=1e-4)
    assert curves[1].norms == pytest.approx(curves[0].norms, rel=1e-2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_attention_takes_the_kernel_that_the_planner_names(precision, tmp_path):
    from helpers.tiny import predict

    from trainer.fakegpu.target import Target, gpu_here
    from trainer.planner.predict import prepare_recipe

    _, summary = train(tmp_path / "run", precision=precision)
    recipe, _ = load_recipe("vit_digits")
    memory = Memory(micro_batch_size=16, precision=precision)
    recipe = prepare_recipe(recipe.replace(model=WithHead("custom", patch_size=4, **SMALL), memory=memory))
    found = predict(recipe, decide_plan(recipe, 1), Target.here(gpu_here()))
    assert {line.partition(" ")[0] for line in found.attention} == set(summary.attention)


@pytest.mark.parametrize("training", [True, False])
def test_flex_attention_is_bigbirds_kernel(training):
    from trainer.models.block_sparse import attention_counts, block_sparse_attention, block_sparse_forward

    torch.manual_seed(0)
    made = [torch.randn(2, 1024, 12, 64, device="cuda").transpose(1, 2).requires_grad_() for _ in range(3)]
    mask = torch.arange(1024, device="cuda") < torch.tensor([[1024], [700]], device="cuda")
    counts = torch.from_numpy(attention_counts(1, 12, 16, 3, 64, 4096, training))[0].cuda()
    rest, found = (mask, counts, 5 + 3 * training), []
    for context in (block_sparse_forward(*made, *rest), block_sparse_attention(*made, *rest)[0]):
        context = context * mask[:, None, :, None]
        found.append([context, *torch.autograd.grad(context.square().sum(), made)])
    for flex, ours in zip(*found, strict=True):
        torch.testing.assert_close(flex, ours, rtol=1e-3, atol=1e-3 * ours.abs().max().item())
