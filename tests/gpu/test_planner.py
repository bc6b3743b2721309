"""Predictions, made by a process that sees no GPU, against what runs on this one take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDED = "ViT-B bf16-mixed · 16"
NAMES = ("vit-b-bf16-mixed-16", "distilbert-ragged-texts-3-4", "llama-100m-fp32-2-4-256-tokens")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of the benchmark for three configurations."""
    out = tmp_path_factory.mktemp("planner") / "planner.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "planner", "--out", str(out), "--only", ",".join(NAMES)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", ["reserved", "allocated"])
def test_predicted_memory_is_within_six_percent(found, kind):
    assert len(found["rows"]) == len(NAMES)
    errors = {row["name"]: row[kind]["error"] for row in found["rows"]}
    assert None not in errors.values(), found["measured"]
    assert max(map(abs, errors.values())) <= 0.06, errors


def test_a_recorded_run_is_replayed_to_the_byte(found):
    recording = found["measured"][RECORDED]["recording"]
    assert recording["allocations"] > 1000
    assert (recording["allocated_error"], recording["reserved_error"]) == (0, 0), recording
    assert (recording["first_difference"], recording["first_misplaced"]) == (None, None)
