"""Rows of tables: their sources, and the first rows of a file, read without torch, pandas or datasets."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from trainer.data.base import MAX_LINE_BYTES, explain_faults, separator_of
from trainer.errors import RecipeError, require, suggest_name
from trainer.system.files import open_regular

if TYPE_CHECKING:
    import datasets

KINDS = {
    ".csv": ("csv", 2, "the header is row 1, blank lines are not counted"),
    ".tsv": ("csv", 2, "the header is row 1, blank lines are not counted"),
    ".parquet": ("parquet", 1, "the first is row 1"),
    ".jsonl": ("json", 1, "the first is row 1, blank lines are not counted"),
}
"""By suffix: the reader of ``datasets``, the number of the first row, and how rows are counted."""

NO_ROWS = "add some, or give another file"
COMPRESSED = "{} is compressed or an archive: unpack it first, and check its content"
ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"Rar!", b"7z\xbc\xaf", b"(\xb5/\xfd", b'\x04"M\x18')
ALPACA = ("instruction", "input", "output")  # columns of a prompt, its optional context, and the answer
PAIR_COLUMNS = {
    "chosen": ("chosen", "chosen_response", "response_chosen"),
    "rejected": ("rejected", "rejected_response", "response_rejected"),
    "prompt": ("prompt", "question", "instruction"),
    "system": ("system",),
}
"""Names of the columns of preferences by their role."""
MAX_SHOWN_GAPS = 5  # max number of rows with a gap that are named
MAX_ROWS = 1_000  # max rows that are read to infer settings
MAX_BYTES = 4_000_000  # max bytes that are read before torch is imported; takes 0.1 s
MAX_COLUMNS = 10_000  # max columns whose names are compared


@dataclass(frozen=True)
class RowSource:
    """The rows of one split, not read yet."""

    content: str  # hash of the content
    read: Callable[[str], datasets.Dataset]  # reads the rows to disk, with a cache in the given folder
    source: str
    first_row: int = 0
    row_numbering: str = ""  # how rows are counted, starting with ``first_row``
    files: Sequence[str] = ()  # file of every row, if each row has its own
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # class names by column, if the source has them
    as_json: bool = False  # whether cells are JSON texts

    def describe(self, index: int) -> str:
        if self.files:
            return self.files[index]
        return describe_row(self.source, index, self.first_row, self.row_numbering)


def describe_row(source: str, index: int, first_row: int, row_numbering: str) -> str:
    """Return the place of a row of a table as a spreadsheet counts; the last two are in ``KINDS``."""
    return f"{source} row {index + first_row} ({row_numbering})"


def brief_places(places: Sequence[str]) -> list[str]:
    """Shorten descriptions of rows: only the first states how rows are counted."""
    return [*places[:1], *(re.sub(r" \(the (first|header) is row[^)]*\)", "", place) for place in places[1:])]


def reject_gaps(gaps: Sequence[int], total: int, describe: Callable[[int], str], missing: str) -> str:
    """Reject rows without text or label, whose numbers are ``gaps``, unless ``missing`` is drop and others remain.
    Return a text about them."""
    if not gaps:
        return ""
    shown = ", ".join(brief_places([describe(index) for index in gaps[:MAX_SHOWN_GAPS]]))
    cause = f"{len(gaps):,} of {total:,} rows have no text or no label: {shown}"
    cause += f" and {len(gaps) - MAX_SHOWN_GAPS:,} more" if len(gaps) > MAX_SHOWN_GAPS else ""
    if missing == "error" or len(gaps) == total:
        fix = ", or leave these rows out with --data.missing drop" if len(gaps) < total else ""
        raise RecipeError(f"{cause}: add them{fix}")
    return cause


def reject_label(place: str, column: str, label: Any, classes: Iterable[str]) -> NoReturn:
    """Reject a label that the training data do not have."""
    known = f"{', '.join(classes)}, the labels of the training data"
    raise RecipeError(f"{place}: {column} {label!r} is not one of {known}")


def check_columns(source: str, found: Sequence[str], **wanted: str) -> None:
    """Check that the columns exist; ``text_column="text"`` maps the setting to its column."""
    for key, name in wanted.items():
        twin = next(other for other in wanted if wanted[other] == name)
        require(twin == key, f"data.{twin} and data.{key} are both {name!r}: they must differ")
        if name not in found:
            missing = f"data.{key}={name!r}: {source} has no such column; it has {', '.join(map(repr, found))}"
            raise RecipeError(missing + suggest_name(repr(name), map(repr, found)))


def find_chat_columns(source: str, found: Sequence[str], messages: str | None, pair: Sequence[str]) -> Sequence[str]:
    """Return the columns of conversations: ``messages`` if given, its default names, ``pair`` or ``ALPACA``."""
    if messages is not None:
        check_columns(source, found, messages_column=messages)
        return [messages]
    for names in ["messages"], ["conversations"], pair, ALPACA[::2]:
        if {*names} <= {*found}:
            return names if names != ALPACA[::2] else [name for name in ALPACA if name in found]
    prompt = f"data.prompt_column={pair[0]!r} and data.completion_column={pair[1]!r}"
    cause = f"{source} has no column messages or conversations, nor {prompt}; it has"
    raise RecipeError(f"{cause} {', '.join(map(repr, found))}: name its column, as with data.messages_column")


def find_pair_columns(source: str, found: Sequence[str], wanted: Mapping[str, str | None]) -> dict[str, str]:
    """Return the column of each role of a preference that has one: ``wanted``, or one of the usual names."""
    check_columns(source, found, **{f"{role}_column": name for role, name in wanted.items() if name is not None})
    usual = {role: next((name for name in names if name in found), "") for role, names in PAIR_COLUMNS.items()}
    columns = {role: wanted.get(role) or usual[role] for role in PAIR_COLUMNS}
    for role in ("chosen", "rejected"):
        cause = f"{source} has no column {' or '.join(PAIR_COLUMNS[role])}; it has {', '.join(map(repr, found))}"
        require(bool(columns[role]), f"{cause}: name it with data.{role}_column")
    return {role: name for role, name in columns.items() if name}


class CsvFormat(NamedTuple):
    """The format of a .csv file. ``None`` is detected."""

    encoding: str | None = None
    separator: str | None = None


AUTO_FORMAT = CsvFormat()


def has_text(text: Any) -> bool:
    """Return whether a cell is a text with more than white space."""
    return isinstance(text, str) and bool(text.strip())


def is_missing(label: Any) -> bool:
    """Return whether a cell has no label."""
    return label is None or label == "" or (isinstance(label, float) and isnan(label))


def iter_json_lines(path: Path, most: float = inf) -> Iterator[dict[str, Any]]:
    """Yield every parsed row that starts within ``most`` bytes. A row with thousands of nested levels would crash the
    process within datasets."""
    empty = True
    with open_regular(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), start=1):
            if file.tell() - len(line) > most:
                return
            require_line_length(f"line {number}", line)
            try:
                row = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not a JSON object")  # noqa: TRY004
            if line.strip():
                empty = False
                yield row
    require(not empty, f"{path} has no rows: {NO_ROWS}")


def require_line_length(what: str, line: bytes) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"{what} has more than {MAX_LINE_BYTES / 1e6:g} MB, the max for a text")


def marked_encoding(start: bytes) -> str:
    """Return the encoding that the byte order mark at the ``start`` of a file names, or UTF-8."""
    marks = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    return next((name for mark, name in marks.items() if start.startswith(mark)), "utf-8")


def detect_encoding(path: Path, declared: str | None) -> str:
    """Return the encoding of a file: ``declared`` if given, otherwise that of its first bytes, or UTF-8.

    The whole file must decode. Another encoding is suggested but never used, because latin-1 accepts any bytes.
    """
    with open_regular(path) as file:
        encoding, lines = declared or marked_encoding(file.read(4)), 1
        fits = codecs.getincrementaldecoder(encoding)()
        file.seek(0)
        for part in iter(partial(file.read, 2**20), b""):
            try:
                fits.decode(part)
            except UnicodeDecodeError as error:
                line = lines + part.count(b"\n", 0, error.start)
                beside = error.object[max(0, error.start - 12) : error.start + 12]
                around = f"byte 0x{error.object[error.start]:02x} in {beside.decode('cp1252', 'replace')!r} as cp1252"
                fix = "--data.encoding cp1252 (Excel's), otherwise give the file's encoding, or save it as UTF-8"
                cause = f"{path} line {line} is not {encoding} ({around})"
                raise RecipeError(f"{cause}: if that looks right, use {fix}") from None
            lines += part.count(b"\n")
    return encoding


class FirstRows(NamedTuple):
    """The first rows of a table, its columns, and whether these are all rows."""

    rows: list[dict[str, Any]]
    columns: list[str]
    whole: bool


def first_rows(path: Path, written: CsvFormat = AUTO_FORMAT, most: int = MAX_ROWS) -> FirstRows:
    """Read at most ``most`` rows, from the first ``MAX_BYTES``, of a .csv, .tsv, .jsonl or .parquet file.

    Raises:
        RecipeError: if the file has no rows or cannot be read, with the message of its full reader.
    """
    kind = path.suffix.lower()
    reject_archive(path)
    read = {"parquet": _first_of_parquet, "json": _first_of_json}.get(KINDS[kind][0], partial(_first_of_csv, written))
    with explain_faults(f"{path} cannot be read as {kind[1:]}"):
        found = read(path, most)
    require(len(found.rows) > 0, f"{path} has no rows: {NO_ROWS}")
    return found


def reject_archive(path: Path) -> None:
    """Reject a file that starts like an archive or a compressed file, regardless of its name."""
    with open_regular(path) as file:
        start = file.read(262)
    require(not start.startswith(ARCHIVES) and start[257:] != b"ustar", COMPRESSED.format(path))


def _first_of_csv(written: CsvFormat, path: Path, most: int) -> FirstRows:
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    whole = len(content) <= MAX_BYTES
    encoding = detect_encoding(path, written.encoding) if whole else written.encoding or marked_encoding(content)
    text = content.decode(encoding, "strict" if whole else "replace")
    header = text[: MAX_LINE_BYTES + 1].partition("\n")[0]
    require_line_length("the header", header.encode())
    limit = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        rows, columns = _parse_csv(text, written.separator or separator_of(header), most, strict=whole)
    finally:
        csv.field_size_limit(limit)  # is global, and other readers of untrusted files rely on it
    twice = sorted({name for name in columns if name and columns.count(name) > 1}) if len(columns) < MAX_COLUMNS else []
    if twice:
        raise ValueError(f"the column {twice[0]!r} is twice in the header")
    return FirstRows(rows, columns, whole and len(rows) < most)


def _parse_csv(text: str, separator: str, most: int, strict: bool) -> tuple[list[dict[str, Any]], list[str]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=strict)
    try:
        return list(islice(reader, most)), list(reader.fieldnames or ())
    except csv.Error as error:
        if strict and "end of data" not in str(error):  # pandas accepts the rest
            return _parse_csv(text, separator, most, strict=False)
        raise ValueError("a quotation mark is never closed") from error


def _first_of_json(path: Path, most: int) -> FirstRows:
    rows = list(islice(iter_json_lines(path, MAX_BYTES), most))
    whole = path.stat().st_size <= MAX_BYTES and len(rows) < most
    return FirstRows(rows, list(dict.fromkeys(name for row in rows for name in row)), whole)


def _first_of_parquet(path: Path, most: int) -> FirstRows:
    """Read the first row group, with the limits of the full reader on what it expands to."""
    from trainer.data.parquet_files import open_parquet, read_group, require_sane_growth

    with open_parquet(path, pre_buffer=False) as file:
        require_sane_growth(path, file.metadata)
        names = list(file.schema_arrow.names)
        if file.metadata.num_row_groups == 0:
            return FirstRows([], names, True)
        rows = read_group(path, file, 0, names).slice(0, most).to_pylist()
        return FirstRows(rows, names, len(rows) == file.metadata.num_rows)
