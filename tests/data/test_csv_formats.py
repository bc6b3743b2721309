"""Tables as spreadsheets write them: separators and encodings that are found, or asked for by a flag."""

import pytest
from helpers.prepared import prepared, refused

from trainer.data import TextFiles
from trainer.errors import RecipeError

TEXT = "text{0}label\nsehr schön{0}gut\nschön, aber zu süß{0}schlecht\n"


def table(tmp_path, content, written="utf-8", name="a.csv", **settings):
    """A dataset of one file, which is trained on and tested with."""
    path = tmp_path / name
    path.write_bytes(content.encode(written))
    return TextFiles(str(path), test_file=str(path), cache_dir=str(tmp_path / "cache"), **settings)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
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
    whole = "".join(f"film {number},{number}.0\n" for number in range(30))
    assert prepared(table(tmp_path, f"text,label\n{whole}"), tokenizer).num_classes == 30
    refused(r"data\.train_file=.* is a folder: .*--data\.train_file FILE", TextFiles(str(tmp_path)), tokenizer)
    assert "Failed" not in capfd.readouterr().err  # as a library says before it
