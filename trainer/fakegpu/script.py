"""``trainer plan --script``: run an unchanged training script on a simulated GPU for a few optimizer steps.

The script runs in a separate process, which exits right after the last of these steps, without cleanup.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from trainer.errors import RecipeError, require, safe_message
from trainer.fakegpu.network import DEFAULT_NETWORK, check_cluster
from trainer.system.child_jobs import innermost_user_frame
from trainer.system.processes import ProcessSession, python_command
from trainer.system.text import wrapped

START = "from trainer.fakegpu.script import child_main; child_main()"
LOG = "script.log"
GRACE = 90.0  # additional seconds for imports and for the result
# Environment variables of launchers. They are removed because the planned process must not wait for other ranks.
LAUNCHED = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|OMPI_COMM_WORLD|PMIX?)_.*"
    r"|SLURM_(PROCID|LOCALID|NODEID|NPROCS|NTASKS.*|TASKS_PER_NODE|NNODES|STEP_.*)"
)


@dataclass(frozen=True)
class Script:
    """A script to plan."""

    path: str
    args: Sequence[str]
    out: str  # folder for what the script prints
    gpu: str | None = None  # name of the card; by default this machine's
    budget: str | None = None
    steps: int = 3  # number of steps of one optimizer after which the script is stopped
    seconds: int = 600  # time limit
    configs: Mapping[str, str] = field(default_factory=dict)  # this and the next two: see ``MissingFilePatches``
    columns: str = ""
    rows: int = 1000
    devices: int | None = None  # number of ranks, as torchrun starts them; by default one, without torchrun
    nodes: int = 1
    interconnect: str = DEFAULT_NETWORK
    rank: int = 0  # the rank that is traced

    @property
    def log(self) -> Path:
        """The file with the output of the script."""
        return Path(self.out, f"rank{self.rank}.log" if self.rank else LOG)


def plan_script(script: Script) -> dict[str, Any]:
    """Return ``FakeGPU.to_json()`` with ``picture``, readable ``text`` and ``outlined``: the files that were missing.

    The first and the last rank are traced. The result is that of the one which needs more memory.
    Raises a ``RecipeError`` if the script fails, takes no step, takes too long or needs a missing file.
    """
    last = check_cluster(script.devices or 1, script.nodes).devices - 1
    if not last:
        return _plan_rank(script, [])
    with ThreadPoolExecutor(2) as pool:
        started: list[ProcessSession] = []
        jobs = {rank: pool.submit(_plan_rank, replace(script, rank=rank), started) for rank in (0, last)}
        try:
            found, failed = {0: jobs[0].result()}, ""
            try:
                found[last] = jobs[last].result()
            except RecipeError as error:
                failed = f"; rank {last} was not: {error}"
        except BaseException:  # leaving the pool waits for both
            for process in started:
                process.kill()
            raise
    peaks = {rank: {size: one[size] for size in ("reserved_gb", "allocated_gb")} for rank, one in found.items()}
    line = "; ".join(f"rank {rank}: {one['reserved_gb']:.3f} GB reserved" for rank, one in peaks.items()) + failed
    worst = max(found.values(), key=lambda one: (one["reserved_gb"], one["allocated_gb"]))
    return worst | {"text": f"{worst['text']}\n{wrapped(f'traced    {line}', ' ' * 10)}", "traced_ranks": peaks}


def _plan_rank(script: Script, started: list[ProcessSession]) -> dict[str, Any]:
    ours, theirs = Pipe(duplex=False)
    environment = {name: text for name, text in os.environ.items() if not LAUNCHED.fullmatch(name)}
    with script.log.open("wb") as log, TemporaryFile() as stopped:
        files = theirs.fileno(), stopped.fileno()
        words = [*python_command(START), json.dumps(asdict(script)), *map(str, files)]
        environment |= {"WANDB_MODE": "disabled", "MPLBACKEND": "Agg"}
        process = ProcessSession(words, environment, stdout=log, stderr=subprocess.STDOUT, pass_fds=files)
        started.append(process)
        theirs.close()
        answer, code = _answer(process, ours, script.seconds + GRACE)
        stopped.seek(0)  # contains a traceback after a timeout only
        dump = stopped.read()
        log.write(dump)
    if "gpu" in answer:
        return dict(answer["gpu"])
    mistake = answer.get("mistake") or _how_it_ended(script, code, dump.decode(errors="replace"))
    raise RecipeError(f"{mistake}; what it printed is in {script.log}")


def _answer(watched: ProcessSession, ours: Connection, seconds: float) -> tuple[dict[str, Any], int | None]:
    answer: dict[str, Any] = {}
    try:
        if ours.poll(seconds):
            answer = json.loads(ours.recv_bytes())
    except (EOFError, OSError):  # the process ended without an answer
        watched.process.wait()
    finally:
        code = watched.process.poll()
        watched.kill()
    return answer, code


def _how_it_ended(script: Script, code: int | None, dump: str) -> str:
    if not dump and code is not None:
        return f"{script.path} has ended its process, with code {code}"
    line = re.search(rf'File "{re.escape(script.path)}", line (\d+)', dump)
    where = f", and was at line {line[1]}" if line else ""
    less = "give it less to do with its own arguments, or say --steps 1, or more --seconds"
    return f"{script.path} took more than {script.seconds} s{where}: {less}"


def child_main() -> None:
    """Run the script in the new process, send the result and exit."""
    words, number, stopped = sys.argv[1:]
    script, connection = Script(**json.loads(words)), Connection(int(number), readable=False)
    faulthandler.enable()

    def end(result: Callable[[], Any]) -> None:
        try:
            answer = {"gpu": result()}
        except RecipeError as error:
            answer = {"mistake": safe_message(error)}
        connection.send_bytes(json.dumps(answer).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    end(lambda: _trace(script, end, int(stopped)))


def _trace(script: Script, end: Callable[[Callable[[], Any]], None], stopped: int) -> Any:
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils._python_dispatch import _disable_current_modes

    from trainer.fakegpu.gpus import GPUS, gpu_named
    from trainer.fakegpu.script_fallbacks import MissingFilePatches, columns_of
    from trainer.fakegpu.target import budget_bytes, gpu_here, reduced_budget_note
    from trainer.fakegpu.user_loop import fake_gpu

    columns, taken = columns_of(script.columns), dict[int, int]()
    if (card := gpu_named(script.gpu) if script.gpu else gpu_here()) is None:
        raise RecipeError(f"no GPU found: choose one with --gpu: {', '.join(sorted(GPUS))}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # from here on, the real GPU must not be used
    on: Any = {"nodes": script.nodes, "rank": script.rank, "interconnect": script.interconnect}
    with fake_gpu(card, ranks=script.devices, **on) as gpu:
        gpu.capacity = budget_bytes(script.budget, card, gpu.ranks)
        cut = reduced_budget_note(script.budget, card, gpu.ranks)

        def result(ended: bool = False) -> Any:
            sys.modules.update(ours)
            require(bool(taken), f"{script.path} has ended without a step of an optimizer")
            require(gpu.allocated > 0, f"{script.path} took its steps on the CPU: does it need a flag to use a GPU?")
            early = f"the script has ended after {max(taken.values())} of {script.steps} steps"
            gpu.add_note(early if ended else gpu.unseen())
            with _disable_current_modes():
                text = "\n".join([f"{gpu}", *cut])
                found = gpu.to_json()
                found |= {"notes": [*found["notes"], *cut], "text": text, "outlined": outlines.notes}
                return found | {"picture": gpu.picture}

        def stepped(optimizer: Any, *_: Any) -> None:
            taken[id(optimizer)] = taken.get(id(optimizer), 0) + 1
            if taken[id(optimizer)] == script.steps:
                end(result)

        register_optimizer_step_post_hook(stepped)
        outlines = MissingFilePatches(script.configs, columns, script.rows)
        folder = Path(script.path).resolve().parent
        sys.argv, sys.path[:0] = [script.path, *script.args], [str(folder)]
        ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "trainer"}
        if any(Path(folder, name).exists() for name in ("trainer.py", "trainer")):  # the script imports its own
            for name in ours:
                del sys.modules[name]
        faulthandler.dump_traceback_later(script.seconds, exit=True, file=stopped)
        try:
            runpy.run_path(script.path, run_name="__main__")
        except RecipeError:
            raise
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                traceback.print_exc()
                raise RecipeError(_described(script.path, error)) from error
        return result(ended=True)


def _described(path: str, error: BaseException) -> str:
    """Return the last line of the traceback, and the innermost line of the script or of a file next to it."""
    if isinstance(error, SystemExit):
        return f"{path} has ended itself with {error.code!r}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = any(f"torch{os.sep}_subclasses" in frame.filename for frame in frames[-6:])
    what = "does what cannot be traced without a GPU" if inside else "failed by itself"
    return f"{path} {what} ({_place(frames, error)}): {traceback.format_exception_only(error)[-1].strip()}"


def _place(frames: Sequence[traceback.FrameSummary], error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):  # it has no frame
        return f"{error.filename}:{error.lineno}"
    seen, installed = [(frame.filename, frame.lineno or 0) for frame in reversed(frames)], f"-packages{os.sep}"
    own = [one for one in seen if installed not in one[0] and not one[0].startswith(sysconfig.get_path("stdlib"))]
    return innermost_user_frame(own or seen)
