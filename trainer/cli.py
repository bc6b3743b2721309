"""The command line: ``trainer fit | plan | ladder | ...``, and ``main`` for recipes run by themselves."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trainer
from trainer.errors import EXIT_REQUEUE, RecipeError, RunError, Stopped
from trainer.recipe import Recipe
from trainer.system.environment import number, require_numbers
from trainer.system.redact import refuse_redacted
from trainer.system.streams import keep_streams, lost_output
from trainer.system.text import escaped

if TYPE_CHECKING:
    from trainer.commands.flags import Flags

# What follows the top-level help is imported where it is used, so that `trainer --help` answers at once.

USAGE = """\
usage: trainer COMMAND ...

{summary}

commands:
{commands}

RECIPE is a packaged name, a .py file that defines `recipe`, or the recipe.yaml of a run. A .py file that a recipe.yaml
names is executed only with --trust-recipe.
packaged recipes: {recipes}

options:
  -h, --help                show this page; `trainer fit RECIPE --help` lists every flag, with its value in that recipe
  --version                 show the version
"""

LOST_PEER = ("Connection closed by peer", "Connection reset by peer")
"""What a collective says when another rank is gone."""


class Command(NamedTuple):
    """A row of the table of commands.

    Args:
        words: that follow its name; the first says what it takes.
        help: what it does.
    """

    words: str
    help: str


COMMANDS = {
    "fit": Command("RECIPE [flags]", "train, evaluate and write a run directory"),
    "run": Command(
        "[--restarts N] -- RECIPE [flags]",
        "fit, started again from its newest checkpoint when it dies; `trainer run --help`",
    ),
    "doctor": Command(
        "RECIPE [flags]", "check this machine, the data and the model before a run: each finding with its fix"
    ),
    "plan": Command(
        "RECIPE [flags]", "find the fastest plan that fits a memory budget, for GPUs that need not be there"
    ),
    "ladder": Command(
        "RECIPE [flags]", "measure the memory techniques on a recipe, one by one and stacked: memory, speed, loss"
    ),
    "evaluate": Command("RUN_DIR [flags]", "evaluate the trained model of a run directory"),
    "checkpoint": Command(
        "list|verify|export DIR", "look at the checkpoints of a run, check them, or make a model of one"
    ),
    "predict": Command(
        "RUN_DIR --text TEXT [TEXT ...] | --image PATH [PATH ...]",
        "classify texts or images with the trained model of a run directory",
    ),
    "chaos": Command(
        "[--trials N] [--out FILE] [--only FAULTS]",
        "kill, stop and corrupt tiny runs on this machine, and see whether they resume bit for bit",
    ),
}
PREDICT_FLAGS = {"text": "texts to classify", "image": "image files to classify"}


def entry() -> None:
    """The ``trainer`` command."""
    keep_streams()
    argv = sys.argv[1:]
    code = run(argv) or _output_lost(argv)
    _leave_failed_ranks(code)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run a command line, without the program's name, and return its exit code.

    A setting that cannot work is one line on stderr and exit code 2, a run that could not go on one line and exit
    code 1, an error of anybody's own code in a run, ``sys.exit()`` among them, a line that says where it was, its
    traceback and exit code 1, and a run that stopped because it was asked to exit code 75; any other exception is
    passed on.
    """
    return _guarded(lambda: _dispatch(list(argv)))


def main(recipe: Recipe) -> None:
    """Train ``recipe``, with the flags of ``trainer fit``: for ``python my_recipe.py --epochs 3``."""
    keep_streams()
    if code := _guarded(lambda: _main(recipe)) or _output_lost(["fit", *sys.argv[1:]]):
        _leave_failed_ranks(code)
        sys.exit(code)


def fit_command(argv: Sequence[str]) -> None:
    """``trainer fit``, raising what :func:`run` prints: for a launcher with a way of its own to report errors."""
    _command("fit", list(argv))


def _leave_failed_ranks(code: int) -> None:
    """End a rank that failed among several without Python's own end: gloo would abort in it, with another code."""
    launched = sys.modules.get("trainer.faults.signals")  # else nothing was begun that could abort
    if code and launched is not None and number("WORLD_SIZE", 1) > 1:
        launched.wait_for_children()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
    """Run a command; its exit code, 0 where it returns none."""
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
    else:
        sys.excepthook = print_traceback
        raise error
    return 2 if isinstance(error, RecipeError) else 1


