"""Nothing in this project executes what is in a file: read from the source code itself, and tried with every command.

The commands are those of the table in trainer/cli.py, with the words that it says they take: a new one is in here.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from helpers.payloads import code

from trainer.cli import COMMANDS, run
from trainer.lab.measured_run import probe_machine, run_trial
from trainer.system.processes import python_command, trainer_command

ROOT = Path(__file__).parents[1]
FOLDERS = ("trainer", "recipes", "benchmarks")

ALLOWED = {
    ("trainer/settings.py", "eval"): "evaluates the annotations of dataclasses: code that is imported already",
    ("trainer/cli.py", "importlib.import_module"): "the module of a command, listed in that file",
    ("trainer/__init__.py", "importlib.import_module"): "one of the public names, listed in that file",
    ("trainer/errors.py", "importlib.import_module"): "a package that the calling code names",
    ("benchmarks/chaos/command.py", "importlib.import_module"): "what the ranks need, listed in that file",
    ("benchmarks/checkpoint.py", "torch.distributed.checkpoint.save"): "measured beside ours",
    ("benchmarks/hostile.py", "importlib.import_module"): "what the cases need, listed in that file",
    ("benchmarks/checkpoint.py", "torch.distributed.checkpoint.load"): "reads what this benchmark has just written",
    ("trainer/commands/recipes.py", "exec_module"): "a recipe is a Python file, and running it is what is asked for",
    ("trainer/system/imports.py", "importlib.import_module"): "of a class named by a flag, or by a trusted file",
    ("trainer/fakegpu/__init__.py", "importlib.import_module"): "one of the public names, listed in that file",
    ("trainer/fakegpu/compiled.py", "exec"): "what Inductor has generated in this process",
    ("trainer/fakegpu/compiled.py", "compile"): "the same",
    ("trainer/fakegpu/script.py", "import runpy"): "a script is one, too",
    ("trainer/fakegpu/script_fallbacks.py", "from_pretrained"): "replaced for that script, and not called",
    (
        "trainer/after/export.py",
        "from_pretrained",
    ): "peft's, of the adapters that this program has just written as safetensors",
}
"""What may stay, and why. torchvision's reader of CIFAR-10 and torch's writer of memory snapshots are not our code."""

DCP = "torch.distributed.checkpoint"
OFF = ("allow_pickle", "trust_remote_code", "shell")  # options that must be
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy"}
ALWAYS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "shutil.unpack_archive"),
    *("yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all"),
    *("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "torch.utils.cpp_extension.load"),
    # Its .metadata is a pickle.
    *(f"{DCP}.{name}" for name in ("load", "save", "load_state_dict", "async_save")),
    *(f"{DCP}.FileSystem{name}" for name in ("Reader", "Writer")),
}
"""Functions for which no argument makes it safe, by full name."""

METHODS = {"exec_module", "load_module", "read_pickle", "to_pickle", "load_from_checkpoint"}
"""The same for methods, and for functions of whatever module."""


def faults(source: str) -> list[str]:
    """The names of everything in ``source`` that may execute what is in a file."""
    names: dict[str, str] = {}  # what they stand for: {"np": "numpy", "load": "torch.load"}
    found, calls, pretrained, safe = [], [], [], set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                names[alias.asname or alias.name] = f"{module}.{alias.name}" if module else alias.name
            imported = [module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"import {name}" for name in imported if name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.Call):
            calls.append(node)
        elif isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config"):
            pretrained.append(node)  # called, or handed to another function
    for call in calls:
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        found += [what for what in [_fault(call, options, names)] if what]
        safe |= {node for node in (call.func, *call.args) if _is_safe(node, options)}
    return found + [node.attr for node in pretrained if node not in safe]


def _fault(call: ast.Call, options: dict[str | None, str], names: dict[str, str]) -> str | None:
    first, dot, rest = ast.unparse(call.func).partition(".")
    name = names.get(first, first) + dot + rest
    last = name.rpartition(".")[2]
    unsafe = {
        "torch.load": options.get("weights_only") != "True",
        "torch.hub.load_state_dict_from_url": options.get("weights_only") != "True",
        "yaml.load": not any("SafeLoader" in ast.unparse(word) for word in [*call.args[1:], *call.keywords]),
        "importlib.import_module": bool(call.args) and not isinstance(call.args[0], ast.Constant),
    }
    if last in METHODS or (last == "extractall" and options.get("filter") != "'data'"):
        return last
    if name in ALWAYS or unsafe.get(name) or name.lower().endswith(("fabric.load", "fabric.load_raw")):
        return name
    return next((option for option in OFF if options.get(option, "False") != "False"), None)


def _is_safe(node: ast.AST, options: dict[str | None, str]) -> bool:
    """Whether ``from_pretrained`` and ``from_config`` get what makes them safe."""
    if not isinstance(node, ast.Attribute) or options.get("trust_remote_code") != "False":
        return False
    owner = ast.unparse(node.value)
    reads_weights = node.attr == "from_pretrained" and "Config" not in owner and "Tokenizer" not in owner
    return not reads_weights or options.get("use_safetensors") == "True"


def test_the_project_executes_nothing_that_it_reads():
    found = set()
    for path in (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        found |= {(name, what) for what in faults(path.read_text(encoding="utf-8"))}
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "allowed, and not there any more"


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
        (f"import {DCP} as dcp\ndcp.load(state)", f"{DCP}.load"),
        (f"from {DCP} import FileSystemReader\nFileSystemReader(p)", f"{DCP}.FileSystemReader"),
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
    assert faults(code) == [what]


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
        "trainer/lab/measured_run.py",
    }
    scripts = [path for path in (ROOT / "launch").iterdir() if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) == 4
    assert [path.name for path in scripts if re.search(r"^[^#]*-m trainer", path.read_text(), re.MULTILINE)] == []


# Files of another person

SMALL = ["--model.layers=1", "--model.width=8", "--model.mlp_width=8", "--max_steps=1", "--run.evaluate=false"]
SHADOWS = ("trainer", "random", "torch", "yaml", "json", "typing", "ctypes", "socket", "sitecustomize", "recipe")
"""Modules that this program imports, or that Python does for it."""

WAYS = [
    *("evil.py", "{run}/evil.py", "vit_digits.py"),  # beside it, by its whole path, by the name of a packaged recipe
    *("./evil.py", "../run/evil.py", "link.py", "{run}/../link/evil.py"),
    *("/proc/self/cwd/run/evil.py", "//proc/self/cwd/run/evil.py", "/proc/self/cwd/evil.py"),
    *("/dev/../proc/self/cwd/run/evil.py", "/./proc/self/cwd/run/evil.py", "/proc/{pid}/cwd/run/evil.py"),
]
"""What the key ``recipe`` of a run's recipe.yaml may say."""


