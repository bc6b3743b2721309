"""Updates that are made while the last backward goes on, and undone where that was wrong: the same bits either way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch
from helpers.combinations import Trained, ask, case_of, covering, likely, name_of, tower_file
from helpers.matrix import Case, set_up
from torch import Tensor

from trainer.memory import optimizer_offload, update_ahead
from trainer.memory.plan import Plan, decide_plan
from trainer.memory.update_ahead import UpdateAhead
from trainer.recipe import Memory, Optim

CLIP = [1e9, 1e9, 1e-3, 1e9, None, 1e9, 1e9, 1e9, 1e-3, 1e-3]
"""The largest norm, step by step: in three of them gradients are clipped."""
SPOILED = 5
"""The step in which a gradient is not finite; under FSDP in the shards of one rank only."""
TRIED = [False, True, True, False, True, True, False, True, True, False]
"""In which steps updates are made ahead: from the second on, and not after one that was clipped or skipped."""
RIGHT = [largest != 1e-3 and step != SPOILED for step, largest in enumerate(CLIP)]

OFFLOADED = [
    values
    for values in likely(9_000)
    if values["cpu_offload"] != "none" and values["compile"] == "none" and isinstance(ask(values), Plan)
    # FSDP itself takes the gradients of streamed weights that are not fp32, when backward is over.
    and (values["cpu_offload"] == "optimizer" or values["precision"] in ("32-true", "bf16-mixed", "16-mixed"))
]


def never(ahead: UpdateAhead) -> None:
    """Nothing is updated ahead."""


def patient(ahead: UpdateAhead) -> None:
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
    small = replaced(optimizer_offload, PIECE=3000, BUCKET=1000, CHUNK=500)
    with replaced(UpdateAhead, **methods), replaced(update_ahead, AT_ONCE=1), small:
        _, stepper, windows, stack = set_up(case, decide_plan(case.recipe, case.world_size))
        ahead, made, stood, seen = stepper.sync.ahead, [], [], []
        ahead.pays = True  # although the host computes
        settle = ahead.settle

        def settled(*args: Any) -> bool:
            made.append(len(ahead.before))
            stood.append(settle(*args))
            return stood[-1]

        ahead.settle = settled
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
        kept = [update_ahead.local(value).detach() for value in kept if isinstance(value, Tensor)]
        return kept, [count > 0 for count in made], stood


def same(ours: list[Tensor], plain: list[Tensor]) -> bool:
    """Bit for bit; what is no number equals itself."""
    alike = [torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(ours, plain, strict=True)]
    return all(alike)


def compared(case: Case) -> tuple[bool, bool, list[bool], list[bool]]:
    """Whether updates ahead, as they come and all that can be made, leave what steps without any leave."""
    plain, none, right = trained(case, open=never)
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


@pytest.mark.parametrize("values", covering(OFFLOADED, 1), ids=name_of)
def test_the_same_bits_with_updates_ahead(values, ranks):
    """Any value that any plan with an offload has; ``-m slow`` has any two of all knobs."""
    check(values, ranks)
