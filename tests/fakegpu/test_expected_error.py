"""The errors to expect of predicted memory are those of the published rows, in the code and on the page."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from trainer.fakegpu.expected_error import PUBLISHED, PublishedErrors, expected_error, kind_of_loop

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
KNOWN = ("with ", "in sample")  # notes of rows that were seen before the simulator was changed
NEW = (2, 15)


def kind_of(row) -> str:
    if not row["eager"]:
        return "compiled"
    if "LoRA" in row["configuration"] or row["configuration"].endswith(("DoRA of rank 32", "norms")):
        return "adapters"
    return kind_of_loop(False, False, 1.0, tuple(map(int, row["torch"].split("."))))


def published() -> dict[str, PublishedErrors]:
    """The table, from the results of the benchmarks."""
    found = defaultdict(list)
    for row in json.loads((RESULTS / "planner_holdout.json").read_text())["rows"]:
        if "error" in row and not row["note"].startswith(KNOWN):
            found[kind_of(row)].append((row["source"], 100 * row["error"]))
    for row in json.loads((RESULTS / "scale_published.json").read_text())["rows"]:
        found["FSDP2"].append(("pytorch/torchtitan", 100 * (row["memory ratio"] - 1)))
    return {
        kind: PublishedErrors(
            len(rows),
            len({source for source, _ in rows}),
            round(min(error for _, error in rows), 1),
            round(max(error for _, error in rows), 1),
            round(median(abs(error) for _, error in rows), 1),
        )
        for kind, rows in found.items()
    }


def test_the_table_is_that_of_the_published_rows():
    assert published() == PUBLISHED


def test_the_page_has_the_table():
    page = (ROOT / "docs/planner/accuracy.md").read_text().replace("\u2212", "-")
    lines = re.findall(
        r"^\| (\w[\w ]*) \| (\d+) \| (\d+) \| ([-+][\d.]+) to ([-+][\d.]+) % \| ([\d.]+) % \|$", page, re.M
    )
    shown = {kind: PublishedErrors(int(rows), int(sources), *map(float, rest)) for kind, rows, sources, *rest in lines}
    assert shown == PUBLISHED


@pytest.mark.parametrize(
    ("loop", "kind"),
    [
        ((False, False, 1.0, NEW), "eager"),
        ((False, False, 0.1, NEW), "adapters"),
        ((False, False, 0.0, NEW), "eager"),
        ((False, False, 1.0, (2, 3)), "old torch"),
        ((False, True, 0.01, NEW), "FSDP2"),
        ((True, True, 1.0, NEW), "compiled"),
    ],
)
def test_the_kind_of_a_loop(loop, kind):
    assert kind_of_loop(*loop) == kind


def test_the_line_names_sources_and_the_worst_errors():
    assert expected_error("FSDP2") == "2 published peaks like this (FSDP2, 1 source): -3.6 to -2.7 %, half within 3.2 %"
