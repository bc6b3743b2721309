"""Encoders on the tokens that are there: what they compute is what transformers computes on padded micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.matrix import perturbed
from helpers.problems import Problem, engine_run, errors, make_model, plain_run, tokenizer_folder
from helpers.rounding import ROUNDING
from helpers.tiny import InMemory
from helpers.traced import held, traced
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from trainer import Memory, Optim, Recipe
from trainer.engine.cut import Cut, cut_batch, largest_micro_batch, tokens_of
from trainer.engine.memory_rehearsal import longest_window
from trainer.engine.window import Windows
from trainer.errors import RecipeError
from trainer.models import BigBird, TextClassifier, padding_free
from trainer.models.base import classification_loss
from trainer.models.padding_free import Lengths, _DroppedAttention, varlen_attention
from trainer.planner.predict import prepare_recipe
from trainer.weights.blocks import find_blocks

ENCODERS = ("distilbert", "bert", "roberta", "bigbird")
LENGTHS = [9, 5, 5, 1, 12]


def batch_of(padding: int, width: int = 12) -> dict[str, Tensor]:
    """Texts of ``LENGTHS`` tokens, one of them the padding token, to the right of which there is padding."""
    ids, mask = torch.full((len(LENGTHS), width), padding), torch.zeros(len(LENGTHS), width, dtype=torch.long)
    generator = torch.Generator().manual_seed(3)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = torch.randint(2, 20, (length,), generator=generator)
        mask[row, :length] = 1
    ids[0, 4] = padding
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 3, 4])}


def gradient(model: TextClassifier, module: torch.nn.Module, batch: Any) -> Tensor:
    module.zero_grad()
    (loss,) = model.losses(module, batch)
    loss.total.backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", [*ENCODERS, "xlm-roberta"])
def test_gradients_are_those_of_transformers_on_padded_texts(name: str) -> None:
    """Of a module that transformers has made, and that nothing of ours has touched."""
    known = make_model("bert" if name == "xlm-roberta" else name)
    model = dataclasses.replace(known, name={"bigbird": "big_bird"}.get(name, name), num_classes=5)
    torch.manual_seed(0)
    module = perturbed(model.build().double().train(), 0.3)
    theirs = AutoModelForSequenceClassification.from_config(module.config).double().train()
    theirs.load_state_dict(module.state_dict())
    batch = batch_of(module.config.pad_token_id)
    packed = model.packed(batch)
    assert packed["input_ids"].shape == (1, sum(LENGTHS))
    assert packed["lengths"].tokens == LENGTHS
    with torch.no_grad():
        evaluated = [next(model.losses(one.eval(), part)).logits for one, part in ((module, packed), (theirs, batch))]
        assert (evaluated[0] - evaluated[1]).norm() <= ROUNDING * evaluated[1].norm()
    module.train(), theirs.train()
    expected = gradient(model, theirs, batch)
    assert (gradient(model, module, packed) - expected).norm() <= ROUNDING * expected.norm()
    if name == "bigbird":  # whose attention is ours where it is padded, too
        theirs = dataclasses.replace(model, padding_free=False).build().double().train()
        theirs.load_state_dict(module.state_dict())
        expected = gradient(model, theirs, batch)
    assert torch.equal(gradient(model, module, batch), expected)  # one that is padded is computed as ever
    assert [type(block).__name__ for block in find_blocks(module)] == [type(b).__name__ for b in find_blocks(theirs)]


# Of distilbert and bigbird: tests/engine/test_equality.py.
@pytest.mark.first(2)
@pytest.mark.parametrize("name", ["bert", "roberta"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_are_those_of_whole_padded_batches(name: str, world_size: int, ranks: Any) -> None:
    problem = Problem(name, size=19, batch_size=8, micro_batch_size=8, micro_batch_tokens=70, clip_norm=0.5)
    runs = [engine_run(problem)] if world_size == 1 else ranks(world_size).run(engine_run, problem, world_size)
    for run in runs:
        found = errors(run, plain_run(problem))
        assert max(found["change"], found["losses"]) <= ROUNDING


@pytest.mark.parametrize("name", [*ENCODERS, "modernbert", "gpt2"])
def test_dropout_follows_from_the_seed_and_the_texts(name: str) -> None:
    """Not from how far they are padded, which decides what a padded micro-batch draws."""
    model = dataclasses.replace(make_model(name), dropout=0.4, **({} if name == "gpt2" else {"num_classes": 5}))
    torch.manual_seed(0)
    module = model.build().train()
    found = []
    for width, seed in ((12, 1), (40, 1), (12, 2)):
        batch = batch_of(module.config.pad_token_id or 0, width)
        if name == "gpt2":
            batch["labels"] = batch["input_ids"]
        torch.manual_seed(seed)
        found.append(gradient(model, module, model.packed(batch)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("rows", [64, 24])
def test_attention_drops_as_many_weights_as_it_is_told(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the identity as values, attention's output is its weights."""
    monkeypatch.setattr(padding_free, "QUERY_CHUNK", rows)
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 4, 64, 64, dtype=torch.float64)
    weights = ((query * 64**-0.5) @ key.transpose(-2, -1)).softmax(-1)
    values = torch.eye(64, dtype=torch.float64).expand(1, 4, 64, 64)
    drawn = torch.cat([_DroppedAttention.apply(query, key, values, 0.3) for _ in range(40)])
    kept = drawn != 0
    rate = round(0.3 * 2**16) / 2**16
    assert torch.allclose(drawn, torch.where(kept, weights / (1 - rate), 0.0), rtol=ROUNDING)
    expected = kept.numel() * (1 - rate)
    assert abs(kept.sum() - expected) < 4 * (expected * rate) ** 0.5  # standard deviations of a binomial distribution
    assert (kept.double().mean(0) - (1 - rate)).abs().max() < 0.4  # at every place
    neighbours = kept[..., 1:] == kept[..., :-1]  # drawn together, and independent
    assert neighbours.double().mean() == pytest.approx((1 - rate) ** 2 + rate**2, abs=3e-3)


