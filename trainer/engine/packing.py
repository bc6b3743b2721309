"""Pack samples without padding into micro-batches with similar numbers of tokens: bin packing.

``lengths`` has the tokens of each sample of the training set. Samples are given as indices, the longest first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush


def _tokens(pack: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in pack)


def deal(by_length: Sequence[int], count: int, max_samples: int, lengths: Sequence[int]) -> list[list[int]]:
    """Put each sample, the longest first, into the micro-batch with the fewest tokens that has room (Graham 1969)."""
    pieces: list[list[int]] = [[] for _ in range(count)]
    waiting = [(0, number) for number in range(count)]
    for index in by_length:
        tokens, number = heappop(waiting)
        pieces[number].append(index)
        if len(pieces[number]) < max_samples:
            heappush(waiting, (tokens + lengths[index], number))
    return sorted(pieces, key=lambda piece: -_tokens(piece, lengths))


def pack_tokens(
    by_length: Sequence[int], budget: int, max_samples: int, world_size: int, lengths: Sequence[int]
) -> list[list[int]]:
    """Make as few packs of at most ``budget`` tokens and ``max_samples`` samples as best-fit decreasing finds.

    Their number is then raised to a multiple of ``world_size``. If the samples fit when they are dealt evenly to that
    many packs, they are. Otherwise the fullest packs are halved.
    """
    packs = _best_fit(by_length, budget, max_samples, lengths)
    count = len(packs) + -len(packs) % world_size
    even = deal(by_length, count, max_samples, lengths)
    if all(_tokens(pack, lengths) <= budget for pack in even if len(pack) > 1):
        packs = even
    while len(packs) < count:
        fullest = max(range(len(packs)), key=lambda i: (len(packs[i]) > 1, _tokens(packs[i], lengths)))
        packs += deal(packs.pop(fullest), 2, max_samples, lengths)
    packs.sort(key=lambda pack: -_tokens(pack, lengths))
    # The ranks compute the packs of one micro-step at the same time, so these have similar sizes. The rank with the
    # fewest tokens so far gets the fullest of them.
    totals, dealt = [0] * world_size, []
    for start in range(0, count, world_size):
        takers = sorted(range(world_size), key=totals.__getitem__)
        taken = dict(zip(takers, packs[start : start + world_size], strict=True))
        totals = [total + _tokens(taken[rank], lengths) for rank, total in enumerate(totals)]
        dealt += [taken[rank] for rank in range(world_size)]
    return dealt


def _best_fit(by_length: Sequence[int], budget: int, max_samples: int, lengths: Sequence[int]) -> list[list[int]]:
    """Pack by best-fit decreasing (Johnson 1974); a sample longer than ``budget`` gets its own pack."""
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # from a number of tokens to the packs with room for exactly that many
    rooms: list[int] = []  # the keys in order; at most as many as tokens in the budget, for any number of samples
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
        if left > 0 and len(packs[number]) < max_samples:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(number)
    return packs
