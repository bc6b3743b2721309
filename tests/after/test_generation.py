"""What language models write: transformers' own greedy text, and draws that do not depend on how texts are batched."""

from __future__ import annotations

import pytest
import torch
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from trainer import RecipeError
from trainer.after.generate import generate_texts, require_free_positions
from trainer.weights.blocks import disable_kv_cache

TEXTS = ["def main(", "x", "import torch\nimport os"]
POSITIONS, NEW = 64, 12
SIZES = {
    "llama": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
}


@pytest.fixture(scope="module")
def tokenizer():
    return ByT5Tokenizer()


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def module(request):
    torch.manual_seed(0)
    common = {"vocab_size": 131, "bos_token_id": None, "eos_token_id": 1, "max_position_embeddings": POSITIONS}
    kinds = {"llama": (LlamaForCausalLM, LlamaConfig), "gpt2": (GPT2LMHeadModel, GPT2Config)}
    model, config = kinds[request.param]
    made = model(config(**common, **SIZES[request.param])).double().eval()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    made.generation_config.repetition_penalty = 5.0  # as published models have beside their weights
    disable_kv_cache(made)
    return made


def batch_of(tokenizer, texts):
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    length = max(map(len, ids)) + 3  # as a collate that pads to a multiple does
    return {
        "input_ids": torch.tensor([one + [0] * (length - len(one)) for one in ids]),
        "attention_mask": torch.tensor([[1] * len(one) + [0] * (length - len(one)) for one in ids]),
    }


def test_the_likeliest_tokens_are_written_whatever_the_batch_and_no_cache_is_left_on(module, tokenizer):
    wanted = []
    for text in TEXTS:
        ids = batch_of(tokenizer, [text])["input_ids"][:, :-3]
        begin = ids.shape[1]
        while ids.shape[1] < begin + NEW and ids[0, -1] != tokenizer.eos_token_id:
            ids = torch.cat([ids, module(ids).logits[:, -1:].argmax(-1)], 1)
        wanted.append(tokenizer.decode(ids[0, begin:], skip_special_tokens=True))
    assert len(set(wanted)) == len(TEXTS)
    assert generate_texts(module, tokenizer, batch_of(tokenizer, TEXTS), [0, 1, 2], NEW) == wanted
    assert module.config.use_cache is False


def test_a_draw_depends_on_the_place_and_the_seed_and_not_on_the_batch(module, tokenizer):
    drawn = 0.9, 0.95, 3  # temperature, top_p, seed
    together = generate_texts(module, tokenizer, batch_of(tokenizer, TEXTS), [0, 1, 2], NEW, *drawn)
    alone = [
        generate_texts(module, tokenizer, batch_of(tokenizer, [text]), [at], NEW, *drawn)[0]
        for at, text in enumerate(TEXTS)
    ]
    assert alone == together
    same = batch_of(tokenizer, TEXTS[:1] * 2)
    first, second = generate_texts(module, tokenizer, same, [0, 1], NEW, *drawn)
    assert first == together[0] != second
    assert generate_texts(module, tokenizer, same, [0, 1], NEW, *drawn[:2], 4) != [first, second]


def test_draws_have_the_models_probabilities(module, tokenizer):
    batch, temperature, count = batch_of(tokenizer, ["x"]), 2.0, 800
    with torch.no_grad():
        wanted = (module(batch["input_ids"][:, :1]).logits[0, -1] / temperature).softmax(-1)
    many = {name: tensor.expand(count, -1) for name, tensor in batch.items()}
    found = generate_texts(module, tokenizer, many, range(count), 1, temperature)
    best = int(wanted[3:].argmax()) + 3
    share, expected = found.count(tokenizer.decode([best])) / count, float(wanted[best])
    assert 0.02 < expected < 0.98
    assert abs(share - expected) < 5 * (expected * (1 - expected) / count) ** 0.5


def test_no_more_is_written_than_there_are_positions(module, tokenizer):
    batch = batch_of(tokenizer, ["a" * (POSITIONS - 2)])
    ids = batch["input_ids"][:, :-3]
    with torch.no_grad():
        for _ in range(2):
            ids = torch.cat([ids, module(ids).logits[:, -1:].argmax(-1)], 1)
    assert generate_texts(module, tokenizer, batch, [0], 50) == [
        tokenizer.decode(ids[0, -2:], skip_special_tokens=True)
    ]
    require_free_positions(batch, module)
    with pytest.raises(RecipeError, match=r"^it has 64 tokens, and the model takes 64: shorten it"):
        require_free_positions(batch_of(tokenizer, ["a" * POSITIONS]), module)


def test_a_long_text_takes_no_room_from_those_that_are_asked_about_with_it(module, tokenizer):
    texts = ["x", "a" * (POSITIONS - 2), "def main("]
    alone = [generate_texts(module, tokenizer, batch_of(tokenizer, [text]), [0], 20)[0] for text in texts]
    assert generate_texts(module, tokenizer, batch_of(tokenizer, texts), [0, 1, 2], 20) == alone


@pytest.mark.parametrize("ends", [[1, "a"], "a", 1.5, {"a": 1}, [None], True])
def test_ends_of_text_that_are_no_integers_are_refused(module, tokenizer, monkeypatch, ends):
    monkeypatch.setattr(module.generation_config, "eos_token_id", ends)
    with pytest.raises(RecipeError, match=r"eos_token_id=.* must be one or more integers: correct generation_config"):
        generate_texts(module, tokenizer, batch_of(tokenizer, TEXTS), [0, 1, 2], NEW)
