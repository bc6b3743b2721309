"""Memory and checkpoints: the planner's prediction for the longest samples, and a checkpoint written and read back."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.parts import Part, PartsReader, describe_parts, whole, write_parts
from trainer.doctor.finding import GB, Finding, fail, ok, skipped, warning, within
from trainer.doctor.subject import Subject
from trainer.forecast import this_device
from trainer.planner.children import Child, Failed
from trainer.planner.gpus import usable_memory
from trainer.planner.machine import budget_bytes
from trainer.planner.predict import Prediction, predict_here
from trainer.planner.search import MARGIN
from trainer.planner.target import Target
from trainer.system.files import hash_file

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
        yield self._verdict(Prediction(**result))

    def _verdict(self, found: Prediction) -> Finding:
        budget, world = self.subject.recipe.memory.budget, self.subject.world
        limit = usable_memory(self.device, world.size)
        if budget is not None:
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
            taken = within(SECONDS, partial(_there_and_back, subject, Path(name)))
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