def command_lines() -> dict[str, list[str]]:
    """Every command with what it takes, as its line of the usage says: ``{"evaluate": ["evaluate", "RUN_DIR"]}``."""
    lines, usage = {}, (ROOT / "trainer" / "usage.txt").read_text(encoding="utf-8")
    for name in COMMANDS:
        taken = re.search(rf"^  {name} (.*?)(  |$)", usage, re.MULTILINE)
        needed = re.sub(r"\[[^]]*\]", "", taken[1].partition(" | ")[0]).split()
        for words in product(*(word.split("|") for word in needed)):
            line = [name, *words]
            lines[" ".join(word for word in line if word[0] not in "-")] = line
    return lines


GIVEN = {
    "RECIPE": "run/recipe.yaml",
    "RUN_DIR": "run",
    "DIR": "run",
    "FILE": "run/recipe.yaml",
    "TEXT": "a",
    "--": "--",
    "--text": "--text",
}
GIVEN |= {"hf:MODEL": "hf:./run", "KEY=VALUES": "optim.lr=1e-4..1e-3"}
GIVEN |= {"COMMAND": sys.executable, "A": "-mthis", "B": "-mthis"}  # the user's own command; it executes nothing else
"""What stands for the words of the table in these tests. A word that is missing here fails them: give it a payload."""

