"""What checkpoints cost: the stall of training, host memory, and speed beside ``torch.save`` and DCP.

    python benchmarks/checkpoint.py [--millions 50] [--repeats 5] [--out NAME]

One process, one model of linear layers with AdamW's state (12 bytes a weight), all ways in one run, interleaved,
medians. Every way reads what it has just written, from the page cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from common import Record, process_memory
from torch import nn

from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.manifest import Manifest, read_manifest, verify_files
from trainer.checkpoint.tensor_parts import HostStagingBuffers, PartsReader, TensorPart, replicated_part, view_on_host
from trainer.checkpoint.writer import BackgroundTask, CheckpointWriter, Snapshot

WIDTH = 1024


def state_of(millions: float) -> dict[str, torch.Tensor]:
    """Weights and two moments of as many million parameters."""
    layers = max(1, round(millions * 1e6 / WIDTH**2))
    return {
        f"{kind}/{layer}": torch.randn(WIDTH, WIDTH)
        for kind in ("weights", "exp_avg", "exp_avg_sq")
        for layer in range(layers)
    }


def snapshot_of(state: dict[str, torch.Tensor], step: int, take: Callable[[Any], dict[str, TensorPart]]) -> Snapshot:
    """What a run would hand to its writer; ``take`` brings the tensors to the host."""

    def manifest(files: Any) -> Manifest:
        return Manifest(
            run="benchmark", step=step, epoch=0, step_in_epoch=step, seed=0, world_size=1, plan="", recipe={},
            dataset="", tokenizer=None, versions={}, figures=None, created="", files=files,
        )  # fmt: skip

    parts = take({name: replicated_part(tensor) for name, tensor in state.items()})
    return Snapshot(
        step=step, parts=parts, rank_state={"random": {}, "values": {}}, shared_state={}, history=b"", manifest=manifest
    )


class Ours:
    """The store of this project: hashed, flushed to the disk, moved into place."""

    def __init__(self, folder: Path) -> None:
        self.folder = CheckpointFolder(folder)
        self.writer = CheckpointWriter(self.folder, 0, 1, "benchmark", 60.0, 1, 0, lambda figures: 0.0)
        self.step, self.copies = 0, HostStagingBuffers()

    def save(self, state: dict[str, torch.Tensor]) -> None:
        self.step += 1
        self.writer.write(snapshot_of(state, self.step, self.copies.copy))

    def load(self, state: dict[str, torch.Tensor]) -> None:
        path = self.folder.newest_first()[0]
        verify_files(path, read_manifest(path))
        reader = PartsReader(path, [json.loads((path / "rank-00000.json").read_text())["tensors"]])
        for name, tensor in state.items():
            reader.read_into(name, TensorPart(tensor, (0,) * tensor.ndim, tuple(tensor.shape)))


class TorchSave:
    """``torch.save`` and ``torch.load``: neither hashed nor flushed nor moved."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path = folder / "state.pt"

    def save(self, state: dict[str, torch.Tensor]) -> None:
        torch.save(state, self.path)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in torch.load(self.path, weights_only=True).items():
            state[name].copy_(tensor)


class DCP:
    """torch.distributed.checkpoint to the file system, which flushes to the disk, and hashes nothing."""

    def __init__(self, folder: Path) -> None:
        self.path = folder

    def save(self, state: dict[str, torch.Tensor]) -> None:
        dcp.save(state, checkpoint_id=self.path)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        dcp.load(state, checkpoint_id=self.path)


WAYS: dict[str, Callable[[Path], Any]] = {"ours": Ours, "torch.save": TorchSave, "DCP": DCP}


def throughput(state: dict[str, torch.Tensor], repeats: int, folder: Path) -> dict[str, Any]:
    """GB/s of saving and loading, and processor seconds, for each way."""
    size = sum(tensor.nbytes for tensor in state.values())
    ways = {name: make(folder / name) for name, make in WAYS.items()}
    times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ways}
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for _ in range(repeats):
        for name, way in ways.items():
            for action, target in (("save", state), ("load", empty)):
                began, cpu = time.perf_counter(), time.process_time()
                getattr(way, action)(target)
                times[name][action].append(time.perf_counter() - began)
                times[name][f"{action}_cpu"].append(time.process_time() - cpu)
            assert all(torch.equal(empty[key], state[key]) for key in state), name
    found: dict[str, dict[str, float]] = {name: {} for name in ways}
    for name, taken in times.items():
        for action in ("save", "load"):
            found[name][f"{action}_gb_per_s"] = round(size / 1e9 / statistics.median(taken[action]), 3)
            found[name][f"{action}_cpu_s_per_gb"] = round(statistics.median(taken[f"{action}_cpu"]) / size * 1e9, 3)
    return found


def hashing() -> dict[str, float]:
    """GB/s of hash functions on this machine."""
    content = bytes(2**28)
    rates = {}
    for name in ("sha256", "blake2b"):
        began = time.perf_counter()
        hashlib.new(name, content)
        rates[name] = round(len(content) / 1e9 / (time.perf_counter() - began), 2)
    return rates


def stall(millions: float, folder: Path, steps: int = 30) -> dict[str, Any]:
    """How long a training step waits for a checkpoint: with the disk beside it, and waiting for the disk."""
    layers = max(1, round(millions * 1e6 / WIDTH**2))
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    batch = torch.randn(256, WIDTH)

    def step() -> float:
        began = time.perf_counter()
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    def state() -> dict[str, torch.Tensor]:
        moments = {f"{key}/{n}": value for n, one in enumerate(optimizer.state.values()) for key, value in one.items()}
        return {**module.state_dict(), **moments}

    step()
    plain = statistics.median(step() for _ in range(steps))
    ours, size = Ours(folder / "stall"), sum(tensor.nbytes for tensor in state().values())
    found: dict[str, Any] = {"step_s": round(plain, 4), "state_gb": round(size / 1e9, 3)}
    copy = ours.copies.copy
    ways = {"asynchronous, first": copy, "asynchronous": copy, "synchronous": view_on_host}
    before = process_memory("VmHWM")
    for number, (key, take) in enumerate(ways.items()):
        background = BackgroundTask()
        began = time.perf_counter()
        snapshot = snapshot_of(state(), number + 1, take)
        copied = time.perf_counter() - began
        background.run(lambda snapshot=snapshot: ours.writer.write(snapshot))
        if key == "synchronous":
            background.wait()
        stalled = time.perf_counter() - began
        during = []
        while background.thread is not None and background.thread.is_alive():
            during.append(step())
        background.wait()
        found[key] = {
            "stall_s": round(stalled, 4),
            "copy_s": round(copied, 4),
            "stall_in_steps": round(stalled / plain, 2),
            "steps_meanwhile": len(during),
            "slower_meanwhile": round(statistics.median(during) / plain, 3) if during else None,
            "host_memory_over_state": round((process_memory("VmHWM") - before) / size, 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=50, help="parameters, in millions")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default="checkpoint")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    record = Record(arguments.out, vars(arguments))
    folder = Path(tempfile.mkdtemp(dir="."))
    try:
        record.write(stall=stall(arguments.millions, folder))  # first: later peaks would hide its memory
        record.write(hashing_gb_per_s=hashing())
        state = state_of(arguments.millions)
        record.write(complete=True, throughput=throughput(state, arguments.repeats, folder))
    finally:
        shutil.rmtree(folder)
    for name in ("stall", "hashing_gb_per_s", "throughput"):
        print(name, record.content[name])


if __name__ == "__main__":
    main()
