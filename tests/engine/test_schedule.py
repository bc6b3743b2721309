"""The learning rate of every step, also after skipped steps, against formulas that share no code with the schedule."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from itertools import product

import pytest
import torch
from engine.test_step import engine_of
from helpers.resumed import recipe, resume, saved
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from trainer.api import fit
from trainer.contract import Model
from trainer.engine.cut import Cut
from trainer.engine.events import Listener
from trainer.engine.loop import count_steps, epoch_at
from trainer.engine.schedule import CheckpointableLambdaLR, ReduceOnPlateau, lr_factor
from trainer.models import VisionTransformer
from trainer.recipe import Optim
from trainer.values import Loss

SAMPLES, EPOCHS, LR, FLOOR, REFERENCE = 24, 4, 0.1, 1e-3, 8
BATCHES = {0: 12, 2: 3}
"""Batch size by epoch, as ``accumulate`` {0: 4, 2: 1} on 3 ranks or 1: 2 + 2 + 8 + 8 steps."""
SIZES = [12] * 4 + [3] * 16
SCHEDULES = {
    "constant": {},
    "constant, warm": {"schedule": "constant", "warmup_steps": 3},
    "linear": {"schedule": "linear", "min_lr": FLOOR},
    "cosine": {"schedule": "cosine", "min_lr": FLOOR},
    "cosine, warm": {"schedule": "cosine", "warmup_ratio": 0.25, "min_lr": FLOOR},
    "one_cycle": {"schedule": "one_cycle"},
    "plateau": {"schedule": "plateau", "plateau_patience": 3, "plateau_factor": 0.5, "min_lr": FLOOR},
    "range_test": {"schedule": "range_test", "min_lr": FLOOR},
}
SCALES = ("none", "linear", "sqrt")
SKIPPED = [(), (0,), (3,), (3, 4, 11), (18,), (5, 19), tuple(range(1, 20, 2))]
"""Steps of a run that are skipped: 3 is the last of the large batches, 19 the last of all."""


class Bad(Model):
    """A linear model whose loss is NaN on the last rank while ``is_bad``."""

    is_bad = False

    def build(self) -> nn.Module:
        return nn.Linear(1, 1)

    def weigh(self, batch):
        return {"loss": float(len(batch))}

    def losses(self, module, batch):
        total = (module(batch) - 1).square().sum()
        yield Loss(total * math.nan if self.is_bad else total, float(len(batch)))


class Evaluations(Listener):
    """Gives the schedule a validation loss after every step, which never improves."""

    def __init__(self, scheduler: CheckpointableLambdaLR) -> None:
        self.scheduler = scheduler
        self.used: list[float] = []

    def on_step(self, counters, result) -> None:
        self.used.append(math.nan if result.skipped else result.lr)
        self.scheduler.on_validation_loss(1.0)


def rates_of(name, scale, skipped, world_size=1):
    """The rates that a run used, nan where it skipped, and those that a checkpoint before each step and at the end has.

    The run is saved and loaded again in front of every step, into another scheduler.
    """
    optim = Optim("sgd", lr=LR, scale_lr=scale, reference_batch_size=REFERENCE, **SCHEDULES[name])
    model = Bad()
    fetch = lambda requests: (torch.ones(len(request.indices), 1) for request in requests)  # noqa: E731
    engine, _, _ = engine_of([1.0] * SAMPLES, model, fetch=fetch, world_size=world_size)
    stepper, windows, optimizer = engine.stepper, engine.windows, engine.stepper.optimizer
    windows.cut_at = lambda epoch: Cut(BATCHES[0 if epoch < 2 else 2], 1, 1)
    total, epoch_of = count_steps(windows, EPOCHS, None), partial(epoch_at, windows, EPOCHS)

    def make_scheduler() -> CheckpointableLambdaLR:
        plateau = ReduceOnPlateau(optim) if optim.schedule == "plateau" else None
        sizes = lambda step: windows.cut_at(epoch_of(step)).batch_size  # noqa: E731
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = LR
        return CheckpointableLambdaLR(
            optimizer, lr_factor(optim, total, sizes, lambda: stepper.skipped_steps, plateau), plateau
        )

    stepper.scheduler = make_scheduler()
    listener = Evaluations(stepper.scheduler)
    at_steps = []

    def at_boundary(engine):
        state = stepper.state_dict()
        at_steps.append(state["scheduler"]["rates"])
        stepper.scheduler = listener.scheduler = make_scheduler()
        stepper.load_state_dict(state)
        assert [group["lr"] for group in optimizer.param_groups] == at_steps[-1]
        model.is_bad = engine.counters.step in skipped and stepper.fabric.global_rank == world_size - 1

    engine.listeners, engine.at_boundary = [listener], at_boundary
    engine.fit(EPOCHS, max_skipped=99)
    at_steps.append(stepper.state_dict()["scheduler"]["rates"])
    return listener.used, [rate for (rate,) in at_steps]


def formula(name, scale, skipped):
    """The rate in front of every step of 20, and after the last: of the steps that were not skipped before it."""
    optim, rates = Optim("sgd", lr=LR, **SCHEDULES[name]), []
    parameter = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    rule = ReduceLROnPlateau(parameter, factor=0.5, patience=3, min_lr=FLOOR / LR, eps=0.0)
    for step in range(21):
        lost = sum(one < step for one in skipped)
        taken, total = step - lost, 20 - lost
        warm = {"constant, warm": 3, "cosine, warm": math.ceil(0.25 * total)}.get(name, 0)
        share = min(1.0, (taken - warm) / max(1, total - warm))
        if taken < warm:
            rate = LR * (taken + 1) / (warm + 1)
        elif optim.schedule == "linear":
            rate = LR * (1 - share) + FLOOR * share
        elif optim.schedule == "cosine":
            rate = FLOOR + (LR - FLOOR) * math.cos(math.pi / 2 * share) ** 2
        elif optim.schedule == "range_test":
            rate = math.exp(math.log(FLOOR) + math.log(LR / FLOOR) * min(1.0, taken / (total - 1)))
        elif optim.schedule == "one_cycle":
            rate = one_cycle(total)[min(taken, total - 1)]
        else:
            rate = LR * parameter.param_groups[0]["lr"] if name == "plateau" else LR
        ratio = SIZES[min(step, 19)] / REFERENCE
        rates.append(rate * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[scale])
        rule.step(1.0)
    return rates


def one_cycle(total):
    """The rate of every step, as torch has it."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR, momentum=0.9)
    scheduler, found = OneCycleLR(optimizer, LR, total_steps=total), []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step() if len(found) < total else None
    return found


