"""AccumulatingOptimizer on several ranks: against the whole-batch step, and the ranks against each other."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
import torch
from helpers.rounding import rounding
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainer import AccumulatingOptimizer

STEPS = 2
RAGGED = [(4, 2, 1), (3, 1, 5), (4, 4, 0), (1, 0, 4)]
SHORT = [(4, 2, 1), (3, 1, 5), (2, 3, 4)]
EQUAL = [(3, 3, 3)] * 4
CLOSE = rounding(
    400
)  # 4 updates from gradients of at most 24 samples; 17 numbers, forward and backward; weights below 1


@dataclass(frozen=True)
class Case:
    """What a rank does.

    Args:
        wrapper: plain, ddp (syncs where ``is_last``), ddp-never, ddp-always, ddp-views, fsdp or fsdp-always.
        cuts: of every micro-step, the samples of each rank.
        weighted: sums with weights instead of means.
        unused: a layer that no rank, or only the ``first`` one, uses.
        lacking: micro-batches that the last rank does not have, and of which it does not know.
    """

    wrapper: str
    cuts: list[tuple[int, ...]]
    weighted: bool = True
    unused: str = ""
    lacking: int = 0
    clip_norm: float | None = None
    sparse: bool = False


class Network(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4, sparse=sparse, dtype=torch.float64)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.extra = nn.Linear(1, 1).double()

    def forward(self, inputs, uses_extra=False):
        outputs = self.body(inputs + self.table((inputs[:, 0] > 0).long()))
        return self.extra(outputs) if uses_extra else outputs


def data(count):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).tanh()


def make(module, case):
    options = {} if case.sparse else {"momentum": 0.9, "weight_decay": 0.01}
    return torch.optim.SGD(module.parameters(), lr=0.1, **options)


def wrapped(case):
    module = Network(case.sparse)
    if case.wrapper.startswith("ddp"):
        views = case.wrapper == "ddp-views"
        return DistributedDataParallel(module, gradient_as_bucket_view=views, find_unused_parameters=True)
    if case.wrapper.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(module.body, mesh=mesh)
        return fully_shard(module, mesh=mesh)
    return module


def at_backward(module, case, is_last):
    """Tell the wrapper whether to synchronise; a context for forward and backward."""
    if case.wrapper.startswith("fsdp"):
        module.set_requires_gradient_sync(is_last or case.wrapper == "fsdp-always")
    keeps = case.wrapper == "ddp-never" or (case.wrapper in ("ddp", "ddp-views") and not is_last)
    return module.no_sync() if keeps else contextlib.nullcontext()


def vector(module):
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in whole])


def train(case):
    """The weights of this rank in the end, and those of whole-batch steps."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    cuts = [cut[:ranks] for cut in case.cuts]
    inputs, targets = data(sum(map(sum, cuts)))
    module = wrapped(case)
    optimizer = AccumulatingOptimizer(make(module, case), STEPS, clip_norm=case.clip_norm)
    start = 0
    own = len(cuts) - (case.lacking if rank == ranks - 1 else 0)
    for number, sizes in enumerate(cuts):
        here = slice(start + sum(sizes[:rank]), start + sum(sizes[: rank + 1]))
        start += sum(sizes)
        if number >= own:
            continue
        is_last = optimizer.is_last or (number == len(cuts) - 1 and case.wrapper == "fsdp")
        with at_backward(module, case, is_last):
            uses = case.unused == "first" and rank == 0
            errors = (module(inputs[here], uses) - targets[here]).square()
            (errors.sum() if case.weighted else errors.mean()).backward()
        optimizer.step(**({"weight": here.stop - here.start} if case.weighted else {}))
        optimizer.zero_grad()
    optimizer.flush()
    return vector(module), reference(case, cuts, inputs, targets)


def reference(case, cuts, inputs, targets):
    module = Network()
    optimizer = make(module, case)
    start = 0
    for first in range(0, len(cuts), STEPS):
        window = cuts[first : first + STEPS]
        total, count = 0.0, sum(map(sum, window))
        for sizes in window:
            for rank, size in enumerate(sizes):
                here, start = slice(start, start + size), start + size
                uses = case.unused == "first" and rank == 0
                total = total + (module(inputs[here], uses) - targets[here]).square().sum()
        optimizer.zero_grad()
        (total / count).backward()
        if case.clip_norm:
            nn.utils.clip_grad_norm_(module.parameters(), case.clip_norm)
        optimizer.step()
    return vector(module)


