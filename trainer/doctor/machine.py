"""Checks of the machine: libraries, devices, disk and memory; in separate processes also the process group, the
planner's estimate and a checkpoint that is written and read."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from trainer.checkpoint.tensor_parts import PartsReader, index_parts, replicated_part, write_parts
from trainer.contract import without_weights
from trainer.data.workers import MIN_SHM_BYTES, SHM_PATH, decide_workers
from trainer.doctor.context import CheckContext, Finding, fail, ok, skipped, warning
from trainer.errors import RecipeError
from trainer.fakegpu.fake_process_group import forget_process_group
from trainer.fakegpu.peaks import Retries
from trainer.fakegpu.prediction import Prediction
from trainer.fakegpu.target import Target, budget_bytes
from trainer.launching.local_store import ADDRESS, bind_to_loopback, loopback_store
from trainer.planner.predict import predict_in_process
from trainer.planner.search import BUDGET_MARGIN
from trainer.run.run_prediction import this_device
from trainer.system.child_jobs import ChildError, ChildJob, run_in_child
from trainer.system.files import hash_file, sync_to_disk
from trainer.system.lock import NAME, RunLock
from trainer.system.machine import available_bytes, cores, query_gpus_in_child
from trainer.system.text import GB, format_bytes

DISTRIBUTION = "exactbatch-trainer"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"

GPU_PROBE_TIMEOUT = 60.0  # how long a new process may take to import torch and query each GPU
BUSY_GPU_SHARE = 0.1  # minimum share of a GPU's memory in use by others that causes a warning


def libraries(subject: CheckContext) -> Finding:
    """Check that the installed versions meet the project's requirements."""
    wrong = []
    known = map(Requirement, required_versions())
    needed = [one for one in known if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in needed:
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            wrong.append((f"{one.name} is not installed", one))
            continue
        if not one.specifier.contains(version, prereleases=True):
            wrong.append((f"{one.name} {version} does not fit {one.specifier}", one))
    if not wrong:
        return ok(f"{len(needed)} as required; torch {torch.__version__}")
    install = " ".join(f"'{one.name}{one.specifier}'" for _, one in wrong)
    return fail("; ".join(text for text, _ in wrong), f"pip install {install}")


def required_versions() -> list[str]:
    """Return the project's requirements from its metadata, or from ``pyproject.toml`` if it is not installed."""
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        listed = re.search(r"^dependencies = \[(.*?)^\]", PROJECT.read_text(), re.MULTILINE | re.DOTALL)
        return re.findall(r'^ *"([^"]+)"', listed[1], re.MULTILINE) if listed else []


def devices(subject: CheckContext) -> Iterator[Finding]:
    """Check that the devices exist and are free."""
    ranks, threads = subject.world.devices, torch.get_num_threads()
    if subject.world.accelerator == "cpu":
        text = f"CPU: {cores()} cores for {ranks} rank(s) of {threads} thread(s)"
        yield ok(text) if ranks * threads <= cores() else warning(text, f"OMP_NUM_THREADS={max(1, cores() // ranks)}")
    else:
        yield from check_gpus(query_gpus_in_child(free=True, seconds=GPU_PROBE_TIMEOUT), ranks)


def check_gpus(gpus: Sequence[dict[str, Any]], wanted: int) -> Iterator[Finding]:
    """Check the first ``wanted`` GPUs of those that :func:`trainer.system.machine.query_gpus` returned."""
    version = Path("/proc/driver/nvidia/version")
    known = re.search(r"Module[^\d]+([\d.]+)", version.read_text()) if version.exists() else None
    driver = known[1] if known else f"for CUDA {torch.version.cuda}"
    if wanted > len(gpus):
        text = f"{wanted} GPUs were requested and {len(gpus)} found"
        yield fail(text, f"--run.devices {len(gpus)}, or CUDA_VISIBLE_DEVICES")
    for number, gpu in enumerate(gpus[:wanted]):
        free, total = gpu["free"], gpu["total_memory"]
        text = f"GPU {number}: {gpu['name']}, {free / GB:.1f} of {total / GB:.1f} GB free, driver {driver}"
        fix = "end the other processes on it, or choose another by CUDA_VISIBLE_DEVICES"
        yield warning(text, fix) if free < (1 - BUSY_GPU_SHARE) * total else ok(text)


def host_memory(subject: CheckContext) -> Finding:
    """Check that CPU memory holds a checkpoint's copy and, on a CPU or with offload, weights and optimizer state."""
    available, memory = available_bytes(), subject.recipe.memory
    on_host = subject.world.accelerator == "cpu" or memory.cpu_offload != "none"
    needed = 0
    if subject.ready and on_host:
        sharded = memory.strategy == "fsdp" or memory.cpu_offload == "parameters"
        needed = subject.state_bytes * (1 if sharded else subject.world.devices)
    copy = subject.checkpoint_bytes if subject.ready and subject.recipe.checkpoint.asynchronous else 0
    text = f"{format_bytes(available)} available" + (f", {format_bytes(needed)} of weights and state" if needed else "")
    text += f", {format_bytes(copy)} of a copy while a checkpoint is written" if copy else ""
    if needed > available:
        return fail(text, "end other processes, fewer ranks, or a smaller model")
    if needed + copy > available:
        return warning(text, "--checkpoint.asynchronous false, or end other processes")
    return ok(text)


def shared_memory(subject: CheckContext) -> Finding:
    """Check /dev/shm, through which data workers send their batches."""
    world = subject.world
    workers = decide_workers(subject.recipe.data, world.accelerator, world.devices)
    if not SHM_PATH.is_dir():
        return skipped(f"there is no {SHM_PATH} on this system")
    free = shutil.disk_usage(SHM_PATH).free
    text = f"{format_bytes(free)} free in {SHM_PATH} for {workers * world.devices} worker(s)"
    if workers and free < MIN_SHM_BYTES:
        return warning(text, "docker run --shm-size 8g, or --data.workers 0")
    if workers * world.devices > cores():
        return warning(f"{text} on {cores()} cores", f"--data.workers {cores() // world.devices}", "workers")
    return ok(text)


# Check that checkpoints can be written to the run directory and fit on its disk.

PROBE_BYTES = 8 * 2**20
SLOW_DISK_BYTES_PER_S = 20e6  # bytes per second, below which a disk counts as slow


def run_directory(subject: CheckContext) -> Iterator[Finding]:
    """Check that the run directory holds no other run, and that files can be written, synced, renamed and locked."""
    folder, disk = subject.run_dir, subject.existing_folder
    if (folder / "recipe.yaml").exists() and subject.recipe.run.resume == "none":
        yield fail(f"{folder} already holds a run", "--run.resume auto, or another --run.dir")
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(disk, os.W_OK):
        what = f"{disk} is not writable" if nearest.is_dir() else f"{nearest} is not a directory"
        yield fail(what, "another --run.dir")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=disk) as name:
            speed = _write_and_rename(Path(name))
            with RunLock(Path(name)):
                pass
    except RecipeError as error:
        yield fail(str(error).replace(name, str(disk)))
        return
    except OSError as error:
        yield fail(f"{disk}: {error.strerror or error}", "free some space, or another --run.dir")
        return
    text = f"{disk}: write, fsync, rename and lock work, {speed / 1e6:.0f} MB/s"
    yield warning(text, "a local disk, or a larger --checkpoint.every") if speed < SLOW_DISK_BYTES_PER_S else ok(text)
    if (folder / NAME).exists():
        with RunLock(folder):  # raises a RecipeError if another run uses the directory
            pass


