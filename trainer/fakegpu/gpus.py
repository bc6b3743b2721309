"""Table of GPUs with the values that the planner needs, from data sheets, and the GPU of this machine."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import RecipeError, closest_names
from trainer.system.machine import cores

# Fraction of a link's nominal rate that a large transfer reaches: 25 of 31.5 GB/s on PCIe 4.0 with pinned memory,
# 230-240 of 300 GB/s in NCCL's all-reduce over the NVLink of eight A100. Packet headers and flow control use the rest.
LINK_EFFICIENCY = 0.8
PCIE_3, PCIE_4, PCIE_5 = 15.75, 31.5, 63.0  # nominal GB/s of 16 lanes in one direction, after line coding
AMD_MI300 = (9, 4)  # torch's capability of gfx942, which no CUDA device has
MIB, GIB = 2**20, 2**30
CPU_BUFFERS = 40_000_000  # bytes of CPU kernels outside tensors: 26 to 55 MB measured, see benchmarks/planner_cpu.py


@dataclass(frozen=True)
class GPU:
    """A graphics card, from its maker's data sheet."""

    name: str  # name in flags, such as a100-80gb
    title: str  # name in messages, such as A100 80 GB (SXM)
    capability: tuple[int, int]  # CUDA compute capability, such as (8, 0)
    memory: int  # total memory in bytes, from torch.cuda.get_device_properties
    bandwidth: float  # memory bandwidth in bytes/s
    # Dense floating-point operations/s by torch's dtype, without sparsity and with sums in fp32; also tfloat32 if the
    # card has it. A missing dtype has no separate units.
    flops: dict[str, float]
    products: tuple[float, float, float]  # fraction of ``flops`` in large products: fp32 and fp64, tf32, half precision
    bus: float  # PCIe bytes/s in one direction, reached by a large copy from pinned memory (LINK_EFFICIENCY)
    link: float  # bytes/s to another GPU of its machine, reached by a large collective; ``bus`` without NVLink
    reported: str = ""  # the driver's name of the card; empty if the card was not found by name
    estimated: bool = False  # values are not from a data sheet but derived from torch's properties of the card
    note: str = ""  # a limit of predictions for this card

    def product_rate(self, dtype: str) -> float:
        """Return the operations/s of large products; a dtype without separate units is as fast as fp32."""
        units = dtype if dtype in self.flops else "float32"
        return self.flops[units] * self.products[{"tfloat32": 1, "float16": 2, "bfloat16": 2}.get(units, 0)]

    @property
    def clocks(self) -> float:
        """Clock cycles/s, summed over the multiprocessors, at the data sheet's clock; each has 64 or 128 fp32 units."""
        units = 64 if self.capability[0] == 7 or self.capability == (8, 0) else 128
        return self.flops["float32"] / (2 * units) if self.name != "cpu" else math.inf

    @property
    def cublas_workspace(self) -> int:
        """Bytes of torch's workspace for cuBLAS, from CUBLAS_WORKSPACE_CONFIG if set.

        Source: ``parseChosenWorkspaceSize`` in torch's ``CublasHandlePool.cpp``: 32 MiB on Hopper and Blackwell,
        including GeForce (8.1 MiB there before 2026), 128 MiB on the MI300X.
        """
        if asked := re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")):
            return sum(int(kib) * 1024 * int(count) for kib, count in asked)
        if self.capability == AMD_MI300:
            return 128 * MIB
        return 32 * MIB if self.capability[0] in (9, 10, 11, 12) else 2 * 4096 * 1024 + 8 * 16 * 1024

    @property
    def cuda_context_bytes(self) -> int:
        """Bytes of CUDA's context and kernels, without those of cuBLAS and cuDNN: a margin, rounded up."""
        if self.name == "cpu":
            return 0
        return {7: 400, 8: 500}.get(self.capability[0], 700) * 10**6


def gpu_named(name: str) -> GPU:
    """Return the GPU of that name, ignoring case, spaces, dashes, ``NVIDIA``, ``GeForce`` and ``RTX``."""
    names = {_squash(known): gpu for known, gpu in GPUS.items()}
    names |= {alias: GPUS[known] for alias, known in ALIASES.items()}
    squashed = _squash(name)
    if squashed in names:
        return names[squashed]
    near = closest_names(squashed, names)
    hint = f"; did you mean {names[near[0]].name}?" if near else "."
    raise RecipeError(f"--gpu={name} is not in the planner's table{hint} It has: {', '.join(sorted(GPUS))}")


def gpu_of(seen: Mapping[str, Any]) -> GPU:
    """Return the GPU for an entry of :func:`trainer.system.machine.query_gpus`, with the memory that torch reports.

    For a card that is not in the table (laptop, MIG slice, newer card), speeds are estimated from clocks and units.
    """
    for gpu in GPUS.values():
        if gpu.reported == seen["name"] and abs(gpu.memory / seen["total_memory"] - 1) < 0.05:
            return dataclasses.replace(gpu, memory=seen["total_memory"])
    return _estimate(seen)


