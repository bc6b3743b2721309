"""Histories of torch's allocator from runs on a real GPU, kept in benchmarks/results/traces: replayed without one.

``python benchmarks/gpu.py planner`` writes them. Where there are none yet, this is skipped.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.recorded import compare, recorded_events, recorded_settings
from trainer.planner.replay import replay

TRACES = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "traces").glob("*.json.gz"))


@pytest.mark.skipif(not TRACES, reason="no recording from a GPU is kept: benchmarks/gpu.py planner makes some")
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_the_simulated_allocator_does_what_the_real_one_did(path):
    recording = json.loads(gzip.decompress(path.read_bytes()))
    found = compare(recording)
    assert found.allocations > 1000
    assert (found.allocated_error, found.reserved_error) == (0, 0)
    assert (found.first_difference, found.first_misplaced) == (None, None)
    assert replay(recorded_events(recording), recorded_settings(recording)).peak_allocated == found.peak_allocated
