"""On-disk cache of processed data, keyed by content. One process builds an entry while the others wait."""

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

from trainer.errors import RecipeError
from trainer.system.files import hash_file, open_regular, read_regular, room_in, staged_file, staged_folder
from trainer.system.text import escaped

MANIFEST = "manifest.json"
MAX_HASHED_BYTES = 1 << 30  # max bytes read of a file or table
CHUNK = 1 << 20  # bytes of a file that are hashed at once
MAX_CACHE_JSON_BYTES = 1 << 30  # max bytes of a note on files, which has some hundred bytes per file
MTIME_SETTLE_NS = 2_000_000_000  # time after a change in which another one may leave the time of change the same

Inspection = Callable[[Sequence[Path]], list[Any]]  # returns a JSON value per file


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of the cache: in ``cache_dir``, or in the cache of ``datasets`` (``HF_DATASETS_CACHE``)."""
    import datasets

    return Path(cache_dir if cache_dir is not None else datasets.config.HF_DATASETS_CACHE) / "trainer"


def get_or_build(root: Path, key: str, what: str, build: Callable[[Path], None]) -> Path:
    """Return the folder that ``build`` fills for ``key``, a hash of all its inputs, from the cache if it is intact.

    One process builds while the others wait, also on other machines if the file system of ``root`` locks files between
    them. A complete folder is moved to its name atomically."""
    place = root / key
    try:
        with room_in(root, "set data.cache_dir to a folder on another disk"):
            root.mkdir(parents=True, exist_ok=True)
            if _cache_problem(place) is not None:
                with _file_lock(root / f"{key}.lock", what):
                    if fault := _cache_problem(place):
                        _build(place, fault, build)
    except (OSError, NotImplementedError) as error:  # NotImplementedError if files cannot be locked
        why = getattr(error, "strerror", None) or error
        fix = "set data.cache_dir to a folder that you own, on a disk that can lock files"
        raise RecipeError(f"the cache {root} cannot be used ({why}): {fix}") from error
    return place


def _file_lock(path: Path, what: str) -> AbstractContextManager[Any]:
    lock = FileLock(path)  # the kernel releases it even if this process is killed
    try:
        return lock.acquire(timeout=2)
    except Timeout:
        print(escaped(f"waiting for another process that makes {what}"), file=sys.stderr, flush=True)
        return lock.acquire()


def _build(place: Path, fault: str, build: Callable[[Path], None]) -> None:
    if place.exists():
        print(escaped(f"trainer: warning: {place} is damaged ({fault}): rebuilding it"), file=sys.stderr, flush=True)
        shutil.rmtree(place)
    for part in place.parent.glob(f".{place.name}.*.part"):  # left by a dead process, because this one has the lock
        shutil.rmtree(part)
    with staged_folder(place) as folder:
        build(folder)
        files = {path.name: [path.stat().st_size, checksum(path)] for path in sorted(folder.iterdir())}
        (folder / MANIFEST).write_text(json.dumps(files))


def _cache_problem(place: Path) -> str | None:
    """Return the reason why a folder of the cache is damaged, or ``None`` if it is intact."""
    try:
        files: Any = json.loads(read_regular(place / MANIFEST, MAX_CACHE_JSON_BYTES))
        for name, (size, digest) in files.items():
            path = place / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if checksum(path) != digest:
                return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or place).name} cannot be read: {error.strerror}"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} cannot be read"
    return None


def checksums(paths: Sequence[Path]) -> list[str]:
    """Hash every byte of every file."""
    return list(map(hash_file, paths))


def evenly_spaced(size: int, count: int) -> list[int]:
    """Return up to ``count`` evenly spread numbers from 0 to ``size`` - 1, including both ends."""
    if size <= count:
        return list(range(size))
    return [number * (size - 1) // (count - 1) for number in range(count)]


def checksum(path: Path, max_bytes: float = MAX_HASHED_BYTES) -> str:
    """Return the sha256 of a file in hexadecimal. Beyond ``max_bytes`` only evenly spread blocks are hashed."""
    size = path.stat().st_size
    if size <= max_bytes:
        return hash_file(path)
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for block in evenly_spaced(-(-size // CHUNK), max(2, int(max_bytes) // CHUNK)):
            file.seek(block * CHUNK)
            digest.update(file.read(CHUNK))
    return digest.hexdigest()


def inspect_cached(
    root: Path, paths: Sequence[Path], inspect: Inspection, *asked: Any, worth_keeping: Callable[[Any], bool] = bool
) -> list[Any]:
    """Return the results of ``inspect`` for the files, cached while their paths, inodes, sizes and change times stay.

    ``cp -p``, ``rsync -t`` and ``tar -x`` can restore sizes and modification times for other content, but not the
    inode's change time (ctime). ``inspect`` returns a JSON value per file, and may use ``asked``.
    """
    seen, settled = [], False
    with suppress(OSError):  # look() reports the error
        stats = [(str(path.absolute()), path.stat()) for path in paths]
        seen = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in stats]
        settled = all(time.time_ns() - stat.st_ctime_ns > MTIME_SETTLE_NS for _, stat in stats)
    note = root / "contents" / f"{hash_of(seen, *asked)}.json"
    if settled and (known := read_cache_json(note)) is not None:
        return known
    try:
        found = inspect(paths)
    except OSError as error:
        cause = f"{error.filename} cannot be read ({error.strerror})"
        raise RecipeError(f"{cause}: check that it exists and its permissions") from error
    if settled and worth_keeping(found):
        write_cache_json(note, found)
    return found


def read_cache_json(note: Path) -> Any:
    """Return what :func:`write_cache_json` has written; ``None`` if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        known = json.loads(read_regular(note, MAX_CACHE_JSON_BYTES))
        if known["digest"] == hash_of(known["found"]):
            return known["found"]
    return None


def write_cache_json(note: Path, found: Any) -> None:
    """Write JSON atomically, best effort: the note only saves time, so disk errors are ignored."""
    with suppress(OSError), staged_file(note, sync_folder=False) as part:
        part.write_text(json.dumps({"found": found, "digest": hash_of(found)}))


def hash_of(*values: Any) -> str:
    """Return a key for JSON values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:40]
