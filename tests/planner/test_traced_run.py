"""What a traced run asks of the memory: weights, gradients, optimizer state, activations, on one rank and on many."""

from __future__ import annotations

import math

import pytest
from helpers import traced
from helpers.traced import BATCH, BFLOAT16, BLOCKS, FLOAT, INNER, LONG, MATRIX, TOKENS, WEIGHTS, WIDTH, Own

from trainer.fakegpu.events import Trace
from trainer.recipe import Memory

RUNS = {
    "plain": (traced.own_recipe(), 1),
    "checkpointed": (traced.own_recipe(Memory(activation_checkpointing="full")), 1),
    "accumulated": (traced.own_recipe(accumulate=4), 1),
    "autocast": (traced.own_recipe(Memory(precision="bf16-mixed"), accumulate=2), 1),
    "activations on the host": (traced.own_recipe(Memory(activation_offload=True)), 1),
    "optimizer on the host": (traced.own_recipe(Memory(cpu_offload="optimizer", micro_batch_size=BATCH)), 1),
    "guessed": (traced.own_recipe(model=Own(asks=True)), 1),
    "ddp": (traced.own_recipe(), 2),
    "fsdp": (traced.own_recipe(Memory(strategy="fsdp")), 8),
}

PHASES = ["init", "forward", "backward", "step", "evaluation", "saving"]
STEP_COUNTERS = 64 * FLOAT  # at most what Adam's counters of steps take, where they are on the device


@pytest.fixture(scope="module")
def runs() -> dict[str, Trace]:
    return traced.traced(RUNS)


def test_blocks_are_allocated_once_and_freed_while_alive_and_marks_say_where_phases_begin(runs) -> None:
    for trace in runs.values():
        seen: set[int] = set()
        alive: set[int] = set()
        for event in trace.events:
            if event.bytes:
                assert event.bytes > 0
                assert event.op
                assert event.id not in seen
                seen.add(event.id)
                alive.add(event.id)
            else:
                alive.remove(event.id)
        assert trace.categories.keys() <= seen
        assert list(dict.fromkeys(phase for _, phase in trace.marks)) == PHASES
        starts = [index for index, _ in trace.marks]
        for (_, phase), start, end in zip(trace.marks, starts, [*starts[1:], len(trace.events)], strict=True):
            assert {event.phase for event in trace.events[start:end]} <= {phase}


def test_a_plain_run_has_what_arithmetic_says(runs: dict[str, Trace]) -> None:
    plain = runs["plain"]
    assert max(traced.held(plain, "params")) == FLOAT * WEIGHTS
    assert max(traced.held(plain, "gradients")) == FLOAT * WEIGHTS
    assert max(traced.held(plain, "optimizer")) == pytest.approx(2 * FLOAT * WEIGHTS, abs=STEP_COUNTERS)
    assert max(traced.when(plain, "backward", "batch")) == BATCH * (TOKENS * WIDTH * FLOAT + LONG)
    assert set(traced.when(plain, "forward", "gradients")) == {0}
    assert traced.when(plain, "evaluation", "batch") == [0]
    assert plain.guesses == 0


def test_forward_leaves_what_backward_needs(runs: dict[str, Trace]) -> None:
    """Of a block: the normalised input, what goes into GELU and comes out of it, and the mask of dropout."""
    tokens = BATCH * TOKENS
    of_a_block = tokens * (FLOAT * (2 * WIDTH + 2 * INNER) + WIDTH)
    at_backward = traced.when(runs["plain"], "backward", "activations")
    assert at_backward == [at_backward[0]] * traced.count(runs["plain"], "backward")
    assert at_backward[0] == pytest.approx(BLOCKS * of_a_block, rel=0.03)
    assert set(traced.when(runs["plain"], "step", "activations")) == {FLOAT}  # the loss, which is read with the norm


def test_checkpointing_leaves_the_inputs_of_blocks(runs: dict[str, Trace]) -> None:
    inputs = (BLOCKS - 1) * BATCH * TOKENS * WIDTH * FLOAT  # that of the first is the batch
    assert max(traced.when(runs["checkpointed"], "backward", "activations")) == pytest.approx(inputs, rel=0.03)
    assert traced.made(runs["checkpointed"], "backward", "gelu")
    assert not traced.made(runs["plain"], "backward", "gelu")


def test_accumulation_keeps_gradients_while_the_next_micro_batch_goes_forward(runs: dict[str, Trace]) -> None:
    accumulated = runs["accumulated"]
    assert max(traced.when(accumulated, "forward", "gradients")) == FLOAT * WEIGHTS
    batch, labels = BATCH // 4 * TOKENS * WIDTH * FLOAT, BATCH // 4 * LONG
    assert (
        max(traced.when(accumulated, "forward", "batch")) == labels
    )  # those of the micro-batch before are still there
    assert max(traced.when(accumulated, "backward", "batch")) == batch + labels
    assert accumulated.skipped_micro_steps == 2
    rehearsal = 1
    assert traced.count(accumulated, "forward") == 2 * (traced.count(accumulated, "step") + rehearsal)


