"""Samples that could not be loaded: left out, counted over all ranks, and never asked for again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from trainer.errors import RecipeError
from trainer.values import BadSample

Reduce = Callable[[list[float]], list[float]]  # sums a list of floats over all ranks
SHOWN = 5  # bad samples that a message names; a file of the run has all


class BadSampleAt(NamedTuple):
    """A bad sample and the split (train, val, test) that it is of."""

    split: str
    sample: BadSample

    def describe(self) -> str:
        place = f"{self.split} sample {self.sample.position}"
        if self.sample.description in self.sample.reason:
            return f"{place}: {self.sample.reason}"
        return f"{self.sample.description} ({place}): {self.sample.reason}"


class Quarantine:
    """The bad samples of all splits, the same on every rank at every step.

    Ranks find bad samples on their own and share them at a point that all of them come to: the sum of the weights of a
    batch, the end of an evaluation. From there on no rank asks for them, whoever's share they fall into.
    """

    def __init__(
        self,
        limit: int | None = 0,  # most of a run; None leaves them out without sharing or counting them, for a prediction
        announce: Callable[[Quarantine, list[BadSampleAt]], None] | None = None,  # told on every rank what was found
    ) -> None:
        self.limit, self.announce = limit, announce
        self.found: dict[tuple[str, int], BadSample] = {}

    def __len__(self) -> int:
        return len(self.found)

    def kept(self, split: str, indices: Sequence[int]) -> Sequence[int]:
        """``indices`` without the known bad samples of ``split``."""
        return [index for index in indices if (split, index) not in self.found] if self.found else indices

    def share(self, split: str, bad: Iterable[BadSample], reduce: Reduce, rank: int, world_size: int) -> None:
        """Tell all ranks what this one has found in ``split``, and learn what they have: a collective."""
        if self.limit is None:
            return
        texts = gather_texts(json.dumps(list(bad)), reduce, rank, world_size)
        everywhere = sorted({BadSample(*fields) for text in texts for fields in json.loads(text)})
        new = []
        for sample in everywhere:  # a transient fault may have two reasons on two ranks: the first is kept
            if (split, sample.position) not in self.found:
                self.found[split, sample.position] = sample
                new.append(BadSampleAt(split, sample))
        if new:
            self._check(new)

    def findings(self) -> list[BadSampleAt]:
        """All bad samples, in the order in which they were found."""
        return [BadSampleAt(split, sample) for (split, _), sample in self.found.items()]

    def state_dict(self) -> dict[str, Any]:
        return {"samples": [{"split": split, **sample._asdict()} for (split, _), sample in self.found.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what an earlier run had found, unless that is more than the limit."""
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
        shown = "; ".join(finding.describe() for finding in self.findings()[:SHOWN])
        more = f"; and {len(self.found) - SHOWN} more" if len(self.found) > SHOWN else ""
        raise RecipeError(
            f"{len(self.found)} samples cannot be loaded, more than data.max_bad_samples={self.limit}: {shown}{more}. "
            "Mend or remove them, or allow more"
        )


def gather_texts(text: str, reduce: Reduce, rank: int, world_size: int) -> list[str]:
    """The ``text`` of every rank, on every rank, by sums alone: each rank adds zeros where the others write."""
    content = text.encode()
    sizes = [int(size) for size in reduce([float(len(content) * (rank == other)) for other in range(world_size)])]
    padding = [0.0] * sum(sizes[:rank]), [0.0] * sum(sizes[rank + 1 :])
    whole = bytes(map(int, reduce([*padding[0], *map(float, content), *padding[1]])))
    ends = accumulate(sizes)
    return [whole[end - size : end].decode() for end, size in zip(ends, sizes, strict=True)]