def require_formula(found, name, scale, skipped):
    used, at_steps = found
    expected = formula(name, scale, skipped)
    assert at_steps == pytest.approx(expected, rel=1e-9, abs=1e-12), (name, scale, skipped)
    taken = [math.nan if step in skipped else rate for step, rate in enumerate(expected[:20])]
    assert used == pytest.approx(taken, rel=1e-9, abs=1e-12, nan_ok=True), (name, scale, skipped)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_and_checkpoint_has_the_rate_of_the_formula_also_after_skipped_steps(name):
    """Any two of schedule, scale and skipped steps meet; ``-m slow`` has every combination."""
    for number, skipped in enumerate(SKIPPED, start=[*SCHEDULES].index(name)):
        scale = SCALES[number % len(SCALES)]
        require_formula(rates_of(name, scale, skipped), name, scale, skipped)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_and_checkpoint_has_the_rate_of_the_formula_whatever_is_combined(name):
    for scale, skipped in product(SCALES, SKIPPED):
        require_formula(rates_of(name, scale, skipped), name, scale, skipped)


CASES = [(name, "linear", (3, 4, 11, 18)) for name in SCHEDULES]


def _on_ranks():
    return [rates_of(*case, world_size=3) for case in CASES]


@pytest.mark.slow
def test_three_ranks_have_the_rates_of_the_formula_when_one_of_them_skips(ranks):
    for found in ranks(3).run(_on_ranks):
        for case, rates in zip(CASES, found, strict=True):
            require_formula(rates, *case)


class NotFinite(VisionTransformer):
    """Its loss is NaN in the fourth step of a process that began at the first step, or the first that began later."""

    steps_left = 3

    def losses(self, module, batch):
        for loss in super().losses(module, batch):
            yield dataclasses.replace(loss, total=loss.total * math.nan) if module.training and self.is_due() else loss

    def is_due(self) -> bool:
        type(self).steps_left -= 1
        return type(self).steps_left == -1


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_is_resumed_after_a_skipped_step_has_the_rates_of_the_undisturbed_one(tmp_path, monkeypatch):
    model = {"patch_size": 4, "layers": 1, "heads": 2, "width": 8, "mlp_width": 8}
    settings = {"model": NotFinite("custom", **model), "memory": {"micro_batch_size": 24}, "batch_size": 24}
    settings["optim"] = Optim("sgd", lr=0.1, schedule="cosine")
    fit(recipe(tmp_path / "whole", **settings))
    rates = [saved(tmp_path / "whole", step)["state"]["scheduler"]["rates"][0] for step in (2, 4, 6)]
    cosine = [0.1 * (1 + math.cos(math.pi * taken / total)) / 2 for taken, total in ((2, 6), (3, 5), (5, 5))]
    assert rates == pytest.approx(cosine, rel=1e-9, abs=1e-12)
    monkeypatch.setattr(NotFinite, "steps_left", -9)
    resume(tmp_path / "whole", tmp_path / "rest", 4, **settings)
    assert saved(tmp_path / "rest", 6) == saved(tmp_path / "whole", 6)
