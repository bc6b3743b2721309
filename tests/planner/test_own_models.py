"""Models of one's own that do what people's models do, and what is said of those that cannot be predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.language import language_model, language_samples
from helpers.tiny import InMemory, prediction_of
from helpers.traced import BATCH, CLASSES, WIDTH, Own, own_recipe
from torch import Tensor, nn

from trainer.fakegpu.prediction import Prediction
from trainer.planner.search import plan
from trainer.recipe import Memory, Recipe, Run
from trainer.system.child_jobs import ChildError


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))


class Around(nn.Module):
    """Calls another module, and a function on its result, both maybe compiled."""

    def __init__(self, inner: nn.Module, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.after = inner, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(x.mean(1)))


class Last(nn.Module):
    """Of a recurrent layer, the output at the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0][:, -1]


def wary(out: Tensor) -> Tensor:
    """Refuses numbers that are not finite, and writes one down."""
    if not torch.isfinite(out).all() or torch.isnan(out).any() or torch.isinf(out).any():
        raise ValueError("not finite")
    assert f"{out.sum():.3f}"
    return out


@dataclass
class Made(Own):
    """A model of any module."""

    make: Callable[[], nn.Module] = layers
    blocks = ()

    def build(self) -> nn.Module:
        return self.make()


def predicted(make: Callable[[], nn.Module], **knobs: Any) -> Prediction:
    return prediction_of(own_recipe(Memory(**knobs), model=Made(make=make), run=Run(evaluate=False)))


def both_compiled() -> nn.Module:
    return Around(torch.compile(layers()), torch.compile(dynamic=False)(torch.tanh))


def test_what_is_compiled_by_the_model_or_by_a_knob_is_traced_as_it_is() -> None:
    compiled, plain = predicted(both_compiled, compile="model"), predicted(lambda: Around(layers(), torch.tanh))
    assert (compiled.allocated, compiled.reserved) == (plain.allocated, plain.reserved)
    assert "memory.compile=model" in " ".join(compiled.notes)


@pytest.mark.slow
def test_a_recurrent_model_is_predicted_and_its_note_says_how() -> None:
    found = predicted(lambda: nn.Sequential(Last(), nn.Linear(WIDTH, CLASSES)))
    weights = sum(parameter.numel() * 4 for parameter in Last().parameters())
    assert found.allocated > 4 * weights  # weights, gradients and two moments
    assert any("recurrent" in note for note in found.notes)


def test_numbers_are_known_to_be_finite() -> None:
    assert predicted(lambda: Around(layers(), wary)).guesses == 0


def test_a_recipe_that_cannot_be_traced_says_why() -> None:
    def broken() -> nn.Module:
        raise ValueError("the width must be even")

    turned = Memory(activation_checkpointing="full", activation_offload=True, cpu_offload="optimizer")
    report = plan(own_recipe(turned, model=Made(make=broken)), gpu="a100-80gb")
    assert report.chosen is None
    assert "the width must be even" in report.explanations[0]
    assert "test_own_models.py" in report.explanations[0]


def test_an_error_inside_of_torch_names_the_line_that_called_it() -> None:
    with pytest.raises(ChildError) as caught:
        predicted(lambda: nn.Linear(3, BATCH))
    assert "site-packages" not in str(caught.value)


def test_an_error_of_the_model_names_its_place() -> None:
    with pytest.raises(ChildError, match=r"^KeyError: 'no such column' \(.*traced\.py:\d+\)$"):
        prediction_of(own_recipe(model=Own(fails=True)))


@pytest.mark.slow
def test_a_streamed_embedding_that_is_tied_has_no_gradient_on_the_device() -> None:
    """The most there is of it are what comes from the host in fp32, and what the step uses, in half precision."""
    words, width = 200_000, 64
    model = language_model("smollm2", config={"vocab_size": words, "hidden_size": width}, loss_chunk=1)
    data = InMemory(samples=language_samples(8))
    data.prepare()
    memory = Memory(micro_batch_size=4, precision="bf16-mixed", cpu_offload="parameters")
    recipe = Recipe(model=model, data=data, batch_size=8, memory=memory, run=Run(evaluate=False))
    prediction = prediction_of(recipe)
    lasting = prediction.phases["step"]["allocated"]  # staging memory, and a workspace that torch 2.11 keeps
    assert prediction.allocated - lasting < (4 + 2 + 0.5) * words * width
