"""Tables over numbers of devices: what ranks send against closed forms, memory, and from where on what wins."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import pytest
from helpers.tiny import predict, target_of
from helpers.traced import BLOCKS, CLASSES, INNER, WIDTH, own_recipe, traced

from trainer.errors import RecipeError
from trainer.fakegpu.cost import StepCost, cost_of, traffic_of
from trainer.fakegpu.events import Trace
from trainer.fakegpu.network import Cluster, clusters, interconnects
from trainer.fakegpu.prediction import Prediction
from trainer.memory.plan import decide_plan
from trainer.planner import scale
from trainer.planner.knobs import apply_settings, strategies
from trainer.planner.scale import ScaleReport, ScaleRow, ScaleSearch
from trainer.recipe import Memory, Run

FLOAT = 4
NORM = 100  # bytes at most that the norm of the gradients and the losses add
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
    "ddp, offloaded": ({"strategy": "ddp", "cpu_offload": "optimizer"}, 4),
    "fsdp": (FSDP, 4),
    "fsdp, kept": (FSDP | {"reshard_after_forward": False}, 4),
    "fsdp, synced": (FSDP | {"sync_every_micro_step": True}, 4),
    "fsdp 16": ({"strategy": "fsdp"}, 16),
    "hsdp 16": ({"strategy": "fsdp", "replicas": 2}, 16),
}


@cache
def run_of(name: str) -> Trace:
    memory, ranks = CASES[name]
    return traced({name: (own_recipe(Memory(**memory), run=Run(evaluate=False)), ranks)})[name]


def traffic(name: str, nodes: int = 1) -> tuple[dict[str, float], float]:
    return traffic_of(run_of(name), Cluster(CASES[name][1], nodes))


def test_ddp_reduces_each_gradient_once_a_step_in_whole_buckets() -> None:
    """And not in each of its 4 micro-steps."""
    by_op, leaving = traffic("ddp")
    assert set(by_op) == {"all_reduce"}
    assert 2 * 3 / 4 * WEIGHTS <= by_op["all_reduce"] <= 2 * 3 / 4 * (WEIGHTS + NORM)
    assert leaving == 0
    reduced = [item.bytes for item in run_of("ddp").work if item.op == "all_reduce" and item.phase == "backward"]
    assert len(reduced) == 2  # the first is closed after 1 MiB, the other holds the rest of 2.1 MB
    assert sum(reduced) == WEIGHTS


@pytest.mark.slow
def test_gradients_in_host_memory_are_reduced_by_the_host() -> None:
    by_op, _ = traffic("ddp, offloaded")
    assert by_op["all_reduce"] == pytest.approx(2 * 3 / 4 * WEIGHTS, abs=1000)
    large = [item for item in run_of("ddp, offloaded").work if item.op == "all_reduce" and item.bytes > 1000]
    assert {item.stream for item in large} == {-1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gathers", "scatters"),
    [
        pytest.param("fsdp", 2 * 8, 1, marks=pytest.mark.slow),
        ("fsdp, kept", 8, 1),
        ("fsdp, synced", 2 * 8, 8),
    ],
)
def test_fsdp_gathers_in_every_pass_and_scatters_when_it_synchronises(name, gathers, scatters) -> None:
    """Of 64 samples each of 4 ranks has 16, in 8 micro-batches of 2."""
    by_op, _ = traffic(name)
    share = 3 / 4 * padded_bytes(4)
    assert by_op["all_gather"] == pytest.approx(gathers * share)
    assert by_op["reduce_scatter"] == pytest.approx(scatters * share)
    assert by_op["all_reduce"] <= NORM


@pytest.mark.slow
def test_hsdp_gathers_within_a_node_and_reduces_shards_between_nodes() -> None:
    by_op, leaving = traffic("hsdp 16", nodes=2)
    whole = padded_bytes(8)
    assert by_op["all_gather"] == pytest.approx(2 * 7 / 8 * whole)
    assert by_op["reduce_scatter"] == pytest.approx(7 / 8 * whole)
    assert by_op["all_reduce"] == pytest.approx(2 * 1 / 2 * whole / 8, abs=NORM)
    assert leaving == pytest.approx(whole, abs=NORM)  # each of 8 ranks sends its shard; 3 times 15/16 of all for FSDP
    assert traffic("fsdp 16", nodes=2)[1] == pytest.approx(3 * 15 / 16 * padded_bytes(16), abs=NORM)


@pytest.mark.slow
def test_replicas_win_over_a_slow_network_alone() -> None:
    for nodes, least, most in ((2, 0, 0.5), (1, 0.95, 10)):
        steps = [cost_of(run_of(name), TARGET, Cluster(16, nodes), SLOW).step_ms for name in ("hsdp 16", "fsdp 16")]
        assert least < steps[0] / steps[1] < most


# ------------------------------------------------------------------------------------------------------ whole tables


@pytest.fixture(scope="module")
def report() -> ScaleReport:
    recipe = own_recipe(Memory(micro_batch_size=8, strategy="fsdp"), run=Run(evaluate=False))
    return ScaleSearch(recipe, TARGET, clusters([16, 128], None, None), [SLOW, FAST]).run()


def test_sharding_divides_the_memory_that_does_not_grow_with_samples(report: ScaleReport) -> None:
    found = {(row.strategy, row.cluster.devices): row.prediction for row in report.rows if row.prediction is not None}
    assert set(found) == {("single", 1), ("fsdp", 16), ("fsdp*", 16), ("hsdp", 16)}
    constant = {key: one.allocated - one.per_sample_bytes for key, one in found.items()}
    assert constant["fsdp", 16] < constant["hsdp", 16] < 0.5 * constant["single", 1]  # hsdp divides by 8 only
    assert scale.refused(report) == [
        "128 devices: batch_size=64: 64 of 128 devices would have no samples: give --batch_size 128 or more"
    ]


def test_a_single_plan_and_the_table_say_the_same_of_the_same_step(report: ScaleReport) -> None:
    alone = report.rows[0]
    single = predict(report.recipe, alone.plan, TARGET)
    assert [single.cost, single.cost] == list(alone.prediction.costs.values())
    assert (single.allocated, single.reserved, single.traffic) == (
        alone.prediction.allocated,
        alone.prediction.reserved,
        {},
    )


@pytest.mark.slow
def test_a_plan_and_the_table_say_the_same_over_a_network(report: ScaleReport) -> None:
    row = next(row for row in report.rows if row.strategy == "hsdp")
    for network in (SLOW, FAST):
        target = dataclasses.replace(TARGET, joined_by=network.name)
        assert (
            predict(apply_settings(report.recipe, row.settings), row.plan, target, 2).cost
            == row.prediction.costs[network.name]
        )


def test_the_table_has_a_line_for_each_row_and_json_all_of_it(report: ScaleReport) -> None:
    lines = scale.table(report).splitlines()
    shown = ["1 1 single", "16 2 fsdp", "16 2 fsdp*", "16 2 hsdp"]
    assert [" ".join(line.split()[:3]) for line in lines[2:6]] == shown
    assert max(map(len, lines)) <= 120
    content = scale.to_json(report)
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
    retries = 0 if size * 1.03 <= 10e9 else None
    found = Prediction(size, size, 0, {}, {"activations": 5 * 10**8}, [], "", costs, {}, 0.0, retries=retries)
    return ScaleRow(Cluster(devices, nodes), strategy, {}, 64, None, found, int(10e9))


def report_of(*rows: ScaleRow) -> ScaleReport:
    return ScaleReport(own_recipe(), TARGET, [SLOW, FAST], list(rows), [], 0.0)


def test_the_verdict_says_from_where_on_what_wins_and_what_does_not_fit() -> None:
    rows = [row_of(1, "single", 30, 100, 100), row_of(8, "ddp", 30, 13, 13), row_of(8, "fsdp", 6, 14, 14)]
    rows += [row_of(16, "ddp", 31, 20, 7), row_of(16, "fsdp", 4, 60, 8, 2), row_of(16, "hsdp", 6, 25, 8.5, 2)]
    rows += [row_of(64, "fsdp", 2, 90, 5, 8), row_of(64, "hsdp", 6, 26, 3, 8)]
    assert scale.summary_text(report_of(*rows), "10gbe") == (
        "over 10gbe: fsdp is fastest on 8, hsdp from 16 devices on; single does not fit on 1 (it takes at least "
        "30.00 GB); ddp does not fit (it takes at least 30.00 GB); the shortest step is fsdp's on 8, 14.0 ms at 89 % "
        "efficiency, and more devices do not shorten it"
    )
    assert "fsdp is fastest on 8 to 16, hsdp on 64" in scale.summary_text(report_of(*rows), "8x-ib-ndr")
    assert scale.fastest(rows[1:2], "10gbe") is None
    equal = [row_of(8, "ddp", 1, 10.05, 1), row_of(8, "fsdp", 1, 10, 1)]
    assert scale.fastest(equal, "10gbe") is equal[0]


def test_what_fits_is_what_fits_in_a_single_plan_and_a_budget_that_is_cut_is_said(monkeypatch) -> None:
    asked = []

    def answer(*_: Any) -> dict[str, Any]:
        asked.append(_[-1])
        return dataclasses.asdict(row_of(1, "single", 90, 1, 1).prediction) | {"retries": 2}

    monkeypatch.setattr(scale, "predict_in_process", answer)
    monkeypatch.setattr(scale, "run_in_children", lambda calls: [(at, call()) for at, call in enumerate(calls)])
    recipe = own_recipe(Memory(micro_batch_size=8, budget="500GB"), run=Run(evaluate=False))
    found = ScaleSearch(recipe, TARGET, clusters([1], None, None), [SLOW]).run()
    (row,) = found.rows
    assert asked == [int(row.budget / 1.03)]
    written = scale.to_json(found)["rows"][0]
    assert (row.runs, written["fits"], written["retries"]) == (True, False, 2)
    assert " retries " in scale.table(found).splitlines()[2]
    assert "torch must release its cache" in scale.table(found)
    assert found.notes[0].startswith("memory.budget: 500GB was asked for, and ")


def sized(size: int, gigabytes: float, growing: float) -> ScaleRow:
    row = row_of(1, "single", gigabytes, 1, 1)
    plan = decide_plan(own_recipe(Memory(micro_batch_size=size)), 1)
    found = dataclasses.replace(row.prediction, categories={"activations": int(growing * 1e9)})
    return dataclasses.replace(row, plan=plan, prediction=found)


def test_a_micro_batch_is_guessed_from_what_grows() -> None:
    sizes = [64, 32, 16, 8, 4, 2, 1]
    small = sized(8, 3, 1)  # 10 GB leave room for 7.7 times what grows
    assert scale.guess([small], sizes) == 32
    assert scale.guess([small, sized(32, 9, 4)], sizes) is None  # it fits: no larger one is expected to
    assert scale.guess([small, sized(32, 12, 8)], sizes) == 16
    assert scale.guess([sized(8, 20, 16)], sizes) == 2
    assert scale.guess([sized(8, 20, 1)], sizes) == 1  # nothing is expected to fit: the smallest is tried
    assert scale.guess([sized(8, 20, 1), sized(1, 19, 0.1)], sizes) is None
    assert scale.size_of(scale.best_of([small, sized(32, 12, 8), sized(16, 6, 4)])) == 16
    assert scale.size_of(scale.best_of([sized(8, 20, 1), sized(1, 19, 0.1)])) == 1


def test_strategies_that_a_recipe_has_ruled_out_are_not_compared() -> None:
    cases = [
        (Memory(), Cluster(1, 1), "single"),
        (Memory(), Cluster(8, 1), "ddp fsdp fsdp*"),
        (Memory(), Cluster(4, 4), "ddp fsdp fsdp*"),  # a shard of one device is none
        (Memory(), Cluster(16, 2), "ddp fsdp fsdp* hsdp"),
        (Memory(strategy="ddp"), Cluster(16, 2), "ddp"),
        (Memory(cpu_offload="parameters"), Cluster(16, 2), "fsdp fsdp* hsdp"),
        (Memory(strategy="fsdp", reshard_after_forward=False), Cluster(16, 2), "fsdp* hsdp"),
        (Memory(strategy="fsdp", replicas=4), Cluster(16, 2), "hsdp"),
    ]
    for memory, cluster, names in cases:
        assert " ".join(strategies(memory, cluster)) == names
    assert strategies(Memory(), Cluster(16, 2))["hsdp"] == {"memory.strategy": "fsdp", "memory.replicas": 2}


def test_clusters_are_cut_in_nodes() -> None:
    assert clusters([2, 8, 64], None, None) == [Cluster(1, 1), Cluster(2, 1), Cluster(8, 1), Cluster(64, 8)]
    assert clusters([8, 1], None, 4) == [Cluster(1, 1), Cluster(8, 2)]
    assert clusters([8, 16], [2, 1], None) == [Cluster(1, 1), Cluster(8, 2), Cluster(16, 1)]
    assert clusters([8, 16], [4], None) == [Cluster(1, 1), Cluster(8, 4), Cluster(16, 4)]


def test_a_knob_at_auto_is_for_a_plan_of_one_number() -> None:
    recipe = own_recipe(Memory(activation_checkpointing="auto"))
    with pytest.raises(RecipeError, match=r"memory.activation_checkpointing=auto .* --devices 8"):
        ScaleSearch(recipe, TARGET, clusters([8], None, None), [SLOW])
