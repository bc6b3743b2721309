"""The manifest of a checkpoint, written last: its origin and the hash of every file; and hashes of the results."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import RunError
from trainer.system.files import hash_file, read_regular, write_atomic

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
"""The state that is the same on all ranks."""
MAX_JSON_BYTES = 64 * 2**20
"""Max bytes of a JSON file of a checkpoint. A manifest has 170 bytes per file (two files per rank) and 60 bytes per
data file; the index of a rank has 200 bytes per tensor."""


class CorruptCheckpointError(RunError):
    """A checkpoint is not what was saved. The message names the file."""


class UnknownFormatError(CorruptCheckpointError):
    """A checkpoint written by a later version, which may be intact."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of ``manifest.json``."""

    run: str  # random name of the run that saved it, the same after a resume
    step: int  # optimizer steps taken
    epoch: int  # epochs completed
    step_in_epoch: int  # steps taken in the current epoch
    seed: int  # seed of the recipe; all other seeds are derived from it and the position
    world_size: int  # number of ranks that saved it
    plan: str  # description of the decided memory knobs
    recipe: Mapping[str, Any]  # settings by their dotted names
    dataset: str  # fingerprint of the data
    tokenizer: str | None  # hash of the tokenizer, if any
    versions: Mapping[str, str | None]  # versions of the trainer and of the libraries
    figures: Mapping[str, float] | None  # metrics of the last evaluation, if it was after this step
    created: str  # time of writing, UTC
    files: Mapping[str, Mapping[str, Any]]  # {"bytes", "sha256"} of every other file, by name
    format: int = FORMAT
    data_files: Mapping[str, str] = field(default_factory=dict)  # a short hash per data file, if they are separate
    base: Mapping[str, str] = field(default_factory=dict)  # sha256 of files with frozen weights, which are not saved

    def to_json(self) -> str:
        """Return the manifest as JSON, with a hash of its content that shows if the manifest was changed."""
        later = ("data_files", "base")  # left out if empty, as in older manifests
        content = {name: value for name, value in vars(self).items() if value or name not in later}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        return json.dumps({**content, "digest": digest}, indent=1, ensure_ascii=False) + "\n"


@contextmanager
def read_errors_as_corrupt(path: Path, hint: str = "") -> Iterator[None]:
    """Turn a disk error into a ``CorruptCheckpointError`` that names the file, ``path`` or another."""
    try:
        yield
    except OSError as error:
        raise CorruptCheckpointError(f"{error.filename or path} cannot be read: {error.strerror}{hint}") from error


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint ``folder``; raise CorruptCheckpointError if it or a file size is wrong."""
    path = folder / MANIFEST
    with read_errors_as_corrupt(path):
        try:
            written = read_regular(path, MAX_JSON_BYTES)
            content = json.loads(written)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path} is missing: the checkpoint was never complete") from None
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{path} is corrupt: {error}") from error
        found = content.get("format") if isinstance(content, dict) else None
        if isinstance(found, int) and found > FORMAT:
            raise UnknownFormatError(f"{path} has format {found}, but this version reads at most format {FORMAT}")
        what = f"{path} is corrupt: its content was not written by a run"
        try:
            manifest = Manifest(**{name: value for name, value in content.items() if name != "digest"})
        except (AttributeError, TypeError):
            raise CorruptCheckpointError(what) from None
        for name, fits in FIELDS.items():  # anyone can write a matching hash
            if not fits(getattr(manifest, name)):
                raise CorruptCheckpointError(f"{what}: {name}={truncate(repr(getattr(manifest, name)))}")
        if manifest.to_json().encode(errors="surrogatepass") != written:  # including whitespace
            raise CorruptCheckpointError(f"{path} is corrupt: its hash differs from the one in the file")
        if folder.absolute().name != folder_name(manifest.step):
            raise CorruptCheckpointError(f"{path} of step {manifest.step} is in {folder.name}: files were swapped")
        _require_sizes(folder, manifest)
    return manifest


def truncate(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict) or not _is_text(value.get("sha256")):
        return False
    return _is_count(value.get("bytes")) and re.fullmatch("[0-9a-f]{64}", value["sha256"]) is not None


def _maps_to(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("run", "plan", "dataset", "created"), _is_text),
    **dict.fromkeys(("step", "epoch", "step_in_epoch"), _is_count),
    "seed": lambda value: isinstance(value, int) and _is_count(abs(value)),
    "world_size": lambda value: _is_count(value) and value > 0,
    "recipe": lambda value: isinstance(value, dict),
    "tokenizer": _or_none(_is_text),
    "versions": _maps_to(_or_none(_is_text)),
    "figures": _or_none(
        _maps_to(lambda value: (isinstance(value, float) and math.isfinite(value)) or _is_count(value))
    ),
    "files": lambda value: _maps_to(_is_entry)(value) and all(Path(name).name == name for name in value),
    "format": lambda value: value == FORMAT and _is_count(value),
    "data_files": _maps_to(_is_text),
    "base": _maps_to(_is_text),
}
"""A check for each field of a manifest, as strict as the code that reads the field needs."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _require_sizes(folder: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.is_symlink():
            raise CorruptCheckpointError(f"{path} is missing or not a file")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CorruptCheckpointError(f"{path} has {size} bytes instead of {entry['bytes']}")
    others = sorted({path.name for path in folder.iterdir()} - {*manifest.files, MANIFEST})
    if others:
        raise CorruptCheckpointError(f"{folder / others[0]} is not a file of this checkpoint: remove it")


