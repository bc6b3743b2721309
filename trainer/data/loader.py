"""From requests (which samples make a micro-batch) to micro-batches, in order, in this process or in workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from trainer.contract import Request
from trainer.data.common import reason
from trainer.errors import RecipeError
from trainer.processes import become_helper


class SampleError(RecipeError):
    """A sample could not be loaded. The message names its file or row, and the cause."""


class Loader:
    """Load the micro-batches that are asked for, one a request, in order.

    What comes out does not depend on ``workers``: sample ``i`` is drawn with torch's global CPU generator seeded by
    its own seed, and the caller's generators are left as they were. (Random numbers drawn from elsewhere, such as
    ``random`` or NumPy, are not seeded.)

    Args:
        split: a map-style dataset, as :class:`trainer.contract.Data` describes it. Where ``__getitems__`` returns a
            list, it is taken for samples, torch's convention, and anything else for a collated batch.
        collate: makes a micro-batch of a list of samples.
        workers: processes that load ahead; 0 loads in this process, when a micro-batch is asked for.
        pin_memory: put the tensors in page-locked memory, for asynchronous copies to a GPU.
        prefetch: micro-batches that each worker has ready or in work.
    """

    def __init__(
        self,
        split: Any,
        collate: Callable[[list[Any]], Any],
        *,
        workers: int = 0,
        pin_memory: bool = False,
        prefetch: int = 2,
    ) -> None:
        self.fetch = _Fetch(split, collate)
        self.workers, self.pin_memory, self.prefetch = workers, pin_memory, prefetch

    def __call__(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield one micro-batch per request.

        Raises:
            SampleError: naming the sample that could not be loaded.
        """
        if self.workers == 0 and not self.pin_memory:  # a DataLoader would add its overhead and nothing else
            yield from map(self.fetch.__getitem__, requests)
            return
        # Workers start anew for every pass, in a few tenths of a second: no state is carried between passes.
        for item in self._dataloader(requests):
            if isinstance(item, _Failure):
                raise SampleError(item.message)
            yield item

    def _dataloader(self, requests: Iterable[Request]) -> DataLoader:
        if self.workers:  # tokenizers warns once per process about forks after it has used threads
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return DataLoader(
            cast(Dataset, _Guarded(self.fetch)),
            sampler=requests,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.workers,
            prefetch_factor=self.prefetch if self.workers else None,
            pin_memory=self.pin_memory,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # else it draws a number from the global generator
        )


class _Fetch:
    """A dataset whose items are micro-batches and whose indices are requests."""

    def __init__(self, split: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.split, self.collate = split, collate
        self.augmented = bool(getattr(split, "augmented", False))
        self.whole = None if self.augmented else getattr(split, "__getitems__", None)

    def __getitem__(self, request: Request) -> Any:
        indices, seeds = request
        if self.whole is not None:
            batch = self._guard(indices, self.whole, indices)
            if not isinstance(batch, list):
                return batch
            samples = batch
        elif self.augmented and seeds:
            samples = self._draw(indices, seeds)
        else:
            samples = [self._guard([i], self.split.__getitem__, i) for i in indices]
        return self._guard(indices, self.collate, samples)

    def _draw(self, indices: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        generator = torch.random.default_generator
        state = generator.get_state()
        samples = []
        try:
            for i, seed in zip(indices, seeds, strict=True):
                # Not torch.manual_seed: it would seed the GPUs too, and dropout there with them.
                generator.manual_seed(seed)
                samples.append(self._guard([i], self.split.__getitem__, i))
        finally:
            generator.set_state(state)
        return samples

    def _guard(self, indices: Sequence[int], function: Callable[[Any], Any], argument: Any) -> Any:
        """``function(argument)``, where any failure names the samples at ``indices``."""
        try:
            return function(argument)
        except RecipeError:
            raise  # it names the file itself
        except Exception as error:
            raise SampleError(f"{self._describe(indices)} could not be loaded: {reason(error)}") from error

    def _describe(self, indices: Sequence[int]) -> str:
        describe = getattr(self.split, "describe", lambda i: f"sample {i} of {type(self.split).__name__}")
        shown = ", ".join(describe(i) for i in indices[:4])
        return shown if len(indices) <= 4 else f"{shown} or one of the {len(indices) - 4} after it"


@dataclass(frozen=True)
class _Failure:
    message: str


class _Guarded:
    """Hands failures over as values: an exception that crosses a process has a traceback for its message."""

    def __init__(self, fetch: _Fetch) -> None:
        self.fetch = fetch

    def __getitem__(self, request: Request) -> Any:
        try:
            return self.fetch[request]
        except RecipeError as error:
            return _Failure(str(error))


def _begin_worker(worker: int) -> None:
    become_helper()


def _as_it_is(batch: Any) -> Any:
    return batch
