"""Tables over numbers of devices: what ranks send against closed forms, memory, and from where on what wins."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from helpers.tiny import recipe_of, target_of
from traced import BLOCKS, CLASSES, INNER, WIDTH, own_recipe, traced

from trainer.errors import RecipeError
from trainer.memory.plan import decide_plan
from trainer.planner.cost import StepCost
from trainer.planner.events import Trace
from trainer.planner.network import Cluster, clusters, interconnects, strategies
from trainer.planner.predict import Prediction, cost_of, predict, traffic_of
from trainer.planner.scale import Scale, ScaleReport, ScaleRow, best_of, guess, size_of
from trainer.planner.scale_text import fastest, refused, table, to_json, verdict
from trainer.recipe import Memory

FLOAT = 4
NORM = 100
"""Bytes at most that the norm of the gradients and the losses add."""

TARGET = target_of()
SLOW, FAST = interconnects("10gbe,8x-ib-ndr", TARGET.gpu)


def padded_bytes(ranks: int) -> int:
    """Of the model of ``traced`` under FSDP, which cuts every tensor by its first dimension, in equal pieces."""
    block = [(INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,), (WIDTH,), (WIDTH,)]
    shapes = block * BLOCKS + [(CLASSES, WIDTH), (CLASSES,)]
    return FLOAT * sum(math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:]) for shape in shapes)


WEIGHTS = padded_bytes(1)
FSDP: dict[str, Any] = {"strategy": "fsdp", "micro_batch_size": 2}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "ddp": ({"strategy": "ddp", "micro_batch_size": 4}, 4),
    "fsdp": (FSDP, 4),
    "fsdp, kept": (FSDP | {"reshard_after_forward": False}, 4),
    "fsdp, synced": (FSDP | {"sync_every_micro_step": True}, 4),
    "fsdp 16": ({"strategy": "fsdp"}, 16),
    "hsdp 16": ({"strategy": "fsdp", "replicas": 2}, 16),
    "ddp, offloaded": ({"strategy": "ddp", "cpu_offload": "optimizer"}, 4),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, Trace]:
    return traced({name: (own_recipe(Memory(**memory)), ranks) for name, (memory, ranks) in CASES.items()})


def traffic(runs: dict[str, Trace], name: str, nodes: int = 1) -> tuple[dict[str, float], float]:
    return traffic_of(runs[name], Cluster(CASES[name][1], nodes))


def test_ddp_reduces_each_gradient_once_a_step(runs: dict[str, Trace]) -> None:
    """And not in each of its 4 micro-steps."""
    by_op, leaving = traffic(runs, "ddp")
    assert set(by_op) == {"all_reduce"}
    assert 2 * 3 / 4 * WEIGHTS <= by_op["all_reduce"] <= 2 * 3 / 4 * (WEIGHTS + NORM)
    assert leaving == 0


def test_gradients_in_host_memory_are_reduced_by_the_host(runs: dict[str, Trace]) -> None:
    by_op, _ = traffic(runs, "ddp, offloaded")
    assert by_op["all_reduce"] == pytest.approx(2 * 3 / 4 * WEIGHTS, abs=1000)
    large = [item for item in runs["ddp, offloaded"].work if item.op == "all_reduce" and item.bytes > 1000]
    assert {item.stream for item in large} == {-1}


def test_ddp_reduces_whole_buckets(runs: dict[str, Trace]) -> None:
    reduced = [item.bytes for item in runs["ddp"].work if item.op == "all_reduce" and item.phase == "backward"]
    assert len(reduced) == 2  # the first is closed after 1 MiB, the other holds the rest of 2.1 MB
    assert sum(reduced) == WEIGHTS


@pytest.mark.parametrize(
    ("name", "gathers", "scatters"),
    [
        ("fsdp", 2 * 8, 1),
        ("fsdp, kept", 8, 1),
        ("fsdp, synced", 2 * 8, 8),
    ],
)
def test_fsdp_gathers_in_every_pass_and_scatters_when_it_synchronises(
    runs: dict[str, Trace], name: str, gathers: int, scatters: int
) -> None:
    """Of 64 samples each of 4 ranks has 16, in 8 micro-batches of 2."""
    by_op, _ = traffic(runs, name)
    share = 3 / 4 * padded_bytes(4)
    assert by_op["all_gather"] == pytest.approx(gathers * share)
    assert by_op["reduce_scatter"] == pytest.approx(scatters * share)
    assert by_op["all_reduce"] <= NORM


def test_hsdp_gathers_within_a_node_and_reduces_shards_between_nodes(runs: dict[str, Trace]) -> None:
    by_op, leaving = traffic(runs, "hsdp 16", nodes=2)
    whole = padded_bytes(8)
    assert by_op["all_gather"] == pytest.approx(2 * 7 / 8 * whole)
    assert by_op["reduce_scatter"] == pytest.approx(7 / 8 * whole)
    assert by_op["all_reduce"] == pytest.approx(2 * 1 / 2 * whole / 8, abs=NORM)
    assert leaving == pytest.approx(whole, abs=NORM)  # each of 8 ranks sends its shard; 3 times 15/16 of all for FSDP
    assert traffic(runs, "fsdp 16", nodes=2)[1] == pytest.approx(3 * 15 / 16 * padded_bytes(16), abs=NORM)


def test_time_grows_with_the_latency_and_falls_with_the_bandwidth(runs: dict[str, Trace]) -> None:
    names = "10gbe,25gbe,100gbe,ib-hdr,8x-ib-hdr"
    for name in ("fsdp 16", "hsdp 16"):
        costs = [cost_of(runs[name], TARGET, Cluster(16, 2), fabric) for fabric in interconnects(names, TARGET.gpu)]
        steps = [cost.step_ms for cost in costs]
        assert steps == sorted(steps, reverse=True)
        assert len({cost.alone_ms for cost in costs}) == 1
        assert all(0 <= cost.exposed_ms <= cost.communication_ms for cost in costs)


def test_replicas_win_over_a_slow_network_alone(runs: dict[str, Trace]) -> None:
    slow = {name: cost_of(runs[name], TARGET, Cluster(16, 2), SLOW).step_ms for name in ("fsdp 16", "hsdp 16")}
    assert slow["hsdp 16"] < 0.5 * slow["fsdp 16"]
    one_node = {name: cost_of(runs[name], TARGET, Cluster(16, 1), SLOW).step_ms for name in ("fsdp 16", "hsdp 16")}
    assert one_node["hsdp 16"] > 0.95 * one_node["fsdp 16"]


# ------------------------------------------------------------------------------------------------------ whole tables


@pytest.fixture(scope="module")
def report() -> ScaleReport:
    recipe = own_recipe(Memory(micro_batch_size=8, strategy="fsdp"))
    return Scale(recipe, TARGET, clusters([16, 128], None, None), [SLOW, FAST]).run()


def test_sharding_divides_the_memory_that_does_not_grow_with_samples(report: ScaleReport) -> None:
    found = {(row.strategy, row.cluster.devices): row.found for row in report.rows if row.found is not None}
    assert set(found) == {("single", 1), ("fsdp", 16), ("fsdp*", 16), ("hsdp", 16)}
    constant = {key: one.allocated - one.growing for key, one in found.items()}
    assert constant["fsdp", 16] < constant["hsdp", 16] < 0.5 * constant["single", 1]  # hsdp divides by 8 only


def test_a_single_plan_and_the_table_say_the_same_of_the_same_step(report: ScaleReport) -> None:
    alone = report.rows[0]
    assert alone.plan is not None
    assert alone.found is not None
    single = predict(own_recipe(Memory(micro_batch_size=8)), alone.plan, TARGET)
    assert [single.cost, single.cost] == list(alone.found.costs.values())
    assert (single.allocated, single.reserved, single.traffic) == (alone.found.allocated, alone.found.reserved, {})


def test_devices_without_samples_are_refused_with_the_batch_that_it_takes(report: ScaleReport) -> None:
    assert refused(report) == [
        "128 devices: batch_size=64: 64 of 128 devices would have no samples; it takes --batch_size 128 or more"
    ]


def test_the_table_has_a_line_for_each_row_and_json_all_of_it(report: ScaleReport) -> None:
    lines = table(report).splitlines()
    assert [line.split()[:3] for line in lines[2:6]] == [
        ["1", "1", "single"],
        ["16", "2", "fsdp"],
        ["16", "2", "fsdp*"],
        ["16", "2", "hsdp"],
    ]
    assert max(map(len, lines)) <= 120
    content = to_json(report)
    rows = content["rows"]
    assert [row["reason"] != "" for row in rows] == [False] * 4 + [True]
    assert rows[3]["flags"] == "--memory.strategy fsdp --memory.replicas 2"
    assert rows[0]["over"]["10gbe"]["efficiency"] == 1
    assert rows[0]["over"]["10gbe"]["exposed_ms"] == 0
    assert set(rows[1]["sent_gb"]) == {"all_gather", "reduce_scatter", "all_reduce"}
    assert content["interconnects"]["8x-ib-ndr"]["between_gb_s"] == pytest.approx(320)
    assert set(content["verdicts"]) == {"10gbe", "8x-ib-ndr"}
    assert content["verdicts"]["10gbe"].startswith("over 10gbe: hsdp is fastest on 16; the shortest step is ")


# ----------------------------------------------------------------------------------------------------- without traces


def row_of(devices: int, strategy: str, gigabytes: float, slow: float, fast: float, nodes: int = 1) -> ScaleRow:
    costs = {name: StepCost(step, 1, 0, 1, 0, 0, 1, 0) for name, step in (("10gbe", slow), ("8x-ib-ndr", fast))}
    size = int(gigabytes * 1e9)
    found = Prediction(size, size, 0, {}, {"activations": int(0.5e9)}, [], "forward", costs, {}, 0.0)
    return ScaleRow(Cluster(devices, nodes), strategy, {}, 64, None, found, int(10e9))


def report_of(*rows: ScaleRow) -> ScaleReport:
    return ScaleReport(recipe_of("vit"), TARGET, [SLOW, FAST], list(rows), [], 0.0)


def test_the_verdict_says_from_where_on_what_wins_and_what_does_not_fit() -> None:
    rows = [
        row_of(1, "single", 30, 100, 100),
        row_of(8, "ddp", 30, 13, 13),
        row_of(8, "fsdp", 6, 14, 14),
        row_of(16, "ddp", 31, 20, 7),
        row_of(16, "fsdp", 4, 60, 8, 2),
        row_of(16, "hsdp", 6, 25, 8.5, 2),
        row_of(64, "fsdp", 2, 90, 5, 8),
        row_of(64, "hsdp", 6, 26, 3, 8),
    ]
    assert verdict(report_of(*rows), "10gbe") == (
        "over 10gbe: fsdp is fastest on 8, hsdp from 16 devices on; single does not fit on 1 (it takes at least "
        "30.00 GB); ddp does not fit (it takes at least 30.00 GB); the shortest step is fsdp's on 8, 14.0 ms at 89 % "
        "efficiency, and more devices do not shorten it"
    )
    assert "fsdp is fastest on 8 to 16, hsdp on 64" in verdict(report_of(*rows), "8x-ib-ndr")
    assert fastest(rows[1:2], "10gbe") is None


def test_of_equal_strategies_the_first_is_taken() -> None:
    rows = [row_of(8, "ddp", 1, 10.05, 1), row_of(8, "fsdp", 1, 10, 1)]
    assert fastest(rows, "10gbe") is rows[0]


def sized(size: int, gigabytes: float, growing: float) -> ScaleRow:
    row = row_of(1, "single", gigabytes, 1, 1)
    assert row.found is not None
    plan = decide_plan(recipe_of("vit", Memory(micro_batch_size=size), batch_size=64), 1)
    found = dataclasses.replace(row.found, categories={"activations": int(growing * 1e9)})
    return dataclasses.replace(row, plan=plan, found=found)


def test_a_micro_batch_is_guessed_from_what_grows() -> None:
    sizes = [64, 32, 16, 8, 4, 2, 1]
    small = sized(8, 3, 1)  # 10 GB leave room for 7.7 times what grows
    assert guess([small], sizes) == 32
    assert guess([small, sized(32, 9, 4)], sizes) is None  # it fits: no larger one is expected to
    assert guess([small, sized(32, 12, 8)], sizes) == 16
    assert guess([sized(8, 20, 16)], sizes) == 2
    assert guess([sized(8, 20, 1)], sizes) == 1  # nothing is expected to fit: the smallest is tried
    assert guess([sized(8, 20, 1), sized(1, 19, 0.1)], sizes) is None
    assert size_of(best_of([small, sized(32, 12, 8), sized(16, 6, 4)])) == 16
    assert size_of(best_of([sized(8, 20, 1), sized(1, 19, 0.1)])) == 1


def test_strategies_that_a_recipe_has_ruled_out_are_not_compared() -> None:
    two_nodes = Cluster(16, 2)
    assert list(strategies(Memory(), Cluster(1, 1))) == ["single"]
    assert list(strategies(Memory(), Cluster(8, 1))) == ["ddp", "fsdp", "fsdp*"]
    assert list(strategies(Memory(), two_nodes)) == ["ddp", "fsdp", "fsdp*", "hsdp"]
    assert strategies(Memory(), two_nodes)["hsdp"] == {"memory.strategy": "fsdp", "memory.replicas": 2}
    assert list(strategies(Memory(strategy="ddp"), two_nodes)) == ["ddp"]
    assert list(strategies(Memory(cpu_offload="parameters"), two_nodes)) == ["fsdp", "fsdp*", "hsdp"]
    assert list(strategies(Memory(strategy="fsdp", reshard_after_forward=False), two_nodes)) == ["fsdp*", "hsdp"]
    assert list(strategies(Memory(strategy="fsdp", replicas=4), two_nodes)) == ["hsdp"]
    assert "hsdp" not in strategies(Memory(), Cluster(4, 4))  # a shard of one device is none


def test_clusters_are_cut_in_nodes() -> None:
    assert clusters([2, 8, 64], None, None) == [Cluster(1, 1), Cluster(2, 1), Cluster(8, 1), Cluster(64, 8)]
    assert clusters([8, 1], None, 4) == [Cluster(1, 1), Cluster(8, 2)]
    assert clusters([8, 16], [2, 1], None) == [Cluster(1, 1), Cluster(8, 2), Cluster(16, 1)]
    assert clusters([8, 16], [4], None) == [Cluster(1, 1), Cluster(8, 4), Cluster(16, 4)]


def test_a_knob_at_auto_is_for_a_plan_of_one_number() -> None:
    recipe = recipe_of("vit", Memory(activation_checkpointing="auto"))
    with pytest.raises(RecipeError, match=r"memory.activation_checkpointing=auto .* --devices 8"):
        Scale(recipe, TARGET, clusters([8], None, None), [SLOW])
