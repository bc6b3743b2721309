"""Which samples make a step, and how a batch is cut."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract import Data, Model
from trainer.engine.cut import Cut, cut_at, cut_batch, decide_cut, padded, padding_share, tokens_of
from trainer.engine.memory_rehearsal import longest_window
from trainer.engine.order import batch_indices, derive_seed, permutation
from trainer.engine.window import Windows
from trainer.errors import RecipeError
from trainer.recipe import Memory, Recipe
from trainer.values import ShuffleGroups

group_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(st.integers(0, 2**62), st.integers(0, 9), group_sizes, st.none() | st.integers(1, 60), st.integers(1, 40))
def test_an_epoch_takes_every_sample_once_and_only_the_last_batch_is_short(seed, epoch, sizes, mixed, batch_size):
    size, groups = sum(sizes), mixed and ShuffleGroups(sizes, mixed)
    steps = range(-(-size // batch_size))
    batches = [batch_indices(seed, epoch, step, size, batch_size, groups) for step in steps]
    assert sorted(index for batch in batches for index in batch) == list(range(size))
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}
    assert 1 <= len(batches[-1]) <= batch_size


def test_epochs_and_seeds_have_their_own_order():
    orders = {tuple(permutation(seed, epoch, 50).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_order_never_changes():
    # Resuming a run after an upgrade relies on these very numbers.
    assert permutation(0, 0, 10).tolist() == [7, 8, 1, 4, 9, 6, 3, 0, 5, 2]
    assert derive_seed(0, 1, 2, 3) == 8479124504904169328
    assert batch_indices(0, 0, 1, 12, 4, ShuffleGroups((3, 2, 4, 3), 5)) == [4, 11, 6, 8]


def test_a_stretch_is_mixed_and_needs_no_other_groups():
    groups = ShuffleGroups([10] * 40, 80)
    stretches = [batch_indices(1, 0, step, 400, 80, groups) for step in range(5)]
    assert [len({index // 10 for index in batch}) for batch in stretches] == [8] * 5
    batches = [batch_indices(1, 0, step, 400, 16, groups) for step in range(25)]
    assert min(len({index // 10 for index in batch}) for batch in batches) > 4
    assert batches != [batch_indices(1, 1, step, 400, 16, groups) for step in range(25)]
    assert batches != [batch_indices(2, 0, step, 400, 16, groups) for step in range(25)]


def windows_of(size, cut, rank=0, world_size=1, **options):
    """Windows whose micro-batches are their requests."""
    common = {"seed": 3, "fetch": iter, "weigh": lambda request: {"loss": float(len(request.indices))}}
    return Windows(size, lambda epoch: cut, rank=rank, world_size=world_size, **common, **options)


@pytest.mark.parametrize("micro_batch_size", [16, 4])
def test_a_rank_reads_a_share_of_the_groups_and_all_ranks_every_sample(micro_batch_size):
    read, samples = [set() for _ in range(4)], Counter()
    for rank in range(4):
        windows = windows_of(25 * 64, Cut(64, micro_batch_size, 1), rank, 4, groups=ShuffleGroups([25] * 64, 400))
        for micro in (micro for window in windows.epoch(0) for micro in window):
            samples.update(micro.indices)
            read[rank] |= {index // 25 for index in micro.indices}
    assert samples == Counter(range(25 * 64))
    assert all(len(groups) < 0.4 * 64 for groups in read)


@pytest.mark.parametrize(("groups", "cut"), [(None, Cut(16, 2, 1)), (ShuffleGroups([10] * 12, 40), Cut(24, 3, 1))])
def test_a_micro_batch_has_its_samples_and_its_dropout_on_any_number_of_ranks(groups, cut):
    def micro_batches(world_size):
        windows = [windows_of(120, cut, rank, world_size, groups=groups, augmented=True) for rank in range(world_size)]
        return sorted((m.seed, m.batch) for w in windows for window in w.epoch(1) for m in window if not m.is_empty)

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


@given(lengths_of, st.integers(1, 20), st.integers(1, 4))
def test_without_padding_micro_batches_and_ranks_have_about_as_many_tokens(lengths, micro_batch_size, world_size):
    cut = Cut(len(lengths), micro_batch_size, 1)
    by_length, dealt = (cut_batch(range(len(lengths)), cut, world_size, lengths, packs) for packs in (False, True))
    assert Counter(chain(*dealt)) == Counter(range(len(lengths)))
    assert len(dealt) == len(by_length)
    assert max(map(len, dealt)) <= max(map(len, by_length))
    tokens = [tokens_of(piece, lengths, packs=True) for piece in dealt]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] <= max(tokens_of(piece, lengths, packs=True) for piece in by_length)
    assert min(map(len, dealt)) > 0 or len(lengths) < len(dealt)
    shares = [sum(tokens[rank::world_size]) for rank in range(world_size)]
    assert max(shares) - min(shares) <= max(lengths)


@given(lengths_of, st.integers(1, 20), st.integers(1, 5), st.integers(1, 600))
def test_packs_hold_every_sample_once_and_no_more_than_their_budget(lengths, micro_batch_size, world_size, tokens):
    cut = Cut(len(lengths), micro_batch_size, 1, tokens)
    packs = cut_batch(range(len(lengths)), cut, world_size, lengths, packs=True)
    assert Counter(chain(*packs)) == Counter(range(len(lengths)))
    assert len(packs) % world_size == 0
    assert max(map(len, packs)) <= micro_batch_size
    totals = [tokens_of(pack, lengths, packs=True) for pack in packs]
    assert all(total <= tokens for total, pack in zip(totals, packs, strict=True) if len(pack) > 1)
    by_rank = [totals[rank::world_size] for rank in range(world_size)]
    for first, second in pairwise(zip(*by_rank, strict=True)):  # computed at once: of about as many tokens
        assert min(first) >= max(second)
    shares = [*map(sum, by_rank)]
    assert max(shares) - min(shares) <= max(totals)
    assert packs == cut_batch(range(len(lengths)), cut, world_size, tuple(lengths), packs=True)


@given(st.integers(2, 400), st.lists(st.lists(st.floats(0, 1), max_size=9), min_size=1, max_size=12), st.integers(1, 4))
def test_packs_are_about_as_few_as_can_be(budget, borders, world_size):
    """Of budgets that are cut in pieces, the fewest packs are known: best-fit decreasing needs 11/9 of them, and 6/9
    (Dósa 2007)."""
    ends = [sorted({0, budget, *(int(border * budget) for border in drawn)}) for drawn in borders]
    lengths = [end - start for those in ends for start, end in pairwise(those)]
    cut = Cut(len(lengths), len(lengths), 1, budget)
    packs = cut_batch(range(len(lengths)), cut, world_size, lengths, packs=True)
    most = (11 * len(borders) + 6) // 9
    assert len(packs) <= most + -most % world_size
    if world_size == 1 and len(packs) == len(borders):
        assert {tokens_of(pack, lengths, packs=True) for pack in packs} == {budget}


def test_packs_of_a_rank_have_their_share_of_the_tokens():
    """Conversations, of which there are few packs a rank: as they were filled, one had 1.17 times the mean."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(64).log_normal_(5.86, 0.9, generator=generator).long().clamp(8, 2048).tolist()
    packs = cut_batch(range(64), Cut(64, 64, 1, 4096), 4, lengths, packs=True)
    shares = [sum(tokens_of(pack, lengths, packs=True) for pack in packs[rank::4]) for rank in range(4)]
    assert max(shares) < 1.01 * sum(shares) / 4
    assert len(packs) == 8  # for 7.7 times the budget