def test_dropout_keeps_a_mask_of_a_byte_an_element(runs: dict[str, Trace]) -> None:
    elements = BATCH * TOKENS * WIDTH
    sizes = traced.made(runs["plain"], "forward", "native_dropout")
    forwards = BLOCKS * traced.count(runs["plain"], "forward")
    assert sizes.count(elements) == sizes.count(elements * FLOAT) == forwards == len(sizes) / 2
    assert not traced.made(runs["plain"], "evaluation", "native_dropout")


def test_autocast_casts_each_weight_once_a_forward_and_forgets_it(runs: dict[str, Trace]) -> None:
    autocast, of_a_matrix = runs["autocast"], MATRIX * BFLOAT16
    casts = traced.made(autocast, "forward", "_to_copy")
    assert casts.count(of_a_matrix) == 2 * BLOCKS * traced.count(autocast, "forward")
    assert traced.made(autocast, "evaluation", "_to_copy").count(of_a_matrix) == 2 * BLOCKS
    assert not traced.made(runs["plain"], "forward", "_to_copy").count(of_a_matrix)
    assert max(traced.held(autocast, "gradients")) == FLOAT * WEIGHTS

    alive: dict[int, str] = {}
    most = {"forward": 0, "evaluation": 0}
    for event in autocast.events:
        if event.op == "_to_copy" and event.bytes == of_a_matrix:
            alive[event.id] = event.phase
            most[event.phase] = max(most[event.phase], len(alive))
        elif not event.bytes:
            alive.pop(event.id, None)
        assert not alive or event.phase not in ("step", "saving")
    assert most == {"forward": 2 * BLOCKS, "evaluation": 2 * BLOCKS}  # all are kept until they are forgotten


def test_activations_leave_on_a_stream_of_their_own(runs: dict[str, Trace]) -> None:
    offloaded, plain = runs["activations on the host"], runs["plain"]
    copies = [work for work in offloaded.work if work.kind in ("to_host", "to_device") and work.bytes >= 2**20]
    assert {work.kind for work in copies if work.stream != 0} == {"to_host", "to_device"}
    assert {work.stream for work in plain.work} == {0}
    assert {event.stream for event in offloaded.events} == {0}  # memory is that of the computing stream all the same
    assert (
        max(traced.when(offloaded, "backward", "activations")) < max(traced.when(plain, "backward", "activations")) / 2
    )
    assert offloaded.host_bytes > plain.host_bytes + max(traced.when(plain, "backward", "activations")) / 2


def test_an_optimizer_on_the_host_leaves_the_device_alone(runs: dict[str, Trace]) -> None:
    """The host has master weights and gradients, each of so small a model in one page-locked piece, and moments."""
    offloaded, whole = runs["optimizer on the host"], FLOAT * WEIGHTS
    page_locked = 2 * 2 ** math.ceil(math.log2(whole))
    assert max(traced.held(offloaded, "optimizer")) == 0
    assert set(traced.when(offloaded, "forward", "gradients")) == {0}
    assert max(traced.held(offloaded, "params")) <= FLOAT * WEIGHTS
    copies = 3 * whole  # of masters and moments, which are updated ahead
    assert offloaded.host_bytes == pytest.approx(page_locked + 2 * whole + copies, rel=0.001)
    assert 28 <= offloaded.host_bytes / WEIGHTS <= 36
    assert runs["plain"].host_bytes == pytest.approx(whole, rel=0.001)  # which weights are made in


def test_guesses_are_counted(runs: dict[str, Trace]) -> None:
    in_evaluation = 1
    assert runs["guessed"].guesses == traced.count(runs["guessed"], "forward") + in_evaluation
    assert [name for name, trace in runs.items() if trace.guesses] == ["guessed"]


def test_ddp_has_buckets_of_gradients_all_the_time(runs: dict[str, Trace]) -> None:
    ddp = runs["ddp"]
    assert max(traced.held(ddp, "params")) == FLOAT * WEIGHTS
    after_the_first_step = traced.when(ddp, "forward", "gradients")[-1]
    assert after_the_first_step == FLOAT * WEIGHTS
    assert max(traced.when(ddp, "backward", "batch")) == BATCH // 2 * (TOKENS * WIDTH * FLOAT + LONG)
    reduced = [work.bytes for work in ddp.work if work.op == "all_reduce" and work.phase == "backward"]
    assert sum(reduced) == FLOAT * WEIGHTS


def test_fsdp_divides_by_the_ranks(runs: dict[str, Trace]) -> None:
    fsdp, ranks = runs["fsdp"], 8
    share = FLOAT * WEIGHTS / ranks
    assert min(traced.when(fsdp, "forward", "params")) == pytest.approx(share, rel=0.12)
    assert max(traced.held(fsdp, "optimizer")) == pytest.approx(2 * share, rel=0.12)
    assert max(traced.when(fsdp, "step", "gradients")) == pytest.approx(share, rel=0.12)
    assert {work.op for work in fsdp.work if work.kind == "collective"} >= {"all_gather", "reduce_scatter"}
    assert max(traced.when(fsdp, "backward", "batch")) == BATCH // ranks * (TOKENS * WIDTH * FLOAT + LONG)
