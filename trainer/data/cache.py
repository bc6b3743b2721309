"""What is made of data once and kept on disk: found by its content, made by one process while the others wait."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from trainer.data.fingerprint import MOST_BYTES, spread
from trainer.errors import RecipeError
from trainer.system.files import hash_file, open_regular, read_regular, room_in, staged_file, staged_folder
from trainer.system.text import escaped

MANIFEST = "manifest.json"
CHUNK, MOST_NOTED = 1 << 20, 1 << 30
"""Bytes of a file that are hashed together; and of a note on the content of files: some hundred for each of them."""

SETTLED_NS = 2_000_000_000
"""A file that was changed less than this before it is looked at may be changed again without a new time of change."""


def cache_folder(cache_dir: str | None) -> Path:
    """Where to keep what is made: in ``cache_dir``, or in the cache of ``datasets`` (``HF_DATASETS_CACHE``)."""
    import datasets

    return Path(cache_dir if cache_dir is not None else datasets.config.HF_DATASETS_CACHE) / "trainer"


def cached(root: Path, key: str, what: str, build: Callable[[Path], None]) -> Path:
    """The folder that ``build`` has filled for ``key``, in this process or another one, now or earlier.

    One process of a machine builds, others wait; those of other machines too, where ``root`` is on a file system that
    locks files between them. The folder gets its name by one move when it is complete. One that is not what was built
    is built again, and that is said. The ``key`` is a hash of everything that decides the content.
    """
    place = root / key
    try:
        with room_in(root, "set data.cache_dir to a folder on another disk"):
            root.mkdir(parents=True, exist_ok=True)
            if _fault(place) is not None:
                with _locked(root / f"{key}.lock", what):
                    if fault := _fault(place):
                        _build(place, fault, build)
    except (OSError, NotImplementedError) as error:  # the latter where files cannot be locked
        why = getattr(error, "strerror", None) or error
        fix = "set data.cache_dir to a folder of yours on a disk that can lock files"
        raise RecipeError(f"the cache {root} cannot be used ({why}): {fix}") from error
    return place


def _locked(path: Path, what: str) -> AbstractContextManager[Any]:
    """The kernel lets go of it when this process ends, however that is."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=2)
    except Timeout:
        print(escaped(f"waiting for another process that makes {what}"), file=sys.stderr, flush=True)
        return lock.acquire()


def _build(place: Path, fault: str, build: Callable[[Path], None]) -> None:
    if place.exists():
        print(escaped(f"trainer: warning: {place} is broken ({fault}): it is made again"), file=sys.stderr, flush=True)
        shutil.rmtree(place)
    for part in place.parent.glob(f".{place.name}.*.part"):  # of a dead process of any machine: this one has the lock
        shutil.rmtree(part)
    with staged_folder(place) as folder:
        build(folder)
        files = {path.name: [path.stat().st_size, checksum(path)] for path in sorted(folder.iterdir())}
        (folder / MANIFEST).write_text(json.dumps(files))


def _fault(place: Path) -> str | None:
    """What is wrong with a folder of the cache; ``None`` for one that is as it was built."""
    try:
        files: Any = json.loads(read_regular(place / MANIFEST, MOST_NOTED))
        for name, (size, digest) in files.items():
            path = place / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if checksum(path) != digest:
                return f"{name} is not what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or place).name} cannot be read: {error.strerror}"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} cannot be read"
    return None


def checksums(paths: Sequence[Path]) -> list[str]:
    """Of every byte of every file."""
    return list(map(hash_file, paths))


def checksum(path: Path, most_bytes: float = MOST_BYTES) -> str:
    """The sha256 of a file, in hexadecimal: of all of it up to ``most_bytes``, of evenly spread blocks beyond."""
    size = path.stat().st_size
    if size <= most_bytes:
        return hash_file(path)
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for block in spread(-(-size // CHUNK), max(2, int(most_bytes) // CHUNK)):
            file.seek(block * CHUNK)
            digest.update(file.read(CHUNK))
    return digest.hexdigest()


def content_of(
    root: Path,
    paths: Sequence[Path],
    look: Callable[[Sequence[Path]], list[Any]],
    *asked: Any,
    worth_keeping: Callable[[Sequence[Any]], bool] = bool,
) -> list[Any]:
    """What ``look`` says of the files; not asked again while their paths, inodes, sizes and times of change stay.

    Sizes and times of writing alone would not do: ``cp -p``, ``rsync -t`` and ``tar -x`` give another content the time
    of the old one, but the time of the change of the inode they cannot give it.

    Args:
        root: of the cache.
        paths: the files.
        look: says of each of them a hash of its content, or what else JSON can hold.
        asked: what decides the answers besides the contents.
        worth_keeping: whether the answers may be given again.
    """
    seen, settled = [], False
    with suppress(OSError):  # told by who looks into it
        stats = [(str(path.absolute()), path.stat()) for path in paths]
        seen = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in stats]
        settled = all(time.time_ns() - stat.st_ctime_ns > SETTLED_NS for _, stat in stats)
    note = root / "contents" / f"{hash_of(seen, *asked)}.json"
    known = read_note(note) if settled else None
    if known is not None:
        return known
    try:
        found = look(paths)
    except OSError as error:
        raise RecipeError(
            f"{error.filename} cannot be read ({error.strerror}): check that it is there and may be read"
        ) from error
    if settled and worth_keeping(found):
        write_note(note, found)
    return found


def read_note(note: Path) -> Any:
    """What :func:`write_note` has put there; ``None`` where nothing is, or what is there is damaged."""
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        known = json.loads(read_regular(note, MOST_NOTED))
        if known["digest"] == hash_of(known["found"]):
            return known["found"]
    return None


def write_note(note: Path, found: Any) -> None:
    """Keep what JSON can hold, whole or not at all: it saves time, no more, so that no error of the disk is told."""
    with suppress(OSError), staged_file(note, sync_folder=False) as part:
        part.write_text(json.dumps({"found": found, "digest": hash_of(found)}))


def hash_of(*values: Any) -> str:
    """A key for values that JSON can hold."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:40]
