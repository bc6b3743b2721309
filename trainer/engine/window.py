"""A batch, cut into micro-batches and dealt to the ranks.

A step is exact however its batch is cut, so the cut is free to serve speed and memory: by count, by length, by tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain, tee
from math import fsum
from typing import Any

from trainer.contract import PADDING_MULTIPLE
from trainer.engine.order import DRAWN, batch_indices, derive_seed, draw_mix, steps_in_epoch
from trainer.engine.quarantine import Quarantine, Reduce
from trainer.errors import RecipeError
from trainer.recipe import Memory, Recipe
from trainer.values import BadSample, Chances, Groups, Incomplete, Mix, Mixing, Packed, Request

MOST_DEALT = 2**18  # samples whose fullest micro-batch is searched for; of more, the longest samples bound it
MOST_HALVINGS = 64  # of a micro-batch: none has 2 ** 64 samples

Fetch = Callable[[Iterator[Request]], Iterator[Any]]  # returns a collated micro-batch for every request, in order

OnLoad = Callable[[Sequence[int]], None]
"""Called with the samples of each micro-batch before it is waited for, and with none after the last of a step."""


@dataclass(frozen=True)
class Cut:
    """How the batches of an epoch are cut."""

    batch_size: int  # samples per step over all ranks
    micro_batch_size: int  # most samples of a micro-batch
    accumulate: int  # micro-batches per step and rank in a full batch (a token budget may ask for more)
    micro_batch_tokens: int | None = None  # most tokens of a micro-batch, with what padding it has
    any_ranks: bool = False  # cut as for one rank: where the ranks do not divide the pieces, some get an empty one

    def halved(self, world_size: int) -> Cut | None:
        """The same batches in micro-batches of half the size; ``None`` when they are of one sample already."""
        if self.micro_batch_size == 1:
            return None
        size = -(-self.micro_batch_size // 2)
        tokens = self.micro_batch_tokens and -(-self.micro_batch_tokens // 2)
        return Cut(self.batch_size, size, -(-self.batch_size // (world_size * size)), tokens, self.any_ranks)


def decide_cut(
    batch_size: int | None,
    micro_batch_size: int | None,
    accumulate: int | None,
    world_size: int,
    micro_batch_tokens: int | None = None,
    any_ranks: bool = False,
) -> Cut:
    """Derive what was left open (``None``) of batch size, micro-batch size and accumulation."""
    if batch_size is None:
        if accumulate is None or micro_batch_size is None:
            raise RecipeError("batch_size is missing: give it, or give accumulate and memory.micro_batch_size")
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


def share_of(memory: Memory, rank: int, world_size: int) -> tuple[int, int]:
    """Which share of a batch a rank takes, and of how many: neighbours that are tensor parallel take the same one."""
    copies = memory.tensor_parallel
    return rank // copies, max(1, world_size // copies)  # too few ranks are refused elsewhere


def cut_at(recipe: Recipe, world_size: int, epoch: int) -> Cut:
    """How the batches of ``epoch`` are cut on ``world_size`` ranks; a schedule such as ``{0: 8, 4: 2}`` holds from each
    epoch named on."""
    memory, accumulate = recipe.memory, recipe.accumulate
    _, world_size = share_of(memory, 0, world_size)
    if isinstance(accumulate, Mapping):
        accumulate = accumulate[max(start for start in accumulate if start <= epoch)]
    size = None if memory.micro_batch_size == "auto" else memory.micro_batch_size
    tokens, any_ranks = memory.micro_batch_tokens, recipe.run.deterministic
    return decide_cut(recipe.batch_size, size, accumulate, world_size, tokens, any_ranks)


def padded(length: int) -> int:
    """``length`` rounded up to the padding multiple."""
    return -(-length // PADDING_MULTIPLE) * PADDING_MULTIPLE


def cut_batch(
    indices: Sequence[int], cut: Cut, world_size: int, lengths: Sequence[int] | None = None, packs: bool = False
) -> list[list[int]]:
    """Cut a batch into a multiple of ``world_size`` micro-batches; rank r gets every ``world_size``-th from r on.

    Micro-batches are as equal in size as can be: the same peak on every rank, and empty ones only when there are fewer
    samples than micro-batches. With ``lengths``, samples of like length share a micro-batch, the longest first, so that
    the peak comes first and the ranks pad alike; with ``packs`` there is no padding, and lengths are mixed so that all
    micro-batches have about as many tokens: a lower peak, and no rank waits for another.
    """
    if cut.any_ranks:
        pieces = cut_batch(indices, replace(cut, any_ranks=False), 1, lengths, packs)
        return pieces + [[] for _ in range(-len(pieces) % world_size)]
    order = list(indices) if lengths is None else sorted(indices, key=lambda index: -lengths[index])
    if lengths is None or cut.micro_batch_tokens is None:
        bounds = _equal_bounds(len(order), cut.micro_batch_size, world_size)
        if lengths is not None and packs:
            return _dealt(order, len(bounds), -(-len(order) // len(bounds)), lengths)
        return [order[start:end] for start, end in bounds]
    if packs:
        return _packs(order, cut.micro_batch_tokens, cut.micro_batch_size, world_size, lengths)
    return _pieces_by_tokens(order, cut, world_size, lengths)


@lru_cache  # nearly all batches have the same size
def _equal_bounds(size: int, micro_batch_size: int, world_size: int) -> list[tuple[int, int]]:
    count = world_size * -(-size // (world_size * micro_batch_size))
    least, longer = divmod(size, count)
    bounds = [piece * least + min(piece, longer) for piece in range(count + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


def _dealt(by_length: Sequence[int], count: int, most: int, lengths: Sequence[int]) -> list[list[int]]:
    """Graham's rule (1969): the longest sample first, each to the micro-batch with the fewest tokens that has room."""
    pieces: list[list[int]] = [[] for _ in range(count)]
    waiting = [(0, number) for number in range(count)]
    for index in by_length:
        tokens, number = heappop(waiting)
        pieces[number].append(index)
        if len(pieces[number]) < most:
            heappush(waiting, (tokens + lengths[index], number))
    return sorted(pieces, key=lambda piece: -tokens_of(piece, lengths, packs=True))