NO_RECIPE = ("plan hf:MODEL", "checkpoint list DIR", "checkpoint verify DIR", "chaos", "runs", "migrate FILE")
NO_RECIPE += ("same-gradient COMMAND A COMMAND B",)
"""Commands that read none of a recipe."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert run(["fit", "vit_digits", *SMALL, "--checkpoint.every=1", f"--run.dir={run_dir}"]) == 0
    return run_dir


@pytest.fixture
def foreign(finished, tmp_path, monkeypatch):
    """A run directory of another person in the working directory, both full of Python files; and their marker."""
    marker = tmp_path / "executed"
    run_dir = shutil.copytree(finished, tmp_path / "run")
    folders = [tmp_path, run_dir, run_dir / "model", run_dir / "checkpoints"]
    for folder, name in product(folders, (*SHADOWS, "__init__", "__main__", "conftest", "evil", "vit_digits")):
        (folder / f"{name}.py").write_text(code(marker))
    evil = {"model_type": "evil", "architectures": ["EvilForCausalLM"], "auto_map": {"AutoConfig": "evil.Config"}}
    (run_dir / "config.json").write_text(json.dumps(evil))
    (run_dir / "link.py").symlink_to(tmp_path / "evil.py")
    (tmp_path / "link").symlink_to(run_dir)
    shutil.rmtree(run_dir / "model")  # else export refuses for that
    monkeypatch.chdir(tmp_path)
    return run_dir, marker


def name_recipe(run_dir, reference):
    text = reference.format(run=run_dir, pid=os.getpid())
    (run_dir / "recipe.yaml").write_text(f"recipe: {text}\n")
    return text


def test_no_class_that_a_file_names_is_imported(foreign, capfd):
    run_dir, marker = foreign
    for text in ("data: evil.Data", "data: {class: evil.Data}", "model.class: run.evil.Model"):
        (run_dir / "recipe.yaml").write_text(f"recipe: vit_digits\n{text}\n")
        for words in (["fit", "run/recipe.yaml"], ["fit", "vit_digits", "--config", "run/recipe.yaml"]):
            assert run(words) == 2
            assert "is not imported: add --trust-recipe if you trust the file" in capfd.readouterr().err
            assert not marker.exists()
    assert run(["fit", "run/recipe.yaml", "--trust-recipe"]) == 2
    assert marker.exists()


@pytest.mark.first(1)
@pytest.mark.parametrize("name", command_lines())
def test_no_command_executes_what_came_with_files(name, foreign, capfd):
    run_dir, marker = foreign
    line = [GIVEN.get(word, word) if word.isupper() or word in GIVEN else word for word in command_lines()[name]]
    assert not [word for word in line if word.isupper()], f"{name} takes something new: say in GIVEN what to give it"
    takes_files = any(word in GIVEN for word in command_lines()[name])
    if {"evaluate", "predict", "export"} & set(line[:1]):
        (run_dir / "model").mkdir()
    taken, ways = {}, WAYS if name == "fit RECIPE" else WAYS[:3]
    for reference in ways if takes_files else ():
        text = name_recipe(run_dir, reference)
        status, error = run(line), capfd.readouterr().err
        assert not marker.exists(), text
        if status != 2 or f"recipe={text!r}" not in error or "is not executed: add --trust-recipe" not in error:
            taken[text] = status, error
    assert len(taken) in (0, len(ways)), taken  # by some ways in and not by others
    if takes_files and not taken:  # or else nothing was tried
        assert run([*line, "--trust-recipe"]) == 2
        assert marker.exists()
    else:
        assert name in NO_RECIPE, f"{name} is not refused: it says here that it needs no recipe, or it is broken"


def test_no_flag_and_no_resumed_run_executes_what_came_with_files(foreign, capfd):
    """``--config`` compares the key; ``--run.resume`` and ``run.dir`` read checkpoints."""
    run_dir, marker = foreign
    flags = (["--config=run/recipe.yaml"], ["--max_steps=-1", "--run.resume=auto", "--run.dir=run"])
    for reference, given in product(reversed(WAYS), flags):
        name_recipe(run_dir, reference)
        assert run(["fit", "vit_digits", *given]) == 2
        assert not marker.exists(), capfd.readouterr().err
    longer = [*SMALL, "--max_steps=2", "--run.allow_change=max_steps", "--run.resume=auto", f"--run.dir={run_dir}"]
    assert run(["fit", "vit_digits", *longer]) == 0
    assert "step 1" in capfd.readouterr().err
    assert not marker.exists()


def test_children_import_nothing_from_the_working_directory(foreign, monkeypatch):
    marker = foreign[1]
    for safe_path in ("", "1"):  # with which Python 3.11 and later leave the working directory out themselves
        monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
        done = subprocess.run(trainer_command("fit", "vit_digits", "--max_steps=-1"), capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[-1] == "trainer: error: max_steps=-1 must be an integer of at least 1"
        look = "import random, sys, trainer.recipe; print(sys.path[0], trainer.__file__)"
        done = subprocess.run(python_command(look), capture_output=True, text=True, check=True)
        first, package = done.stdout.split()
        assert (Path(first).is_relative_to(Path.cwd()), Path(package)) == (False, ROOT / "trainer" / "__init__.py")
    assert not marker.exists()


@pytest.mark.slow
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
