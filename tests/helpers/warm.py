"""Python processes that need not import torch: forks of a server that has imported everything and done nothing.

Importing torch, Lightning and transformers takes five to nine seconds of a core, a fork some milliseconds. Only what is
about the start of Python itself, about who started whom or about memory starts an interpreter of its own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from helpers import LONG

forks: Any = multiprocessing.get_context("forkserver")
PRELOADED = ["trainer.api", "trainer.commands.flags", "trainer.planner.search", "accelerate", "sklearn.metrics"]
PRELOADED += ["matplotlib.backends.backend_agg", "transformers.models.distilbert.modeling_distilbert"]
forks.set_forkserver_preload(PRELOADED)


class WarmProcess:
    """``python WORDS`` in a fork and in a session of its own, with the methods of ``subprocess.Popen``.

    It is given the descriptors ``files``; those of ``words`` that are their numbers become what they are there.
    """

    def __init__(
        self,
        words: Sequence[str],
        stdout: Path,
        stderr: Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
    ) -> None:
        outputs = [stdout, stderr]
        for path in outputs:
            path.touch()
        environment = dict(os.environ if env is None else env)
        self.args = list(words)
        given = {str(number): Given(number) for number in files}
        self.process = forks.Process(target=_be, args=(self.args, cwd or Path.cwd(), environment, outputs, given))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it to this process alone."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class Given:
    """A descriptor on its way to a fork, where it is a number again."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return methodcaller("detach"), (reduction.DupFd(self.number),)


def python(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = LONG
) -> subprocess.CompletedProcess:
    """What ``python WORDS`` prints and ends with, like ``subprocess.run`` with text output."""
    with TemporaryDirectory(prefix="warm-") as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        process = WarmProcess([str(word) for word in words], *outputs, cwd, env)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{error}:\n{outputs[1].read_text()}") from None
        return subprocess.CompletedProcess(process.args, code, *(path.read_text() for path in outputs))


def _be(
    words: list[str], cwd: Path, environment: dict[str, str], outputs: list[Path], files: Mapping[str, int]
) -> None:
    """Do in a fork what Python does from its start to its end."""
    words = [str(files.get(word, word)) for word in words]
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, (name, path) in enumerate(zip(("stdout", "stderr"), outputs, strict=True), start=1):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
        stream = open(number, "w", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    multiprocessing.set_start_method(None, force=True)  # as it is where nobody has set it
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os._exit(_exit_code(words))


def _exit_code(words: list[str]) -> int:
    try:
        try:
            _run(words)
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return 1 if isinstance(end.code, str) else end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _run(words: list[str]) -> None:
    kind, *rest = words
    sys.argv = [kind, *rest] if not kind.startswith("-") else [kind, *rest[1:]]
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        exec(rest[0], sys.modules["__main__"].__dict__)
    else:
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
