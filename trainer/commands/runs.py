"""``trainer fit``, ``evaluate``, ``predict`` and ``export``, and recipes that are run as scripts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands import CommandFlags
from trainer.commands.recipes import load_recipe, parse_command, parse_count, resolve, source_of
from trainer.errors import RecipeError, require
from trainer.faults.signals import requeue_before_training
from trainer.models.hub import HubModel
from trainer.recipe import Recipe
from trainer.system.text import escaped

if TYPE_CHECKING:
    from trainer.api import FinishedRun
    from trainer.commands.flags import Flags

# Modules that import torch are imported inside the functions, so that --help is fast.

EVALUATE_FLAGS = CommandFlags(
    {"file": "a file with labels to evaluate instead of the test set; --file may be omitted"},
    positional="file",
    description="Evaluate the trained model of a run directory on its test set, or its validation set.",
)
PREDICT_FLAGS = CommandFlags(
    {
        "path": "files, folders, patterns and tables (.csv, .tsv, .jsonl, .parquet) to classify, or - for standard "
        "input; --path may be omitted",
        "text": "texts to classify, or to continue with a language model",
        "image": "image files to classify",
        "output": "write the predictions to a .csv, .tsv, .jsonl or .parquet file instead of printing them; the "
        "columns of a table are kept",
        "top-k": "number of most probable classes to report (default: 1)",
        "max-new-tokens": "maximum number of tokens that a language model generates (default: 128)",
        "temperature": "sample tokens from scores divided by this, with --seed (default: 0, the most probable)",
        "top-p": "sample from the most probable tokens that together have this probability (default: all)",
        "column": "column of a table with texts or paths of images (default: data.text_column)",
        "batch-size": "inputs per forward pass (default: 32)",
        "device": "auto, cpu, cuda or cuda:1 (default: auto, a GPU if available)",
        "precision": "precision of the computation, as memory.precision (default: 32-true)",
    },
    {
        "probabilities": "report the probability of every class",
        "lines": "every line of standard input and of text files is one text",
    },
    multi_valued=("path", "text", "image"),
    positional="path",
    description="Classify files, folders, tables, texts, images or standard input with a run's model.",
)
FORMATS = ("onnx", "hf", "peft", "hub")
EXPORT_FLAGS = CommandFlags(
    {
        "to": "onnx (a file), hf (a folder that transformers loads), peft (adapters alone) or hub (a repository on the "
        "Hugging Face hub)",
        "output": "the file or folder (default: model.onnx, hf or peft in the run directory)",
        "repo": "for --to hub: NAME/MODEL",
    },
    {"public": "make a new repository public (default: private)"},
    description="Export the trained model of a run, and check that the export has the same outputs.",
)


def fit(argv: list[str]) -> None:
    """Train, evaluate and write a run directory."""
    requeue_before_training()
    if asked := parse_command("fit", "RECIPE", argv):
        _check_and_fit(asked.recipe, asked.source)


def _check_and_fit(recipe: Recipe, source: str | None) -> None:
    """Check the files of data and model, before torch is imported, and train."""
    recipe.data.use_model(recipe.model)
    recipe.data.require_files()
    if isinstance(recipe.model, HubModel):
        recipe.model.require_files()
    from trainer.api import fit

    fit(recipe, source=source)


def fit_script(recipe: Recipe) -> None:
    """Run ``python my_recipe.py`` with the flags of ``trainer fit``."""
    requeue_before_training()
    from trainer.commands.flags import split_argv

    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise RecipeError("main(recipe) is for recipe files run as scripts: in a notebook, use fitted = fit(recipe)")
    positionals, flags = split_argv(sys.argv[1:])
    for word in positionals:
        raise RecipeError(f"unexpected {word!r}: python {sys.argv[0]} takes flags only")
    source = source_of(script)
    if resolved := resolve(recipe, source, flags, usage=f"python {sys.argv[0]} [flags]"):
        _check_and_fit(resolved, source)


def evaluate(argv: list[str]) -> None:
    """Evaluate the trained model of a run directory."""
    if asked := parse_command("evaluate", "RUN_DIR", argv, EVALUATE_FLAGS, named=_load_run_recipe):
        files = [text for name, text in asked.flags if name == "file"]
        require(len(files) <= 1, f"evaluate takes one file, not {len(files)}")
        file = files[0] if files else None
        data = asked.recipe.data.for_evaluation(path=file)
        data.use_model(asked.recipe.model)
        data.require_files()
        from trainer.api import evaluate

        evaluate(asked.recipe, Path(asked.reference), file)


def predict(argv: list[str]) -> None:
    """Classify texts, images, folders or tables with the trained model of a run directory."""
    if asked := parse_command("predict", "RUN_DIR", argv, PREDICT_FLAGS, named=_load_run_recipe):
        texts, images, paths = inputs(asked.flags)
        options = {*PREDICT_FLAGS.valued, *PREDICT_FLAGS.switches} - {*PREDICT_FLAGS.multi_valued}
        chosen = [(name.replace("-", "_"), text) for name, text in asked.flags if name in options]
        given: dict[str, Any] = {name: True if text is None else text for name, text in chosen}
        counts = ("top_k", "batch_size", "max_new_tokens")
        given |= {key: parse_count(key.replace("_", "-"), given[key]) for key in counts if key in given}
        given |= {key: _number(key, given[key]) for key in ("temperature", "top_p") if key in given}
        from trainer import predict

        predict(asked.recipe, Path(asked.reference), texts, images, paths, collect=False, **given)


def _number(key: str, text: str) -> float:
    """Parse a number; PredictOptions checks its range."""
    try:
        return float(text)
    except ValueError:
        raise RecipeError(f"--{key.replace('_', '-')}={text[:40]!r} must be a number") from None


def export(argv: list[str]) -> None:
    """Export the trained model of a run directory to ONNX, transformers, peft or the hub."""
    if asked := parse_command("export", "RUN_DIR", argv, EXPORT_FLAGS, named=_load_run_recipe):
        given = {name: text for name, text in asked.flags if name in EXPORT_FLAGS.valued and text}
        to = given.get("to", "")
        require(bool(to), f"export needs --to {'|'.join(FORMATS)}")
        gguf = "no maintained package converts to GGUF: export --to hf, and convert the folder with llama.cpp's script"
        require(to != "gguf", f"--to=gguf: {gguf}")
        require(to in FORMATS, f"--to={to!r} must be one of {', '.join(FORMATS)}")
        for name, of in (("output", ("onnx", "hf", "peft")), ("repo", ("hub",))):
            require(name not in given or to in of, f"--{name} is for --to {' and '.join(of)}, not for {to}")
        from trainer.after.export import export

        public = ("public", None) in asked.flags
        print(escaped(export(asked.recipe, Path(asked.reference), to, given.get("output"), given.get("repo"), public)))


def inputs(flags: Flags) -> tuple[list[str], list[str], list[str]]:
    """Return the texts, the images and the paths to classify; exactly one of them must be given."""
    found = [[text for name, text in flags if name == kind and text is not None] for kind in ("text", "image", "path")]
    texts, images, paths = found
    for text in texts:
        require(text.strip() != "", "--text is empty: give a text")
        require(text != "-", "--text - is not a text: to read standard input, give - after RUN_DIR, without --text")
        require(text.encode(errors="replace").decode() == text, f"--text {text[:40]!a} is not UTF-8 text")
    ways = "either --text TEXT or --image PATH, or files and folders after RUN_DIR"
    count = sum(map(bool, found))
    require(count == 1, f"predict needs {ways}{', not both' if count > 1 else ''}")
    for image in images:  # unlike Path.is_dir, os.path accepts invalid names
        why = "is a folder: give it after RUN_DIR, without --image" if os.path.isdir(image) else "no such file"
        require(os.path.isfile(image), f"image {image!r}: {why}")
    return texts, images, paths


def load(run_dir: str | Path, recipe: Recipe | None = None, *, trusted: bool = False) -> FinishedRun:
    """Load a finished run: its model and metrics, with methods to predict and evaluate.

    Args:
        run_dir: the run directory written by ``fit`` or ``trainer fit``.
        recipe: the trained recipe, needed if it has custom classes; by default the one in ``recipe.yaml``.
        trusted: import Python code that ``recipe.yaml`` names, like ``--trust-recipe``.

    Raises:
        RecipeError: if there is no finished run, or its recipe does not load.
    """
    found = _load_run_recipe(str(run_dir))
    recipe = recipe or load_recipe(found, trusted=trusted)[0]
    from trainer.api import FinishedRun

    return FinishedRun(recipe, run_dir)


def _load_run_recipe(reference: str) -> str:
    run_dir = Path(reference)
    recipe, named = run_dir / "recipe.yaml", f"run directory {str(run_dir)!r}"
    require(run_dir.is_dir(), f"{named}: no such directory")
    require(recipe.is_file(), f"{named} has no recipe.yaml: it was not written by trainer fit")
    require((run_dir / "model").is_dir(), f"{named} has no model/: the run did not finish")
    return str(recipe)
