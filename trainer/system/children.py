"""Work in processes of its own: each prediction changes torch for the rest of its process, so each has its own.

A fork has the recipe, its data and everything imported already, also a model class that only a user's script knows;
nothing is pickled, and results come back as JSON.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from trainer.errors import RecipeError, RunError
from trainer.system.machine import cores
from trainer.system.processes import become_helper

Job = Callable[[], Any]
"""Returns something that JSON can hold."""

CANNOT = "this process has {}: predict before {}, or from a process of its own, as `trainer plan` is"
HAS_TRAINED = CANNOT.format("trained already, and what it forks can compute no gradients", "training")
HAS_USED_GPU = CANNOT.format("used its GPU already, which no process that it forks survives", "that")


class Failed(RunError):
    """A job ended without a result."""


class Child:
    """A job that runs in a process of its own; where it ``sees_gpu``, it may use that of this machine.

    ``anew`` starts a new interpreter, which takes seconds, for a ``job`` that can be pickled. CUDA works there whatever
    this process has done: without NVML, torch has begun with it once anybody has asked whether there is a GPU, and no
    fork can use one.
    """

    def __init__(self, job: Job, sees_gpu: bool = False, anew: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn" if anew else "fork")
        self.connection, theirs = context.Pipe(duplex=False)
        torch = sys.modules.get("torch")  # this floor loads without it
        # Asked here: in a fork torch says that it is not.
        gpu_in_use = torch is not None and torch.cuda.is_initialized() and not anew
        self.process = context.Process(target=_work, args=(job, theirs, sees_gpu, gpu_in_use), daemon=True)
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
    inner = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, here / "system", here / "planner"))
    seen = list(frames)
    outer = (frame for frame in seen if not frame[0].startswith((*inner, "<")))
    return "{}:{}".format(*next(outer, seen[0]))
