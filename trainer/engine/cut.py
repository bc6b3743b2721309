"""Divide a batch into micro-batches and ranks: pure functions of counts and lengths, without torch.

A step has the same gradient for every cut of its batch. The cut only decides speed and memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from trainer.contract import PADDING_MULTIPLE
from trainer.engine.packing import deal, pack_tokens
from trainer.errors import RecipeError
from trainer.recipe import Memory, Recipe


@dataclass(frozen=True)
class Cut:
    """The sizes into which the batches of an epoch are cut."""

    batch_size: int  # samples per step over all ranks
    micro_batch_size: int  # max samples of a micro-batch
    accumulate: int  # micro-batches per step and rank in a full batch; micro_batch_tokens may make more
    micro_batch_tokens: int | None = None  # max tokens of a micro-batch, including padding
    rank_independent: bool = False  # whether micro-batches are the same on any number of ranks, plus empty ones

    def halved(self, world_size: int) -> Cut | None:
        """Return the same batches in micro-batches of half the size, or ``None`` if these hold one sample already."""
        if self.micro_batch_size == 1:
            return None
        size = -(-self.micro_batch_size // 2)
        tokens = self.micro_batch_tokens and -(-self.micro_batch_tokens // 2)
        return Cut(self.batch_size, size, -(-self.batch_size // (world_size * size)), tokens, self.rank_independent)


def decide_cut(
    batch_size: int | None,
    micro_batch_size: int | None,
    accumulate: int | None,
    world_size: int,
    micro_batch_tokens: int | None = None,
    any_ranks: bool = False,
) -> Cut:
    """Return the cut. Batch size, micro-batch size and accumulation are derived from each other if ``None``."""
    if batch_size is None:
        if accumulate is None or micro_batch_size is None:
            raise RecipeError("batch_size is not set: set it, or set both accumulate and memory.micro_batch_size")
        size = micro_batch_size * accumulate * world_size
        return Cut(size, micro_batch_size, accumulate, micro_batch_tokens, any_ranks)
    share = -(-batch_size // world_size)
    size = micro_batch_size or -(-share // (accumulate or 1))
    derived = -(-share // size)
    if accumulate is not None and accumulate != derived:
        raise RecipeError(
            f"batch_size={batch_size} contradicts accumulate={accumulate} with memory.micro_batch_size={size} on "
            f"{world_size} rank(s), which make {size * accumulate * world_size}: leave out one of the three"
            if micro_batch_size
            else f"batch_size={batch_size} on {world_size} rank(s) cannot be cut into accumulate={accumulate} "
            f"micro-batches: those of {size} samples make {derived}; use accumulate {derived}, or set "
            "memory.micro_batch_size instead"
        )
    return Cut(batch_size, min(size, batch_size if any_ranks else share), derived, micro_batch_tokens, any_ranks)


def data_parallel_rank(memory: Memory, rank: int, world_size: int) -> tuple[int, int]:
    """Return the share of a batch that ``rank`` computes, and the number of shares; tensor-parallel ranks share one."""
    copies = memory.tensor_parallel
    return rank // copies, max(1, world_size // copies)  # too few ranks are rejected elsewhere


def cut_at(recipe: Recipe, world_size: int, epoch: int) -> Cut:
    """Return the cut of ``epoch``: a schedule ``{0: 8, 4: 2}`` of ``accumulate`` means 8, and 2 from epoch 4 on."""
    memory, accumulate = recipe.memory, recipe.accumulate
    _, world_size = data_parallel_rank(memory, 0, world_size)
    if isinstance(accumulate, Mapping):
        accumulate = accumulate[max(start for start in accumulate if start <= epoch)]
    size = None if memory.micro_batch_size == "auto" else memory.micro_batch_size
    tokens, any_ranks = memory.micro_batch_tokens, recipe.run.deterministic
    return decide_cut(recipe.batch_size, size, accumulate, world_size, tokens, any_ranks)


def padded(length: int) -> int:
    return -(-length // PADDING_MULTIPLE) * PADDING_MULTIPLE


def cut_batch(
    indices: Sequence[int], cut: Cut, world_size: int, lengths: Sequence[int] | None = None, packs: bool = False
) -> list[list[int]]:
    """Cut a batch into a multiple of ``world_size`` micro-batches; rank r takes every ``world_size``-th, from r on.

    Without a limit on tokens, their sizes differ by at most one sample, so all ranks have the same peak; they are empty
    only if there are too few samples. With ``lengths``, samples of similar length share a micro-batch, and the longest
    come first: the first micro-step has the peak, and all ranks pad by similar amounts. ``packs`` means micro-batches
    without padding. They mix lengths instead, so that all have similar numbers of tokens.
    """
    if cut.rank_independent:
        pieces = cut_batch(indices, replace(cut, rank_independent=False), 1, lengths, packs)
        return pieces + [[] for _ in range(-len(pieces) % world_size)]
    order = list(indices) if lengths is None else sorted(indices, key=lambda index: -lengths[index])
    if lengths is None or cut.micro_batch_tokens is None:
        bounds = _equal_bounds(len(order), cut.micro_batch_size, world_size)
        if lengths is not None and packs:
            return deal(order, len(bounds), -(-len(order) // len(bounds)), lengths)
        return [order[start:end] for start, end in bounds]
    if packs:
        return pack_tokens(order, cut.micro_batch_tokens, cut.micro_batch_size, world_size, lengths)
    return _pieces_by_tokens(order, cut, world_size, lengths)


@lru_cache  # nearly all batches have the same size
def _equal_bounds(size: int, micro_batch_size: int, world_size: int) -> list[tuple[int, int]]:
    count = world_size * -(-size // (world_size * micro_batch_size))
    least, longer = divmod(size, count)
    bounds = [piece * least + min(piece, longer) for piece in range(count + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


def _pieces_by_tokens(by_length: list[int], cut: Cut, world_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Fill micro-batches one by one, then halve the largest until ``world_size`` divides their number."""
    assert cut.micro_batch_tokens is not None
    pieces: list[list[int]] = []
    tokens = longest = 0  # in the last micro-batch; a sample with more tokens than allowed gets its own
    for index in by_length:
        if not pieces or len(pieces[-1]) == cut.micro_batch_size or tokens + longest > cut.micro_batch_tokens:
            pieces.append([])
            tokens, longest = 0, padded(lengths[index])
        pieces[-1].append(index)
        tokens += longest
    while len(pieces) % world_size:
        largest = max(range(len(pieces)), key=lambda place: len(pieces[place]))
        middle = (len(pieces[largest]) + 1) // 2
        pieces[largest : largest + 1] = [pieces[largest][:middle], pieces[largest][middle:]]
    return pieces


def tokens_of(piece: Sequence[int], lengths: Sequence[int], packs: bool = False) -> int:
    """Count the tokens of a micro-batch, with padding to its longest sample unless it is packed."""
    if packs or not piece:
        return sum(lengths[index] for index in piece)
    return len(piece) * padded(max(lengths[index] for index in piece))


def largest_micro_batch(pieces: Sequence[list[int]], lengths: Sequence[int] | None, packs: bool = False) -> list[int]:
    """Return the micro-batch with the most tokens; ``pieces`` are in the order of :func:`cut_batch`."""
    return pieces[0] if lengths is None else max(pieces, key=lambda piece: tokens_of(piece, lengths, packs))


def padding_share(pieces: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Return the share of padding among the tokens of ``pieces``, each padded to its longest sample."""
    total = sum(tokens_of(piece, lengths) for piece in pieces)
    return 1 - sum(tokens_of(piece, lengths, True) for piece in pieces) / total if total else 0.0
