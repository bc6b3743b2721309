"""The machine: libraries, devices, host and shared memory."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from trainer.data.workers import SHARED, SMALL_SHARED, decide_workers
from trainer.doctor.finding import Finding, fail, ok, skipped, warning
from trainer.doctor.subject import Subject
from trainer.errors import RecipeError
from trainer.system.files import sync_to_disk
from trainer.system.lock import NAME, RunLock
from trainer.system.machine import ask_for_gpus, available_bytes, cores
from trainer.system.text import GB

DISTRIBUTION = "exactbatch-trainer"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"

SECONDS = 60.0
"""How long a new process may take to import torch and ask each GPU."""

BUSY = 0.1
"""Share of a GPU's memory that others may hold before that is worth a word."""


def libraries(subject: Subject) -> Iterator[Finding]:
    """Whether the installed versions are those that the project asks for."""
    check, wrong, count = "libraries", [], 0
    for text in required():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append((f"{requirement.name} is not installed", requirement))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append((f"{requirement.name} {version} does not fit {requirement.specifier}", requirement))
    if wrong:
        install = " ".join(f"'{requirement.name}{requirement.specifier}'" for _, requirement in wrong)
        yield fail(check, "; ".join(text for text, _ in wrong), f"pip install {install}")
    else:
        yield ok(check, f"{count} as required; torch {torch.__version__}")


def required() -> list[str]:
    """What the project needs: as it was installed, or as its ``pyproject.toml`` says for a checkout that was not."""
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        listed = re.search(r"^dependencies = \[(.*?)^\]", PROJECT.read_text(), re.MULTILINE | re.DOTALL)
        return re.findall(r'^ *"([^"]+)"', listed[1], re.MULTILINE) if listed else []


def devices(subject: Subject) -> Iterator[Finding]:
    """Whether the devices are there, and free."""
    check, world = "devices", subject.world
    if world.accelerator == "cpu":
        threads = world.devices * torch.get_num_threads()
        text = f"CPU: {cores()} cores for {world.devices} rank(s) of {torch.get_num_threads()} thread(s)"
        if threads > cores():
            yield warning(check, text, f"OMP_NUM_THREADS={max(1, cores() // world.devices)}")
        else:
            yield ok(check, text)
        return
    yield from of_gpus(ask_for_gpus(free=True, seconds=SECONDS), world.devices)


def of_gpus(gpus: Sequence[dict[str, Any]], wanted: int) -> Iterator[Finding]:
    """What there is to say of the GPUs of this machine, of which ``wanted`` are to be used.

    Args:
        gpus: as :func:`trainer.system.machine.seen_gpus` gives them, with what is free.
        wanted: from the first on.
    """
    check, version = "devices", Path("/proc/driver/nvidia/version")
    known = re.search(r"Module[^\d]+([\d.]+)", version.read_text()) if version.exists() else None
    driver = known[1] if known else f"for CUDA {torch.version.cuda}"
    if wanted > len(gpus):
        text = f"{wanted} GPUs were asked for and {len(gpus)} are there"
        yield fail(check, text, f"--run.devices {len(gpus)}, or CUDA_VISIBLE_DEVICES")
    for number, gpu in enumerate(gpus[:wanted]):
        free, total = gpu["free"], gpu["total_memory"]
        text = f"GPU {number}: {gpu['name']}, {free / GB:.1f} of {total / GB:.1f} GB free, driver {driver}"
        if free < (1 - BUSY) * total:
            yield warning(check, text, "end the other processes on it, or choose another by CUDA_VISIBLE_DEVICES")
        else:
            yield ok(check, text)


def host_memory(subject: Subject) -> Iterator[Finding]:
    """Whether the weights and their optimizer's state fit the host, where they are to be there, and a copy of them."""
    check, available = "host memory", available_bytes()
    memory = subject.recipe.memory
    on_host = subject.world.accelerator == "cpu" or memory.cpu_offload != "none"
    needed = 0
    if subject.ready and on_host:
        sharded = memory.strategy == "fsdp" or memory.cpu_offload == "parameters"
        needed = subject.checkpoint_bytes * (1 if sharded else subject.world.devices)
    copy = subject.checkpoint_bytes if subject.ready and subject.recipe.checkpoint.asynchronous else 0
    text = f"{available / GB:.1f} GB available" + (f", {needed / GB:.2f} GB of weights and state" if needed else "")
    text += f", {copy / GB:.2f} GB of a copy while a checkpoint is written" if copy else ""
    if needed > available:
        yield fail(check, text, "end other processes, fewer ranks, or a smaller model")
    elif needed + copy > available:
        yield warning(check, text, "--checkpoint.asynchronous false, or end other processes")
    else:
        yield ok(check, text)


def shared_memory(subject: Subject) -> Iterator[Finding]:
    """Whether workers can hand their batches over, which they do in /dev/shm."""
    world = subject.world
    check, workers = "shared memory", decide_workers(subject.recipe.data, world.accelerator, world.devices)
    if not SHARED.is_dir():
        yield skipped(check, f"there is no {SHARED} on this system")
        return
    free = shutil.disk_usage(SHARED).free
    text = f"{free / GB:.2f} GB free in {SHARED} for {workers * world.devices} worker(s)"
    if workers and free < SMALL_SHARED:
        yield warning(check, text, "docker run --shm-size 8g, or --data.workers 0")
    elif workers * world.devices > cores():
        yield warning("workers", f"{text} on {cores()} cores", f"--data.workers {cores() // world.devices}")
    else:
        yield ok(check, text)


# The disk: whether the run directory can be written to as checkpoints are, and has the space for them.

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