def _leave_before_training() -> None:
    from trainer.faults.signals import leave_before_training

    leave_before_training()


def _quiet_libraries() -> None:
    """Keep from stderr what libraries say to nobody: bars, each an endless line in a log file, and two warnings.

    They come with every import of a model of transformers, which imports torchao, which registers two of its classes
    in a way that torch will not take any more one day.
    """
    logging.getLogger("torch.utils._pytree").addFilter(_is_not_of_torchao)
    os.environ["MPLBACKEND"] = "agg"  # for files; a name of no backend would end the import of torchmetrics
    if not sys.stderr.isatty():
        for library in ("HF_HUB", "HF_DATASETS"):  # read when the libraries are imported, which is later
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")


def _is_not_of_torchao(record: logging.LogRecord) -> bool:
    told = record.args if isinstance(record.args, tuple) else ()
    return not any(str(getattr(value, "__module__", "")).startswith("torchao.") for value in told)


def _dispatch(argv: list[str]) -> int:
    first = argv[0] if argv else "--help"
    if first in COMMANDS:
        require_numbers()
        own: dict[str, Callable[[list[str]], int | None]] = {"run": _run, "checkpoint": _checkpoint, "chaos": _chaos}
        return own.get(first, partial(_command, first))(argv[1:]) or 0
    if first in ("-h", "--help"):
        _print_usage()
    elif first == "--version":
        print(f"trainer {trainer.__version__}")
    else:
        from trainer.settings import did_you_mean

        kind = "flag" if first.startswith("-") else "command"
        suggestion = did_you_mean(first.lstrip("-"), COMMANDS)
        raise RecipeError(f"unknown {kind} {first}{suggestion} (commands: {', '.join(COMMANDS)})")
    return 0


def _print_usage() -> None:
    from trainer.commands.recipes import packaged_recipes

    rows = [(f"{name} {command.words}", command.help) for name, command in COMMANDS.items()]
    table = [f"  {line:<26}{text}" if len(line) < 26 else f"  {line}\n{'':28}{text}" for line, text in rows]
    names = ", ".join(packaged_recipes())
    print(USAGE.format(summary=trainer.__doc__, commands="\n".join(table), recipes=names), end="")


def _run(argv: list[str]) -> int:
    from trainer.supervise.command import run_command

    return run_command(argv)


def _checkpoint(argv: list[str]) -> None:
    from trainer.commands.checkpoint import checkpoint_command

    checkpoint_command(argv)


def _main(recipe: Recipe) -> None:
    from trainer.commands.flags import scan
    from trainer.commands.recipes import source_of

    require_numbers()
    _leave_before_training()
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise RecipeError("main(recipe) is for recipe files that are run as scripts: call fit(recipe) instead")
    positionals, flags = scan(sys.argv[1:])
    if positionals:
        raise RecipeError(f"unexpected {positionals[0]!r}: python {sys.argv[0]} takes flags only")
    source = source_of(script)
    if resolved := _resolve(recipe, source, flags, usage=f"python {sys.argv[0]} [flags]"):
        from trainer.fit import fit

        fit(resolved, source=source)


def _command(name: str, argv: list[str]) -> None:
    if name == "fit":
        _leave_before_training()
    from trainer.commands.flags import scan
    from trainer.commands.recipes import TRUST, load_recipe

    lists, switches = _own_flags(name)
    positionals, flags = scan(argv, several=PREDICT_FLAGS if name == "predict" else (), switches=switches)
    if not positionals and ("help", None) in flags:
        _print_usage()
        return
    reference = _one_positional(name, positionals)
    run_dir = Path(reference)
    named = str(_recipe_of(run_dir)) if _takes(name) == "RUN_DIR" else reference
    recipe, source = load_recipe(named, trusted=(TRUST, None) in flags)
    resolved = _resolve(recipe, source, flags, f"trainer {name} {reference} [flags]", lists, switches)
    if resolved is None:
        return
    if name == "fit":
        from trainer.fit import fit

        fit(resolved, source=source)
    elif name == "doctor":
        from trainer.doctor.command import doctor_command

        doctor_command(resolved, reference, flags)
    elif name == "plan":
        from trainer.commands.plan import plan_command

        plan_command(resolved, reference, flags)
    elif name == "ladder":
        from trainer.commands.ladder import ladder

        ladder(resolved, reference, flags)
    elif name == "evaluate":
        from trainer.fit import evaluate

        evaluate(resolved, run_dir)
    else:
        _predict(resolved, run_dir, flags)


