"""The page of the documentation: a table of verdicts, and the details of every cell that is not exact."""

from __future__ import annotations

import re
from typing import Any

from conformance.cases import CASES
from conformance.environments import HERE

PAGE = HERE.parent / "docs" / "conformance.md"
START, END = "<!-- results -->", "<!-- end of results -->"

SIGNS = {
    "exact": "✓",
    "rounding": "✓",
    "factor": "factor",
    "ragged": "weights",
    "order": "order",
    "samples": "samples",
    "rate": "rates",
    "update": "update",
    "other": "wrong",
    "rejected": "rejected",
    "crashed": "crashed",
    "unsupported": "–",
}
"""What a cell says. ``–``: the trainer, or its adapter, does not have what the case needs."""

WRONG = ("factor", "ragged", "order", "samples", "rate", "update", "other")


def build(content: dict[str, Any]) -> None:
    """Write the results into the page, between its two marks."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(START)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{render(content['cells'])}\n{END}{after}", encoding="utf-8")


def render(cells: dict[str, dict[str, Any]]) -> str:
    """Return the summary, the table and the details as Markdown."""
    names = sorted({name.partition("/")[0] for name in cells}, key=lambda name: (name != "ours", name))
    facts = {name: facts_of(name) for name in names}
    head = ["case", *(f"[{facts[name]['TITLE']}]({facts[name]['DOCS']}) {version(cells, name)}" for name in names)]
    lines = [summary(cells), "", row(head), row(["---"] * len(head))]
    lines += [row([case.title, *(sign(cells, name, case.name) for name in names)]) for case in CASES.values()]
    lines += ["", "### What is not exact", ""]
    for name in names:
        found = [(case, cells[f"{name}/{case.name}"]) for case in CASES.values() if f"{name}/{case.name}" in cells]
        wrong = [(case, cell) for case, cell in found if cell["verdict"] in (*WRONG, "rejected", "crashed")]
        if wrong:
            lines += [f"**{facts[name]['TITLE']}**", ""]
            lines += [f"* {case.title}: {detail(cell)}" for case, cell in wrong]
            lines += [""]
    return "\n".join(lines).rstrip()


def summary(cells: dict[str, dict[str, Any]]) -> str:
    """Return one line with the numbers of cells."""
    kinds = [cell["verdict"] for cell in cells.values()]
    counts = {
        "exact": sum(kind in ("exact", "rounding") for kind in kinds),
        "wrong": sum(kind in WRONG for kind in kinds),
        "rejected": kinds.count("rejected"),
        "crashed or did not end": kinds.count("crashed"),
        "not supported": kinds.count("unsupported"),
    }
    dates = sorted(cell["date"] for cell in cells.values())
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{len(cells)} cells: {listed}. Measured from {dates[0]} to {dates[-1]}."


def sign(cells: dict[str, dict[str, Any]], name: str, case: str) -> str:
    """Return what the table says of a cell."""
    cell = cells.get(f"{name}/{case}")
    return "" if cell is None else SIGNS[cell["verdict"]]


def detail(cell: dict[str, Any]) -> str:
    """Return a line about a cell: the kind, the error and what was found."""
    error = "" if cell.get("error") is None else f", relative error {cell['error']:.2g}"
    text = re.sub(r"([|<>])", r"\\\1", cell.get("detail", ""))
    return f"{SIGNS[cell['verdict']]}{error}{': ' if text else ''}{text}"


def version(cells: dict[str, dict[str, Any]], name: str) -> str:
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
    return {"TITLE": title[1], "DOCS": docs[1].removeprefix("../")}


def row(cells: list[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
