"""BatchNorm's running statistics: the same on all ranks, and the same with every technique."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from helpers import matrix
from helpers.combinations import CLASSES, PIXELS, Trained
from torch import Tensor, nn

from trainer.api import fit
from trainer.contract import Data, Model
from trainer.data import Digits
from trainer.errors import RecipeError
from trainer.memory.compatibility import require_supported_parameters, require_whole_batchnorm
from trainer.memory.oom import OutOfMemoryError
from trainer.memory.plan import decide_plan
from trainer.models.base import classification_loss
from trainer.recipe import Memory, Optim, Recipe, Run
from trainer.values import Loss

SGD = Optim("sgd", lr=0.01)  # Adam would move biases before BatchNorm, whose gradients are rounding noise
OTHERS = [
    {"strategy": "fsdp", "cpu_offload": "optimizer"},
    {"strategy": "fsdp"},
    {"strategy": "ddp", "cpu_offload": "optimizer"},
    {"strategy": "fsdp", "cpu_offload": "parameters"},
    {"strategy": "fsdp", "replicas": 2, "activation_checkpointing": "full"},
    {"strategy": "ddp", "activation_checkpointing": "selective"},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(PIXELS, PIXELS), nn.BatchNorm1d(PIXELS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


@dataclass
class Normalised(Model):
    """Two blocks with BatchNorm."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(PIXELS, CLASSES))

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        yield classification_loss(module(batch["pixel_values"]), batch["labels"])


class Conditional(Normalised):
    """Reduced after the last backward: DDP broadcasts no buffers then."""

    conditional = True


@dataclass(frozen=True)
class WithBatchNorm(Trained):
    kind: type[Model] = Normalised
    optim: Optim = SGD

    @property
    def model(self) -> Model:
        return self.kind()


def evaluated(case: WithBatchNorm) -> dict[str, Any]:
    """The running statistics after three steps, and the loss of an evaluation with them; called on every rank."""
    _, stepper, windows, stack = matrix.set_up(case, decide_plan(case.recipe, case.world_size))
    for epoch, step in matrix.steps_of(case):
        (window,) = windows.epoch(epoch, step, step + 1)
        assert not stepper.step(window).skipped or case.memory.precision == "16-mixed"  # which looks for its loss scale
    statistics = {name: buffer.clone() for name, buffer in stack.module.named_buffers()}
    stepper.module.eval()
    with torch.no_grad():
        (loss,) = stepper.losses(matrix.collate(case.samples))
    return {"statistics": statistics, "loss": float(loss.total)}


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_ranks_evaluate_as_under_ddp(accumulate, ranks):
    results = [
        result
        for memory in ({"strategy": "ddp"}, *OTHERS[accumulate - 1 :: 2])
        for result in ranks(2).run(evaluated, WithBatchNorm("bn", Memory(**memory), 2, accumulate=accumulate))
    ]
    expected = results[0]
    for result in results:
        torch.testing.assert_close(result["statistics"], expected["statistics"], rtol=1e-5, atol=1e-6)
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_all_ranks_have_the_statistics_of_the_first_where_ddp_does_not_see_to_it(ranks):
    first, second = ranks(2).run(evaluated, WithBatchNorm("bn", Memory(strategy="ddp"), 2, kind=Conditional))
    assert first["loss"] == second["loss"]


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_a_checkpointed_block_counts_a_batch_once(checkpointing):
    case = WithBatchNorm("bn", Memory())
    plain = evaluated(case)
    ours = evaluated(replace(case, memory=Memory(activation_checkpointing=checkpointing)))
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
    assert plain["statistics"]["0.0.norm.num_batches_tracked"] == matrix.STEPS


PRECISIONS = ("bf16-mixed", "16-mixed", "bf16-true", "64-true")


def test_batchnorm_in_every_precision(ranks):
    exact = ranks(2).run(evaluated, WithBatchNorm("bn", Memory(strategy="ddp"), 2))[0]["loss"]
    for knobs, precision in zip(({"strategy": "ddp"}, *OTHERS), cycle(PRECISIONS), strict=False):
        first, second = ranks(2).run(evaluated, WithBatchNorm("bn", Memory(precision=precision, **knobs), 2))
        rounding = 0.1 if precision == "bf16-true" else 0.05  # of the weights and of the statistics, too
        assert first["loss"] == second["loss"] == pytest.approx(exact, rel=rounding), (knobs, precision)


