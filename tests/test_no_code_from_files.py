"""Nothing in this project executes what is in a file: read from the source code itself, and tried with every command.

The commands are those of the table in trainer/cli.py, with the words that it says they take: a new one is in here.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from helpers.payloads import code

from trainer.cli import COMMANDS, run
from trainer.commands.measured_run import probe_machine, run_trial
from trainer.system.processes import own_code, own_command

ROOT = Path(__file__).parents[1]
FOLDERS = ("trainer", "recipes", "benchmarks")

ALLOWED = {
    ("trainer/settings.py", "eval"): "evaluates the annotations of dataclasses: code that is imported already",
    ("trainer/cli.py", "importlib.import_module"): "the module of a command, listed in that file",
    ("trainer/__init__.py", "importlib.import_module"): "one of the public names, listed in that file",
    ("trainer/errors.py", "importlib.import_module"): "a package that the calling code names",
    ("benchmarks/chaos/command.py", "importlib.import_module"): "what the ranks need, listed in that file",
    ("benchmarks/checkpoint.py", "torch.distributed.checkpoint.save"): "measured beside ours",
    ("benchmarks/kills.py", "importlib.import_module"): "what the ranks need, listed in benchmarks/chaos/command.py",
    ("benchmarks/hostile.py", "importlib.import_module"): "what the cases need, listed in that file",
    ("benchmarks/checkpoint.py", "torch.distributed.checkpoint.load"): "reads what this benchmark has just written",
    (
        "trainer/commands/recipes.py",
        "exec_module",
    ): "a recipe is a Python file, and running it is what the user asks for",
}
"""What may stay, and why. torchvision's reader of CIFAR-10 and torch's writer of memory snapshots are not our code."""

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy"}
ALWAYS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "shutil.unpack_archive"),
    *("yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all"),
    *("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "torch.utils.cpp_extension.load"),
    # The .metadata of torch.distributed.checkpoint is a pickle.
    *(f"torch.distributed.checkpoint.{name}" for name in ("load", "save", "load_state_dict", "async_save")),
    *(f"torch.distributed.checkpoint.FileSystem{name}" for name in ("Reader", "Writer")),
}
"""Functions for which no argument makes it safe, by full name."""

METHODS = {"exec_module", "load_module", "read_pickle", "to_pickle", "load_from_checkpoint"}
"""The same for methods, and for functions of whatever module."""


def faults(source: str) -> list[tuple[int, str]]:
    """The line and the name of everything in ``source`` that may execute what is in a file."""
    tree = ast.parse(source)
    names = _imported(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    unsafe = [(call.lineno, what) for call in calls if (what := _fault(call, names))]
    return sorted([*_forbidden_imports(tree), *_careless_pretrained(tree), *unsafe])


def _imported(tree: ast.AST) -> dict[str, str]:
    """What the names in a file stand for: ``{"np": "numpy", "load": "torch.load"}``."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _forbidden_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from ((node.lineno, f"import {module}") for module in modules if module.partition(".")[0] in MODULES)


def _fault(call: ast.Call, names: dict[str, str]) -> str | None:
    first, dot, rest = ast.unparse(call.func).partition(".")
    name = names.get(first, first) + dot + rest
    last = name.rpartition(".")[2]
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    positional = [ast.unparse(argument) for argument in call.args]
    unsafe = {
        "torch.load": options.get("weights_only") != "True",
        "torch.hub.load_state_dict_from_url": options.get("weights_only") != "True",
        "yaml.load": not any("SafeLoader" in word for word in [*positional[1:], *options.values()]),
        "importlib.import_module": bool(call.args) and not isinstance(call.args[0], ast.Constant),
    }
    if name in ALWAYS or last in METHODS or name.lower().endswith(("fabric.load", "fabric.load_raw")):
        return last if last in METHODS else name
    if unsafe.get(name) or (last == "extractall" and options.get("filter") != "'data'"):
        return name if name in unsafe else last
    for option, safe in {"allow_pickle": "False", "trust_remote_code": "False", "shell": "False"}.items():
        if options.get(option, safe) != safe:
            return option
    return None


