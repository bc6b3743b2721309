"""Models of one's own that do what people's models do, and what is said of those that cannot be predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from helpers.tiny import prediction_of
from torch import Tensor, nn
from traced import BATCH, CLASSES, WIDTH, Own, own_recipe

from trainer.planner.predict import Prediction
from trainer.planner.search import plan


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))


class Around(nn.Module):
    """Calls another module, and a function on its result, both maybe compiled."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.inner = torch.compile(layers()) if compiled else layers()
        self.after = torch.compile(dynamic=False)(torch.tanh) if compiled else torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(x.mean(1)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class Wary(nn.Module):
    """Refuses numbers that are not finite, and writes one down."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x.mean(1))
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


def predicted(make: Callable[[], nn.Module]) -> Prediction:
    return prediction_of(own_recipe(model=Made(make=make)))


def test_what_a_model_compiles_itself_is_traced_as_it_is() -> None:
    compiled, plain = predicted(lambda: Around(True)), predicted(lambda: Around(False))
    assert (compiled.allocated, compiled.reserved) == (plain.allocated, plain.reserved)


def test_a_recurrent_model_is_predicted_and_its_note_says_how() -> None:
    found = predicted(Recurrent)
    weights = sum(parameter.numel() * 4 for parameter in Recurrent().parameters())
    assert found.allocated > 4 * weights  # weights, gradients and two moments
    assert any("recurrent" in note for note in found.notes)


def test_numbers_are_known_to_be_finite() -> None:
    assert predicted(Wary).guesses == 0


def test_a_recipe_that_cannot_be_traced_says_why() -> None:
    def broken() -> nn.Module:
        raise ValueError("the width must be even")

    report = plan(own_recipe(model=Made(make=broken)), gpu="a100-80gb", quick=True)
    assert report.chosen is None
    assert "the width must be even" in report.explanations[0]
    assert "test_own_models.py" in report.explanations[0]


def test_an_error_inside_of_torch_names_the_line_that_called_it() -> None:
    report = plan(own_recipe(model=Made(make=lambda: nn.Linear(3, BATCH))), gpu="a100-80gb", quick=True)
    assert "site-packages" not in report.explanations[0]
