"""AccumulatingOptimizer against the whole-batch step."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer import AccumulatingOptimizer


def data(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).tanh()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def whole_batches(optimizer_class, chunks, clip_norm=None):
    """The weights after one plain step for each of ``chunks``."""
    module = network()
    optimizer = optimizer_class(module.parameters())
    for inputs, targets in chunks:
        optimizer.zero_grad()
        (module(inputs) - targets).square().mean().backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize("make", [sgd, adam])
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12), steps=st.integers(1, 5))
def test_sums_with_weights_are_exact_for_any_micro_batches(make, sizes, steps):
    inputs, targets = data(sum(sizes))
    micro = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    module = network()
    optimizer = AccumulatingOptimizer(make(module.parameters()), steps=steps)
    for x, y in micro:
        (module(x) - y).square().sum().backward()
        optimizer.step(weight=len(x))
        optimizer.zero_grad()
    optimizer.flush()
    windows = [micro[start : start + steps] for start in range(0, len(micro), steps)]
    chunks = [tuple(torch.cat(part) for part in zip(*window, strict=True)) for window in windows]
    torch.testing.assert_close(
        nn.utils.parameters_to_vector(module.parameters()), whole_batches(make, chunks), rtol=1e-12, atol=1e-12
    )


def test_means_of_equal_micro_batches_and_a_flushed_window_are_exact():
    inputs, targets = data(10)
    module = network()
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=3, clip_norm=0.05)
    updates = []
    for x, y in zip(inputs.split(2), targets.split(2), strict=True):  # five micro-batches: windows of three and two
        (module(x) - y).square().mean().backward()
        updates.append(optimizer.step())
        optimizer.zero_grad()
    assert updates == [False, False, True, False, False]
    assert optimizer.flush()
    assert not optimizer.flush()
    chunks = [(inputs[:6], targets[:6]), (inputs[6:], targets[6:])]
    expected = whole_batches(sgd, chunks, clip_norm=0.05)
    torch.testing.assert_close(nn.utils.parameters_to_vector(module.parameters()), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheduler_on", ["wrapper", "wrapped"])
def test_schedulers_move_once_an_update(scheduler_on):
    module = network()
    inner = sgd(module.parameters())
    optimizer = AccumulatingOptimizer(inner, steps=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer if scheduler_on == "wrapper" else inner, 1, gamma=0.5)
    rates = []
    for x, y in zip(*(part.split(2) for part in data(8)), strict=True):
        (module(x) - y).square().mean().backward()
        rates.append(optimizer.param_groups[0]["lr"])
        if optimizer.step():
            scheduler.step()
        optimizer.zero_grad()
    assert rates == [0.1, 0.1, 0.05, 0.05]
    assert isinstance(optimizer, torch.optim.Optimizer)


def scaled_run(inputs, targets, scaler, overflow_at=None):
    module = network().float()
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=2)
    for number, (x, y) in enumerate(zip(inputs.float().split(2), targets.float().split(2), strict=True)):
        loss = (module(x) - y).square().mean()
        if number == overflow_at:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(module.parameters())


def test_a_grad_scaler_whose_scale_changes_within_a_window():
    inputs, targets = data(8)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)  # the scale doubles every micro-batch
    found = scaled_run(inputs, targets, scaler)
    assert scaler.get_scale() == 64.0
    expected = whole_batches(sgd, [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])])
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


def test_an_overflow_drops_its_window_only():
    inputs, targets = data(8)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    found = scaled_run(inputs, targets, scaler, overflow_at=1)
    assert scaler.get_scale() == 2.0
    torch.testing.assert_close(found, whole_batches(sgd, [(inputs[4:], targets[4:])]).float(), rtol=1e-5, atol=1e-6)


def test_misuse_is_refused():
    module = network()
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        AccumulatingOptimizer(sgd(module.parameters()), steps=0)
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=3)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: None)
    module(data(2)[0]).sum().backward()
    optimizer.step(weight=2)
    with pytest.raises(ValueError, match="for every micro-batch of a window, or for none"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"call flush\(\) before saving"):
        optimizer.state_dict()
    optimizer.flush()
    assert copy.deepcopy(optimizer.state_dict()).keys() == {"state", "param_groups"}


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        AccumulatingOptimizer(torch.optim.LBFGS(network().parameters()), steps=2)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["model", "wrapped"])
def test_a_window_that_somebody_clears_is_refused_and_not_dropped(where, set_to_none):
    module, (inputs, targets) = network(), data(8)
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=4)

    def micro_step(x, y):
        (module(x) - y).square().mean().backward()
        optimizer.step()

    micro_step(inputs[:4], targets[:4])
    (module if where == "model" else optimizer.optimizer).zero_grad(set_to_none=set_to_none)
    with pytest.raises(RuntimeError, match=r"cleared or changed between step\(\) and backward\(\): call optimizer\."):
        micro_step(inputs[4:], targets[4:])


def test_a_gradient_that_is_cleared_and_gets_none_is_missed():
    module = nn.ModuleDict({"left": nn.Linear(1, 1), "right": nn.Linear(1, 1)})
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=3)
    module["left"](torch.ones(1)).backward()
    optimizer.step()
    module["left"].zero_grad()
    module["right"](torch.ones(1)).backward()
    with pytest.raises(RuntimeError, match="cleared or changed"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_that_torch_replaces_are_no_loss():
    """A second graph makes autograd add out of place, several losses add twice: neither is somebody's clearing."""
    module, (inputs, targets) = network(), data(8)
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=2)
    for x, y in zip(inputs.split(4), targets.split(4), strict=True):
        (module(x) - y).square().sum().backward(create_graph=True)
        (module(x) - y).square().sum().backward()
        optimizer.step(weight=8)
    torch.testing.assert_close(
        nn.utils.parameters_to_vector(module.parameters()), whole_batches(sgd, [(inputs, targets)]), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("how", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
@pytest.mark.parametrize("done", [0, 1])
def test_a_copy_goes_on_where_the_original_was(how, done):
    module, (inputs, targets) = network(), data(8)
    optimizer = AccumulatingOptimizer(adam(module.parameters()), steps=2, clip_norm=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # ties itself to the very object
    micro = list(zip(inputs.split(4), targets.split(4), strict=True))

    def micro_step(module, optimizer, x, y):
        (module(x) - y).square().sum().backward()
        return optimizer.step(weight=len(x))

    for x, y in micro[:done]:
        micro_step(module, optimizer, x, y)
    before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    module_copy, optimizer_copy = how((module, optimizer))
    assert optimizer_copy.micro_step == done
    for x, y in micro[done:]:
        updated = micro_step(module_copy, optimizer_copy, x, y)
    assert updated
    torch.testing.assert_close(
        nn.utils.parameters_to_vector(module_copy.parameters()),
        whole_batches(adam, [(inputs, targets)], clip_norm=0.5),
        rtol=1e-12,
        atol=1e-14,
    )
    assert torch.equal(nn.utils.parameters_to_vector(module.parameters()), before)
