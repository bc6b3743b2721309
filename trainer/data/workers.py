"""Loading in worker processes, with detection of workers that die or hang."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer.contract import Data
from trainer.errors import RunError
from trainer.system.machine import cores
from trainer.system.processes import detach_from_rank
from trainer.system.streams import install_safe_streams
from trainer.values import Request

MAX_AHEAD = 128
"""Max micro-batches that all workers of a rank load ahead. Each of their tensors may hold a file descriptor (1,024 per
process by default), and the current window is in memory too."""
POLL_INTERVAL = 1.0  # interval of checks that workers are alive while waiting for a micro-batch
WORKER_GONE_ERRORS = (EOFError, ConnectionError, FileNotFoundError)  # raised if a worker ends while passing a batch
WORKER_EXIT_TIMEOUT = 60.0  # seconds to wait for such a worker to be gone, generous for a busy machine
WORKER_CLOSE_TIMEOUT = 2.0  # seconds for all workers to leave after their last request, before they are killed
SHM_PATH, MIN_SHM_BYTES = Path("/dev/shm"), 1e9  # free bytes below which workers may run out; containers have 64 MB

SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "; the kernel does this when memory runs out: lower data.workers, or check the kernel's log",
    signal.SIGBUS: "; shared memory (/dev/shm) may be full: lower data.workers, or enlarge it",
    signal.SIGSEGV: "; a library that decodes samples has crashed: set data.workers 0 to see where",
}


class WorkerError(RunError):
    """Raised if a data worker died or hung. The message names the worker, its end, and its samples."""


def decide_workers(data: Data, accelerator: str, ranks: int) -> int:
    """Return ``data.workers`` or, if it is not set, a default for each of the ``ranks`` of this machine."""
    if data.workers is not None:
        return data.workers
    small = SHM_PATH.is_dir() and shutil.disk_usage(SHM_PATH).free < MIN_SHM_BYTES  # workers pass batches through it
    # Workers are processes, because drawing seeds generators of a process. On a CPU they would take cores.
    return 0 if accelerator == "cpu" or small else min(4, cores() // ranks)


def load_in_workers(
    fetch: Any, requests: Iterable[Request], workers: int, pin_memory: bool, timeout: float, at_once: int = 1
) -> Iterator[Any]:
    """Yield ``fetch[request]`` for every request, in order, by torch's DataLoader, ``at_once`` of them loaded ahead.

    Raises ``WorkerError`` one or two seconds after the result of a dead worker is needed, and ``timeout`` seconds after
    that of a hung one."""
    if workers:  # tokenizers warns about forks after it has used threads
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    watch = _WorkerMonitor(timeout)
    loader: DataLoader[Any] = DataLoader(
        fetch,
        sampler=watch.record(requests),
        batch_size=None,
        collate_fn=_identity_collate,
        num_workers=workers,
        prefetch_factor=max(2, min(-(-at_once // workers) + 1, MAX_AHEAD // workers)) if workers else None,
        pin_memory=pin_memory,
        timeout=POLL_INTERVAL if workers else 0,
        worker_init_fn=_init_worker if workers else None,
        generator=torch.Generator(),  # otherwise it would draw a number from the global generator
    )
    if not workers:
        yield from loader
        return
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        watch.begin(iter(loader))
    finally:
        # Torch's handler would raise an error about a dead worker anywhere in this process, such as in a collective.
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            signal.signal(signal.SIGCHLD, handler)
    try:
        yield from watch
    except WorkerError:
        watch.kill()
        raise
    finally:
        watch.close()


class _WorkerMonitor:
    """Iterates over the results of workers, and checks while waiting that they are alive."""

    def __init__(self, timeout: float) -> None:
        self.timeout, self.done = timeout, 0
        self.under_way: deque[Request] = deque()

    def record(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            self.under_way.append(request)
            yield request

    def begin(self, batches: Any) -> None:
        self.batches, self.shutdown = batches, batches._shutdown_workers
        self.processes = list(batches._workers)  # private, but the only access to exit codes, which messages need
        batches._shutdown_workers = self.close  # torch also calls it after the last micro-batch

    def __iter__(self) -> Iterator[Any]:
        since = time.monotonic()
        while True:
            try:
                batch = next(self.batches)
            except StopIteration:
                return
            except (RuntimeError, *WORKER_GONE_ERRORS) as error:
                self._diagnose(error, time.monotonic() - since)
                continue
            self.under_way.popleft()
            self.done += 1
            yield batch
            since = time.monotonic()

    def _diagnose(self, error: Exception, waited: float) -> None:
        """Raise the cause of ``error``; return if the wait can continue."""
        # Torch prefixes an error that a worker has passed on with "Caught"; otherwise the worker is ending.
        if isinstance(error, WORKER_GONE_ERRORS) and not str(error).startswith("Caught "):
            gone = wait([process.sentinel for process in self.processes], WORKER_EXIT_TIMEOUT)
            for process in self.processes:
                if process.sentinel in gone:  # the sentinel is ready shortly before the exit code
                    process.join(WORKER_EXIT_TIMEOUT)
        for number, process in enumerate(self.processes):
            if not process.is_alive():
                what, advice = f"exited with code {process.exitcode}", "; set data.workers 0 to see where it ends"
                if process.exitcode < 0:
                    killer = signal.Signals(-process.exitcode)
                    what, advice = f"was killed by {killer.name}", SIGNAL_HINTS.get(killer, "")
                raise self._worker_error(number, what, advice) from error
        if not str(error).startswith("DataLoader timed out"):
            raise error
        if waited >= self.timeout:
            what = f"has not answered for {self.timeout:g} s"
            advice = ": check these samples and the storage, or raise data.worker_timeout"
            raise self._worker_error(self.done % len(self.processes), what, advice) from error

    def _worker_error(self, number: int, what: str, advice: str) -> WorkerError:
        workers = len(self.processes)
        dealt = list(self.under_way)[(number - self.done) % workers :: workers]  # in turn
        indices = [index for request in dealt for index in request.indices]
        more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
        samples = f"samples {', '.join(map(str, indices[:8]))}{more}" if indices else "nothing"
        name = f"data worker {number} of {workers} (pid {self.processes[number].pid})"
        return WorkerError(f"{name} {what} while loading {samples}{advice}")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def close(self) -> None:
        """Let the workers leave, and kill the others. Torch alone waits 5 s for each that a thread keeps alive."""
        self.batches._shutdown_workers = self.shutdown  # restore torch's method
        late = threading.Timer(WORKER_CLOSE_TIMEOUT, lambda: [process.kill() for process in self.processes])
        late.daemon = True
        late.start()
        try:
            self.shutdown()
        finally:
            late.cancel()
            late.join()
            self.kill()  # otherwise the exit of this process would wait for a stopped worker


def _init_worker(worker: int) -> None:
    detach_from_rank()
    install_safe_streams()  # a worker that was not forked has Python's default streams
    # Ignore signals, because Slurm sends them to every process of a job regardless of its group. A worker is ended by
    # its rank, or with it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _identity_collate(batch: Any) -> Any:
    return batch
