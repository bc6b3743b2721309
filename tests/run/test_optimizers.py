"""Optimizers, schedules and all that goes with them: a run equals a plain loop in float64, and resumes bit for bit."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resumed import TINY, assert_same_weights, losses, recipe, resume, saved
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from trainer import Optim, RecipeError
from trainer.api import fit
from trainer.data import Digits
from trainer.engine.feed import fill_from_data
from trainer.engine.order import batch_indices
from trainer.engine.schedule import decay
from trainer.models import VisionTransformer

pytestmark = pytest.mark.usefixtures("no_pictures")

STEPS = 10  # two epochs
WARM = {"schedule": "cosine", "warmup_ratio": 0.25, "min_lr": 1e-4}


@dataclass
class Textbook:
    """What a plain loop calls, and when."""

    optimizer: torch.optim.Optimizer
    stepped: Callable[[], Any]  # after every step
    evaluated: Callable[[float], Any] = lambda loss: None  # with the validation loss, after every second step


def settings_of(optim: Optim) -> dict[str, Any]:
    """Of a run in float64, with a validation set; evaluated after every second step."""
    data, model = Digits(test_fraction=0.965, val_fraction=0.2), VisionTransformer("custom", **TINY | {"dropout": 0.0})
    memory = {"precision": "64-true", "micro_batch_size": 3}
    chosen: dict[str, Any] = {"optim": optim, "data": data, "model": model, "memory": memory, "batch_size": 12}
    return chosen | {"eval_every": 2, "run": {"evaluate": True}}


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "model.safetensors")


def plain_run(optim: Optim, of: Callable[[nn.Module], Textbook]) -> dict[str, torch.Tensor]:
    """The weights that a loop of plain PyTorch ends with, on whole batches."""
    run = recipe(Path("nowhere"), **settings_of(optim))
    run.data.prepare()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(run.seed)
    module = fill_from_data(run.model, run.data).build().train()
    torch.set_default_dtype(torch.float32)
    book, size, step = of(module), len(run.data.train), 0

    def loss_of(split: Any, indices: Any) -> torch.Tensor:
        batch = run.data.collate([split[index] for index in indices])
        pixels = batch["pixel_values"].double().expand(-1, 3, -1, -1)
        return cross_entropy(module(pixels), batch["labels"])

    for epoch in range(run.epochs):
        for number in range(-(-size // run.batch_size)):
            loss_of(run.data.train, batch_indices(run.seed, epoch, number, size, run.batch_size)).backward()
            nn.utils.clip_grad_norm_(module.parameters(), optim.clip_norm or float("inf"))
            book.optimizer.step()
            book.optimizer.zero_grad()
            book.stepped()
            step += 1
            is_last = number == -(-size // run.batch_size) - 1
            if step % run.eval_every == 0 or is_last:
                with torch.no_grad():
                    book.evaluated(loss_of(run.data.val, range(len(run.data.val))).item())
    assert step == STEPS
    return {name: value.detach() for name, value in module.state_dict().items()}


def decayed(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def with_warm_cosine(module: nn.Module) -> Textbook:
    optimizer = torch.optim.AdamW(decayed(module, 0.1), lr=1e-2, betas=(0.8, 0.95), eps=1e-4)
    warm = LinearLR(optimizer, 1 / 4, total_iters=3)  # a quarter of 10 steps, rounded up
    schedule = SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, STEPS - 3, eta_min=1e-4)], [3])
    return Textbook(optimizer, schedule.step)


def with_one_cycle(module: nn.Module) -> Textbook:
    optimizer = torch.optim.SGD(decayed(module, 0.1), lr=1e-2, momentum=0.9, nesterov=True)
    schedule = OneCycleLR(optimizer, 1e-2, total_steps=STEPS, cycle_momentum=False)
    rest = iter([schedule.step] * (STEPS - 1))  # it refuses one step more
    return Textbook(optimizer, lambda: next(rest, lambda: None)())


def with_plateau(module: nn.Module) -> Textbook:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=0.02)
    return Textbook(optimizer, lambda: None, schedule.step)


PLATEAU = Optim("sgd", lr=0.1, schedule="plateau", plateau_factor=0.5, plateau_patience=0, min_lr=0.02)
CASES: dict[str, tuple[Optim, Callable[[nn.Module], Textbook]]] = {
    "betas, eps and a warm cosine": (
        Optim("adamw", lr=1e-2, weight_decay=0.1, betas=[0.8, 0.95], eps=1e-4, clip_norm=1.0, **WARM),
        with_warm_cosine,
    ),
    "Nesterov in one cycle": (
        Optim("sgd", lr=1e-2, weight_decay=0.1, momentum=0.9, nesterov=True, schedule="one_cycle"),
        with_one_cycle,
    ),
    "plateau": (PLATEAU, with_plateau),
}
WORLDS = {"ddp": {"strategy": "ddp"}, "fsdp": {"strategy": "fsdp"}}


def train(run_dir: Path, **changes: Any) -> None:
    fit(recipe(run_dir, **changes))


@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_the_plain_loop(case, ranks, tmp_path):
    optim, book = CASES[case]
    expected, settings = plain_run(optim, book), settings_of(optim)
    train(tmp_path / "single", **settings)
    for name, memory in WORLDS.items():
        ranks(2).run(partial(train, tmp_path / name, **settings | {"memory": settings["memory"] | memory}))
    for name in ("single", *WORLDS):
        for key, value in weights_of(tmp_path / name).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-12, msg=f"{name}: {key}")


USUAL = ("plateau",)


@pytest.mark.parametrize(
    "case", [case if case in USUAL else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(case, ranks, tmp_path):
    settings = settings_of(CASES[case][0])
    train(tmp_path / "whole", **settings)
    resume(tmp_path / "whole", tmp_path / "rest", 4, **settings | {"run": {"evaluate": True}})
    assert saved(tmp_path / "rest", STEPS) == saved(tmp_path / "whole", STEPS)
    memory = settings["memory"] | {"strategy": "fsdp"}
    run = {"evaluate": True, "allow_change": ["memory"]}
    ranks(2).run(
        partial(resume, tmp_path / "whole", tmp_path / "sharded", 4, **settings | {"memory": memory, "run": run})
    )
    assert losses(tmp_path / "sharded") == pytest.approx(losses(tmp_path / "whole"), rel=1e-12)
    assert_same_weights(tmp_path / "sharded", tmp_path / "whole", rtol=1e-12)


def test_a_plateau_of_two_ranks_resumes_bit_for_bit(ranks, tmp_path):
    settings = settings_of(PLATEAU)
    settings["memory"] |= {"strategy": "ddp"}
    ranks(2).run(partial(train, tmp_path / "whole", **settings))
    ranks(2).run(partial(resume, tmp_path / "whole", tmp_path / "rest", 4, **settings))
    assert saved(tmp_path / "rest", STEPS) == saved(tmp_path / "whole", STEPS)
    state = saved(tmp_path / "whole", 4)["state"]["scheduler"]
    assert state["plateau"]["factor"] < 1  # or nothing would have been at stake


def test_a_plateau_needs_a_validation_set(tmp_path):
    with pytest.raises(RecipeError, match=r"^optim\.schedule=plateau needs a validation set: .*data\.val_fraction"):
        train(tmp_path, optim=PLATEAU, run={"evaluate": True})
    with pytest.raises(RecipeError, match=r"^optim\.schedule=plateau waits for evaluations, and run\.evaluate is fals"):
        recipe(tmp_path, optim=PLATEAU)


@pytest.mark.parametrize("settings", [{}, {"warmup_ratio": 0.15}, {"warmup_steps": 7}, {"min_lr": 1e-3}], ids=str)
@pytest.mark.parametrize("total", [1, 2, 3, 10, 37])
def test_one_cycle_is_torchs(settings, total):
    optim, parameter = Optim("sgd", lr=0.1, schedule="one_cycle", **settings), torch.zeros(1)
    steps = settings.get("warmup_steps", 0)
    if steps >= total:
        assert [decay(optim, step, total) for step in range(total)] == sorted(
            decay(optim, s, total) for s in range(total)
        )
        return
    pct = steps / total if steps else settings.get("warmup_ratio", 0.3)
    last = {"final_div_factor": 0.1 / 25 / 1e-3} if "min_lr" in settings else {}
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    schedule = OneCycleLR(optimizer, 0.1, total_steps=total, pct_start=pct, cycle_momentum=False, **last)
    for step in range(total):
        assert 0.1 * decay(optim, step, total) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        if step < total - 1:
            schedule.step()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"betas": [0.9]}, r"optim.betas=[0.9] must be two numbers in [0, 1)"),
    ({"betas": [0.9, 1.0]}, r"optim.betas=[0.9, 1.0] must be two numbers in [0, 1)"),
    ({"name": "sgd", "betas": [0.9, 0.99]}, "optim.betas=[0.9, 0.99] has no meaning for sgd"),
    ({"eps": 0.0}, "optim.eps=0.0 must be greater than 0"),
    ({"name": "lion", "eps": 1e-8}, "optim.eps=1e-08 has no meaning for lion"),
    ({"nesterov": True}, "optim.nesterov=true is for optim.name sgd with optim.momentum"),
    ({"min_lr": 1.0, "schedule": "cosine"}, "optim.min_lr=1.0 must be between 0 and optim.lr=0.001"),
    ({"min_lr": 1e-5}, "optim.min_lr=1e-05 has no meaning for optim.schedule=constant"),
    ({"warmup_ratio": 1.0}, "optim.warmup_ratio=1.0 must be a fraction of all steps"),
    ({"warmup_ratio": 0.1, "warmup_steps": 5}, "optim.warmup_steps=5 and optim.warmup_ratio=0.1 say the same thing"),
    ({"plateau_patience": -1}, "optim.plateau_patience=-1 must not be negative"),
    ({"plateau_factor": 1.0}, "optim.plateau_factor=1.0 must be between 0 and 1"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=str)
def test_what_makes_no_sense_is_refused_by_its_name(settings, message):
    with pytest.raises(RecipeError, match=f"^{re.escape(message)}"):
        dataclasses.replace(Optim(), **settings)