def _packs(
    by_length: Sequence[int], budget: int, most: int, world_size: int, lengths: Sequence[int]
) -> list[list[int]]:
    """As few packs of at most ``budget`` tokens and ``most`` samples as best-fit decreasing finds, rounded up to a
    multiple of ``world_size``: filled evenly where they then hold all, else with the fullest of them halved."""
    packs = _best_fit(by_length, budget, most, lengths)
    count = len(packs) + -len(packs) % world_size
    even = _dealt(by_length, count, most, lengths)
    if all(tokens_of(pack, lengths, True) <= budget for pack in even if len(pack) > 1):
        packs = even
    while len(packs) < count:
        fullest = max(
            range(len(packs)), key=lambda place: (len(packs[place]) > 1, tokens_of(packs[place], lengths, True))
        )
        packs += _dealt(packs.pop(fullest), 2, most, lengths)
    packs.sort(key=lambda pack: -tokens_of(pack, lengths, True))
    # Of packs that the ranks compute at once, and so of about as many tokens, the fullest goes to who has had least.
    totals, dealt = [0] * world_size, []
    for start in range(0, count, world_size):
        takers = sorted(range(world_size), key=totals.__getitem__)
        taken = dict(zip(takers, packs[start : start + world_size], strict=True))
        totals = [total + tokens_of(taken[rank], lengths, True) for rank, total in enumerate(totals)]
        dealt += [taken[rank] for rank in range(world_size)]
    return dealt


def _best_fit(by_length: Sequence[int], budget: int, most: int, lengths: Sequence[int]) -> list[list[int]]:
    """Best-fit decreasing (Johnson 1974); a sample longer than ``budget`` makes a pack of its own."""
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # from tokens to the packs that have room for so many more
    rooms: list[int] = []  # those keys in order: there are no more than tokens in a budget, however many samples
    for index in by_length:
        place = bisect_left(rooms, lengths[index])
        room = rooms[place] if place < len(rooms) else budget
        if place == len(rooms):
            packs.append([])
            number = len(packs) - 1
        else:
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        packs[number].append(index)
        left = room - lengths[index]
        if left > 0 and len(packs[number]) < most:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(number)
    return packs


