"""Updating during the backward is the plain optimizer, step for step, on one rank and on shards."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from helpers.problems import LR, Problem, engine_run, errors, flat, make_fabric, plain_run
from helpers.rounding import ROUNDING
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from trainer import Memory, Optim
from trainer.engine.schedule import lr_factor
from trainer.engine.sync import GradientSync
from trainer.errors import RunError
from trainer.memory.optimizer import OptimizerInBackward, UpdateInBackwardSync, build_optimizer

CPU = torch.device("cpu")
STEPS = 6
OPTIMS = {
    "adamw": Optim("adamw", lr=1e-2, weight_decay=0.1, schedule="cosine", warmup_steps=2),
    "sgd": Optim("sgd", lr=1e-2, momentum=0.9, weight_decay=0.1, schedule="cosine"),
    "adagrad": Optim("adagrad", lr=1e-2, schedule="linear"),
    "rmsprop": Optim("rmsprop", lr=1e-3, momentum=0.5),
    "adafactor": Optim("adafactor", lr=1e-2),
    "lion": Optim("lion", lr=1e-3, weight_decay=0.1),
    "muon": Optim("muon", lr=1e-3, weight_decay=0.1),
}


class Tied(nn.Module):
    """A weight that is used twice, blocks that are computed again in backward, a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 8) * 0.3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.unused = nn.Linear(2, 2)

    def forward(self, numbers):
        hidden = self.table[numbers]
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return hidden @ self.table.T


def train(module, optim, memory, steps=STEPS, first_sample=0, samples=12):
    """Train on ``samples`` of 12; the gradient norms, which the optimizer in backward tells, and the optimizer."""
    optimizer = build_optimizer(list(module.parameters()), optim, memory, CPU)
    scheduler = LambdaLR(optimizer, lr_factor(optim, STEPS, lambda step: 1))
    applied = isinstance(optimizer, OptimizerInBackward)
    sync = UpdateInBackwardSync(optimizer) if applied else GradientSync(list(module.parameters()))
    norms = []
    for step in range(steps):
        numbers = torch.arange(first_sample, first_sample + samples) * (step + 1) % 6
        sync.before_forward(True)
        nn.functional.cross_entropy(module(numbers), (numbers + 1) % 6).backward()
        assert not applied or all(p.grad is None for p in module.parameters())
        norms.append(sync.norm().item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return norms, optimizer


def tied():
    torch.manual_seed(3)
    return Tied().double()


@pytest.mark.parametrize("name", OPTIMS)
def test_it_is_the_plain_optimizer_to_the_last_digits(name):
    ours, plain = tied(), tied()
    before = flat(plain)
    our_norms, _ = train(ours, OPTIMS[name], Memory(optimizer_in_backward=True))
    norms, _ = train(plain, OPTIMS[name], Memory())
    assert (flat(plain) - before).norm() > 1e-3
    assert (flat(ours) - flat(plain)).norm() / (flat(plain) - before).norm() < ROUNDING
    assert our_norms == pytest.approx(norms, rel=ROUNDING)


def test_only_a_few_gradients_exist_at_a_time():
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])
    memory = Memory(optimizer_in_backward=True)
    optimizer = build_optimizer(list(module.parameters()), Optim("sgd", lr=0.1), memory, CPU)
    most = 0

    def look(_):
        nonlocal most
        most = max(most, sum(p.grad is not None for p in module.parameters()))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)  # after the one that updates
        parameter.register_hook(lambda gradient: look(None))
    module(torch.randn(4, 64)).sum().backward()
    assert most <= 2
    assert optimizer.norm() > 0


def test_its_state_is_the_plain_optimizers_and_training_goes_on_from_it():
    whole, parts = tied(), tied()
    optim, memory = OPTIMS["adamw"], Memory(optimizer_in_backward=True)
    train(whole, optim, Memory(), steps=2)
    _, first = train(parts, optim, memory, steps=2)
    other = tied()
    other.load_state_dict(parts.state_dict())
    second = build_optimizer(list(other.parameters()), optim, memory, CPU)
    second.load_state_dict(deepcopy(first.state_dict()))
    plain = build_optimizer(list(whole.parameters()), optim, Memory(), CPU)
    plain.load_state_dict(deepcopy(first.state_dict()))  # either loads the other's
    for module in (other, whole):
        nn.functional.cross_entropy(module(torch.arange(6)), torch.arange(6)).backward()
    second.step()
    plain.step()
    torch.testing.assert_close(flat(other), flat(whole), rtol=ROUNDING, atol=ROUNDING)
    assert second.state[other.table]["step"] == 3


def in_backward(stepper, windows):
    stepper.optimizer = OptimizerInBackward(torch.optim.SGD(stepper.parameters, lr=LR))
    stepper.sync = UpdateInBackwardSync(stepper.optimizer)


def test_the_engine_takes_the_same_steps_with_it():
    problem = Problem("vit", 24, 8, 8)
    ours, plain = engine_run(problem, prepare=in_backward), plain_run(problem)
    assert errors(ours, plain)["change"] < ROUNDING
    assert ours["norms"] == pytest.approx(plain["norms"], rel=ROUNDING)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=ROUNDING)


@pytest.mark.parametrize(("pixel", "cause"), [(math.nan, "loss 'loss' is nan"), (1e38, "inf|nan")])
def test_a_step_that_is_not_finite_stops_the_run(pixel, cause):
    def prepare(stepper, windows):
        in_backward(stepper, windows)
        fetch = windows.fetch

        def spoilt(requests):
            for batch in fetch(requests):
                batch["pixel_values"][0] *= pixel
                yield batch

        windows.fetch = spoilt

    with pytest.raises(RunError, match=rf"{cause}.*cannot be skipped: .*memory\.optimizer_in_backward"):
        engine_run(Problem("mlp", 8, 8, 8, precision="32-true"), prepare=prepare)


def _on_shards(name, replicas):
    world = torch.distributed.get_world_size()
    make_fabric("64-true", world)  # as a run would: it sets the process group up
    shape, names = ((replicas, world // replicas), ("replica", "shard")) if replicas > 1 else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    plain, sharded, share = tied(), tied(), 12 // world
    for part in (*sharded.blocks, sharded):
        fully_shard(part, mesh=mesh)
    first = torch.distributed.get_rank() * share
    memory = Memory(optimizer_in_backward=True)
    norms, optimizer = train(sharded, OPTIMS[name], memory, first_sample=first, samples=share)
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    plain_norms, _ = train(plain, OPTIMS[name], Memory())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in sharded.parameters()]
    return (torch.cat([part.detach().flatten() for part in whole]) - flat(plain)).norm().item(), norms, plain_norms


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "world_size", "replicas"), [("adagrad", 2, 1), ("sgd", 3, 1), ("adamw", 4, 2)])
def test_shards_are_updated_after_their_reduction(name, world_size, replicas, ranks):
    for difference, norms, plain_norms in ranks(world_size).run(_on_shards, name, replicas):
        assert difference < ROUNDING
        assert norms == pytest.approx(plain_norms, rel=ROUNDING)
