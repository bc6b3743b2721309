"""``memory.matmul_precision``: what torch is told for a run and no longer, what a plan says, and what it wins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import traced
from torch import nn

from trainer import Memory, Recipe, RecipeError, Run
from trainer.api import evaluate, fit
from trainer.data import Digits
from trainer.memory.plan import decide_plan
from trainer.memory.precision import matmul_precision
from trainer.models import MLP
from trainer.planner.knobs import lossy_steps
from trainer.run.description import plan_warnings
from trainer.run.identity import PLANNED, flat_settings
from trainer.values import Loss

HALF = Memory(micro_batch_size=16, precision="bf16-mixed")


def settings() -> tuple[str, ...]:
    """Of products on GPUs and CPUs, and of cuDNN's convolutions and recurrent layers."""
    backends: Any = torch.backends
    parts = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    return tuple(part.fp32_precision for part in parts)


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    backends: Any = torch.backends
    before = settings()
    yield
    torch.set_float32_matmul_precision("highest")
    for part, setting in zip((backends.cuda.matmul, backends.mkldnn.matmul), before, strict=False):
        part.fp32_precision = setting


@dataclass
class Spy(MLP):
    """Notes what torch is told while it computes."""

    hidden: list[int] = field(default_factory=lambda: [8])

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        cudnn: Any = torch.backends.cudnn
        # Torch raises an error if an older flag is read that contradicts a newer one.
        SEEN.append((torch.get_float32_matmul_precision(), cudnn.conv.fp32_precision, cudnn.allow_tf32))
        yield from super().losses(module, batch)


SEEN: list[tuple[str, str, bool]] = []


def recipe(run_dir: Any = None, memory: Memory = HALF) -> Recipe:
    run = Run(dir=None if run_dir is None else str(run_dir), progress=False)
    data = Digits(val_fraction=0.1, test_fraction=0.8)
    return Recipe(model=Spy(), data=data, batch_size=64, max_steps=1, memory=memory, run=run)


@pytest.mark.first(1)
@pytest.mark.parametrize("wish", ["highest", "high", "medium"])
def test_a_run_computes_as_asked_and_leaves_torch_as_it_was(wish, tmp_path, no_pictures):
    wished = recipe(tmp_path / "run", Memory(micro_batch_size=16, matmul_precision=wish))
    before = settings()
    SEEN.clear()
    fit(wished)
    evaluate(wished, tmp_path / "run")
    assert settings() == before
    assert set(SEEN) == {(wish, *(("ieee", False) if wish == "highest" else ("tf32", True)))}
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("way", ["older", "newer", "neither"])
def test_whichever_way_torch_was_told_before_is_what_holds_afterwards(way):
    products: Any = torch.backends.cuda.matmul
    if way == "older":
        torch.set_float32_matmul_precision("medium")
    elif way == "newer":
        products.fp32_precision = "tf32"
    told = settings()
    with matmul_precision("highest"):
        assert settings() == ("ieee",) * 4
        with pytest.raises(KeyError), matmul_precision("high"):
            raise KeyError(settings())
        assert settings() == ("ieee",) * 4
        assert torch.get_float32_matmul_precision() == "highest"
    assert settings() == told


def test_a_plan_says_what_is_rounded_and_where_that_does_nothing():
    high = decide_plan(recipe(memory=Memory(micro_batch_size=16, matmul_precision="high")), 1)
    assert "(lossy: fp32 products rounded to TF32)" in high.describe()
    assert high.for_evaluation().memory.matmul_precision == "high"
    said = {
        (precision, wish, on_gpu): plan_warnings(
            recipe(memory=Memory(micro_batch_size=16, precision=precision, matmul_precision=wish)), on_gpu
        )
        for precision in ("32-true", "bf16-mixed")
        for wish in ("highest", "high", "medium")
        for on_gpu in (True, False)
    }
    told = {asked: lines[0] for asked, lines in said.items() if lines}
    assert told.keys() == {key for key in said if key[1] != "highest" and key[::2] != ("32-true", True)}
    assert told["32-true", "high", False].endswith("on a CPU it has no effect")
    assert told["32-true", "medium", False].endswith("(AMX)")
    assert told["bf16-mixed", "high", True].endswith("computes almost none in fp32")
    for precision in ("64-true", "bf16-true"):
        wrong = recipe(memory=Memory(micro_batch_size=16, precision=precision, matmul_precision="high"))
        with pytest.raises(RecipeError, match=f"matmul_precision=high .*precision={precision} has none: use highest"):
            decide_plan(wrong, 1)


def test_it_is_a_wish_of_the_recipe_that_a_checkpoint_is_resumed_with():
    assert flat_settings(recipe())["memory.matmul_precision"] == "highest"
    assert "memory.matmul_precision" not in PLANNED


def test_the_planner_turns_it_only_at_a_loss_and_for_time_alone():
    full = recipe(memory=Memory(micro_batch_size=16))
    high = {"memory.matmul_precision": "high"}
    assert high in lossy_steps(full, faster=True)
    assert all("memory.matmul_precision" not in step for step in lossy_steps(full))
    chosen = dataclasses.replace(full.memory, matmul_precision="medium")
    for asked in (recipe(), full.replace(memory=chosen)):
        assert high not in lossy_steps(asked, faster=True)


@pytest.mark.slow
def test_products_and_convolutions_are_traced_in_what_they_are_computed_in():
    wishes = {wish: (traced.own_recipe(Memory(matmul_precision=wish)), 1) for wish in ("highest", "high")}
    units = {wish: {work.dtype for work in trace.work if work.flops} for wish, trace in traced.traced(wishes).items()}
    assert units == {"highest": {"float32"}, "high": {"tfloat32"}}