def _careless_pretrained(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """``from_pretrained`` and ``from_config``, called or handed to another function, without what makes them safe."""
    safe: set[ast.AST] = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            safe |= {node for node in (call.func, *call.args) if _is_safe(node, options)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config") and node not in safe:
            yield node.lineno, node.attr


def _is_safe(node: ast.AST, options: dict[str | None, str]) -> bool:
    weights = "Config" not in ast.unparse(node) and "Tokenizer" not in ast.unparse(node)
    weights = weights and not ast.unparse(node).endswith("from_config")
    pickles = weights and options.get("use_safetensors") != "True"
    return options.get("trust_remote_code") == "False" and not pickles


def test_the_project_executes_nothing_that_it_reads():
    found = {}
    for path in sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        found |= {(name, what): line for line, what in faults(path.read_text(encoding="utf-8"))}
    assert {key: line for key, line in found.items() if key not in ALLOWED} == {}
    assert ALLOWED.keys() - found.keys() == set(), "allowed, and not there any more"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import pickle", "import pickle"),
        ("from joblib import load", "import joblib"),
        ("import dill as d", "import dill"),
        ("import torch\ntorch.load(f)", "torch.load"),
        ("from torch import load\nload(f, weights_only=False)", "torch.load"),
        ("from torch import load as read\nread(f)", "torch.load"),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", "allow_pickle"),
        ("import yaml\nyaml.load(f, Loader=yaml.Loader)", "yaml.load"),
        ("import yaml\nyaml.load(f)", "yaml.load"),
        ("import yaml\nyaml.unsafe_load(f)", "yaml.unsafe_load"),
        ("eval(open(f).read())", "eval"),
        ("exec(text)", "exec"),
        ("import pandas\npandas.read_pickle(f)", "read_pickle"),
        ("import torch\ntorch.jit.load(f)", "torch.jit.load"),
        ("import torch\ntorch.hub.load('a/b', 'c')", "torch.hub.load"),
        ("import torch.distributed.checkpoint as dcp\ndcp.load(state)", "torch.distributed.checkpoint.load"),
        (
            "from torch.distributed.checkpoint import FileSystemReader\nFileSystemReader(p)",
            "torch.distributed.checkpoint.FileSystemReader",
        ),
        ("tar.extractall(p)", "extractall"),
        ("zipfile.ZipFile(p).extractall(q)", "extractall"),
        ("self.fabric.load(p)", "self.fabric.load"),
        ("importlib.import_module(text)", "importlib.import_module"),
        ("subprocess.run(text, shell=True)", "shell"),
        ("spec.loader.exec_module(module)", "exec_module"),
        ("load_dataset(n, trust_remote_code=wished)", "trust_remote_code"),
        ("AutoModel.from_pretrained(n, trust_remote_code=False)", "from_pretrained"),
        ("AutoTokenizer.from_pretrained(n)", "from_pretrained"),
        ("read(AutoConfig.from_pretrained, n)", "from_pretrained"),
        ("AutoModel.from_config(c)", "from_config"),
    ],
)
def test_what_would_execute_is_found(code, what):
    assert [found for _, found in faults(code)] == [what]


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load(f, weights_only=True)",
        "import numpy as np\nnp.load(f)\nnp.load(f, allow_pickle=False)",
        "import yaml\nyaml.load(f, yaml.SafeLoader)\nyaml.safe_load(f)\nyaml.compose(f, yaml.SafeLoader)",
        "tar.extractall(p, filter='data')",
        "module.eval()\nre.compile(x)\njson.load(f)",
        "AutoModel.from_pretrained(n, trust_remote_code=False, use_safetensors=True)",
        "read(AutoTokenizer.from_pretrained, n, trust_remote_code=False)",
        "importlib.import_module('torch')",
        "subprocess.run(['ls'], shell=False)",
    ],
)
def test_what_is_safe_is_not_found(code):
    assert faults(code) == []


