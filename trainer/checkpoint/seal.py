"""Whether the model and the recipe of a run are what the run wrote: hashes that lie with them.

They find accidents. A folder or recipe without them is of an earlier version, or was changed on purpose by a person who
took them away.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import MOST_BYTES, CorruptCheckpoint
from trainer.system.files import hash_file, read_regular, write_atomic

FILES = "files.json"
"""In a folder, beside the files: bytes and sha256 of each."""

LINE = "# sha256 of the lines above: "
"""The last line of a text."""


def seal_folder(folder: Path) -> None:
    """Write the sizes and hashes of all files in ``folder`` and below."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILES)
    files = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": hash_file(path)} for path in paths}
    write_atomic(folder / FILES, _content(files))


def require_sealed(folder: Path) -> str | None:
    """Check every file that :func:`seal_folder` saw; what a person has put beside them is left alone.

    Returns:
        Why nothing could be checked, if so.

    Raises:
        CorruptCheckpoint: naming the file that is missing or changed, and what to do.
    """
    stated = folder / FILES
    if not stated.exists():
        return f"{folder} has no {FILES}: an earlier version wrote it, or a person has changed it; it is not checked"
    go_on = f"copy it again, or remove {stated} if it was changed on purpose"
    try:
        written = read_regular(stated, MOST_BYTES)
        files = json.loads(written)["files"]
        is_whole = _content(files).encode() == written
    except OSError as error:
        raise CorruptCheckpoint(f"{stated} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CorruptCheckpoint(f"{stated} is not what the run has written: {go_on}")
    for name, entry in files.items():
        try:
            found = hash_file(folder / name)
        except OSError as error:
            raise CorruptCheckpoint(f"{folder / name} cannot be read ({error.strerror}): {go_on}") from error
        if found != entry["sha256"]:
            raise CorruptCheckpoint(f"{folder / name} is not what the run has written: {go_on}")
    return None


def sealed(text: str) -> str:
    """``text`` with its hash as a last line, a comment."""
    return f"{text}{LINE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def require_sealed_text(path: Path) -> str | None:
    """Check a file that holds a :func:`sealed` text.

    Returns:
        Why nothing could be checked, if so.

    Raises:
        CorruptCheckpoint: when it was changed, and what to do.
    """
    try:
        text = read_regular(path, MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    above, line, _ = text.rpartition(LINE)
    if not line:
        return f"{path} has no hash: an earlier version wrote it, or a person has changed it; it is not checked"
    if sealed(above) != text:
        raise CorruptCheckpoint(
            f"{path} is not what the run has written: undo the change and give flags instead, or remove its last line, "
            "the hash, if it was changed on purpose"
        )
    return None


def require_run(run_dir: Path) -> list[str]:
    """Check ``recipe.yaml`` and ``model/`` of a run directory; why something could not be checked.

    Raises:
        CorruptCheckpoint: naming the file.
    """
    recipe = run_dir / "recipe.yaml"  # a model may be used with a recipe from elsewhere
    found = [require_sealed_text(recipe) if recipe.exists() else None, require_sealed(run_dir / "model")]
    return [text for text in found if text is not None]


def _content(files: dict[str, Any]) -> str:
    """With a hash of its own, as a manifest has one."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "digest": digest}, indent=1, ensure_ascii=True) + "\n"
