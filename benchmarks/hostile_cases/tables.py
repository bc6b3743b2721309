"""Texts with labels: csv, jsonl, Parquet and folders of text files."""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hostile_cases.case import (
    ANY,
    ESC,
    FIT,
    GOOD,
    RAN,
    REFUSED,
    TEXT,
    TEXT_MODEL,
    Case,
    done,
    own,
    replaced,
    wrote,
)

CSV: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", REFUSED),
    "header only": ("text,label\n", REFUSED),
    "a byte order mark": (b"\xef\xbb\xbf" + GOOD.encode(), RAN),
    "Latin-1": ("text,label\ncaf\xe9,1\nbad,0\n".encode("latin-1"), REFUSED),
    "NULs": (b"text,label\ngo\0od,1\nbad,0\n", ANY),
    "a quote that never closes": ('text,label\n"good,1\nbad,0\n', REFUSED),
    "2,000 columns": (",".join(["text", "label", *map(str, range(2000))]) + "\n" + "a,1" + ",x" * 2000 + "\nb,0" + ",x" * 2000, RAN),
    "a row that is too long": ("text,label\ngood,1,2,3\nbad,0\n", REFUSED),
    "a blank label": ("text,label\ngood,\nbad,0\n", REFUSED),
    "a header of control characters": (f"{ESC},label\ngood,1\n", REFUSED),
    "labels of control characters": (f"text,label\ngood,{ESC}\nbad,0\n", RAN),
    "a label of 5,000 digits": (f"text,label\na,{'9' * 5000}\nb,1\n", ANY),
    "labels of other digits": ("text,label\na,\u0663\nb,\u00b2\nc,-1\n", RAN),
    "3,000 classes": ("text,label\n" + "".join(f"good,c{n}\n" for n in range(3000)), RAN),
    "CR": (GOOD.replace("\n", "\r"), ANY),
    "a column twice": ("text,label,label\na,1,0\nb,0,1\n", REFUSED),
    "gzip": (gzip.compress(GOOD.encode()), REFUSED),
}
JSONL: dict[str, tuple[str | bytes, str]] = {
    "cut": ('{"text": "a", "label": 1}\n{"text": "b", "la', REFUSED),
    "an array": ('[{"text": "a", "label": 1}]', REFUSED),
    "NaN labels": ('{"text": "a", "label": NaN}\n{"text": "b", "label": 0}\n', REFUSED),
    "labels that are lists": ('{"text": "a", "label": [1]}\n{"text": "b", "label": [0]}\n', ANY),
    "a lone surrogate": ('{"text": "a\\ud800", "label": 1}\n{"text": "b", "label": 0}\n', ANY),
    "a label of 400 digits": ('{"text": "a", "label": 1' + "0" * 400 + '}\n{"text": "b", "label": 0}\n', ANY),
    "a label of 5,000 digits": ('{"text": "a", "label": 1' + "0" * 5000 + '}\n{"text": "b", "label": 0}\n', REFUSED),
    "not UTF-8": (b'{"text": "\xff\xfe", "label": 1}\n', REFUSED),
    "other keys in every line": ('{"text": "a", "label": 1, "x": 1}\n{"label": 0, "text": "b", "y": [1]}\n', ANY),
    "a key twice": ('{"text": "a", "label": 1, "label": 0}\n{"text": "b", "label": 0}\n', ANY),
    "control characters": (json.dumps({"text": ESC, "label": ESC}) + '\n{"text": "b", "label": "0"}\n', ANY),
}


def parquet(**columns: Any) -> bytes:
    import pyarrow as pa

    return written(pa.table(columns))


def written(table: Any) -> bytes:
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return buffer.getvalue()


def _columns() -> dict[str, tuple[Callable[[], bytes], str]]:
    import decimal

    import pyarrow as pa

    texts, labels = ["a", "b"], [1, 0]
    good = partial(parquet, text=texts, label=labels)
    twice = pa.table([pa.array(texts), pa.array(labels), pa.array(labels)], names=["text", "label", "label"])
    return {
        "a footer cut off": (lambda: good()[:-20], REFUSED),
        "a footer of 4 GB": (lambda: good()[:-8] + b"\xff\xff\xff\x7fPAR1", REFUSED),
        "the magic of encryption": (lambda: good()[:-4] + b"PARE", REFUSED),
        "zeros within": (lambda: b"PAR1" + b"\0" * (len(good()) - 700) + good()[-696:], REFUSED),
        "no rows": (partial(parquet, text=pa.array([], pa.string()), label=pa.array([], pa.int64())), REFUSED),
        "labels that are decimals": (partial(parquet, text=texts, label=[decimal.Decimal("1.50"), decimal.Decimal("0.00")]), ANY),
        "labels that are nan": (partial(parquet, text=texts, label=[float("nan"), 1.0]), REFUSED),
        "labels of a dictionary": (partial(parquet, text=texts, label=pa.array(["x", "y"]).dictionary_encode()), RAN),
        "labels that are lists": (partial(parquet, text=texts, label=[[1], [0]]), ANY),
        "names of control characters": (lambda: parquet(**{"text": texts, ESC: labels}), REFUSED),
        "a column twice": (lambda: written(twice), REFUSED),
    }


