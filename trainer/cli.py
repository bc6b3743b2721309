"""The command line: ``trainer fit | plan | ladder | ...``, and ``main`` for recipes that run as scripts."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import trainer
from trainer.errors import EXIT_REQUEUE, MissingArgumentError, RecipeError, RunError, RunStoppedError
from trainer.launching.company import keep_company
from trainer.recipe import Recipe
from trainer.system import status_line
from trainer.system.environment import read_int_variable, require_numbers
from trainer.system.streams import install_safe_streams, stdout_error
from trainer.system.text import escaped

# Everything beyond the top-level help is imported where it is used, so that `trainer --help` is fast.
PEER_LOST_MESSAGES = ("Connection closed by peer", "Connection reset by peer")  # if another rank has ended

COMMANDS = {
    "fit": "commands.runs:fit",
    "run": "supervise.supervisor:run_command",
    "doctor": "commands.doctor:doctor",
    "plan": "commands.plan:plan",
    "ladder": "lab.ladder:ladder",
    "sweep": "lab.sweep:sweep",
    "evaluate": "commands.runs:evaluate",
    "checkpoint": "commands.checkpoint:checkpoint",
    "predict": "commands.runs:predict",
    "export": "commands.runs:export",
    "migrate": "commands.migrate:migrate",
    "same-gradient": "commands.same_gradient:same_gradient",
    "runs": "lab.list_runs:runs",
}
"""The function of each command. It takes the remaining arguments, and returns an exit code or ``None``."""


def entry() -> None:
    """The ``trainer`` command."""
    install_safe_streams()
    argv = sys.argv[1:]
    if argv[:1] and argv[0] in COMMANDS:
        _start_status_line(next((word for word in argv[1:2] if word[:1] != "-"), argv[0]))
    _exit_process(run(argv) or _report_broken_stdout(argv), fast=True)


def run(argv: Sequence[str]) -> int:
    """Run a command line, without the program's name, and return its exit code.

    A rejected setting prints one line on stderr and returns 2; a run that cannot continue prints one line and returns
    1, an error in user code, including ``sys.exit()``, also its place and its traceback. A run that was asked to stop
    returns 75. Any other exception is raised.
    """
    _silence_libraries()
    try:
        return _dispatch(list(argv))
    except BaseException as error:  # also SystemExit: a command that calls sys.exit() has not finished
        return _exit_code(error)


def main(recipe: Recipe) -> None:
    """Train ``recipe``, with the flags of ``trainer fit``: for ``python my_recipe.py --epochs 3``."""
    install_safe_streams()
    _start_status_line(sys.argv[0])
    _silence_libraries()
    code = 0
    try:
        require_numbers()
        from trainer.commands.runs import fit_script

        fit_script(recipe)
    except BaseException as error:
        code = _exit_code(error)
    status_line.clear_status()
    if code := code or _report_broken_stdout(["fit", *sys.argv[1:]]):
        _exit_process(code)


def fit_command(argv: Sequence[str]) -> None:
    """Run ``trainer fit`` and raise its errors, for launchers that report errors themselves."""
    _command("fit")(list(argv))


def _command(name: str) -> Callable[[list[str]], int | None]:
    module, _, function = COMMANDS[name].partition(":")
    return getattr(import_module(f"trainer.{module}"), function)


def _start_status_line(subject: str) -> None:
    status_line.start_status(f"trainer {trainer.__version__} · {subject}")


def _exit_process(code: int, fast: bool = False) -> NoReturn:
    """Exit with ``code``. ``fast`` waits for threads and runs atexit handlers, but skips the teardown of modules, which
    takes 1 s with torch. A failed rank of several skips it too: gloo may abort in it and change the exit code."""
    status_line.clear_status()
    launched: Any = sys.modules.get("trainer.faults.signals")  # if not imported, nothing that could abort was started
    failed = launched is not None and code != 0 and read_int_variable("WORLD_SIZE", 1) > 1
    if failed:
        launched.wait_for_children()
    elif fast:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    if failed or fast:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _report_broken_stdout(argv: Sequence[str]) -> int:
    """Report output that could not be written and return 1; return 0 for training, which does not depend on it."""
    trains = argv[:1] in (["fit"], ["run"]) and not {"-h", "--help", "--print_config"} & set(argv)
    if trains or (error := stdout_error()) is None:
        return 0
    from trainer.system.error_reports import print_error

    print_error(f"stdout: {error.strerror}: the output is not complete")
    return 1


def _exit_code(error: BaseException) -> int:
    """Report an error that is known, or whose place in a run is known, and return its exit code; raise any other."""
    if isinstance(error, RunStoppedError):
        print(escaped(error), file=sys.stderr)
        return EXIT_REQUEUE
    if isinstance(error, KeyboardInterrupt):
        return 130
    from trainer.system.error_reports import get_location, print_error, print_traceback, report

    if isinstance(error, RecipeError | RunError | SystemExit) or get_location(error) is not None:
        report(error)
    elif isinstance(error, RuntimeError) and any(sign in str(error) for sign in PEER_LOST_MESSAGES):
        print_error("another rank ended; its message says why")
    elif isinstance(error, OSError) and error.filename is not None:  # an invalid name, or a fault of the disk
        print_error(f"{error.filename}: {error.strerror}")
    elif library := _importing(error):
        print_error(f"cannot import {library}: {error}: reinstall it, or correct the variable that it reads")
    else:
        sys.excepthook = print_traceback
        raise error
    return 2 if isinstance(error, RecipeError) else 1


def _importing(error: BaseException) -> str:
    """Return the library whose import raised ``error``, or an empty string."""
    scopes = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    library = str(scopes[-1].f_globals["__name__"]).partition(".")[0] if scopes else ""
    return "" if library in ("trainer", "__main__") else library


def _silence_libraries() -> None:
    """Suppress progress bars of libraries in log files, and a warning that users cannot act on."""
    # DDP warns about strides of dimensions of size 1 (class tokens, convolutions of one pixel), which have no effect.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    os.environ["MPLBACKEND"] = "agg"  # for files; matplotlib cannot be imported with an unknown backend
    if not sys.stderr.isatty():
        for library in ("HF_HUB", "HF_DATASETS"):  # read when the libraries are imported later
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")


def _dispatch(argv: list[str]) -> int:
    first = argv[0] if argv else "--help"
    if first in COMMANDS:
        require_numbers()
        if first in ("fit", "evaluate"):  # before torch is imported
            keep_company()
        try:
            return _command(first)(argv[1:]) or 0
        except MissingArgumentError:
            if not {"-h", "--help"} & set(argv):
                raise
            first = "--help"
    if first in ("-h", "--help"):
        from trainer.commands.recipes import packaged_recipes

        usage = Path(__file__).with_name("usage.txt").read_text(encoding="utf-8")
        print(usage.format(summary=trainer.__doc__, recipes=", ".join(packaged_recipes())), end="")
    elif first == "--version":
        print(f"trainer {trainer.__version__}")
    else:
        from trainer.system.names import did_you_mean

        kind = "flag" if first.startswith("-") else "command"
        suggestion = did_you_mean(first.lstrip("-"), COMMANDS)
        raise RecipeError(f"unknown {kind} {first}{suggestion} (commands: {', '.join(COMMANDS)})")
    return 0