@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("fsdp", 2), ("fsdp", 1)])
def test_batchnorm_over_ranks_is_refused_at_the_start_where_there_is_a_group(strategy, world_size):
    module = nn.SyncBatchNorm.convert_sync_batchnorm(Normalised().build())
    recipe = Recipe(model=Normalised(), data=Data(), batch_size=8, memory=Memory(strategy=strategy))
    with pytest.raises(RecipeError, match=rf"^memory\.strategy={strategy} cannot train 0\.0\.norm, [^\n]*LayerNorm"):
        require_supported_parameters(module, decide_plan(recipe, world_size), Normalised())
    alone = decide_plan(recipe.replace(memory=Memory()), 1)
    require_supported_parameters(module, alone, Normalised())  # there it is a BatchNorm


@pytest.mark.parametrize("strategy", ["dp", "async"])
def test_strategies_with_other_gradients_are_refused_by_name(strategy):
    with pytest.raises(RecipeError, match=rf"^memory\.strategy={strategy} is not supported: [^\n]*use ddp"):
        Memory(strategy=strategy)


class Interacting(Normalised):
    samples_interact = True


def recipe_of(memory, **settings):
    return Recipe(model=Normalised(), data=Data(), batch_size=8, memory=memory).replace(**settings)


@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        (recipe_of(Memory(micro_batch_size=2)), 1),
        (recipe_of(Memory()), 2),
        (recipe_of(Memory(micro_batch_size=8), batch_size=None, accumulate={0: 1, 2: 4}), 1),
    ],
)
def test_a_cut_batch_is_rejected_unless_another_gradient_is_accepted(recipe, world_size):
    module, plan = Normalised().build(), decide_plan(recipe, world_size)
    with pytest.raises(RecipeError, match=r"^layer '0\.0\.norm' is a BatchNorm: .*memory\.correct_batchnorm true$"):
        require_whole_batchnorm(module, plan, recipe)
    require_whole_batchnorm(nn.LayerNorm(4), plan, recipe)
    require_whole_batchnorm(module, plan, recipe.replace(model=Interacting()))
    for corrected in (True, False):
        accepted = replace(recipe.memory, correct_batchnorm=corrected)
        require_whole_batchnorm(module, plan, recipe.replace(memory=accepted))


def test_a_whole_batch_is_trained_with_batchnorm():
    recipe = recipe_of(Memory())
    require_whole_batchnorm(Normalised().build(), decide_plan(recipe, 1), recipe)


@dataclass
class Hungry(Model):
    """Has no memory for more than 12 samples."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        if module.training and len(batch["labels"]) > 12:
            raise torch.OutOfMemoryError("no memory for these activations")
        yield classification_loss(module(batch["pixel_values"]), batch["labels"])


def test_a_recovery_cuts_batches_only_where_another_gradient_is_accepted(tmp_path):
    def train(name: str, corrected: bool | None) -> Any:
        memory, run = Memory(correct_batchnorm=corrected), Run(dir=str(tmp_path / name), progress=False, evaluate=False)
        data = Digits(test_fraction=0.9)
        return fit(Recipe(model=Hungry(), data=data, optim=SGD, batch_size=24, max_steps=2, memory=memory, run=run))

    with pytest.raises(OutOfMemoryError, match="out of memory in forward"):
        train("whole", None)
    assert train("cut", True).summary.recoveries == 1


def test_the_loss_of_a_router_is_rejected_unless_the_model_allows_it():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=8, num_key_value_heads=2, output_router_logits=True, **sizes)
    module = transformers.MixtralForCausalLM(config)
    plan = decide_plan(Recipe(model=Normalised(), data=Data(), batch_size=8), 1)
    with pytest.raises(RecipeError, match=r"^Normalised: output_router_logits=True [^\n]*set it to False"):
        require_supported_parameters(module, plan, Normalised())

    require_supported_parameters(module, plan, Interacting())
    config.output_router_logits = False
    require_supported_parameters(module, plan, Normalised())
