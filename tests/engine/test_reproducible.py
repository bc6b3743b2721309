"""Sums and norms that do not depend on who adds, and micro-batches that do not depend on the number of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.engine.cut import Cut, cut_batch
from trainer.engine.deterministic import PartialSums, reproducible_norm, tree_sum
from trainer.engine.window import Windows


def node(leaves: list[Tensor | None]) -> Tensor | None:
    """The definition: the sum over leaves 0 to 2^h, of which both halves are such sums."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    left, right = node(leaves[:half]), node(leaves[half:])
    return left + right if left is not None and right is not None else left if right is None else right


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 2**31))
def test_the_sum_has_the_bits_of_its_definition_however_many_ranks_share_it(present, ranks, seed):
    values = torch.randn(len(present), 3, generator=torch.Generator().manual_seed(seed)) * 1e3 ** torch.randn(3)
    values[:, 2] = -0.0
    leaves = [value if there else None for value, there in zip(values, present, strict=True)]
    sums = PartialSums()
    for start in range(0, len(leaves), ranks):
        row = [None if leaf is None else [leaf.clone()] for leaf in leaves[start : start + ranks]]
        sums.add(tree_sum(row + [None] * (ranks - len(row))))
        assert len(sums.sums) <= (start // ranks + 1).bit_length()
    total, expected = sums.total(), node(leaves)
    assert (total is None) == (expected is None)
    assert total is None or bits(total[0]) == bits(expected)


def bits(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


@given(st.integers(1, 5000), st.integers(0, 2**31), st.sampled_from([1e-40, 1e-12, 1.0, 1e12, 1e37]))
def test_the_norm_does_not_depend_on_order_nor_on_parts(elements, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator) * scale * 10 ** torch.randn(elements, generator=generator)
    shuffled = values[torch.randperm(elements, generator=generator)]
    cut = int(torch.randint(0, elements + 1, (), generator=generator))
    norm = norm_of([values])
    assert norm == norm_of([shuffled[:cut], shuffled[cut:].reshape(1, -1)])
    exact = math.sqrt(math.fsum(value**2 for value in values.double().tolist()))
    assert norm == pytest.approx(exact, rel=1e-14)


def norm_of(parts: list[Tensor]) -> float:
    return float(reproducible_norm(parts, sum(part.numel() for part in parts), torch.device("cpu"), reduce=False))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_of_something_not_finite_is_infinite(bad):
    assert norm_of([torch.tensor([1.0, bad]), torch.tensor([2.0])]) == math.inf


def test_norms_of_nothing_of_zeros_and_of_the_smallest_and_largest_numbers():
    assert norm_of([]) == norm_of([torch.zeros(3), torch.zeros(0)]) == 0.0
    for scale in (1e-310, 1.0, 1e300):
        values = torch.tensor([3.0, 4.0], dtype=torch.float64) * scale
        before = values.tolist()
        assert norm_of([values]) == pytest.approx(5 * scale, rel=1e-9)
        assert values.tolist() == before


# ------------------------------------------------------------------------------------------------------------ windows


@given(st.integers(1, 40), st.integers(1, 9), st.none() | st.integers(8, 200), st.booleans())
def test_the_micro_batches_do_not_depend_on_the_ranks(samples, size, tokens, by_length):
    lengths = [7 * sample % 37 + 1 for sample in range(samples)] if by_length else None
    alone = cut_batch(range(samples), Cut(samples, size, 1, tokens), 1, lengths)
    for ranks in (1, 2, 4, 8):
        pieces = cut_batch(range(samples), Cut(samples, size, 1, tokens, rank_independent=True), ranks, lengths)
        assert pieces == alone + [[]] * (-len(alone) % ranks)


def test_weights_that_are_fractions_add_up_to_the_same_bits():
    tenths = [{"loss": 0.1 * 3**number} for number in range(7)]
    expected = math.fsum(weight["loss"] for weight in tenths).hex(), [1] * 7
    for world_size in (1, 2, 4):
        tables: list[list[float]] = []
        for rank in range(world_size):  # the sums over the ranks, in two rounds: each writes, then one reads
            next(windows_of(tenths, rank, world_size, lambda row, tables=tables: tables.append(row) or row).epoch(0))
        total = [math.fsum(column) for column in zip(*tables, strict=True)]
        window = next(windows_of(tenths, 0, world_size, lambda row, total=total: total).epoch(0))
        assert (window.weights["loss"].hex(), list(window.sizes)[:7]) == expected
        assert not any(window.sizes[7:])


def windows_of(weights: list[dict[str, float]], rank: int, world_size: int, reduce: Any) -> Windows:
    """One batch of micro-batches of one sample, of such weights."""
    return Windows(
        size=len(weights),
        cut_at=lambda epoch: Cut(len(weights), 1, -(-len(weights) // world_size), rank_independent=True),
        fetch=lambda requests: (request.indices[0] for request in requests),
        weigh=lambda sample: weights[sample],
        seed=0,
        rank=rank,
        world_size=world_size,
        reduce=reduce,
    )
