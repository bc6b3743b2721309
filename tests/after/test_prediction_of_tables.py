"""Tables keep their columns next to the predictions; tables, lines and standard input are streamed."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from trainer import Data, FinishedRun, Loss, Recipe, RecipeError, predict
from trainer.after import predict as prediction
from trainer.checkpoint.export import save_model
from trainer.contract import Preparable
from trainer.system import streams

NAMES = ["ant", "bee", "cat"]
TEXTS = ["", "007", "NA", "null", "1.10", "2020-01-01", 'a "b", c', "two\nlines", "a\rb\r\n", " é\t;😀 ", "=1+1"]
PROBABILITY = float(torch.tensor([5.0, 0.0, 0.0]).softmax(0).max())


@dataclass
class Lengths(Preparable):
    """A model that classifies a text by the number of its characters, so that a test knows each answer."""

    class_names = NAMES
    num_classes = 3

    def tokenizer_or_none(self) -> Any:
        return len

    def build(self) -> nn.Module:
        return nn.Linear(1, 1)

    def losses(self, module: nn.Module, batch: Mapping[str, Any]) -> Iterator[Loss]:
        logits = 5.0 * one_hot(batch["lengths"] % 3, 3)
        yield Loss(logits.sum(), 1.0, logits=logits)


@dataclass
class Said(Data):
    text_column = "text"

    def encode(self, texts: Any, tokenizer: Any) -> Any:
        if not all(texts):
            raise RecipeError("the text is empty")
        return {"lengths": torch.tensor(list(map(tokenizer, texts)))}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Any, Path]:
    run_dir = tmp_path_factory.mktemp("run")
    model = Lengths()
    save_model(model, model.build().eval(), run_dir / "model")
    return Recipe(model=model, data=Said(), batch_size=1), run_dir


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    else:
        with open(path, "w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return list(map(json.loads, path.read_text().splitlines()))
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


@pytest.mark.parametrize("to", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_all_columns_and_cells_stay_as_they_are_in_their_order(run, tmp_path, monkeypatch, kind, to):
    monkeypatch.setattr("trainer.data.tables.BLOCK_ROWS", 3)
    texts = [cell.replace("\r", "") for cell in TEXTS] if kind in ("csv", "tsv") else TEXTS  # pandas reads it as \n
    rows = [{"id": f"{k:03}", "text": f"{k} {cell}", "z": cell, "a": cell[::-1]} for k, cell in enumerate(texts)]
    table, out = write(tmp_path / f"a.{kind}", rows), tmp_path / f"out.{to}"
    predict(*run, paths=[str(table)], output=str(out), batch_size=4)
    found = read(out)
    assert list(found[0]) == [*rows[0], "label", "probability", "error"]
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    assert [row["label"] for row in found] == [NAMES[len(row["text"]) % 3] for row in rows]
    assert [float(row["probability"]) for row in found] == pytest.approx([PROBABILITY] * len(rows))
    assert not any(row["error"] for row in found)


def test_types_of_parquet_columns_stay_and_other_formats_get_texts_of_them(run, tmp_path):
    rows = pa.table(
        {
            "text": ["one", None, "three"],
            "number": pa.array([1, None, 2**62], pa.int64()),
            "single": pa.array([0.1, None, 3], pa.float32()),
            "when": pa.array([datetime(2020, 1, 1), None, datetime(1900, 1, 1)], pa.timestamp("us")),
            "exact": pa.array([1_000_000_000_000_000_001, None, 0], pa.timestamp("ns", "UTC")),
            "day": pa.array([date(2020, 1, 1), None, None]),
            "money": pa.array([Decimal("1.10"), None, Decimal("2.20")]),
            "bytes": pa.array([b"\xff\x00", None, b""]),
            "words": pa.array([["a", None], None, []], pa.list_(pa.string())),
            "kind": pa.array(["x", None, "y"]).dictionary_encode(),
            "turns": pa.array([[{"role": "user", "n": 1}], None, []]),
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    for kind in ("parquet", "jsonl", "csv"):
        with pytest.raises(RecipeError, match="1 of 3 inputs could not be read"):
            predict(*run, paths=[str(tmp_path / "a.parquet")], output=str(tmp_path / f"out.{kind}"))
    kept = pq.read_table(tmp_path / "out.parquet")
    assert kept.column_names == [*rows.column_names, "label", "probability", "error"]
    assert kept.select(rows.column_names).cast(rows.schema).equals(rows)
    assert kept.schema.field("exact").type == rows.schema.field("exact").type
    first, second, _ = read(tmp_path / "out.jsonl")
    assert (first["number"], first["bytes"], first["words"]) == (1, "/wA=", ["a", None])
    assert (first["when"], first["money"], second["turns"]) == ("2020-01-01 00:00:00", "1.10", None)
    first, second, third = read(tmp_path / "out.csv")
    assert (first["turns"], first["day"], third["number"]) == ('[{"role": "user", "n": 1}]', "2020-01-01", f"{2**62}")
    assert (second["number"], second["label"], second["error"]) == ("", "", "the cell is not a text")


def test_json_values_become_the_parquet_type_that_represents_all_of_a_column(run, tmp_path):
    rows: list[dict[str, Any]] = [
        {"text": "a", "id": 1, "score": 1, "large": 1, "mixed": 1, "nested": {"k": [1]}},
        {"text": "b", "id": 2, "score": 0.5, "large": 2**70, "mixed": "1", "more": True},
    ]
    write(tmp_path / "a.jsonl", rows)
    for kind in ("parquet", "jsonl"):
        predict(*run, paths=[str(tmp_path / "a.jsonl")], output=str(tmp_path / f"out.{kind}"))
    assert [
        {k: row[k] for k in row.keys() & given} for row, given in zip(read(tmp_path / "out.jsonl"), rows, strict=True)
    ] == rows
    table = pq.read_table(tmp_path / "out.parquet")
    types = {"text": "string", "id": "int64", "score": "double", "large": "string", "mixed": "string"}
    types |= {"nested": "string", "more": "bool"}
    assert {name: str(table.schema.field(name).type) for name in table.column_names[:7]} == types
    assert table["score"].to_pylist() == [1.0, 0.5]
    assert table["large"].to_pylist() == ["1", str(2**70)]
    assert table["nested"].to_pylist() == ['{"k": [1]}', None]


def test_a_column_of_the_table_with_our_name_stays_and_ours_gets_a_suffix(run, tmp_path):
    rows = [{"text": "four", "label": "true", "error": "none"}]
    first, second = tmp_path / "1.csv", tmp_path / "2.csv"
    predict(*run, paths=[str(write(tmp_path / "a.csv", rows))], output=str(first))
    ours = {"label_predicted": "bee", "error_predicted": ""}
    (found,) = read(first)
    assert list(found) == ["text", "label", "error", "label_predicted", "probability", "error_predicted"]
    assert found == {**rows[0], **ours, "probability": found["probability"]}
    predict(*run, paths=[str(first)], output=str(second))
    (again,) = read(second)
    assert list(again)[:6] == list(found)
    assert list(again)[6:] == [f"{name}_predicted_predicted" for name in ("label", "probability", "error")]


def test_several_tables_keep_all_columns_and_a_mix_has_inputs_and_sources(run, tmp_path):
    one = write(tmp_path / "a.csv", [{"text": "a", "n": "1"}, {"text": "bb", "n": "2"}])
    two = write(tmp_path / "b.jsonl", [{"n": 3, "text": "ccc", "more": None}])
    predict(*run, paths=[str(one), str(two)], output=str(tmp_path / "out.parquet"))
    found = read(tmp_path / "out.parquet")
    assert list(found[0]) == ["text", "n", "more", "source", "label", "probability", "error"]
    assert [(row["text"], row["n"], row["more"]) for row in found] == [
        ("a", "1", None),
        ("bb", "2", None),
        ("ccc", "3", None),
    ]
    assert [row["source"] for row in found] == [f"{one} row 2", f"{one} row 3", f"{two} row 1"]
    (tmp_path / "c.txt").write_text("dddd")
    predict(*run, paths=[str(one), str(tmp_path / "c.txt")], output=str(tmp_path / "out.csv"))
    found = read(tmp_path / "out.csv")
    assert list(found[0]) == ["input", "source", "label", "probability", "error"]
    assert [row["input"] for row in found] == ["a", "bb", str(tmp_path / "c.txt")]


def test_a_header_without_a_name_stays_and_a_row_with_too_many_cells_is_refused(run, tmp_path, golden):
    (tmp_path / "a.csv").write_text(",text\n0,a\n1,\n")
    with pytest.raises(RecipeError, match=r"a\.csv row 3: the text is empty"):
        predict(*run, paths=[str(tmp_path / "a.csv")], output=str(tmp_path / "out.csv"))
    assert (tmp_path / "out.csv").read_text().startswith(",text,label,probability,error\n0,a,bee,0.9")
    (tmp_path / "b.csv").write_text("text,n\na,1,2\nb,3,4\n")
    with golden.raises(RecipeError):
        predict(*run, paths=[str(tmp_path / "b.csv")], output=str(tmp_path / "none.csv"))
    assert not (tmp_path / "none.csv").exists()


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_what_is_held_is_a_small_part_of_a_large_table(run, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("trainer.data.tables.BLOCK_ROWS", 50)
    monkeypatch.setattr(prediction, "BYTES_A_GROUP", 200_000)
    rows = [{"text": f"{k} " + "x" * (k % 3), "more": f"{k}".zfill(7) * 500} for k in range(3_000)]
    table, out, arrow = tmp_path / f"a.{kind}", tmp_path / f"out.{kind}", list[int]()
    if kind == "parquet":
        whole = pa.Table.from_pylist(rows)
        pq.write_table(whole, table, compression="none", use_dictionary=False, row_group_size=500)
        del whole
    else:
        write(table, rows)
    size, encode, before = table.stat().st_size, Said.encode, pa.total_allocated_bytes()

    def watched(*given: Any) -> Any:
        arrow.append(pa.total_allocated_bytes() - before)
        return encode(*given)

    monkeypatch.setattr(Said, "encode", watched)
    loaded = FinishedRun(*run)
    loaded.predict("a")
    tracemalloc.start()
    try:
        loaded.predict(paths=[str(table)], output=str(out), batch_size=50)
        held = tracemalloc.get_traced_memory()[1] + max(arrow)
    finally:
        tracemalloc.stop()
    assert size > 10e6
    assert held < size / 2, f"{held:,} of {size:,} bytes"
    found = read(out)
    assert [row["more"] for row in found] == [row["more"] for row in rows]
    assert [row["label"] for row in found] == [NAMES[len(row["text"]) % 3] for row in rows]


def piped(monkeypatch: Any, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_standard_input_is_one_text_and_with_lines_a_text_per_line(run, monkeypatch, capsys, tmp_path):
    content = "a\nbb\r\nccc é".encode()
    piped(monkeypatch, content)
    assert predict(*run, paths=["-"]) == [(NAMES[len(content.decode()) % 3], pytest.approx(PROBABILITY))]
    assert capsys.readouterr().out.endswith("\tstandard input\n")
    piped(monkeypatch, content)
    predict(*run, paths=["-"], lines=True, batch_size=2)
    assert [line.split("\t")[::2] for line in capsys.readouterr().out.splitlines()] == [
        ["bee", "a"],
        ["cat", "bb"],
        ["cat", "ccc é"],
    ]
    piped(monkeypatch, content)
    (tmp_path / "notes.txt").write_bytes(b"dddd\n")
    given = {"paths": [str(tmp_path / "notes.txt"), "-"], "lines": True, "output": str(tmp_path / "out.jsonl")}
    assert predict(*run, **given) == []
    sources = [f"{tmp_path / 'notes.txt'} line 1", *(f"standard input line {k}" for k in (1, 2, 3))]
    assert [row["source"] for row in read(tmp_path / "out.jsonl")] == sources
    said = capsys.readouterr()
    assert said.out.startswith("4 predictions: ")
    assert "\n4 · " in f"\n{said.err}"  # how many in all is not known


def test_lines_that_cannot_be_read_are_named_and_the_others_are_classified(run, monkeypatch, capsys, golden, tmp_path):
    monkeypatch.setattr(prediction, "MAX_TEXT_BYTES", 10)
    piped(monkeypatch, b"0123456789\n0123456789A\n" + b"x" * 100 + b"\n\xff\n\nend")
    (tmp_path / "empty.txt").touch()
    with golden.raises(RecipeError):
        predict(*run, paths=["-", str(tmp_path / "empty.txt")], lines=True)
    said = capsys.readouterr()
    assert [line.split("\t")[2] for line in said.out.splitlines()] == ["0123456789", "end"]
    assert said.err.count("left out") == 5


def test_names_of_bad_inputs_are_not_kept_without_end(run, monkeypatch, golden):
    piped(monkeypatch, b"\n" * 1_000)
    with golden.raises(RecipeError):
        predict(*run, paths=["-"], lines=True, quiet=True)


@pytest.mark.parametrize("how", [{}, {"lines": True}], ids=str)
@pytest.mark.parametrize("content", [b"", b"12345678901234567890123", b"\xff"], ids=["empty", "long", "bytes"])
def test_a_stream_that_is_no_text_is_refused_in_one_line(run, monkeypatch, golden, how, content):
    monkeypatch.setattr(prediction, "MAX_TEXT_BYTES", 20)
    piped(monkeypatch, content)
    with golden.raises(RecipeError):
        predict(*run, paths=["-"], **how)


@dataclass
class Seen(Said):
    encode = None

    def load_image(self, path: Any) -> Any:
        raise AssertionError(path)


@pytest.mark.parametrize("how", [{"paths": ["-"]}, {"paths": ["a.txt"], "lines": True}], ids=str)
def test_a_model_of_images_reads_no_lines(run, monkeypatch, golden, how, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    with golden.raises(RecipeError):
        predict(run[0].replace(data=Seen()), run[1], **how)


def test_lines_without_a_text_file_are_refused(run, tmp_path, golden):
    table = write(tmp_path / "a.csv", [{"text": "a"}])
    with golden.raises(RecipeError):
        predict(*run, paths=[str(table)], lines=True)


def test_answers_are_printed_batch_by_batch_and_kept_only_if_asked_for(run, monkeypatch):
    """A stream that waits for the answers to its first batch before it goes on."""
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)

    def lines() -> Iterator[bytes]:
        for number in range(9):
            assert len(printed.getvalue().splitlines()) == number - number % 3
            yield b"x" * (number + 1) + b"\n"
        yield b""

    given = lines()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(readline=lambda size: next(given))))
    assert predict(*run, paths=["-"], lines=True, batch_size=3, collect=False) == []
    assert len(printed.getvalue().splitlines()) == 9


def test_a_stream_ends_when_nobody_reads_the_answers(run, monkeypatch):
    """``yes | trainer predict RUN - --lines | head -1`` ends."""
    reader, writer = os.pipe()
    os.close(reader)
    file = io.TextIOWrapper(io.BufferedWriter(streams.SafeFile(writer, "w")))
    monkeypatch.setattr(sys, "stdout", file)
    source = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=source.stdout))
    try:
        predict(*run, paths=["-"], lines=True, collect=False)
    finally:
        source.kill()
        source.communicate()
        file.close()
