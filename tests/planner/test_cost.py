"""The time of a step: worked by hand, by its monotonicity, and beside a published measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.planner.cost import TAKES_WEIGHTS, Clocks, StepCost, step_cost
from trainer.planner.events import Kind, Trace, Work
from trainer.planner.gpus import GPU, gpu_named
from trainer.planner.network import Cluster, interconnects
from trainer.planner.predict import cost_of
from trainer.planner.target import Target

A100 = gpu_named("a100-80gb")
T4 = gpu_named("t4")
MB = 10**6
SLACK = 0.25  # milliseconds of twenty launches
MICROSECONDS = 0.1  # milliseconds of a few launches, kernels and hops beside what a case is about


def cost(work: list[Work], gpu: GPU = A100, ranks: int = 8) -> StepCost:
    """Of a step of ranks in one node."""
    (network,) = interconnects("ib-hdr", gpu)
    return cost_of(Trace(work=work), Target(gpu), Cluster(ranks, 1), network)


def kernel(flops: int = 0, moved: int = 0, dtype: str = "bfloat16", phase: str = "forward", stream: int = 0) -> Work:
    return Work("mm", "compute", phase, stream, flops, moved, dtype)


def copy(moved: int, kind: Kind = "to_host", stream: int = 1, phase: str = "backward") -> Work:
    return Work("copy_", kind, phase, stream, 0, moved, "float32")


def collective(op: str, moved: int, stream: int = 2, phase: str = "backward") -> Work:
    return Work(op, "collective", phase, stream, 0, moved, "float32")


def busy(milliseconds: float, phase: str) -> Work:
    """A kernel that takes so long."""
    return kernel(moved=round(milliseconds * 1_631_200_000), phase=phase, dtype="float32")


PHASES, MANY = st.sampled_from(["forward", "backward", "step"]), st.integers(0, 10**10)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "float64", "int64"])
KERNELS = st.builds(kernel, st.integers(0, 10**13), MANY, DTYPES, PHASES, st.integers(0, 2))
COPIES = st.builds(copy, MANY, st.sampled_from(["to_host", "to_device"]), st.integers(0, 3), PHASES)
OPS = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"])
COLLECTIVES = st.builds(collective, OPS, MANY, st.integers(-1, 3))
STEPS = st.lists(KERNELS | COPIES | COLLECTIVES, max_size=12)


def test_a_step_by_hand() -> None:
    """At 171.6 TFLOP/s, 1.63 TB/s, 25.2 GB/s over the bus, 240 GB/s over NVLink and 40 GB/s in host memory.

    Forward takes 10 ms, and backward 10. From its end on, 10 ms of copies go beside 14 ms of a reduction. Then the host
    takes 10 ms to update, and 1 ms of copies waits for nobody.
    """
    work = [
        kernel(1_716 * 10**9),
        kernel(moved=16_312 * MB, phase="backward"),
        copy(252 * MB),
        collective("all_reduce", 1920 * MB),  # 2 x 7 / 8 of the tensor goes over the link of each rank
        Work("host_optimizer", "compute", "step", -1, 0, 400 * MB, "float32"),
        copy(25_200_000, "to_device", stream=0, phase="step"),
    ]
    found = cost(work)
    by_hand = {"step": 10 + 10 + 14 + 10 + 1, "alone": 10 + 10 + 10 + 10 + 1, "update": 10 + 1, "exposed": 4}
    by_hand |= {"compute": 10 + 10, "launch": 0.04, "transfer": 10 + 1, "communication": 14, "host": 10}
    for name, milliseconds in by_hand.items():
        assert getattr(found, f"{name}_ms") == pytest.approx(milliseconds, abs=MICROSECONDS), name


def test_small_kernels_are_bound_by_their_launch_and_views_cost_nothing_else() -> None:
    found, view = cost([kernel(moved=1000)] * 1000), cost([kernel()])
    assert found.compute_ms < found.launch_ms < found.step_ms < 1.01 * found.launch_ms
    assert view.compute_ms == 0 < view.launch_ms == view.step_ms
    assert cost([]) == StepCost(0, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("gpu", "op", "dtype", "milliseconds"),
    [
        (A100, "mm", "float32", 60.3),  # 1 TFLOP at 19.5 or 156 TFLOP/s, of which 85 or 55 % are reached
        (A100, "convolution_backward", "float32", 11.7),  # in tf32
        (T4, "convolution", "float32", 145.2),  # at 8.1 TFLOP/s
        (T4, "mm", "bfloat16", 145.2),  # for which it has no units
    ],
)
def test_rates_of_dtypes(gpu: GPU, op: str, dtype: str, milliseconds: float) -> None:
    found = cost([Work(op, "compute", "forward", 0, 10**12, 0, dtype)], gpu)
    assert found.compute_ms == pytest.approx(milliseconds, abs=MICROSECONDS)


def test_copies_both_ways_share_no_lane_and_copies_one_way_do() -> None:
    there, back = copy(252 * MB, "to_device", stream=1), copy(252 * MB, "to_host", stream=2)
    assert cost([there]).step_ms == pytest.approx(10, abs=MICROSECONDS)
    assert cost([there, back]).step_ms == pytest.approx(10, abs=MICROSECONDS)
    assert cost([there, there._replace(stream=2)]).step_ms == pytest.approx(20, abs=MICROSECONDS)
    # A phase waits for the weights that were copied for it.
    streamed = [copy(252 * MB, "to_device", phase="forward"), kernel(phase="forward")]
    assert cost([*streamed, busy(5, "backward")]).step_ms == pytest.approx(15, abs=MICROSECONDS)


def test_gradients_in_host_memory_are_reduced_by_the_host() -> None:
    """47 million parameters in fp32 on 2 ranks: 0.2 s were measured on gloo."""
    found = cost([collective("all_reduce", 188 * MB, stream=-1)], ranks=2)
    assert found.step_ms == found.exposed_ms == found.communication_ms == pytest.approx(188, rel=0.01)


@given(STEPS, st.sampled_from(["compute", "bandwidth", "bus", "link"]))
def test_a_faster_gpu_is_never_slower(work: list[Work], what: str) -> None:
    faster = {dtype: 2 * rate for dtype, rate in A100.flops.items()}
    better = replace(A100, flops=faster) if what == "compute" else replace(A100, **{what: 2 * getattr(A100, what)})
    assert cost(work, better).step_ms <= cost(work).step_ms


@given(STEPS, st.integers(0, 11), st.integers(1, 10**13), st.sampled_from(["flops", "bytes"]))
def test_more_to_do_is_never_faster(work: list[Work], at: int, extra: int, what: str) -> None:
    more = [item._replace(**{what: getattr(item, what) + extra * (n == at)}) for n, item in enumerate(work)]
    assert cost(more).step_ms >= cost(work).step_ms


@given(STEPS)
def test_overlap_is_never_slower_than_one_after_the_other(work: list[Work]) -> None:
    serial = [item._replace(stream=min(item.stream, 0)) for item in work]
    assert cost(work).step_ms <= cost(serial).step_ms * (1 + 1e-9)


@given(STEPS)
def test_the_parts_fit_in_the_whole(work: list[Work]) -> None:
    found, about = cost(work), 1 + 1e-9
    assert max(found.compute_ms, found.launch_ms, found.host_ms, found.update_ms) <= found.step_ms * about
    assert found.alone_ms <= found.step_ms <= (found.alone_ms + found.communication_ms) * about
    assert found.step_ms <= about * (
        found.compute_ms + found.launch_ms + found.transfer_ms + found.communication_ms + found.host_ms
    )


def vit_large(batch: int, dtype: str) -> Iterator[Work]:
    """What a training step of ViT-L/16 at 224 px with AdamW does: 61.6 G multiplications and additions an image."""
    tokens, width, size = 197, 1024, {"bfloat16": 2, "float32": 4}[dtype]
    rows, unit, square = batch * tokens, batch * tokens * width * size, width**2
    for phase in ("forward", "backward", "backward"):
        yield kernel(2 * batch * 196 * 768 * width, unit, dtype, phase)
        for _ in range(24):
            for inner, outer in ((1, 3), (1, 1), (1, 4), (4, 1)):  # qkv, projection, MLP
                moved = (inner + outer) * unit + inner * outer * square * size
                yield kernel(2 * rows * inner * outer * square, moved, dtype, phase)
            yield kernel(4 * rows * tokens * width, 4 * unit, dtype, phase)
            # two norms, two residual sums, gelu on four times the width, biases and layouts of attention
            for reads_and_writes in (2, 2, 3, 3, 8, 6):
                yield kernel(0, reads_and_writes * unit, dtype, phase)
    for _ in range(8):  # AdamW, foreach: about eight passes that read two tensors and write one
        yield kernel(0, 3 * 24 * 12 * square * size, dtype, "step")


@pytest.mark.parametrize(("dtype", "minutes"), [("bfloat16", 2.88), ("float32", 17.9)])
def test_a_published_measurement_is_near(dtype: str, minutes: float) -> None:
    """ViT-L/16, batch 64, on one A100: minutes for 703 steps as published, data loading included."""
    work = list(vit_large(64, dtype))
    assert sum(item.flops for item in work) == pytest.approx(3 * 2 * 61.6e9 * 64, rel=0.02)
    assert 1 / 1.5 < cost(work, A100, 1).step_ms / (1e3 * minutes * 60 / 703) < 1.5


# ------------------------------------------------------------------------------------------------------------ overlap


def taken(work: list[Work], each_ms: float) -> float:
    """Milliseconds of work whose collectives take ``each_ms``, without the few microseconds of launches."""
    return 1e3 * Clocks(A100, lambda item: ("link", 1e-3 * each_ms)).run(work)


def test_weights_are_gathered_one_block_ahead() -> None:
    work = []
    for _ in range(4):
        gather, take = collective("all_gather", 1, phase="forward"), kernel()._replace(op=TAKES_WEIGHTS)
        work += [gather, take, busy(10, "forward")]
    assert taken(work, 6) == pytest.approx(6 + 4 * 10, abs=SLACK)  # the first has nothing to hide behind
    assert taken(work, 15) == pytest.approx(4 * 15 + 10, abs=SLACK)


def test_buckets_are_reduced_beside_the_backward_that_has_made_them() -> None:
    """Gradients of micro-steps are reduced in the last, and only that one's backward hides it."""
    last = [busy(10, "backward"), collective("all_reduce", 1, stream=0)] * 2
    work = [busy(10, "forward"), busy(20, "backward"), busy(10, "forward"), *last, busy(1, "step")]
    assert taken(work, 5) == pytest.approx(60 + 5 + 1, abs=SLACK)
    assert taken(work, 30) == pytest.approx(50 + 2 * 30 + 1, abs=SLACK)


def test_shards_are_reduced_beside_the_blocks_before_them_and_the_norm_is_waited_for() -> None:
    work = [busy(10, "backward"), collective("reduce_scatter", 1, stream=3)] * 3
    assert taken([*work, busy(2, "step")], 4) == pytest.approx(30 + 4 + 2, abs=SLACK)
    work = [busy(1, "step"), collective("all_reduce", 1, stream=0, phase="step"), busy(1, "step")]
    assert taken(work, 5) == pytest.approx(7, abs=SLACK)


def test_micro_steps_that_were_not_traced_are_like_the_one_in_the_middle() -> None:
    micro = [busy(3, "forward"), busy(7, "backward")]
    last = [*micro, collective("all_reduce", 1, stream=0), busy(1, "step")]
    trace = Trace(work=[*micro, *micro, *last], micro_steps=[0, 2, 4, 7], skipped_micro_steps=97)
    cost = step_cost(trace, A100, lambda item: ("link", 0.004))
    assert cost.step_ms == pytest.approx(100 * 10 + 4 + 1, rel=0.01)
    assert cost.exposed_ms == pytest.approx(4, abs=SLACK)
    assert cost.communication_ms == pytest.approx(4)
