"""The command line: ``trainer fit | evaluate | predict``, and ``main`` for recipes that are run by themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import trainer
from trainer.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from trainer.flags import Words

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
  -h, --help                show this page; `trainer fit RECIPE --help` lists every flag, with its value in that recipe
  --version                 show the version
"""

COMMAND_USAGE = {
    "fit": "RECIPE [flags]",
    "evaluate": "RUN_DIR [flags]",
    "predict": "RUN_DIR --text TEXT [TEXT ...] | --image PATH [PATH ...] [flags]",
}

PREDICT_FLAGS = {"text": "texts to classify", "image": "image files to classify"}


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
        _print_usage()
    elif first == "--version":
        print(f"trainer {trainer.__version__}")
    else:
        from trainer.settings import did_you_mean

        kind = "flag" if first.startswith("-") else "command"
        suggestion = did_you_mean(first.lstrip("-"), commands)
        raise RecipeError(f"unknown {kind} {first}{suggestion} (commands: {', '.join(commands)})")


def _print_usage() -> None:
    from trainer.locate import packaged_recipes

    print(USAGE.format(summary=trainer.__doc__, recipes=", ".join(packaged_recipes())), end="")


def _main(recipe: Recipe) -> None:
    from trainer.flags import scan
    from trainer.locate import source_of

    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise RecipeError("main(recipe) is for recipe files that are run as scripts: call fit(recipe) instead")
    words = scan(sys.argv[1:])
    if words.positionals:
        raise RecipeError(f"unexpected {words.positionals[0]!r}: python {sys.argv[0]} takes flags only")
    _train(recipe, source_of(script), words, usage=f"python {sys.argv[0]} [flags]")


def _fit(argv: list[str]) -> None:
    from trainer.flags import scan
    from trainer.locate import load_recipe

    words = scan(argv)
    if not words.positionals and words.asks_for_help:
        return _print_usage()
    reference = _one_positional("fit", words)
    return _train(*load_recipe(reference), words, usage=f"trainer fit {reference} [flags]")


def _train(recipe: Recipe, source: str, words: Words, usage: str) -> None:
    resolved = _resolve(recipe, source, words, usage)
    if resolved is not None:
        from trainer.fit import fit

        fit(resolved, source=source)


def _evaluate(argv: list[str]) -> None:
    from trainer.flags import scan

    words = scan(argv)
    if not words.positionals and words.asks_for_help:
        return _print_usage()
    run_dir = _run_dir("evaluate", words)
    recipe = _recipe_of(run_dir, words, usage=f"trainer evaluate {run_dir} [flags]")
    if recipe is not None:
        from trainer.fit import evaluate

        evaluate(recipe, run_dir)
    return None


def _predict(argv: list[str]) -> None:
    from trainer.flags import scan

    words = scan(argv, several=tuple(PREDICT_FLAGS))
    if not words.positionals and words.asks_for_help:
        return _print_usage()
    run_dir = _run_dir("predict", words)
    recipe = _recipe_of(run_dir, words, usage=f"trainer predict {COMMAND_USAGE['predict']}", lists=PREDICT_FLAGS)
    if recipe is None:
        return None
    texts, images = words.values("text"), words.values("image")
    if bool(texts) == bool(images):
        raise RecipeError("predict needs either --text TEXT or --image PATH" + (", not both" if texts else ""))
    for image in images:
        if not Path(image).is_file():
            raise RecipeError(f"image {image!r}: no such file")
    from trainer.fit import predict

    predict(recipe, run_dir, texts=texts, images=images)
    return None


def _recipe_of(run_dir: Path, words: Words, usage: str, lists: Mapping[str, str] | None = None) -> Recipe | None:
    from trainer.locate import load_recipe

    return _resolve(*load_recipe(str(run_dir / "recipe.yaml")), words, usage, lists)


def _resolve(
    recipe: Recipe, source: str, words: Words, usage: str, lists: Mapping[str, str] | None = None
) -> Recipe | None:
    """``recipe`` with the YAML files and flags applied, or ``None`` when printing was all that was asked for."""
    from trainer.flags import RecipeParser
    from trainer.locate import config_changes
    from trainer.settings import change, dump_recipe

    parser = RecipeParser(recipe, usage, lists)
    if words.asks_for_help:
        parser.parser.print_help()
        return None
    from_yaml = config_changes(parser, source, words.values("config"))
    resolved = change(recipe, from_yaml, parser.read_flags(words, from_yaml))
    if "--print_config" in words.switches:
        print(dump_recipe(resolved, source), end="")
        return None
    return resolved


def _one_positional(command: str, words: Words) -> str:
    what = COMMAND_USAGE[command].split()[0]
    if not words.positionals:
        from trainer.locate import packaged_recipes

        known = f" (packaged recipes: {', '.join(packaged_recipes())})" if command == "fit" else ""
        raise RecipeError(f"{command} needs a {what}: trainer {command} {COMMAND_USAGE[command]}{known}")
    if len(words.positionals) > 1:
        raise RecipeError(f"unexpected {words.positionals[1]!r}: {command} takes one {what}, then flags")
    return words.positionals[0]


def _run_dir(command: str, words: Words) -> Path:
    """The run directory, which must hold a recipe and a trained model."""
    run_dir = Path(_one_positional(command, words))
    if not run_dir.is_dir():
        raise RecipeError(f"run directory {str(run_dir)!r}: no such directory")
    if not (run_dir / "recipe.yaml").is_file():
        raise RecipeError(f"run directory {str(run_dir)!r} has no recipe.yaml: it was not written by trainer fit")
    if not (run_dir / "model").is_dir():
        raise RecipeError(f"run directory {str(run_dir)!r} has no model/: the run did not finish")
    return run_dir
