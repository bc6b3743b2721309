"""Data that have no end, or take the machine: refused by name before they are decoded."""

import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.prepared import prepared, refused
from PIL import Image

from trainer.data import TextFiles
from trainer.data.base import MAX_LINE_BYTES
from trainer.data.image_splits import check_images, read_image
from trainer.data.parquet_files import open_parquet
from trainer.data.shards import ShardReader, find_shards
from trainer.data.tables import open_table
from trainer.data.tokens import CHARS_PER_BATCH, MIN_CHARS_LIMIT, encode
from trainer.errors import RecipeError


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
    said = rf"bomb\.png.*it has {width:,} x {height:,} pixels; the max is 89,000,000"
    with pytest.raises(RecipeError, match=said):
        check_images([str(tmp_path / "bomb.png")], 0, tmp_path / "cache")
    with pytest.raises(RecipeError, match=said):
        read_image(str(tmp_path / "bomb.png"), "RGB")


def test_an_image_that_is_only_large_is_read(tmp_path):
    Image.fromarray(np.zeros((20, 4000), np.uint8)).save(tmp_path / "wide.png")
    check_images([str(tmp_path / "wide.png")], 0, tmp_path / "cache")
    assert read_image(str(tmp_path / "wide.png"), "L").shape == (1, 20, 4000)


LONG = "word " * (MIN_CHARS_LIMIT // 5)


def texts(path):
    return TextFiles(str(path), cache_dir=str(path.parent / "cache"), max_length=16)


def test_an_absurd_text_is_named_with_its_row_and_a_whole_book_is_cut(tmp_path, tokenizer, monkeypatch):
    assert MIN_CHARS_LIMIT == 1_000_000  # of a book; here it is a page
    monkeypatch.setattr("trainer.data.tokens.MIN_CHARS_LIMIT", 20_000)
    (tmp_path / "book.csv").write_text(f"text,label\na film,0\n{LONG[:20_000]},1\n")
    assert len(prepared(texts(tmp_path / "book.csv"), tokenizer).train[1]["input_ids"]) == 16
    (tmp_path / "absurd.csv").write_text(f"text,label\na film,0\n{LONG[:20_000]}words,1\n")
    said = r"absurd\.csv row 3 .*has 20,005 characters in 'text', and the max is 20,000"
    refused(said, texts(tmp_path / "absurd.csv"), tokenizer)


def test_many_long_texts_are_given_to_the_tokenizer_a_few_at_a_time(tokenizer):
    most = []

    def counting(texts, **settings):
        most.append(sum(map(len, texts)))
        return tokenizer([text[:100] for text in texts], **settings)

    many = ["short", LONG, "a", LONG, LONG, "b"]
    encoded = encode(many, counting, 16)
    assert max(most) <= CHARS_PER_BATCH
    cut = [text[:100] for text in many]
    assert encoded["input_ids"] == tokenizer(cut, truncation=True, max_length=16)["input_ids"]


def test_a_few_bytes_of_parquet_that_stand_for_gigabytes_are_refused(tmp_path, tokenizer):
    one = pa.table({"text": ["x" * 90_000_000, "fine"], "label": ["a", "b"]})
    pq.write_table(one, tmp_path / "one.parquet", compression="zstd")
    assert (tmp_path / "one.parquet").stat().st_size < 20_000
    said = r"one\.parquet row group 0: text of .* bytes would be unpacked"
    refused(said, texts(tmp_path / "one.parquet"), tokenizer)
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2000, np.int32)), pa.array(["y" * 3_000_000]))
    table = pa.table({"text": text, "label": ["a", "b"] * 1000})
    for schema in (True, False):  # a file need not say that it is a dictionary
        pq.write_table(table, tmp_path / "many.parquet", compression="none", store_schema=schema)
        said = r"row group 0: text would be decoded to 6,000,000,000 bytes"
        refused(said, texts(tmp_path / "many.parquet"), tokenizer)


def test_a_line_of_json_without_an_end_and_a_column_given_twice_are_refused(tmp_path, tokenizer):
    (tmp_path / "long.jsonl").write_text('{"text": "' + "x" * MAX_LINE_BYTES + '", "label": "a"}\n')
    said = r"long\.jsonl cannot be read as jsonl .*line 1 has more than 32 MB"
    refused(said, texts(tmp_path / "long.jsonl"), tokenizer)
    (tmp_path / "twice.csv").write_text("text,text,label\na,b,1\nc,d,0\n")
    said = r"twice\.csv cannot be read as csv .*column 'text' is twice in the header"
    refused(said, texts(tmp_path / "twice.csv"), tokenizer)


TEXT = "x" * 1000


