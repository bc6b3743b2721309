"""Language models: the loss is that of transformers' logits, however a batch is cut, and nothing of it is averaged."""

from __future__ import annotations

import json
import math

import pytest
import torch
from helpers.language import EXACT, FAMILIES, language_model, language_samples, textbook_of_module
from helpers.problems import Problem, collate, engine_run, errors, plain_run
from helpers.rounding import ROUNDING
from helpers.tiny import InMemory
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from trainer import Memory, Optim, Recipe, Run, fit
from trainer.checkpoint.export import load_model, save_model
from trainer.errors import RecipeError, RunError
from trainer.models import CausalLM


def built(model, seed=0):
    torch.manual_seed(seed)
    module = model.build().double().train()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


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


@pytest.mark.parametrize("family", EXACT)
@pytest.mark.parametrize("cut", [{"micro_batch_size": 3}, {"micro_batch_size": 4, "micro_batch_tokens": 90}])
def test_steps_are_those_of_whole_batches(family, cut):
    problem = Problem(family, 19, 8, **cut)
    assert max(errors(engine_run(problem), plain_run(problem)).values()) < ROUNDING


@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_of_several_ranks_are_those_of_one(world_size, ranks):
    problem = Problem("gemma3", 19, 8, 2)
    ours = ranks(world_size).run(engine_run, problem, world_size)[0]
    assert max(errors(ours, plain_run(problem)).values()) < ROUNDING


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


@pytest.mark.parametrize("family", ["llama", "smollm2", "gpt2", "mixtral", "roberta"])
def test_a_saved_folder_holds_what_was_trained_and_a_tied_head_once(family, tmp_path, monkeypatch):
    """Read again after writing: one that would be loaded with other values is refused."""
    experts = CausalLM("mixtral", config={**FAMILIES["llama"][1], "num_local_experts": 3}, tokenizer="none")
    decoder = CausalLM("roberta", config={**ENCODER, "is_decoder": True}, tokenizer="none")  # whose bias is tied, too
    model = {"mixtral": experts, "roberta": decoder}.get(family) or language_model(family)
    module = built(model).float()
    (tmp_path / "good").mkdir()
    save_model(model, module, tmp_path / "good")
    with safe_open(tmp_path / "good" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (family in ("llama", "mixtral"))  # noqa: SIM118
    kind = json.loads((tmp_path / "good" / "config.json").read_text())["architectures"]
    assert kind == [type(module).__name__]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "good")
    assert type(loaded).__name__ == kind[0]
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    write = module.save_pretrained

    def damaged(folder, state_dict):
        last = list(state_dict)[-2]
        write(folder, state_dict=state_dict | {last: state_dict[last] * (1 + 2**-20)})

    monkeypatch.setattr(module, "save_pretrained", damaged)
    (tmp_path / "bad").mkdir()
    with pytest.raises(
        RunError, match=r"bad does not match the trained weights: \S+ would be loaded with different values"
    ):
        save_model(model, module, tmp_path / "bad")


@pytest.mark.usefixtures("no_pictures")
def test_a_mixture_of_experts_trains_in_float64(tmp_path):
    """The grouped matmul of experts, which is the default of transformers, has no kernel for float64."""
    model = CausalLM("mixtral", config={**FAMILIES["llama"][1], "num_local_experts": 3}, tokenizer="none")
    assert fit(recipe_of(model, tmp_path, evaluate=False)).status == "finished"
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert not [key for key in saved if "experts_implementation" in key]  # in other precisions the default is faster
