"""Text datasets on real reviews: padding, caching, classes, and every refusal names its row."""

import csv
import json
from pathlib import Path

import pandas
import pytest
import torch

from trainer.data import IMDb, TextFiles, tokens
from trainer.errors import RecipeError

TWO_ROWS = [["text", "label"], ["good", "0"], ["bad", "1"]]


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return str(path)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def reviews(sample_data, tokenizer, cache):
    """The folder of 100 training and 100 test reviews."""
    data = IMDb(root=str(sample_data / "imdb_folder"), max_length=300, cache_dir=cache)
    data.prepare(tokenizer)
    return data


def test_a_folder_of_reviews_becomes_tokens_classes_and_file_names(reviews, tokenizer):
    assert [len(reviews.train), reviews.val, len(reviews.test)] == [100, None, 100]
    assert reviews.class_names == ["negative", "positive"]
    for index in (0, 99):
        path = reviews.train.describe(index)
        sample = reviews.train[index]
        assert ("/pos/" in path) == sample["labels"]
        text = Path(path).read_text(encoding="utf-8")
        assert sample["input_ids"] == tokenizer(text, truncation=True, max_length=300)["input_ids"]
        assert reviews.train.lengths[index] == len(sample["input_ids"])


def test_batches_are_padded_to_their_own_longest_sample_and_no_further(reviews):
    lengths = reviews.train.lengths
    order = sorted(range(100), key=lengths.__getitem__)
    short, long = reviews.train.__getitems__(order[:4]), reviews.train.__getitems__(order[-4:])
    assert set(short) == {"input_ids", "attention_mask", "labels"}
    assert short["input_ids"].shape == (4, -(-lengths[order[3]] // 8) * 8)
    assert long["input_ids"].shape == (4, 300)  # max_length, which is no multiple of 8
    assert short["attention_mask"].sum(1).tolist() == [lengths[i] for i in order[:4]]
    assert (short["input_ids"][short["attention_mask"] == 0] == 0).all()
    assert all(value.dtype == torch.int64 for value in short.values())
    collated = reviews.collate([reviews.train[i] for i in order[:4]])
    assert all(torch.equal(collated[key], short[key]) for key in short)


def test_the_second_run_tokenises_nothing(reviews, sample_data, tokenizer, monkeypatch):
    def refuse(*_):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(tokens, "encode", refuse)
    tokenizer("a call changes the tokenizer's own state", truncation=True, max_length=3)
    root, cache = str(sample_data / "imdb_folder"), reviews.cache_dir
    again = IMDb(root=root, max_length=300, cache_dir=cache)
    again.prepare(tokenizer)
    assert again.train.lengths == reviews.train.lengths
    with pytest.raises(AssertionError, match="tokenised again"):
        IMDb(root=root, max_length=299, cache_dir=cache).prepare(tokenizer)


def test_another_tokenizer_has_its_own_tokens(reviews, sample_data):
    from transformers import AutoTokenizer

    bigbird = AutoTokenizer.from_pretrained(sample_data / "tokenizers" / "bigbird-roberta-base")
    data = IMDb(root=str(sample_data / "imdb_folder"), max_length=300, cache_dir=reviews.cache_dir)
    data.prepare(bigbird)
    assert data.train[0]["input_ids"][0] == bigbird.cls_token_id != reviews.train[0]["input_ids"][0]


def test_a_changed_file_is_read_and_tokenised_anew(tmp_path, tokenizer):
    path = tmp_path / "train.csv"
    for word, expected in (("good", 3), ("good good", 4)):
        write_csv(path, [["text", "label"], [word, "0"], ["bad", "1"]])
        data = TextFiles(str(path), cache_dir=str(tmp_path / "cache"))
        data.prepare(tokenizer)
        assert data.train.lengths[0] == expected


def test_csv_reviews_from_a_url_with_a_part_held_out(sample_data, tmp_path, tokenizer, cache):
    for part, count in (("train", 40), ("test", 20)):
        rows = list(csv.reader((sample_data / "imdb" / f"{part}.csv").open(encoding="utf-8", newline="")))
        write_csv(tmp_path / f"{part}.csv", rows[: count + 1])
    data = IMDb(root=tmp_path.as_uri(), val_fraction=0.25, cache_dir=cache)
    data.prepare(tokenizer)
    assert [len(data.train), len(data.val), len(data.test)] == [30, 10, 20]
    assert sorted([*data.train.chosen, *data.val.chosen]) == list(range(40))
    table = pandas.read_csv(tmp_path / "train.csv")
    row = data.val.chosen[3]
    assert data.val[3]["labels"] == table["label"][row]
    assert data.val.lengths[3] == min(512, len(tokenizer(table["text"][row])["input_ids"]))
    assert data.val.describe(3).startswith(f"{tmp_path}/train.csv row {row + 2} (the header is row 1")


def test_string_labels_become_sorted_classes_in_every_format(tmp_path, tokenizer):
    rows = [{"body": "fine", "kind": "ham"}, {"body": "buy now", "kind": "spam"}, {"body": "null", "kind": "ham"}]
    table = pandas.DataFrame(rows)
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_parquet(tmp_path / "a.parquet")
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    for kind in ("csv", "parquet", "jsonl"):
        file = str(tmp_path / f"a.{kind}")
        data = TextFiles(file, test_file=file, text_column="body", label_column="kind", cache_dir=str(tmp_path / "c"))
        data.prepare(tokenizer)
        assert data.class_names == ["ham", "spam"]
        assert data.test.__getitems__([0, 1, 2])["labels"].tolist() == [0, 1, 0]
        assert data.val is None
        assert data.train[2]["input_ids"] == tokenizer("null")["input_ids"]  # a word, not a missing value


def test_integer_labels_are_ordered_by_value(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x", "label": label}) + "\n" for label in (10, 2, -1)))
    data = TextFiles(str(path), cache_dir=str(tmp_path / "c"))
    data.prepare(tokenizer)
    assert data.class_names == ["-1", "2", "10"]
    assert [data.train[i]["labels"] for i in range(3)] == [2, 1, 0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["  ", "1"], "row 4 .*has no text"),
        (["", "1"], "row 4 .*has no text"),
        (["fine", ""], "row 4 .*has no label"),
    ],
)
def test_a_row_without_text_or_label_is_named_as_a_spreadsheet_counts(tmp_path, tokenizer, row, message):
    two_lines = ["a review\nof two lines", "0"]
    path = write_csv(tmp_path / "train.csv", [["text", "label"], two_lines, ["bad", "1"], row, ["good", "0"]])
    with pytest.raises(RecipeError, match=f"{path} {message}"):
        TextFiles(path, cache_dir=str(tmp_path / "c")).prepare(tokenizer)


def test_an_unknown_label_in_the_test_file_is_named(tmp_path, tokenizer):
    train = write_csv(tmp_path / "train.csv", TWO_ROWS)
    test = write_csv(tmp_path / "test.csv", [*TWO_ROWS, ["so so", "2"]])
    with pytest.raises(RecipeError, match=rf"{test} row 4 .*: label '2' is not one of 0, 1"):
        TextFiles(train, test_file=test, cache_dir=str(tmp_path / "c")).prepare(tokenizer)


def test_a_missing_column_names_the_nearest(tmp_path, tokenizer):
    path = write_csv(tmp_path / "train.csv", [["texts", "label"], ["good", "0"], ["bad", "1"]])
    with pytest.raises(RecipeError, match=r"data\.text_column='text'.*has 'texts', 'label'; did you mean 'texts'"):
        TextFiles(path, cache_dir=str(tmp_path / "c")).prepare(tokenizer)


def test_files_that_are_missing_or_malformed_are_named(tmp_path, tokenizer):
    with pytest.raises(RecipeError, match=rf"data\.train_file=.*no file {tmp_path}/none\.csv"):
        TextFiles(str(tmp_path / "none.csv")).prepare(tokenizer)
    with pytest.raises(RecipeError, match=rf"data\.root=.*no folder {tmp_path}/none"):
        IMDb(root=str(tmp_path / "none")).prepare(tokenizer)
    with pytest.raises(RecipeError, match=r"neither train\.csv nor train/pos"):
        IMDb(root=str(tmp_path)).prepare(tokenizer)
    for name, content in (
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": '),
        ("a.csv", 'text,label\n"x,1\n'),
        ("b.csv", ""),
        ("a.parquet", "no parquet"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(RecipeError, match=f"{tmp_path}/{name} cannot be read as"):
            TextFiles(str(tmp_path / name), cache_dir=str(tmp_path / "c")).prepare(tokenizer)


def test_a_review_that_is_not_utf8_is_named(tmp_path, tokenizer):
    for part in ("train", "test"):
        for name in ("neg", "pos"):
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "0_1.txt").write_bytes("très bien".encode())
    (tmp_path / "test" / "pos" / "0_1.txt").write_bytes("très bien".encode("latin-1"))
    with pytest.raises(RecipeError, match=f"{tmp_path}/test/pos/0_1.txt is not UTF-8"):
        IMDb(root=str(tmp_path), cache_dir=str(tmp_path / "c")).prepare(tokenizer)


def test_a_hub_that_cannot_be_reached_names_the_other_ways(tokenizer, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(RecipeError, match=r"'stanfordnlp/imdb'.*Couldn't reach the hub.*train\.csv"):
        IMDb().prepare(tokenizer)


def test_a_tokenizer_is_needed_and_must_serve_max_length(tokenizer):
    with pytest.raises(RecipeError, match=r"model\.tokenizer"):
        IMDb().prepare(None)
    with pytest.raises(RecipeError, match=r"data\.max_length=4096 is more than the 512 tokens"):
        IMDb(max_length=4096).prepare(tokenizer)
    with pytest.raises(RecipeError, match="no room beside 2 special tokens"):
        IMDb(max_length=2).prepare(tokenizer)


def test_texts_are_encoded_for_prediction_as_for_training(reviews, tokenizer):
    text = Path(reviews.test.describe(5)).read_text(encoding="utf-8")
    batch = reviews.encode([text, "bad"], tokenizer)
    length = reviews.test.lengths[5]
    assert batch["input_ids"][0, :length].tolist() == reviews.test[5]["input_ids"]
    assert "labels" not in batch
    assert IMDb().encode(["bad"], tokenizer)["input_ids"].shape == (1, 8)
    with pytest.raises(RecipeError, match="text 2"):
        reviews.encode(["fine", " "], tokenizer)


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(RecipeError, match=r"data\.val_file='v\.csv' and data\.val_fraction=0\.1"):
        TextFiles("t.csv", val_file="v.csv", val_fraction=0.1)
    with pytest.raises(RecipeError, match=r"data\.text_column and data\.label_column"):
        TextFiles("t.csv", text_column="a", label_column="a")
