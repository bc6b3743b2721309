"""Labels of the tasks in files of texts: how they are read, and which row is named when one cannot be."""

import json

import pytest
import torch
from helpers.problems import tokenizer_folder
from transformers import AutoTokenizer

from trainer.contract import Model
from trainer.data import TextFiles
from trainer.data.fingerprint import fingerprint
from trainer.errors import RecipeError
from trainer.values import IGNORED_LABEL


def model_of(task):
    model = Model()
    model.task = task
    return model


def prepared(tmp_path, task, rows, name="a.jsonl", **settings):
    """The dataset of a file with ``rows`` of text and label."""
    lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    if name.endswith(".csv"):
        lines = ["text,label", *(f"{text},{label}" for text, label in rows)]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    file = str(tmp_path / name)
    data = TextFiles(file, test_file=file, max_length=8, cache_dir=str(tmp_path / "cache"), **settings)
    data.prepare(AutoTokenizer.from_pretrained(tokenizer_folder()), model_of(task))
    return data


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_several_labels_become_zeros_and_ones(name, tmp_path):
    rows = [("w2 w3", "b|a"), ("w4", ""), ("w5 w6 w7", "c")]
    data = prepared(tmp_path, "multi_label", rows, name)
    assert data.class_names == ["a", "b", "c"]
    batch = data.collate([data.train[0], data.train[1], data.train[2]])
    assert batch["labels"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert batch["labels"].dtype == torch.float32
    assert torch.equal(data.train.__getitems__([0, 1, 2])["labels"], batch["labels"])
    lists = [(text, [one for one in label.split("|") if one]) for text, label in rows]
    assert list(prepared(tmp_path, "multi_label", lists, "b.jsonl").train.labels) == list(data.train.labels)
    assert fingerprint(prepared(tmp_path, "multi_label", lists, "b.jsonl")) == fingerprint(data)
    assert fingerprint(prepared(tmp_path, "multi_label", [*lists[:2], ("w5 w6 w7", ["a"])])) != fingerprint(data)


def test_numbers_stay_numbers(tmp_path):
    data = prepared(tmp_path, "regression", [("w2", "0.1"), ("w3", "-100")], "a.csv")
    assert (data.class_names, data.num_classes) == (["label"], 1)
    assert data.train.labels == [(0.1,), (-100.0,)]
    several = prepared(tmp_path, "regression", [("w2", [1, 2.5]), ("w3", [0, 1])])
    assert several.class_names == ["label_1", "label_2"]
    assert several.collate([several.train[0]])["labels"].tolist() == [[1.0, 2.5]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_first_token_of_a_word_has_its_tag(side, tmp_path):
    rows = [(["w2", "w3-w4", "w5"], ["X", "Y", "X"]), ("w6 w7 " * 5, "Y X " * 5)]
    data = prepared(tmp_path, "token", rows)
    assert data.class_names == ["X", "Y"]
    assert data.train.labels[0] == [0, 1, IGNORED_LABEL, IGNORED_LABEL, 0]  # w3, - and w4 are one word
    data._pad.tokenizer.padding_side = side
    batch = data.collate([data.train[0], data.train[1]])
    assert batch["labels"].shape == batch["input_ids"].shape == (2, 8)
    assert batch["labels"][1].tolist() == [1, 0] * 4  # cut off
    assert torch.equal(batch["labels"] != IGNORED_LABEL, batch["labels"] >= 0)
    assert (batch["labels"][0] >= 0).logical_and(batch["attention_mask"][0] == 0).sum() == 0
    encoded = data.encode(["w2 w9 w10"], data._pad.tokenizer)
    assert encoded["words"][0][encoded["attention_mask"][0] == 1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("task", "text", "label", "said"),
    [
        ("regression", "w2", "good", r"a.jsonl row 2 .*label 'good' is not a number, .*single_label if it is a class"),
        ("regression", "w2", [], r"row 2 .*label \[\] is not a number"),
        ("regression", "w2", True, r"row 2 .*label True is not a number"),
        ("regression", "w2", "nan", r"row 2 .*label 'nan' is not a number"),
        ("regression", "w2", [1.0, 2.0], "1 numbers in one row and 2 in another: write the same number in all rows"),
        ("multi_label", "w2", 1.5, r"row 2 .*label 1.5 is not a list of labels for model.task=multi_label: write a"),
        ("token", "w2 w3", "X", r"row 2 .*has 2 words in 'text' and 1 tags in 'label': give one tag per word"),
        ("token", ["w2", ""], ["X", "Y"], r"row 2 .*text \['w2', ''\] is not a list of words"),
    ],
)
def test_a_label_that_the_task_cannot_have_is_named_by_its_row(task, text, label, said, tmp_path):
    good = {"regression": "1.5", "multi_label": "a", "token": "X"}[task]
    with pytest.raises(RecipeError, match=said):
        prepared(tmp_path, task, [("w2", good), (text, label)])


@pytest.mark.first(1)
@pytest.mark.parametrize("task", ["multi_label", "token"])
def test_a_label_that_training_has_not_is_named_by_its_row(task, tmp_path):
    data = prepared(tmp_path, task, [("w2", "a"), ("w3", "b")])
    (tmp_path / "b.jsonl").write_text('{"text": "w4", "label": "a"}\n{"text": "w5", "label": "z"}\n')
    data.test_file = str(tmp_path / "b.jsonl")
    said = r"b.jsonl row 2 .*: label 'z' is not one of a, b, the labels of the training"
    with pytest.raises(RecipeError, match=said):
        data.prepare(data._pad.tokenizer)
    (tmp_path / "b.jsonl").write_text('{"text": "w4", "label": [1, 2]}\n')
    data.train_file = str(tmp_path / "n.jsonl")
    data.use_model(model_of("regression"))
    (tmp_path / "n.jsonl").write_text('{"text": "w4", "label": 1}\n')
    with pytest.raises(RecipeError, match=r"b.jsonl row 1 .*: label 2 numbers, but 1 in the training data"):
        data.prepare(data._pad.tokenizer)