@pytest.mark.parametrize("rows", [3, 2])
def test_gradients_of_dropped_attention_are_right(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding_free, "QUERY_CHUNK", rows)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(5)
        return _DroppedAttention.apply(query, key, value, 0.3)

    torch.manual_seed(0)
    query = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(attention, (query, key, value))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_texts_do_not_see_each_other(rate: float) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, sum(LENGTHS), 2, 4, dtype=torch.float64)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    for first in (False, True):
        asked = query[ends[:-1].long()] if first else query
        found = []
        for changed in (0.0, 1.0):
            torch.manual_seed(1)
            other = torch.cat([key[:14], key[14:] + changed])  # of all but the first two texts
            found.append(varlen_attention(asked, other, value, Lengths(LENGTHS), ends, rate))
        same = 2 if first else 14
        assert found[0].shape == (len(asked), 8)
        assert torch.equal(found[0][:same], found[1][:same])
        assert not torch.equal(found[0][same:], found[1][same:])


def test_micro_batches_hold_as_many_tokens_as_are_there() -> None:
    lengths = [37, 3, 9, 25, 40, 1, 16, 8, 31, 31]
    cut = Cut(len(lengths), 8, 1, micro_batch_tokens=64)
    pieces = cut_batch(range(len(lengths)), cut, 1, lengths, packs=True)
    assert sorted(index for piece in pieces for index in piece) == list(range(len(lengths)))
    assert all(tokens_of(piece, lengths, packs=True) <= 64 and len(piece) <= 8 for piece in pieces)
    assert len(pieces) == 4  # for 201 tokens
    assert len(pieces) < len(cut_batch(range(len(lengths)), cut, 1, lengths))