def find_corruption(folder: Path, share: int = 0, shares: int = 1) -> CorruptCheckpointError | None:
    """Check the manifest of a checkpoint and a share of its files; return the error, or ``None``."""
    try:
        manifest = read_manifest(folder)
        verify_files(folder, manifest, sorted(manifest.files)[share::shares])
    except CorruptCheckpointError as error:
        return error
    return None


def verify_files(folder: Path, manifest: Manifest, names: Sequence[str] | None = None) -> None:
    """Check the hashes of the files ``names`` (default: all); the error names the first file that was changed."""
    problem = f"is corrupt: its hash differs from the one in {MANIFEST}"
    for name in manifest.files if names is None else names:
        _require_hash(folder / name, manifest.files[name]["sha256"], problem)


def _require_hash(path: Path, stated: str, problem: str, hint: str = "") -> None:
    with read_errors_as_corrupt(path, hint):
        found = hash_file(path)
    if found != stated:
        raise CorruptCheckpointError(f"{path} {problem}")


# Hashes of the results of a run: next to the model, and in the last line of recipe.yaml. They detect accidents. They
# are missing if an earlier version wrote the folder or recipe, or if the user removed them to make a change.

FILES = "files.json"
"""The file of a folder with the bytes and sha256 of each other file."""

LINE = "# sha256 of the lines above: "
"""The start of the last line of a text."""

UNCHECKED = "it is not checked, because an earlier version wrote it or the hash was removed"


def write_hashes(folder: Path) -> None:
    """Write the sizes and hashes of all files in ``folder`` and below."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILES)
    files = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": hash_file(path)} for path in paths}
    write_atomic(folder / FILES, _content(files))


def verify_folder(folder: Path) -> str | None:
    """Raise ``RecipeError`` if a recorded file changed. Return why nothing was checked, or ``None``."""
    stated = folder / FILES
    if not stated.exists():
        return f"{folder} has no {FILES}: {UNCHECKED}"
    go_on = f"copy it again, or remove {stated} if it was changed on purpose"
    with read_errors_as_corrupt(stated):
        written = read_regular(stated, MAX_JSON_BYTES)
    try:
        files = json.loads(written)["files"]
        is_whole = _content(files).encode() == written
    except (ValueError, LookupError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CorruptCheckpointError(f"{stated} was changed after the run: {go_on}")
    for name, entry in files.items():
        _require_hash(folder / name, entry["sha256"], f"was changed after the run: {go_on}", f": {go_on}")
    return None


def append_hash(text: str) -> str:
    """Return ``text`` with its hash added as a comment in the last line."""
    return f"{text}{LINE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def verify_text_file(path: Path) -> str | None:
    """Check a file with a :func:`append_hash` text, with the same result as :func:`verify_folder`."""
    with read_errors_as_corrupt(path):
        text = read_regular(path, MAX_JSON_BYTES).decode(errors="replace")
    above, line, _ = text.rpartition(LINE)
    if not line:
        return f"{path} has no hash: {UNCHECKED}"
    if append_hash(above) != text:
        fix = "revert the change and use flags instead, or remove its last line, the hash, if it was changed on purpose"
        raise CorruptCheckpointError(f"{path} was changed after the run: {fix}")
    return None


def _content(files: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "digest": digest}, indent=1, ensure_ascii=True) + "\n"