def _write_and_rename(folder: Path) -> float:
    """Write, sync and rename a file as for a checkpoint, and return the bytes per second."""
    content = os.urandom(PROBE_BYTES)
    began = time.perf_counter()
    part = folder / "part"
    part.write_bytes(content)
    sync_to_disk(part)
    os.replace(part, folder / "whole")
    sync_to_disk(folder)
    taken = time.perf_counter() - began
    if (folder / "whole").read_bytes() != content:
        raise OSError(0, "a file was read with other content than was written")
    return PROBE_BYTES / taken


def disk_space(subject: CheckContext) -> Finding:
    """Check that the disk has space for the checkpoints that are kept and one that is being written."""
    if not subject.ready:
        return skipped("the size of the model is unknown")
    wishes, run = subject.recipe.checkpoint, subject.recipe.run
    has_best = run.evaluate and run.best != "last" and (subject.recipe.data.val is not None or run.best is not None)
    count = wishes.keep_last + max(wishes.keep_best, int(has_best)) + 1
    needed, free = count * subject.checkpoint_bytes, shutil.disk_usage(subject.existing_folder).free
    text = f"{format_bytes(free)} free, {count} checkpoints of about {format_bytes(subject.checkpoint_bytes)}"
    fix = f"free {needed - free:,} bytes on the file system of {subject.existing_folder}, lower --checkpoint.keep_last"
    return ok(text) if needed <= free else fail(text, f"{fix}, or another --run.dir")