def test_only_two_functions_start_python():
    """``python -m`` and ``-c`` import from the working directory; see trainer/system/processes.py."""
    using = [path for path in (ROOT / "trainer").rglob("*.py") if "sys.executable" in path.read_text(encoding="utf-8")]
    assert {path.relative_to(ROOT).as_posix() for path in using} == {
        "trainer/system/processes.py",
        "trainer/commands/measured_run.py",
    }
    scripts = [path for path in (ROOT / "launch").iterdir() if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) == 4
    assert [path.name for path in scripts if re.search(r"^[^#]*-m trainer", path.read_text(), re.MULTILINE)] == []


# ---------------------------------------------------------------------------------- files of somebody else

SMALL = ["--model.layers=1", "--model.width=8", "--model.mlp_width=8", "--max_steps=1", "--run.evaluate=false"]
SHADOWS = ("trainer", "random", "torch", "yaml", "json", "typing", "ctypes", "socket", "sitecustomize", "recipe")
"""Modules that this program imports, or that Python does for it."""

WAYS = {
    "beside": "evil.py",
    "dot": "./evil.py",
    "dots": "../run/evil.py",
    "absolute": "{run}/evil.py",
    "proc": "/proc/self/cwd/run/evil.py",
    "two slashes": "//proc/self/cwd/run/evil.py",
    "around proc": "/dev/../proc/self/cwd/run/evil.py",
    "dot in proc": "/./proc/self/cwd/run/evil.py",
    "own number": "/proc/{pid}/cwd/run/evil.py",
    "beside the run": "/proc/self/cwd/evil.py",
    "a link inside": "link.py",
    "a link outside": "{run}/../link/evil.py",
    "a packaged name": "vit_digits.py",
}
"""What the key ``recipe`` of a run's recipe.yaml may say."""


def command_lines() -> dict[str, list[str]]:
    """Every command with what it takes, as its line in the table says: ``{"evaluate": ["evaluate", "RUN_DIR"]}``."""
    lines = {}
    for name, command in COMMANDS.items():
        needed = re.sub(r"\[[^]]*\]", "", command.words.partition(" | ")[0]).split()
        for words in product(*(word.split("|") for word in needed)):
            line = [name, *words]
            lines[" ".join(word for word in line if word[0] not in "-")] = line
    return lines


GIVEN = {"RECIPE": "run/recipe.yaml", "RUN_DIR": "run", "DIR": "run", "TEXT": "a", "--": "--", "--text": "--text"}
"""What stands for the words of the table in these tests. A word that is missing here fails them: give it a payload."""


NO_RECIPE = ("checkpoint list DIR", "checkpoint verify DIR", "chaos")
"""Commands that read none of a recipe."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert run(["fit", "vit_digits", *SMALL, "--checkpoint.every=1", f"--run.dir={run_dir}"]) == 0
    return run_dir


@pytest.fixture
def foreign(finished, tmp_path, monkeypatch):
    """A run directory of somebody else's in the working directory, both full of Python; and what that makes."""
    marker = tmp_path / "executed"
    run_dir = shutil.copytree(finished, tmp_path / "run")
    folders = [tmp_path, run_dir, run_dir / "model", run_dir / "checkpoints"]
    for folder, name in product(folders, (*SHADOWS, "__init__", "__main__", "conftest", "evil", "vit_digits")):
        (folder / f"{name}.py").write_text(code(marker))
    (run_dir / "link.py").symlink_to(tmp_path / "evil.py")
    (tmp_path / "link").symlink_to(run_dir)
    shutil.rmtree(run_dir / "model")  # else export refuses for that
    monkeypatch.chdir(tmp_path)
    return run_dir, marker


def name_recipe(run_dir, reference):
    text = reference.format(run=run_dir, pid=os.getpid())
    (run_dir / "recipe.yaml").write_text(f"recipe: {text}\n")
    return text


