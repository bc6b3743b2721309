"""The command line: ``trainer fit | plan | ladder | ...``, and ``main`` for recipes run by themselves."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

import trainer
from trainer.errors import EXIT_REQUEUE, NothingNamed, RecipeError, RunError, Stopped
from trainer.launching.company import keep_company
from trainer.recipe import Recipe
from trainer.system import waiting
from trainer.system.environment import number, require_numbers
from trainer.system.streams import keep_streams, lost_output
from trainer.system.text import escaped

# What follows the top-level help is imported where it is used, so that `trainer --help` answers at once.

USAGE = """\
usage: trainer COMMAND ...

{summary}

commands:
  fit RECIPE [flags]        train, evaluate and write a run directory
  run [--restarts N] -- RECIPE [flags]
                            fit, started again from its newest checkpoint when it dies; `trainer run --help`
  doctor RECIPE [flags]     check this machine, the data and the model before a run: each finding with its fix
  plan RECIPE|hf:MODEL [flags]
                            find the fastest plan that fits a memory budget, for GPUs that need not be there
  plan --script FILE [flags] -- ARGS
                            what a training script that is not ours would take of such a GPU
  ladder RECIPE [flags]     measure the memory techniques on a recipe, one by one and stacked: memory, speed, loss
  sweep RECIPE --over KEY=VALUES [flags]
                            find good settings by many runs, by Optuna
  evaluate RUN_DIR [flags]  evaluate the trained model of a run directory
  checkpoint list|verify|export DIR
                            look at the checkpoints of a run, check them, or make a model of one
  predict RUN_DIR --text TEXT [TEXT ...] | --image PATH [PATH ...] | PATH ...
                            classify files, folders, tables, texts or images with the trained model of a run directory
  export RUN_DIR --to onnx|hf|hub [flags]
                            write the trained model of a run directory for others, and check it
  runs [DIR ...]            a table of runs, with their figures; --compare two of them

RECIPE is a packaged name, a .py file that defines `recipe`, or the recipe.yaml of a run. A .py file that a recipe.yaml
names is executed only with --trust-recipe.
packaged recipes: {recipes}

options:
  -h, --help                show this page; `trainer fit RECIPE --help` lists every flag, with its value in that recipe
  --version                 show the version
