"""Which optimizer the settings build, what state it keeps, and what it does to weights."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import sys

import pytest
import torch
from helpers.problems import make_fabric
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from trainer import Memory, Optim, RecipeError
from trainer.engine.schedule import lr_factor
from trainer.memory import low_bit_adam
from trainer.memory.optimizer import build_optimizer

CPU = torch.device("cpu")


def network(dtype=torch.float32):
    """64 × 128 weights (8192: quantised), 128 biases (too few: not)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)).to(dtype)


def train(module, optimizer, steps=20, scheduler=None):
    """Full-batch regression; the losses of the steps."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 64, generator=generator).to(next(module.parameters()).dtype)
    losses = []
    for _ in range(steps):
        loss = (module(inputs) - inputs.sum(1, keepdim=True)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses


def state_bytes(optimizer):
    """Bytes of all moments, as they are stored."""

    def stored(tensor):
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            return sum(stored(getattr(tensor, name)) for name in names)
        return tensor.nbytes

    return sum(stored(t) for state in optimizer.state.values() for name, t in state.items() if name != "step")


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize(("bits", "bytes_per_weight", "apart"), [(8, 2, 0.01), (4, 1, 0.06)])
def test_state_takes_the_bits_that_were_asked_for_and_trains_like_the_plain_one(name, bits, bytes_per_weight, apart):
    module, reference = network(), network()
    optim = Optim(name, lr=1e-3, weight_decay=0.1)
    plain = train(reference, build_optimizer(list(reference.parameters()), optim, Memory(), CPU))
    optimizer = build_optimizer(list(module.parameters()), optim, Memory(optimizer_state_bits=bits), CPU)
    lean = train(module, optimizer)
    small = 2 * 4 * (128 + 128 + 1)  # tensors of fewer than 4096 values keep fp32
    tables = 4 * (256 + 256) if bits == 8 else 4 * (16 + 16)
    blocks = 2 * 4 * 8192 // (256 if bits == 8 else 128)
    expected = 8192 * bytes_per_weight + small + tables + blocks
    assert state_bytes(optimizer) == expected
    assert lean[-1] < 0.85 * lean[0]
    assert lean == pytest.approx(plain, rel=apart)


@pytest.mark.parametrize(("name", "bits"), [("adam", 32), ("adamw", 8), ("adam", 4)])
def test_torchaos_update_is_the_textbooks(name, bits):
    """Where nothing is quantised or rounded, it must be torch.optim's, with decay where it should be."""
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    reference, optim = copy.deepcopy(small), Optim(name, lr=1e-2, weight_decay=0.3)
    memory = Memory(precision="bf16-true", stochastic_rounding=True, optimizer_state_bits=bits)  # of bf16 weights only
    inputs = torch.randn(16, 8)
    for module, knobs in ((small, memory), (reference, Memory())):
        optimizer = build_optimizer(list(module.parameters()), optim, knobs, CPU)
        for _ in range(5):
            (module(inputs) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(small.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "memory", [Memory(), Memory(optimizer_state_bits=8), Memory(optimizer_in_backward=True)], ids=["32", "8", "fused"]
)
def test_matrices_decay_and_vectors_do_not_and_a_schedule_reaches_the_optimizer(memory):
    module = network()
    before = [p.clone() for p in module.parameters()]
    optim = Optim("adamw", lr=0.1, weight_decay=0.5, schedule="cosine")
    optimizer = build_optimizer(list(module.parameters()), optim, memory, CPU)
    scheduler = LambdaLR(optimizer, lr_factor(optim, 10, lambda step: 1))
    (sum(p.sum() for p in module.parameters()) * 0).backward()  # zero gradients: only decay moves anything
    optimizer.step()
    for old, new in zip(before, module.parameters(), strict=True):
        torch.testing.assert_close(new, old * (0.95 if new.ndim == 2 else 1.0))
    train(module, optimizer, 10, scheduler)
    assert all(float(group["lr"]) == 0 for group in optimizer.param_groups)
    before = [p.clone() for p in module.parameters()]
    train(module, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def _drift(stochastic: bool) -> float:
    """How far 200 updates of 1e-5 move bf16 weights of 1, whose neighbours are 1 - 0.004 and 1 + 0.008."""
    module = nn.Linear(64, 128, bias=False).bfloat16()
    nn.init.ones_(module.weight)
    memory = Memory(precision="bf16-true", stochastic_rounding=stochastic)
    optimizer = build_optimizer(list(module.parameters()), Optim("adamw", lr=1e-5), memory, CPU)
    for _ in range(200):
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
    return (1 - module.weight.float().mean()).item()


def test_stochastic_rounding_keeps_small_updates_on_average():
    assert _drift(stochastic=False) == 0.0
    assert _drift(stochastic=True) == pytest.approx(200 * 1e-5, rel=0.1)


def test_stochastic_rounding_is_the_same_on_every_rank_and_another_every_step():
    memory = Memory(precision="bf16-true", stochastic_rounding=True)
    ranks = []
    for seed in range(2):
        weight = nn.Parameter(torch.ones(4096, 1, dtype=torch.bfloat16))
        optimizer = build_optimizer([weight], Optim("adamw", lr=1e-3), memory, CPU)
        moved = []
        for _ in range(2):
            before = weight.detach().clone()
            weight.grad = torch.ones_like(weight)
            torch.manual_seed(seed)  # as ranks do, whose micro-batches have different seeds
            optimizer.step()
            moved.append(weight.detach() != before)
        assert 0 < moved[0].sum() < 4096
        assert not torch.equal(moved[0], moved[1])
        ranks.append(weight.detach())
    assert torch.equal(*ranks)


@pytest.mark.parametrize(
    ("name", "memory", "package", "key"),
    [
        ("lion", {}, "timm", r"optim\.name=lion"),
        ("adamw", {"optimizer_state_bits": 4}, "torchao", r"memory\.optimizer_state_bits=4"),
        ("adamw", {"stochastic_rounding": True}, "torchao", r"memory\.stochastic_rounding=True"),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(name, memory, package, key, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # what importing it then does is what it does without it
    message = rf"{key} needs the package {package} .*pip install 'exactbatch-trainer\[lean\]'"
    with pytest.raises(RecipeError, match=message):
        build_optimizer(list(network().parameters()), Optim(name), Memory(**memory), CPU)


def _on_shards(memory, dtype):
    """The largest difference between weights that are sharded over the ranks and those that are not."""
    make_fabric("32-true", torch.distributed.get_world_size())  # as a run would: it sets the process group up

    def answer(shard, memory):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).to(dtype)  # 8192 weights, in shards of 4096
        if shard:
            for layer in module:
                fully_shard(layer)
            fully_shard(module)
        optimizer = build_optimizer(list(module.parameters()), Optim("adamw", lr=1e-2, weight_decay=0.1), memory, CPU)
        for _ in range(3):
            module(torch.linspace(-1, 1, 128).reshape(2, 64).to(dtype)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]

    whole = answer(False, dataclasses.replace(memory, optimizer_in_backward=False))
    return max((a - b).abs().max().item() for a, b in zip(answer(True, memory), whole, strict=True))


@pytest.mark.parametrize(("bits", "in_backward"), [(8, False), (4, True)])
def test_lean_state_of_shards_is_that_of_whole_weights(bits, in_backward, ranks):
    memory = Memory(optimizer_state_bits=bits, optimizer_in_backward=in_backward)
    assert max(ranks(2).run(_on_shards, memory, torch.float32)) < 1e-6


def test_lean_state_and_random_rounding_of_shards(ranks):
    memory = Memory(optimizer_state_bits=8, stochastic_rounding=True, precision="bf16-true")
    differences = ranks(2).run(_on_shards, memory, torch.bfloat16)
    assert max(differences) < 0.01  # three roundings of weights below 1: other random numbers, the same weights
    assert len(set(differences)) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_compiled_update_is_the_eager_one(monkeypatch):
    memory = Memory(optimizer_state_bits=8, optimizer_in_backward=True)
    optim = Optim("adamw", lr=1e-2, weight_decay=0.1, schedule="cosine")
    found = []
    for compiled in (False, True):
        monkeypatch.setattr(low_bit_adam, "can_compile", lambda device, compiled=compiled: compiled)
        module = network()
        optimizer = build_optimizer(list(module.parameters()), optim, memory, CPU)
        train(module, optimizer, 4, LambdaLR(optimizer, lr_factor(optim, 5, lambda step: 1)))
        found.append([p.detach() for p in module.parameters()])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