@pytest.mark.parametrize("name", command_lines())
def test_no_command_executes_what_came_with_files(name, foreign, capfd):
    run_dir, marker = foreign
    line = [GIVEN.get(word, word) if word.isupper() or word in GIVEN else word for word in command_lines()[name]]
    assert not [word for word in line if word.isupper()], f"{name} takes something new: say in GIVEN what to give it"
    takes_files = any(word in GIVEN for word in command_lines()[name])
    if "evaluate" in line or "predict" in line:
        (run_dir / "model").mkdir()
    taken = {}
    for reference in WAYS.values() if takes_files else ():
        text = name_recipe(run_dir, reference)
        status, error = run(line), capfd.readouterr().err
        assert not marker.exists(), text
        if status != 2 or f"recipe={text!r}" not in error or "is not executed: add --trust-recipe" not in error:
            taken[text] = status, error
    assert len(taken) in (0, len(WAYS)), taken  # by some ways in and not by others
    if takes_files and not taken:  # or else nothing was tried
        assert run([*line, "--trust-recipe"]) == 2
        assert marker.exists()
    else:
        assert name in NO_RECIPE, f"{name} is not refused: it says here that it needs no recipe, or it is broken"


@pytest.mark.parametrize("reference", WAYS.values(), ids=WAYS)
def test_no_flag_executes_what_came_with_files(reference, foreign, capfd):
    """``--config`` compares the key; ``--run.resume`` and ``run.dir`` read checkpoints."""
    run_dir, marker = foreign
    name_recipe(run_dir, reference)
    for flags in (["--config=run/recipe.yaml"], ["--max_steps=-1", "--run.resume=auto", "--run.dir=run"]):
        assert run(["fit", "vit_digits", *flags]) == 2
        assert not marker.exists(), capfd.readouterr().err


def test_a_resumed_run_executes_nothing(foreign, capfd):
    run_dir, marker = foreign
    name_recipe(run_dir, "evil.py")
    longer = [*SMALL, "--max_steps=2", "--run.allow_change=max_steps", "--run.resume=auto", f"--run.dir={run_dir}"]
    assert run(["fit", "vit_digits", *longer]) == 0
    assert "step 1" in capfd.readouterr().err
    assert not marker.exists()


def test_children_import_nothing_from_the_working_directory(foreign, monkeypatch):
    marker = foreign[1]
    for safe_path in ("", "1"):  # with which Python 3.11 and later leave the working directory out themselves
        monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
        done = subprocess.run(own_command("fit", "vit_digits", "--max_steps=-1"), capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "trainer: error: max_steps=-1 must be an integer of at least 1\n"
        look = "import random, sys, trainer.recipe; print(sys.path[0], trainer.__file__)"
        done = subprocess.run(own_code(look), capture_output=True, text=True, check=True)
        first, package = done.stdout.split()
        assert (Path(first).is_relative_to(Path.cwd()), Path(package)) == (False, ROOT / "trainer" / "__init__.py")
    assert not marker.exists()


def test_the_processes_of_a_ladder_import_nothing_from_the_working_directory(foreign, tmp_path):
    assert probe_machine()["devices"] >= 1  # imports torch
    assert run_trial(["vit_digits", "--max_steps=-1"], tmp_path / "rung").status == "refused"
    assert not foreign[1].exists()


@pytest.mark.slow
def test_the_ranks_of_a_supervised_run_import_nothing_from_the_working_directory(foreign, tmp_path, capfd):
    """Fabric starts them by the command line of the process that the supervisor has started."""
    words = ["vit_digits", *SMALL, "--run.devices=2", "--run.accelerator=cpu", f"--run.dir={tmp_path / 'two'}"]
    assert run(["run", "--restarts", "0", "--", *words]) == 0
    assert "python: 2 ranks on 1 node" in capfd.readouterr().err
    assert not foreign[1].exists()
