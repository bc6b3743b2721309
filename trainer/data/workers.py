"""Loading in processes beside this one, whose death or standstill is found and named."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from trainer.contract import Data
from trainer.errors import RunError
from trainer.system.machine import cores
from trainer.system.processes import become_helper
from trainer.system.streams import keep_streams
from trainer.values import Request

SECONDS_BETWEEN_LOOKS = 1.0
"""How often a wait for a micro-batch is interrupted to see whether the workers live."""

SHARED = Path("/dev/shm")
SMALL_SHARED = 1e9
"""Bytes of shared memory below which loading workers may run out of it; containers have 64 MB unless told otherwise."""

MOST = 4
"""Workers of a rank that nobody asked for."""

HINTS = {
    signal.SIGKILL: "; the kernel does this when memory runs out: lower data.workers, or look into its log",
    signal.SIGBUS: "; shared memory (/dev/shm) may be full: lower data.workers, or give it more",
    signal.SIGSEGV: "; a library that decodes samples has crashed: load them with data.workers 0 to see where",
}
EXITED = "; load them with data.workers 0 to see where it is ended"


class WorkerError(RunError):
    """A process that loads data died or hung. The message names it, how it ended and what it was loading."""


def decide_workers(data: Data, accelerator: str, ranks: int) -> int:
    """``data.workers``; where it is left open, as many as can load samples while a GPU computes.

    Processes, and not a thread that loads a window ahead: drawing a sample seeds the generators of its process.

    Args:
        data: with the wish.
        accelerator: ``"cpu"``, where they would take the cores that compute, or ``"cuda"``.
        ranks: on this machine.
    """
    if data.workers is not None:
        return data.workers
    small = SHARED.is_dir() and shutil.disk_usage(SHARED).free < SMALL_SHARED  # where they hand their batches over
    return 0 if accelerator == "cpu" or small else min(MOST, cores() // ranks)


def load_in_workers(
    fetch: Any, requests: Iterable[Request], workers: int, prefetch: int, pin_memory: bool, timeout: float
) -> Iterator[Any]:
    """Yield ``fetch[request]`` for every request, in order, by torch's DataLoader.

    Args:
        fetch: picklable where processes are spawned.
        workers: processes; 0 loads in this one.
        prefetch: requests that each worker has ready or in work.
        pin_memory: put tensors in page-locked memory.
        timeout: seconds that a request may take a worker; not checked in this process.

    Raises:
        WorkerError: within a second or two of needing what a dead worker owes, and after ``timeout`` for a hung one.
    """
    if workers:  # tokenizers warns once per process about forks after it has used threads
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    log = _Requests(requests)
    loader = DataLoader(
        cast(Dataset, fetch),
        sampler=log,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=pin_memory,
        timeout=SECONDS_BETWEEN_LOOKS if workers else 0,
        worker_init_fn=_begin if workers else None,
        generator=torch.Generator(),  # else it draws a number from the global generator
    )
    if not workers:
        yield from loader
        return
    with _torch_raises_nothing_between():
        batches: Any = iter(loader)
    watch = _Watch(batches, log, timeout)
    try:
        yield from watch
    except WorkerError:
        watch.kill()
        raise
    finally:
        watch.close()


class _Requests:
    """Hands requests on and keeps those that are under way, in order."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = requests
        self.under_way: deque[Request] = deque()
        self.done = 0

    def __iter__(self) -> Iterator[Request]:
        for request in self.requests:
            self.under_way.append(request)
            yield request

    def finish(self) -> None:
        """The first one under way has been answered."""
        self.under_way.popleft()
        self.done += 1

    def of_worker(self, number: int, workers: int) -> list[int]:
        """The samples that a worker has in work or ready: requests are dealt in turn."""
        first = (number - self.done) % workers
        return [index for request in list(self.under_way)[first::workers] for index in request.indices]


ENDED_IN_BETWEEN = (EOFError, ConnectionError, FileNotFoundError)
"""What a micro-batch raises whose worker has ended while it was handed over."""

SECONDS_TO_END = 60.0
"""How long that worker may take to be gone, on a machine with much else to do."""

SECONDS_TO_LEAVE = 2.0
"""How long all workers together may take to leave when nothing is asked of them any more: then they are killed."""


class _Watch:
    """Iterates over what workers load, and looks after them while it waits."""

    def __init__(self, batches: Any, log: _Requests, timeout: float) -> None:
        self.batches, self.log, self.timeout = batches, log, timeout
        self.processes = list(batches._workers)  # the only way to their exit codes
        self.shutdown = batches._shutdown_workers
        batches._shutdown_workers = self.close  # torch calls it, too, when the last micro-batch was taken

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                batch = self._next()
            except StopIteration:
                return
            self.log.finish()
            yield batch

    def _next(self) -> Any:
        since = time.monotonic()
        while True:
            try:
                return next(self.batches)
            except (RuntimeError, *ENDED_IN_BETWEEN) as error:  # noqa: PERF203
                self._diagnose(error, time.monotonic() - since)

    def _diagnose(self, error: Exception, waited: float) -> None:
        """Return if the wait can go on."""
        if _is_of_handing_over(error):  # a worker's end follows
            self._wait_for_an_end()
        for number, process in enumerate(self.processes):
            if not process.is_alive():
                raise WorkerError(self._died(number)) from error
        if not str(error).startswith("DataLoader timed out"):
            raise error
        if waited >= self.timeout:
            raise WorkerError(self._hung()) from error

    def _wait_for_an_end(self) -> None:
        """Until a worker is gone. Its sentinel tells a little sooner than that it may be asked for its exit code."""
        gone = wait([process.sentinel for process in self.processes], SECONDS_TO_END)
        for process in self.processes:
            if process.sentinel in gone:
                process.join(SECONDS_TO_END)

    def _died(self, number: int) -> str:
        code = self.processes[number].exitcode
        ended, hint = f"exited with code {code}", EXITED
        if code < 0:
            ended = f"was killed by {signal.Signals(-code).name}"
            hint = HINTS.get(signal.Signals(-code), "")
        return f"{self._name(number)} {ended} while it loaded {self._samples(number)}{hint}"

    def _hung(self) -> str:
        number = self.log.done % len(self.processes)
        return (
            f"{self._name(number)} has not answered for {self.timeout:g} s while it loaded {self._samples(number)}: "
            "look at these samples and at the storage, or raise data.worker_timeout"
        )

    def _name(self, number: int) -> str:
        return f"data worker {number} of {len(self.processes)} (pid {self.processes[number].pid})"

    def _samples(self, number: int) -> str:
        indices = self.log.of_worker(number, len(self.processes))
        shown = ", ".join(map(str, indices[:8]))
        more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
        return f"samples {shown}{more}" if indices else "nothing"

    def kill(self) -> None:
        """End all workers that are left, also those that are stopped."""
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


def _is_of_handing_over(error: Exception) -> bool:
    """Whether it is what a worker's end looks like from here; torch says of an error that a worker has passed on."""
    return isinstance(error, ENDED_IN_BETWEEN) and not str(error).startswith("Caught ")


@contextmanager
def _torch_raises_nothing_between() -> Iterator[None]:
    """Keep torch from raising an error about a worker wherever this process happens to be, in a collective, say.

    Its handler of SIGCHLD, set when workers are first started, does so. What it would find is found by ``_Watch``.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers; torch knows this
        yield
        return
    previous = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous)


def _begin(worker: int) -> None:
    become_helper()
    keep_streams()  # one that was not forked has those of Python
    # Slurm signals every process of a job, whatever its group. What ends a worker is the rank, or the rank's end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _as_it_is(batch: Any) -> Any:
    return batch
