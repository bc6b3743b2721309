"""Nothing in this project loads a file in a way that could execute what is in it: read from the source code itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("trainer", "recipes", "benchmarks")

ALLOWED = {
    ("trainer/settings.py", "eval"): "evaluates the annotations of dataclasses: code that is imported already",
    ("trainer/__init__.py", "importlib.import_module"): "one of the public names, listed in that file",
    ("trainer/errors.py", "importlib.import_module"): "a package that the calling code names",
    ("trainer/chaos/command.py", "importlib.import_module"): "what the ranks need, listed in that file",
    ("benchmarks/checkpoint.py", "torch.distributed.checkpoint.save"): "measured beside ours",
    ("benchmarks/hostile.py", "importlib.import_module"): "what the cases need, listed in that file",
    ("benchmarks/checkpoint.py", "torch.distributed.checkpoint.load"): "reads what this benchmark has just written",
    ("trainer/locate.py", "exec_module"): "a recipe is a Python file, and running it is what the user asks for",
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
