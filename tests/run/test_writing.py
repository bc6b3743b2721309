"""``trainer predict`` of a language model: documents go on, conversations are answered, and files have what is new."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.language import language_model

from trainer import Recipe, RecipeError, predict
from trainer.checkpoint.export import load_model, save_model
from trainer.data import Conversations, Documents

TEXTS = ["def main(", "import os\n"]
NEW = 10


@pytest.fixture(scope="module", params=[Documents, Conversations])
def run(request, tmp_path_factory):
    """A run with an untrained model, its recipe, and what it writes greedily after the tokens of a text."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    model = language_model("llama", tokenizer="bytes", config={"vocab_size": 260, "eos_token_id": 256})
    data = request.param(train_files="absent")
    if request.param is Conversations:
        data = request.param(train_files="absent", chat_template="chatml")
    module = model.build().eval()
    for parameter in module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    save_model(model, module, folder / "model")
    return Recipe(model=model, data=data, batch_size=1), folder


def greedy(recipe, folder, text, answers):
    """What follows, token by token, without a cache."""
    model = recipe.model.saved_in(folder / "model")
    tokenizer, module = model.tokenizer_or_none(), load_model(recipe.model, folder / "model").eval()
    if answers:
        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    begin, ends = ids.shape[1], {tokenizer.eos_token_id}
    while ids.shape[1] < min(begin + NEW, 64) and ids[0, -1].item() not in ends:
        ids = torch.cat([ids, module(ids).logits[:, -1:].argmax(-1)], 1)
    return tokenizer.decode(ids[0, begin:], skip_special_tokens=True)


@torch.no_grad()
def test_texts_are_gone_on_from_or_answered_and_files_hold_what_is_new(run, tmp_path, capsys):
    recipe, folder = run
    answers = isinstance(recipe.data, Conversations)
    wanted = [greedy(recipe, folder, text, answers) for text in TEXTS]
    assert predict(recipe, folder, texts=TEXTS, max_new_tokens=NEW, device="cpu") == wanted
    said = capsys.readouterr().out
    assert said.startswith(wanted[0].split("\n")[0][:1] if answers else TEXTS[0])
    assert said.endswith("\n\n")
    table, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"say": text} for text in TEXTS] + [{"say": "a" * 300}]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RecipeError, match=r"1 of 3 inputs .*row 3: it has 3\d\d tokens, and the model takes 64"):
        predict(recipe, folder, paths=[str(table)], column="say", output=str(out), max_new_tokens=NEW, batch_size=2)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["generated_text"] for row in found] == [*wanted, None]
    assert [row["say"] for row in found][:2] == TEXTS
    assert list(found[0]) == ["say", "generated_text", "error"]


@pytest.mark.parametrize("run", [Conversations], indirect=True)
def test_messages_of_a_table_are_answered_without_the_answer_that_is_there(run, tmp_path):
    recipe, folder = run
    table = tmp_path / "in.jsonl"
    asked = {"role": "user", "content": TEXTS[0]}
    rows = [[asked], [asked, {"role": "assistant", "content": "yes"}]]
    table.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    first, second = predict(recipe, folder, paths=[str(table)], column="messages", max_new_tokens=NEW)
    assert first == second == predict(recipe, folder, texts=TEXTS[:1], max_new_tokens=NEW)[0]


@pytest.mark.parametrize("how", [{"top_k": 3}, {"probabilities": True}, {"top_p": 0.9}, {"images": ["a.png"]}], ids=str)
def test_what_only_classifiers_have_is_refused_by_name(run, how, golden):
    recipe, folder = run
    with golden.raises(RecipeError):
        predict(recipe, folder, **{} if "images" in how else {"texts": TEXTS}, **how)
