"""``benchmarks/comm_volume.py``: what gloo ranks send is what the planner says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from comm_volume import CASES, RANKS, can_measure, compare  # noqa: E402


@pytest.mark.slow
def test_ranks_send_what_is_predicted():
    if not can_measure():
        pytest.skip("a network of our own takes unshare, ip, and the right to use them")
    found = compare()
    for one in found["collectives"]:
        if one["collective"] != "reduce_scatter":  # gloo's is an all-reduce
            assert one["measured"] == pytest.approx(one["ring"], rel=0.01), one
    assert len(found["steps"]) == len(CASES) * len(RANKS)
    for one in found["steps"]:
        assert one["measured"] == pytest.approx(one["predicted_for_gloo"], rel=0.02), one
        if one["case"] == "ddp":
            assert one["measured"] == pytest.approx(one["predicted"], rel=0.02)