def dictionary(count, text=TEXT):
    """``count`` times the same text, which is in memory once."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([text]))


def in_rows(array, *ends):
    return pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), array)


def records(**columns):
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


CHAT = records(role=dictionary(600_000, "user"), content=dictionary(600_000, "y"))
DECODED = r"row group 0: \w+ would be decoded to "
SECOND = r"row 2 \(the first is row 1\): text"


def deep():
    return in_rows(records(a=in_rows(in_rows(dictionary(40_000), 40_000), 1), b=pa.array([1])), 0, 1)


def mapped():
    keys = pa.array(map(str, range(40_000)))
    return pa.MapArray.from_arrays(pa.array([0, 40_000], pa.int32()), keys, dictionary(40_000))


NESTED = {
    # One row of many texts; with many bytes of text; many rows that come to gigabytes; within structs, lists and maps.
    "list": (lambda: in_rows(dictionary(1_000_001), 1_000_001), r"\.list\.element has more than 1,000,000 values"),
    "chat": (lambda: in_rows(CHAT, 3, 600_000, 600_000), rf"{SECOND}\.role has 599,997 values"),
    "long": (lambda: in_rows(dictionary(40_000), 2, 40_000), f"{SECOND} has 39,998,000 bytes"),
    "rows": (lambda: in_rows(dictionary(4_100, "y" * 1_000_000), *range(1, 4_101)), DECODED + "4,100,000,000"),
    "deep": (deep, rf"{SECOND}\.a has 40,000,000 bytes"),
    "map": (mapped, r"row 1 \(the first is row 1\): text\.value has 40,000,000 bytes"),
    "numbers": (lambda: in_rows(pa.array(np.zeros(1_000_001)), 1_000_001), r"text\S* has more than 1,000,000 values"),
}


@pytest.mark.parametrize("kind", NESTED)
def test_a_nested_column_that_stands_for_gigabytes_is_refused_before_it_is_decoded(tmp_path, kind):
    make, said = NESTED[kind]
    path = tmp_path / f"{kind}.parquet"
    pq.write_table(pa.table({"text": make()}), path, compression="zstd")
    assert path.stat().st_size < 500_000
    before = pa.total_allocated_bytes()
    with pytest.raises(RecipeError, match=rf"{kind}\.parquet.*{said}"):
        open_table(path, tmp_path / "cache").read(str(tmp_path))
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_two_columns_of_one_path_are_refused_because_one_of_them_would_not_be_checked(tmp_path):
    table = pa.table({"a.b": dictionary(10), "a": records(b=dictionary(10))})
    pq.write_table(table, tmp_path / "twice.parquet", store_schema=False)
    with pytest.raises(RecipeError, match=r"twice\.parquet row group 0: .*a\.b cannot be checked as string"):
        open_table(tmp_path / "twice.parquet", tmp_path / "cache").read(str(tmp_path))


def test_streamed_files_are_checked_when_a_row_group_is_decoded(tmp_path):
    texts = pa.array(["a film", "a book"]).dictionary_encode()
    good = pa.table({"text": texts, "label": ["x", None], "messages": [[{"role": "user", "content": "hi"}], None]})
    pq.write_table(good, tmp_path / "good.parquet")
    long = pa.table({"text": dictionary(2, "y" * 33_000_000), "label": dictionary(2_000, "z" * 3_000_000)[:2]})
    pq.write_table(long, tmp_path / "long.parquet", compression="none")
    paths, cache = [tmp_path / "good.parquet", tmp_path / "long.parquet"], tmp_path / "cache"
    reader = ShardReader(find_shards(paths, cache), ["text", "label"], 10)
    assert [reader.row(0), reader.row(1)] == [("a film", "x"), ("a book", None)]
    before = pa.total_allocated_bytes()
    with pytest.raises(RecipeError, match=r"long\.parquet row 1 \(the first is row 1\): text has 33,000,000 bytes"):
        reader.row(2)
    assert pa.total_allocated_bytes() - before < 1_000_000
    chats = ShardReader(find_shards(paths[:1], cache), ["messages"], 10)
    assert [chats.row(0), chats.row(1)] == [([{"role": "user", "content": "hi"}],), (None,)]
    labels = pa.table({"text": ["a"] * 2_000, "label": dictionary(2_000, "z" * 3_000_000)})
    pq.write_table(labels, tmp_path / "labels.parquet", compression="none")
    with pytest.raises(RecipeError, match=rf"labels\.parquet {DECODED}6,000,000,000"):
        find_shards([tmp_path / "labels.parquet"], cache, "label")
    pq.write_table(pa.table({"text": in_rows(CHAT, 600_000)}), tmp_path / "chat.parquet")
    with pytest.raises(RecipeError, match=r"chat\.parquet row 1 .*: text\.role has 600,000 values"):
        ShardReader(find_shards([tmp_path / "chat.parquet"], cache), ["text"], 10).row(0)


def test_a_column_of_the_json_type_is_checked_as_text(tmp_path):
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['["a"]', None, '"b"']))
    pq.write_table(pa.table({"text": column, "more": in_rows(column, 3, 3, 3)}), tmp_path / "typed.parquet")
    with open_parquet(tmp_path / "typed.parquet") as file:
        texts = pa.dictionary(pa.int32(), pa.string())
        assert [kind if kind == texts else kind.value_type for kind in file.schema_arrow.types] == [texts, texts]
    table = open_table(tmp_path / "typed.parquet", tmp_path / "cache").read(str(tmp_path))
    assert len(table) == 3
