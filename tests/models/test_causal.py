"""Language models: the loss is that of transformers' logits, however a batch is cut, and nothing of it is averaged."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.language import FAMILIES, WORDS, language_model, language_samples, textbook_of_module
from helpers.matrix import perturbed
from helpers.problems import collate
from helpers.rounding import ROUNDING
from helpers.tiny import InMemory
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from trainer import Memory, Optim, Recipe, Run, fit
from trainer.checkpoint.export import load_model, save_model
from trainer.errors import RecipeError, RunError
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


# Saved models: all weights once, and the token that ends what a model writes

END, OTHER_END = 5, 7


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of ``WORDS`` words whose texts end with ``END``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    made = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=f"w{END}", unk_token="w0").save_pretrained(folder)
    return str(folder)


EXPERTS = CausalLM("mixtral", config={**FAMILIES["llama"][1], "num_local_experts": 3}, tokenizer="none")
DECODER = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
DECODER |= {"is_decoder": True, "vocab_size": WORDS}
OTHERS = {
    "mixtral": EXPERTS,
    "roberta": CausalLM("roberta", config=DECODER, tokenizer="none"),
}  # whose bias is tied, too


@pytest.mark.first(1)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_transformers_loads_the_trained_model_and_a_tied_head_is_saved_once(tmp_path, tokenizer, family, monkeypatch):
    """Read again after writing: one that would be loaded with other values is refused."""
    torch.manual_seed(0)
    model = OTHERS.get(family) or language_model(family, tokenizer=tokenizer)
    module = perturbed(model.build().eval(), 0.1)
    good, bad = tmp_path / "good", tmp_path / "bad"
    save_model(model, module, good)
    loaded = AutoModelForCausalLM.from_pretrained(good)
    assert json.loads((good / "config.json").read_text())["architectures"] == [type(loaded).__name__]
    assert type(loaded).__name__ == type(module).__name__
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    ids = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = module(ids).logits
        assert torch.allclose(loaded.eval()(ids).logits, wanted, rtol=1e-4, atol=1e-5)
        assert torch.allclose(load_model(model, good).eval()(ids).logits, wanted, rtol=1e-6, atol=1e-6)
    with safe_open(good / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    heads = [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == WORDS]
    assert len(heads) == (1 if module.config.tie_word_embeddings else 2)
    if family in FAMILIES:
        assert AutoTokenizer.from_pretrained(good).eos_token_id == END
        assert GenerationConfig.from_pretrained(good).eos_token_id == END
        assert json.loads((good / "config.json").read_text())["eos_token_id"] == END
    write = module.save_pretrained

    def damaged(folder, state_dict):
        last = list(state_dict)[-2]
        write(folder, state_dict=state_dict | {last: state_dict[last] * (1 + 2**-20)})

    monkeypatch.setattr(module, "save_pretrained", damaged)
    said = r"bad does not match the trained weights: \S+ would be loaded with different values"
    with pytest.raises(RunError, match=said):
        save_model(model, module, bad)


def test_master_weights_are_loaded_in_the_type_that_they_were_saved_in(tmp_path, tokenizer):
    model = language_model("llama", tokenizer=tokenizer)
    module = model.build()
    masters = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    save_model(model, module.to(torch.bfloat16), tmp_path, masters)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in masters.items())


@pytest.mark.parametrize("streamed", [False, True])
def test_what_the_weights_came_with_is_kept_and_a_temperature_alone_is_mended(tmp_path, tokenizer, streamed):
    source, target = tmp_path / "source", tmp_path / "target"
    model = language_model("llama")
    save_model(model, model.build(), source)
    published = {"temperature": 0.6, "repetition_penalty": 1.1, "eos_token_id": [OTHER_END, END]}
    (source / "generation_config.json").write_text(json.dumps(published))
    model = replace(model, name=str(source), weights=str(source), config={}, tokenizer=tokenizer)
    save_model(model, model.skeleton() if streamed else model.build(), target)
    found = json.loads((target / "generation_config.json").read_text())
    assert found["eos_token_id"] == [END, OTHER_END]
    assert (found["temperature"], found["repetition_penalty"], found["do_sample"]) == (0.6, 1.1, True)
