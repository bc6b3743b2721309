"""A Slurm cluster of this machine: munged, slurmctld and a slurmd for each of two nodes, in a temporary directory.

Each slurmd runs in a UTS and a mount namespace of its own, so that the nodes, and the tasks on them, have names of
their own that resolve. Needs root on Linux, and the Debian packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "unshare")
LONG = 300.0  # as in helpers, which this file does without when it is started beside the tests
SECONDS_TO_END = 15.0

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
KillWait=15
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""
# CPUs are those that the tests' jobs take, however many the machine has.
NODE = "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"


def missing() -> str | None:
    """Why no cluster can be started here; ``None`` if one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "the Slurm tests start a cluster as root on Linux"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(absent)}: apt-get install slurm-wlm munge (tests/slurm/install.sh)" if absent else None


class Cluster:
    """Runs for as long as it is entered."""

    def __init__(self) -> None:
        self._closing = ExitStack()
        self.daemons: list[subprocess.Popen] = []
        self.variables: dict[str, str] = {}
        """For the commands, and the jobs, besides those of this process."""

    def __enter__(self) -> Cluster:
        with ExitStack() as closing:
            self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
            guard = subprocess.Popen([sys.executable, __file__, str(self.folder)], stdin=subprocess.PIPE)
            assert guard.stdin is not None
            closing.callback(guard.wait)
            closing.callback(guard.stdin.close)
            closing.callback(self._end_daemons)
            self._configure()
            self._start()
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._closing:
            self.command("scancel", "--full", "--user", "root", check=False)
            self.wait_until(lambda: not self.command("squeue", "--noheader").strip(), SECONDS_TO_END, check=False)

    @property
    def environment(self) -> dict[str, str]:
        """For the commands of this cluster: that of this process, without any other job or launcher."""
        foreign = ("SLURM_", "SBATCH_", "LT_", "TORCHELASTIC", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"} | self.variables

    def command(self, *words: str, check: bool = True) -> str:
        """What a command of Slurm says."""
        done = subprocess.run(words, capture_output=True, text=True, env=self.environment, timeout=LONG)
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def wait_until(self, condition: Callable[[], bool], seconds: float, check: bool = True) -> None:
        """Return when ``condition`` holds; raise after ``seconds``, with what the daemons say."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                assert not check, f"not within {seconds} s; {self._logs()}"
                return
            time.sleep(0.1)

    def state(self, job: str) -> str:
        """Such as RUNNING."""
        return self.fields(job)["JobState"]

    def fields(self, job: str) -> dict[str, str]:
        """Such as ``Restarts``: how often a job was put back into the queue."""
        words = self.command("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, job: str) -> tuple[str, str, str]:
        """State, exit code and signal (such as ``1:0``) of the batch script, and restarts."""
        found = self.fields(job)
        return found["JobState"], found["ExitCode"], found["Restarts"]

    def idle(self) -> bool:
        """Whether no node has a job, or something left of one."""
        states = self.command("sinfo", "--Node", "--noheader", "--partition=low", "--format=%t", check=False)
        return states.split() == ["idle"] * len(NODES)

    def running(self, job: str) -> bool:
        """Whether processes of a job are left."""
        return bool(self.command("squeue", "--noheader", "--jobs", job, check=False).strip())

    def _configure(self) -> None:
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(NODE.format(name=name, port=port) for name, port in zip(NODES, ports[1:], strict=True))
        text = CONFIGURATION.format(host=socket.gethostname(), port=ports[0], folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").touch()
        known = Path("/etc/hosts").read_text()
        (self.folder / "hosts").write_text(known + "".join(f"127.0.0.1 {node}\n" for node in NODES))

    def _start(self) -> None:
        folder = self.folder
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        self.wait_until((folder / "munge.socket").exists, LONG)
        self._daemon("slurmctld", "-D", "-i", "-f", f"{folder}/slurm.conf")
        for node in NODES:
            steps = f"hostname {node} && mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N {node}"
            self._daemon("unshare", "--uts", "--mount", "bash", "-c", f"{steps} -f {folder}/slurm.conf")
        self.wait_until(self.idle, LONG)

    def _daemon(self, *words: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self.daemons.append(subprocess.Popen(words, stdout=log, stderr=log, env=self.environment))

    def _end_daemons(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def clear_away(folder: Path) -> None:
    """Kill all processes of the cluster in ``folder``, its jobs among them, and remove it."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    until = time.monotonic() + SECONDS_TO_END
    while (left := [one for one in Path("/proc").iterdir() if _says(one, mark)]) and time.monotonic() < until:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def _says(process: Path, mark: bytes) -> bool:
    try:
        return process.name.isdigit() and mark in (process / "environ").read_bytes()
    except OSError:  # it has ended
        return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


if __name__ == "__main__":  # beside the tests: they have ended, however that was, when their end of the pipe is closed
    os.setsid()  # Ctrl-C is for the tests
    sys.stdin.read()
    clear_away(Path(sys.argv[1]))
