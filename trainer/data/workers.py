"""Loading in processes beside this one, whose death or standstill is found and named."""

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
from trainer.system.processes import become_helper
from trainer.system.streams import keep_streams
from trainer.values import Request

MAX_AHEAD = 128
"""Micro-batches that all workers of a rank load ahead. Each tensor of one may hold a file descriptor, of which a
process has 1,024 by default, and the window that is being computed is in memory, too."""

SECONDS_BETWEEN_LOOKS = 1.0  # at the workers, whether they live, while a micro-batch is waited for
SHARED, SMALL_SHARED = Path("/dev/shm"), 1e9  # bytes below which workers may run out of it; containers have 64 MB

HINTS: dict[int, str] = {
    signal.SIGKILL: "; the kernel does this when memory runs out: lower data.workers, or look into its log",
    signal.SIGBUS: "; shared memory (/dev/shm) may be full: lower data.workers, or give it more",
    signal.SIGSEGV: "; a library that decodes samples has crashed: load them with data.workers 0 to see where",
}


class WorkerError(RunError):
    """A process that loads data died or hung. The message names it, how it ended and what it was loading."""


def decide_workers(data: Data, accelerator: str, ranks: int) -> int:
    """``data.workers``; by default as many for each of the ``ranks`` of this machine as load for a GPU, none on a CPU,
    whose cores compute. Processes, not threads: drawing a sample seeds the generators of its process."""
    if data.workers is not None:
        return data.workers
    small = SHARED.is_dir() and shutil.disk_usage(SHARED).free < SMALL_SHARED  # where they hand their batches over
    return 0 if accelerator == "cpu" or small else min(4, cores() // ranks)


def load_in_workers(
    fetch: Any, requests: Iterable[Request], workers: int, pin_memory: bool, timeout: float, at_once: int = 1
) -> Iterator[Any]:
    """Yield ``fetch[request]`` for every request, in order, by torch's DataLoader; see ``Loader``. A ``WorkerError``
    comes a second or two after a dead worker's result is needed, and ``timeout`` seconds after a hung one's. Whoever
    takes ``at_once`` results before computing anything finds as many loaded again the next time."""
    if workers:  # tokenizers warns once per process about forks after it has used threads
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    watch = _Watch(timeout)
    loader: DataLoader[Any] = DataLoader(
        fetch,
        sampler=watch.noted(requests),
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=max(2, min(-(-at_once // workers) + 1, MAX_AHEAD // workers)) if workers else None,
        pin_memory=pin_memory,
        timeout=SECONDS_BETWEEN_LOOKS if workers else 0,
        worker_init_fn=_begin if workers else None,
        generator=torch.Generator(),  # else it draws a number from the global generator
    )
    if not workers:
        yield from loader
        return
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        watch.begin(iter(loader))
    finally:
        # Torch's handler, set when workers are first started, would raise an error about one wherever this process
        # happens to be, in a collective, say. What it would find is found by the watch.
        if threading.current_thread() is threading.main_thread():  # which alone may set handlers; torch knows this
            signal.signal(signal.SIGCHLD, handler)
    try:
        yield from watch
    except WorkerError:
        watch.kill()
        raise
    finally:
        watch.close()


ENDED_IN_BETWEEN = (EOFError, ConnectionError, FileNotFoundError)  # if a worker ends during a handover

SECONDS_TO_END, SECONDS_TO_LEAVE = 60.0, 2.0
"""How long that worker may take to be gone, on a machine with much else to do; and all workers together to leave when
nothing is asked of them any more: then they are killed."""


class _Watch:
    """Iterates over what workers load of the requests that it has noted, and looks after them while it waits."""

    def __init__(self, timeout: float) -> None:
        self.timeout, self.done = timeout, 0
        self.under_way: deque[Request] = deque()

    def noted(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            self.under_way.append(request)
            yield request

    def begin(self, batches: Any) -> None:
        self.batches, self.shutdown = batches, batches._shutdown_workers
        self.processes = list(batches._workers)  # the only way to their exit codes
        batches._shutdown_workers = self.close  # torch calls it, too, when the last micro-batch was taken

    def __iter__(self) -> Iterator[Any]:
        since = time.monotonic()
        while True:
            try:
                batch = next(self.batches)
            except StopIteration:
                return
            except (RuntimeError, *ENDED_IN_BETWEEN) as error:
                self._diagnose(error, time.monotonic() - since)
                continue
            self.under_way.popleft()
            self.done += 1
            yield batch
            since = time.monotonic()

    def _diagnose(self, error: Exception, waited: float) -> None:
        """Return if the wait can go on."""
        # Torch says "Caught ..." of an error that a worker has passed on; without it, a worker's end follows.
        if isinstance(error, ENDED_IN_BETWEEN) and not str(error).startswith("Caught "):
            gone = wait([process.sentinel for process in self.processes], SECONDS_TO_END)
            for process in self.processes:
                if process.sentinel in gone:  # which tells a little sooner than that there is an exit code
                    process.join(SECONDS_TO_END)
        for number, process in enumerate(self.processes):
            if not process.is_alive():
                raise WorkerError(self._died(number)) from error
        if not str(error).startswith("DataLoader timed out"):
            raise error
        if waited >= self.timeout:
            raise WorkerError(self._hung()) from error

    def _died(self, number: int) -> str:
        code = self.processes[number].exitcode
        if code >= 0:
            advice = "; load them with data.workers 0 to see where it is ended"
            return self._told(number, f"exited with code {code}", advice)
        return self._told(number, f"was killed by {signal.Signals(-code).name}", HINTS.get(-code, ""))

    def _hung(self) -> str:
        advice = ": look at these samples and at the storage, or raise data.worker_timeout"
        return self._told(self.done % len(self.processes), f"has not answered for {self.timeout:g} s", advice)

    def _told(self, number: int, what: str, advice: str) -> str:
        workers = len(self.processes)
        dealt = list(self.under_way)[(number - self.done) % workers :: workers]  # in turn
        indices = [index for request in dealt for index in request.indices]
        more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
        samples = f"samples {', '.join(map(str, indices[:8]))}{more}" if indices else "nothing"
        name = f"data worker {number} of {workers} (pid {self.processes[number].pid})"
        return f"{name} {what} while it loaded {samples}{advice}"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def close(self) -> None:
        """Let the workers leave, and kill those that stay: torch waits 5 s for each that a thread keeps."""
        self.batches._shutdown_workers = self.shutdown  # nothing to do for it, from here on
        late = threading.Timer(SECONDS_TO_LEAVE, lambda: [process.kill() for process in self.processes])
        late.daemon = True
        late.start()
        try:
            self.shutdown()
        finally:
            late.cancel()
            late.join()
            self.kill()  # else the end of this process would wait for one that is stopped


def _begin(worker: int) -> None:
    become_helper()
    keep_streams()  # one that was not forked has those of Python
    # Slurm signals every process of a job, whatever its group. What ends a worker is the rank, or the rank's end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _as_it_is(batch: Any) -> Any:
    return batch