"""
LOST_PEER = ("Connection closed by peer", "Connection reset by peer")
"""What a collective says when another rank is gone."""


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
    "runs": "lab.list_runs:runs",
}
"""What carries a command out: a function, imported when it is given, of the words after its name; and maybe a code."""


def entry() -> None:
    """The ``trainer`` command."""
    keep_streams()
    argv = sys.argv[1:]
    if argv[:1] and argv[0] in COMMANDS:
        _begin(next((word for word in argv[1:2] if word[:1] != "-"), argv[0]))
    _end(run(argv) or _output_lost(argv), soon=True)


def run(argv: Sequence[str]) -> int:
    """Run a command line, without the program's name, and return its exit code.

    A setting that cannot work is one line on stderr and 2; a run that could not go on, one line and 1; an error of
    anybody's own code in a run, ``sys.exit()`` among them, a line that says where, its traceback and 1; a run that
    was asked to stop, 75. Any other exception is passed on.
    """
    return _guarded(lambda: _dispatch(list(argv)))


def main(recipe: Recipe) -> None:
    """Train ``recipe``, with the flags of ``trainer fit``: for ``python my_recipe.py --epochs 3``."""
    keep_streams()
    _begin(sys.argv[0])

    def script() -> None:
        require_numbers()
        from trainer.commands.runs import fit_script

        fit_script(recipe)

    code = _guarded(script)
    waiting.end()
    if code := code or _output_lost(["fit", *sys.argv[1:]]):
        _end(code)


def fit_command(argv: Sequence[str]) -> None:
    """``trainer fit``, raising what :func:`run` prints: for a launcher with a way of its own to report errors."""
    _carry_out("fit", list(argv))


def _carry_out(command: str, argv: list[str]) -> int:
    module, _, function = COMMANDS[command].partition(":")
    return getattr(import_module(f"trainer.{module}"), function)(argv) or 0


def _begin(subject: str) -> None:
    waiting.begin(f"trainer {trainer.__version__} · {subject}")


def _end(code: int, soon: bool = False) -> NoReturn:
    """Exit: ``soon`` once threads are done and what is registered for the end, without Python's own, which takes
    modules apart for a second once torch is there; so a rank that failed among several, in which gloo would abort, with
    another code."""
    waiting.end()
    launched = sys.modules.get("trainer.faults.signals")  # else nothing was begun that could abort
    failed = launched is not None and code != 0 and number("WORLD_SIZE", 1) > 1
    if launched is not None and failed:
        launched.wait_for_children()
    elif soon:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    if failed or soon:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _output_lost(argv: Sequence[str]) -> int:
    """1, and a line, where the output is what a command was given for and did not arrive; training outlives it."""
    trains = argv[:1] in (["fit"], ["run"]) and not {"-h", "--help", "--print_config"} & set(argv)
    error = None if trains else lost_output()
    if error is None:
        return 0
    from trainer.system.reports import say

    say(f"stdout: {error.strerror}: the output is not complete")
    return 1


def _guarded(command: Callable[[], int | None]) -> int:
    _quiet_libraries()
    try:
        return command() or 0
    except Stopped as error:
        print(escaped(error), file=sys.stderr)
        return EXIT_REQUEUE
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # SystemExit, too: whoever calls sys.exit() has not finished the command
        return _report(error)


def _report(error: BaseException) -> int:
    """Print an error whose cause is known, or where it happened in a run; raise any other."""
    from trainer.system.reports import place_of, print_traceback, report, say

    if isinstance(error, RecipeError | RunError | SystemExit) or place_of(error) is not None:
        report(error)
    elif isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER):
        say("another rank ended; its message says why")
    elif isinstance(error, OSError) and error.filename is not None:  # a name that no file can have, a disk
        say(f"{error.filename}: {error.strerror}")
    elif library := _importing(error):
        say(f"cannot import {library}: {error}: reinstall it, or correct the environment variable that it reads")
    else:
        sys.excepthook = print_traceback
        raise error
    return 2 if isinstance(error, RecipeError) else 1


def _importing(error: BaseException) -> str:
    """The library whose import raised ``error``; empty if none did."""
    scopes = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    library = str(scopes[-1].f_globals["__name__"]).partition(".")[0] if scopes else ""
    return "" if library in ("trainer", "__main__") else library


def _quiet_libraries() -> None:
    """Keep from stderr what libraries say to nobody: bars, each an endless line in a log file, and what torch says of
    torchao's classes, which come with every model of transformers."""
    logging.getLogger("torch.utils._pytree").addFilter(_is_not_of_torchao)
    # DDP's, of class tokens and convolutions of one pixel: strides of dimensions of 1, which mean nothing.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    os.environ["MPLBACKEND"] = "agg"  # for files; an unknown backend would end the import of matplotlib
    if not sys.stderr.isatty():
        for library in ("HF_HUB", "HF_DATASETS"):  # read when the libraries are imported, which is later
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")


def _is_not_of_torchao(record: logging.LogRecord) -> bool:
    return not any(str(getattr(value, "__module__", "")).startswith("torchao.") for value in record.args or ())


def _dispatch(argv: list[str]) -> int:
    first = argv[0] if argv else "--help"
    if first in COMMANDS:
        require_numbers()
        if first in ("fit", "evaluate"):  # before torch is imported
            keep_company()
        try:
            return _carry_out(first, argv[1:])
        except NothingNamed:
            if not {"-h", "--help"} & set(argv):
                raise
            first = "--help"
    if first in ("-h", "--help"):
        from trainer.commands.recipes import packaged_recipes

        print(USAGE.format(summary=trainer.__doc__, recipes=", ".join(packaged_recipes())), end="")
    elif first == "--version":
        print(f"trainer {trainer.__version__}")
    else:
        from trainer.settings import did_you_mean

        kind = "flag" if first.startswith("-") else "command"
        suggestion = did_you_mean(first.lstrip("-"), COMMANDS)
        raise RecipeError(f"unknown {kind} {first}{suggestion} (commands: {', '.join(COMMANDS)})")
    return 0
