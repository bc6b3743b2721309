"""Several machines on one: network namespaces that a switch connects, each with names, processes and a boot of its own.

What a process on such a host sees is what it would see on a machine: another host name, another ``boot_id``, no process
of the others, and one interface, ``eth0``, through which alone it reaches them. The file system is shared.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from helpers import LONG

NETWORK = "10.77.0"
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def why_not() -> str | None:
    """Why there can be no such hosts here; ``None`` where there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2, util-linux and mount"
    probe = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    bridge = ["ip", "-n", probe, "link", "add", "br0", "type", "bridge"]
    found = subprocess.run(bridge, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return f"the kernel has no bridges: {found.stderr.strip()}" if found.returncode else None


class Host:
    """One machine: its name, by which the others find it, the address of its eth0, namespaces, and a folder."""

    def __init__(self, name: str, address: str, space: str, switch: str, folder: Path) -> None:
        self.name, self.address, self.space, self.switch = name, address, space, switch
        self.port = f"to-{name}"
        self.folder = folder
        self.names = folder / "hosts"
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self.processes: list[Process] = []

    def start(
        self,
        command: Sequence[str],
        output: Path,
        environment: dict[str, str],
        where: Path,
        private: Path | None = None,
    ) -> Process:
        """Start ``command`` on this host, in the directory ``where``; what it prints goes to ``output``.

        ``private`` is a directory of which it has one of its own, an empty one.
        """
        own_disk = f"mount -t tmpfs none {private} && " if private is not None else ""
        # The shell stays: the first process of a namespace cannot be killed from within, and a machine has another one.
        inside = (
            f"{own_disk}hostname {self.name} && mount --bind {self.folder}/boot_id {BOOT_ID} && "
            f'mount --bind {self.names} /etc/hosts && "$@"; exit $?'
        )
        own = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside, "sh"]
        words = ["ip", "netns", "exec", self.space, *own, *command]
        with open(output, "ab") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            process = subprocess.Popen(words, env=environment, cwd=where, start_new_session=True, **streams)
        self.processes.append(Process(process, output))
        return self.processes[-1]

    def cut(self) -> None:
        """Let nothing through any more, silently: the switch drops its packets, and nobody is told."""
        ip("-n", self.switch, "link", "set", self.port, "nomaster")

    def restore(self) -> None:
        """Let everything through again."""
        ip("-n", self.switch, "link", "set", self.port, "master", "br0")

    def crash(self) -> None:
        """Lose the machine: nothing is heard of it, not even that its connections end."""
        self.cut()
        for process in self.processes:
            process.kill()

    def boot(self) -> None:
        """Have it back after a crash, with another boot_id."""
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self.restore()


class Process:
    """A command that runs on a host, with all that it starts."""

    def __init__(self, process: subprocess.Popen, output: Path) -> None:
        self.process, self.output = process, output

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text()

    def errors(self) -> list[str]:
        """The lines of its errors, in order."""
        return [line for line in self.text.splitlines() if "trainer: error: " in line]

    def wait_for(self, text: str, seconds: float = LONG, times: int = 1) -> None:
        """Until it prints ``text`` for the ``times``-th time."""
        until = time.monotonic() + seconds
        while self.text.count(text) < times:
            assert time.monotonic() < until, f"{text!r} is not in:\n{self.text}"
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.text}"
            time.sleep(0.1)

    def wait(self, seconds: float = LONG) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {seconds} s:\n{self.text}") from None

    def kill(self) -> None:
        """End it and all that it has started, at once: the kernel ends a process namespace with its first process."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Hosts:
    """Machines of the given names at one switch, for as long as the context lasts."""

    def __init__(self, folder: Path, *names: str) -> None:
        mark = f"t{os.getpid()}"
        self.switch = f"{mark}-switch"
        self.hosts = []
        for number, name in enumerate(names, start=1):
            own = folder / name
            own.mkdir(parents=True)
            self.hosts.append(Host(name, f"{NETWORK}.{number}", f"{mark}-{name}", self.switch, own))

    def __enter__(self) -> list[Host]:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self.hosts

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _make(self) -> None:
        known = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br0", "up")
        for host in self.hosts:
            host.names.write_text(f"127.0.0.1 localhost\n{known}")
            ip("netns", "add", host.space)
            peer = ("type", "veth", "peer", "name", "eth0", "netns", host.space)
            ip("link", "add", host.port, "netns", self.switch, *peer)
            ip("-n", self.switch, "link", "set", host.port, "master", "br0", "up")
            ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", host.space, "link", "set", interface, "up")

    def _remove(self) -> None:
        for process in [process for host in self.hosts for process in host.processes]:
            process.kill()
        for space in [self.switch, *(host.space for host in self.hosts)]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def ip(*words: str) -> None:
    """Run ``ip`` of iproute2."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
