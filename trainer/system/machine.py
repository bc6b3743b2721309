"""What this process may use of the machine."""

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
from trainer.system.processes import own_code

CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int:
    """Host memory that this process and its children may still take, within its control group."""
    import psutil

    free = psutil.virtual_memory().available
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        # The group is charged for files that were read, which the kernel gives up when memory is asked for.
        stat = CGROUP / "memory.stat"
        lines = [line.split() for line in stat.read_text().splitlines()] if stat.exists() else []
        files = next((int(words[1]) for words in lines if words[0] == "inactive_file"), 0)
        free = min(free, int(limit.read_text()) - int(used.read_text()) + files)
    return free


# The GPUs: who asks torch begins with CUDA, which takes some of their memory, and can fork no more.

FACTS = (  # of torch's properties of a device
    *("name", "total_memory", "major", "minor", "multi_processor_count"),
    *("clock_rate", "memory_clock_rate", "memory_bus_width"),
)

ASK = "import json; from trainer.system.machine import seen_gpus; print(json.dumps(seen_gpus({})))"


def may_have_gpu() -> bool:
    """Whether torch may find a GPU here, as far as can be told at once: not where NVIDIA's library (NVML) counts none,
    or neither it nor the driver's is there, nor AMD's device."""
    if Path("/dev/kfd").exists():
        return True
    with suppress(OSError):
        nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
        if nvml.nvmlInit_v2() != 0:
            return False
        known = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        nvml.nvmlShutdown()
        return not known or count.value > 0
    with suppress(OSError):  # Jetson has had the driver's alone
        return ctypes.CDLL("libcuda.so.1") is not None
    return False


def seen_gpus(free: bool = False) -> list[dict[str, Any]]:
    """What torch says of each GPU: :data:`FACTS`, some of them ``None``, and the bytes that are ``free`` if asked."""
    import torch

    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(number)
        found.append({name: getattr(properties, name, None) for name in FACTS})
        if free:
            found[-1]["free"] = torch.cuda.mem_get_info(number)[0]
    return found


def ask_for_gpus(free: bool = False, seconds: float | None = None) -> list[dict[str, Any]]:
    """:func:`seen_gpus` of a new process, which has ended by then: it sees them whatever this one has done. A RunError
    if torch does not start there, or takes longer than ``seconds``."""
    try:
        done = subprocess.run(own_code(ASK.format(free)), capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"torch has not said within {seconds:g} s which GPUs there are") from error
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.split("\n") if line.strip()]
        raise RunError(f"torch does not start: {said[-1] if said else f'exit code {done.returncode}'}")
    return json.loads(done.stdout.splitlines()[-1])


# The host's side of memory: what of this process is resident, and its peak since a moment of our choosing.

HostPeaks = Literal["exact", "sampled", "whole run"]
"""What the peak of a phase is: the highest resident memory within it; the higher of that at its beginning and its
end, where the kernel keeps no record of it or does not let it be cleared; or, without /proc, the peak of the process so
far."""

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class HostReading:
    """Resident memory of the process in bytes."""

    resident: int
    anonymous: int  # without files that are mapped into memory: what the process allocated itself
    peak: int  # since HostMemory.restart_peak where its peaks are exact, else see HostPeaks
    process_peak: int  # the highest that is known, at least the other


class HostMemory:
    """Reads what the operating system knows of this process. A reading takes tens of microseconds."""

    def __init__(self, status: Path = STATUS, clear_refs: Path = CLEAR_REFS) -> None:
        self.status, self.clear_refs = status, clear_refs
        fields = _fields(status) if status.exists() else {}
        # Not every kernel keeps a record: gVisor, which some clouds run containers in, does not.
        kept: HostPeaks = "exact" if "VmHWM" in fields else "sampled"
        self.peaks: HostPeaks = kept if "VmRSS" in fields else "whole run"

    def read(self) -> HostReading:
        """Resident memory and its peak, as they are now."""
        if self.peaks == "whole run":
            peak = process_peak(self.status)
            return HostReading(peak, peak, peak, peak)
        fields = _fields(self.status)
        resident = fields["VmRSS"]
        record = fields["VmHWM"] if "VmHWM" in fields else max(resident, process_peak(self.status))
        anonymous = fields.get("RssAnon", resident)  # kernels before 4.5 have none
        return HostReading(resident, anonymous, record if self.peaks == "exact" else resident, record)

    def restart_peak(self) -> None:
        """Let the next peak be that from now on."""
        if self.peaks == "exact":
            try:
                self.clear_refs.write_bytes(b"5")  # by proc(5): forget the peak
            except OSError:  # no permission, or a kernel without it
                self.peaks = "sampled"


def process_peak(status: Path = STATUS) -> int:
    """The peak of this process's resident memory in bytes: since its start, or since the last ``restart_peak``."""
    try:  # not getrusage, if it can be helped: on Linux its peak begins with what the parent held
        return _fields(status)["VmHWM"]
    except (OSError, KeyError):
        # ru_maxrss is in KiB on Linux and in bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _fields(status: Path) -> dict[str, int]:
    """The memory values of the file, which are in kB, in bytes."""
    lines = [line.split() for line in status.read_text().splitlines() if line.startswith(("Vm", "Rss"))]
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in lines}
