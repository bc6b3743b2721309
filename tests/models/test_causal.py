"""Language models: the loss is that of transformers' logits, however a batch is cut, and nothing of it is averaged."""

from __future__ import annotations

import json
import math

import pytest
import torch
from helpers.language import FAMILIES, language_model, language_samples, textbook_of_module
from helpers.matrix import perturbed
from helpers.problems import collate
from helpers.rounding import ROUNDING
from helpers.tiny import InMemory
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from trainer import Memory, Optim, Recipe, Run, fit
from trainer.checkpoint.export import load_model
from trainer.errors import RecipeError
from trainer.models import CausalLM


def built(model):
    torch.manual_seed(0)
    return perturbed(model.build().double().train(), 0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_a_plain_loop_over_transformers_logits(family):
    name, config = FAMILIES[family]
    model, batch = CausalLM(name, config=config, tokenizer="none", dropout=0.0), collate(language_samples(7))
    module = built(model)
    theirs = AutoModelForCausalLM.from_config(module.config).double().train()
    theirs.load_state_dict(module.state_dict())
    assert type(theirs) is not type(module)
    assert type(theirs).__name__ == type(module).__name__
    (loss,) = model.losses(module, batch)
    loss.total.backward()
    weight = model.weigh(batch)["loss"]
    mean = textbook_of_module(theirs, batch)
    (weight * mean).backward()
    assert weight == sum(int((sample["labels"][1:] != -100).sum()) for sample in language_samples(7))
    torch.testing.assert_close(loss.total, weight * mean, rtol=ROUNDING, atol=0)
    for (name, ours), expected in zip(module.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=ROUNDING, atol=ROUNDING, msg=name)


def recipe_of(model, tmp_path, samples=None, memory=None, **settings):
    """Two epochs of little, evaluated on the first samples."""
    return Recipe(
        model=model,
        data=InMemory(samples=samples or language_samples(17)),
        optim=Optim("adamw", lr=1e-2),
        batch_size=6,
        epochs=2,
        memory=memory or Memory(precision="64-true", micro_batch_size=2),
        run=Run(dir=str(tmp_path / "run"), predict=False, **settings),
    )


def test_an_evaluation_says_the_perplexity_of_all_tokens_once(tmp_path):
    """Not the mean over micro-batches, which hold between 1 and 39 tokens that are predicted."""
    model = language_model("qwen3")
    summary = fit(recipe_of(model, tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float64)
    total, tokens = 0.0, 0
    for sample in language_samples(17)[:7]:
        logits = loaded(sample["input_ids"][None]).logits
        total += cross_entropy(logits[0, :-1], sample["labels"][1:], reduction="sum").item()
        tokens += int((sample["labels"][1:] != -100).sum())
    assert summary.metrics["val"]["loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert summary.metrics["val"]["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-6)
    assert "perplexity" in (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]
    module = load_model(model, tmp_path / "run" / "model")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.float(), module.get_parameter(name)), name


ENCODER = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("roberta", ENCODER, "is_decoder=False"),
        ("xlm", {"n_layers": 1, "emb_dim": 16, "n_heads": 2}, "causal=False"),
        ("gemma", FAMILIES["gemma"][1] | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ],
)
def test_models_that_see_what_they_are_to_predict_are_refused(name, config, why):
    with pytest.raises(RecipeError, match=rf"model.name='{name}' sees the tokens .* predict \({why}\): use a decoder"):
        CausalLM(name, config=config, tokenizer="none").build()


@pytest.mark.usefixtures("no_pictures")
def test_a_mixture_of_experts_trains_in_float64(tmp_path):
    """The grouped matmul of experts, which is the default of transformers, has no kernel for float64."""
    model = CausalLM("mixtral", config={**FAMILIES["llama"][1], "num_local_experts": 3}, tokenizer="none")
    assert fit(recipe_of(model, tmp_path, evaluate=False)).status == "finished"
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert not [key for key in saved if "experts_implementation" in key]  # in other precisions the default is faster
