"""The generated parts of docs/migrate: ``python -m helpers.migration`` in ``tests`` writes them.

Each page has the first block of code in JSON or YAML as an example of a file, what ``trainer migrate`` prints for it,
and the table of all keys."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.cli import run
from trainer.commands.migrate import COUNTS, LIBRARIES, read_table
from trainer.system.names import FOREIGN_SWITCHES, OUR_NAMES

PAGES = Path(__file__).parents[2] / "docs" / "migrate"
FILES = dict(zip(LIBRARIES, ("training_args.json", "config.yaml", "default_config.yaml", "args.yaml"), strict=True))
DERIVED = {
    "micro": ("batch_size", "memory.micro_batch_size"),
    "accumulate": ("batch_size",),
    "ranks": ("batch_size",),
    "nodes": ("batch_size",),
    "warmup_epochs": ("optim.warmup_ratio",),
}
assert DERIVED.keys() == set(COUNTS)


def targets(key: str, cases: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the settings that ``key`` may set, in the order of its table."""
    name = key.rpartition(".")[2]
    for case in cases:
        outcomes = [one for one in case.get("values", {}).values() if isinstance(one, Mapping)]
        to = case.get("to") if "to" in case or "why" in case else OUR_NAMES.get(name)
        outcomes += [to] if isinstance(to, Mapping) else [{to: None}] if to else []
        if name in FOREIGN_SWITCHES and True not in case.get("values", {}) and not case.get("why"):
            outcomes.append({FOREIGN_SWITCHES[name].split()[0]: None})
        for ours in (ours for outcome in outcomes for ours in outcome):
            yield from DERIVED.get(ours, (ours,))


def cell(ours: str) -> str:
    """Format a setting of ours for a table."""
    section, _, name = ours.partition(".")
    if name == "class":
        return f"`--{section}`"
    owner, _, argument = ours.rpartition(".")
    if ours == "model.config.model_args":
        return "`model.config` with model_args"
    return f"`model.config` with `{argument}`" if owner == "model.config.model_args" else f"`{ours}`"


def render_table(library: str) -> str:
    """Return the table of a library as Markdown."""
    lines = ["| field | here | note |", "|---|---|---|"]
    for key, cases in read_table(library)["keys"].items():
        here = ", ".join(map(cell, dict.fromkeys(targets(key, cases)))) or "–"
        notes = [str(case[name]) for name in ("note", "why") for case in cases if name in case]
        notes += [one for case in cases for one in case.get("values", {}).values() if isinstance(one, str)]
        lines.append(f"| {key.replace('*', 'all others')} | {here} | {'; '.join(dict.fromkeys(notes))} |")
    return "\n".join(lines)


def example(library: str, page: str) -> tuple[str, str]:
    """Return what ``trainer migrate`` prints for the example of a page, on stdout and on stderr."""
    found = re.search(r"```(?:json|yaml)\n(.*?)```", page, re.DOTALL)
    assert found is not None, library
    with TemporaryDirectory() as folder:
        path = Path(folder, FILES[library])
        path.write_text(found[1])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert run(["migrate", str(path)]) == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


def render(library: str) -> str:
    """Return the page of a library with its generated parts."""
    page = (PAGES / f"{library}.md").read_text()
    printed, notes = example(library, page)
    parts = {"printed": f"```yaml\n{printed}```\n\n```text\n{notes}```", "fields": render_table(library)}
    for name, text in parts.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        page = f"{before}{start}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    for library in LIBRARIES:
        (PAGES / f"{library}.md").write_text(render(library))
