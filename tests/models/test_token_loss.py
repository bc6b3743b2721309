"""The loss in chunks is that of whole logits, for every chunk, head and transform, in far less memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.language import EXACT, FAMILIES, WORDS, language_model, language_samples
from helpers.live_bytes import LiveBytes
from helpers.problems import Problem, collate, engine_run, errors, initial_module, plain_run
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy

from trainer import RecipeError
from trainer.models import CausalLM, LoRA
from trainer.models.token_loss import Transform, chunked_loss, predicted_places, transform_of

TOKENS, WIDTH = 37, 12
CHUNKS = (1, 7, 36, 37, 500, None)
TRANSFORMS = {
    "plain": Transform(),
    "scaled": Transform(1 / 3),
    "capped": Transform(1.0, 2.5),
    "both": Transform(4, 3.0),
}


class Adapted(nn.Module):
    """What peft makes of a linear head: its own weight frozen, and a low-rank one beside it."""

    active_adapters = ("default",)

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling = head.requires_grad_(False), {"default": 2.0}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, WORDS, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})

    def forward(self, hidden: Tensor) -> Tensor:
        low = self.lora_A["default"](hidden)
        return self.base_layer(hidden) + 2.0 * self.lora_B["default"](low)


def head_of(kind: str) -> nn.Module:
    torch.manual_seed(1)
    head = nn.Linear(WIDTH, WORDS, bias=kind == "biased")
    if kind == "adapted":
        return Adapted(head)
    return head.requires_grad_(kind != "frozen")


def states(count: int = TOKENS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return (2 * torch.randn(count, WIDTH, dtype=dtype)).requires_grad_(), torch.randint(WORDS, (count,))


def whole_loss(hidden: Tensor, head: nn.Module, targets: Tensor, transform: Transform) -> Tensor:
    """As a textbook writes it."""
    logits = head(hidden) * transform.scale
    logits = logits if transform.cap is None else transform.cap * torch.tanh(logits / transform.cap)
    return cross_entropy(logits, targets, reduction="sum")


def gradients(loss: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *(p for p in head.parameters() if p.requires_grad)]))


@pytest.mark.parametrize("kind", ["plain", "biased", "frozen", "adapted"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_every_chunk_gives_the_gradient_of_whole_logits(kind: str, transform: Transform) -> None:
    head, (hidden, targets) = head_of(kind).double(), states()
    whole = whole_loss(hidden, head, targets, transform)
    expected = gradients(0.3 * whole, hidden, head)
    for chunk in CHUNKS:
        loss = chunked_loss(hidden, head, targets, transform, chunk)
        torch.testing.assert_close(loss, whole, rtol=1e-13, atol=0)
        for ours, theirs in zip(gradients(0.3 * loss, hidden, head), expected, strict=True):
            assert (ours - theirs).norm() <= 1e-13 * theirs.norm(), chunk


def test_logits_may_be_as_large_as_they_like() -> None:
    """The largest is taken off before exponentials: e^1000 is no number in fp64."""
    head, (hidden, targets) = head_of("plain").double(), states()
    hidden = (1e3 * hidden).detach().requires_grad_()
    whole, loss = (of(hidden, head, targets, Transform()) for of in (whole_loss, chunked_loss))
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(loss, hidden, head)[0], gradients(whole, hidden, head)[0])


def test_nothing_to_predict_is_a_loss_of_nothing() -> None:
    head, (hidden, targets) = head_of("biased").double(), states(0)
    loss = chunked_loss(hidden, head, targets, Transform(), 4)
    assert loss.item() == 0.0
    assert [gradient.abs().sum().item() for gradient in gradients(loss, hidden, head)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("family", EXACT)
@pytest.mark.parametrize("chunk", [1, 13, 1000])
def test_models_take_the_same_steps_in_chunks(family: str, chunk: int) -> None:
    """Of batches with tokens that are not to be predicted, a sample of one token, and one without a label."""
    problem = Problem(family, 19, 8, 3)
    model = language_model(family, loss_chunk=chunk)
    torch.set_default_dtype(torch.float64)
    try:
        module = initial_module(problem)
    finally:
        torch.set_default_dtype(torch.float32)
    module.loss_chunk = chunk
    ours = engine_run(problem, of=(model, module))
    assert max(errors(ours, plain_run(problem)).values()) < 1e-12


def test_places_are_those_before_a_label_and_are_known_on_the_host() -> None:
    labels = torch.tensor([[5, -100, 7, 8], [-100, -100, -100, -100], [1, 2, -100, -100]])
    assert predicted_places(labels).tolist() == [1, 2, 8]  # 5 and 1 are first: nothing comes before them
    model, batch = language_model("llama"), collate(language_samples(7))
    packed = model.packed(batch)
    assert model.weigh(batch)["loss"] == len(packed["places"]) == int((batch["labels"][:, 1:] != -100).sum())
    module = model.build().double()
    (loss,), (again,) = model.losses(module, packed), model.losses(module, batch)
    assert torch.equal(loss.total, again.total)