def _pieces_by_tokens(by_length: list[int], cut: Cut, world_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Fill micro-batches greedily; halve the largest, where they stand, to a multiple of ``world_size``."""
    assert cut.micro_batch_tokens is not None
    pieces: list[list[int]] = []
    tokens = longest = 0  # of the last piece; a sample longer than the budget makes one of its own
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
    """The tokens of a micro-batch: padded to its longest sample, or packed."""
    if packs or not piece:
        return sum(lengths[index] for index in piece)
    return len(piece) * padded(max(lengths[index] for index in piece))


def fullest(pieces: Sequence[list[int]], lengths: Sequence[int] | None, packs: bool = False) -> list[int]:
    """Of micro-batches as :func:`cut_batch` cuts them, the first of those with the most tokens."""
    return pieces[0] if lengths is None else max(pieces, key=lambda piece: tokens_of(piece, lengths, packs))


def padding_share(pieces: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """The share of padding tokens among all tokens of the micro-batches ``pieces``, each padded to its own longest."""
    total = sum(tokens_of(piece, lengths) for piece in pieces)
    return 1 - sum(tokens_of(piece, lengths, True) for piece in pieces) / total if total else 0.0


@dataclass(slots=True)
class MicroBatch:
    """What goes through forward and backward at once."""

    batch: Any  # the collated samples, on the host
    seed: int  # of dropout; the same for this micro-batch on any rank
    is_last: bool  # of its window: it synchronises gradients
    is_empty: bool  # only keeps this rank in step with the others: its samples weigh nothing
    indices: Sequence[int] = ()  # its samples, by their place in the dataset
    packed: Any = None  # the batch as ``losses`` gets it, if the loader has packed it


@dataclass(slots=True)
class Window:
    """One rank's share of a batch."""

    micro_batches: list[MicroBatch]  # what this rank puts through the model, in order
    weights: dict[str, float]  # of every loss, the weight of the whole batch over all ranks
    samples: int  # of the whole batch over all ranks; bad ones are not counted
    epoch: int = 0
    present: Sequence[bool] = ()  # of a batch cut as for one rank, which of all its micro-batches are not empty
    tokens: int = 0  # of those samples, without padding; 0 where lengths are not known

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


@dataclass
class Windows:
    """The windows of this rank, epoch by epoch."""

    size: int  # samples in the training set
    cut_at: Callable[[int], Cut]  # the cut of an epoch's batches
    fetch: Fetch
    weigh: Callable[[Any], dict[str, float]]  # the weight of every loss of a micro-batch
    seed: int
    rank: int = 0
    world_size: int = 1
    reduce: Reduce = list
    lengths: Sequence[int] | None = None  # tokens of each sample, when there are such
    packs: bool = False  # whether micro-batches are packed, without padding
    groups: Groups | None = None  # of samples that lie together, when there are such
    chances: Chances | None = None  # of samples to be drawn, where an epoch does not have each once
    probably_longest: Sequence[int] = ()  # samples to take for the longest ones, where lengths are not known
    augmented: bool = False  # reading a sample, or the model, draws random numbers, so that each needs a seed
    mixing: Mixing | None = None  # of the samples of a batch
    quarantine: Quarantine = field(default_factory=Quarantine)
    on_load: OnLoad = lambda samples: None
    on_epoch: Callable[[int], object] = lambda micro_batches: None  # called with the size of an epoch's first window
    changes: Sequence[int] | None = None  # epochs from which on batches may be cut otherwise; None for any

    def __post_init__(self) -> None:
        self.cut = lru_cache(self._cut)  # asked for in every step
        self.halvings = self.current_epoch = 0

    def _cut(self, epoch: int) -> Cut:
        """How the batches of ``epoch`` are cut, after as many halvings as they allow."""
        cut = self.cut_at(epoch)
        for _ in range(self.halvings):
            cut = cut.halved(self.world_size) or cut
        return cut

    def can_halve(self) -> bool:
        return self.cut(self.current_epoch).micro_batch_size > 1

    def halve(self) -> Cut:
        """Cut batches into micro-batches of half the size from now on; return how those of this epoch are cut."""
        self.halvings += 1
        self.cut.cache_clear()
        return self.cut(self.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        """What has changed since the start, the same on all ranks, as JSON; where training is, its caller knows."""
        return {"halvings": self.halvings, "quarantine": self.quarantine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not 0 <= state["halvings"] < MOST_HALVINGS:
            raise ValueError(f"halvings is {state['halvings']}")
        self.halvings = state["halvings"]
        self.cut.cache_clear()
        self.quarantine.load_state_dict(state["quarantine"])

    def longest(self, epochs: int) -> Window:
        """A window of the largest micro-batch that can occur: twice, if gradients of an earlier one are kept then."""
        self.current_epoch = max(self.spans(epochs), key=lambda span: self.cut(span.start).micro_batch_size).start
        cut, lengths = self.cut(self.current_epoch), self.lengths
        if self.packs and lengths is not None and epochs * self.size <= MOST_DEALT:
            every = ((epoch, step) for epoch in range(epochs) for step in range(self.steps(epoch)))
            indices = fullest([piece for at in every for piece in self.pieces(*at)], lengths, self.packs)
        else:
            order: Sequence[int] = [*self.probably_longest, *range(min(self.size, cut.micro_batch_size))]
            if lengths is not None:
                order = sorted(range(self.size), key=lambda i: -lengths[i])
            if cut.micro_batch_tokens is None:  # else a micro-batch of shorter samples may have more tokens
                order = order[: cut.micro_batch_size]
            indices = fullest(cut_batch(order, cut, 1, lengths, self.packs), lengths, self.packs)
        request = self._request(self.current_epoch, indices)
        count = 2 if cut.accumulate > 1 or cut.micro_batch_tokens is not None else 1
        fetched = enumerate(self.fetch(iter([request] * count)), start=1)
        micro_batches = [micro_batch(batch, indices, 0, number == count, False)[0] for number, batch in fetched]
        weights, present, _ = self._weights(micro_batches)
        return Window(micro_batches, weights, len(indices) * count * self.world_size, present=present)

    def spans(self, epochs: int) -> list[range]:
        """The epochs, in runs of those whose batches are cut alike: there may be billions of them."""
        starts = range(epochs) if self.changes is None else sorted({0, *self.changes})
        ends = [*starts[1:], epochs]
        return [range(start, min(end, epochs)) for start, end in zip(starts, ends, strict=True) if start < epochs]

    def steps(self, epoch: int) -> int:
        return steps_in_epoch(self.size, self.cut_at(epoch).batch_size)

    def pieces(self, epoch: int, step: int) -> list[list[int]]:
        """All micro-batches of a batch, over all ranks."""
        batch = self._batch(epoch, step)
        return [[batch[place] for place in piece] for piece in self._places(epoch, batch)]

    def _batch(self, epoch: int, step: int) -> list[int]:
        batch_size = self.cut(epoch).batch_size
        return batch_indices(self.seed, epoch, step, self.size, batch_size, self.groups, self.chances)

    def _places(self, epoch: int, batch: Sequence[int]) -> list[list[int]]:
        """All micro-batches, as places in the batch: what is drawn for a sample follows from its place."""
        lengths = None if self.lengths is None else [self.lengths[index] for index in batch]
        pieces = cut_batch(range(len(batch)), self.cut(epoch), self.world_size, lengths, self.packs)
        if self._are_neighbours(epoch):
            each = len(pieces) // self.world_size
            pieces = [piece for first in range(each) for piece in pieces[first::each]]
        return pieces

    def _are_neighbours(self, epoch: int) -> bool:
        """Whether a rank's micro-batches stand together in the batch, as samples of a group do; else they alternate."""
        return self.groups is not None and not self.cut(epoch).any_ranks

    def epoch(self, epoch: int, first_step: int = 0, last_step: int | None = None) -> Iterator[Window]:
        """Yield the windows of steps ``first_step`` to ``last_step`` (excluded; default: all that there are)."""
        self.current_epoch = epoch
        all_steps = self.steps(epoch)
        steps = range(first_step, all_steps if last_step is None else min(all_steps, last_step))
        plans, ahead, first = tee((self._own(epoch, step) for step in steps), 3)  # workers fetch ahead of the steps
        self.on_epoch(len(next(first, ())))
        del first  # else the plans of the whole epoch would be kept for it
        batches = self.fetch(request for own in ahead for request, _ in own)
        for step, own in zip(steps, plans, strict=True):
            micro_batches: list[MicroBatch] = []
            bad: list[BadSample] = []
            for number, (request, is_empty) in enumerate(own):
                indices = request.indices
                self.on_load(indices)
                # Of dropout: of the place that this micro-batch has in the batch on any number of ranks.
                neighbours = self._are_neighbours(epoch)
                place = self.rank * len(own) + number if neighbours else number * self.world_size + self.rank
                seed = derive_seed(self.seed, epoch, step, place)
                micro, found = micro_batch(next(batches), indices, seed, number == len(own) - 1, is_empty)
                micro_batches.append(micro)
                bad += found
            self.on_load(())
            weights, present, any_bad = self._weights(micro_batches, len(bad))
            if any_bad:
                self.quarantine.share("train", bad, self.reduce, self.rank, self.world_size)
            samples, tokens = self._samples(epoch, step)
            yield Window(micro_batches, weights, samples, epoch, present, tokens)

    def _own(self, epoch: int, step: int) -> list[tuple[Request, bool]]:
        """This rank's micro-batches of a step, and whether each is empty."""
        batch = self._batch(epoch, step)
        good = set(self.quarantine.kept("train", batch))
        pieces = [[place for place in piece if batch[place] in good] for piece in self._places(epoch, batch)]
        drawn = None if self.mixing is None else draw_mix(self.seed, epoch, step, len(batch), self.mixing)
        own = []
        for piece in pieces[self.rank :: self.world_size]:
            # A rank with nothing left does a zero-weight micro-step on another's sample, for the collectives' sake.
            if piece:
                request = self._request(epoch, [batch[place] for place in piece], step, piece)
            else:
                borrowed = self._borrowed([[batch[place] for place in other] for other in pieces])
                request = self._request(epoch, borrowed)
            if piece and drawn is not None:
                partners, share, centre = drawn
                found = [partners[place] if batch[partners[place]] in good else place for place in piece]
                theirs = self._request(epoch, [batch[place] for place in found], step, found)
                request = request._replace(mix=Mix(theirs.indices, theirs.seeds, share, centre))
            own.append((request, not piece))
        return own

    def _request(self, epoch: int, indices: list[int], step: int = 0, places: Sequence[int] = ()) -> Request:
        """Samples as they are; where others are mixed, each with itself. One that an epoch may have twice draws by its
        place in the batch, too."""
        seeds = None
        if self.augmented and self.chances is not None and places:
            parts = zip(places, indices, strict=True)
            seeds = [derive_seed(self.seed, epoch, step, place, index, DRAWN) for place, index in parts]
        elif self.augmented:
            seeds = [derive_seed(self.seed, epoch, index) for index in indices]
        return Request(indices, seeds, None if self.mixing is None else Mix(indices, seeds, 1.0))

    def _borrowed(self, pieces: Sequence[Sequence[int]]) -> list[int]:
        """The shortest sample of the first micro-batch that has one; any good sample where the batch has none."""
        others = next(filter(None, pieces), None) or self.quarantine.kept("train", range(self.size))[:1]
        if not others:
            raise RecipeError(f"none of the {self.size} training samples can be loaded: see quarantine.json")
        return [max(others, key=lambda i: -self.lengths[i] if self.lengths else 0)]

    def _samples(self, epoch: int, step: int) -> tuple[int, int]:
        """The samples of a batch over all ranks that are not known as bad, and their tokens."""
        batch_size, lengths = self.cut(epoch).batch_size, self.lengths
        if not len(self.quarantine) and lengths is None:
            return min(batch_size, self.size - step * batch_size), 0
        batch = self._batch(epoch, step)
        kept = self.quarantine.kept("train", batch)
        return len(kept), 0 if lengths is None else tokens_of(kept, lengths, packs=True)

    def _weights(self, micro_batches: list[MicroBatch], bad: int = 0) -> tuple[dict[str, float], list[bool], bool]:
        """What a window says of the batch over all ranks: weights, present; and if any rank has ``bad`` samples."""
        weights = [self.weigh(micro.batch) for micro in micro_batches]
        present: list[float] = [float(not micro.is_empty) for micro in micro_batches]
        try:
            rows = [
                [weight[name] if there else 0.0 for weight, there in zip(weights, present, strict=True)]
                for name in weights[0]
            ]
        except (TypeError, KeyError) as error:
            raise RecipeError(
                f"{type(getattr(self.weigh, '__self__', self.weigh)).__name__}: weigh() gives {weights[0]!r}: give a "
                "dict from every one of loss_names to how many items that loss is the sum of"
            ) from error
        if not self.cut(self.current_epoch).any_ranks:
            *sums, found = self.reduce([*map(sum, rows), float(bad)])
            return dict(zip(weights[0], sums, strict=True)), [], found > 0
        rows.append(present)
        # Room for what all ranks have in such rows, in the order of the micro-batches, filled with this rank's.
        length = len(present) * self.world_size
        places = [0.0] * (length * len(rows))
        places[self.rank :: self.world_size] = chain.from_iterable(rows)
        *values, found = self.reduce([*places, float(bad)])
        *tables, everywhere = [values[start : start + length] for start in range(0, len(values), length)]
        sums = [fsum(table) for table in tables]  # rounded once: the same however fractions are dealt to the ranks
        return dict(zip(weights[0], sums, strict=True)), [flag > 0 for flag in everywhere], found > 0


def micro_batch(
    loaded: Any, indices: Sequence[int], seed: int, is_last: bool, is_empty: bool
) -> tuple[MicroBatch, list[BadSample]]:
    """A micro-batch of what was loaded for ``indices``, and its bad samples; see :class:`MicroBatch`. One without
    samples is empty; what an empty one fails to borrow is left to the rank whose it is."""
    found = loaded.batch if isinstance(loaded, Incomplete) else loaded
    batch, packed = (found.batch, found.packed) if isinstance(found, Packed) else (found, None)
    if not isinstance(loaded, Incomplete):
        return MicroBatch(batch, seed, is_last, is_empty, indices, packed), []
    is_lost = is_empty or not loaded.kept
    return MicroBatch(batch, seed, is_last, is_lost, loaded.kept, packed), [] if is_empty else loaded.bad
