"""Whether the model and the recipe of a run are what the run wrote: hashes that lie with them.

They find accidents. A folder or recipe without them is of an earlier version, or was changed on purpose by a person who
took them away.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import MOST_BYTES, CorruptCheckpoint, reading
from trainer.system.files import hash_file, read_regular, write_atomic

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
        with reading(folder / name, f": {go_on}"):
            found = hash_file(folder / name)
        if found != entry["sha256"]:
            raise CorruptCheckpoint(f"{folder / name} is not what the run has written: {go_on}")
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
