"""Checks of the structure: limits on lines, the code map of the README, names, prose, no import cycles."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers.prose import files, matches

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "trainer").rglob("*.py")
}

CORE = [
    *("api.py", "contract.py", "errors.py", "recipe.py", "values.py"),
    *("engine/__init__.py", "engine/cut.py", "engine/data_feed.py", "engine/events.py"),
    *("engine/forward.py", "engine/loop.py", "engine/loss_totals.py", "engine/order.py"),
    *("engine/schedule.py", "engine/step.py", "engine/sync.py", "engine/window.py"),
    *("memory/initialize.py", "memory/knobs.py", "memory/plan.py", "memory/sharding.py", "memory/stack.py"),
    *("run/directory.py", "run/session.py", "run/setup.py", "run/training.py"),
]
"""The files that a newcomer must know."""

# Maximum numbers of lines. They only fall, except by an allowance that an issue names.
MAX_CORE = 4787  # CORE
MAX_TRAINER = 36363  # trainer/ without fakegpu
MAX_FAKEGPU = 4732  # trainer/fakegpu
MAX_BENCHMARKS = 12103  # benchmarks/

MAX_PHRASES = {"trainer": 0, "README.md": 0, "CONTRIBUTING.md": 0, "docs": 26}
"""Maximum numbers of phrases of the former private dialect, by place; see tests/helpers/prose.py. They only fall."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def package(path: Path) -> str:
    return path.relative_to(ROOT / "trainer").parts[0]


def count_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_limits_on_lines_hold():
    simulator = [path for path in FILES.values() if package(path) == "fakegpu"]
    assert count_lines(ROOT / "trainer" / name for name in CORE) <= MAX_CORE
    assert count_lines(simulator) <= MAX_FAKEGPU
    assert count_lines((ROOT / "benchmarks").rglob("*.py")) <= MAX_BENCHMARKS
    assert count_lines(FILES.values()) - count_lines(simulator) <= MAX_TRAINER


@pytest.mark.parametrize("place", MAX_PHRASES)
def test_prose_is_plain_english(place):
    found = [f"{path.relative_to(ROOT)}:{line}: {text}" for path in files(ROOT / place) for line, text in matches(path)]
    assert len(found) <= MAX_PHRASES[place], "\n".join(found)


def test_the_code_map_of_the_readme_is_complete():
    page = (ROOT / "README.md").read_text()
    tree = page[page.index("\ntrainer/\n") : page.index("\nrecipes/")]
    shown = {line.split()[0].rstrip("/") for line in tree.strip().splitlines()[1:]}
    assert shown == {package(path) for path in FILES.values()} - {"__init__.py", "__main__.py"}


def test_no_two_public_classes_have_one_name():
    where = defaultdict(list)
    for module, path in FILES.items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}


def imports(module: str, path: Path) -> set[str]:
    """Modules of the package that ``path`` imports, at its top or within a function; not those for types alone."""
    found = set()
    nodes: list[ast.AST] = [parsed(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & FILES.keys() or {node.module or ""}
        nodes += ast.iter_child_nodes(node)
    return (found & FILES.keys()) - {module, "trainer"}


def test_no_file_imports_itself_by_way_of_others():
    graph = {module: imports(module, path) for module, path in FILES.items() if module != "trainer"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


INTERFACES = {"data", "dataset", "first", "split", "_split", "samples", "train", "val", "test", "model"}
MAX_LOOKUPS = 5


def test_attributes_of_data_splits_and_models_are_not_looked_up_by_name():
    """Count ``getattr`` and ``hasattr`` whose first argument is called like a dataset, a split or a model, or is the
    ``type`` of one, as in ``getattr(recipe.model, "task", None)``. Typed attributes with defaults replace them."""

    def last_name(node: ast.AST) -> str:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "type" and node.args:
            return last_name(node.args[0])
        return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

    found = [
        f"{module}:{node.lineno}"
        for module, path in FILES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        if last_name(node.args[0]) in INTERFACES
    ]
    assert len(found) <= MAX_LOOKUPS, found
