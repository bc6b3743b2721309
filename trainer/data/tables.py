"""Rows of text and label in files or on the hub. Messages can name the place of each row."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from glob import escape, glob
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.utils.extract import Extractor

from trainer.data.base import MAX_LINE_BYTES, explain_faults, root_cause, separator_of
from trainer.data.cache import cache_folder, checksums, hash_of, inspect_cached
from trainer.data.parquet_files import open_parquet, read_group, require_sane_growth, text_columns
from trainer.data.rows import (
    AUTO_FORMAT,
    COMPRESSED,
    KINDS,
    MAX_COLUMNS,
    NO_ROWS,
    CsvFormat,
    RowSource,
    detect_encoding,
    iter_json_lines,
    reject_archive,
    require_line_length,
)
from trainer.errors import RecipeError, RunError, require
from trainer.system.files import open_regular, read_regular, room_in
from trainer.system.hub import offline_advice as of_hub
from trainer.system.hub import offline_reason, warn_offline_cache

BLOCK_ROWS, BLOCK_BYTES = 250, 16_000_000  # maximum rows of a streamed table, and of Parquet bytes, in memory at once
MAX_REASON_CHARS = 400  # max characters of a library's message


def open_table(path: Path, cache: Path, csv_format: CsvFormat = AUTO_FORMAT) -> RowSource:
    """Return the rows of a .csv, .tsv, .parquet or .jsonl file. Reading them later checks that they are valid."""
    kind = path.suffix.lower()
    require(path.is_file(), f"there is no file {path}: check the path")
    require(kind in KINDS, f"{path} must be one of {', '.join(KINDS)}: convert it")
    (content,) = inspect_cached(cache, [path], checksums)
    content = f"{kind} {content} {csv_format}" if any(csv_format) else f"{kind} {content}"
    return RowSource(content, partial(_read_file, path, kind, csv_format), str(path), *KINDS[kind][1:])


def _read_file(path: Path, kind: str, written: CsvFormat, cache_dir: str) -> datasets.Dataset:
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # our errors include theirs
    with _explain_faults(path):
        _reject_decompression_bombs(path, kind)
        options = {"cache_dir": cache_dir} | (_csv_options(path, written) if KINDS[kind][0] == "csv" else {})
        try:
            with no_progress_bar():
                table = datasets.load_dataset(KINDS[kind][0], data_files=str(path), split="train", **options)
        except ValueError as error:  # also raised for a table without rows
            require("corresponds to no data" not in str(error), f"{path} has no rows: {NO_ROWS}")
            raise
    require(len(table) > 0, f"{path} has no rows: {NO_ROWS}")
    return table


def _explain_faults(path: Path) -> AbstractContextManager[None]:
    return explain_faults(f"{path} cannot be read as {path.suffix.lower()[1:]}")


Rows = Callable[[], Iterator[dict[str, Any]]]
"""Reads the rows of a table from the start. One block at a time is in memory."""


def stream_table(path: Path) -> tuple[int, dict[str, pa.DataType], Rows]:
    """Return the number of rows of a .csv, .tsv, .parquet or .jsonl file, its columns with their types, and its rows.

    The file is read once before, so that a fault at the end of a large one is found at the start."""
    kind = KINDS[path.suffix.lower()][0]
    with _explain_faults(path):
        reject_archive(path)
        if kind == "parquet":
            _reject_decompression_bombs(path, ".parquet")
            read: Rows = partial(_parquet_rows, path)
            with pq.ParquetFile(path, arrow_extensions_enabled=False) as file:
                count, schema = file.metadata.num_rows, file.schema_arrow
            columns = dict(zip(schema.names, schema.types, strict=True))
            require(len(columns) == len(schema), f"{path} has two columns with one name: rename one")
        else:
            csv_rows = partial(_csv_rows, path, _csv_options(path, AUTO_FORMAT)) if kind == "csv" else None
            read = csv_rows or partial(iter_json_lines, path)
            count, columns = _shape_of(read())
    require(count > 0, f"{path} has no rows: {NO_ROWS}")
    return count, columns, partial(_explained, path, read)


def _explained(path: Path, read: Rows) -> Iterator[dict[str, Any]]:
    with _explain_faults(path):
        yield from read()


def _shape_of(rows: Iterator[dict[str, Any]]) -> tuple[int, dict[str, pa.DataType]]:
    """Return the number of rows and a type for each column; a column of other or mixed JSON values is text."""
    number, found = 0, dict[str, set[type]]()
    for number, row in enumerate(rows, start=1):
        for name, cell in row.items():
            large = type(cell) is int and abs(cell) > 2**53  # a float64 may not represent it
            found.setdefault(name, set()).add(object if large else type(cell))
        require(len(found) <= MAX_COLUMNS, f"row {number} and those before have more than {MAX_COLUMNS:,} columns")
    exact = [{bool}, {int}, {float}, {int, float}]
    kinds = {name: types - {type(None)} for name, types in found.items()}
    cells = {name: [kind() for kind in own] if own in exact else [""] for name, own in kinds.items()}
    return number, {name: pa.array(own).type for name, own in cells.items()}


def _csv_rows(path: Path, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    options, names = {**options, "dtype": str}, list(options["features"])
    del options["features"]
    header = pandas.read_csv(path, nrows=1, header=None, **options).iloc[0].tolist()
    names = header if len({*header}) == len(names) else names  # pandas names columns without a name
    with pandas.read_csv(path, chunksize=BLOCK_ROWS, **options) as blocks:
        for block in blocks:
            if len(block) and not isinstance(block.index, pandas.RangeIndex):  # made of the first cells
                raise ValueError(f"a row has more cells than the {len(names)} of the header")
            yield from (dict(zip(names, cells, strict=True)) for cells in block.itertuples(index=False, name=None))


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path, arrow_extensions_enabled=False, pre_buffer=False, buffer_size=2**20) as file:
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        widest = max(group.total_byte_size // max(1, group.num_rows) for group in groups)
        for batch in file.iter_batches(max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, widest))), use_threads=False):
            yield from batch.to_pylist()


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide the progress bars of datasets while a file is read, which takes a moment."""
    enabled = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if enabled:
            datasets.enable_progress_bars()


