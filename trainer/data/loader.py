"""From requests (which samples make a micro-batch) to micro-batches, in order, in this process or in workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trainer.contract import Data
from trainer.data.common import reason
from trainer.data.mix import mixed
from trainer.data.workers import load_in_workers
from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.values import IGNORED_LABEL, BadSample, Incomplete, Packed, Request


class SampleError(RecipeError):
    """A sample could not be loaded. The message names its file or row, and the cause."""


class _Failure(NamedTuple):
    message: str


class PackedInMemory(Packed):
    """One that torch's DataLoader pins: of both forms, what goes to the device."""

    def pin_memory(self) -> Packed:
        return Packed(self.batch, tree_map_only(Tensor, Tensor.pin_memory, self.packed))


class Loader:
    """Load the micro-batches that are asked for, one a request, in order.

    What comes out does not depend on ``workers``: sample ``i`` of an ``augmented`` split is drawn with the global
    generators (torch's of the CPU, NumPy's, that of ``random``) seeded by its own seed, and the caller's are left as
    they were.

    Args:
        split: a map-style dataset, as :class:`trainer.contract.Data` describes it. Where ``__getitems__`` returns a
            list, it is taken for samples, torch's convention, and anything else for a collated batch.
        collate: makes a micro-batch of a list of samples.
        workers: processes that load ahead; 0 loads in this process, when a micro-batch is asked for.
        pin_memory: put the tensors in page-locked memory, for asynchronous copies to a GPU.
        num_classes: classes that integer ``labels`` of a micro-batch are of; ``None`` does not look at them.
        max_bad_samples: with more than 0, what cannot be loaded is left out: such a micro-batch comes as
            :class:`trainer.values.Incomplete`. The caller counts them: :class:`trainer.engine.quarantine.Quarantine`.
        worker_timeout: seconds that a micro-batch may take a worker.
        seeded: add ``seeds``, int64 ``(n,)``, to what was requested with seeds.
        packed: the model's. A micro-batch that it changes comes as :class:`trainer.values.Packed`.
    """

    def __init__(
        self,
        split: Any,
        collate: Callable[[list[Any]], Any],
        *,
        workers: int = 0,
        pin_memory: bool = False,
        num_classes: int | None = None,
        max_bad_samples: int = 0,
        worker_timeout: float = 300.0,
        seeded: bool = False,
        packed: Callable[[Any], Any] | None = None,
    ) -> None:
        self.split, self.collate, self.num_classes, self.max_bad_samples = split, collate, num_classes, max_bad_samples
        self.workers, self.pin_memory, self.worker_timeout = workers, pin_memory, worker_timeout
        self.seeded, self.packed = seeded, packed
        self.at_once = 1  # micro-batches that are taken together, for a window: as many are loaded ahead
        self.augmented = bool(getattr(split, "augmented", False))
        self.sample: Any = getattr(split, "__getitem__", None)
        # Of a split that draws samples and makes a micro-batch of them itself; unless the dataset has its own way.
        if hasattr(type(split), "together") and getattr(collate, "__func__", None) is Data.collate:
            self.sample, self.collate = split.draw, split.together
        self.whole = None if self.augmented else getattr(split, "__getitems__", None)

    def __call__(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield one micro-batch per request; raises :class:`SampleError`, and ``WorkerError`` where a worker ends."""
        if self.workers == 0 and not self.pin_memory:  # a DataLoader would add its overhead and nothing else
            yield from map(self._fetch, requests)
            return
        # Workers start anew for every pass, in a few tenths of a second: no state is carried between passes.
        for item in load_in_workers(self, requests, self.workers, self.pin_memory, self.worker_timeout, self.at_once):
            if isinstance(item, _Failure):
                raise SampleError(item.message)
            yield item

    def __getitem__(self, request: Request) -> Any:
        """What a worker hands over: no exception, which would have a traceback for its message on the other side."""
        try:
            return self._fetch(request)
        except RecipeError as error:
            return _Failure(str(error))

    def _fetch(self, request: Request) -> Any:
        try:
            return self._load(request)
        except RecipeError:
            if not self.max_bad_samples:
                raise
            return self._without_bad(request)

    def _load(self, request: Request) -> Any:
        batch = self._mixed(request)
        if self.seeded and request.seeds is not None:
            if not isinstance(batch, Mapping):
                raise RecipeError(
                    f"the model draws by batch['seeds'], which a {type(batch).__name__} cannot take: collate to a dict"
                )
            batch = {**batch, "seeds": torch.tensor(request.seeds)}
        packed = batch if self.packed is None else self._guard(request.indices, self.packed, batch)
        return batch if packed is batch else PackedInMemory(batch, packed)

    def _mixed(self, request: Request) -> Any:
        if request.mix is None:
            return self._checked(request)
        # A partner that is in the micro-batch itself is loaded once.
        own, partners = _paired(request.indices, request.seeds), _paired(request.mix.partners, request.mix.seeds)
        rows = {sample: row for row, sample in enumerate(dict.fromkeys([*own, *partners]))}
        loaded = self._checked(Request(*_unpaired(list(rows), request.seeds)))
        return mixed(loaded, [rows[sample] for sample in own], [rows[sample] for sample in partners], request.mix)

    def _checked(self, request: Request) -> Any:
        batch = self._collated(request.indices, request.seeds)
        if self.num_classes is not None and (stray := stray_labels(batch, self.num_classes)):
            (label, row), named = stray[0], request.indices
            # A collate that makes several rows of a sample, or one of several, leaves open whose label it is.
            if row is not None and len(batch["labels"]) == len(named):
                named = [named[row]]
            raise SampleError(
                f"{self._describe(named)} has the label {label}, but there are {self.num_classes} classes, 0 to "
                f"{self.num_classes - 1}: mend the label, or set num_classes to more"
            )
        return batch

    def _collated(self, indices: Sequence[int], seeds: Sequence[int] | None) -> Any:
        if self.whole is not None:
            samples = self._guard(indices, self.whole, indices)
            self._require_all(samples, indices)
            if not isinstance(samples, list):
                return samples
        else:
            own_seeds = seeds if self.augmented and seeds else None
            samples = []
            with generators_kept() if own_seeds else nullcontext():
                for index, seed in zip(indices, own_seeds or [0] * len(indices), strict=True):
                    if own_seeds:
                        seed_generators(seed)
                    samples.append(self._guard([index], self.sample, index))
        return self._guard(indices, self.collate, samples)

    def _require_all(self, batch: Any, indices: Sequence[int]) -> None:
        """Refuse another number of samples than requested; of a collated batch, a multiple is allowed."""
        counted = batch if isinstance(batch, list) else _first_of(batch)
        found, asked = len(counted) if counted is not None else len(indices), len(indices)
        if found != asked and (counted is batch or not found or found % asked):
            raise SampleError(
                f"{type(self.split).__name__}.__getitems__ was asked for {asked} samples ({self._describe(indices)}) "
                f"and returned {found}: it must return every sample it is asked for, and no other"
            )

    def _guard(self, indices: Sequence[int], function: Callable[[Any], Any], argument: Any) -> Any:
        """``function(argument)``, where any failure names the samples at ``indices``."""
        try:
            return function(argument)
        except (RecipeError, MemoryError):
            raise  # the one names the file itself, the other is nobody's fault
        except Exception as error:
            raise SampleError(f"{self._describe(indices)} could not be loaded: {reason(error)}") from error

    def _describe(self, indices: Sequence[int]) -> str:
        describe = getattr(self.split, "describe", lambda i: f"sample {i} of {type(self.split).__name__}")
        shown = ", ".join(describe(i) for i in indices[:4])
        return shown if len(indices) <= 4 else f"{shown} or one of the {len(indices) - 4} after it"

    def _without_bad(self, request: Request) -> Any:
        """The micro-batch without the samples that cannot be loaded; with itself is mixed whose partner cannot."""
        own, mix = _paired(request.indices, request.seeds), request.mix
        faults = [self._fault(*sample) for sample in own]
        bad, good = [fault for fault in faults if fault], [not fault for fault in faults]
        if not any(good):
            return Incomplete(self._borrowed(bad), [], bad)
        own = list(compress(own, good))
        if mix is not None:
            pairs = zip(own, compress(_paired(mix.partners, mix.seeds), good), strict=True)
            found = [sample if self._fault(*partner) else partner for sample, partner in pairs]
            partners, seeds = _unpaired(found, mix.seeds)
            mix = mix._replace(partners=partners, seeds=seeds)
        # Samples that only fail together, such as images of different sizes, end the run here.
        asked = Request(*_unpaired(own, request.seeds), mix)
        batch = self._load(asked)
        return Incomplete(batch, asked.indices, bad) if bad else batch

    def _fault(self, index: int, seed: int) -> BadSample | None:
        try:
            self._load(Request([index], [seed]))
        except RecipeError as error:
            why = str(error) if error.__cause__ is None else reason(error)
            return BadSample(index, self._describe([index]), " ".join(why.split()))
        return None

    def _borrowed(self, bad: Sequence[BadSample]) -> Any:
        """A micro-batch of another sample, which weighs nothing."""
        size, failed = len(self.split), list(bad)
        for step in range(1, min(self.max_bad_samples + 1, size - 1) + 1):
            index = (bad[-1].position + step) % size
            if not (fault := self._fault(index, 0)):
                return self._load(Request([index], [0]))
            failed.append(fault)
        raise SampleError(
            f"{len(failed)} samples in a row cannot be loaded, data.max_bad_samples is {self.max_bad_samples}; "
            f"the last is {failed[-1].description}: {failed[-1].reason}"
        )


def loader_of(recipe: Recipe, split: Any, workers: int = 0, pin_memory: bool = False) -> Loader:
    """What loads ``split`` of a recipe's prepared data."""
    data = recipe.data
    classes = getattr(recipe.model, "num_classes", None)
    classes = getattr(data, "num_classes", None) if classes is None else classes
    return Loader(
        split,
        data.collate,
        workers=workers,
        pin_memory=pin_memory,
        num_classes=None if getattr(recipe.model, "task", None) == "regression" else classes,
        max_bad_samples=data.max_bad_samples,
        worker_timeout=data.worker_timeout,
        seeded=recipe.model.seeded,
        packed=recipe.model.packed,
    )


def _paired(indices: Sequence[int], seeds: Sequence[int] | None) -> list[tuple[int, int]]:
    return list(zip(indices, seeds or [0] * len(indices), strict=True))


def _unpaired(samples: Sequence[tuple[int, int]], like: Any) -> tuple[list[int], list[int] | None]:
    return [index for index, _ in samples], None if like is None else [seed for _, seed in samples]


def _first_of(batch: Any) -> Any:
    """The part of a collated batch that is counted: its ``labels``, or else the first; ``None`` if there is none."""
    if isinstance(batch, Mapping):
        batch = [batch["labels"]] if "labels" in batch else list(batch.values())
    parts = batch if isinstance(batch, list | tuple) else [batch]
    return next((part for part in parts if hasattr(part, "__len__") and getattr(part, "ndim", 1) != 0), None)


# Labels that no class has: found on the host, before a kernel reads outside its bounds.
SMALL = 64  # entries up to which a list is faster than tensor operations


def stray_labels(batch: Any, num_classes: int) -> list[tuple[int, int | None]]:
    """Labels in ``batch["labels"]``, integers ``(n, ...)`` in host memory, outside of ``num_classes``, each with its
    row (``None`` for a tensor without rows); -100 is no label."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool or labels.is_cuda:
        return []
    found = labels.flatten() if labels.numel() <= SMALL else torch.stack(torch.aminmax(labels))
    # As numbers of Python: beside a tensor of 8 bits torch would cut num_classes off at 8 bits.
    if all(0 <= label < num_classes for label in found.tolist()):
        return []
    labels = labels.long()
    stray = ((labels < 0) | (labels >= num_classes)) & (labels != IGNORED_LABEL)
    rows = stray.nonzero()[:, 0].tolist() if labels.ndim else [None] * int(stray)
    return list(zip(labels[stray].tolist(), rows, strict=True))


# The global random generators that a sample may draw from: seeded for it, and put back.


def seed_generators(seed: int) -> None:
    """Seed torch's generator of the CPU, NumPy's global one and that of ``random``; ``seed`` is in [0, 2^63)."""
    # Not torch.manual_seed: it would seed the GPUs too, and dropout there with them.
    torch.random.default_generator.manual_seed(seed)
    random.seed(seed)
    # Both are a Mersenne Twister: of the same words, NumPy would draw the numbers that random draws.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the three generators back into the state that they are in now."""
    generator = torch.random.default_generator
    before = generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        generator.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