def test_the_fullest_micro_batch_of_a_run_is_found(monkeypatch):
    lengths = torch.randint(1, 300, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    windows = windows_of(50, Cut(16, 4, 2), world_size=2, lengths=lengths, packs=True)
    steps = [(epoch, step) for epoch in range(3) for step in range(windows.steps(epoch))]
    most = max(tokens_of(piece, lengths, packs=True) for at in steps for piece in windows.pieces(*at))
    assert most == tokens_of(longest_window(windows, 3).micro_batches[0].indices, lengths, packs=True)
    monkeypatch.setattr("trainer.engine.memory_rehearsal.MAX_SEARCHED_SAMPLES", 100)
    assert sum(sorted(lengths)[-4:]) == tokens_of(
        longest_window(windows, 3).micro_batches[0].indices, lengths, packs=True
    )


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
    recipe = Recipe(model=Model(), data=Data(), accumulate={0: 8, 4: 2}, memory=Memory(micro_batch_size=1))
    assert [cut_at(recipe, 1, epoch).accumulate for epoch in range(6)] == [8, 8, 8, 8, 2, 2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((64, 16, None, 1), (64, 16, 4)),
        ((64, 16, None, 2), (64, 16, 2)),
        ((64, None, 4, 1), (64, 16, 4)),
        ((64, None, None, 1), (64, 64, 1)),
        ((64, 1000, None, 2), (64, 32, 1)),
        ((None, 8, 2, 3), (48, 8, 2)),
        ((64, 16, 4, 1), (64, 16, 4)),
        ((10, 3, 4, 1), (10, 3, 4)),
    ],
)
def test_what_is_left_open_is_derived(given, expected):
    cut = decide_cut(*given)
    assert (cut.batch_size, cut.micro_batch_size, cut.accumulate) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((64, 16, 8, 1), "batch_size=64 .*accumulate=8 .*micro_batch_size=16 .* 1 rank.* make 128"),
        ((10, None, 8, 1), "batch_size=10 .*accumulate=8 micro-batches: those of 2 samples make 5; use accumulate 5"),
        ((None, 8, None, 1), "batch_size is not set: set it, or set both accumulate and memory.micro_batch_size"),
    ],
)
def test_a_contradiction_names_the_numbers(given, message):
    with pytest.raises(RecipeError, match=message):
        decide_cut(*given)


def test_windows_follow_the_schedule_and_a_later_start_is_the_same_run():
    windows = windows_of(20, None)
    windows.cut_at = lambda epoch: Cut(6, 2, 3) if epoch == 0 else Cut(12, 2, 6)
    whole = list(windows.epoch(0))
    assert [len(window) for window in whole] == [3, 3, 3, 1]
    assert [window.samples for window in whole] == [6, 6, 6, 2]
    assert [window.weights["loss"] for window in whole] == [6.0, 6.0, 6.0, 2.0]
    assert [micro.is_last for micro in whole[0]] == [False, False, True]
    assert len(list(windows.epoch(1))) == 2
    resumed = list(windows.epoch(0, first_step=2))
    assert [(m.batch, m.seed) for w in resumed for m in w] == [(m.batch, m.seed) for w in whole[2:] for m in w]
