"""The manifest of a checkpoint, written last: what it is of, and the hash of every file; and hashes of the results."""

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
"""What all ranks have the same of."""
MOST_BYTES = 64 * 2**20
"""Of a JSON file of a checkpoint: a manifest takes 170 bytes a file of it, two files a rank, and 60 a file of the data;
what a rank says of its tensors takes 200 bytes for each of them."""


class CorruptCheckpoint(RunError):
    """A checkpoint is not what was saved. The message names the file."""


class UnknownFormat(CorruptCheckpoint):
    """A checkpoint that a later version has written: it may be what was saved."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``manifest.json`` holds."""

    run: str  # that saved it: a random name, kept when it is resumed
    step: int  # optimizer steps taken
    epoch: int  # epochs completed
    step_in_epoch: int  # taken in the epoch that comes next or goes on
    seed: int  # of the recipe; the seeds of everything else follow from it and the position
    world_size: int  # ranks that saved it
    plan: str  # the memory knobs that were decided, in words
    recipe: Mapping[str, Any]  # its settings by their dotted names
    dataset: str  # fingerprint of the data
    tokenizer: str | None  # its hash, if there is one
    versions: Mapping[str, str | None]  # of the trainer and of the libraries
    figures: Mapping[str, float] | None  # of the last evaluation, if it was made after this very step
    created: str  # when, UTC
    files: Mapping[str, Mapping[str, Any]]  # {"bytes", "sha256"} of every other file, by name
    format: int = FORMAT
    data_files: Mapping[str, str] = field(default_factory=dict)  # a short hash of each, where they are kept apart
    base: Mapping[str, str] = field(default_factory=dict)  # sha256 of the files of frozen weights that are left out

    def to_json(self) -> str:
        """With a hash of its own content, so that a changed manifest is found as well as a changed file."""
        content = dict(vars(self))
        for name in ("data_files", "base"):
            if not content[name]:  # as in manifests from before there was such a thing
                del content[name]
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        return json.dumps({**content, "digest": digest}, indent=1, ensure_ascii=False) + "\n"


@contextmanager
def reading(path: Path, hint: str = "") -> Iterator[None]:
    """Say of an error of the disk, as a corrupt checkpoint, which file, ``path`` or another, cannot be read."""
    try:
        yield
    except OSError as error:
        raise CorruptCheckpoint(f"{error.filename or path} cannot be read: {error.strerror}{hint}") from error


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of the checkpoint ``folder``, and that every file has the size that it says.

    Raises:
        CorruptCheckpoint: naming the file that is missing, changed, or not one of the checkpoint.
    """
    path = folder / MANIFEST
    with reading(path):
        try:
            written = read_regular(path, MOST_BYTES)
            content = json.loads(written)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path} is missing: the checkpoint was never complete") from None
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"{path} is corrupt: {error}") from error
        found = content.get("format") if isinstance(content, dict) else None
        if isinstance(found, int) and found > FORMAT:
            raise UnknownFormat(f"{path} has format {found}, of a later version; this one reads format {FORMAT}")
        what = f"{path} is corrupt: it holds something else than a run has written"
        try:
            manifest = Manifest(**{name: value for name, value in content.items() if name != "digest"})
        except (AttributeError, TypeError):
            raise CorruptCheckpoint(what) from None
        for name, fits in FIELDS.items():  # a hash that fits does not say who has made it
            if not fits(getattr(manifest, name)):
                raise CorruptCheckpoint(f"{what}: {name}={cut_off(repr(getattr(manifest, name)))}")
        if manifest.to_json().encode(errors="surrogatepass") != written:  # down to the last blank
            raise CorruptCheckpoint(f"{path} is corrupt: its content does not have the hash that it states")
        if folder.absolute().name != folder_name(manifest.step):
            raise CorruptCheckpoint(f"{path} is of step {manifest.step}, not of {folder.name}: files were swapped")
        _require_sizes(folder, manifest)
    return manifest


def cut_off(text: str) -> str:
    """At most 60 characters of ``text``."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_figure(value: Any) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or _is_count(value)


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
    "figures": _or_none(_maps_to(_is_figure)),
    "files": lambda value: _maps_to(_is_entry)(value) and all(Path(name).name == name for name in value),
    "format": lambda value: value == FORMAT and _is_count(value),
    "data_files": _maps_to(_is_text),
    "base": _maps_to(_is_text),
}
"""What the fields of a manifest are, each as far as what reads it relies upon it."""


