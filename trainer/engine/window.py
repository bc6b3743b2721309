"""The share of every batch that this rank computes: windows of micro-batches, read ahead of the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, tee
from math import fsum
from typing import TYPE_CHECKING, Any

from trainer.engine.cut import Cut, cut_batch, tokens_of
from trainer.engine.order import DRAW_SEED, batch_indices, derive_seed, draw_mix
from trainer.engine.quarantine import Quarantine, Reduce
from trainer.errors import RecipeError, require
from trainer.values import BadSample, MixupDraw, Packed, PartialBatch, Request

if TYPE_CHECKING:
    from trainer.values import MixupConfig, SampleWeights, ShuffleGroups

MAX_HALVINGS = 64  # max halvings of a micro-batch, which never has 2 ** 64 samples

Fetch = Callable[[Iterator[Request]], Iterator[Any]]
"""Yields a collated micro-batch for every request, in order."""

OnLoad = Callable[[Sequence[int]], None]
"""Called with the samples of each micro-batch before waiting for it, and with none after the last one of a step."""


@dataclass(slots=True)
class MicroBatch:
    """The samples of one forward and backward pass."""

    batch: Any  # the collated samples, on the host
    seed: int  # for dropout; does not depend on the rank
    is_last: bool  # whether it ends its window; gradients are then synchronised
    is_empty: bool  # whether its samples have weight 0 and only keep this rank in step with the others
    indices: Sequence[int] = ()  # its samples, as indices into the dataset
    packed: Any = None  # the batch in the form that ``losses`` receives, if the loader has packed it


@dataclass(slots=True)
class Window:
    """One rank's share of a batch."""

    micro_batches: list[MicroBatch]  # in the order in which this rank computes them
    weights: dict[str, float]  # from each loss to its weight in the whole batch, over all ranks
    samples: int  # size of the whole batch over all ranks, without bad samples
    epoch: int = 0
    sizes: Sequence[int] = ()  # with ``Cut.rank_independent`` or ``whole``: the samples of all micro-batches
    tokens: int = 0  # tokens of these samples without padding; 0 if lengths are unknown

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


