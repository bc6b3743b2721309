"""The page of the documentation: a table of verdicts, and the details of every cell that is not exact."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from conformance.cases import CASES, Case
from conformance.environments import HERE
from conformance.known import Known, known

PAGE = HERE.parent / "docs" / "conformance.md"
START, END = "<!-- results -->", "<!-- end of results -->"
Cells = dict[str, dict[str, Any]]

SIGNS = {
    "exact": "✓",
    "rounding": "✓",
    "average": "average",
    "precision": "precision",
    "factor": "factor",
    "ragged": "weights",
    "order": "order",
    "samples": "samples",
    "seeds": "seeds",
    "rate": "rates",
    "update": "update",
    "other": "wrong",
    "rejected": "rejected",
    "crashed": "crashed",
    "unsupported": "–",
}
"""What a cell says. ``–``: the trainer, or its adapter, does not have what the case needs."""

NOT_WRONG = ("exact", "rounding", "rejected", "crashed", "unsupported")


def build(content: dict[str, Any]) -> None:
    """Write the results into the page, between its two marks."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(START)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{render(content)}\n{END}{after}", encoding="utf-8")


def render(content: dict[str, Any]) -> str:
    """Return the summary, the table and the details as Markdown."""
    cells: Cells = content["cells"]
    names = sorted({name.partition("/")[0] for name in cells}, key=lambda name: (not name.startswith("ours"), name))
    lines = [summary(content), "", *matrix(cells, names), "", "## What is not exact", ""]
    for name in names:
        lines += details(cells, name)
    return "\n".join(lines).rstrip()


def summary(content: dict[str, Any]) -> str:
    """Return the numbers of cells and the time they took."""
    cells = content["cells"].values()
    kinds = [cell["verdict"] for cell in cells]
    counts = {
        "exact": sum(kind in ("exact", "rounding") for kind in kinds),
        "wrong": sum(is_wrong(cell) for cell in cells),
        "rejected": kinds.count("rejected"),
        "crashed or did not end": kinds.count("crashed"),
        "not supported": kinds.count("unsupported"),
    }
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    dates = sorted(cell["date"] for cell in cells)
    minutes = f"{content['seconds'] / 60:.0f} minutes on {content['machine']}"
    return f"{len(kinds)} cells: {listed}. Measured from {dates[0]} to {dates[-1]} in {minutes}."


def is_wrong(cell: dict[str, Any]) -> bool:
    """Return whether a trainer took steps that are not those of the whole batch."""
    return cell["verdict"] not in NOT_WRONG


def matrix(cells: Cells, names: Sequence[str]) -> list[str]:
    """Return the table as HTML: a row for each case, a column for each trainer. ``conformance.js`` filters it."""
    lines = ['<div class="matrix" markdown="0">', '<table id="matrix" class="grid">', "<thead><tr><th>case</th>"]
    for name in names:
        facts, kind = facts_of(name), "ours" if is_ours(name) else "remedy" if "_" in name else "default"
        title = f'<a href="{href(facts["DOCS"])}">{html.escape(facts["TITLE"])}</a>'
        lines.append(f'<th data-kind="{kind}"><div>{title} {version(cells, name)}</div></th>')
    lines.append("</tr></thead>")
    lines.append("<tbody>")
    for case in CASES.values():
        shown = "".join(box(cells, name, case.name) for name in names)
        lines.append(f'<tr data-ranks="{case.ranks}"><th>{html.escape(case.title)}</th>{shown}</tr>')
    return [*lines, "</tbody></table>", "</div>"]


def is_ours(name: str) -> bool:
    """Return whether a row is this project's, or another trainer with its drop-in."""
    return name.startswith("ours") or name == "accumulate" or name.endswith("_drop_in")


def href(link: str) -> str:
    """Return a link to a file of the documentation as one from this page of the site."""
    return link if link.startswith("http") else link.removeprefix("../").replace(".md", ".html")


def box(cells: Cells, name: str, case: str) -> str:
    """Return one cell of the table."""
    cell = cells.get(f"{name}/{case}")
    if cell is None:
        return "<td></td>"
    sign, text = SIGNS[cell["verdict"]], html.escape(detail(cell), quote=True)
    if is_wrong(cell):
        return f'<td class="wrong" title="{text}"><a href="#{name}">{sign}</a></td>'
    return f'<td class="{cell["verdict"]}" title="{text}">{sign}</td>'


def details(cells: Cells, name: str) -> list[str]:
    """Return what is not exact of a trainer: each cause, and the cells that it explains."""
    found: dict[Known | None, list[Case]] = {}
    for case in CASES.values():
        cell = cells.get(f"{name}/{case.name}")
        if cell and (is_wrong(cell) or cell["verdict"] in ("rejected", "crashed")):
            found.setdefault(None if cell["verdict"] == "rejected" else known(name, case.name), []).append(case)
    if not found:
        return []
    lines = [f"### {facts_of(name)['TITLE']} {{#{name}}}", ""]
    for cause, explained in sorted(found.items(), key=lambda one: one[0] is None):
        lines += [cause.text(), ""] if cause else []
        lines += [f"* {case.title}: {detail(cells[f'{name}/{case.name}'])}" for case in explained]
        lines.append("")
    return lines


def detail(cell: dict[str, Any]) -> str:
    """Return a line about a cell: the kind, the error and what was found."""
    error = "" if cell.get("error") is None else f", relative error {cell['error']:.2g}"
    text = re.sub(r"([|<>*\[\]]|\b_|_\b)", r"\\\1", cell.get("detail", ""))  # within a word _ has no meaning
    return f"{SIGNS[cell['verdict']]}{error}{': ' if text else ''}{text}"


def version(cells: Cells, name: str) -> str:
    """Return the version that was measured."""
    found = {cell.get("version") for key, cell in cells.items() if key.startswith(f"{name}/")} - {None}
    return ", ".join(sorted(found))  # type: ignore[arg-type]


def facts_of(name: str) -> dict[str, str]:
    """Return the title and the documentation of a trainer, from its file, without importing it."""
    text = (HERE / "trainers" / f"{name}.py").read_text(encoding="utf-8")
    title = re.search(r'^TITLE, VERSION_OF = "(.*?)", ', text, re.MULTILINE)
    docs = re.search(r'^DOCS = "(.*?)"', text, re.MULTILINE)
    if title is None or docs is None:
        raise SystemExit(f"conformance: error: {name}.py needs TITLE, VERSION_OF and DOCS")
    return {"TITLE": title[1], "DOCS": docs[1]}
