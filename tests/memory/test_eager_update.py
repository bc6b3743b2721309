"""Updates that are made while the last backward goes on, and undone where that was wrong: the same bits either way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
import torch
from helpers.combinations import Trained, ask, case_of, covering, likely, name_of, tower_file
from helpers.matrix import Case, set_up
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from trainer.memory import eager_update, optimizer_offload
from trainer.memory.eager_update import EagerOptimizerUpdate
from trainer.memory.plan import Plan, decide_plan
from trainer.recipe import Memory, Optim

CLIP = [1e9, 1e9, 1e-3, 1e9, None, 1e9, 1e9, 1e9, 1e-3, 1e-3]
"""The largest norm, step by step: in three of them gradients are clipped."""
SPOILED = 5
"""The step in which a gradient is not finite; under FSDP in the shards of one rank only."""
TRIED = [False, True, True, False, True, True, False, True, True, False]
"""In which steps updates are made ahead: from the second on, and not after one that was clipped or skipped."""
RIGHT = [largest != 1e-3 and step != SPOILED for step, largest in enumerate(CLIP)]


def offloaded(count: int) -> list[dict]:
    """Of ``count`` random combinations those with an offload that have a plan."""
    return [
        values
        for values in likely(count)
        if values["cpu_offload"] != "none"
        and values["compile"] == "none"
        # FSDP itself takes the gradients of streamed weights that are not fp32, when backward is over.
        and (values["cpu_offload"] == "optimizer" or values["precision"] in ("32-true", "bf16-mixed", "16-mixed"))
        and isinstance(ask(values), Plan)
    ]


def never(ahead: EagerOptimizerUpdate) -> None:
    """Nothing is updated ahead."""


def patient(ahead: EagerOptimizerUpdate) -> None:
    """All updates that could have been made are: how many there are no longer depends on the machine."""
    for update in ahead.updates:
        update.result()
    ahead.join()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def trained(case: Case, **methods: Any) -> tuple[list[Tensor], list[bool], list[bool]]:
    """All that ten steps leave on this rank; in which of them something was updated ahead, and in which that stood."""
    small = replaced(optimizer_offload, PIECE=3000, MAX_PIECE=4096, BUCKET=1000, CHUNK=500)
    with replaced(EagerOptimizerUpdate, **methods), replaced(eager_update, CHUNK_ELEMENTS=1), small:
        _, stepper, windows, stack = set_up(case, decide_plan(case.recipe, case.world_size))
        ahead, made, stood, seen = stepper.sync.ahead, [], [], []
        ahead.pays = True  # although the host computes
        settle = ahead.commit_or_undo

        def settled(*args: Any) -> bool:
            made.append(len(ahead.before))
            stood.append(settle(*args))
            return stood[-1]

        ahead.commit_or_undo = settled
        per_epoch = -(-case.size // case.batch_size)
        for step, largest in enumerate(CLIP):
            epoch, at = divmod(step, per_epoch)
            (window,) = windows.epoch(epoch, at, at + 1)
            if step == SPOILED:
                window.micro_batches[0].batch["spoil"] = True
            stepper.clip_norm = largest
            result = stepper.step(window)
            seen.append(torch.tensor([result.loss, result.grad_norm, result.skipped], dtype=torch.float64))
            for group in stepper.optimizer.param_groups:
                group["lr"] *= 0.9
        states = [value for state in stepper.optimizer.state.values() for value in state.values()]
        kept = [*stack.module.state_dict().values(), *stepper.parameters, *states, *seen]
        kept = [eager_update.local_shard(value).detach() for value in kept if isinstance(value, Tensor)]
        return kept, [count > 0 for count in made], stood


def same(ours: list[Tensor], plain: list[Tensor]) -> bool:
    """Bit for bit; what is no number equals itself."""
    alike = [torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(ours, plain, strict=True)]
    return all(alike)


def compared(case: Case) -> tuple[bool, bool, list[bool], list[bool]]:
    """Whether updates ahead, as they come and all that can be made, leave what steps without any leave."""
    plain, none, right = trained(case, begin_last_backward=never)
    assert not any(none)
    hasty, _, _ = trained(case)
    ours, made, stood = trained(case, stop=patient)
    assert stood == right
    return same(hasty, plain), same(ours, plain), made, stood


def check(values: dict, ranks: Any) -> None:
    if values["optim"] == "lion":
        pytest.importorskip("timm")
    frozen = values.get("frozen", False)
    case = case_of({key: value for key, value in values.items() if key != "frozen"}, frozen, tower_file())
    for hasty, ours, made, stood in ranks(case.world_size).run(compared, case):
        assert hasty
        assert ours
        if "16" in case.memory.precision and case.memory.precision != "bf16-mixed":
            assert any(made)  # fp16 may skip steps of its own
        else:
            assert made == TRIED
            assert stood == RIGHT


EVERY = covering(offloaded(3_000), 1)
FIRST, MORE = EVERY[::5], [one for at, one in enumerate(EVERY) if at % 5]


@pytest.mark.slow
@pytest.mark.parametrize("values", [*FIRST, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)], ids=name_of)
def test_the_same_bits_with_updates_ahead(values, ranks):
    """Any value that any plan with an offload has; ``-m slow`` has any two of all knobs."""
    check(values, ranks)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_bits_with_any_two_knobs(ranks):
    for values in covering(offloaded(9_000), 2)[::4]:
        check(values, ranks)


def test_weights_are_updated_before_the_last_backward_has_ended(monkeypatch):
    """The gradient of the first layer, the last to come, is held back until the last layer has been updated."""
    monkeypatch.setattr(eager_update, "CHUNK_ELEMENTS", 1)
    memory, optim = Memory(strategy="single", cpu_offload="optimizer"), Optim("adamw", lr=1e-3)
    case = Trained("tower", memory, optim=optim, weights=tower_file())
    _, stepper, windows, _ = set_up(case, decide_plan(case.recipe, 1))
    ahead, updated, waited = stepper.sync.ahead, Event(), []
    ahead.pays, update = True, ahead.update

    def and_told(*args: Any) -> None:
        update(*args)
        updated.set()

    monkeypatch.setattr(ahead, "update", and_told)
    hold_back = stepper.module.stem.weight.register_hook(lambda gradient: waited.append(updated.wait(20)))
    first, second = windows.epoch(0, 0, 2)
    updated.set()
    assert not stepper.step(first).skipped  # which is not updated ahead
    updated.clear()
    waited.clear()
    assert not stepper.step(second).skipped
    hold_back.remove()
    assert waited == [True]


def test_a_second_gradient_in_the_same_backward_takes_the_first_update_back(monkeypatch):
    """Reentrant checkpointing brings the gradient of a shared weight in parts."""
    weight = torch.nn.Parameter(torch.ones(4))
    master = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([master], lr=1.0)
    sync = optimizer_offload.HostGradientSync({weight: master}, torch.device("cpu"), optimizer, 1)
    monkeypatch.setattr(eager_update, "CHUNK_ELEMENTS", 1)
    sync.ahead.pays = sync.ahead.has_stepped = True
    sync.before_last_backward()
    for part in (2.0, 3.0):
        (weight * part).sum().backward()
        for update in sync.ahead.updates:
            update.result()
        assert master.tolist() == ([-1.0] * 4 if part == 2 else [1.0] * 4)
    sync.after_last_backward()
    assert master.grad is not None
    assert master.grad.tolist() == [5.0] * 4


class Looped(torch.nn.Module):
    """Uses a part twice, and forgets what is in it both times."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, values: Tensor) -> Tensor:
        for _ in range(2):
            values = checkpoint(self.part, values, use_reentrant=True).tanh()
        return self.head(values)


