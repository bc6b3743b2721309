"""The disk: whether the run directory can be written to as checkpoints are, and has the space for them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.doctor.finding import GB, Finding, fail, ok, skipped, warning
from trainer.doctor.subject import Subject
from trainer.errors import RecipeError
from trainer.faults.lock import NAME, RunLock
from trainer.system.files import sync_to_disk

PROBE_BYTES = 8 * 2**20
SLOW = 20e6
"""Bytes a second below which a disk is called slow."""


def run_directory(subject: Subject) -> Iterator[Finding]:
    """Whether there is a run already, and whether files can be written, synced, renamed and locked there."""
    check, folder = "run directory", subject.run_dir
    if (folder / "recipe.yaml").exists() and subject.recipe.run.resume == "none":
        yield fail(check, f"{folder} already holds a run", "--run.resume auto, or another --run.dir")
    in_the_way = next(path for path in (folder, *folder.parents) if path.exists())
    if not in_the_way.is_dir():
        yield fail(check, f"{in_the_way} is not a directory", "another --run.dir")
        return
    if not os.access(subject.disk, os.W_OK):
        yield fail(check, f"{subject.disk} is not writable", "another --run.dir")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=subject.disk) as name:
            speed = _write_and_rename(Path(name))
            lock = RunLock(Path(name))
            lock.acquire()
            lock.release()
    except RecipeError as error:
        yield fail(check, str(error).replace(name, str(subject.disk)))
        return
    except OSError as error:
        yield fail(check, f"{subject.disk}: {error.strerror or error}", "free some space, or another --run.dir")
        return
    text = f"{subject.disk}: write, fsync, rename and lock work, {speed / 1e6:.0f} MB/s"
    if speed < SLOW:
        yield warning(check, text, "a local disk, or a larger --checkpoint.every")
    else:
        yield ok(check, text)
    yield from _in_use(subject)


def _write_and_rename(folder: Path) -> float:
    """Write a file to the disk and give it its name, as a checkpoint is; the bytes a second."""
    content = os.urandom(PROBE_BYTES)
    began = time.perf_counter()
    part = folder / "part"
    part.write_bytes(content)
    sync_to_disk(part)
    os.replace(part, folder / "whole")
    sync_to_disk(folder)
    taken = time.perf_counter() - began
    if (folder / "whole").read_bytes() != content:
        raise OSError(0, "what was written is not what is read")
    return PROBE_BYTES / taken


def _in_use(subject: Subject) -> Iterator[Finding]:
    if not (subject.run_dir / NAME).exists():
        return
    lock = RunLock(subject.run_dir)
    try:
        lock.acquire()
    except RecipeError as error:
        yield fail("run directory", str(error))
        return
    lock.release()


def space(subject: Subject) -> Iterator[Finding]:
    """Whether there is space for the checkpoints that are kept, and the one that is being written."""
    check = "disk space"
    if not subject.ready:
        yield skipped(check, "the size of the model is not known")
        return
    wishes = subject.recipe.checkpoint
    count = wishes.keep_last + wishes.keep_best + 1
    needed, free = count * subject.checkpoint_bytes, shutil.disk_usage(subject.disk).free
    text = f"{free / GB:.2f} GB free, {count} checkpoints of about {subject.checkpoint_bytes / GB:.3f} GB"
    if free < needed:
        fix = f"free {needed - free:,} bytes on the file system of {subject.disk}, lower --checkpoint.keep_last"
        yield fail(check, text, f"{fix}, or another --run.dir")
    else:
        yield ok(check, text)