# Ports and process group: start the requested number of ranks in separate processes and run an all-reduce.

RENDEZVOUS_TIMEOUT = 20.0
RENDEZVOUS_FIX = "check firewall, hostname and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO shows details"


def process_group(subject: CheckContext) -> Finding:
    """Start the ranks of this machine and add up their numbers, within ``RENDEZVOUS_TIMEOUT``."""
    size, on_gpu = subject.world.devices, subject.world.accelerator == "cuda"
    try:
        listener = socket.create_server((ADDRESS, 0))  # inherited by the first rank, which hosts the store
    except OSError as error:
        return fail(f"no port can be opened on {ADDRESS}: {error}", "check the network of this container")
    backend = "nccl" if on_gpu else "gloo"
    began = time.perf_counter()
    jobs = [partial(_all_reduce_ranks, backend, rank, size, listener) for rank in range(size)]
    ranks = [ChildJob(job, sees_gpu=on_gpu, anew=on_gpu) for job in jobs]
    listener.close()
    problems = []
    for rank, child in enumerate(ranks):
        if not child.wait(max(0.0, RENDEZVOUS_TIMEOUT - (time.perf_counter() - began))):
            child.kill()
            problems.append(f"rank {rank}: no answer within {RENDEZVOUS_TIMEOUT:g} s")
        elif isinstance(found := child.result(), Exception):
            problems.append(f"rank {rank}: {found}")
    if problems:
        return fail(f"{backend}, {size} rank(s): {problems[0]}", RENDEZVOUS_FIX)
    return ok(f"{backend}, {size} rank(s) met and added up in {time.perf_counter() - began:.1f} s")


