"""Work in processes of its own: each prediction changes torch for the rest of its process, so each has its own.

A fork has the recipe, its data and everything imported already, also a model class that only a user's script knows;
nothing is pickled, and results come back as JSON.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from trainer.errors import RecipeError, RunError
from trainer.system.machine import cores
from trainer.system.processes import become_helper

Job = Callable[[], Any]
"""Returns something that JSON can hold."""

CANNOT = "this process has {}: predict before {}, or from a process of its own, as `trainer plan` is"
HAS_TRAINED = CANNOT.format("trained already, and what it forks can compute no gradients", "training")
HAS_USED_GPU = CANNOT.format("used its GPU already, which no process that it forks survives", "that")


IDLE, WALL = 10.0, 120.0
"""Seconds without a call after which a fork of :class:`Bounded` ends; and of wall time that a call may take."""


class Failed(RunError):
    """A job ended without a result."""


class Child:
    """A job that runs in another process; where it ``sees_gpu``, it may use that of this machine.

    ``anew`` starts a new interpreter, which takes seconds, for a ``job`` that can be pickled. CUDA works there whatever
    this process has done: without NVML, torch starts CUDA to find out whether there is a GPU, and then no fork can use
    one. A ``plain`` job does not use torch, so that it can be forked all the same.
    """

    def __init__(self, job: Job, sees_gpu: bool = False, anew: bool = False, plain: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn" if anew else "fork")
        self.connection, theirs = context.Pipe(duplex=False)
        torch = sys.modules.get("torch")  # this floor loads without it
        # Asked here: in a fork torch says that it is not.
        gpu_in_use = torch is not None and torch.cuda.is_initialized() and not (anew or plain)
        self.process = context.Process(target=_work, args=(job, theirs, sees_gpu, gpu_in_use), daemon=True)
        # Otherwise a worker of torch's DataLoader, which is a daemon, may start no process.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether the job ends within ``seconds``."""
        return self.connection.poll(seconds)

    def result(self) -> Any:
        """What the job returned, or the ``RecipeError`` or :class:`Failed` that it ended with; waits for it."""
        try:
            answer = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):  # also in the middle of an answer
            answer = {}
        finally:
            self.connection.close()
            self.process.join()
        if "result" in answer:
            return answer["result"]
        if "recipe_error" in answer:
            return RecipeError(answer["recipe_error"])
        ended = f"its process ended with code {self.process.exitcode}: did memory run out?"
        return Failed(answer.get("error") or ended)

    def kill(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.join()


class Bounded:
    """Calls ``job`` in another process, with limits on CPU time and memory: for what a file of unknown origin computes.

    Arguments and results are JSON. Each process that calls this object forks one at its first call. The fork ends when
    it has not been called for some seconds; the next call then forks another one.
    """

    def __init__(self, job: Callable[..., Any], seconds: float, memory: int) -> None:
        self.job, self.seconds, self.memory, self.owner = job, seconds, memory, 0
        self.child, self.connection = cast(Child, None), cast(Any, None)

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is spawned."""
        return self.__dict__ | {"owner": 0, "child": None, "connection": None}

    def __call__(self, *arguments: Any) -> Any:
        """The result of ``job``, or the ``RecipeError`` that it raised; :class:`Failed` names the limit it exceeded."""
        request = json.dumps(arguments, default=lambda value: f"<{type(value).__name__}>").encode()
        was_killed = False
        while True:
            if self.owner != os.getpid() or not self.child.process.is_alive():
                self.connection, theirs = multiprocessing.Pipe()
                self.child, self.owner = Child(partial(self._serve, theirs), plain=True), os.getpid()
                theirs.close()
            try:
                self.connection.send_bytes(request)
                if not self.connection.poll(WALL):  # no CPU time, or a lock held when it was forked
                    self.child.kill()
                return json.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                ended = self.child.result()
            if self.child.process.exitcode == -signal.SIGPROF:
                raise Failed(f"takes more than {self.seconds:g} s of CPU time")
            if self.child.process.exitcode == -signal.SIGKILL and not was_killed:
                was_killed = True  # another fork, once
            elif ended is not None:  # else it ended for lack of calls, just before this one
                raise ended

    def _serve(self, connection: Connection) -> None:
        """Do the job in the fork as often as it is asked for."""
        self.connection.close()  # it would never see the end of the caller
        for number in (signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        with suppress(OSError):  # macOS has no /proc, and no such limit
            pages, hard = Path("/proc/self/statm").read_text().split()[0], resource.getrlimit(resource.RLIMIT_AS)[1]
            most = int(pages) * resource.getpagesize() + self.memory
            resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        with suppress(EOFError, ConnectionError):
            while connection.poll(IDLE):
                arguments = json.loads(connection.recv_bytes())
                signal.setitimer(signal.ITIMER_PROF, self.seconds)
                try:
                    answer = json.dumps(self.job(*arguments)).encode()
                except MemoryError:
                    raise Failed(f"takes more than {self.memory / 1e9:g} GB of memory") from None
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.send_bytes(answer)


def in_child(job: Job, sees_gpu: bool = False, seconds: float | None = None) -> Any:
    """The result of ``job``, done by a :class:`Child`; what that ended with, or a TimeoutError, is raised."""
    child = Child(job, sees_gpu)
    if not child.wait(seconds):
        child.kill()
        raise TimeoutError(f"it took more than {seconds:g} s")
    result = child.result()
    if isinstance(result, Exception):
        raise result
    return result


def in_children(jobs: Sequence[Job], at_once: int | None = None, sees_gpu: bool = False) -> Iterator[tuple[int, Any]]:
    """Do ``jobs`` in processes of their own, begun in this order; yield the number and the result of each, as they end.

    The result may be the ``RecipeError`` or :class:`Failed` that a job ended with. By default there is a process a
    core, eight at most; ``sees_gpu`` is as of :class:`Child`.
    """
    at_once = at_once or min(cores(), 8)
    waiting = list(enumerate(jobs))
    running: dict[Any, tuple[int, Child]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, job = waiting.pop(0)
                child = Child(job, sees_gpu)
                running[child.connection] = (number, child)
            for connection in wait(list(running)):
                number, child = running.pop(connection)
                yield number, child.result()
    finally:
        for _, child in running.values():
            child.kill()


def _work(job: Job, connection: Connection, sees_gpu: bool, gpu_in_use: bool) -> None:
    """Do ``job`` in the child, silently: what it prints is about a machine that is not there."""
    become_helper()
    gc.freeze()  # what was there before is not looked through again and again
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    if not sees_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import torch

        torch.set_num_threads(1)  # OpenMP's threads did not survive the fork
        answer = {"error": HAS_USED_GPU} if gpu_in_use else {"result": job()}
    except RecipeError as error:
        answer = {"recipe_error": str(error)}
    except BaseException as error:
        if "autograd's threading" in str(error):  # torch's engine does not survive a fork
            error = Failed(HAS_TRAINED)
        answer = {"error": _described(error)}
    connection.send_bytes(json.dumps(answer).encode())
    connection.close()
    os._exit(0)  # no destructor may touch a GPU that is not there


def _described(error: BaseException) -> str:
    """The first line of an error and where it came from, outside of torch if possible; our own speak for themselves."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, Failed):
        return first
    frames = traceback.extract_tb(error.__traceback__)
    line = users_line((frame.filename, frame.lineno or 0) for frame in reversed(frames))
    return f"{type(error).__name__}: {first} ({line})"


def users_line(frames: Iterable[tuple[str, int]]) -> str:
    """``file:line`` of the innermost of ``frames`` that is neither torch's nor of what pretends to be a GPU."""
    import torch

    here = Path(__file__).parents[1]
    folders = Path(torch.__file__).parent, *(here / name for name in ("system", "fakegpu", "planner"))
    inner = tuple(f"{folder}{os.sep}" for folder in folders)
    seen = list(frames)
    outer = (frame for frame in seen if not frame[0].startswith((*inner, "<")))
    return "{}:{}".format(*next(outer, seen[0]))
