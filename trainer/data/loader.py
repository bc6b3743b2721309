"""Loading of micro-batches from requests (lists of samples), in order, in this process or in workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trainer.contract import Data, DrawnInputs, DrawnSamples, Packable, as_samples, capability
from trainer.data.base import root_cause
from trainer.data.mixup import apply_mixup
from trainer.data.workers import load_in_workers
from trainer.errors import RecipeError, require
from trainer.recipe import Recipe
from trainer.values import IGNORED_LABEL, BadSample, Packed, PartialBatch, Request


class SampleError(RecipeError):
    """Raised if a sample cannot be loaded. The message names its file or row, and the cause."""


class PackedInMemory(Packed):
    """A packed micro-batch whose ``packed`` part, which goes to the device, is pinned by torch's DataLoader."""

    def pin_memory(self) -> Packed:
        return Packed(self.batch, tree_map_only(Tensor, Tensor.pin_memory, self.packed))


class Loader:
    """Loads one micro-batch per request, in order.

    The result does not depend on ``workers``: each sample of an ``augmented`` split is drawn with the global generators
    (torch's CPU generator, NumPy's, and ``random``) seeded by the sample's seed. The caller's states are restored.

    ``split`` is a map-style dataset. If its ``__getitems__`` returns a list, it holds samples, torch's convention;
    anything else is a collated batch.
    """

    def __init__(
        self,
        split: Any,
        collate: Callable[[list[Any]], Any],  # collates a list of samples to a micro-batch
        *,
        workers: int = 0,  # processes that load ahead; 0 loads in this process, on request
        pin_memory: bool = False,  # put the tensors in page-locked memory, for asynchronous copies to a GPU
        num_classes: int | None = None,  # to check integer ``labels`` against; ``None`` skips the check
        max_bad_samples: int = 0,  # above 0, bad samples are skipped, in a PartialBatch; Quarantine counts them
        worker_timeout: float = 300.0,  # max seconds for a worker to load a micro-batch
        seeded: bool = False,  # add ``seeds``, int64 ``(n,)``, to micro-batches requested with seeds
        packed: Callable[[Any], Any] | None = None,  # the model's; a micro-batch that it changes is returned as Packed
    ) -> None:
        self.split, self.collate = as_samples(split), collate
        self.num_classes, self.max_bad_samples = num_classes, max_bad_samples
        self.workers, self.pin_memory, self.worker_timeout = workers, pin_memory, worker_timeout
        self.seeded, self.packed = seeded, packed
        self.at_once = 1  # micro-batches per window, which are taken together and loaded ahead
        self.augmented = bool(self.split.augmented)
        self.sample: Any = self.split.__getitem__
        # Use the split's own drawing and collating if it has them, unless the dataset overrides collate().
        if isinstance(split, DrawnSamples) and getattr(collate, "__func__", None) is Data.collate:
            self.sample, self.collate = split.draw, split.together
        self.whole = None if self.augmented else self.split.__getitems__

    def __call__(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield one micro-batch per request. Raises :class:`SampleError`, and ``WorkerError`` if a worker ends."""
        if self.workers == 0 and not self.pin_memory:  # a DataLoader would only add overhead
            yield from map(self._fetch, requests)
            return
        # Workers are restarted for every pass, in a few tenths of a second, so that passes share no state.
        for item in load_in_workers(self, requests, self.workers, self.pin_memory, self.worker_timeout, self.at_once):
            if isinstance(item, SampleError):
                raise item
            yield item

    def __getitem__(self, request: Request) -> Any:
        """Load a request in a worker. Failures are returned, because a raised one would have a traceback as message."""
        try:
            return self._fetch(request)
        except RecipeError as error:
            return SampleError(str(error))

    def _fetch(self, request: Request) -> Any:
        try:
            return self._load(request)
        except RecipeError:
            if not self.max_bad_samples:
                raise
            return self._drop_bad(request)

    def _load(self, request: Request) -> Any:
        batch = self._mixed(request)
        if self.seeded and request.seeds is not None:
            cause = f"the model draws by batch['seeds'], but the batch is a {type(batch).__name__}"
            require(isinstance(batch, Mapping), f"{cause}: collate to a dict")
            batch = {**batch, "seeds": torch.tensor(request.seeds)}
        packed = batch if self.packed is None else self._name_failures(request.indices, self.packed, batch)
        return batch if packed is batch else PackedInMemory(batch, packed)

    def _mixed(self, request: Request) -> Any:
        if request.mix is None:
            return self._checked(request)
        # A partner that is also in the micro-batch is loaded once.
        own = _with_seeds(request.indices, request.seeds)
        partners = _with_seeds(request.mix.partners, request.mix.seeds)
        rows = {sample: row for row, sample in enumerate(dict.fromkeys([*own, *partners]))}
        loaded = self._checked(Request(*_without_seeds(list(rows), request.seeds)))
        return apply_mixup(loaded, [rows[sample] for sample in own], [rows[sample] for sample in partners], request.mix)

    def _checked(self, request: Request) -> Any:
        batch = self._collated(request.indices, request.seeds)
        if self.num_classes is not None and (stray := out_of_range_labels(batch, self.num_classes)):
            (label, row), named = stray[0], request.indices
            # If collate changes the number of rows, the sample of the label is unknown.
            if row is not None and len(batch["labels"]) == len(named):
                named = [named[row]]
            valid = f"valid labels are 0 to {self.num_classes - 1} ({self.num_classes} classes)"
            cause = f"{self._describe(named)} has the label {label}, but {valid}"
            raise SampleError(f"{cause}: fix the label, or raise num_classes")
        return batch

    def _collated(self, indices: Sequence[int], seeds: Sequence[int] | None) -> Any:
        if self.whole is not None:
            samples = self._name_failures(indices, self.whole, indices)
            self._require_all(samples, indices)
            if not isinstance(samples, list):
                return samples
        else:
            samples, is_seeded = [], bool(self.augmented and seeds)
            with preserve_rng_state() if is_seeded else nullcontext():
                for index, seed in _with_seeds(indices, seeds):
                    if is_seeded:
                        seed_everything(seed)
                    samples.append(self._name_failures([index], self.sample, index))
        return self._name_failures(indices, self.collate, samples)

    def _require_all(self, batch: Any, indices: Sequence[int]) -> None:
        """Check that all requested samples were returned; a collated batch may have a multiple of rows."""
        counted = batch if isinstance(batch, list) else _first_tensor(batch)
        found, asked = len(counted) if counted is not None else len(indices), len(indices)
        if found != asked and (counted is batch or not found or found % asked):
            method = f"{type(self.split.original).__name__}.__getitems__"
            cause = f"{method} returned {found} instead of {asked} samples ({self._describe(indices)})"
            raise SampleError(f"{cause}: it must return exactly the requested samples")

    def _name_failures(self, indices: Sequence[int], function: Callable[[Any], Any], argument: Any) -> Any:
        """Call ``function(argument)``; a failure raises an error that names the samples at ``indices``."""
        try:
            return function(argument)
        except (RecipeError, MemoryError):
            raise  # a RecipeError names the file itself, and no sample is the cause of a MemoryError
        except Exception as error:
            raise SampleError(f"{self._describe(indices)} could not be loaded: {root_cause(error)}") from error

    def _describe(self, indices: Sequence[int]) -> str:
        shown = ", ".join(self.split.describe(i) for i in indices[:4])
        return shown if len(indices) <= 4 else f"{shown} or one of the {len(indices) - 4} after it"

    def _drop_bad(self, request: Request) -> Any:
        """Load the micro-batch without bad samples. A sample with a bad partner is mixed with itself."""
        own, mix = _with_seeds(request.indices, request.seeds), request.mix
        faults = [self._try_sample(*sample) for sample in own]
        bad, good = [fault for fault in faults if fault], [not fault for fault in faults]
        if not any(good):
            return PartialBatch(self._zero_weight_batch(bad), [], bad)
        own = list(compress(own, good))
        if mix is not None:
            pairs = zip(own, compress(_with_seeds(mix.partners, mix.seeds), good), strict=True)
            found = [sample if self._try_sample(*partner) else partner for sample, partner in pairs]
            partners, seeds = _without_seeds(found, mix.seeds)
            mix = mix._replace(partners=partners, seeds=seeds)
        # Samples that fail only together, such as images of different sizes, raise an error here.
        asked = Request(*_without_seeds(own, request.seeds), mix)
        batch = self._load(asked)
        return PartialBatch(batch, asked.indices, bad) if bad else batch

    def _try_sample(self, index: int, seed: int) -> BadSample | None:
        try:
            self._load(Request([index], [seed]))
        except RecipeError as error:
            why = str(error) if error.__cause__ is None else root_cause(error)
            return BadSample(index, self._describe([index]), " ".join(why.split()))
        return None

    def _zero_weight_batch(self, bad: Sequence[BadSample]) -> Any:
        """Load a micro-batch of another sample, to be used with weight 0."""
        size, failed = len(self.split), list(bad)
        for step in range(1, min(self.max_bad_samples + 1, size - 1) + 1):
            index = (bad[-1].position + step) % size
            if not (fault := self._try_sample(index, 0)):
                return self._load(Request([index], [0]))
            failed.append(fault)
        cause = f"{len(failed)} samples in a row cannot be loaded (data.max_bad_samples={self.max_bad_samples})"
        raise SampleError(f"{cause}; the last is {failed[-1].description}: {failed[-1].reason}")


def make_loader(recipe: Recipe, split: Any, workers: int = 0, pin_memory: bool = False) -> Loader:
    """Return the loader of ``split`` of a recipe's prepared data."""
    model, data = recipe.model, recipe.data
    classes = data.num_classes if model.num_classes is None else model.num_classes
    return Loader(
        split,
        data.collate,
        workers=workers,
        pin_memory=pin_memory,
        num_classes=None if model.task == "regression" else classes,
        max_bad_samples=data.max_bad_samples,
        worker_timeout=data.worker_timeout,
        seeded=capability(model, DrawnInputs).seeded,
        packed=model.packed if isinstance(model, Packable) else None,
    )


def _with_seeds(indices: Sequence[int], seeds: Sequence[int] | None) -> list[tuple[int, int]]:
    return list(zip(indices, seeds or [0] * len(indices), strict=True))


def _without_seeds(samples: Sequence[tuple[int, int]], like: Any) -> tuple[list[int], list[int] | None]:
    return [index for index, _ in samples], None if like is None else [seed for _, seed in samples]


def _first_tensor(batch: Any) -> Any:
    """Return the part of a collated batch to count: its ``labels``, otherwise the first; ``None`` if there is none."""
    if isinstance(batch, Mapping):
        batch = [batch["labels"]] if "labels" in batch else list(batch.values())
    parts = batch if isinstance(batch, list | tuple) else [batch]
    return next((part for part in parts if hasattr(part, "__len__") and getattr(part, "ndim", 1) != 0), None)


LIST_THRESHOLD = 64  # max number of labels for which a list is faster than tensor operations


def out_of_range_labels(batch: Any, num_classes: int) -> list[tuple[int, int | None]]:
    """Return ``labels`` ``(n, ...)`` on the host that are out of range, except -100, with their rows, if any.

    They are detected before a kernel reads out of bounds."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool or labels.is_cuda:
        return []
    found = labels.flatten() if labels.numel() <= LIST_THRESHOLD else torch.stack(torch.aminmax(labels))
    # Compare Python integers: in a comparison with an 8-bit tensor, torch would truncate num_classes to 8 bits.
    if all(0 <= label < num_classes for label in found.tolist()):
        return []
    labels = labels.long()
    stray = ((labels < 0) | (labels >= num_classes)) & (labels != IGNORED_LABEL)
    rows = stray.nonzero()[:, 0].tolist() if labels.ndim else [None] * int(stray)
    return list(zip(labels[stray].tolist(), rows, strict=True))


def seed_everything(seed: int) -> None:
    """Seed torch's CPU generator, NumPy's global one and ``random``; ``seed`` is in [0, 2^63)."""
    # Not torch.manual_seed(), which would also seed the GPUs and thereby their dropout.
    torch.random.default_generator.manual_seed(seed)
    random.seed(seed)
    # Both are Mersenne Twisters: with the same seed, NumPy would draw the same numbers as random.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the current states of the three generators at the end of the context."""
    generator = torch.random.default_generator
    before = generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        generator.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
