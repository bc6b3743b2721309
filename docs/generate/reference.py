"""Writes the pages of the reference from the code: settings, commands, files of a run, exit codes, Python names."""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import pkgutil
from argparse import Action
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from importlib import import_module
from itertools import product
from types import ModuleType
from typing import Any
from unittest.mock import patch

import trainer
import trainer.data
import trainer.fakegpu
import trainer.integrations
import trainer.models
import trainer.planner
from trainer import cli
from trainer.commands import RECIPE_FLAGS
from trainer.commands.classes import SWAPPABLE_SECTIONS, known_classes, with_classes
from trainer.commands.flags import RecipeParser
from trainer.errors import RecipeError, RunError, RunStoppedError
from trainer.recipe import VALUE_ALIASES, Recipe
from trainer.settings import CLASS

RUN_FILES = {
    "recipe.yaml": "trainer.run.directory.write_recipe",
    "status.json": "trainer.run.directory.write_status",
    "summary.json": "trainer.report.summary.Summary",
    "metrics.csv": "trainer.report.loggers.CSVMetrics",
    "report.html": "trainer.report.html_report.write_report",
    "classification_report.txt": "trainer.run.directory.report_text",
    "confusion.csv, confusion.png, errors.csv": "trainer.report.mistakes.write_mistakes",
    "curves.png": "trainer.report.plots.plot_curves",
    "memory.png": "trainer.report.plots.plot_memory",
    "model/model.safetensors, model/config.json": "trainer.checkpoint.export.save_model",
    "model/files.json": "trainer.checkpoint.manifest.write_hashes",
    "model/README.md": "trainer.report.model_card.build_model_card",
    "model/adapter/": "trainer.models.lora.save_adapters",
    "checkpoints/step-N/manifest.json": "trainer.checkpoint.manifest.Manifest",
    "checkpoints/step-N/": "trainer.checkpoint.writer",
    "tensorboard/": "trainer.report.loggers.make_loggers",
    "quarantine.json": "trainer.run.listeners.report_bad_samples",
    "profile.txt, profile.json.gz": "trainer.run.profile.Profile",
    "memory_snapshot.pickle": "trainer.memory.monitor.record_memory_history",
    "supervisor.json": "trainer.supervise.attempt.Journal",
    ".run.lock, .supervisor.lock": "trainer.system.lock.RunLock",
}
"""The files of a run directory, and the function or class whose docstring describes them."""

WITH_FIELDS = ("trainer.report.summary.Summary", "trainer.checkpoint.manifest.Manifest")
"""The classes whose fields are the content of a file."""

ERRORS = (RecipeError, RunError, RunStoppedError, KeyboardInterrupt)
HELP_WIDTH = 100


def pages() -> dict[str, str]:
    """Return the Markdown of each page of the reference, by its path below ``reference/``."""
    sections = {name: f"{name}.md" for name in SWAPPABLE_SECTIONS}
    written = {
        "recipe.md": recipe_page(),
        "commands.md": commands_page(),
        "run-directory.md": run_directory_page(),
        "exit-codes.md": exit_codes_page(),
    }
    written |= {path: classes_page(name) for name, path in sections.items()}
    modules = (trainer, trainer.data, trainer.models, trainer.planner, trainer.fakegpu, trainer.integrations)
    documented: dict[str, str] = {}  # the page of each name: two modules may export it
    return written | {f"python/{module.__name__}.md": python_page(module, documented) for module in modules}


def recipe_with(section: str, name: str) -> Recipe:
    """Return a recipe with the built-in class ``name`` as ``section``, and another section that fits."""
    (other,) = SWAPPABLE_SECTIONS.keys() - {section}
    partners = known_classes(other).values()
    for partner, start in product(
        [*partners, partial(trainer.data.TextFiles, "FILE")], known_classes(section).values()
    ):
        with suppress(RecipeError, TypeError):  # a class that does not fit, or that has required settings
            recipe = Recipe(**{section: start(), other: partner()}, batch_size=1)
            return with_classes(recipe, {section: name}, trusted=False)[0]
    raise ValueError(f"no built-in class of {other} fits {name}")


