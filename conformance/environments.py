"""One virtual environment per trainer: pinned, and reused while its list of packages is the same.

An environment of 5 GB per trainer would fill a disk, so they are layers on one base: ``base.txt`` is installed once,
and an environment sees it through a ``.pth`` file and adds only what ``trainers/NAME.txt`` lists. The lists have the
hashes of all files: change a version, and then run ``uv pip compile --no-deps --generate-hashes --no-annotate
--python-version 3.11 NAME.txt -o NAME.txt``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("CONFORMANCE_CACHE", Path.home() / ".cache" / "conformance"))
CREATION = threading.Lock()  # trainers are measured in threads, and all need the base


def python_of(trainer: str) -> Path:
    """Return the interpreter of a trainer's environment, which is created first if there is none.

    Raises:
        subprocess.CalledProcessError: if a package cannot be installed; its ``stderr`` says why.
    """
    own, shared = (HERE / "trainers" / f"{name}.txt" for name in (trainer, trainer.partition("_")[0]))
    pins = own if own.exists() else shared  # remedies and drop-ins share an environment
    with CREATION:
        base = _environment("base", HERE / "base.txt", None)
        return _environment(pins.stem, pins, base) if pins.exists() else base


def _environment(name: str, pins: Path, base: Path | None) -> Path:
    content = pins.read_bytes() + sys.version.encode() + (str(base).encode() if base else b"")
    folder = CACHE / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    for outdated in CACHE.glob(f"{name}-*"):
        shutil.rmtree(outdated)
    _run(sys.executable, "-m", "venv", str(folder))
    if base:
        (folder / _packages(folder) / "base.pth").write_text(str(base.parents[1] / _packages(base.parents[1])))
    options = ("--quiet", "--no-cache-dir", "--no-deps", "--require-hashes")
    _run(str(python), "-m", "pip", "install", *options, "-r", str(pins))
    (folder / "complete").touch()
    return python


def _packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python*/site-packages")
    return found.relative_to(folder)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
