"""Which samples make a step, and how a batch is cut."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.engine.order import batch_indices, derive_seed, permutation, steps_in_epoch
from trainer.engine.window import Cut, Windows, at_epoch, cut_batch, decide_cut, padded, padding_share
from trainer.errors import RecipeError
from trainer.values import Groups


@given(st.integers(0, 2**62), st.integers(0, 50), st.integers(1, 200), st.integers(1, 40))
def test_an_epoch_takes_every_sample_once_and_only_the_last_batch_is_short(seed, epoch, size, batch_size):
    steps = [batch_indices(seed, epoch, step, size, batch_size) for step in range(steps_in_epoch(size, batch_size))]
    assert sorted(index for step in steps for index in step) == list(range(size))
    assert {len(step) for step in steps[:-1]} <= {batch_size}
    assert 1 <= len(steps[-1]) <= batch_size


def test_epochs_and_seeds_have_their_own_order():
    orders = {tuple(permutation(seed, epoch, 50).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_order_never_changes():
    # Resuming a run after an upgrade relies on these very numbers.
    assert permutation(0, 0, 10).tolist() == PERMUTATION
    assert derive_seed(0, 1, 2, 3) == SEED


PERMUTATION = [7, 8, 1, 4, 9, 6, 3, 0, 5, 2]
SEED = 8479124504904169328

group_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(st.integers(0, 2**62), st.integers(0, 9), group_sizes, st.integers(1, 60), st.integers(1, 40))
def test_with_groups_an_epoch_takes_every_sample_once(seed, epoch, sizes, mixed, batch_size):
    size = sum(sizes)
    batches = [
        batch_indices(seed, epoch, step, size, batch_size, Groups(sizes, mixed))
        for step in range(steps_in_epoch(size, batch_size))
    ]
    assert sorted(index for batch in batches for index in batch) == list(range(size))
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}


def group_of(sizes):
    return [number for number, size in enumerate(sizes) for _ in range(size)]


def test_a_stretch_is_mixed_and_needs_no_other_groups():
    sizes = [10] * 40
    of = group_of(sizes)
    groups = Groups(sizes, 80)
    stretches = [batch_indices(1, 0, step, 400, 80, groups) for step in range(5)]
    assert [len({of[index] for index in batch}) for batch in stretches] == [8] * 5
    batches = [batch_indices(1, 0, step, 400, 16, groups) for step in range(25)]
    assert min(len({of[index] for index in batch}) for batch in batches) > 4
    assert batches != [batch_indices(1, 1, step, 400, 16, groups) for step in range(25)]
    assert batches != [batch_indices(2, 0, step, 400, 16, groups) for step in range(25)]


def test_the_order_with_groups_never_changes():
    assert batch_indices(0, 0, 1, 12, 4, Groups((3, 2, 4, 3), 5)) == GROUPED


GROUPED = [4, 11, 6, 8]


def grouped_windows(sizes, mixed, cut, rank, world_size):
    """Windows whose micro-batches are their samples."""
    return Windows(
        sum(sizes), lambda epoch: cut, lambda requests: ({"labels": r.indices} for r in requests),
        lambda batch: {"loss": 1.0}, seed=0, rank=rank, world_size=world_size, groups=Groups(sizes, mixed),
    )  # fmt: skip


@pytest.mark.parametrize("micro_batch_size", [16, 4])
def test_a_rank_reads_a_share_of_the_groups_and_all_ranks_every_sample(micro_batch_size):
    sizes, world_size = [25] * 64, 4
    of = group_of(sizes)
    read = [set() for _ in range(world_size)]
    samples = Counter()
    for rank in range(world_size):
        for window in grouped_windows(sizes, 400, Cut(64, micro_batch_size, 1), rank, world_size).epoch(0):
            for micro in window:
                samples.update(micro.batch["labels"])
                read[rank] |= {of[index] for index in micro.batch["labels"]}
    assert samples == Counter(range(sum(sizes)))
    assert all(len(groups) < 0.4 * len(sizes) for groups in read)


def test_with_groups_a_micro_batch_has_its_dropout_on_any_number_of_ranks():
    def micro_batches(world_size):
        windows = [grouped_windows([10] * 12, 40, Cut(24, 3, 1), rank, world_size) for rank in range(world_size)]
        return sorted((m.seed, m.indices) for w in windows for window in w.epoch(1) for m in window if not m.is_empty)

    assert micro_batches(1) == micro_batches(2) == micro_batches(4)


lengths_of = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(lengths_of, st.integers(1, 20), st.integers(1, 5), st.none() | st.integers(1, 600), st.booleans())
def test_a_cut_loses_nothing_and_keeps_its_limits(lengths, micro_batch_size, world_size, tokens, by_length):
    cut = Cut(len(lengths), micro_batch_size, 1, tokens)
    pieces = cut_batch(range(len(lengths)), cut, world_size, lengths if by_length else None)
    assert Counter(index for piece in pieces for index in piece) == Counter(range(len(lengths)))
    assert len(pieces) % world_size == 0
    assert max(map(len, pieces)) <= micro_batch_size
    if by_length and tokens:
        totals = [len(piece) * padded(max(lengths[index] for index in piece)) for piece in pieces if len(piece) > 1]
        assert all(total <= tokens for total in totals)
    if not tokens:
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
        assert min(map(len, pieces)) > 0 or len(lengths) < len(pieces) <= len(lengths) + world_size - 1


@given(lengths_of, st.integers(1, 20), st.integers(1, 4))
def test_cut_by_length_the_peak_comes_first(lengths, micro_batch_size, world_size):
    pieces = cut_batch(range(len(lengths)), Cut(len(lengths), micro_batch_size, 1), world_size, lengths)
    longest = [max((lengths[index] for index in piece), default=0) for piece in pieces]
    assert longest == sorted(longest, reverse=True)


def test_cutting_by_length_pads_a_fraction_of_what_the_drawn_order_pads():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 512, (256,), generator=generator).tolist()
    cut = Cut(256, 8, 32)
    in_order, by_length = (cut_batch(range(256), cut, 1, those) for those in (None, lengths))
    assert padding_share(in_order, lengths) > 0.35
    assert padding_share(by_length, lengths) < 0.05


def test_more_ranks_than_samples_leaves_empty_micro_batches_at_the_end():
    assert cut_batch([7, 8], Cut(4, 4, 1), world_size=3) == [[7], [8], []]


def test_a_schedule_holds_from_the_epoch_it_names():
    assert [at_epoch({0: 8, 4: 2}, epoch) for epoch in range(6)] == [8, 8, 8, 8, 2, 2]
    assert at_epoch(3, 7) == 3
    assert at_epoch(None, 7) is None


@pytest.mark.parametrize(
    ("batch", "micro", "accumulate", "ranks", "expected"),
    [
        (64, 16, None, 1, (64, 16, 4)),
        (64, 16, None, 2, (64, 16, 2)),
        (64, None, 4, 1, (64, 16, 4)),
        (64, None, None, 1, (64, 64, 1)),
        (64, 1000, None, 2, (64, 32, 1)),
        (None, 8, 8, 1, (64, 8, 8)),
        (None, 8, 2, 3, (48, 8, 2)),
        (64, 16, 4, 1, (64, 16, 4)),
        (10, 3, 4, 1, (10, 3, 4)),
    ],
)
def test_what_is_left_open_is_derived(batch, micro, accumulate, ranks, expected):
    cut = decide_cut(batch, micro, accumulate, ranks)
    assert (cut.batch_size, cut.micro_batch_size, cut.accumulate) == expected


def test_a_contradiction_names_all_three_numbers():
    with pytest.raises(RecipeError, match=r"batch_size=64 .*accumulate=8 .*micro_batch_size=16 .* 1 rank.* make 128"):
        decide_cut(64, 16, 8, 1)


def test_windows_follow_the_schedule_and_a_later_start_is_the_same_run():
    def windows():
        return Windows(
            size=20,
            cut_at=lambda epoch: Cut(6, 2, 3) if epoch == 0 else Cut(12, 2, 6),
            fetch=lambda requests: (list(request) for request in requests),
            weigh=lambda batch: {"loss": float(len(batch[0]))},
            seed=3,
        )

    whole = list(windows().epoch(0))
    assert [len(window) for window in whole] == [3, 3, 3, 1]
    assert [window.samples for window in whole] == [6, 6, 6, 2]
    assert [window.weights["loss"] for window in whole] == [6.0, 6.0, 6.0, 2.0]
    assert [micro.is_last for micro in whole[0]] == [False, False, True]
    assert len(list(windows().epoch(1))) == 2
    resumed = list(windows().epoch(0, first_step=2))
    assert [(m.batch, m.seed) for w in resumed for m in w] == [(m.batch, m.seed) for w in whole[2:] for m in w]


def test_ranks_share_the_micro_batches_and_their_seeds():
    def windows(rank, world_size):
        return Windows(
            size=16,
            cut_at=lambda epoch: Cut(16, 2, 8 // world_size),
            fetch=lambda requests: (list(request) for request in requests),
            weigh=lambda batch: {"loss": float(len(batch[0]))},
            seed=0,
            rank=rank,
            world_size=world_size,
        )

    def micro_batches(rank, world_size):
        return {tuple(m.batch[0]): (m.seed, m.batch[1]) for w in windows(rank, world_size).epoch(0) for m in w}

    assert micro_batches(0, 2) | micro_batches(1, 2) == micro_batches(0, 1)