def test_what_cannot_be_packed_stays_padded_or_is_refused() -> None:
    model = make_model("distilbert")
    batch = batch_of(0)
    torn = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
    assert model.packed(torn) is torn
    plain = dataclasses.replace(model, padding_free=False)
    assert plain.packed(batch) is batch
    assert not plain.packs()
    decoder = TextClassifier("bert", tokenizer=tokenizer_folder(), config={"is_decoder": True}, num_classes=2)
    sparse = BigBird(tokenizer=tokenizer_folder(), attention="block_sparse")
    of_transformers = (TextClassifier(name, tokenizer=tokenizer_folder()) for name in ("gpt2", "big_bird"))
    modern, stretched = make_model("modernbert"), {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    odd = ({"classifier_pooling": "mean"}, {"rope_parameters": {"full_attention": stretched}})
    of_all_tokens, turned = (dataclasses.replace(modern, config=modern.config | one) for one in odd)
    for other in (decoder, sparse, of_all_tokens, turned, *of_transformers):
        assert not other.packs()
        with pytest.raises(RecipeError, match=r"model\.padding_free=true is for encoders \(distilbert, bert,.*null"):
            dataclasses.replace(other, padding_free=True).packs()


def test_a_batch_of_another_form_stays_padded() -> None:
    model, batch = make_model("bert"), batch_of(0)
    numbers = torch.arange(len(LENGTHS))
    square = batch["attention_mask"][:, None, None].bool()
    for other in ({**batch, "number": numbers}, {**batch, "names": [*"abcde"]}, {**batch, "attention_mask": square}):
        assert model.packed(other) is other
    own = {**batch, "position_ids": numbers.flip(0)[:, None].expand_as(batch["input_ids"])}
    positions = model.packed(own)["position_ids"][0].tolist()
    assert positions == [4] * 9 + [3] * 5 + [2] * 5 + [1] + [0] * 12  # those of the samples


@dataclasses.dataclass
class Mean(TextClassifier):
    """Classifies by the mean of all tokens."""

    def losses(self, module: Any, batch: Any) -> Any:
        mask = batch["attention_mask"][..., None]
        states = module.base_model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        yield classification_loss(module.classifier((states * mask).sum(1) / mask.sum(1)), batch["labels"])


def test_a_model_that_may_read_other_tokens_stays_padded() -> None:
    model = Mean(**{field.name: getattr(make_model("bert"), field.name) for field in dataclasses.fields(Mean)})
    assert not model.packs()
    batch = batch_of(0)
    (loss,) = model.losses(model.build(), model.packed(batch))
    assert loss.counted() == len(LENGTHS)
    assert dataclasses.replace(model, padding_free=True).packs()  # it has been said


def test_the_longest_micro_batch_is_that_of_the_most_tokens() -> None:
    lengths = [40, *[30] * 3, *[8] * 20]
    cut = Cut(len(lengths), len(lengths), 1, micro_batch_tokens=64)
    for packs, most in ((True, 62), (False, 64)):  # 290 tokens in five packs
        windows = Windows(len(lengths), lambda _: cut, iter, lambda _: {"loss": 1.0}, 0, lengths=lengths, packs=packs)
        assert [tokens_of(micro.indices, lengths, packs) for micro in longest_window(windows, 1).micro_batches] == [
            most,
            most,
        ]
    assert largest_micro_batch(cut_batch(range(24), Cut(24, 24, 1), 1, lengths), lengths) == [*range(24)]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_prediction_is_of_the_tokens_that_are_there(rate: float) -> None:
    """Kept for the backward by 8 texts of 64, 8, ... 8 tokens, on a GPU that is not here."""
    lengths, recipes = [64, *[8] * 7], {}
    samples = [{"input_ids": torch.full((length,), 5), "labels": torch.tensor(0)} for length in lengths]
    config = {"n_layers": 2, "dim": 64, "hidden_dim": 256, "n_heads": 2, "max_position_embeddings": 64}
    for free in (False, True):
        options = {"num_classes": 2, "dropout": rate, "padding_free": free}
        model = TextClassifier(config=config, tokenizer=tokenizer_folder(), **options)
        memory = Memory(precision="bf16-mixed", micro_batch_size=8)
        recipe = Recipe(model=model, data=InMemory(samples=samples), optim=Optim("sgd"), batch_size=8, memory=memory)
        recipes[str(free)] = prepare_recipe(recipe), 1
    traces = traced(recipes)
    padded, packed = (max(held(traces[key], "activations")) for key in ("False", "True"))
    assert packed < 0.35 * padded  # 120 tokens instead of 512, of the last block fewer
    assert not any(trace.guesses for trace in traces.values())
