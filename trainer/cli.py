"""The command line: ``trainer fit | evaluate | predict``, and ``main`` for recipes that are run by themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainer
from trainer.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from trainer.flags import Arguments

# What follows the top-level help is imported where it is used, so that `trainer --help` answers at once.

USAGE = """\
usage: trainer COMMAND ...

{summary}

commands:
  fit RECIPE [flags]        train, evaluate and write a run directory
  evaluate RUN_DIR [flags]  evaluate the trained model of a run directory
  predict RUN_DIR --text TEXT [TEXT ...] | --image PATH [PATH ...]
                            classify texts or images with the trained model of a run directory

RECIPE is a packaged name, a .py file that defines `recipe`, or the recipe.yaml of a run.
packaged recipes: {recipes}

options:
  -h, --help                show this page; `trainer fit RECIPE --help` lists every flag
  --version                 show the version
"""

COMMAND_USAGE = {
    "fit": "RECIPE [flags]",
    "evaluate": "RUN_DIR [flags]",
    "predict": "RUN_DIR --text TEXT [TEXT ...] | --image PATH [PATH ...] [flags]",
}


def entry() -> None:
    """The ``trainer`` command."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run a command line, without the program's name, and return its exit code.

    A setting that cannot work is one line on stderr and exit code 2; any other exception is passed on.
    """
    return _guarded(lambda: _dispatch(list(argv)))


def main(recipe: Recipe) -> None:
    """Train ``recipe``, with the flags of ``trainer fit``: for ``python my_recipe.py --epochs 3``."""
    if code := _guarded(lambda: _main(recipe)):
        sys.exit(code)


def _guarded(command: Callable[[], None]) -> int:
    try:
        command()
    except RecipeError as error:
        message = " ".join(line.strip() for line in str(error).splitlines())
        print(f"{_rank_prefix()}trainer: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _rank_prefix() -> str:
    """Which process speaks, when it is not the first: an error on one rank only must not be lost."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    return "" if rank == "0" else f"[rank {rank}] "


def _dispatch(argv: list[str]) -> None:
    commands = {"fit": _fit, "evaluate": _evaluate, "predict": _predict}
    first = argv[0] if argv else "--help"
    if first in commands:
        commands[first](argv[1:])
    elif first in ("-h", "--help"):
        from trainer.locate import packaged_recipes

        print(USAGE.format(summary=trainer.__doc__, recipes=", ".join(packaged_recipes())), end="")
    elif first == "--version":
        print(f"trainer {trainer.__version__}")
    else:
        from trainer.values import did_you_mean, nearest

        kind = "flag" if first.startswith("-") else "command"
        suggestion = nearest(first.lstrip("-"), commands)
        raise RecipeError(f"unknown {kind} {first}{did_you_mean(suggestion)} (commands: {', '.join(commands)})")


def _main(recipe: Recipe) -> None:
    from trainer.flags import scan
    from trainer.locate import source_of

    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise RecipeError("main(recipe) is for recipe files that are run as scripts: call fit(recipe) instead")
    arguments = scan(sys.argv[1:])
    if arguments.positionals:
        raise RecipeError(f"unexpected {arguments.positionals[0]!r}: python {sys.argv[0]} takes flags only")
    _train(recipe, source_of(script), arguments, usage=f"python {sys.argv[0]} [flags]")


def _fit(argv: list[str]) -> None:
    from trainer.flags import scan
    from trainer.locate import load_recipe

    arguments = scan(argv)
    if _only_help("fit", arguments):
        return
    reference = _one_positional("fit", arguments)
    recipe, source = load_recipe(reference)
    _train(recipe, source, arguments, usage=f"trainer fit {reference} [flags]")


def _evaluate(argv: list[str]) -> None:
    from trainer.flags import scan

    arguments = scan(argv)
    if _only_help("evaluate", arguments):
        return
    run_dir = _run_dir("evaluate", arguments)
    recipe = _recipe_of(run_dir, arguments, usage=f"trainer evaluate {run_dir} [flags]")
    if recipe is not None:
        from trainer.fit import evaluate

        evaluate(recipe, run_dir)