@dataclass
class Windows:
    """Yields the windows of this rank, epoch by epoch."""

    size: int  # samples in the training set
    cut_at: Callable[[int], Cut]  # from an epoch to its cut, before any halving
    fetch: Fetch
    weigh: Callable[[Any], dict[str, float]]  # from a collated micro-batch to the weight of every loss
    seed: int
    rank: int = 0
    world_size: int = 1
    reduce: Reduce = list
    lengths: Sequence[int] | None = None  # tokens of each sample, if known
    packs: bool = False  # whether micro-batches are packed, without padding
    groups: ShuffleGroups | None = None  # samples that are stored together and read together
    sample_weights: SampleWeights | None = None  # sample weights; samples are then drawn with replacement
    longest_candidates: Sequence[int] = ()  # candidates for the longest samples if lengths are unknown
    augmented: bool = False  # whether samples need a seed, because reading or the model draws random numbers
    mixing: MixupConfig | None = None  # MixUp or CutMix within a batch
    quarantine: Quarantine = field(default_factory=Quarantine)
    on_load: OnLoad = lambda samples: None
    on_epoch: Callable[[int], object] = lambda micro_batches: None  # called with the length of an epoch's first window
    whole: bool = False  # whether the loss compares all samples of a batch: see WholeBatch
    changes: Sequence[int] | None = None  # the only epochs at which the cut may change; None for any epoch

    def __post_init__(self) -> None:
        self.cut = lru_cache(self._cut)  # called in every step
        self.halvings = self.current_epoch = 0

    def _cut(self, epoch: int) -> Cut:
        cut = self.cut_at(epoch)
        for _ in range(self.halvings):
            cut = cut.halved(self.world_size) or cut
        return cut

    def halve(self) -> Cut:
        """Halve the micro-batches of all later windows; return the new cut of this epoch."""
        self.halvings += 1
        self.cut.cache_clear()
        return self.cut(self.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed since the start, as JSON, equal on all ranks; the caller saves epoch and step."""
        return {"halvings": self.halvings, "quarantine": self.quarantine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not 0 <= state["halvings"] < MAX_HALVINGS:
            raise ValueError(f"halvings={state['halvings']} must be from 0 to {MAX_HALVINGS - 1}")
        self.halvings = state["halvings"]
        self.cut.cache_clear()
        self.quarantine.load_state_dict(state["quarantine"])

    def repeated(self, indices: list[int], count: int) -> Window:
        """Return a window of ``count`` micro-batches with the same samples, for a trial of the peak."""
        fetched = enumerate(self.fetch(iter([self._request(self.current_epoch, indices)] * count)), start=1)
        micro_batches = [make_micro_batch(batch, indices, 0, number == count, False)[0] for number, batch in fetched]
        weights, sizes, _ = self._weights(micro_batches)
        others = max(0, self.cut(self.current_epoch).batch_size - sum(sizes))  # a whole batch is larger than these
        samples = len(indices) * count * self.world_size
        return Window(micro_batches, weights, samples, sizes=[*sizes, others] if self.whole else sizes)

    def epoch_ranges(self, epochs: int) -> list[range]:
        """Return ranges of epochs with the same cut; a list of single epochs may have billions of entries."""
        starts = range(epochs) if self.changes is None else sorted({0, *self.changes})
        ends = [*starts[1:], epochs]
        return [range(start, min(end, epochs)) for start, end in zip(starts, ends, strict=True) if start < epochs]

    def steps(self, epoch: int) -> int:
        return -(-self.size // self.cut_at(epoch).batch_size)  # the last batch may have fewer samples

    def pieces(self, epoch: int, step: int) -> list[list[int]]:
        """Return all micro-batches of a batch, over all ranks."""
        batch = self._batch(epoch, step)
        return [[batch[place] for place in piece] for piece in self._places(epoch, batch)]

    def _batch(self, epoch: int, step: int) -> list[int]:
        batch_size = self.cut(epoch).batch_size
        return batch_indices(self.seed, epoch, step, self.size, batch_size, self.groups, self.sample_weights)

    def _places(self, epoch: int, batch: Sequence[int]) -> list[list[int]]:
        """Return all micro-batches as positions in the batch, from which the seeds of samples are derived."""
        lengths = None if self.lengths is None else [self.lengths[index] for index in batch]
        pieces = cut_batch(range(len(batch)), self.cut(epoch), self.world_size, lengths, self.packs)
        if self._are_neighbours(epoch):
            each = len(pieces) // self.world_size
            pieces = [piece for first in range(each) for piece in pieces[first::each]]
        return pieces

    def _are_neighbours(self, epoch: int) -> bool:
        """Return whether a rank takes consecutive micro-batches, to read few groups, instead of every n-th one."""
        return self.groups is not None and not self.cut(epoch).rank_independent

    def epoch(self, epoch: int, first_step: int = 0, last_step: int | None = None) -> Iterator[Window]:
        """Yield the windows of the steps from ``first_step`` up to ``last_step`` (exclusive; by default all)."""
        self.current_epoch = epoch
        all_steps = self.steps(epoch)
        steps = range(first_step, all_steps if last_step is None else min(all_steps, last_step))
        self.on_epoch(len(self._own(epoch, steps[0])) if steps else 0)
        plans, ahead = tee(self._own(epoch, step) for step in steps)  # workers read ahead of the steps
        batches = self.fetch(request for own in ahead for request, _ in own)
        for step, own in zip(steps, plans, strict=True):
            micro_batches: list[MicroBatch] = []
            bad: list[BadSample] = []
            for number, (request, is_empty) in enumerate(own):
                indices = request.indices
                self.on_load(indices)
                # The seed of dropout depends on the position in the batch, which is the same on any number of ranks.
                neighbours = self._are_neighbours(epoch)
                place = self.rank * len(own) + number if neighbours else number * self.world_size + self.rank
                seed = derive_seed(self.seed, epoch, step, place)
                micro, found = make_micro_batch(next(batches), indices, seed, number == len(own) - 1, is_empty)
                micro_batches.append(micro)
                bad += found
            self.on_load(())
            weights, sizes, any_bad = self._weights(micro_batches, len(bad))
            if any_bad:
                self.quarantine.exchange("train", bad, self.reduce, self.rank, self.world_size)
            samples, tokens = self._samples(epoch, step)
            yield Window(micro_batches, weights, samples, epoch, sizes, tokens)

    def _own(self, epoch: int, step: int) -> list[tuple[Request, bool]]:
        """Return requests for this rank's micro-batches of a step, and whether each is empty."""
        batch = self._batch(epoch, step)
        good = set(self.quarantine.filter("train", batch))
        pieces = [[place for place in piece if batch[place] in good] for piece in self._places(epoch, batch)]
        drawn = None if self.mixing is None else draw_mix(self.seed, epoch, step, len(batch), self.mixing)
        own = []
        for piece in pieces[self.rank :: self.world_size]:
            # A rank without samples computes a borrowed one with weight 0, so that it joins the collectives.
            if piece:
                request = self._request(epoch, [batch[place] for place in piece], step, piece)
            else:
                borrowed = self._placeholder_sample([[batch[place] for place in other] for other in pieces])
                request = self._request(epoch, borrowed)
            if piece and drawn is not None:
                partners, share, centre = drawn
                found = [partners[place] if batch[partners[place]] in good else place for place in piece]
                theirs = self._request(epoch, [batch[place] for place in found], step, found)
                request = request._replace(mix=MixupDraw(theirs.indices, theirs.seeds, share, centre))
            own.append((request, not piece))
        return own

    def _request(self, epoch: int, indices: list[int], step: int = 0, places: Sequence[int] = ()) -> Request:
        """Return a request for samples mixed with themselves; the seeds of repeated samples depend on the position."""
        seeds = None
        if self.augmented and self.sample_weights is not None and places:
            parts = zip(places, indices, strict=True)
            seeds = [derive_seed(self.seed, epoch, step, place, index, DRAW_SEED) for place, index in parts]
        elif self.augmented:
            seeds = [derive_seed(self.seed, epoch, index) for index in indices]
        return Request(indices, seeds, None if self.mixing is None else MixupDraw(indices, seeds, 1.0))

    def _placeholder_sample(self, pieces: Sequence[Sequence[int]]) -> list[int]:
        """Return the shortest sample of the first non-empty micro-batch, or else any loadable training sample."""
        others = next(filter(None, pieces), None) or self.quarantine.filter("train", range(self.size))[:1]
        require(bool(others), f"none of the {self.size} training samples can be loaded: see quarantine.json")
        return [max(others, key=lambda i: -self.lengths[i] if self.lengths else 0)]

    def _samples(self, epoch: int, step: int) -> tuple[int, int]:
        batch_size, lengths = self.cut(epoch).batch_size, self.lengths
        if not len(self.quarantine) and lengths is None:
            return min(batch_size, self.size - step * batch_size), 0
        kept = self.quarantine.filter("train", self._batch(epoch, step))
        return len(kept), 0 if lengths is None else tokens_of(kept, lengths, packs=True)

    def _weights(self, micro_batches: list[MicroBatch], bad: int = 0) -> tuple[dict[str, float], list[int], bool]:
        """Sum over the ranks: return ``Window.weights``, ``Window.sizes``, and whether any rank has bad samples."""
        weights = [self.weigh(micro.batch) for micro in micro_batches]
        own = [0.0 if micro.is_empty else float(len(micro.indices)) for micro in micro_batches]
        pairs = list(zip(weights, own, strict=True))
        try:
            rows = [[weight[name] if there else 0.0 for weight, there in pairs] for name in weights[0]]
        except (TypeError, KeyError) as error:
            cause = f"{type(getattr(self.weigh, '__self__', self.weigh)).__name__}: weigh() returns {weights[0]!r}"
            fix = "return a dict from every name in loss_names to the number of items which that loss sums up"
            raise RecipeError(f"{cause}: {fix}") from error
        if not (self.cut(self.current_epoch).rank_independent or self.whole):
            *sums, found = self.reduce([*map(sum, rows), float(bad)])
            return dict(zip(weights[0], sums, strict=True)), [], found > 0
        rows.append(own)
        # Rows with a place for every micro-batch of all ranks, in order. This rank fills its places; the sum the rest.
        length = len(own) * self.world_size
        places = [0.0] * (length * len(rows))
        places[self.rank :: self.world_size] = chain.from_iterable(rows)
        *values, found = self.reduce([*places, float(bad)])
        *tables, everywhere = [values[start : start + length] for start in range(0, len(values), length)]
        sums = [fsum(table) for table in tables]  # rounded once: equal on any number of ranks
        return dict(zip(weights[0], sums, strict=True)), [*map(int, everywhere)], found > 0


def make_micro_batch(
    loaded: Any, indices: Sequence[int], seed: int, is_last: bool, is_empty: bool
) -> tuple[MicroBatch, list[BadSample]]:
    """Return the micro-batch loaded for ``indices``, empty if none could be loaded, and its own bad samples."""
    found = loaded.batch if isinstance(loaded, PartialBatch) else loaded
    batch, packed = (found.batch, found.packed) if isinstance(found, Packed) else (found, None)
    if not isinstance(loaded, PartialBatch):
        return MicroBatch(batch, seed, is_last, is_empty, indices, packed), []
    is_lost = is_empty or not loaded.kept_indices
    return MicroBatch(batch, seed, is_last, is_lost, loaded.kept_indices, packed), [] if is_empty else loaded.bad
