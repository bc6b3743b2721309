"""What a language model is saved as: all of its weights, once, and the token that ends what it writes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers.language import FAMILIES, WORDS, language_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from trainer.checkpoint.export import load_model, save_model

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


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_same_model_and_the_file_has_a_tied_head_once(tmp_path, tokenizer, family):
    torch.manual_seed(0)
    model = language_model(family, tokenizer=tokenizer)
    module = model.build().eval()
    torch.nn.init.normal_(module.get_output_embeddings().weight)
    save_model(model, module, tmp_path)
    ids = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = load_model(model, tmp_path).eval()(ids).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits
        assert torch.allclose(found, module(ids).logits, rtol=1e-4, atol=1e-5)
        assert torch.allclose(wanted, module(ids).logits, rtol=1e-6, atol=1e-6)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        heads = sorted(name for name in file.keys() if file.get_slice(name).get_shape()[0] == WORDS)  # noqa: SIM118
    assert len(heads) == (1 if module.config.tie_word_embeddings else 2)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == END
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == END
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == END


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
