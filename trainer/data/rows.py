"""Rows of text and label as they lie in files or on the hub, each of which can be named to a person."""

from __future__ import annotations

import codecs
import csv
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pandas
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets.utils.extract import Extractor

from trainer.data.cache import checksums, content_of, hash_of
from trainer.data.common import reason
from trainer.errors import RecipeError, nearest, require
from trainer.system.files import open_regular, read_regular
from trainer.system.hub import advice as of_hub
from trainer.system.hub import away, tell_of_cache

_KINDS = {
    ".csv": ("csv", 2, "the header is row 1, blank lines are not counted"),
    ".tsv": ("csv", 2, "the header is row 1, blank lines are not counted"),
    ".parquet": ("parquet", 1, "the first is row 1"),
    ".jsonl": ("json", 1, "the first is row 1, blank lines are not counted"),
}
"""What reads it, the number of its first row, and how rows are numbered."""

SEPARATORS = (",", ";", "\t", "|")
MOST_REASON = 400  # characters of what a library says
NO_ROWS = "add some, or name another file"

MOST_LINE, MOST_DECODED = 32_000_000, 4_000_000_000
"""Bytes of a line, a cell or a file of one text; and of the texts in a row group, which are in memory together."""

GROWTH, ROWS_A_BYTE, MOST_COLUMNS = 1_000, 100, 10_000
"""How far a column of Parquet may grow when it is unpacked, rows that a byte of it may stand for, and columns of which
the names are compared."""


@dataclass(frozen=True)
class Rows:
    """One split as it was found."""

    content: str  # a hash of what is in it
    read: Callable[[str], datasets.Dataset]  # puts the rows on disk, with a cache in the folder that it is given
    source: str
    first: int = 0
    counting: str = ""  # how rows are numbered, from ``first`` on
    files: Sequence[str] = ()  # of every row, where each has its own
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of the classes, by column, where it says them
    as_json: bool = False  # cells are JSON texts

    def describe(self, index: int) -> str:
        if self.files:
            return self.files[index]
        return f"{self.source} row {index + self.first} ({self.counting})"


def check_columns(source: str, found: Sequence[str], **wanted: str) -> None:
    """Refuse a missing column: ``text_column="text"`` says which field asks for which."""
    for key, name in wanted.items():
        none = f"data.{key}={name!r}: {source} has no such column; it has {', '.join(map(repr, found))}"
        require(name in found, none + nearest(repr(name), map(repr, found)))


class CsvFormat(NamedTuple):
    """How the cells of a .csv file are written; what is ``None`` is found out."""

    encoding: str | None = None
    separator: str | None = None


FOUND = CsvFormat()


def find_file(path: Path, cache: Path, written: CsvFormat = FOUND) -> Rows:
    """The rows of a .csv, .tsv, .parquet or .jsonl file; that it is empty or malformed is said when they are read."""
    kind = path.suffix.lower()
    require(path.is_file(), f"there is no file {path}: check the path")
    require(kind in _KINDS, f"{path} is none of {', '.join(_KINDS)}: convert it to one of them")
    (content,) = content_of(cache, [path], checksums)
    told = f" {written}" if any(written) else ""
    return Rows(f"{kind} {content}{told}", partial(_read_file, path, kind, written), str(path), *_KINDS[kind][1:])


