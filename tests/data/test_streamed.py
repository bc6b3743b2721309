"""Texts streamed from Parquet files: any row, few groups in memory, and every fault is named."""

import pickle
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.prepared import prepared, refused
from helpers.shards import CLASSES, text_of, write_shards

from trainer.data import StreamedText, TextFiles
from trainer.data.fingerprint import data_files, fingerprint
from trainer.data.loader import Loader
from trainer.data.shards import ShardReader
from trainer.engine.order import batch_indices
from trainer.errors import RecipeError
from trainer.values import PartialBatch, Request


@pytest.fixture
def folder(tmp_path):
    """3 shards of 40 rows, in row groups of 16, 16 and 8."""
    return write_shards(tmp_path / "shards", shards=3, rows=40, group=16)


@pytest.fixture
def read(folder, tokenizer, tmp_path):
    def read(place=folder, **settings):
        data = StreamedText(str(place), **{"shuffle_buffer": 30, "cache_dir": str(tmp_path / "cache")} | settings)
        return prepared(data, tokenizer)

    return read


def test_every_row_is_there_with_its_text_class_and_name(read, folder, tokenizer):
    data = read()
    assert (len(data.train), data.class_names) == (120, CLASSES)
    assert data.train.groups.sizes == (16, 16, 8) * 3
    for index in (0, 17, 39, 40, 119):
        ids = tokenizer(text_of(index))["input_ids"]
        assert data.train[index] == {"input_ids": ids, "labels": index % len(CLASSES)}
        shard, row = divmod(index, 40)
        assert data.train.describe(index) == f"{folder}/part-{shard:02d}.parquet row {row + 1} (the first is row 1)"
    longest = data.train.longest  # of the first row group, which stands for all
    lengths = [len(text_of(index)) for index in longest]
    assert (sorted(longest), lengths) == (list(range(16)), sorted(lengths, reverse=True))
    train, test = str(folder / "part-0[01].parquet"), str(folder / "part-02.parquet")
    data = read(train, test_files=test)
    assert (len(data.train), data.val, len(data.test)) == (80, None, 40)
    assert data.test[0] == {"input_ids": tokenizer(text_of(80))["input_ids"], "labels": 80 % len(CLASSES)}


def test_batches_are_those_of_the_same_texts_in_one_file(read, folder, tokenizer, tmp_path):
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.concat_tables([pq.read_table(path) for path in sorted(folder.iterdir())]), whole)
    reference = prepared(TextFiles(str(whole), cache_dir=str(tmp_path / "cache")), tokenizer)
    data = read()
    for indices in ([3, 90, 41], [119]):
        batch, expected = data.train.__getitems__(indices), reference.train.__getitems__(indices)
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[key], expected[key]) for key in batch)
    assert data.collate([data.train[3]])["labels"].tolist() == [0]


def test_few_row_groups_are_in_memory_and_a_shuffled_epoch_decodes_each_once(read):
    data = read()
    reader = data.train.reader
    reader.decoded = 0
    seen = Counter()
    for step in range(12):
        indices = batch_indices(0, 0, step, 120, 10, data.train.groups)  # as the engine would take them
        seen.update(indices)
        data.train.__getitems__(indices)
        assert sum(map(len, reader._tables.values())) <= 2 * 30 + 3 * 16
    assert seen == Counter(range(120))
    assert reader.decoded == 9
    reader = ShardReader(reader.shards, ["label"], max_rows=20)
    for index in (0, 16, 32, 40, 0):
        assert reader.row(index) == (CLASSES[index % len(CLASSES)],)
    assert reader.decoded == 5
    reader.row(15)
    assert reader.decoded == 5


