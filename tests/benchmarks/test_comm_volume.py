"""``benchmarks/comm_volume.py``: what gloo ranks send is what the planner says."""

from __future__ import annotations

import pytest
from helpers.benchmark import imported

(comm_volume,) = imported("comm_volume")


@pytest.mark.slow
def test_ranks_send_what_is_predicted():
    if not comm_volume.can_measure():
        pytest.skip("a network of our own takes unshare, ip, and the right to use them")
    found = comm_volume.compare()
    for one in found["collectives"]:
        if one["collective"] != "reduce_scatter":  # gloo's is an all-reduce
            assert one["measured"] == pytest.approx(one["ring"], rel=0.01), one
    assert len(found["steps"]) == len(comm_volume.CASES) * len(comm_volume.RANKS)
    for one in found["steps"]:
        assert one["measured"] == pytest.approx(one["predicted_for_gloo"], rel=0.02), one
        if one["case"] == "ddp":
            assert one["measured"] == pytest.approx(one["predicted"], rel=0.02)
