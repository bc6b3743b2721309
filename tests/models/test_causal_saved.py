"""What a language model is saved as: all of its weights, once, and the token that ends what it writes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers.language import FAMILIES, WORDS, language_model
from helpers.matrix import perturbed
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from trainer.checkpoint.export import load_model, save_model
from trainer.errors import RunError
from trainer.models import CausalLM

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
