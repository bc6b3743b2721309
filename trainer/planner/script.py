"""``trainer plan --script``: somebody's training script, as it is, on a GPU that is not there, for a few optimizer steps.

It runs in a process of its own, which ends, without any cleaning up, when the last of the steps has been taken: nothing
that it would write later is written.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.errors import RecipeError, require, text_of
from trainer.system.processes import end_with_parent, own_code

START = "from trainer.planner.script import child; child()"
LOG = "script.log"
GRACE = 60.0  # seconds until torch and the planner are imported, and the result is drawn


@dataclass(frozen=True)
class Script:
    """What is to be planned."""

    path: str
    args: Sequence[str]
    out: str  # folder for plan.png and what the script prints
    gpu: str | None = None  # by default that of this machine
    budget: str | None = None
    steps: int = 3  # optimizer steps after which it is stopped
    seconds: int = 600  # that it may take
    configs: dict[str, str] | None = None  # folders by the names that it asks the hub for
    columns: str | None = None  # of data sets that are missing
    rows: int = 1000


def plan_script(script: Script) -> dict[str, Any]:
    """What the script takes, as :meth:`FakeGPU.to_json`, with ``budget_gb``.

    Raises:
        RecipeError: when there is no such file, when it fails, never steps, takes too long, or wants what is not here.
    """
    ours, theirs = Pipe(duplex=False)
    words = [*own_code(START), json.dumps(asdict(script)), str(theirs.fileno()), str(os.getpid())]
    log = Path(script.out) / LOG
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # so that what it has started ends with it
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )
    theirs.close()
    try:
        answer = json.loads(ours.recv_bytes()) if ours.poll(script.seconds + GRACE) else {"late": True}
    except (EOFError, OSError):
        answer = {"late": True, "code": process.wait()}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if "gpu" in answer:
        return dict(answer["gpu"])
    if "mistake" in answer:
        raise RecipeError(answer["mistake"])
    printed = log.read_text(errors="replace")
    if answer.get("late") and (where := _last_seen(printed, script.path)):
        raise RecipeError(
            f"{script.path} took more than {script.seconds} s and {where}: give it less to do with its own arguments, "
            f"or --steps 1, or more time with --seconds; what it printed is in {log}"
        )
    raise RecipeError(f"{script.path} ended its process with code {answer.get('code')}: what it printed is in {log}")


def _last_seen(printed: str, path: str) -> str | None:
    """Where a script was when its time was over, from what ``faulthandler`` has written."""
    _, found, dump = printed.rpartition("Timeout (")
    line = re.search(rf'File "{re.escape(path)}", line (\d+)', dump)
    return None if not found else f"was at line {line[1]}" if line else "was not in its own code"


def child() -> None:
    """In the new process: run the script, answer, and end."""
    words, number, parent = sys.argv[1:]
    end_with_parent(int(parent))
    script, connection = Script(**json.loads(words)), Connection(int(number), readable=False)
    faulthandler.enable()

    def answer(**content: Any) -> None:
        connection.send_bytes(json.dumps(content).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    try:
        answer(gpu=_traced(script, answer))
    except RecipeError as error:
        answer(mistake=text_of(error))


def _traced(script: Script, answer: Any) -> Any:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils._python_dispatch import _disable_current_modes

    from trainer.planner.any_loop import fake_gpu
    from trainer.planner.outlines import Outlines, columns_of
    from trainer.planner.search import target_for
    from trainer.planner.target import budget_bytes

    card = target_for(script.gpu).gpu
    budget = budget_bytes(script.budget, card, 1)
    columns = None if script.columns is None else columns_of(script.columns)
    outlines = Outlines(script.configs or {}, columns, script.rows)
    with fake_gpu(card) as gpu:
        gpu.capacity = budget

        def result() -> Any:
            require(gpu.allocated > 0, f"{script.path} took its steps on the CPU: does it need a flag to use a GPU?")
            with _disable_current_modes():
                gpu.plot(Path(script.out) / "plan.png")
                return gpu.to_json() | {"title": card.title, "budget_gb": budget / 1e9, "outlined": outlines.notes}

        taken: dict[int, int] = {}

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            taken[id(optimizer)] = taken.get(id(optimizer), 0) + 1
            if taken[id(optimizer)] == script.steps:
                try:
                    answer(gpu=result())
                except RecipeError as error:
                    answer(mistake=text_of(error))

        register_optimizer_step_post_hook(stepped)
        outlines.install()
        sys.argv = [script.path, *script.args]
        sys.path.insert(0, str(Path(script.path).resolve().parent))
        faulthandler.dump_traceback_later(script.seconds, exit=True)
        try:
            runpy.run_path(script.path, run_name="__main__")
        except RecipeError:
            raise
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                traceback.print_exc()
                raise RecipeError(_told(script, error)) from error
        if not taken:
            raise RecipeError(
                f"{script.path} ended without an optimizer step (optimizer.step was never called, or its data were "
                f"empty): what it printed is in {Path(script.out) / LOG}"
            )
        outlines.note("the script ended by itself before the last of the steps that were wanted")
        return result()


def _told(script: Script, error: BaseException) -> str:
    """The last line of a traceback, and where in the script or else beside it."""
    log = f"what it printed is in {Path(script.out) / LOG}"
    if isinstance(error, SystemExit):
        return f"{script.path} ended itself with {error.code!r} before an optimizer step: {log}"
    line = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == script.path] or frames
    cause = "failed by itself"
    if "fake" in line.lower() or any(f"torch{os.sep}_subclasses" in frame.filename for frame in frames[-6:]):
        cause = "does what the planner cannot trace"
    return f"{script.path} {cause} (line {own[-1].lineno}): {line}; {log}"