def test_workers_change_no_bit_and_a_split_travels_to_a_spawned_one(read):
    data = read()
    assert pickle.loads(pickle.dumps(data.train))[50] == data.train[50]  # has a file open that its workers inherit
    requests = [Request([start, (start * 7) % 120]) for start in range(0, 120, 9)]
    here, there = (list(Loader(data.train, data.collate, workers=workers)(requests)) for workers in (0, 2))
    for one, other in zip(here, there, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_classes_may_be_given_and_are_else_all_labels_sorted(read, folder):
    assert read(classes=["c", "b", "a"]).train[0]["labels"] == 2
    write_shards(folder, shards=1, rows=4, group=4, label=lambda i: [10, 2, -1, 2][i])
    for path in sorted(folder.iterdir())[1:]:
        path.unlink()
    data = read()
    assert data.class_names == ["-1", "2", "10"]
    assert [data.train[i]["labels"] for i in range(4)] == [2, 1, 0, 1]


def left_out(data, indices):
    (found,) = Loader(data.train, data.collate, max_bad_samples=3)([Request(indices)])
    assert isinstance(found, PartialBatch)
    return found.kept_indices, [bad.position for bad in found.bad]


def test_rows_without_text_or_known_label_are_named_and_may_be_left_out(read, folder):
    place = folder / "part-01.parquet"
    table = pq.read_table(place).to_pydict()
    table["text"][5], table["label"][6], table["label"][7] = "  ", None, "z"
    pq.write_table(pa.table(table), place, row_group_size=16)
    data = read(classes=CLASSES)
    said = ["row 6 .*has no text in 'text'", "row 7 .*has no label", "row 8 .*label 'z' is not one of a, b, c"]
    for index, message in enumerate(said, start=45):
        with pytest.raises(RecipeError, match=f"{place} {message}"):
            data.train[index]
    assert left_out(data, [44, 45, 46, 47, 48]) == ([44, 48], [45, 46, 47])


def test_a_damaged_row_group_is_named_and_its_rows_may_be_left_out(read, folder):
    path = folder / "part-02.parquet"
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    content[start + 40 : start + column.total_compressed_size] = bytes(column.total_compressed_size - 40)
    path.write_bytes(content)
    data = read(classes=CLASSES)
    with pytest.raises(RecipeError, match=rf"{path} row group 1 \(the first is 0\) cannot be read as Parquet"):
        list(Loader(data.train, data.collate)([Request([96])]))
    assert left_out(data, [95, 96, 97]) == ([95], [96, 97])


def test_files_that_will_not_do_are_named_before_training(folder, tokenizer, tmp_path):
    def no(message, place=folder, **settings):
        refused(message, StreamedText(str(place), cache_dir=str(tmp_path / "c"), **settings), tokenizer)

    last, empty, other = folder / "part-02.parquet", tmp_path / "empty", tmp_path / "a.jsonl"
    no(r"data\.text_column='texts': .*part-00\.parquet has no such column.*did you mean 'text'", text_column="texts")
    no(r"data\.train_files='.*none': there is no such folder", tmp_path / "none")
    empty.mkdir()
    no(r"data\.test_files='.*': the folder .* contains no \.parquet", test_files=str(empty))
    no(r"is not a local path: download the files first", "hf://datasets/a/b/*.parquet")
    with pytest.raises(RecipeError, match=r"data\.shuffle_buffer=0"):
        StreamedText(str(folder), shuffle_buffer=0)
    no(r"data\.classes contains a label twice", classes=["a", "a"])
    other.write_text("{}")
    no(r"a\.jsonl is not a \.parquet file.*convert it to Parquet", other)
    content = last.read_bytes()
    last.write_bytes(content[: len(content) // 2])
    no(f"{last} cannot be read as Parquet .*damaged or incomplete")
    last.write_bytes(b"")
    no(f"{last} cannot be read as Parquet")
    pq.write_table(pa.table({"text": ["x"], "lable": ["a"]}), last)
    no(rf"{last} has no such column.*did you mean 'lable'")
    pq.write_table(pa.table({"text": pa.array([], pa.string()), "label": pa.array([], pa.string())}), last)
    no(r"data\.test_files=.*: no rows in .*", test_files=str(last))


def test_a_file_that_changes_while_it_is_trained_on_is_named(read, folder):
    data = read()
    write_shards(folder, shards=3, rows=36, group=12)
    said = r"part-00\.parquet row group 0 has 12 rows instead of 16: the file has changed"
    with pytest.raises(RecipeError, match=said):
        data.train[0]


def test_the_fingerprint_follows_content_and_names_the_files(read, folder, tmp_path):
    data, moved = read(), tmp_path / "moved"
    before, files = fingerprint(data), data_files(data)
    assert list(files) == [f"train/part-{number:02d}.parquet" for number in range(3)]
    folder.rename(moved)
    assert fingerprint(read(moved)) == before
    others = [read(moved, max_length=8), read(moved, classes=["c", "a", "b"])]
    write_shards(moved, shards=3, rows=40, group=16, text=lambda i: text_of(i) if i != 70 else "other")
    changed = read(moved)
    assert [name for name, digest in data_files(changed).items() if digest != files[name]] == ["train/part-01.parquet"]
    assert len({before, *map(fingerprint, [changed, *others])}) == 4
