"""Memory and checkpoints: the planner's prediction for the longest samples, and a checkpoint written and read back."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint.parts import Part, PartsReader, describe_parts, whole, write_parts
from trainer.doctor.finding import Finding, fail, ok, skipped, warning
from trainer.doctor.subject import Subject
from trainer.launching.loopback import ADDRESS, keep_to_loopback, loopback_store
from trainer.planner.fake_ranks import forget_process_group
from trainer.planner.predict import Prediction, predict_here
from trainer.planner.search import MARGIN
from trainer.planner.target import Target, budget_bytes
from trainer.run.forecast import this_device
from trainer.system.children import Child, Failed, in_child
from trainer.system.files import hash_file
from trainer.system.text import GB

LARGEST = 2e9
"""Bytes of weights up to which a checkpoint is tried."""

SECONDS = 30.0
FIX = "--memory.budget 90%, or trainer plan, finds one that fits; --memory.activation_checkpointing full"


class PeakMemory:
    """The planner's prediction of a run, made beside the other checks, against what the device has.

    Args:
        subject: ready.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.child: Child | None = None
        if subject.ready and subject.plan is not None:
            self.device = this_device(subject.world.accelerator)
            job = partial(
                predict_here, subject.recipe, subject.plan, Target.here(self.device), subject.world.nodes, False
            )
            self.child = Child(job)

    def look(self) -> Iterator[Finding]:
        """The verdict, within ``SECONDS`` of waiting."""
        check, subject = "peak memory", self.subject
        if self.child is None:
            asked = "the planner decides what fits when the run starts: trainer plan shows it"
            yield skipped(check, asked if subject.ready else "model or data could not be prepared")
            return
        if not self.child.wait(SECONDS):
            self.child.kill()
            yield skipped(check, f"the prediction takes more than {SECONDS:g} s: trainer plan has more patience")
            return
        result: Any = self.child.result()
        if isinstance(result, Failed):
            yield skipped(check, f"it cannot be predicted: {result}")
            return
        if isinstance(result, Exception):
            raise result
        yield self._verdict(Prediction.answered(result))

    def _verdict(self, found: Prediction) -> Finding:
        budget, world = self.subject.recipe.memory.budget, self.subject.world
        limit = budget_bytes(budget, self.device, world.size)
        sharing = world.devices if self.device.name == "cpu" else 1  # ranks on CPUs have the host's memory in common
        kind = "of host memory" if self.device.name == "cpu" else "reserved"
        text = (
            f"{sharing * found.reserved / GB:.2f} GB {kind} predicted for the longest samples, of {limit / GB:.2f} GB"
        )
        if sharing * found.reserved > limit:
            return fail("peak memory", text, FIX)
        if sharing * found.reserved * (1 + MARGIN) > limit:
            return warning("peak memory", text, FIX)
        return ok("peak memory", text)


def round_trip(subject: Subject) -> Iterator[Finding]:
    """Write the model's weights as a checkpoint's, and read them back, bit for bit."""
    check = "checkpoint"
    weights = sum(p.numel() * p.element_size() for p in subject.module.parameters())
    if weights > LARGEST:
        yield skipped(check, f"{weights / GB:.1f} GB of weights: only up to {LARGEST / GB:g} GB are tried")
        return
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=subject.disk) as name:
        try:
            taken = in_child(partial(_there_and_back, subject, Path(name)), seconds=SECONDS)
        except TimeoutError:
            yield warning(
                check,
                f"{weights / GB:.2f} GB took more than {SECONDS:g} s",
                "a faster disk, or a larger --checkpoint.every",
            )
            return
    if taken["different"]:
        yield fail(check, f"{taken['different']} was read back otherwise than it was written", "another --run.dir")
    else:
        rates = f"saved in {taken['save']:.2f} s, loaded in {taken['load']:.2f} s"
        yield ok(check, f"{taken['bytes'] / GB:.3f} GB of weights {rates}, bit for bit")


def _there_and_back(subject: Subject, folder: Path) -> dict[str, Any]:
    """Save and load the weights of a new model; the seconds that each took, and what came back different."""
    torch.manual_seed(subject.recipe.seed)
    module = subject.recipe.model.unloaded().build()
    parts = {f"weights/{name}": whole(p.detach()) for name, p in module.named_parameters()}
    parts |= {f"buffers/{name}": whole(buffer.detach()) for name, buffer in module.named_buffers()}
    parts = {name: Part(part.tensor.contiguous(), part.offset, part.shape) for name, part in parts.items()}
    began = time.perf_counter()
    path = folder / "probe.safetensors"
    entry = write_parts(path, parts)
    saved = time.perf_counter()
    different = "" if hash_file(path) == entry["sha256"] else path.name
    reader = PartsReader(folder, [describe_parts(path.name, parts)])
    for name, part in parts.items():
        found = whole(torch.empty_like(part.tensor))
        reader.read_into(name, found)
        if not torch.equal(_bytes(found.tensor), _bytes(part.tensor)):
            different = different or name
    loaded = time.perf_counter() - saved
    return {"save": saved - began, "load": loaded, "bytes": entry["bytes"], "different": different}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor: not-a-numbers are equal, too."""
    return tensor.reshape(-1).view(torch.uint8)


# Ports and process group: as many ranks as were asked for, started and added up, in processes of their own.

MEETING_SECONDS = 20.0
MEETING_FIX = "check firewall, hostname and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says more"


def process_group(subject: Subject) -> Iterator[Finding]:
    """Start the ranks of this machine and let them add up who they are, for no longer than ``MEETING_SECONDS``."""
    check, size = "process group", subject.world.devices
    try:
        listener = socket.create_server((ADDRESS, 0))  # which the first rank inherits
    except OSError as error:
        yield fail(check, f"no port can be opened on {ADDRESS}: {error}", "check the network of this container")
        return
    on_gpu = subject.world.accelerator == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    began = time.perf_counter()
    jobs = [partial(_add_up, backend, rank, size, listener) for rank in range(size)]
    ranks = [Child(job, sees_gpu=on_gpu, anew=on_gpu) for job in jobs]
    listener.close()
    problems = []
    for rank, child in enumerate(ranks):
        left = MEETING_SECONDS - (time.perf_counter() - began)
        problem = _problem(child, max(0.0, left))
        if problem:
            problems.append(f"rank {rank}: {problem}")
    if problems:
        yield fail(check, f"{backend}, {size} rank(s): {problems[0]}", MEETING_FIX)
    else:
        yield ok(check, f"{backend}, {size} rank(s) met and added up in {time.perf_counter() - began:.1f} s")


def _problem(child: Child, seconds: float) -> str | None:
    if not child.wait(seconds):
        child.kill()
        return f"no answer within {MEETING_SECONDS:g} s"
    found: Any = child.result()
    return str(found) if isinstance(found, Exception) else None


def _add_up(backend: str, rank: int, size: int, listener: socket.socket) -> bool:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    forget_process_group()
    keep_to_loopback()
    port = listener.getsockname()[1]
    if rank == 0:
        store = loopback_store(listener, MEETING_SECONDS)
    else:
        listener.close()
        store = dist.TCPStore(ADDRESS, port, wait_for_workers=False, timeout=timedelta(seconds=MEETING_SECONDS))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=MEETING_SECONDS)
    )
    value = torch.tensor(float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    if value.item() != size * (size + 1) / 2:
        raise RuntimeError(f"the sum of the ranks came out as {value.item():g}")
    dist.destroy_process_group()
    return True
