"""Collectives over links, by hand; and what overlaps in a step."""

from __future__ import annotations

import math

import pytest

from trainer.errors import RecipeError
from trainer.planner.cost import KERNEL, LAUNCH, MEMORY, TAKES_WEIGHTS, Timeline, step_cost
from trainer.planner.events import Trace, Work
from trainer.planner.gpus import ACHIEVED, gpu_named
from trainer.planner.network import BASE, NVLINK_HOP, RDMA_HOP, Group, group_of, interconnects, sent

A100 = gpu_named("a100-80gb")
(HDR,) = interconnects("ib-hdr", A100)
GB = 10**9


def test_groups_are_found_from_their_distance() -> None:
    assert group_of(64, 1, 64, 8) == Group(64, 8)
    assert group_of(8, 1, 64, 8) == Group(8, 1)  # the shards of a node
    assert group_of(8, 8, 64, 8) == Group(8, 8, beside=8)  # their replicas
    assert group_of(32, 1, 64, 8) == Group(32, 4)  # two replicas of four nodes each
    assert group_of(2, 32, 64, 8) == Group(2, 2, beside=8)
    assert group_of(16, 4, 64, 8) == Group(16, 8, beside=4)  # two shards of a node, each with 16 replicas
    assert group_of(4, 1, 4, 4) == Group(4, 4)


def test_a_ring_by_hand() -> None:
    within = HDR.seconds("all_gather", 8 * GB, Group(8, 1))
    assert within == pytest.approx(BASE + 7 * NVLINK_HOP + 7 / (300 * ACHIEVED))
    between = HDR.seconds("reduce_scatter", 16 * GB, Group(16, 2))
    assert between == pytest.approx(BASE + 14 * NVLINK_HOP + RDMA_HOP + 15 / (25 * ACHIEVED))
    reduced = HDR.seconds("all_reduce", 16 * GB, Group(16, 2))
    assert reduced == pytest.approx(BASE + 28 * NVLINK_HOP + 2 * RDMA_HOP + 30 / (25 * ACHIEVED))
    assert HDR.seconds("all_reduce", GB, Group(1, 1)) == 0


def test_replicas_share_the_network_of_their_node() -> None:
    """Eight shards of 1 GB are reduced at once: as long as the 8 GB of which they are the eighths."""
    shards = HDR.seconds("all_reduce", GB, Group(8, 8, beside=8)) - BASE
    whole = HDR.seconds("all_reduce", 8 * GB, Group(8, 8)) - BASE
    assert shards == pytest.approx(whole)
    alone = HDR.seconds("all_reduce", GB, Group(8, 8)) - BASE
    assert shards - 14 * RDMA_HOP == pytest.approx(8 * (alone - 14 * RDMA_HOP))


def test_small_tensors_of_many_ranks_are_reduced_by_a_tree() -> None:
    tree = HDR.seconds("all_reduce", 8, Group(512, 64))
    assert tree == pytest.approx(BASE + 2 * (7 * NVLINK_HOP + math.log2(64) * RDMA_HOP), rel=1e-3)
    assert tree < 0.1 * HDR.seconds("all_gather", 8, Group(512, 64))


def test_what_is_sent_is_what_a_ring_sends() -> None:
    assert sent("all_gather", 100, Group(4, 1)) == 75
    assert sent("all_reduce", 100, Group(4, 1)) == 150
    assert sent("reduce_scatter", 100, Group(1, 1)) == 0


def test_names_of_interconnects() -> None:
    hdr, gbe = interconnects("8x-ib-hdr, pcie-4+25GbE", A100)
    assert (hdr.name, gbe.name) == ("8x-ib-hdr", "pcie-4+25gbe")
    assert hdr.between.bandwidth == pytest.approx(8 * 25e9 * ACHIEVED)
    assert hdr.within.bandwidth == A100.link
    assert gbe.within.bandwidth == pytest.approx(31.5e9 * ACHIEVED)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("100gb", ["--interconnect=100gb", "did you mean 100gbe?", "ib-ndr", "between nodes"]),
        ("nvlink+100gbe", ["--interconnect=nvlink+100gbe", "'nvlink'", "within a node", "nvlink-4"]),
        ("100gbe,100gbe", ["--interconnect=100gbe,100gbe", "twice"]),
        ("0x-100gbe", ["--interconnect=0x-100gbe"]),
        ("", ["--interconnect="]),
    ],
)
def test_names_that_are_not_known(text: str, parts: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        interconnects(text, A100)
    assert [part for part in parts if part not in str(error.value)] == []


# ------------------------------------------------------------------------------------------------------------ overlap


def kernel(milliseconds: float, phase: str, op: str = "mm") -> Work:
    return Work(op, "compute", phase, 0, 0, round(1e-3 * milliseconds * A100.bandwidth * MEMORY), "float32")


def collective(op: str, phase: str, stream: int) -> Work:
    return Work(op, "collective", phase, stream, 0, 1, "float32")


def taken(work: list[Work], each_ms: float) -> float:
    """Milliseconds of work whose collectives take ``each_ms``, without the few microseconds of launches."""
    return 1e3 * Timeline(A100, lambda item: ("link", 1e-3 * each_ms)).run(work)


SLACK = 1e3 * 20 * (KERNEL + LAUNCH)


def test_weights_are_gathered_one_block_ahead() -> None:
    work = []
    for _ in range(4):
        gather, take = collective("all_gather", "forward", 2), Work(TAKES_WEIGHTS, "compute", "forward", 0, 0, 0, "")
        work += [gather, take, kernel(10, "forward")]
    assert taken(work, 6) == pytest.approx(6 + 4 * 10, abs=SLACK)  # the first has nothing to hide behind
    assert taken(work, 15) == pytest.approx(4 * 15 + 10, abs=SLACK)


def test_buckets_are_reduced_beside_the_backward_that_has_made_them() -> None:
    """Gradients of micro-steps are reduced in the last, and only that one's backward hides it."""
    last = [kernel(10, "backward"), collective("all_reduce", "backward", 0)] * 2
    work = [kernel(10, "forward"), kernel(20, "backward"), kernel(10, "forward"), *last, kernel(1, "step")]
    assert taken(work, 5) == pytest.approx(60 + 5 + 1, abs=SLACK)
    assert taken(work, 30) == pytest.approx(50 + 2 * 30 + 1, abs=SLACK)


def test_shards_are_reduced_beside_the_blocks_before_them() -> None:
    work = [kernel(10, "backward"), collective("reduce_scatter", "backward", 3)] * 3
    assert taken([*work, kernel(2, "step")], 4) == pytest.approx(30 + 4 + 2, abs=SLACK)


def test_the_norm_is_waited_for() -> None:
    work = [kernel(1, "step"), collective("all_reduce", "step", 0), kernel(1, "step")]
    assert taken(work, 5) == pytest.approx(7, abs=SLACK)


def test_micro_steps_that_were_not_traced_are_like_the_one_in_the_middle() -> None:
    micro = [kernel(3, "forward"), kernel(7, "backward")]
    last = [*micro, collective("all_reduce", "backward", 0), kernel(1, "step")]
    trace = Trace(work=[*micro, *micro, *last], micro_steps=[0, 2, 4, 7], skipped_micro_steps=97)
    cost = step_cost(trace, A100, lambda item: ("link", 0.004))
    assert cost.step_ms == pytest.approx(100 * 10 + 4 + 1, rel=0.01)
    assert cost.exposed_ms == pytest.approx(4, abs=SLACK)
    assert cost.communication_ms == pytest.approx(4)
