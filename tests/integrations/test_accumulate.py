"""AccumulatingOptimizer against the whole-batch step."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers.rounding import ROUNDING
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer import AccumulatingOptimizer


def data(count):
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).tanh()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def weights_of(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def whole_batches(make, chunks, clip_norm=None):
    """The weights after one plain step for each of ``chunks``."""
    module = network()
    optimizer = make(module.parameters())
    for inputs, targets in chunks:
        optimizer.zero_grad()
        (module(inputs) - targets).square().mean().backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
    return weights_of(module)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def check(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, **({"rtol": ROUNDING, "atol": ROUNDING} | tolerance))


@pytest.mark.parametrize("make", [sgd, adam])
@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12), steps=st.integers(1, 5))
def test_sums_with_weights_are_exact_for_any_micro_batches(make, sizes, steps):
    micro = list(zip(*(part.split(sizes) for part in data(sum(sizes))), strict=True))
    module = network()
    optimizer = AccumulatingOptimizer(make(module.parameters()), steps=steps)
    for _ in range(2):  # epochs
        for x, y in micro:
            (module(x) - y).square().sum().backward()
            optimizer.step(weight=len(x))
            optimizer.zero_grad()
        optimizer.flush()
    windows = [micro[start : start + steps] for start in range(0, len(micro), steps)] * 2
    chunks = [tuple(torch.cat(part) for part in zip(*window, strict=True)) for window in windows]
    check(weights_of(module), whole_batches(make, chunks))


@pytest.mark.parametrize("scheduler_on", ["wrapper", "wrapped"])
def test_means_of_equal_micro_batches_a_flushed_window_and_a_scheduler(scheduler_on):
    inputs, targets = data(10)
    module = network()
    inner = sgd(module.parameters())
    optimizer = AccumulatingOptimizer(inner, steps=3, clip_norm=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer if scheduler_on == "wrapper" else inner, 1, gamma=1.0)
    updates = []
    for x, y in zip(inputs.split(2), targets.split(2), strict=True):  # five micro-batches: windows of three and two
        (module(x) - y).square().mean().backward()
        updates.append(optimizer.step())
        if updates[-1]:
            scheduler.step()
        optimizer.zero_grad()
    assert updates == [False, False, True, False, False]
    assert scheduler.last_epoch == 1
    assert optimizer.flush()
    assert not optimizer.flush()
    chunks = [(inputs[:6], targets[:6]), (inputs[6:], targets[6:])]
    check(weights_of(module), whole_batches(sgd, chunks, clip_norm=0.05))
    assert isinstance(optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize(("growth", "overflow_at", "scale"), [(1, None, 64.0), (1000, 1, 2.0)])
def test_a_scale_that_changes_within_a_window_and_an_overflow_that_drops_its_window_only(growth, overflow_at, scale):
    (inputs, targets), module = data(8), network().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=growth)
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=2)
    for number, (x, y) in enumerate(zip(inputs.float().split(2), targets.float().split(2), strict=True)):
        factor = float("inf") if number == overflow_at else 1.0
        scaler.scale((module(x) - y).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == scale
    chunks = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])][overflow_at is not None :]
    check(weights_of(module), whole_batches(sgd, chunks).float(), rtol=1e-5, atol=1e-6)


def test_misuse_is_refused():
    module = network()
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        AccumulatingOptimizer(sgd(module.parameters()), steps=0)
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        AccumulatingOptimizer(torch.optim.LBFGS(module.parameters()), steps=2)
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=3)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: None)
    with pytest.raises(ValueError, match="weight=-1 must not be negative"):
        optimizer.step(weight=-1)
    module(data(2)[0]).sum().backward()
    optimizer.step(weight=2)
    with pytest.raises(ValueError, match="for only some micro-batches of a window"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"call flush\(\) before saving"):
        optimizer.state_dict()
    optimizer.flush()
    assert copy.deepcopy(optimizer.state_dict()).keys() == {"state", "param_groups"}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["model", "wrapped", "one of two parts"])
def test_a_window_that_somebody_clears_is_refused_and_not_dropped(where, set_to_none):
    module = nn.ModuleDict({"left": network(), "right": network()})
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=4)
    module["left"](data(4)[0]).sum().backward()
    optimizer.step()
    (optimizer.optimizer if where == "wrapped" else module).zero_grad(set_to_none=set_to_none)
    message = r"cleared or changed between step\(\) and backward\(\): call optimizer\."
    if where == "one of two parts":  # what was cleared gets no gradient any more
        module["right"](data(4)[0]).sum().backward()
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
    else:
        with pytest.raises(RuntimeError, match=message):
            module["left"](data(4)[0]).sum().backward()


def test_a_window_that_somebody_clears_is_not_flushed():
    module = network()
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=4)
    module(data(4)[0]).sum().backward()
    optimizer.step()
    module.zero_grad()
    with pytest.raises(RuntimeError, match="cleared or changed"):
        optimizer.flush()


def test_loading_a_state_discards_the_window_and_training_continues():
    module, (inputs, targets) = network(), data(8)
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=2)
    state = optimizer.state_dict()
    module(inputs).sum().backward()
    optimizer.step(weight=8)
    optimizer.load_state_dict(state)
    for x, y in zip(inputs.split(4), targets.split(4), strict=True):
        (module(x) - y).square().sum().backward()
        optimizer.step(weight=4)
    check(weights_of(module), whole_batches(sgd, [(inputs, targets)]))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_that_torch_replaces_are_no_loss():
    """A second graph makes autograd add out of place, several losses add twice: neither is somebody's clearing."""
    module, (inputs, targets) = network(), data(8)
    optimizer = AccumulatingOptimizer(sgd(module.parameters()), steps=2)
    for x, y in zip(inputs.split(4), targets.split(4), strict=True):
        (module(x) - y).square().sum().backward(create_graph=True)
        (module(x) - y).square().sum().backward()
        optimizer.step(weight=8)
    check(weights_of(module), whole_batches(sgd, [(inputs, targets)]))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
@pytest.mark.parametrize("done", [0, 1])
def test_a_copy_goes_on_where_the_original_was(how, done):
    module, (inputs, targets) = network(), data(8)
    optimizer = AccumulatingOptimizer(adam(module.parameters()), steps=2, clip_norm=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # ties itself to the very object
    before = weights_of(module)
    here = module, optimizer
    for number, (x, y) in enumerate(zip(inputs.split(4), targets.split(4), strict=True)):
        if number == done:
            here = how((module, optimizer))
            assert here[1].micro_step == done
        (here[0](x) - y).square().sum().backward()
        updated = here[1].step(weight=len(x))
    assert updated
    check(weights_of(here[0]), whole_batches(adam, [(inputs, targets)], clip_norm=0.5))
    assert torch.equal(weights_of(module), before)