def _read_file(path: Path, kind: str, written: CsvFormat, cache_dir: str) -> datasets.Dataset:
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # what they say of errors, ours say, too
    try:
        if Extractor.infer_extractor_format(path) is not None:  # datasets would unpack one, whatever its name says
            said = "it is compressed or an archive: unpack it first, where you can see what is in it"
            raise ValueError(said)  # noqa: TRY301
        if kind == ".jsonl":
            for _ in _lines(path):
                pass
        if kind == ".parquet":
            _refuse_bombs(path)
        options = {"cache_dir": cache_dir} | (_csv_options(path, written) if _KINDS[kind][0] == "csv" else {})
        table = datasets.load_dataset(_KINDS[kind][0], data_files=str(path), split="train", **options)
    except RecipeError:
        raise
    except Exception as error:  # each format's reader has its own exceptions
        require("corresponds to no data" not in str(error), f"{path} has no rows: {NO_ROWS}")
        raise RecipeError(f"{path} cannot be read as {kind[1:]} ({reason(error)}): mend the file") from error
    require(len(table) > 0, f"{path} has no rows: {NO_ROWS}")
    return table


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every row, parsed here: one that is nested some thousand times would end the process within datasets."""
    empty = True
    with open_regular(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MOST_LINE + 1), b""), start=1):
            _require_short(f"line {number}", line)
            try:
                row = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} holds no JSON object")  # noqa: TRY004
            if line.strip():
                empty = False
                yield row
    require(not empty, f"{path} has no rows: {NO_ROWS}")


def find_lines(path: Path, cache: Path, pick: Callable[[Sequence[str]], Sequence[str]]) -> Rows:
    """The rows of a .jsonl file whose cells may be of other types in each row: kept as JSON, each by itself.

    Of all columns that are found, those that ``pick`` returns are read.
    """
    (content,) = content_of(cache, [path], checksums)
    return Rows(f"lines {content}", partial(_read_lines, path, pick), str(path), *_KINDS[".jsonl"][1:], as_json=True)


def _read_lines(path: Path, pick: Callable[[Sequence[str]], Sequence[str]], cache_dir: str) -> datasets.Dataset:
    try:
        columns = tuple(pick(list(dict.fromkeys(name for row in _lines(path) for name in row))))  # a list is cut apart
        told: Any = {"path": path, "columns": columns}
        features = datasets.Features({name: datasets.Value("large_string") for name in columns})
        return datasets.Dataset.from_generator(_read_cells, features, cache_dir=cache_dir, gen_kwargs=told)
    except RecipeError:
        raise
    except Exception as error:  # datasets wraps what the generator raises
        raise RecipeError(f"{path} cannot be read as jsonl ({reason(error)}): mend the file") from error


def _read_cells(path: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    for row in _lines(path):
        yield {name: json.dumps(row.get(name)) for name in columns}


def find_texts(source: str, paths: Sequence[Path], cache: Path, encoding: str) -> Rows:
    """A row for each file: its ``text``, or the ``problem`` why it has none."""
    content = hash_of("texts", content_of(cache, paths, checksums), encoding)
    return Rows(content, partial(_read_documents, paths, encoding), source, files=list(map(str, paths)))


def _read_documents(paths: Sequence[Path], encoding: str, cache_dir: str) -> datasets.Dataset:
    features = datasets.Features(text=datasets.Value("large_string"), problem=datasets.Value("string"))
    told: Any = {"paths": tuple(map(str, paths)), "encoding": encoding}
    return datasets.Dataset.from_generator(_documents, features, cache_dir=cache_dir, gen_kwargs=told)


def _documents(paths: Sequence[str], encoding: str) -> Iterator[dict[str, str]]:
    for path in paths:
        text, problem = "", ""
        try:
            text = read_regular(path, MOST_LINE).decode(encoding)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except ValueError as error:
            problem = f"is no text in {encoding} ({reason(error)}): save it so, or leave it out"
        if "\0" in text:
            text, problem = "", "is no text (it has a character 0): leave it out"
        yield {"text": text, "problem": problem}


def _require_short(what: str, line: bytes) -> None:
    if len(line) > MOST_LINE:
        raise ValueError(f"{what} has more than {MOST_LINE / 1e6:g} MB: no text is that long")


def _refuse_bombs(path: Path) -> None:
    """Look into a Parquet file before it is decoded: a few kB of it can stand for gigabytes, of one cell or of many.

    Texts stay as the file has them meanwhile, each different one once: pages of at most 2 GB, whatever the footer says.
    """
    size, schema = path.stat().st_size, pq.read_schema(path)
    kinds = [field.type.value_type if pa.types.is_dictionary(field.type) else field.type for field in schema]
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    texts = [name for name, kind in zip(schema.names, kinds, strict=True) if any(check(kind) for check in is_text)]
    with pq.ParquetFile(path, read_dictionary=texts, pre_buffer=False) as file:
        metadata = file.metadata
        if metadata.num_rows > max(1_000_000, ROWS_A_BYTE * size):
            raise ValueError(f"{metadata.num_rows:,} rows in {size:,} bytes")
        for group in range(metadata.num_row_groups):
            require_moderate(metadata.row_group(group), group)
            for name in texts:
                column = file.read_row_group(group, columns=[name], use_threads=False).column(0)
                for chunk in column.chunks:
                    _require_cells(name, group, chunk)


def require_moderate(row_group: Any, number: int) -> None:
    """Raise ValueError where a column would grow out of all proportion, by the footer: a lie is found in reading."""
    for column in map(row_group.column, range(row_group.num_columns)):
        unpacked, packed = column.total_uncompressed_size, column.total_compressed_size
        if unpacked > max(MOST_LINE, GROWTH * packed):
            raise ValueError(
                f"row group {number}: {column.path_in_schema} of {packed:,} bytes would be unpacked to {unpacked:,}"
            )


def _require_cells(name: str, group: int, chunk: Any) -> None:
    lengths = pc.binary_length(chunk.dictionary)
    longest = pc.max(lengths).as_py() or 0
    if longest > MOST_LINE:
        raise ValueError(f"row group {group}: a cell of {name} has {longest:,} bytes: no text is that long")
    decoded = pc.sum(pc.take(lengths, chunk.indices)).as_py() or 0
    if decoded > MOST_DECODED:
        raise ValueError(f"row group {group}: {name} would be decoded to {decoded:,} bytes: write smaller row groups")


def _csv_options(path: Path, written: CsvFormat) -> dict[str, Any]:
    """Read every cell as it stands: no review that says "null" turns into a missing one, no label into 1.0."""
    encoding = _encoding_of(path, written.encoding)
    with open_regular(path) as file:
        header = io.TextIOWrapper(file, encoding).readline(MOST_LINE + 1)
    _require_short("the header", header.encode())
    common = {"sep": written.separator or _separator_of(header), "encoding": encoding}
    asked: Any = {**common, "dtype": str, "keep_default_na": False}
    given = pandas.read_csv(path, nrows=1, header=None, **asked).iloc[0].tolist()
    named = [name for name in given[:MOST_COLUMNS] if isinstance(name, str) and name]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise ValueError(f"the column {twice[0]!r} is given twice in the header")
    columns = pandas.read_csv(path, nrows=0, **common).columns
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    return {**common, "features": features, "keep_default_na": False}


def _encoding_of(path: Path, told: str | None) -> str:
    """The encoding of a file: the one that is ``told``, or UTF-8, or what its first bytes say; all of it must fit.

    Another that fits is proposed, but not taken: every byte is some letter in latin-1, be it the right one or not.
    """
    with open_regular(path) as file:
        start = file.read(4)
        marks = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
        found = next((name for mark, name in marks.items() if start.startswith(mark)), "utf-8")
        encoding, fits, lines = told or found, codecs.getincrementaldecoder(told or found)(), 1
        file.seek(0)
        for part in iter(partial(file.read, 2**20), b""):
            try:
                fits.decode(part)
            except UnicodeDecodeError as error:
                line = lines + part.count(b"\n", 0, error.start)
                beside = error.object[max(0, error.start - 12) : error.start + 12]
                raise RecipeError(
                    f"{path} line {line} is not {encoding} (byte 0x{error.object[error.start]:02x} in "
                    f"{beside.decode('cp1252', 'replace')!r}, as cp1252 reads it): if that looks right, say "
                    "--data.encoding cp1252 (Excel's), else the encoding that it has; or save it as UTF-8"
                ) from None
            lines += part.count(b"\n")
    return encoding


def _separator_of(header: str) -> str:
    """Of those that are common, the one that cuts the ``header`` in most columns; a comma where none does."""
    return max(SEPARATORS, key=lambda sign: len(next(csv.reader([header], delimiter=sign), [])))


def find_folders(root: Path, part: str, classes: Sequence[tuple[str, int]], cache: Path) -> Rows:
    """The rows ROOT/PART/NAME/*.txt, one text a file, in UTF-8, for every ``(name, label)`` of ``classes``."""
    files: list[tuple[str, int]] = []
    for name, label in classes:
        folder = root / part / name
        texts = sorted(folder.glob("*.txt"))
        require(len(texts) > 0, f"{folder} is missing or holds no .txt files")
        files += [(str(path), label) for path in texts]
    paths = [path for path, _ in files]
    content = hash_of(content_of(cache, list(map(Path, paths)), checksums), [label for _, label in files])
    return Rows(content, partial(_read_folders, root / part, files), str(root / part), files=paths)


def _read_folders(folder: Path, files: list[tuple[str, int]], cache_dir: str) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_generator(_read_texts, gen_kwargs={"files": files}, cache_dir=cache_dir)
    except Exception as error:  # datasets wraps what the generator raises
        raise RecipeError(f"{folder} cannot be read: {reason(error)}") from error


def _read_texts(files: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    for path, label in files:
        try:
            text = read_regular(path, MOST_LINE).decode()
        except OSError as error:
            raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError:
            raise RecipeError(f"{path} is not UTF-8 text: save it as UTF-8 or remove it") from None
        yield {"text": text, "label": label}


def is_cached(name: str, cache_dir: str | None) -> bool:
    """Whether a dataset of the Hugging Face hub has been loaded before: no hub is asked."""
    return (Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()


def find_hub(
    key: str,
    name: str,
    splits: Mapping[str, str],
    advice: str,
    cache_dir: str | None,
    config: str | None = None,
    revision: str | None = None,
) -> dict[str, Rows]:
    """Load ``splits``, by the parts that they are for, of a dataset of the Hugging Face hub or of its cache, or of a
    folder; ``advice`` is what to look at where the setting ``data.key``, the ``name``, is not what is wrong."""
    options: dict[str, Any] = {"split": list(splits.values()), "cache_dir": cache_dir, "revision": revision}
    here = Path(name).is_dir()
    why_not = None if here else away()
    try:
        tables = datasets.load_dataset(name, config, **options)
    except Exception as error:  # connection, authentication, missing dataset, missing split: one list would not do
        # Which parts and splits there are stands behind the first line.
        why = why_not or f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_REASON]}"
        if here:
            raise RecipeError(f"data.{key}={name!r} could not be loaded ({why}): check the folder, {advice}") from error
        raise RecipeError(
            f"data.{key}={name!r} is no folder here and could not be loaded from https://huggingface.co/datasets/"
            f"{name} ({why}): check the name and the network, {advice}; {of_hub()}"
        ) from error
    if why_not:
        tell_of_cache()
    counting = "the first is row 0, as on the hub"
    return {
        part: Rows(
            table._fingerprint,  # of its revision there
            partial(_as_loaded, table),
            f"{name} {splits[part]}",
            0,
            counting,
            names={column: kind.names for column, kind in table.features.items() if hasattr(kind, "names")},
        )
        for part, table in zip(splits, tables, strict=True)
    }


def _as_loaded(table: datasets.Dataset, cache_dir: str) -> datasets.Dataset:
    return table