def _predict(argv: list[str]) -> None:
    from trainer.flags import scan

    arguments = scan(argv, several=("text", "image"))
    if _only_help("predict", arguments):
        return
    run_dir = _run_dir("predict", arguments)
    texts, images = arguments.lists.get("text", []), arguments.lists.get("image", [])
    recipe = _recipe_of(run_dir, arguments, usage=f"trainer predict {COMMAND_USAGE['predict']}")
    if recipe is None:
        return
    if bool(texts) == bool(images):
        raise RecipeError("predict needs either --text TEXT or --image PATH" + (", not both" if texts else ""))
    for image in images:
        if not Path(image).is_file():
            raise RecipeError(f"image {image!r}: no such file")
    from trainer.fit import predict

    predict(recipe, run_dir, texts=texts, images=images)


def _train(recipe: Recipe, source: str, arguments: Arguments, usage: str) -> None:
    resolved = _resolve(recipe, source, arguments, usage)
    if resolved is not None:
        from trainer.fit import fit

        fit(resolved, source=source)


def _recipe_of(run_dir: Path, arguments: Arguments, usage: str) -> Recipe | None:
    from trainer.locate import load_recipe

    recipe, source = load_recipe(str(run_dir / "recipe.yaml"))
    return _resolve(recipe, source, arguments, usage)


def _resolve(recipe: Recipe, source: str, arguments: Arguments, usage: str) -> Recipe | None:
    """``recipe`` with the YAML files and flags applied, or ``None`` when printing was all that was asked for."""
    from trainer.settings import change, dump_recipe, read_flags

    if "help" in arguments.switches:
        from trainer.flags import format_flags

        print(format_flags(recipe, usage), end="")
        return None
    changes = read_flags(recipe, arguments.flags, _read_configs(recipe, source, arguments.configs))
    resolved = change(recipe, changes)
    if "print_config" in arguments.switches:
        print(dump_recipe(resolved, source), end="")
        return None
    return resolved


def _read_configs(recipe: Recipe, source: str, paths: Sequence[str]) -> dict[str, Any]:
    """The changes that the ``--config`` files ask for, later files over earlier ones."""
    from trainer.locate import yaml_changes, yaml_source
    from trainer.settings import load_yaml_file

    changes: dict[str, Any] = {}
    for path in map(Path, paths):
        tree = load_yaml_file(path)
        if yaml_source(path, tree) not in (None, source):
            raise RecipeError(f"{path}: recipe={tree['recipe']!r} is not the recipe asked for, {source!r}")
        changes |= yaml_changes(recipe, path, tree)
    return changes


def _only_help(command: str, arguments: Arguments) -> bool:
    """Print a command's own help when it is asked for without saying for which recipe or run."""
    if "help" not in arguments.switches or arguments.positionals:
        return False
    from trainer.locate import packaged_recipes

    what = COMMAND_USAGE[command].split()[0]
    print(f"usage: trainer {command} {COMMAND_USAGE[command]}\n")
    print(f"`trainer {command} {what} --help` lists every flag, with its value in that recipe.")
    print(f"packaged recipes: {', '.join(packaged_recipes())}")
    return True


def _one_positional(command: str, arguments: Arguments) -> str:
    what = COMMAND_USAGE[command].split()[0]
    if not arguments.positionals:
        from trainer.locate import packaged_recipes

        known = f" (packaged recipes: {', '.join(packaged_recipes())})" if command == "fit" else ""
        raise RecipeError(f"{command} needs a {what}: trainer {command} {COMMAND_USAGE[command]}{known}")
    if len(arguments.positionals) > 1:
        raise RecipeError(f"unexpected {arguments.positionals[1]!r}: {command} takes one {what}, then flags")
    return arguments.positionals[0]


def _run_dir(command: str, arguments: Arguments) -> Path:
    """The run directory, which must hold a recipe and a trained model."""
    run_dir = Path(_one_positional(command, arguments))
    if not run_dir.is_dir():
        raise RecipeError(f"run directory {str(run_dir)!r}: no such directory")
    if not (run_dir / "recipe.yaml").is_file():
        raise RecipeError(f"run directory {str(run_dir)!r} has no recipe.yaml: it was not written by trainer fit")
    if not (run_dir / "model").is_dir():
        raise RecipeError(f"run directory {str(run_dir)!r} has no model/: the run did not finish")
    return run_dir