def folder_name(step: int) -> str:
    """The name of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def _require_sizes(folder: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.is_symlink():
            raise CorruptCheckpoint(f"{path} is missing, or is not a file")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CorruptCheckpoint(f"{path} has {size} bytes instead of {entry['bytes']}")
    others = sorted({path.name for path in folder.iterdir()} - {*manifest.files, MANIFEST})
    if others:
        raise CorruptCheckpoint(f"{folder / others[0]} is not a file of this checkpoint: remove it")


def fault_of(folder: Path, share: int = 0, shares: int = 1) -> CorruptCheckpoint | None:
    """What is wrong with a checkpoint, if anything, as far as its manifest and this share of its files tell."""
    try:
        manifest = read_manifest(folder)
        verify_files(folder, manifest, sorted(manifest.files)[share::shares])
    except CorruptCheckpoint as error:
        return error
    return None


def verify_files(folder: Path, manifest: Manifest, names: Sequence[str] | None = None) -> None:
    """Check the hashes of the files ``names`` (by default of all); an error names the first that is not as saved."""
    problem = f"is corrupt: it does not have the hash that {MANIFEST} states"
    for name in manifest.files if names is None else names:
        _require_hash(folder / name, manifest.files[name]["sha256"], problem)


def _require_hash(path: Path, stated: str, problem: str, hint: str = "") -> None:
    with reading(path, hint):
        found = hash_file(path)
    if found != stated:
        raise CorruptCheckpoint(f"{path} {problem}")


# The results of a run: hashes that lie beside the model, and in the last line of recipe.yaml. They find accidents. A
# folder or recipe without them is of an earlier version, or a person has removed them to change it on purpose.

FILES = "files.json"
"""In a folder, beside the files: bytes and sha256 of each."""

LINE = "# sha256 of the lines above: "
"""The last line of a text."""

UNCHECKED = "an earlier version wrote it, or a person has changed it; it is not checked"


def seal_folder(folder: Path) -> None:
    """Write the sizes and hashes of all files in ``folder`` and below."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILES)
    files = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": hash_file(path)} for path in paths}
    write_atomic(folder / FILES, _content(files))


def require_sealed(folder: Path) -> str | None:
    """Check every file that :func:`seal_folder` saw; what a person has put beside them is left alone.

    Returns why nothing could be checked, if so.

    Raises:
        CorruptCheckpoint: naming the file that is missing or changed, and what to do.
    """
    stated = folder / FILES
    if not stated.exists():
        return f"{folder} has no {FILES}: {UNCHECKED}"
    go_on = f"copy it again, or remove {stated} if it was changed on purpose"
    with reading(stated):
        written = read_regular(stated, MOST_BYTES)
    try:
        files = json.loads(written)["files"]
        is_whole = _content(files).encode() == written
    except (ValueError, LookupError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CorruptCheckpoint(f"{stated} is not what the run has written: {go_on}")
    for name, entry in files.items():
        _require_hash(folder / name, entry["sha256"], f"is not what the run has written: {go_on}", f": {go_on}")
    return None


def sealed(text: str) -> str:
    """``text`` with its hash as a last line, a comment."""
    return f"{text}{LINE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def require_sealed_text(path: Path) -> str | None:
    """Check a file that holds a :func:`sealed` text, as :func:`require_sealed` does a folder."""
    with reading(path):
        text = read_regular(path, MOST_BYTES).decode(errors="replace")
    above, line, _ = text.rpartition(LINE)
    if not line:
        return f"{path} has no hash: {UNCHECKED}"
    if sealed(above) != text:
        raise CorruptCheckpoint(
            f"{path} is not what the run has written: undo the change and give flags instead, or remove its last line, "
            "the hash, if it was changed on purpose"
        )
    return None


def _content(files: dict[str, Any]) -> str:
    """With a hash of its own, as a manifest has one."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "digest": digest}, indent=1, ensure_ascii=True) + "\n"
