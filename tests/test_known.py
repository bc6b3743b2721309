"""The table of what upstream knows names cells and pages that exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.__main__ import trainers
from conformance.cases import CASES
from conformance.known import KNOWN, known

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "conformance" / "results.json"


@pytest.mark.parametrize("entry", KNOWN, ids=lambda entry: f"{entry.trainers[0]}-{entry.cases[0]}")
def test_an_entry_names_cells_and_pages_that_exist(entry):
    assert set(entry.trainers) <= {*trainers(), "*"}
    assert set(entry.cases) <= {*CASES, "*"}
    assert not entry.page or (ROOT / "docs/upstream" / entry.page).exists()
    assert bool(entry.thread) == bool(entry.since)
    assert not entry.fixed_in or entry.thread


def test_every_wrong_cell_has_an_entry():
    if not RESULTS.exists():
        pytest.skip(f"needs {RESULTS.name}: python -m conformance run")
    right = ("exact", "rounding", "unsupported", "rejected")
    cells = json.loads(RESULTS.read_text(encoding="utf-8"))["cells"]
    wrong = [name.partition("/") for name, cell in cells.items() if cell["verdict"] not in right]
    assert [f"{trainer}/{case}" for trainer, _, case in wrong if known(trainer, case) is None] == []


def test_the_first_entry_about_a_cell_is_taken():
    assert known("transformers", "moe").page == "transformers-router-loss.md"
    assert known("accelerate", "moe").cases == ("moe", "batch-norm")
    assert known("ours", "ragged") is None