def open_json_lines(path: Path, cache: Path, pick: Callable[[Sequence[str]], Sequence[str]]) -> RowSource:
    """Return the rows of a .jsonl file, each cell as JSON because types may change; ``pick`` selects columns."""
    (content,) = inspect_cached(cache, [path], checksums)
    read = partial(_read_lines, path, pick)
    return RowSource(f"lines {content}", read, str(path), *KINDS[".jsonl"][1:], as_json=True)


def _read_lines(path: Path, pick: Callable[[Sequence[str]], Sequence[str]], cache_dir: str) -> datasets.Dataset:
    with _explain_faults(path):
        columns = pick(list(dict.fromkeys(name for row in iter_json_lines(path) for name in row)))
        told: Any = {"path": path, "columns": tuple(columns)}  # from_generator splits lists
        features = datasets.Features({name: datasets.Value("large_string") for name in columns})
        with no_progress_bar():
            return datasets.Dataset.from_generator(_read_cells, features, cache_dir=cache_dir, gen_kwargs=told)


def _read_cells(path: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    for row in iter_json_lines(path):
        yield {name: json.dumps(row.get(name)) for name in columns}


def open_text_files(source: str, paths: Sequence[Path], cache: Path, encoding: str) -> RowSource:
    """Return one row per file, with its ``text``, or the ``problem`` why it has none."""
    content = hash_of("texts", inspect_cached(cache, paths, checksums), encoding)
    return RowSource(content, partial(_read_documents, paths, encoding), source, files=list(map(str, paths)))


def _read_documents(paths: Sequence[Path], encoding: str, cache_dir: str) -> datasets.Dataset:
    features = datasets.Features(text=datasets.Value("large_string"), problem=datasets.Value("string"))
    told: Any = {"paths": tuple(map(str, paths)), "encoding": encoding}
    return datasets.Dataset.from_generator(_documents, features, cache_dir=cache_dir, gen_kwargs=told)


def _documents(paths: Sequence[str], encoding: str) -> Iterator[dict[str, str]]:
    for path in paths:
        text, problem = "", ""
        try:
            text = read_regular(path, MAX_LINE_BYTES).decode(encoding)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except ValueError as error:  # also raised for a table without rows
            problem = f"is not {encoding} text ({root_cause(error)}): save it in that encoding, or leave it out"
        if "\0" in text:
            text, problem = "", "is not text (it contains the character 0): leave it out"
        yield {"text": text, "problem": problem}


def _reject_decompression_bombs(path: Path, kind: str) -> None:
    """Reject archives and oversized content before datasets reads the file: a few kB can expand to gigabytes."""
    if Extractor.infer_extractor_format(path) is not None:  # datasets would unpack it, regardless of its name
        raise RecipeError(COMPRESSED.format(path))
    for _ in iter_json_lines(path) if kind == ".jsonl" else ():
        pass
    if kind == ".parquet":
        with open_parquet(path, pre_buffer=False) as file:
            require_sane_growth(path, file.metadata)
            # One column is in memory at a time.
            for group, column in product(range(file.metadata.num_row_groups), text_columns(file.metadata)):
                read_group(path, file, group, [column])


def _csv_options(path: Path, written: CsvFormat) -> dict[str, Any]:
    """Return options that read every cell as text: "null" does not become missing, and a label 1 not 1.0."""
    encoding = detect_encoding(path, written.encoding)
    with open_regular(path) as file:
        header = io.TextIOWrapper(file, encoding).readline(MAX_LINE_BYTES + 1)
    require_line_length("the header", header.encode())
    common = {"sep": written.separator or separator_of(header), "encoding": encoding}
    asked: Any = {**common, "dtype": str, "keep_default_na": False}
    given = pandas.read_csv(path, nrows=1, header=None, **asked).iloc[0].tolist()
    named = [name for name in given[:MAX_COLUMNS] if isinstance(name, str) and name]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise ValueError(f"the column {twice[0]!r} is twice in the header")
    columns = pandas.read_csv(path, nrows=0, **common).columns
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    return {**common, "features": features, "keep_default_na": False}


def open_class_folders(root: Path, part: str, classes: Sequence[tuple[str, int]], cache: Path) -> RowSource:
    """Return the rows ROOT/PART/NAME/*.txt, one UTF-8 text per file, for every ``(name, label)`` of ``classes``."""
    files: list[tuple[str, int]] = []
    for name, label in classes:
        folder = root / part / name
        texts = sorted(folder.glob("*.txt"))
        require(len(texts) > 0, f"{folder} is missing or contains no .txt files: add them")
        files += [(str(path), label) for path in texts]
    paths = [path for path, _ in files]
    content = hash_of(inspect_cached(cache, list(map(Path, paths)), checksums), [label for _, label in files])
    return RowSource(content, partial(_read_folders, root / part, files), str(root / part), files=paths)


def _read_folders(folder: Path, files: list[tuple[str, int]], cache_dir: str) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_generator(_read_texts, gen_kwargs={"files": files}, cache_dir=cache_dir)
    except Exception as error:  # datasets wraps what the generator raises
        raise RecipeError(f"{folder} cannot be read: {root_cause(error)}") from error


def _read_texts(files: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    for path, label in files:
        try:
            text = read_regular(path, MAX_LINE_BYTES).decode()
        except OSError as error:
            raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError:
            raise RecipeError(f"{path} is not UTF-8 text: save it as UTF-8 or remove it") from None
        yield {"text": text, "label": label}


def is_cached(name: str, cache_dir: str | None) -> bool:
    """Return whether a dataset of the Hugging Face hub is in the local cache, without a request to the hub."""
    return (Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()


def open_hub_dataset(
    key: str,
    name: str,
    splits: Mapping[str, str],
    advice: str,
    cache_dir: str | None,
    config: str | None = None,
    revision: str | None = None,
) -> dict[str, RowSource]:
    """Load ``splits``, by part, of a hub dataset, its cache or a folder; ``advice`` names further settings to check."""
    options: dict[str, Any] = {"split": list(splits.values()), "cache_dir": cache_dir, "revision": revision}
    here = Path(name).is_dir()
    why_not = None if here else offline_reason()
    try:
        for path in map(Path, sorted(glob(f"{escape(name)}/**", recursive=True)) if here else ()):
            if path.is_file():
                _reject_decompression_bombs(path, path.suffix.lower())
        with room_in(cache_folder(cache_dir).parent, "set data.cache_dir to a folder on another disk"):
            tables = datasets.load_dataset(name, config, **options)
    except (RunError, RecipeError):
        raise
    except Exception as error:  # many classes: connection, authentication, missing dataset, missing split
        # The available configurations and splits are after the first line.
        why = why_not or f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_REASON_CHARS]}"
        if here:
            raise RecipeError(f"data.{key}={name!r} could not be loaded ({why}): check the folder, {advice}") from error
        hub = f"https://huggingface.co/datasets/{name} ({why})"
        cause = f"data.{key}={name!r} is not a local folder and could not be loaded from {hub}"
        raise RecipeError(f"{cause}: check the name and the network, {advice}; {of_hub()}") from error
    if why_not:
        warn_offline_cache()
    return {
        part: RowSource(
            table._fingerprint,  # depends on the revision on the hub
            partial(_as_loaded, table),
            f"{name} {splits[part]}",
            0,
            "the first is row 0, as on the hub",
            names={column: kind.names for column, kind in table.features.items() if hasattr(kind, "names")},
        )
        for part, table in zip(splits, tables, strict=True)
    }


def _as_loaded(table: datasets.Dataset, cache_dir: str) -> datasets.Dataset:
    return table
