"""Data that have no end, or take the machine: refused by name before they are decoded."""

from __future__ import annotations

import json
import os
import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trainer.commands.flags import load_yaml_file
from trainer.data import ImageFolder, TextFiles
from trainer.data.arrays import check_images, read_image
from trainer.data.rows import MOST_LINE, find_file, find_folders
from trainer.data.tokens import CHARACTERS_AT_ONCE, LEAST_CHARACTERS, encode
from trainer.errors import RecipeError
from trainer.models.hub import from_hub


def png(path, width, height):
    """A PNG whose header states its size, with a single row in it."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * (width + 1))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


@pytest.mark.parametrize(("width", "height"), [(1, 170_000_000), (13_000, 13_000), (1, 300), (70_000, 1000)], ids=str)
def test_an_image_that_would_take_the_machine_is_refused_by_its_header(tmp_path, width, height):
    png(tmp_path / "bomb.png", width, height)
    said = rf"bomb\.png.*it has {width:,} x {height:,} pixels; at most 89,000,000 are read"
    with pytest.raises(RecipeError, match=said):
        check_images([str(tmp_path / "bomb.png")], 0, tmp_path / "cache")
    with pytest.raises(RecipeError, match=said):
        read_image(str(tmp_path / "bomb.png"), "RGB")


def test_an_image_that_is_only_large_is_read(tmp_path):
    Image.fromarray(np.zeros((20, 4000), np.uint8)).save(tmp_path / "wide.png")
    check_images([str(tmp_path / "wide.png")], 0, tmp_path / "cache")
    assert read_image(str(tmp_path / "wide.png"), "L").shape == (1, 20, 4000)


@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    def place(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "a device":
            path.symlink_to("/dev/zero")
        else:
            os.mkfifo(path)
        return path

    root = tmp_path / "images"
    for part in ("train", "test"):
        (root / part / "cat").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(root / part / "cat" / "fine.png")
    place(root / "train" / "cat" / "endless.png")
    with pytest.raises(RecipeError, match=rf"1 of 3 images cannot be read: .*endless\.png .*it is {kind}"):
        ImageFolder(str(root), cache_dir=str(tmp_path / "cache")).prepare()
    place(tmp_path / "texts" / "train" / "pos" / "a.txt")
    with pytest.raises(RecipeError, match=rf"a\.txt cannot be read \(it is {kind}"):
        find_folders(tmp_path / "texts", "train", [("pos", 1)], tmp_path / "cache")
    with pytest.raises(RecipeError, match=r"table\.csv"):
        find_file(place(tmp_path / "table.csv"), tmp_path / "cache")
    with pytest.raises(RecipeError, match=rf"settings\.yaml cannot be read: it is {kind}"):
        load_yaml_file(place(tmp_path / "settings.yaml"))
    model = place(tmp_path / "model" / "model.safetensors")
    with pytest.raises(RecipeError, match=rf"model\.safetensors cannot be read: it is {kind}"):
        from_hub("weights", str(model.parent), lambda: pytest.fail("opened"))


def test_settings_of_megabytes_are_refused_before_they_are_parsed(tmp_path):
    (tmp_path / "settings.yaml").write_text("a: " + "x" * (1 << 20))
    with pytest.raises(RecipeError, match=r"settings\.yaml cannot be read: it is larger than the 1 MB"):
        load_yaml_file(tmp_path / "settings.yaml")


@pytest.fixture
def prepare(tmp_path, tokenizer):
    def prepare(path, **settings):
        data = TextFiles(str(path), cache_dir=str(tmp_path / "cache"), max_length=16, **settings)
        data.prepare(tokenizer)
        return data.train

    return prepare


LONG = "word " * (LEAST_CHARACTERS // 5)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_an_absurd_text_is_named_with_its_row_and_a_whole_book_is_cut(tmp_path, prepare, kind):
    def write(name, texts):
        table = pa.table({"text": texts, "label": [str(number % 2) for number in range(len(texts))]})
        path = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            pq.write_table(table, path)
        elif kind == "csv":
            path.write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in table.to_pylist()))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        return path

    book = prepare(write("book", ["a film", LONG[:-5]]))
    assert len(book[1]["input_ids"]) == 16
    with pytest.raises(RecipeError, match=rf"absurd\.{kind} row . .*has 1,000,005 characters in 'text', and 1,000,000"):
        prepare(write("absurd", ["a film", LONG + "words"]))


def test_many_long_texts_are_given_to_the_tokenizer_a_few_at_a_time(tokenizer):
    most = []

    def counting(texts, **settings):
        most.append(sum(map(len, texts)))
        return tokenizer([text[:100] for text in texts], **settings)

    texts = ["short", LONG, "a", LONG, LONG, "b"]
    encoded = encode(texts, counting, 16)
    assert max(most) <= CHARACTERS_AT_ONCE
    assert encoded["input_ids"] == tokenizer(texts_of(texts), truncation=True, max_length=16)["input_ids"]


def texts_of(texts):
    return [text[:100] for text in texts]


def test_a_few_bytes_of_parquet_that_stand_for_gigabytes_are_refused(tmp_path, prepare):
    one = pa.table({"text": ["x" * 90_000_000, "fine"], "label": ["a", "b"]})
    pq.write_table(one, tmp_path / "one.parquet", compression="zstd")
    assert (tmp_path / "one.parquet").stat().st_size < 20_000
    with pytest.raises(
        RecipeError, match=r"one\.parquet cannot be read as parquet .*text of .* bytes would be unpacked"
    ):
        prepare(tmp_path / "one.parquet")
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2000, np.int32)), pa.array(["y" * 3_000_000]))
    table = pa.table({"text": text, "label": ["a", "b"] * 1000})
    for schema in (True, False):  # a file need not say that it is a dictionary
        pq.write_table(table, tmp_path / "many.parquet", compression="none", store_schema=schema)
        with pytest.raises(RecipeError, match=r"row group 0: text would be decoded to 6,000,000,000 bytes"):
            prepare(tmp_path / "many.parquet")


def test_a_line_of_json_without_an_end_is_refused(tmp_path, prepare):
    (tmp_path / "long.jsonl").write_text('{"text": "' + "x" * MOST_LINE + '", "label": "a"}\n')
    with pytest.raises(RecipeError, match=r"long\.jsonl cannot be read as jsonl .*line 1 has more than 32 MB"):
        prepare(tmp_path / "long.jsonl")


def test_a_column_given_twice_is_refused(tmp_path, prepare):
    (tmp_path / "twice.csv").write_text("text,text,label\na,b,1\nc,d,0\n")
    with pytest.raises(RecipeError, match=r"twice\.csv cannot be read as csv .*column 'text' is given twice"):
        prepare(tmp_path / "twice.csv")