def _all_reduce_ranks(backend: str, rank: int, size: int, listener: socket.socket) -> bool:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    forget_process_group()
    bind_to_loopback()
    port, patience = listener.getsockname()[1], timedelta(seconds=RENDEZVOUS_TIMEOUT)
    if rank == 0:
        store = loopback_store(listener, RENDEZVOUS_TIMEOUT)
    else:
        listener.close()
        store = dist.TCPStore(ADDRESS, port, wait_for_workers=False, timeout=patience)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    value = torch.tensor(float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    if value.item() != size * (size + 1) / 2:
        raise RuntimeError(f"the all-reduce returned {value.item():g} instead of {size * (size + 1) // 2}")
    dist.destroy_process_group()
    return True


# Memory and checkpoints: the planner's estimate for the longest samples, and a checkpoint that is written and read.

MAX_ROUND_TRIP_BYTES = 2e9  # maximum bytes of weights for the checkpoint check
CHECK_TIMEOUT = 30.0  # time limit of the estimate and of the checkpoint check
MEMORY_FIX = "--memory.budget 90% or trainer plan finds a plan that fits; or --memory.activation_checkpointing full"


class PeakMemory:
    """The planner's memory estimate, computed while the other checks run and compared with the device's memory."""

    def __init__(self, subject: CheckContext) -> None:
        self.subject = subject
        self.child: ChildJob | None = None
        if subject.ready and subject.plan is not None:
            world, self.device = subject.world, this_device(subject.world.accelerator)
            self.sharing = world.devices if self.device.name == "cpu" else 1  # ranks on CPUs share CPU memory
            self.limit = budget_bytes(subject.recipe.memory.budget, self.device, world.world_size)
            asked = partial(predict_in_process, subject.recipe, subject.plan, Target.here(self.device), world.nodes)
            self.child = ChildJob(partial(asked, capacity=self.limit // self.sharing))

    def finding(self) -> Finding:
        """Return the finding, after waiting at most ``CHECK_TIMEOUT``."""
        if self.child is None:
            asked = "the planner chooses a plan that fits when the run starts: trainer plan shows it"
            return skipped(asked if self.subject.ready else "model or data could not be prepared")
        if not self.child.wait(CHECK_TIMEOUT):
            self.child.kill()
            text = f"the estimate takes more than {CHECK_TIMEOUT:g} s: use trainer plan, which has no time limit"
            return skipped(text)
        result: Any = self.child.result()
        if isinstance(result, ChildError):
            return skipped(f"no estimate is possible: {result}")
        if isinstance(result, Exception):
            raise result
        found = Prediction.from_child(result)
        peak, kind = found.reserved * self.sharing, "CPU memory" if self.device.name == "cpu" else "reserved memory"
        text = f"estimated {kind} for the longest samples: {format_bytes(peak)} of {format_bytes(self.limit)}"
        if found.retries is None:
            return fail(text, MEMORY_FIX)
        text += f"; {Retries(found.retries)}" if found.retries else ""
        return warning(text, MEMORY_FIX) if peak * (1 + BUDGET_MARGIN) > self.limit else ok(text)


def round_trip(subject: CheckContext) -> Finding:
    """Write the model's weights like a checkpoint, read them, and compare them bit for bit."""
    weights = sum(p.numel() * p.element_size() for p in subject.module.parameters())
    if weights > MAX_ROUND_TRIP_BYTES:
        return skipped(f"{weights / GB:.1f} GB of weights: checked only up to {MAX_ROUND_TRIP_BYTES / GB:g} GB")
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=subject.existing_folder) as name:
        try:
            taken = run_in_child(partial(_save_and_load, subject, Path(name)), seconds=CHECK_TIMEOUT)
        except TimeoutError:
            text = f"{format_bytes(weights)} took more than {CHECK_TIMEOUT:g} s"
            return warning(text, "a faster disk, or a larger --checkpoint.every")
    if taken["different"]:
        return fail(f"{taken['different']} was read with other content than was written", "another --run.dir")
    rates = f"saved in {taken['save']:.2f} s, loaded in {taken['load']:.2f} s"
    return ok(f"{format_bytes(taken['bytes'])} of weights {rates}, bit for bit")


def _save_and_load(subject: CheckContext, folder: Path) -> dict[str, Any]:
    """Save and load the weights of a new model; return the seconds of each and the name of a tensor that differs."""
    torch.manual_seed(subject.recipe.seed)
    module = without_weights(subject.recipe.model).build()
    tensors: dict[str, torch.Tensor] = {f"weights/{name}": parameter for name, parameter in module.named_parameters()}
    tensors |= {f"buffers/{name}": buffer for name, buffer in module.named_buffers()}
    parts = {name: replicated_part(tensor.detach().contiguous()) for name, tensor in tensors.items()}
    began = time.perf_counter()
    path = folder / "probe.safetensors"
    entry = write_parts(path, parts)
    saved = time.perf_counter()
    different = "" if hash_file(path) == entry["sha256"] else path.name
    reader = PartsReader(folder, [index_parts(path.name, parts)])
    for name, part in parts.items():
        found = replicated_part(torch.empty_like(part.tensor))
        reader.read_into(name, found)
        if not torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (found.tensor, part.tensor))):
            different = different or name
    loaded = time.perf_counter() - saved
    return {"save": saved - began, "load": loaded, "bytes": entry["bytes"], "different": different}
