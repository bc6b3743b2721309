"""Disks that are full: a tmpfs that only the case sees (chaos/small_disk.py)."""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from chaos.small_disk import SmallDisk

from hostile_cases.case import ANY, FIT, GOOD, RAN, REFUSED, Case

FULL: dict[str, tuple[list[str], str, str]] = {
    "predict, its output": (["predict", "spoken", "t.csv", "--trust-recipe", "--output", "disk/o.csv"], "", REFUSED),
    "predict, TMPDIR": (["predict", "spoken", "t.csv", "--trust-recipe", "--output", "o.csv"], "disk", ANY),
    "export --to hf": (["export", "spoken", "--trust-recipe", "--to", "hf", "--output", "disk/o"], "", REFUSED),
    "export --to peft": (["export", "adapted", "--trust-recipe", "--to", "peft", "--output", "disk/o"], "", REFUSED),
    "a cache of tokens": (["fit", "text.py", "--data.cache_dir", "disk/cache"], "", REFUSED),
    "a cache of conversations": (["fit", "chat.py", "--data.cache_dir", "disk/cache"], "", REFUSED),
    "a cache in TMPDIR": (["fit", "text.py", "--data.cache_dir", "fresh"], "disk", ANY),
    "a run directory": ([*FIT, "--run.dir", "disk/out"], "", REFUSED),
    "a sweep": (["sweep", "own.py", "--run.evaluate=true", "--over=optim.lr=0.001..1.0", "--data.val_fraction=0.3", "--out=disk/s"], "", REFUSED),
    "a plan": (["plan", "own.py", "--gpu", "cpu", "--out", "disk/p"], "", REFUSED),
    "a folder of evaluations": (["evaluate", "disk/run", "--trust-recipe"], "", RAN),
}


def _filled(words: list[str], scratch: str) -> list[str]:
    disk = SmallDisk(Path("disk").absolute())
    shutil.copytree("run", "disk/run")
    Path("t.csv").write_text(GOOD + "film,1\n" * (20_000 if scratch else 2000))
    disk.fill()
    if scratch:  # Python takes another folder where not a byte can be written
        os.truncate(disk.filler, disk.filler.stat().st_size - 2**16)
        os.environ["TMPDIR"] = str(Path(scratch).absolute())
    return words


def disks() -> Iterable[Case]:
    """Full disks: an error of the environment that names the folder, never of the user's file."""
    for given, (words, scratch, expect) in FULL.items():
        yield Case("full disk", given, partial(_filled, words, scratch), expect, "disk" if expect == REFUSED else "", code=1)
