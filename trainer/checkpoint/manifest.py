"""The manifest of a checkpoint: what it is of, and the size and hash of every file. It is written last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import RunError
from trainer.system.files import hash_file, read_regular

FORMAT = 1
MANIFEST = "manifest.json"
MOST_BYTES = 64 * 2**20
"""Of a JSON file of a checkpoint: a manifest takes 170 bytes a file of it, two files a rank, and 60 a file of the data;
what a rank says of its tensors takes 200 bytes for each of them."""

HASH = re.compile("[0-9a-f]{64}")


class CorruptCheckpoint(RunError):
    """A checkpoint is not what was saved. The message names the file."""


class UnknownFormat(CorruptCheckpoint):
    """A checkpoint that a later version has written: it may be what was saved."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``manifest.json`` holds.

    Args:
        run: the run that saved it: a random name, kept when it is resumed.
        step: optimizer steps taken.
        epoch: epochs completed.
        step_in_epoch: steps taken in the epoch that comes next or goes on.
        seed: of the recipe; the seeds of everything else follow from it and the position.
        world_size: ranks that saved it.
        plan: the memory knobs that were decided, in words.
        recipe: the settings of the recipe by their dotted names.
        dataset: fingerprint of the data.
        tokenizer: hash of the tokenizer; ``None`` without one.
        versions: of the trainer and of the libraries.
        figures: of the last evaluation, if it was made after this very step.
        created: when, UTC.
        files: ``{"bytes", "sha256"}`` of every other file, by name.
        data_files: a short hash of every file of the data, by its name, where those are kept apart.
    """

    run: str
    step: int
    epoch: int
    step_in_epoch: int
    seed: int
    world_size: int
    plan: str
    recipe: Mapping[str, Any]
    dataset: str
    tokenizer: str | None
    versions: Mapping[str, str | None]
    figures: Mapping[str, float] | None
    created: str
    files: Mapping[str, Mapping[str, Any]]
    format: int = FORMAT
    data_files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """With a hash of its own content, so that a changed manifest is found as well as a changed file."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not self.data_files:  # as in manifests from before there was such a thing
            del content["data_files"]
        return json.dumps({**content, "digest": _digest(content)}, indent=1, ensure_ascii=False) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of the checkpoint ``folder``, and that every file has the size that it says.

    Raises:
        CorruptCheckpoint: naming the file that is missing, changed, or not one of the checkpoint.
    """
    path = folder / MANIFEST
    try:
        written = read_regular(path, MOST_BYTES)
        content = json.loads(written)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing: the checkpoint was never complete") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is corrupt: {error}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise UnknownFormat(f"{path} has format {found}, of a later version; this one reads format {FORMAT}")
    manifest = _parsed(path, content)
    if manifest.to_json().encode(errors="surrogatepass") != written:  # down to the last blank
        raise CorruptCheckpoint(f"{path} is corrupt: its content does not have the hash that it states")
    if folder.absolute().name != folder_name(manifest.step):
        raise CorruptCheckpoint(f"{path} is of step {manifest.step}, not of {folder.name}: files were swapped")
    try:
        _require_sizes(folder, manifest)
    except OSError as error:
        raise CorruptCheckpoint(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    return manifest


def _parsed(path: Path, content: Any) -> Manifest:
    """The manifest with this content.

    Raises:
        CorruptCheckpoint: naming the field that is not of its type: a hash that fits does not say who has made it.
    """
    what = f"{path} is corrupt: it holds something else than a run has written"
    try:
        manifest = Manifest(**{name: value for name, value in content.items() if name != "digest"})
    except (AttributeError, TypeError):
        raise CorruptCheckpoint(what) from None
    for name, fits in FIELDS.items():
        if not fits(getattr(manifest, name)):
            raise CorruptCheckpoint(f"{what}: {name}={_short(getattr(manifest, name))}")
    return manifest


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_figure(value: Any) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or _is_count(value)


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and _is_count(entry.get("bytes"))
        and _is_text(entry.get("sha256"))
        and HASH.fullmatch(entry["sha256"]) is not None
    )


def _maps_to(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(fits(item) for item in value.values())


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
    except OSError as error:  # its folder went while its files were listed
        return CorruptCheckpoint(f"{error.filename or folder} cannot be read: {error.strerror}")
    return None


def verify_files(folder: Path, manifest: Manifest, names: Sequence[str] | None = None) -> None:
    """Check the hashes of the files ``names`` (by default of all).

    Raises:
        CorruptCheckpoint: naming the first file that is not what was saved.
    """
    for name in manifest.files if names is None else names:
        path = folder / name
        try:
            found = hash_file(path)
        except OSError as error:
            raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        if found != manifest.files[name]["sha256"]:
            raise CorruptCheckpoint(f"{path} is corrupt: it does not have the hash that {MANIFEST} states")