CASES = {
    f"{wrapper}, {name}": Case(wrapper, cuts, weighted)
    for wrapper in ("plain", "ddp", "ddp-never", "ddp-always", "ddp-views", "fsdp", "fsdp-always")
    for name, cuts, weighted in (("ragged sums", RAGGED, True), ("a short window of means", EQUAL[:3], False))
} | {
    "ddp, a short window of sums, clipped": Case("ddp", SHORT, clip_norm=0.02),
    "fsdp, a short window of sums, clipped": Case("fsdp", SHORT, clip_norm=0.02),
    "plain, used by one rank": Case("plain", SHORT, unused="first"),
    "ddp, used by one rank": Case("ddp", SHORT, unused="first"),
    "ddp-never, used by one rank": Case("ddp-never", RAGGED, unused="first"),
    "plain, sparse": Case("plain", RAGGED, sparse=True),
    "ddp-never, sparse": Case("ddp-never", SHORT, sparse=True),
    # The others flush what they hold; the samples of the last micro-step are theirs.
    "plain, a rank that has run out": Case("plain", [(4, 2, 1), (3, 1, 2), (2, 0, 0)], lacking=1),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_each_other_and_the_whole_batch(case, ranks):
    for world_size in (2, 3) if CASES[case].cuts is RAGGED else (2,):
        answers = ranks(world_size).run(train, CASES[case])
        for weights, expected in answers:
            assert torch.equal(weights, answers[0][0])
            torch.testing.assert_close(weights, expected, rtol=CLOSE, atol=CLOSE)


def refused(what):
    """What each rank is told, or ``None``."""
    rank = torch.distributed.get_rank()
    inputs, targets = data(4)
    module = Network()
    if what == "other weights":
        nn.init.constant_(module.body[0].weight, float(rank))
    if what == "fsdp":
        module = wrapped(Case("fsdp", []))
        module.set_requires_gradient_sync(False)
    optimizer = AccumulatingOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), STEPS)
    try:
        for _ in range(1 if what in ("fsdp", "kinds") or (what == "flush" and rank) else STEPS):
            (module(inputs) - targets).square().sum().backward()
            optimizer.step(**({} if what == "kinds" and rank else {"weight": 4}))
        optimizer.flush()
    except RuntimeError as error:
        return str(error)
    return None


REFUSALS = {
    "other weights": "the 2 ranks have different weights: wrap the model in DistributedDataParallel",
    "fsdp": "FSDP has not reduced the gradients of this window: call set_requires_gradient_sync(True)",
    "flush": "1 of 2 ranks call flush() while the others complete a window: give every rank the same number",
    "kinds": "weight= was passed on some ranks only: pass it on every rank, or on none",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_would_be_wrong_is_refused_on_all_ranks_alike(what, ranks):
    told = ranks(2).run(refused, what)
    assert told[0] == told[1]
    assert told[0].startswith(REFUSALS[what])
    assert "\n" not in told[0]


def own_models():
    """A model of each rank's own, trained on its own: how far its weight is from where its own gradient brings it."""
    inputs, targets = data(4)
    module = Network()
    nn.init.constant_(module.body[0].weight, 0.1 * torch.distributed.get_rank())
    group = torch.distributed.new_subgroups(1)[0]
    optimizer = AccumulatingOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), 1, group=group)
    weight, loss = module.body[0].weight, (module(inputs) - targets).square().sum()
    expected = weight.detach() - 0.1 * torch.autograd.grad(loss, weight, retain_graph=True)[0] / 4
    loss.backward()
    optimizer.step(weight=4)
    return float((weight - expected).abs().max())


def test_a_group_of_one_rank_trains_a_model_of_its_own(ranks):
    assert max(ranks(2).run(own_models)) < CLOSE


def scaled(scaler_class):
    """The weights after three windows, of which one overflows on the second rank, and how the third ended."""
    rank = torch.distributed.get_rank()
    inputs, targets = data(24)
    module = Network()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = AccumulatingOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), STEPS)
    scaler = scaler_class("cpu", init_scale=16.0, growth_interval=1000)
    updates = []
    for number, (x, y) in enumerate(zip(inputs.split(4), targets.split(4), strict=True)):
        x, y = x[rank::2], y[rank::2]
        with contextlib.nullcontext() if optimizer.is_last else ddp.no_sync():
            loss = (ddp(x) - y).square().sum()
            if number == 2 and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        if scaler_class is ShardedGradScaler:
            scaler.unscale_(optimizer)
        try:
            updates.append(scaler.step(optimizer, weight=len(x)))
        except RuntimeError as error:
            return vector(module), updates, str(error)
        scaler.update()
    return vector(module), updates, ""


def test_an_overflow_on_one_rank_drops_the_window_on_all(ranks):
    answers = ranks(2).run(scaled, ShardedGradScaler)
    for weights, updates, told in answers:
        assert (updates, told) == ([False, True, False, False, False, True], "")
        assert torch.equal(weights, answers[0][0])
    module, (inputs, targets) = Network(), data(24)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for here in (slice(0, 8), slice(16, 24)):
        optimizer.zero_grad()
        ((module(inputs[here]) - targets[here]).square().sum() / 8).backward()
        optimizer.step()
    torch.testing.assert_close(answers[0][0], vector(module), rtol=CLOSE, atol=CLOSE)


def test_scales_that_differ_between_ranks_are_refused_before_an_update(ranks):
    answers = ranks(2).run(scaled, torch.amp.GradScaler)
    for weights, updates, told in answers:
        assert updates == [False, True, False, False, False]  # the window with the overflow is dropped on both
        assert told.startswith(
            "the GradScalers of the ranks have different scales, because only some ranks saw an overflow"
        )
        assert torch.equal(weights, answers[0][0])