def settings(recipe: Recipe, section: str, anchors: str = "") -> str:
    """Return an entry for each setting in ``section`` of ``recipe``, and below it, as ``--help`` lists them."""
    parser, found = RecipeParser(recipe), []
    for action in parser.parser._actions:
        key = str(action.dest)
        inside = key.startswith(f"{section}.") if section else "." not in key
        if key in parser.settings and inside:
            fields = {field.name: field for field in dataclasses.fields(parser.settings[key].owner)}
            found.append(entry(key, action, fields[key.rpartition(".")[2]], f"{anchors}{key}"))
    return "\n".join(found)


def entry(key: str, action: Action, field: dataclasses.Field[Any], anchor: str) -> str:
    """Return the heading, the type, the default and the description of one setting."""
    facts = [f"`{action.metavar}`", f"default {default(field)}"]
    if interval := field.metadata.get("interval"):
        facts.append(f"in the interval `{interval}`{field.metadata['note']}")
    if aliases := [f"`{alias}`" for name, alias in VALUE_ALIASES if name == key]:
        facts.append(f"also {', '.join(aliases)}")
    return f"### `{key}` {{ #{anchor} }}\n\n{' · '.join(facts)}\n\n{sentence(action.help or '')}\n"


def default(field: dataclasses.Field[Any]) -> str:
    """Return the default of a field as YAML has it, or *required*."""
    if field.default is field.default_factory is dataclasses.MISSING:
        return "*required*"
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    words = {"None": "null", "True": "true", "False": "false", "": "''"}
    return f"`{words.get(str(made), made)}`"


def sentence(text: str) -> str:
    """Return ``text`` as Markdown that shows it unchanged, with a capital letter and a full stop."""
    shown = text.strip().replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")
    return shown and f"{shown[0].upper()}{shown[1:].rstrip('.')}."


def recipe_page() -> str:
    """Return the page of the settings that every recipe has."""
    recipe = recipe_with("data", "Digits")
    intro = """# Recipe: every setting

Each setting is a flag of `trainer fit`, a YAML key and a field in Python: `--memory.precision bf16-mixed`,
`memory: {precision: bf16-mixed}` and `Memory(precision="bf16-mixed")` mean the same. The settings of [models](model.md)
and [data](data.md) depend on the class. `trainer fit RECIPE --help` prints the settings with the values of that recipe.
"""
    parts = [intro, "## The recipe\n", inspect.getdoc(Recipe).partition("\n")[0] + "\n", settings(recipe, "")]
    for field in dataclasses.fields(Recipe):
        if field.name not in SWAPPABLE_SECTIONS and dataclasses.is_dataclass(section := getattr(recipe, field.name)):
            about = inspect.getdoc(type(section)).partition("\n")[0]
            parts += [f"## {field.name}: {type(section).__name__}\n", f"{about}\n", settings(recipe, field.name)]
    return "\n".join(parts)


def classes_page(section: str) -> str:
    """Return the page of the settings of all built-in classes of ``model`` or ``data``."""
    parts = [
        f"# {section.capitalize()}: the settings of each class\n",
        f"`--{section} CLASS` chooses a class, `{section}: {{{CLASS}: NAME}}` in YAML. A custom class is named as "
        "`module.Class`: see [your own model](../your-own-model.md).\n",
    ]
    for name, kind in known_classes(section).items():
        recipe = recipe_with(section, name)
        about = inspect.getdoc(kind).partition("\nArgs:")[0].strip()
        parts += [f"## {name}\n", f"{about}\n", settings(recipe, section, f"{name}.")]
    return "\n".join(parts)


def help_text(*argv: str) -> str:
    """Return what ``trainer ARGV`` prints."""
    printed = io.StringIO()
    with patch.dict(os.environ, COLUMNS=str(HELP_WIDTH)), redirect_stdout(printed):
        code = cli.run(argv)
    if code:
        raise RuntimeError(f"trainer {' '.join(argv)} ended with exit code {code}")
    return f"```text\n{printed.getvalue().strip()}\n```\n"


