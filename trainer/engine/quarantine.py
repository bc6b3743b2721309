"""Samples that could not be loaded: skipped, counted over all ranks, and not requested again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from trainer.errors import RecipeError
from trainer.values import BadSample

Reduce = Callable[[list[float]], list[float]]  # sums a list of floats over all ranks
SHOWN = 5  # max bad samples in a message; quarantine.json lists all


class BadSampleAt(NamedTuple):
    """A bad sample and its split (train, val or test)."""

    split: str
    sample: BadSample

    def describe(self) -> str:
        place = f"{self.split} sample {self.sample.position}"
        if self.sample.description in self.sample.reason:
            return f"{place}: {self.sample.reason}"
        return f"{self.sample.description} ({place}): {self.sample.reason}"


class Quarantine:
    """The bad samples of all splits, equal on every rank at every step."""

    def __init__(
        self,
        limit: int | None = 0,  # max of a run; None skips bad samples without sharing or counting them
        announce: Callable[[Quarantine, list[BadSampleAt]], None] | None = None,  # called on every rank with new ones
    ) -> None:
        self.limit, self.announce = limit, announce
        self.found: dict[tuple[str, int], BadSample] = {}

    def __len__(self) -> int:
        return len(self.found)

    def filter(self, split: str, indices: Sequence[int]) -> Sequence[int]:
        """Return ``indices`` without the known bad samples of ``split``."""
        return [index for index in indices if (split, index) not in self.found] if self.found else indices

    def exchange(self, split: str, bad: Iterable[BadSample], reduce: Reduce, rank: int, world_size: int) -> None:
        """Exchange the bad samples of ``split`` that each rank has found. A collective."""
        if self.limit is None:
            return
        texts = gather_texts(json.dumps(list(bad)), reduce, rank, world_size)
        everywhere = sorted({BadSample(*fields) for text in texts for fields in json.loads(text)})
        new = []
        for sample in everywhere:  # two ranks may report different reasons for one sample; keep the first
            if (split, sample.position) not in self.found:
                self.found[split, sample.position] = sample
                new.append(BadSampleAt(split, sample))
        if new:
            self._check(new)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": [{"split": split, **sample._asdict()} for (split, _), sample in self.found.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the bad samples of an earlier run; RecipeError if they exceed the limit."""
        self.found = {}
        for entry in state["samples"]:
            sample = BadSample(int(entry["position"]), str(entry["description"]), str(entry["reason"]))
            self.found[str(entry["split"]), sample.position] = sample
        if self.found:
            self._check([])

    def _check(self, new: list[BadSampleAt]) -> None:
        if self.announce is not None:
            self.announce(self, new)
        if self.limit is None or len(self.found) <= self.limit:
            return
        first = list(self.found.items())[:SHOWN]  # in the order of detection
        shown = "; ".join(BadSampleAt(split, sample).describe() for (split, _), sample in first)
        more = f"; and {len(self.found) - SHOWN} more" if len(self.found) > SHOWN else ""
        cause = f"{len(self.found)} samples cannot be loaded, which exceeds data.max_bad_samples={self.limit}"
        raise RecipeError(f"{cause}: {shown}{more}. Fix or remove them, or raise the limit")


def gather_texts(text: str, reduce: Reduce, rank: int, world_size: int) -> list[str]:
    """Gather the ``text`` of every rank using sums only: each rank adds zeros at the positions of the others."""
    content = text.encode()
    sizes = [int(size) for size in reduce([float(len(content) * (rank == other)) for other in range(world_size)])]
    padding = [0.0] * sum(sizes[:rank]), [0.0] * sum(sizes[rank + 1 :])
    whole = bytes(map(int, reduce([*padding[0], *map(float, content), *padding[1]])))
    return [whole[end - size : end].decode() for end, size in zip(accumulate(sizes), sizes, strict=True)]