STREAMED = ("a footer of 4 GB", "the magic of encryption", "zeros within", "no rows", "labels that are nan")


def tables() -> Iterable[Case]:
    """Texts with labels."""
    for given, (text, expect) in CSV.items():
        says = "t.csv" if expect == REFUSED else ""
        yield Case("text files", f"csv: {given}", partial(wrote, "t.csv", text, TEXT), expect, says)
    for given, (text, expect) in JSONL.items():
        words = [*TEXT, "--data.train_file", "t.jsonl"]
        says = "t.jsonl" if expect == REFUSED else ""
        yield Case("text files", f"jsonl: {given}", partial(wrote, "t.jsonl", text, words), expect, says)
    words = [*TEXT, "--data.train_file", "t.parquet"]
    streamed = own(TEXT_MODEL, "StreamedText('shards', cache_dir='cache', max_length=8)", "batch_size=2")
    for given, (made, expect) in _columns().items():
        says = "t.parquet" if expect == REFUSED else ""
        yield Case("text files", f"parquet: {given}", lambda made=made: wrote("t.parquet", made(), words), expect, says)
        if given not in STREAMED:
            continue
        yield Case(
            "text files",
            f"streamed parquet: {given}",
            lambda made=made: wrote("shards/t.parquet", made(), wrote("own.py", streamed, FIT)),
            expect,
            says,
        )
    folder = own(TEXT_MODEL, "IMDb('texts', cache_dir='cache', max_length=8)", "batch_size=2")
    odd: dict[str, tuple[Callable[[], Any], str]] = {
        "no neg": (lambda: wrote("texts/train/pos/1.txt", "a", []), REFUSED),
        "an empty file": (lambda: _texts(b""), REFUSED),
        "not UTF-8": (lambda: _texts(b"\xff\xfe\xfd"), REFUSED),
        "NULs": (lambda: _texts(b"good\0film"), ANY),
        "a link to itself": (lambda: (_texts(b"good"), os.symlink("l.txt", "texts/train/pos/l.txt")), REFUSED),
        "a folder 2.txt": (lambda: (_texts(b"good"), os.mkdir("texts/train/pos/2.txt")), REFUSED),
        "a name of control characters": (
            lambda: (_texts(b"good"), wrote("texts/train/pos/\x1b[31m.txt", b"\xff", [])),
            REFUSED,
        ),
        "a name that is no UTF-8": (lambda: (_texts(b"good"), wrote("texts/train/pos/\udcff.txt", "good", [])), ANY),
    }
    for given, (make, expect) in odd.items():
        yield Case("text files", f"folder: {given}", lambda make=make: done(make, wrote("own.py", folder, FIT)), expect)
    refused: list[tuple[str, Callable[[], Any], list[str], str]] = [
        ("a folder t.csv", lambda: replaced("t.csv", os.mkdir), [], "t.csv"),
        ("csv without an ending", lambda: wrote("t", GOOD, []), ["--data.train_file", "t"], "csv"),
        ("a cache that is a file", lambda: wrote("file", "x", []), ["--data.cache_dir", "file"], "file"),
        ("data.max_length 10^9", lambda: None, ["--data.max_length", "1000000000"], "max_length"),
        ("data.text_column is the label", lambda: None, ["--data.text_column", "label"], "column"),
    ]
    for given, make, flags, says in refused:
        yield Case("text files", given, partial(done, make, [*TEXT, *flags]), REFUSED, says)


def _texts(first: bytes) -> None:
    for part in ("train", "test"):
        for name in ("pos", "neg"):
            wrote(f"texts/{part}/{name}/0.txt", "film", [])
    wrote("texts/train/pos/1.txt", first, [])
