"""The manifest of a checkpoint: what it is of, and the size and hash of every file. It is written last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import RunError

FORMAT = 1
MANIFEST = "manifest.json"
CHUNK = 16 * 2**20
TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("run", "plan", "dataset", "created"), str),
    **dict.fromkeys(("step", "epoch", "step_in_epoch", "seed", "world_size", "format"), int),
    **dict.fromkeys(("recipe", "versions", "files", "data_files"), dict),
    "tokenizer": (str, type(None)),
    "figures": (dict, type(None)),
}


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
        written = path.read_bytes()
        content = json.loads(written)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing: the checkpoint was never complete") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is corrupt: {error}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise UnknownFormat(f"{path} has format {found}, of a later version; this one reads format {FORMAT}")
    manifest = _parsed(content)
    if manifest is None:
        raise CorruptCheckpoint(f"{path} is corrupt: it holds something else than a run has written")
    if manifest.to_json().encode() != written:  # down to the last blank
        raise CorruptCheckpoint(f"{path} is corrupt: its content does not have the hash that it states")
    if folder.absolute().name != folder_name(manifest.step):
        raise CorruptCheckpoint(f"{path} is of step {manifest.step}, not of {folder.name}: files were swapped")
    _require_sizes(folder, manifest)
    return manifest


def _parsed(content: Any) -> Manifest | None:
    """The manifest with this content; ``None`` where it is not one."""
    try:
        manifest = Manifest(**{name: value for name, value in content.items() if name != "digest"})
    except (AttributeError, TypeError):
        return None
    return manifest if _is_sound(manifest) else None


def _is_sound(manifest: Manifest) -> bool:
    """Whether everything is of its type: a hash that fits does not say who has made it."""
    typed = all(isinstance(getattr(manifest, name), kind) for name, kind in TYPES.items())
    return (
        typed
        and manifest.format == FORMAT
        and manifest.world_size > 0
        and all(Path(name).name == name and _is_entry(entry) for name, entry in manifest.files.items())
    )


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)


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


def hash_file(path: Path) -> str:
    """The sha256 of a file, in hexadecimal; hashlib uses the processor's instructions for it where there are any."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()
