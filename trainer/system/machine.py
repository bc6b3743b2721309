"""What this process may use of the machine."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int | None:
    """Host memory that this process and its children may still take, within its control group; ``None``: not known."""
    free = _numbers(MEMINFO).get("MemAvailable:")
    if free is None:
        return None
    free *= 1024
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        # The group is charged for files that were read, which the kernel gives up when memory is asked for.
        files = _numbers(CGROUP / "memory.stat").get("inactive_file", 0)
        free = min(free, int(limit.read_text()) - int(used.read_text()) + files)
    return free


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by the word before it; none where there is no such file."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


# The host's side of memory: what of this process is resident, and its peak since a moment of our choosing.

HostPeaks = Literal["exact", "sampled", "whole run"]
"""What the peak of a phase is: the highest resident memory within it; the higher of that at its beginning and its
end, where the kernel keeps no record of it or does not let it be cleared; or, without /proc, the peak of the process so
far."""

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FORGET_PEAK = b"5"


@dataclass(frozen=True, slots=True)
class HostReading:
    """Resident memory of the process in bytes.

    Args:
        resident: now.
        anonymous: now, without files that are mapped into memory: what the process allocated itself.
        peak: the highest since :meth:`HostMemory.restart_peak` where ``peaks`` is exact, else see ``HostPeaks``.
        process_peak: the highest that is known, at least ``peak``.
    """

    resident: int
    anonymous: int
    peak: int
    process_peak: int


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
        resident = _bytes(fields["VmRSS"])
        record = _bytes(fields["VmHWM"]) if "VmHWM" in fields else max(resident, process_peak(self.status))
        anonymous = _bytes(fields["RssAnon"]) if "RssAnon" in fields else resident  # kernels before 4.5
        return HostReading(resident, anonymous, record if self.peaks == "exact" else resident, record)

    def restart_peak(self) -> None:
        """Let the next peak be that from now on."""
        if self.peaks == "exact":
            try:
                self.clear_refs.write_bytes(FORGET_PEAK)
            except OSError:  # no permission, or a kernel without it
                self.peaks = "sampled"


def process_peak(status: Path = STATUS) -> int:
    """The peak of this process's resident memory in bytes: since its start, or since the last ``restart_peak``."""
    try:  # not getrusage, if it can be helped: on Linux its peak begins with what the parent held
        return _bytes(_fields(status)["VmHWM"])
    except (OSError, KeyError):
        # ru_maxrss is in KiB on Linux and in bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _fields(status: Path) -> dict[str, str]:
    return dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)


def _bytes(field: str) -> int:
    return int(field.split()[0]) * 1024
