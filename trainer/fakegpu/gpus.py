"""Table of GPUs with the values that the planner needs, from data sheets, and the GPU of this machine."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
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


# Fraction of the data sheet's rate in large products (fp32, tf32, half precision), from published measurements of
# torch.mm with square matrices of 8,192 rows. Sources: (a) github.com/zzc0721/torch-performance-test-data, database.md
# and issues 54 to 200; (b) github.com/mli/transformers-benchmarks; (c) github.com/chsasank/device-benchmarks; (d) the
# best of many shapes, so rather high: github.com/mag-/gpu_benchmark and the table of achievable FLOPS of
# github.com/stas00/ml-engineering. Reason: a data sheet assumes one clock; in products, cards of 70 to 150 W are below
# it, larger cards slightly below, and GeForce cards above. Since capability 8.6, multiprocessors have twice as many
# fp32 units but not twice their data rate: fp32 products reach 0.6 to 0.77.
GEFORCE = (0.70, 1.03, 1.05)  # medians of (a): 3060 to 3090, 4060 Ti to 4090, 5060 Ti to 5090: 0.61-0.76, 0.98-1.13
PRODUCTS = {
    "t4": (0.51, 1, 0.64),  # (a), (c); only while the card is cool
    "v100-16gb": (0.90, 1, 0.75),  # (a) 0.92 and 0.78, (b) 0.76, (c) 0.83 and 0.67
    "v100-32gb": (0.90, 1, 0.75),
    "a10": (0.45, 0.45, 0.45),  # (c); tf32 assumed
    "a10g": (0.67, 0.98, 0.95),  # (a)
    "l4": (0.60, 0.70, 0.70),  # (d) 0.76; fp32 and tf32 assumed
    "l40s": (0.65, 0.70, 0.70),  # (d); fp32 and tf32 assumed
    "rtx-a6000": (0.63, 0.78, 0.68),  # (b) 0.61 in 2022, (a) 0.74 for the A40, which has the same chip
    "rtx-6000-ada": (0.65, 0.76, 0.76),  # (d); fp32 and tf32 assumed
    "a100-40gb": (0.95, 0.74, 0.80),  # (a)
    "a100-80gb": (0.98, 0.74, 0.83),  # (a) 0.83-0.85, (b) 0.74 in 2022, (d) 0.87
    "a100-80gb-pcie": (0.88, 0.66, 0.69),  # (a), (b), (d) 0.81
    "h100-sxm": (0.76, 0.76, 0.76),  # (a) 0.74-0.81, (d) 0.80
    "h100-pcie": (0.71, 0.62, 0.61),  # (a), (c), (d) 0.66
    "h100-nvl": (0.71, 0.60, 0.58),  # (d); fp32 and tf32 assumed
    "h200": (0.76, 0.76, 0.76),  # assumed: same chip and power as the H100
    "gh200": (0.76, 0.78, 0.80),  # (d) 0.84; fp32 and tf32 assumed
    "b200": (0.88, 0.75, 0.75),  # (a); tf32 assumed
    "mi300x": (0.55, 0.55, 0.55),  # (d) 0.51-0.60; fp32 and tf32 assumed
}

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


def _card(
    name: str,
    title: str,
    reported: str,
    capability: tuple[int, int],
    memory: float,
    bandwidth: float,
    tflops: tuple[float, float, float, float],
    bus: float = PCIE_4,
    link: float | None = None,
    note: str = "",
) -> GPU:
    """Build a GPU from data sheet units: GiB, GB/s, TFLOP/s (fp64, fp32, tf32, half), nominal GB/s."""
    flops = _flops(capability, *(rate * 1e12 for rate in tflops))
    within = (bus if link is None else link) * 1e9 * LINK_EFFICIENCY
    size, moves, reached = int(memory * GIB), bandwidth * 1e9, bus * 1e9 * LINK_EFFICIENCY
    products = PRODUCTS.get(name, GEFORCE)
    return GPU(name, title, capability, size, moves, flops, products, reached, within, reported, note=note)


def _geforce(title: str, capability: tuple[int, int], memory: float, speed: float, tflops: float, bus: float) -> GPU:
    """Build a GeForce GPU: half precision with fp32 sums has twice the fp32 rate (half the data sheet)."""
    name, reported = title.lower().replace(" ", "-"), "NVIDIA GeForce " + re.sub(r" \d+GB$", "", title)
    return _card(name, title, reported, capability, memory, speed, (tflops / 64, tflops, tflops, 2 * tflops), bus)


# Memory is torch's value on Linux: the minimum in published out-of-memory messages. It varies by about 1 % with driver
# and ECC: 79.14-79.33 GiB on A100, 139.72-139.81 on H200, 23.5-23.7 on RTX 4090. GeForce cards of one generation and
# size are assumed to have the same value. fp64 rates are those of tensor cores if they support it. NVLink bridges
# between two PCIe cards are ignored, because a ring over more than two cards uses the bus.
_AMPERE, _ADA, _BLACKWELL = (8, 6), (8, 9), (12, 0)
_V100 = (7.8, 15.7, 0, 125)
_A100 = (19.5, 19.5, 156, 312)
_HOPPER = (66.9, 66.9, 494.7, 989.4)
_MI300X = (163.4, 163.4, 653.7, 1307.4)
_ROCM = "the replay assumes the workspaces of CUDA's kernels, and was not compared with a run on ROCm"
_SERVERS = [
    _card("t4", "T4", "Tesla T4", (7, 5), 14.56, 320, (0.25, 8.1, 0, 65), PCIE_3),
    _card("v100-16gb", "V100 16 GB (SXM)", "Tesla V100-SXM2-16GB", (7, 0), 15.77, 900, _V100, PCIE_3, 150),
    _card("v100-32gb", "V100 32 GB (SXM)", "Tesla V100-SXM2-32GB", (7, 0), 31.73, 900, _V100, PCIE_3, 150),
    _card("a10", "A10", "NVIDIA A10", _AMPERE, 22.03, 600, (0.49, 31.2, 62.5, 125)),
    _card("a10g", "A10G", "NVIDIA A10G", _AMPERE, 22.03, 600, (0.55, 35, 35, 70)),
    _card("l4", "L4", "NVIDIA L4", _ADA, 22.03, 300, (0.47, 30.3, 60, 121)),
    _card("l40s", "L40S", "NVIDIA L40S", _ADA, 44.34, 864, (1.43, 91.6, 183, 362)),
    _card("rtx-a6000", "RTX A6000", "NVIDIA RTX A6000", _AMPERE, 47.4, 768, (0.6, 38.7, 77.4, 154.8)),
    _card("rtx-6000-ada", "RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", _ADA, 47.4, 960, (1.4, 91.1, 182.1, 364.2)),
    _card("a100-40gb", "A100 40 GB (SXM)", "NVIDIA A100-SXM4-40GB", (8, 0), 39.39, 1555, _A100, PCIE_4, 300),
    _card("a100-80gb", "A100 80 GB (SXM)", "NVIDIA A100-SXM4-80GB", (8, 0), 79.14, 2039, _A100, PCIE_4, 300),
    _card("a100-80gb-pcie", "A100 80 GB (PCIe)", "NVIDIA A100 80GB PCIe", (8, 0), 79.14, 1935, _A100, PCIE_4),
    _card("h100-sxm", "H100 (SXM)", "NVIDIA H100 80GB HBM3", (9, 0), 79.1, 3350, _HOPPER, PCIE_5, 450),
    _card("h100-pcie", "H100 (PCIe)", "NVIDIA H100 PCIe", (9, 0), 79.1, 2000, (51.2, 51.2, 378, 756), PCIE_5),
    _card("h100-nvl", "H100 NVL", "NVIDIA H100 NVL", (9, 0), 93.02, 3900, (60, 60, 417.5, 835.5), PCIE_5),
    _card("h200", "H200 (SXM)", "NVIDIA H200", (9, 0), 139.72, 4800, _HOPPER, PCIE_5, 450),
    # NVLink-C2C joins its host memory: 450 GB/s each way.
    _card("gh200", "GH200 (96 GB)", "NVIDIA GH200 480GB", (9, 0), 94.5, 4000, _HOPPER, 450, 450),
    _card("b200", "B200", "NVIDIA B200", (10, 0), 178.35, 7700, (37, 75, 1125, 2250), PCIE_5, 900),
    _card("mi300x", "MI300X", "AMD Instinct MI300X", AMD_MI300, 191.69, 5300, _MI300X, PCIE_5, 448, _ROCM),
]
_GEFORCE = [
    _geforce("RTX 3060", _AMPERE, 11.63, 360, 12.7, PCIE_4),
    _geforce("RTX 3060 Ti", _AMPERE, 7.63, 448, 16.2, PCIE_4),
    _geforce("RTX 3070", _AMPERE, 7.63, 448, 20.3, PCIE_4),
    _geforce("RTX 3070 Ti", _AMPERE, 7.63, 608, 21.7, PCIE_4),
    _geforce("RTX 3080", _AMPERE, 9.63, 760, 29.8, PCIE_4),
    _geforce("RTX 3080 12GB", _AMPERE, 11.63, 912, 30.6, PCIE_4),
    _geforce("RTX 3080 Ti", _AMPERE, 11.63, 912, 34.1, PCIE_4),
    _geforce("RTX 3090", _AMPERE, 23.55, 936, 35.6, PCIE_4),
    _geforce("RTX 3090 Ti", _AMPERE, 23.55, 1008, 40.0, PCIE_4),
    _geforce("RTX 4060", _ADA, 7.63, 272, 15.1, PCIE_4 / 2),
    _geforce("RTX 4060 Ti 8GB", _ADA, 7.63, 288, 22.1, PCIE_4 / 2),
    _geforce("RTX 4060 Ti 16GB", _ADA, 15.56, 288, 22.1, PCIE_4 / 2),
    _geforce("RTX 4070", _ADA, 11.57, 504, 29.1, PCIE_4),
    _geforce("RTX 4070 SUPER", _ADA, 11.57, 504, 35.5, PCIE_4),
    _geforce("RTX 4070 Ti", _ADA, 11.57, 504, 40.1, PCIE_4),
    _geforce("RTX 4070 Ti SUPER", _ADA, 15.56, 672, 44.1, PCIE_4),
    _geforce("RTX 4080", _ADA, 15.56, 717, 48.7, PCIE_4),
    _geforce("RTX 4080 SUPER", _ADA, 15.56, 736, 52.2, PCIE_4),
    _geforce("RTX 4090", _ADA, 23.52, 1008, 82.6, PCIE_4),
    _geforce("RTX 5060", _BLACKWELL, 7.52, 448, 19.2, PCIE_5 / 2),
    _geforce("RTX 5060 Ti 8GB", _BLACKWELL, 7.52, 448, 23.7, PCIE_5 / 2),
    _geforce("RTX 5060 Ti 16GB", _BLACKWELL, 15.45, 448, 23.7, PCIE_5 / 2),
    _geforce("RTX 5070", _BLACKWELL, 11.49, 672, 30.9, PCIE_5),
    _geforce("RTX 5070 Ti", _BLACKWELL, 15.45, 896, 43.9, PCIE_5),
    _geforce("RTX 5080", _BLACKWELL, 15.45, 960, 56.3, PCIE_5),
    _geforce("RTX 5090", _BLACKWELL, 31.36, 1792, 104.8, PCIE_5),
]

GPUS = {gpu.name: gpu for gpu in [*_SERVERS, *_GEFORCE]}

NO_GPU = f"no GPU found: choose one with --gpu: {', '.join(sorted(GPUS))}, or cpu"

# Short names, normalised as in ``gpu_named``.
ALIASES = {"a100": "a100-80gb", "a100sxm": "a100-80gb", "a100pcie": "a100-80gb-pcie", "h100": "h100-sxm"}
ALIASES |= {"v100": "v100-16gb", "306012gb": "rtx-3060", "308010gb": "rtx-3080"}
