"""Jobs in child processes. Each prediction needs one, because it changes torch for the rest of its process.

A fork already has the recipe, its data and all imports, including a model class that is defined in a user's script.
Nothing is pickled, and results are returned as JSON.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from trainer.errors import RecipeError, RunError
from trainer.system.machine import cores
from trainer.system.processes import detach_from_rank

Job = Callable[[], Any]
"""A function that returns a value that JSON can represent."""

CANNOT = "this process has {}: predict before that, or in a separate process, as `trainer plan` does"
HAS_TRAINED = CANNOT.format("trained already, so its forks cannot compute gradients")
HAS_USED_GPU = CANNOT.format("used its GPU already, so its forks cannot use CUDA")

IDLE, WALL = 10.0, 120.0
"""Seconds without a call after which a fork of :class:`Bounded` ends, and the maximum wall time of a call."""


class ChildError(RunError):
    """Raised when a job ends without a result."""


class ChildJob:
    """A job that runs in another process.

    Args:
        sees_gpu: let the job use this machine's GPUs.
        ``anew``: start a new interpreter, which takes seconds, instead of a fork. The job must be picklable. CUDA works
            there even if this process has initialized it: without NVML, torch does so just to look for a GPU, and
            CUDA does not work in forks afterwards.
        plain: the job does not use torch, so it may be forked even after this process has used CUDA.
    """

    def __init__(self, job: Job, sees_gpu: bool = False, anew: bool = False, plain: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn" if anew else "fork")
        self.connection, theirs = context.Pipe(duplex=False)
        torch = sys.modules.get("torch")  # this package must not import it
        # Checked here because in a fork is_initialized() returns False.
        gpu_in_use = torch is not None and torch.cuda.is_initialized() and not (anew or plain)
        self.process = context.Process(target=_work, args=(job, theirs, sees_gpu, gpu_in_use), daemon=True)
        # DataLoader workers are daemons, and multiprocessing forbids daemons to start processes.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether the job ends within ``seconds``."""
        return self.connection.poll(seconds)

    def result(self) -> Any:
        """Wait for the job and return its result, or the ``RecipeError`` or :class:`ChildError` that ended it."""
        try:
            answer = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):  # the child died, possibly while it sent its answer
            answer = {}
        finally:
            self.connection.close()
            self.process.join()
        if "result" in answer:
            return answer["result"]
        if "recipe_error" in answer:
            return RecipeError(answer["recipe_error"])
        ended = f"its process ended with code {self.process.exitcode}: check whether memory ran out"
        return ChildError(answer.get("error") or ended)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Bounded:
    """Calls ``job`` in a fork with limits on CPU time and memory, for computations that an untrusted file defines.

    Arguments and results are JSON. Each process that calls this object creates a fork at its first call. The fork ends
    after :data:`IDLE` seconds without a call; the next call then creates a new one.
    """

    def __init__(self, job: Callable[..., Any], seconds: float, memory: int) -> None:
        self.job, self.seconds, self.memory, self.owner = job, seconds, memory, 0
        self.child, self.connection = cast(ChildJob, None), cast(Any, None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the fork, which a spawned process cannot use."""
        return self.__dict__ | {"owner": 0, "child": None, "connection": None}

    def __call__(self, *arguments: Any) -> Any:
        """Return the result of ``job`` or raise its ``RecipeError``; :class:`ChildError` names an exceeded limit."""
        request = json.dumps(arguments, default=lambda value: f"<{type(value).__name__}>").encode()
        was_killed = False
        while True:
            if self.owner != os.getpid() or not self.child.process.is_alive():
                self.connection, theirs = multiprocessing.Pipe()
                self.child, self.owner = ChildJob(partial(self._serve, theirs), plain=True), os.getpid()
                theirs.close()
            try:
                self.connection.send_bytes(request)
                if not self.connection.poll(WALL):  # starved of CPU time, or a lock was held during the fork
                    self.child.kill()
                return json.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                ended = self.child.result()
            if self.child.process.exitcode == -signal.SIGPROF:
                raise ChildError(f"takes more than {self.seconds:g} s of CPU time")
            if self.child.process.exitcode == -signal.SIGKILL and not was_killed:
                was_killed = True  # retry once in another fork
            elif ended is not None:  # otherwise the fork had just ended because it was idle
                raise ended

    def _serve(self, connection: Connection) -> None:
        self.connection.close()  # otherwise the fork would not notice that the caller has ended
        for number in (signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        with suppress(OSError):  # macOS has neither /proc nor this limit
            pages, hard = Path("/proc/self/statm").read_text().split()[0], resource.getrlimit(resource.RLIMIT_AS)[1]
            limit = int(pages) * resource.getpagesize() + self.memory
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        with suppress(EOFError, ConnectionError):
            while connection.poll(IDLE):
                arguments = json.loads(connection.recv_bytes())
                signal.setitimer(signal.ITIMER_PROF, self.seconds)
                try:
                    answer = json.dumps(self.job(*arguments)).encode()
                except MemoryError:
                    raise ChildError(f"takes more than {self.memory / 1e9:g} GB of memory") from None
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.send_bytes(answer)


def run_in_child(job: Job, sees_gpu: bool = False, seconds: float | None = None) -> Any:
    """Run ``job`` in a :class:`ChildJob`; return its result, raise its error, or a TimeoutError after ``seconds``."""
    child = ChildJob(job, sees_gpu)
    if not child.wait(seconds):
        child.kill()
        raise TimeoutError(f"it took more than {seconds:g} s")
    result = child.result()
    if isinstance(result, Exception):
        raise result
    return result


def run_in_children(
    jobs: Iterable[Job | None], max_workers: int | None = None, sees_gpu: bool = False
) -> Iterator[tuple[int, Any]]:
    """Run each job in a child process, started in order; yield (index, result) of each job when it ends.

    A job is taken when it can start; ``None`` stands for one that depends on the next result. A result may be the
    ``RecipeError`` or :class:`ChildError` that ended the job. By default, a process per core runs at a time, at most 8.
    """
    max_workers = max_workers or min(cores(), 8)
    waiting, numbers = iter(jobs), count()
    running: dict[Any, tuple[int, ChildJob]] = {}
    try:
        while True:
            while len(running) < max_workers and (job := next(waiting, None)) is not None:
                child = ChildJob(job, sees_gpu)
                running[child.connection] = (next(numbers), child)
            if not running:
                break
            for connection in wait(list(running)):
                number, child = running.pop(connection)
                yield number, child.result()
    finally:
        for _, child in running.values():
            child.kill()


def _work(job: Job, connection: Connection, sees_gpu: bool, gpu_in_use: bool) -> None:
    """Run ``job`` in the child without output, because its messages would describe the simulated machine."""
    detach_from_rank()
    gc.freeze()  # existing objects need no collection in the child
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    if not sees_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import torch

        torch.set_num_threads(1)  # OpenMP's threads do not exist in a fork
        answer = {"error": HAS_USED_GPU} if gpu_in_use else {"result": job()}
    except RecipeError as error:
        answer = {"recipe_error": str(error)}
    except BaseException as error:
        if "autograd's threading" in str(error):  # torch's autograd engine does not work in a fork
            error = ChildError(HAS_TRAINED)
        answer = {"error": _described(error)}
    connection.send_bytes(json.dumps(answer).encode())
    connection.close()
    os._exit(0)  # skip destructors, which could touch the simulated GPU


def _described(error: BaseException) -> str:
    """Return type, first line and source line of an error; a :class:`ChildError` needs only its message."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, ChildError):
        return first
    frames = traceback.extract_tb(error.__traceback__)
    line = innermost_user_frame((frame.filename, frame.lineno or 0) for frame in reversed(frames))
    return f"{type(error).__name__}: {first} ({line})"


def innermost_user_frame(frames: Iterable[tuple[str, int]]) -> str:
    """Return ``file:line`` of the innermost frame that is neither in torch nor in the GPU simulator."""
    import torch

    here = Path(__file__).parents[1]
    folders = Path(torch.__file__).parent, *(here / name for name in ("system", "fakegpu", "planner"))
    inner = tuple(f"{folder}{os.sep}" for folder in folders)
    seen = list(frames)
    return "{}:{}".format(*next((frame for frame in seen if not frame[0].startswith((*inner, "<"))), seen[0]))
