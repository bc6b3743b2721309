"""Text datasets: padding, caching, classes, formats of tables, and every refusal names its row."""

import csv
import json
from pathlib import Path

import pandas
import pytest
import torch
from helpers.prepared import prepared, refused

from trainer.data import IMDb, TextFiles
from trainer.errors import RecipeError
from trainer.models import TextClassifier

TWO_ROWS = [["text", "label"], ["good", "0"], ["bad", "1"]]


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def files(train, **settings):
    return TextFiles(str(train), cache_dir=str(Path(train).parent / "cache"), **settings)


@pytest.fixture(scope="module")
def reviews(sample_data, tokenizer, tmp_path_factory):
    """The folder of 100 training and 100 test reviews."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return prepared(IMDb(str(sample_data / "imdb_folder"), max_length=300, cache_dir=cache), tokenizer)


def test_a_folder_of_reviews_becomes_tokens_classes_and_file_names(reviews, tokenizer):
    assert [len(reviews.train), reviews.val, len(reviews.test)] == [100, None, 100]
    assert reviews.class_names == ["negative", "positive"]
    for index in (0, 99):
        path, sample = reviews.train.describe(index), reviews.train[index]
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


def test_another_tokenizer_or_length_has_its_own_tokens(sample_data, tmp_path, tokenizer):
    from transformers import AutoTokenizer

    path = write_csv(tmp_path / "train.csv", TWO_ROWS)
    bigbird = AutoTokenizer.from_pretrained(sample_data / "tokenizers" / "bigbird-roberta-base")
    first, other = prepared(files(path), tokenizer), prepared(files(path), bigbird)
    assert other.train[0]["input_ids"][0] == bigbird.cls_token_id != first.train[0]["input_ids"][0]
    write_csv(tmp_path / "train.csv", [["text", "label"], ["good good", "0"], ["bad", "1"]])  # read and tokenised anew
    lengths = [prepared(files(path, max_length=most), tokenizer).train.lengths[0] for most in (512, 3)]
    assert [first.train.lengths[0], *lengths] == [3, 4, 3]


def test_csv_reviews_from_a_url_with_a_part_held_out(sample_data, tmp_path, tokenizer):
    for part, count in (("train", 40), ("test", 20)):
        rows = list(csv.reader((sample_data / "imdb" / f"{part}.csv").open(encoding="utf-8", newline="")))
        write_csv(tmp_path / f"{part}.csv", rows[: count + 1])
    data = prepared(IMDb(tmp_path.as_uri(), val_fraction=0.25, cache_dir=str(tmp_path / "cache")), tokenizer)
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
    for kind, row in (("csv", 3), ("parquet", 2), ("jsonl", 2)):
        file = tmp_path / f"a.{kind}"
        data = prepared(files(file, test_file=str(file), text_column="body", label_column="kind"), tokenizer)
        assert (data.class_names, data.val) == (["ham", "spam"], None)
        assert data.test.__getitems__([0, 1, 2])["labels"].tolist() == [0, 1, 0]
        assert data.train[2]["input_ids"] == tokenizer("null")["input_ids"]  # a word, not a missing value
        assert data.train.describe(1).startswith(f"{file} row {row} (the ")


@pytest.mark.parametrize("row", [["  ", "1"], ["", "1"], ["fine", ""]])
def test_rows_without_text_or_label_are_named_as_a_spreadsheet_counts_or_left_out(tmp_path, tokenizer, row, capsys):
    rows = [["a review\nof two lines", "0"], ["bad", "1"], row, *[["good", "0"], ["bad", "1"]] * 4]
    path = write_csv(tmp_path / "train.csv", [["text", "label"], *rows])
    refused(
        rf"1 of 11 rows have no text or no label: {path} row 4 \(.*: add them, or .*--data.missing drop",
        files(path),
        tokenizer,
    )
    all_bad = write_csv(tmp_path / "bad.csv", [["text", "label"], row, row])
    refused(r"2 of 2 rows have no text or no label: .*: add them$", files(all_bad, missing="drop"), tokenizer)
    dropped = files(path, missing="drop", val_fraction=0.2)
    dropped.prepare(tokenizer)
    assert "leaving out rows: 1 of 11 rows have no text" in capsys.readouterr().out
    without = files(write_csv(tmp_path / "without.csv", [["text", "label"], *rows[:2], *rows[3:]]), val_fraction=0.2)
    without.prepare(tokenizer)
    for part in ("train", "val"):
        left, whole = getattr(dropped, part), getattr(without, part)
        assert left.labels == whole.labels
        assert [left[n]["input_ids"] for n in range(len(left))] == [whole[n]["input_ids"] for n in range(len(whole))]
    places = [dropped.train.describe(n).split(" row ")[1].split()[0] for n in range(len(dropped.train))]
    assert "4" not in places  # and the rows after it keep their numbers


def test_hundreds_of_gaps_are_counted_and_five_are_named(tmp_path, tokenizer):
    path = write_csv(tmp_path / "train.csv", [["text", "label"], *[["", "0"]] * 300, ["good", "0"], ["bad", "1"]])
    refused(rf"300 of 302 rows .*row 2 \(.*, {path} row 6 and 295 more: add", files(path), tokenizer)


def test_a_column_of_ids_is_no_label(tmp_path, tokenizer):
    path = write_csv(tmp_path / "train.csv", [["text", "label"], *[["good", str(n)] for n in range(30)]])
    refused("data.label_column='label' has another value in each of 30 rows, like an id", files(path), tokenizer)


@pytest.mark.parametrize(
    ("task", "labels"), [("regression", ["1.5", ""]), ("multi_label", [None, "a|b"]), ("token", ["A B", None])]
)
def test_rows_without_labels_are_left_out_for_every_task(task, labels, tmp_path, tokenizer):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": "two words", "label": label}) + "\n" for label in [*labels, *labels]))
    data = files(path, missing="drop")
    data.prepare(tokenizer, TextClassifier(task=task))
    assert [data.train.describe(n).split(" row ")[1].split()[0] for n in range(2)] == (
        ["1", "3"] if labels[1] in (None, "") else ["2", "4"]
    )
    assert len(data.train.labels) == 2


def test_a_missing_column_and_an_unknown_label_in_the_test_file_are_named(tmp_path, tokenizer):
    train = write_csv(tmp_path / "train.csv", TWO_ROWS)
    test = write_csv(tmp_path / "test.csv", [*TWO_ROWS, ["so so", "2"]])
    refused(rf"{test} row 4 .*: label '2' is not one of 0, 1", files(train, test_file=test), tokenizer)
    odd = write_csv(tmp_path / "odd.csv", [["texts", "label"], ["good", "0"]])
    refused(r"data\.text_column='text'.*has 'texts', 'label'; did you mean 'texts'", files(odd), tokenizer)


def test_files_that_are_missing_or_malformed_are_named(tmp_path, tokenizer):
    refused(rf"data\.train_file=.*no file {tmp_path}/none\.csv", files(tmp_path / "none.csv"), tokenizer)
    refused(rf"data\.root=.*no folder {tmp_path}/none", IMDb(str(tmp_path / "none")), tokenizer)
    refused(r"neither train\.csv nor train/pos", IMDb(str(tmp_path)), tokenizer)
    for name, content in (
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": '),
        ("a.csv", 'text,label\n"x,1\n'),
        ("a.parquet", "no parquet"),
    ):
        (tmp_path / name).write_text(content)
        refused(f"{tmp_path}/{name} cannot be read as", files(tmp_path / name), tokenizer)
    (tmp_path / "b.csv").touch()
    refused(f"{tmp_path}/b.csv has no rows", files(tmp_path / "b.csv"), tokenizer)


def test_a_review_that_is_not_utf8_is_named(tmp_path, tokenizer):
    for part in ("train", "test"):
        for name in ("neg", "pos"):
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "0_1.txt").write_bytes("très bien".encode())
    (tmp_path / "test" / "pos" / "0_1.txt").write_bytes("très bien".encode("latin-1"))
    data = IMDb(str(tmp_path), cache_dir=str(tmp_path / "c"))
    refused(f"{tmp_path}/test/pos/0_1.txt is not UTF-8", data, tokenizer)


def test_a_hub_that_cannot_be_reached_names_the_other_ways(tokenizer, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("trainer.data.tables.offline_reason", lambda: "")  # it answers, and fails later
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    refused(r"'stanfordnlp/imdb'.*Couldn't reach the hub.*train\.csv", IMDb(), tokenizer)


def test_a_tokenizer_is_needed_and_must_serve_max_length(tokenizer):
    refused(r"model\.tokenizer", IMDb())
    refused(r"data\.max_length=4096 is more than the 512 tokens", IMDb(max_length=4096), tokenizer)
    refused("no room for text with 2 special tokens", IMDb(max_length=2), tokenizer)


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


# Tables as spreadsheets write them

TEXT = "text{0}label\nsehr schön{0}gut\nschön, aber zu süß{0}schlecht\n"


def table(tmp_path, content, written="utf-8", name="a.csv", **settings):
    """A dataset of one file, which is trained on and tested with."""
    path = tmp_path / name
    path.write_bytes(content.encode(written))
    return TextFiles(str(path), test_file=str(path), cache_dir=str(tmp_path / "cache"), **settings)


@pytest.mark.parametrize(
    ("separator", "encoding"),
    [(";", "utf-8"), ("\t", "utf-8-sig"), ("|", "utf-16"), ("\t", "utf-16"), ("|", "utf-8")],
)
def test_separators_and_encodings_that_a_file_shows_are_found(tmp_path, tokenizer, separator, encoding):
    data = prepared(table(tmp_path, TEXT.format(separator), encoding), tokenizer)
    assert data.class_names == ["gut", "schlecht"]
    assert data.train[1]["input_ids"] == tokenizer("schön, aber zu süß")["input_ids"]


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_an_encoding_that_nothing_shows_is_asked_for_and_taken(tmp_path, tokenizer, encoding, capfd):
    said = r"a\.csv line 2 is not utf-8 \(byte 0xf6 in '.*sehr schön;gut.* as cp1252.*--data\.encoding cp1252"
    refused(said, table(tmp_path, TEXT.format(";"), encoding), tokenizer)
    assert capfd.readouterr().err == ""  # no line of a library's
    data = prepared(table(tmp_path, TEXT.format(";"), encoding, encoding=encoding), tokenizer)
    assert data.train[0]["input_ids"] == tokenizer("sehr schön")["input_ids"]


def test_what_is_told_goes_before_what_is_found(tmp_path, tokenizer):
    content = "text;more|label\na;b|x\nc;d|y\n"
    data = prepared(table(tmp_path, content, separator="|", text_column="text;more"), tokenizer)
    assert data.train[0]["input_ids"] == tokenizer("a;b")["input_ids"]
    tabs = prepared(table(tmp_path, TEXT.format("\t"), name="a.tsv", separator="tab"), tokenizer)
    assert tabs.class_names == ["gut", "schlecht"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoding": "utf-88"}, r"data\.encoding='utf-88' is not an encoding of Python"),
        ({"encoding": "base64"}, r"data\.encoding='base64' is not an encoding"),  # a codec, but not of texts
        ({"separator": "::"}, r"data\.separator='::' must be one character"),
    ],
)
def test_settings_of_tables_that_cannot_work_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        TextFiles("a.csv", **settings)


def test_tables_without_rows_classes_or_a_file_say_what_to_do(tmp_path, tokenizer, capfd):
    for name, content in (("a.csv", "text,label\n"), ("a.jsonl", "")):
        refused(f"{tmp_path}/{name} has no rows: add some", table(tmp_path, content, name=name), tokenizer)
    every = "a.csv: data.label_column='label' is 'gut' in every row, .* two classes or more: add rows of another class"
    refused(every, table(tmp_path, "text,label\na,gut\nb,gut\n"), tokenizer)
    numbers = "".join(f"film {number},{number / 7:.3f}\n" for number in range(30))
    looks = r"has 30 different numbers such as 0\.000, which looks like regression: use --model\.task regression"
    refused(looks, table(tmp_path, f"text,label\n{numbers}"), tokenizer)
    whole = "".join(f"film {number},{number // 2}.0\n" for number in range(60))
    assert prepared(table(tmp_path, f"text,label\n{whole}"), tokenizer).num_classes == 30
    refused(r"data\.train_file=.* is a folder: .*--data\.train_file FILE", TextFiles(str(tmp_path)), tokenizer)
    assert "Failed" not in capfd.readouterr().err  # as a library says before it
