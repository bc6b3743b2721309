"""What the flags of commands have in common that are not a recipe's. Imports no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from trainer.errors import require
from trainer.system.files import make_folder

MOST = 1_000_000
"""Of whatever is counted: devices, nodes, steps, trials."""


def count(name: str, text: str) -> int:
    """The value of ``--name``, an integer of at least 1."""
    fits = text.isascii() and text.isdecimal() and len(text) < 10 and 0 < int(text) <= MOST
    require(fits, f"--{name}={text[:40]!r} must be an integer of at least 1, and at most {MOST:,}")
    return int(text)


def yes_or_no(name: str, text: str) -> bool:
    """The value of ``--name``, true or false."""
    require(text.lower() in ("true", "false"), f"--{name}={text!r} must be true or false")
    return text.lower() == "true"


def new_folder(command: str, wanted: str | None, reference: str) -> Path:
    """The folder that a command writes to, made; one that holds what it wrote before is refused.

    Args:
        command: ladder or plan; its main file is that name with ``.json``.
        wanted: the value of ``--out``, if it was given.
        reference: names the recipe.
    """
    name = f"{command}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    out = Path(wanted or f"runs/{Path(reference).stem}/{name}").absolute()
    make_folder("--out", out)
    require(not (out / f"{command}.json").exists(), f"--out={out} already holds a {command}: choose another folder")
    return out