def host_as_device() -> GPU:
    """Return this machine's CPU as the device of a run, with rough rates that only serve to rank plans."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flops = {"float32": 50e9 * cores(), "float64": 25e9 * cores()}
    note = f"reserved is that of tensors, plus about {CPU_BUFFERS / 1e6:.0f} MB for CPU kernels (26 to 55 MB measured)"
    return GPU("cpu", "CPU", (0, 0), memory, 20e9, flops, (1, 1, 1), bus=20e9, link=1e9, note=note, estimated=True)


def non_allocator_bytes(gpu: GPU, ranks: int) -> int:
    """Return the bytes outside torch's allocator on each device: CUDA's context and NCCL's buffers."""
    return gpu.cuda_context_bytes + nccl_bytes(ranks)


def usable_memory(gpu: GPU, ranks: int) -> int:
    """Return the bytes that torch's allocator may reserve."""
    return gpu.memory - non_allocator_bytes(gpu, ranks)


def nccl_bytes(ranks: int) -> int:
    """Return the bytes of NCCL's buffers (0 for one rank): a margin, not measured.

    About 10 MB per channel and neighbour: a ring has two on up to 32 channels, a tree more with each doubling of ranks.
    """
    return int(250e6 + 100e6 * math.log2(ranks)) if ranks > 1 else 0


def _squash(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|rtx|[^a-z0-9]", "", name.lower())


# ``GPU.products`` of GeForce cards: medians over 3060 to 3090, 4060 Ti to 4090 and 5060 Ti to 5090, source (a) of
# gpus.csv: 0.61-0.76 for fp32, 0.98-1.13 for half precision.
GEFORCE = (0.70, 1.03, 1.05)

# FLOPs per clock and multiprocessor by major capability: fp32, and half precision with sums in fp32. If GeForce and
# server cards differ, the value is GeForce's, so that a card is faster rather than slower than estimated.
FLOPS_PER_CLOCK = {6: (256, 256), 7: (128, 512), 8: (256, 512), 9: (256, 4096), 10: (256, 8192), 12: (256, 512)}


def _estimate(seen: Mapping[str, Any]) -> GPU:
    capability, name = (seen["major"], seen["minor"]), seen["name"]
    fp32, half = (128, 2048) if capability == (8, 0) else FLOPS_PER_CLOCK.get(seen["major"], (256, 512))
    # Clocks are in kHz; if torch does not report them, those of a slow card.
    clock = seen["multi_processor_count"] * (seen["clock_rate"] or 1_400_000) * 1e3
    beats = (seen["memory_clock_rate"] or 5_000_000) * 2e3  # two per clock
    bandwidth = beats * (seen["memory_bus_width"] or 128) / 8
    double = fp32 / 2 if capability in ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0)) else fp32 / 64
    flops = _flops(capability, clock * double, clock * fp32, clock * half / 2, clock * half)
    bus = (PCIE_4 if capability >= (8, 0) else PCIE_3) * 1e9 * LINK_EFFICIENCY
    note = f"{name} is not in the planner's table: its speed is estimated from its clocks"
    memory = seen["total_memory"]
    return GPU("detected", name, capability, memory, bandwidth, flops, GEFORCE, bus, bus, estimated=True, note=note)


def _flops(capability: tuple[int, int], fp64: float, fp32: float, tf32: float, half: float) -> dict[str, float]:
    flops = {"float64": fp64, "float32": fp32, "float16": half}
    return flops | {"tfloat32": tf32, "bfloat16": half} if capability >= (8, 0) else flops


def _card(row: Mapping[str, str]) -> GPU:
    """Build a GPU from a line of ``gpus.csv``, which explains the columns."""
    major, minor = map(int, row["capability"].split("."))
    fp32, bus = float(row["fp32"]), float(row["bus"])
    usual = {"fp64": fp32 / 64, "fp32": fp32, "tf32": fp32, "half": 2 * fp32, "link": bus}
    fp64, fp32, tf32, half, link = (float(row[name] or value) for name, value in usual.items())
    flops = _flops((major, minor), *(1e12 * rate for rate in (fp64, fp32, tf32, half)))
    products: Any = tuple(map(float, row["products"].split())) or GEFORCE
    reached, within = bus * 1e9 * LINK_EFFICIENCY, link * 1e9 * LINK_EFFICIENCY
    sizes = int(float(row["memory"]) * GIB), float(row["bandwidth"]) * 1e9
    own = (row["name"], row["title"], (major, minor), *sizes, flops, products, reached, within, row["reported"])
    return GPU(*own, note=row["note"])


_LINES = Path(__file__).with_name("gpus.csv").read_text(encoding="utf-8").splitlines()
GPUS = {row["name"]: _card(row) for row in csv.DictReader(line for line in _LINES if line[:1] != "#")}

NO_GPU = f"no GPU found: choose one with --gpu: {', '.join(sorted(GPUS))}, or cpu"

# Short names, normalised as in ``gpu_named``.
ALIASES = {"a100": "a100-80gb", "a100sxm": "a100-80gb", "a100pcie": "a100-80gb-pcie", "h100": "h100-sxm"}
ALIASES |= {"v100": "v100-16gb", "306012gb": "rtx-3060", "308010gb": "rtx-3080"}
