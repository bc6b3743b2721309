"""The cores, memory and GPUs of this machine that the process may use."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.errors import RunError
from trainer.system.processes import python_command

CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int:
    """Return the host memory that this process and its children may still allocate, within their cgroup."""
    import psutil

    free = psutil.virtual_memory().available
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        # The cgroup's usage includes cached file pages, which the kernel frees on demand.
        stat = CGROUP / "memory.stat"
        lines = [line.split() for line in stat.read_text().splitlines()] if stat.exists() else []
        files = next((int(words[1]) for words in lines if words[0] == "inactive_file"), 0)
        free = min(free, int(limit.read_text()) - int(used.read_text()) + files)
    return free


# GPUs. Asking torch initializes CUDA, which takes GPU memory and breaks forks. So another process asks.

FACTS = (  # the used fields of torch.cuda.get_device_properties
    *("name", "total_memory", "major", "minor", "multi_processor_count"),
    *("clock_rate", "memory_clock_rate", "memory_bus_width"),
)

ASK = "import json; from trainer.system.machine import query_gpus; print(json.dumps(query_gpus({})))"


def gpu_possible() -> bool:
    """Guess quickly whether torch may find a GPU: NVML counts one, or NVIDIA's driver or AMD's device exists."""
    if Path("/dev/kfd").exists():
        return True
    with suppress(OSError):
        nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
        if nvml.nvmlInit_v2() != 0:
            return False
        known = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        nvml.nvmlShutdown()
        return not known or count.value > 0
    with suppress(OSError):  # older Jetson systems have only the driver library
        return ctypes.CDLL("libcuda.so.1") is not None
    return False


def query_gpus(free: bool = False) -> list[dict[str, Any]]:
    """Return :data:`FACTS` of each GPU according to torch (unknown: ``None``), with its free bytes if ``free``."""
    import torch

    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(number)
        found.append({name: getattr(properties, name, None) for name in FACTS})
        if free:
            found[-1]["free"] = torch.cuda.mem_get_info(number)[0]
    return found


def query_gpus_in_child(free: bool = False, seconds: float | None = None) -> list[dict[str, Any]]:
    """Return :func:`query_gpus` from a new process, without CUDA in this one; a RunError if torch fails there."""
    command = python_command(ASK.format(free))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"torch has not listed the GPUs within {seconds:g} s") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.split("\n") if line.strip()]
        raise RunError(f"torch does not start: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return json.loads(done.stdout.splitlines()[-1])


# Host memory: the resident memory of this process and its peak per phase.

HostPeaks = Literal["exact", "sampled", "whole run"]
"""How the peak of a phase is measured.

``exact`` is the highest resident memory within the phase. ``sampled`` is the higher value of its start and end, if the
kernel keeps no peak or cannot reset it. ``whole run`` (without /proc) is the peak since the process started.
"""

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class HostReading:
    """Resident memory of the process in bytes."""

    resident: int
    anonymous: int  # memory that the process allocated, without files mapped into memory
    peak: int  # since HostMemory.reset_peak if peaks are exact, otherwise see HostPeaks
    process_peak: int  # the highest known value, at least ``peak``


class HostMemory:
    """Reads the memory counters of this process. A reading takes tens of microseconds."""

    def __init__(self, status: Path = STATUS, clear_refs: Path = CLEAR_REFS) -> None:
        self.status, self.clear_refs = status, clear_refs
        fields = _fields(status) if status.exists() else {}
        # gVisor, which some clouds use for containers, keeps no peak.
        kept: HostPeaks = "exact" if "VmHWM" in fields else "sampled"
        self.peaks: HostPeaks = kept if "VmRSS" in fields else "whole run"

    def read(self) -> HostReading:
        """Return the current resident memory and its peak."""
        if self.peaks == "whole run":
            peak = process_peak(self.status)
            return HostReading(peak, peak, peak, peak)
        fields = _fields(self.status)
        resident = fields["VmRSS"]
        record = fields["VmHWM"] if "VmHWM" in fields else max(resident, process_peak(self.status))
        anonymous = fields.get("RssAnon", resident)  # missing in kernels before 4.5
        return HostReading(resident, anonymous, record if self.peaks == "exact" else resident, record)

    def reset_peak(self) -> None:
        if self.peaks == "exact":
            try:
                self.clear_refs.write_bytes(b"5")  # resets VmHWM, see proc(5)
            except OSError:  # no permission, or not supported by the kernel
                self.peaks = "sampled"


def process_peak(status: Path = STATUS) -> int:
    """Return the peak resident memory of this process in bytes, since its start or the last ``reset_peak``."""
    try:  # preferred to getrusage, whose peak on Linux includes the parent's memory before the exec
        return _fields(status)["VmHWM"]
    except (OSError, KeyError):
        # ru_maxrss is in KiB on Linux and in bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _fields(status: Path) -> dict[str, int]:
    """Return the memory values of the file, converted from kB to bytes."""
    lines = [line.split() for line in status.read_text().splitlines() if line.startswith(("Vm", "Rss"))]
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in lines}
