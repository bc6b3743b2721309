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
    "__init__.py": 90,
    "__main__.py": 20,
    "cli.py": 230,
    "commands": 2930,
    "supervise": 550,
    "doctor": 650,
    "api.py": 170,
    "run": 3950,
    "planner": 6400,
    "faults": 980,
    "launching": 770,
    "memory": 3800,
    "engine": 2830,
    "data": 4590,
    "models": 3240,
    "checkpoint": 1030,
    "report": 1740,
    "settings.py": 230,
    "recipe.py": 550,
    "contract.py": 260,
    "weights": 700,
    "values.py": 210,
    "system": 1740,
    "errors.py": 140,
}
TOTAL = 37630
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