def commands_page() -> str:
    """Return the page of all commands: what ``--help`` prints."""
    switches = {**RECIPE_FLAGS.switches, "help": "list every flag, with its value in that recipe"}
    rows = [f"| `--{name} {name.upper()}` | {text} |" for name, text in RECIPE_FLAGS.valued.items()]
    rows += [f"| `--{name}` | {text} |" for name, text in switches.items()]
    parts = ["# Commands\n", help_text("--help")]
    for name in cli.COMMANDS:
        parts.append(f"## trainer {name}\n")
        if name == "fit":
            parts.append("Every [setting of the recipe](recipe.md) is a flag. In addition:\n")
            parts.append("\n".join(["| flag | |", "|---|---|", *rows]) + "\n")
        else:
            parts.append(help_text(name, "--help"))
        if name == "plan":
            parts += ["### trainer plan --script\n", help_text(name, "--script", "FILE", "--help")]
    return "\n".join(parts)


def first_paragraph(path: str) -> str:
    """Return the first paragraph of the docstring of a function, a class or a module."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except AttributeError:
        found = import_module(path)
    return " ".join(inspect.getdoc(found).partition("\n\n")[0].split())


def run_directory_page() -> str:
    """Return the page of the files of a run directory."""
    rows = [
        f"| {'<br>'.join(f'`{file}`' for file in files.split(', '))} | {first_paragraph(path)}<br>`{path}` |"
        for files, path in RUN_FILES.items()
    ]
    parts = [
        "# Files of a run directory\n",
        "The descriptions are the docstrings of the code that writes the files. Files of optional features exist only "
        "if the feature is used.\n",
        "\n".join(["| file | description, and the code that writes it |", "|---|---|", *rows]) + "\n",
    ]
    for path in WITH_FIELDS:
        options = "{show_root_heading: false, show_root_toc_entry: false, members: true, show_if_no_docstring: true}"
        files = next(files for files, named in RUN_FILES.items() if named == path)
        parts.append(f"## The content of {files}\n\n::: {path}\n    options: {options}\n")
    return "\n".join(parts)


def exit_codes_page() -> str:
    """Return the page of the exit codes; each is that of an error as the command line handles it."""
    rows = ["| 0 | | the command has done what it was asked to |"]
    for kind in ERRORS:
        with redirect_stderr(io.StringIO()):
            code = cli._exit_code(kind("example"))
        rows.append(f"| {code} | `{kind.__name__}` | {first_paragraph(f'{kind.__module__}.{kind.__name__}')} |")
    about = inspect.getdoc(cli.run).partition("\n\n")[2]
    return "\n".join(["# Exit codes\n", about, "", "| code | error | |", "|---|---|---|", *rows, ""])


def python_page(module: ModuleType, documented: dict[str, str]) -> str:
    """Return the page of the public names of a module, or of its files if it exports none.

    A name in ``documented`` is linked to its page; the others are added to it.
    """
    parts = [f"# {module.__name__}\n", f"{sentence(inspect.getdoc(module).partition(chr(10))[0])}\n"]
    if hasattr(module, "__all__"):
        named = {name: getattr(module, name) for name in sorted(module.__all__, key=str.lower)}
        found = [(f"{module.__name__}.{name}", f"{one.__module__}.{one.__qualname__}") for name, one in named.items()]
    else:
        files = [f"{module.__name__}.{one.name}" for one in pkgutil.iter_modules(module.__path__)]
        found = [(name, name) for name in files if not name.rpartition(".")[2].startswith("_")]
    for name, path in found:
        if page := documented.get(path):
            parts.append(f"## {name}\n\nSee [{page}]({page}.md).\n")
            continue
        documented[path] = module.__name__
        about = f"heading: {name}, toc_label: {name.rpartition('.')[2]}"
        if module in (trainer.data, trainer.models):  # their settings are on the pages of the sections
            about += ", members: []"
        parts.append(f"::: {path}\n    options: {{{about}}}\n")
    return "\n".join(parts)
