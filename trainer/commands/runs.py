"""``trainer fit``, ``trainer evaluate`` and ``trainer predict``, and recipes that are run as scripts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands import OwnFlags
from trainer.commands.recipes import asked_for, count, load_recipe, resolve, source_of
from trainer.errors import RecipeError, require
from trainer.recipe import Recipe
from trainer.system.text import escaped

if TYPE_CHECKING:
    from trainer.api import FinishedRun
    from trainer.commands.flags import Flags

# What trains imports torch: it is imported where it is used, so that --help answers at once.

EVALUATE_FLAGS = OwnFlags(about="Evaluate the trained model of a run directory on its test set, or its validation set.")
PREDICT_FLAGS = OwnFlags(
    {
        "path": "files, folders, patterns and tables (.csv, .jsonl, .parquet) to classify; needs no --path",
        "text": "texts to classify, or to go on from by a language model",
        "image": "image files to classify",
        "output": "write the predictions to a .csv, .jsonl or .parquet file, instead of printing them",
        "top-k": "tell so many of the most probable classes (default: 1)",
        "max-new-tokens": "of a language model: tokens that it writes after a text, at most (default: 128)",
        "temperature": "draw tokens, by --seed, from scores that are divided by this (default: 0, the likeliest)",
        "top-p": "draw of the likeliest tokens that together have this probability (default: of all)",
        "column": "of a table: the texts, or the paths of the images (default: data.text_column)",
        "batch-size": "inputs that go through the model at once (default: 32)",
        "device": "auto, cpu, cuda or cuda:1 (default: auto, a GPU where there is one)",
        "precision": "what is computed in, as memory.precision (default: 32-true)",
    },
    {"probabilities": "tell the probability of every class"},
    several=("path", "text", "image"),
    words="path",
    about="Classify files, folders, tables, texts or images with the trained model of a run directory, or write on.",
)
FORMATS = ("onnx", "hf", "peft", "hub")
EXPORT_FLAGS = OwnFlags(
    {
        "to": "onnx (a file), hf (a folder that transformers loads), peft (adapters alone) or hub (a repository on the "
        "Hugging Face hub)",
        "output": "the file or folder (default: model.onnx, hf or peft in the run directory)",
        "repo": "of --to hub: NAME/MODEL",
    },
    {"public": "make the repository a public one; it is private by default"},
    about="Write the trained model of a run for others, and check that what was written gives its outputs.",
)


def fit(argv: list[str]) -> None:
    """Train, evaluate and write a run directory."""
    from trainer.faults.signals import leave_before_training

    leave_before_training()
    if asked := asked_for("fit", "RECIPE", argv):
        asked.recipe.data.require_files()
        from trainer.api import fit

        fit(asked.recipe, source=asked.source)


def fit_script(recipe: Recipe) -> None:
    """``python my_recipe.py``, with the flags of ``trainer fit``."""
    from trainer.faults.signals import leave_before_training

    leave_before_training()
    from trainer.commands.flags import scan

    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise RecipeError(
            "main(recipe) is for recipe files that are run as scripts: in a notebook, say fitted = fit(recipe)"
        )
    positionals, flags = scan(sys.argv[1:])
    if positionals:
        raise RecipeError(f"unexpected {positionals[0]!r}: python {sys.argv[0]} takes flags only")
    source = source_of(script)
    if resolved := resolve(recipe, source, flags, usage=f"python {sys.argv[0]} [flags]"):
        resolved.data.require_files()
        from trainer.api import fit

        fit(resolved, source=source)


def evaluate(argv: list[str]) -> None:
    """Evaluate the trained model of a run directory."""
    if asked := asked_for("evaluate", "RUN_DIR", argv, EVALUATE_FLAGS, named=_recipe_of):
        asked.recipe.data.require_files()
        from trainer.api import evaluate

        evaluate(asked.recipe, Path(asked.reference))


def predict(argv: list[str]) -> None:
    """Classify texts, images, folders or tables with the trained model of a run directory."""
    if asked := asked_for("predict", "RUN_DIR", argv, PREDICT_FLAGS, named=_recipe_of):
        texts, images, paths = inputs(asked.flags)
        options = {*PREDICT_FLAGS.valued, *PREDICT_FLAGS.switches} - {*PREDICT_FLAGS.several}
        chosen = [(name.replace("-", "_"), text) for name, text in asked.flags if name in options]
        given: dict[str, Any] = {name: True if text is None else text for name, text in chosen}
        counts = ("top_k", "batch_size", "max_new_tokens")
        given |= {key: count(key.replace("_", "-"), given[key]) for key in counts if key in given}
        given |= {key: _number(key, given[key]) for key in ("temperature", "top_p") if key in given}
        from trainer import predict

        predict(asked.recipe, Path(asked.reference), texts, images, paths, **given)


def _number(key: str, text: str) -> float:
    """What a flag gives; PredictOptions says what is too large."""
    try:
        return float(text)
    except ValueError:
        raise RecipeError(f"--{key.replace('_', '-')}={text[:40]!r} must be a number") from None


def export(argv: list[str]) -> None:
    """Write the trained model of a run directory for others: ONNX, transformers or the hub."""
    if asked := asked_for("export", "RUN_DIR", argv, EXPORT_FLAGS, named=_recipe_of):
        given = {name: text for name, text in asked.flags if name in EXPORT_FLAGS.valued and text}
        to = given.get("to", "")
        require(
            to in FORMATS,
            f"--to={to!r} must be one of {', '.join(FORMATS)}" if to else f"export needs --to {'|'.join(FORMATS)}",
        )
        for name, of in (("output", ("onnx", "hf", "peft")), ("repo", ("hub",))):
            require(name not in given or to in of, f"--{name} is for --to {' and '.join(of)}, not for {to}")
        from trainer.after.export import export

        public = ("public", None) in asked.flags
        print(escaped(export(asked.recipe, Path(asked.reference), to, given.get("output"), given.get("repo"), public)))


def inputs(flags: Flags) -> tuple[list[str], list[str], list[str]]:
    """The texts, the images, or the paths of files and folders that are to be classified: one of the three."""
    texts, images, paths = found = [
        [text for name, text in flags if name == wanted and text is not None] for wanted in ("text", "image", "path")
    ]
    for text in texts:
        require(text.strip() != "", "--text is empty: give a text")
        require(text.encode(errors="replace").decode() == text, f"--text {text[:40]!a} is not UTF-8 text")
    several = ", not both" if sum(map(bool, found)) > 1 else ""
    ways = "either --text TEXT or --image PATH, or files and folders after RUN_DIR"
    require(sum(map(bool, found)) == 1, f"predict needs {ways}{several}")
    for image in images:  # os.path also takes a name that no file can have
        why = "is a folder: give it after RUN_DIR, without --image" if os.path.isdir(image) else "no such file"
        require(os.path.isfile(image), f"image {image!r}: {why}")
    return texts, images, paths


def load(run_dir: str | Path, recipe: Recipe | None = None, *, trusted: bool = False) -> FinishedRun:
    """A finished run, by its directory: its model, its figures, and what predicts and evaluates.

    Args:
        run_dir: what ``fit``, or ``trainer fit``, has written.
        recipe: what was trained, where that has classes of your own; by default as its ``recipe.yaml`` says.
        trusted: whether Python code that its ``recipe.yaml`` names is imported, as by ``--trust-recipe``.

    Raises:
        RecipeError: when there is no finished run, or its recipe does not load.
    """
    found = _recipe_of(str(run_dir))
    if recipe is None:
        recipe = load_recipe(found, trusted=trusted)[0]
    from trainer import api

    return api.FinishedRun(recipe, run_dir)


def _recipe_of(reference: str) -> str:
    run_dir = Path(reference)
    recipe, named = run_dir / "recipe.yaml", f"run directory {str(run_dir)!r}"
    require(run_dir.is_dir(), f"{named}: no such directory")
    require(recipe.is_file(), f"{named} has no recipe.yaml: it was not written by trainer fit")
    require((run_dir / "model").is_dir(), f"{named} has no model/: the run did not finish")
    return str(recipe)
