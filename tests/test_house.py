"""The house stays one that a newcomer finds their way in: its size, its page, its names, no circles."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "trainer").rglob("*.py")
}

# Lines that each floor may have. Who raises one says why in the message of that commit.
BUDGETS = {
    "__init__.py": 89,
    "__main__.py": 16,
    "cli.py": 240,
    "commands": 1600,
    "supervise": 539,
    "lab": 1295,
    "after": 1002,
    "doctor": 631,
    "api.py": 158,
    "run": 2939,
    "planner": 2515,
    "faults": 961,
    "launching": 839,
    "memory": 3791,
    "engine": 2750,
    "data": 4594,
    "models": 3575,
    "checkpoint": 977,
    "report": 1685,
    "settings.py": 226,
    "recipe.py": 544,
    "contract.py": 259,
    "weights": 810,
    "values.py": 214,
    "integrations": 349,
    "fakegpu": 3861,
    "system": 1862,
    "errors.py": 128,
}
TOTAL = 38449
"""Of all floors."""


def floor(path: Path) -> str:
    return path.relative_to(ROOT / "trainer").parts[0]


def test_every_floor_stays_within_its_budget():
    lines: Counter[str] = Counter()
    for path in FILES.values():
        lines[floor(path)] += len(path.read_text().splitlines())
    over = {name: (count, BUDGETS.get(name)) for name, count in lines.items() if count > BUDGETS.get(name, 0)}
    assert over == {}
    assert sum(lines.values()) <= TOTAL


def test_the_readme_shows_every_floor():
    page = (ROOT / "README.md").read_text()
    tree = page[page.index("\ntrainer/\n") : page.index("\nrecipes/")]
    shown = {line.split()[0].rstrip("/") for line in tree.strip().splitlines()[1:]}
    assert shown == {floor(path) for path in FILES.values()} - {"__init__.py", "__main__.py"}


def test_no_two_public_classes_have_one_name():
    where = defaultdict(list)
    for module, path in FILES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}


def imports(module: str, path: Path) -> set[str]:
    """Modules of the package that ``path`` imports, at its top or within a function; not those for types alone."""
    found = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
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
MAX_LOOKUPS = 10


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
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        if last_name(node.args[0]) in INTERFACES
    ]
    assert len(found) <= MAX_LOOKUPS, found
