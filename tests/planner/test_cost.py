"""The time of a step: worked by hand, by its monotonicity, and beside a published measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import RecipeError
from trainer.planner.cost import (
    COPY,
    HOP,
    HOST_MEMORY,
    HOST_NETWORK,
    KERNEL,
    LAUNCH,
    MEMORY,
    NETWORK,
    OTHER_CORES,
    TENSOR_CORES,
    step_time,
)
from trainer.planner.events import Kind, Work
from trainer.planner.gpus import GPU, gpu_named

A100 = gpu_named("a100-80gb")
T4 = gpu_named("t4")
MB = 10**6


def kernel(flops: int = 0, moved: int = 0, dtype: str = "bfloat16", phase: str = "forward", stream: int = 0) -> Work:
    return Work("mm", "compute", phase, stream, flops, moved, dtype)


def copy(moved: int, kind: Kind = "to_host", stream: int = 1, phase: str = "backward") -> Work:
    return Work("copy_", kind, phase, stream, 0, moved, "float32")


def collective(op: str, moved: int, stream: int = 2, phase: str = "backward") -> Work:
    return Work(op, "collective", phase, stream, 0, moved, "float32")


def kernels() -> st.SearchStrategy[Work]:
    dtypes = st.sampled_from(["float32", "bfloat16", "float16", "float64", "int64"])
    phases = st.sampled_from(["forward", "backward", "step"])
    return st.builds(kernel, st.integers(0, 10**13), st.integers(0, 10**10), dtypes, phases, st.integers(0, 2))


def transfers() -> st.SearchStrategy[Work]:
    kinds: st.SearchStrategy[Kind] = st.sampled_from(["to_host", "to_device"])
    return st.builds(copy, st.integers(0, 10**10), kinds, st.integers(0, 3), st.sampled_from(["forward", "backward"]))


def collectives() -> st.SearchStrategy[Work]:
    ops = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"])
    return st.builds(collective, ops, st.integers(0, 10**10), st.integers(-1, 3))


STEPS = st.lists(kernels() | transfers() | collectives(), max_size=12)


def test_a_step_by_hand() -> None:
    """Backward: 5 ms of arithmetic and 2 ms of memory traffic, beside which 4 ms of copies and 9 ms of collectives go.
    Then the host takes 3 ms to update, and 1 ms of copies waits for nobody."""
    link, bus = A100.link, A100.bus
    work = [
        kernel(int(0.005 * 312e12 * TENSOR_CORES), phase="backward"),
        kernel(moved=int(0.002 * 2039e9 * MEMORY), phase="backward"),
        copy(int(0.004 * bus)),
        collective("all_reduce", int(0.009 * link / 1.75)),  # 2 x 7 / 8 of the tensor goes over the link of each rank
        Work("host_optimizer", "compute", "step", -1, 0, int(0.003 * HOST_MEMORY), "float32"),
        copy(int(0.001 * bus), "to_device", stream=0, phase="step"),
    ]
    step = step_time(work, A100, 8)
    backward, update = step.phases["backward"], step.phases["step"]
    assert backward.compute_ms == pytest.approx(7 + 2e3 * KERNEL)
    assert backward.transfer_ms == pytest.approx(4 + 1e3 * COPY)
    assert backward.communication_ms == pytest.approx(9 + 3e3 * HOP)
    assert backward.total_ms == pytest.approx(backward.communication_ms)
    assert backward.exposed_ms == pytest.approx(2 + 3e3 * HOP - 2e3 * KERNEL)
    assert backward.overlapped_ms == pytest.approx(11 + 1e3 * COPY + 2e3 * KERNEL)
    assert update.host_ms == pytest.approx(3)
    assert update.total_ms == pytest.approx(4 + 1e3 * COPY)
    assert step.total_ms == pytest.approx(backward.total_ms + update.total_ms)
    assert step.launch_ms == pytest.approx(5e3 * LAUNCH)
    assert list(step.phases) == ["backward", "step"]


def test_nothing_takes_no_time() -> None:
    assert (step_time([], A100, 1).total_ms, step_time([], A100, 1).phases) == (0, {})


def test_small_kernels_are_bound_by_their_launch() -> None:
    step = step_time([kernel(moved=1000)] * 1000, A100, 1)
    assert step.total_ms == pytest.approx(1e6 * LAUNCH)
    assert step.total_ms == step.launch_ms > step.compute_ms > 1e6 * KERNEL


def test_a_view_costs_its_launch_only() -> None:
    step = step_time([kernel()], A100, 1)
    assert (step.compute_ms, step.total_ms) == (0, pytest.approx(1e3 * LAUNCH))


def test_a_dtype_without_units_computes_as_fp32() -> None:
    flops = 10**12
    expected = 1e3 * (KERNEL + flops / (8.1e12 * OTHER_CORES))
    assert step_time([kernel(flops, dtype="bfloat16")], T4, 1).compute_ms == pytest.approx(expected)
    assert step_time([kernel(flops, dtype="float32")], T4, 1).compute_ms == pytest.approx(expected)


def test_convolutions_in_fp32_use_tf32_and_matrix_products_do_not() -> None:
    def seconds(op: str, gpu: GPU) -> float:
        return step_time([Work(op, "compute", "forward", 0, 10**12, 0, "float32")], gpu, 1).compute_ms / 1e3

    assert seconds("mm", A100) - KERNEL == pytest.approx(1e12 / (19.5e12 * OTHER_CORES))
    assert seconds("convolution_backward", A100) - KERNEL == pytest.approx(1e12 / (156e12 * TENSOR_CORES))
    assert seconds("convolution", T4) == seconds("mm", T4)


def test_copies_both_ways_share_no_lane_and_copies_one_way_do() -> None:
    there, back = copy(100 * MB, "to_device", stream=1), copy(100 * MB, "to_host", stream=2)
    one = step_time([there], A100, 1).total_ms
    assert step_time([there, back], A100, 1).total_ms == pytest.approx(one)
    assert step_time([there, there._replace(stream=2)], A100, 1).total_ms == pytest.approx(2 * one)
    assert step_time([there, back._replace(stream=1)], A100, 1).total_ms == pytest.approx(2 * one)


def test_collectives_send_their_share_over_the_slowest_link() -> None:
    def seconds(op: str, ranks: int, gpu: GPU = A100) -> float:
        return step_time([collective(op, 8000 * MB)], gpu, ranks).communication_ms / 1e3

    assert seconds("all_gather", 8) == pytest.approx(7000 * MB / A100.link + HOP * 3)
    assert seconds("all_reduce", 8) == pytest.approx(14000 * MB / A100.link + HOP * 3)
    assert seconds("reduce_scatter", 16) == pytest.approx(7500 * MB / NETWORK + HOP * 4)
    assert seconds("all_reduce", 16, T4) == pytest.approx(15000 * MB / T4.bus + HOP * 4)  # slower than the network
    assert seconds("all_reduce", 1) == 0


def test_gradients_in_host_memory_are_reduced_by_the_host() -> None:
    """47 million parameters in fp32 on 2 ranks: 0.2 s were measured on gloo."""
    step = step_time([collective("all_reduce", 188 * MB, stream=-1)], A100, 2)
    assert step.host_ms == pytest.approx(188, rel=0.01)
    assert step.host_ms == pytest.approx(1e3 * (188 * MB / HOST_NETWORK + HOP))
    assert (step.communication_ms, step.exposed_ms) == (0, step.host_ms)


@given(STEPS, st.sampled_from(["compute", "bandwidth", "bus", "link"]))
def test_a_faster_gpu_is_never_slower(work: list[Work], what: str) -> None:
    faster = {dtype: 2 * rate for dtype, rate in A100.flops.items()}
    better = replace(A100, flops=faster) if what == "compute" else replace(A100, **{what: 2 * getattr(A100, what)})
    assert step_time(work, better, 8).total_ms <= step_time(work, A100, 8).total_ms


@given(STEPS, st.integers(0, 11), st.integers(1, 10**13), st.sampled_from(["flops", "bytes"]))
def test_more_to_do_is_never_faster(work: list[Work], at: int, extra: int, what: str) -> None:
    more = [
        item._replace(**{what: getattr(item, what) + extra}) if index == at else item for index, item in enumerate(work)
    ]
    assert step_time(more, A100, 8).total_ms >= step_time(work, A100, 8).total_ms


@given(STEPS)
def test_overlap_is_never_slower_than_one_after_the_other(work: list[Work]) -> None:
    serial = [item._replace(stream=min(item.stream, 0)) for item in work]
    overlapped, in_line = step_time(work, A100, 8), step_time(serial, A100, 8)
    assert overlapped.total_ms <= in_line.total_ms * (1 + 1e-9)
    assert overlapped.exposed_ms <= in_line.exposed_ms * (1 + 1e-9)


@given(STEPS)
def test_the_parts_make_the_whole(work: list[Work]) -> None:
    step = step_time(work, A100, 8)
    phases = step.phases.values()
    assert step.total_ms == pytest.approx(sum(phase.total_ms for phase in phases))
    assert step.total_ms == pytest.approx(
        sum(max(phase.compute_ms, phase.launch_ms) for phase in phases) + step.exposed_ms
    )
    for phase in phases:
        assert phase.exposed_ms >= -1e-9
        assert phase.overlapped_ms >= -1e-9 * phase.total_ms


@given(collectives(), st.integers(1, 255))
def test_more_ranks_never_communicate_less(item: Work, ranks: int) -> None:
    fewer, more = step_time([item], A100, ranks), step_time([item], A100, ranks + 1)
    assert more.communication_ms + more.host_ms >= fewer.communication_ms + fewer.host_ms


@pytest.mark.parametrize(("ranks", "per_node", "name"), [(0, 8, "ranks=0"), (2, 0, "gpus_per_node=0")])
def test_counts_of_zero_are_refused(ranks: int, per_node: int, name: str) -> None:
    with pytest.raises(RecipeError, match=f"{name} must be an integer of at least 1"):
        step_time([], A100, ranks, gpus_per_node=per_node)


def vit_large(batch: int, dtype: str) -> Iterator[Work]:
    """What a training step of ViT-L/16 at 224 px with AdamW does: 61.6 G multiplications and additions an image."""
    tokens, width, heads, size = 197, 1024, 16, {"bfloat16": 2, "float32": 4}[dtype]
    rows, unit = batch * tokens, batch * tokens * width * size
    weights = 12 * width**2
    for phase, times in (("forward", 1), ("backward", 2)):
        for _ in range(times):
            yield kernel(2 * batch * 196 * 768 * width, unit, dtype, phase)
            for _ in range(24):
                for inner, outer in ((1, 3), (1, 1), (1, 4), (4, 1)):  # qkv, projection, MLP
                    moved = (inner + outer) * unit + inner * outer * width**2 * size
                    yield kernel(2 * rows * inner * outer * width**2, moved, dtype, phase)
                yield kernel(4 * batch * heads * tokens**2 * (width // heads), 4 * unit, dtype, phase)
                # two norms, two residual sums, gelu on four times the width, biases and layouts of attention
                for reads_and_writes in (2, 2, 3, 3, 8, 6):
                    yield kernel(0, reads_and_writes * unit, dtype, phase)
    for _ in range(8):  # AdamW, foreach: about eight passes that read two tensors and write one
        yield kernel(0, 3 * 24 * weights * size, dtype, "step")


@pytest.mark.parametrize(("dtype", "minutes"), [("bfloat16", 2.88), ("float32", 17.9)])
def test_a_published_measurement_is_near(dtype: str, minutes: float) -> None:
    """ViT-L/16, batch 64, on one A100: minutes for 703 steps as published, data loading included."""
    work = list(vit_large(64, dtype))
    assert sum(item.flops for item in work) == pytest.approx(3 * 2 * 61.6e9 * 64, rel=0.02)
    estimate, measured = step_time(work, A100, 1).total_ms / 1e3, minutes * 60 / 703
    assert measured / 1.5 < estimate < measured * 1.5