def _chaos(argv: list[str]) -> None:
    from trainer.commands.flags import scan

    positionals, flags = scan(argv)
    if positionals:
        raise RecipeError(f"unexpected {positionals[0]!r}: chaos takes flags only, and has a recipe of its own")
    from trainer.chaos.command import FLAGS, chaos

    if ("help", None) in flags:
        print("usage: trainer chaos [flags]\n")
        print("\n".join(f"  --{name:9} {text}" for name, text in FLAGS.items()))
        return
    chaos(flags)


def _own_flags(name: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The flags of a command besides those of the recipe, with their help: with a value, and without."""
    if name == "ladder":
        from trainer.commands.ladder import FLAGS

        return FLAGS, {}
    if name == "plan":
        from trainer.commands import plan as plan_command

        return plan_command.FLAGS, plan_command.SWITCHES
    if name == "doctor":
        from trainer.doctor.command import SWITCHES

        return {}, SWITCHES
    return PREDICT_FLAGS if name == "predict" else {}, {}


def _predict(recipe: Recipe, run_dir: Path, flags: Flags) -> None:
    texts, images = ([text for name, text in flags if name == wanted and text is not None] for wanted in PREDICT_FLAGS)
    for text in texts:
        if not text:
            raise RecipeError("--text is empty: give the text to classify")
        if text.encode(errors="replace").decode() != text:
            raise RecipeError(f"--text {text[:40]!a} is not UTF-8 text")
    if bool(texts) == bool(images):
        raise RecipeError("predict needs either --text TEXT or --image PATH" + (", not both" if texts else ""))
    for image in images:
        if not os.path.isfile(image):  # also for a name that no file can have
            raise RecipeError(f"image {image!r}: no such file")
    from trainer.fit import predict

    predict(recipe, run_dir, texts=texts, images=images)


def _resolve(
    recipe: Recipe,
    source: str,
    flags: Flags,
    usage: str,
    lists: Mapping[str, str] | None = None,
    switches: Mapping[str, str] | None = None,
) -> Recipe | None:
    """``recipe`` with the YAML files and flags applied, or ``None`` when printing was all that was asked for."""
    from trainer.commands.flags import RecipeParser
    from trainer.commands.recipes import config_changes
    from trainer.settings import change, dump_recipe, settings_of

    parser = RecipeParser(recipe, usage, lists, switches)
    if ("help", None) in flags:
        parser.parser.print_help()
        return None
    in_yaml = config_changes(parser, source, [text for name, text in flags if name == "config" and text])
    resolved = change(recipe, in_yaml, parser.read_flags(flags, in_yaml))
    refuse_redacted({key: setting.value for key, setting in settings_of(resolved).items()})
    if ("print_config", None) in flags:
        print(dump_recipe(resolved, source), end="")
        return None
    return resolved


def _takes(command: str) -> str:
    return COMMANDS[command].words.partition(" ")[0]


def _one_positional(command: str, positionals: list[str]) -> str:
    what = _takes(command)
    if not positionals:
        from trainer.commands.recipes import packaged_recipes

        known = f" (packaged recipes: {', '.join(packaged_recipes())})" if what == "RECIPE" else ""
        raise RecipeError(f"{command} needs a {what}{known}: see trainer --help")
    if len(positionals) > 1:
        raise RecipeError(f"unexpected {positionals[1]!r}: {command} takes one {what}, then flags")
    return positionals[0]


def _recipe_of(run_dir: Path) -> Path:
    """The recipe of a run directory, which must hold a trained model too."""
    if not run_dir.is_dir():
        raise RecipeError(f"run directory {str(run_dir)!r}: no such directory")
    if not (run_dir / "recipe.yaml").is_file():
        raise RecipeError(f"run directory {str(run_dir)!r} has no recipe.yaml: it was not written by trainer fit")
    if not (run_dir / "model").is_dir():
        raise RecipeError(f"run directory {str(run_dir)!r} has no model/: the run did not finish")
    return run_dir / "recipe.yaml"