def looped(is_on: bool) -> list[Tensor]:
    """The weights after steps of a streamed :class:`Looped`, with updates ahead that come as early as they may."""
    torch.manual_seed(0)
    module = Looped()
    for part in (module.part, module):
        fully_shard(part, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    parameters = [*module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    sync = optimizer_offload.StreamedGradientSync(module, parameters, torch.device("cpu"), optimizer, 2)
    sync.ahead.pays, sync.ahead.submit = is_on, sync.ahead.update
    with replaced(eager_update, CHUNK_ELEMENTS=1):
        for _ in range(3):
            sync.begin(None)
            loss = module(torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()).square().sum()
            sync.before_last_backward()
            loss.backward()
            sync.after_last_backward()
            sync.clip(sync.norm(), None)
            optimizer.step()
            optimizer.zero_grad()
    return [eager_update.local_shard(parameter.detach()).clone() for parameter in parameters]


def both_looped() -> bool:
    return same(looped(True), looped(False))


def test_weights_that_are_gathered_again_are_not_updated_before(ranks):
    assert ranks(2).run(both_looped) == [True, True]


def test_no_more_is_copied_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(eager_update, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(eager_update, "available_bytes", lambda: 2 * 4 * 12)  # half of it is for 12 weights
    weights = [torch.ones(8, requires_grad=True) for _ in range(2)]
    ahead = EagerOptimizerUpdate(torch.optim.SGD(weights, lr=1.0))
    ahead.has_stepped = True
    for _ in range(2):
        ahead.begin_last_backward()
        for weight in weights:
            ahead.take(weight, torch.ones(8))
        patient(ahead)
        assert [*ahead.before] == weights[:1]
        ahead.undo()
        assert weights[0].tolist() == [1.0] * 8


def test_an_update_that_fails_is_raised_and_taken_back(monkeypatch):
    monkeypatch.setattr(eager_update, "CHUNK_ELEMENTS", 1)
    weight = torch.ones(8, requires_grad=True)
    ahead = EagerOptimizerUpdate(torch.optim.SGD([weight], lr=1.0))
    ahead.has_stepped = True
    monkeypatch.setattr(ahead.hand, "step", lambda: weight.data.zero_() is None or 1 / 0)
    ahead.begin_last_backward()
    ahead.take(weight, torch.ones(8))
    with pytest.raises(ZeroDivisionError):
        ahead.stop()
    ahead.undo()
    assert weight.tolist() == [1.0] * 8
